"""PSNR and SSIM agree with scikit-image's values, frame 0 is left out, non-finite pixels are counted, not hidden."""

from __future__ import annotations

import numpy as np
import pytest

from solarwm_lib.inference import metrics


def pattern() -> tuple[np.ndarray, np.ndarray]:
    index = np.arange(32 * 44 * 3).reshape(1, 32, 44, 3)
    first = ((index * 37 + (index // 5) ** 2) % 256).astype(np.uint8)
    return first, ((first.astype(int) * 3 + (index % 29) * 4) // 4).clip(0, 255).astype(np.uint8)


def test_values_equal_scikit_image() -> None:
    """From scikit-image 0.26: structural_similarity(gaussian_weights, sigma 1.5, population covariance)."""
    first, second = pattern()
    assert metrics.ssim_per_frame(first, second)[0] == pytest.approx(0.9418224098875694, abs=1e-12)
    assert metrics.psnr_per_frame(first, second)[0] == pytest.approx(19.471683571519684, abs=1e-6)


def test_equal_clips_reach_the_cap_and_one() -> None:
    first, _ = pattern()
    assert metrics.psnr_per_frame(first, first).tolist() == [100.0]
    assert metrics.ssim_per_frame(first, first)[0] == pytest.approx(1.0)


def test_frames_smaller_than_the_window_still_have_a_similarity() -> None:
    tiny = np.arange(2 * 8 * 9 * 3, dtype=np.uint8).reshape(2, 8, 9, 3)
    assert metrics.ssim_per_frame(tiny, tiny) == pytest.approx([1.0, 1.0])


def test_clip_psnr_is_that_of_all_generated_pixels_together() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    other = np.clip(
        truth + rng.integers(-40, 40, truth.shape) * np.arange(5)[:, None, None, None], 0, 255
    ).astype(np.uint8)
    error = np.square(truth[1:].astype(float) - other[1:].astype(float)).mean()
    expected = 10 * np.log10(255**2 / error)
    assert metrics.clip_psnr(metrics.psnr_per_frame(truth, other)) == pytest.approx(expected, abs=1e-4)


def test_clip_value_leaves_out_the_given_frame() -> None:
    assert metrics.clip_value([100.0, 20.0, 30.0]) == 25.0
    assert metrics.clip_value([40.0]) == 40.0


def test_repeat_first_frame_holds_frame_zero() -> None:
    clip = np.arange(3 * 2 * 2 * 3, dtype=np.uint8).reshape(3, 2, 2, 3)
    held = metrics.repeat_first_frame(clip)
    assert held.shape == clip.shape
    assert all(np.array_equal(frame, clip[0]) for frame in held)


def test_different_shapes_are_refused() -> None:
    first, _ = pattern()
    with pytest.raises(ValueError, match="shapes"):
        metrics.psnr_per_frame(first, first[:, :-1])


def test_statistics_name_the_first_bad_frame() -> None:
    pixels = np.zeros((3, 2, 2, 3), np.float32)
    pixels[1, 0, 0] = np.nan
    pixels[2] = np.inf
    statistics = metrics.pixel_statistics(pixels)
    assert statistics.first_bad_frame == 1
    assert statistics.finite_fraction.tolist() == [1.0, 0.75, 0.0]
    assert np.isnan(statistics.mean[2])
    assert metrics.pixel_statistics(pixels[:1]).first_bad_frame is None


def test_rounding_is_the_published_one() -> None:
    values = np.array([-1.0, 0.0, 1.0, 1.5, -2.0, np.nan, np.inf], np.float32)
    assert metrics.to_uint8(values).tolist() == [0, 128, 255, 255, 0, 0, 0]
