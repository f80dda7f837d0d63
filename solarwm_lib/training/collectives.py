"""The few collectives that training needs, each a no-op in a world of one process.

A failing peer must never leave the others waiting: ranks exchange a status first and all raise the same error
(`agree`), and a connection that breaks becomes a DistributedError instead of a stack trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from solarwm_lib.runtime.connection import connection
from solarwm_lib.runtime.errors import SolarError, of_exit_code
from solarwm_lib.runtime.process import waiting
from solarwm_lib.training.topology import Topology

T = TypeVar("T")
BUCKET_BYTES = 64 * 2**20


@contextmanager
def process_group(topology: Topology, timeout_seconds: float = 3600.0) -> Iterator[torch.device]:
    """Join the process group of torchrun's rendezvous (nccl with CUDA, else gloo) and yield this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", topology.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if topology.world_size == 1 or dist.is_initialized():
        yield device
        return
    with _connection("joining the process group"):
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if cuda else "gloo", timeout=timedelta(seconds=timeout_seconds)
        )
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def _connection(what: str) -> Iterator[None]:
    """As `connection`, and this rank's heartbeat says meanwhile that it waits."""
    with connection(what), waiting(what):
        yield


def rank() -> int:
    """Number of this process among those that take part in collectives."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes that take part in collectives."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(values: list[float]) -> list[list[float]]:
    """Return the `values` of every rank, in rank order (float64; every rank passes the same number of values)."""
    if world_size() == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(world_size())]
    with _connection("exchanging the step status"):
        dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on any rank."""
    if world_size() == 1:
        return flag
    box = torch.tensor([float(flag)])
    with _connection("exchanging a flag"):
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return bool(box.item())


def agree(error: SolarError | None) -> None:
    """Raise the lowest failing rank's error on every rank; return on all of them if nobody failed."""
    if world_size() == 1:
        if error is not None:
            raise error
        return
    reports: list[tuple[int, str] | None] = [None] * world_size()
    with _connection("exchanging failures"):
        dist.all_gather_object(reports, None if error is None else (error.exit_code, str(error)))
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    if failed:
        rank, (code, text) = failed[0]
        others = f" (also failed: ranks {', '.join(str(r) for r, _ in failed[1:])})" if failed[1:] else ""
        raise of_exit_code(code)(f"rank {rank}: {text}{others}") from error


def on_main(topology: Topology, operation: Callable[[], T]) -> T:
    """Run `operation` on rank 0 and return its (small, picklable) result on every rank; its SolarError reaches all."""
    result: T | None = None
    failure: SolarError | None = None
    if topology.is_main:
        try:
            result = operation()
        except SolarError as error:
            failure = error
    agree(failure)
    if world_size() == 1:
        return result  # type: ignore[return-value]
    box = [result]
    with _connection("receiving rank 0's result"):
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def average_(tensors: list[torch.Tensor]) -> None:
    """Replace `tensors` by their mean over all ranks, in place, reduced in float32 in buckets of 64 MiB."""
    if world_size() == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket])
        with _connection("averaging gradients"):
            dist.all_reduce(flat)
        flat /= world_size()
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.numel() * 4
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
