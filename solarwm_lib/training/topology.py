"""Who does which part of the global batch: world, data-parallel and sequence-parallel arithmetic.

Everything here is arithmetic on integers; no process group is touched and torch is not imported, so a launch whose
numbers do not fit is refused before anything is allocated, connected or written (spec operations 8.1 - 8.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from solarwm_lib.runtime.errors import ConfigError

TORCHRUN_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Topology:
    """Place of this process. raw_rank = data_rank * sequence_parallel_size + sequence_rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        sp = self.sequence_parallel_size
        if min(self.world_size, self.local_world_size, sp) < 1:
            raise ConfigError(
                f"world size {self.world_size}, local world size {self.local_world_size} and "
                f"distributed.sequence_parallel_size {sp} must all be at least 1"
            )
        if not 0 <= self.rank < self.world_size or not 0 <= self.local_rank < self.local_world_size:
            raise ConfigError(
                f"rank {self.rank} (local {self.local_rank}) is outside the world of {self.world_size} "
                f"(local {self.local_world_size})"
            )
        if self.world_size % self.local_world_size:
            raise ConfigError(
                f"world size {self.world_size} is not a multiple of the {self.local_world_size} processes per node"
            )
        if self.world_size % sp or self.local_world_size % sp:
            raise ConfigError(
                f"distributed.sequence_parallel_size {sp} divides neither the world size {self.world_size} nor "
                f"the {self.local_world_size} processes per node evenly; legal values: "
                f"{_divisors(self.world_size, self.local_world_size)}"
            )

    @property
    def data_world_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.world_size // self.sequence_parallel_size

    @property
    def data_rank(self) -> int:
        """Index of this process's replica."""
        return self.rank // self.sequence_parallel_size

    @property
    def sequence_rank(self) -> int:
        """Index within the sequence-parallel group."""
        return self.rank % self.sequence_parallel_size

    @property
    def node(self) -> int:
        """Index of this process's machine."""
        return self.rank // self.local_world_size

    @property
    def is_main(self) -> bool:
        """True on the one process that writes shared files."""
        return self.rank == 0


def from_environment(
    environment: Mapping[str, str], world_size: int, sequence_parallel_size: int = 1
) -> Topology:
    """Return this process's place from torchrun's variables, checked against the configured world size.

    Without torchrun (none of its variables set) the world is one process. Raises ConfigError when the variables are
    incomplete or when the actual world differs from `distributed.world_size`.
    """
    present = [name for name in TORCHRUN_VARIABLES if name in environment]
    if present and len(present) < len(TORCHRUN_VARIABLES):
        missing = [name for name in TORCHRUN_VARIABLES if name not in environment]
        raise ConfigError(
            f"{', '.join(present)} set but {', '.join(missing)} missing: start with torchrun, or unset them for one process"
        )
    try:
        actual, rank, local_world, local_rank = (
            [int(environment[name]) for name in TORCHRUN_VARIABLES] if present else [1, 0, 1, 0]
        )
    except ValueError:
        found = {name: environment[name] for name in TORCHRUN_VARIABLES}
        raise ConfigError(f"torchrun variables must be integers, found {found}") from None
    if actual != world_size:
        raise ConfigError(
            f"WORLD_SIZE is {actual} but distributed.world_size is {world_size}: start {world_size} process(es) "
            f"(torchrun --standalone --nproc-per-node={world_size} ...) or set distributed.world_size={actual}"
        )
    return Topology(rank, actual, local_rank, local_world, sequence_parallel_size)


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's global batch is dealt to replicas and micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    data_world_size: int

    def __post_init__(self) -> None:
        product = self.micro_batch_size * self.accumulation_steps * self.data_world_size
        if product != self.global_batch_size or product < 1:
            per_micro = self.micro_batch_size * self.data_world_size
            fitting = (
                f"gradient_accumulation_steps={self.global_batch_size // per_micro} would keep the batch"
                if per_micro > 0 and self.global_batch_size % per_micro == 0 and self.global_batch_size
                else f"the nearest global batches at these sizes are multiples of {per_micro}"
            )
            raise ConfigError(
                f"train.global_batch_size is {self.global_batch_size} but {self.data_world_size} replicas x "
                f"micro_batch_size {self.micro_batch_size} x gradient_accumulation_steps {self.accumulation_steps} "
                f"= {product}; {fitting}"
            )

    def micro_batches(self, step: int, data_rank: int) -> list[range]:
        """Return the global sample indices of optimizer step `step` (0-based) that replica `data_rank` computes.

        A replica's share is one contiguous block, so the union over replicas is the same block of
        `global_batch_size` indices for every world size: samples are re-dealt, never repeated or skipped.
        """
        share = self.micro_batch_size * self.accumulation_steps
        first = step * self.global_batch_size + data_rank * share
        size = self.micro_batch_size
        return [range(first + i * size, first + (i + 1) * size) for i in range(self.accumulation_steps)]


def sequence_groups(world_size: int, sequence_parallel_size: int) -> list[list[int]]:
    """Return the contiguous sequence-parallel groups of raw ranks."""
    sp = sequence_parallel_size
    return [list(range(first, first + sp)) for first in range(0, world_size, sp)]


@dataclass(frozen=True)
class MeshShape:
    """Processes along the axes of the device mesh: whole copies x parts of a copy x peers that share a sample."""

    replicate: int
    shard: int
    sequence: int
    shards: bool = False

    @property
    def parts(self) -> int:
        """Into how many parts one copy of the parameters is cut: sequence peers hold parts of their own."""
        return self.shard * self.sequence if self.shards else 1


def mesh_shape(
    strategy: str, world_size: int, local_world_size: int, sequence_parallel_size: int = 1
) -> MeshShape:
    """Return the mesh of `train.strategy`; rank = (replicate * shards + shard) * sequences + sequence (spec operations 8.2).

    replicate: every process has all parameters. full_shard: one copy over the whole world. hybrid_shard: one copy inside each node.
    Sequence-parallel peers hold different parts, too: the release shards among the ranks of one sequence position and adds up
    the peers' gradients; over both axes the memory is smaller and the one reduction gives the same mean. A world of one
    process shards nothing. Raises ConfigError for hybrid_shard on one node, or on nodes of one process: plain sharding is meant.
    """
    world, local, sp = world_size, local_world_size, sequence_parallel_size
    if strategy == "replicate" or world == 1:
        return MeshShape(world // sp, 1, sp)
    if strategy == "full_shard":
        return MeshShape(1, world // sp, sp, shards=True)
    nodes = world // local
    if nodes < 2 or local < 2:
        raise ConfigError(
            f"train.strategy: found hybrid_shard, which needs at least 2 nodes of at least 2 processes; world {world} with "
            f"{local} processes per node is {nodes} node(s); use full_shard"
        )
    return MeshShape(nodes, local // sp, sp, shards=True)


def _divisors(*numbers: int) -> str:
    return ", ".join(str(d) for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers))
