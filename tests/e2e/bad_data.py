"""The table of bad input: indexes and shards; see `bad_input.py`."""

from __future__ import annotations

import copy
import gzip
import re
import tarfile
from collections.abc import Callable
from typing import Any

from bad_bench import SHARD, Bench, Case, Prepare, Rows, entries, first, met_by, rows, tar


def _index(change: Callable[[bytes], bytes], name: str = "train-index.jsonl") -> Prepare:
    """The bytes of an index file, by itself."""

    def prepare(bench: Bench) -> list[str]:
        path = bench.path / name
        path.write_bytes(change((bench.world.dataset / "train-index.jsonl").read_bytes()))
        return ["data", "inspect", str(path)]

    return prepare


def _published_index(change: Callable[[bytes], bytes]) -> Prepare:
    """The training index inside a published data set, its length unchanged."""

    def prepare(bench: Bench) -> list[str]:
        dataset = bench.dataset(lambda rows: None)
        path = dataset / "train-index.jsonl"
        changed = change(path.read_bytes())
        assert len(changed) == path.stat().st_size
        path.chmod(0o644)
        path.write_bytes(changed)
        return ["train", *bench.on(dataset)]

    return prepare


def _other_index(bench: Bench) -> list[str]:
    dataset = bench.dataset(lambda rows: None)
    (dataset / "other.jsonl").write_bytes((dataset / "train-index.jsonl").read_bytes())
    return ["train", *bench.on(dataset, data__train_index="other.jsonl")]


def _shard(change: Callable[[bytes], bytes], command: str = "inspect") -> Prepare:
    """The bytes of the training shard, its index unchanged."""

    def prepare(bench: Bench) -> list[str]:
        dataset = bench.dataset()
        path = dataset / SHARD
        path.write_bytes(change(path.read_bytes()))
        return met_by(bench, command, dataset)

    return prepare


def _members(
    change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], Any], command: str = "inspect"
) -> Prepare:
    """The members of the training shard, its index unchanged."""

    def altered(shard: bytes) -> bytes:
        members = entries(shard)
        change(members)
        return tar(members)

    return _shard(altered, command)


def _rename(name: str) -> Prepare:
    return _members(lambda members: setattr(members[0][0], "name", name))


def _linked(kind: bytes) -> Prepare:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        info = members[2][0]
        info.type, info.linkname = kind, "elsewhere.mp4"

    return _members(change)


def _backwards(shard: bytes) -> bytes:
    """A member of negative size, with a checksum that agrees: a reader that trusts it never ends."""
    header = bytearray(shard[:512])
    header[124:136], header[148:156] = b"-00000001000", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + shard[512:]


def _merged(bench: Bench) -> list[str]:
    """Names of two samples that agree up to the first dot, in index and shard."""
    dataset = bench.dataset()
    index, shard = dataset / "train-index.jsonl", dataset / SHARD
    index.write_text(re.sub(r"train-(\d+)\.(camera|manifest|video)", r"train.\1.\2", index.read_text()))
    members = entries(shard.read_bytes())
    for info, _ in members:
        info.name = info.name.replace("-", ".", 1)
    shard.write_bytes(tar(members))
    return ["data", "inspect", str(index)]


def _missing_shard(bench: Bench) -> list[str]:
    dataset = bench.dataset()
    (dataset / SHARD).unlink()
    return ["train", *bench.on(dataset)]


def _inspect_without(bench: Bench) -> list[str]:
    dataset = bench.dataset()
    (dataset / SHARD).unlink()
    return ["data", "inspect", str(dataset / "train-index.jsonl"), "--root", str(dataset)]


def _outside_shard(bench: Bench) -> list[str]:
    dataset = bench.dataset()
    (dataset / SHARD).rename(bench.path / "elsewhere.tar")
    (dataset / SHARD).symlink_to(bench.path / "elsewhere.tar")
    return ["train", *bench.on(dataset)]


def _damaged_shard(bench: Bench) -> list[str]:
    dataset = bench.dataset()
    shard = dataset / "shards/test-000000.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1  # inside the first member, a camera
    shard.write_bytes(data)
    return ["freeze-plan", *bench.on(dataset), "--out", str(bench.path / "plan.json")]


def _wrong_size(rows: Rows) -> None:
    for row in rows:
        row["members"][row["camera_member"]]["bytes"] += 8


def _beyond_the_end(rows: Rows) -> None:
    rows[0]["members"][rows[0]["video_member"]]["offset"] += 2**20


def _zipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


CASES: tuple[Case, ...] = (
    # the index file
    Case("index is missing", "…/absent.jsonl: index is missing; set data.root, data.train_index or data.test_index", 3, lambda bench: ["data", "inspect", str(bench.path / "absent.jsonl")]),
    Case("index is missing, training", "…/other.jsonl: index is missing; set data.root, data.train_index or data.test_index", 3,
         lambda bench: ["train", *bench.config("new", data__train_index="other.jsonl")]),
    Case("index was changed after it was published", "…/train-index.jsonl: sha256 is …, … was published with …; the index was "
         "changed, restore it or publish the change as a new data set", 3, _published_index(lambda data: data.replace(b"room", b"ruin", 1))),
    Case("index was never published", "data.train_index: …/other.jsonl is no member of …, which holds test-index.jsonl, "
         "train-index.jsonl; name one of them, or publish the other index as a data set", 3, _other_index),
    Case("index is empty", "…/train-index.jsonl: index is empty, expected at least one row; set data.train_index or data.test_index, or "
         "rebuild the data set", 3, rows(lambda rows: rows.clear())),
    Case("index of blank lines", "…/train-index.jsonl: index is empty, expected at least one row; set "
         "data.train_index or data.test_index, or rebuild the data set", 3, _index(lambda data: b"\n \n")),
    Case("index is a folder", "…: index is not readable ([Errno 21] Is a directory)", 3, lambda bench: ["data", "inspect", str(bench.world.dataset)]),
    Case("index is not UTF-8", "…/train-index.jsonl: not UTF-8 at byte 65", 3, _index(lambda data: data.replace(b"room", b"ro\xffm", 1))),
    Case("index is gzip, its name does not say so", "…/train-index.jsonl: not UTF-8 at byte 1; it is gzip, give it "
         "a name that ends in .gz", 3, _index(_zipped)),
    Case("index is named .gz and is not gzip", "…/i.jsonl.gz: index is not readable (Error -3 while decompressing "
         "data: incorrect header check); restore a copy, a name that ends in .gz means gzip", 3, _index(lambda data: data, "i.jsonl.gz")),
    Case("gzip index is cut", "…/i.jsonl.gz: index is not readable (the compressed file ends before its "
         "end-of-stream marker); restore a copy, a name that ends in .gz means gzip", 3, _index(lambda data: _zipped(data)[:-9], "i.jsonl.gz")),
    Case("gzip index is damaged", "…/i.jsonl.gz: index is not readable (Error -3 while decompressing data: "
         "incorrect data check); restore a copy, a name that ends in .gz means gzip", 3, _index(lambda data: _zipped(data)[:-8] + b"8 bytes.", "i.jsonl.gz")),
    Case("last line of an index is cut", "…/train-index.jsonl line 6: not a JSON object (Unterminated string "
         "starting at: line 1 column … (char …))", 3, _index(lambda data: data[:-30])),
    Case("line is no object", "…/train-index.jsonl line 1: found list, expected a JSON object", 3, _index(lambda data: b"[1]\n" + data)),
    Case("line is nested without end", "…/train-index.jsonl line 1: not a JSON object (maximum recursion depth "
         "exceeded while decoding a JSON array from a unicode string)", 3, _index(lambda data: b'{"a":' + b"[" * 100_000 + b"\n")),
    Case("key twice in a line", "…/train-index.jsonl line 1: not a JSON object (key 'fps' appears twice)", 3, _index(lambda data: data.replace(b'{"', b'{"fps":1,"', 1))),
    Case("NaN in a line", "…/train-index.jsonl line 1: not a JSON object (NaN is not JSON)", 3, _index(lambda data: data.replace(b'"fps":16.0', b'"fps":NaN', 1))),
    Case("half a character in a line", "…/train-index.jsonl line 1: holds half a surrogate pair, expected whole "
         "characters", 3, _index(lambda data: data.replace(b'{"', b'{"note":"\\ud800","', 1))),
    # fields of a row
    Case("field is absent", "…/data/train-index.jsonl line 1: field 'camera_member': Field required", 3, rows(lambda rows: rows[0].pop("camera_member"), "inspect")),
    Case("frame count is a fraction", "…/data/train-index.jsonl line 1: field 'num_frames': Input should be a valid "
         "integer, found 8.5", 3, first(num_frames=8.5)),
    Case("frame count is zero", "…/data/train-index.jsonl line 1: field 'num_frames': Input should be greater than "
         "or equal to 1, found 0", 3, first(num_frames=0)),
    Case("frame rate is zero", "…/data/train-index.jsonl line 1: field 'fps': Input should be greater than 0, found "
         "0", 3, first(fps=0)),
    Case("repeats are zero", "…/data/train-index.jsonl line 1: field 'epoch_repeats': Input should be greater than "
         "or equal to 1, found 0", 3, first(epoch_repeats=0)),
    Case("caption is no text", "…/data/train-index.jsonl line 1: field 'caption': Input should be a valid string, "
         "found 7", 3, first(caption=7)),
    Case("shard path leaves the root", "…/train-index.jsonl line 1: field 'shard': found '../x', "
         "expected a relative path without '', '.' or '..' segments", 3, rows(lambda rows: rows[0].update(shard="../x"))),
    Case("shard path is absolute", "…/data/train-index.jsonl line 1: field 'shard': found '/x.tar', expected a "
         "relative path without '', '.' or '..' segments", 3, first(shard="/x.tar")),
    Case("shard path is an address", "…/data/train-index.jsonl line 1: field 'shard': found 's3://bucket/x.tar', "
         "expected a path without a scheme or drive", 3, first(shard="s3://bucket/x.tar")),
    Case("shard path has a backslash", "…/data/train-index.jsonl line 1: field 'shard': found 'shards\\\\x.tar', "
         "expected a POSIX path without backslash", 3, first(shard="shards\\x.tar")),
    Case("shard digest is no SHA-256", "…/data/train-index.jsonl line 1: field 'shard_digest': found 'ABC', "
         "expected 64 lower-case hexadecimal digits", 3, first(shard_digest="ABC")),
    Case("digest without size", "…/data/train-index.jsonl line 1: field 'shard_size': absent, required beside any "
         "other shard_* identity field", 3, rows(lambda rows: [row.pop("shard_size") for row in rows], "inspect")),
    Case("rows of a shard disagree", "…/data/train-index.jsonl row 1: shard_* fields of 'shards/train-000000.tar' "
         "differ from row 0; all rows of a shard carry the same size, generation and digests", 3, rows(lambda rows: rows[1].update(shard_size=1), "inspect")),
    Case("member that the row does not record", "…/data/train-index.jsonl line 1: field 'members': no entry for "
         "'train-000000.video.mp4', found none", 3, first(members={})),
    Case("member offset inside the header", "…/data/train-index.jsonl line 1: field "
         "'members.train-000000.video.mp4.offset': Input should be greater than or equal to 512, found 0", 3,
         rows(lambda rows: rows[0]["members"][rows[0]["video_member"]].update(offset=0), "inspect")),
    Case("neither manifest nor its member", "…/data/train-index.jsonl line 1: field 'manifest': absent, expected an "
         "inline manifest or manifest_member", 3, rows(lambda rows: rows[0].pop("manifest_member"), "inspect")),
    Case("sample id twice", "…/train-index.jsonl row 1: field 'sample_id' repeats 'tiny/train-000000' of row 0; "
         "sample ids are unique, use epoch_repeats to weight a clip", 3,
         rows(lambda rows: rows[1].update(sample_id=rows[0]["sample_id"]))),
    Case("dotted keys that readers would merge", "…/data/train-index.jsonl row 1: field 'key' 'clip.1' collides "
         "with 'clip.0' of row 0 in 'shards/train-000000.tar' (a key ends at its first dot)", 3,
         rows(lambda rows: [row.update(key=f"clip.{number}") for number, row in enumerate(rows)], "inspect")),
    Case("frame count is absent", "sample 'tiny/train-000000': field 'num_frames' is absent, expected the decoded "
         "frame count", 3, rows(lambda rows: rows[0].pop("num_frames"))),
    Case("start beyond the clip", "sample 'tiny/train-000000': start frame 6 is outside 0..4 (9 frames, the clip "
         "spans 5); correct start_frame in the index", 3, lambda bench: ["train", *bench.on(
        bench.dataset(lambda rows: rows[0].update(start_frame=6)), data__random_start=False)]),
    # shards, met while training
    Case("shard is missing", "data.root: …/data: member 'shards/train-000000.tar' is missing "
         "(No such file or directory); rebuild the data set or change data.root", 3, _missing_shard, early=True),
    Case("shard is truncated", "data.root: …/data: member 'shards/train-000000.tar' has … bytes, expected …; "
         "it is truncated or was changed, restore a copy; rebuild the data set or change data.root", 3,
         _shard(lambda data: data[:-2048], "train"), early=True),
    Case("shard is a link to elsewhere", "data.root: …/data: member 'shards/train-000000.tar' is a link or special "
         "file, expected a regular file; rebuild the data set or change data.root", 3, _outside_shard),
    Case("shard that the data set does not have",
         "shards/other.tar: shard is missing under data.root …/data (sample 'tiny/train-…')", 3,
         rows(lambda rows: [row.update(shard="shards/other.tar") for row in rows])),
    Case("shard of another size than its rows say", "shards/train-000000.tar: shard has … bytes, the index promises "
         "shard_size …; it is truncated or of another build, copy or rebuild it", 3,
         rows(lambda rows: [row.update(shard_size=row["shard_size"] + 512) for row in rows])),
    Case("shard ends before a member", "shards/train-000000.tar: shard ends at byte …, the index promises bytes up to … "
         "(sample 'tiny/train-000000'); the shard is truncated, copy or rebuild it", 3, rows(_beyond_the_end)),
    Case("member size differs from the index", "shards/test-000000.tar member 'test-….camera.npz' of sample 'tiny/test-…': "
         "the shard holds 'test-….camera.npz' with … bytes at byte …, the index promises … bytes; "
         "index and shard do not belong together", 3, rows(_wrong_size, "freeze-plan")),
    Case("the same, met while training (launch records stay)", "shards/train-000000.tar member 'train-….camera.npz' of "
         "sample 'tiny/train-…': the shard holds 'train-….camera.npz' with … bytes at byte …, the index promises … bytes; "
         "index and shard do not belong together", 3, rows(_wrong_size), records=True),
    Case("members in another order, training (launch records stay)", "shards/train-000000.tar member "
         "'train-….camera.npz' of sample 'tiny/train-…': the shard holds 'train-….video.mp4' with … bytes at "
         "byte …, the index promises 816 bytes; index and shard do not belong together", 3,
         _members(lambda members: members.reverse(), "train"), records=True),
    Case("damaged byte in a shard", "shards/test-000000.tar member 'test-….camera.npz' of sample 'tiny/test-…': "
         "sha256 is …, the index promises …; the shard is damaged, restore a copy", 3, _damaged_shard),
    # shards, met by `data inspect`
    Case("shard is missing, `data inspect`", "shards/train-000000.tar: cannot be read (No such file or directory); "
         "samples affected: 'tiny/train-000000', 'tiny/train-000001', 'tiny/train-000002', "
         "'tiny/train-000003', 'tiny/train-000004' and 1 more (and … more)", 3, _inspect_without),
    Case("shard is empty", "shards/train-000000.tar at byte 0: the file is empty, expected an uncompressed tar; "
         "samples affected: 'tiny/train-000000', 'tiny/train-000001', 'tiny/train-000002', "
         "'tiny/train-000003', 'tiny/train-000004' and 1 more (and … more)", 3, _shard(lambda data: b"")),
    Case("shard is gzip", "shards/train-000000.tar at byte 0: the file is gzip-compressed, expected an uncompressed "
         "tar; unpack it with gunzip; samples affected: 'tiny/train-000000', 'tiny/train-000001', "
         "'tiny/train-000002', 'tiny/train-000003', 'tiny/train-000004' and 1 more (and … more)", 3, _shard(_zipped)),
    Case("shard is no tar", "shards/train-000000.tar at byte 0: no tar header here, the archive is damaged or of "
         "another format; samples affected: 'tiny/train-000000', 'tiny/train-000001', 'tiny/train-000002', "
         "'tiny/train-000003', 'tiny/train-000004' and 1 more (and … more)", 3, _shard(lambda data: b"not a tar" * 200)),
    Case("shard is cut inside a member", "shards/train-000000.tar at byte …: member 'train-000002.video.mp4' needs "
         "bytes … to …, the file ends at byte …: it is truncated; samples affected: 'tiny/train-000002', "
         "'tiny/train-000003', 'tiny/train-000004', 'tiny/train-000005' (and … more)", 3, _shard(lambda data: data[:20000])),
    Case("shard is cut inside a header", "shards/train-000000.tar at byte …: member 'train-000000.manifest.json' "
         "needs bytes … to …, the file ends at byte …: it is truncated; samples affected: "
         "'tiny/train-000000', 'tiny/train-000001', 'tiny/train-000002', 'tiny/train-000003', "
         "'tiny/train-000004' and 1 more (and … more)", 3, _shard(lambda data: data[:2048 + 100])),
    Case("end blocks are missing", "shards/train-000000.tar at byte …: the end-of-archive blocks are missing: the "
         "file ends at byte …, it is truncated or still written; samples affected: none (and … more)", 3, _shard(lambda data: data[:-1024])),
    Case("one end block is missing", "shards/train-000000.tar at byte …: the second end-of-archive block is "
         "missing; samples affected: none (and … more)", 3, _shard(lambda data: data[:-512])),
    Case("two shards one after the other", "shards/train-000000.tar at byte …: data after the end-of-archive "
         "blocks, first at byte …; samples affected: none (and … more)", 3, _shard(lambda data: data + data)),
    Case("header is damaged", "shards/train-000000.tar at byte …: no tar header here, the archive is damaged or of "
         "another format; samples affected: 'tiny/train-000000', 'tiny/train-000001', 'tiny/train-000002', "
         "'tiny/train-000003', 'tiny/train-000004' and 1 more", 3, _shard(lambda data: data[:1538] + b"?" + data[1539:])),
    Case("member of negative size", "shards/train-000000.tar at byte 0: no tar header here, the archive is damaged "
         "or of another format; samples affected: 'tiny/train-000000', 'tiny/train-000001', "
         "'tiny/train-000002', 'tiny/train-000003', 'tiny/train-000004' and 1 more", 3, _shard(_backwards)),
    Case("shard has another size", "shards/train-000000.tar: shard has … bytes, the index promises shard_size …; "
         "samples affected: 'tiny/train-000000', 'tiny/train-000001', 'tiny/train-000002', "
         "'tiny/train-000003', 'tiny/train-000004' and 1 more (and … more)", 3, _shard(lambda data: data + bytes(512))),
    Case("members in another order", "shards/train-000000.tar at byte …: member 'train-000000.camera.npz' begins at "
         "byte …, the index promises byte 512: re-ordered or of another build; samples affected: "
         "'tiny/train-000000', 'tiny/train-000001', 'tiny/train-000002', 'tiny/train-000003', "
         "'tiny/train-000004' and 1 more (and … more)", 3, _members(lambda members: members.reverse())),
    Case("member is missing", "shards/train-000000.tar at byte …: no member 'train-000005.video.mp4', which the "
         "index promises; samples affected: 'tiny/train-000005' (and … more)", 3, _members(lambda members: members.pop())),
    Case("member of another size", "shards/train-000000.tar at byte …: member 'train-000000.camera.npz' has 816 "
         "bytes, the index promises 824; samples affected: 'tiny/train-000000', 'tiny/train-000001', "
         "'tiny/train-000002', 'tiny/train-000003', 'tiny/train-000004' and 1 more (and … more)", 3, rows(_wrong_size, "inspect")),
    Case("members of another data set", "shards/train-000000.tar at byte …: no member 'train-000000.camera.npz', "
         "which the index promises; it holds 18 members the index does not name, first "
         "'xtrain-000000.camera.npz'; samples affected: 'tiny/train-000000', 'tiny/train-000001', "
         "'tiny/train-000002', 'tiny/train-000003', 'tiny/train-000004' and 1 more", 3,
         _members(lambda members: [setattr(info, "name", f"x{info.name}") for info, _ in members])),
    Case("member with an absolute name", "shards/train-000000.tar at byte …: no member 'train-000000.camera.npz', "
         "which the index promises; it holds 1 members the index does not name, first '/etc/passwd'; samples "
         "affected: 'tiny/train-000000' (and … more)", 3, _rename("/etc/passwd")),
    Case("member above the root", "shards/train-000000.tar at byte …: no member 'train-000000.camera.npz', which "
         "the index promises; it holds 1 members the index does not name, first '../x.npz'; samples affected: "
         "'tiny/train-000000' (and … more)", 3, _rename("../x.npz")),
    Case("symbolic link", "shards/train-000000.tar at byte …: member 'train-000000.video.mp4' is a symbolic link, "
         "expected a plain file; samples affected: 'tiny/train-000000'", 3, _linked(tarfile.SYMTYPE)),
    Case("hard link", "shards/train-000000.tar at byte …: member 'train-000000.video.mp4' is a hard link, expected "
         "a plain file; samples affected: 'tiny/train-000000'", 3, _linked(tarfile.LNKTYPE)),
    Case("device", "shards/train-000000.tar at byte …: member 'train-000000.video.mp4' is a device, expected a "
         "plain file; samples affected: 'tiny/train-000000'", 3, _linked(tarfile.CHRTYPE)),
    Case("member twice", "shards/train-000000.tar at byte …: member 'train-000000.camera.npz' is stored twice, "
         "first at byte 0; samples affected: 'tiny/train-000000' (and … more)", 3, _members(lambda members: members.append(copy.deepcopy(members[0])))),
    Case("dotted names that readers would merge", "shards/train-000000.tar: members 'train.000000.camera.npz' and "
         "'train.000001.camera.npz' of two samples share the webdataset key 'train' (a key ends at its first "
         "dot) and would be read as one; samples affected: 'tiny/train-000000', 'tiny/train-000001' (and … "
         "more)", 3, _merged),
)  # fmt: skip
