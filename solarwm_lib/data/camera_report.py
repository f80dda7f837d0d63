"""Which way stored cameras move, and what contradicts the declared convention; reports instead of raising.

A wrong direction, wrong axes or a wrong unit train without an error and teach nothing, so the numbers that give them away
are printed: forward_dot_step, handedness, step length, rotation error. They never change how an array is read; that is
declared (`data.camera_array_key`, `data.camera_axes`, `data.camera_scale`). (spec operations 5.1, 5.4)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data.camera import (
    C2W_KEYS,
    IDENTITY_TOLERANCE,
    ROTATION_TOLERANCE,
    load_cameras,
    read_matrices,
)
from solarwm_lib.runtime.errors import DataError

FORWARD = 0.5  # mean cosine that counts as walking forward, its opposite as backward
BETTER = 0.25  # by so much another direction must exceed the declared one, and reach three times as much
LONG_STEP = 1.0  # metres a frame: 24 m/s at 24 frames/s
SHORT_STEP = 1e-4
JUMP = 10.0  # times the clip's median step
JUMP_STEPS = 8  # fewer steps have no median to speak of
ROUNDING = 0.05  # float32 spacing of the positions as a share of the median step
UNITS = (("centimetres", 0.01), ("feet", 0.3048), ("millimetres", 0.001))
LARGEST = 1e30  # larger numbers are as good as infinite, and their squares are
EXAMPLES = 5

Camera = tuple[str, NDArray] | tuple[str, NDArray, str]


class CameraRow(Protocol):
    """What an index row says about a camera."""

    @property
    def sample_id(self) -> str: ...
    @property
    def camera_member(self) -> str: ...


@dataclass(frozen=True)
class Convention:
    """What the configuration declares about stored arrays: name (which gives the direction), camera axes, metres per unit."""

    array_key: str = "c2w"
    axes: str = "opencv"
    scale: float = 1.0

    @property
    def direction(self) -> str:
        """`c2w` or `w2c`. `relative_w2c` moves as w2c does; its world is one of its cameras."""
        return "c2w" if self.array_key in C2W_KEYS else "w2c"

    @property
    def name(self) -> str:
        return f"{self.direction}/{self.axes}"


@dataclass(frozen=True)
class _Clip:
    """Measures of one stored array. Steps are those between neighbouring finite frames, in metres."""

    sample_id: str
    dataset: str
    frames: int
    nonfinite: int
    mirrored: int
    skewed: int
    skew: float
    size: tuple[float, float]  # smallest and largest |det|^(1/3): 1 unless a scale is stored in the rotation
    bottom: float
    cosine: dict[str, NDArray]  # direction -> cosine of +z and the step, OpenCV axes, moving steps only
    step: dict[str, NDArray]  # direction -> length of every step
    turn: NDArray  # degrees
    reach: float
    rounding: float
    jumps: tuple[tuple[int, float, float], ...]  # frame before it, step, the clip's median


def summarize_rows(
    rows: Iterable[CameraRow], read: Callable[[Any, str], bytes], *, convention: Convention
) -> dict[str, Any]:
    """Return `summarize` of the camera members of index rows; `read(row, member)` gives the bytes of a member.

    Cameras that cannot be read at all (`unreadable`) and those that can be measured but that no reader would take
    (`refused`: NaN, no rotation, mirrored, not one per frame) are counted and the first few named; nothing is raised.
    """
    failures: list[str] = []
    refused: list[str] = []

    def cameras() -> Iterable[Camera]:
        for row in rows:
            name = f"sample {row.sample_id!r}"
            try:
                content = read(row, row.camera_member)
                stored = read_matrices(content, convention.array_key, name=name)
            except DataError as error:
                failures.append(str(error))
                continue
            if (refusal := _refusal(row, content, len(stored), convention)) is not None:
                refused.append(refusal)
            yield row.sample_id, stored, getattr(row, "dataset", None) or ""

    summary = summarize(cameras(), convention=convention)
    return summary | {
        "unreadable": len(failures),
        "unreadable_examples": failures[:EXAMPLES],
        "refused": len(refused),
        "refused_examples": refused[:EXAMPLES],
    }


def _refusal(row: CameraRow, content: bytes, frames: int, convention: Convention) -> str | None:
    """Return why loading refuses a camera file, None if it does not."""
    name, promised = f"sample {row.sample_id!r}", getattr(row, "num_frames", None)
    try:
        load_cameras(content, convention.array_key, axes=convention.axes, scale=convention.scale, name=name)
    except DataError as error:
        return str(error)
    if promised is not None and frames != promised:
        return f"{name}: camera has {frames} rows, the video {promised} frames; expected one each"
    return None


def summarize(cameras: Iterable[Camera], *, convention: Convention) -> dict[str, Any]:
    """Return how cameras move under the declared convention, and per dataset if there are several.

    `cameras` yields (sample_id, array, optional dataset), arrays [T, 4, 4] *as stored* (`camera.read_matrices`), whatever
    their values. Lengths are metres after `convention.scale`, angles degrees.

    forward_dot_step: mean cosine of the viewing axis +z and the step taken; walking forward is clearly positive.
    forward_by_interpretation: the same number if the arrays were read in another direction or other axes.
    reach_max: largest distance of a camera from the first one of its clip.
    """
    clips = [_measure(*item, convention=convention) for item in cameras]
    summary = {"declared": asdict(convention)} | _reduce(clips, convention)
    datasets = sorted({clip.dataset for clip in clips})
    if len(datasets) > 1:
        summary["datasets"] = {
            name: _reduce([clip for clip in clips if clip.dataset == name], convention) for name in datasets
        }
    return summary | {"unreadable": 0, "unreadable_examples": [], "refused": 0, "refused_examples": []}


def _measure(sample_id: str, stored: NDArray, dataset: str = "", *, convention: Convention) -> _Clip:
    matrices = stored.astype(np.float64)
    finite = (np.abs(matrices) < LARGEST).all(axis=(1, 2))  # NaN compares false
    kept = matrices[finite]
    rotation, determinant = kept[:, :3, :3], np.linalg.det(kept[:, :3, :3])
    skew = np.abs(rotation @ rotation.transpose(0, 2, 1) - np.eye(3)).max(axis=(1, 2), initial=0)
    size = np.cbrt(np.abs(determinant))
    frame = np.flatnonzero(finite)
    beside = np.diff(frame) == 1  # no step across a frame that was dropped
    cosine, step, reach = {}, {}, {}
    for direction, (centre, forward) in _views(kept).items():
        centre = centre * convention.scale
        move = np.diff(centre, axis=0)[beside]
        length = np.linalg.norm(move, axis=1)
        moving = length > max(1e-9, 0.01 * float(length.mean())) if len(length) else np.zeros(0, bool)
        along = (move * forward[:-1][beside]).sum(axis=1)
        cosine[direction] = along[moving] / length[moving]
        step[direction] = length
        reach[direction] = float(np.linalg.norm(centre - centre[:1], axis=1).max(initial=0))
    return _Clip(
        sample_id=sample_id,
        dataset=dataset,
        frames=len(stored),
        nonfinite=int((~finite).sum()),
        mirrored=int((determinant < 0).sum()),
        skewed=int((skew > ROTATION_TOLERANCE).sum()),
        skew=float(skew.max(initial=0)),
        size=(float(size.min(initial=math.inf)), float(size.max(initial=0))),
        bottom=float(np.abs(kept[:, 3] - (0, 0, 0, 1)).max(initial=0)),
        cosine=cosine,
        step=step,
        turn=_turns(rotation)[beside],
        reach=reach[convention.direction],
        rounding=_rounding(kept) * convention.scale,
        jumps=_jumps(frame[:-1][beside], step[convention.direction]),
    )


def _views(matrices: NDArray) -> dict[str, tuple[NDArray, NDArray]]:
    """Return centres and viewing axes +z (unit), both [T, 3], of matrices read as c2w and as w2c.

    The pseudo-inverse instead of the transpose: matrices that are no rotations are looked at too.
    """
    rotation, translation = matrices[:, :3, :3], matrices[:, :3, 3]
    inverse = np.linalg.pinv(rotation) if len(rotation) else rotation
    centre = -(inverse @ translation[:, :, None])[:, :, 0]
    return {
        "c2w": (translation, _unit(rotation[:, :, 2])),
        "w2c": (centre, _unit(inverse[:, :, 2])),
    }


def _unit(vectors: NDArray) -> NDArray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _turns(rotation: NDArray) -> NDArray:
    """Return the angle between neighbouring frames in degrees, [T - 1]."""
    trace = (rotation[:-1] * rotation[1:]).sum(axis=(1, 2))
    return np.degrees(np.arccos(np.clip((trace - 1) / 2, -1, 1)))


def _rounding(matrices: NDArray) -> float:
    """Return the spacing of float32 numbers at the largest translation, in stored units."""
    largest = np.abs(matrices[:, :3, 3]).max(initial=0)
    return float(np.spacing(np.float32(min(largest, 1e38))))


def _jumps(frames: NDArray, length: NDArray) -> tuple[tuple[int, float, float], ...]:
    moving = length[length > 1e-9]
    if len(moving) < JUMP_STEPS:
        return ()
    median = float(np.median(moving))
    return tuple((int(frames[i]), float(length[i]), median) for i in np.flatnonzero(length > JUMP * median))


def _reduce(clips: Sequence[_Clip], convention: Convention) -> dict[str, Any]:
    direction, sign = convention.direction, 1 if convention.axes == "opencv" else -1
    cosine = {key: _pool([clip.cosine[key] for clip in clips]) for key in ("c2w", "w2c")}
    step = {key: _pool([clip.step[key] for clip in clips]) for key in ("c2w", "w2c")}
    turn = _pool([clip.turn for clip in clips])
    forward = {}
    for key, values in cosine.items():
        mean = float(values.mean()) if len(values) else None
        forward[f"{key}/opencv"] = _round(mean)
        forward[f"{key}/opengl"] = _round(None if mean is None else -mean)
    moving = [sign * float(clip.cosine[direction].mean()) for clip in clips if len(clip.cosine[direction])]
    lengths = step[direction]
    frames, bad = sum(clip.frames for clip in clips), sum(clip.nonfinite for clip in clips)
    mirrored = sum(clip.mirrored for clip in clips)
    jumps = [(clip.sample_id, *jump) for clip in clips for jump in clip.jumps]
    sizes = [clip.size for clip in clips if clip.frames > clip.nonfinite]
    return {
        "samples": len(clips),
        "frames": frames,
        "steps": len(lengths),
        "handedness": _handedness(mirrored, frames - bad),
        "mirrored_frames": mirrored,
        "forward_dot_step": forward[convention.name],
        "forward_clips": len(moving),
        "forward_clips_backward": sum(value < 0 for value in moving),
        "forward_by_interpretation": forward,
        "step_by_direction": {
            key: _round(float(values.mean())) if len(values) else None for key, values in step.items()
        },
        "step_length": _statistics(lengths, ("mean", "median", "max")),
        "turn_degrees": _statistics(turn, ("mean", "max")),
        "reach_max": _round(max((clip.reach for clip in clips), default=0.0)),
        "rotation_error_max": _round(max((clip.skew for clip in clips), default=0.0)),
        "rotation_error_frames": sum(clip.skewed for clip in clips),
        "rotation_size": [_round(min(s[0] for s in sizes)), _round(max(s[1] for s in sizes))]
        if sizes
        else None,
        "bottom_row_error_max": _round(max((clip.bottom for clip in clips), default=0.0)),
        "position_rounding": _round(max((clip.rounding for clip in clips), default=0.0)),
        "nonfinite_frames": bad,
        "jump_count": len(jumps),
        "jump_examples": [
            f"sample {sample!r} frames {frame} to {frame + 1}: {length:.4g} m, the clip's median is {median:.4g} m"
            for sample, frame, length, median in jumps[:EXAMPLES]
        ],
    }


def _pool(arrays: Sequence[NDArray]) -> NDArray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _handedness(mirrored: int, frames: int) -> str:
    if not frames:
        return "none"
    return "right" if not mirrored else "left" if mirrored == frames else "mixed"


def _statistics(values: NDArray, names: Sequence[str]) -> dict[str, float | None] | None:
    functions: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median, "max": np.max}
    return {name: _round(float(functions[name](values))) for name in names} if len(values) else None


def _round(value: float | None) -> float | None:
    """Return five significant digits: enough to judge by, and equal on every machine."""
    return None if value is None else float(f"{value:.5g}")


def warnings(summary: dict[str, Any]) -> list[str]:
    """Return what in a summary contradicts the declared convention or could not be trained on, one line each.

    Of several datasets each is judged by itself, so that one wrong one among right ones is named.
    """
    convention = Convention(**summary["declared"])
    found = []
    if summary["unreadable"]:
        total = summary["samples"] + summary["unreadable"]
        found.append(
            f"cameras: {summary['unreadable']} of {total} cannot be read, first: {summary['unreadable_examples'][0]}"
        )
    for name, part in (summary.get("datasets") or {None: summary}).items():
        prefix = "cameras" if name is None else f"cameras of dataset {name or '(none)'!r}"
        found += [f"{prefix}: {text}" for text in (*_broken(part), *_contradictions(part, convention))]
    return found


def _broken(part: dict[str, Any]) -> Iterable[str]:
    """Yield what loading will refuse."""
    frames = part["frames"]
    if part["nonfinite_frames"]:
        yield f"{part['nonfinite_frames']} of {frames} frames hold NaN or infinite values"
    if part["mirrored_frames"]:
        yield (
            f"{part['mirrored_frames']} of {frames} frames are mirrored (determinant -1, handedness {part['handedness']}), "
            "expected right-handed; flip two axes together, never one"
        )
    if part["rotation_error_frames"]:
        smallest, largest = part["rotation_size"]
        scaled = abs(largest - 1) > ROTATION_TOLERANCE or abs(smallest - 1) > ROTATION_TOLERANCE
        yield (
            f"{part['rotation_error_frames']} of {frames} frames are no rotations (R Rᵀ differs from identity by "
            f"{part['rotation_error_max']:.3g}, allowed {ROTATION_TOLERANCE:g}"
            + (f"; a scale of {smallest:.4g} to {largest:.4g} is stored in the matrix)" if scaled else ")")
        )
    if part["bottom_row_error_max"] > IDENTITY_TOLERANCE:
        yield f"a bottom row differs from 0 0 0 1 by {part['bottom_row_error_max']:.3g}; transposed matrices look so"
    if part["jump_count"]:
        yield (
            f"{part['jump_count']} of {part['steps']} steps are longer than {JUMP:g} times the clip's median, "
            f"first: {part['jump_examples'][0]}; cuts or re-ordered frames look so"
        )


def _contradictions(part: dict[str, Any], convention: Convention) -> Iterable[str]:
    """Yield what loading cannot notice: direction, axes and unit."""
    forward, clips = part["forward_dot_step"], part["forward_clips"]
    # One clip may well have been filmed walking backward; the more agree, the less it takes.
    backward = clips > 0 and forward < -FORWARD - FORWARD / clips
    if backward or _other_direction_fits(part, convention):
        yield (
            f"declared {convention.name} gives forward_dot_step {forward:+.2f} over {clips} moving clips, "
            f"{part['forward_clips_backward']} of them backward; {_alternatives(part, convention)}"
        )
    length = part["step_length"]
    if length is None:
        return
    if length["median"] > LONG_STEP:
        yield f"the median step is {length['median']:.4g} m a frame, expected below {LONG_STEP:g}; {_unit_hint(length['median'], convention)}"
    elif 0 < length["mean"] < SHORT_STEP and length["median"] > 1e-9:
        yield (
            f"the mean step is {length['mean']:.3g} m a frame, hardly a movement; if positions are normalised or in kilometres, "
            "declare metres per unit as data.camera_scale"
        )
    if length["median"] > 1e-9 and part["position_rounding"] > ROUNDING * length["median"]:
        yield (
            f"positions are so far from the origin that float32 rounds them to {part['position_rounding']:.3g} m, the median step is "
            f"{length['median']:.3g} m; subtract a common offset before storing them"
        )


def _other_direction_fits(part: dict[str, Any], convention: Convention) -> bool:
    """Whether the other direction moves along the view clearly better than the declared one, and on a path no longer.

    Read in the wrong direction, cameras with absolute headings seem to move any way, so that the mean is near zero instead of
    negative. The path is looked at too because someone walking straight while looking around also moves "forward" in the
    wrong direction; there a turn swings the centre about the origin and makes the steps longer.
    """
    other = "w2c" if convention.direction == "c2w" else "c2w"
    value, steps = part["forward_by_interpretation"][f"{other}/opencv"], part["step_by_direction"]
    if value is None or part["forward_clips"] < 3:
        return False
    better = abs(value) >= 3 * BETTER and part["forward_dot_step"] <= abs(value) - BETTER
    return bool(better and steps[other] <= 1.02 * steps[convention.direction])


def _alternatives(part: dict[str, Any], convention: Convention) -> str:
    """Return which other interpretations move forward, the likeliest first: a high cosine on a short path."""
    steps, values = part["step_by_direction"], part["forward_by_interpretation"]
    fitting = [
        (name, value, steps[name.split("/")[0]])
        for name, value in values.items()
        if value is not None and value >= FORWARD and name != convention.name
    ]
    fitting.sort(key=lambda item: item[2] / item[1])
    listed = ", ".join(f"{name} {value:+.2f} (mean step {step:.3g} m)" for name, value, step in fitting)
    return (
        f"forward would be {listed}; if that is what is stored, declare data.camera_axes, or store the array under the name of "
        "its direction (data.camera_array_key)"
    )


def _unit_hint(median: float, convention: Convention) -> str:
    for unit, metres in UNITS:
        if median * metres <= LONG_STEP / 2:
            return f"if positions are in {unit}, set data.camera_scale to {metres * convention.scale:g}"
    return "declare metres per unit as data.camera_scale"


def format_summary(summary: dict[str, Any]) -> str:
    """Return a summary as lines for a terminal, warnings not included."""
    declared = Convention(**summary["declared"])
    scale = "" if declared.scale == 1 else f", scale {declared.scale:g}"
    lines = [f"cameras ({declared.array_key}, {declared.axes} axes{scale})"]
    for name, part in {"": summary, **summary.get("datasets", {})}.items():
        if name:
            lines.append(f"  {name}")
        indent = "    " if name else "  "
        lines += [f"{indent}{label:<18}{text}" for label, text in _lines(part)]
    return "\n".join(lines)


def _lines(part: dict[str, Any]) -> Iterable[tuple[str, str]]:
    yield "samples", f"{part['samples']} ({part['frames']} frames)"
    yield "handedness", part["handedness"]
    forward = part["forward_dot_step"]
    yield "forward_dot_step", "no movement" if forward is None else f"{forward:+.3f} (+1: along the view)"
    if part["step_length"]:
        step, turn = part["step_length"], part["turn_degrees"]
        yield "step_length", f"mean {step['mean']:.4g} m, median {step['median']:.4g}, max {step['max']:.4g}"
        yield "turn", f"mean {turn['mean']:.3g} degrees a frame, max {turn['max']:.3g}"
    yield "reach", f"{part['reach_max']:.4g} m from the first frame"
    yield "rotation_error", f"{part['rotation_error_max']:.2g} (allowed {ROTATION_TOLERANCE:g})"
    yield "jumps", str(part["jump_count"])
