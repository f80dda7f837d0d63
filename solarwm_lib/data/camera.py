"""Camera arrays: loading, rebasing to the first frame, publication guards, the model-side translation transform.

Axes are OpenCV's: x right, y down, z forward. `c2w` maps camera to world coordinates, `w2c` the reverse; every name
carries its direction. Units are metres. Matrices are float32 [..., 4, 4]. (spec operations 5, wan22 2.1 and 2.3)
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.config.geometry import frame_law, latent_frames
from solarwm_lib.runtime.errors import ConfigError, DataError

CONVENTION = "authoritative_source_c2w_no_axis_flip"
AUDIT_SECONDS = 10.0
ROTATION_TOLERANCE = 1e-3
IDENTITY_TOLERANCE = 1e-5
C2W_KEYS = ("c2w", "vipe_c2w")
W2C_KEYS = ("w2c", "vipe_w2c")

Matrices = NDArray[np.float32]


class CameraGuardError(DataError):
    """A camera leaves the publication guards: selection and training may skip the clip, everything else may not."""


def load_c2w(source: bytes | str | Path, key: str, *, name: str | None = None) -> Matrices:
    """Return the absolute camera-to-world matrices of an NPZ, float32 [T, 4, 4].

    `key` is the declared array and decides the stored direction: `c2w` and `vipe_c2w` are camera-to-world, `w2c` and
    `vipe_w2c` world-to-camera (inverted here by the rotation transpose). `name` labels errors.
    Raises DataError for an unreadable file, a missing key, a wrong shape, non-finite values or a non-rotation.
    """
    label = name or (str(source) if isinstance(source, str | Path) else "camera NPZ")
    if key not in C2W_KEYS + W2C_KEYS:
        raise ConfigError(
            f"data.camera_array_key: found {key!r}, expected one of {', '.join(C2W_KEYS + W2C_KEYS)} "
            "(arrays of absolute camera matrices)"
        )
    arrays = _read_npz(source, label)
    if key not in arrays:
        raise DataError(
            f"{label}: no array {key!r}, found {', '.join(sorted(arrays)) or 'none'}; "
            "set data.camera_array_key to the stored array, its name decides the direction"
        )
    if key.startswith("vipe_"):
        status = {str(value) for value in np.atleast_1d(arrays.get("vipe_status", "absent")).ravel()}
        if status != {"ok"}:
            raise DataError(
                f"{label}: vipe_status is {', '.join(sorted(status))}, expected ok for array {key!r}"
            )
    return _as_c2w(arrays[key], key, label)


def _read_npz(source: bytes | str | Path, label: str) -> dict[str, NDArray]:
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{label}: camera file is missing") from None
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        # TypeError: of an NPY stream np.load returns a bare array, which is no context manager.
        raise DataError(f"{label}: not a readable NPZ ({error})") from None


def _as_c2w(array: NDArray, key: str, label: str) -> Matrices:
    if array.ndim != 3 or array.shape[1:] != (4, 4) or len(array) < 1:
        raise DataError(
            f"{label}: array {key!r} has shape {list(array.shape)}, expected [T, 4, 4] with T >= 1"
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(f"{label}: array {key!r} has dtype {array.dtype}, expected a floating-point array")
    matrices = array.astype(np.float32)
    check_rigid(matrices, f"{label}: array {key!r}")
    return matrices if key in C2W_KEYS else invert_rigid(matrices)


def check_rigid(matrices: Matrices, label: str) -> None:
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


def invert_rigid(matrices: Matrices) -> Matrices:
    """Return the inverse of rigid [..., 4, 4] by the rotation transpose: R' = Rᵀ, t' = -Rᵀ t."""
    inverse = np.zeros_like(matrices)
    rotation_t = np.swapaxes(matrices[..., :3, :3], -1, -2)
    inverse[..., :3, :3] = rotation_t
    inverse[..., :3, 3:] = -(rotation_t @ matrices[..., :3, 3:])
    inverse[..., 3, 3] = 1
    return inverse


def opengl_to_opencv(c2w: Matrices) -> Matrices:
    """Return camera-to-world matrices with y and z of the camera axes negated (its own inverse).

    The flip is a change of *camera* axes, so it multiplies a camera-to-world matrix on the right.
    """
    return c2w * np.array([1, -1, -1, 1], c2w.dtype)


def latent_frame_indices(pixel_frames: int, family: str) -> tuple[int, ...]:
    """Return the pixel index whose camera conditions each latent frame: the first frame of each group.

    Causal stride-s families select {0, 1, 1+s, 1+2s, ...} (Wan s = 4, LTX s = 8); MiniMax-H3 packs 17 pixel frames
    into five latents at 0, 1, 5, 9, 13. Raises ConfigError for a frame count the family's law does not allow.
    (spec operations 5.3)
    """
    latents, group = latent_frames(family, pixel_frames), frame_law(family).group
    if group == 17:
        return tuple(17 * (latent // 5) + (0, 1, 5, 9, 13)[latent % 5] for latent in range(latents))
    return (0, *(1 + group * latent for latent in range(latents - 1)))


def relative_c2w(c2w: Matrices, indices: Sequence[int]) -> Matrices:
    """Return camera-to-world of the frames `indices` relative to the first of them, float32 [T, 4, 4].

    inv(C2W_0) C2W_i in float32; row 0 is set to the exact identity. (spec wan22 2.1)
    """
    selected = c2w[np.asarray(indices)]
    relative = np.stack([invert_rigid(selected[0]) @ matrix for matrix in selected])
    if np.abs(relative[0] - np.eye(4)).max() > ROTATION_TOLERANCE:
        raise DataError(
            "camera: the first frame is not invertible by its transpose; its rotation is not orthonormal"
        )
    relative[0] = np.eye(4)
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

    `relative` is the unscaled relative camera-to-world [T, 4, 4] of the pixel frames `indices`. (spec operations 5.4)
    """
    audited = relative[: audit_rows(indices, fps, pixel_frames)]
    distance = np.linalg.norm(audited[:, :3, 3], axis=1)
    largest = np.abs(audited).max(axis=(1, 2))
    guards = (
        ("data.max_relative_translation", distance, max_relative_translation, "translation"),
        ("data.max_camera_absolute", largest, max_camera_absolute, "largest matrix entry"),
    )
    for key, values, limit, what in guards:
        if limit is not None and float(values.max()) > limit:
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


def camera_manifest(
    shape: Sequence[int], max_relative_translation: float = 20.0, max_camera_absolute: float = 20.0
) -> dict:
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


def npz_bytes(**arrays: NDArray) -> bytes:
    """Return an uncompressed NPZ of `arrays` whose bytes depend on nothing else (fixed member dates)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), member.getvalue())
    return stream.getvalue()
