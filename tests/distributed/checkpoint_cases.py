"""Saves and loads of parameters in parts, by processes forked from this one: `checkpoint_cases.py FOLDER`.

Worlds of 4 (two copies in two parts each), 2 and 1 processes save and load the same state. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))

import saver_world
from saver_world import set_step, values_at

from solarwm_lib.runtime.errors import SolarError
from solarwm_lib.training import checkpoint, members, writing
from solarwm_lib.training.learner import Learner
from solarwm_lib.training.topology import Topology

STEP = 5


class Network(torch.nn.Module):
    """Parameters that do not divide evenly: dimension 0 is odd, or smaller than the number of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(9, 7)
        self.second = torch.nn.Linear(7, 1)
        self.wide = torch.nn.Linear(64, 513, bias=False)


def learner(mesh_shape: tuple[int, ...]) -> Learner:
    network = Network()
    if mesh_shape != (1,):
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for layer in (network.first, network):
            fully_shard(layer, mesh=mesh)
    return saver_world.learner_of(dict(network.named_parameters()))


def differences(state: Learner, step: int) -> list[str]:
    """Tensors of `state`, put together, that are not those of `step`."""
    found = []
    for member, tensors in state.tensors().members().items():
        for name, tensor in tensors.items():
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, writing.DTensor) else whole
            if not torch.equal(whole, values_at(member, name, whole.shape, step)):
                found.append(f"{member}/{name}")
    return found


def save(folder: Path, rank: int, mesh: tuple[int, ...], topology: Topology) -> list[str]:
    """Save in the background and at once; return what differs from the state when it is compared with the file."""
    state = learner(mesh)
    set_step(state, STEP)
    saver = saver_world.saver(folder, state, topology)
    saver.rolling()
    set_step(state, 1)  # the next step's update
    set_step(state, STEP)
    saver.finish()
    saver.saved_step = -1
    artifact = saver.publish(folder / checkpoint.directory_name(STEP))
    saver.require_equal(artifact)
    set_step(state, 1)
    try:
        saver.require_equal(artifact)
    except SolarError as error:
        return [str(error)]
    return []


def load(folder: Path, rank: int, mesh: tuple[int, ...], topology: Topology) -> list[str]:
    """Load a save of another world; return the tensors that are not what was saved."""
    state = learner(mesh)
    set_step(state, 1)
    artifact = checkpoint.open_verified(folder / checkpoint.directory_name(STEP))
    checkpoint.verify_share(artifact, rank, topology.world_size)
    for member, targets in state.tensors().members().items():
        checkpoint.load_into(checkpoint.files_of(artifact, member), targets)
    return differences(state, STEP)


def fail(folder: Path, rank: int, mesh: tuple[int, ...], topology: Topology) -> list[str]:
    """Rank 1 cannot write its part, at once and in the background; return the errors of this rank."""
    state, errors = learner(mesh), []
    set_step(state, STEP)
    saver = saver_world.saver(folder, state, topology)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    for operation in (lambda: saver.rolling(at_once=True), saver.rolling, saver.finish):
        try:
            operation()
        except SolarError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def _child(rank: int, world: int, port_file: str, folder: str, mesh: tuple[int, ...], name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=world)
    topology = Topology(rank, world, rank, world)
    try:
        found = globals()[name](Path(folder), rank, mesh, topology)
    except Exception:
        found = [traceback.format_exc()]
    Path(f"{port_file}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(case: Callable[..., list[str]], folder: Path, mesh: tuple[int, ...], work: Path) -> list[Any]:
    """Return what `case` returned on every rank of a world of this mesh."""
    world = torch.Size(mesh).numel()
    port_file = work / f"{case.__name__}-{folder.name}-{world}"
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (world, str(port_file), str(folder), mesh, case.__name__)
    mp.start_processes(_child, arguments, nprocs=world, start_method="fork")
    return [json.loads(Path(f"{port_file}.{rank}.json").read_text()) for rank in range(world)]


def main(work: Path) -> dict[str, Any]:
    writing.EXCHANGE_BYTES = 20_000  # several exchanges, not one
    worlds = {"hybrid": (2, 2), "two": (2,), "one": (1,)}
    report: dict[str, Any] = {"save": {}, "load": {}}
    for name, mesh in worlds.items():
        report["save"][name] = run(save, work / name, mesh, work)
    for source, target in (
        ("hybrid", "two"),
        ("hybrid", "one"),
        ("two", "hybrid"),
        ("one", "two"),
        ("two", "one"),
    ):
        report["load"][f"{source} to {target}"] = run(load, work / source, worlds[target], work)
    report["fail"] = run(fail, work / "failing", worlds["two"], work)
    report["fail_left"] = sorted(os.listdir(work / "failing" / "rolling"))
    report["other_content"] = []
    for name in worlds:
        artifact = checkpoint.open_verified(work / name / checkpoint.directory_name(STEP))
        report[f"{name}_weights"] = {m.path: m.sha256 for m in artifact.members if m.path != checkpoint.STATE}
        for member in checkpoint.INVENTORY[:-1]:
            stored = members.Stored(checkpoint.files_of(artifact, member))
            reference = members.Stored(work / "one" / checkpoint.directory_name(STEP) / member)
            if sorted(stored.names) != sorted(reference.names) or not all(
                torch.equal(stored.whole(n), reference.whole(n)) for n in stored.names
            ):
                report["other_content"].append(f"{name}/{member}")
    return report


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1])), indent=2))
