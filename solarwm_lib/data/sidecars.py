"""What stands beside a video in a folder to pack: camera and caption files, and the names both are matched by.

Sidecars of `NAME.ext` are `NAME.camera.npz` (array `c2w`, one row per source frame), `NAME.camera.txt` (RealEstate10K
text) and `NAME.caption.txt`. `NAME.ext.camera.npz` and so on work too and tell `clip.mp4` from `clip.mov`. RealEstate10K
and many captioners both write plain `NAME.txt`, so what that one means must be declared; it is never guessed.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from solarwm_lib.data.camera import invert_rigid
from solarwm_lib.runtime.errors import DataError

CAMERA_NPZ = ".camera.npz"
CAMERA_TEXT = ".camera.txt"
CAPTION_TEXT = ".caption.txt"
PLAIN_TEXT = ".txt"

KEY_LENGTH = 64  # leaves room for `.manifest.json` within the 100 bytes of a USTAR name
MATCH_TOLERANCE_US = 2000  # RealEstate10K rounds frame times to milliseconds
LARGEST_GAP_US = 1_000_000


@dataclass(frozen=True)
class Refusal:
    """A file that is not packed: POSIX path relative to the packed folder, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Source:
    """A candidate video with its sidecars. `key` is unique in the folder and safe in an archive."""

    path: Path
    relative: str
    key: str
    camera: Path | None
    caption: Path | None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.path, self.camera, self.caption) if path is not None)


@dataclass(frozen=True)
class Trajectory:
    """Camera rows over time: microseconds int64[N], w2c float64[N,4,4] (OpenCV axes), intrinsics float64[N,4].

    Intrinsics are fx, fy, cx, cy divided by the width and height of the image.
    """

    timestamps_us: np.ndarray
    w2c: np.ndarray
    intrinsics: np.ndarray


def discover(
    root: Path, exclude: Iterable[Path] = (), plain_text: str | None = None
) -> tuple[list[Source], list[Refusal]]:
    """List the videos under `root` with their sidecars, and the files that are refused by name alone.

    Hidden files and folders and everything under `exclude` are skipped, symbolic links to files are followed. Names match
    after Unicode normalisation, because macOS writes decomposed accents.

    Raises:
        DataError: `root` is no folder or holds no visible file.
    """
    if not root.is_dir():
        raise DataError(
            f"{root}: expected a folder of videos, found {'a file' if root.exists() else 'nothing'}"
        )
    files = {_relative(path, root): path for path in _walk(root, {path.resolve() for path in exclude})}
    if not files:
        raise DataError(f"{root}: no visible file in this folder or below it")
    sidecars = {name: path for name, path in files.items() if _sidecar_owner(name) is not None}
    videos = {name: path for name, path in files.items() if name not in sidecars}
    claims = _claims(videos, sidecars)
    claimants = Counter(path for group in claims.values() for path in group.values())
    keys = unique_keys(videos)
    sources, refusals = [], []
    for name, path in sorted(videos.items()):
        try:
            for sidecar in claims[name].values():
                if claimants[sidecar] > 1:
                    raise DataError(
                        f"{sidecar.name} fits several videos; name it {path.name}{_sidecar_kind(sidecar.name)}"
                    )
            camera, caption = _assign(claims[name], plain_text)
            sources.append(Source(path, name, keys[name], camera, caption))
        except DataError as error:
            refusals.append(Refusal(name, str(error)))
    claimed = {sidecar for group in claims.values() for sidecar in group.values()}
    for name in sorted(set(sidecars) - {_relative(path, root) for path in claimed}):
        if not (plain_text == "ignore" and _sidecar_kind(name) == PLAIN_TEXT):
            refusals.append(
                Refusal(
                    name,
                    f"sidecar without a video: nothing here is named {Path(_sidecar_owner(name) or '').name}.*",
                )
            )
    return sources, refusals


def unique_keys(names: Iterable[str]) -> dict[str, str]:
    """Map relative video names to archive keys: `[A-Za-z0-9_-]`, at most `KEY_LENGTH`, different for different names.

    A name that is already such a key (without its suffix) stays as it is. Any other, and names that differ only in suffix
    or letter case, get eight digits of the name's SHA-256, so a key never depends on the order or number of files.
    """
    stems = {name: name[: -len(Path(name).suffix)] if Path(name).suffix else name for name in names}
    shared = Counter(stem.casefold() for stem in stems.values())
    keys = {}
    for name, stem in stems.items():
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", stem)
        if plain != stem or len(plain) > KEY_LENGTH or shared[stem.casefold()] > 1:
            plain = f"{plain[: KEY_LENGTH - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        keys[name] = plain
    taken = Counter(key.casefold() for key in keys.values())
    for name, key in keys.items():
        if taken[key.casefold()] > 1:
            raise DataError(f"{name}: its key {key} also belongs to another file; rename one of them")
    return keys


def parse_realestate10k(text: str, name: str) -> Trajectory:
    """Read RealEstate10K camera text: a URL or comment line, then 19 numbers a row.

    A row is `timestamp_us fx fy cx cy k1 k2` and the 3x4 world-to-camera matrix row by row, OpenCV axes (x right, y down,
    z forward), intrinsics divided by the image size.

    Raises:
        DataError: names the file and line of the first row that is malformed, distorted, not rigid or out of order.
    """
    rows = []
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        fields = line.split()
        comment = line.startswith("#") or (number == 1 and not _is_number(fields[0]) if fields else True)
        if not comment:
            rows.append(_row(fields, f"{name}: line {number}"))
            if len(rows) > 1 and rows[-1][0] <= rows[-2][0]:
                raise DataError(
                    f"{name}: line {number}: timestamp {rows[-1][0]:.0f} does not follow {rows[-2][0]:.0f}"
                )
    if not rows:
        raise DataError(f"{name}: no camera row; expected a comment line, then rows of 19 numbers")
    table = np.array(rows)
    w2c = np.zeros((len(rows), 4, 4))
    w2c[:, :3] = table[:, 7:].reshape(-1, 3, 4)
    w2c[:, 3, 3] = 1
    return Trajectory(table[:, 0].astype(np.int64), w2c, table[:, 1:5])


def camera_at(
    trajectory: Trajectory, times_us: np.ndarray, interpolate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return c2w float64[F,4,4] and intrinsics float64[F,4] at `times_us` float64[F] of the trajectory's clock.

    Without `interpolate` every time needs a row within 2 ms. With it, the rotation follows the shortest arc and the camera
    centre a straight line between neighbouring rows at most one second apart. Nothing is extrapolated.

    Raises:
        DataError: a frame lies outside the rows, between rows that may not be bridged, or has no row of its own.
    """
    rows = trajectory.timestamps_us.astype(np.float64)
    outside = (times_us < rows[0] - MATCH_TOLERANCE_US) | (times_us > rows[-1] + MATCH_TOLERANCE_US)
    if outside.any():
        frame = int(np.argmax(outside))
        raise DataError(
            f"frame {frame} at {times_us[frame] / 1e6:.3f} s lies outside the camera rows, {rows[0] / 1e6:.3f} to "
            f"{rows[-1] / 1e6:.3f} s, and cameras are never extrapolated; pass --trim-to-camera to keep only the covered "
            "part, or --camera-clock first-row if the rows count from the start of a longer video"
        )
    after = (
        np.clip(np.searchsorted(rows, times_us), 1, len(rows) - 1)
        if len(rows) > 1
        else np.zeros(len(times_us), int)
    )
    before = np.maximum(after - 1, 0)
    nearest = np.where(times_us - rows[before] <= rows[after] - times_us, before, after)
    distance = np.abs(rows[nearest] - times_us)
    c2w = invert_rigid(trajectory.w2c)
    exact = distance <= MATCH_TOLERANCE_US
    if exact.all():
        return c2w[nearest], trajectory.intrinsics[nearest]
    frame = int(np.argmax(~exact))
    if not interpolate:
        raise DataError(
            f"frame {frame} at {times_us[frame] / 1e6:.3f} s has no camera row within {MATCH_TOLERANCE_US / 1000:g} ms, the "
            f"nearest is {distance[frame] / 1000:.1f} ms away; pass --interpolate-camera to interpolate in SE(3)"
        )
    gap = np.where(exact, 0, rows[after] - rows[before])
    if gap.max() > LARGEST_GAP_US:
        frame = int(np.argmax(gap))
        raise DataError(
            f"frame {frame} at {times_us[frame] / 1e6:.3f} s lies in a gap of {gap[frame] / 1e6:.2f} s between camera rows; "
            f"interpolation bridges at most {LARGEST_GAP_US / 1e6:g} s"
        )
    span = np.maximum(rows[after] - rows[before], 1)
    weight = np.clip((times_us - rows[before]) / span, 0, 1)
    weight = np.where(exact, (nearest == after) & (after != before), weight)
    mixed = trajectory.intrinsics[before] + weight[:, None] * (
        trajectory.intrinsics[after] - trajectory.intrinsics[before]
    )
    return interpolate_se3(c2w[before], c2w[after], weight), mixed


def interpolate_se3(a: np.ndarray, b: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Move from a to b, both c2w float64[F,4,4], by `weight` float64[F]: shortest arc for R, straight line for t."""
    relative = np.swapaxes(a[:, :3, :3], 1, 2) @ b[:, :3, :3]
    axis = 0.5 * np.stack(
        [
            relative[:, 2, 1] - relative[:, 1, 2],
            relative[:, 0, 2] - relative[:, 2, 0],
            relative[:, 1, 0] - relative[:, 0, 1],
        ],
        axis=1,
    )
    sine = np.linalg.norm(axis, axis=1)
    angle = np.arctan2(sine, 0.5 * (np.trace(relative, axis1=1, axis2=2) - 1))
    if (angle > 0.75 * np.pi).any():
        raise DataError(
            f"neighbouring camera rows turn by {np.degrees(angle.max()):.0f} degrees; the arc is ambiguous"
        )
    axis = axis / np.maximum(sine, 1e-300)[:, None]
    turn = (angle * weight)[:, None, None]
    cross = np.zeros((len(a), 3, 3))
    cross[:, 0, 1], cross[:, 0, 2], cross[:, 1, 2] = -axis[:, 2], axis[:, 1], -axis[:, 0]
    cross -= np.swapaxes(cross, 1, 2)
    step = np.eye(3) + np.sin(turn) * cross + (1 - np.cos(turn)) * (cross @ cross)
    out = a.copy()
    out[:, :3, :3] = a[:, :3, :3] @ step
    out[:, :3, 3] = a[:, :3, 3] + weight[:, None] * (b[:, :3, 3] - a[:, :3, 3])
    return out


def read_caption(path: Path) -> str:
    """Return the caption in a UTF-8 text file, inner line breaks kept."""
    try:
        caption = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path.name}: expected UTF-8 text, found byte {error.object[error.start]:#04x}"
        ) from error
    if not caption:
        raise DataError(f"{path.name}: the caption is empty")
    return unicodedata.normalize("NFC", caption)


def _walk(root: Path, exclude: set[Path]) -> Iterable[Path]:
    for path in sorted(root.iterdir()):
        if path.name.startswith(".") or path.resolve() in exclude:
            continue
        if path.is_dir():
            if not path.is_symlink():  # a link to a folder may lead back to its parent
                yield from _walk(path, exclude)
        else:
            yield path


def _relative(path: Path, root: Path) -> str:
    return unicodedata.normalize("NFC", path.relative_to(root).as_posix())


def _sidecar_kind(name: str) -> str | None:
    return next(
        (kind for kind in (CAMERA_NPZ, CAMERA_TEXT, CAPTION_TEXT, PLAIN_TEXT) if name.endswith(kind)), None
    )


def _sidecar_owner(name: str) -> str | None:
    kind = _sidecar_kind(name)
    return name[: -len(kind)] if kind else None


def _claims(videos: dict[str, Path], sidecars: dict[str, Path]) -> dict[str, dict[str, Path]]:
    """Map each video to {sidecar kind: path}; a sidecar of the full file name wins over one of the stem."""
    by_owner: dict[str, dict[str, Path]] = defaultdict(dict)
    for name, path in sidecars.items():
        by_owner[_sidecar_owner(name) or ""][_sidecar_kind(name) or ""] = path
    return {
        name: {
            **by_owner.get(name[: -len(Path(name).suffix)] if Path(name).suffix else name, {}),
            **by_owner.get(name, {}),
        }
        for name in videos
    }


def _assign(found: dict[str, Path], plain_text: str | None) -> tuple[Path | None, Path | None]:
    cameras = [found[kind] for kind in (CAMERA_NPZ, CAMERA_TEXT) if kind in found]
    captions = [found[CAPTION_TEXT]] if CAPTION_TEXT in found else []
    if PLAIN_TEXT in found:
        if plain_text is None:
            raise DataError(
                f"{found[PLAIN_TEXT].name} may be a camera or a caption; rename it to *{CAMERA_TEXT} or *{CAPTION_TEXT}, or "
                "declare --plain-txt camera, caption or ignore"
            )
        {"camera": cameras, "caption": captions, "ignore": []}[plain_text].append(found[PLAIN_TEXT])
    for kind, paths in (("camera", cameras), ("caption", captions)):
        if len(paths) > 1:
            raise DataError(
                f"more than one {kind} sidecar: {', '.join(path.name for path in paths)}; keep one"
            )
    return next(iter(cameras), None), next(iter(captions), None)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _row(fields: list[str], where: str) -> list[float]:
    if len(fields) != 19 or not all(_is_number(field) for field in fields):
        raise DataError(
            f"{where}: expected 19 numbers (timestamp, fx, fy, cx, cy, k1, k2, 3x4 w2c), found {len(fields)} fields"
        )
    row = [float(field) for field in fields]
    if not np.isfinite(row).all() or row[0] != int(row[0]):
        raise DataError(f"{where}: expected a whole timestamp in microseconds and finite numbers")
    if row[1] <= 0 or row[2] <= 0 or row[1] > 20 or row[2] > 20:
        raise DataError(
            f"{where}: focal lengths {row[1]:g} {row[2]:g}; expected them divided by the image size, within (0, 20]"
        )
    if row[5] or row[6]:
        raise DataError(
            f"{where}: lens distortion k1={row[5]:g} k2={row[6]:g}; undistort the video first, expected 0 0"
        )
    rotation = np.array(row[7:]).reshape(3, 4)[:, :3]
    if np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-3 or np.linalg.det(rotation) < 0:
        raise DataError(f"{where}: the 3x3 part is not a rotation (orthonormal within 1e-3, determinant +1)")
    return row
