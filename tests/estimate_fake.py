"""The most memory that a full-size forward and backward pass would take, without taking any: fake tensors, real operators.

Counts the bytes of live storages after every operator, as autograd and the network would hold them; kernels' own scratch is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.geometry import MASK_CHANNELS
from solarwm_lib.config.load import Resolved


class LiveBytes(TorchDispatchMode):
    """Sums the storages that operators make and that still live; `highest` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.highest, self._known = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        self.highest = max(self.highest, self.held)
        return result

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.held += size
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def peak(resolved: Resolved, described: Mapping[str, Any]) -> int:
    """The most bytes beside the weights during one velocity of a network of `described` and its backward pass."""
    config = resolved.config
    data, train = config.data, config.train
    causal = config.model.causal
    with FakeTensorMode(allow_non_fake_inputs=True):
        backbone = Wan22.from_config(described, config.model).train()
        if train.activation_checkpointing:
            backbone.transformer.enable_gradient_checkpointing()
        n, frames = train.micro_batch_size, data.latent_frames
        stride = described["spatial_stride"]
        shape = (n, frames, described["latent_channels"], data.height // stride, data.width // stride)
        text = torch.zeros(n, config.model.text_length, described["transformer"]["text_dim"])
        times = torch.zeros(n, frames)
        w2c, intrinsics = torch.zeros(n, frames, 4, 4), torch.zeros(n, 3, 3)
        latents = torch.zeros(shape)
        condition = None
        if backbone.image_conditioned:
            condition = torch.zeros(n, frames, MASK_CHANNELS + shape[2], *shape[3:])
        lower = train.precision == "bfloat16"

        def velocity() -> torch.Tensor:
            if train.stage == "stage0p5":
                return backbone.velocity(latents, times, text, w2c, intrinsics, image_condition=condition)
            windows = {
                "chunk": causal.chunk_latent_frames,
                "max_prior_clean_chunks": causal.max_prior_clean_chunks,
            }
            return backbone.teacher_forced_velocity(latents, latents, times, text, w2c, intrinsics, **windows)

        return _measured(velocity, lower, cache=train.stage == "stage0p5")


def _measured(velocity: Callable[[], torch.Tensor], lower: bool, cache: bool) -> int:
    with LiveBytes() as live:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lower, cache_enabled=cache):
            loss = velocity().float().square().mean()
        loss.backward()
    return live.highest
