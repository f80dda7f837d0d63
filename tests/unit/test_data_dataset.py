"""Samples from a dataset on disk: geometry, guards, caches, and each refusal."""

import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from solarwm_lib.artifacts import Transaction
from solarwm_lib.config import sections as config
from solarwm_lib.data import camera, video
from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.data.dataset import RawClips, read_dataset
from solarwm_lib.data.index import RawRow, index_bytes, read_index
from solarwm_lib.data.shards import ShardReader, ShardWriter
from solarwm_lib.data.synthetic import camera_path
from solarwm_lib.data.writer import SCHEMA, Clip, RawDatasetWriter
from solarwm_lib.runtime.errors import DataError


def Data(**changes):
    """The `data` section of a run over clips of 20 frames."""
    fields = {"root": "-", "pixel_frames": 9, "height": 32, "width": 48, "fps": 16.0, "seed": 1}
    return config.Data(**fields | changes)


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


def open_clips(root, data=None, index="train-index.jsonl", cache=0.0, **options):
    return RawClips(root, index, data or Data(), cache, **options)


def at(clips, index):
    """What training reads at a global index."""
    return clips.load(clips.locate(index)[0])


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
        sample, planned = at(clips, index), clips.plan.occurrence_at(index)
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
        assert (sample.caption, sample.fps) == (f"room {number}", 16.0)
        assert clips.locate(index) == (planned, ())


def test_the_cache_changes_nothing_but_speed(root, monkeypatch):
    plain, cached = open_clips(root), open_clips(root, cache=1.0)
    for index in range(6):
        np.testing.assert_array_equal(at(plain, index).frames, at(cached, index).frames)
    monkeypatch.setattr(video, "decode", lambda *a, **k: pytest.fail("decoded again"))
    for index in range(6):
        at(cached, index)


def test_the_cache_is_bounded_in_bytes(root):
    one_clip = 20 * 32 * 48 * 3
    clips = open_clips(root, cache=1.5 * one_clip / 2**30)
    for index in range(9):
        at(clips, index)
        assert sum(frames.nbytes for frames in clips._decoded._held.values()) <= 1.5 * one_clip


def test_threads_may_share_a_reader(root):
    clips = open_clips(root, cache=1.0)
    with ThreadPoolExecutor(4) as pool:
        samples = list(pool.map(lambda index: at(clips, index), range(24)))
    alone = open_clips(root)
    for index, sample in enumerate(samples):
        np.testing.assert_array_equal(sample.frames, at(alone, index).frames)


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
    assert at(open_clips(root, Data(height=64, width=96)), 0).frames.shape == (9, 64, 96, 3)
    with pytest.raises(DataError, match=r"video is 48x32, data\.width x data\.height is 64x32.*pack"):
        at(open_clips(root, Data(height=32, width=64)), 0)


def far(c2w, at):
    c2w = c2w.copy()
    c2w[at:, 0, 3] += 50
    return c2w


def test_training_skips_guarded_clips_the_same_way_everywhere(tmp_path):
    root = build(tmp_path / "d", clip(0), clip(1, c2w=far(camera_path(20, 1), 4)), clip(2))
    clips = open_clips(root, Data(random_start=False))
    places = [clips.locate(index) for index in range(12)]
    assert {clips.load(planned).sample_id for planned, _ in places} == {"clip 0", "clip 2"}
    replaced = [rejected for _, rejected in places if rejected]
    assert len(replaced) == 4 and all("translation" in rejected[0] for rejected in replaced)
    again = open_clips(root, Data(random_start=False))
    assert [again.locate(i) for i in reversed(range(12))] == places[::-1]
    with pytest.raises(CameraGuardError, match="sample 'clip 1'"):
        clips.case(1, 0)
    open_clips(root, Data(max_relative_translation=None, max_camera_absolute=None)).case(1, 0)


def test_a_dataset_that_only_holds_guarded_clips_fails(tmp_path):
    root = build(tmp_path / "d", clip(1, c2w=far(camera_path(20, 1), 4)))
    with pytest.raises(DataError, match="16 clips in a row leave the camera guards"):
        open_clips(root, Data(random_start=False)).locate(0)


def test_only_cameras_are_read_to_locate_a_sample(root, monkeypatch):
    monkeypatch.setattr(video, "decode", lambda *a, **k: pytest.fail("decoded a video"))
    clips = open_clips(root)
    assert [clips.locate(index)[0].row_ordinal for index in range(3)]
    unguarded = open_clips(root, Data(max_relative_translation=None, max_camera_absolute=None))
    monkeypatch.setattr(ShardReader, "read_many", lambda *a, **k: pytest.fail("read a member"))
    assert [unguarded.locate(index) for index in range(3)]


def test_intrinsics_are_those_of_the_clip_where_the_run_says_so(tmp_path):
    own = np.array([[0.9, 0, 0.5], [0, 1.1, 0.4], [0, 0, 1]], np.float32)
    npz = camera.npz_bytes(c2w=camera_path(20, 0), intrinsics=own)
    clips = repack(tmp_path, camera=npz, options={"intrinsics_mode": "per_clip"})
    np.testing.assert_array_equal(clips.case(0, 3).intrinsics, own)
    plain = open_clips(tmp_path, index="i.jsonl")
    np.testing.assert_array_equal(plain.case(0, 3).intrinsics, camera.fixed_intrinsics())


def test_the_same_path_stored_in_another_convention_is_the_same_sample(tmp_path):
    """World-to-camera with OpenGL axes in centimetres, declared as such, against camera-to-world in metres."""
    c2w = camera_path(20, 0)
    stored = camera.opengl_to_opencv(c2w).astype(np.float64)
    stored[:, :3, 3] *= 100
    block = camera.camera_manifest((20, 4, 4), 2000.0, 2000.0) | {
        "array_key": "w2c",
        "axes": "opengl",
        "convention": "authoritative_source_w2c_no_axis_flip",
    }
    clips = repack(
        tmp_path,
        camera=camera.npz_bytes(w2c=np.linalg.inv(stored)),
        manifest=json.dumps({"camera": block}).encode(),
        data=Data(camera_array_key="w2c", camera_axes="opengl", camera_scale=0.01),
    )
    expected = camera.relative_w2c(c2w, [3, 4, 8])
    np.testing.assert_allclose(clips.case(0, 3).w2c, expected, atol=1e-5)


def test_a_dataset_read_through_a_bucket_is_the_same(root, tmp_path):
    """memory:// stands for any address: whole shards through the cache, and byte ranges."""
    import fsspec

    store = fsspec.filesystem("memory")
    for shard in (root / "shards").iterdir():
        store.pipe_file(f"/bucket-of-dataset/shards/{shard.name}", shard.read_bytes())
    address = {"root": "memory://bucket-of-dataset"}
    local = open_clips(root)
    for extra in ({}, {"cache_dir": str(tmp_path / "cache"), "cache_max_gib": 1.0}):
        clips = open_clips(root, Data(transport={**address, **extra}))
        clips.check()
        for index in range(4):
            clips.prefetch([index])
            np.testing.assert_array_equal(at(clips, index).frames, at(local, index).frames)
        clips.close()


def test_shards_elsewhere_may_be_absent_and_a_cut_one_is_still_refused(root, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    first, *_ = sorted((copy / "shards").iterdir())
    first.unlink()
    with pytest.raises(DataError, match=r"data\.root: .*is missing"):
        read_dataset(copy)
    assert read_dataset(copy, shards_elsewhere=True).digest == read_dataset(root).digest
    first.write_bytes(b"cut")
    with pytest.raises(DataError, match="has 3 bytes"):
        read_dataset(copy, shards_elsewhere=True)


def test_a_clip_longer_than_the_video_is_refused_on_opening(root):
    with pytest.raises(DataError, match=r"sample 'clip 0': video has 20 frames, the clip spans 21"):
        open_clips(root, Data(pixel_frames=21))


def repack(tmp_path, data=None, options=None, **payloads):
    """A dataset of one clip whose members are replaced by raw payloads, with a truthful index; opened."""
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
    return open_clips(tmp_path, data, "i.jsonl", **options or {})


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
    (member,) = payload
    undecodable = payload.get("manifest", b"").strip() in (b"junk", b"[]")
    assert caught.value.reason == ("shard" if undecodable else "video" if member == "video" else "camera")


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
