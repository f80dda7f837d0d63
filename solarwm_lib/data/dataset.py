"""Raw clips as samples: frames, cameras, caption of a planned occurrence. Thread-safe; numpy only."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solarwm_lib import artifacts
from solarwm_lib.data import video
from solarwm_lib.data.camera import Matrices
from solarwm_lib.data.clip import Cameras, DataConfig, caption_of, label, parse_manifest
from solarwm_lib.data.failures import SampleFailure, reading, settle
from solarwm_lib.data.index import RawRow, read_index
from solarwm_lib.data.sampling import Plan, PlannedSample
from solarwm_lib.data.transport import open_shards
from solarwm_lib.data.video import Frames
from solarwm_lib.runtime.errors import ArtifactError, DataError

WHOLE_VIDEO_SPANS = 4  # a video up to this many clips long is decoded whole and kept
STRETCH_TOLERANCE = 0.03  # 1280x720 fits 864x480 and 832x480; anything further off needs a declared crop
SHARDS = "shards/"


def read_dataset(root: str | Path, *, shards_elsewhere: bool = False) -> artifacts.Artifact:
    """Return the published data set at `root`; DataError if it is absent, unfinished, or a member is missing or cut.

    With `shards_elsewhere` (data.transport.root is set) its shards need not lie here; those that do are checked.
    """
    try:
        return artifacts.read(root, elsewhere=SHARDS if shards_elsewhere else "")
    except ArtifactError as error:
        raise DataError(f"data.root: {error}; rebuild the data set or change data.root") from None


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


class RawClips:
    """Samples of a raw-WDS dataset: `locate` and `load` by the plan for training, `case` by row and start otherwise.

    `index` is relative to `root`; shards lie where `data.transport` says. `global_batch_size` and `data.mixed_shards`
    shape the order, `intrinsics_mode` is model.camera_intrinsics_mode. Decoded videos are kept up to
    `decoded_cache_gib`, least recently used first out.
    """

    def __init__(
        self,
        root: str | Path,
        index: str | Path,
        data: DataConfig,
        decoded_cache_gib: float = 0.0,
        *,
        family: str = "wan22_ti2v_5b",
        global_batch_size: int = 1,
        intrinsics_mode: str = "wan_fixed",
    ) -> None:
        self.rows = read_index(Path(root) / index)
        self._row(0)  # an index of stored latents is refused before anything is made for it
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
        self._shards = open_shards(data, root)
        self._decoded = _FrameCache(int(decoded_cache_gib * 2**30))

    def __len__(self) -> int:
        return len(self.rows)

    def locate(self, global_sample_index: int) -> tuple[PlannedSample, tuple[str, ...]]:
        """Return what training reads at a global index, and the guards' messages of the clips it stands in for.

        A clip that leaves the camera guards is replaced by a keyed draw, the same on every rank. Only cameras are read.
        """
        settled = settle(self.plan, global_sample_index, self._check_camera)
        return settled.planned, settled.rejected

    def load(self, planned: PlannedSample) -> Sample:
        """Return the clip of a planned sample.

        Raises CameraGuardError if it leaves the guards, SampleFailure with its reason if it cannot be read.
        """
        row = self._row(planned.row_ordinal)
        held = self._decoded.get(planned.row_ordinal)
        stored = self._read(row, () if held is not None else (row.video_member,))
        manifest = self._manifest(row, stored)
        indices = self._source_frames(planned)
        w2c, intrinsics = self._cameras.read(row, stored[row.camera_member], manifest.get("camera"), indices)
        with reading("video"):
            frames = (
                held[indices]
                if held is not None
                else self._frames(row, planned.row_ordinal, indices, stored[row.video_member])
            )
        return Sample(
            sample_id=row.sample_id,
            occurrence_id=planned.occurrence_id,
            row_ordinal=planned.row_ordinal,
            start_frame=planned.start_frame,
            frames=frames,
            w2c=w2c,
            intrinsics=intrinsics,
            caption=caption_of(row, manifest),
            fps=self._data.fps,
        )

    def case(self, row_ordinal: int, start_frame: int) -> Sample:
        """Return the clip of a row at a start frame; CameraGuardError if it leaves the guards."""
        if not 0 <= row_ordinal < len(self.rows):
            raise DataError(f"row {row_ordinal} is outside the index of {len(self.rows)} rows")
        self.plan.check_start(row_ordinal, start_frame)
        sample_id = self.rows[row_ordinal].sample_id
        return self.load(PlannedSample(-1, row_ordinal, 0, 0, start_frame, f"{sample_id}@{start_frame}"))

    def prefetch(self, global_sample_indices: Sequence[int]) -> None:
        """Have the shards that follow these places of the plan staged, if there is a shard cache."""
        count = self._data.transport.prefetch_shards
        if self._data.transport.cache_dir and count:
            self._shards.prefetch(self.plan.shards_ahead(list(global_sample_indices), count))

    def check(self) -> None:
        """Compare every shard with the index, without reading any content. Raises DataError."""
        self._shards.check(self.rows)

    def close(self) -> None:
        """Close the shards and the index."""
        self._shards.close()
        self.rows.close()

    def _row(self, ordinal: int) -> RawRow:
        row = self.rows[ordinal]
        if not isinstance(row, RawRow):
            raise DataError(
                f"{label(row)}: a row of stored latents, expected raw clips; set data.encoding to preencoded and "
                "data.latents_root to its generation"
            )
        return row

    def _source_frames(self, planned: PlannedSample) -> list[int]:
        return [planned.start_frame + offset for offset in self.plan.offsets_of(planned.row_ordinal)]

    def _read(self, row: RawRow, further: Sequence[str]) -> dict[str, bytes]:
        names = [row.camera_member, *further]
        if row.manifest is None:
            assert row.manifest_member is not None  # RawRow requires one of the two
            names.append(row.manifest_member)
        with reading("shard"):
            return self._shards.read_many(row, names)

    def _manifest(self, row: RawRow, stored: dict[str, bytes]) -> dict[str, Any]:
        if row.manifest is not None:
            return row.manifest
        assert row.manifest_member is not None
        return parse_manifest(row, stored[row.manifest_member])

    def _check_camera(self, planned: PlannedSample) -> None:
        """Raise CameraGuardError if the clip leaves the guards; with both guards off nothing is read."""
        if self._cameras.guarded:
            row = self._row(planned.row_ordinal)
            stored = self._read(row, ())
            attestation = self._manifest(row, stored).get("camera")
            self._cameras.read(row, stored[row.camera_member], attestation, self._source_frames(planned))

    def _frames(self, row: RawRow, row_ordinal: int, indices: list[int], source: bytes) -> Frames:
        height, width, name = self._data.height, self._data.width, label(row)
        assert row.num_frames is not None  # Plan refuses rows without it
        whole = row.num_frames * height * width * 3
        short = row.num_frames <= WHOLE_VIDEO_SPANS * (indices[-1] - indices[0] + 1)
        check_aspect(source, row, height, width)
        if whole > self._decoded.capacity or not short:
            return video.decode(source, indices, name=name, size=(height, width))
        frames = video.decode(source, name=name, size=(height, width))
        if len(frames) != row.num_frames:
            raise SampleFailure(
                "video",
                f"{name}: decoded {len(frames)} frames, the index promises {row.num_frames}; rebuild the index",
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


def check_aspect(source: bytes, row: RawRow, height: int, width: int) -> None:
    """Raise DataError if scaling to (height, width) would distort the picture by more than the tolerance.

    Stretching keeps normalised intrinsics exact; cropping would not, so it is never done silently.
    """
    found_height, found_width = row.height, row.width
    if found_height is None or found_width is None:
        first = video.decode(source, [0], name=label(row))
        found_height, found_width = first.shape[1:3]
    distortion = abs((width / height) / (found_width / found_height) - 1)
    if distortion > STRETCH_TOLERANCE:
        raise DataError(
            f"{label(row)}: video is {found_width}x{found_height}, data.width x data.height is "
            f"{width}x{height}: shapes differ by {distortion:.0%}; pack the videos with that size "
            "(`solarwm data pack --height --width`)"
        )
