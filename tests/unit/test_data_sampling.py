"""Order and frame selection: a pure function of (seed, index, global batch), each occurrence exactly once per epoch."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solarwm_lib.data.index import Index
from solarwm_lib.data.rows import LatentRow, RawRow
from solarwm_lib.data.sampling import (
    Plan,
    batch_digest,
    digest_text,
    frame_offsets,
    last_offset,
    last_offsets,
)
from solarwm_lib.runtime.errors import ConfigError, DataError
from solarwm_lib.training.topology import BatchPlan


def row(sample_id, repeats=1, num_frames=100, fps=16.0, shard="s.tar", **changes):
    return RawRow(
        sample_id=sample_id,
        key=sample_id,
        shard=shard,
        video_member="v",
        camera_member="c",
        manifest={},
        epoch_repeats=repeats,
        num_frames=num_frames,
        fps=fps,
        **changes,
    )


def latent_row(sample_id, frames, **changes):
    return LatentRow(
        sample_id=sample_id,
        key=sample_id,
        shard="shards/part-000000/samples-00000.tar",
        source_sample_id=sample_id,
        source_frame_indices=frames,
        encoder_contract_digest="0" * 64,
        preencoded_member="p",
        camera_member="c",
        manifest_member="m",
        **changes,
    )


def plan(rows, seed=0, pixel_frames=81, fps=16.0, batch=1, **settings):
    return Plan(
        Index.of(rows), seed=seed, pixel_frames=pixel_frames, fps=fps, global_batch_size=batch, **settings
    )


def rows_of(repeats, shards=None):
    """Return one row per repeat count; `shards` gives each its shard number, in any order."""
    shards = shards or [0] * len(repeats)
    return [
        row(f"r{ordinal}", count, shard=f"shards/part-{shard:03d}.tar")
        for ordinal, (count, shard) in enumerate(zip(repeats, shards, strict=True))
    ]


def even_shards(shards, clips):
    return rows_of([1] * shards * clips, [shard for shard in range(shards) for _ in range(clips)])


layouts = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=24)


# --- offsets ----------------------------------------------------------------------------------------------------------


def test_offsets_of_appendix_a():
    film = frame_offsets(81, 24, 16)
    assert film[:9] == (0, 2, 3, 4, 6, 8, 9, 10, 12) and film[80] == 120
    broadcast = frame_offsets(81, 30, 16)
    assert broadcast[:9] == (0, 2, 4, 6, 8, 9, 11, 13, 15) and broadcast[80] == 150
    assert frame_offsets(5, 16, 16) == frame_offsets(5, 0, 16) == (0, 1, 2, 3, 4)


@given(st.integers(1, 300), st.floats(1, 240), st.floats(1, 240))
def test_offsets_start_at_zero_never_decrease_and_stay_within_half_a_frame(frames, source, output):
    offsets = frame_offsets(frames, source, output)
    assert offsets[0] == 0 and len(offsets) == frames
    assert all(a <= b for a, b in pairwise(offsets))
    if source != output:
        assert all(abs(offset - k * source / output) <= 0.5 + 1e-9 for k, offset in enumerate(offsets))


rates = st.one_of(st.floats(0.1, 1000), st.sampled_from([0.0, 12.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]))


@given(st.integers(1, 300), st.lists(rates, min_size=1, max_size=20), rates.filter(bool))
def test_last_offsets_of_many_rows_are_those_of_each(frames, sources, output):
    found = last_offsets(frames, np.array([*sources, np.nan]), output)
    assert found.tolist() == [frame_offsets(frames, source, output)[-1] for source in [*sources, output]]


def test_a_clip_longer_than_memory_is_refused_by_its_number():
    with pytest.raises(DataError, match="the clip spans 4000000000 source frames"):
        plan([row("a")], pixel_frames=4 * 10**9)
    with pytest.raises(DataError, match=r"the clip spans .* source frames"):
        plan([row("a", fps=24.0)], fps=1e-300)  # beyond what an integer column holds
    assert last_offset(5, 24, 16) == 6


# --- order ------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(layouts, st.integers(1, 40), st.integers(1, 4), st.integers(0, 2**32), st.integers(0, 5))
def test_every_occurrence_appears_exactly_once_per_epoch(layout, batch, mixed, seed, epoch):
    repeats, shards = zip(*layout, strict=True)
    order = plan(rows_of(repeats, shards), seed, batch=batch, mixed_shards=mixed)
    total = sum(repeats)
    assert order.occurrences == total
    planned = [order.occurrence_at(epoch * total + position) for position in range(total)]
    expected = {(ordinal, repeat): 1 for ordinal, count in enumerate(repeats) for repeat in range(count)}
    assert Counter((sample.row_ordinal, sample.repeat_ordinal) for sample in planned) == expected
    assert {sample.epoch for sample in planned} == {epoch}
    assert len({sample.occurrence_id for sample in planned}) == total
    assert all(0 <= sample.start_frame <= 100 - 81 for sample in planned)


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(0, 40))
def test_any_world_size_deals_the_same_batch_and_a_resume_changes_nothing(layout, ranks, other, resume):
    repeats, shards = zip(*layout, strict=True)
    rows = rows_of(repeats, shards)
    alone = plan(rows, 5, batch=8)
    uninterrupted = [alone.occurrence_at(index) for index in range(50 * 8)]
    # `ranks` processes stop after `resume` steps; `other` new ones, which never saw an earlier step, go on.
    for step in (resume, resume + 9):
        replicas = ranks if step == resume else other
        deal, fresh = BatchPlan(8, 1, 8 // replicas, replicas), plan(rows, 5, batch=8)
        dealt = [
            fresh.occurrence_at(index)
            for rank in range(replicas)
            for part in deal.micro_batches(step, rank)
            for index in part
        ]
        assert dealt == uninterrupted[step * 8 : step * 8 + 8]


def test_order_depends_on_nothing_but_seed_index_and_batch():
    rows = rows_of([2, 1, 3, 1], [0, 1, 0, 2])
    forward = [plan(rows, 5).occurrence_at(index) for index in range(30)]
    order = plan(rows, 5)
    backward = [order.occurrence_at(index) for index in reversed(range(30))]
    assert forward == backward[::-1]


def test_the_order_of_this_index_is_pinned():
    """A run resumed by a later version must find the order it was started with."""
    order = plan(rows_of([2, 1, 3, 1], [0, 1, 0, 2]), 42, batch=2, mixed_shards=2)
    ids = [order.occurrence_at(index).occurrence_id for index in range(14)]
    starts = [order.occurrence_at(index).start_frame for index in range(14)]
    first = ["r2#0.1", "r2#0.2", "r1#0.0", "r0#0.1", "r0#0.0", "r3#0.0", "r2#0.0"]
    assert ids == [*first, "r3#1.0", "r0#1.0", "r1#1.0", "r2#1.2", "r0#1.1", "r2#1.0", "r2#1.1"]
    assert starts == [10, 18, 15, 9, 7, 19, 9, 16, 16, 18, 18, 6, 4, 14]


def test_epochs_and_seeds_differ_in_order_and_start():
    rows = even_shards(5, 4)
    orders = [
        [plan(rows, seed).occurrence_at(20 * epoch + i) for i in range(20)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(s.row_ordinal for s in order) for order in orders}) == 3
    assert len({tuple(s.row_ordinal // 4 for s in order) for order in orders}) == 3  # shards
    assert len({tuple(s.start_frame for s in order) for order in orders}) == 3


def test_a_new_shard_leaves_the_order_of_the_others_alone():
    def shards(rows):
        order = plan(rows, 9)
        found = [rows[order.occurrence_at(index).row_ordinal].shard for index in range(order.occurrences)]
        return list(dict.fromkeys(found))

    before = even_shards(12, 3)
    after = shards([*before[:9], row("new", shard="another/part.tar"), *before[9:]])
    assert [name for name in after if name != "another/part.tar"] == shards(before)


def test_a_shard_named_in_two_places_of_the_index_is_one_shard():
    order = plan(rows_of([1] * 30, [0, 1, 2] * 10), 3)
    shards = [order.occurrence_at(index).row_ordinal % 3 for index in range(30)]
    assert [len(list(group)) for _, group in itertools.groupby(shards)] == [10, 10, 10]


# --- locality ---------------------------------------------------------------------------------------------------------


def visits(order, rows, readers, epoch=0):
    """Return the shards each of `readers` equal shares of the batch reads in an epoch, in order, without repeats."""
    total, batch = order.occurrences, order.global_batch_size
    found = [[] for _ in range(readers)]
    for index in range(epoch * total, (epoch + 1) * total):
        found[index % batch * readers // batch].append(rows[order.occurrence_at(index).row_ordinal].shard)
    return found


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(1, 12), st.integers(0, 3))
def test_a_lane_reads_each_of_its_shards_in_one_stretch(layout, batch, epoch):
    repeats, shards = zip(*layout, strict=True)
    rows = rows_of(repeats, shards)
    order = plan(rows, 1, batch=batch)
    lanes = visits(order, rows, batch, epoch)
    full, longer = divmod(order.occurrences, batch)
    assert sorted(map(len, lanes)) == [full] * (batch - longer) + [full + 1] * longer  # nobody starves
    stretches = [[name for name, _ in itertools.groupby(lane)] for lane in lanes]
    assert all(len(set(lane)) == len(lane) for lane in stretches)
    # Runs of neighbouring lanes share a shard only where one ends inside it.
    assert sum(map(len, stretches)) <= len(set(shards)) + batch - 1


@pytest.mark.parametrize(("nodes", "batch"), [(2, 16), (4, 16), (4, 64), (8, 64)])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_a_node_reads_each_shard_about_once(nodes, batch, epoch):
    rows = even_shards(32, 33)
    read = visits(plan(rows, 42, batch=batch), rows, nodes, epoch)
    # One shard is cut at every border between nodes; the lanes' borders rotate when an epoch is no multiple of the batch.
    assert sum(len(set(shards)) for shards in read) <= 32 + nodes
    counts = [len(shards) for shards in read]
    assert max(counts) - min(counts) <= batch // nodes


def test_four_nodes_share_the_shards_that_starved_one():
    """Hash ownership gave node 2 nothing here (spec operations W-13)."""
    names = [f"abot/shards/part-{number:03d}.tar" for number in range(8)]
    rows = [row(f"{name[12:20]}-{clip}", shard=name) for name in names for clip in range(6)]
    read = visits(plan(rows, 42, batch=4), rows, 4)
    assert [len(set(shards)) for shards in read] == [2, 2, 2, 2]


def test_mixed_shards_are_shuffled_together():
    rows = even_shards(12, 20)
    order = plan(rows, 4, mixed_shards=3)
    shards = [order.occurrence_at(index).row_ordinal // 20 for index in range(240)]
    groups = [set(shards[start : start + 60]) for start in range(0, 240, 60)]
    assert [len(group) for group in groups] == [3] * 4 and len(set().union(*groups)) == 12
    assert (
        sum(a != b for a, b in pairwise(shards[:60])) > 25
    )  # 40 expected of 59, 2 when shards follow each other
    # The groups are the same stretches of shards that are read one by one otherwise.
    alone = plan(rows, 4)
    single = [alone.occurrence_at(index).row_ordinal // 20 for index in range(240)]
    assert [set(single[start : start + 60]) for start in range(0, 240, 60)] == groups


@settings(max_examples=80, deadline=None)
@given(
    layouts, st.integers(1, 6), st.integers(0, 30), st.integers(1, 4), st.integers(0, 5), st.integers(0, 60)
)
def test_shards_ahead_are_those_that_come_next(layout, batch, step, share, count, seed):
    repeats, shards = zip(*layout, strict=True)
    rows = rows_of(repeats, shards)
    order = plan(rows, seed, batch=batch)
    now = range(step * batch, step * batch + min(share, batch))

    def shard(index):
        return rows[order.occurrence_at(index).row_ordinal].shard

    current = {shard(index) for index in now}
    # Step by step over one epoch and a batch, as the lanes will read.
    later = [now.start + ahead for ahead in range(order.occurrences + batch) if ahead % batch < len(now)]
    expected = [name for name in dict.fromkeys(map(shard, later)) if name not in current]
    assert order.shards_ahead(now, count) == expected[:count]


def test_shards_ahead_of_a_mixed_group_are_first_the_rest_of_the_group():
    rows = even_shards(9, 10)
    order = plan(rows, 4, mixed_shards=3)
    first, second = (
        {rows[order.occurrence_at(index).row_ordinal].shard for index in range(start, start + 30)}
        for start in (0, 30)
    )
    now = rows[order.occurrence_at(0).row_ordinal].shard
    ahead = order.shards_ahead([0], 5)
    assert set(ahead[:2]) == first - {now} and set(ahead[2:]) == second
    assert order.shards_ahead([], 3) == order.shards_ahead([0], 0) == []


# --- starts -----------------------------------------------------------------------------------------------------------


def test_starts_follow_the_sample_not_its_place_in_the_index():
    first, second = plan(rows_of([1] * 6)), plan([row("new"), *rows_of([1] * 6)])
    starts = {s.occurrence_id: s.start_frame for s in map(first.occurrence_at, range(6))}
    again = {s.occurrence_id: s.start_frame for s in map(second.occurrence_at, range(7))}
    assert starts.items() <= again.items()


def test_every_legal_start_is_reached():
    order = plan([row("a", num_frames=84)])
    assert {order.occurrence_at(index).start_frame for index in range(200)} == {0, 1, 2, 3}


def test_fixed_starts_come_from_the_row():
    rows = [row("a", start_frame=7), row("b")]
    order = plan(rows, random_start=False)
    found = {rows[s.row_ordinal].sample_id: s for s in map(order.occurrence_at, range(2))}
    assert {name: sample.start_frame for name, sample in found.items()} == {"a": 7, "b": 0}
    assert order.source_frames(found["a"]) == list(range(7, 88))
    with pytest.raises(
        DataError, match=r"sample 'a': start frame 20 is outside 0\.\.19 \(100 frames, the clip spans 81\)"
    ):
        plan([row("b"), row("a", start_frame=20)], random_start=False)
    with pytest.raises(DataError, match=r"sample 'b': start frame -1 is outside 0\.\.19"):
        order.check_start(1, -1)


def test_latent_rows_show_the_frames_they_were_encoded_from():
    rows = [
        latent_row("a", [4, 6, 7, 8]),
        latent_row("b", [0, 1, 2, 3], start_frame=0, num_frames=4, fps=16.0),
    ]
    order = plan(rows, pixel_frames=4, random_start=False)
    found = {rows[s.row_ordinal].sample_id: s for s in map(order.occurrence_at, range(2))}
    assert found["a"].start_frame == 4 and order.source_frames(found["a"]) == [4, 6, 7, 8]
    assert found["b"].start_frame == 0 and order.source_frames(found["b"]) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"'a': its latents have a fixed start.*data\.random_start=false"):
        plan(rows, pixel_frames=4)


def test_replacements_are_keyed_draws_over_all_occurrences():
    order = plan(rows_of([1, 3, 2], [0, 1, 2]), 8, batch=4)
    draws = [order.replacement(index, attempt) for index in range(100) for attempt in (1, 2)]
    assert draws == [order.replacement(index, attempt) for index in range(100) for attempt in (1, 2)]
    assert len({(draw.row_ordinal, draw.repeat_ordinal) for draw in draws}) == 6
    assert {draw.epoch for draw in draws[:12]} == {0}
    assert draws[0].occurrence_id.endswith(".1") and draws[1].occurrence_id.endswith(".2")
    assert draws[0].global_sample_index == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_video_shorter_than_the_clip_is_refused_at_plan_time():
    with pytest.raises(
        DataError, match=r"sample 'b': video has 80 frames, the clip spans 81.*data\.pixel_frames"
    ):
        plan([row("a"), row("b", num_frames=80), row("c", num_frames=79)])
    # 24 fps source on a 16 fps clip: 81 output frames span 121 source frames.
    with pytest.raises(DataError, match="the clip spans 121"):
        plan([row("a", num_frames=120, fps=24)])
    assert plan([row("a", num_frames=121, fps=24)]).occurrence_at(3).start_frame == 0
    assert plan([row("a", num_frames=81, fps=None)]).occurrence_at(3).start_frame == 0


def test_empty_index_and_unknown_length_are_refused():
    with pytest.raises(DataError, match=r"no row|empty"):
        plan([])
    with pytest.raises(DataError, match="'a': field 'num_frames' is absent"):
        plan([row("a", num_frames=None)])


def test_every_rank_needs_an_occurrence():
    order = plan(rows_of([2, 1]), batch=8)
    order.require_readers(3)
    with pytest.raises(
        DataError,
        match=r"3 occurrence\(s\) per epoch for 4 data-parallel ranks.*distributed\.world_size.*at most 3",
    ):
        order.require_readers(4)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ({"pixel_frames": 0}, "data.pixel_frames is 0"),
        ({"fps": 0.0}, "data.fps is 0.0"),
        ({"fps": float("nan")}, "data.fps is nan"),
        ({"batch": 0}, "train.global_batch_size is 0"),
        ({"mixed_shards": 0}, "data.mixed_shards is 0"),
    ],
)
def test_numbers_that_are_not_positive_are_refused(setting, key):
    with pytest.raises(ConfigError, match=f"{key}, expected a positive number"):
        plan([row("a")], **setting)


def test_negative_indices_are_refused():
    with pytest.raises(ValueError, match="-1 is negative"):
        plan([row("a")]).occurrence_at(-1)


# --- digest -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**40), st.text(max_size=5)), max_size=20), st.data())
def test_digests_of_shares_add_up_to_that_of_the_batch(pairs, data):
    whole = batch_digest(pairs)
    shares: list[list] = [[], [], []]
    for pair in data.draw(st.permutations(pairs)):
        shares[data.draw(st.integers(0, 2))].append(pair)
    total = sum(int(float(batch_digest(share))) for share in shares)  # ranks exchange float64
    assert total % 2**52 == whole < 2**52
    assert digest_text(total) == digest_text(whole)


def test_digests_tell_batches_apart():
    assert batch_digest([(0, "a"), (1, "b")]) != batch_digest([(0, "b"), (1, "a")])
    assert batch_digest([]) == 0 and digest_text(0) == "0" * 13


# --- scale ------------------------------------------------------------------------------------------------------------


def entry_seconds(order, count=60):
    """Return the median CPU seconds of a first look at each of many far-apart steps."""
    seconds = []
    for number in range(count):
        index = (number * 7919 + 1) * order.occurrences // 13 + number
        start = time.thread_time()
        order.occurrence_at(index)
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds)


def test_entry_at_any_step_takes_less_than_a_millisecond():
    assert entry_seconds(plan(even_shards(500, 20), batch=64)) < 1e-3


@pytest.mark.slow
def test_two_million_rows_are_planned_in_a_second_and_entered_in_a_millisecond(tmp_path: Path):
    path = tmp_path / "index.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for number in range(2_000_000):
            fields = {
                "sample_id": f"clip-{number}",
                "key": f"{number:07d}",
                "shard": f"shards/part-{number // 500:05d}.tar",
                "video_member": "v.mp4",
                "camera_member": "c.npz",
                "manifest_member": "m.json",
                "num_frames": 100 + number % 400,
                "fps": 24.0 if number % 3 else 16.0,
                "epoch_repeats": 1 + number % 2,
            }
            file.write(json.dumps(fields) + "\n")
    index = Index.open(path)
    try:
        start = time.thread_time()
        order = Plan(index, seed=42, pixel_frames=49, fps=16.0, global_batch_size=256)
        assert time.thread_time() - start < 1.0
        assert order.occurrences == 3_000_000
        assert entry_seconds(order) < 1e-3
        start = time.thread_time()
        assert len(order.shards_ahead(range(10**6, 10**6 + 32), 4)) == 4
        assert time.thread_time() - start < 0.05
    finally:
        index.close()
