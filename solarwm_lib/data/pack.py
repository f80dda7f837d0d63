"""`solarwm data pack`: a folder of videos with sidecars becomes a raw-WDS dataset.

Every file is decoded completely before it counts. What cannot be packed is listed with its reason in `refused.jsonl` and
the rest goes on. Frames are chosen by their own time stamps, so variable rate becomes constant rate; size changes, the
camera's origin and every repeated frame are recorded beside the clip. (spec operations 4.1, 4.2, 5.1; sidecar names in
`data/sidecars.py`)
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from solarwm_lib.artifacts import Artifact, Transaction, reissue
from solarwm_lib.data import sidecars
from solarwm_lib.data.camera import load_c2w
from solarwm_lib.data.index import read_rows
from solarwm_lib.data.intake import Resize, decode_strictly, plan_resize, resample
from solarwm_lib.data.pack_options import PackOptions
from solarwm_lib.data.sidecars import Refusal, Source
from solarwm_lib.data.video import Frames, VideoInfo, iterate, mp4_bytes, probe_by_decoding
from solarwm_lib.data.writer import SCHEMA, SPLITS, Clip, RawDatasetWriter
from solarwm_lib.runtime.errors import DataError
from solarwm_lib.runtime.keyed import uniform

REFUSED = "refused.jsonl"


@dataclass(frozen=True)
class PackReport:
    """What `pack` made: rows per split, refused files, remarks on packed ones."""

    artifact: Artifact
    rows: dict[str, int]
    refused: tuple[Refusal, ...]
    remarks: tuple[str, ...] = ()
    already_packed: bool = False

    def summary(self) -> str:
        state = "already packed" if self.already_packed else "packed"
        counts = ", ".join(f"{self.rows[split]} {split}" for split in SPLITS)
        return f"{state} {sum(self.rows.values())} clips ({counts}), refused {len(self.refused)} files: {self.artifact.path}"


@dataclass(frozen=True)
class Prepared:
    """A checked source: which of its frames are packed, with one camera each (c2w float32 [F, 4, 4])."""

    source: Source
    digest: str
    info: VideoInfo
    pixel_aspect: Fraction
    resize: Resize
    ordinals: NDArray[np.int64]
    c2w: NDArray[np.float32]
    intrinsics: NDArray[np.float32] | None
    camera_origin: str
    caption: str

    @property
    def repeated(self) -> int:
        return int((np.diff(self.ordinals) == 0).sum())


def pack(
    src: Path,
    out: Path,
    options: PackOptions,
    *,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> PackReport:
    """Pack the videos under `src` into the dataset artifact `out`.

    Packing the same files with the same options again changes nothing and returns at once. `log` receives one line per
    refused file and the summary.

    Raises:
        ConfigError: an option is out of range.
        DataError: no file could be packed; nothing is written.
        ArtifactError: `out` holds something else.
    """
    options.check()
    src, out = Path(src), Path(out)
    sources, refused = sidecars.discover(src, exclude=[out], plain_text=options.plain_txt)
    digests = {source: _digests(source) for source in sources}
    identity = {
        "name": out.name,
        **asdict(options),
        "files": hashlib.sha256(
            json.dumps([[[s.relative, *digests[s]] for s in sources], [r.path for r in refused]]).encode()
        ).hexdigest(),
    }
    if (artifact := reissue(out, SCHEMA, identity)) is not None:
        report = _existing(artifact)
    else:
        prepared = []
        for source in tqdm(sources, desc="check", unit="file", disable=None):
            try:
                prepared.append(prepare(source, digests[source][0], options))
            except (DataError, OSError) as error:
                refused.append(Refusal(source.relative, _reason(error, source)))
        report = _write(prepared, refused, out, identity, options)
    for refusal in report.refused:
        log(f"refused {refusal.path}: {refusal.reason}")
    for remark in report.remarks:
        log(f"note: {remark}")
    log(report.summary())
    return report


def prepare(source: Source, digest: str, options: PackOptions) -> Prepared:
    """Decode the whole video, match its sidecars, choose the frames. Raises DataError with the reason to refuse it."""
    name = source.path.name
    if not source.path.stat().st_size:
        raise DataError(f"{name}: empty file (0 bytes)")
    if source.caption is None and options.caption is None:
        raise DataError(
            f"no caption: expected {source.path.stem}{sidecars.CAPTION_TEXT} beside it, or --caption TEXT for all"
        )
    caption = sidecars.read_caption(source.caption) if source.caption else str(options.caption).strip()
    pixel_aspect = decode_strictly(source.path)
    info = probe_by_decoding(source.path, name=name)
    times = np.array(info.times) - info.times[0]
    trajectory = _trajectory(source, options)
    first, last = covered(times, trajectory) if trajectory and options.trim_to_camera else (0, len(times) - 1)
    ordinals = first + resample(times[first : last + 1], options.fps)
    if len(ordinals) < options.min_frames:
        raise DataError(
            f"{name}: {len(ordinals)} frames at {options.fps:g} fps ({times[last] - times[first]:.2f} s), expected at least "
            f"{options.min_frames}; change --min-frames"
        )
    upright_aspect = 1 / pixel_aspect if info.rotation % 180 else pixel_aspect
    resize = plan_resize(info.height, info.width, upright_aspect, options.size, options.fit)
    c2w, normalised, origin = _cameras(source, trajectory, times, ordinals, options)
    intrinsics = None if normalised is None else resize.intrinsics(np.median(normalised, axis=0))
    return Prepared(source, digest, info, pixel_aspect, resize, ordinals, c2w, intrinsics, origin, caption)


def covered(times: NDArray[np.float64], trajectory: sidecars.Trajectory) -> tuple[int, int]:
    """Return the first and last frame whose time (seconds) lies within the camera rows."""
    slack = sidecars.MATCH_TOLERANCE_US
    rows, microseconds = trajectory.timestamps_us, times * 1e6
    inside = np.flatnonzero((microseconds >= rows[0] - slack) & (microseconds <= rows[-1] + slack))
    if not len(inside):
        raise DataError(
            f"no frame lies within the camera rows, {rows[0] / 1e6:.3f} to {rows[-1] / 1e6:.3f} s; the video lasts "
            f"{times[-1]:.3f} s; if the rows count from the start of a longer video pass --camera-clock first-row"
        )
    return int(inside[0]), int(inside[-1])


def assign_splits(names: Sequence[str], fraction: float, seed: int) -> dict[str, str]:
    """Return train or test per source, a pure function of its name, so that adding files moves no other.

    Where `fraction` > 0 leaves a split of two or more sources empty, the source nearest to the border fills it.
    """
    draws = {name: uniform(seed, "split", name) for name in names}
    splits = {name: "test" if draw < fraction else "train" for name, draw in draws.items()}
    counts = Counter(splits.values())
    if not counts["train"] or (fraction > 0 and len(names) > 1 and not counts["test"]):
        nearest = (
            max(names, key=draws.__getitem__) if not counts["train"] else min(names, key=draws.__getitem__)
        )
        splits[nearest] = "train" if not counts["train"] else "test"
    return splits


def _write(
    prepared: Sequence[Prepared],
    refused: list[Refusal],
    out: Path,
    identity: dict[str, Any],
    options: PackOptions,
) -> PackReport:
    if not prepared:
        first = "; ".join(f"{refusal.path}: {refusal.reason}" for refusal in refused[:3])
        more = f" (and {len(refused) - 3} more)" if len(refused) > 3 else ""
        raise DataError(f"nothing packed, refused {len(refused)} files: {first}{more}")
    splits = assign_splits([item.source.relative for item in prepared], options.test_fraction, options.seed)
    remarks: list[str] = []
    with Transaction(out, SCHEMA, identity) as transaction:
        writer = RawDatasetWriter(transaction, options.clips_per_shard)
        for item in tqdm(prepared, desc="pack", unit="file", disable=None):
            try:
                clips = list(_clips(item, out.name, options))
            except DataError as error:  # the file changed after its check
                refused.append(Refusal(item.source.relative, _reason(error, item.source)))
                continue
            for clip in clips:
                writer.add(splits[item.source.relative], clip)
            remarks += _remarks(item, clips)
        rows = writer.finish()
        refused.sort(key=lambda refusal: refusal.path)
        lines = [json.dumps(asdict(refusal), ensure_ascii=False, sort_keys=True) for refusal in refused]
        transaction.write_text(REFUSED, "".join(f"{line}\n" for line in lines))
    if not rows["test"]:
        remarks.append("the test index is empty: validation needs a dataset with test clips")
    return PackReport(transaction.artifact, rows, tuple(refused), tuple(remarks))


def _clips(item: Prepared, dataset: str, options: PackOptions) -> Iterator[Clip]:
    frames = _frames(item)
    starts = range(0, len(item.ordinals), options.max_clip_frames)
    for number, start in enumerate(starts):
        ordinals = item.ordinals[start : start + options.max_clip_frames]
        if len(ordinals) < options.min_frames:
            return  # a tail too short to train on
        key = item.source.key if len(starts) == 1 else f"{item.source.key}-p{number:04d}"
        yield Clip(
            sample_id=key,
            key=key,
            video=mp4_bytes(islice(frames, len(ordinals)), options.fps, crf=options.crf),
            c2w=item.c2w[start : start + len(ordinals)],
            fps=options.fps,
            height=item.resize.target[0],
            width=item.resize.target[1],
            caption=item.caption,
            scene=item.source.key,
            dataset=dataset,
            intrinsics=item.intrinsics,
            metadata=_provenance(item, ordinals, options),
        )


def _frames(item: Prepared) -> Iterator[Frames]:
    """Yield the packed frames in order, one decoded frame in memory at a time."""
    repeats = Counter(item.ordinals.tolist())
    for ordinal, (_, frame) in enumerate(
        iterate(item.source.path, name=item.source.path.name, size=item.resize.scaled)
    ):
        if count := repeats.get(ordinal):
            fitted = item.resize.apply(frame)
            for _ in range(count):
                yield fitted


def _provenance(item: Prepared, ordinals: NDArray[np.int64], options: PackOptions) -> dict[str, Any]:
    return {
        "camera_origin": item.camera_origin,
        "fit": options.fit,
        "resize": asdict(item.resize),
        "source": {
            "path": item.source.relative,
            "sha256": item.digest,
            "frames": item.info.frames,
            "fps": round(item.info.fps, 6),
            "variable_rate": item.info.variable_rate,
            "width": item.info.width,
            "height": item.info.height,
            "pixel_aspect": f"{item.pixel_aspect.numerator}:{item.pixel_aspect.denominator}",
            "rotation": item.info.rotation,
            "first_frame": int(ordinals[0]),
            "last_frame": int(ordinals[-1]),
            "repeated_frames": int((np.diff(ordinals) == 0).sum()),
        },
    }


def _remarks(item: Prepared, clips: Sequence[Clip]) -> Iterator[str]:
    name, options_frames = item.source.relative, sum(len(clip.c2w) for clip in clips)
    if item.repeated:
        yield f"{name}: {item.repeated} of {len(item.ordinals)} frames repeat their predecessor ({item.info.fps:.2f} fps source)"
    if item.resize.scaled[0] > item.info.height:
        yield f"{name}: enlarged {item.resize.scaled[0] / item.info.height:.2f} times from {item.info.width}x{item.info.height}"
    if options_frames < len(item.ordinals):
        yield f"{name}: the last {len(item.ordinals) - options_frames} frames are too few for a clip of their own"


def _trajectory(source: Source, options: PackOptions) -> sidecars.Trajectory | None:
    if source.camera is None or source.camera.suffix != ".txt":
        return None
    try:
        text = source.camera.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{source.camera.name}: not a text file") from None
    trajectory = sidecars.parse_realestate10k(text, source.camera.name)
    if options.camera_clock == "first-row":
        return replace(trajectory, timestamps_us=trajectory.timestamps_us - trajectory.timestamps_us[0])
    return trajectory


def _cameras(
    source: Source,
    trajectory: sidecars.Trajectory | None,
    times: NDArray[np.float64],
    ordinals: NDArray[np.int64],
    options: PackOptions,
) -> tuple[NDArray[np.float32], NDArray[np.float64] | None, str]:
    """Return c2w float32 [F, 4, 4] of the chosen frames, normalised intrinsics [F, 4] if known, and where they are from."""
    if trajectory is not None:
        c2w, intrinsics = sidecars.camera_at(trajectory, times[ordinals] * 1e6, options.interpolate_camera)
        return c2w.astype(np.float32), intrinsics, "realestate10k"
    if source.camera is not None:
        stored = load_c2w(source.camera, "c2w", name=source.camera.name)
        if len(stored) != len(times):
            raise DataError(
                f"{source.camera.name}: {len(stored)} camera rows, the video decodes to {len(times)} frames; expected one row "
                "per source frame"
            )
        return stored[ordinals], None, "npz"
    if options.static_camera:
        return np.repeat(np.eye(4, dtype=np.float32)[None], len(ordinals), axis=0), None, "declared static"
    stem = source.path.stem
    raise DataError(
        f"no camera: expected {stem}{sidecars.CAMERA_NPZ} or {stem}{sidecars.CAMERA_TEXT} beside it, or --static-camera"
    )


def _digests(source: Source) -> list[str]:
    digests = []
    for path in (source.path, source.camera, source.caption):
        try:
            with open(path or "/dev/null", "rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            digests.append(f"unreadable: {error.strerror}")
    return digests


def _existing(artifact: Artifact) -> PackReport:
    rows = {split: len(read_rows(artifact.file(f"{split}-index.jsonl"))) for split in SPLITS}
    refused = tuple(Refusal(**row) for _, row in read_rows(artifact.file(REFUSED)))
    return PackReport(artifact, rows, refused, already_packed=True)


def _reason(error: Exception, source: Source) -> str:
    """The reason without the name of the video, which stands beside it in every list."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return " ".join(str(error).split()).removeprefix(f"{source.path.name}: ")
