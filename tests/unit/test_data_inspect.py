"""`inspect` counts, lists what is wrong with shards, and shows which way cameras move."""

import hashlib
import io
import json

import numpy as np
import pytest

from solarwm_lib.data import camera
from solarwm_lib.data.index import LatentRow, RawRow, write_index
from solarwm_lib.data.inspect import format_inspection, inspect
from solarwm_lib.data.shards import ShardReader, ShardWriter
from solarwm_lib.runtime.errors import ConfigError, DataError


def walk(sign=1.0, frames=20):
    """A camera walking along its own +z (OpenCV), or backwards."""
    c2w = np.tile(np.eye(4, dtype=np.float32), (frames, 1, 1))
    c2w[:, 2, 3] = sign * 0.1 * np.arange(frames)
    return c2w


def build(root, clips, per_shard=2, folder="shards", index="train-index.jsonl"):
    """An index and shards with cameras but no real video. `clips`: (key, camera array, further row fields)."""
    rows = []
    for start in range(0, len(clips), per_shard):
        name, stream = f"{folder}/train-{start // per_shard:06d}.tar", io.BytesIO()
        writer, pending = ShardWriter(stream), []
        for key, c2w, fields in clips[start : start + per_shard]:
            payloads = {
                "camera.npz": camera.npz_bytes(c2w=c2w),
                "video.mp4": b"video",
                "manifest.json": b"{}",
            }
            members = {
                f"{key}.{suffix}": writer.add(f"{key}.{suffix}", data) for suffix, data in payloads.items()
            }
            pending.append((key, members, {"num_frames": len(c2w), "fps": 16.0, "split": "train"} | fields))
        size, digest = writer.finish()
        rows += [
            RawRow(
                sample_id=f"clip {key}", key=key, shard=name, shard_size=size, shard_digest=digest,
                members={name: member.model_dump() for name, member in members.items()},
                video_member=f"{key}.video.mp4", camera_member=f"{key}.camera.npz",
                manifest_member=f"{key}.manifest.json", **fields,
            )
            for key, members, fields in pending
        ]  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(stream.getvalue())
    write_index(root / index, rows)
    return root / index


def clips(count=3, **fields):
    return [
        (f"c{number}", walk(), {"height": 32, "width": 48, "dataset": "room"} | fields)
        for number in range(count)
    ]


def test_counts_and_digests(tmp_path):
    data = [
        *clips(3, caption="a room", epoch_repeats=2),
        ("d", walk(frames=33), {"dataset": "hall", "fps": 24.0}),
    ]
    path = build(tmp_path, data)
    facts = inspect(path)
    assert facts["index"] == str(path) and facts["kind"] == "raw"
    assert (facts["rows"], facts["virtual_occurrences"], facts["shards"], facts["shards_checked"]) == (
        4,
        7,
        2,
        2,
    )
    ids = b"clip c0\nclip c1\nclip c2\nclip d\n"
    assert facts["ordered_sample_id_digest"] == hashlib.blake2s(ids).hexdigest()
    assert facts["decompressed_digest"] == hashlib.blake2s(path.read_bytes()).hexdigest()
    assert facts["num_frames"] == [20, 33] and facts["fps"] == [16, 24]
    assert facts["sizes"] == ["48x32", "unknown"] and (facts["captions"], facts["captions_missing"]) == (3, 1)
    room, hall = facts["table"]
    assert hall == {
        "dataset": "hall", "split": "train", "size": "unknown", "rows": 1, "occurrences": 1, "frames_min": 33,
        "frames_max": 33, "fps_min": 24, "fps_max": 24, "hours": 0.0004, "captions_missing": 1,
    }  # fmt: skip
    assert room["dataset"] == "room" and room["occurrences"] == 6 and room["captions_missing"] == 0
    assert facts["problems"] == [] and json.loads(json.dumps(facts)) == facts


def test_rows_that_say_nothing_are_counted_as_unknown(tmp_path):
    bare = {
        "sample_id": "a",
        "key": "a",
        "shard": "s.tar",
        "video_member": "a.v",
        "camera_member": "a.c",
        "manifest": {},
    }
    write_index(tmp_path / "i.jsonl.gz", [RawRow(**bare)])
    facts = inspect(tmp_path / "i.jsonl.gz")
    assert facts["num_frames"] is None and facts["fps"] is None and facts["sizes"] == ["unknown"]
    assert facts["table"][0]["dataset"] is None and facts["table"][0]["frames_min"] is None
    assert "shards_checked" not in facts and "cameras" not in facts, "no shard is at hand"
    assert inspect(tmp_path / "i.jsonl.gz", root=tmp_path, cameras=False)["problems"] == [
        "s.tar: cannot be read (No such file or directory); samples affected: 'a'"
    ]


def test_shards_are_compared_with_the_index(tmp_path):
    path = build(tmp_path, clips(5))
    shard = tmp_path / "shards/train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:1500])
    facts = inspect(path, cameras=False)
    (problem,) = facts["problems"]
    assert problem.startswith("shards/train-000001.tar at byte") and "it is truncated" in problem
    assert problem.endswith("samples affected: 'clip c2', 'clip c3'") and facts["shards_checked"] == 3
    assert inspect(path, cameras=False, check_shards=False)["problems"] == []
    assert problem in format_inspection(facts)


def test_latent_generations_keep_shards_beside_the_folder_of_the_index(tmp_path):
    digest = "0" * 64
    names = {f"{part}_member": f"samples/a/{part}.bin" for part in ("preencoded", "camera", "manifest")}
    stream = io.BytesIO()
    writer = ShardWriter(stream)
    members = {
        name: writer.add(name, camera.npz_bytes(c2w=walk()) if "camera" in name else b"x").model_dump()
        for name in names.values()
    }
    size, _ = writer.finish()
    (tmp_path / "shards/part-000000").mkdir(parents=True)
    (tmp_path / "index").mkdir()
    (tmp_path / "shards/part-000000/samples-00000.tar").write_bytes(stream.getvalue())
    row = LatentRow(
        sample_id="a", key="a", shard="shards/part-000000/samples-00000.tar", shard_size=size, source_sample_id="a",
        source_frame_indices=list(range(20)), encoder_contract_digest=digest, members=members, **names,
    )  # fmt: skip
    write_index(tmp_path / "index/train-index.jsonl", [row])
    facts = inspect(tmp_path / "index/train-index.jsonl")
    assert facts["kind"] == "latent" and facts["shards_checked"] == 1 and facts["problems"] == []
    assert facts["cameras"]["samples"] == 1


def test_cameras_that_walk_forward_agree_with_the_declaration(tmp_path):
    facts = inspect(build(tmp_path, clips()))
    assert facts["cameras"]["forward_dot_step"] == pytest.approx(1.0) and facts["warnings"] == []
    assert facts["cameras"]["samples"] == 3


def test_a_wrong_declaration_is_told_with_numbers(tmp_path):
    flipped = [(f"c{number}", camera.opengl_to_opencv(walk()), {}) for number in range(3)]
    path = build(tmp_path, flipped)
    facts = inspect(path)
    assert facts["cameras"]["forward_dot_step"] == pytest.approx(-1.0)
    assert any("opengl" in text for text in facts["warnings"]) and facts["problems"] == []
    assert facts["warnings"][0] in format_inspection(facts)
    assert inspect(path, camera_axes="opengl")["warnings"] == []


def test_cameras_that_cannot_be_read_are_problems(tmp_path):
    path = build(tmp_path, clips())
    facts = inspect(path, camera_array_key="w2c")
    assert facts["cameras"]["unreadable"] == 3 and all("'w2c'" in text for text in facts["problems"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c2w: c2w[3].fill(np.nan), "frame 3 holds NaN or infinite values"),
        (lambda c2w: c2w[:, :3, :3].__imul__(1.5), "is not a rotation"),
        (lambda c2w: c2w[:, :3, 1].__imul__(-1), "is mirrored"),
    ],
)
def test_cameras_that_no_reader_would_take_are_problems(tmp_path, spoil, message):
    bad = walk()
    spoil(bad)
    facts = inspect(build(tmp_path, [("a", walk(), {}), ("b", bad, {})]))
    (problem,) = facts["problems"]
    assert "sample 'clip b': array 'c2w'" in problem and message in problem
    assert facts["cameras"]["refused"] == 1 and facts["cameras"]["samples"] == 2


def test_a_camera_of_another_length_than_its_video_is_a_problem(tmp_path):
    (problem,) = inspect(build(tmp_path, [("a", walk(), {"num_frames": 99})]))["problems"]
    assert f"camera has {len(walk())} rows, the video 99 frames" in problem


def test_what_cannot_be_looked_for_is_refused(tmp_path):
    path = build(tmp_path, clips())
    with pytest.raises(ConfigError, match=r"--root: .* is not a folder of this machine"):
        inspect(path, root="s3://bucket")
    with pytest.raises(ConfigError, match=r"data.camera_array_key: found 'poses', expected one of c2w"):
        inspect(path, camera_array_key="poses")


def test_cameras_may_come_from_elsewhere(tmp_path):
    path = build(tmp_path / "there", clips())
    here = tmp_path / "train-index.jsonl"
    here.write_bytes(path.read_bytes())
    assert "cameras" not in inspect(here)
    shards = ShardReader(tmp_path / "there")
    assert inspect(here, transport=shards)["cameras"]["samples"] == 3
    assert inspect(here, root=tmp_path / "there")["shards_checked"] == 2


def test_a_bad_index_is_refused(tmp_path):
    (tmp_path / "i.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="line 1: field 'sample_id': Field required"):
        inspect(tmp_path / "i.jsonl")


def test_the_text_for_a_terminal_names_every_fact(tmp_path):
    text = format_inspection(inspect(build(tmp_path, clips(caption="x"))))
    for word in (
        "rows",
        "virtual_occurrences",
        "decompressed_digest",
        "48x32",
        "room",
        "forward_dot_step",
        "hours",
    ):
        assert word in text
    assert "problems" not in text
