"""Tensor members of a checkpoint as files: the safetensors layout, members in parts, and reading only what a rank holds.

A member `model.safetensors` is one file, or parts `model-00001-of-00004.safetensors` with whole tensors in each, written by
several processes. Readers ask `files_of` and never see the difference.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO

import torch

from solarwm_lib.artifacts import Artifact
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training.sharding import held, local

_PART = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.safetensors)")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# names


def part_name(member: str, index: int, count: int) -> str:
    """File of part `index` (from 0) of `count`; a member of one part has its own name."""
    stem, _, suffix = member.rpartition(".")
    return member if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}"


def members_in(files: Iterable[str]) -> set[str]:
    """Names of the members that `files` are or are parts of."""
    return {match["stem"] + match["suffix"] if (match := _PART.fullmatch(f)) else f for f in files}


def part_names(member: str, files: Collection[str], where: object) -> list[str]:
    """Return the files of `member` among `files`, in order; [] if there is none.

    ArtifactError names a part that is missing, and a member that is there both whole and in parts.
    """
    parts = [f for f in files if _PART.fullmatch(f) and members_in([f]) == {member}]
    if not parts:
        return [member] if member in files else []
    counts = {int(_PART.fullmatch(f)["count"]) for f in parts}  # type: ignore[index]
    wanted = [part_name(member, index, max(counts)) for index in range(max(counts))]
    if missing := [name for name in wanted if name not in parts]:
        raise ArtifactError(f"{where}: part {missing[0]} of member {member} is missing; restore a copy")
    if unexpected := sorted({*parts} - {*wanted} | ({member} & {*files})):
        raise ArtifactError(f"{where}: {unexpected[0]} does not belong beside {wanted[0]}; restore a copy")
    return wanted


def files_of(artifact: Artifact, member: str) -> list[Path]:
    """Return the file or files of a member of a checkpoint.

    ArtifactError if the checkpoint has no such member, lacks a part of it, or was thinned of it.
    """
    names = part_names(member, [m.path for m in artifact.members], artifact.path)
    return [artifact.file(name) for name in names or [member]]


# writing


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write whole `tensors` in the safetensors format, one at a time: the peak is one tensor, not a copy of the model.

    Tensors are ordered by element size (largest first, so all are aligned) and name; equal tensors give equal bytes. They
    must not change before the stream is closed.
    """
    write = getattr(stream, "write_stable", stream.write)
    write(header(tensors))
    for name in order(tensors):
        write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names in the order of their place in the file."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Length and header of the file of `tensors`, whose shapes are those of the whole tensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order(tensors):
        tensor = tensors[name]
        end = offset + size_of(tensor)
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of the whole tensor, also where this process holds a part of it."""
    return tensor.numel() * tensor.element_size()


# reading


class Stored:
    """The tensors of one member, mapped from its files: nothing is read before it is asked for."""

    def __init__(self, files: Path | Sequence[Path]) -> None:
        """ArtifactError for a file that is no safetensors file, and for a tensor that two parts hold."""
        from safetensors import SafetensorError, safe_open

        self.files = [files] if isinstance(files, Path) else list(files)
        self._places: dict[str, tuple[Path, Any]] = {}
        for file in self.files:
            try:
                opened = safe_open(str(file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ArtifactError(f"{file}: cannot be read as safetensors ({error})") from None
            for name in opened.keys():  # noqa: SIM118
                if name in self._places:
                    raise ArtifactError(
                        f"{file}: tensor {name} stands in {self._places[name][0].name} too; the parts are not of one save"
                    )
                self._places[name] = (file, opened)

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._places)

    @property
    def where(self) -> str:
        """The file, or the first of the parts, for messages."""
        more = len(self.files) - 1
        return f"{self.files[0]}{f' and {more} more parts' if more else ''}"

    def require(
        self,
        expected: Mapping[str, torch.Tensor],
        *,
        ignored: Set[str] = frozenset(),
        any_dtype: bool = False,
    ) -> None:
        """Raise ArtifactError unless names, shapes and dtypes are exactly those of `expected`; only headers are read.

        Tensors that are `ignored` may be there, too; with `any_dtype` the precision is not looked at.
        """
        found = self._places.keys() - (ignored - expected.keys())
        if missing := sorted(expected.keys() - found):
            raise ArtifactError(
                f"{self.where}: {len(missing)} tensors of the model are missing, first {missing[0]}"
            )
        if unknown := sorted(found - expected.keys()):
            raise ArtifactError(
                f"{self.where}: {len(unknown)} tensors do not belong to the model, first {unknown[0]}"
            )
        for name, tensor in expected.items():
            file, opened = self._places[name]
            part = opened.get_slice(name)
            same_dtype = any_dtype or part.get_dtype() == _DTYPES[tensor.dtype]
            if list(part.get_shape()) != list(tensor.shape) or not same_dtype:
                raise ArtifactError(
                    f"{file}: tensor {name} is {part.get_dtype()} {list(part.get_shape())}, the model has "
                    f"{_DTYPES[tensor.dtype]} {list(tensor.shape)}; check model.architecture"
                )

    def whole(self, name: str) -> torch.Tensor:
        """The tensor, mapped from the file."""
        return self._places[name][1].get_tensor(name)  # type: ignore[no-any-return]

    def part_of(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """The rows of the tensor that this process holds of `target`, mapped from the file."""
        if target.dim() == 0 or local(target) is target:
            return self.whole(name)
        return self._places[name][1].get_slice(name)[held(target)]  # type: ignore[no-any-return]


@torch.no_grad()
def load_into(
    files: Path | Sequence[Path],
    targets: Mapping[str, torch.Tensor],
    *,
    ignored: Set[str] = frozenset(),
    any_dtype: bool = False,
) -> None:
    """Copy a member into `targets`, whose names, shapes and dtypes must be its own as `Stored.require` has it.

    Each process reads only the rows that it holds, one tensor at a time: whole tensors never exist where they are in parts.
    """
    stored = Stored(files)
    stored.require(targets, ignored=ignored, any_dtype=any_dtype)
    for name, target in targets.items():
        local(target.detach()).copy_(stored.part_of(name, target))


def first_difference(files: Path | Sequence[Path], tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor whose part here differs in any bit from the member; None if all are equal."""
    stored = Stored(files)
    stored.require(tensors)
    for name, tensor in tensors.items():
        mine = local(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        theirs = stored.part_of(name, tensor).contiguous().reshape(-1).view(torch.uint8)
        if not torch.equal(mine, theirs):
            return name
    return None


def load_tensors(
    files: Path | Sequence[Path], expected: Mapping[str, torch.Tensor], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a member whose names, shapes and dtypes must be exactly those of `expected`.

    On the CPU they are mapped from the file, so only what is looked at is read.
    """
    stored = Stored(files)
    stored.require(expected)
    return {name: stored.whole(name).to(device) for name in expected}


@torch.no_grad()
def copy_into(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy whole `values` into the tensors of `targets` of the same names, of which this process may hold a part."""
    for name, target in targets.items():
        value = values[name]
        mine = local(target.detach())
        mine.copy_(value if value.shape == mine.shape else value[held(target)])
