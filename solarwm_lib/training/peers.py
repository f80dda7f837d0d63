"""Sequence-parallel peers read the same clips; what one of them cannot read, none of them may use.

Peers exchange how each read fared before anybody replaces a clip, so their batches stay the same clip for clip. Only the
ranks of one sequence group take part; where every rank reads clips of its own nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from solarwm_lib.runtime.errors import DistributedError
from solarwm_lib.training.topology import Topology, sequence_groups


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
            for ranks in sequence_groups(topology.world_size, self._size):
                group = dist.new_group(ranks, timedelta(seconds=timeout_seconds), backend="gloo")
                if topology.rank in ranks:
                    self._group = group

    def agree(self, outcomes: Sequence[Failed | None]) -> list[Failed | None]:
        """Return, for each read, the failure that counts on every peer: of the earliest draw, then of the lowest rank."""
        if self._group is None:
            return list(outcomes)
        try:
            if not self._any([outcome is not None for outcome in outcomes]):
                return list(outcomes)
            rows: list[Sequence[Failed | None]] = [()] * self._size
            dist.all_gather_object(rows, list(outcomes), group=self._group)
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DistributedError(
                f"exchanging reads with the sequence-parallel peers failed: {reason}; a peer has ended or cannot be reached"
            ) from error
        return [_first(column) for column in zip(*rows, strict=True)]

    def _any(self, flags: Sequence[bool]) -> bool:
        flag = torch.tensor([float(any(flags))])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())


def _first(column: Sequence[Failed | None]) -> Failed | None:
    failed = [outcome for outcome in column if outcome is not None]
    return min(failed, key=lambda outcome: outcome.attempt) if failed else None
