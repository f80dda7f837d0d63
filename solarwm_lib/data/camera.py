"""Camera arrays: loading, rebasing to the first frame, publication guards, the model-side translation transform.

Axes are OpenCV's: x right, y down, z forward. `c2w` maps camera to world coordinates, `w2c` the reverse; every name
carries its direction. Units are metres. Matrices are float32 [..., 4, 4]. Stored arrays of another direction, other
axes or another unit are converted once, while loading, and only as `data.camera_array_key`, `data.camera_axes` and
`data.camera_scale` declare. (spec operations 5, wan22 2.1 and 2.3)
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.config.geometry import frame_law, latent_frames
from solarwm_lib.runtime.errors import ConfigError, DataError

CONVENTION = "authoritative_source_c2w_no_axis_flip"
AUDIT_SECONDS = 10.0
ROTATION_TOLERANCE = 1e-3
IDENTITY_TOLERANCE = 1e-5
FOCAL_TOLERANCE = 0.05
LARGEST_ARRAY_BYTES = 64 << 20  # half a million frames of float64
LARGEST_NORMALISED = 4.0  # a focal length or centre beyond four image sizes is one in pixels
C2W_KEYS = ("c2w", "vipe_c2w")
W2C_KEYS = ("w2c", "vipe_w2c")
RELATIVE_KEY = "relative_w2c"
AXES = ("opencv", "opengl")
FLIP = (1, -1, -1, 1)  # OpenGL to OpenCV camera axes and back: y and z negated
# What a manifest calls the array it attests. Only the first is the release's; `+normalized_K` is LTX-2.5's.
_CONVENTIONS = {
    "c2w": CONVENTION,
    "w2c": "authoritative_source_w2c_no_axis_flip",
    RELATIVE_KEY: "relative_w2c+normalized_K",
}

Matrices = NDArray[np.float32]


class CameraGuardError(DataError):
    """A camera leaves the publication guards: selection and training may skip the clip, everything else may not."""


class CameraConfig(Protocol):
    """What a camera file means and may contain: part of the `data` section of a run."""

    @property
    def camera_array_key(self) -> str: ...
    @property
    def camera_axes(self) -> str: ...
    @property
    def camera_scale(self) -> float: ...
    @property
    def max_relative_translation(self) -> float | None: ...
    @property
    def max_camera_absolute(self) -> float | None: ...


def load_c2w(
    source: bytes | str | Path, key: str, *, axes: str = "opencv", scale: float = 1.0, name: str | None = None
) -> Matrices:
    """Return the absolute camera-to-world matrices of an NPZ, float32 [T, 4, 4], OpenCV axes.

    `key` is the declared array and decides the stored direction: `c2w` and `vipe_c2w` are camera-to-world, `w2c` and
    `vipe_w2c` world-to-camera (inverted here by the rotation transpose). `axes` are the stored camera axes, `scale` turns
    stored translations into metres. Float32 c2w with OpenCV axes and scale 1 is returned bit for bit. `name` labels errors.
    Raises DataError for an unreadable file, a missing key, a wrong shape, non-finite values or a non-rotation, ConfigError
    for an undeclared convention and for `relative_w2c`, which holds no absolute cameras. (spec operations 5.1)
    """
    if key == RELATIVE_KEY:
        raise ConfigError(
            f"data.camera_array_key: found {RELATIVE_KEY!r}, which holds no absolute cameras; expected one of "
            f"{', '.join(C2W_KEYS + W2C_KEYS)}"
        )
    return load_cameras(source, key, axes=axes, scale=scale, name=name)


def load_cameras(
    source: bytes | str | Path, key: str, *, axes: str = "opencv", scale: float = 1.0, name: str | None = None
) -> Matrices:
    """Return camera-to-world matrices up to the choice of the world frame, float32 [T, 4, 4], OpenCV axes.

    As `load_c2w`, and `relative_w2c` too: its world is the first stored camera, whose row must be the identity. Rebasing
    (`relative_c2w`, `relative_w2c`) removes the world frame, so what the network gets is the same either way.
    """
    label = _label(source, name)
    check_declared(key, axes, scale)
    stored = read_matrices(source, key, name=name)
    check_rigid(stored, f"{label}: array {key!r}")
    if key == RELATIVE_KEY and (off := float(np.abs(stored[0] - np.eye(4)).max())) > IDENTITY_TOLERANCE:
        raise DataError(
            f"{label}: array {key!r}: row 0 differs from identity by {off:.3g}, expected cameras relative to the first "
            f"frame (allowed {IDENTITY_TOLERANCE:g}); absolute ones are named w2c (data.camera_array_key)"
        )
    with np.errstate(over="ignore"):
        c2w = to_c2w(stored, key, axes, scale).astype(np.float32)
    if not np.isfinite(c2w).all():
        raise DataError(f"{label}: array {key!r} holds translations beyond float32; check data.camera_scale")
    return c2w


def to_c2w(stored: NDArray, key: str, axes: str = "opencv", scale: float = 1.0) -> NDArray:
    """Return stored rigid matrices [..., 4, 4] as camera-to-world with OpenCV axes and translations times `scale`.

    Direction first, then axes: a change of *camera* axes multiplies camera-to-world on the right, which is the left side of
    the stored world-to-camera. The world of `relative_w2c` is a camera, so there the change multiplies on both sides.
    Whatever needs converting is converted in float64; a float array that needs nothing keeps its dtype and bits.
    """
    if key in C2W_KEYS and axes == "opencv" and scale == 1:
        return stored
    c2w = stored.astype(np.float64)
    if key not in C2W_KEYS:
        c2w = invert_rigid(c2w)
    if axes == "opengl":
        c2w = opengl_to_opencv(c2w)
        if key == RELATIVE_KEY:
            c2w = c2w * np.array(FLIP, np.float64)[:, None]
    c2w[..., :3, 3] *= scale
    return c2w


def read_matrices(source: bytes | str | Path, key: str, *, name: str | None = None) -> NDArray:
    """Return the array `key` of an NPZ as stored: floating point [T, 4, 4], T >= 1, values unchecked.

    Raises DataError for an unreadable file, a missing key, another shape or dtype, or a `vipe_status` other than ok.
    """
    label = _label(source, name)
    arrays, names = _read_npz(source, label, (key, "vipe_status"))
    if key not in arrays:
        raise DataError(
            f"{label}: no array {key!r}, found {names}; "
            "set data.camera_array_key to the stored array, its name decides the direction"
        )
    if key.startswith("vipe_"):
        states = np.atleast_1d(arrays.get("vipe_status", "absent")).ravel()
        found = {value.decode() if isinstance(value, bytes) else str(value) for value in states}
        if found != {"ok"}:
            raise DataError(
                f"{label}: vipe_status is {', '.join(sorted(found)) or 'empty'}, expected ok for array {key!r}"
            )
    array = arrays[key]
    if array.ndim != 3 or array.shape[1:] != (4, 4) or len(array) < 1:
        raise DataError(
            f"{label}: array {key!r} has shape {list(array.shape)}, expected [T, 4, 4] with T >= 1"
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(f"{label}: array {key!r} has dtype {array.dtype}, expected a floating-point array")
    return array


def check_declared(key: str, axes: str, scale: float = 1.0) -> None:
    """Raise ConfigError for an array name, axes or a scale that no run can declare."""
    known = (*C2W_KEYS, *W2C_KEYS, RELATIVE_KEY)
    if key not in known:
        raise ConfigError(f"data.camera_array_key: found {key!r}, expected one of {', '.join(known)}")
    if axes not in AXES:
        raise ConfigError(f"data.camera_axes: found {axes!r}, expected one of {', '.join(AXES)}")
    if not (scale > 0 and math.isfinite(scale)):
        raise ConfigError(f"data.camera_scale: found {scale}, expected a positive number")


def _label(source: bytes | str | Path, name: str | None) -> str:
    return name or (str(source) if isinstance(source, str | Path) else "camera NPZ")


def _read_npz(source: bytes | str | Path, label: str, keys: Sequence[str]) -> tuple[dict[str, NDArray], str]:
    """Return those of the arrays `keys` that the file holds, and all names; other arrays (depth, say) stay unread."""
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with np.load(stream, allow_pickle=False) as archive:
            wanted = [key for key in keys if key in archive.files]
            _check_npz_size(archive.zip, wanted)
            found = {key: np.asarray(archive[key]) for key in wanted}
            return found, ", ".join(sorted(archive.files)) or "none"
    except FileNotFoundError:
        raise DataError(f"{label}: camera file is missing") from None
    except (ValueError, OSError, EOFError, TypeError, NotImplementedError, RuntimeError, MemoryError,
            zlib.error, zipfile.BadZipFile) as error:  # fmt: skip
        # TypeError: of an NPY stream np.load returns a bare array, which is no context manager.
        # MemoryError: of an array header that promises more than any file holds.
        raise DataError(
            f"{label}: not a readable NPZ ({error!s:.200}); write it again or remove the row"
        ) from None


def _check_npz_size(archive: zipfile.ZipFile, keys: Sequence[str]) -> None:
    """Raise ValueError for an array that would unpack to far more than a camera track: a few kilobytes may hold gigabytes."""
    for info in archive.infolist():
        if info.filename.removesuffix(".npy") in keys and info.file_size > LARGEST_ARRAY_BYTES:
            raise ValueError(
                f"array {info.filename!r} has {info.file_size} bytes, expected at most {LARGEST_ARRAY_BYTES}"
            )


def check_rigid(matrices: NDArray, label: str) -> None:
    """Raise DataError unless each [4, 4] is finite, with a right-handed rotation and bottom row 0 0 0 1."""
    finite = np.isfinite(matrices).all(axis=(1, 2))
    if not finite.all():
        raise DataError(
            f"{label}: frame {int(np.argmin(finite))} holds NaN or infinite values, expected finite ones"
        )
    rotation = matrices[:, :3, :3].astype(np.float64)
    skew = np.abs(rotation @ rotation.transpose(0, 2, 1) - np.eye(3)).max(axis=(1, 2))
    if (worst := float(skew.max())) > ROTATION_TOLERANCE:
        raise DataError(
            f"{label}: frame {int(skew.argmax())} is not a rotation (R Rᵀ differs from identity by {worst:.3g}, "
            f"allowed {ROTATION_TOLERANCE:g}); scale or shear must not be stored in the matrix"
        )
    determinant = np.linalg.det(rotation)
    if determinant.min() < 0:
        raise DataError(
            f"{label}: frame {int(determinant.argmin())} is mirrored (determinant -1, expected +1); "
            "flip two axes together, never one (OpenGL to OpenCV negates y and z)"
        )
    bottom = np.abs(matrices[:, 3] - np.array([0, 0, 0, 1], np.float32)).max(axis=1)
    if bottom.max() > IDENTITY_TOLERANCE:
        raise DataError(f"{label}: frame {int(bottom.argmax())} has a bottom row other than 0 0 0 1")


def invert_rigid(matrices: NDArray) -> NDArray:
    """Return the inverse of rigid [..., 4, 4] by the rotation transpose: R' = Rᵀ, t' = -Rᵀ t."""
    inverse = np.zeros_like(matrices)
    rotation_t = np.swapaxes(matrices[..., :3, :3], -1, -2)
    inverse[..., :3, :3] = rotation_t
    inverse[..., :3, 3:] = -(rotation_t @ matrices[..., :3, 3:])
    inverse[..., 3, 3] = 1
    return inverse


def opengl_to_opencv(c2w: NDArray) -> NDArray:
    """Return camera-to-world matrices with y and z of the camera axes negated (its own inverse).

    The flip is a change of *camera* axes, so it multiplies a camera-to-world matrix on the right.
    """
    return c2w * np.array(FLIP, c2w.dtype)


def latent_frame_indices(pixel_frames: int, family: str) -> tuple[int, ...]:
    """Return the pixel index whose camera conditions each latent frame: the first frame of each group.

    Causal stride-s families select {0, 1, 1+s, 1+2s, ...} (Wan s = 4, LTX s = 8); MiniMax-H3 packs 17 pixel frames
    into five latents at 0, 1, 5, 9, 13. Raises ConfigError for a frame count the family's law does not allow.
    (spec operations 5.3)
    """
    return latent_positions(latent_frames(family, pixel_frames), family)


def latent_positions(latents: int, family: str) -> tuple[int, ...]:
    """Return the pixel index whose camera conditions each of `latents` latent frames, clips of any length.

    H3 rollouts of whole chunks are no legal clips but have cameras: 50 latents end at pixel 166. (spec operations 5.3)
    """
    group = frame_law(family).group
    if group == 17:
        return tuple(17 * (latent // 5) + (0, 1, 5, 9, 13)[latent % 5] for latent in range(latents))
    return (0, *(1 + group * latent for latent in range(latents - 1)))


def relative_c2w(c2w: Matrices, indices: Sequence[int], *, name: str = "camera") -> Matrices:
    """Return camera-to-world of the frames `indices` relative to the first of them, float32 [T, 4, 4].

    inv(C2W_0) C2W_i in float32; row 0 is set to the exact identity. (spec wan22 2.1)
    """
    selected = c2w[np.asarray(indices)]
    with np.errstate(over="ignore", invalid="ignore"):
        relative = np.stack([invert_rigid(selected[0]) @ matrix for matrix in selected])
    if np.abs(relative[0] - np.eye(4)).max() > ROTATION_TOLERANCE:
        raise DataError(
            f"{name}: the first frame is not invertible by its transpose; its rotation is not orthonormal"
        )
    relative[0] = np.eye(4)
    if not np.isfinite(relative).all():
        raise DataError(f"{name}: relative translations overflow float32; check data.camera_scale")
    return relative


def relative_w2c(c2w: Matrices, indices: Sequence[int]) -> Matrices:
    """Return first-frame-relative world-to-camera matrices of the frames `indices`, float32 [T, 4, 4].

    Rebasing happens after selection, so the first selected frame is the anchor. (spec wan22 2.1, operations 5.3)
    """
    return invert_rigid(relative_c2w(c2w, indices))


def audit_rows(indices: Sequence[int], fps: float, pixel_frames: int) -> int:
    """Return how many leading rows fall in the audited prefix: pixel index < min(F, max(1, ceil(10 s * fps)))."""
    prefix = min(pixel_frames, max(1, math.ceil(AUDIT_SECONDS * fps)))
    return max(1, sum(index < prefix for index in indices))


def audit(
    relative: Matrices,
    indices: Sequence[int],
    *,
    fps: float,
    pixel_frames: int,
    max_relative_translation: float | None,
    max_camera_absolute: float | None,
    name: str = "camera",
) -> None:
    """Raise CameraGuardError if an audited relative matrix leaves the guards; `None` disables a guard.

    `relative` is the relative camera-to-world [T, 4, 4] of the pixel frames `indices`, in metres and before
    `camera_translation_transform`. (spec operations 5.4)
    """
    audited = relative[: audit_rows(indices, fps, pixel_frames)]
    distance = np.linalg.norm(audited[:, :3, 3], axis=1)
    largest = np.abs(audited).max(axis=(1, 2))
    guards = (
        ("data.max_relative_translation", distance, max_relative_translation, "translation"),
        ("data.max_camera_absolute", largest, max_camera_absolute, "largest matrix entry"),
    )
    for key, values, limit, what in guards:
        if limit is not None and not float(values.max()) <= limit:  # NaN is refused too
            raise CameraGuardError(
                f"{name}: {what} {float(values.max()):.4g} at pixel frame {indices[int(values.argmax())]} "
                f"exceeds {key} = {limit:g} within the first {AUDIT_SECONDS:g} s"
            )


def logd4(w2c: NDArray) -> NDArray:
    """Return matrices with translation t * ln(1 + |t|) / (4 |t|); zero stays zero, the rotation is untouched."""
    translation = w2c[..., :3, 3]
    norm = np.linalg.norm(translation, axis=-1, keepdims=True)
    scale = np.log1p(norm) / (4 * np.where(norm > 0, norm, 1))
    result = w2c.copy()
    result[..., :3, 3] = translation * scale
    return result


def fixed_intrinsics() -> NDArray[np.float32]:
    """Return the normalised intrinsics that every sample of the Wan routes uses, float32 [3, 3].

    fx = 969.69697/1920, fy = 969.69697/1080 in units of image width and height, centre 0.5. (spec wan22 2.1)
    """
    focal = 32000 / 33
    return np.array([[focal / 1920, 0, 0.5], [0, focal / 1080, 0.5], [0, 0, 1]], np.float32)


def clip_intrinsics(
    source: bytes | str | Path, key: str, frame_indices: Sequence[int], *, name: str | None = None
) -> NDArray[np.float32]:
    """Return the normalised intrinsics of a clip for mode `per_clip`, float32 [3, 3].

    The array `key` of the camera file holds fx, fy, cx, cy as [4] or [N, 4], or matrices [3, 3] or [N, 3, 3], divided by image
    width and height; one row is static, otherwise there is one per video frame and the first of `frame_indices` counts.
    Raises DataError for a missing array, values in pixels, focal lengths that are not positive, skew, or a zoom: focal
    lengths that change by more than FOCAL_TOLERANCE within the clip, which one matrix cannot describe. (spec operations 5.6)
    """
    label = f"{_label(source, name)}: array {key!r}"
    arrays, names = _read_npz(source, _label(source, name), (key,))
    if key not in arrays:
        raise DataError(
            f"{label} is missing, found {names}; set data.intrinsics_array_key, or "
            "model.camera_intrinsics_mode: wan_fixed"
        )
    rows = _intrinsic_rows(arrays[key], label)
    if len(rows) > 1:
        if max(frame_indices) >= len(rows):
            raise DataError(f"{label} has {len(rows)} rows, the clip needs row {max(frame_indices)}")
        rows = rows[np.asarray(frame_indices)]
    if not np.isfinite(rows).all():
        raise DataError(f"{label} holds NaN or infinite values, expected finite ones")
    if (largest := float(np.abs(rows).max())) > LARGEST_NORMALISED:
        raise DataError(
            f"{label} holds {largest:g}, which is in pixels, expected at most {LARGEST_NORMALISED:g}; "
            "divide fx and cx by the image width, fy and cy by its height"
        )
    focal = rows[:, :2]
    if focal.min() <= 0:
        raise DataError(
            f"{label} holds the focal length {float(focal.min()):g}, expected a positive one; a negative one mirrors the image"
        )
    if (zoom := float((focal.max(axis=0) / focal.min(axis=0) - 1).max())) > FOCAL_TOLERANCE:
        raise DataError(
            f"{label}: the focal length changes by {zoom:.0%} within the clip, per_clip takes one (allowed "
            f"{FOCAL_TOLERANCE:.0%}); drop the clip or set model.camera_intrinsics_mode: wan_fixed"
        )
    fx, fy, cx, cy = rows[0]
    return np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]], np.float32)


def _intrinsic_rows(array: NDArray, label: str) -> NDArray[np.float64]:
    """Return fx, fy, cx, cy as float64 [N, 4]."""
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(f"{label} has dtype {array.dtype}, expected a floating-point array")
    if array.shape[-1:] == (4,) and array.ndim in (1, 2) and array.size:
        return np.atleast_2d(array).astype(np.float64)
    if array.shape[-2:] != (3, 3) or array.ndim not in (2, 3) or not array.size:
        raise DataError(f"{label} has shape {list(array.shape)}, expected [4], [N, 4], [3, 3] or [N, 3, 3]")
    matrices = array.reshape(-1, 3, 3).astype(np.float64)
    rest = matrices[:, [0, 1, 2, 2, 2], [1, 0, 0, 1, 2]] - (0, 0, 0, 0, 1)
    if np.abs(rest).max() > IDENTITY_TOLERANCE:
        raise DataError(f"{label} is no pinhole: expected no skew and the bottom row 0 0 1")
    return matrices[:, [0, 1, 0, 1], [0, 1, 2, 2]]


def camera_manifest(
    shape: Sequence[int],
    max_relative_translation: float = 20.0,
    max_camera_absolute: float = 20.0,
) -> dict[str, Any]:
    """Return the manifest block that attests a float32 `c2w` NPZ of `shape` [T, 4, 4]. (spec operations 5.1)"""
    return {
        "array_key": "c2w",
        "convention": CONVENTION,
        "dtype": "float32",
        "finite": True,
        "magnitude_audit_seconds": AUDIT_SECONDS,
        "max_camera_abs": max_camera_absolute,
        "max_rel_translation": max_relative_translation,
        "shape": list(shape),
    }


def check_attestation(block: Any, shape: Sequence[int], config: CameraConfig, name: str) -> None:
    """Raise DataError unless a manifest's `camera` block attests the array of `shape` [T, 4, 4] that it comes with.

    The released block speaks of OpenCV camera-to-world. Arrays declared otherwise need a block that says the same:
    `array_key` for another direction, `axes` for OpenGL. Bounds are stated in the stored unit; guards that the run
    disables (null) are not compared with the ones the data was published under. (spec operations 5.1)
    """
    if not isinstance(block, dict):
        raise DataError(
            f"{name}: manifest has no 'camera' block; expected the attestation of its camera array"
        )
    key, axes = config.camera_array_key, config.camera_axes
    direction = key.removeprefix("vipe_")
    expected: dict[str, Any] = {}
    if direction == "c2w" or "convention" in block:
        expected["convention"] = _CONVENTIONS[direction]
    if direction != "c2w" or "array_key" in block:
        expected["array_key"] = key
    if axes != "opencv" or "axes" in block:
        expected["axes"] = axes
    for field, value in expected.items():
        if block.get(field) != value:
            setting = "data.camera_axes" if field == "axes" else "data.camera_array_key"
            raise DataError(
                f"{name}: manifest camera.{field} is {block.get(field)!r}, expected {value!r} for "
                f"data.camera_array_key {key} and data.camera_axes {axes}; declare what is stored ({setting})"
            )
    expected = {
        "dtype": "float32",
        "finite": True,
        "shape": list(shape),
        "magnitude_audit_seconds": AUDIT_SECONDS,
    }
    for field, value in expected.items():
        if block.get(field) != value:
            raise DataError(
                f"{name}: manifest camera.{field} is {block.get(field)!r}, expected {value!r}; manifest and camera file do "
                "not belong together, pack the clip again"
            )
    limits = {
        "max_rel_translation": ("data.max_relative_translation", config.max_relative_translation),
        "max_camera_abs": ("data.max_camera_absolute", config.max_camera_absolute),
    }
    for field, (setting, limit) in limits.items():
        if limit is not None and not _same(block.get(field), limit / config.camera_scale):
            raise DataError(
                f"{name}: manifest camera.{field} is {block.get(field)!r}, expected {limit / config.camera_scale!r}; set "
                f"{setting} to the guard the clips were published under, or to null"
            )


def _same(found: Any, expected: float) -> bool:
    number = isinstance(found, int | float) and not isinstance(found, bool)
    return number and math.isclose(found, expected, rel_tol=1e-9)


def npz_bytes(**arrays: NDArray) -> bytes:
    """Return an uncompressed NPZ of `arrays` whose bytes depend on nothing else (fixed member dates)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), member.getvalue())
    return stream.getvalue()
