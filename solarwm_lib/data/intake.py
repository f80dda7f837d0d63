"""What of a source video becomes a clip: strict decoding, the choice of frames by time, and the change of size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data.video import Frames
from solarwm_lib.runtime.errors import DataError

CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,mxf,nut,ivf,gif,yuv4mpegpipe"
TIME_SLACK = 0.05  # of an output frame: absorbs time stamps rounded to milliseconds


@dataclass(frozen=True)
class Resize:
    """From a displayed frame to a packed one, (height, width) in pixels: scale to `scaled`, then cut or pad to `target`.

    `offset` is the (row, column) of the target's corner in the scaled picture; negative where a border is added.
    """

    scaled: tuple[int, int]
    target: tuple[int, int]
    offset: tuple[int, int]

    def apply(self, frame: Frames) -> Frames:
        (height, width), (top, left) = self.target, self.offset
        cut = frame[max(top, 0) : max(top, 0) + height, max(left, 0) : max(left, 0) + width]
        if cut.shape[:2] == self.target:
            return np.ascontiguousarray(cut)
        canvas = np.zeros((height, width, 3), np.uint8)
        canvas[-min(top, 0) :, -min(left, 0) :][: cut.shape[0], : cut.shape[1]] = cut
        return canvas

    def intrinsics(self, normalised: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return float32 [3, 3] of the target from fx, fy, cx, cy, all divided by the size of the displayed frame."""
        fx, fy, cx, cy = (float(value) for value in normalised)
        (scaled_h, scaled_w), (height, width), (top, left) = self.scaled, self.target, self.offset
        return np.array(
            [
                [fx * scaled_w / width, 0, (cx * scaled_w - left) / width],
                [0, fy * scaled_h / height, (cy * scaled_h - top) / height],
                [0, 0, 1],
            ],
            np.float32,
        )


def decode_strictly(path: Path) -> Fraction:
    """Decode every frame with error detection on and return the pixel aspect ratio (width : height).

    ffmpeg conceals damage and ends quietly where a file was cut, so both are looked for. Only known video containers are
    opened: playlists, which may name other files, and pictures are not videos.

    Raises:
        DataError: not a video, damaged, or shorter than its header declares.
    """
    frames, end, start = 0, 0.0, 0.0
    try:
        with av.open(str(path), options={"format_whitelist": CONTAINERS}) as container:
            if not container.streams.video:
                raise DataError(f"{path.name}: holds no video stream")
            stream: Any = container.streams.video[0]
            if stream.disposition & av.stream.Disposition.attached_pic:
                raise DataError(f"{path.name}: an audio file with a cover picture, not a video")
            if stream.codec_context is None:
                raise DataError(
                    f"{path.name}: no decoder fits its video stream; it is truncated or of an unknown codec"
                )
            stream.codec_context.options = {"err_detect": "explode"}
            stream.thread_type = "AUTO"
            for packet in container.demux(stream):
                for frame in packet.decode():
                    if packet.is_corrupt or frame.is_corrupt:
                        raise DataError(
                            f"{path.name}: frame {frames} is damaged; repair or re-encode the file"
                        )
                    time = frame.time if frame.time is not None else 0.0
                    start = time if frames == 0 else start
                    end = time + float(frame.duration * frame.time_base)
                    frames += 1
            declared = _declared_seconds(container, stream)
            pixel_aspect = stream.sample_aspect_ratio
    except av.error.FFmpegError as error:
        where = (
            f"damaged or truncated after {frames} frames" if frames else "not a readable video, or truncated"
        )
        raise DataError(
            f"{path.name}: {where} ({error.strerror}); read are mp4, mov, mkv, webm, avi, ts, flv and ogg"
        ) from None
    if frames and declared - (end - start) > max(0.5, 0.05 * declared):
        raise DataError(
            f"{path.name}: truncated: its header declares {declared:.2f} s, {end - start:.2f} s decode"
        )
    return Fraction(pixel_aspect or 1)


def resample(times: NDArray[np.float64], fps: float) -> NDArray[np.int64]:
    """Return, for output times 0, 1/fps, 2/fps ..., the ordinal of the nearest source frame; ties go to the earlier one.

    `times` are increasing presentation times in seconds. The output ends with the last frame: nothing is extrapolated.
    """
    count = int(np.floor((times[-1] - times[0]) * fps + TIME_SLACK)) + 1
    wanted = times[0] + np.arange(count) / fps
    # The microsecond keeps exact halves (24 to 16 fps) from being decided by rounding noise.
    borders = (times[1:] + times[:-1]) / 2 + 1e-6
    return np.searchsorted(borders, wanted, side="left")


def plan_resize(
    height: int, width: int, pixel_aspect: Fraction, size: tuple[int, int] | None, fit: str
) -> Resize:
    """Return how a displayed frame of this size and pixel aspect (both after rotation) becomes a packed one.

    `size` is the (height, width) wanted; None keeps the displayed size, less one row or column where that is odd.
    """
    shown = max(2, round(width * pixel_aspect))
    if size is None:
        target = (height - height % 2, shown - shown % 2)
        if min(target) < 2:
            raise DataError(f"{width}x{height} pixels are too few for a video")
        return Resize((height, shown), target, (0, 0))
    target = size
    if fit == "stretch":
        return Resize(target, target, (0, 0))
    ratios = (target[0] / height, float(target[1] / (width * pixel_aspect)))
    choose: Callable[..., int] = max if fit == "crop" else min
    factor = choose(ratios)  # type: ignore[type-var]
    exact = (height * factor, float(width * pixel_aspect) * factor)
    scaled = tuple(max(1, choose(round(size), limit)) for size, limit in zip(exact, target, strict=True))
    offset = tuple(int((side - limit) / 2) for side, limit in zip(scaled, target, strict=True))
    return Resize((scaled[0], scaled[1]), target, (offset[0], offset[1]))


def _declared_seconds(container: Any, stream: Any) -> float:
    """What the header says the video lasts, for containers whose cut end is not an error to ffmpeg; else 0."""
    if "matroska" in container.format.name:
        hours, minutes, seconds = (stream.metadata.get("DURATION") or "0:0:0").split(":")
        tagged = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
        return tagged or (container.duration or 0) / av.time_base
    return 0.0
