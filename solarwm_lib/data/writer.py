"""The raw-WDS dataset layout, written through one artifact transaction; used by the tiny world and by `data pack`.

`shards/SPLIT-NNNNNN.tar` with KEY.video.mp4, KEY.camera.npz, KEY.manifest.json, and one `SPLIT-index.jsonl` per split.
(spec operations 4.1, 5.1)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data.camera import camera_manifest, check_rigid, npz_bytes
from solarwm_lib.data.index import Member, RawRow, check_rows, index_bytes
from solarwm_lib.data.shards import ShardWriter, check_key
from solarwm_lib.runtime.errors import DataError

SCHEMA = "solarwm.dataset.raw.v1"
SPLITS = ("train", "test")


class Transaction(Protocol):
    """What the writer needs of `artifacts.Transaction`."""

    def open(self, member: str) -> BinaryIO: ...
    def write_bytes(self, member: str, data: bytes) -> Any: ...


@dataclass(frozen=True)
class Clip:
    """One sample on its way into a shard. `video` is mp4 bytes; `c2w` float32 [T, 4, 4] with T = num_frames."""

    sample_id: str
    key: str
    video: bytes
    c2w: NDArray[np.float32]
    fps: float
    height: int
    width: int
    caption: str
    scene: str
    dataset: str
    intrinsics: NDArray[np.float32] | None = None  # normalised [3, 3]
    start_frame: int | None = None
    epoch_repeats: int = 1
    metadata: dict[str, Any] = field(default_factory=dict)


class RawDatasetWriter:
    """Packs clips into shards of `clips_per_shard` per split; `finish` writes the indexes."""

    def __init__(self, transaction: Transaction, clips_per_shard: int) -> None:
        self._transaction = transaction
        self._splits = {split: _Split(transaction, split, clips_per_shard) for split in SPLITS}

    def add(self, split: str, clip: Clip) -> None:
        """Append a clip to a split. Raises DataError for a bad key, camera or empty video."""
        self._splits[split].add(clip)

    def finish(self) -> dict[str, int]:
        """Close the last shards and write the indexes of both splits; return rows per split.

        Raises DataError if there is no training row or ids repeat, within a split or between the two.
        """
        rows = {split: writer.finish() for split, writer in self._splits.items()}
        if not rows["train"]:
            raise DataError("dataset: no training clip was written, expected at least one")
        check_rows([row for split in SPLITS for row in rows[split]], "dataset")
        for split in SPLITS:
            self._transaction.write_bytes(f"{split}-index.jsonl", index_bytes(rows[split]))
        return {split: len(rows[split]) for split in SPLITS}


class _Split:
    def __init__(self, transaction: Transaction, name: str, clips_per_shard: int) -> None:
        self._transaction, self._name, self._limit = transaction, name, clips_per_shard
        self._rows: list[RawRow] = []
        self._pending: list[dict[str, Any]] = []
        self._stream: BinaryIO | None = None
        self._writer: ShardWriter | None = None
        self._shards = 0

    def add(self, clip: Clip) -> None:
        check_key(clip.key)
        check_rigid(clip.c2w, f"sample {clip.sample_id!r}: camera")
        if self._writer is None:
            self._stream = self._transaction.open(self._shard_name())
            self._writer = ShardWriter(self._stream)
        payloads = {
            "camera.npz": _camera(clip),
            "manifest.json": json.dumps(sample_manifest(clip), sort_keys=True, ensure_ascii=False).encode(),
            "video.mp4": clip.video,
        }
        members = {f"{clip.key}.{suffix}": data for suffix, data in payloads.items()}
        records = {name: self._writer.add(name, data) for name, data in members.items()}
        self._pending.append(_row_fields(clip, self._name, self._shard_name(), records))
        if len(self._pending) >= self._limit:
            self._close_shard()

    def finish(self) -> list[RawRow]:
        self._close_shard()
        return self._rows

    def _shard_name(self) -> str:
        return f"shards/{self._name}-{self._shards:06d}.tar"

    def _close_shard(self) -> None:
        if self._writer is None or self._stream is None:
            return
        size, digest = self._writer.finish()
        self._stream.close()
        identity = {"shard_size": size, "shard_digest": digest}
        self._rows += [RawRow.model_validate(fields | identity) for fields in self._pending]
        self._writer, self._stream, self._pending = None, None, []
        self._shards += 1


def sample_manifest(clip: Clip) -> dict[str, Any]:
    """Return the per-sample manifest with the camera attestation that the raw reader requires."""
    frames = len(clip.c2w)
    video = {"num_frames": frames, "fps": clip.fps, "height": clip.height, "width": clip.width}
    return {
        "video": video,
        "prompt": {"text": clip.caption},
        "metadata": {"scene": clip.scene, **clip.metadata},
        "camera": camera_manifest((frames, 4, 4)),
    }


def _camera(clip: Clip) -> bytes:
    arrays: dict[str, NDArray] = {"c2w": clip.c2w.astype(np.float32)}
    if clip.intrinsics is not None:
        arrays["intrinsics"] = clip.intrinsics.astype(np.float32)
    return npz_bytes(**arrays)


def _row_fields(clip: Clip, split: str, shard: str, members: dict[str, Member]) -> dict[str, Any]:
    return {
        "sample_id": clip.sample_id,
        "key": clip.key,
        "shard": shard,
        "split": split,
        "dataset": clip.dataset,
        "caption": clip.caption,
        "num_frames": len(clip.c2w),
        "fps": clip.fps,
        "height": clip.height,
        "width": clip.width,
        "start_frame": clip.start_frame,
        "epoch_repeats": clip.epoch_repeats,
        "video_member": f"{clip.key}.video.mp4",
        "camera_member": f"{clip.key}.camera.npz",
        "manifest_member": f"{clip.key}.manifest.json",
        "members": {name: member.model_dump() for name, member in members.items()},
    }
