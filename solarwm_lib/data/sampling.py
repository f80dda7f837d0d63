"""Which clip, which repeat and which start frame every global sample index means: a pure function of (seed, index).

Nothing depends on rank, worker, prefetch or history, so a resume needs only the step and a change of world size
re-deals the remaining indices exactly once each. Each epoch is a keyed permutation of all occurrences, computed in O(1).
(replaces the stateful order of spec operations 4.6 by the remedy of W-11; frame selection is 4.7)
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from solarwm_lib.data.index import RawRow
from solarwm_lib.runtime import keyed
from solarwm_lib.runtime.errors import DataError


@dataclass(frozen=True)
class PlannedSample:
    """What one global sample index stands for."""

    global_sample_index: int
    row_ordinal: int
    repeat_ordinal: int
    epoch: int
    start_frame: int
    occurrence_id: str


@functools.lru_cache(maxsize=1024)
def frame_offsets(pixel_frames: int, source_fps: float, output_fps: float) -> tuple[int, ...]:
    """Return the source offset of each output frame: round-half-even(k * source / output), never decreasing.

    A non-positive source rate counts as the output rate. (spec operations 4.7)
    """
    if source_fps <= 0 or source_fps == output_fps:
        return tuple(range(pixel_frames))
    rounded = (round(k * source_fps / output_fps) for k in range(pixel_frames))
    return tuple(itertools.accumulate(rounded, max))


def start_count(row: RawRow, offsets: Sequence[int]) -> int:
    """Return how many start frames a row allows; DataError if its video is shorter than the clip."""
    if row.num_frames is None:
        raise DataError(
            f"sample {row.sample_id!r}: field 'num_frames' is absent, expected the decoded frame count"
        )
    if row.num_frames <= offsets[-1]:
        raise DataError(
            f"sample {row.sample_id!r}: video has {row.num_frames} frames, the clip spans {offsets[-1] + 1} source frames; "
            "lower data.pixel_frames or remove the row"
        )
    return row.num_frames - offsets[-1]


class Plan:
    """The order in which `rows` are seen, epoch after epoch.

    Every occurrence (row, repeat) appears exactly once per epoch. Raises DataError if a row cannot hold the clip or a
    fixed start lies outside it.
    """

    def __init__(
        self, rows: Sequence[RawRow], *, seed: int, pixel_frames: int, fps: float, random_start: bool = True
    ) -> None:
        if not rows:
            raise DataError("the index holds no row; expected at least one")
        self.seed, self.random_start = seed, random_start
        self._rows = rows
        self.offsets = [frame_offsets(pixel_frames, row.fps or fps, fps) for row in rows]
        self._starts = [start_count(row, offsets) for row, offsets in zip(rows, self.offsets, strict=True)]
        self._ends = list(itertools.accumulate(row.epoch_repeats for row in rows))
        if not random_start:
            for ordinal in range(len(rows)):
                self.check_start(ordinal, rows[ordinal].start_frame or 0)

    @property
    def occurrences(self) -> int:
        """Virtual occurrences of one epoch: the sum of the rows' repeats."""
        return self._ends[-1]

    def check_start(self, row_ordinal: int, start_frame: int) -> None:
        """Raise DataError unless a clip may start there."""
        if not 0 <= start_frame < self._starts[row_ordinal]:
            row = self._rows[row_ordinal]
            raise DataError(
                f"sample {row.sample_id!r}: start frame {start_frame} is outside 0..{self._starts[row_ordinal] - 1} "
                f"({row.num_frames} frames, the clip spans {self.offsets[row_ordinal][-1] + 1})"
            )

    def occurrence_at(self, global_sample_index: int) -> PlannedSample:
        """Return the sample of a global index >= 0 (step * global batch + position in the batch)."""
        if global_sample_index < 0:
            raise ValueError(f"global sample index {global_sample_index} is negative")
        epoch, position = divmod(global_sample_index, self.occurrences)
        occurrence = keyed.permutation_at(position, self.occurrences, self.seed, "order", epoch)
        return self._planned(global_sample_index, epoch, occurrence, 0)

    def replacement(self, global_sample_index: int, attempt: int) -> PlannedSample:
        """Return what stands in for a clip the camera guards reject: a keyed draw over all occurrences."""
        epoch = global_sample_index // self.occurrences
        occurrence = keyed.integer(self.occurrences, self.seed, "replacement", global_sample_index, attempt)
        return self._planned(global_sample_index, epoch, occurrence, attempt)

    def _planned(self, index: int, epoch: int, occurrence: int, attempt: int) -> PlannedSample:
        ordinal = bisect_right(self._ends, occurrence)
        row = self._rows[ordinal]
        repeat = occurrence - (self._ends[ordinal] - row.epoch_repeats)
        # Keyed by sample id, so inserting a row elsewhere in the index leaves this row's starts alone.
        key = (self.seed, "start", epoch, row.sample_id, repeat, attempt)
        start = keyed.integer(self._starts[ordinal], *key) if self.random_start else row.start_frame or 0
        suffix = f".{attempt}" if attempt else ""
        return PlannedSample(
            index, ordinal, repeat, epoch, start, f"{row.sample_id}#{epoch}.{repeat}{suffix}"
        )
