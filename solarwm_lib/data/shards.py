"""Uncompressed USTAR shards: deterministic writing, reading by recorded byte offset.

Every member read is checked against its recorded length and SHA-256, so a cut, swapped or damaged shard is an error
naming shard and member, never a shorter data set. (spec operations 4.2; webdataset-compatible names)
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from solarwm_lib.data.index import Member, RawRow, check_relative_path
from solarwm_lib.runtime.errors import DataError

BLOCK = 512
KEY = re.compile(r"[A-Za-z0-9_-]+")


class ShardWriter:
    """Writes one shard to a binary stream; equal members give equal bytes (no dates, owners or modes of the host)."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._offset = 0
        self._digest = hashlib.sha256()
        self._names: set[str] = set()

    def add(self, name: str, data: bytes) -> Member:
        """Append a member and return where its content lies. Raises DataError for a bad or repeated name."""
        try:
            check_relative_path(name)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            header = info.tobuf(format=tarfile.USTAR_FORMAT, encoding="utf-8", errors="strict")
        except ValueError as error:
            raise DataError(f"shard member {name!r}: {error}") from None
        if name in self._names:
            raise DataError(f"shard member {name!r} is added twice; sample keys must differ within a shard")
        self._names.add(name)
        self._write(header)
        member = Member(offset=self._offset, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        self._write(data)
        self._write(b"\0" * (-len(data) % BLOCK))
        return member

    def finish(self) -> tuple[int, str]:
        """Write the end blocks; return the shard's (bytes, sha256). The caller closes the stream."""
        self._write(b"\0" * (2 * BLOCK))
        return self._offset, self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self._offset += len(data)


def check_key(key: str) -> str:
    """Return a sample key that every webdataset reader keeps apart, or raise DataError."""
    if not KEY.fullmatch(key):
        raise DataError(
            f"sample key {key!r}: expected letters, digits, '_' and '-' only (a key ends at its first dot)"
        )
    return key


class ShardReader:
    """Reads members of the shards under `root`; safe to share between threads and to fork.

    Keeps at most `max_open` shards open. Shards resolve inside the root (symbolic links included).
    """

    def __init__(self, root: str | Path, max_open: int = 8) -> None:
        self.root = Path(root).resolve()
        self._max_open = max_open
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, row: RawRow, name: str) -> bytes:
        """Return the content of member `name` of `row`.

        Raises DataError for a missing, truncated or outside shard, a missing member, and size or digest mismatch.
        """
        with self._lock:
            shard = self._shard(row)
            record = row.members.get(name) if row.members is not None else shard.table().get(name)
            if record is None:
                raise DataError(f"{row.shard}: no member {name!r} for sample {row.sample_id!r}")
            header, data = shard.pread(record.offset - BLOCK, BLOCK), shard.pread(record.offset, record.bytes)
        label = f"{row.shard} member {name!r} of sample {row.sample_id!r}"
        if len(header) < BLOCK or len(data) < record.bytes:
            raise DataError(
                f"{label}: shard ends at byte {shard.size}, the index promises bytes {record.offset} to "
                f"{record.offset + record.bytes}; the shard is truncated, copy or rebuild it"
            )
        found_name, found_size = _parse_header(header, label)
        if found_name != name or found_size != record.bytes:
            raise DataError(
                f"{label}: the shard holds {found_name!r} with {found_size} bytes at byte {record.offset}, the index "
                f"promises {record.bytes} bytes; index and shard do not belong together"
            )
        digest = hashlib.sha256(data).hexdigest()
        if record.sha256 and digest != record.sha256:
            raise DataError(
                f"{label}: sha256 is {digest}, the index promises {record.sha256}; the shard is damaged, "
                "restore a copy"
            )
        return data

    def check(self, rows: Iterable[RawRow]) -> None:
        """Compare every shard of `rows` with the index without reading content.

        Raises DataError for a shard that is missing, outside the root, of another size, or ends before a member does.
        """
        last: dict[str, tuple[int, RawRow]] = {}
        for row in rows:
            end = max((member.offset + member.bytes for member in (row.members or {}).values()), default=0)
            last[row.shard] = max(last.get(row.shard, (0, row)), (end, row), key=lambda pair: pair[0])
        for name, (end, row) in last.items():
            with self._lock:
                size = self._shard(row).size
            if size < end:
                raise DataError(
                    f"{name}: shard ends at byte {size}, the index promises bytes up to {end} (sample {row.sample_id!r}); "
                    "the shard is truncated, copy or rebuild it"
                )

    def close(self) -> None:
        """Close every open shard."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _shard(self, row: RawRow) -> _OpenShard:
        if (shard := self._open.get(row.shard)) is None:
            shard = _OpenShard(self._resolve(row), row.shard)
            self._open[row.shard] = shard
            if len(self._open) > self._max_open:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(row.shard)
        if row.shard_size is not None and shard.size != row.shard_size:
            raise DataError(
                f"{row.shard}: shard has {shard.size} bytes, the index promises shard_size {row.shard_size}; "
                "it is truncated or of another build, copy or rebuild it"
            )
        return shard

    def _resolve(self, row: RawRow) -> Path:
        path = (self.root / row.shard).resolve()
        if not path.is_relative_to(self.root):
            raise DataError(f"{row.shard}: resolves to {path}, outside data.root {self.root}")
        if not path.is_file():
            raise DataError(
                f"{row.shard}: shard is missing under data.root {self.root} (sample {row.sample_id!r})"
            )
        return path


class _OpenShard:
    """An open shard file and, for rows without recorded offsets, its lazily scanned member table."""

    def __init__(self, path: Path, name: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self._path, self._name = path, name
        self._table: dict[str, _Scanned] | None = None
        self.size = os.fstat(self._descriptor).st_size

    def pread(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes; positioned, so threads and forks do not disturb each other."""
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def table(self) -> dict[str, _Scanned]:
        """Return the members found by reading every header; only uncompressed tar is accepted."""
        if self._table is None:
            try:
                with tarfile.open(self._path, mode="r:") as archive:
                    self._table = {
                        entry.name: _Scanned(entry.offset_data, entry.size)
                        for entry in archive
                        if entry.isfile()
                    }
            except tarfile.TarError as error:
                raise DataError(f"{self._name}: not a readable uncompressed tar ({error})") from None
        return self._table

    def close(self) -> None:
        os.close(self._descriptor)


class _Scanned:
    """A member found by scanning: no digest is on record."""

    sha256 = None

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.bytes = offset, size


def _parse_header(header: bytes, label: str) -> tuple[str, int]:
    try:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise DataError(
            f"{label}: no tar header at the recorded offset ({error}); index and shard differ"
        ) from None
    return info.name, info.size
