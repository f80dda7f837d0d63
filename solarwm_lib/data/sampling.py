"""Which clip, which repeat and which start frame every global sample index means.

A pure function of (seed, index, global batch size, mixed_shards): nothing depends on rank, world size, worker, prefetch
or history, so a resume needs only the step and a change of world size re-deals the same batches.

Sample g = step * global_batch_size + lane. Each epoch lays the shards out in a keyed order and cuts that row of
occurrences into one contiguous run per lane; a step takes the next occurrence of every lane. A rank owns neighbouring
lanes and a node neighbouring ranks, so a node reads a stretch of the row: each shard about once, whatever the topology.
(replaces the stateful order of spec operations 4.6 by the remedies of W-11 and W-13; frame selection is 4.7)
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data.index import Index
from solarwm_lib.data.rows import AnyRow, LatentRow
from solarwm_lib.runtime import keyed
from solarwm_lib.runtime.errors import ConfigError, DataError

LONGEST_SPAN = 2.0**53  # frames; no video comes near, and numbers beyond do not fit the columns
DIGEST_BITS = 52  # exact in a float64, as which ranks exchange them; add them as integers
ORDERS_KEPT = 4
PERMUTATIONS_KEPT = 1024


class PlannedSample(NamedTuple):
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


def last_offset(pixel_frames: int, source_fps: float, output_fps: float) -> int:
    """Return `frame_offsets(...)[-1]` without the others: what a clip spans is refused by a number alone."""
    return int(last_offsets(pixel_frames, np.array([source_fps], np.float64), output_fps)[0])


def last_offsets(pixel_frames: int, source_fps: NDArray[np.float64], output_fps: float) -> NDArray[np.int64]:
    """Return `frame_offsets(...)[-1]` for each source rate; NaN (rate unknown) counts as the output rate."""
    rates = np.where(source_fps > 0, source_fps, output_fps)
    with np.errstate(over="ignore"):
        return np.rint(np.minimum((pixel_frames - 1) * rates / output_fps, LONGEST_SPAN)).astype(np.int64)


def start_count(row: AnyRow, last: int) -> int:
    """Return how many start frames a row allows a clip that ends `last` frames after its start.

    DataError if the video is shorter than the clip.
    """
    if row.num_frames is None:
        raise DataError(
            f"sample {row.sample_id!r}: field 'num_frames' is absent, expected the decoded frame count"
        )
    if row.num_frames <= last:
        raise DataError(
            f"sample {row.sample_id!r}: video has {row.num_frames} frames, the clip spans {last + 1} source frames; "
            "lower data.pixel_frames or remove the row"
        )
    return row.num_frames - last


def batch_digest(pairs: Iterable[tuple[int, str]]) -> int:
    """Return a digest of (global sample index, occurrence id) pairs, below 2**52.

    It is a sum modulo 2**52: the digests of the ranks' shares, added as integers, make that of the batch in any topology.
    """
    return sum(keyed.key64(index, occurrence_id) for index, occurrence_id in pairs) % 2**DIGEST_BITS


def digest_text(digest: int) -> str:
    """Return a batch digest as it is logged and printed: 13 hexadecimal digits."""
    return f"{digest % 2**DIGEST_BITS:013x}"


@dataclass(frozen=True)
class _EpochOrder:
    """The row of shards of one epoch: shard `shards[i]` holds positions edges[i] .. edges[i + 1] - 1."""

    shards: list[int]
    edges: list[int]


class _Place(NamedTuple):
    """Where a global sample index lies: a position of its epoch, in the group of slots first .. stop - 1.

    `left` counts what its lane still takes from the group, itself included.
    """

    epoch: int
    position: int
    first: int
    stop: int
    left: int


class Plan:
    """The order in which the rows of `index` are seen, epoch after epoch.

    Every occurrence (row, repeat) appears exactly once per epoch. The clips of `mixed_shards` neighbouring shards are
    shuffled together. Rows of a latent index show the frames they were encoded from, so only their order is planned.

    Raises DataError if a row cannot hold the clip, a fixed start lies outside it, or latents are asked for random
    starts; ConfigError for a number that is not positive. All lookups are thread-safe.
    """

    def __init__(
        self,
        index: Index,
        *,
        seed: int,
        pixel_frames: int,
        fps: float,
        random_start: bool = True,
        global_batch_size: int,
        mixed_shards: int = 1,
    ) -> None:
        for key, value in (
            ("data.pixel_frames", pixel_frames),
            ("data.fps", fps),
            ("train.global_batch_size", global_batch_size),
            ("data.mixed_shards", mixed_shards),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{key} is {value}, expected a positive number")
        self.index, self.seed = index, seed
        self.pixel_frames, self.fps, self.random_start = pixel_frames, fps, random_start
        self.global_batch_size, self.mixed_shards = global_batch_size, mixed_shards
        self._check_rows()

        # Canonical order of occurrences: by shard, then row, then repeat. A shard named in two places of the index is
        # one shard here.
        shard, repeats = index.columns.shard, index.columns.repeats
        self._rows = np.argsort(shard, kind="stable")
        self._row_edges = _edges(repeats[self._rows])
        self._shard_edges = self._row_edges[_edges(np.bincount(shard, minlength=len(index.shards)))]
        self._shard_keys = np.array([keyed.key64("shard", name) for name in index.shards], dtype=np.uint64)
        self.occurrences = int(self._row_edges[-1])
        """Virtual occurrences of one epoch: the sum of the rows' repeats."""
        self._order = functools.lru_cache(ORDERS_KEPT)(self._order_of)
        self._permutation = functools.lru_cache(PERMUTATIONS_KEPT)(self._permutation_of)

    def _check_rows(self) -> None:
        """Raise DataError for the first row that cannot hold the clip or whose fixed start lies outside it."""
        if isinstance(first := self.index[0], LatentRow):
            if self.random_start:
                raise DataError(
                    f"sample {first.sample_id!r}: its latents have a fixed start, found random starts; "
                    "set data.random_start=false"
                )
            return
        columns = self.index.columns
        last = last_offsets(self.pixel_frames, columns.fps, self.fps)
        short = columns.num_frames <= last
        if short.any():
            ordinal = int(short.argmax())
            start_count(self.index[ordinal], int(last[ordinal]))
        if not self.random_start:
            outside = np.maximum(columns.start_frame, 0) >= columns.num_frames - last
            if outside.any():
                ordinal = int(outside.argmax())
                self.check_start(ordinal, int(columns.start_frame[ordinal]))

    def require_readers(self, data_world_size: int) -> None:
        """Raise DataError unless every data-parallel rank has at least one occurrence of an epoch to read."""
        if self.occurrences < data_world_size:
            raise DataError(
                f"{self.index.path}: {self.occurrences} occurrence(s) per epoch for {data_world_size} data-parallel ranks, "
                f"expected at least one each; add clips, raise epoch_repeats, or lower distributed.world_size so that at "
                f"most {self.occurrences} rank(s) read"
            )

    def offsets_of(self, row_ordinal: int) -> tuple[int, ...]:
        """Return the source offset of each clip frame from the start frame of a row."""
        rate = float(self.index.columns.fps[row_ordinal])
        return frame_offsets(self.pixel_frames, rate if rate > 0 else self.fps, self.fps)

    def source_frames(self, planned: PlannedSample) -> list[int]:
        """Return the source frame of each clip frame: those a latent row records, else start frame + offsets."""
        row = self.index[planned.row_ordinal]
        if isinstance(row, LatentRow):
            return list(row.source_frame_indices)
        return [planned.start_frame + offset for offset in self.offsets_of(planned.row_ordinal)]

    def check_start(self, row_ordinal: int, start_frame: int) -> None:
        """Raise DataError unless a clip may start there."""
        starts = self._starts(row_ordinal)
        if not 0 <= start_frame < starts:
            row = self.index[row_ordinal]
            raise DataError(
                f"sample {row.sample_id!r}: start frame {start_frame} is outside 0..{starts - 1} "
                f"({row.num_frames} frames, the clip spans {self.offsets_of(row_ordinal)[-1] + 1}); correct start_frame in the index"
            )

    def occurrence_at(self, global_sample_index: int) -> PlannedSample:
        """Return the sample of a global index >= 0 (step * global batch + position in the batch)."""
        place = self._place(global_sample_index)
        occurrence = self._occurrence(place)
        return self._planned(global_sample_index, place.epoch, occurrence, 0)

    def replacement(self, global_sample_index: int, attempt: int) -> PlannedSample:
        """Return what stands in for a clip that cannot be used: a keyed draw over all occurrences, attempt >= 1."""
        epoch = global_sample_index // self.occurrences
        occurrence = keyed.integer(self.occurrences, self.seed, "replacement", global_sample_index, attempt)
        return self._planned(global_sample_index, epoch, occurrence, attempt)

    def shards_ahead(self, global_sample_indices: Iterable[int], count: int) -> list[str]:
        """Return up to `count` shards that the lanes of these indices need next, the soonest first.

        Looks one epoch ahead; shards that the indices themselves lie in are left out. No row is read.
        """
        lanes = sorted(global_sample_indices)
        current = {self._shard(self._occurrence(self._place(index))) for index in lanes}
        horizon = lanes[0] + self.occurrences + self.global_batch_size if lanes else 0
        ahead: dict[int, None] = {}
        while lanes and len(ahead) < count and lanes[0] < horizon:
            place = self._place(lanes[0])
            group = self._order(place.epoch).shards[place.first : place.stop]
            ahead.update(dict.fromkeys(shard for shard in group if shard not in current))
            heapq.heapreplace(lanes, lanes[0] + place.left * self.global_batch_size)
        return [self.index.shards[shard] for shard in itertools.islice(ahead, count)]

    def _place(self, global_sample_index: int) -> _Place:
        """Return the place of a global index: lane a of an epoch holds the a-th of B nearly equal runs of its order."""
        if global_sample_index < 0:
            raise ValueError(f"global sample index {global_sample_index} is negative")
        epoch, within = divmod(global_sample_index, self.occurrences)
        taken, lane = divmod(within, self.global_batch_size)
        full, longer = divmod(self.occurrences, self.global_batch_size)
        position = lane * full + min(lane, longer) + taken
        run_end = (lane + 1) * full + min(lane + 1, longer)
        edges = self._order(epoch).edges
        slot = bisect_right(edges, position) - 1
        first = slot - slot % self.mixed_shards
        stop = min(first + self.mixed_shards, len(edges) - 1)
        return _Place(epoch, position, first, stop, min(run_end, edges[stop]) - position)

    def _occurrence(self, place: _Place) -> int:
        """Return the canonical ordinal of the occurrence at a place: shuffled within its group of shards."""
        order = self._order(place.epoch)
        start, stop = order.edges[place.first], order.edges[place.stop]
        inside = self._permutation(place.epoch, place.first, stop - start)
        shuffled = start + inside[place.position - start]
        slot = bisect_right(order.edges, shuffled) - 1
        return int(self._shard_edges[order.shards[slot]]) + shuffled - order.edges[slot]

    def _shard(self, occurrence: int) -> int:
        return int(self._shard_edges.searchsorted(occurrence, "right")) - 1

    def _order_of(self, epoch: int) -> _EpochOrder:
        """Return the keyed order of the shards; each one's key is of its name, so adding one moves no other."""
        shards = np.argsort(keyed.keys64(self._shard_keys, self.seed, "shards", epoch), kind="stable")
        edges = _edges(np.diff(self._shard_edges)[shards])
        return _EpochOrder(shards.tolist(), edges.tolist())  # lists: a single look-up in one is far cheaper

    def _permutation_of(self, epoch: int, first: int, size: int) -> keyed.Permutation:
        name = self.index.shards[self._order(epoch).shards[first]]
        return keyed.Permutation(size, self.seed, "order", epoch, name)

    def _starts(self, row_ordinal: int) -> int:
        return int(self.index.columns.num_frames[row_ordinal]) - self.offsets_of(row_ordinal)[-1]

    def _planned(self, index: int, epoch: int, occurrence: int, attempt: int) -> PlannedSample:
        entry = occurrence  # true where no row repeats
        if self.occurrences > len(self.index):
            entry = int(self._row_edges.searchsorted(occurrence, "right")) - 1
        ordinal, repeat = int(self._rows[entry]), occurrence - int(self._row_edges[entry])
        row = self.index[ordinal]
        if isinstance(row, LatentRow):
            start = row.source_frame_indices[0]
        elif self.random_start:
            # Keyed by sample id, so inserting a row elsewhere in the index leaves this row's starts alone.
            starts, key = self._starts(ordinal), (self.seed, "start", epoch, row.sample_id, repeat, attempt)
            start = keyed.integer(starts, *key) if starts > 1 else 0
        else:
            start = row.start_frame or 0
        suffix = f".{attempt}" if attempt else ""
        return PlannedSample(
            index, ordinal, repeat, epoch, start, f"{row.sample_id}#{epoch}.{repeat}{suffix}"
        )


def _edges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of consecutive runs begins and the last one ends: 0 and the running sums."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
