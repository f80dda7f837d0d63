"""Index files: one JSON row per clip, in authoritative order. Readers never scan archives to discover samples.

`.jsonl` or `.jsonl.gz` by suffix; blank lines are skipped and the row ordinal counts the others from 0.
(spec operations 4.1)
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from solarwm_lib.runtime.errors import DataError

SHARD_IDENTITY = ("shard_generation", "shard_size", "shard_md5_b64", "shard_digest")


def check_relative_path(value: str) -> str:
    """Return `value` if it is a relative POSIX path that cannot leave its root; raise ValueError otherwise."""
    if not value:
        raise ValueError("is empty, expected a relative POSIX path")
    if "\\" in value or "\0" in value:
        raise ValueError(f"found {value!r}, expected a POSIX path without backslash")
    if ":" in value.split("/", 1)[0]:
        raise ValueError(f"found {value!r}, expected a path without a scheme or drive")
    if any(segment in ("", ".", "..") for segment in value.split("/")):
        raise ValueError(f"found {value!r}, expected a relative path without '', '.' or '..' segments")
    return value


def _positive_size(value: Any) -> Any:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"found {value!r}, expected a positive integer")
    return value


def _md5(value: str) -> str:
    try:
        size = len(base64.b64decode(value, validate=True))
    except ValueError:
        size = -1
    if size != 16:
        raise ValueError(f"found {value!r}, expected base64 of 16 bytes")
    return value


Text = Annotated[StrictStr, Field(min_length=1)]
RelativePath = Annotated[StrictStr, AfterValidator(check_relative_path)]
Size = Annotated[int, BeforeValidator(_positive_size)]
Sha256 = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]


class Member(BaseModel):
    """Where one file lies inside its shard: byte offset of its content, length and SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offset: Annotated[StrictInt, Field(ge=512)]
    bytes: Annotated[StrictInt, Field(ge=0)]
    sha256: Sha256


class RawRow(BaseModel):
    """One raw clip. Fields this class does not name are kept and written back."""

    model_config = ConfigDict(extra="allow", frozen=True)

    sample_id: Text
    key: Text
    shard: RelativePath
    epoch_repeats: Annotated[StrictInt, Field(ge=1)] = 1
    shard_size: Size | None = None
    shard_generation: Text | None = None
    shard_md5_b64: Annotated[StrictStr, AfterValidator(_md5)] | None = None
    shard_digest: Sha256 | None = None
    video_member: RelativePath
    camera_member: RelativePath
    manifest_member: RelativePath | None = None
    manifest: dict[str, Any] | None = None
    members: dict[RelativePath, Member] | None = None
    num_frames: Annotated[StrictInt, Field(ge=1)] | None = None
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    height: Annotated[StrictInt, Field(ge=1)] | None = None
    width: Annotated[StrictInt, Field(ge=1)] | None = None
    caption: StrictStr | None = None
    dataset: StrictStr | None = None
    split: StrictStr | None = None
    start_frame: Annotated[StrictInt, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RawRow:
        if self.shard_size is None and any(getattr(self, name) is not None for name in SHARD_IDENTITY):
            raise ValueError("field 'shard_size': absent, required beside any other shard_* identity field")
        if self.manifest is None and self.manifest_member is None:
            raise ValueError("field 'manifest': absent, expected an inline manifest or manifest_member")
        if self.members is not None:
            named = (self.video_member, self.camera_member, self.manifest_member)
            for name in named:
                if name is not None and name not in self.members:
                    raise ValueError(
                        f"field 'members': no entry for {name!r}, found {', '.join(self.members)}"
                    )
        return self

    def shard_identity(self) -> tuple[Any, ...]:
        """Return what all rows of one shard must agree on."""
        return tuple(getattr(self, name) for name in SHARD_IDENTITY)


def read_text(path: str | Path) -> str:
    """Return the decompressed text of an index; DataError if it is missing, damaged or not UTF-8."""
    path = Path(path)
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{path}: index is missing; set data.root, data.train_index or data.test_index"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: index is not readable ({error})") from None


def read_rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, row exactly as stored) of each row, without checking its fields."""
    path, rows = Path(path), []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        except ValueError as error:
            raise DataError(f"{path} line {number}: not a JSON object ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number}: found {type(row).__name__}, expected a JSON object")
        rows.append((number, row))
    return rows


def read_index(path: str | Path) -> list[RawRow]:
    """Return the checked rows of an index.

    Raises DataError naming line and field for a bad row, a duplicate sample_id, disagreeing shard identities, keys
    that webdataset readers would merge, and an empty index.
    """
    path = Path(path)
    rows = [_parse(row, path, number) for number, row in read_rows(path)]
    if not rows:
        raise DataError(
            f"{path}: index is empty, expected at least one row; "
            "set data.train_index or data.test_index, or rebuild the data set"
        )
    check_rows(rows, str(path))
    return rows


def check_rows(rows: Sequence[RawRow], label: str) -> None:
    """Raise DataError for duplicates and contradictions between rows."""
    seen: dict[str, int] = {}
    identity: dict[str, tuple[tuple[Any, ...], int]] = {}
    stems: dict[tuple[str, str], tuple[str, int]] = {}
    for ordinal, row in enumerate(rows):
        if row.sample_id in seen:
            raise DataError(
                f"{label} row {ordinal}: field 'sample_id' repeats {row.sample_id!r} of row {seen[row.sample_id]}; "
                "sample ids are unique, use epoch_repeats to weight a clip"
            )
        seen[row.sample_id] = ordinal
        known, first = identity.setdefault(row.shard, (row.shard_identity(), ordinal))
        if known != row.shard_identity():
            raise DataError(
                f"{label} row {ordinal}: shard_* fields of {row.shard!r} differ from row {first}; "
                "all rows of a shard carry the same size, generation and digests"
            )
        # A webdataset key ends at the first dot: 'a.b' and 'a.c' would be read as one sample.
        key, first = stems.setdefault((row.shard, row.key.split(".", 1)[0]), (row.key, ordinal))
        if first != ordinal:
            raise DataError(
                f"{label} row {ordinal}: field 'key' {row.key!r} collides with {key!r} of row {first} in {row.shard!r} "
                "(a key ends at its first dot)"
            )


def index_bytes(rows: Iterable[RawRow], *, compressed: bool = False) -> bytes:
    """Return the rows as JSON Lines (keys sorted, absent fields left out), gzipped without a date if asked."""
    lines = [
        json.dumps(
            row.model_dump(exclude_none=True),
            sort_keys=True,
            ensure_ascii=False,
            separators=(",", ":"),
            allow_nan=False,
        )
        for row in rows
    ]
    data = "".join(f"{line}\n" for line in lines).encode()
    return gzip.compress(data, mtime=0) if compressed else data


def write_index(path: str | Path, rows: Sequence[RawRow]) -> None:
    """Write an index outside a transaction (compressed if the name ends in .gz)."""
    path = Path(path)
    path.write_bytes(index_bytes(rows, compressed=path.suffix == ".gz"))


def _parse(row: dict[str, Any], path: Path, number: int) -> RawRow:
    try:
        return RawRow.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        found = (
            ""
            if "found" in message or not field or first["type"] == "missing"
            else f", found {first['input']!r:.80}"
        )
        where = f"field '{field}': " if field else ""
        raise DataError(f"{path} line {number}: {where}{message}{found}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return result


def _refuse_constant(value: str) -> None:
    raise ValueError(f"{value} is not JSON")
