"""Scoring and filming one generated clip, stretch by stretch: the pixels of a long clip are never all in memory.

Shapes: F frames of the clip, n of a stretch, H W pixels.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from solarwm_lib.data.video import Mp4Writer
from solarwm_lib.inference import metrics
from solarwm_lib.inference.panels import Panel, difference, grid_frames
from solarwm_lib.inference.slots import COMPARE_CRF, FRAME_COLUMNS, VIDEO_CRF, Slot, csv_text, score_notes
from solarwm_lib.runtime.errors import NonFiniteError

STATISTICS = {"mean": "mean", "std": "std", "minimum": "min", "maximum": "max"}
PADDED = "padded.mp4"


def measure(
    slot: Slot,
    truth: np.ndarray,
    pixels: np.ndarray,
    ceiling: np.ndarray,
    fps: float,
    title: str,
) -> None:
    """Fill `slot` with metrics, videos and statistics of float pixels [F,H,W,3] in [-1,1]; see `Measurement`."""
    frames = min(len(truth), len(pixels))
    with Measurement(slot, len(pixels), frames, fps, title) as measurement:
        statistics = metrics.pixel_statistics(pixels)
        measurement.add(metrics.to_uint8(pixels), statistics, truth[:frames], ceiling[:frames])
        measurement.finish()


class Measurement:
    """Takes a generated clip of `frames` frames in stretches, in order, and fills `slot` at the end; a context manager.

    The clip is scored on its first `truth_frames` frames; those behind them are shown and not scored. The slot ends in
    status ok, or in error (with the same files, the bad frames marked) if a pixel is not finite. `pad` frames more are
    appended, repeating the last, in a second video of the generated clip, `padded`.
    """

    def __init__(
        self, slot: Slot, frames: int, truth_frames: int, fps: float, title: str, pad: int = 0
    ) -> None:
        self.slot = slot
        self.padded: bytes | None = None
        self._frames, self._truth_frames, self._title, self._pad = frames, truth_frames, title, pad
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in FRAME_COLUMNS[1:]}
        self._count = 0
        self._held: np.ndarray | None = None
        self._last: np.ndarray | None = None
        self._fps = fps
        self._stack = ExitStack()
        self._writers: dict[str, Mp4Writer] = {}

    def __enter__(self) -> Measurement:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="solarwm-")))
        rates = {"generated.mp4": VIDEO_CRF, "ground_truth.mp4": VIDEO_CRF, "compare.mp4": COMPARE_CRF}
        if self._pad:
            rates[PADDED] = VIDEO_CRF
        for name, crf in rates.items():
            self._writers[name] = Mp4Writer(self._folder / name, self._fps, crf=crf)
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.abandon()
        self._stack.close()

    def add(
        self,
        generated: np.ndarray,
        statistics: metrics.PixelStatistics,
        truth: np.ndarray,
        ceiling: np.ndarray,
    ) -> None:
        """Take the next stretch: uint8 `generated` [n,H,W,3], `statistics` of its pixels before rounding, and uint8 `truth`
        and `ceiling` (the codec's reconstruction of truth) [m,H,W,3] of its first m <= n frames.
        """
        if self._held is None:
            self._held = truth[:1].copy()
        scored = generated[: len(truth)]
        held = np.broadcast_to(self._held, truth.shape)
        rows = {
            "psnr": metrics.psnr_per_frame(truth, scored),
            "ssim": metrics.ssim_per_frame(truth, scored),
            "repeat_first_frame_psnr": metrics.psnr_per_frame(truth, held),
            "repeat_first_frame_ssim": metrics.ssim_per_frame(truth, held),
            "codec_ceiling_psnr": metrics.psnr_per_frame(truth, ceiling),
        }
        bad = np.flatnonzero(statistics.finite_fraction < 1)
        for name in ("psnr", "ssim"):
            rows[name][bad[bad < len(truth)]] = np.nan
        unscored = np.full(len(generated) - len(truth), np.nan)
        rows = {name: np.concatenate([values, unscored]) for name, values in rows.items()}
        for field in fields(statistics):
            rows[STATISTICS.get(field.name, field.name)] = getattr(statistics, field.name)
        for name, values in rows.items():
            self._columns[name].append(values)
        self._film("generated.mp4", generated)
        self._film("ground_truth.mp4", truth)
        self._film("compare.mp4", self._comparison(truth, generated, rows, frozenset(bad.tolist())))
        if self._pad:
            self._film(PADDED, generated)
            self._last = generated[-1].copy()
        self._count += len(generated)

    def finish(self) -> None:
        """Fill the slot."""
        if self._count != self._frames:
            raise ValueError(f"{self._count} frames were measured, expected {self._frames}")
        slot = self.slot
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        bad = np.flatnonzero(columns["finite_fraction"] < 1)
        slot.facts["first_bad_frame"] = int(bad[0]) if len(bad) else None
        if len(bad):
            slot.fail(
                NonFiniteError(
                    f"{len(bad)} of {self._frames} frames are not finite, the first is frame {bad[0]}"
                )
            )
        elif slot.failure is None:
            slot.status = "ok"
            slot.metrics = {
                name: (metrics.clip_psnr if name.endswith("psnr") else metrics.clip_value)(
                    columns[name][: self._truth_frames]
                )
                for name in FRAME_COLUMNS[1:6]
            }
            slot.metrics["margin_db"] = slot.metrics["psnr"] - slot.metrics["repeat_first_frame_psnr"]
        if self._truth_frames < self._frames:
            slot.facts["ground_truth_frames"] = self._truth_frames
        for _ in range(self._pad):
            self._film(PADDED, [self._last])
        rows = [{"frame": i, **{k: v[i] for k, v in columns.items()}} for i in range(self._frames)]
        files = {name: self._filmed(name) for name in self._writers}
        self.padded = files.pop(PADDED, None)
        slot.members |= {**files, "frames.csv": csv_text(FRAME_COLUMNS, rows).encode()}

    def _film(self, name: str, frames: Sequence[Any] | np.ndarray | Iterator[np.ndarray]) -> None:
        for frame in frames:
            self._writers[name].write(frame)

    def _filmed(self, name: str) -> bytes:
        self._writers[name].close()
        return (self._folder / name).read_bytes()

    def _comparison(
        self,
        truth: np.ndarray,
        generated: np.ndarray,
        rows: Mapping[str, np.ndarray],
        bad: frozenset[int],
    ) -> Iterator[np.ndarray]:
        first, last = self._count, self._frames - 1
        case = self.slot.case
        name = f"{case['sample_id']} from frame {case['start_frame']}"
        labels = [f"{name} · {first + i}/{last}" for i in range(len(truth))]
        scores = score_notes(rows["psnr"], rows["ssim"], self._truth_frames, first)
        baseline = [
            f"repeat first frame: PSNR {v:.2f} dB" if first + i and math.isfinite(v) else ""
            for i, v in enumerate(rows["repeat_first_frame_psnr"])
        ]
        scored = self._truth_frames
        return grid_frames(
            [
                [
                    Panel("ground truth", truth, labels, length=scored),
                    Panel(f"generated · {self._title}", generated, scores, bad),
                    Panel("|difference| x2", difference(truth, generated), baseline, bad, length=scored),
                ]
            ],
            first,
        )
