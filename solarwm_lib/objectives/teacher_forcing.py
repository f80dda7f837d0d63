"""Stage1 flow-matching baseline (spec wan22 4.2): Stage0.5's loss under teacher forcing, one timestep per chunk.

The noisy half of `[clean | noisy]` learns to denoise a chunk from the clean chunks before it. Unless a sample is dropped,
its latent 0 stays clean at timestep 0 and outside the loss; the clean half is clean at timestep 0 always.

Shapes: B batch, T latent frames, C channels, h w latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime import keyed
from . import flow_matching
from .flow_matching import Draws, LossOutput
from .noise import Schedule, clip_noise

if TYPE_CHECKING:
    from ..backbones.protocol import Backbone


def draw(
    latent_shape: tuple[int, int, int, int],
    *,
    seed: int,
    global_sample_indices: Sequence[int],
    global_batch_size: int,
    chunk: int,
    image_condition_dropout: float,
    num_train_timesteps: int = 1000,
    purpose: str = "train",
) -> Draws:
    """Draw a batch of `latent_shape` (T, C, h, w) clips: a table index per chunk of `chunk` frames, as int64 `[B,T]`.

    Noise and dropped samples are those of Stage0.5 at the same place in the sample stream. ValueError unless T is a multiple of
    the chunk.
    """
    frames = latent_shape[0]
    if frames % chunk:
        raise ValueError(f"{frames} latent frames; expected a multiple of the chunk of {chunk}")
    index = [
        [
            keyed.integer(num_train_timesteps, seed, purpose, "timestep", g, block)
            for block in range(frames // chunk)
        ]
        for g in global_sample_indices
    ]
    return Draws(
        torch.tensor(index).repeat_interleave(chunk, dim=1),
        clip_noise(latent_shape, global_sample_indices, seed, purpose, "noise"),
        flow_matching.drop_rows(seed, global_sample_indices, global_batch_size, image_condition_dropout),
    )


def loss(
    backbone: Backbone,
    latents: Tensor,
    prompt_embeds: Tensor,
    w2c: Tensor | None,
    intrinsics: Tensor | None,
    draws: Draws,
    table: Schedule,
    *,
    chunk: int,
    max_prior_clean_chunks: int,
    sink: int = 0,
) -> LossOutput:
    """Return the loss of clean `latents` `[B,T,C,h,w]`, weighted per frame and normalised per sample; `sink` in latent frames."""
    noised = flow_matching.add_noise(latents, draws, table)
    prediction = backbone.teacher_forced_velocity(
        latents,
        noised.latents,
        noised.timesteps,
        prompt_embeds,
        w2c,
        intrinsics,
        chunk=chunk,
        max_prior_clean_chunks=max_prior_clean_chunks,
        sink=sink,
    )
    return flow_matching.weighted_loss(prediction, latents, noised, draws, table)
