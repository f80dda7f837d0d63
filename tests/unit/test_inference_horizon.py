"""Horizons: the numbers of spec wan22 6.3 and 6.4, and both camera-length roundings as properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solarwm_lib.config.geometry import pixel_frames
from solarwm_lib.data.sampling import frame_offsets
from solarwm_lib.inference.horizon import camera_length, published_frames, source_variable
from solarwm_lib.runtime.errors import DataError

FAMILY = "wan22_ti2v_5b"
RATES = st.sampled_from([16.0, 24.0, 25.0, 30.0, 29.97, 60.0, 12.0, 8.0])


@pytest.mark.parametrize(("frames", "latents"), [(81, 21), (160, 39), (237, 60), (960, 60)])
def test_source_variable_horizons(frames: int, latents: int) -> None:
    assert source_variable(frames, 3, 21, 60) == latents


def test_a_source_below_the_minimum_is_refused() -> None:
    with pytest.raises(DataError, match=r"clip: 80 frames give 18 latent frames .* at least 21"):
        source_variable(80, 3, 21, 60)


@pytest.mark.parametrize(
    ("frames", "fps", "latents"),
    [(960, 16, 240), (160, 16, 39), (81, 16, 21), (1440, 24, 240), (9, 16, 3)],
)
def test_documented_camera_length_ends_inside_the_track(frames: int, fps: float, latents: int) -> None:
    assert camera_length(frames, fps, 16.0, 3) == latents


def test_the_two_roundings_of_960_frames() -> None:
    assert published_frames(960, 16.0, 16.0) == 960
    assert published_frames(1440, 24.0, 16.0) == 960
    assert pixel_frames(FAMILY, camera_length(960, 16.0, 16.0, 3)) == 957
    assert camera_length(960, 16.0, 16.0, 3, "covering") == 243
    assert pixel_frames(FAMILY, 243) == 969


def test_a_track_shorter_than_a_chunk_is_refused_unless_covered() -> None:
    with pytest.raises(DataError, match=r"track has 8 frames, one chunk of 3 latent frames needs 9"):
        camera_length(8, 16.0, 16.0, 3)
    assert camera_length(8, 16.0, 16.0, 3, "covering") == 3
    assert camera_length(1, 16.0, 16.0, 3, "covering") == 3


@settings(max_examples=200, deadline=None)
@given(frames=st.integers(120, 3000), source=RATES, chunk=st.integers(1, 5))
def test_documented_is_the_longest_inside_and_covering_the_shortest_outside(
    frames: int, source: float, chunk: int
) -> None:
    inside = camera_length(frames, source, 16.0, chunk)
    assert inside % chunk == 0
    assert frame_offsets(pixel_frames(FAMILY, inside), source, 16.0)[-1] < frames
    assert frame_offsets(pixel_frames(FAMILY, inside + chunk), source, 16.0)[-1] >= frames
    outside = camera_length(frames, source, 16.0, chunk, "covering")
    wanted = published_frames(frames, source, 16.0)
    assert outside % chunk == 0 and pixel_frames(FAMILY, outside) >= wanted
    assert outside == chunk or pixel_frames(FAMILY, outside - chunk) < wanted
