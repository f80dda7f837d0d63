"""What an index holds: counts, digests and, where the shards are at hand, which way its cameras move."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from solarwm_lib.data.camera import load_c2w
from solarwm_lib.data.index import RawRow, read_index, read_rows, read_text
from solarwm_lib.data.shards import ShardReader

CAMERA_SAMPLE = 16


def inspect(index: str | Path, *, cameras: bool = True, camera_array_key: str = "c2w") -> dict[str, Any]:
    """Return counts and digests of an index (spec operations 1.3), and a summary of its first cameras.

    Cameras are looked at when the shards lie beside the index. Raises DataError for a bad index or camera.
    """
    path = Path(index).absolute()
    rows = read_index(path)
    stored = [row for _, row in read_rows(path)]
    facts: dict[str, Any] = {
        "index": str(path),
        "rows": len(rows),
        "virtual_occurrences": sum(row.epoch_repeats for row in rows),
        "shards": len({row.shard for row in rows}),
        "ordered_sample_id_digest": _digest("".join(f"{row.sample_id}\n" for row in rows)),
        "ordered_row_digest": _digest("".join(_canonical(row) for row in stored)),
        "decompressed_digest": _digest(read_text(path)),
        "num_frames": _range([row.num_frames for row in rows]),
        "fps": _range([row.fps for row in rows]),
        "sizes": sorted({f"{row.width}x{row.height}" for row in rows}),
        "captions": sum(bool(row.caption) for row in rows),
    }
    if cameras and all((path.parent / row.shard).is_file() for row in rows[:CAMERA_SAMPLE]):
        facts["cameras"] = camera_summary(path.parent, rows[:CAMERA_SAMPLE], camera_array_key)
    return facts


def camera_summary(root: Path, rows: list[RawRow], camera_array_key: str = "c2w") -> dict[str, Any]:
    """Return how the cameras of `rows` move, so that a wrong convention shows.

    `forward_dot_step`: mean cosine between the viewing axis +z and the step taken. Walking forward gives a clearly
    positive value; a steadily negative one suggests OpenGL axes or world-to-camera matrices. `step_length`: mean step in
    the data's unit. Mirrored and non-rotation matrices have already been refused while loading.
    """
    shards = ShardReader(root)
    cosines, lengths = [], []
    for row in rows:
        c2w = load_c2w(
            shards.read(row, row.camera_member), camera_array_key, name=f"sample {row.sample_id!r}"
        )
        step = np.diff(c2w[:, :3, 3], axis=0)
        length = np.linalg.norm(step, axis=1)
        lengths.append(length)
        moving = length > 1e-6
        cosines.append((step * c2w[:-1, :3, 2]).sum(axis=1)[moving] / length[moving])
    shards.close()
    cosine, length = np.concatenate(cosines), np.concatenate(lengths)
    return {
        "samples": len(rows),
        "handedness": "right",
        "forward_dot_step": round(float(cosine.mean()), 4) if len(cosine) else None,
        "step_length": round(float(length.mean()), 6) if len(length) else None,
    }


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode()).hexdigest()


def _canonical(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def _range(values: list[Any]) -> list[Any] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
