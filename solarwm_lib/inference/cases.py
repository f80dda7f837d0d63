"""A frozen case as data: its first frame and cameras for any horizon, and the frames it can be compared with.

Nothing is decoded before it is needed and nothing is kept: a pass reads the video of one case at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from solarwm_lib.config.geometry import pixel_frames
from solarwm_lib.data import camera, video
from solarwm_lib.data.clip import Cameras, caption_of, label, parse_manifest
from solarwm_lib.data.dataset import check_aspect
from solarwm_lib.data.failures import reading
from solarwm_lib.data.index import RawRow, read_index
from solarwm_lib.data.sampling import frame_offsets
from solarwm_lib.data.transport import open_shards
from solarwm_lib.inference import horizon
from solarwm_lib.inference.plan import index_path
from solarwm_lib.runtime.errors import DataError

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved


@dataclass(frozen=True)
class Case:
    """What a case is generated from: uint8 `first_frame` [H,W,3], float32 `w2c` [T,4,4], `intrinsics` [3,3], the prompt.

    `camera_frames` counts the leading latents whose camera the track has. Behind it the last of them is repeated, at
    camera length the last camera of the track.
    """

    prompt: str
    first_frame: np.ndarray
    w2c: np.ndarray
    intrinsics: np.ndarray
    camera_frames: int


class Cases:
    """Reads the cases of a plan from the held-out clips. The plan has applied the validation guards: none are applied here."""

    def __init__(self, resolved: Resolved) -> None:
        self._path = index_path(resolved)
        self.rows = read_index(self._path)
        self._config = resolved.config
        self._cover = horizon.mode_of(resolved.config) == horizon.CAMERA
        self._data = resolved.config.data.model_copy(
            update={"max_relative_translation": None, "max_camera_absolute": None}
        )
        self._shards = open_shards(self._data, self._data.root)

    def read(self, case: Mapping[str, Any], latent_frames: int) -> Case:
        """Return a case for `latent_frames`; DataError if the data no longer are what the plan froze."""
        row = self._row(case)
        stored = self._read(row, row.camera_member, row.video_member)
        manifest = self._manifest(row, stored)
        prompt = caption_of(row, manifest)
        _check(case, "sample_id", row.sample_id)
        _check(case, "prompt", prompt)
        w2c, intrinsics, known = self._cameras(case, row, stored, manifest, latent_frames)
        with reading("video"):
            first = self._decoded(row, stored[row.video_member], [case["start_frame"]])[0]
        return Case(prompt, first, w2c, intrinsics, known)

    def truth_frames(self, case: Mapping[str, Any], frames: int) -> int:
        """Return how many of the first `frames` output frames of a case the source has."""
        return len(self._source(case, self._row(case), frames))

    def truth(self, case: Mapping[str, Any], frames: int, first: int = 0) -> np.ndarray:
        """Return the recorded frames `first`.. of a case up to `frames`, or fewer where the source ends: uint8 [n,H,W,3]."""
        row = self._row(case)
        indices = self._source(case, row, frames)[first:]
        if not indices:
            return np.empty((0, self._data.height, self._data.width, 3), np.uint8)
        stored = self._read(row, row.video_member)
        with reading("video"):
            return self._decoded(row, stored[row.video_member], indices)

    def source_c2w(self, case: Mapping[str, Any], frames: int) -> np.ndarray:
        """Return the source's own camera-to-world float64 [frames,4,4], neither rebased nor compressed. (spec wan22 6.5)

        Frames behind the end of the track repeat its last camera.
        """
        row, data = self._row(case), self._data
        stored = self._read(row, row.camera_member)[row.camera_member]
        matrices = camera.read_matrices(stored, data.camera_array_key, name=label(row)).astype(np.float64)
        c2w = camera.to_c2w(matrices, data.camera_array_key, data.camera_axes, data.camera_scale)
        offsets = frame_offsets(frames, row.fps or data.fps, data.fps)
        return c2w[np.minimum(case["start_frame"] + np.array(offsets), len(c2w) - 1)]

    def close(self) -> None:
        """Close the shards and the index."""
        self._shards.close()
        self.rows.close()

    def _row(self, case: Mapping[str, Any]) -> RawRow:
        ordinal = case["row_ordinal"]
        if not 0 <= ordinal < len(self.rows):
            raise DataError(f"{self._path}: has {len(self.rows)} rows, the frozen plan names row {ordinal}")
        row = self.rows[ordinal]
        if not isinstance(row, RawRow) or row.num_frames is None:
            raise DataError(
                f"{label(row)}: expected a raw clip with num_frames; point data.root at raw clips"
            )
        if case["start_frame"] >= row.num_frames:
            raise DataError(
                f"slot {case['slot']}: the frozen plan starts at frame {case['start_frame']}, {label(row)} has "
                f"{row.num_frames}; the test index changed after the plan was frozen"
            )
        return row

    def _source(self, case: Mapping[str, Any], row: RawRow, frames: int) -> list[int]:
        """Return the source indices of the first `frames` output frames, as far as the source has them."""
        assert row.num_frames is not None
        offsets = frame_offsets(frames, row.fps or self._data.fps, self._data.fps)
        indices = (case["start_frame"] + offset for offset in offsets)
        return [index for index in indices if index < row.num_frames]

    def _cameras(
        self,
        case: Mapping[str, Any],
        row: RawRow,
        stored: Mapping[str, bytes],
        manifest: Mapping[str, Any],
        latent_frames: int,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return w2c and intrinsics, and how many latents have a camera of their own. (spec wan22 2.4)"""
        model = self._config.model
        frames = pixel_frames(model.family, latent_frames)
        reader = Cameras(
            self._data.model_copy(update={"pixel_frames": frames}),
            model.family,
            model.camera_intrinsics_mode,
        )
        source = self._source(case, row, frames)
        known = sum(position < len(source) for position in reader.latent_indices)
        assert row.num_frames is not None
        last = row.num_frames - 1 if self._cover else source[reader.latent_indices[known - 1]]
        indices = source + [last] * (frames - len(source))
        w2c, intrinsics = reader.read(row, stored[row.camera_member], manifest.get("camera"), indices)
        return w2c, intrinsics, known

    def _read(self, row: RawRow, *names: str) -> dict[str, bytes]:
        wanted = [*names, *([row.manifest_member] if row.manifest_member and row.manifest is None else [])]
        with reading("shard"):
            return self._shards.read_many(row, wanted)

    def _manifest(self, row: RawRow, stored: Mapping[str, bytes]) -> dict[str, Any]:
        if row.manifest is not None:
            return row.manifest
        assert row.manifest_member is not None  # RawRow requires one of the two
        return parse_manifest(row, stored[row.manifest_member])

    def _decoded(self, row: RawRow, source: bytes, indices: Sequence[int]) -> np.ndarray:
        height, width = self._data.height, self._data.width
        check_aspect(source, row, height, width)
        return video.decode(source, indices, name=label(row), size=(height, width))


def _check(case: Mapping[str, Any], name: str, value: Any) -> None:
    if value != case[name]:
        raise DataError(
            f"slot {case['slot']}: {name} is {value!r}, the frozen plan says {case[name]!r}; the test index changed "
            "after the plan was frozen"
        )
