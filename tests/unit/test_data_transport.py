"""Transport: one reader for folders, staged shards and byte ranges; what passes is tried again, what does not is said."""

import io
import os
import sys
from dataclasses import dataclass, field

import fsspec
import pytest

from solarwm_lib.config.sections import Transport
from solarwm_lib.data import transport
from solarwm_lib.data.index import RawRow, write_index
from solarwm_lib.data.shards import ShardWriter
from solarwm_lib.data.transport import RemoteFiles, open_shards, warm_cache
from solarwm_lib.runtime.errors import ConfigError, DataError

NAMES = ("a.camera.npz", "a.manifest.json", "a.video.mp4")
ROOT = "memory://lab/clips"


@dataclass
class DataSection:
    root: str
    transport: Transport = field(default_factory=Transport)


def stored_row(target, shard="shards/p.tar", **changes):
    """Write a shard below `target` (folder or address) and return its row."""
    stream = io.BytesIO()
    writer = ShardWriter(stream)
    records = {name: writer.add(name, f"{shard}{name}".encode() * 50).model_dump() for name in NAMES}
    size, digest = writer.finish()
    with fsspec.open(f"{target}/{shard}", "wb", auto_mkdir=True) as file:
        file.write(stream.getvalue())
    fields = {
        "sample_id": shard,
        "key": "a",
        "shard": shard,
        "shard_size": size,
        "shard_digest": digest,
        "video_member": NAMES[2],
        "camera_member": NAMES[0],
        "manifest_member": NAMES[1],
        "members": records,
    }
    return RawRow.model_validate({k: v for k, v in (fields | changes).items() if v is not None})


@pytest.fixture(autouse=True)
def empty_memory():
    fsspec.filesystem("memory").store.clear()


def put(key, data, root=ROOT):
    fsspec.filesystem("memory").pipe_file(f"{root}/{key}", data)


def test_a_range_is_the_same_bytes_whatever_the_block_size():
    data = os.urandom(1000)
    put("a/p.tar", data)
    for block in (1, 7, 999, 1000, 10_000):
        remote = RemoteFiles(ROOT + "/", block_bytes=block)
        assert remote.size("a/p.tar") == 1000
        assert remote.read_range("a/p.tar", 3, 998) == data[3:998]
        assert b"".join(remote.read_blocks("a/p.tar", 0, 1000)) == data
        assert remote.read_range("a/p.tar", 5, 5) == b""
    assert remote.url("a/p.tar") == "memory://lab/clips/a/p.tar"


def test_a_missing_file_is_final_and_named_by_its_address():
    put("folder/p.tar", b"x")
    for key in ("q.tar", "folder"):
        with pytest.raises(DataError, match=f"^{ROOT}/{key}: not found; check data.transport"):
            RemoteFiles(ROOT).size(key)
    with pytest.raises(DataError, match=r"q.tar: not found"):
        RemoteFiles(ROOT).read_range("q.tar", 0, 1)


def test_a_body_that_stays_short_is_an_error_after_the_last_try():
    put("p.tar", b"x" * 10)
    with pytest.raises(DataError) as caught:
        RemoteFiles(ROOT, attempts=2).read_range("p.tar", 0, 12)
    assert str(caught.value) == (
        f"{ROOT}/p.tar: bytes 0 to 12 not read in 2 tries, last: EOFError: 10 of 12 bytes came back; "
        "check the network or raise data.transport.attempts"
    )


def test_trying_again_ends_with_the_time_limit():
    put("p.tar", b"x" * 10)
    with pytest.raises(DataError, match=r"not read in time after 1 tries.*data.transport.timeout_seconds"):
        RemoteFiles(ROOT, timeout_seconds=0.1).read_range("p.tar", 0, 12)
    with pytest.raises(DataError, match=r"not reached within 1800 s"):
        RemoteFiles(ROOT).read_range("p.tar", 0, 10, deadline=0.0)


def client_error(status, code="SomeCode"):
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "GetObject")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_servers_are_tried_again(status):
    assert transport._final(client_error(status), "size") is None
    wrapped = OSError(5, "translated")
    wrapped.__cause__ = client_error(status)
    assert transport._final(wrapped, "size") is None


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (404, "not found"),
        (401, "access is refused"),
        (403, "access is refused"),
        (400, "size not readable (HTTP 400"),
        (416, "size not readable (HTTP 416"),
    ],
)
def test_refusals_are_final(status, text):
    assert text in transport._final(client_error(status), "size")


def test_other_errors_are_sorted_by_whether_they_can_pass():
    import aiohttp
    import google.auth.exceptions
    from botocore.exceptions import EndpointConnectionError, NoCredentialsError
    from gcsfs.retry import HttpError

    passing = [
        ConnectionResetError(),
        TimeoutError(),
        EOFError(),
        EndpointConnectionError(endpoint_url="http://x"),
        aiohttp.ClientPayloadError(),
        aiohttp.ServerDisconnectedError(),
        google.auth.exceptions.TransportError(),
        HttpError({"code": 503}),
        HttpError({"code": "429"}),
    ]
    assert [error for error in passing if transport._final(error, "size") is not None] == []
    refused = [
        NoCredentialsError(),
        google.auth.exceptions.DefaultCredentialsError(),
        PermissionError(),
        OSError("Forbidden: x"),
        HttpError({"code": 401, "message": "no"}),
    ]
    assert all("credentials" in transport._final(error, "size") for error in refused)
    assert "size not readable (ValueError: odd)" in transport._final(ValueError("odd"), "size")


@pytest.mark.parametrize(
    ("root", "text"),
    [
        ("/data/clips", r"is not a bucket.s address, expected such as s3://"),
        ("swift9://x/y", r"found scheme 'swift9', expected s3, gs or memory"),
        (
            "http://x/y",
            r"found scheme 'http', expected s3, gs or memory",
        ),  # fsspec knows it, a run may not name it
        ("s3://", r"'s3://' names no bucket, expected such as s3://BUCKET/FOLDER"),
    ],
)
def test_an_address_nothing_can_read_is_refused(root, text):
    with pytest.raises(ConfigError, match=text) as caught:
        RemoteFiles(root)
    assert caught.value.exit_code == 2


def test_a_missing_bucket_package_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "gcsfs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs://b/x needs a package.*pip install 'solarwm-graph\[gcs\]'"):
        RemoteFiles("gs://b/x")


def test_a_forked_child_connects_anew():
    put("p.tar", b"content")
    remote = RemoteFiles(ROOT)
    remote.read_range("p.tar", 0, 3)
    parent = remote._filesystem
    child = os.fork()
    if child == 0:
        fresh = remote._filesystem is None and remote.read_range("p.tar", 0, 7) == b"content"
        os._exit(0 if fresh and remote._filesystem is not parent else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_every_transport_reads_the_same(tmp_path):
    local = stored_row(str(tmp_path / "data"))
    assert stored_row(ROOT) == local
    bucket = {"root": ROOT}
    sections = [
        DataSection(str(tmp_path / "data")),
        DataSection("/nowhere", Transport(root=str(tmp_path / "data"))),
        DataSection("/nowhere", Transport(**bucket)),
        DataSection("/nowhere", Transport(**bucket, cache_dir=str(tmp_path / "cache"), cache_max_gib=0.001)),
    ]
    expected = {name: f"shards/p.tar{name}".encode() * 50 for name in NAMES}
    for section in sections:
        reader = open_shards(section)
        reader.check([local])
        reader.prefetch(["shards/p.tar"])
        assert reader.read_many(local, NAMES) == expected
        assert reader.read(local, NAMES[0]) == expected[NAMES[0]]
        reader.close()
    assert open_shards(DataSection("/nowhere"), tmp_path / "data").read(local, NAMES[0])


def test_the_root_in_a_message_is_the_setting_it_comes_from(tmp_path):
    row = stored_row(str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match=r"missing under data.root"):
        open_shards(DataSection(str(tmp_path))).check([row])
    with pytest.raises(DataError, match=r"missing under data.transport.root"):
        open_shards(DataSection("/x", Transport(root=str(tmp_path)))).check([row])


def test_byte_ranges_are_checked_like_files():
    row = stored_row(ROOT)
    reader = open_shards(DataSection("/x", Transport(root=ROOT)))
    data = bytearray(fsspec.filesystem("memory").cat_file(f"{ROOT}/shards/p.tar"))
    data[row.members[NAMES[2]].offset] ^= 1
    put("shards/p.tar", bytes(data))
    assert reader.read(row, NAMES[0])
    with pytest.raises(DataError, match=r"sha256 is .*the shard is damaged"):
        reader.read(row, NAMES[2])
    for size, text in ((900, "shard has 900 bytes, the index promises shard_size"), (None, "not found")):
        fsspec.filesystem("memory").store.clear()
        if size:
            put("shards/p.tar", bytes(data[:size]))
        other = open_shards(DataSection("/x", Transport(root=ROOT)))
        with pytest.raises(DataError, match=text):
            other.read(row, NAMES[0])
        with pytest.raises(DataError, match=text):
            other.check([row])
    put("shards/p.tar", bytes(data[:900]))
    unsized = row.model_copy(update={"shard_size": None, "shard_digest": None})
    with pytest.raises(DataError, match=r"shard ends at byte 900.*the shard is truncated"):
        open_shards(DataSection("/x", Transport(root=ROOT))).read(unsized, NAMES[2])


def test_byte_ranges_need_recorded_offsets(tmp_path):
    row = stored_row(ROOT, members=None)
    reader = open_shards(DataSection("/x", Transport(root=ROOT)))
    for action in (lambda: reader.read(row, NAMES[0]), lambda: reader.check([row])):
        with pytest.raises(ConfigError, match=r"records no byte offsets.*set data.transport.cache_dir"):
            action()
    staged = Transport(root=ROOT, cache_dir=str(tmp_path))
    assert open_shards(DataSection("/x", staged)).read(row, NAMES[0])


def test_warming_stages_every_shard_once_and_refuses_what_does_not_fit(tmp_path, capsys):
    rows = [stored_row(ROOT, f"shards/{number}.tar") for number in range(5)]
    rows += [rows[0].model_copy(update={"sample_id": "again", "key": "b"})]
    write_index(tmp_path / "index.jsonl", rows)
    total = sum(row.shard_size for row in rows[:5])
    with pytest.raises(
        ConfigError, match=r"data.transport.cache_max_gib: 5 shards with \d+ bytes do not fit"
    ):
        warm_cache(tmp_path / "index.jsonl", ROOT, tmp_path / "cache", total / 2**30)
    assert not list((tmp_path / "cache").glob("*.data"))
    done = warm_cache(tmp_path / "index.jsonl", ROOT, tmp_path / "cache", 0.01, workers=2)
    assert (done["shards"], done["bytes"]) == (5, total) and done["elapsed_seconds"] > 0
    assert capsys.readouterr().err == ""  # the bar is for terminals
    fsspec.filesystem("memory").store.clear()
    warm = Transport(root=ROOT, cache_dir=str(tmp_path / "cache"))
    reader = open_shards(DataSection("/x", warm))
    reader.check(rows)
    assert all(reader.read(row, NAMES[0]) for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_gib": float("nan")}, "--max-gib: found nan, expected a positive number"),
        ({"max_gib": float("inf")}, "--max-gib: found inf"),
        ({"max_gib": 0}, "--max-gib: found 0"),
        ({"workers": 0}, "--workers: found 0"),
        ({"timeout": -1.0}, "--timeout-seconds: found -1"),
    ],
)
def test_warming_refuses_numbers_that_mean_nothing(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        warm_cache(tmp_path / "index.jsonl", ROOT, tmp_path / "cache", **{"max_gib": 1.0} | changes)
    assert not (tmp_path / "cache").exists()


def test_warming_without_an_index_makes_no_folder(tmp_path):
    with pytest.raises(DataError, match="index is missing"):
        warm_cache(tmp_path / "index.jsonl", ROOT, tmp_path / "cache", 1.0)
    assert not (tmp_path / "cache").exists()


def test_warming_stops_at_the_first_damaged_shard(tmp_path):
    rows = [stored_row(ROOT, f"{number}.tar") for number in range(3)]
    rows[1] = rows[1].model_copy(update={"shard_digest": "0" * 64})
    write_index(tmp_path / "index.jsonl", rows)
    with pytest.raises(DataError, match=r"^1.tar: sha256 is .*promises shard_digest 000"):
        warm_cache(tmp_path / "index.jsonl", ROOT, tmp_path / "cache", 0.01)
