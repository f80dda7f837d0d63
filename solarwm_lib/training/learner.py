"""What an update computes (a loss) and what it changes (a learner)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from solarwm_lib.training import checkpoint, optim
from solarwm_lib.training.batches import Batch
from solarwm_lib.training.checkpoint import Tensors
from solarwm_lib.training.ema import Ema


@dataclass(frozen=True)
class Relative:
    """A part of a loss in units of a mean that is known only when all ranks have computed their micro-batches (AnyFlow).

    `loss`: scalar with gradient; `per_sample`: its detached terms `[B]`, 0 for samples without a part in it. `total` and
    `count`: what this micro-batch adds to the mean, which is the sum of totals by the sum of counts over ranks and
    micro-batches of the update.
    """

    loss: torch.Tensor
    per_sample: torch.Tensor
    total: float
    count: int


@dataclass(frozen=True)
class Loss:
    """Loss of one micro-batch: scalar with gradient, detached per-sample terms `[B]`, raw timesteps of each sample.

    `relative` comes on top. `zeroed` counts non-finite elements of a gradient that the objective set to 0.
    """

    loss: torch.Tensor
    per_sample: torch.Tensor
    timesteps: Sequence[Any]
    relative: Relative | None = None
    zeroed: int = 0

    def terms(self) -> torch.Tensor:
        """The per-sample terms with the relative part as if the mean were 1: where one is not finite, so is the loss."""
        return self.per_sample if self.relative is None else self.per_sample + self.relative.per_sample


Objective = Callable[[Batch], Loss]
# Called with a micro-batch and what was drawn for it, before the pass: raises if sequence-parallel peers hold others.
Witness = Callable[[Batch, Any], None]


def unwitnessed(batch: Batch, draws: Any) -> None:
    """The witness of a process that shares its samples with nobody."""


@dataclass
class Learner:
    """Everything an update changes: the parameters, the optimizer's slots, the average (None: there is none), the counters.

    `replaced` counts the clips that others stood in for so far, by reason and over all ranks.
    """

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    learning_rate: Callable[[int], float]
    gradient_clip: float
    completed_steps: int = 0
    replaced: dict[str, int] = field(default_factory=dict)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by parameter name; a parameter the loss does not reach has a zero gradient, on every rank alike."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def apply(self, gradients: list[torch.Tensor], norm: torch.Tensor) -> float:
        """Take one optimizer step with `gradients` of global norm `norm`; return the learning rate it used."""
        optim.clip_gradients(gradients, norm, self.gradient_clip)
        rate = self.learning_rate(self.completed_steps)
        optim.set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.completed_steps += 1
        if self.ema is not None:
            self.ema.update(self.parameters, self.completed_steps)
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    # What a save holds, and what `completed_steps` completed steps imply.

    def tensors(self) -> Tensors:
        """The tensor members of the current state."""
        average = {} if self.ema is None else self.ema.shadow
        return Tensors(
            self.parameters, average, checkpoint.optimizer_tensors(self.optimizer, self.parameters)
        )

    def ema_updates(self) -> int:
        """How often the average was updated."""
        return 0 if self.ema is None else self.ema.updates

    def ema_updates_after(self, step: int) -> int:
        """How often the average must have been updated after `step` steps."""
        return 0 if self.ema is None else self.ema.cadence.updates_after(step)

    def batches_after(self, step: int) -> int:
        """How many global batches `step` steps take."""
        return step

    def counters(self) -> dict[str, int]:
        """What else a save records."""
        return {}

    def counters_after(self, step: int) -> dict[str, int]:
        """What `counters` must be after `step` steps."""
        return {}

    def resume(self, step: int, ema_updates: int) -> None:
        """Set the counters to those of a save of `step` whose tensors are in place."""
        self.completed_steps = step
        if self.ema is not None:
            self.ema.updates = ema_updates
