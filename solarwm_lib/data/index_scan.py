"""One pass over an index: blocks of lines become checked columns, in several processes when the file is large.

`scan_block` is a pure function of a block of whole lines; `Collected` joins the parts in order and makes the checks
between rows with bounded memory. (spec operations 4.1)
"""

from __future__ import annotations

import hashlib
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data.rows import (
    LATENT_KEY,
    AnyRow,
    RawRow,
    check_latent,
    check_raw,
    count_keys,
    latent_fields,
    may_hold_constants,
    most_keys,
    nested_keys,
    ordinary_fields,
    raw_fields,
    strict_object,
    validate_row,
)
from solarwm_lib.runtime.errors import DataError, MemoryExhausted

# Above this many bytes of text, a second process is worth its start.
PARALLEL_BYTES = 64 << 20
MOST_PROCESSES = 4

# One record a row. `shard`, `dataset` and `split` are codes, -1 for absent; hashes are Python's, equal in forked processes.
RECORD = np.dtype(
    [
        ("shard", np.int32),
        ("repeats", np.int64),
        ("num_frames", np.int64),
        ("fps", np.float64),
        ("start_frame", np.int64),
        ("height", np.int32),
        ("width", np.int32),
        ("caption", np.bool_),
        ("dataset", np.int32),
        ("split", np.int32),
        ("sample_hash", np.int64),
        ("key_hash", np.int64),
        ("offset", np.int64),
    ]
)


@dataclass(frozen=True)
class Block:
    """Whole lines of an index: `text`, the number of lines and bytes before it."""

    text: bytes
    lines_before: int
    offset: int


@dataclass(frozen=True)
class Part:
    """The rows of a block as records whose codes count in the part's own lists.

    `shards` holds (name, identity...) tuples; `ids` every sample id and a newline.
    """

    records: NDArray
    shards: list[tuple[Any, ...]]
    datasets: list[str]
    splits: list[str]
    ids: bytes


def scan_block(label: str, block: Block) -> Part:
    """Check every line of a block; DataError `LABEL line N: ...` for the first bad one."""
    lines, most = block.text.split(b"\n"), most_keys(block.text)
    parse = raw_fields if _has_extra_fields(lines) else ordinary_fields
    rows, offsets = _checked(label, block, lines, parse)
    exact = sum(map(count_keys, rows)) == most
    if not exact and parse is ordinary_fields:
        rows, offsets = _checked(label, block, lines, raw_fields)
    # Fields no class names may hold keys too; those are counted only where the quick count leaves a doubt.
    if may_hold_constants(block.text) or not (exact or sum(map(nested_keys, rows)) == most):
        _look_closer(label, block, lines)
    return part_of(rows, offsets)


def _checked(
    label: str, block: Block, lines: list[bytes], parse: Callable[[bytes], dict[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Return the fields of every row and the byte at which its line starts."""
    rows: list[Mapping[str, Any]] = []
    offsets: list[int] = []
    fields: Mapping[str, Any]
    position, any_latent = block.offset, LATENT_KEY in block.text
    for line in lines:
        if line and not line.isspace():
            try:
                if any_latent and LATENT_KEY in line:
                    check_latent(fields := latent_fields(line))
                else:
                    check_raw(fields := parse(line))
            except ValueError:  # of which ValidationError is one
                number = block.lines_before + 1 + block.text.count(b"\n", 0, position - block.offset)
                fields = _slowly(line, label, number, position)
            rows.append(fields)
            offsets.append(position)
        position += len(line) + 1
    return rows, offsets


def _has_extra_fields(lines: list[bytes]) -> bool:
    """Tell whether the first row has fields no class names; its neighbours are then read with theirs at once."""
    try:
        return any(name not in RawRow.model_fields for name in raw_fields(lines[0]))
    except ValueError:
        return True


def part_of(rows: Sequence[Mapping[str, Any]], offsets: Sequence[int] | None = None) -> Part:
    """Return checked rows as records; `offsets` are the bytes at which their lines start."""
    shards: dict[tuple[Any, ...], int] = {}
    datasets: dict[str, int] = {}
    splits: dict[str, int] = {}
    ids = [fields["sample_id"] for fields in rows]
    records = np.empty(len(rows), RECORD)
    records["shard"] = [shards.setdefault(_shard(fields.get), len(shards)) for fields in rows]
    records["repeats"] = [fields.get("epoch_repeats", 1) for fields in rows]
    for name in ("num_frames", "height", "width"):
        records[name] = [fields.get(name) or -1 for fields in rows]
    records["fps"] = [fields.get("fps") or math.nan for fields in rows]
    starts = [fields.get("start_frame") for fields in rows]
    records["start_frame"] = [-1 if start is None else start for start in starts]
    records["caption"] = [bool(fields.get("caption")) for fields in rows]
    records["dataset"] = [_code(datasets, fields.get("dataset")) for fields in rows]
    records["split"] = [_code(splits, fields.get("split")) for fields in rows]
    records["sample_hash"] = [hash(sample_id) for sample_id in ids]
    # A webdataset key ends at the first dot: 'a.b' and 'a.c' would be read as one sample.
    records["key_hash"] = [hash((fields["shard"], fields["key"].split(".", 1)[0])) for fields in rows]
    records["offset"] = -1 if offsets is None else offsets
    text = "".join([f"{sample_id}\n" for sample_id in ids]).encode()
    return Part(records, list(shards), list(datasets), list(splits), text)


class Collected:
    """Parts joined in order. Sample ids and keys are compared by 64-bit hash, and for real where hashes agree."""

    def __init__(self, label: str) -> None:
        self.label, self.rows = label, 0
        self.ids = hashlib.blake2s()
        # name -> (ordinal, identity, first row)
        self.shards: dict[str, tuple[int, tuple[Any, ...], int]] = {}
        self.datasets: dict[str, int] = {}
        self.splits: dict[str, int] = {}
        self._pieces: list[NDArray] = []

    def add(self, part: Part) -> None:
        """Append a part; DataError if a shard's identity differs from an earlier row's."""
        records = part.records
        ordinals = [
            self._shard_ordinal(entry, records["shard"], code) for code, entry in enumerate(part.shards)
        ]
        records["shard"] = np.array(ordinals, np.int32)[records["shard"]]
        for name, own, names in (
            ("dataset", part.datasets, self.datasets),
            ("split", part.splits, self.splits),
        ):
            # Absent is -1, the last entry.
            records[name] = np.array([*(_code(names, value) for value in own), -1], np.int32)[records[name]]
        self._pieces.append(records)
        self.ids.update(part.ids)
        self.rows += len(records)

    def joined(self) -> dict[str, NDArray]:
        """Return the records of all parts as columns, once."""
        records = np.concatenate(self._pieces)
        self._pieces.clear()
        return {name: records[name].copy() for name in RECORD.names or ()}

    def _shard_ordinal(self, entry: tuple[Any, ...], codes: NDArray[np.int32], code: int) -> int:
        name, identity = entry[0], entry[1:]
        if (known := self.shards.get(name)) is None:
            known = self.shards[name] = (
                len(self.shards),
                identity,
                self.rows + int(np.argmax(codes == code)),
            )
        elif known[1] != identity:
            raise DataError(
                f"{self.label} row {self.rows + int(np.argmax(codes == code))}: shard_* fields of {name!r} differ from "
                f"row {known[2]}; all rows of a shard carry the same size, generation and digests"
            )
        return known[0]


def refuse_repeats(label: str, columns: dict[str, NDArray], row: Callable[[int], AnyRow]) -> None:
    """Take the hashes out of the columns; DataError for repeated sample ids and keys that webdataset would merge."""
    for first, second in _equal_pairs(columns.pop("sample_hash")):
        a, b = row(first), row(second)
        if a.sample_id == b.sample_id:
            raise DataError(
                f"{label} row {second}: field 'sample_id' repeats {b.sample_id!r} of row {first}; "
                "sample ids are unique, use epoch_repeats to weight a clip"
            )
    for first, second in _equal_pairs(columns.pop("key_hash")):
        a, b = row(first), row(second)
        if a.shard == b.shard and a.key.split(".", 1)[0] == b.key.split(".", 1)[0]:
            raise DataError(
                f"{label} row {second}: field 'key' {b.key!r} collides with {a.key!r} of row {first} in "
                f"{b.shard!r} (a key ends at its first dot)"
            )


def blocks_of(chunks: Iterable[bytes]) -> Iterator[Block]:
    """Cut pieces of a text into blocks of whole lines."""
    lines, offset, carry = 0, 0, b""
    for chunk in chunks:
        if (cut := chunk.rfind(b"\n") + 1) == 0:
            carry += chunk
            continue
        text = b"".join((carry, memoryview(chunk)[:cut]))
        yield Block(text, lines, offset)
        lines, offset, carry = lines + text.count(b"\n"), offset + len(text), chunk[cut:]
    if carry:
        yield Block(carry, lines, offset)


def processes_for(size: int) -> int:
    """Return how many processes share the check of `size` bytes of text."""
    if size < PARALLEL_BYTES or multiprocessing.current_process().daemon:
        return 1
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def scan(
    label: str, chunks: Iterator[bytes], again: Callable[[], Iterator[bytes]], processes: int
) -> Iterator[Part]:
    """Yield the part of every block of a text in order, reading `chunks` to their end.

    Several processes read the text `again`, each for itself, and check every n-th block: reading or inflating it twice
    costs less than handing it over. Raises what reading or checking raises.
    """
    if processes < 2:
        for block in blocks_of(chunks):
            yield scan_block(label, block)
        return
    # Forked, so that Python hashes agree.
    context = multiprocessing.get_context("fork")
    workers, readers = [], []
    try:
        for share in range(processes):
            reader, writer = context.Pipe(duplex=False)
            worker = context.Process(
                target=_send_parts, args=(label, again, share, processes, writer), daemon=True
            )
            worker.start()
            writer.close()
            workers.append(worker)
            readers.append(reader)
        for number in itertools.count():
            if (part := _received(label, readers[number % processes])) is None:
                break
            yield part
            next(chunks, None)
        for _ in chunks:
            pass
    finally:
        for reader in readers:
            reader.close()
        for worker in workers:
            worker.kill()  # not terminate: a trainer's SIGTERM handler is inherited
            worker.join()


def _send_parts(
    label: str, again: Callable[[], Iterator[bytes]], share: int, processes: int, writer: Connection
) -> None:
    try:
        for number, block in enumerate(blocks_of(again())):
            if number % processes == share:
                writer.send(scan_block(label, block))
        writer.send(None)
    except BrokenPipeError:  # the other side found an error and left
        return
    except Exception as error:
        writer.send(error)


def _received(label: str, reader: Connection) -> Part | None:
    try:
        result = reader.recv()
    except EOFError:
        raise MemoryExhausted(
            f"{label}: a process that checks the index was killed, probably for want of memory"
        ) from None
    if isinstance(result, Exception):
        raise result
    return result


def _shard(get: Callable[[str], Any]) -> tuple[Any, ...]:
    return (
        get("shard"),
        get("shard_generation"),
        get("shard_size"),
        get("shard_md5_b64"),
        get("shard_digest"),
    )


def _code(names: dict[str, int], name: str | None) -> int:
    return -1 if name is None else names.setdefault(name, len(names))


def _look_closer(label: str, block: Block, lines: list[bytes]) -> None:
    """Raise DataError for the first line with a duplicate key or a number that is not JSON."""
    for number, line in enumerate(lines, start=block.lines_before + 1):
        if line and not line.isspace():
            try:
                strict_object(line)
            except ValueError as problem:
                raise DataError(f"{label} line {number}: {problem}") from None


def _slowly(line: bytes, label: str, number: int, position: int) -> Mapping[str, Any]:
    """Check a line that failed in the way that can say what is wrong with it."""
    try:
        return validate_row(strict_object(line)).__dict__
    except UnicodeDecodeError as problem:
        packed = "; it is gzip, give it a name that ends in .gz" if line.startswith(b"\x1f\x8b") else ""
        raise DataError(f"{label}: not UTF-8 at byte {position + problem.start}{packed}") from None
    except ValueError as problem:
        raise DataError(f"{label} line {number}: {problem}") from None


def _equal_pairs(hashes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (earlier, later) positions of equal hashes, ordered by the later one."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    repeats = np.flatnonzero(ranked[1:] == ranked[:-1]) + 1
    for place in repeats[np.argsort(order[repeats], kind="stable")]:
        for earlier in range(int(np.searchsorted(ranked, ranked[place])), int(place)):
            yield int(order[earlier]), int(order[place])
