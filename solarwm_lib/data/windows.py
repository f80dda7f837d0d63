"""Fixed windows of a clip: where each starts, what it is called, and indexes with one row per window.

A window is `pixel_frames` F output frames that begin at a source frame; it spans `span` source frames, which equals F
unless the source is resampled. Its name is made from its source: ids `SOURCE/latent-{F}f-wNN`, keys `KEY__latent{F}f_wNN`.
All numbers follow from the index alone, so window rows and the latents made from them can be checked by recomputation.
(spec operations 6.6, wan22 9.4)
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solarwm_lib.artifacts import Artifact, Transaction, reissue
from solarwm_lib.data.index import RawRow, index_bytes, read_index
from solarwm_lib.data.rows import AnyRow, Row
from solarwm_lib.data.sampling import last_offset
from solarwm_lib.data.writer import SPLITS
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError
from solarwm_lib.runtime.files import fsync_dir

SCHEMA = "solarwm.windows.v1"
PROFILES = ("spread", "hashed", "wan_153f")
SIX_WINDOW_DATASETS = ("abot", "miradata", "sekai_game")
WAN_153F_FRAMES = 153
JOIN_SCHEMA = "solarwm.wan22-153f-window-index.v1"
ROLE_FIELDS = ("split", "role", "recipe_role")
_SUFFIX = re.compile(r"(?P<source>.+)/latent-(?P<frames>[1-9][0-9]*)f-w(?P<index>[0-9]{2,})", re.DOTALL)


@dataclass(frozen=True)
class Window:
    """One window of a source clip: window `index` of `count` begins at source frame `start`."""

    sample_id: str
    key: str
    source_sample_id: str
    index: int
    count: int
    start: int


def namespace(pixel_frames: int) -> str:
    """Name that keys the hashed starts and marks the windows of this length, `solarwm-latent-153f-v1`."""
    return f"solarwm-latent-{pixel_frames}f-v1"


def window_id(source_sample_id: str, pixel_frames: int, index: int) -> str:
    """Sample id of a window, `SOURCE/latent-153f-w00`."""
    return f"{source_sample_id}/latent-{pixel_frames}f-w{index:02d}"


def window_key(source_key: str, pixel_frames: int, index: int) -> str:
    """Sample key of a window, `KEY__latent153f_w00`."""
    return f"{source_key}__latent{pixel_frames}f_w{index:02d}"


def split_id(sample_id: str) -> tuple[str, int, int] | None:
    """(source sample id, pixel frames, window index) that a window's id states; None for any other id."""
    match = _SUFFIX.fullmatch(sample_id)
    return (match["source"], int(match["frames"]), int(match["index"])) if match else None


def spread_starts(num_frames: int, span: int) -> tuple[int, ...]:
    """Starts of windows spread over a whole clip, about one per span: `wan_81f` of the release for any length.

    count = max(1, (n - 1 + (F-1) div 2) div (F-1)); a single window is centred (rounded down), several run from the first
    to the last possible start, rounded half up.
    """
    last, step = num_frames - span, max(1, span - 1)
    count = max(1, (num_frames - 1 + step // 2) // step)
    if count == 1:
        return (last // 2,)
    return tuple((2 * i * last + count - 1) // (2 * (count - 1)) for i in range(count))


def six_starts(num_frames: int, span: int) -> tuple[int, ...]:
    """Six evenly spaced starts, (i * (n - F) + 2) div 5."""
    return tuple((i * (num_frames - span) + 2) // 5 for i in range(6))


def hashed_start(source_sample_id: str, num_frames: int, span: int, pixel_frames: int) -> int:
    """The one start of a clip: BLAKE2b-64, little endian, of namespace, NUL and source id, modulo the possible starts."""
    text = f"{namespace(pixel_frames)}\0{source_sample_id}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") % (num_frames - span + 1)


def starts_of(
    profile: str, source_sample_id: str, dataset: str | None, num_frames: int, span: int, pixel_frames: int
) -> tuple[int, ...]:
    """Starts of all windows of one clip under `profile`; needs num_frames >= span >= 1."""
    if profile == "spread":
        return spread_starts(num_frames, span)
    if profile == "wan_153f" and dataset in SIX_WINDOW_DATASETS:
        return six_starts(num_frames, span)
    return (hashed_start(source_sample_id, num_frames, span, pixel_frames),)


def check_role(fields: Mapping[str, Any], split: str, label: str) -> None:
    """Raise DataError if a field that states the split of a row (split, role, recipe_role) says another one."""
    for name in ROLE_FIELDS:
        if (found := fields.get(name)) not in (None, split):
            raise DataError(
                f"{label}: field {name!r} is {found!r} in the {split} index; a row lies in the index of its split"
            )


def field_of(row: Row, name: str) -> Any:
    """A field of a row, whether its model names it or not; None if absent."""
    return getattr(row, name, None)


def window_of(row: RawRow, pixel_frames: int) -> Window:
    """The window that an index row stands for: a row of a window index, or a plain clip as its own only window.

    A plain clip begins at its `start_frame`, else at 0. DataError for a window of another length, or one whose fields
    contradict its id.
    """
    named, start = split_id(row.sample_id), row.start_frame or 0
    if named is None:
        found = (
            window_id(row.sample_id, pixel_frames, 0),
            window_key(row.key, pixel_frames, 0),
            row.sample_id,
        )
        return Window(*found, index=0, count=1, start=start)
    source, frames, index = named
    if frames != pixel_frames:
        raise DataError(
            f"sample {row.sample_id!r}: window of {frames} frames, data.pixel_frames is {pixel_frames}; make windows "
            f"of that length (`solarwm data materialize-windows --pixel-frames {pixel_frames}`)"
        )
    if row.start_frame is None:
        raise DataError(f"sample {row.sample_id!r}: field 'start_frame' is absent, a window needs its start")
    stated = {"source_sample_id": source, "window_index": index, "window_hash_namespace": namespace(frames)}
    for name, expected in stated.items():
        if (value := field_of(row, name)) not in (None, expected):
            raise DataError(
                f"sample {row.sample_id!r}: field {name!r} is {value!r}, its id says {expected!r}"
            )
    count = field_of(row, "window_count")
    if not isinstance(count, int) or isinstance(count, bool) or count <= index:
        raise DataError(
            f"sample {row.sample_id!r}: field 'window_count' is {count!r}, expected more than window {index}"
        )
    return Window(row.sample_id, row.key, source, index, count, start)


def window_row(row: RawRow, split: str, starts: Sequence[int], index: int, pixel_frames: int) -> RawRow:
    """The row of window `index` of a clip: the clip's own fields and shard under the window's names and start."""
    fields = {
        "sample_id": window_id(row.sample_id, pixel_frames, index),
        "key": window_key(row.key, pixel_frames, index),
        "split": split,
        "start_frame": starts[index],
        "source_sample_id": row.sample_id,
        "window_index": index,
        "window_count": len(starts),
        "window_hash_namespace": namespace(pixel_frames),
    }
    return row.model_copy(update=fields)


def materialize_windows(
    data_root: str | Path, profile: str, out: str | Path, *, pixel_frames: int, fps: float | None = None
) -> Artifact:
    """Publish the window indexes of a raw data set: members `train-index.jsonl` and `test-index.jsonl`.

    `profile`: `spread` (as many windows as the clip holds), `hashed` (one, at a hashed start), `wan_153f` (six for
    the datasets abot, miradata and sekai_game, else one hashed). `fps` is the rate clips are resampled to; without it
    windows count source frames. Shards stay where they are: a run over the windows sets `data.transport.root` to
    their folder. DataError for a clip shorter than one window, or already a window.
    """
    from solarwm_lib.data.dataset import read_dataset

    _check_profile(profile, pixel_frames, fps)
    dataset = read_dataset(data_root, shards_elsewhere=True)  # only the indexes are read
    identity = {"dataset": dataset.digest, "profile": profile, "pixel_frames": pixel_frames, "fps": fps}
    if (existing := reissue(out, SCHEMA, identity)) is not None:
        return existing
    with Transaction(out, SCHEMA, identity, [dataset]) as transaction:
        for split in SPLITS:
            with transaction.open(f"{split}-index.jsonl") as stream:
                for row in _source_rows(dataset.path, split):
                    for window in _windows(row, split, profile, pixel_frames, fps):
                        stream.write(index_bytes([window]))
    return transaction.artifact


def raw_row(row: AnyRow) -> RawRow:
    """Return `row` if it is one of raw clips; DataError for stored latents."""
    if not isinstance(row, RawRow):
        raise DataError(
            f"sample {row.sample_id!r}: a row of stored latents, expected raw clips; give a raw data set or index"
        )
    return row


def _source_rows(root: Path, split: str) -> Iterator[RawRow]:
    """Rows of a split's index, `SPLIT-index.jsonl` or `.jsonl.gz`; none if the test index is absent or empty."""
    path = root / f"{split}-index.jsonl"
    if not path.is_file() and path.with_suffix(".jsonl.gz").is_file():
        path = path.with_suffix(".jsonl.gz")
    if split == "test" and (not path.is_file() or not path.stat().st_size):
        return
    with closing(read_index(path)) as index:
        yield from map(raw_row, index)


def _check_profile(profile: str, pixel_frames: int, fps: float | None) -> None:
    if profile not in PROFILES:
        raise ConfigError(f"profile: found {profile!r}, expected one of {', '.join(PROFILES)}")
    if pixel_frames < 1:
        raise ConfigError(f"--pixel-frames: found {pixel_frames}, expected 1 or more")
    if fps is not None and not 0 < fps < math.inf:
        raise ConfigError(f"--fps: found {fps:g}, expected a positive number of frames per second")
    if profile == "wan_153f" and pixel_frames != WAN_153F_FRAMES:
        raise ConfigError(
            f"profile wan_153f has windows of {WAN_153F_FRAMES} pixel frames, found {pixel_frames}; "
            "use that length, or profile spread or hashed"
        )


def _windows(row: RawRow, split: str, profile: str, pixel_frames: int, fps: float | None) -> Iterator[RawRow]:
    label = f"sample {row.sample_id!r}"
    check_role({name: field_of(row, name) for name in ROLE_FIELDS}, split, label)
    if split_id(row.sample_id) is not None:
        raise DataError(f"{label}: is a window already; give the raw data set that it was cut from")
    if row.num_frames is None:
        raise DataError(f"{label}: field 'num_frames' is absent, expected the decoded frame count")
    span = last_offset(pixel_frames, row.fps or fps, fps) + 1 if fps else pixel_frames
    if row.num_frames < span:
        raise DataError(
            f"{label}: video has {row.num_frames} frames, a window spans {span} source frames; "
            "use a smaller --pixel-frames or remove the row"
        )
    starts = starts_of(profile, row.sample_id, row.dataset, row.num_frames, span, pixel_frames)
    for index in range(len(starts)):
        yield window_row(row, split, starts, index, pixel_frames)


def materialize_wan153f(
    train_index: str | Path,
    test_index: str | Path,
    train_window_index: str | Path,
    test_window_index: str | Path,
    output: str | Path,
) -> dict[str, Any]:
    """Join raw rows to the published 153-frame windows and create `output` (gzip JSONL, training windows first).

    Each window row names its source by its id or `source_sample_id`, and its `start_frame`. Roles must agree, the windows
    of a source have different ordinals, and every start is computed again. `epoch_repeats` becomes 1. Memory stays
    bounded: the join is an SQLite file beside the output. Returns the summary of spec operations 6.6. DataError for a row
    that does not agree, ArtifactError if `output` exists.
    """
    output = Path(output)
    if output.exists():
        raise ArtifactError(f"{output}: exists and is never overwritten; use another name or remove it")
    windows = {"train": Path(train_window_index), "test": Path(test_window_index)}
    for split, path in windows.items():
        if not path.is_file():
            raise DataError(f"--{split}-window-index: {path}: is not a file; give the published window index")
    raw = {"train": read_index(train_index), "test": read_index(test_index)}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=output.parent, prefix=f".{output.name}.", suffix=".partial"
    ) as folder:
        with closing(sqlite3.connect(Path(folder) / "join.sqlite", isolation_level=None)) as database:
            database.executescript(
                "PRAGMA synchronous=OFF; PRAGMA journal_mode=OFF; BEGIN;"
                "CREATE TABLE sources (id TEXT PRIMARY KEY, split TEXT, ordinal INTEGER) WITHOUT ROWID;"
                "CREATE TABLE windows (source TEXT, ordinal INTEGER, PRIMARY KEY (source, ordinal)) WITHOUT ROWID;"
            )
            for split in SPLITS:
                _add_sources(database, raw[split], split)
            rows = (row for split in SPLITS for row in _joined(database, raw, windows[split], split))
            digests = _write_gzip(Path(folder) / "index", rows)
            counts = _join_counts(database)
        try:
            os.link(Path(folder) / "index", output)  # refuses an existing file also in a race
        except FileExistsError:
            raise ArtifactError(
                f"{output}: exists and is never overwritten; use another name or remove it"
            ) from None
    fsync_dir(output.parent)
    facts = {
        "schema": JOIN_SCHEMA,
        "output": str(output),
        "window_hash_namespace": namespace(WAN_153F_FRAMES),
    }
    return facts | counts | digests


def _add_sources(database: sqlite3.Connection, rows: Sequence[AnyRow], split: str) -> None:
    for ordinal, row in enumerate(map(raw_row, rows)):
        check_role({name: field_of(row, name) for name in ROLE_FIELDS}, split, f"sample {row.sample_id!r}")
        try:
            database.execute("INSERT INTO sources VALUES (?, ?, ?)", (row.sample_id, split, ordinal))
        except sqlite3.IntegrityError:
            raise DataError(
                f"sample {row.sample_id!r}: in both raw indexes, expected in one; splits may not share a source"
            ) from None


def _joined(
    database: sqlite3.Connection, raw: Mapping[str, Sequence[AnyRow]], path: Path, split: str
) -> Iterator[RawRow]:
    """Rows of one window index in its order, each on top of its raw row."""
    for number, fields in _json_lines(path):
        label = f"{path} line {number}"
        check_role(fields, split, label)
        named = split_id(str(fields.get("sample_id", "")))
        if named is None or named[1] != WAN_153F_FRAMES:
            raise DataError(
                f"{label}: field 'sample_id' is {fields.get('sample_id')!r}, expected SOURCE/latent-153f-wNN"
            )
        source, _, index = named
        found = database.execute("SELECT split, ordinal FROM sources WHERE id = ?", (source,)).fetchone()
        if found is None or found[0] != split or fields.get("source_sample_id", source) != source:
            where = f"in the raw {found[0]} index" if found else "in no raw index"
            raise DataError(f"{label}: source {source!r} is {where}, expected in the raw {split} index")
        try:
            database.execute("INSERT INTO windows VALUES (?, ?)", (source, index))
        except sqlite3.IntegrityError:
            raise DataError(f"{label}: window {index} of {source!r} appears twice") from None
        row = raw_row(raw[split][found[1]])
        if row.num_frames is None or row.num_frames < WAN_153F_FRAMES:
            raise DataError(
                f"{label}: source {source!r} has {row.num_frames} frames, expected {WAN_153F_FRAMES} or more"
            )
        starts = starts_of("wan_153f", source, row.dataset, row.num_frames, WAN_153F_FRAMES, WAN_153F_FRAMES)
        if index >= len(starts) or fields.get("start_frame") != starts[index]:
            expected = starts[index] if index < len(starts) else f"only {len(starts)} windows"
            raise DataError(
                f"{label}: window {index} starts at {fields.get('start_frame')!r}, its clip of {row.num_frames} frames "
                f"gives {expected}; raw and window index do not belong together"
            )
        yield window_row(row, split, starts, index, WAN_153F_FRAMES).model_copy(update={"epoch_repeats": 1})


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON Lines file, read as a stream; DataError names file and line."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path} line {number}: not a JSON object ({error})") from None
                if not isinstance(value, dict):
                    raise DataError(
                        f"{path} line {number}: found {type(value).__name__}, expected a JSON object"
                    )
                yield number, value
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: index is not readable ({error})") from None


def _write_gzip(path: Path, rows: Iterator[RawRow]) -> dict[str, str]:
    """Write rows as gzip without a date, fsynced; return SHA-256 of the text and of the file."""
    text = hashlib.sha256()
    with path.open("xb") as file:
        with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as stream:
            for row in rows:
                line = index_bytes([row])
                text.update(line)
                stream.write(line)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        compressed = hashlib.file_digest(file, "sha256").hexdigest()
    return {"decompressed_sha256": text.hexdigest(), "compressed_sha256": compressed}


def _join_counts(database: sqlite3.Connection) -> dict[str, int]:
    counts: dict[str, int] = {}
    for split in SPLITS:
        query = (
            "SELECT count(*), count(DISTINCT source) FROM windows JOIN sources ON source = id WHERE split = ?"
        )
        found = database.execute(query, (split,)).fetchone()
        counts |= {f"{split}_windows": found[0], f"{split}_sources": found[1]}
    return counts | {"total_windows": counts["train_windows"] + counts["test_windows"]}
