"""What a run reads, step by step, before it reads it: `solarwm data plan`.

From a run's configuration the list is exactly what its trainer consumes, clips replaced by the camera guards included.
From an index and numbers alone it is the plan before any guard has seen a camera. (spec operations 4.8, W-10)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.data.index import Index, LatentRow
from solarwm_lib.data.sampling import Plan, PlannedSample, batch_digest, digest_text
from solarwm_lib.runtime.errors import ConfigError, DataError
from solarwm_lib.training.topology import BatchPlan, Topology

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

SCHEMA = "solarwm.sample-plan.v2"
FINGERPRINTED = (
    "sample_id",
    "key",
    "shard",
    "row_ordinal",
    "repeat_ordinal",
    "epoch",
    "start_frame",
    "source_frame_indices",
    "reader_rank",
)

Locate = Callable[[int], tuple[PlannedSample, tuple[str, ...]]]


def plan_report(
    resolved: Resolved,
    *,
    step: int = 0,
    steps: int = 1,
    epoch: int | None = None,
    rank: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return what a run reads in `steps` optimizer steps after `step` completed ones, or from an epoch's first step on.

    `rank` is a raw rank, as torchrun counts; None stands for all. `shown` holds the first `limit` records; `count` and
    `fingerprint` cover all of them. `steps` of the result gives the `batch_digest` of each whole global batch, as the
    run's metrics.jsonl has it where its `step` is `completed_steps`. Raises what opening the training clips raises.
    """
    from solarwm_lib.training.setup import open_clips

    config = resolved.config
    topology = _topology(config.distributed.world_size, config.distributed.sequence_parallel_size, rank)
    deal = BatchPlan(
        config.train.global_batch_size,
        config.train.micro_batch_size,
        config.train.gradient_accumulation_steps,
        topology.data_world_size,
    )
    _require_counts(step=step, steps=steps, epoch=epoch, limit=limit)
    clips = open_clips(resolved)
    try:
        listing = _Listing(clips.plan, deal, clips.locate, topology, rank)
        return listing.report(step, steps, epoch, limit)
    finally:
        clips.close()


def plan_index(
    index_path: str | Path,
    *,
    seed: int,
    pixel_frames: int,
    fps: float,
    global_batch_size: int | None = None,
    world_size: int = 1,
    sequence_parallel_size: int = 1,
    random_start: bool = True,
    mixed_shards: int = 1,
    step: int = 0,
    steps: int = 1,
    epoch: int | None = None,
    rank: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return the same as `plan_report` for an index and numbers, before any guard has seen a camera.

    `global_batch_size` None: one sample per data-parallel rank. Raises ConfigError for numbers that do not fit each
    other, DataError for an index that cannot be planned.
    """
    _require_counts(step=step, steps=steps, epoch=epoch, limit=limit)
    if not 0 <= seed < 2**63:
        raise ConfigError(f"data.seed is {seed}, expected 0 to {2**63 - 1}")
    topology = _topology(world_size, sequence_parallel_size, rank)
    ranks = topology.data_world_size
    batch = ranks if global_batch_size is None else global_batch_size
    share, rest = divmod(batch, ranks)
    if rest or share < 1:
        nearest = sorted({max(share, 1) * ranks, (max(share, 0) + 1) * ranks})
        raise ConfigError(
            f"train.global_batch_size is {batch}, expected a multiple of the {ranks} data-parallel ranks, "
            f"such as {' or '.join(map(str, nearest))}"
        )
    index = Index.open(index_path)
    try:
        _require_frames(index, pixel_frames)
        plan = Plan(
            index,
            seed=seed,
            pixel_frames=pixel_frames,
            fps=fps,
            random_start=random_start,
            global_batch_size=batch,
            mixed_shards=mixed_shards,
        )
        deal = BatchPlan(batch, share, 1, ranks)
        listing = _Listing(plan, deal, lambda g: (plan.occurrence_at(g), ()), topology, rank)
        return listing.report(step, steps, epoch, limit)
    finally:
        index.close()


@dataclass(frozen=True)
class _Listing:
    """A plan, how its batches are dealt, how a global index is resolved, and whose share is listed (None: everyone's)."""

    plan: Plan
    deal: BatchPlan
    locate: Locate
    topology: Topology
    rank: int | None

    def report(self, step: int, steps: int, epoch: int | None, limit: int | None) -> dict[str, Any]:
        """Return the listing of whole steps; an epoch begins in a step that may still hold the end of the one before."""
        plan, size = self.plan, self.deal.global_batch_size
        plan.require_readers(self.deal.data_world_size)
        first = step if epoch is None else epoch * plan.occurrences // size
        shown: list[dict[str, Any]] = []
        digests: list[dict[str, Any]] = []
        count, fingerprint = 0, Fingerprint()
        for number in range(first, first + steps):
            found = {index: self.locate(index) for index in range(number * size, (number + 1) * size)}
            digest = batch_digest((index, planned.occurrence_id) for index, (planned, _) in found.items())
            digests.append(
                {"step": number, "completed_steps": number + 1, "batch_digest": digest_text(digest)}
            )
            for record in self._records(number, found):
                fingerprint.add(record)
                count += 1
                if limit is None or len(shown) < limit:
                    shown.append(record)
        return {
            "schema": SCHEMA,
            "index": str(plan.index.path),
            "occurrences": plan.occurrences,
            "seed": plan.seed,
            "global_batch_size": size,
            "mixed_shards": plan.mixed_shards,
            "world_size": self.topology.world_size,
            "data_world_size": self.topology.data_world_size,
            "rank": self.rank,
            "steps": digests,
            "count": count,
            "fingerprint": fingerprint.hexdigest(),
            "shown": shown,
        }

    def _records(
        self, step: int, found: dict[int, tuple[PlannedSample, tuple[str, ...]]]
    ) -> Iterator[dict[str, Any]]:
        ranks = range(self.deal.data_world_size) if self.rank is None else [self.topology.data_rank]
        for data_rank in ranks:
            for part in self.deal.micro_batches(step, data_rank):
                for index in part:
                    planned, rejected = found[index]
                    row = self.plan.index[planned.row_ordinal]
                    yield {
                        "step": step,
                        "global_sample_index": index,
                        "reader_rank": data_rank,
                        "occurrence_id": planned.occurrence_id,
                        "sample_id": row.sample_id,
                        "key": row.key,
                        "shard": row.shard,
                        "row_ordinal": planned.row_ordinal,
                        "repeat_ordinal": planned.repeat_ordinal,
                        "epoch": planned.epoch,
                        "start_frame": planned.start_frame,
                        "source_frame_indices": self.plan.source_frames(planned),
                        "rejected": list(rejected),
                    }


class Fingerprint:
    """BLAKE2s of plans, one after the other: spec operations 4.8 without `worker_id`, on which nothing depends here."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2s(f"{SCHEMA}\n".encode())

    def add(self, record: dict[str, Any]) -> None:
        """Add the nine fields of one plan."""
        fields = (record[name] for name in FINGERPRINTED)
        texts = (",".join(map(str, field)) if isinstance(field, list) else str(field) for field in fields)
        self._digest.update(("\t".join(texts) + "\n").encode())

    def hexdigest(self) -> str:
        """Return the fingerprint of what was added so far, 64 hexadecimal digits."""
        return self._digest.hexdigest()


def _topology(world_size: int, sequence_parallel_size: int, rank: int | None) -> Topology:
    """Return the place of `rank` in a world seen as one node; nodes do not change who reads what."""
    place = rank or 0
    return Topology(place, world_size, place, world_size, sequence_parallel_size)


def _require_frames(index: Index, pixel_frames: int) -> None:
    """Raise DataError for stored latents of clips of another length, whose frames no plan chooses."""
    if isinstance(first := index[0], LatentRow) and len(first.source_frame_indices) != pixel_frames:
        raise DataError(
            f"sample {first.sample_id!r}: its latents show {len(first.source_frame_indices)} frames, data.pixel_frames "
            f"is {pixel_frames}; set it to theirs or encode the clips again"
        )


def _require_counts(**counts: int | None) -> None:
    if counts["epoch"] is not None and counts["step"]:
        raise ConfigError(
            f"step is {counts['step']} and epoch is {counts['epoch']}, expected one of them; an epoch gives its first step"
        )
    for name, value in counts.items():
        least = 1 if name == "steps" else 0
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}, expected at least {least}")
