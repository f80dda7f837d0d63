"""Windows: the published starts, names that cannot lie, and window indexes made from raw ones."""

import gzip
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.artifacts import Transaction
from solarwm_lib.data import windows
from solarwm_lib.data.index import LatentRow, RawRow, index_bytes, read_index
from solarwm_lib.data.writer import SCHEMA, Clip, RawDatasetWriter
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError


def row(sample_id="clip", **changes):
    fields = {
        "sample_id": sample_id,
        "key": "key",
        "shard": "shards/a.tar",
        "video_member": "key.video.mp4",
        "camera_member": "key.camera.npz",
        "manifest_member": "key.manifest.json",
        "num_frames": 20,
        "fps": 16.0,
    }
    return RawRow.model_validate(fields | changes)


def clip(name, frames, **changes):
    fields = {
        "sample_id": f"set/{name}",
        "key": name,
        "video": b"not decoded here",
        "c2w": np.tile(np.eye(4, dtype=np.float32), (frames, 1, 1)),
        "fps": 16.0,
        "height": 32,
        "width": 32,
        "caption": name,
        "scene": "room",
        "dataset": "set",
    }
    return Clip(**fields | changes)


def publish(root, train, test=()):
    with Transaction(root, SCHEMA, {"name": root.name}) as transaction:
        writer = RawDatasetWriter(transaction, clips_per_shard=2)
        for split, clips in (("train", train), ("test", test)):
            for each in clips:
                writer.add(split, each)
        writer.finish()
    return root


@pytest.mark.parametrize(
    ("frames", "starts"),
    [
        (120, [19]),
        (121, [0, 40]),
        (160, [0, 79]),
        (240, [0, 80, 159]),
        (960, [0, 80, 160, 240, 320, 400, 479, 559, 639, 719, 799, 879]),
    ],
)
def test_81_frame_windows_start_where_the_release_starts_them(frames, starts):
    assert list(windows.spread_starts(frames, 81)) == starts


def test_153_frame_windows_start_where_the_release_starts_them():
    assert windows.six_starts(960, 153) == (0, 161, 323, 484, 646, 807)
    published = {("dl3dv-10s/clip-a", 160): 3, ("dl3dv-10s/clip-b", 160): 2, ("spatialvid/clip-c", 320): 80}
    for (source, frames), start in published.items():
        assert windows.hashed_start(source, frames, 153, 153) == start
        assert windows.starts_of("wan_153f", source, "dl3dv", frames, 153, 153) == (start,)
    assert windows.starts_of("wan_153f", "x", "sekai_game", 960, 153, 153) == windows.six_starts(960, 153)


@given(span=st.integers(1, 200), extra=st.integers(0, 2000))
def test_spread_windows_lie_inside_the_clip_and_reach_both_ends(span, extra):
    starts = windows.spread_starts(span + extra, span)
    assert list(starts) == sorted(starts)
    assert min(starts) >= 0 and max(starts) <= extra
    if len(starts) > 1:
        assert (starts[0], starts[-1]) == (0, extra)


@given(source=st.text(min_size=1), span=st.integers(1, 200), extra=st.integers(0, 2000))
def test_hashed_windows_lie_inside_the_clip(source, span, extra):
    assert 0 <= windows.hashed_start(source, span + extra, span, 81) <= extra


@given(source=st.text(min_size=1), frames=st.integers(1, 999), index=st.integers(0, 999))
def test_a_window_id_states_its_source_length_and_place(source, frames, index):
    assert windows.split_id(windows.window_id(source, frames, index)) == (source, frames, index)


def test_names_are_those_of_the_release():
    assert windows.window_id("set/a", 153, 4) == "set/a/latent-153f-w04"
    assert windows.window_key("k", 81, 0) == "k__latent81f_w00"
    assert windows.namespace(81) == "solarwm-latent-81f-v1"
    assert windows.split_id("set/a") is None


def test_a_plain_clip_is_its_own_only_window():
    found = windows.window_of(row("set/a", start_frame=3), 5)
    assert found == windows.Window("set/a/latent-5f-w00", "key__latent5f_w00", "set/a", 0, 1, 3)
    assert windows.window_of(row("set/a"), 5).start == 0


def window(**changes):
    fields = {"start_frame": 7, "window_index": 1, "window_count": 2, "source_sample_id": "set/a"}
    return row("set/a/latent-5f-w01", key="k__latent5f_w01", **fields | changes)


def test_a_window_row_is_read_back():
    found = windows.window_of(window(), 5)
    assert found == windows.Window("set/a/latent-5f-w01", "k__latent5f_w01", "set/a", 1, 2, 7)


@pytest.mark.parametrize(
    ("changes", "frames", "message"),
    [
        ({}, 9, "window of 5 frames, data.pixel_frames is 9; make windows of that length"),
        ({"start_frame": None}, 5, "field 'start_frame' is absent, a window needs its start"),
        ({"source_sample_id": "set/b"}, 5, "'source_sample_id' is 'set/b', its id says 'set/a'"),
        ({"window_index": 0}, 5, "'window_index' is 0, its id says 1"),
        ({"window_count": 1}, 5, "'window_count' is 1, expected more than window 1"),
        ({"window_count": None}, 5, "'window_count' is None, expected more than window 1"),
        ({"window_hash_namespace": "other"}, 5, "is 'other', its id says 'solarwm-latent-5f-v1'"),
    ],
)
def test_a_window_that_contradicts_itself_is_refused(changes, frames, message):
    with pytest.raises(DataError, match=message):
        windows.window_of(window(**changes), frames)


@pytest.mark.parametrize("field", windows.ROLE_FIELDS)
def test_a_row_of_another_split_is_refused(field):
    windows.check_role({field: "train"}, "train", "sample 'a'")
    with pytest.raises(DataError, match=rf"sample 'a': field '{field}' is 'test' in the train index"):
        windows.check_role({field: "test"}, "train", "sample 'a'")


def test_a_window_index_has_every_window_of_every_clip_and_leaves_shards_where_they_are(tmp_path):
    data = publish(tmp_path / "data", [clip("a", 17, epoch_repeats=3), clip("b", 9)], [clip("c", 12)])
    made = windows.materialize_windows(data, "spread", tmp_path / "windows", pixel_frames=9)
    train, test = (read_index(made.path / f"{split}-index.jsonl") for split in ("train", "test"))
    assert [(r.sample_id, r.start_frame, r.epoch_repeats) for r in train] == [
        ("set/a/latent-9f-w00", 0, 3),
        ("set/a/latent-9f-w01", 8, 3),
        ("set/b/latent-9f-w00", 0, 1),
    ]
    assert [windows.window_of(r, 9).count for r in train] == [2, 2, 1]
    raw = read_index(data / "train-index.jsonl")[0]
    assert (train[0].shard, train[0].members, train[0].caption) == (raw.shard, raw.members, "a")
    assert [(r.sample_id, r.start_frame, r.split) for r in test] == [("set/c/latent-9f-w00", 1, "test")]
    assert [parent.path for parent in made.parents] == ["../data"]
    assert windows.materialize_windows(data, "spread", tmp_path / "windows", pixel_frames=9) == made


def test_windows_of_a_resampled_clip_span_its_source_frames(tmp_path):
    data = publish(tmp_path / "data", [clip("a", 40, fps=32.0)])
    made = windows.materialize_windows(data, "spread", tmp_path / "w", pixel_frames=9, fps=16.0)
    rows = read_index(made.path / "train-index.jsonl")
    assert [r.start_frame for r in rows] == list(windows.spread_starts(40, 17))
    assert (made.path / "test-index.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("profile", "frames", "error", "message"),
    [
        ("wan", 9, ConfigError, "profile: found 'wan', expected one of spread, hashed, wan_153f"),
        ("wan_153f", 9, ConfigError, "profile wan_153f has windows of 153 pixel frames, found 9"),
        ("spread", 0, ConfigError, "--pixel-frames: found 0, expected 1 or more"),
        ("hashed", 13, DataError, "sample 'set/b': video has 12 frames, a window spans 13 source frames"),
    ],
)
def test_windows_that_cannot_be_made_are_refused(tmp_path, profile, frames, error, message):
    data = publish(tmp_path / "data", [clip("a", 17), clip("b", 12)])
    with pytest.raises(error, match=message):
        windows.materialize_windows(data, profile, tmp_path / "out", pixel_frames=frames)
    assert not (tmp_path / "out").exists()


def test_windows_of_windows_and_other_identities_are_refused(tmp_path):
    data = publish(tmp_path / "data", [clip("a", 17, sample_id="set/a/latent-9f-w00")])
    with pytest.raises(DataError, match="is a window already; give the raw data set that it was cut from"):
        windows.materialize_windows(data, "spread", tmp_path / "w", pixel_frames=9)
    with pytest.raises(DataError, match=r"data.root: .*does not exist"):
        windows.materialize_windows(tmp_path / "no", "spread", tmp_path / "w", pixel_frames=9)
    data = publish(tmp_path / "other", [clip("a", 17)])
    windows.materialize_windows(data, "spread", tmp_path / "w", pixel_frames=9)
    with pytest.raises(ArtifactError, match="pixel_frames: found 9, wanted 5"):
        windows.materialize_windows(data, "spread", tmp_path / "w", pixel_frames=5)


def published_windows(path, *entries, compressed=False):
    data = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    return path


def window_entry(source, index, start, **changes):
    return {"sample_id": f"{source}/latent-153f-w{index:02d}", "start_frame": start} | changes


@pytest.fixture
def raw_indexes(tmp_path):
    """A training index with a six-window and a one-window clip, and a test index."""
    train = [
        row("abot/a", dataset="abot", num_frames=960, epoch_repeats=4, key="a"),
        row("dl3dv-10s/clip-a", dataset="dl3dv", num_frames=160, key="b"),
    ]
    test = [row("spatialvid/clip-c", dataset="spatialvid", num_frames=320, key="c", split="test")]
    for split, rows in (("train", train), ("test", test)):
        (tmp_path / f"raw-{split}.jsonl").write_bytes(index_bytes(rows))
    return [tmp_path / "raw-train.jsonl", tmp_path / "raw-test.jsonl"]


TEST_WINDOW = window_entry("spatialvid/clip-c", 0, 80, role="test")


def test_the_join_writes_one_row_per_published_window_in_its_order(tmp_path, raw_indexes):
    train = published_windows(
        tmp_path / "train.jsonl.gz",
        window_entry("dl3dv-10s/clip-a", 0, 3),
        window_entry("abot/a", 5, 807, source_sample_id="abot/a", recipe_role="train"),
        window_entry("abot/a", 0, 0),
        compressed=True,
    )
    test = published_windows(tmp_path / "test.jsonl", TEST_WINDOW)
    output = tmp_path / "deep" / "out.jsonl.gz"
    summary = windows.materialize_wan153f(*raw_indexes, train, test, output)
    text = gzip.decompress(output.read_bytes())
    rows = read_index(output)
    assert [(r.sample_id, r.start_frame, r.epoch_repeats, r.split) for r in rows] == [
        ("dl3dv-10s/clip-a/latent-153f-w00", 3, 1, "train"),
        ("abot/a/latent-153f-w05", 807, 1, "train"),
        ("abot/a/latent-153f-w00", 0, 1, "train"),
        ("spatialvid/clip-c/latent-153f-w00", 80, 1, "test"),
    ]
    assert [windows.window_of(r, 153).count for r in rows] == [1, 6, 6, 1]
    assert summary == {
        "schema": "solarwm.wan22-153f-window-index.v1",
        "output": str(output),
        "train_sources": 2,
        "test_sources": 1,
        "train_windows": 3,
        "test_windows": 1,
        "total_windows": 4,
        "window_hash_namespace": "solarwm-latent-153f-v1",
        "decompressed_sha256": hashlib.sha256(text).hexdigest(),
        "compressed_sha256": hashlib.sha256(output.read_bytes()).hexdigest(),
    }
    again = windows.materialize_wan153f(*raw_indexes, train, test, tmp_path / "again.gz")
    assert again["compressed_sha256"] == summary["compressed_sha256"]
    with pytest.raises(ArtifactError, match="exists and is never overwritten"):
        windows.materialize_wan153f(*raw_indexes, train, test, output)
    assert sorted(path.name for path in output.parent.iterdir()) == [output.name]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"sample_id": "abot/a"}], "line 1: field 'sample_id' is 'abot/a', expected SOURCE/latent-153f-wNN"),
        ([window_entry("nobody", 0, 0)], "line 1: source 'nobody' is in no raw index"),
        (
            [window_entry("spatialvid/clip-c", 0, 80)],
            "is in the raw test index, expected in the raw train index",
        ),
        ([window_entry("abot/a", 1, 160)], "window 1 starts at 160, its clip of 960 frames gives 161"),
        ([window_entry("abot/a", 6, 0)], "window 6 starts at 0, its clip of 960 frames gives only 6 windows"),
        ([window_entry("abot/a", 0, 0)] * 2, "line 2: window 0 of 'abot/a' appears twice"),
        ([window_entry("abot/a", 0, 0, role="test")], "field 'role' is 'test' in the train index"),
        ([[1]], "line 1: found list, expected a JSON object"),
    ],
)
def test_windows_that_do_not_belong_to_the_raw_rows_are_refused(tmp_path, raw_indexes, entries, message):
    train = published_windows(tmp_path / "train.jsonl", *entries)
    test = published_windows(tmp_path / "test.jsonl", TEST_WINDOW)
    with pytest.raises(DataError, match=message):
        windows.materialize_wan153f(*raw_indexes, train, test, tmp_path / "out.gz")
    assert not list(tmp_path.glob("*out.gz*"))


def test_a_cut_or_broken_window_index_is_refused(tmp_path, raw_indexes):
    test = published_windows(tmp_path / "test.jsonl", TEST_WINDOW)
    whole = gzip.compress(json.dumps(window_entry("abot/a", 0, 0)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: index is not readable"):
        windows.materialize_wan153f(*raw_indexes, tmp_path / "cut.jsonl.gz", test, tmp_path / "out.gz")
    (tmp_path / "bad.jsonl").write_text("\n{\n")
    with pytest.raises(DataError, match=r"bad.jsonl line 2: not a JSON object"):
        windows.materialize_wan153f(*raw_indexes, tmp_path / "bad.jsonl", test, tmp_path / "out.gz")


def test_a_source_in_both_raw_indexes_is_refused(tmp_path, raw_indexes):
    with pytest.raises(DataError, match="sample 'abot/a': in both raw indexes, expected in one"):
        windows.materialize_wan153f(
            raw_indexes[0], raw_indexes[0], raw_indexes[0], raw_indexes[0], tmp_path / "o"
        )


def test_stored_latents_have_no_windows():
    latent = {
        "sample_id": "set/a/latent-5f-w00",
        "key": "a",
        "shard": "shards/a.tar",
        "encoder_contract_digest": "0" * 64,
        "source_sample_id": "set/a",
        "source_frame_indices": [0, 1],
        "preencoded_member": "a/preencoded.safetensors",
        "camera_member": "a/camera.npz",
        "manifest_member": "a/manifest.json",
    }
    with pytest.raises(
        DataError, match=r"'set/a/latent-5f-w00': a row of stored latents, expected raw clips"
    ):
        windows.raw_row(LatentRow.model_validate(latent))
    assert windows.raw_row(row()) == row()


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_windows_at_a_rate_that_is_none_are_refused(tmp_path, fps):
    data = publish(tmp_path / "data", [clip("a", 17)])
    with pytest.raises(ConfigError, match=r"--fps: found .*expected a positive number"):
        windows.materialize_windows(data, "spread", tmp_path / "w", pixel_frames=5, fps=fps)
    assert not (tmp_path / "w").exists()


def test_a_window_longer_than_memory_is_refused_by_its_number(tmp_path):
    data = publish(tmp_path / "data", [clip("a", 17)])
    with pytest.raises(DataError, match="a window spans 7999999999 source frames"):
        windows.materialize_windows(data, "spread", tmp_path / "w", pixel_frames=4 * 10**9, fps=8)


def test_a_join_without_its_window_index_makes_no_folder(tmp_path, raw_indexes):
    absent = tmp_path / "absent.jsonl"
    with pytest.raises(DataError, match=r"--train-window-index: .*absent.jsonl: is not a file"):
        windows.materialize_wan153f(*raw_indexes, absent, absent, tmp_path / "deep/out.gz")
    assert not (tmp_path / "deep").exists()
