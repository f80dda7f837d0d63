"""Optimizer steps of Stage0.5 with the whole network of Wan 5B: seconds, memory beside its estimate, FLOP utilisation.

Random weights in float32 with gradients, two AdamW slots and the average (100 GB), bfloat16 autocast, activation checkpointing, one
clip of 81 frames at 480x864. Where that does not fit, fewer blocks run, and `blocks` says how many.
"""

from __future__ import annotations

import gc
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import Findings, cameras, median_seconds, peak_bytes, recipe, reset_peak

from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.geometry import geometry
from solarwm_lib.config.load import Resolved
from solarwm_lib.runtime.process import Heartbeat, StopRequest
from solarwm_lib.training import loop, setup
from solarwm_lib.training.batches import Batch
from solarwm_lib.training.topology import BatchPlan, Topology

SETS = [
    "distributed.world_size=1",
    "train.strategy=replicate",
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
    "train.activation_checkpointing=true",
    "data.encoding=preencoded",  # no codec and text encoder beside the network
    "data.latents_root=/latents",  # never read
    "data.random_start=false",
]
BLOCKS = {True: (30, 20, 10), False: (2,)}  # at the full size: the next one if memory runs out
WARM_UP, REPETITIONS = 2, 3
# Dense bfloat16 peak by data sheet: an assumption, not a measurement. Names in `solarwm_lib.estimate.hardware`.
DATA_SHEETS = {"H200": "h200-141", "H100": "h100-80", "A100": "a100-80", "B200": "b200-180"}


def run(full: bool) -> tuple[Resolved, dict[str, Any]]:
    """The configuration of the step, and the architecture it names."""
    resolved = recipe("train_stage0p5_fm_81f", full, "smoke", sets=SETS)
    return resolved, load_architecture(resolved.config.model.architecture)


def tokens_of(resolved: Resolved, architecture: Mapping[str, Any]) -> int:
    """Tokens of a clip, the only one of a step."""
    data = resolved.config.data
    size = geometry(
        resolved.config.model.family, dict(architecture), data.pixel_frames, data.height, data.width
    )
    return size.tokens


def with_blocks(architecture: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """The architecture with so many blocks."""
    return {**architecture, "transformer": {**architecture["transformer"], "num_layers": blocks}}


def network(resolved: Resolved, architecture: Mapping[str, Any], device: torch.device | str) -> Any:
    """The network in training mode with random float32 weights, made on `device`."""
    backbone: Any = Wan22.from_config(architecture, resolved.config.model, device)
    backbone.train().requires_grad_(True)
    if resolved.config.train.activation_checkpointing:
        backbone.transformer.enable_gradient_checkpointing()
    return backbone


class RandomClips:
    """Latents, prompts and cameras of the configuration's size, random, on the device from the start."""

    workers = 0

    def __init__(
        self, resolved: Resolved, architecture: Mapping[str, Any], device: torch.device | str
    ) -> None:
        data, text, stride = resolved.config.data, architecture["transformer"]["text_dim"], 16
        shape = (
            data.latent_frames,
            architecture["latent_channels"],
            data.height // stride,
            data.width // stride,
        )
        self.latents = torch.randn(1, *shape, device=device)
        self.prompt = torch.randn(1, resolved.config.model.text_length, text, device=device)
        self.w2c, self.intrinsics = cameras(1, data.latent_frames, torch.device(device))

    def load(self, indices: Sequence[int], following: Sequence[int] = (), allowed: int = 0) -> Batch:
        """The same clip at every index."""
        n, names = len(indices), tuple(f"clip-{index}" for index in indices)
        latents, prompts, w2c, intrinsics = (
            x.expand(n, *x.shape[1:]) for x in (self.latents, self.prompt, self.w2c, self.intrinsics)
        )
        return Batch(tuple(indices), names, names, (0,) * n, ("",) * n, latents, prompts, w2c, intrinsics)


def trainer(
    resolved: Resolved, architecture: Mapping[str, Any], device: torch.device, folder: Path
) -> loop.Trainer:
    """The trainer of the run over a network of random weights and random clips."""
    backbone = network(resolved, architecture, device)
    clips: Any = RandomClips(resolved, architecture, device)
    return loop.Trainer(
        setup.build_learner(resolved, backbone, None),
        setup.build_objective(resolved, backbone, device),
        clips,
        BatchPlan(1, 1, 1, 1),
        Topology(),
        folder,
        Heartbeat(folder, 0),
        StopRequest(),
    )


def prediction(resolved: Resolved, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What `solarwm estimate` says of exactly this run: parameters, bytes at the peak, FLOPs per step."""
    from solarwm_lib.estimate.flops import flops
    from solarwm_lib.estimate.memory import plan
    from solarwm_lib.estimate.workload import workload_of

    workload = workload_of(resolved, architecture, local_world=1)
    work = flops(workload)
    return {
        "parameters": workload.network.total,
        "estimated_bytes": plan(workload).total,
        "model_flops": float(work.model),
        "hardware_flops": float(work.hardware),
    }


def assumed_peak(device: torch.device) -> float | None:
    """The data sheet's dense bfloat16 FLOP/s of this GPU; None for one that is not listed."""
    from solarwm_lib.estimate.hardware import gpu

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name()
    known = next((sheet for mark, sheet in DATA_SHEETS.items() if mark in name), None)
    return None if known is None else gpu(known).bfloat16


def steps(resolved: Resolved, architecture: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Take warm-up and measured steps: median seconds, peak bytes, last loss."""
    torch.manual_seed(0)
    reset_peak(device)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        of_run = trainer(resolved, architecture, device, Path(folder))
        seconds = median_seconds(device, lambda: records.append(of_run.step()[0]), REPETITIONS, WARM_UP)
    reserved = torch.cuda.max_memory_reserved() if device.type == "cuda" else None
    return {
        "step_seconds": seconds,
        "peak_bytes": peak_bytes(device),
        "peak_reserved_bytes": reserved,
        "last_loss": records[-1].loss,
    }


def first_that_fits(
    choices: Sequence[int], attempt: Callable[[int], dict[str, Any]]
) -> tuple[int, dict[str, Any]]:
    """Return the first of `choices` whose attempt does not run out of memory, and its figures; MemoryError if there is none."""
    for choice in choices:
        try:
            return choice, attempt(choice)
        except torch.OutOfMemoryError as error:
            print(f"{choice} blocks do not fit: {error}", file=sys.stderr)
        # Only here, after the error is gone, nothing holds on to the tensors of the attempt.
        gc.collect()
        torch.cuda.empty_cache()
    raise MemoryError(f"not even {choices[-1]} blocks fit")


def step(found: Findings) -> None:
    """Steps with as many blocks as fit, beside the estimate."""
    device = found.device
    resolved, architecture = run(found.is_cuda)

    def attempt(blocks: int) -> dict[str, Any]:
        found.set({"blocks": blocks})
        return steps(resolved, with_blocks(architecture, blocks), device)

    blocks, measured = first_that_fits(BLOCKS[found.is_cuda], attempt)
    seconds, tokens = measured["step_seconds"], tokens_of(resolved, architecture)
    found.set({**measured, "tokens_per_step": tokens, "tokens_per_second": tokens / seconds})
    expected, peak = prediction(resolved, with_blocks(architecture, blocks)), assumed_peak(device)
    found.set(
        {
            **expected,
            "peak_over_estimated": measured["peak_bytes"] / expected["estimated_bytes"],
            "model_tflops_per_second": expected["model_flops"] / seconds / 1e12,
            "hardware_tflops_per_second": expected["hardware_flops"] / seconds / 1e12,
            "assumed_peak_tflops": None if peak is None else peak / 1e12,
            "model_flops_utilisation": None if peak is None else expected["model_flops"] / seconds / peak,
        }
    )
    found.check("whole_network", blocks == BLOCKS[found.is_cuda][0])
    found.check("loss_is_finite", math.isfinite(measured["last_loss"]))
    if found.is_cuda:
        # Fragmentation and library workspaces are not in the plan; it must not be short by more than this.
        found.check("fits_the_estimate", measured["peak_bytes"] <= 1.1 * expected["estimated_bytes"])
