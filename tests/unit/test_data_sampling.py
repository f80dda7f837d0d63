"""Order and frame selection: a pure function of (seed, index), each occurrence exactly once per epoch."""

from collections import Counter
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solarwm_lib.data.index import RawRow
from solarwm_lib.data.sampling import Plan, frame_offsets
from solarwm_lib.runtime.errors import DataError


def row(sample_id, repeats=1, num_frames=100, fps=16.0, **changes):
    return RawRow(
        sample_id=sample_id,
        key=sample_id,
        shard="s.tar",
        video_member="v",
        camera_member="c",
        manifest={},
        epoch_repeats=repeats,
        num_frames=num_frames,
        fps=fps,
        **changes,
    )


def plan(rows, seed=0, pixel_frames=81, fps=16.0, random_start=True):
    return Plan(rows, seed=seed, pixel_frames=pixel_frames, fps=fps, random_start=random_start)


def rows_of(repeats):
    return [row(f"r{ordinal}", count) for ordinal, count in enumerate(repeats)]


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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(0, 2**32), st.integers(0, 5))
def test_every_occurrence_appears_exactly_once_per_epoch(repeats, seed, epoch):
    order = plan(rows_of(repeats), seed)
    total = sum(repeats)
    planned = [order.occurrence_at(epoch * total + position) for position in range(total)]
    expected = {(ordinal, repeat): 1 for ordinal, count in enumerate(repeats) for repeat in range(count)}
    assert Counter((sample.row_ordinal, sample.repeat_ordinal) for sample in planned) == expected
    assert {sample.epoch for sample in planned} == {epoch}
    assert len({sample.occurrence_id for sample in planned}) == total
    assert all(0 <= sample.start_frame <= 100 - 81 for sample in planned)


def test_order_depends_on_nothing_but_seed_and_index():
    rows = rows_of([2, 1, 3, 1])
    forward = [plan(rows, 5).occurrence_at(index) for index in range(30)]
    backward = [plan(rows, 5).occurrence_at(index) for index in reversed(range(30))]
    assert forward == backward[::-1]


def test_two_and_four_ranks_see_the_same_union_as_one_after_a_resume():
    order = plan(rows_of([1] * 12), 3)
    alone = [order.occurrence_at(index).occurrence_id for index in range(24)]
    # 8 samples on two ranks of batch 2, then a resume on four ranks of batch 1: the counter is all the state.
    dealt = [
        [order.occurrence_at(step * 4 + 2 * rank + i).occurrence_id for step in range(2) for i in range(2)]
        for rank in range(2)
    ]
    resumed = [
        [order.occurrence_at(step * 4 + rank).occurrence_id for step in range(2, 6)] for rank in range(4)
    ]
    assert sorted(chain(*dealt, *resumed)) == sorted(alone)


def test_epochs_and_seeds_differ_in_order_and_start():
    rows = rows_of([1] * 20)
    orders = [
        [plan(rows, seed).occurrence_at(20 * epoch + i) for i in range(20)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(s.row_ordinal for s in order) for order in orders}) == 3
    assert len({tuple(s.start_frame for s in order) for order in orders}) == 3


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
    assert {rows[s.row_ordinal].sample_id: s.start_frame for s in map(order.occurrence_at, range(2))} == {
        "a": 7,
        "b": 0,
    }
    with pytest.raises(DataError, match=r"sample 'a': start frame 20 is outside 0\.\.19"):
        plan([row("a", start_frame=20)], random_start=False)


def test_a_video_shorter_than_the_clip_is_refused_at_plan_time():
    with pytest.raises(
        DataError, match=r"sample 'b': video has 80 frames, the clip spans 81.*data\.pixel_frames"
    ):
        plan([row("a"), row("b", num_frames=80)])
    # 24 fps source on a 16 fps clip: 81 output frames span 121 source frames.
    with pytest.raises(DataError, match="the clip spans 121"):
        plan([row("a", num_frames=120, fps=24)])
    assert plan([row("a", num_frames=121, fps=24)]).occurrence_at(3).start_frame == 0


def test_empty_index_and_unknown_length_are_refused():
    with pytest.raises(DataError, match="no row"):
        plan([])
    with pytest.raises(DataError, match="'num_frames' is absent"):
        plan([row("a", num_frames=None)])
