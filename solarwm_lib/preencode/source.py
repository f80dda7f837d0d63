"""The raw rows of a generation as work items: which window each is, what decides its tensors, and its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.artifacts import Artifact
from solarwm_lib.config.identity import canonical_json
from solarwm_lib.data import video
from solarwm_lib.data.clip import Cameras, caption_of, label, parse_manifest
from solarwm_lib.data.dataset import check_aspect, read_dataset
from solarwm_lib.data.failures import reading
from solarwm_lib.data.index import Index, RawRow
from solarwm_lib.data.sampling import frame_offsets, last_offset
from solarwm_lib.data.transport import open_shards
from solarwm_lib.data.video import Frames
from solarwm_lib.data.windows import ROLE_FIELDS, Window, check_role, field_of, raw_row, window_of
from solarwm_lib.preencode import contract
from solarwm_lib.runtime.errors import DataError

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.preencode.encode import ClipEncoder


@dataclass(frozen=True)
class Item:
    """One clip to store. `ordinal` counts the training rows, then the test rows; digests are SHA-256."""

    ordinal: int
    split: str
    row: RawRow
    window: Window
    source_frame_indices: tuple[int, ...]
    caption: str
    video_sha256: str
    camera_sha256: str
    manifest_sha256: str
    latents_key: str
    prompt_key: str

    def content(self) -> str:
        """Canonical JSON of all that the stored sample depends on, beside the encoder; says nothing of where bytes lie."""
        row, window = self.row, self.window
        return canonical_json(
            {
                "sample_id": window.sample_id,
                "key": window.key,
                "source_sample_id": window.source_sample_id,
                "window": [window.index, window.count, window.start],
                "split": self.split,
                "dataset": row.dataset,
                "caption": self.caption,
                "kept_tier": kept_tier(row),
                "num_frames": row.num_frames,
                "fps": row.fps,
                "epoch_repeats": row.epoch_repeats,
                "camera": self.camera_sha256,
                "manifest": self.manifest_sha256,
                "latents_key": self.latents_key,
                "prompt_key": self.prompt_key,
            }
        )


def kept_tier(row: RawRow) -> Any:
    """The quality tier of a row, whichever of its two names it has; None if absent."""
    tier = field_of(row, "kept_tier")
    return tier if tier is not None else field_of(row, "tier")


class SourceRows:
    """The training rows of a raw data set followed by its test rows, in index order; a test index may be absent or empty."""

    def __init__(self, resolved: Resolved) -> None:
        data = resolved.config.data
        self.artifact: Artifact = read_dataset(data.root, shards_elsewhere=bool(data.transport.root))
        self._pixel_frames = data.pixel_frames
        self._indexes: list[tuple[str, Index]] = []
        for split, name in (("train", data.train_index), ("test", data.test_index)):
            path = Path(data.root) / name
            if split == "train" or (path.is_file() and path.stat().st_size):
                self._indexes.append((split, Index.open(path)))

    def __len__(self) -> int:
        return sum(len(index) for _, index in self._indexes)

    def facts(self) -> dict[str, Any]:
        """Rows and SHA-256 of each index, by split."""
        return {split: {"rows": len(index), "sha256": index.sha256} for split, index in self._indexes}

    def rows(self, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, str, RawRow, Window]]:
        """Yield (ordinal, split, row, window) of the rows [first, stop).

        Raises DataError for a latent row, a row of another split, or a window of another length.
        """
        offset, stop = 0, len(self) if stop is None else stop
        for split, index in self._indexes:
            for ordinal in range(max(first, offset), min(stop, offset + len(index))):
                row = raw_row(index[ordinal - offset])
                check_role({name: field_of(row, name) for name in ROLE_FIELDS}, split, label(row))
                yield ordinal, split, row, window_of(row, self._pixel_frames)
            offset += len(index)

    def tested_sources(self) -> set[str]:
        """Return the source ids of the test rows."""
        train = sum(len(index) for split, index in self._indexes if split == "train")
        return {window.source_sample_id for _, _, _, window in self.rows(train)}

    def check_splits(self) -> None:
        """Raise DataError for a source clip that lies in both splits, before anything is encoded."""
        if tested := self.tested_sources():
            for _, split, _, window in self.rows():
                check_split(split, window, tested)

    def close(self) -> None:
        """Close the indexes."""
        for _, index in self._indexes:
            index.close()


def check_split(split: str, window: Window, tested: Container[str]) -> None:
    """Raise DataError for a training row whose source is among the tested ones."""
    if split == "train" and window.source_sample_id in tested:
        raise DataError(
            f"sample {window.sample_id!r}: its source {window.source_sample_id!r} is in both splits, expected in one; "
            "remove it from one index"
        )


class RawBytes:
    """Reads what an item is made of. Thread-safe."""

    def __init__(self, resolved: Resolved) -> None:
        config, settings = resolved.config, resolved.config.preencode
        assert settings is not None  # `rules.check` refuses action preencode without the section
        self._data, self._dtype, self._schema = config.data, settings.dtype, str(settings.latent_schema)
        self._text_length = config.model.text_length
        self._shards = open_shards(self._data, self._data.root)
        self._cameras = Cameras(self._data, config.model.family, config.model.camera_intrinsics_mode)

    def item(self, ordinal: int, split: str, row: RawRow, window: Window, encoder: ClipEncoder) -> Item:
        """Return the item of a row. Content is read only where the index records no digest or no caption."""
        data, name = self._data, label(row)
        span = (data.pixel_frames, row.fps or data.fps, data.fps)
        last = window.start + last_offset(*span)
        if row.num_frames is None or last >= row.num_frames:
            raise DataError(
                f"{name}: video has {row.num_frames} frames, the clip needs source frames {window.start} to "
                f"{last}; make windows of this length and rate, or lower data.pixel_frames"
            )
        if row.start_frame is None and last + 1 < row.num_frames:
            raise DataError(
                f"{name}: video has {row.num_frames} frames, the clip spans {last + 1} and the index states no start_frame; "
                "cut the videos into windows (`solarwm data materialize-windows`), or state start_frame"
            )
        indices = tuple(window.start + offset for offset in frame_offsets(*span))
        if row.source_frame_indices is not None and tuple(row.source_frame_indices) != indices:
            raise DataError(
                f"{name}: field 'source_frame_indices' is not {len(indices)} frames from {window.start} at "
                f"{row.fps or data.fps:g} to {data.fps:g} frames/s; set data.fps and data.pixel_frames to the index's"
            )
        caption = row.caption if row.caption is not None else caption_of(row, self.manifest(row))
        video_sha256 = self._digest(row, row.video_member)
        key = contract.latents_key(
            video_sha256=video_sha256,
            source_frame_indices=indices,
            height=data.height,
            width=data.width,
            codec=encoder.latents_identity,
            dtype=self._dtype,
            latent_schema=self._schema,
        )
        return Item(
            ordinal=ordinal,
            split=split,
            row=row,
            window=window,
            source_frame_indices=indices,
            caption=caption,
            video_sha256=video_sha256,
            camera_sha256=self._digest(row, row.camera_member),
            manifest_sha256=self._digest(row, row.manifest_member)
            if row.manifest_member is not None
            else hashlib.sha256(canonical_json(row.manifest).encode()).hexdigest(),
            latents_key=key,
            prompt_key=contract.prompt_key(
                text=encoder.clean(caption),
                encoder=encoder.prompt_identity,
                text_length=self._text_length,
                dtype=self._dtype,
            ),
        )

    def manifest(self, row: RawRow) -> dict[str, Any]:
        """Return the manifest of a row."""
        if row.manifest is not None:
            return row.manifest
        assert row.manifest_member is not None  # RawRow requires one of the two
        return parse_manifest(row, self._read(row, row.manifest_member))

    def camera(self, item: Item, manifest: dict[str, Any]) -> bytes:
        """Return the camera NPZ of an item, checked; CameraGuardError if the clip leaves the guards."""
        stored = self._read(item.row, item.row.camera_member)
        self._cameras.read(item.row, stored, manifest.get("camera"), item.source_frame_indices)
        return stored

    def frames(self, item: Item) -> Frames:
        """Return the frames of an item, uint8 [F,H,W,3]."""
        height, width = self._data.height, self._data.width
        source = self._read(item.row, item.row.video_member)
        with reading("video"):
            check_aspect(source, item.row, height, width)
            return video.decode(source, item.source_frame_indices, name=label(item.row), size=(height, width))

    def close(self) -> None:
        """Close the shards."""
        self._shards.close()

    def _read(self, row: RawRow, name: str) -> bytes:
        with reading("shard"):
            return self._shards.read(row, name)

    def _digest(self, row: RawRow, name: str) -> str:
        if row.members is not None:
            return row.members[name].sha256
        return hashlib.sha256(self._read(row, name)).hexdigest()
