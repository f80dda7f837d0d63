"""Checkpoints: one transaction holding everything a run needs to go on exactly where it was.

Members (`INVENTORY`): `model.safetensors` (live weights), `ema.safetensors` (float32 average), `optimizer.safetensors`
(three slots per parameter) and `state.json` (counters, stream position, learning rate, history); Stage2 adds the critic's
weights and optimizer (`STAGE2_INVENTORY`), and its teacher stays where it came from. A member that is missing is an error
naming it. Everything is checked in this order: marker and digests before any model exists, names
and shapes of tensors (from the headers) before any tensor is read, then the counters against each other.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact, Transaction, json_bytes
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training.optim import SLOTS

SCHEMA = "solarwm.checkpoint.v1"
MODEL, EMA, OPTIMIZER, STATE = "model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json"
CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"
INVENTORY = (MODEL, EMA, OPTIMIZER, STATE)
STAGE2_INVENTORY = (*INVENTORY[:-1], CRITIC, CRITIC_OPTIMIZER, STATE)
WEIGHTS = {"live": MODEL, "ema": EMA}
_REMOVED = ".removed"
_STEP_NAME = re.compile(r"(?:checkpoint_model|step)_(\d{6,})")
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


@dataclass(frozen=True)
class State:
    """`state.json`: everything of a run's state that is not a tensor.

    `stream_position` is the global sample index of the first sample not yet trained on; `learning_rate` is the rate of
    the next step (of the student in Stage2). `history` has one entry per uninterrupted stretch: the steps it covered and the topology, thread
    count and versions under which bit-for-bit equality of the result can be claimed. `run` describes the run (route,
    semantic configuration) for whoever loads these weights.
    """

    completed_steps: int
    ema_updates: int
    stream_position: int
    learning_rate: float
    global_batch_size: int
    history: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensors:
    """The tensor members as name -> tensor mappings, ready to be written; those of the critic are Stage2's."""

    model: Mapping[str, torch.Tensor]
    ema: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    critic: Mapping[str, torch.Tensor] | None = None
    critic_optimizer: Mapping[str, torch.Tensor] | None = None

    def members(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Member name -> its tensors."""
        members = {
            MODEL: self.model,
            EMA: self.ema,
            OPTIMIZER: self.optimizer,
            CRITIC: self.critic,
            CRITIC_OPTIMIZER: self.critic_optimizer,
        }
        return {name: tensors for name, tensors in members.items() if tensors is not None}

    def bytes(self) -> int:
        """Payload bytes a save needs, headers included."""
        return sum(
            len(_header(tensors)) + sum(t.numel() * t.element_size() for t in tensors.values())
            for tensors in self.members().values()
        )


def directory_name(step: int) -> str:
    """Name of the published checkpoint of `step`."""
    return f"checkpoint_model_{step:06d}"


def step_of(path: Path) -> int | None:
    """Step in a checkpoint or rolling save's directory name, None if it has neither form."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def save(
    target: Path,
    tensors: Tensors,
    state: State,
    identity: dict[str, Any],
    parents: list[Path],
    expected_bytes: int = 0,
) -> Artifact:
    """Publish one checkpoint at `target` (absent or empty).

    Raises ArtifactError before anything is written when less space is free than the members need, and when the disk
    fills up on the way; earlier checkpoints are never touched by a save.
    """
    needed = max(expected_bytes, tensors.bytes()) + 2**16
    with Transaction(target, SCHEMA, identity, parents, expected_bytes=needed) as transaction:
        for member, values in tensors.members().items():
            with transaction.open(member) as stream:
                write_safetensors(stream, values)
        transaction.write_bytes(STATE, json_bytes(asdict(state)))
    return transaction.artifact


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` in the safetensors format, one at a time: the peak is one tensor, not a copy of the model.

    Tensors are ordered by element size (largest first, so all are aligned) and name; equal tensors give equal bytes.
    """
    stream.write(_header(tensors))
    for name in _order(tensors):
        stream.write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in _order(tensors):
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def open_verified(path: Path, inventory: Sequence[str] = INVENTORY, *, deep: bool = True) -> Artifact:
    """Return the checkpoint at `path` after comparing every member with its digest and the `inventory`.

    Raises ArtifactError naming the member that is missing, truncated or of other content. No tensor is read.
    """
    artifact = artifacts.verify(path, deep=deep, schema=SCHEMA)
    present = {member.path for member in artifact.members}
    if missing := [member for member in inventory if member not in present]:
        raise ArtifactError(
            f"{artifact.path}: member {missing[0]} is missing from the checkpoint (it holds "
            f"{', '.join(sorted(present))}); full resume needs {', '.join(inventory)}"
        )
    return artifact


def read_state(artifact: Artifact) -> State:
    """Parse `state.json`; ArtifactError names a missing or unknown field."""
    path = artifact.file(STATE)
    values = json.loads(path.read_bytes())
    names = {f.name for f in fields(State)}
    if not isinstance(values, dict) or set(values) != names:
        found = set(values) if isinstance(values, dict) else set()
        raise ArtifactError(
            f"{path}: state fields missing {sorted(names - found) or 'none'}, unknown {sorted(found - names) or 'none'}"
        )
    return State(**values)


def load_tensors(
    path: Path, expected: Mapping[str, torch.Tensor], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Read one tensor member whose names and shapes must be exactly those of `expected`.

    Names, shapes and dtypes come from the header, so a file of another model is refused before its tensors are read.
    """
    from safetensors import safe_open

    with safe_open(str(path), framework="pt", device=str(device)) as file:
        _compare_names(path, set(file.keys()), set(expected))
        for name, tensor in expected.items():
            part = file.get_slice(name)
            if list(part.get_shape()) != list(tensor.shape) or part.get_dtype() != _DTYPES[tensor.dtype]:
                raise ArtifactError(
                    f"{path}: tensor {name} is {part.get_dtype()} {list(part.get_shape())}, the model has "
                    f"{_DTYPES[tensor.dtype]} {list(tensor.shape)}; check model.architecture"
                )
        return {name: file.get_tensor(name) for name in expected}


def _compare_names(path: Path, found: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - found):
        raise ArtifactError(f"{path}: {len(missing)} tensors of the model are missing, first {missing[0]}")
    if unknown := sorted(found - expected):
        raise ArtifactError(f"{path}: {len(unknown)} tensors do not belong to the model, first {unknown[0]}")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's slots as `PARAMETER.SLOT` -> tensor, every parameter with exactly `SLOTS`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        slots = optimizer.state[parameter]
        if set(slots) != set(SLOTS):
            raise ArtifactError(
                f"optimizer slots of {name} are {sorted(slots)}, expected {sorted(SLOTS)}: state cannot be saved"
            )
        tensors.update({f"{name}.{slot}": slots[slot] for slot in SLOTS})
    return tensors


@torch.no_grad()
def copy_into(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy `values` into the tensors of `targets` of the same names."""
    for name, target in targets.items():
        target.copy_(values[name])


def load_weights(
    path: Path, role: str, expected: Mapping[str, torch.Tensor], source_step: int | None = None
) -> dict[str, torch.Tensor]:
    """Read the `role` ("live" or "ema") weights of a checkpoint, for initialisation or inference.

    Raises ArtifactError if the checkpoint does not verify, is not of `source_step`, lacks the role (an average that
    was never updated is not a result), or belongs to another model.
    """
    artifact = artifacts.verify(path, deep=True, schema=SCHEMA)
    check_role(path, read_state(artifact), role, source_step)
    return load_tensors(artifact.file(WEIGHTS[role]), expected)


def check_role(
    path: Path, state: State, role: str, source_step: int | None, section: str = "checkpoint"
) -> None:
    """Raise ArtifactError if the checkpoint of `state` is not of `source_step` or has no `role` weights.

    `section` names the configuration section whose source_step it is.
    """
    if source_step is not None and state.completed_steps != source_step:
        raise ArtifactError(
            f"{path}: holds step {state.completed_steps}, but {section}.source_step is {source_step}"
        )
    if role == "ema" and state.ema_updates == 0:
        raise ArtifactError(
            f"{path}: the EMA was never updated up to step {state.completed_steps} (train.ema.start_step); "
            f"use weights live or a later step"
        )


@dataclass(frozen=True)
class Candidate:
    """A checkpoint or rolling save a run may continue from."""

    step: int
    path: Path
    rolling: bool


def candidates(run_dir: Path, until_step: int) -> tuple[list[Candidate], list[Path]]:
    """Return (complete saves with step <= `until_step`, newest first; directories without a marker, which are ignored).

    At equal steps the published checkpoint comes before the rolling save. Completeness here is the marker's presence;
    whoever uses a candidate verifies it.
    """
    complete: list[Candidate] = []
    unfinished: list[Path] = []
    for path, rolling in _save_directories(run_dir):
        step = step_of(path)
        if step is None or step > until_step:
            continue
        if (path / artifacts.MARKER).exists():
            complete.append(Candidate(step, path, rolling))
        elif any(path.iterdir()):
            unfinished.append(path)
    return sorted(complete, key=lambda c: (-c.step, c.rolling)), unfinished


def newest_published(run_dir: Path) -> int:
    """Return the step of the newest published checkpoint, 0 if there is none."""
    steps = (
        step_of(path)
        for path, rolling in _save_directories(run_dir)
        if not rolling and (path / artifacts.MARKER).exists()
    )
    return max((step for step in steps if step is not None), default=0)


def _save_directories(run_dir: Path) -> Iterator[tuple[Path, bool]]:
    for parent, rolling in ((run_dir, False), (run_dir / "rolling", True)):
        for path in sorted(parent.iterdir()) if parent.is_dir() else []:
            if path.is_dir() and not path.name.startswith("."):
                yield path, rolling


def remove_rolling(run_dir: Path, newest_verified: int, keep: int) -> list[Path]:
    """Remove rolling saves of steps up to `newest_verified`, keeping the newest `keep` of them; return the removed.

    A save is first renamed to a hidden name, so a crash on the way never leaves a half-removed directory in the place
    of a save; leftovers of such a crash are swept here.
    """
    rolling = run_dir / "rolling"
    saves = [c for c in candidates(run_dir, newest_verified)[0] if c.rolling]
    removed = [candidate.path for candidate in saves[keep:]]
    for path in removed:
        path.rename(rolling / f".{path.name}{_REMOVED}")
    for leftover in rolling.glob(f".*{_REMOVED}") if rolling.is_dir() else []:
        shutil.rmtree(leftover)
    return removed
