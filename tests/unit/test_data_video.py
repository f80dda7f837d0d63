"""Video: round trip, counting by decoding, rotation, odd sizes, damage."""

import struct

import av
import numpy as np
import pytest

from solarwm_lib.data import video
from solarwm_lib.runtime.errors import DataError


def moving(frames=9, height=32, width=48):
    """A smooth moving pattern, uint8 [frames, height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width] / 16
    waves = [
        np.stack([np.sin(x + i / 4), np.cos(y - i / 5), np.sin(x / 2 + y / 2 + i / 6)], -1)
        for i in range(frames)
    ]
    return (127 + 100 * np.stack(waves)).astype(np.uint8)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b) ** 2))


def rotated_90_clockwise(mp4):
    """The same mp4 with a display matrix that asks players to turn it 90 degrees clockwise."""
    at = mp4.find(b"tkhd") + 4 + 4 + 20 + 16
    return mp4[:at] + struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30) + mp4[at + 36 :]


def with_key_frames(path, frames, every):
    """Write frames with B frames and an open key frame every so many, as foreign files have them."""
    with av.open(str(path), "w") as container:
        options = {"threads": "1", "x264-params": f"keyint={every}:min-keyint={every}:scenecut=0:bframes=2"}
        stream = container.add_stream("libx264", rate=16, options=options)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def variable_rate(path, frames, ticks):
    """Write frames at the given times in units of 1/100 s."""
    from fractions import Fraction

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"threads": "1"})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.codec_context.time_base = Fraction(1, 100)
        for frame, tick in zip(frames, ticks, strict=True):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = tick, Fraction(1, 100)
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def test_round_trip_keeps_count_size_rate_and_colour(tmp_path):
    frames = moving()
    assert video.encode_mp4(tmp_path / "a.mp4", frames, 16, crf=8) == (32, 48)
    decoded = video.decode(tmp_path / "a.mp4")
    assert decoded.shape == frames.shape and decoded.dtype == np.uint8
    assert psnr(decoded, frames) > 38
    assert np.abs((decoded.astype(float) - frames).mean(axis=(0, 1, 2))).max() < 1.0  # no colour cast
    info = video.probe_by_decoding(tmp_path / "a.mp4")
    assert (info.frames, info.height, info.width, info.rotation) == (9, 32, 48, 0)
    assert info.fps == pytest.approx(16) and not info.variable_rate


def test_equal_frames_give_equal_bytes_with_the_index_in_front():
    frames = moving(17, 64, 96)
    data = video.mp4_bytes(frames, 16, crf=8)
    held = []
    for attempt in range(12):
        held.append(
            bytearray(1000 * attempt + 17)
        )  # moves the allocator, where uninitialised reads would show
        assert video.mp4_bytes(frames, 16, crf=8) == data
    assert data.find(b"moov") < data.find(b"mdat")


def test_decode_takes_indices_in_any_order_and_from_bytes():
    data = video.mp4_bytes(moving(), 16)
    everything = video.decode(data)
    np.testing.assert_array_equal(video.decode(data, [0, 4, 4, 2]), everything[[0, 4, 4, 2]])


@pytest.mark.parametrize("start", [0, 15, 16, 29, 30, 31, 70, 88])
def test_a_window_is_decoded_from_the_key_frame_before_it(tmp_path, start):
    path = with_key_frames(tmp_path / "long.mp4", moving(90), every=30)
    whole = video.decode(path)
    assert np.array_equal(video.decode(path, [start + 1, start]), whole[[start + 1, start]])
    assert np.array_equal(video.decode(path.read_bytes(), [start], size=(16, 24)).shape, (1, 16, 24, 3))


def test_a_window_in_the_middle_reads_only_its_own_group(tmp_path):
    path = with_key_frames(tmp_path / "long.mp4", moving(90), every=30)
    before = video.decode(path, [64, 65])
    with av.open(str(path)) as container:
        first_group = [packet for packet in container.demux(video=0) if packet.size][1:20]
    data = bytearray(path.read_bytes())
    for packet in first_group:
        data[packet.pos + 8 : packet.pos + packet.size] = bytes(packet.size - 8)
    path.write_bytes(data)
    assert np.array_equal(video.decode(path, [64, 65]), before)


def test_a_variable_rate_window_is_the_one_counted_from_the_start(tmp_path):
    ticks = np.cumsum([1 + (i % 5) for i in range(60)])
    path = tmp_path / "variable.mp4"
    variable_rate(path, moving(60), ticks)
    whole = video.decode(path)
    for start in (16, 40, 58):
        assert np.array_equal(video.decode(path, [start, start + 1]), whole[start : start + 2])


def test_a_late_window_beyond_the_end_is_refused():
    mp4 = video.mp4_bytes(moving(20), 16)
    with pytest.raises(DataError, match=r"decoded 20 frames, the clip needs frame 20"):
        video.decode(mp4, [18, 20])


def test_a_video_shorter_than_the_clip_is_refused():
    with pytest.raises(DataError, match=r"clip-a: decoded 9 frames, the clip needs frame 12"):
        video.decode(video.mp4_bytes(moving(), 16), [0, 12], name="clip-a")


def test_rotation_metadata_is_honoured():
    data = video.mp4_bytes(moving(), 16)
    turned = rotated_90_clockwise(data)
    np.testing.assert_array_equal(video.decode(turned)[3], np.rot90(video.decode(data)[3], -1))
    info = video.probe_by_decoding(turned)
    assert (info.height, info.width, info.rotation) == (48, 32, 270)
    assert video.decode(turned, [0], size=(24, 16)).shape == (1, 24, 16, 3)


def test_the_rate_of_a_variable_rate_video_is_measured(tmp_path):
    ticks = [0, 3, 6, 30, 33, 60, 63, 100, 110]
    variable_rate(tmp_path / "vfr.mp4", moving(), ticks)
    info = video.probe_by_decoding(tmp_path / "vfr.mp4")
    assert info.frames == 9 and info.variable_rate
    assert info.times == pytest.approx([tick / 100 for tick in ticks], abs=1e-3)
    assert info.fps == pytest.approx(8 / 1.10, rel=1e-3)


@pytest.mark.parametrize(("odd", "size"), [("pad", (32, 48)), ("crop", (30, 46))])
def test_odd_sizes_are_padded_or_cropped_only_when_asked(tmp_path, odd, size):
    frames = moving(3)[:, :31, :47]
    with pytest.raises(DataError, match=r"47x31.*46x30 \(crop\) and 48x32 \(pad\)"):
        video.encode_mp4(tmp_path / "a.mp4", frames, 16)
    assert video.encode_mp4(tmp_path / "a.mp4", frames, 16, odd=odd) == size
    assert video.decode(tmp_path / "a.mp4").shape == (3, *size, 3)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    data = video.mp4_bytes(moving(), 16)
    for bad in (b"", b"junk" * 50, data[: len(data) // 2]):
        with pytest.raises(DataError) as caught:
            video.decode(bad, name="clip-a")
        assert str(caught.value).startswith("clip-a:") and "\n" not in str(caught.value)
    with pytest.raises(DataError, match="not a readable video"):
        video.decode(tmp_path / "none.mp4")


def test_a_title_in_another_encoding_is_no_damage(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        container.metadata["title"] = "QQQQ"
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for packet in (*stream.encode(av.VideoFrame.from_ndarray(moving()[0])), *stream.encode(None)):
            container.mux(packet)
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.count(b"QQQQ") == 1
    foreign = data.replace(b"QQQQ", b"\xe9\xff\xe9\xff")
    assert (video.decode(foreign) == video.decode(data)).all()
    assert video.probe_by_decoding(foreign).frames == 1


def test_frames_that_cannot_be_encoded_are_refused(tmp_path):
    with pytest.raises(DataError, match="no frames"):
        video.encode_mp4(tmp_path / "a.mp4", [], 16)
    with pytest.raises(DataError, match="frame 1 is uint8"):
        video.encode_mp4(tmp_path / "a.mp4", [moving()[0], moving(1, 16, 16)[0]], 16)
    with pytest.raises(DataError, match="float64"):
        video.encode_mp4(tmp_path / "a.mp4", [moving()[0] / 255], 16)
