"""Stage0.5 flow matching (spec wan22 3.1 and 3.2): shifted table, Gaussian weights, clean first latent, image-condition dropout.

Path x_sigma = (1 - sigma) x0 + sigma eps, target v = eps - x0. One timestep per clip, drawn uniformly by index. Unless a
sample is dropped, its latent 0 stays clean at timestep 0 and outside the loss.

Shapes: B batch, T latent frames, C channels, h w latent size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..runtime import keyed

if TYPE_CHECKING:
    from ..backbones.protocol import Backbone


@dataclass(frozen=True)
class Schedule:
    """The training table: float64 `sigmas`, `timesteps` = N sigma and loss `weights`, each `[N]`, from noise to clean."""

    sigmas: np.ndarray
    timesteps: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Draws:
    """Everything random about a batch: table `index` int64 `[B]`, standard normal `noise` `[B,T,C,h,w]`, `dropped` bool `[B]`."""

    index: Tensor
    noise: Tensor
    dropped: Tensor


@dataclass(frozen=True)
class Noised:
    """A batch as the backbone sees it: `latents` `[B,T,C,h,w]`, raw `timesteps` float32 `[B,T]`, `supervised` bool `[B,T]`."""

    latents: Tensor
    timesteps: Tensor
    supervised: Tensor


@dataclass(frozen=True)
class LossOutput:
    """Mean loss (scalar, with gradient) and its `per_sample` terms (detached float32 `[B]`) for logs and failure reports."""

    loss: Tensor
    per_sample: Tensor


def shifted_sigmas(shift: float, num_train_timesteps: int = 1000) -> np.ndarray:
    """Return float64 sigma_i = s u_i / (1 + (s-1) u_i) for u = 1, ..., 1/N (zero is not in the table)."""
    base = np.linspace(1.0, 0.0, num_train_timesteps + 1)[:-1]
    return shift * base / (1 + (shift - 1) * base)


def gaussian_weights(sigmas: np.ndarray) -> np.ndarray:
    """Return the loss weights of a table: y = exp(-2 ((t-N/2)/N)^2), moved to minimum 0 and scaled to mean 1."""
    bell = np.exp(-2 * (sigmas - 0.5) ** 2)
    bell = bell - bell.min()
    return bell * len(bell) / bell.sum()


def schedule(shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """Build the table of a timestep shift (5.0 for TI2V-5B, 3.0 for A14B and the tiny world)."""
    sigmas = shifted_sigmas(shift, num_train_timesteps)
    return Schedule(sigmas, sigmas * num_train_timesteps, gaussian_weights(sigmas))


def image_condition_dropped(seed: int, step: int, rank: int, micro: int, row: int, p: float) -> bool:
    """Return the released drop decision, a hash that consumes no random state (`step` counts completed optimizer steps)."""
    text = f"ti2v-image-drop-v1|{seed}|{step}|{rank}|{micro}|{row}"
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return value < int(p * 2**64)


def draw(
    latent_shape: tuple[int, int, int, int],
    *,
    seed: int,
    global_sample_indices: Sequence[int],
    global_batch_size: int,
    image_condition_dropout: float,
    num_train_timesteps: int = 1000,
    purpose: str = "train",
) -> Draws:
    """Draw a batch of `latent_shape` (T, C, h, w) clips from their positions in the sample stream alone.

    The released dropout hash takes rank and micro-batch; here the row is the position within the global batch, so neither
    the number of processes nor accumulation changes which samples drop.
    """
    index = [keyed.integer(num_train_timesteps, seed, purpose, "timestep", g) for g in global_sample_indices]
    noise = np.stack([keyed.normal(latent_shape, seed, purpose, "noise", g) for g in global_sample_indices])
    dropped = []
    for global_index in global_sample_indices:
        step, row = divmod(global_index, global_batch_size)
        dropped.append(image_condition_dropped(seed, step, 0, 0, row, image_condition_dropout))
    return Draws(torch.tensor(index), torch.from_numpy(noise), torch.tensor(dropped))


def add_noise(latents: Tensor, draws: Draws, table: Schedule) -> Noised:
    """Return clean `latents` `[B,T,C,h,w]` moved to their drawn sigma; mixing in float32, result in the dtype of `latents`."""
    index = draws.index.cpu().numpy()
    sigma = latents.new_tensor(table.sigmas[index], dtype=torch.float32).view(-1, 1, 1, 1, 1)
    noise = draws.noise.to(latents.device, latents.dtype)
    noisy = ((1 - sigma) * latents + sigma * noise).to(latents.dtype)

    frames = latents.shape[1]
    kept = ~draws.dropped.to(latents.device)
    anchored = torch.zeros(len(index), frames, dtype=torch.bool, device=latents.device)
    anchored[:, 0] = kept
    noisy = torch.where(anchored[:, :, None, None, None], latents, noisy)
    timesteps = latents.new_tensor(table.timesteps[index], dtype=torch.float32)[:, None].expand(-1, frames)
    return Noised(noisy, timesteps.masked_fill(anchored, 0.0), ~anchored)


def weighted_error(prediction: Tensor, target: Tensor, supervised: Tensor, weights: Tensor) -> Tensor:
    """Return float32 `[B]`: sum(mask w (prediction - target)^2) / sum(mask) over the elements of each sample.

    The mask comes before the square and by selection, so a non-finite value in an excluded frame cannot leak.
    """
    mask = supervised[:, :, None, None, None]
    error = torch.where(mask, prediction.float() - target.float(), 0.0)
    elements = supervised.sum(dim=1) * target[0, 0].numel()
    return weights * error.square().flatten(1).sum(dim=1) / elements.clamp_min(1)


def loss(
    backbone: Backbone,
    latents: Tensor,
    prompt_embeds: Tensor,
    w2c: Tensor | None,
    intrinsics: Tensor | None,
    draws: Draws,
    table: Schedule,
) -> LossOutput:
    """Return the flow-matching loss of clean `latents` `[B,T,C,h,w]`, normalised per sample and then averaged.

    At the release's micro-batch of one this is the released loss; per-sample normalisation keeps it the same for every
    split of a global batch into processes and micro-batches.
    """
    noised = add_noise(latents, draws, table)
    prediction = backbone.velocity(noised.latents, noised.timesteps, prompt_embeds, w2c, intrinsics)
    target = draws.noise.to(latents.device, latents.dtype) - latents
    weights = latents.new_tensor(table.weights[draws.index.cpu().numpy()], dtype=torch.float32)
    per_sample = weighted_error(prediction, target, noised.supervised, weights)
    return LossOutput(per_sample.mean(), per_sample.detach())
