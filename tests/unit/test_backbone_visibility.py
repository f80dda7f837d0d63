"""Visibility plans against the rules they stand for, written out pair by pair."""

import pytest
import torch

from solarwm_lib.backbones.visibility import (
    BIDIRECTIONAL,
    Span,
    bidirectional,
    cached_window,
    causal_window,
    merged,
    teacher_forcing,
)


def pairs(queries, keys, tokens, rule):
    """Dense mask of `rule(query frame, key frame)` with `tokens` tokens per frame."""
    frames = torch.tensor([[rule(q, k) for k in range(keys)] for q in range(queries)])
    return frames.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def test_everything_sees_everything():
    assert bidirectional() is BIDIRECTIONAL
    assert BIDIRECTIONAL.mask(3).all() and BIDIRECTIONAL.mask(2, 5).shape == (2, 5)


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize(
    ("frames", "chunk", "prior"), [(14, 2, 5), (6, 3, 5), (9, 3, 1), (4, 2, 0), (3, 3, 5)]
)
def test_teacher_forcing_is_the_rule_of_the_specification(frames, chunk, prior, sink):
    sink *= chunk // 2 if chunk % 2 == 0 else 0

    def sees(query, key):
        own, other = (frame % frames // chunk for frame in (query, key))
        in_sink = key < sink
        if query < frames:  # clean: the whole prefix, windowed only with a sink
            return key < frames and other <= own and (not sink or in_sink or own - other <= prior)
        if key < frames:  # noisy to clean: strictly before, at most `prior` chunks
            return other < own and (own - other <= prior or in_sink)
        return other == own

    plan = teacher_forcing(frames, chunk, prior, 2, sink)
    assert torch.equal(plan.mask(4 * frames), pairs(2 * frames, 2 * frames, 2, sees))


def test_the_released_layout_drops_the_first_image_from_the_last_chunk():
    """21 latents, chunks of 3, five prior chunks: spec 4.1."""
    mask = teacher_forcing(21, 3, 5, 1).mask(42)
    assert mask[:21, :21].sum() == 9 * 28 and not mask[:21, 21:].any()
    assert not mask[21 + 18, :3].any() and mask[21 + 18, 3:18].all()
    assert not any(mask[21 + frame, frame] for frame in range(21))  # no target leak
    assert mask.diagonal().all()


@pytest.mark.parametrize(("window", "sink"), [(None, 0), (4, 0), (8, 0), (6, 2), (4, 2), (2, 0)])
def test_causal_window_is_the_rule_of_the_specification(window, sink):
    def sees(query, key):
        stop = query // 2 * 2 + 2
        if window is None or stop <= window:
            return key < stop
        return key < sink or stop - (window - sink) <= key < stop

    plan = causal_window(8, 4, 2, 3, window, sink)
    assert torch.equal(plan.mask(36), pairs(12, 12, 3, sees))


def test_the_cached_plan_is_the_last_rows_of_the_causal_one():
    for new in (2, 4):
        plan = cached_window(6, new, 2, 3)
        assert torch.equal(
            plan.mask(3 * new, 18 + 3 * new), causal_window(6, new, 2, 3).mask(18 + 3 * new)[18:]
        )
    assert cached_window(6, 2, 2, 3) is BIDIRECTIONAL


@pytest.mark.parametrize(
    "plan", [teacher_forcing(12, 3, 2, 5), teacher_forcing(12, 3, 2, 5, 3), causal_window(9, 3, 3, 5, 6, 3)]
)
def test_segments_tile_the_queries_and_key_runs_do_not_touch(plan):
    stop = 0
    for segment in plan.segments:
        assert segment.query.start == stop and segment.query.length > 0
        stop = segment.query.stop
        assert merged(segment.keys) == segment.keys


def test_plans_are_built_once_per_geometry():
    assert teacher_forcing(12, 3, 5, 7) is teacher_forcing(12, 3, 5, 7)
    assert hash(causal_window(6, 3, 3, 2)) == hash(causal_window(6, 3, 3, 2))


def test_touching_runs_are_joined():
    assert merged([Span(4, 6), Span(0, 2), Span(2, 2), Span(2, 4), Span(8, 9)]) == (Span(0, 6), Span(8, 9))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: teacher_forcing(7, 3, 5, 1), "frames has 7 latent frames; expected whole chunks of 3"),
        (lambda: teacher_forcing(6, 3, 5, 1, 2), "sink has 2"),
        (lambda: teacher_forcing(6, 3, -1, 1), "expected 0 or more"),
        (lambda: causal_window(4, 3, 3, 1), "history has 4"),
        (lambda: causal_window(6, 3, 3, 1, 5), "window has 5"),
        (lambda: causal_window(6, 3, 3, 1, None, 3), "without a window"),
        (lambda: causal_window(6, 3, 3, 1, 3, 3), "room for a sink of 3 and a chunk of 3"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
