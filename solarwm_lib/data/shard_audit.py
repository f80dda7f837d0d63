"""What a shard file holds against what the index states, told by tar headers alone.

Standard readers end quietly at the first header they cannot read and merge samples whose names agree up to a dot, so a
damaged shard looks like a smaller data set. Here every difference is named: shard, member, byte and the samples it
costs. (spec operations 4.2)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from solarwm_lib.data.rows import AnyRow, LatentRow, Row, check_relative_path

BLOCK = 512
NAMED = 5
EXTENSION_BYTES = 1 << 20  # of a GNU or PAX header that are looked at; names are far shorter
_FILE, _FOLDER = (b"0", b"\0", b"7"), b"5"
_LONG_NAME, _PAX, _PAX_GLOBAL, _LONG_LINK = b"L", b"x", b"g", b"K"
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


@dataclass(frozen=True)
class ShardProblem:
    """One difference: `what` was found at byte `offset` (None: the file as a whole), and the sample ids it affects."""

    shard: str
    what: str
    offset: int | None
    member: str | None
    samples: tuple[str, ...]

    def __str__(self) -> str:
        place = "" if self.offset is None else f" at byte {self.offset}"
        named = ", ".join(repr(sample_id) for sample_id in self.samples[:NAMED])
        more = f" and {len(self.samples) - NAMED} more" if len(self.samples) > NAMED else ""
        return f"{self.shard}{place}: {self.what}; samples affected: {named + more if named else 'none'}"


@dataclass(frozen=True)
class Entry:
    """A tar member: byte offsets of its header and content, content length, type flag."""

    name: str
    header: int
    offset: int
    size: int
    kind: bytes


@dataclass(frozen=True)
class Fault:
    """Why a walk through the headers ended before the end of the archive."""

    what: str
    offset: int
    member: str | None = None


def audit_shard(path: str | Path, rows: Sequence[AnyRow]) -> list[ShardProblem]:
    """Compare the headers of one shard with its index rows (at least one, all of that shard).

    Reported: missing file, other size than recorded, gzip or other formats, truncation, bytes that are no header, missing
    end blocks, data after the end, members that are absent, elsewhere or of another size than recorded, links and
    devices, names that leave the root, duplicate members, and samples that webdataset readers would merge.
    """
    shard, everyone = rows[0].shard, tuple(row.sample_id for row in rows)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return [ShardProblem(shard, f"cannot be read ({error.strerror})", None, None, everyone)]
    try:
        size = os.fstat(descriptor).st_size
        entries, fault = walk(descriptor, size)
    except OSError as error:
        return [ShardProblem(shard, f"cannot be read ({error.strerror})", None, None, everyone)]
    finally:
        os.close(descriptor)
    owners = _owners(rows)
    problems = [
        *_against_index(rows, entries, owners, fault),
        *_bad_members(shard, entries, owners),
        *_merged(rows),
    ]
    promised = rows[0].shard_size
    if promised is not None and size != promised and fault is None:
        what = f"shard has {size} bytes, the index promises shard_size {promised}"
        problems.append(ShardProblem(shard, what, None, None, everyone))
    return problems


def walk(descriptor: int, size: int) -> tuple[list[Entry], Fault | None]:
    """Return the members of an uncompressed tar of `size` bytes, and what ended the walk if not the end blocks."""
    entries: list[Entry] = []
    position, name, length = 0, None, None
    if size == 0:
        return entries, Fault("the file is empty, expected an uncompressed tar", 0)
    if os.pread(descriptor, 2, 0) == b"\x1f\x8b":
        return entries, Fault(
            "the file is gzip-compressed, expected an uncompressed tar; unpack it with gunzip", 0
        )
    while True:
        header = os.pread(descriptor, BLOCK, position)
        if len(header) < BLOCK:
            what = "cut inside a header" if header else "the end-of-archive blocks are missing"
            return entries, Fault(
                f"{what}: the file ends at byte {size}, it is truncated or still written", position
            )
        if header.count(0) == BLOCK:
            return entries, _after_end(descriptor, position)
        if (parsed := _parse(header)) is None:
            return entries, Fault("no tar header here, the archive is damaged or of another format", position)
        own_name, own_length, kind = parsed
        own_name, own_length = name or own_name, own_length if length is None else length
        start, end = position + BLOCK, position + BLOCK + own_length
        if end > size:
            what = f"member {own_name!r} needs bytes {start} to {end}, the file ends at byte {size}: it is truncated"
            return entries, Fault(what, position, own_name)
        if kind in (_LONG_NAME, _PAX):
            payload = os.pread(descriptor, min(own_length, EXTENSION_BYTES), start)
            name, length = _extension(kind, payload, name, length)
        elif kind not in (_PAX_GLOBAL, _LONG_LINK):
            entries.append(Entry(own_name, position, start, own_length, kind))
            name, length = None, None
        position = start + -(-own_length // BLOCK) * BLOCK


def _parse(header: bytes) -> tuple[str, int, bytes] | None:
    """Return (name, size, type) of a header block, None if it is none."""
    try:
        promised = int(header[148:156].rstrip(b"\0 "), 8)
        size = _number(header[124:136])
        name, prefix = (_text(header[a:b]) for a, b in ((0, 100), (345, 500)))
    except ValueError:
        return None
    # The checksum counts its own eight bytes as spaces.
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != promised:
        return None
    if prefix and header[257:263] == b"ustar\0":
        name = f"{prefix}/{name}"
    return name, size, header[156:157]


def _number(digits: bytes) -> int:
    # Sizes of 8 GiB and more are stored in base 256, marked by the highest bit.
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    octal = digits.strip(b"\0 ") or b"0"
    if not octal.isdigit():  # a sign would send the walk backwards
        raise ValueError(f"{octal!r} is no number")
    return int(octal, 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8")


def _extension(
    kind: bytes, payload: bytes, name: str | None, length: int | None
) -> tuple[str | None, int | None]:
    """Return name and size that a GNU or PAX header gives to the member after it."""
    if kind == _LONG_NAME:
        return payload.rstrip(b"\0").decode("utf-8", "replace"), length
    while payload:
        count, _, _ = payload.partition(b" ")
        if not count.isdigit() or int(count) <= len(count):
            break
        key, _, value = payload[len(count) + 1 : int(count) - 1].partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "replace")
        elif key == b"size" and value.isdigit():
            length = int(value)
        payload = payload[int(count) :]
    return name, length


def _after_end(descriptor: int, position: int) -> Fault | None:
    """Judge what follows the first empty block: a second one, then nothing but padding."""
    start, blocks = position, 0
    while data := os.pread(descriptor, 1 << 20, position):
        if data.count(0) != len(data):
            where = position + len(data) - len(data.lstrip(b"\0"))
            return Fault(f"data after the end-of-archive blocks, first at byte {where}", start)
        position, blocks = position + len(data), blocks + len(data) // BLOCK
    return None if blocks >= 2 else Fault("the second end-of-archive block is missing", start)


def _names(row: Row) -> tuple[str, ...]:
    """Return the members a row needs."""
    if row.members is not None:
        return tuple(row.members)
    fields = ("preencoded_member",) if isinstance(row, LatentRow) else ("video_member",)
    values = (getattr(row, field) for field in (*fields, "camera_member", "manifest_member"))
    return tuple(value for value in values if value is not None)


def _owners(rows: Sequence[AnyRow]) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for row in rows:
        for name in _names(row):
            owners.setdefault(name, []).append(row.sample_id)
    return owners


def _against_index(
    rows: Sequence[AnyRow], entries: Sequence[Entry], owners: dict[str, list[str]], fault: Fault | None
) -> Iterator[ShardProblem]:
    """Yield what ended the walk, and members that are absent, elsewhere or of another size than recorded."""
    shard, found = rows[0].shard, _found(rows, entries)
    absent: dict[str, str] = {}  # sample -> its first bad member
    moved: dict[str, str] = {}
    resized: dict[str, str] = {}
    recorded: dict[str, tuple[int, int]] = {}
    for row in rows:
        for name in _names(row):
            entry, record = found.get(name), (row.members or {}).get(name)
            if record is not None:
                recorded[name] = (record.offset, record.bytes)
            if entry is None:
                absent.setdefault(row.sample_id, name)
            elif record is not None and entry.offset != record.offset:
                moved.setdefault(row.sample_id, name)
            elif record is not None and entry.size != record.bytes:
                resized.setdefault(row.sample_id, name)
    if fault is not None:
        # What the fault costs: samples not wholly read before it. At the very end it costs none.
        yield ShardProblem(shard, fault.what, fault.offset, fault.member, tuple(absent))
    elif absent:
        name = next(iter(absent.values()))
        unnamed = [entry.name for entry in entries if entry.name not in owners]
        instead = (
            f"; it holds {len(unnamed)} members the index does not name, first {unnamed[0]!r}"
            if unnamed
            else ""
        )
        at = recorded[name][0] if name in recorded else None
        what = f"no member {name!r}{', which the index promises' if at is not None else ''}{instead}"
        yield ShardProblem(shard, what, at, name, tuple(absent))
    if moved:
        name = min(moved.values(), key=lambda name: recorded[name])
        what = f"member {name!r} begins at byte {found[name].offset}, the index promises byte {recorded[name][0]}"
        yield ShardProblem(
            shard, f"{what}: re-ordered or of another build", recorded[name][0], name, tuple(moved)
        )
    if resized:
        name = next(iter(resized.values()))
        what = f"member {name!r} has {found[name].size} bytes, the index promises {recorded[name][1]}"
        yield ShardProblem(shard, what, found[name].offset, name, tuple(resized))


def _found(rows: Sequence[AnyRow], entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the members by name; of several with one name, the one at the recorded place."""
    recorded = {(name, member.offset) for row in rows for name, member in (row.members or {}).items()}
    found = {entry.name: entry for entry in entries}
    found.update((entry.name, entry) for entry in entries if (entry.name, entry.offset) in recorded)
    return found


def _bad_members(
    shard: str, entries: Sequence[Entry], owners: dict[str, list[str]]
) -> Iterator[ShardProblem]:
    """Yield links, unsafe names and duplicates: the first of each sort, with every sample they touch."""
    groups: dict[str, list[tuple[Entry, str]]] = {}
    seen: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind == _FOLDER:
            continue
        if entry.kind not in _FILE:
            kind = _KINDS.get(entry.kind, f"of type {entry.kind!r}")
            groups.setdefault("kind", []).append((entry, f"is {kind}, expected a plain file"))
        try:
            check_relative_path(entry.name)
        except ValueError as error:
            groups.setdefault("name", []).append((entry, str(error)))
        first = seen.setdefault(entry.name, entry)
        if first is not entry:
            groups.setdefault("twice", []).append((entry, f"is stored twice, first at byte {first.header}"))
    for found in groups.values():
        entry, what = found[0]
        touched = dict.fromkeys(sample for bad, _ in found for sample in owners.get(bad.name, ()))
        more = f" ({len(found) - 1} more members like it)" if len(found) > 1 else ""
        yield ShardProblem(
            shard, f"member {entry.name!r} {what}{more}", entry.header, entry.name, tuple(touched)
        )


def _merged(rows: Sequence[AnyRow]) -> Iterator[ShardProblem]:
    """Yield samples whose members share a webdataset key: the name up to the first dot after the last slash."""
    stems: dict[str, tuple[frozenset[str], AnyRow, str]] = {}
    for row in rows:
        names = frozenset(_names(row))
        for name in sorted(names):
            folder, slash, base = name.rpartition("/")
            stem = f"{folder}{slash}{base.split('.', 1)[0]}"
            other, first, first_name = stems.setdefault(stem, (names, row, name))
            if other != names:
                what = (
                    f"members {first_name!r} and {name!r} of two samples share the webdataset key {stem!r} (a key ends at "
                    "its first dot) and would be read as one"
                )
                yield ShardProblem(row.shard, what, None, name, (first.sample_id, row.sample_id))
                break
