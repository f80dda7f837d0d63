"""Reading tensors one at a time from safetensors and torch archives, and writing safetensors as a stream.

The peak of a conversion is one tensor, not a model: safetensors files and `.pt` archives are mapped into memory, names
change through a dict, a cast happens when the tensor is written.
"""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from solarwm_lib.artifacts import Transaction
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.weights.inventory import DTYPES, TensorInfo, read_shards, shard_files

SHARD_BYTES = 10 * 2**30
STEM = "diffusion_pytorch_model"
_TORCH = {code: getattr(torch, name) for code, (_, name) in DTYPES.items()}
_CODES = {dtype: code for code, dtype in _TORCH.items()}


@dataclass(frozen=True)
class Weights:
    """Named tensors of one network on disk: what they are, and how to get one of them. `where` is for messages."""

    where: str
    infos: Mapping[str, TensorInfo]
    get: Callable[[str], torch.Tensor]

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """Return the tensors `names` = {new name: name here}."""
        return Weights(
            self.where, {new: self.infos[old] for new, old in names.items()}, lambda new: self.get(names[new])
        )

    def cast(self, dtype: str | None) -> Weights:
        """Return the tensors as float type `dtype` ("float32", ...); None keeps each as it is."""
        if dtype is None:
            return self
        target = getattr(torch, dtype)
        infos = {name: TensorInfo(_CODES[target], info.shape) for name, info in self.infos.items()}
        return Weights(self.where, infos, lambda name: self.get(name).to(target))


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """Return dtype and shape of a tensor, which may be on the meta device."""
    return TensorInfo(_CODES[tensor.dtype], tuple(tensor.shape))


def from_tensors(tensors: Mapping[str, torch.Tensor], where: str) -> Weights:
    """Weights over tensors in memory or mapped from an archive."""
    return Weights(where, {name: info_of(tensor) for name, tensor in tensors.items()}, tensors.__getitem__)


def from_safetensors(path: Path | str | Iterable[Path]) -> Weights:
    """Weights of a safetensors file, of the shards of a folder or an index, or of a list of files."""
    from safetensors import safe_open

    files = shard_files(path) if isinstance(path, str | Path) else list(path)
    infos, places = read_shards(files)
    opened: dict[Path, Any] = {}

    def get(name: str) -> torch.Tensor:
        place = places[name]
        if place not in opened:
            opened[place] = safe_open(str(place), framework="pt")
        return opened[place].get_tensor(name)

    return Weights(str(path if isinstance(path, str | Path) else files[0].parent), infos, get)


def load_archive(path: Path | str) -> Any:
    """Return what a `.pt` or `.pth` archive holds, tensors mapped from the file and not read, nothing executed.

    ArtifactError for a file of another format, a truncated one, or one that holds anything but tensors, numbers, text,
    lists and dicts (spec wan22 7.2: every payload loads in tensors-only mode).
    """
    path = Path(path)
    if not zipfile.is_zipfile(path):
        raise ArtifactError(
            f"{path}: not a complete torch archive (zip): it is truncated, or written by torch before 1.6; load and save it "
            "again with torch.save, or fetch it again"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        refused = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()[0]
        raise ArtifactError(
            f"{path}: holds more than tensors and plain values ({refused}); loading it could run foreign code, so it is refused"
        ) from None
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ArtifactError(f"{path}: damaged torch archive ({str(error).splitlines()[0]})") from None


def check_archive(path: Path | str) -> None:
    """Read a whole `.pt` archive and compare every record with its CRC-32: torch.load itself accepts a flipped byte."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError) as error:
        raise ArtifactError(f"{path}: damaged archive ({error}); fetch it again") from None
    if bad is not None:
        raise ArtifactError(
            f"{path}: record {bad} does not match its checksum; the file is damaged, fetch it again"
        )


def state_dict(payload: Any, where: str) -> Weights:
    """Weights of a mapping name -> tensor out of an archive; ArtifactError names the first other entry."""
    if not isinstance(payload, Mapping) or not payload:
        raise ArtifactError(f"{where}: {type(payload).__name__}, expected a dict of named tensors")
    for name, value in payload.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ArtifactError(
                f"{where}: entry {name!r} is {type(value).__name__}, expected a tensor with a text name"
            )
    return from_tensors(payload, where)


def from_archive(path: Path | str) -> Weights:
    """Weights of a `.pth` file that is one state dict (VAE, text encoder)."""
    return state_dict(load_archive(path), str(path))


def write_stream(stream: BinaryIO, weights: Weights, metadata: Mapping[str, str] | None = None) -> None:
    """Write safetensors sequentially, one tensor at a time; equal tensors and metadata give equal bytes.

    Tensors lie by falling element size and name, so each is aligned.
    """
    names = sorted(weights.infos, key=lambda name: (-DTYPES[weights.infos[name].dtype][0], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in names:
        info = weights.infos[name]
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.bytes],
        }
        offset += info.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    stream.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        tensor = weights.get(name).detach().cpu()
        if info_of(tensor) != weights.infos[name]:
            raise ArtifactError(
                f"{weights.where}: {name} is {info_of(tensor)}, announced as {weights.infos[name]}"
            )
        stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_component(
    transaction: Transaction,
    folder: str,
    weights: Weights,
    *,
    stem: str = STEM,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `weights` into `folder` of a transaction as diffusers and transformers do: one file, or shards and an index."""
    prefix = f"{folder}/" if folder else ""
    shards = _shards(weights.infos, shard_bytes)
    if len(shards) == 1:
        with transaction.open(f"{prefix}{stem}.safetensors") as stream:
            write_stream(stream, weights)
        return
    weight_map = {}
    for index, names in enumerate(shards, 1):
        file = f"{stem}-{index:05d}-of-{len(shards):05d}.safetensors"
        with transaction.open(f"{prefix}{file}") as stream:
            write_stream(stream, weights.renamed({name: name for name in names}))
        weight_map.update(dict.fromkeys(names, file))
    total = sum(info.bytes for info in weights.infos.values())
    transaction.write_json(
        f"{prefix}{stem}.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _shards(infos: Mapping[str, TensorInfo], limit: int) -> list[list[str]]:
    """Deal names in order to shards of at most `limit` bytes (a larger tensor gets its own)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + info.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.bytes
    return shards
