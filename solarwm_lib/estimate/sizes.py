"""Sizes beside the step's own memory: parameters by role, checkpoints, host memory. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solarwm_lib.estimate.workload import Workload

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

GIB = 2**30
HEADER_BYTES = 150  # per tensor in a safetensors header
PROCESS = GIB // 2  # the interpreter with torch, diffusers and transformers: 0.45 GB measured on a CPU
CUDA_PROCESS = 3 * GIB  # the same with CUDA's libraries; an assumption
PROMPT_CACHE = GIB


def parameters(workload: Workload) -> dict[str, int | None]:
    """Parameters by role; None: not known for this family."""
    w = workload
    found: dict[str, int | None] = {"student": w.network.total + w.connector}
    if w.adapter:
        found["student adapter (trained)"] = w.adapter
    if w.stage == "stage2":
        # With adapters every role has a copy of the base beside them.
        found |= {"teacher": w.adapter or w.network.total, "critic": w.adapter or w.network.total}
    return found | {"codec": w.codec, "text encoder": w.text_encoder}


def checkpoint(workload: Workload) -> int:
    """Bytes of a checkpoint: weights, average and two moments in float32, and the critic's weights and moments."""
    w = workload
    tensors = w.network.tensors if not w.adapter else 2 * w.network.tensors
    student = 16 * w.trainable + tensors * (4 + 5 * HEADER_BYTES)
    critic = 12 * w.trainable + tensors * (4 + 4 * HEADER_BYTES) if w.stage == "stage2" else 0
    return student + critic


def host(resolved: Resolved, workload: Workload) -> dict[str, int]:
    """Host memory of a process by part, on a machine with GPUs."""
    w, data = workload, resolved.config.data
    shards = 1 if w.adapter else w.topology.shards
    return {
        "interpreter and libraries": CUDA_PROCESS,
        "caches of clips and prompts": int(data.decoded_cache_gib * GIB) + PROMPT_CACHE,
        "weights while they load": 4 * w.network.total // w.topology.shards,
        "staging of an asynchronous save": checkpoint(w) // shards,
    }
