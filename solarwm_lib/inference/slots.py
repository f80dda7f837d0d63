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

from solarwm_lib.runtime.errors import MemoryExhausted, SolarError
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


def score_notes(
    psnr: Sequence[float] | np.ndarray,
    ssim: Sequence[float] | np.ndarray,
    scored: int | None = None,
    first: int = 0,
) -> list[str]:
    """Return one caption per frame, from `first` on, of a generated clip whose first `scored` frames (all) have ground truth."""
    notes = []
    for frame, (decibels, similarity) in enumerate(zip(psnr, ssim, strict=True), start=first):
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
