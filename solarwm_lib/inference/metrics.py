"""PSNR and SSIM of uint8 RGB clips, per frame and per clip, and the baseline "repeat the first frame".

Both compare a generated frame with the ground-truth frame at the same index, on 8-bit RGB. Frame 0 is given to the model,
so a clip's value is over frames 1..F-1: the mean of SSIM, and for PSNR the decibels of the mean squared error (as the
average of ffmpeg's psnr filter). A mean of decibels would be ruled by frames that nearly equal the given one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PEAK = 255.0
PSNR_CAP_DB = 100.0
SSIM_WINDOW = 11
SSIM_SIGMA = 1.5


def psnr_per_frame(truth: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return `[F]` decibels of two uint8 clips `[F,H,W,3]`: `10 log10(255^2 / MSE)` over pixels and channels.

    Capped at 100 dB, which equal frames reach.
    """
    _same_shape(truth, other)
    squared = [
        np.mean(np.square(a.astype(np.float32) - b.astype(np.float32)), dtype=np.float64)
        for a, b in zip(truth, other, strict=True)
    ]
    floor = PEAK**2 / 10 ** (PSNR_CAP_DB / 10)
    return 10 * np.log10(PEAK**2 / np.maximum(squared, floor))


def ssim_per_frame(truth: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return `[F]` structural similarities of two uint8 clips `[F,H,W,3]`.

    Wang et al. 2004: Gaussian window of 11x11, sigma 1.5, K1 0.01, K2 0.03, per channel, averaged over the positions
    where the window fits. Equals scikit-image with `gaussian_weights=True, use_sample_covariance=False`. Frames
    smaller than the window in a direction use the largest odd window that fits.
    """
    _same_shape(truth, other)
    return np.array(
        [_ssim(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(truth, other, strict=True)]
    )


def _ssim(a: np.ndarray, b: np.ndarray) -> float:
    c1, c2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = _blur(np.stack([a, b, a * a, b * b, a * b]))
    product, squares = mean_a * mean_b, mean_a**2 + mean_b**2
    covariance, variances = mean_ab - product, mean_aa + mean_bb - squares
    return float(np.mean((2 * product + c1) * (2 * covariance + c2) / ((squares + c1) * (variances + c2))))


def _blur(maps: np.ndarray) -> np.ndarray:
    """Filter H and W of `[N,H,W,3]` with the Gaussian window, valid positions only; returns `[N,3,H',W']`."""
    planes = np.moveaxis(maps, 3, 1)
    return _window_matrix(planes.shape[2]) @ planes @ _window_matrix(planes.shape[3]).T


@functools.lru_cache(maxsize=8)
def _window_matrix(length: int) -> np.ndarray:
    """Return the banded matrix that filters a line of `length` values: two BLAS products replace 22 passes."""
    size = min(SSIM_WINDOW, length - 1 + length % 2)
    taps = np.exp(-0.5 * ((np.arange(size) - size // 2) / SSIM_SIGMA) ** 2)
    matrix = np.zeros((length - size + 1, length))
    for row in range(len(matrix)):
        matrix[row, row : row + size] = taps / taps.sum()
    return matrix


def repeat_first_frame(truth: np.ndarray) -> np.ndarray:
    """Return the baseline clip that shows frame 0 of `truth` throughout (a view, not a copy)."""
    return np.broadcast_to(truth[:1], truth.shape)


def clip_value(per_frame: Sequence[float] | np.ndarray) -> float:
    """Return the mean over the generated frames, 1..F-1; of a clip of one frame, that frame's value."""
    values = np.asarray(per_frame, dtype=np.float64)
    return float(values[1:].mean() if len(values) > 1 else values.mean())


def clip_psnr(per_frame: Sequence[float] | np.ndarray) -> float:
    """Return the PSNR of the mean squared error of the frames that `clip_value` averages, from their PSNRs in dB."""
    return -10 * float(np.log10(clip_value(10 ** (-np.asarray(per_frame, dtype=np.float64) / 10))))


@dataclass(frozen=True)
class PixelStatistics:
    """Per-frame facts about decoded pixels `[F,H,W,3]` in [-1,1], before rounding to 8 bits."""

    mean: np.ndarray
    std: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray
    finite_fraction: np.ndarray

    @property
    def first_bad_frame(self) -> int | None:
        bad = np.flatnonzero(self.finite_fraction < 1)
        return int(bad[0]) if len(bad) else None


def pixel_statistics(pixels: np.ndarray) -> PixelStatistics:
    """Return statistics over the finite values of each frame of float `pixels` `[F,H,W,3]`; NaN where there are none."""
    rows = []
    for frame in pixels:
        finite = frame[np.isfinite(frame)]
        spread = (finite.mean(), finite.std(), finite.min(), finite.max()) if finite.size else (np.nan,) * 4
        rows.append((*spread, finite.size / frame.size))
    return PixelStatistics(*np.array(rows, dtype=np.float64).T)


def to_uint8(pixels: np.ndarray) -> np.ndarray:
    """Round float pixels in [-1,1] to uint8 as `round((x + 1) * 127.5)`; non-finite values become 0."""
    finite = np.nan_to_num(pixels, nan=-1.0, posinf=-1.0, neginf=-1.0)
    return np.rint(np.clip((finite + 1.0) * 127.5, 0, 255)).astype(np.uint8)


def _same_shape(truth: np.ndarray, other: np.ndarray) -> None:
    if truth.shape != other.shape or truth.ndim != 4:
        raise ValueError(f"clips have shapes {truth.shape} and {other.shape}, expected two equal [F,H,W,3]")
