"""Samples from a dataset on disk: geometry, guards, caches, and each refusal."""

import hashlib
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest

from solarwm_lib.artifacts import Transaction
from solarwm_lib.data import camera, video
from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.data.dataset import RawClips
from solarwm_lib.data.index import RawRow, index_bytes, read_index
from solarwm_lib.data.inspect import inspect
from solarwm_lib.data.shards import ShardReader, ShardWriter
from solarwm_lib.data.synthetic import camera_path
from solarwm_lib.data.writer import SCHEMA, Clip, RawDatasetWriter
from solarwm_lib.runtime.errors import DataError


@dataclass(frozen=True)
class Data:
    pixel_frames: int = 9
    height: int = 32
    width: int = 48
    fps: float = 16.0
    seed: int = 1
    random_start: bool = True
    camera_array_key: str = "c2w"
    max_relative_translation: float | None = 20.0
    max_camera_absolute: float | None = 20.0


def frames_of(number, count=20, height=32, width=48):
    """Frames whose red level tells clip and time: uint8 [count, height, width, 3]."""
    frames = np.zeros((count, height, width, 3), np.uint8)
    frames[..., 0] = (60 * number + 4 * np.arange(count))[:, None, None]
    frames[..., 1] = np.linspace(0, 200, width)[None, None]
    return frames


def clip(number, **changes):
    frames = frames_of(number)
    fields = {
        "sample_id": f"clip {number}",
        "key": f"clip-{number}",
        "video": video.mp4_bytes(frames, 16, crf=4),
        "c2w": camera_path(len(frames), number),
        "fps": 16.0,
        "height": frames.shape[1],
        "width": frames.shape[2],
        "caption": f"room {number}",
        "scene": "room",
        "dataset": "test",
    }
    return Clip(**fields | changes)


def build(root, *clips):
    with Transaction(root, SCHEMA, {"test": 1}) as transaction:
        writer = RawDatasetWriter(transaction, clips_per_shard=2)
        for each in clips:
            writer.add("train", each)
        writer.finish()
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return build(tmp_path_factory.mktemp("d") / "clips", clip(0), clip(1), clip(2))


def open_clips(root, data=None, index="train-index.jsonl", cache=0.0):
    return RawClips(root, index, data or Data(), cache)


def edit_index(root, edit, name="edited.jsonl"):
    """Write a copy of the index whose first row is changed by `edit`; return its name."""
    rows = [
        json.loads(row.model_dump_json(exclude_none=True)) for row in read_index(root / "train-index.jsonl")
    ]
    edit(rows[0])
    (root / name).write_bytes(index_bytes([RawRow.model_validate(row) for row in rows]))
    return name


def test_a_sample_holds_the_planned_window_and_its_cameras(root):
    clips = open_clips(root)
    for index in range(6):
        sample, planned = clips.sample(index), clips.plan.occurrence_at(index)
        number = int(sample.sample_id.split()[1])
        assert (sample.row_ordinal, sample.start_frame) == (planned.row_ordinal, planned.start_frame)
        assert sample.occurrence_id == planned.occurrence_id
        expected = frames_of(number)[sample.start_frame :][:9]
        assert sample.frames.shape == (9, 32, 48, 3) and sample.frames.dtype == np.uint8
        assert (
            np.abs(sample.frames.astype(int)[..., 0].mean((1, 2)) - expected[..., 0].mean((1, 2))).max() < 3
        )
        c2w = camera_path(20, number)
        np.testing.assert_array_equal(
            sample.w2c, camera.relative_w2c(c2w, [sample.start_frame + j for j in (0, 1, 5)])
        )
        np.testing.assert_array_equal(sample.intrinsics, camera.fixed_intrinsics())
        assert (sample.caption, sample.fps, sample.rejected) == (f"room {number}", 16.0, ())


def test_the_cache_changes_nothing_but_speed(root, monkeypatch):
    plain, cached = open_clips(root), open_clips(root, cache=1.0)
    for index in range(6):
        np.testing.assert_array_equal(plain.sample(index).frames, cached.sample(index).frames)
    monkeypatch.setattr(video, "decode", lambda *a, **k: pytest.fail("decoded again"))
    for index in range(6):
        cached.sample(index)


def test_the_cache_is_bounded_in_bytes(root):
    one_clip = 20 * 32 * 48 * 3
    clips = open_clips(root, cache=1.5 * one_clip / 2**30)
    for index in range(9):
        clips.sample(index)
        assert sum(frames.nbytes for frames in clips._decoded._held.values()) <= 1.5 * one_clip


def test_threads_may_share_a_reader(root):
    clips = open_clips(root, cache=1.0)
    with ThreadPoolExecutor(4) as pool:
        samples = list(pool.map(clips.sample, range(24)))
    alone = open_clips(root)
    for index, sample in enumerate(samples):
        np.testing.assert_array_equal(sample.frames, alone.sample(index).frames)


def test_a_case_is_addressed_by_row_and_start(root):
    clips = open_clips(root)
    sample = clips.case(2, 11)
    assert (sample.sample_id, sample.start_frame, sample.row_ordinal) == ("clip 2", 11, 2)
    with pytest.raises(DataError, match=r"start frame 12 is outside 0\.\.11"):
        clips.case(2, 12)
    with pytest.raises(DataError, match="row 3 is outside"):
        clips.case(3, 0)


def test_faster_sources_are_resampled_by_time(tmp_path):
    root = build(tmp_path / "d", clip(0, fps=32.0, video=video.mp4_bytes(frames_of(0), 32, crf=4)))
    sample = open_clips(root).case(0, 2)
    np.testing.assert_allclose(sample.frames[..., 0].mean((1, 2)), 4 * (2 + 2 * np.arange(9)), atol=3)
    np.testing.assert_array_equal(sample.w2c, camera.relative_w2c(camera_path(20, 0), [2, 4, 12]))


def test_videos_of_nearly_the_same_shape_are_scaled_and_others_refused(root):
    assert open_clips(root, Data(height=64, width=96)).sample(0).frames.shape == (9, 64, 96, 3)
    with pytest.raises(DataError, match=r"video is 48x32, data\.width x data\.height is 64x32.*pack"):
        open_clips(root, Data(height=32, width=64)).sample(0)


def far(c2w, at):
    c2w = c2w.copy()
    c2w[at:, 0, 3] += 50
    return c2w


def test_training_skips_guarded_clips_the_same_way_everywhere(tmp_path):
    root = build(tmp_path / "d", clip(0), clip(1, c2w=far(camera_path(20, 1), 4)), clip(2))
    clips = open_clips(root, Data(random_start=False))
    samples = [clips.sample(index) for index in range(12)]
    assert {sample.sample_id for sample in samples} == {"clip 0", "clip 2"}
    replaced = [sample for sample in samples if sample.rejected]
    assert len(replaced) == 4 and all("translation" in sample.rejected[0] for sample in replaced)
    again = open_clips(root, Data(random_start=False))
    assert [again.sample(i).occurrence_id for i in reversed(range(12))] == [s.occurrence_id for s in samples][
        ::-1
    ]
    with pytest.raises(CameraGuardError, match="sample 'clip 1'"):
        clips.case(1, 0)
    open_clips(root, Data(max_relative_translation=None, max_camera_absolute=None)).case(1, 0)


def test_a_dataset_that_only_holds_guarded_clips_fails(tmp_path):
    root = build(tmp_path / "d", clip(1, c2w=far(camera_path(20, 1), 4)))
    with pytest.raises(DataError, match="16 clips in a row leave the camera guards"):
        open_clips(root, Data(random_start=False)).sample(0)


def test_a_clip_longer_than_the_video_is_refused_on_opening(root):
    with pytest.raises(DataError, match=r"sample 'clip 0': video has 20 frames, the clip spans 21"):
        open_clips(root, Data(pixel_frames=21))


def repack(tmp_path, **payloads):
    """A dataset of one clip whose members are replaced by raw payloads, with a truthful index."""
    source = build(tmp_path / "source", clip(0))
    row = read_index(source / "train-index.jsonl")[0]
    reader, stream = ShardReader(source), io.BytesIO()
    writer = ShardWriter(stream)
    members = {}
    for name in row.members:
        suffix = name.split(".", 1)[1].split(".")[0]
        members[name] = writer.add(name, payloads.get(suffix) or reader.read(row, name)).model_dump()
    size, digest = writer.finish()
    (tmp_path / "p.tar").write_bytes(stream.getvalue())
    fields = row.model_dump() | {
        "shard": "p.tar",
        "members": members,
        "shard_size": size,
        "shard_digest": digest,
    }
    (tmp_path / "i.jsonl").write_bytes(index_bytes([RawRow.model_validate(fields)]))
    return open_clips(tmp_path, index="i.jsonl")


NAN = camera_path(20, 0)
NAN[7, 1, 1] = np.nan


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"camera": camera.npz_bytes(c2w=NAN)}, "frame 7 holds NaN"),
        ({"camera": camera.npz_bytes(c2w=np.zeros((20, 3, 4)))}, r"shape \[20, 3, 4\]"),
        ({"camera": camera.npz_bytes(c2w=2 * camera_path(20, 0))}, "not a rotation"),
        ({"camera": camera.npz_bytes(c2w=camera_path(19, 0))}, "camera has 19 rows, the video 20 frames"),
        ({"camera": b"junk"}, "not a readable NPZ"),
        ({"manifest": b"junk"}, "is not JSON"),
        ({"manifest": b"[]"}, "not a JSON object"),
        ({"manifest": b"{}"}, "no 'camera' block"),
        (
            {"manifest": json.dumps({"camera": {"convention": "opengl"}}).encode()},
            "camera.convention is 'opengl'",
        ),
        (
            {"manifest": json.dumps({"camera": camera.camera_manifest((20, 4, 4), 5.0)}).encode()},
            r"camera.max_rel_translation is 5.0, expected 20.0",
        ),
        ({"video": b"junk"}, "not a readable video"),
        ({"video": video.mp4_bytes(frames_of(0, 12), 16)}, "decoded 12 frames"),
    ],
)
def test_bad_payloads_are_one_line_naming_the_sample(tmp_path, payload, message):
    clips = repack(tmp_path, **payload)
    with pytest.raises(DataError, match=message) as caught:
        clips.case(0, 11)
    assert caught.value.exit_code == 3
    assert "clip 0" in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_without_caption_anywhere_is_refused_and_an_empty_one_is_not(root):
    index = edit_index(root, lambda row: row.pop("caption"))
    assert open_clips(root, index=index).case(0, 0).caption == "room 0"  # from the manifest

    def inline(row):
        row.pop("caption")
        row["manifest"] = {"camera": camera.camera_manifest((20, 4, 4))}

    with pytest.raises(DataError, match="sample 'clip 0': no caption"):
        open_clips(root, index=edit_index(root, inline)).case(0, 0)
    index = edit_index(root, lambda row: row.update(caption=""))
    assert open_clips(root, index=index).case(0, 0).caption == ""


def test_members_that_do_not_match_the_shard_are_refused(root):
    def shrink(row):
        row["members"]["clip-0.video.mp4"]["bytes"] -= 1

    with pytest.raises(DataError, match="do not belong together"):
        open_clips(root, index=edit_index(root, shrink)).case(0, 0)


def test_a_rejected_clip_leaves_nothing_written(tmp_path):
    for bad, message in (
        (clip(0, key="a.b"), "sample key"),
        (clip(0, c2w=NAN), "holds NaN"),
    ):
        with pytest.raises(DataError, match=message):
            build(tmp_path / "d", clip(1), bad)
    with pytest.raises(DataError, match="repeats 'clip 1'"):
        build(tmp_path / "d", clip(1), replace(clip(1), key="other"))
    with pytest.raises(DataError, match="no training clip"):
        build(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_inspect_counts_digests_and_shows_the_motion(root):
    path = root / "train-index.jsonl"
    facts = inspect(path)
    assert facts["rows"] == 3 and facts["virtual_occurrences"] == 3 and facts["shards"] == 2
    ids = hashlib.blake2s(b"clip 0\nclip 1\nclip 2\n").hexdigest()
    assert facts["ordered_sample_id_digest"] == ids
    # Our writer stores rows canonically, so both digests are that of the file.
    assert (
        facts["ordered_row_digest"]
        == facts["decompressed_digest"]
        == hashlib.blake2s(path.read_bytes()).hexdigest()
    )
    assert facts["num_frames"] == [20, 20] and facts["sizes"] == ["48x32"] and facts["captions"] == 3
    assert facts["cameras"]["samples"] == 3 and facts["cameras"]["step_length"] > 0


def test_inspect_shows_a_reversed_convention(tmp_path):
    walk = np.tile(np.eye(4, dtype=np.float32), (20, 1, 1))
    walk[:, 2, 3] = 0.1 * np.arange(20)  # forward along its own +z
    forward = inspect(build(tmp_path / "cv", clip(0, c2w=walk)) / "train-index.jsonl")
    flipped = inspect(
        build(tmp_path / "gl", clip(0, c2w=camera.opengl_to_opencv(walk))) / "train-index.jsonl"
    )
    assert forward["cameras"]["forward_dot_step"] == 1.0 and flipped["cameras"]["forward_dot_step"] == -1.0
    assert forward["cameras"]["step_length"] == pytest.approx(0.1)
