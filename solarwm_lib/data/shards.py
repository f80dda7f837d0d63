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
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from solarwm_lib.data.index import Index, Member, Row, check_relative_path
from solarwm_lib.runtime.errors import ConfigError, DataError

if TYPE_CHECKING:
    from solarwm_lib.data.shard_cache import ShardCache
    from solarwm_lib.data.transport import RemoteFiles

BLOCK = 512
GAP_BYTES = 1 << 16  # members this close are read at once: less costly than a second read or request
SIZE_REQUESTS = 16  # sizes asked for at a time when a bucket is checked against the index
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
    """Reads members of shards under the folder `root`, staged by `cache`, or of `remote` by byte range.

    Safe to share between threads (reads run side by side) and to fork. Keeps at most `max_open` shards open. Local
    shards resolve inside the root, symbolic links included; `root_key` is the setting that error messages name.
    """

    def __init__(
        self,
        root: str | Path | None,
        max_open: int = 64,
        cache: ShardCache | None = None,
        remote: RemoteFiles | None = None,
        *,
        root_key: str = "data.root",
    ) -> None:
        self.root = Path(root).resolve() if root is not None and cache is None and remote is None else None
        self._root_key = root_key
        self._max_open = max_open
        self._cache, self._remote = cache, remote
        self._open: OrderedDict[str, OpenShard | RangeShard] = OrderedDict()
        self._lock = threading.Lock()
        survive_fork(self)

    def read(self, row: Row, name: str) -> bytes:
        """Return the content of member `name` of `row`.

        Raises DataError for a missing, truncated or outside shard, a missing member, and size or digest mismatch.
        """
        return self.read_many(row, (name,))[name]

    def read_many(self, row: Row, names: Iterable[str]) -> dict[str, bytes]:
        """Return the content of several members of `row`; neighbours in the shard are read at once.

        Raises as `read` does.
        """
        shard = self._leased(row)
        try:
            records = _records(row, shard, names)
            start = min([record.offset for record in records.values()], default=0)
            stop = max([record.offset + record.bytes for record in records.values()], default=0)
            wanted = sum([record.bytes for record in records.values()])
            if stop - start > wanted + GAP_BYTES * len(records):
                return _read_apart(row, shard, records)
            data = shard.pread(start, stop - start)
            return {
                name: _checked(
                    row,
                    shard,
                    name,
                    record,
                    data[record.offset - start : record.offset - start + record.bytes],
                )
                for name, record in records.items()
            }
        finally:
            shard.release()

    def prefetch(self, shards: Iterable[Row | str]) -> None:
        """Stage shards ahead of their first read, in the background; nothing happens without a cache."""
        if self._cache is not None:
            self._cache.prefetch(shards)

    def check(self, rows: Iterable[Row]) -> None:
        """Compare every shard of `rows` with the index without reading content (buckets: one size request each).

        Raises DataError for a shard that is missing, outside the root, of another size, or ends before a member does;
        ConfigError for one that this transport cannot read.
        """
        last: dict[str, tuple[int, Row]] = {}
        for row in _one_per_shard(rows):
            end = max((member.offset + member.bytes for member in (row.members or {}).values()), default=0)
            last[row.shard] = max(last.get(row.shard, (0, row)), (end, row), key=lambda pair: pair[0])
            if row.members is None and self._remote is not None:
                raise _no_offsets(row)
        for size, (name, (end, row)) in zip(
            self._sizes([row for _, row in last.values()]), last.items(), strict=True
        ):
            if size < end:
                raise DataError(
                    f"{name}: shard ends at byte {size}, the index promises bytes up to {end} "
                    f"(sample {row.sample_id!r}); the shard is truncated, copy or rebuild it"
                )

    def close(self) -> None:
        """Close every open shard and stop prefetching; reading again opens them again."""
        with self._lock:
            shards, self._open = list(self._open.values()), OrderedDict()
        for shard in shards:
            shard.close()
        if self._cache is not None:
            self._cache.close()

    def _leased(self, row: Row) -> OpenShard | RangeShard:
        """Return the shard of a row, staged, open and leased; the caller releases it."""
        with self._lock:
            shard = self._open.get(row.shard)
            if shard is not None:
                self._open.move_to_end(row.shard)
        if shard is None or not shard.lease():
            shard = self._opened(row)
            self._keep(row.shard, shard)
        try:
            _check_size(row, shard.size)
        except DataError:
            shard.release()
            raise
        return shard

    def _opened(self, row: Row) -> OpenShard | RangeShard:
        if self._cache is not None:
            return self._cache.acquire(row)
        if self._remote is not None:
            return RangeShard(self._remote, row.shard)
        path = self._resolve(row)
        return OpenShard(os.open(path, os.O_RDONLY), path, row.shard)

    def _keep(self, name: str, shard: OpenShard | RangeShard) -> None:
        """Remember an open shard in place of an older one of that name and of the least recently used ones."""
        with self._lock:
            retired = [self._open.pop(name)] if name in self._open else []
            self._open[name] = shard
            while len(self._open) > self._max_open:
                retired.append(self._open.popitem(last=False)[1])
        for old in retired:
            old.close()

    def _sizes(self, rows: list[Row]) -> list[int]:
        if self.root is not None:
            return [self._size(row) for row in rows]
        with ThreadPoolExecutor(SIZE_REQUESTS) as pool:
            return list(pool.map(self._size, rows))

    def _size(self, row: Row) -> int:
        """Return the bytes of a shard without opening or staging it."""
        if self._cache is not None:
            size = self._cache.size(row)
        elif self._remote is not None:
            size = self._remote.size(row.shard)
        else:
            size = self._resolve(row).stat().st_size
        _check_size(row, size)
        return size

    def _resolve(self, row: Row) -> Path:
        assert self.root is not None
        path = (self.root / row.shard).resolve()
        if not path.is_relative_to(self.root):
            raise DataError(f"{row.shard}: resolves to {path}, outside {self._root_key} {self.root}")
        if not path.is_file():
            raise DataError(
                f"{row.shard}: shard is missing under {self._root_key} {self.root} (sample {row.sample_id!r})"
            )
        return path

    def after_fork(self) -> None:
        self._lock, self._open = threading.Lock(), OrderedDict()


class OpenShard:
    """An open shard file, leased (in use) when made; closed once it is retired and nobody reads it any more."""

    def __init__(self, descriptor: int, path: Path, name: str) -> None:
        self._descriptor = descriptor
        self._path, self._name = path, name
        self._table: dict[str, _Scanned] | None = None
        self._users, self._retired = 1, False
        self._lock = threading.Lock()
        self.size = os.fstat(descriptor).st_size
        survive_fork(self)

    def lease(self) -> bool:
        """Start a read; False if the shard was closed or evicted meanwhile and must be opened again."""
        with self._lock:
            if self._retired or (self._users == 0 and not self._take()):
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """End a read."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._drop()
                if self._retired:
                    os.close(self._descriptor)

    def close(self) -> None:
        """Close as soon as no read is in progress."""
        with self._lock:
            if not self._retired:
                self._retired = True
                if self._users == 0:
                    os.close(self._descriptor)

    def pread(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes; positioned, so threads do not disturb each other."""
        part = os.pread(self._descriptor, size, offset)
        if len(part) == size:
            return part
        parts = []
        while part:
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
            part = os.pread(self._descriptor, size, offset) if size else b""
        return b"".join(parts)

    def table(self) -> Mapping[str, _Scanned]:
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

    def after_fork(self) -> None:
        # The child opens its own: an inherited descriptor shares its file lock with the parent.
        if not (self._retired and self._users == 0):
            os.close(self._descriptor)
        self._lock, self._users, self._retired = threading.Lock(), 0, True

    def _take(self) -> bool:
        """Called before the first of concurrent reads; False if the file is not the one that was opened."""
        return True

    def _drop(self) -> None:
        """Called after the last of concurrent reads."""


class RangeShard:
    """A shard in a bucket of which only the wanted bytes are read; has the interface of `OpenShard`."""

    def __init__(self, remote: RemoteFiles, name: str) -> None:
        self._remote, self._name = remote, name
        self.size = remote.size(name)

    def lease(self) -> bool:
        return True

    def release(self) -> None: ...

    def close(self) -> None: ...

    def pread(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes, fewer at the end of the shard."""
        return self._remote.read_range(self._name, offset, max(offset, min(offset + size, self.size)))


class _Scanned:
    """A member found by scanning: no digest is on record."""

    sha256 = None

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.bytes = offset, size


def survive_fork(resource: Any) -> None:
    """Call `resource.after_fork()` in every forked child, before anything else runs there."""
    _resources.add(resource)


_resources: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork() -> None:
    for resource in list(_resources):
        resource.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _one_per_shard(rows: Iterable[Row]) -> Iterable[Row]:
    """Return what is enough to check sizes: of an index that records all of them, the first row of each shard."""
    if not isinstance(rows, Index) or (rows.shard_bytes < 0).any():
        return rows
    _, first = np.unique(rows.columns.shard, return_index=True)
    return [rows[int(ordinal)] for ordinal in first]


def _records(
    row: Row, shard: OpenShard | RangeShard, names: Iterable[str]
) -> Mapping[str, Member | _Scanned]:
    if row.members is None and isinstance(shard, RangeShard):
        raise _no_offsets(row)
    table = row.members if row.members is not None else shard.table()  # type: ignore[union-attr]
    try:
        return {name: table[name] for name in names}
    except KeyError as error:
        raise DataError(f"{row.shard}: no member {error} for sample {row.sample_id!r}") from None


def _no_offsets(row: Row) -> ConfigError:
    return ConfigError(
        f"{row.shard}: the index records no byte offsets for sample {row.sample_id!r}, so its members cannot be read "
        "by byte range; set data.transport.cache_dir to stage whole shards"
    )


def _read_apart(
    row: Row, shard: OpenShard | RangeShard, records: Mapping[str, Member | _Scanned]
) -> dict[str, bytes]:
    """Return members that lie apart, each group of neighbours by one read."""
    groups: list[list[str]] = []
    end = 0
    for name, record in sorted(records.items(), key=lambda item: item[1].offset):
        if groups and record.offset - end <= GAP_BYTES:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, record.offset + record.bytes)
    found: dict[str, bytes] = {}
    for group in groups:
        start = records[group[0]].offset
        data = shard.pread(start, max(records[name].offset + records[name].bytes for name in group) - start)
        for name in group:
            at = records[name].offset - start
            found[name] = _checked(row, shard, name, records[name], data[at : at + records[name].bytes])
    return {name: found[name] for name in records}


def _check_size(row: Row, size: int) -> None:
    if row.shard_size is not None and size != row.shard_size:
        raise DataError(
            f"{row.shard}: shard has {size} bytes, the index promises shard_size {row.shard_size}; "
            "it is truncated or of another build, copy or rebuild it"
        )


def _checked(
    row: Row, shard: OpenShard | RangeShard, name: str, record: Member | _Scanned, data: bytes
) -> bytes:
    """Return `data`; DataError that explains why it is not the member, if it is not."""
    if len(data) == record.bytes and (
        record.sha256 is None or hashlib.sha256(data).hexdigest() == record.sha256
    ):
        return data
    label = f"{row.shard} member {name!r} of sample {row.sample_id!r}"
    if len(data) < record.bytes:
        raise DataError(
            f"{label}: shard ends at byte {shard.size}, the index promises bytes {record.offset} to "
            f"{record.offset + record.bytes}; the shard is truncated, copy or rebuild it"
        )
    found_name, found_size = _parse_header(shard.pread(record.offset - BLOCK, BLOCK), label)
    if found_name != name or found_size != record.bytes:
        raise DataError(
            f"{label}: the shard holds {found_name!r} with {found_size} bytes at byte {record.offset}, the index "
            f"promises {record.bytes} bytes; index and shard do not belong together"
        )
    raise DataError(
        f"{label}: sha256 is {hashlib.sha256(data).hexdigest()}, the index promises {record.sha256}; "
        "the shard is damaged, restore a copy"
    )


def _parse_header(header: bytes, label: str) -> tuple[str, int]:
    try:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise DataError(
            f"{label}: no tar header at the recorded offset ({error}); index and shard differ"
        ) from None
    return info.name, info.size
