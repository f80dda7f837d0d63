"""What an index holds, whether its shards hold it too, and which way its cameras move."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from solarwm_lib.data.camera import check_declared
from solarwm_lib.data.index import Index, LatentRow
from solarwm_lib.data.shard_audit import ShardProblem, audit_shard
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    import pandas

    from solarwm_lib.data.shards import ShardReader

CAMERA_SAMPLE = 64


def inspect(
    index_path: str | Path,
    *,
    root: str | Path | None = None,
    cameras: bool = True,
    camera_array_key: str = "c2w",
    camera_axes: str = "opencv",
    transport: ShardReader | None = None,
    check_shards: bool = True,
) -> dict[str, Any]:
    """Return counts and digests of an index (spec operations 1.3), its table, and the state of shards and cameras.

    Shards are looked for under `root`; by default beside the index or, as latent generations lie, in the folder above.
    If they are there, every one is compared with its rows by its tar headers and up to 64 cameras are read (from
    `transport`, if given, wherever the shards are). `problems` lists what would stop or spoil a reader, one line each;
    `warnings` what contradicts the declared camera convention. Raises DataError for a bad index, ConfigError for a `root`
    that is no folder or an undeclared convention.
    """
    check_declared(camera_array_key, camera_axes)
    if root is not None and not Path(root).is_dir():
        raise ConfigError(f"--root: {root} is not a folder of this machine; shards are looked for below it")
    path = Path(index_path).absolute()
    index = Index.open(path)
    with ThreadPoolExecutor(1) as pool:
        # Hashing needs no interpreter lock; the table and the shards are looked at meanwhile.
        digest = pool.submit(lambda: index.decompressed_blake2s)
        facts = _facts(index, path)
        problems: list[str] = []
        place = Path(root) if root is not None else _shard_root(index, path)
        if check_shards and place is not None:
            problems += map(str, audit(index, place))
            facts["shards_checked"] = len(index.shards)
        if cameras and (transport is not None or place is not None):
            facts |= _cameras(index, transport, place, camera_array_key, camera_axes)
            problems += facts["cameras"]["unreadable_examples"] + facts["cameras"]["refused_examples"]
        facts["decompressed_digest"] = digest.result()
    index.close()
    return facts | {"problems": list(dict.fromkeys(problems))}


def _facts(index: Index, path: Path) -> dict[str, Any]:
    columns = index.columns
    facts: dict[str, Any] = {
        "index": str(path),
        "kind": "latent" if isinstance(index[0], LatentRow) else "raw",
        "rows": len(index),
        "virtual_occurrences": index.occurrences,
        "shards": len(index.shards),
        "ordered_sample_id_digest": index.ordered_sample_id_blake2s,
        "num_frames": _range(columns.num_frames[columns.num_frames > 0]),
        "fps": _range(columns.fps[~np.isnan(columns.fps)]),
        "captions": int(columns.caption.sum()),
        "captions_missing": int((~columns.caption).sum()),
        "table": _table(index),
    }
    facts["sizes"] = sorted({row["size"] for row in facts["table"]})
    return facts


def audit(index: Index, root: Path) -> list[ShardProblem]:
    """Compare every shard of an index with the file under `root`, headers only."""
    order = np.argsort(index.columns.shard, kind="stable")
    first = np.searchsorted(index.columns.shard[order], np.arange(len(index.shards) + 1))
    problems: list[ShardProblem] = []
    for number, name in enumerate(tqdm(index.shards, desc="shards", unit="shard", disable=None)):
        rows = [index[int(ordinal)] for ordinal in order[first[number] : first[number + 1]]]
        problems += audit_shard(root / name, rows)
    return problems


def format_inspection(facts: dict[str, Any]) -> str:
    """Return the facts of `inspect` as text for a terminal."""
    import pandas

    lines = [
        f"{name:26}{_shown(value)}"
        for name, value in facts.items()
        if name not in ("table", "cameras", "warnings", "problems")
    ]
    lines += ["", pandas.DataFrame(facts["table"]).to_string(index=False, na_rep="-")]
    if "cameras" in facts:
        from solarwm_lib.data.camera_report import format_summary

        lines += ["", format_summary(facts["cameras"])]
    for kind in ("warnings", "problems"):
        if facts.get(kind):
            lines += ["", f"{kind}:", *(f"  {text}" for text in facts[kind])]
    return "\n".join(lines)


def _shard_root(index: Index, path: Path) -> Path | None:
    """Return the folder the shard keys start from, if the first shard of the index can be found."""
    return next((root for root in path.parents[:2] if (root / index.shards[0]).is_file()), None)


def _cameras(
    index: Index, transport: ShardReader | None, root: Path | None, key: str, axes: str
) -> dict[str, Any]:
    from solarwm_lib.data import camera_report
    from solarwm_lib.data.shards import ShardReader

    # Spread over the index: data sets differ in their conventions, and one index may hold several.
    chosen = np.unique(np.linspace(0, len(index) - 1, min(CAMERA_SAMPLE, len(index))).astype(int))
    shards = transport or ShardReader(root)
    try:
        summary = camera_report.summarize_rows(
            [index[int(ordinal)] for ordinal in chosen],
            shards.read,
            convention=camera_report.Convention(key, axes),
        )
    finally:
        if transport is None:
            shards.close()
    return {"cameras": summary, "warnings": camera_report.warnings(summary)}


def _table(index: Index) -> list[dict[str, Any]]:
    """Return rows, occurrences, frames, rates and missing captions per dataset, split and size."""
    frame = _frame(index)
    groups = frame.groupby(["dataset", "split", "height", "width"], sort=True)
    table = groups.agg(
        rows=("repeats", "size"),
        occurrences=("repeats", "sum"),
        frames_min=("num_frames", "min"),
        frames_max=("num_frames", "max"),
        fps_min=("fps", "min"),
        fps_max=("fps", "max"),
        hours=("hours", "sum"),
        captions_missing=("captionless", "sum"),
    ).reset_index()
    names = {"dataset": index.columns.datasets, "split": index.columns.splits}
    records = []
    for row in table.to_dict("records"):
        named = {name: known[code] if (code := row.pop(name)) >= 0 else None for name, known in names.items()}
        height, width = row.pop("height"), row.pop("width")
        size = f"{width}x{height}" if height > 0 and width > 0 else "unknown"
        records.append(named | {"size": size} | {name: _plain(value) for name, value in row.items()})
    return records


def _frame(index: Index) -> pandas.DataFrame:
    import pandas

    columns = index.columns
    frames = np.where(columns.num_frames > 0, columns.num_frames, np.nan)
    return pandas.DataFrame(
        {
            "dataset": columns.dataset,
            "split": columns.split,
            "height": columns.height,
            "width": columns.width,
            "repeats": columns.repeats,
            "num_frames": frames,
            "fps": columns.fps,
            "hours": columns.repeats * frames / columns.fps / 3600,
            "captionless": ~columns.caption,
        },
        copy=False,
    )


def _plain(value: Any) -> int | float | None:
    """Return a number as JSON has it: whole where it is whole, None for nan."""
    if value != value:
        return None
    return int(value) if value == int(value) else round(float(value), 4)


def _range(values: Any) -> list[int | float | None] | None:
    return [_plain(values.min()), _plain(values.max())] if len(values) else None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
