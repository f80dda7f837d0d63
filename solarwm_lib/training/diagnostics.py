"""What a non-finite loss or gradient leaves behind: one JSON file per failing rank, enough to reproduce the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from solarwm_lib.artifacts import json_bytes, write_atomic
from solarwm_lib.training.batches import Batch

FOLDER = "diagnostics"


def statistics(tensor: torch.Tensor) -> dict[str, Any]:
    """Return shape, counts of NaN and inf, and minimum, maximum, mean and deviation of the finite entries."""
    values = tensor.detach().double()
    finite = values[torch.isfinite(values)]
    summary: dict[str, Any] = {
        "shape": list(tensor.shape),
        "nan": int(torch.isnan(values).sum()),
        "inf": int(torch.isinf(values).sum()),
    }
    if finite.numel():
        summary |= {
            "min": finite.min().item(),
            "max": finite.max().item(),
            "mean": finite.mean().item(),
            "std": finite.std(correction=0).item(),
        }
    return summary


def describe_batch(batch: Batch, timesteps: Sequence[Any], losses: Sequence[float]) -> list[dict[str, Any]]:
    """Return one entry per sample: identity, timestep (or a list of them), loss, camera translation norms per latent frame, statistics."""
    return [
        {
            "sample_id": sample_id,
            "occurrence_id": batch.occurrence_ids[i],
            "global_sample_index": batch.indices[i],
            "start_frame": batch.start_frames[i],
            "caption": batch.captions[i],
            "timestep": timesteps[i],
            "loss": _plain(losses[i]),
            "camera_translation_norms": [_plain(x) for x in batch.w2c[i, :, :3, 3].norm(dim=-1).tolist()],
            "latents": statistics(batch.latents[i]),
            "prompt_embeds": statistics(batch.prompt_embeds[i]),
        }
        for i, sample_id in enumerate(batch.sample_ids)
    ]


def bad_tensors(tensors: Mapping[str, torch.Tensor], limit: int = 20) -> list[dict[str, Any]]:
    """Return the first `limit` tensors with a NaN or inf, with their statistics."""
    found: list[dict[str, Any]] = []
    for name, tensor in tensors.items():
        if len(found) < limit and not torch.isfinite(tensor).all():
            found.append({"name": name, **statistics(tensor)})
    return found


def write_dump(run_dir: Path, step: int, rank: int, content: Mapping[str, Any]) -> Path:
    """Write `diagnostics/nonfinite-step-000123-rank-00000.json` and return its path."""
    path = run_dir / FOLDER / f"nonfinite-step-{step:06d}-rank-{rank:05d}.json"
    write_atomic(path, json_bytes({"schema": "solarwm.nonfinite.v1", "step": step, "rank": rank, **content}))
    return path


def _plain(value: float) -> float | str:
    """JSON has no NaN: spell it."""
    return value if math.isfinite(value) else str(value)
