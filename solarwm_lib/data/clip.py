"""What raw and latent clips have in common: opening, the manifest, the cameras of the latent frames, the caption."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data import camera
from solarwm_lib.data.camera import CameraConfig, Matrices
from solarwm_lib.data.failures import SampleFailure, reading
from solarwm_lib.data.index import LatentRow, RawRow
from solarwm_lib.data.sampling import Plan, PlannedSample
from solarwm_lib.runtime.errors import DataError

S = TypeVar("S", covariant=True)


class DataConfig(CameraConfig, Protocol):
    """What the readers need of the `data` section of a run."""

    @property
    def root(self) -> str: ...
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
    def mixed_shards(self) -> int: ...
    @property
    def latent_schema(self) -> str | None: ...
    @property
    def intrinsics_array_key(self) -> str: ...
    @property
    def transport(self) -> Any: ...


class Clips(Protocol[S]):
    """A set of clips that training reads by the plan's global sample indices; `load` may be called in any thread."""

    @property
    def plan(self) -> Plan: ...

    def __len__(self) -> int: ...

    def locate(self, global_sample_index: int) -> tuple[PlannedSample, tuple[str, ...]]: ...

    def load(self, planned: PlannedSample) -> S: ...

    def prefetch(self, global_sample_indices: Sequence[int]) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


def label(row: RawRow | LatentRow) -> str:
    """Return how messages name a row."""
    return f"sample {row.sample_id!r}"


def parse_manifest(row: RawRow | LatentRow, stored: bytes) -> dict[str, Any]:
    """Return the manifest member of a row; SampleFailure `shard` unless it is a JSON object."""
    with reading("shard"):
        try:
            manifest = json.loads(stored)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{label(row)}: {row.manifest_member} is not JSON ({error})") from None
        if not isinstance(manifest, dict):
            raise DataError(f"{label(row)}: {row.manifest_member} is not a JSON object")
    return manifest


def caption_of(row: RawRow | LatentRow, manifest: Mapping[str, Any]) -> str:
    """Return the row's caption, else the manifest's prompt text; an absent one is an error, an empty one is not."""
    prompt = manifest.get("prompt")
    text = prompt.get("text") if isinstance(prompt, dict) else None
    caption = row.caption if row.caption is not None else text
    if not isinstance(caption, str):
        raise SampleFailure(
            "caption",
            f"{label(row)}: no caption in the row and no prompt.text in the manifest; write one, it may be empty",
        )
    return caption


class Cameras:
    """Reads the cameras of a clip's latent frames as a run declares them, and applies its guards."""

    def __init__(self, data: DataConfig, family: str, intrinsics_mode: str) -> None:
        self._data, self._intrinsics_mode = data, intrinsics_mode
        self.latent_indices = camera.latent_frame_indices(data.pixel_frames, family)

    @property
    def guarded(self) -> bool:
        """Whether a camera can leave the guards at all."""
        return (self._data.max_relative_translation, self._data.max_camera_absolute) != (None, None)

    def read(
        self, row: RawRow | LatentRow, stored: bytes, attestation: Any, indices: Sequence[int]
    ) -> tuple[Matrices, NDArray[np.float32]]:
        """Return world-to-camera [T, 4, 4] relative to the first frame, and normalised intrinsics [3, 3], float32.

        `stored` is the camera NPZ, `attestation` the manifest's camera block, `indices` the source frames of the clip.
        Raises SampleFailure `camera`, or CameraGuardError if the clip leaves the guards. (spec operations 5.1 - 5.6)
        """
        data, name = self._data, label(row)
        selected = [indices[latent] for latent in self.latent_indices]
        with reading("camera"):
            c2w = camera.load_cameras(
                stored,
                data.camera_array_key,
                axes=data.camera_axes,
                scale=data.camera_scale,
                name=f"{name}: {row.camera_member}",
            )
            if len(c2w) != row.num_frames:
                raise DataError(
                    f"{name}: camera has {len(c2w)} rows, the video {row.num_frames} frames; expected one each"
                )
            camera.check_attestation(attestation, c2w.shape, data, name)
            relative = camera.relative_c2w(c2w, selected)
            camera.audit(
                relative,
                self.latent_indices,
                fps=data.fps,
                pixel_frames=data.pixel_frames,
                max_relative_translation=data.max_relative_translation,
                max_camera_absolute=data.max_camera_absolute,
                name=name,
            )
            return camera.invert_rigid(relative), self._intrinsics(stored, selected, name)

    def _intrinsics(self, stored: bytes, selected: Sequence[int], name: str) -> NDArray[np.float32]:
        if self._intrinsics_mode == "wan_fixed":
            return camera.fixed_intrinsics()
        return camera.clip_intrinsics(stored, self._data.intrinsics_array_key, selected, name=name)
