"""A learner of any size and a saver of it, without a network, data or a configuration file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from solarwm_lib.training import optim
from solarwm_lib.training.ema import Ema, EmaCadence
from solarwm_lib.training.learner import Learner
from solarwm_lib.training.saver import Saver
from solarwm_lib.training.setup import Run
from solarwm_lib.training.topology import BatchPlan, Topology

SHAPES = {"block.weight": (7, 300), "block.bias": (7,), "head": (1, 5), "wide": (40, 64)}


def learner_of(parameters: dict[str, torch.nn.Parameter]) -> Learner:
    """A learner at step 0; parameters may lie in parts."""
    optimizer = optim.adamw(
        parameters.values(), learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    return Learner(parameters, optimizer, Ema.of(parameters, EmaCadence(0.9)), lambda step: 1e-3, 1.0)


def learner(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Learner:
    """A learner of whole parameters of these shapes."""
    return learner_of({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})


def values_at(member: str, name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """What a tensor of the state holds after `step` steps: a function of its names alone."""
    seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(f"{member}/{name}/{step}"))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def set_step(state: Learner, step: int) -> None:
    """Put `state`, whole or in parts, after `step` steps."""
    from solarwm_lib.training.members import copy_into

    for member, tensors in state.tensors().members().items():
        copy_into(tensors, {name: values_at(member, name, t.shape, step) for name, t in tensors.items()})
    state.resume(step, step)


def saver(folder: Path, state: Learner, topology: Topology | None = None, **settings: Any) -> Saver:
    """The saver of a run that is nothing but its directory; `settings` are those of the section `checkpoint`."""
    defaults = {"keep_rolling": 1, "asynchronous": True, "keep_full": 0, "keep_full_steps": []}
    resolved: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(**{**defaults, **settings})),
        route=SimpleNamespace(key="test"),
        semantic_digest="",
        values={},
    )
    topology = topology or Topology()
    inputs: Any = SimpleNamespace(parents=[])
    batches = BatchPlan(topology.world_size, 1, 1, topology.world_size)
    return Saver(Run(resolved, folder, topology, batches, inputs, {}), state, None, [])
