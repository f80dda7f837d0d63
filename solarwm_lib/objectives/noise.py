"""The forward process of the Wan objectives (spec wan22 3.1): shifted table, mixing, clean recovery, keyed noise, anchor.

x_sigma = (1 - sigma) x0 + sigma eps with sigma = t / N; velocity = eps - x0. A timestep that is not in the table takes the
nearest entry's sigma and weight, except where an objective says that its time is continuous.

Shapes: B batch, T latent frames, C channels, h w latent size. A sigma or a timestep is `[B]` (one per clip) or `[B,T]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..runtime import keyed

Numbers = TypeVar("Numbers", float, np.ndarray)


@dataclass(frozen=True)
class Schedule:
    """The training table: float64 `sigmas`, `timesteps` = N sigma and loss `weights`, each `[N]`, from noise to clean."""

    sigmas: np.ndarray
    timesteps: np.ndarray
    weights: np.ndarray

    @property
    def num_train_timesteps(self) -> int:
        """N; raw timesteps lie in [0, N]."""
        return len(self.timesteps)

    def nearest(self, timesteps: Tensor) -> Tensor:
        """Return the int64 index of the table entry nearest to each raw timestep, in the shape of `timesteps`."""
        grid = torch.from_numpy(self.timesteps).to(timesteps.device)
        return (timesteps.double()[..., None] - grid).abs().argmin(dim=-1)

    def sigma_of(self, timesteps: Tensor) -> Tensor:
        """Return the float64 sigma of the nearest entry."""
        return torch.from_numpy(self.sigmas).to(timesteps.device)[self.nearest(timesteps)]

    def weight_of(self, timesteps: Tensor) -> Tensor:
        """Return the float32 loss weight of the nearest entry."""
        return torch.from_numpy(self.weights).to(timesteps.device)[self.nearest(timesteps)].float()


def shift_time(u: Numbers, shift: float) -> Numbers:
    """Return sigma = s u / (1 + (s-1) u), which maps [0, 1] onto itself and moves time towards noise for s > 1."""
    return shift * u / (1 + (shift - 1) * u)


def shifted_sigmas(shift: float, num_train_timesteps: int = 1000) -> np.ndarray:
    """Return float64 sigma_i = s u_i / (1 + (s-1) u_i) for u = 1, ..., 1/N (zero is not in the table)."""
    return shift_time(np.linspace(1.0, 0.0, num_train_timesteps + 1)[:-1], shift)


def gaussian_weights(sigmas: np.ndarray) -> np.ndarray:
    """Return the loss weights of a table: y = exp(-2 ((t-N/2)/N)^2), moved to minimum 0 and scaled to mean 1."""
    bell = np.exp(-2 * (sigmas - 0.5) ** 2)
    bell = bell - bell.min()
    return bell * len(bell) / bell.sum()


def schedule(shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """Build the table of a timestep shift (5.0 for TI2V-5B, 3.0 for A14B and the tiny world)."""
    sigmas = shifted_sigmas(shift, num_train_timesteps)
    return Schedule(sigmas, sigmas * num_train_timesteps, gaussian_weights(sigmas))


def clip_noise(shape: tuple[int, ...], global_sample_indices: Sequence[int], *parts: keyed.Part) -> Tensor:
    """Return standard normal float32 `[B, *shape]`: row i is keyed by `parts` and sample i's place in the stream."""
    return torch.from_numpy(np.stack([keyed.normal(shape, *parts, g) for g in global_sample_indices]))


def widened(values: Tensor) -> Tensor:
    """Return `values` in at least float32 (float64 stays): sums and differences of losses are never bfloat16."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def per_clip(values: Tensor) -> Tensor:
    """Return `[B]` or `[B,T]` shaped to broadcast against latents `[B,T,C,h,w]`."""
    return values.view(*values.shape, *[1] * (5 - values.ndim))


def mix(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return (1 - sigma) clean + sigma noise; arithmetic in at least float32, result in the dtype of `clean`."""
    working = torch.promote_types(clean.dtype, torch.float32)
    share = per_clip(sigma.to(clean.device, working))
    noise = noise.to(clean.device, clean.dtype)
    return ((1 - share) * clean + share * noise).to(clean.dtype)


def clean_from_velocity(noisy: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Return x0 = noisy - sigma velocity, computed in float64 and given in the dtype of `noisy`."""
    share = per_clip(sigma.to(noisy.device, torch.float64))
    return (noisy.double() - share * velocity.double()).to(noisy.dtype)


def with_anchor(latents: Tensor, anchor: Tensor) -> Tensor:
    """Return `latents` `[B,T,C,h,w]` with latent 0 replaced by the clean first image `anchor` `[B,1,C,h,w]`."""
    return torch.cat([anchor.to(latents.device, latents.dtype), latents[:, 1:]], dim=1)


def anchored_timesteps(timesteps: Tensor, frames: int) -> Tensor:
    """Return float32 `[B,T]`: every frame at its clip's raw timestep `[B]`, latent 0 (the clean anchor) at 0."""
    spread = timesteps.float()[:, None].repeat(1, frames)
    spread[:, 0] = 0
    return spread


def mean_square(error: Tensor, supervised: Tensor) -> Tensor:
    """Return the mean of error^2 over the supervised frames of each clip, `[B]`.

    `error` `[B,T,C,h,w]` in float32 or float64, `supervised` bool `[B,T]`. Frames are excluded by selection before the
    square, so a non-finite value in one of them reaches neither the loss nor a gradient.
    """
    kept = torch.where(per_clip(supervised), error, 0.0)
    elements = supervised.sum(dim=1) * error[0, 0].numel()
    return kept.square().flatten(1).sum(dim=1) / elements.clamp_min(1)


def after_anchor(latents: Tensor) -> Tensor:
    """Return the bool mask `[B,T]` of all frames but latent 0, which is given and never supervised."""
    mask = torch.ones(latents.shape[:2], dtype=torch.bool, device=latents.device)
    mask[:, 0] = False
    return mask
