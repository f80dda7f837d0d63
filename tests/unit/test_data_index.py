"""Index rows: what is accepted, what is refused with line and field, what survives a round trip."""

import gzip
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.data import index as index_module
from solarwm_lib.data import index_scan
from solarwm_lib.data.index import (
    Index,
    LatentRow,
    RawRow,
    check_relative_path,
    check_rows,
    index_bytes,
    read_index,
    write_index,
)
from solarwm_lib.runtime.errors import DataError


def fields(sample_id="a", **changes):
    """A valid row; a change to None removes the field."""
    row = {
        "sample_id": sample_id,
        "key": sample_id,
        "shard": "shards/part-000000.tar",
        "video_member": f"{sample_id}.video.mp4",
        "camera_member": f"{sample_id}.camera.npz",
        "manifest": {},
        "num_frames": 33,
        "fps": 16.0,
    }
    return {key: value for key, value in (row | changes).items() if value is not None}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refusal(path):
    with pytest.raises(DataError) as caught:
        read_index(path)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    return str(caught.value)


BAD_PATHS = [
    "",
    "/abs/x.tar",
    "../x.tar",
    "a/../x.tar",
    "./x.tar",
    "a//x.tar",
    "a/",
    "a/./x.tar",
    "gs://b/x.tar",
    "C:/x.tar",
    "a\\x.tar",
    "a\0.tar",
]


def test_order_blank_lines_repeats_and_unknown_fields_are_kept(tmp_path):
    path = tmp_path / "train-index.jsonl"
    path.write_text(
        json.dumps(fields("b", epoch_repeats=3, kept_tier="xhigh"))
        + "\n\n  \n"
        + json.dumps(fields("a", caption="été"))
        + "\n"
    )
    rows = read_index(path)
    assert [row.sample_id for row in rows] == ["b", "a"]
    assert [row.epoch_repeats for row in rows] == [3, 1]
    assert json.loads(index_bytes(rows).splitlines()[0])["kept_tier"] == "xhigh"


@pytest.mark.parametrize("name", ["i.jsonl", "i.jsonl.gz"])
def test_written_rows_read_back_and_bytes_repeat(tmp_path, name):
    rows = [RawRow(**fields("a", caption="Zürich", start_frame=0)), RawRow(**fields("b"))]
    write_index(tmp_path / name, rows)
    assert list(read_index(tmp_path / name)) == rows
    assert index_bytes(rows, compressed=True) == index_bytes(rows, compressed=True)
    assert gzip.decompress(index_bytes(rows, compressed=True)) == index_bytes(rows)


@pytest.mark.parametrize("bad", BAD_PATHS)
@pytest.mark.parametrize("field", ["shard", "video_member", "camera_member"])
def test_paths_that_could_leave_the_root_are_refused(tmp_path, field, bad):
    message = refusal(write(tmp_path / "i.jsonl", fields("ok"), fields("a", **{field: bad})))
    assert "line 2" in message and f"field '{field}'" in message


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="/\\\0:"), min_size=1), min_size=1))
def test_a_path_is_accepted_exactly_when_no_segment_climbs(segments):
    path = "/".join(segments)
    if any(segment in (".", "..") for segment in segments):
        with pytest.raises(ValueError, match="segments"):
            check_relative_path(path)
    else:
        assert check_relative_path(path) == path
    for bad in (f"/{path}", f"{path}/", f"../{path}", f"s3://{path}", f"{path}/../x"):
        with pytest.raises(ValueError):
            check_relative_path(bad)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sample_id": ""}, "sample_id"),
        ({"sample_id": 7}, "sample_id"),
        ({"key": None}, "key"),
        ({"epoch_repeats": 0}, "epoch_repeats"),
        ({"epoch_repeats": True}, "epoch_repeats"),
        ({"epoch_repeats": 1.0}, "epoch_repeats"),
        ({"epoch_repeats": "2"}, "epoch_repeats"),
        ({"shard_size": 0}, "shard_size"),
        ({"shard_size": 5.0}, "shard_size"),
        ({"shard_size": True}, "shard_size"),
        ({"shard_digest": "ab" * 32}, "shard_size"),
        ({"shard_size": 9, "shard_digest": "xyz"}, "shard_digest"),
        ({"shard_size": 9, "shard_md5_b64": "AAAA"}, "shard_md5_b64"),
        ({"num_frames": 0}, "num_frames"),
        ({"fps": -1}, "fps"),
        ({"start_frame": -1}, "start_frame"),
        ({"manifest": None}, "manifest"),
        ({"members": {}}, "members"),
        ({"members": {"a.video.mp4": {"offset": 0, "bytes": 1, "sha256": "0" * 64}}}, "members"),
    ],
)
def test_a_bad_field_is_named_with_its_line(tmp_path, change, field):
    message = refusal(write(tmp_path / "i.jsonl", fields("ok"), fields(**({"sample_id": "a"} | change))))
    assert message.startswith(f"{tmp_path / 'i.jsonl'} line 2:") and field in message


def test_shard_size_accepts_digit_strings():
    assert RawRow(**fields(shard_size="2048")).shard_size == 2048


def test_duplicate_ids_are_refused(tmp_path):
    message = refusal(write(tmp_path / "i.jsonl", fields("a"), fields("b"), fields("a")))
    assert "row 2: field 'sample_id' repeats 'a' of row 0" in message


def test_rows_of_one_shard_must_agree_on_its_identity(tmp_path):
    message = refusal(write(tmp_path / "i.jsonl", fields("a", shard_size=1024), fields("b", shard_size=2048)))
    assert "shard_* fields of 'shards/part-000000.tar' differ from row 0" in message
    assert "differ" in refusal(write(tmp_path / "i.jsonl", fields("a", shard_size=1024), fields("b")))


def test_keys_that_webdataset_would_merge_are_refused(tmp_path):
    message = refusal(write(tmp_path / "i.jsonl", fields("a.one"), fields("a.two")))
    assert "collides with 'a.one'" in message
    other_shard = fields("a.two") | {"shard": "shards/part-000001.tar"}
    assert len(read_index(write(tmp_path / "i.jsonl", fields("a.one"), other_shard))) == 2


def test_empty_missing_and_damaged_indexes_are_refused(tmp_path):
    path = tmp_path / "i.jsonl"
    assert "index is missing" in refusal(path)
    path.write_text("\n \n")
    assert "index is empty" in refusal(path)
    path.write_text('{"sample_id": "a"\n')
    assert "line 1: not a JSON object" in refusal(path)
    path.write_text("[1]\n")
    assert "found list" in refusal(path)
    path.write_text('{"key": "a", "key": "b"}\n')
    assert "'key' appears twice" in refusal(path)
    path.write_text('{"fps": NaN}\n')
    assert "NaN is not JSON" in refusal(path)
    path.write_bytes(b'{"key": "\xff"}\n')
    assert "not UTF-8" in refusal(path)
    compressed = tmp_path / "i.jsonl.gz"
    for data in (b"plain text", gzip.compress(b"{}")[:-9]):
        compressed.write_bytes(data)
        assert "not readable" in refusal(compressed)


def test_loose_json_is_found_in_a_block_of_good_lines(tmp_path):
    good = [
        json.dumps(fields(f"row-{number}", caption='a ": b', notes={"a": [{"b": 1}]})) for number in range(40)
    ]
    for bad, message in (
        (
            '{"split": "a", ' + good[7][1:-1] + ', "split": "b"}',
            "line 8: not a JSON object (key 'split' appears twice)",
        ),
        (good[7][:-1] + ', "notes2": [NaN]}', "line 8: not a JSON object (NaN is not JSON)"),
        (good[7][:-1] + ', "notes2": Infinity}', "line 8: not a JSON object (Infinity is not JSON)"),
    ):
        path = tmp_path / "i.jsonl"
        path.write_text("\n".join([*good[:7], bad, *good[8:]]))
        assert refusal(path).endswith(message)
    path.write_text("\n".join([*good[:7], good[7][:-1] + ', "notes2": "NaN and Infinity"}', *good[8:]]))
    assert len(read_index(path)) == 40


@pytest.mark.parametrize("place", [0, 20])
def test_extra_fields_of_a_member_are_refused_wherever_they_stand(tmp_path, place):
    member = {"offset": 512, "bytes": 1, "sha256": "0" * 64}
    rows = [
        fields(
            f"r{number}", members={f"r{number}.{end}": dict(member) for end in ("video.mp4", "camera.npz")}
        )
        for number in range(30)
    ]
    rows[place]["members"][f"r{place}.video.mp4"]["mode"] = 1
    message = refusal(write(tmp_path / "i.jsonl", *rows))
    assert f"line {place + 1}: field 'members.r{place}.video.mp4.mode'" in message


def test_a_row_with_unknown_fields_among_ordinary_ones_is_fine(tmp_path):
    rows = [fields(f"r{number}") | ({"tier": {"x": 1}} if number == 20 else {}) for number in range(30)]
    index = read_index(write(tmp_path / "i.jsonl", *rows))
    assert len(index) == 30 and index[20].model_extra == {"tier": {"x": 1}}


LATENT = {
    "source_sample_id": "a",
    "source_frame_indices": [0, 1],
    "encoder_contract_digest": "0" * 64,
    "preencoded_member": "samples/a/preencoded.safetensors",
    "camera_member": "samples/a/camera.npz",
    "manifest_member": "samples/a/manifest.json",
}


def test_latent_rows_are_rows_of_an_index(tmp_path):
    latent = {
        "sample_id": "a/latent",
        "key": "a__latent",
        "shard": "shards/part-000000/samples-00000.tar",
    } | LATENT
    index = read_index(write(tmp_path / "i.jsonl", latent, fields("b")))
    assert isinstance(index[0], LatentRow) and isinstance(index[1], RawRow)
    quoting = fields("c", metadata={"encoder_contract_digest": "0"})
    assert isinstance(read_index(write(tmp_path / "k.jsonl", quoting, latent))[0], RawRow)
    message = refusal(write(tmp_path / "j.jsonl", latent | {"source_frame_indices": [1.5]}))
    assert "line 1: field 'source_frame_indices.0'" in message


@pytest.mark.parametrize("name", ["i.jsonl", "i.jsonl.gz"])
def test_rows_are_read_by_ordinal_as_they_were_written(tmp_path, name, monkeypatch):
    monkeypatch.setattr(index_module, "CHUNK", 997)  # blocks end inside rows
    rows = [
        RawRow(**fields(f"row {number}", caption="x" * (37 * number % 9000), shard=f"s-{number // 7}.tar"))
        for number in range(60)
    ]
    write_index(tmp_path / name, iter(rows))
    index = Index.open(tmp_path / name)
    assert index.path == tmp_path / name and len(index) == 60 and index[:] == rows == list(index)
    assert index[-1] == rows[-1] and index[5:9] == rows[5:9] and index[31].sample_id == "row 31"
    with pytest.raises(IndexError):
        index[60]
    assert index.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert index.decompressed_blake2s == hashlib.blake2s(index_bytes(rows)).hexdigest()
    ids = "".join(f"{row.sample_id}\n" for row in rows)
    assert index.ordered_sample_id_blake2s == hashlib.blake2s(ids.encode()).hexdigest()
    index.close()


def test_columns_hold_what_the_rows_say(tmp_path):
    rows = [
        fields(
            "a",
            epoch_repeats=3,
            start_frame=0,
            height=480,
            width=832,
            caption="x",
            dataset="room",
            split="train",
        ),
        fields("b", fps=None, num_frames=None, shard="other.tar", dataset="hall", caption=""),
        fields("c", shard_size=None, dataset="room"),
    ]
    index = read_index(write(tmp_path / "i.jsonl", *rows))
    columns = index.columns
    assert index.occurrences == 5 and index.shards == ["shards/part-000000.tar", "other.tar"]
    assert columns.shard.tolist() == [0, 1, 0] and columns.repeats.tolist() == [3, 1, 1]
    assert columns.num_frames.tolist() == [33, -1, 33] and columns.start_frame.tolist() == [0, -1, -1]
    assert columns.fps[[0, 2]].tolist() == [16.0, 16.0] and np.isnan(columns.fps[1])
    assert columns.height.tolist() == [480, -1, -1] and columns.width.tolist() == [832, -1, -1]
    assert columns.caption.tolist() == [True, False, False]
    assert columns.datasets == ["room", "hall"] and columns.dataset.tolist() == [0, 1, 0]
    assert columns.splits == ["train"] and columns.split.tolist() == [0, -1, -1]
    kinds = {
        "shard": "i4",
        "repeats": "i8",
        "num_frames": "i8",
        "fps": "f8",
        "start_frame": "i8",
        "height": "i4",
    }
    assert all(getattr(columns, name).dtype == kind for name, kind in kinds.items())


def test_shards_keep_their_identity(tmp_path):
    digest = "ab" * 32
    rows = [fields("a", shard_size=1024, shard_digest=digest), fields("b", shard="other.tar")]
    index = read_index(write(tmp_path / "i.jsonl", *rows))
    assert index.shard_identity(0) == (None, 1024, None, digest) == index[0].shard_identity()
    assert index.shard_identity(1) == (None,) * 4 and index.shard_bytes.tolist() == [1024, -1]


def test_an_index_of_rows_in_memory_is_checked_too():
    rows = [RawRow(**fields("a", epoch_repeats=2)), RawRow(**fields("b"))]
    index = Index.of(rows)
    assert list(index) == rows and index.occurrences == 3 and index.path is None
    assert index.sha256 == hashlib.sha256(index_bytes(rows)).hexdigest()
    with pytest.raises(DataError, match="row 1: field 'sample_id' repeats 'a' of row 0"):
        Index.of([rows[0], rows[0]])
    with pytest.raises(DataError, match="the set row 1: field 'sample_id' repeats"):
        check_rows([rows[0], rows[0]], "the set")
    with pytest.raises(DataError, match="holds no row"):
        Index.of([])


def test_equal_hashes_of_different_names_are_no_duplicates(monkeypatch):
    monkeypatch.setattr(index_scan, "hash", lambda value: 7, raising=False)
    rows = [RawRow(**fields(name, shard=f"{name}.tar")) for name in ("a", "b", "c")]
    assert len(Index.of(rows)) == 3
    with pytest.raises(DataError, match="row 3: field 'sample_id' repeats 'b' of row 1"):
        Index.of([*rows, rows[1]])
    with pytest.raises(DataError, match=r"row 3: field 'key' 'b\.x' collides with 'b' of row 1"):
        Index.of([*rows, rows[1].model_copy(update={"sample_id": "d", "key": "b.x"})])


def test_the_first_repetition_is_the_one_named(tmp_path):
    names = ["a", "b", "c", "b", "a"]
    assert "row 3: field 'sample_id' repeats 'b' of row 1" in refusal(
        write(tmp_path / "i.jsonl", *map(fields, names))
    )


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_several_processes_read_what_one_reads(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(index_module, "CHUNK", 5000)
    path = tmp_path / f"i.jsonl{suffix}"
    rows = [
        RawRow(**fields(f"row {number}", shard=f"s-{number % 5}.tar", dataset=f"d-{number % 3}"))
        for number in range(500)
    ]
    write_index(path, rows)
    alone = read_index(path)
    monkeypatch.setattr(index_scan, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(index_scan.os, "sched_getaffinity", lambda pid: {0, 1})
    shared = read_index(path)
    assert (shared.sha256, shared.decompressed_blake2s) == (alone.sha256, alone.decompressed_blake2s)
    assert shared.shards == alone.shards and list(shared) == list(alone)
    for name, values in vars(alone.columns).items():
        assert np.array_equal(getattr(shared.columns, name), values), name
    write_index(path, [*rows[:450], rows[3], *rows[451:]])
    assert "row 450: field 'sample_id' repeats 'row 3' of row 3" in refusal(path)
    lines = index_bytes(rows).splitlines(keepends=True)
    lines[333] = b'{"sample_id": 7}\n'
    path.write_bytes(gzip.compress(b"".join(lines)) if suffix else b"".join(lines))
    assert refusal(path).startswith(f"{path} line 334: field 'sample_id'")


def test_threads_and_forks_read_the_same_rows(tmp_path):
    rows = [RawRow(**fields(f"row {number}")) for number in range(300)]
    write_index(tmp_path / "i.jsonl.gz", rows)
    index = read_index(tmp_path / "i.jsonl.gz")

    def right():
        return all(index[ordinal] == rows[ordinal] for ordinal in range(0, 300, 7))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: right(), range(8)))
    child = os.fork()
    if child == 0:
        os._exit(0 if right() else 1)
    assert right() and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_rewritten_under_an_open_index_is_noticed(tmp_path):
    path = write(tmp_path / "i.jsonl", fields("a"), fields("b"))
    index = read_index(path)
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(DataError, match=r"row 1: not a JSON object .* the file changed after it was opened"):
        index[1]


def test_columns_outlive_the_file(tmp_path):
    index = read_index(write(tmp_path / "i.jsonl", fields("a")))
    index.close()
    index.close()
    assert index.occurrences == 1
