"""A latent generation written by hand, as the format is described: what the reader must accept, and ways to spoil it."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from solarwm_lib.config import sections
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.geometry import geometry
from solarwm_lib.data import camera
from solarwm_lib.data.index import LatentRow, write_index
from solarwm_lib.data.latents import LatentClips
from solarwm_lib.data.shards import ShardWriter
from solarwm_lib.data.synthetic import camera_path
from solarwm_lib.preencode.contract import EncoderContract, wan_contract

FAMILY, FRAMES, SIDE, TEXT = "wan22_ti2v_5b", 5, 32, 16
SCHEMA = "solarwm.wan22_ti2v_5b.32p.5f.v1"
ARCHITECTURE = load_architecture("wan22-tiny")
SIZES = geometry(FAMILY, ARCHITECTURE, FRAMES, SIDE, SIDE)
TEXT_DIM = ARCHITECTURE["transformer"]["text_dim"]
NAMES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}


def data_section(root: Path, **changes: Any) -> sections.Data:
    """The `data` section of a run over the generation at `root`."""
    fields = {
        "root": "-",
        "encoding": "preencoded",
        "latents_root": str(root),
        "latent_schema": SCHEMA,
        "pixel_frames": FRAMES,
        "height": SIDE,
        "width": SIDE,
        "random_start": False,
    }
    return sections.Data(**fields | changes)


def safetensors(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:
    """A safetensors file of name -> (dtype name, array of that item size)."""
    header: dict[str, Any] = {"__metadata__": {"format": "test"}}
    body = b""
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + array.nbytes],
        }
        body += array.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def encoder_contract(family: str = FAMILY, **changes: Any) -> EncoderContract:
    """The contract of the tiny world's encoder in float32."""
    options = {"pixel_frames": FRAMES, "height": SIDE, "width": SIDE, "dtype": "float32", "text_length": TEXT}
    return wan_contract(family, ARCHITECTURE, **options | {"extras": {"latent_schema": SCHEMA}} | changes)


def tensors_of(number: int, contract: EncoderContract) -> dict[str, tuple[str, np.ndarray]]:
    """Tensors of a sample whose latents tell its number."""
    dtype = {"float32": "F32", "bfloat16": "BF16"}[contract.stored[0].dtype]
    fill = {"F32": float(number), "BF16": 0x3F80 + number}[dtype]
    return {
        spec.name: (dtype, np.full([size or 1 for size in spec.shape], fill, NAMES[dtype]))
        for spec in contract.stored
    }


def block_of(row: dict[str, Any], contract: EncoderContract, stored: bytes) -> dict[str, Any]:
    """The `preencoding` block of a row. (spec operations 6.5)"""
    frames = row["source_frame_indices"]
    shapes = {spec.name: list(spec.shape) for spec in contract.stored}
    return {
        "version": SCHEMA,
        "source_sample_id": row["source_sample_id"],
        "source_dataset": row["dataset"],
        "window_index": 0,
        "window_count": 1,
        "window_hash_namespace": f"solarwm-latent-{FRAMES}f-v1",
        "start_frame": frames[0],
        "source_frame_first": frames[0],
        "source_frame_last": frames[-1],
        "pixel_frames": FRAMES,
        "latent_frames": SIZES.latent_frames,
        "target_h": SIDE,
        "target_w": SIDE,
        "dtype": contract.stored[0].dtype,
        "latent_shape": shapes["latents"],
        "prompt_shape": shapes["prompt_embeds"],
        **({"i2v_y_shape": shapes["i2v_y"]} if "i2v_y" in shapes else {}),
        "encoder_contract_digest": contract.digest,
        "tensors_digest": hashlib.sha256(stored).hexdigest(),
        "caption_source": "frozen",
        "camera_source": "preserve",
    }


def row_of(number: int, contract: EncoderContract, start: int = 3) -> dict[str, Any]:
    """Index fields of a sample, before its shard is known."""
    return {
        "sample_id": f"clip {number}/latent-{FRAMES}f-w00",
        "key": f"clip-{number}__latent{FRAMES}f_w00",
        "source_sample_id": f"clip {number}",
        "source_frame_indices": list(range(start, start + FRAMES)),
        "start_frame": start,
        "encoder_contract_digest": contract.digest,
        "num_frames": 20,
        "fps": 16.0,
        "dataset": "test",
        "split": "train",
        "caption": f"room {number}",
    }


def write_generation(
    root: Path,
    count: int = 3,
    *,
    contract: EncoderContract | None = None,
    recorded: bool = True,
    c2w: Callable[[int], np.ndarray] = lambda number: camera_path(20, number),
    tensors: Callable[[int, EncoderContract], Any] = tensors_of,
    edit_row: Callable[[dict[str, Any]], None] = lambda row: None,
    edit_block: Callable[[dict[str, Any]], None] = lambda block: None,
    edit_manifest: Callable[[dict[str, Any]], None] = lambda manifest: None,
) -> Path:
    """Write samples 0..count-1 into one shard; the edits apply to every sample. Return `root`."""
    contract = contract or encoder_contract()
    (root / "index").mkdir(parents=True)
    (root / "shards" / "part-000000").mkdir(parents=True)
    stream, rows = io.BytesIO(), []
    writer = ShardWriter(stream)
    for number in range(count):
        row = row_of(number, contract)
        edit_row(row)
        content = tensors(number, contract)
        stored = content if isinstance(content, bytes) else safetensors(content)
        block = block_of(row, contract, stored)
        edit_block(block)
        manifest = {
            "camera": camera.camera_manifest((20, 4, 4)),
            "video": {"num_frames": 20, "fps": 16.0},
            "prompt": {"text": f"room {number}"},
            "preencoding": block,
        }
        edit_manifest(manifest)
        payload = {
            "camera.npz": camera.npz_bytes(c2w=c2w(number)),
            "manifest.json": json.dumps(manifest).encode(),
            "preencoded.safetensors": stored,
        }
        prefix = f"samples/{number:024x}/"
        records = {
            prefix + name: writer.add(prefix + name, data).model_dump() for name, data in payload.items()
        }
        row |= {
            "shard": "shards/part-000000/samples-00000.tar",
            "members": records if recorded else {name: prefix + name for name in payload},
            "preencoded_member": prefix + "preencoded.safetensors",
            "camera_member": prefix + "camera.npz",
            "manifest_member": prefix + "manifest.json",
        }
        rows.append(row)
    size, digest = writer.finish()
    (root / "shards/part-000000/samples-00000.tar").write_bytes(stream.getvalue())
    (root / "index" / "encoder-contract.json").write_text(json.dumps(contract.values()))
    identity = {"shard_size": size, "shard_digest": digest}
    write_index(
        root / "index" / "train-index.jsonl", [LatentRow.model_validate(row | identity) for row in rows]
    )
    return root


def open_generation(root: Path, family: str = FAMILY, **changes: Any) -> LatentClips:
    """Open a generation as a run of this geometry does; `changes` are fields of `data`."""
    return LatentClips(
        root,
        data_section(root, **changes),
        family=family,
        geometry=SIZES,
        text_length=TEXT,
        text_dim=TEXT_DIM,
    )
