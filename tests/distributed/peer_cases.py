"""What four ranks in two sequence groups are told where one of them is about to compute with other data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from solarwm_lib.objectives import anyflow, flow_matching, self_gradient_forcing
from solarwm_lib.runtime.errors import DistributedError
from solarwm_lib.training.batches import Batch
from solarwm_lib.training.peers import Peers
from solarwm_lib.training.topology import Topology

PROMPT = "A slow walk through a textured room with tall walls, "


def batch(data_rank: int) -> Batch:
    """The batch of one data-parallel replica."""
    generator = torch.Generator().manual_seed(data_rank)
    return Batch(
        indices=(2 * data_rank, 2 * data_rank + 1),
        sample_ids=("room-0", "room-1"),
        occurrence_ids=("0#0.0", f"1#{data_rank}.1"),
        start_frames=(0, 4),
        captions=(PROMPT + "morning", PROMPT + "evening"),
        latents=torch.randn(2, 3, 4, 6, 6, generator=generator),
        prompt_embeds=torch.randn(2, 5, 8, generator=generator),
        w2c=torch.randn(2, 3, 4, 4, generator=generator),
        intrinsics=torch.eye(3).repeat(2, 1, 1),
    )


def draws(data_rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(10 + data_rank)
    noise = torch.randn(2, 3, 4, 6, 6, generator=generator)
    times = torch.tensor([500.0, 250.0])
    return [
        flow_matching.Draws(torch.tensor([700, 3]), noise, torch.tensor([False, True])),
        anyflow.Draws(times, times / 2, torch.tensor([0, 1]), noise),
        self_gradient_forcing.Draws(torch.tensor([1, 2]), noise, noise[None], times, noise),
    ]


def nudged(x: torch.Tensor) -> torch.Tensor:
    """`x` with the last bit of its last number changed."""
    x = x.clone()
    x.view(torch.int32).view(-1)[-1] ^= 1
    return x


CHANGES: dict[str, Callable[[Batch, list[Any]], tuple[Batch, list[Any]]]] = {
    "nothing": lambda b, d: (b, d),
    "occurrence": lambda b, d: (replace(b, occurrence_ids=("0#0.0", "9#9.9")), d),
    "start frame": lambda b, d: (replace(b, start_frames=(0, 5)), d),
    "prompt": lambda b, d: (replace(b, captions=(b.captions[0], PROMPT + "evening rain")), d),
    "camera": lambda b, d: (replace(b, w2c=nudged(b.w2c)), d),
    "lens": lambda b, d: (replace(b, intrinsics=nudged(b.intrinsics)), d),
    "latents": lambda b, d: (replace(b, latents=nudged(b.latents)), d),
    "image condition": lambda b, d: (replace(b, image_condition=b.latents), d),
    "noise": lambda b, d: (b, [replace(d[0], noise=nudged(d[0].noise)), *d[1:]]),
    "timestep": lambda b, d: (b, [replace(d[0], index=torch.tensor([700, 4])), *d[1:]]),
    "flow map": lambda b, d: (b, [d[0], replace(d[1], r=d[1].t), d[2]]),
    "exit step": lambda b, d: (b, [*d[:2], replace(d[2], exit=torch.tensor([1, 1]))]),
    "prompt and noise": lambda b, d: (
        replace(b, captions=("a cat", "a dog")),
        [replace(d[0], noise=-d[0].noise), *d[1:]],
    ),
    "missing draws": lambda b, d: (b, d[:1]),
}


def comparisons(rank: int) -> dict[str, str | None]:
    """Return what `rank` of four is told about each change that rank 3 alone makes."""
    topology = Topology(rank, 4, rank, 4, 2)
    peers, told = Peers(topology), {}
    for name, change in CHANGES.items():
        own = batch(topology.data_rank), draws(topology.data_rank)
        changed, drawn = change(*own) if rank == 3 else own
        told[name] = _told(peers, 6, changed, *drawn)
    told["step"] = _told(peers, 7 if rank == 3 else 6, *draws(0))
    return told


def _told(peers: Peers, step: int, *carriers: Any) -> str | None:
    try:
        peers.same(step, *carriers)
    except DistributedError as error:
        return str(error)
    return None
