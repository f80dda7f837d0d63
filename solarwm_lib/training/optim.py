"""AdamW and the learning-rate schedule of Stage0.5 (spec wan22 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from solarwm_lib.training.sharding import local

SLOTS = ("step", "exp_avg", "exp_avg_sq")


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int, minimum_ratio: float) -> float:
    """Return the multiplier of the base rate for the optimizer step that follows `step` completed ones.

    step/warmup during warm-up (the very first step runs at 0, as released), then a cosine from 1 to `minimum_ratio`
    at `total_steps`, constant afterwards.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return minimum_ratio + (1.0 - minimum_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def learning_rate(step: int, base: float, warmup_steps: int, total_steps: int, minimum_ratio: float) -> float:
    """Return the learning rate used by the optimizer step that follows `step` completed ones.

    A pure function of the counter: there is no scheduler object whose state a resume could lose.
    """
    return base * learning_rate_factor(step, warmup_steps, total_steps, minimum_ratio)


def adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Return AdamW over one group of all parameters with its slots already allocated.

    torch allocates slots at a parameter's first gradient, which would make the set of checkpoint tensors depend on
    history; allocated up front, every parameter always has exactly `SLOTS`. The fused kernel is elementwise and does
    not depend on the order of parameters.
    """
    optimizer = torch.optim.AdamW(
        list(parameters), lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(gradients: list[torch.Tensor], norm: torch.Tensor, maximum: float) -> None:
    """Scale `gradients` in place so that their global norm `norm` does not exceed `maximum`."""
    scale = torch.clamp(maximum / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local(gradient) for gradient in gradients], scale)
