"""The network of a run with its first weights: whole on every process, or each process with its rows of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from solarwm_lib.backbones import attention, second_time, wan22
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ConfigError
from solarwm_lib.training.members import Stored, load_into
from solarwm_lib.training.sharding import WHOLE, Layout

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved


def build_backbone(
    resolved: Resolved, device: torch.device, layout: Layout = WHOLE, *, base_weights: bool = True
) -> Wan22:
    """Return the network in training mode with the float32 base weights; a flow map's second time starts as a copy of the first.

    With a `layout` in parts each process reads and holds its rows only; without `base_weights` those are left unset, for a
    checkpoint to set. ConfigError for an attention executor that does not run on `device`.
    """
    config = resolved.config
    architecture = load_architecture(config.model.architecture)
    anyflow = config.train.anyflow is not None
    executor = config.train.attention_executor
    if executor == "flex" and device.type != "cuda":
        raise ConfigError(
            f"train.attention_executor: found flex, which has gradients on CUDA only, and this is {device.type}; use segments"
        )
    if layout.is_sharded:
        backbone = Wan22.from_config(architecture, config.model, "meta", anyflow)
    else:
        backbone = Wan22.from_pretrained(config.model.base_path, architecture, config.model, anyflow=anyflow)
        backbone.to(device)
    attention.set_executor(backbone.transformer, executor)
    backbone.train().requires_grad_(True)
    if config.train.activation_checkpointing:
        backbone.transformer.enable_gradient_checkpointing()  # type: ignore[attr-defined]
    if layout.is_sharded:
        layout.apply(backbone.transformer)
        backbone.to_empty(device=device)
        if base_weights:
            _fill_base(backbone, Path(config.model.base_path) / "transformer", architecture)
    return backbone


def _fill_base(backbone: Wan22, folder: Path, architecture: Mapping[str, Any]) -> None:
    """Read this process's rows of the base weights; ArtifactError unless the folder holds exactly the network's tensors."""
    wan22.check_config(folder, architecture["transformer"])
    files = sorted(folder.glob("*.safetensors"))
    targets = dict(backbone.trainable())
    copies = backbone.anyflow and not {*Stored(files).names} >= second_time.TENSORS
    if copies:
        targets = {name: p for name, p in targets.items() if name not in second_time.TENSORS}
    load_into(files, targets, any_dtype=True)
    if copies:
        second_time.copy_time(backbone.transformer)
