"""Who writes which tensors of a checkpoint, and the writing itself, which needs no connection between processes.

Whole parameters: rank 0 writes everything. Parameters in parts: the ranks that hold the first copy of the network write side by
side; every tensor has one of them as its owner, which gets the parts of it from the others and writes it whole. So a checkpoint
reads the same whatever wrote it. The exchange is collective and happens in the training thread; writing may happen in another.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from solarwm_lib.artifacts import Artifact, Member, Transaction
from solarwm_lib.runtime import receipts
from solarwm_lib.runtime.connection import connection
from solarwm_lib.runtime.errors import ArtifactError, DistributedError, SolarError
from solarwm_lib.runtime.files import HashingWriter, disk_full
from solarwm_lib.training.members import part_name, size_of, write_safetensors
from solarwm_lib.training.sharding import local

# A rank that writes may be slower than rank 0 by this much; below the hour after which a collective gives up.
RECEIPT_TIMEOUT_SECONDS = 1800.0
WRITERS_PER_RANK = 3
# Whole size of the tensors whose parts change hands in one exchange: few exchanges, little memory.
EXCHANGE_BYTES = 2**28

T = TypeVar("T")

# Member name -> tensor name -> tensor.
Members = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Writers:
    """The ranks that write, in the order of their parts; `index` is this rank's place, None if it writes nothing."""

    ranks: tuple[int, ...]
    index: int | None

    @property
    def is_alone(self) -> bool:
        """True if one rank writes everything."""
        return len(self.ranks) == 1


def writers_of(members: Members, rank: int) -> Writers:
    """Return who writes the state that `members` are: the group of rank 0 among those that hold one copy in parts."""
    for tensors in members.values():
        for tensor in tensors.values():
            if (axis := _parts_axis(tensor)) is not None:
                assert isinstance(tensor, DTensor)
                ranks = tuple(dist.get_process_group_ranks(tensor.device_mesh.get_group(axis)))
                return Writers(ranks, ranks.index(rank) if 0 in ranks else None)
    return Writers((0,), 0 if rank == 0 else None)


def _parts_axis(tensor: torch.Tensor) -> int | None:
    """Axis of the mesh over which a tensor lies in parts, None for a whole one."""
    if not isinstance(tensor, DTensor):
        return None
    axis = next((axis for axis, place in enumerate(tensor.placements) if place.is_shard()), None)
    if axis is not None and not tensor.placements[axis].is_shard(0):
        raise DistributedError(
            f"a tensor lies in parts as {tensor.placements}, expected along its first dimension"
        )
    return axis


def owners(members: Members, count: int) -> dict[str, dict[str, int]]:
    """Member name -> tensor name -> which of `count` writers owns it: the largest tensors first, each to the one with the
    fewest bytes so far. The same on every rank."""
    loads = [(0, index) for index in range(count)]
    result: dict[str, dict[str, int]] = {}
    for member, tensors in members.items():
        result[member] = {}
        for name in sorted(tensors, key=lambda name: (-size_of(tensors[name]), name)):
            load, index = heapq.heappop(loads)
            result[member][name] = index
            heapq.heappush(loads, (load + size_of(tensors[name]), index))
    return result


class HostBuffers:
    """Copies of tensors in host memory, whose place is reused by the next save; pinned where the tensors are on a device."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def place(self, member: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the whole of `tensor`."""
        buffer = self._buffers.get((member, name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[member, name] = buffer
        return buffer

    @staticmethod
    def wait() -> None:
        """Return when all copies into buffers are complete."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


@torch.no_grad()
def stage(members: Members, writers: Writers, buffers: HostBuffers) -> Members:
    """Return the files that this rank writes (file name -> its whole tensors), copied to host memory.

    Collective among the writers: parts go straight to the owner of their tensor, many in one exchange. Beside the buffers
    it takes device memory for what `EXCHANGE_BYTES` of tensors are here. {} on a rank that writes nothing.
    """
    if writers.index is None:
        return {}
    count = len(writers.ranks)
    owned = owners(members, count)
    files: dict[str, dict[str, torch.Tensor]] = {}
    waiting: list[_Part] = []
    for member, tensors in members.items():
        mine = files.setdefault(part_name(member, writers.index, count), {})
        for name, tensor in tensors.items():
            owner = owned[member][name]
            if owner == writers.index:
                mine[name] = buffers.place(member, name, tensor)
            if _parts_axis(tensor) is None:
                if owner == writers.index:
                    mine[name].copy_(local(tensor.detach()), non_blocking=True)
                continue
            if waiting and (waiting[0].tensor.dtype != tensor.dtype or _bytes(waiting) > EXCHANGE_BYTES):
                _exchange(waiting, writers.index, count)
                waiting = []
            waiting.append(_Part(tensor.detach(), owner, mine.get(name)))
    if waiting:
        _exchange(waiting, writers.index, count)
    buffers.wait()
    return files


@dataclass(frozen=True)
class _Part:
    """A tensor in parts, the writer that owns it, and on that one the buffer for the whole of it."""

    tensor: torch.Tensor
    owner: int
    buffer: torch.Tensor | None


def _bytes(parts: Iterable[_Part]) -> int:
    return sum(size_of(part.tensor) for part in parts)


def _exchange(parts: Sequence[_Part], index: int, count: int) -> None:
    """Send this rank's part of every tensor to the tensor's owner; fill the buffers of those owned here."""
    axis = _parts_axis(parts[0].tensor)
    assert axis is not None and isinstance(parts[0].tensor, DTensor)
    to_send: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for part in parts:
        mine = local(part.tensor)
        rows = _rows(part.tensor, index, count)
        if mine.shape[0] != rows.stop - rows.start:
            raise DistributedError(
                f"rank {index} holds {mine.shape[0]} rows of a tensor {list(part.tensor.shape)} in {count} parts, expected "
                f"{rows.stop - rows.start}: the state cannot be saved"
            )
        to_send[part.owner].append(mine.reshape(-1))
    sent = torch.cat([piece for pieces in to_send for piece in pieces])
    here = [part for part in parts if part.buffer is not None]
    sizes = [
        [
            part.tensor.shape[1:].numel() * (rows.stop - rows.start)
            for part in here
            for rows in [_rows(part.tensor, source, count)]
        ]
        for source in range(count)
    ]
    received = sent.new_empty(sum(map(sum, sizes)))
    with connection("gathering the state for a save"):
        dist.all_to_all_single(
            received,
            sent,
            [sum(row) for row in sizes],
            [sum(piece.numel() for piece in pieces) for pieces in to_send],
            group=parts[0].tensor.device_mesh.get_group(axis),
        )
    pieces = iter(received.split([size for row in sizes for size in row]))
    for source in range(count):
        for part in here:
            assert part.buffer is not None
            target = part.buffer[_rows(part.tensor, source, count)]
            target.copy_(next(pieces).view(target.shape), non_blocking=True)


def _rows(tensor: torch.Tensor, index: int, count: int) -> slice:
    """Rows of a tensor in `count` parts that the part `index` has: equal chunks, the last ones smaller or empty."""
    rows = tensor.shape[0]
    chunk = -(-rows // count)
    return slice(min(index * chunk, rows), min((index + 1) * chunk, rows))


def write_part(staging: Path, target: Path, rank: int, files: Members) -> None:
    """Write the `files` of a rank other than 0 into the staging directory of rank 0's transaction, and leave a receipt.

    Returns quietly if rank 0 has removed the directory: it says why. Raises ArtifactError, after telling rank 0.
    """
    try:
        members = _side_by_side(lambda name: _write_file(staging, name, files[name]), files)
        receipts.leave(staging, rank, members)
    except Exception as error:
        if not staging.is_dir():
            return
        failure = as_artifact_error(error, target)
        receipts.leave_error(staging, rank, failure)
        raise failure from error


def _side_by_side(write: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """Return `write` of every name: one file is hashed while another waits for the disk. All end before an error is raised."""
    with ThreadPoolExecutor(WRITERS_PER_RANK, "write") as pool:
        return list(pool.map(write, names))


def _write_into(transaction: Transaction, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    with transaction.open(name) as stream:
        write_safetensors(stream, tensors)


def _write_file(staging: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> Member:
    told: list[Member] = []
    with HashingWriter(
        staging / name, lambda size, sha256: told.append(Member(name, size, sha256))
    ) as stream:
        write_safetensors(stream, tensors)  # type: ignore[arg-type]
    return told[0]


def write_main(
    held: ExitStack,
    transaction: Transaction,
    files: Members,
    extra: Mapping[str, bytes],
    writers: Writers,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Artifact:
    """Write rank 0's `files` and the small members `extra`, wait for the other writers, and publish.

    `held` is what leaves the open `transaction`; once `is_given_up` the others are not waited for. Raises ArtifactError or another rank's error; nothing is published then.
    """
    try:
        with held:
            _side_by_side(lambda name: _write_into(transaction, name, files[name]), files)
            for name, data in extra.items():
                transaction.write_bytes(name, data)
            others = [rank for rank in writers.ranks if rank != 0]
            for member in receipts.collect(transaction.staging, others, RECEIPT_TIMEOUT_SECONDS, is_given_up):
                transaction.adopt(member)
    except Exception as error:
        raise as_artifact_error(error, transaction.target) from error
    return transaction.artifact


def as_artifact_error(error: Exception, target: Path) -> SolarError:
    """Return `error` if it is one that people are told in a line, else an ArtifactError about the save of `target`."""
    if isinstance(error, SolarError):
        return error
    reason = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )
    what = "disk full while writing" if disk_full(error) else "cannot write"
    return ArtifactError(
        f"{what} {target}: {reason}; nothing was published, earlier checkpoints are untouched"
    )
