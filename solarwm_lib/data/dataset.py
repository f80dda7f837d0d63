"""Raw clips as samples: frames, cameras, caption of a planned occurrence. Thread-safe; numpy only."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from solarwm_lib import artifacts
from solarwm_lib.data import camera, video
from solarwm_lib.data.camera import CameraGuardError, Matrices
from solarwm_lib.data.index import RawRow, read_index
from solarwm_lib.data.sampling import Plan, PlannedSample
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.video import Frames
from solarwm_lib.runtime.errors import ArtifactError, DataError

GUARD_ATTEMPTS = 16
WHOLE_VIDEO_SPANS = 4  # a video up to this many clips long is decoded whole and kept
STRETCH_TOLERANCE = 0.03  # 1280x720 fits 864x480 and 832x480; anything further off needs a declared crop


def read_dataset(root: str | Path) -> artifacts.Artifact:
    """Return the published data set at `root`; DataError if it is absent, unfinished, or a shard is missing or cut."""
    try:
        return artifacts.read(root)
    except ArtifactError as error:
        raise DataError(f"data.root: {error}; rebuild the data set or change data.root") from None


class DataConfig(Protocol):
    """What the reader needs of the `data` section of a run."""

    @property
    def pixel_frames(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def fps(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def random_start(self) -> bool: ...
    @property
    def camera_array_key(self) -> str: ...
    @property
    def max_relative_translation(self) -> float | None: ...
    @property
    def max_camera_absolute(self) -> float | None: ...


@dataclass(frozen=True)
class Sample:
    """One training or validation clip."""

    sample_id: str
    occurrence_id: str
    row_ordinal: int
    start_frame: int
    frames: Frames  # uint8 [F, H, W, 3]
    w2c: Matrices  # float32 [T, 4, 4], relative to the first frame
    intrinsics: NDArray[np.float32]  # [3, 3], normalised by width and height
    caption: str
    fps: float
    rejected: tuple[str, ...] = ()  # guard messages of the clips this one stands in for


class RawClips:
    """Samples of a raw-WDS dataset: `sample` by global index for training, `case` by row and start for validation.

    `index` is relative to `root`. Decoded videos are kept up to `decoded_cache_gib`, least recently used first out.
    """

    def __init__(
        self,
        root: str | Path,
        index: str | Path,
        data: DataConfig,
        decoded_cache_gib: float = 0.0,
        *,
        family: str = "wan22_ti2v_5b",
    ) -> None:
        self.rows: list[RawRow] = read_index(Path(root) / index)
        self.plan = Plan(
            self.rows,
            seed=data.seed,
            pixel_frames=data.pixel_frames,
            fps=data.fps,
            random_start=data.random_start,
        )
        self._data = data
        self._latent_indices = camera.latent_frame_indices(data.pixel_frames, family)
        self._shards = ShardReader(root)
        self._decoded = _FrameCache(int(decoded_cache_gib * 2**30))

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, global_sample_index: int) -> Sample:
        """Return the sample of a global index.

        A clip that leaves the camera guards is replaced by a keyed draw, the same on every rank, and named in
        `rejected`; after GUARD_ATTEMPTS rejections DataError. Every other failure is raised as it is.
        """
        rejected: list[str] = []
        planned = self.plan.occurrence_at(global_sample_index)
        while True:
            try:
                return self._load(planned, tuple(rejected))
            except CameraGuardError as error:
                rejected.append(str(error))
            if len(rejected) == GUARD_ATTEMPTS:
                raise DataError(
                    f"{GUARD_ATTEMPTS} clips in a row leave the camera guards, last: {rejected[-1]}; "
                    "raise data.max_relative_translation or data.max_camera_absolute, or clean the index"
                )
            planned = self.plan.replacement(global_sample_index, len(rejected))

    def case(self, row_ordinal: int, start_frame: int) -> Sample:
        """Return the clip of a row at a start frame; CameraGuardError if it leaves the guards."""
        if not 0 <= row_ordinal < len(self.rows):
            raise DataError(f"row {row_ordinal} is outside the index of {len(self.rows)} rows")
        self.plan.check_start(row_ordinal, start_frame)
        sample_id = self.rows[row_ordinal].sample_id
        return self._load(PlannedSample(-1, row_ordinal, 0, 0, start_frame, f"{sample_id}@{start_frame}"), ())

    def check(self) -> None:
        """Compare every shard with the index, without reading any content. Raises DataError."""
        self._shards.check(self.rows)

    def close(self) -> None:
        """Close the shards."""
        self._shards.close()

    def _load(self, planned: PlannedSample, rejected: tuple[str, ...]) -> Sample:
        row = self.rows[planned.row_ordinal]
        manifest = self._manifest(row)
        indices = [planned.start_frame + offset for offset in self.plan.offsets[planned.row_ordinal]]
        w2c = self._cameras(row, manifest, indices)
        return Sample(
            sample_id=row.sample_id,
            occurrence_id=planned.occurrence_id,
            row_ordinal=planned.row_ordinal,
            start_frame=planned.start_frame,
            frames=self._frames(row, planned.row_ordinal, indices),
            w2c=w2c,
            intrinsics=camera.fixed_intrinsics(),
            caption=_caption(row, manifest),
            fps=self._data.fps,
            rejected=rejected,
        )

    def _manifest(self, row: RawRow) -> dict[str, Any]:
        if row.manifest is not None:
            return row.manifest
        assert row.manifest_member is not None  # RawRow requires one of the two
        try:
            manifest = json.loads(self._shards.read(row, row.manifest_member))
        except ValueError as error:
            raise DataError(
                f"sample {row.sample_id!r}: {row.manifest_member} is not JSON ({error})"
            ) from None
        if not isinstance(manifest, dict):
            raise DataError(f"sample {row.sample_id!r}: {row.manifest_member} is not a JSON object")
        return manifest

    def _cameras(self, row: RawRow, manifest: dict[str, Any], indices: list[int]) -> Matrices:
        """Return the relative world-to-camera matrices [T, 4, 4] of the latent frames, after the guards."""
        data, name = self._data, f"sample {row.sample_id!r}"
        c2w = camera.load_c2w(
            self._shards.read(row, row.camera_member),
            data.camera_array_key,
            name=f"{name}: {row.camera_member}",
        )
        if len(c2w) != row.num_frames:
            raise DataError(
                f"{name}: camera has {len(c2w)} rows, the video {row.num_frames} frames; expected one each"
            )
        _check_attestation(manifest.get("camera"), c2w, data, name)
        selected = [indices[latent] for latent in self._latent_indices]
        relative = camera.relative_c2w(c2w, selected)
        camera.audit(
            relative,
            self._latent_indices,
            fps=data.fps,
            pixel_frames=data.pixel_frames,
            max_relative_translation=data.max_relative_translation,
            max_camera_absolute=data.max_camera_absolute,
            name=name,
        )
        return camera.invert_rigid(relative)

    def _frames(self, row: RawRow, row_ordinal: int, indices: list[int]) -> Frames:
        height, width = self._data.height, self._data.width
        name = f"sample {row.sample_id!r}"
        assert row.num_frames is not None  # Plan refuses rows without it
        whole = row.num_frames * height * width * 3
        short = row.num_frames <= WHOLE_VIDEO_SPANS * (indices[-1] - indices[0] + 1)
        if (held := self._decoded.get(row_ordinal)) is not None:
            return held[indices]
        source = self._shards.read(row, row.video_member)
        _check_aspect(source, row, height, width)
        if whole > self._decoded.capacity or not short:
            return video.decode(source, indices, name=name, size=(height, width))
        frames = video.decode(source, name=name, size=(height, width))
        if len(frames) != row.num_frames:
            raise DataError(
                f"{name}: decoded {len(frames)} frames, the index promises {row.num_frames}; rebuild the index"
            )
        self._decoded.put(row_ordinal, frames)
        return frames[indices]


class _FrameCache:
    """Decoded videos by row, bounded by bytes; the least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used = 0
        self._held: OrderedDict[int, Frames] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: int) -> Frames | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: int, frames: Frames) -> None:
        with self._lock:
            if key in self._held or frames.nbytes > self.capacity:
                return
            self._held[key] = frames
            self._used += frames.nbytes
            while self._used > self.capacity:
                self._used -= self._held.popitem(last=False)[1].nbytes


def _caption(row: RawRow, manifest: dict[str, Any]) -> str:
    """Return the row's caption, else the manifest's prompt text; an absent one is an error, an empty one is not."""
    prompt = manifest.get("prompt")
    caption = (
        row.caption if row.caption is not None else prompt.get("text") if isinstance(prompt, dict) else None
    )
    if not isinstance(caption, str):
        raise DataError(f"sample {row.sample_id!r}: no caption in the row and no prompt.text in the manifest")
    return caption


def _check_attestation(block: Any, c2w: Matrices, data: DataConfig, name: str) -> None:
    """Raise DataError unless the manifest attests the camera it comes with. (spec operations 5.1)

    Guards that the run disables (null) are not compared with the ones the data was published under.
    """
    if not isinstance(block, dict):
        raise DataError(
            f"{name}: manifest has no 'camera' block; expected the attestation of its camera array"
        )
    expected: dict[str, Any] = {
        "convention": camera.CONVENTION,
        "dtype": "float32",
        "finite": True,
        "shape": list(c2w.shape),
        "magnitude_audit_seconds": camera.AUDIT_SECONDS,
    }
    if data.max_relative_translation is not None:
        expected["max_rel_translation"] = data.max_relative_translation
    if data.max_camera_absolute is not None:
        expected["max_camera_abs"] = data.max_camera_absolute
    if "array_key" in block:
        expected["array_key"] = data.camera_array_key
    for key, value in expected.items():
        if block.get(key) != value:
            raise DataError(f"{name}: manifest camera.{key} is {block.get(key)!r}, expected {value!r}")


def _check_aspect(source: bytes, row: RawRow, height: int, width: int) -> None:
    """Raise DataError if scaling to (height, width) would distort the picture by more than the tolerance.

    Stretching keeps normalised intrinsics exact; cropping would not, so it is never done silently.
    """
    found_height, found_width = row.height, row.width
    if found_height is None or found_width is None:
        first = video.decode(source, [0], name=f"sample {row.sample_id!r}")
        found_height, found_width = first.shape[1:3]
    distortion = abs((width / height) / (found_width / found_height) - 1)
    if distortion > STRETCH_TOLERANCE:
        raise DataError(
            f"sample {row.sample_id!r}: video is {found_width}x{found_height}, data.width x data.height is "
            f"{width}x{height}: shapes differ by {distortion:.0%}; pack the videos with that size "
            "(`solarwm data pack --height --width`)"
        )
