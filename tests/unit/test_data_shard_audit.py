"""Damaged, foreign and ambiguous shards are told by shard, member, byte and the samples they cost."""

import gzip
import io
import os
import tarfile
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.data.index import LatentRow, RawRow
from solarwm_lib.data.shard_audit import BLOCK, audit_shard, walk
from solarwm_lib.data.shards import ShardWriter

SUFFIXES = ("camera.npz", "manifest.json", "video.mp4")
NAME = "shards/part-000000.tar"


def packed(keys, suffixes=SUFFIXES, size=700):
    """A shard and its rows, sample ids `clip KEY`, as the writer makes them."""
    stream = io.BytesIO()
    writer, rows = ShardWriter(stream), []
    for number, key in enumerate(keys):
        members = {
            f"{key}.{suffix}": writer.add(f"{key}.{suffix}", bytes([number + 1]) * (size + number))
            for suffix in suffixes
        }
        rows.append((key, {name: member.model_dump() for name, member in members.items()}))
    total, digest = writer.finish()
    identity = {"shard_size": total, "shard_digest": digest}
    return stream.getvalue(), [row(key, members=members, **identity) for key, members in rows]


def row(key, **changes):
    fields = {
        "sample_id": f"clip {key}",
        "key": key,
        "shard": NAME,
        "video_member": f"{key}.video.mp4",
        "camera_member": f"{key}.camera.npz",
        "manifest_member": f"{key}.manifest.json",
    }
    return RawRow(**fields | changes)


def unrecorded(rows):
    """The rows as an index without offsets, sizes and digests states them."""
    return [row(each.key) for each in rows]


def problems(tmp_path, data, rows):
    (tmp_path / "x.tar").write_bytes(data)
    found = audit_shard(tmp_path / "x.tar", rows)
    assert all(str(each).startswith(NAME) and "\n" not in str(each) for each in found)
    return found


def tar(*members, **options):
    """A tar of (name, bytes or link target) by Python's own writer."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **options) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def files(*keys):
    return [(f"{key}.{suffix}", b"x" * 9) for key in keys for suffix in SUFFIXES]


def test_a_shard_that_holds_what_the_index_states_has_no_problem(tmp_path):
    data, rows = packed(["a", "b", "c"])
    assert problems(tmp_path, data, rows) == []
    assert problems(tmp_path, data, rows[1:]) == [], "an index may leave samples out"
    assert problems(tmp_path, data, unrecorded(rows)) == []


@given(
    st.lists(st.integers(0, 3000), max_size=6),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.integers(1, 300),
)
def test_the_walk_finds_what_tarfile_finds(sizes, form, length):
    members = [
        (f"{'long-' * (length // 5 if form != tarfile.USTAR_FORMAT else 1)}{number}.ü.bin", b"x" * size)
        for number, size in enumerate(sizes)
    ]
    data = tar(*members, format=form)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        expected = [(entry.name, entry.offset_data, entry.size) for entry in archive]
    with tempfile.TemporaryFile() as stream:
        stream.write(data)
        stream.flush()
        entries, fault = walk(stream.fileno(), os.fstat(stream.fileno()).st_size)
    assert fault is None and [(entry.name, entry.offset, entry.size) for entry in entries] == expected


@pytest.mark.parametrize("recorded", [True, False])
def test_a_truncated_shard_names_the_first_bad_member_and_what_is_lost(tmp_path, recorded):
    data, rows = packed(["a", "b", "c"])
    third = rows[1].members["b.manifest.json"].offset
    rows = rows if recorded else unrecorded(rows)
    (found,) = problems(tmp_path, data[: third + 100], rows)
    assert found.member == "b.manifest.json" and found.offset == third - BLOCK
    assert found.samples == ("clip b", "clip c")
    assert str(found) == (
        f"{NAME} at byte {third - BLOCK}: member 'b.manifest.json' needs bytes {third} to {third + 701}, the file ends at "
        f"byte {third + 100}: it is truncated; samples affected: 'clip b', 'clip c'"
    )
    (found,) = problems(tmp_path, data[: third - BLOCK + 5], rows)
    assert "cut inside a header" in str(found) and found.samples == ("clip b", "clip c")


def test_missing_end_blocks_are_told_even_if_no_sample_is_lost(tmp_path):
    data, rows = packed(["a", "b"])
    (found,) = problems(tmp_path, data[: -2 * BLOCK], unrecorded(rows))
    assert "end-of-archive blocks are missing" in found.what and found.samples == ()
    (found,) = problems(tmp_path, data[:-BLOCK], unrecorded(rows))
    assert "second end-of-archive block is missing" in found.what
    (found,) = problems(tmp_path, data + b"more", unrecorded(rows))
    assert f"data after the end-of-archive blocks, first at byte {len(data)}" in found.what


def test_two_shards_glued_together_end_for_readers_at_the_first(tmp_path):
    first, rows = packed(["a"])
    second, more = packed(["b"])
    (found,) = problems(tmp_path, first + second, unrecorded(rows + more))
    assert "data after the end-of-archive blocks" in found.what and found.samples == ("clip b",)


def test_damaged_headers_end_a_walk_where_readers_would_end_quietly(tmp_path):
    data, rows = packed(["a", "b", "c"])
    at = rows[1].members["b.camera.npz"].offset - BLOCK
    broken = data[:at] + b"\xff" * 20 + data[at + 20 :]
    found = problems(tmp_path, broken, rows)[0]
    assert found.offset == at and "no tar header here" in found.what and found.samples == ("clip b", "clip c")
    hole = data[:at] + b"\0" * 2048 + data[at + 2048 :]
    found = problems(tmp_path, hole, rows)[0]
    assert "data after the end-of-archive blocks" in found.what and found.samples == ("clip b", "clip c")


def test_a_reordered_shard_is_noticed_by_its_offsets(tmp_path):
    _, rows = packed(["a", "b", "c"])
    data, _ = packed(["a", "c", "b"])
    (moved,) = problems(tmp_path, data, rows)
    assert moved.samples == ("clip b", "clip c") and moved.member == "b.camera.npz"
    assert "re-ordered or of another build" in moved.what
    data, _ = packed(["a", "b", "c"], suffixes=("manifest.json", "camera.npz", "video.mp4"))
    assert problems(tmp_path, data, rows)[0].member == "a.camera.npz"


def test_a_foreign_shard_names_what_it_holds_instead(tmp_path):
    _, rows = packed(["a", "b"])
    data, _ = packed(["x", "y"])
    found = problems(tmp_path, data, rows)[0]
    assert found.samples == ("clip a", "clip b") and found.member == "a.camera.npz" and found.offset == BLOCK
    assert "it holds 6 members the index does not name, first 'x.camera.npz'" in found.what


def test_another_size_is_told_with_both_sizes(tmp_path):
    data, rows = packed(["a"])
    found = problems(tmp_path, data + b"\0" * 512, rows)
    assert [each.what for each in found] == [
        f"shard has {len(data) + 512} bytes, the index promises shard_size {len(data)}"
    ]
    other, _ = packed(["a"], size=600)
    assert "has 600 bytes, the index promises 700" in problems(tmp_path, other, rows)[0].what


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (gzip.compress(packed(["a"])[0]), "the file is gzip-compressed, expected an uncompressed tar"),
        (b"", "the file is empty"),
        (b"PK\3\4" + b"zip" * 400, "no tar header here"),
    ],
)
def test_files_that_are_no_tar(tmp_path, data, what):
    (found,) = problems(tmp_path, data, [row("a"), row("b")])
    assert what in found.what and found.offset == 0 and found.samples == ("clip a", "clip b")


def test_a_missing_shard_costs_all_its_samples(tmp_path):
    (found,) = audit_shard(tmp_path / "absent.tar", [row(str(number)) for number in range(7)])
    assert str(found) == (
        f"{NAME}: cannot be read (No such file or directory); samples affected: 'clip 0', 'clip 1', 'clip 2', 'clip 3', "
        "'clip 4' and 2 more"
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("/etc/a.video.mp4", "found '/etc/a.video.mp4', expected a relative path without"),
        ("../a.video.mp4", "found '../a.video.mp4', expected a relative path without"),
        ("./a.video.mp4", "found './a.video.mp4', expected a relative path without"),
    ],
)
def test_names_that_leave_the_root_are_told(tmp_path, name, what):
    found = problems(tmp_path, tar(*files("a"), (name, b"x")), [row("a")])
    assert [each.member for each in found] == [name] and what in found[0].what


def test_links_are_told_with_the_samples_that_need_them(tmp_path):
    members = [*files("a"), *files("b")[:2], ("b.video.mp4", "a.video.mp4"), ("c.video.mp4", "a.video.mp4")]
    (found,) = problems(tmp_path, tar(*members), [row("a"), row("b")])
    assert (
        found.what
        == "member 'b.video.mp4' is a symbolic link, expected a plain file (1 more members like it)"
    )
    assert found.samples == ("clip b",)


def test_folders_are_harmless(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        folder = tarfile.TarInfo("samples/")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files("a"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert problems(tmp_path, stream.getvalue(), [row("a")]) == []


def test_duplicate_members_are_told_with_both_places(tmp_path):
    (found,) = problems(tmp_path, tar(*files("a", "b"), ("a.video.mp4", b"other")), [row("a"), row("b")])
    assert found.what == "member 'a.video.mp4' is stored twice, first at byte 2048" and found.samples == (
        "clip a",
    )
    assert found.offset == 6 * 1024


def test_samples_that_webdataset_would_merge_are_told(tmp_path):
    first = row("one", video_member="a.one.mp4", camera_member="a.one.npz", manifest_member="a.one.json")
    second = row("two", video_member="a.two.mp4", camera_member="a.two.npz", manifest_member="a.two.json")
    members = [(f"a.{key}.{end}", b"x") for key in ("one", "two") for end in ("mp4", "npz", "json")]
    (found,) = problems(tmp_path, tar(*members), [first, second])
    assert "share the webdataset key 'a'" in found.what and found.samples == ("clip one", "clip two")


def test_windows_of_one_video_share_its_members(tmp_path):
    windows = [
        row("a").model_copy(update={"sample_id": f"a/w{number}", "key": f"a__w{number}"})
        for number in range(3)
    ]
    assert problems(tmp_path, tar(*files("a")), windows) == []


def test_latent_shards_keep_each_sample_in_its_folder(tmp_path):
    def latent(name):
        members = {
            f"{part}_member": f"samples/{name}/{part}.bin" for part in ("preencoded", "camera", "manifest")
        }
        return LatentRow(
            sample_id=f"clip {name}", key=name, shard=NAME, source_sample_id=name, source_frame_indices=[0],
            encoder_contract_digest="0" * 64, **members,
        )  # fmt: skip

    parts = [
        (f"samples/{name}/{part}.bin", b"x")
        for name in ("a", "b")
        for part in ("preencoded", "camera", "manifest")
    ]
    assert problems(tmp_path, tar(*parts), [latent("a"), latent("b")]) == []
    (found,) = problems(tmp_path, tar(*parts[:-1]), [latent("a"), latent("b")])
    assert found.what == "no member 'samples/b/manifest.bin'" and found.samples == ("clip b",)


def test_sizes_of_8_gib_and_more_are_read_as_tar_writes_them(tmp_path):
    info = tarfile.TarInfo("a.video.mp4")
    info.size = 9 * 2**30
    header = info.tobuf(format=tarfile.GNU_FORMAT)
    (found,) = problems(tmp_path, header, [row("a")])
    assert f"needs bytes 512 to {512 + 9 * 2**30}" in found.what


def test_a_size_that_leads_backwards_ends_the_walk(tmp_path):
    data, rows = packed(["a"])
    header = bytearray(data[:BLOCK])
    header[124:136], header[148:156] = b"-00000001000", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (problem,) = problems(tmp_path, bytes(header) + data[BLOCK:], rows)
    assert "at byte 0: no tar header here" in str(problem)


def test_a_copy_of_a_member_does_not_move_the_one_that_is_read(tmp_path):
    data, rows = packed(["a"])
    end = len(data) - 2 * BLOCK
    copied = data[:end] + data[: rows[0].members["a.video.mp4"].offset - BLOCK] + data[end:]
    kinds = [str(problem) for problem in problems(tmp_path, copied, rows)]
    assert any("stored twice, first at byte 0" in text for text in kinds)
    assert not any("re-ordered" in text for text in kinds)
