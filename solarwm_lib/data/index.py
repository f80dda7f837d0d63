"""Index files: one JSON row per clip, in authoritative order. Readers never scan archives to discover samples.

`.jsonl` or `.jsonl.gz` by suffix; blank lines are skipped and the row ordinal counts the others from 0. Opening checks
every row and keeps a few numbers of each; the rows themselves stay on disk and are read by ordinal, so an index of
millions of rows costs tens of bytes a row. (spec operations 4.1)
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data.index_scan import (
    Collected,
    part_of,
    processes_for,
    refuse_repeats,
    scan,
)
from solarwm_lib.data.random_gzip import RandomGzip
from solarwm_lib.data.rows import (
    SHARD_IDENTITY,
    AnyRow,
    LatentRow,
    Member,
    RawRow,
    Row,
    check_relative_path,
    parse_row,
    strict_object,
)
from solarwm_lib.runtime.errors import DataError

__all__ = [
    "SHARD_IDENTITY",
    "AnyRow",
    "Columns",
    "Index",
    "LatentRow",
    "Member",
    "RawRow",
    "Row",
    "check_relative_path",
    "check_rows",
    "index_bytes",
    "parse_row",
    "read_index",
    "read_rows",
    "read_text",
    "write_index",
    "write_rows",
]

CHUNK = 1 << 17
GZIP_RATIO = 5  # how much longer the text of an index is than its gzip file, roughly
ROWS_KEPT = 16384  # parsed rows, some 4 kB each: a small index stays whole in memory


@dataclass(frozen=True)
class Columns:
    """What a plan and a summary need of every row, one array entry per row; -1 (nan for `fps`) where absent.

    `shard`, `dataset`, `split` are codes into `Index.shards`, `datasets`, `splits`; `caption` tells a non-empty one.
    """

    shard: NDArray[np.int32]
    repeats: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    fps: NDArray[np.float64]
    start_frame: NDArray[np.int64]
    height: NDArray[np.int32]
    width: NDArray[np.int32]
    caption: NDArray[np.bool_]
    dataset: NDArray[np.int32]
    split: NDArray[np.int32]
    datasets: list[str]
    splits: list[str]


class Index(Sequence[AnyRow]):
    """The checked rows of an index, read by ordinal. Safe between threads and across fork.

    `path` (None for rows in memory), `ordered_sample_id_blake2s` (each id and a newline; spec operations 1.3), `shards` in
    order of first appearance, `columns`; `sha256` of the file and `decompressed_blake2s` are computed when first asked for.
    """

    path: Path | None
    ordered_sample_id_blake2s: str
    shards: list[str]
    columns: Columns

    def __init__(
        self, collected: Collected, columns: dict[str, NDArray], row: Callable[[int], AnyRow]
    ) -> None:
        refuse_repeats(collected.label, columns, row)
        self.columns = Columns(**columns, datasets=list(collected.datasets), splits=list(collected.splits))
        self.shards = list(collected.shards)
        self.ordered_sample_id_blake2s = collected.ids.hexdigest()
        self.path = None
        self._row = row
        self._identities = [identity for _, identity, _ in collected.shards.values()]
        self._stored: Callable[[], Iterator[bytes]] = lambda: iter([index_bytes(self)])
        self._text = self._stored
        self._close: Callable[[], Any] = lambda: None

    @classmethod
    def open(cls, path: str | Path) -> Index:
        """Check an index file in one pass and keep it open.

        Raises DataError naming line and field for a bad row; for a duplicate sample_id, disagreeing shard identities and
        keys that webdataset readers would merge; and for an index that is missing, damaged or empty.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise DataError(f"{path}: index is not readable ({error.strerror})") from None
        try:
            index = cls._scanned(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        index._close = weakref.finalize(index, os.close, descriptor)
        return index

    @classmethod
    def _scanned(cls, path: Path, descriptor: int) -> Index:
        compressed = RandomGzip(descriptor) if path.suffix == ".gz" else None

        def stored() -> Iterator[bytes]:
            return _chunks(descriptor)

        def text() -> Iterator[bytes]:
            return RandomGzip(descriptor, most_points=2).chunks() if compressed else stored()

        processes = processes_for(os.fstat(descriptor).st_size * (GZIP_RATIO if compressed else 1))
        chunks = compressed.chunks() if compressed else stored()
        collected = Collected(str(path))
        try:
            for part in scan(collected.label, chunks, text, processes):
                collected.add(part)
        except (OSError, EOFError, zlib.error) as error:
            remedy = "; restore a copy, a name that ends in .gz means gzip" if compressed else ""
            raise DataError(f"{path}: index is not readable ({error}){remedy}") from None
        if not collected.rows:
            raise DataError(
                f"{path}: index is empty, expected at least one row; "
                "set data.train_index or data.test_index, or rebuild the data set"
            )
        columns = collected.joined()
        pread = compressed.pread if compressed else _pread(descriptor)
        # The plan and the reader ask for the same row one after the other, and a small index fits whole.
        rows = functools.lru_cache(ROWS_KEPT)(_FileRows(path, pread, columns.pop("offset")))
        index = cls(collected, columns, rows)
        index.path, index._stored, index._text = path, stored, text
        return index

    @classmethod
    def of(cls, rows: Iterable[AnyRow], label: str = "rows") -> Index:
        """Return an index of rows in memory, with the checks between rows; digests are those of `index_bytes`."""
        kept = list(rows)
        if not kept:
            raise DataError(f"{label}: holds no row, expected at least one")
        collected = Collected(label)
        collected.add(part_of([row.__dict__ for row in kept]))
        columns = collected.joined()
        del columns["offset"]
        return cls(collected, columns, kept.__getitem__)

    def __len__(self) -> int:
        return len(self.columns.shard)

    @overload
    def __getitem__(self, ordinal: int) -> AnyRow: ...
    @overload
    def __getitem__(self, ordinal: slice) -> list[AnyRow]: ...
    def __getitem__(self, ordinal: int | slice) -> AnyRow | list[AnyRow]:
        if isinstance(ordinal, slice):
            return [self._row(number) for number in range(*ordinal.indices(len(self)))]
        number = ordinal + len(self) if ordinal < 0 else ordinal
        if not 0 <= number < len(self):
            raise IndexError(f"row {ordinal} of an index with {len(self)} rows")
        return self._row(number)

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the file, or of what `index_bytes` gives for rows in memory."""
        return _digest(hashlib.sha256(), self._stored())

    @functools.cached_property
    def decompressed_blake2s(self) -> str:
        """BLAKE2s of the decompressed text. (spec operations 1.3)"""
        return _digest(hashlib.blake2s(), self._text())

    @property
    def occurrences(self) -> int:
        """Virtual occurrences of one epoch: the sum of the rows' repeats. (spec operations 4.3)"""
        return int(self.columns.repeats.sum())

    def shard_identity(self, ordinal: int) -> tuple[Any, ...]:
        """Return (generation, size, MD5 in base64, SHA-256) of a shard by its ordinal; None where not recorded."""
        return self._identities[ordinal]

    @property
    def shard_bytes(self) -> NDArray[np.int64]:
        """Size of every shard, -1 where the rows do not record it."""
        position = SHARD_IDENTITY.index("shard_size")
        return np.array([identity[position] or -1 for identity in self._identities], np.int64)

    def close(self) -> None:
        """Close the file; the columns stay usable, rows and digests do not."""
        self._close()


def read_index(path: str | Path) -> Index:
    """Return the checked rows of an index file; see `Index.open`."""
    return Index.open(path)


def check_rows(rows: Iterable[AnyRow], label: str) -> None:
    """Raise DataError for duplicates and contradictions between rows."""
    kept = list(rows)
    collected = Collected(label)
    collected.add(part_of([row.__dict__ for row in kept]))
    refuse_repeats(label, collected.joined(), kept.__getitem__)


def write_rows(stream: BinaryIO, rows: Iterable[AnyRow], *, compressed: bool = False) -> None:
    """Write rows as JSON Lines (keys sorted, absent fields left out), gzipped without date or name if asked."""
    target = gzip.GzipFile("", "wb", 9, stream, mtime=0) if compressed else stream
    for row in rows:
        line = json.dumps(
            row.model_dump(exclude_none=True),
            sort_keys=True,
            ensure_ascii=False,
            separators=(",", ":"),
            allow_nan=False,
        )
        target.write(f"{line}\n".encode())
    if compressed:
        target.close()


def index_bytes(rows: Iterable[AnyRow], *, compressed: bool = False) -> bytes:
    """Return the rows as `write_rows` writes them."""
    buffer = io.BytesIO()
    write_rows(buffer, rows, compressed=compressed)
    return buffer.getvalue()


def write_index(path: str | Path, rows: Iterable[AnyRow]) -> None:
    """Write an index outside a transaction, row by row (compressed if the name ends in .gz)."""
    path = Path(path)
    with path.open("wb") as stream:
        write_rows(stream, rows, compressed=path.suffix == ".gz")


def read_text(path: str | Path) -> str:
    """Return the decompressed text of a small index; DataError if it is missing, damaged or not UTF-8."""
    path = Path(path)
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except FileNotFoundError:
        raise _missing(path) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: index is not readable ({error})") from None


def read_rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, object exactly as stored) of each line of a small file, without checking its fields."""
    path, rows = Path(path), []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                rows.append((number, strict_object(line)))
            except ValueError as error:
                raise DataError(f"{path} line {number}: {error}") from None
    return rows


def _missing(path: Path) -> DataError:
    return DataError(f"{path}: index is missing; set data.root, data.train_index or data.test_index")


def _pread(descriptor: int) -> Callable[[int, int], bytes]:
    return lambda size, offset: os.pread(descriptor, size, offset)


class _FileRows:
    """Rows of an index file by ordinal."""

    def __init__(self, path: Path, pread: Callable[[int, int], bytes], offsets: NDArray[np.int64]) -> None:
        self._path, self._pread, self._offsets = path, pread, offsets

    def __call__(self, ordinal: int) -> AnyRow:
        # A line is followed by the next row's line, perhaps with blank lines between, or by the end of the file.
        start, size = int(self._offsets[ordinal]), 4096
        while b"\n" not in (data := self._pread(size, start)) and len(data) == size:
            size *= 4
        try:
            return parse_row(data.split(b"\n", 1)[0])
        except ValueError as error:
            raise DataError(
                f"{self._path} row {ordinal}: {error}; the file changed after it was opened"
            ) from None


def _chunks(descriptor: int) -> Iterator[bytes]:
    offset = 0
    while data := os.pread(descriptor, CHUNK, offset):
        offset += len(data)
        yield data


def _digest(digest: Any, chunks: Iterator[bytes]) -> str:
    for data in chunks:
        digest.update(data)
    return digest.hexdigest()
