"""H.264 in and out through PyAV: frame counts, times and rotation come from decoding, never from the header.

Frames are uint8 RGB [F, H, W, 3], display-oriented. Colour is BT.709 limited range, tagged in what is written.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray

from solarwm_lib.runtime.errors import DataError

Frames = NDArray[np.uint8]
Source = bytes | str | Path
Size = tuple[int, int]

# Bit-exact, full-chroma scaling: the same file gives the same pixels whatever SIMD the machine has.
SCALER = int(
    Interpolation.BICUBIC
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
    | Interpolation.BITEXACT
)
# x264's macroblock tree reads lookahead costs it never initialises on small frames: equal input then gives different
# bytes (measured, 19 variants of one clip in 60 runs). Without lookahead and its users the output is reproducible.
REPRODUCIBLE = "mbtree=0:rc-lookahead=0:scenecut=0:bframes=0:weightp=0"
IMMEDIATE = ":force-cfr=1"  # without it the encoder keeps a frame back
BT709 = 1
# A fragment per frame: a fragment is only written when the frame after it comes.
GROWING = "frag_every_frame+empty_moov+default_base_moof"
VARIABLE_RATE_TOLERANCE = 0.1
SEEK_FROM = 16  # frames; below it, listing the key frames costs more than decoding from the start


@dataclass(frozen=True)
class VideoInfo:
    """What decoding a whole video found."""

    frames: int
    width: int  # pixels, after rotation
    height: int
    rotation: int  # degrees counter-clockwise that decoding applied: 0, 90, 180 or 270
    times: tuple[float, ...]  # presentation time of each frame in seconds, increasing
    fps: float  # measured: (frames - 1) / (last time - first time); the nominal rate for a single frame
    nominal_fps: float  # the header's claim; 0 when it makes none
    variable_rate: bool  # some interval differs from the mean by more than a tenth


def iterate(
    source: Source, *, name: str | None = None, size: Size | None = None
) -> Iterator[tuple[float, Frames]]:
    """Yield (time in seconds, uint8 [H, W, 3]) of each frame in display order, rotated upright.

    `size` is the (height, width) to scale to, after rotation. Raises DataError for a file that does not decode.
    """
    label = name or _label(source)
    scaler = VideoReformatter()
    with _decoding(source, label) as (container, stream):
        rate = float(stream.average_rate or 0)
        for ordinal, frame in enumerate(container.decode(stream)):
            time = float(frame.time) if frame.time is not None else ordinal / (rate or 1.0)
            yield time, _upright(frame, scaler, size, label)


def decode(
    source: Source, indices: Sequence[int] | None = None, *, name: str | None = None, size: Size | None = None
) -> Frames:
    """Return the frames `indices` (all by default; any order, repeats allowed) as uint8 [F, H, W, 3].

    Decoding starts at the key frame before the first wanted one. Raises DataError if the video does not decode, is
    empty, or is shorter than an index needs.
    """
    label = name or _label(source)
    if indices is None:
        everything = [frame for _, frame in iterate(source, name=label, size=size)]
        return _stack(everything, label)
    if not len(indices) or min(indices) < 0:
        raise ValueError("indices must be non-empty and non-negative")
    wanted = set(indices)
    kept: dict[int, Frames] = {}
    if min(wanted) >= SEEK_FROM:
        kept = _decode_wanted(source, wanted, label, size, seek=True)
    if kept.keys() != wanted:  # no usable time stamps or key frames: count frames from the start
        kept = _decode_wanted(source, wanted, label, size, seek=False)
    return _stack([kept[index] for index in indices], label)


def _decode_wanted(
    source: Source, wanted: set[int], label: str, size: Size | None, *, seek: bool
) -> dict[int, Frames]:
    """Return the wanted frames by ordinal; with `seek` possibly not all of them, else DataError if one is missing."""
    scaler, last = VideoReformatter(), max(wanted)
    kept: dict[int, Frames] = {}
    count = 0
    with _decoding(source, label) as (container, stream):
        ordinals = _seek(container, stream, min(wanted)) if seek else None
        if seek and not ordinals:
            return {}
        for count, frame in enumerate(container.decode(stream), start=1):
            ordinal = count - 1 if ordinals is None else ordinals.get(frame.pts, -1)
            if ordinal in wanted:
                kept[ordinal] = _upright(frame, scaler, size, label)
            if ordinal >= last:
                break
    if not seek and count <= last:
        raise DataError(
            f"{label}: decoded {count} frames, the clip needs frame {last} (at least {last + 1} frames); "
            "the index promises more than the video holds, rebuild it with `solarwm data pack`"
        )
    return kept


def _seek(container: Any, stream: Any, ordinal: int) -> dict[int, int]:
    """Go to the last key frame at or before frame `ordinal`; return the ordinal of each time stamp, empty if unknown."""
    packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
    stamps = sorted(packet.pts for packet in packets if packet.pts is not None)
    ordinals = {stamp: position for position, stamp in enumerate(stamps)}
    keys = [p.pts for p in packets if p.is_keyframe and ordinals.get(p.pts, ordinal + 1) <= ordinal]
    if len(ordinals) != len(packets) or not keys:
        return {}
    container.seek(max(keys), stream=stream)
    return ordinals


@contextmanager
def _decoding(source: Source, label: str) -> Iterator[tuple[Any, Any]]:
    """Open a video and its stream for decoding in the calling thread; DataError for a file that does not decode."""
    try:
        with _open(source, label) as container:
            stream = _video_stream(container, label)
            stream.thread_type = "NONE"
            yield container, stream
    except av.error.FFmpegError as error:
        raise DataError(
            f"{label}: does not decode ({error.strerror}); re-encode or remove the file"
        ) from None


def _upright(frame: Any, scaler: VideoReformatter, size: Size | None, label: str) -> Frames:
    """Return a decoded frame as uint8 [H, W, 3], rotated and scaled to (height, width) `size`."""
    turns = _quarter_turns(frame, label)
    height, width = size or (None, None)
    if turns % 2:
        height, width = width, height
    picture = scaler.reformat(
        frame, width=width, height=height, format="rgb24", interpolation=SCALER, threads=1
    ).to_ndarray()
    return np.ascontiguousarray(np.rot90(picture, turns))


def probe_by_decoding(source: Source, *, name: str | None = None) -> VideoInfo:
    """Decode the whole video once and return what it holds; container headers are not trusted."""
    label = name or _label(source)
    with _open(source, label) as container:
        stream = _video_stream(container, label)
        nominal = float(stream.average_rate or stream.guessed_rate or 0)
        stream.thread_type = "NONE"
        times: list[float] = []
        shape, turns = (0, 0), 0
        try:
            for ordinal, frame in enumerate(container.decode(stream)):
                times.append(float(frame.time) if frame.time is not None else ordinal / (nominal or 1.0))
                if shape not in ((0, 0), (frame.height, frame.width)):
                    raise DataError(
                        f"{label}: frame {ordinal} is {frame.width}x{frame.height}, earlier ones are "
                        f"{shape[1]}x{shape[0]}; split the video where its size changes"
                    )
                shape, turns = (frame.height, frame.width), _quarter_turns(frame, label)
        except av.error.FFmpegError as error:
            raise DataError(
                f"{label}: does not decode after {len(times)} frames ({error.strerror})"
            ) from None
    if not times:
        raise DataError(f"{label}: holds no decodable video frame")
    gaps = np.diff(times)
    if len(gaps) and gaps.min() <= 0:
        raise DataError(f"{label}: frame {int(gaps.argmin()) + 1} has a time not after its predecessor's")
    mean = float(gaps.mean()) if len(gaps) else 0.0
    height, width = shape[::-1] if turns % 2 else shape
    return VideoInfo(
        frames=len(times),
        width=width,
        height=height,
        rotation=90 * turns,
        times=tuple(times),
        fps=1 / mean if mean else nominal,
        nominal_fps=nominal,
        variable_rate=bool(len(gaps)) and float(np.abs(gaps - mean).max()) > VARIABLE_RATE_TOLERANCE * mean,
    )


class Mp4Writer:
    """Writes H.264 yuv420p frame by frame; a context manager. Equal frames give equal bytes.

    Frames are uint8 [H, W, 3] of one size. yuv420p needs even sizes: `odd` says whether an odd one is refused, padded by
    repeating the last row or column, or cropped by one. The index stands in front, which takes a second pass at the end; a
    `growing` file has none and can be played at any moment, up to the last frame but one, even if its writer is killed.
    """

    def __init__(
        self,
        path: str | Path,
        fps: float,
        *,
        crf: int = 18,
        preset: str = "veryfast",
        odd: Literal["refuse", "pad", "crop"] = "refuse",
        growing: bool = False,
    ) -> None:
        self.path = path
        self._rate = Fraction(fps).limit_denominator(1001)
        parameters = REPRODUCIBLE + (IMMEDIATE if growing else "")
        self._options = {"crf": str(crf), "preset": preset, "threads": "1", "x264-params": parameters}
        self._odd = odd
        self._scaler = VideoReformatter()
        self._shape: tuple[int, ...] | None = None
        self._count = 0
        self._stream: Any = None
        movflags = GROWING if growing else "+faststart"
        options = {"movflags": movflags, "fflags": "+bitexact", **({"flush_packets": "1"} if growing else {})}
        self._container = av.open(str(path), "w", format="mp4", options=options)

    def __enter__(self) -> Mp4Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def size(self) -> Size:
        """The (height, width) written; of the first frame on."""
        return self._stream.height, self._stream.width

    def write(self, frame: Frames) -> None:
        """Append a frame; DataError unless it is like the first."""
        if self._shape is None:
            self._begin(frame)
        if frame.shape != self._shape or frame.dtype != np.uint8:
            raise DataError(
                f"{self.path}: frame {self._count} is {frame.dtype} {list(frame.shape)}, expected uint8 {list(self._shape or ())}"
            )
        picture = self._scaler.reformat(
            av.VideoFrame.from_ndarray(_fit(frame, *self.size), format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=SCALER,
            threads=1,
        )
        picture.pts, picture.time_base = self._count, 1 / self._rate
        self._container.mux(self._stream.encode(picture))
        self._count += 1

    def close(self) -> None:
        """Write what is left; DataError if there was no frame."""
        if self._stream is None:
            self._container.close()
            raise DataError(f"{self.path}: no frames to encode")
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def abandon(self) -> None:
        """Release the file as it is; nothing after `close`."""
        self._container.close()

    def _begin(self, frame: Frames) -> None:
        height, width = even_size(frame.shape[0], frame.shape[1], self._odd)
        stream: Any = self._container.add_stream("libx264", rate=self._rate, options=self._options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        codec.color_range = int(ColorRange.MPEG)
        self._stream, self._shape = stream, frame.shape


def encode_mp4(
    path: str | Path,
    frames: Iterable[Frames],
    fps: float,
    *,
    crf: int = 18,
    preset: str = "veryfast",
    odd: Literal["refuse", "pad", "crop"] = "refuse",
) -> Size:
    """Write `frames` by `Mp4Writer`; return (height, width) written."""
    with Mp4Writer(path, fps, crf=crf, preset=preset, odd=odd) as writer:
        for frame in frames:
            writer.write(frame)
    return writer.size


def mp4_bytes(frames: Iterable[Frames], fps: float, *, crf: int = 18, preset: str = "veryfast") -> bytes:
    """Return what `encode_mp4` writes. The faststart pass re-opens its file, hence the temporary one."""
    with tempfile.TemporaryDirectory(prefix="solarwm-") as folder:
        path = Path(folder) / "clip.mp4"
        encode_mp4(path, frames, fps, crf=crf, preset=preset)
        return path.read_bytes()


def even_size(height: int, width: int, odd: Literal["refuse", "pad", "crop"]) -> Size:
    """Return the (height, width) that yuv420p will hold."""
    if not (height % 2 or width % 2):
        return height, width
    if odd == "refuse":
        raise DataError(
            f"video size {width}x{height}: H.264 yuv420p needs even width and height; nearest are "
            f"{width - width % 2}x{height - height % 2} (crop) and {width + width % 2}x{height + height % 2} (pad)"
        )
    step = 1 if odd == "pad" else -1
    return height + step * (height % 2), width + step * (width % 2)


def _fit(frame: Frames, height: int, width: int) -> Frames:
    missing = ((0, max(0, height - frame.shape[0])), (0, max(0, width - frame.shape[1])), (0, 0))
    if any(after for _, after in missing):
        frame = np.pad(frame, missing, mode="edge")
    return np.ascontiguousarray(frame[:height, :width])


def _stack(frames: list[Frames], label: str) -> Frames:
    if not frames:
        raise DataError(f"{label}: holds no decodable video frame")
    if len({frame.shape for frame in frames}) > 1:
        raise DataError(f"{label}: the frame size changes within the video; split it there")
    return np.stack(frames)


def _label(source: Source) -> str:
    return "video" if isinstance(source, bytes) else str(source)


def _open(source: Source, label: str) -> Any:
    stream = io.BytesIO(source) if isinstance(source, bytes) else str(source)
    try:
        # Titles and comments in another encoding are common, and nobody reads them.
        return av.open(stream, metadata_errors="replace")
    except av.error.FFmpegError as error:
        raise DataError(
            f"{label}: not a readable video ({error.strerror}); re-encode it or remove the clip"
        ) from None


def _video_stream(container: Any, label: str) -> Any:
    if not container.streams.video:
        raise DataError(f"{label}: holds no video stream; re-encode it or remove the clip")
    return container.streams.video[0]


def _quarter_turns(frame: Any, label: str) -> int:
    """Return the counter-clockwise quarter turns that the display matrix asks for."""
    if frame.rotation % 90:
        raise DataError(f"{label}: display rotation of {frame.rotation} degrees, expected a multiple of 90")
    return int(frame.rotation // 90) % 4
