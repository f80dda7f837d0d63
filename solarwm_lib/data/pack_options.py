"""Options of `solarwm data pack`: fields, command line and range checks in one place. Imports nothing heavy.

Each field is the option of the same name (`max_clip_frames` is `--max-clip-frames`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any, Literal

from solarwm_lib.runtime.errors import ConfigError

FITS = ("crop", "pad", "stretch")
CLOCKS = ("video", "first-row")
PLAIN_TEXT_MEANINGS = ("camera", "caption", "ignore")


@dataclass(frozen=True)
class PackOptions:
    """How to pack. All of it is part of the dataset's identity.

    `height` and `width` are given together, or neither: then each video keeps its displayed size, less one row or column
    where that is odd. `fit` says how another aspect ratio is met. `static_camera` and `caption` hold for videos without a
    sidecar of that kind. `camera_clock` says what RealEstate10K times count from: the first frame of the video, or their
    own first row (for clips cut out of a longer video). Clips longer than `max_clip_frames` are cut into several.
    """

    fps: float = 16.0
    height: int | None = None
    width: int | None = None
    fit: Literal["crop", "pad", "stretch"] = "crop"
    static_camera: bool = False
    caption: str | None = None
    plain_txt: Literal["camera", "caption", "ignore"] | None = None
    camera_clock: Literal["video", "first-row"] = "video"
    interpolate_camera: bool = False
    trim_to_camera: bool = False
    min_frames: int = 5
    max_clip_frames: int = 960
    test_fraction: float = 0.1
    seed: int = 42
    clips_per_shard: int = 64
    crf: int = 16

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) asked for, or None to keep the displayed size."""
        return None if self.height is None or self.width is None else (self.height, self.width)

    def check(self) -> None:
        """Raise ConfigError for values that cannot be packed with."""
        rules = (
            (0 < self.fps <= 240, "--fps", self.fps, "within (0, 240]"),
            (
                (self.height is None) == (self.width is None),
                "--height/--width",
                (self.height, self.width),
                "both or neither",
            ),
            (self.fit in FITS, "--fit", self.fit, f"one of {', '.join(FITS)}"),
            (self.camera_clock in CLOCKS, "--camera-clock", self.camera_clock, f"one of {', '.join(CLOCKS)}"),
            (
                self.plain_txt in (None, *PLAIN_TEXT_MEANINGS),
                "--plain-txt",
                self.plain_txt,
                f"one of {', '.join(PLAIN_TEXT_MEANINGS)}",
            ),
            (0 <= self.test_fraction < 1, "--test-fraction", self.test_fraction, "within [0, 1)"),
            (
                1 <= self.min_frames <= self.max_clip_frames,
                "--min-frames",
                self.min_frames,
                "within [1, --max-clip-frames]",
            ),
            (self.clips_per_shard >= 1, "--clips-per-shard", self.clips_per_shard, "at least 1"),
            (0 <= self.crf <= 40, "--crf", self.crf, "within [0, 40]"),
            (self.caption is None or bool(self.caption.strip()), "--caption", self.caption, "some text"),
        )
        for good, key, found, expected in rules:
            if not good:
                raise ConfigError(f"{key}: found {found}, expected {expected}")
        for key, size in (("--height", self.height), ("--width", self.width)):
            if size is not None and (size < 2 or size % 2):
                below = max(2, size - size % 2)
                raise ConfigError(
                    f"{key}: found {size}, H.264 yuv420p needs an even size; nearest {below} or {below + 2}"
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option to `parser`; `from_arguments` reads them back."""
    default = PackOptions()

    def add(flag: str, help: str, **kwargs: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        parser.add_argument(flag, default=getattr(default, name), help=help, **kwargs)

    add("--fps", "constant rate of the packed clips", type=float)
    add("--height", "pixels; with --width (default: each video keeps its size)", type=int)
    add("--width", "pixels; with --height", type=int)
    add("--fit", "how another aspect ratio is met", choices=FITS)
    add(
        "--static-camera",
        "declare that the camera stands still in videos without a camera sidecar",
        action="store_true",
    )
    add("--caption", "caption of videos without a caption sidecar")
    add("--plain-txt", "what NAME.txt beside a video is", choices=PLAIN_TEXT_MEANINGS)
    add(
        "--camera-clock",
        "what RealEstate10K times count from: the video's start or their first row",
        choices=CLOCKS,
    )
    add(
        "--interpolate-camera", "interpolate RealEstate10K cameras in SE(3) between rows", action="store_true"
    )
    add(
        "--trim-to-camera", "keep only the part of a video that RealEstate10K rows cover", action="store_true"
    )
    add("--min-frames", "refuse clips with fewer packed frames", type=int)
    add("--max-clip-frames", "cut longer videos into several clips", type=int)
    add("--test-fraction", "share of source videos in the test index", type=float)
    add("--seed", "of the split", type=int)
    add("--clips-per-shard", "clips in one archive", type=int)
    add("--crf", "H.264 quality of the packed clips, smaller is better", type=int)


def from_arguments(arguments: argparse.Namespace) -> PackOptions:
    """Return the options parsed by a parser that `add_arguments` filled."""
    return PackOptions(**{field.name: getattr(arguments, field.name) for field in fields(PackOptions)})
