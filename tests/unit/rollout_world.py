"""The causal stages without training: clips longer than a training clip, and a checkpoint of random weights per stage."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tinyworld import TinyWorld

from solarwm_lib import artifacts
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.load import resolve_values
from solarwm_lib.inference.latents import beside
from solarwm_lib.runtime import keyed
from solarwm_lib.training import checkpoint as checkpoints

FRAMES = 19  # of the held-out clips: 5 whole latents, and two frames more
CAUSAL = {
    "chunk_latent_frames": 2,
    "max_prior_clean_chunks": 1,
    "local_attention_latent_frames": 4,
    "sink_latent_frames": 0,
}
STAGES = {
    "fm": {"stage": "stage1", "causal_mode": "teacher_forcing", "objective": "flow_matching"},
    "anyflow": {"stage": "stage1", "causal_mode": "teacher_forcing", "objective": "anyflow_forward_map"},
    "sgf": {
        "stage": "stage2",
        "causal_mode": "self_gradient_forcing",
        "objective": "flow_matching",
        "self_gradient_forcing": {"denoising_timesteps": [1000, 500]},
    },
}
SOLVERS = {"fm": "unipc", "anyflow": "flowmap", "sgf": "self_forcing"}


def a_pass(stage: str, name: str = "live", latents: int = 2, **changes: Any) -> dict[str, Any]:
    values = {"name": name, "mode": "autoregressive", "solver": SOLVERS[stage], "num_inference_steps": 2}
    return values | {"rollout_latent_frames": latents} | changes


def long_world(tiny_world: TinyWorld, root: Path) -> TinyWorld:
    """The tiny world with held-out clips longer than a training clip."""
    from solarwm_lib.data.synthetic import SynthSpec, synthesize

    spec = SynthSpec("long", train_clips=1, test_clips=2, frames=FRAMES, height=32, width=32)
    synthesize(root / "data", spec)
    return TinyWorld(root / "data", tiny_world.assets)


def resolve(world: TinyWorld, root: Path, stage: str, passes: list[dict[str, Any]], **changes: Any) -> Any:
    """Resolved configuration of an inference with a checkpoint at `root / STAGE`."""
    values = world.values(root, validation__passes=passes, model__causal=dict(CAUSAL))
    values["action"] = "infer"
    values["train"] = {
        **copy.deepcopy(STAGES[stage]),
        "micro_batch_size": 1,
        "max_steps": 12,
        "precision": "float32",
    }
    values["checkpoint"] = {"path": str(root / stage)}
    values["inference"] = {"sample_count": 2}
    for key, value in changes.items():
        *sections, leaf = key.split("__")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    return resolve_values(values)


def publish_checkpoint(world: TinyWorld, root: Path, stage: str) -> None:
    """Publish a checkpoint at `root / stage`: base weights plus keyed noise."""
    resolved = resolve(world, root, stage, [a_pass(stage)])
    model = resolved.config.model
    backbone = Wan22.from_pretrained(
        model.base_path, load_architecture(model.architecture), model, anyflow=stage == "anyflow"
    )
    roles = {
        role: {
            name: value.detach() + 0.05 * torch.from_numpy(keyed.normal(tuple(value.shape), role, name))
            for name, value in backbone.trainable()
        }
        for role in ("live", "ema")
    }
    state = checkpoints.State(1, 1, 4, 0.0, 4, run={"config": resolved.values})
    identity = {"assets": artifacts.read(model.base_path).digest, "step": 1}
    tensors = checkpoints.Tensors(roles["live"], roles["ema"], {})
    checkpoints.save(root / stage, tensors, state, identity, [])


def manifest(artifact: artifacts.Artifact, slot: int = 0, prefix: str = "") -> dict[str, Any]:
    return json.loads(artifact.file(f"{prefix}slot-{slot:06d}/manifest.json").read_bytes())


def kept_latents(out: Path, name: str, slot: int = 0) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(beside(out, name) / f"slot-{slot:06d}" / "latents.safetensors")["latents"]
