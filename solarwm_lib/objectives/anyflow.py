"""Stage1 TF-AnyFlow v1.5 (spec wan22 4.3): a forward map U(z, t, r) learned under teacher forcing.

The prediction u + (t - r) dU/dt of the map from t to r must equal the velocity, so a sample may later jump from t to r in
one step. One pair (t, r) per clip; dU/dt is a central difference along the predicted velocity, no gradient through it;
guidance against a negative prompt is fused into the target. Latent 0 is clean at t = r = 0 always.

A micro-batch takes two calls, because its losses are scaled by a mean over all ranks: `errors`, then `loss`.

Shapes: B batch, T latent frames, C channels, h w latent size. Times t and r are raw, in [0, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..runtime import keyed
from . import noise as process
from .flow_matching import LossOutput
from .noise import Schedule

if TYPE_CHECKING:
    from ..backbones.protocol import Backbone

# Keeps the rescaling of a vanishing loss finite, and the width of the difference above zero (latent 0 has none).
RESCALE_EPSILON = 1e-5
MINIMUM_WIDTH = 1e-6


class Kind(IntEnum):
    """What a sample teaches: the velocity itself (r = t), the jump to clean (r = 0), or a jump in between (0 < r < t)."""

    DIFFUSION = 0
    CONSISTENCY = 1
    FLOW_MAP = 2


@dataclass(frozen=True)
class Draws:
    """Everything random about a batch: raw times `t`, `r` float32 `[B]`, `kind` int64 `[B]` (`Kind`), `noise` `[B,T,C,h,w]`."""

    t: Tensor
    r: Tensor
    kind: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Errors:
    """A micro-batch before rescaling: mean square `error` with gradient, Gaussian `weight`, `diffusion` bool; each `[B]`."""

    error: Tensor
    weight: Tensor
    diffusion: Tensor


def kinds(
    rows: Sequence[int], global_batch_size: int, diffusion_ratio: float, consistency_ratio: float
) -> np.ndarray:
    """Return the `Kind` of samples by their row within the global batch (spec 4.3; Python's half-to-even rounding).

    The first round(diffusion_ratio G) rows are diffusion, the next round(consistency_ratio G) consistency, the rest flow map.
    """
    diffusion = round(diffusion_ratio * global_batch_size)
    consistency = diffusion + round(consistency_ratio * global_batch_size)
    row = np.asarray(rows)
    return np.select([row < diffusion, row < consistency], [Kind.DIFFUSION, Kind.CONSISTENCY], Kind.FLOW_MAP)


def time_pairs(
    u1: np.ndarray, u2: np.ndarray, kind: np.ndarray, shift: float, num_train_timesteps: int = 1000
) -> tuple[np.ndarray, np.ndarray]:
    """Return raw float32 times (t, r) `[n]` of two uniforms in [0, 1): shifted t = u1 and r = u1 u2, or r as the kind says.

    The shift is continuous (no table). Flow-map pairs are strict, 0 < r < t: where rounding made two equal, the next
    representable value is taken, after the shift, because that is what the network sees.
    """
    u1, u2 = u1.astype(np.float32), u2.astype(np.float32)
    t, r = (
        (num_train_timesteps * process.shift_time(u.astype(np.float64), shift)).astype(np.float32)
        for u in (u1, u1 * u2)
    )
    zero, infinity = np.float32(0), np.float32(np.inf)
    smallest = np.nextafter(zero, infinity)
    is_map = kind == Kind.FLOW_MAP
    t = np.where(is_map, np.maximum(t, np.nextafter(smallest, infinity)), t)
    inside = np.clip(r, smallest, np.nextafter(t, zero))
    r = np.select([kind == Kind.DIFFUSION, is_map], [t, inside], zero)
    return t, r


def draw(
    latent_shape: tuple[int, int, int, int],
    *,
    seed: int,
    global_sample_indices: Sequence[int],
    global_batch_size: int,
    shift: float,
    diffusion_ratio: float = 0.5,
    consistency_ratio: float = 0.25,
    num_train_timesteps: int = 1000,
    purpose: str = "train",
) -> Draws:
    """Draw a batch of `latent_shape` (T, C, h, w) clips from their positions in the sample stream alone.

    Released, a sample's kind follows from its rank; here from its row in the global batch, which is the same place.
    """
    indices = global_sample_indices
    rows = [g % global_batch_size for g in indices]
    kind = kinds(rows, global_batch_size, diffusion_ratio, consistency_ratio)
    u1, u2 = (np.array([_uniform32(seed, purpose, name, g) for g in indices]) for name in ("u1", "u2"))
    t, r = time_pairs(u1, u2, kind, shift, num_train_timesteps)
    noise = process.clip_noise(latent_shape, indices, seed, purpose, "noise")
    return Draws(torch.from_numpy(t), torch.from_numpy(r), torch.from_numpy(kind), noise)


def _uniform32(*parts: keyed.Part) -> np.float32:
    """Return a uniform float32 in [0, 1): 24 bits, so that rounding never gives 1."""
    return np.float32(keyed.integer(2**24, *parts) * 2.0**-24)


def bounded_window(
    t: Tensor, r: Tensor, epsilon: float, num_train_timesteps: int = 1000
) -> tuple[Tensor, Tensor]:
    """Return the ends (t+, t-) of the difference: t +- epsilon raw units, no later than N and no earlier than r."""
    return (t + epsilon).clamp_max(num_train_timesteps), torch.maximum(t - epsilon, r)


# U(latents, t, r): latents `[B,T,C,h,w]` and raw times `[B,T]` to a velocity.
Field = Callable[[Tensor, Tensor, Tensor], Tensor]


def slope(
    field: Field, noisy: Tensor, t: Tensor, r: Tensor, epsilon: float, num_train_timesteps: int = 1000
) -> Tensor:
    """Return dU/dt per raw timestep unit along the predicted velocity, `[B,T,C,h,w]`: three calls of `field`.

    D = (U(z+, t+, r) - U(z-, t-, r)) / (t+ - t-), z+- on the line through z with direction U(z, t, t). Latent 0 (t = r = 0)
    is held. Times are `[B,T]`.
    """
    upper, lower = bounded_window(t, r, epsilon, num_train_timesteps)
    # Latent 0 stays at time 0: its window is empty, so that it does not move either.
    upper, lower = (torch.cat([torch.zeros_like(end[:, :1]), end[:, 1:]], dim=1) for end in (upper, lower))
    direction = process.widened(field(noisy, t, t))
    start = process.widened(noisy)

    def at(end: Tensor) -> Tensor:
        moved = start + direction * process.per_clip((end - t).to(start.dtype) / num_train_timesteps)
        # By selection: a non-finite direction in latent 0 must not reach it.
        moved = process.with_anchor(moved, start[:, :1]).to(noisy.dtype)
        return process.widened(field(moved, end, r))

    width = (upper - lower).clamp_min(MINIMUM_WIDTH)
    return (at(upper) - at(lower)) / process.per_clip(width).to(start.dtype)


def errors(
    backbone: Backbone,
    latents: Tensor,
    prompt_embeds: Tensor,
    negative_embeds: Tensor | None,
    w2c: Tensor | None,
    intrinsics: Tensor | None,
    draws: Draws,
    table: Schedule,
    *,
    chunk: int,
    max_prior_clean_chunks: int,
    sink: int = 0,
    epsilon: float = 5.0,
    guidance_scale: float = 3.0,
) -> Errors:
    """Return the errors of clean `latents` `[B,T,C,h,w]`: 5 forwards of the backbone, 4 without guidance (scale 1).

    `negative_embeds` is `[1,L,D]`, needed unless the scale is 1 (ValueError). `sink` in latent frames, `epsilon` in raw
    timestep units. Gradients flow through U(z, t, r) alone; it comes last, so that its activations never lie beside the
    other forwards. The difference is taken for the samples with r < t only, yet for at least one sample: every rank makes
    the same sequence of forwards, as sharded parameters demand.
    """
    negative = None if guidance_scale == 1 else negative_embeds
    if guidance_scale != 1 and negative is None:
        raise ValueError(f"guidance scale {guidance_scale} needs negative_embeds; give them or a scale of 1")
    batch, frames = latents.shape[:2]
    device = latents.device
    every = torch.arange(batch, device=device)
    n = table.num_train_timesteps

    def field(noisy: Tensor, t: Tensor, r: Tensor, rows: Tensor, prompts: Tensor = prompt_embeds) -> Tensor:
        return backbone.teacher_forced_velocity(
            latents[rows],
            noisy,
            t,
            prompts[rows],
            None if w2c is None else w2c[rows],
            None if intrinsics is None else intrinsics[rows],
            chunk=chunk,
            max_prior_clean_chunks=max_prior_clean_chunks,
            sink=sink,
            r=r,
        )

    noise = draws.noise.to(device, latents.dtype)
    t, r = (process.anchored_timesteps(time.to(device), frames) for time in (draws.t, draws.r))
    noisy = process.with_anchor(process.mix(latents, noise, draws.t.double() / n), latents[:, :1])
    target = process.widened(noise - latents)
    diffusion = (draws.kind == Kind.DIFFUSION).to(device)

    with torch.no_grad():
        if negative is not None:
            unconditional = process.widened(field(noisy, t, t, every, negative.expand(batch, -1, -1)))
            target = guidance_scale * target + (1 - guidance_scale) * unconditional
        moving = torch.nonzero(~diffusion).flatten()
        rows = moving if len(moving) else every[:1]
        change = torch.zeros_like(target)
        map_of_rows = partial(field, rows=rows)
        change[rows] = slope(map_of_rows, noisy[rows], t[rows], r[rows], epsilon, n).to(change.dtype)

    # By selection: where r = t there is nothing to add, whatever the difference came out as.
    span = process.per_clip(t - r)
    correction = torch.where(span == 0, 0.0, span * change)
    prediction = process.widened(field(noisy, t, r, every)) + correction
    error = process.mean_square((prediction - target) / guidance_scale, process.after_anchor(latents))
    return Errors(error, table.weight_of(draws.t.to(device)), diffusion)


def diffusion_sum(micro_batch: Errors) -> tuple[float, int]:
    """Return sum and number of the finite errors of this micro-batch's diffusion samples: what ranks add up."""
    values = micro_batch.error.detach()[micro_batch.diffusion].double()
    finite = values[values.isfinite()]
    return finite.sum().item(), finite.numel()


def diffusion_mean(sums: Iterable[tuple[float, float]]) -> float | None:
    """Return the mean over the `diffusion_sum`s of all ranks; None if there is no finite diffusion error anywhere."""
    totals = [*sums]
    count = sum(number for _, number in totals)
    return math.fsum(total for total, _ in totals) / count if count else None


def loss(micro_batch: Errors, mean: float | None) -> LossOutput:
    """Return the loss of a micro-batch, given the `diffusion_mean` of the global micro-batch.

    The error of every other sample is scaled, without gradient, to the size of that mean: no kind outweighs another. Then the
    Gaussian weights of t, and the average.
    """
    error = micro_batch.error
    if mean is not None:
        scale = mean / (error.detach() + RESCALE_EPSILON)
        error = torch.where(micro_batch.diffusion, error, error * scale)
    per_sample = micro_batch.weight * error
    return LossOutput(per_sample.mean(), per_sample.detach())


def sampling_pairs(steps: int, shift: float, num_train_timesteps: int = 1000) -> list[tuple[float, float]]:
    """Return the raw pairs (t, r) of a `steps`-step flow-map sampler: the shifted linear grid, from N to 0."""
    sigmas = process.shift_time(np.linspace(1.0, 0.0, steps + 1), shift)
    times = (num_train_timesteps * sigmas).tolist()
    return list(pairwise(times))
