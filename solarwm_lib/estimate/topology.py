"""Which topologies a run fits on: the configured one, and the smallest at the same global batch. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from solarwm_lib.estimate.hardware import Gpu
from solarwm_lib.estimate.memory import plan
from solarwm_lib.estimate.workload import LOCAL_WORLD, Topology, Workload

SEQUENCES = (1, 2, 4, 8)
LARGEST_WORLD = 1024


def fits(workload: Workload, gpu: Gpu) -> bool:
    """Whether the predicted peak of tensors leaves the GPU its reserve."""
    return plan(workload).total <= gpu.usable


def smallest(workload: Workload, gpu: Gpu, local_world: int = LOCAL_WORLD) -> Workload | None:
    """The workload on the fewest GPUs it fits on, None if there is no such number up to 1024.

    Global and micro-batch stay; accumulation follows. Of equal worlds: without checkpointing before with, fewer sequence-parallel peers
    before more, whole parameters before sharded ones.
    """
    world = 1
    while world <= LARGEST_WORLD:
        for topology in _topologies(workload, world, local_world):
            candidate = replace(workload, topology=topology)
            if fits(candidate, gpu):
                return candidate
        world *= 2
    return None


def _topologies(workload: Workload, world: int, local_world: int) -> Iterator[Topology]:
    local = min(world, local_world)
    strategies = ["replicate"]
    if world > 1:
        strategies += (["hybrid_shard"] if world > local > 1 else []) + ["full_shard"]
    for checkpointing in (False, True):
        for sequence in SEQUENCES:
            replicas, micro = world // sequence, workload.topology.micro_batch
            if local % sequence or workload.network.heads % sequence:
                continue
            accumulation, rest = divmod(workload.global_batch, replicas * micro)
            if rest or accumulation < 1:
                continue
            for strategy in strategies:
                yield Topology(world, sequence, micro, accumulation, strategy, checkpointing, local)


def describe(topology: Topology) -> str:
    """`16 GPUs, full_shard, SP 2, micro-batch 1, accumulation 2, activation checkpointing on`."""
    t = topology
    return (
        f"{t.world} GPU{'s' if t.world > 1 else ''}, {t.strategy}, SP {t.sequence}, micro-batch {t.micro_batch}, "
        f"accumulation {t.accumulation}, activation checkpointing {'on' if t.checkpointing else 'off'}"
    )
