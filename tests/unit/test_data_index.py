"""Index rows: what is accepted, what is refused with line and field, what survives a round trip."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.data.index import RawRow, check_relative_path, index_bytes, read_index, write_index
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
    assert read_index(tmp_path / name) == rows
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
