"""Stored latents as samples: tensors, cameras and caption of a planned occurrence. Thread-safe; numpy only.

Nothing about a stored sample is taken on trust: its row, its manifest, its tensors and the generation's encoder contract
must all say what the run's configuration says. (spec operations 6.1 and 6.5)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solarwm_lib import artifacts
from solarwm_lib.config.geometry import Geometry, condition_channels
from solarwm_lib.data import windows
from solarwm_lib.data.camera import Matrices
from solarwm_lib.data.clip import Cameras, DataConfig, caption_of, label, parse_manifest
from solarwm_lib.data.failures import reading, settle
from solarwm_lib.data.index import LatentRow, RawRow, read_index
from solarwm_lib.data.sampling import Plan, PlannedSample, frame_offsets
from solarwm_lib.data.tensors import DTYPE_NAMES, StoredTensor, parse_safetensors
from solarwm_lib.data.transport import open_latent_shards
from solarwm_lib.preencode.contract import CAMERA_CONVENTION, EncoderContract
from solarwm_lib.runtime.errors import ArtifactError, DataError

INDEX_SCHEMA = "solarwm.latents.index.v1"
INDEX_FOLDER = "index"
CONTRACT = "encoder-contract.json"
CAPTION_SOURCE, CAMERA_SOURCE = "frozen", "preserve"


def read_generation(latents_root: str | Path) -> artifacts.Artifact:
    """Return the merged index of the generation at `latents_root`; DataError if it is absent, unfinished or damaged."""
    try:
        return artifacts.read(Path(latents_root) / INDEX_FOLDER, INDEX_SCHEMA)
    except ArtifactError as error:
        raise DataError(
            f"data.latents_root: {error}; run `solarwm preencode` and `solarwm merge-latents`, or change data.latents_root"
        ) from None


@dataclass(frozen=True)
class LatentSample:
    """One stored clip. `tensors`: `latents` [T,C,h,w], `prompt_embeds` [L,D] and, for A14B, `i2v_y` [T,4+C,h,w]."""

    sample_id: str
    occurrence_id: str
    row_ordinal: int
    start_frame: int
    tensors: dict[str, StoredTensor]
    w2c: Matrices  # float32 [T, 4, 4], relative to the first frame
    intrinsics: NDArray[np.float32]  # [3, 3], normalised by width and height
    caption: str
    fps: float


class LatentClips:
    """Samples of a latent generation, as `RawClips` for training: `locate`, `load`, `prefetch`, `check`, `close`.

    `latents_root` holds the merged index of `split` in `index/` and the shards, unless `data.transport.latents_root` says
    where these are. `geometry`, `text_length` and `text_dim` are those of the run's model:
    a generation encoded for another one is refused when it is opened. Raises DataError.
    """

    def __init__(
        self,
        latents_root: str | Path,
        data: DataConfig,
        *,
        family: str,
        geometry: Geometry,
        text_length: int,
        text_dim: int,
        global_batch_size: int = 1,
        intrinsics_mode: str = "wan_fixed",
        split: str = "train",
    ) -> None:
        root = Path(latents_root)
        self.contract = read_contract(root)
        self._digest = self.contract.digest
        _check_contract(self.contract, data, family, geometry, (text_length, text_dim))
        self.rows = read_index(_index_path(root, split))
        self._require_latent(self.rows[0])
        self.plan = Plan(
            self.rows,
            seed=data.seed,
            pixel_frames=data.pixel_frames,
            fps=data.fps,
            random_start=data.random_start,
            global_batch_size=global_batch_size,
            mixed_shards=data.mixed_shards,
        )
        self._data = data
        self._cameras = Cameras(data, family, intrinsics_mode)
        self._shards = open_latent_shards(data, root)

    def __len__(self) -> int:
        return len(self.rows)

    def locate(self, global_sample_index: int) -> tuple[PlannedSample, tuple[str, ...]]:
        """Return what training reads at a global index, and the guards' messages of the clips it stands in for."""
        settled = settle(self.plan, global_sample_index, self._check_camera)
        return settled.planned, settled.rejected

    def load(self, planned: PlannedSample) -> LatentSample:
        """Return the stored clip of a planned sample.

        Raises CameraGuardError if its camera leaves the guards, SampleFailure with its reason if it cannot be read or
        anything about it contradicts the row, the contract or the configuration.
        """
        row = self._row(planned.row_ordinal)
        stored = self._read(row, (row.camera_member, row.manifest_member, row.preencoded_member))
        manifest = parse_manifest(row, stored[row.manifest_member])
        w2c, intrinsics = self._cameras.read(
            row, stored[row.camera_member], manifest.get("camera"), row.source_frame_indices
        )
        with reading("tensors"):
            check_row(row, self._data)
            self._check_block(row, manifest)
            tensors = self._tensors(row, stored[row.preencoded_member])
        return LatentSample(
            sample_id=row.sample_id,
            occurrence_id=planned.occurrence_id,
            row_ordinal=planned.row_ordinal,
            start_frame=planned.start_frame,
            tensors=tensors,
            w2c=w2c,
            intrinsics=intrinsics,
            caption=caption_of(row, manifest),
            fps=self._data.fps,
        )

    def prefetch(self, global_sample_indices: Sequence[int]) -> None:
        """Have the shards that follow these places of the plan staged, if there is a shard cache."""
        transport = self._data.transport
        if transport.cache_dir and transport.prefetch_shards:
            self._shards.prefetch(
                self.plan.shards_ahead(list(global_sample_indices), transport.prefetch_shards)
            )

    def check(self) -> None:
        """Compare every row with the contract and every shard with the index, without reading any content."""
        self._shards.check(self._checked_rows())

    def close(self) -> None:
        """Close the shards and the index."""
        self._shards.close()
        self.rows.close()

    def _checked_rows(self) -> Iterator[LatentRow]:
        for row in self.rows:
            latent = self._require_latent(row)
            check_row(latent, self._data)
            yield latent

    def _row(self, ordinal: int) -> LatentRow:
        return self._require_latent(self.rows[ordinal])

    def _require_latent(self, row: RawRow | LatentRow) -> LatentRow:
        if not isinstance(row, LatentRow):
            raise DataError(
                f"{label(row)}: a row of raw clips, expected stored latents; set data.latents_root to a latent "
                "generation or data.encoding to online"
            )
        if row.encoder_contract_digest != self._digest:
            raise DataError(
                f"{label(row)}: encoder_contract_digest is {row.encoder_contract_digest[:16]}, {CONTRACT} of the "
                f"generation has {self._digest[:16]}; index and contract do not belong together, merge again"
            )
        return row

    def _read(self, row: LatentRow, names: Sequence[str]) -> dict[str, bytes]:
        with reading("shard"):
            return self._shards.read_many(row, names)

    def _check_camera(self, planned: PlannedSample) -> None:
        """Raise CameraGuardError if the clip leaves the guards; with both guards off nothing is read."""
        if self._cameras.guarded:
            row = self._row(planned.row_ordinal)
            stored = self._read(row, (row.camera_member, row.manifest_member))
            attestation = parse_manifest(row, stored[row.manifest_member]).get("camera")
            self._cameras.read(row, stored[row.camera_member], attestation, row.source_frame_indices)

    def _check_block(self, row: LatentRow, manifest: Mapping[str, Any]) -> None:
        """Raise DataError unless the manifest's `preencoding` block is that of this row, run and contract."""
        name, data = label(row), self._data
        block = manifest.get("preencoding")
        if not isinstance(block, dict):
            raise DataError(f"{name}: manifest has no 'preencoding' block; expected that of stored latents")
        schema = str(data.latent_schema)
        if block.get("version") not in (schema, schema.replace(".", "_")):
            raise DataError(
                f"{name}: manifest preencoding.version is {block.get('version')!r}, expected {schema!r} "
                "(data.latent_schema)"
            )
        frames = row.source_frame_indices
        shapes = {spec.name: list(spec.shape) for spec in self.contract.stored}
        expected: dict[str, Any] = {
            "source_sample_id": row.source_sample_id,
            "start_frame": frames[0],
            "source_frame_first": frames[0],
            "source_frame_last": frames[-1],
            "pixel_frames": data.pixel_frames,
            "latent_frames": self.contract.latent_frames,
            "target_h": data.height,
            "target_w": data.width,
            "dtype": self.contract.stored[0].dtype,
            "latent_shape": shapes["latents"],
            "prompt_shape": shapes["prompt_embeds"],
            "encoder_contract_digest": self._digest,
            "caption_source": CAPTION_SOURCE,
            "camera_source": CAMERA_SOURCE,
            "window_hash_namespace": windows.namespace(data.pixel_frames),
        }
        if "i2v_y" in shapes:
            expected["i2v_y_shape"] = shapes["i2v_y"]
        if row.dataset is not None:
            expected["source_dataset"] = row.dataset
        if row.members is not None:  # the recorded digest was compared with the bytes when they were read
            expected["tensors_digest"] = row.members[row.preencoded_member].sha256
        for key, value in expected.items():
            if not _same(block.get(key), value):
                raise DataError(
                    f"{name}: manifest preencoding.{key} is {block.get(key)!r}, expected {value!r}; the sample was "
                    "encoded otherwise than this run and its index say, encode it again"
                )
        _check_window(row, block, data.pixel_frames)
        _check_fps(row, manifest)

    def _tensors(self, row: LatentRow, content: bytes) -> dict[str, StoredTensor]:
        """Return the sample's tensors after comparing names, dtypes, shapes and finiteness with the contract."""
        name = f"{label(row)}: {row.preencoded_member}"
        tensors = parse_safetensors(content, name)
        wanted = {spec.name: spec for spec in self.contract.stored}
        if tensors.keys() != wanted.keys():
            raise DataError(
                f"{name}: holds tensors {', '.join(sorted(tensors)) or 'none'}, expected {', '.join(sorted(wanted))}"
            )
        for key, spec in wanted.items():
            tensor = tensors[key]
            if DTYPE_NAMES.get(tensor.dtype) != spec.dtype or tensor.shape != spec.shape:
                raise DataError(
                    f"{name}: {key} is {tensor.describe()}, expected {spec.dtype} {list(spec.shape)}"
                )
            if not tensor.finite():
                raise DataError(f"{name}: {key} holds NaN or infinite values; encode the sample again")
        return tensors


def read_contract(latents_root: Path) -> EncoderContract:
    """Return the encoder contract of a generation; DataError if it is missing or not one."""
    path = latents_root / INDEX_FOLDER / CONTRACT
    try:
        return EncoderContract.from_values(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError, ArtifactError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"{path}: no readable encoder contract ({reason}); data.latents_root must be a merged latent generation"
        ) from None


def check_row(row: LatentRow, data: DataConfig) -> None:
    """Raise DataError unless a row shows exactly the frames that this run's clip has from the row's start."""
    offsets = frame_offsets(data.pixel_frames, row.fps or data.fps, data.fps)
    start = row.source_frame_indices[0]
    if row.source_frame_indices != [start + offset for offset in offsets]:
        raise DataError(
            f"{label(row)}: source_frame_indices are {_range(row.source_frame_indices)}, expected "
            f"{_range([start + offset for offset in offsets])} for data.pixel_frames {data.pixel_frames} at "
            f"{row.fps or data.fps:g} to data.fps {data.fps:g} frames/s; the generation was encoded otherwise"
        )
    if row.num_frames is not None and row.source_frame_indices[-1] >= row.num_frames:
        raise DataError(
            f"{label(row)}: source_frame_indices end at {row.source_frame_indices[-1]}, the video has "
            f"{row.num_frames} frames"
        )


def _range(frames: Sequence[int]) -> str:
    return f"{len(frames)} frames {frames[0]}, {frames[1] if frames[1:] else '-'} ... {frames[-1]}"


def _index_path(root: Path, split: str) -> Path:
    plain = root / INDEX_FOLDER / f"{split}-index.jsonl"
    packed = plain.with_suffix(".jsonl.gz")
    return packed if packed.is_file() and not plain.is_file() else plain


def _check_contract(
    contract: EncoderContract, data: DataConfig, family: str, sizes: Geometry, prompt: tuple[int, int]
) -> None:
    """Raise DataError naming the first setting that the generation was not encoded for."""
    latent = (sizes.latent_height, sizes.latent_width)
    shapes: dict[str, tuple[int | None, ...]] = {
        "latents": (sizes.latent_frames, sizes.latent_channels, *latent),
        "prompt_embeds": prompt,
    }
    if condition := condition_channels(family, sizes.latent_channels):
        shapes["i2v_y"] = (sizes.latent_frames, condition, *latent)
    promised = {spec.name: spec.shape for spec in contract.stored}
    facts = (
        ("model.family", contract.family, family),
        ("data.pixel_frames", contract.pixel_frames, data.pixel_frames),
        ("data.latent_frames", contract.latent_frames, sizes.latent_frames),
        ("data.height", contract.height, data.height),
        ("data.width", contract.width, data.width),
        ("camera convention", contract.camera_convention, CAMERA_CONVENTION),
        ("data.latent_schema", contract.extras.get("latent_schema", data.latent_schema), data.latent_schema),
        ("tensors", sorted(promised), sorted(shapes)),
        *(
            (f"shape of {name} (model.architecture)", promised.get(name), shape)
            for name, shape in shapes.items()
        ),
    )
    for key, there, here in facts:
        if there != here:
            raise DataError(
                f"data.latents_root: {key}: the generation was encoded for {_plain(there)}, this run needs {_plain(here)}; "
                "encode the clips for this configuration or change data.latents_root"
            )


def _check_window(row: LatentRow, block: Mapping[str, Any], pixel_frames: int) -> None:
    """Raise DataError unless the window is the one that the sample's id names, or the hashed one of its source."""
    name, index, count = label(row), block.get("window_index"), block.get("window_count")
    if type(index) is not int or type(count) is not int or not 0 <= index < count:
        raise DataError(f"{name}: manifest preencoding.window_index is {index!r} of window_count {count!r}")
    if windows.split_id(row.sample_id) == (row.source_sample_id, pixel_frames, index):
        return
    start, span = row.source_frame_indices[0], row.source_frame_indices[-1] - row.source_frame_indices[0] + 1
    hashed = (
        windows.hashed_start(row.source_sample_id, row.num_frames, span, pixel_frames)
        if row.num_frames is not None and row.num_frames >= span
        else None
    )
    if (index, count, start) != (0, 1, hashed):
        raise DataError(
            f"{name}: window {index} of {count} at frame {start} is neither named by the id "
            f"({windows.window_id(row.source_sample_id, pixel_frames, index)!r}) nor the hashed window of its source "
            f"(frame {hashed})"
        )


def _check_fps(row: LatentRow, manifest: Mapping[str, Any]) -> None:
    """Raise DataError if row and manifest state different frame rates. (spec operations 4.1.2)"""
    video = manifest.get("video")
    stated = video.get("fps") if isinstance(video, dict) else None
    if row.fps is not None and stated is not None and not _same(stated, row.fps):
        raise DataError(f"{label(row)}: manifest video.fps is {stated!r}, the index says {row.fps!r}")


def _same(found: Any, expected: Any) -> bool:
    """Equality in which true is not 1 and, among numbers, 16 is 16.0."""
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else f"{value}"
