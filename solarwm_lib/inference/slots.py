"""What one slot of a pass leaves behind: videos, per-frame statistics and a manifest that ends ok, error or skipped."""

from __future__ import annotations

import csv
import io
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from solarwm_lib.data.video import mp4_bytes
from solarwm_lib.inference import metrics
from solarwm_lib.inference.panels import Panel, difference, grid_frames
from solarwm_lib.runtime.errors import MemoryExhausted, NonFiniteError, SolarError
from solarwm_lib.runtime.files import json_bytes

SLOT_SCHEMA = "solarwm.validation-slot.v1"
VIDEO_CRF, COMPARE_CRF = 12, 30
FRAME_COLUMNS = (
    "frame",
    "psnr",
    "ssim",
    "repeat_first_frame_psnr",
    "repeat_first_frame_ssim",
    "codec_ceiling_psnr",
    "mean",
    "std",
    "min",
    "max",
    "finite_fraction",
)
METRIC_COLUMNS = (
    "slot",
    "sample_id",
    "start_frame",
    "status",
    "psnr",
    "ssim",
    "repeat_first_frame_psnr",
    "repeat_first_frame_ssim",
    "codec_ceiling_psnr",
    "margin_db",
    "error",
)


@dataclass(frozen=True)
class Failure:
    """Why a slot has no result: kind and exit code as on the command line, one line, and the traceback of a bug."""

    kind: str
    exit_code: int
    message: str
    traceback: str | None = None

    def record(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None}


@dataclass
class Slot:
    """A slot on its way to a manifest. `members` are the files of its directory by name, `public` those of the whole
    artifact by path."""

    case: dict[str, Any]
    status: str = "skipped"
    failure: Failure | None = None
    metrics: dict[str, float] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    members: dict[str, bytes] = field(default_factory=dict)
    public: dict[str, bytes] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        """End in status error; the first reason stays."""
        self.status = "error"
        self.failure = self.failure or describe(error)

    def manifest(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the slot's manifest; `shared` are the facts of the pass."""
        return {
            **shared,
            "schema": SLOT_SCHEMA,
            "slot": self.case["slot"],
            "case": self.case,
            "status": self.status,
            "error": self.failure.record() if self.failure else None,
            "metrics": self.metrics,
            "timings_s": {name: round(seconds, 4) for name, seconds in self.timings.items()},
            "files": sorted(self.members),
            **self.facts,
        }

    def row(self) -> dict[str, Any]:
        """Return the slot's row of `metrics.csv`."""
        return {
            "slot": self.case["slot"],
            "sample_id": self.case["sample_id"],
            "start_frame": self.case["start_frame"],
            "status": self.status,
            **(self.metrics or {}),
            "error": self.failure.message if self.failure else None,
        }


def describe(error: Exception) -> Failure:
    """Return the failure of a slot; only bugs keep their traceback, the others say what to do."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SolarError):
        return Failure(error.kind, error.exit_code, message)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Failure(MemoryExhausted.kind, MemoryExhausted.exit_code, message)
    text = "".join(traceback.format_exception(error))
    return Failure("bug", 1, f"{type(error).__name__}: {message}", text)


def measure(
    slot: Slot,
    truth: np.ndarray,
    pixels: np.ndarray,
    ceiling: np.ndarray,
    fps: float,
    title: str,
) -> None:
    """Fill `slot` as `measure_frames` does, from float pixels [F,H,W,3] in [-1,1]."""
    statistics = metrics.pixel_statistics(pixels)
    measure_frames(slot, truth, metrics.to_uint8(pixels), statistics, ceiling, fps, title)


def measure_frames(
    slot: Slot,
    truth: np.ndarray,
    generated: np.ndarray,
    statistics: metrics.PixelStatistics,
    ceiling: np.ndarray,
    fps: float,
    title: str,
) -> None:
    """Fill `slot` with metrics, videos and statistics of one generated clip.

    generated: uint8 [F,H,W,3], `statistics` those of its pixels before rounding. truth and ceiling (the codec's
    reconstruction of truth): uint8 [n,H,W,3], n <= F; frames behind them are shown and not scored. Ends in status ok, or in
    error (with the same files, the bad frames marked) if a pixel is not finite.
    """
    frames = len(generated)
    truth, ceiling = truth[:frames], ceiling[:frames]
    scored = generated[: len(truth)]
    held = metrics.repeat_first_frame(truth)
    per_frame = {
        "psnr": metrics.psnr_per_frame(truth, scored),
        "ssim": metrics.ssim_per_frame(truth, scored),
        "repeat_first_frame_psnr": metrics.psnr_per_frame(truth, held),
        "repeat_first_frame_ssim": metrics.ssim_per_frame(truth, held),
        "codec_ceiling_psnr": metrics.psnr_per_frame(truth, ceiling),
    }
    bad = np.flatnonzero(statistics.finite_fraction < 1)
    for name in ("psnr", "ssim"):
        per_frame[name][bad[bad < len(truth)]] = np.nan
    if len(bad):
        slot.fail(
            NonFiniteError(f"{len(bad)} of {frames} frames are not finite, the first is frame {bad[0]}")
        )
    else:
        slot.status = "ok"
        slot.metrics = {
            name: (metrics.clip_psnr if name.endswith("psnr") else metrics.clip_value)(values)
            for name, values in per_frame.items()
        }
        slot.metrics["margin_db"] = slot.metrics["psnr"] - slot.metrics["repeat_first_frame_psnr"]
    if len(truth) < frames:
        slot.facts["ground_truth_frames"] = len(truth)
        unscored = np.full(frames - len(truth), np.nan)
        per_frame = {name: np.concatenate([values, unscored]) for name, values in per_frame.items()}
    columns = {
        **per_frame,
        "mean": statistics.mean,
        "std": statistics.std,
        "min": statistics.minimum,
        "max": statistics.maximum,
        "finite_fraction": statistics.finite_fraction,
    }
    rows = [{"frame": i, **{k: v[i] for k, v in columns.items()}} for i in range(frames)]
    slot.facts["first_bad_frame"] = statistics.first_bad_frame
    slot.members |= {
        "generated.mp4": mp4_bytes(generated, fps, crf=VIDEO_CRF),
        "ground_truth.mp4": mp4_bytes(truth, fps, crf=VIDEO_CRF),
        "compare.mp4": mp4_bytes(
            _comparison(slot, truth, generated, per_frame, title, frozenset(bad.tolist())),
            fps,
            crf=COMPARE_CRF,
        ),
        "frames.csv": csv_text(FRAME_COLUMNS, rows).encode(),
    }


def _comparison(
    slot: Slot,
    truth: np.ndarray,
    generated: np.ndarray,
    per_frame: Mapping[str, np.ndarray],
    title: str,
    bad: frozenset[int],
) -> Iterable[np.ndarray]:
    last = len(generated) - 1
    name = f"{slot.case['sample_id']} from frame {slot.case['start_frame']}"
    scores = score_notes(per_frame["psnr"], per_frame["ssim"], len(truth))
    baseline = [
        f"repeat first frame: PSNR {v:.2f} dB" if i and math.isfinite(v) else ""
        for i, v in enumerate(per_frame["repeat_first_frame_psnr"])
    ]
    return grid_frames(
        [
            [
                Panel("ground truth", truth, [f"{name} · {i}/{last}" for i in range(len(truth))]),
                Panel(f"generated · {title}", generated, scores, bad),
                Panel("|difference| x2", difference(truth, generated), baseline, bad),
            ]
        ]
    )


def score_notes(
    psnr: Sequence[float] | np.ndarray, ssim: Sequence[float] | np.ndarray, scored: int | None = None
) -> list[str]:
    """Return one caption per frame of a generated clip, of which the first `scored` frames (all) have ground truth."""
    notes = []
    for frame, (decibels, similarity) in enumerate(zip(psnr, ssim, strict=True)):
        if frame == 0:
            notes.append("first frame: given")
        elif scored is not None and frame >= scored:
            notes.append("no ground truth")
        elif math.isfinite(decibels):
            notes.append(f"PSNR {decibels:.2f} dB · SSIM {similarity:.3f}")
        else:
            notes.append("not finite")
    return notes


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return CSV with six significant digits; absent and non-finite values are empty cells."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return stream.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return "" if value is None else value


def members_of(directory: str, slot: Slot, shared: Mapping[str, Any]) -> dict[str, bytes]:
    """Return artifact member -> content of a slot, its manifest included."""
    files = {**slot.members, "manifest.json": json_bytes(slot.manifest(shared))}
    return {f"{directory}/{name}": data for name, data in files.items()}
