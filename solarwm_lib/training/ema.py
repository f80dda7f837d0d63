"""Exponential moving average of the weights (spec operations 9.7, wan22 3.3)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training.sharding import local


@dataclass(frozen=True)
class EmaCadence:
    """When and how strongly the average moves; every question is answered from the step counter alone."""

    decay: float
    start_step: int = 0
    update_every: int = 1
    warmup_steps: int = 0

    def is_due(self, completed_steps: int) -> bool:
        """True if the average moves after optimizer step number `completed_steps` (1-based)."""
        return completed_steps >= max(1, self.start_step) and completed_steps % self.update_every == 0

    def decay_at(self, completed_steps: int) -> float:
        """Decay of the update after step `completed_steps`: 0 (a copy of the live weights) during warm-up."""
        return 0.0 if completed_steps < self.warmup_steps else self.decay

    def updates_after(self, completed_steps: int) -> int:
        """Number of updates that `completed_steps` optimizer steps must have made."""
        before_start = (max(1, self.start_step) - 1) // self.update_every
        return max(0, completed_steps // self.update_every - before_start)


@dataclass
class Ema:
    """float32 shadow of named parameters, in parts where they are, and the number of updates it has seen."""

    cadence: EmaCadence
    shadow: dict[str, torch.Tensor]
    updates: int = 0
    _names: list[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._names = list(self.shadow)

    @classmethod
    def of(cls, parameters: dict[str, torch.nn.Parameter], cadence: EmaCadence) -> Ema:
        """Return an average that starts as a float32 copy of `parameters`."""
        shadow = {name: p.detach().to(torch.float32, copy=True) for name, p in parameters.items()}
        return cls(cadence, shadow)

    @torch.no_grad()
    def update(self, parameters: dict[str, torch.nn.Parameter], completed_steps: int) -> bool:
        """Move the shadow towards `parameters` if step `completed_steps` is due; return whether it moved.

        shadow <- d * shadow + (1 - d) * live, written as shadow + (1 - d) * (live - shadow), which loses no bits of
        small differences when d is close to 1. Raises ArtifactError when names differ from the shadow's.
        """
        if not self.cadence.is_due(completed_steps):
            return False
        if list(parameters) != self._names:
            changed = sorted(set(parameters) ^ set(self._names)) or ["(order)"]
            raise ArtifactError(f"EMA holds other parameters than the model: {', '.join(changed[:5])}")
        shadow = [local(tensor) for tensor in self.shadow.values()]
        live = [local(p.detach()).to(torch.float32) for p in parameters.values()]
        torch._foreach_lerp_(shadow, live, 1.0 - self.cadence.decay_at(completed_steps))
        self.updates += 1
        return True
