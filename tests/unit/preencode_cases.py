"""Small raw data sets, base models and configurations for the tests of preencoding."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from solarwm_lib.artifacts import Transaction
from solarwm_lib.config.load import resolve_values
from solarwm_lib.data import video
from solarwm_lib.data.index import read_index
from solarwm_lib.data.synthetic import camera_path
from solarwm_lib.data.writer import SCHEMA, Clip, RawDatasetWriter

FRAMES, COUNT, SIZE = 5, 9, 32


def pixels(number: int, count: int = COUNT) -> np.ndarray:
    """Frames that tell clip and time, uint8 [count, SIZE, SIZE, 3]."""
    frames = np.zeros((count, SIZE, SIZE, 3), np.uint8)
    frames[..., 0] = (30 * number + 6 * np.arange(count))[:, None, None]
    frames[..., 1] = np.linspace(0, 200, SIZE)[None, None]
    return frames


def clip(number: int, **changes: Any) -> Clip:
    """A clip of COUNT frames whose latents begin at the first one."""
    fields: dict[str, Any] = {
        "sample_id": f"set/clip-{number}",
        "key": f"clip-{number}",
        "video": video.mp4_bytes(pixels(number), 16, crf=8),
        "c2w": camera_path(COUNT, number),
        "fps": 16.0,
        "height": SIZE,
        "width": SIZE,
        "caption": f"room {number}",
        "scene": "room",
        "dataset": "set",
        "start_frame": 0,
    }
    return Clip(**fields | changes)


def publish(root: Path, train: Sequence[Clip], test: Sequence[Clip] = ()) -> Path:
    """Write a raw data set artifact with two clips a shard."""
    with Transaction(root, SCHEMA, {"name": root.name}) as transaction:
        writer = RawDatasetWriter(transaction, clips_per_shard=2)
        for split, clips in (("train", train), ("test", test)):
            for each in clips:
                writer.add(split, each)
        writer.finish()
    return root


def resolved(root: Path, data: Path, assets: Path, **changes: Any) -> Any:
    """Resolved preencode configuration of a generation at `root`; `changes` are dotted keys with `__` for the dot."""
    values: dict[str, Any] = {
        "schema": "solarwm.run.v1",
        "action": "preencode",
        "name": root.name,
        "model": {
            "family": "wan22_ti2v_5b",
            "architecture": "wan22-tiny",
            "base_path": str(assets),
            "text_length": 16,
        },
        "data": {
            "root": str(data),
            "pixel_frames": FRAMES,
            "height": SIZE,
            "width": SIZE,
            "random_start": False,
            "num_workers": 0,
        },
        "preencode": {"generation_id": root.name, "parts": 3, "dtype": "float32", "shard_max_samples": 2},
        "runtime": {"output_dir": str(root), "progress": False},
    }
    values = copy.deepcopy(values)
    for key, value in changes.items():
        *sections, leaf = key.split("__")
        target = values
        for section in sections:
            target = target[section]
        target[leaf] = value
    return resolve_values(values)


def rows_of(generation: Path, split: str = "train") -> list[Any]:
    """Rows of a merged generation."""
    return list(read_index(generation / "index" / f"{split}-index.jsonl"))


def keys_of(generation: Path, split: str = "train") -> Mapping[str, tuple[str, str]]:
    """(latents key, prompt key) by sample id."""
    return {row.sample_id: (row.latents_key, row.prompt_key) for row in rows_of(generation, split)}


def changed_assets(assets: Path, out: Path, component: str, tensor: str) -> Path:
    """A copy of base weights, published anew, in which one value of one tensor is another."""
    from safetensors.torch import load_file, save_file

    with Transaction(out, "solarwm.assets.v1", {"changed": tensor}) as transaction:
        shutil.copytree(assets, transaction.staging, dirs_exist_ok=True)
        for name in ("COMPLETE.json", "manifest.json"):
            (transaction.staging / name).unlink()
        (path,) = (transaction.staging / component).glob("*.safetensors")
        tensors = load_file(path)
        tensors[tensor].view(-1)[0] += 1
        save_file(tensors, path, metadata={"format": "pt"})
    return out
