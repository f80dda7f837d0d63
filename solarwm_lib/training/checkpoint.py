"""Checkpoints: one transaction holding everything a run needs to go on exactly where it was.

Members (`INVENTORY`): `model.safetensors` (live weights), `ema.safetensors` (float32 average), `optimizer.safetensors`
(three slots per parameter) and `state.json` (counters, stream position, learning rate, history); Stage2 adds the critic's
weights and optimizer (`STAGE2_INVENTORY`), and its teacher stays where it came from. A member that is missing is an error
naming it. Everything is checked in this order: marker and digests before any model exists, names
and shapes of tensors (from the headers) before any tensor is read, then the counters against each other.

Members hold whole tensors, also when parameters lie in parts over many ranks, rather than torch.distributed.checkpoint's
shards: any world size, strategy or safetensors tool reads them, nothing is unpickled, and equal states are equal bytes.
Parts then only say who wrote what (`members`, `writing`); what is kept and what goes is `retention`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from solarwm_lib import artifacts
from solarwm_lib.artifacts import THINNED, Artifact, Member, Transaction, json_bytes
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import writing
from solarwm_lib.training.members import (
    copy_into,
    files_of,
    header,
    load_into,
    load_tensors,
    members_in,
    part_names,
    size_of,
    write_safetensors,
)
from solarwm_lib.training.optim import SLOTS
from solarwm_lib.training.writing import Writers

__all__ = [
    "Candidate",
    "State",
    "Tensors",
    "copy_into",
    "files_of",
    "load_into",
    "load_tensors",
    "load_weights",
    "open_verified",
    "read_state",
    "save",
    "weight_files",
    "write_safetensors",
]

SCHEMA = "solarwm.checkpoint.v1"
MODEL, EMA, OPTIMIZER, STATE = "model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json"
CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"
INVENTORY = (MODEL, EMA, OPTIMIZER, STATE)
STAGE2_INVENTORY = (*INVENTORY[:-1], CRITIC, CRITIC_OPTIMIZER, STATE)
WEIGHTS = {"live": MODEL, "ema": EMA}
_STEP_NAME = re.compile(r"(?:checkpoint_model|step)_(\d{6,})")


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
            len(header(tensors)) + sum(map(size_of, tensors.values())) for tensors in self.members().values()
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
    """Publish one checkpoint of whole tensors at `target` (absent or empty).

    Raises ArtifactError before anything is written when less space is free than the members need, and when the disk
    fills up on the way; earlier checkpoints are never touched by a save.
    """
    held, transaction = begin(target, tensors, identity, parents, expected_bytes)
    return writing.write_main(held, transaction, tensors.members(), extra(state), Writers((0,), 0))


def begin(
    target: Path, tensors: Tensors, identity: dict[str, Any], parents: list[Path], expected_bytes: int = 0
) -> tuple[ExitStack, Transaction]:
    """Open the transaction of a save and return (what leaves it, the transaction); ArtifactError for too little space."""
    needed = max(expected_bytes, tensors.bytes()) + 2**16
    with ExitStack() as stack:
        transaction = stack.enter_context(
            Transaction(target, SCHEMA, identity, parents, expected_bytes=needed)
        )
        return stack.pop_all(), transaction


def extra(state: State) -> dict[str, bytes]:
    """The members of a save that are no tensors."""
    return {STATE: json_bytes(asdict(state))}


def open_verified(path: Path, inventory: Sequence[str] = INVENTORY, *, deep: bool = True) -> Artifact:
    """Return the checkpoint at `path` after comparing its members with their sizes, digests (without `deep` only that of
    `state.json`) and the `inventory`.

    Raises ArtifactError naming the member or the part that is missing, truncated, dropped or of other content. No tensor is read.
    """
    artifact = artifacts.verify(path, deep=True, schema=SCHEMA, only=None if deep else {STATE})
    files = [member.path for member in artifact.members]
    present = members_in(files)
    if missing := [member for member in inventory if member not in present]:
        raise ArtifactError(
            f"{artifact.path}: member {missing[0]} is missing from the checkpoint (it holds "
            f"{', '.join(sorted(present))}); full resume needs {', '.join(inventory)}"
        )
    for member in inventory:
        part_names(member, files, artifact.path)
    if dropped := members_in(member.path for member in artifact.dropped) & set(inventory):
        raise ArtifactError(
            f"{artifact.path}: was thinned ({THINNED}): its {', '.join(sorted(dropped))} is gone, so training cannot go on "
            f"from it; {_nearest_full(artifact)}"
        )
    return artifact


def _nearest_full(thinned: Artifact) -> str:
    """Say which published checkpoint beside `thinned`, of its step or before, still has everything."""
    step = step_of(thinned.path)
    for candidate in candidates(thinned.path.parent, step)[0] if step is not None else []:
        if not candidate.rolling and not (candidate.path / THINNED).exists():
            return f"the nearest full one before it is {candidate.path.name}: move later ones away to go on from that"
    return "no full one is before it; its weights still start a new run (checkpoint.mode weights_only)"


def verify_share(artifact: Artifact, rank: int, count: int, only: Collection[str] | None = None) -> None:
    """Compare the digests of this rank's share, by bytes, of the members of `artifact` (of those in `only`).

    `count` ranks compare all of them. Raises ArtifactError naming the member.
    """
    loads = [0] * count
    mine: list[Member] = []
    wanted = [m for m in artifact.members if m not in artifact.dropped and (only is None or m.path in only)]
    for member in sorted(wanted, key=lambda m: (-m.bytes, m.path)):
        lightest = loads.index(min(loads))
        loads[lightest] += member.bytes
        if lightest == rank:
            mine.append(member)
    artifacts.check_digests(artifact.path, mine)


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


def weight_files(path: Path, roles: Sequence[str], source_step: int | None = None) -> dict[str, list[Path]]:
    """Return role ("live", "ema") -> the files of its weights, verified to the last byte: every rank compares a share, once.

    All ranks call this at the same point and raise the same error. Raises ArtifactError as `load_weights`.
    """
    from solarwm_lib.training import collectives

    files: dict[str, list[Path]] = {}
    failure: ArtifactError | None = None
    try:
        files = _verified_files(path, roles, source_step, collectives.rank(), collectives.world_size())
    except ArtifactError as error:
        failure = error
    collectives.agree(failure)
    return files


def load_weights(
    path: Path, role: str, expected: Mapping[str, torch.Tensor], source_step: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the `role` ("live" or "ema") weights of a checkpoint, mapped from its files, for inference in this process.

    Only what is read is verified to the last byte: the role's members and `state.json`. Raises ArtifactError if the
    checkpoint does not verify, is not of `source_step`, lacks the role (an average that was never updated is not a result),
    or belongs to another model.
    """
    return load_tensors(_verified_files(path, [role], source_step, 0, 1)[role], expected)


def _verified_files(
    path: Path, roles: Sequence[str], source_step: int | None, rank: int, count: int
) -> dict[str, list[Path]]:
    artifact = artifacts.read(path, SCHEMA)
    state = read_state(artifact)
    for role in roles:
        check_role(path, state, role, source_step)
    files = {role: files_of(artifact, WEIGHTS[role]) for role in roles}
    names = {file.name for found in files.values() for file in found}
    verify_share(artifact, rank, count, {STATE, *names})
    return files


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
    for path, rolling in save_directories(run_dir):
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
        for path, rolling in save_directories(run_dir)
        if not rolling and (path / artifacts.MARKER).exists()
    )
    return max((step for step in steps if step is not None), default=0)


def save_directories(run_dir: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (directory, whether it is a rolling save) of everything that looks like a save; names decide, never times."""
    for parent, rolling in ((run_dir, False), (run_dir / "rolling", True)):
        for path in sorted(parent.iterdir()) if parent.is_dir() else []:
            if path.is_dir() and not path.name.startswith("."):
                yield path, rolling
