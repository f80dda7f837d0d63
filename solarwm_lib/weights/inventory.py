"""What tensors a file holds, from its header alone, and whether they are exactly those of a network.

No torch here. Sizes are in elements unless named bytes; dtypes are safetensors codes ("F32", "BF16").
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solarwm_lib.config.architectures import architecture_names, load_architecture
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.weights.keys import DELTA

DTYPES = {  # code -> (bytes, name)
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "I64": (8, "int64"), "I32": (4, "int32"),
    "I16": (2, "int16"), "I8": (1, "int8"), "U8": (1, "uint8"), "BOOL": (1, "bool"),
}  # fmt: skip
FLOATS = ("F32", "BF16", "F16")
_HEADER_LIMIT = 100_000_000
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: dtype code and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPES[self.dtype][0]


def _no_duplicates(where: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in items)
        if twice := [key for key, count in counts.items() if count > 1]:
            raise ArtifactError(f"{where}: key {twice[0]} occurs {counts[twice[0]]} times; expected once")
        return dict(items)

    return pairs


def read_header(path: Path | str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return (tensors, metadata) of a safetensors file; ArtifactError if truncated, damaged or with a key twice."""
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise ArtifactError(
                f"{path}: not a safetensors file ({size} bytes, header length {length}); it is truncated or another format"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates(str(path)))
        metadata = header.pop("__metadata__", {})
        tensors = {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: safetensors header is damaged ({type(error).__name__}: {error})"
        ) from None
    end = 0
    for begin, stop, name in spans:
        info = tensors[name]
        if info.dtype not in DTYPES:
            raise ArtifactError(
                f"{path}: {name} has dtype {info.dtype!r}, expected one of {', '.join(DTYPES)}"
            )
        if begin != end or stop - begin != info.bytes:
            raise ArtifactError(f"{path}: {name} ({info.dtype} {list(info.shape)}) lies at bytes {begin}..{stop}, which "
                                f"does not fit its size or its neighbour; the header is damaged")  # fmt: skip
        end = stop
    if size != 8 + length + end:
        raise ArtifactError(
            f"{path}: has {size} bytes, its header describes {8 + length + end}; it is truncated or was changed"
        )
    return tensors, metadata


def read_shards(files: Iterable[Path]) -> tuple[dict[str, TensorInfo], dict[str, Path]]:
    """Return ({key: tensor}, {key: file}) of several safetensors files; a key in two of them is an ArtifactError."""
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, Path] = {}
    for file in files:
        for key, info in read_header(file)[0].items():
            if key in places:
                raise ArtifactError(
                    f"{file}: key {key} is also in {places[key].name}; expected each tensor in one shard, remove the stale file"
                )
            tensors[key], places[key] = info, file
    return tensors, places


def shard_files(path: Path | str) -> list[Path]:
    """Return the safetensors files of a folder, an index or a single file, checked against the index if there is one.

    ArtifactError if there is none, if a shard named by the index is missing, or if the folder holds files beside it.
    """
    path = Path(path)
    if path.is_file() and not path.name.endswith(INDEX_SUFFIX):
        return [path]
    folder = path if path.is_dir() else path.parent
    indexes = [path] if path.is_file() else sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    found = sorted(folder.glob("*.safetensors"))
    if len(indexes) > 1:
        raise ArtifactError(
            f"{folder}: {', '.join(i.name for i in indexes)}: more than one index; name the one to read"
        )
    if not indexes:
        if not found:
            raise ArtifactError(f"{folder}: no *.safetensors file")
        return found
    listed = _listed(indexes[0])
    files = [folder / name for name in sorted(set(listed.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ArtifactError(
            f"{indexes[0]}: {len(missing)} shards are missing, first {missing[0]}; fetch it again"
        )
    if path.is_dir() and (extra := [file.name for file in found if file not in files]):
        raise ArtifactError(
            f"{folder}: {extra[0]} is not listed in {indexes[0].name}; remove it, or name one file"
        )
    for key, place in read_shards(files)[1].items():
        if listed.pop(key, None) != place.name:
            raise ArtifactError(
                f"{indexes[0]}: says nothing or another file of {key}, which lies in {place.name}"
            )
    if listed:
        key, name = next(iter(listed.items()))
        raise ArtifactError(
            f"{indexes[0]}: {len(listed)} tensors are not in their shard, first {key} in {name}"
        )
    return files


def _listed(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_bytes(), object_pairs_hook=_no_duplicates(str(index)))["weight_map"]
        if not all(isinstance(name, str) and Path(name).name == name for name in listed.values()):
            raise ValueError("a shard name is not a plain file name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{index}: not an index of safetensors shards ({type(error).__name__}: {error})"
        ) from None
    return dict(listed)


def transformer_shapes(arguments: Mapping[str, Any], anyflow: bool = False) -> dict[str, tuple[int, ...]]:
    """Return {diffusers name: shape} of WanTransformer3DModel(**arguments): 27 tensors per block + 15, + 4 for AnyFlow.

    `arguments` is the `transformer` mapping of an architecture file. Spec wan22 1.1 and 1.6.
    """
    dim = arguments["num_attention_heads"] * arguments["attention_head_dim"]
    patch = tuple(arguments["patch_size"])
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    shapes["patch_embedding.weight"] = (dim, arguments["in_channels"], *patch)
    shapes["patch_embedding.bias"] = (dim,)
    embedder = "condition_embedder"
    for name in ("time_embedder", "delta_embedder") if anyflow else ("time_embedder",):
        linear(f"{embedder}.{name}.linear_1", arguments["freq_dim"], dim)
        linear(f"{embedder}.{name}.linear_2", dim, dim)
    linear(f"{embedder}.text_embedder.linear_1", arguments["text_dim"], dim)
    linear(f"{embedder}.text_embedder.linear_2", dim, dim)
    linear(f"{embedder}.time_proj", dim, 6 * dim)
    linear("proj_out", dim, math.prod(patch) * arguments["out_channels"])
    shapes["scale_shift_table"] = (1, 2, dim)
    for index in range(arguments["num_layers"]):
        block = f"blocks.{index}"
        shapes[f"{block}.scale_shift_table"] = (1, 6, dim)
        for attention in ("attn1", "attn2"):
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                linear(f"{block}.{attention}.{name}", dim, dim)
            for name in ("norm_q", "norm_k"):
                shapes[f"{block}.{attention}.{name}.weight"] = (dim,)
        if arguments.get("cross_attn_norm", True):
            shapes[f"{block}.norm2.weight"], shapes[f"{block}.norm2.bias"] = (dim,), (dim,)
        linear(f"{block}.ffn.net.0.proj", dim, arguments["ffn_dim"])
        linear(f"{block}.ffn.net.2", arguments["ffn_dim"], dim)
    return shapes


def problems(found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return what keeps `found` from being exactly `expected`: missing, unexpected, other shape, not a float type."""
    result = []
    if missing := sorted(expected.keys() - found.keys()):
        result.append(f"{len(missing)} tensors are missing, first {missing[0]}")
    if unexpected := sorted(found.keys() - expected.keys()):
        result.append(f"{len(unexpected)} unexpected tensors, first {unexpected[0]}")
    common = sorted(expected.keys() & found.keys())
    if other := [name for name in common if found[name].shape != tuple(expected[name])]:
        name = other[0]
        result.append(
            f"{len(other)} tensors have another shape, first {name}: found {list(found[name].shape)}, expected {list(expected[name])}"
        )
    if odd := [name for name in common if found[name].dtype not in FLOATS]:
        result.append(
            f"{len(odd)} tensors are not {', '.join(DTYPES[d][1] for d in FLOATS)}, first {odd[0]}: {DTYPES[found[odd[0]].dtype][1]}"
        )
    return result


def require(
    found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], where: str, key: str
) -> None:
    """Raise ArtifactError unless `found` is exactly `expected`; `key` names what the reader could change."""
    if wrong := problems(found, expected):
        raise ArtifactError(f"{where}: {'; '.join(wrong)}; check {key}")


def has_delta(found: Iterable[str]) -> bool:
    """True if the AnyFlow time embedding is among diffusers names (all or some of its four tensors)."""
    return not set(found).isdisjoint(DELTA)


def match_architecture(found: Mapping[str, TensorInfo]) -> tuple[str | None, str]:
    """Return (name of the `config/models` file whose tensors these are, ""), or (None, how it differs from the nearest)."""
    best, fewest = "no architecture file describes it", math.inf
    for name in architecture_names():
        architecture = load_architecture(name)
        if not str(architecture["family"]).startswith("wan22"):
            continue
        expected = transformer_shapes(architecture["transformer"], has_delta(found))
        wrong = problems(found, expected)
        if not wrong:
            return name, ""
        distance = len(expected.keys() ^ found.keys()) + sum(
            found[n].shape != expected[n] for n in expected.keys() & found.keys()
        )
        if distance < fewest:
            best, fewest = f"nearest is {name}: {'; '.join(wrong)}", distance
    return None, best


def summary(found: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return counts for a report: tensors, parameters, bytes and parameters per dtype."""
    dtypes: Counter[str] = Counter()
    for info in found.values():
        dtypes[DTYPES[info.dtype][1]] += info.elements
    return {
        "tensors": len(found),
        "parameters": sum(info.elements for info in found.values()),
        "bytes": sum(info.bytes for info in found.values()),
        "dtypes": dict(sorted(dtypes.items())),
    }
