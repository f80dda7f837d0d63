"""Deal of the global batch and the refusals that come before anything is allocated."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.runtime.errors import ConfigError
from solarwm_lib.training.topology import (
    BatchPlan,
    MeshShape,
    Topology,
    from_environment,
    mesh_shape,
    sequence_groups,
)

TORCHRUN = {"WORLD_SIZE": "16", "RANK": "11", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}


def test_ranks_follow_the_layout_with_sequence_parallel_fastest():
    place = from_environment(TORCHRUN, world_size=16, sequence_parallel_size=2)
    assert (place.data_world_size, place.data_rank, place.sequence_rank, place.node) == (8, 5, 1, 1)
    assert not place.is_main


def test_without_torchrun_the_world_is_one_process():
    assert from_environment({}, 1) == Topology()


@pytest.mark.parametrize("actual, configured", [("2", 1), ("1", 256), ("16", 8)])
def test_a_world_of_another_size_is_refused_with_both_numbers(actual, configured):
    environment = {"WORLD_SIZE": actual, "RANK": "0", "LOCAL_WORLD_SIZE": actual, "LOCAL_RANK": "0"}
    with pytest.raises(
        ConfigError, match=rf"WORLD_SIZE is {actual} but distributed.world_size is {configured}"
    ):
        from_environment(environment, configured)


def test_a_configured_world_without_torchrun_is_refused():
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 1 but distributed\.world_size is 2"):
        from_environment({}, 2)


def test_half_a_torchrun_environment_is_refused():
    with pytest.raises(ConfigError, match="RANK set but LOCAL_WORLD_SIZE"):
        from_environment({"WORLD_SIZE": "2", "RANK": "0"}, 2)


def test_sequence_parallel_size_must_divide_the_node():
    with pytest.raises(ConfigError, match="legal values: 1, 2, 4, 8"):
        from_environment(TORCHRUN, 16, sequence_parallel_size=3)


@pytest.mark.parametrize(
    ("strategy", "world", "local", "sp", "expected"),
    [
        ("replicate", 8, 8, 2, MeshShape(4, 1, 2)),
        ("full_shard", 16, 8, 2, MeshShape(1, 8, 2, shards=True)),
        ("hybrid_shard", 16, 8, 2, MeshShape(2, 4, 2, shards=True)),
        ("hybrid_shard", 256, 8, 1, MeshShape(32, 8, 1, shards=True)),
        ("full_shard", 1, 1, 1, MeshShape(1, 1, 1)),
    ],
)
def test_mesh_of_a_strategy(strategy, world, local, sp, expected):
    found = mesh_shape(strategy, world, local, sp)
    assert found == expected
    assert found.replicate * found.shard * found.sequence == world
    assert found.parts == (world // found.replicate if found.shards else 1)


@pytest.mark.parametrize(("world", "local"), [(8, 8), (4, 1)])
def test_hybrid_sharding_without_nodes_of_several_processes_is_refused(world, local):
    with pytest.raises(ConfigError, match=r"at least 2 nodes of at least 2 processes.*use full_shard"):
        mesh_shape("hybrid_shard", world, local)


def test_sequence_groups_are_contiguous():
    assert sequence_groups(4, 2) == [[0, 1], [2, 3]]


def test_batch_that_does_not_multiply_out_is_refused_with_the_accumulation_that_would():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4 would keep the batch"):
        BatchPlan(global_batch_size=16, micro_batch_size=2, accumulation_steps=1, data_world_size=2)


def test_batch_that_cannot_be_dealt_names_the_nearest():
    with pytest.raises(ConfigError, match="multiples of 4"):
        BatchPlan(global_batch_size=18, micro_batch_size=2, accumulation_steps=4, data_world_size=2)


@given(
    world=st.sampled_from([1, 2, 4]),
    other=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]),
    steps=st.integers(1, 5),
    switch=st.integers(0, 5),
)
def test_changing_the_world_deals_every_sample_exactly_once(world, other, micro, steps, switch):
    batch = 16
    seen: list[int] = []
    for step in range(steps):
        ranks = world if step < switch else other
        plan = BatchPlan(batch, micro, batch // (micro * ranks), ranks)
        for rank in range(ranks):
            seen += [i for part in plan.micro_batches(step, rank) for i in part]
    assert sorted(seen) == list(range(batch * steps))


def test_topology_imports_no_torch():
    code = "import sys, solarwm_lib.training.topology; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
