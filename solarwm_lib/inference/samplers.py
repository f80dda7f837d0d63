"""Solvers: a velocity field and a sigma grid give latents.

Tensor layout: B batch, T latent frames, C channels, h w latent height and width. Latents are `[B,T,C,h,w]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

    Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    FlowMap = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TRAIN_TIMESTEPS = 1000


def unipc_grid(
    num_inference_steps: int, shift: float, num_train_timesteps: int = TRAIN_TIMESTEPS
) -> tuple[list[int], list[float]]:
    """Return the pinned UniPC grid: integer timesteps (one per step) and sigmas (one more, the last is 0).

    `base = linspace(1 - 1/N, 0, n+1)[:-1]`, `sigma = s base / (1 + (s-1) base)`, `t = trunc(N sigma)` (spec wan22
    6.1). Pinned here because the grids libraries generate differ between their versions.
    """
    if not 1 <= num_inference_steps <= num_train_timesteps:
        raise ConfigError(
            f"num_inference_steps is {num_inference_steps}, expected 1 to {num_train_timesteps}: "
            "change it in validation.passes"
        )
    if not shift > 0:
        raise ConfigError(
            f"timestep shift is {shift}, expected a positive number: change model.timestep_shift"
        )
    # NumPy's own linspace: a value one ULP below an integer timestep truncates to the one before it.
    base = np.linspace(1 - 1 / num_train_timesteps, 0, num_inference_steps + 1)[:-1]
    sigmas = shift * base / (1 + (shift - 1) * base)
    return (num_train_timesteps * sigmas).astype(np.int64).tolist(), [*sigmas.tolist(), 0.0]


def unipc_scheduler(timesteps: Sequence[int], sigmas: Sequence[float]) -> Any:
    """Return diffusers' second-order UniPC with flow prediction, its state reset and its grid replaced by ours."""
    import torch
    from diffusers import UniPCMultistepScheduler

    if len(sigmas) != len(timesteps) + 1 or sigmas[-1] != 0:
        raise ValueError(f"{len(timesteps)} timesteps need {len(timesteps) + 1} sigmas ending in 0")
    scheduler: Any = UniPCMultistepScheduler(
        num_train_timesteps=TRAIN_TIMESTEPS,
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=1.0,
    )
    scheduler.set_timesteps(len(timesteps))
    scheduler.timesteps = torch.tensor(list(timesteps), dtype=torch.int64)
    scheduler.sigmas = torch.tensor(list(sigmas), dtype=torch.float32)
    # Truncation can map two steps to one integer; by value the scheduler would then start at the second of them.
    scheduler.set_begin_index(0)
    return scheduler


def sample_unipc(
    velocity_fn: Velocity,
    noise: torch.Tensor,
    timesteps: Sequence[int],
    sigmas: Sequence[float],
    anchor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Integrate `velocity_fn` from `noise` `[B,T,C,h,w]` to clean latents of the same shape, in float32.

    `velocity_fn(latents, timesteps[B,T]) -> velocity` sees raw timesteps per latent frame. With `anchor`
    `[B,1,C,h,w]` latent 0 is given: it replaces the noise, its timestep and its velocity are 0, and it is imposed
    again after every step (spec wan22 6.1), so the result holds it bit for bit.
    """
    import torch

    if anchor is not None and anchor.shape != noise[:, :1].shape:
        raise ValueError(f"anchor has shape {tuple(anchor.shape)}, expected {tuple(noise[:, :1].shape)}")
    scheduler = unipc_scheduler(timesteps, sigmas)
    latents = noise.float()
    if anchor is not None:
        anchor = anchor.to(latents)
        latents = torch.cat([anchor, latents[:, 1:]], dim=1)
    for timestep in scheduler.timesteps:
        frame_timesteps = torch.full(latents.shape[:2], float(timestep), device=latents.device)
        if anchor is not None:
            frame_timesteps[:, 0] = 0
        velocity = velocity_fn(latents, frame_timesteps).float()
        if anchor is not None:
            velocity = torch.cat([torch.zeros_like(anchor), velocity[:, 1:]], dim=1)
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        if anchor is not None:
            latents = torch.cat([anchor, latents[:, 1:]], dim=1)
    return latents


def sample_flowmap(
    map_fn: FlowMap,
    noise: torch.Tensor,
    pairs: Sequence[tuple[float, float]],
    anchor: torch.Tensor | None = None,
    num_train_timesteps: int = TRAIN_TIMESTEPS,
) -> torch.Tensor:
    """Follow a flow map from `noise` `[B,T,C,h,w]` along raw `pairs` (t, r): x <- x - (t - r) / N U(x, t, r) (spec wan22 6.1).

    `map_fn(latents, t[B,T], r[B,T]) -> velocity` sees one pair of raw times per latent frame. Arithmetic is in at least
    float32. `anchor` `[B,1,C,h,w]` is latent 0 as in `sample_unipc`: t = r = 0 there, and the result holds it bit for bit.
    """
    import torch

    from solarwm_lib.objectives.noise import widened, with_anchor

    latents = widened(noise)
    for t, r in pairs:
        if anchor is not None:
            latents = with_anchor(latents, anchor)
        times = torch.tensor([t, r], device=latents.device)[:, None, None].repeat(1, *latents.shape[:2])
        if anchor is not None:
            times[:, :, 0] = 0
        velocity = map_fn(latents, *times).to(latents.dtype)
        latents = latents - (t - r) / num_train_timesteps * velocity
    return latents if anchor is None else with_anchor(latents, anchor)
