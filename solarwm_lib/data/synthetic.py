"""The tiny world: textured rooms filmed along smooth random paths, written as a raw-WDS dataset.

Cameras and intrinsics are exact, so a model can be judged by decibels. Textures are smooth with a few large shapes per
wall: fine noise would only teach the codec to blur. World axes are OpenCV's with y down; lengths are metres.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.artifacts import Artifact, Transaction, reissue
from solarwm_lib.data.camera import Matrices, fixed_intrinsics
from solarwm_lib.data.room import Room
from solarwm_lib.data.video import Frames, mp4_bytes
from solarwm_lib.data.writer import SCHEMA, SPLITS, Clip, RawDatasetWriter
from solarwm_lib.runtime import keyed
from solarwm_lib.runtime.errors import ConfigError

VERSION = 1  # part of the dataset identity: raise it with any change that moves a byte
CRF = 8  # near-lossless: the codec should learn the room, not H.264
LEG_FRAMES = 32  # a path leg: turn by TURN_DEGREES while walking LEG_METRES
TURN_DEGREES = (60.0, 120.0)
LEG_METRES = (0.2, 0.6)
ROAM_METRES = 0.6  # path knots stay within this of the room's centre in x and z; any leg fits from anywhere
PITCH_DEGREES = 7.0
BOB_METRES = 0.2


@dataclass(frozen=True)
class SynthSpec:
    """What to film. `frames` are pixel frames per clip; clip i of a split is filmed in room i mod `rooms`."""

    name: str
    rooms: int = 1
    train_clips: int = 500
    test_clips: int = 16
    frames: int = 33
    height: int = 64
    width: int = 96
    fps: float = 16.0
    seed: int = 0
    clips_per_shard: int = 100

    def __post_init__(self) -> None:
        for key in ("rooms", "train_clips", "frames", "clips_per_shard"):
            if getattr(self, key) < 1:
                raise ConfigError(
                    f"dataset {self.name!r}: {key} is {getattr(self, key)}, expected at least 1"
                )
        if self.test_clips < 0 or self.fps <= 0:
            raise ConfigError(f"dataset {self.name!r}: test_clips must be >= 0 and fps > 0")
        for key in ("height", "width"):
            value = getattr(self, key)
            if value < 16 or value % 2:
                near = max(16, value - value % 2)
                raise ConfigError(
                    f"dataset {self.name!r}: {key} is {value}, expected an even number >= 16 (nearest {near}, {near + 2})"
                )

    @classmethod
    def from_json(cls, text: str) -> SynthSpec:
        """Return the spec of a JSON object; ConfigError names an unknown, missing or mistyped field."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"dataset spec is not JSON ({error})") from None
        if not isinstance(values, dict) or "name" not in values:
            raise ConfigError("dataset spec: expected a JSON object with at least 'name'")
        for key, value in values.items():
            if key not in fields:
                raise ConfigError(f"dataset spec: unknown key {key!r}, expected one of {', '.join(fields)}")
            kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
            if isinstance(value, bool) or not isinstance(value, kinds[str(fields[key].type)]):
                raise ConfigError(f"dataset spec: {key} is {value!r}, expected {fields[key].type}")
        return cls(**values | {"fps": float(values.get("fps", cls.fps))})


def camera_path(frames: int, *key: keyed.Part) -> Matrices:
    """Return a smooth keyed walk through a room, camera-to-world float32 [frames, 4, 4].

    Knots lie LEG_FRAMES apart, each turned 60 to 120 degrees and moved 0.2 to 0.6 m from the one before; Catmull-Rom
    splines join them. The camera looks level within PITCH_DEGREES.
    """
    knots = math.ceil((frames - 1) / LEG_FRAMES) + 3
    yaw, position = _knots(knots, *key)
    time = np.arange(frames) / LEG_FRAMES + 1
    phase = [2 * math.pi * keyed.uniform(*key, name) for name in ("pitch", "bob")]
    pitch = math.radians(PITCH_DEGREES) * np.sin(2.1 * time + phase[0])
    height = BOB_METRES * np.sin(1.7 * time + phase[1])
    x, z = _catmull_rom(position, time).T
    return _poses(_catmull_rom(yaw[:, None], time)[:, 0], pitch, np.stack([x, height, z], axis=1))


def _knots(count: int, *key: keyed.Part) -> tuple[NDArray, NDArray]:
    """Return (yaw [count] in radians, position [count, 2] in metres) of path knots."""

    def between(low: float, high: float, *name: keyed.Part) -> float:
        return low + (high - low) * keyed.uniform(*key, *name)

    yaw = [between(0, 2 * math.pi, "yaw")]
    position = [np.array([between(-ROAM_METRES, ROAM_METRES, axis) for axis in ("x", "z")])]
    for knot in range(1, count):
        turn = math.radians(between(*TURN_DEGREES, "turn", knot))
        yaw.append(yaw[-1] + (turn if keyed.integer(2, *key, "side", knot) else -turn))
        length = between(*LEG_METRES, "length", knot)
        # Some heading always stays inside: the far corner is at least sqrt(2) * ROAM_METRES > 0.8 m away.
        headings = (between(0, 2 * math.pi, "heading", knot, attempt) for attempt in range(1000))
        steps = (length * np.array([math.cos(angle), math.sin(angle)]) for angle in headings)
        position.append(
            next(position[-1] + s for s in steps if np.abs(position[-1] + s).max() <= ROAM_METRES)
        )
    return np.array(yaw), np.array(position)


def _catmull_rom(knots: NDArray, time: NDArray) -> NDArray:
    """Return the spline [len(time), D] through knots [K, D] at integer times; `time` lies in [1, K - 2]."""
    index = np.clip(np.floor(time).astype(int), 1, len(knots) - 3)
    t = (time - index)[:, None]
    p0, p1, p2, p3 = (knots[index + offset] for offset in (-1, 0, 1, 2))
    return p1 + 0.5 * t * (p2 - p0 + t * (2 * p0 - 5 * p1 + 4 * p2 - p3 + t * (3 * (p1 - p2) + p3 - p0)))


def _poses(yaw: NDArray, pitch: NDArray, position: NDArray) -> Matrices:
    """Return camera-to-world [T, 4, 4] of yaw about y, then pitch about the camera's x (radians), and centres [T, 3]."""
    cy, sy, cp, sp = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch)
    c2w = np.tile(np.eye(4), (len(yaw), 1, 1))
    c2w[:, 0, :3] = np.stack([cy, sy * sp, sy * cp], axis=1)
    c2w[:, 1, :3] = np.stack([0 * cp, cp, -sp], axis=1)
    c2w[:, 2, :3] = np.stack([-sy, cy * sp, cy * cp], axis=1)
    c2w[:, :3, 3] = position
    return c2w.astype(np.float32)


@dataclass(frozen=True)
class Filmed:
    """One rendered clip before it is encoded."""

    split: str
    ordinal: int
    room: int
    caption: str
    c2w: Matrices  # [F, 4, 4]
    frames: Frames  # [F, H, W, 3]


def film(spec: SynthSpec) -> Iterator[Filmed]:
    """Yield the clips of a spec, training split first; each depends only on the spec's seed, split and ordinal."""
    rooms = [Room(keyed.key64(spec.seed, "room", room)) for room in range(spec.rooms)]
    for split, count in zip(SPLITS, (spec.train_clips, spec.test_clips), strict=True):
        for ordinal in range(count):
            room = rooms[ordinal % spec.rooms]
            c2w = camera_path(spec.frames, spec.seed, "path", split, ordinal)
            frames = room.render(c2w, spec.height, spec.width)
            yield Filmed(split, ordinal, ordinal % spec.rooms, room.caption, c2w, frames)


def identity(spec: SynthSpec) -> dict:
    """Return what decides every byte of the dataset: the spec and the generator's version."""
    return {"generator": "procedural_room", "version": VERSION, "spec": dataclasses.asdict(spec)}


def synthesize(out_dir: Path, spec: SynthSpec, progress: bool = True) -> Artifact:
    """Film `spec` into the dataset artifact `out_dir` and return it; a complete one of the same spec is kept.

    Members: shards/*.tar, train-index.jsonl, test-index.jsonl, preview.png.
    """
    from tqdm import tqdm

    if (existing := reissue(out_dir, SCHEMA, identity(spec))) is not None:
        return existing
    total = spec.train_clips + spec.test_clips
    with Transaction(out_dir, SCHEMA, identity(spec)) as transaction:
        writer = RawDatasetWriter(transaction, spec.clips_per_shard)
        strips: list[Frames] = []
        clips = tqdm(film(spec), total=total, desc=f"film {spec.name}", unit="clip", disable=not progress)
        for filmed in clips:
            writer.add(filmed.split, _clip(filmed, spec))
            if len(strips) < 8 and filmed.split == "train":
                strips.append(filmed.frames)
        writer.finish()
        transaction.write_bytes("preview.png", preview_png(strips))
    return transaction.artifact


def _clip(filmed: Filmed, spec: SynthSpec) -> Clip:
    name = f"{filmed.split}-{filmed.ordinal:06d}"
    return Clip(
        sample_id=f"{spec.name}/{name}",
        key=name,
        video=mp4_bytes(filmed.frames, spec.fps, crf=CRF),
        c2w=filmed.c2w,
        fps=spec.fps,
        height=spec.height,
        width=spec.width,
        caption=filmed.caption,
        scene=f"room-{filmed.room:04d}",
        dataset=spec.name,
        intrinsics=fixed_intrinsics(),
    )


def preview_png(clips: Iterable[Frames], columns: int = 6, scale: int = 2) -> bytes:
    """Return a contact sheet: one row per clip [F, H, W, 3], `columns` frames evenly spread over its length."""
    from PIL import Image

    rows = [
        np.concatenate(
            [clip[index] for index in np.linspace(0, len(clip) - 1, columns).round().astype(int)], axis=1
        )
        for clip in clips
    ]
    sheet = np.concatenate(rows).repeat(scale, axis=0).repeat(scale, axis=1)
    stream = io.BytesIO()
    Image.fromarray(sheet).save(stream, format="PNG")
    return stream.getvalue()
