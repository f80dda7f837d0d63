"""Stage0.5 flow matching (spec wan22 3.1 and 3.2): shifted table, Gaussian weights, first image and its dropout.

Path x_sigma = (1 - sigma) x0 + sigma eps, target v = eps - x0. One timestep per clip, drawn uniformly by index. The first
image of TI2V is latent 0, clean at timestep 0 and outside the loss unless the sample is dropped. I2V has it beside the
latents, in the image condition y, which is zero where a sample is dropped; all its frames are noised and supervised.

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
from . import noise as process
from .noise import Schedule, schedule

if TYPE_CHECKING:
    from ..backbones.protocol import Backbone

__all__ = [
    "Draws",
    "LossOutput",
    "Noised",
    "Schedule",
    "add_noise",
    "draw",
    "loss",
    "schedule",
    "weighted_loss",
]


@dataclass(frozen=True)
class Draws:
    """Everything random about a batch: standard normal `noise` `[B,T,C,h,w]`, `dropped` bool `[B]` and the table `index`.

    `index` is int64, `[B]` (one timestep per clip) or `[B,T]` (one per frame, Stage1's chunks).
    """

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
    noise = process.clip_noise(latent_shape, global_sample_indices, seed, purpose, "noise")
    dropped = drop_rows(seed, global_sample_indices, global_batch_size, image_condition_dropout)
    return Draws(torch.tensor(index), noise, dropped)


def drop_rows(seed: int, global_sample_indices: Sequence[int], global_batch_size: int, p: float) -> Tensor:
    """Return bool `[B]`: which samples train without the first image."""
    places = [divmod(g, global_batch_size) for g in global_sample_indices]
    return torch.tensor([image_condition_dropped(seed, step, 0, 0, row, p) for step, row in places])


def add_noise(latents: Tensor, draws: Draws, table: Schedule) -> Noised:
    """Return clean `latents` `[B,T,C,h,w]` moved to their drawn sigma; mixing in float32, result in the dtype of `latents`."""
    batch, frames = latents.shape[:2]
    noised = add_noise_everywhere(latents, draws, table)
    anchored = torch.zeros(batch, frames, dtype=torch.bool, device=latents.device)
    anchored[:, 0] = ~draws.dropped.to(latents.device)
    noisy = torch.where(process.per_clip(anchored), latents, noised.latents)
    return Noised(noisy, noised.timesteps.masked_fill(anchored, 0.0), ~anchored)


def add_noise_everywhere(latents: Tensor, draws: Draws, table: Schedule) -> Noised:
    """Return `add_noise` without a clean latent 0: (1 - sigma) x0 + sigma eps in every frame, all supervised."""
    batch, frames = latents.shape[:2]
    noisy = process.mix(latents, draws.noise, _entries(table.sigmas, draws, frames))
    timesteps = _entries(table.timesteps, draws, frames).to(latents.device, torch.float32)
    return Noised(noisy, timesteps, torch.ones(batch, frames, dtype=torch.bool, device=latents.device))


def kept_condition(image_condition: Tensor, draws: Draws) -> Tensor:
    """Return y `[B,T,4+C,h,w]` with mask and latents 0 for the dropped samples (by selection: nothing of them is left)."""
    dropped = draws.dropped.to(image_condition.device)
    return image_condition.masked_fill(process.per_clip(dropped), 0.0)


def _entries(column: np.ndarray, draws: Draws, frames: int) -> Tensor:
    """Return the drawn entries of a table column, float64 `[B,T]`."""
    values = torch.from_numpy(column[draws.index.cpu().numpy()])
    return values if values.ndim == 2 else values[:, None].expand(-1, frames)


def weighted_error(prediction: Tensor, target: Tensor, supervised: Tensor, weights: Tensor) -> Tensor:
    """Return `[B]`: sum(mask w (prediction - target)^2) / sum(mask) over the elements of each sample, `weights` `[B,T]`.

    The mask comes before the square and by selection, so a non-finite value in an excluded frame cannot leak.
    """
    error = torch.where(
        process.per_clip(supervised), process.widened(prediction) - process.widened(target), 0.0
    )
    elements = supervised.sum(dim=1) * target[0, 0].numel()
    return (weights * error.square().flatten(2).sum(dim=2)).sum(dim=1) / elements.clamp_min(1)


def weighted_loss(
    prediction: Tensor, latents: Tensor, noised: Noised, draws: Draws, table: Schedule
) -> LossOutput:
    """Return the loss of a predicted velocity `[B,T,C,h,w]`, normalised per sample and then averaged.

    At the release's micro-batch of one this is the released loss; per-sample normalisation keeps it the same for every
    split of a global batch into processes and micro-batches.
    """
    target = draws.noise.to(latents.device, latents.dtype) - latents
    weights = _entries(table.weights, draws, latents.shape[1]).to(latents.device, torch.float32)
    per_sample = weighted_error(prediction, target, noised.supervised, weights)
    return LossOutput(per_sample.mean(), per_sample.detach())


def loss(
    backbone: Backbone,
    latents: Tensor,
    prompt_embeds: Tensor,
    w2c: Tensor | None,
    intrinsics: Tensor | None,
    draws: Draws,
    table: Schedule,
    image_condition: Tensor | None = None,
) -> LossOutput:
    """Return the Stage0.5 loss of clean `latents` `[B,T,C,h,w]`: one bidirectional pass over the whole clip.

    image_condition: y `[B,T,4+C,h,w]` of an image-conditioned backbone, None for any other.
    """
    if image_condition is None:
        noised = add_noise(latents, draws, table)
    else:
        noised = add_noise_everywhere(latents, draws, table)
        image_condition = kept_condition(image_condition, draws)
    prediction = backbone.velocity(
        noised.latents, noised.timesteps, prompt_embeds, w2c, intrinsics, image_condition=image_condition
    )
    return weighted_loss(prediction, latents, noised, draws, table)
