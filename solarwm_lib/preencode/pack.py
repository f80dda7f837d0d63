"""Stored samples as shards: deterministic USTAR members, the `preencoding` manifest block, and one row per sample.

Equal samples in equal order give equal bytes, so a part that is made again is the same part. (spec operations 6.2 - 6.5)
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from solarwm_lib.config.identity import canonical_json
from solarwm_lib.data.index import LatentRow
from solarwm_lib.data.shards import BLOCK, ShardWriter
from solarwm_lib.data.windows import namespace
from solarwm_lib.data.writer import Transaction
from solarwm_lib.preencode.contract import EncoderContract
from solarwm_lib.preencode.source import Item, kept_tier
from solarwm_lib.runtime.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_SCHEMA = "solarwm.preencoded-sample.v1"
TENSORS, CAMERA, MANIFEST, PROVENANCE = (
    "preencoded.safetensors",
    "camera.npz",
    "manifest.json",
    "provenance.json",
)
_SHAPES = {"latents": "latent_shape", "prompt_embeds": "prompt_shape", "i2v_y": "i2v_y_shape"}


def sample_prefix(sample_id: str) -> str:
    """Folder of a sample inside its shard, `samples/` and 24 hexadecimal characters of BLAKE2s of its id."""
    return f"samples/{hashlib.blake2s(sample_id.encode()).hexdigest()[:24]}/"


def tensor_bytes(tensors: Mapping[str, Tensor], contract: EncoderContract) -> bytes:
    """The safetensors member of a sample; a function of the tensors alone (one metadata entry, so one order)."""
    from safetensors.torch import save

    ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
    return save(ordered, metadata={"format": contract.format_version})


def preencoding_block(
    item: Item, contract: EncoderContract, latent_schema: str, tensors_digest: str
) -> dict[str, Any]:
    """The manifest block that says what the stored tensors are. `tensors_digest` is SHA-256 of the member. (6.5)"""
    window, indices = item.window, item.source_frame_indices
    shapes = {_SHAPES.get(spec.name, f"{spec.name}_shape"): list(spec.shape) for spec in contract.stored}
    return {
        "version": latent_schema,
        "source_sample_id": window.source_sample_id,
        "source_dataset": item.row.dataset,
        "window_index": window.index,
        "window_count": window.count,
        "window_hash_namespace": namespace(contract.pixel_frames),
        "start_frame": window.start,
        "source_frame_first": indices[0],
        "source_frame_last": indices[-1],
        "pixel_frames": contract.pixel_frames,
        "latent_frames": contract.latent_frames,
        "target_h": contract.height,
        "target_w": contract.width,
        "dtype": contract.stored[0].dtype,
        **shapes,
        "encoder_contract_digest": contract.digest,
        "tensors_digest": tensors_digest,
        "caption_source": "frozen",
        "camera_source": "preserve",
    }


def _manifest_bytes(item: Item, manifest: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(manifest, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise DataError(
            f"sample {item.row.sample_id!r}: manifest holds NaN or infinity, which is not JSON"
        ) from None


class LatentShards:
    """Writes samples into shards `samples-NNNNN.tar` of one part, and keeps their rows.

    `folder` is where the part lies below the generation; shard keys of rows are relative to the generation. A shard ends
    before it would exceed `max_samples` or `max_bytes` (one sample always fits).
    """

    def __init__(
        self,
        transaction: Transaction,
        folder: str,
        contract: EncoderContract,
        latent_schema: str,
        *,
        max_samples: int,
        max_bytes: int,
    ) -> None:
        self._transaction, self._folder = transaction, folder
        self._contract, self._latent_schema, self._digest = contract, latent_schema, contract.digest
        self._max_samples, self._max_bytes = max_samples, max_bytes
        self._open: _Shard | None = None
        self._count = 0
        self._rows: list[LatentRow] = []

    def add(
        self, item: Item, tensors: Mapping[str, Tensor], camera: bytes, manifest: Mapping[str, Any]
    ) -> None:
        """Append one sample; `tensors` are those of the contract, `camera` and `manifest` the raw clip's."""
        self._contract.check(tensors, f"sample {item.window.sample_id!r}")
        stored = tensor_bytes(tensors, self._contract)
        block = preencoding_block(
            item, self._contract, self._latent_schema, hashlib.sha256(stored).hexdigest()
        )
        prefix = sample_prefix(item.window.sample_id)
        payload = {
            CAMERA: camera,
            MANIFEST: _manifest_bytes(item, {**manifest, "preencoding": block}),
            TENSORS: stored,
        }
        names = {suffix: prefix + suffix for suffix in sorted(payload)}
        fields = self._fields(item)
        provenance = {
            "schema": SAMPLE_SCHEMA,
            "members": names,
            **{name: fields[name] for name in _PROVENANCE_FIELDS},
        }
        payload[PROVENANCE] = canonical_json(provenance).encode()
        members = {prefix + suffix: data for suffix, data in payload.items()}  # sorted, provenance last
        self._room_for(members)
        assert self._open is not None
        self._open.add(
            members,
            fields
            | {
                "preencoded_member": names[TENSORS],
                "camera_member": names[CAMERA],
                "manifest_member": names[MANIFEST],
                "provenance_member": prefix + PROVENANCE,
            },
        )

    def finish(self) -> list[LatentRow]:
        """Close the last shard; return all rows in order."""
        if self._open is not None:
            self._rows += self._open.finish()
            self._open = None
        return self._rows

    def _room_for(self, members: Mapping[str, bytes]) -> None:
        size = sum(BLOCK + len(data) + -len(data) % BLOCK for data in members.values())
        shard = self._open
        if shard is not None and (
            len(shard.rows) >= self._max_samples or shard.bytes + size > self._max_bytes
        ):
            self.finish()
        if self._open is None:
            name = f"samples-{self._count:05d}.tar"
            self._open = _Shard(self._transaction.open(name), f"{self._folder}/{name}")
            self._count += 1

    def _fields(self, item: Item) -> dict[str, Any]:
        row, window = item.row, item.window
        metadata = {
            "split": item.split,
            "kept_tier": kept_tier(row),
            "dataset": row.dataset,
            "caption": item.caption,
            "num_frames": row.num_frames,
            "fps": row.fps,
        }
        metadata = {name: value for name, value in metadata.items() if value is not None}
        return {
            "sample_id": window.sample_id,
            "key": window.key,
            "source_sample_id": window.source_sample_id,
            "start_frame": window.start,
            "source_frame_indices": list(item.source_frame_indices),
            "encoder_contract_digest": self._digest,
            "epoch_repeats": row.epoch_repeats,
            "height": self._contract.height,
            "width": self._contract.width,
            "latents_key": item.latents_key,
            "prompt_key": item.prompt_key,
            **metadata,
            "metadata": {
                **metadata,
                "source_identity": item.video_sha256,
                "camera_sidecar_digest": item.camera_sha256,
            },
        }


_PROVENANCE_FIELDS = (
    "sample_id",
    "key",
    "source_sample_id",
    "start_frame",
    "source_frame_indices",
    "encoder_contract_digest",
    "metadata",
)


class _Shard:
    """One open shard and the rows of what it holds, complete but for the shard's own digests."""

    def __init__(self, stream: BinaryIO, key: str) -> None:
        self._stream, self._key = stream, key
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._writer = ShardWriter(self)  # type: ignore[arg-type]  # it only calls `write`
        self.bytes = 2 * BLOCK  # of the end
        self.rows: list[dict[str, Any]] = []

    def write(self, data: bytes) -> int:
        """Pass bytes on to the file, for the MD5 that buckets check uploads with."""
        self._md5.update(data)
        self.bytes += len(data)
        return self._stream.write(data)

    def add(self, members: Mapping[str, bytes], fields: Mapping[str, Any]) -> None:
        records = {name: self._writer.add(name, data).model_dump() for name, data in members.items()}
        self.rows.append({**fields, "shard": self._key, "members": records})

    def finish(self) -> list[LatentRow]:
        size, sha256 = self._writer.finish()
        self._stream.close()
        identity = {
            "shard_size": size,
            "shard_digest": sha256,
            "shard_md5_b64": base64.b64encode(self._md5.digest()).decode(),
        }
        return [LatentRow.model_validate(fields | identity) for fields in self.rows]
