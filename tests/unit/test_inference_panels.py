"""Comparison pictures enlarge small clips, mark defects and say where a clip ends; nothing is cut silently."""

from __future__ import annotations

import numpy as np
import pytest

from solarwm_lib.inference.panels import (
    ALARM,
    BAND_HEIGHT,
    GAP,
    Panel,
    difference,
    grid_frames,
    magnification,
)


def clip(frames: int, value: int = 90, height: int = 64, width: int = 96) -> np.ndarray:
    return np.full((frames, height, width, 3), value, np.uint8)


def test_small_clips_are_enlarged_by_a_whole_factor() -> None:
    assert [magnification(h) for h in (32, 64, 96, 256, 480)] == [8, 4, 3, 1, 1]
    frame = next(grid_frames([[Panel("ground truth", clip(1)), Panel("generated", clip(1))]]))
    assert frame.shape == (BAND_HEIGHT + 256, 2 * 384 + GAP, 3)
    assert (frame[BAND_HEIGHT:, :384] == 90).all()


def test_header_holds_ink_and_long_labels_stay_in_their_cell() -> None:
    title = "a label that is much too long for a cell of this width, " * 4
    frame = next(grid_frames([[Panel(title, clip(1)), Panel("", clip(1))]]))
    band = frame[:BAND_HEIGHT]
    assert (band[:, :384] > 200).any()
    assert (band[:, 384 + GAP :] < 40).all()


def test_shorter_clip_is_padded_by_a_labelled_panel() -> None:
    frames = list(grid_frames([[Panel("long", clip(3)), Panel("short", clip(2))]]))
    assert len(frames) == 3
    filler = frames[2][BAND_HEIGHT:, 384 + GAP :]
    assert not (filler == 90).all(axis=2).any() and (filler > 200).any()
    assert (frames[2][BAND_HEIGHT:, :384] == 90).all()


def test_non_finite_frames_are_crossed_out() -> None:
    panel = Panel("generated", clip(2), bad_frames=frozenset({1}))
    good, bad = list(grid_frames([[panel]]))
    assert not (good == ALARM).all(axis=2).any()
    assert (bad == ALARM).all(axis=2).sum() > 2000


def test_difference_is_doubled_and_clipped_without_wrapping() -> None:
    assert difference(clip(2, 10), clip(2, 30)).max() == 40
    assert difference(clip(2, 0), clip(2, 200)).min() == 255
    assert len(difference(clip(3), clip(2))) == 2


def test_odd_sizes_become_even_and_empty_cells_stay_empty() -> None:
    frame = next(grid_frames([[Panel("a", clip(1, height=51, width=33))], [None]]))
    assert frame.shape[0] % 2 == 0 and frame.shape[1] % 2 == 0


def test_clips_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        next(grid_frames([[Panel("a", clip(1)), Panel("b", clip(1, width=64))]]))
