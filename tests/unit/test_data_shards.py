"""Shards: deterministic bytes, standard tar, and every kind of damage named instead of skipped."""

import gzip
import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.data.index import RawRow
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
