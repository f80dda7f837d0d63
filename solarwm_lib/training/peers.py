"""Sequence-parallel peers read the same clips; what one of them cannot read, none of them may use.

Peers exchange how each read fared before anybody replaces a clip, so their batches stay the same clip for clip, and compare
what they are about to compute with: they share one pass, and a peer with another prompt or other noise would spoil it unseen.
Only the ranks of one sequence group take part; where every rank reads clips of its own nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from solarwm_lib.runtime.connection import connection
from solarwm_lib.runtime.errors import DistributedError
from solarwm_lib.training.fingerprints import excerpts, fingerprints, hashed, shown
from solarwm_lib.training.topology import Topology, sequence_groups

# What a person calls the fields of batches and draws; others are called by their own name.
NAMES = {
    "indices": "sample",
    "sample_ids": "sample",
    "occurrence_ids": "occurrence",
    "start_frames": "start frame",
    "captions": "prompt",
    "prompt_embeds": "prompt embedding",
    "w2c": "camera",
    "intrinsics": "camera",
    "index": "timestep",
    "t": "timestep",
    "r": "second time",
    "dropped": "prompt dropout",
    "kind": "sample type",
    "exit": "exit step",
}
NOT_COMPUTED_WITH = {"replaced"}


@dataclass(frozen=True)
class Failed:
    """A read that failed at draw number `attempt`; `reason` is empty if nothing may stand in for the clip."""

    attempt: int
    reason: str
    message: str


class Peers:
    """The sequence group of this rank. Every rank of the world must make its `Peers` at the same point."""

    def __init__(self, topology: Topology, timeout_seconds: float = 3600.0) -> None:
        self._size = topology.sequence_parallel_size
        self._group: dist.ProcessGroup | None = None
        if self._size > 1:
            # Of the world's own backends: a backbone exchanges tokens on the device over it, and statuses go over the CPU.
            for ranks in sequence_groups(topology.world_size, self._size):
                group = dist.new_group(ranks, timedelta(seconds=timeout_seconds))
                if topology.rank in ranks:
                    self._group = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of this rank and its peers, None where it has no peers."""
        return self._group

    def agree(self, outcomes: Sequence[Failed | None]) -> list[Failed | None]:
        """Return, for each read, the failure that counts on every peer: of the earliest draw, then of the lowest rank."""
        if self._group is None:
            return list(outcomes)
        with connection("exchanging reads with the sequence-parallel peers"):
            if not self._any([outcome is not None for outcome in outcomes]):
                return list(outcomes)
            rows = self._gather_objects(list(outcomes))
        return [_first(column) for column in zip(*rows, strict=True)]

    def same(self, step: int, *carriers: Any) -> None:
        """Raise DistributedError on every peer unless all are about to compute optimizer step `step` with the same data.

        Each of `carriers` is a dataclass (a batch, an objective's draws) or a mapping: of tensors, text, numbers, None or tuples
        of them. One 64-bit number per peer is exchanged while they are the same.
        """
        if self._group is None:
            return
        parts = [("step", step), *(part for carrier in carriers for part in _parts(carrier))]
        prints = fingerprints([value for _, value in parts])
        names = [name for name, _ in parts]
        mine = torch.tensor([hashed(f"{names} {prints}")])
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        with connection("comparing data with the sequence-parallel peers"):
            dist.all_gather(rows, mine, group=self._group)
            if all(torch.equal(row, mine) for row in rows):
                return
            told = [
                (name, number, shown(value, number))
                for (name, value), number in zip(parts, prints, strict=True)
            ]
            reports = self._gather_objects(told)
        ranks = dist.get_process_group_ranks(self._group)
        raise DistributedError(
            f"optimizer step {step}: sequence-parallel peers differ in {_differences(ranks, reports)}; "
            "start all ranks with one configuration, data and code"
        )

    def _gather_objects(self, mine: Any) -> list[Any]:
        rows: list[Any] = [None] * self._size
        dist.all_gather_object(rows, mine, group=self._group)
        return rows

    def _any(self, flags: Sequence[bool]) -> bool:
        flag = torch.tensor([float(any(flags))])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())


def _first(column: Sequence[Failed | None]) -> Failed | None:
    failed = [outcome for outcome in column if outcome is not None]
    return min(failed, key=lambda outcome: outcome.attempt) if failed else None


def _parts(carrier: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `carrier` holds, by the names people use."""
    if isinstance(carrier, Mapping):
        named = list(carrier.items())
    else:
        named = [(field.name, getattr(carrier, field.name)) for field in fields(carrier)]
    for name, value in named:
        if name not in NOT_COMPUTED_WITH:
            yield NAMES.get(name, name.replace("_", " ")), value


def _differences(ranks: Sequence[int], reports: Sequence[Sequence[tuple[str, int, str]]]) -> str:
    """Return what differs between the `reports` (name, fingerprint, text) of `ranks`, each name once."""
    if len({tuple(name for name, _, _ in report) for report in reports}) > 1:
        counts = (f"rank {r} {len(report)} parts" for r, report in zip(ranks, reports, strict=True))
        return f"what they have: {', '.join(counts)}"
    found: dict[str, str] = {}
    for column in zip(*reports, strict=True):
        name = column[0][0]
        if name not in found and len({number for _, number, _ in column}) > 1:
            texts = excerpts([text for _, _, text in column])
            found[name] = ", ".join(f"rank {r} {text}" for r, text in zip(ranks, texts, strict=True))
    return "; in ".join(f"{name}: {values}" for name, values in found.items())
