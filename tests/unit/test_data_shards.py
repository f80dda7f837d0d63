"""Shards: deterministic bytes, standard tar, and every kind of damage named instead of skipped."""

import gzip
import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solarwm_lib.data.index import Index, RawRow
from solarwm_lib.data.shards import ShardReader, ShardWriter, check_key
from solarwm_lib.runtime.errors import DataError

NAMES = ("a.camera.npz", "a.manifest.json", "a.video.mp4")


def shard(members):
    """Return (tar bytes, member records)."""
    stream = io.BytesIO()
    writer = ShardWriter(stream)
    records = {name: writer.add(name, data) for name, data in members.items()}
    writer.finish()
    return stream.getvalue(), records


def row_of(records, size, **changes):
    fields = {
        "sample_id": "a",
        "key": "a",
        "shard": "shards/p.tar",
        "shard_size": size,
        "video_member": "a.video.mp4",
        "camera_member": "a.camera.npz",
        "manifest_member": "a.manifest.json",
        "members": {name: record.model_dump() for name, record in records.items()},
    }
    return RawRow.model_validate(
        {key: value for key, value in (fields | changes).items() if value is not None}
    )


@pytest.fixture
def stored(tmp_path):
    """(root, tar bytes, row) of one sample on disk."""
    data, records = shard({name: name.encode() * 100 for name in NAMES})
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/p.tar").write_bytes(data)
    return tmp_path, data, row_of(records, len(data))


def refusal(root, row, name="a.video.mp4"):
    with pytest.raises(DataError) as caught:
        ShardReader(root).read(row, name)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    return str(caught.value)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_-]{1,40}\.[a-z.]{1,9}[a-z]", fullmatch=True), st.binary(max_size=2000)
    )
)
def test_any_tar_reader_finds_the_members_where_the_index_says(members):
    data, records = shard(members)
    assert (data, records) == shard(members)
    assert len(data) % 512 == 0 and data[-1024:] == bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        assert {entry.name: archive.extractfile(entry).read() for entry in archive} == members
        assert all(entry.mtime == entry.uid == entry.gid == 0 for entry in archive)
    for name, record in records.items():
        assert data[record.offset : record.offset + record.bytes] == members[name]


def test_members_are_read_by_offset_and_by_scanning(stored):
    root, data, row = stored
    unlisted = row_of({}, len(data), members=None)
    for name in NAMES:
        assert ShardReader(root).read(row, name) == name.encode() * 100
        assert ShardReader(root).read(unlisted, name) == name.encode() * 100
    assert "no member 'b.txt'" in refusal(root, row, "b.txt")
    assert "no member 'b.txt'" in refusal(root, unlisted, "b.txt")


def test_only_a_few_shards_stay_open(tmp_path):
    rows = []
    for ordinal in range(6):
        data, records = shard({name: bytes([ordinal]) for name in NAMES})
        (tmp_path / f"{ordinal}.tar").write_bytes(data)
        rows.append(row_of(records, len(data), shard=f"{ordinal}.tar"))
    reader = ShardReader(tmp_path, max_open=2)
    for ordinal in [0, 1, 2, 3, 4, 5, 0, 5, 0, 3]:
        assert reader.read(rows[ordinal], "a.video.mp4") == bytes([ordinal])
        assert len(reader._open) <= 2
    reader.close()


def test_missing_and_truncated_shards_are_named(stored):
    root, data, row = stored
    path = root / "shards/p.tar"
    path.write_bytes(data[:-600])
    assert "shard has" in refusal(root, row) and "truncated" in refusal(root, row)
    unsized = row_of({n: row.members[n] for n in NAMES}, None)
    path.write_bytes(data[: row.members["a.video.mp4"].offset + 10])
    assert "the shard is truncated" in refusal(root, unsized)
    path.write_bytes(data[:1000])
    assert "the shard is truncated" in refusal(root, unsized)
    path.unlink()
    assert "shards/p.tar: shard is missing" in refusal(root, row)


def test_missing_end_blocks_are_noticed(stored):
    root, data, row = stored
    (root / "shards/p.tar").write_bytes(data[:-1024])
    assert f"promises shard_size {len(data)}" in refusal(root, row)


def test_one_flipped_byte_is_noticed(stored):
    root, data, row = stored
    at = row.members["a.video.mp4"].offset + 5
    (root / "shards/p.tar").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert "sha256 is" in refusal(root, row)


def test_member_size_or_place_that_disagrees_is_named(stored):
    root, data, row = stored
    member = row.members["a.video.mp4"]
    for change in (
        {"bytes": member.bytes - 1},
        {"offset": member.offset + 512},
        {"offset": row.members[NAMES[0]].offset},
    ):
        wrong = row.members | {"a.video.mp4": member.model_copy(update=change)}
        message = refusal(root, row_of(wrong, len(data)))
        assert "do not belong together" in message or "no tar header" in message


def test_a_link_out_of_the_root_is_refused_and_one_inside_is_followed(stored, tmp_path_factory):
    root, data, row = stored
    outside = tmp_path_factory.mktemp("elsewhere") / "p.tar"
    outside.write_bytes(data)
    path = root / "shards/p.tar"
    path.rename(root / "moved.tar")
    path.symlink_to(root / "moved.tar")
    assert ShardReader(root).read(row, "a.video.mp4")
    path.unlink()
    path.symlink_to(outside)
    assert "outside data.root" in refusal(root, row)
    linked_root = tmp_path_factory.mktemp("links") / "root"
    linked_root.symlink_to(root)
    path.unlink()
    path.write_bytes(data)
    assert ShardReader(linked_root).read(row, "a.video.mp4")


def test_compressed_tars_are_refused(stored):
    root, data, _ = stored
    packed = gzip.compress(data)
    (root / "shards/p.tar").write_bytes(packed)
    assert "not a readable uncompressed tar" in refusal(root, row_of({}, len(packed), members=None))


def test_names_that_collide_or_climb_are_refused_while_writing():
    writer = ShardWriter(io.BytesIO())
    writer.add("a.txt", b"")
    with pytest.raises(DataError, match="added twice"):
        writer.add("a.txt", b"")
    for bad in ("../a", "/a", "a//b", "x" * 300):
        with pytest.raises(DataError, match="shard member"):
            writer.add(bad, b"")


@pytest.mark.parametrize("key", ["a.b", "", "a/b", "é", "a b"])
def test_keys_hold_no_dot_or_separator(key):
    with pytest.raises(DataError, match="sample key"):
        check_key(key)
    assert check_key("Clip_01-a") == "Clip_01-a"


def test_several_members_come_from_one_read_unless_they_lie_far_apart(tmp_path, monkeypatch):
    sizes = {"a.camera.npz": 10, "a.manifest.json": 0, "b.video.mp4": 200_000, "a.video.mp4": 5_000}
    data, records = shard({name: os.urandom(size) for name, size in sizes.items()})
    (tmp_path / "p.tar").write_bytes(data)
    row = row_of(records, len(data), shard="p.tar")
    spans = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: spans.append(arguments[1:]) or real(*arguments))
    reader = ShardReader(tmp_path)
    found = reader.read_many(row, ("a.video.mp4", "a.camera.npz", "a.manifest.json"))
    assert list(found) == ["a.video.mp4", "a.camera.npz", "a.manifest.json"]
    for name, content in found.items():
        assert content == data[records[name].offset : records[name].offset + sizes[name]]
    assert len(spans) == 2 and max(size for size, _ in spans) < 10_000
    assert reader.read_many(row, ()) == {}


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8), st.data())
def test_any_selection_of_members_reads_like_one_at_a_time(tmp_path_factory, contents, choice):
    names = [f"s{number}.bin" for number in range(len(contents))]
    data, records = shard(dict(zip(names, contents, strict=True)))
    root = tmp_path_factory.mktemp("shards")
    (root / "p.tar").write_bytes(data)
    fields = {"video_member": names[0], "camera_member": names[0], "manifest_member": names[0]}
    row = row_of(records, len(data), shard="p.tar", **fields)
    wanted = choice.draw(st.lists(st.sampled_from(names), unique=True))
    reader = ShardReader(root)
    assert reader.read_many(row, wanted) == {name: reader.read(row, name) for name in wanted}
    scanned = row_of({}, len(data), members=None, shard="p.tar", **fields)
    assert reader.read_many(scanned, wanted) == reader.read_many(row, wanted)


def test_a_cut_inside_the_read_ahead_names_the_first_member_that_is_gone(stored):
    root, data, row = stored
    unsized = row_of(row.members, None)
    (root / "shards/p.tar").write_bytes(data[: row.members["a.manifest.json"].offset + 3])
    with pytest.raises(DataError, match=r"member 'a.manifest.json'.*the shard is truncated"):
        ShardReader(root).read_many(unsized, NAMES)


def test_a_check_without_reading_names_missing_cut_and_short_shards(stored):
    root, data, row = stored
    path, unsized = root / "shards/p.tar", row_of(row.members, None)
    ShardReader(root).check([row, unsized])
    path.write_bytes(data[:-1024])
    with pytest.raises(
        DataError, match=f"has {len(data) - 1024} bytes, the index promises shard_size {len(data)}"
    ):
        ShardReader(root).check([row])
    ShardReader(root).check([unsized])
    path.write_bytes(data[:-2048])
    with pytest.raises(DataError, match=r"shard ends at byte .*sample 'a'"):
        ShardReader(root).check([unsized])
    path.unlink()
    with pytest.raises(DataError, match=r"shard is missing under data.transport.root"):
        ShardReader(root, root_key="data.transport.root").check([row])


def test_checking_an_index_that_records_sizes_looks_at_each_shard_once(tmp_path):
    rows = []
    for ordinal in range(3):
        data, records = shard({name: bytes([ordinal]) for name in NAMES})
        (tmp_path / f"{ordinal}.tar").write_bytes(data)
        for clip in "ab":
            names = {"sample_id": f"{ordinal}{clip}", "key": clip}
            rows.append(row_of(records, len(data), shard=f"{ordinal}.tar", **names))
    index = Index.of(rows)
    ShardReader(tmp_path).check(index)
    (tmp_path / "2.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"^2.tar: shard has 0 bytes"):
        ShardReader(tmp_path).check(index)


def test_threads_share_a_reader_whose_shards_are_closed_under_them(tmp_path):
    rows = []
    for ordinal in range(5):
        data, records = shard({name: bytes([ordinal]) * 3000 for name in NAMES})
        (tmp_path / f"{ordinal}.tar").write_bytes(data)
        rows.append(row_of(records, len(data), shard=f"{ordinal}.tar"))
    reader = ShardReader(tmp_path, max_open=1)

    def read(number):
        ordinal = number % 5
        return reader.read_many(rows[ordinal], NAMES)[NAMES[2]] == bytes([ordinal]) * 3000

    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(400)))
    reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_forked_child_reads_with_handles_of_its_own(stored):
    root, _, row = stored
    reader = ShardReader(root)
    reader.read(row, NAMES[0])
    child = os.fork()
    if child == 0:
        intact = reader._open == {} and reader.read(row, NAMES[1]) == NAMES[1].encode() * 100
        os._exit(0 if intact else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert reader.read(row, NAMES[2])
