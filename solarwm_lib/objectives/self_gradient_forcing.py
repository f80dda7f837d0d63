"""Stage2: distribution matching of a few-step causal student by self-gradient forcing (spec wan22 5).

An update has three parts. `rollout`: the student generates a clip chunk by chunk without gradient, and what it conditioned
on and denoised is recorded at one denoising step per sample (the exit). `replay`: one teacher-forced pass over the record gives
the same latents with a gradient that also reaches the encoding of the context. Then the loss: the student follows the
difference of critic and teacher scores, the critic learns the flow of the student's samples.

No video is needed: a batch is a first image (the anchor, latent 0), a prompt and cameras.

Shapes: B batch, T latent frames, C channels, h w latent size, K denoising steps, c frames of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime import keyed
from ..runtime.errors import ConfigError
from . import noise as process
from .flow_matching import LossOutput
from .noise import Schedule

if TYPE_CHECKING:
    from ..backbones.protocol import Backbone

SMALLEST_NORMALIZER = 1e-8


@dataclass(frozen=True)
class Recipe:
    """What stays the same over a run: table, raw denoising `timesteps` `[K]`, chunk and windows in latent frames, guidance.

    `window` is what a chunk sees in a rollout, itself included; `max_prior_clean_chunks` the same in a replay, itself excluded.
    """

    table: Schedule
    timesteps: tuple[float, ...]
    chunk: int = 3
    window: int = 18
    sink: int = 0
    max_prior_clean_chunks: int = 5
    score_min_timestep: float = 20.0
    score_max_timestep: float = 980.0
    real_guidance_scale: float = 3.0
    fake_guidance_scale: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """What a batch is generated from: prompt_embeds `[B,L,D]`, cameras w2c `[B,T,4,4]` and intrinsics `[B,3,3]` or neither."""

    prompt_embeds: Tensor
    w2c: Tensor | None = None
    intrinsics: Tensor | None = None


@dataclass(frozen=True)
class Draws:
    """Everything random about a batch.

    exit: int64 `[B]`, the recorded denoising step of each sample. noise `[B,T,C,h,w]` starts the rollout, renoise
    `[K-1,B,T,C,h,w]` follows each step but the last. score_timestep: raw float32 `[B]`; score_noise `[B,T,C,h,w]`.
    """

    exit: Tensor
    noise: Tensor
    renoise: Tensor
    score_timestep: Tensor
    score_noise: Tensor


@dataclass(frozen=True)
class Record:
    """A rollout at each sample's exit step: `noisy` inputs, `context` = x0 of that step, raw `timesteps` float32 `[B,T]`.

    Latents are `[B,T,C,h,w]`, their latent 0 is the anchor at timestep 0.
    """

    noisy: Tensor
    context: Tensor
    timesteps: Tensor


def denoising_timesteps(labels: Sequence[int], table: Schedule) -> tuple[float, ...]:
    """Return the raw timesteps of step labels: label L is table entry N - L; a final label 0 is dropped.

    With shift 5, [1000, 750, 500, 250] are 1000, 937.5, 833.333 and 625. ConfigError unless labels fall within [0, N].
    """
    n = table.num_train_timesteps
    steps = list(labels[:-1]) if labels and labels[-1] == 0 else list(labels)
    if not steps or steps[0] > n or steps[-1] < 1 or steps != sorted(set(steps), reverse=True):
        raise ConfigError(
            f"train.self_gradient_forcing.denoising_timesteps: found {list(labels)}, expected falling labels between {n} and 1"
        )
    return tuple(_timestep(label, table) for label in steps)


def _timestep(label: int, table: Schedule) -> float:
    """Return the raw timestep of a label or integer time in [0, N]: N - L counts along the table, 0 lies behind its end."""
    return float(table.timesteps[table.num_train_timesteps - label]) if label else 0.0


def draw(
    latent_shape: tuple[int, int, int, int],
    recipe: Recipe,
    *,
    seed: int,
    global_sample_indices: Sequence[int],
    purpose: str = "train",
) -> Draws:
    """Draw a batch of `latent_shape` (T, C, h, w) rollouts from their positions in the sample stream alone.

    Every batch of the stream serves one update, student's or critic's, so the position suffices as a key. Released, the exit
    step is drawn per rank; here per sample.
    """
    indices, steps = global_sample_indices, len(recipe.timesteps)
    n = recipe.table.num_train_timesteps
    raw = [keyed.integer(n, seed, purpose, "score_timestep", g) for g in indices]
    renoise = [
        process.clip_noise(latent_shape, indices, seed, purpose, "renoise", step) for step in range(steps - 1)
    ]
    return Draws(
        exit=torch.tensor([keyed.integer(steps, seed, purpose, "exit", g) for g in indices]),
        noise=process.clip_noise(latent_shape, indices, seed, purpose, "noise"),
        renoise=torch.stack(renoise) if renoise else torch.empty(0, len(indices), *latent_shape),
        score_timestep=score_timesteps(raw, recipe),
        score_noise=process.clip_noise(latent_shape, indices, seed, purpose, "score_noise"),
    )


def score_timesteps(raw: Sequence[int], recipe: Recipe) -> Tensor:
    """Return raw float32 timesteps `[B]` of integers n in [0, N): N s f / (1 + (s-1) f) with f = n/N, clamped to the bounds."""
    shifted = torch.tensor([_timestep(n, recipe.table) for n in raw])
    return shifted.clamp(recipe.score_min_timestep, recipe.score_max_timestep)


# Velocity of a chunk: latents `[B,c,C,h,w]` and raw timesteps `[B,c]` to `[B,c,C,h,w]`.
ChunkVelocity = Callable[[Tensor, Tensor], Tensor]


def denoise_chunk(
    velocity: ChunkVelocity,
    noise: Tensor,
    renoise: Sequence[Tensor],
    timesteps: Sequence[float],
    table: Schedule,
    anchor: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Denoise one chunk from `noise` `[B,c,C,h,w]`; return the input and the predicted x0 of each of the K steps.

    After each step but the last, x0 is noised anew to the next timestep with `renoise` (K-1 tensors like `noise`). With
    `anchor` `[B,1,C,h,w]`, for the first chunk, frame 0 is the anchor at timestep 0 throughout. Sampling takes the last x0.
    """
    inputs: list[Tensor] = []
    cleans: list[Tensor] = []
    sigmas = table.sigma_of(torch.tensor(timesteps, dtype=torch.float64))[:, None].expand(-1, len(noise))
    latents = noise
    for step, timestep in enumerate(timesteps):
        if step > 0:
            latents = process.mix(cleans[-1], renoise[step - 1], sigmas[step])
        frame_timesteps = torch.full(noise.shape[:2], timestep, dtype=torch.float32, device=noise.device)
        if anchor is not None:
            latents = process.with_anchor(latents, anchor)
            frame_timesteps[:, 0] = 0
        clean = process.clean_from_velocity(latents, velocity(latents, frame_timesteps), sigmas[step])
        inputs.append(latents)
        cleans.append(clean if anchor is None else process.with_anchor(clean, anchor))
    return inputs, cleans


@torch.no_grad()
def rollout(
    student: Backbone, anchor: Tensor, conditions: Conditions, draws: Draws, recipe: Recipe
) -> Record:
    """Generate T latents after `anchor` `[B,1,C,h,w]`, chunk by chunk under the key-value cache; return the record.

    A chunk is committed as its x0 at the sample's exit step, at timestep 0. All steps run, also past the exit: K + 1 forwards
    per chunk on every rank, as sharded parameters demand. ValueError unless T is a multiple of the chunk.
    """
    frames, chunk = draws.noise.shape[1], recipe.chunk
    if frames % chunk:
        raise ValueError(f"{frames} latent frames; expected a multiple of the chunk of {chunk}")
    noise, renoise = draws.noise.to(anchor), draws.renoise.to(anchor)
    rows = torch.arange(len(anchor), device=anchor.device)
    exits = draws.exit.to(anchor.device)
    state = student.rollout_state(
        conditions.prompt_embeds, conditions.intrinsics, chunk=chunk, window=recipe.window, sink=recipe.sink
    )
    still = torch.zeros(len(anchor), chunk, device=anchor.device)
    recorded = []
    for first in range(0, frames, chunk):
        here = slice(first, first + chunk)
        cameras = None if conditions.w2c is None else conditions.w2c[:, here]

        def velocity(latents: Tensor, timesteps: Tensor, cameras: Tensor | None = cameras) -> Tensor:
            return student.chunk_velocity(state, latents, timesteps, cameras)

        inputs, cleans = denoise_chunk(
            velocity,
            noise[:, here],
            renoise[:, :, here].unbind(),
            recipe.timesteps,
            recipe.table,
            anchor if first == 0 else None,
        )
        context = torch.stack(cleans)[exits, rows]
        student.chunk_velocity(state, context, still, cameras, commit=True)
        recorded.append((torch.stack(inputs)[exits, rows], context))
    noisy, contexts = (torch.cat(parts, dim=1) for parts in zip(*recorded, strict=True))
    timesteps = torch.tensor(recipe.timesteps, device=anchor.device)[exits]
    return Record(noisy, contexts, process.anchored_timesteps(timesteps, frames))


def replay(student: Backbone, record: Record, conditions: Conditions, recipe: Recipe) -> Tensor:
    """Return the record's x0 `[B,T,C,h,w]` from one teacher-forced pass over `[context | noisy]`, with gradient.

    The latents are constants, the context's keys and values are computed anew: a loss on a late chunk trains how earlier chunks
    are encoded. Equal to `record.context` as long as the rollout's window has not moved (`replay_repeats_rollout`).
    """
    velocity = student.teacher_forced_velocity(
        record.context,
        record.noisy,
        record.timesteps,
        conditions.prompt_embeds,
        conditions.w2c,
        conditions.intrinsics,
        chunk=recipe.chunk,
        max_prior_clean_chunks=recipe.max_prior_clean_chunks,
        sink=recipe.sink,
    )
    sigma = recipe.table.sigma_of(record.timesteps)
    generated = process.clean_from_velocity(record.noisy, velocity, sigma)
    return process.with_anchor(generated, record.context[:, :1])


def replay_repeats_rollout(frames: int, recipe: Recipe) -> bool:
    """Whether a replay of `frames` latents must equal the rollout: the window never moved and the replay sees as far back.

    Once it moves (the last of the released seven chunks, window 18) the rollout counts positions from the window's first frame,
    the replay from the clip's. Rotary positions are relative only among tokens of one camera, because the camera transform
    follows the rotation and mixes the rotated pairs: from there on the two differ, as released.
    """
    return frames <= min(recipe.window, (recipe.max_prior_clean_chunks + 1) * recipe.chunk)


@torch.no_grad()
def critic_sample(student: Backbone, record: Record, conditions: Conditions, recipe: Recipe) -> Tensor:
    """Return what the critic learns from, `[B,T,C,h,w]`: the replay without gradient.

    Where it can only repeat the rollout's own latents, these are taken: a fifth of a critic update's work is saved.
    """
    if replay_repeats_rollout(record.noisy.shape[1], recipe):
        return record.context
    return replay(student, record, conditions, recipe)


def noised_for_score(generated: Tensor, draws: Draws, table: Schedule) -> tuple[Tensor, Tensor]:
    """Return (x_t `[B,T,C,h,w]`, raw timesteps `[B,T]`) of detached `generated`, with the anchor clean at timestep 0."""
    generated = generated.detach()
    timestep = draws.score_timestep.to(generated.device)
    noisy = process.mix(generated, draws.score_noise, table.sigma_of(timestep))
    return (
        process.with_anchor(noisy, generated[:, :1]),
        process.anchored_timesteps(timestep, generated.shape[1]),
    )


def denoised(
    model: Backbone,
    noisy: Tensor,
    timesteps: Tensor,
    conditions: Conditions,
    negative_embeds: Tensor | None,
    guidance_scale: float,
    table: Schedule,
) -> Tensor:
    """Return a score model's x0 `[B,T,C,h,w]`: c + g (c - u), u under the negative prompt `[1,L,D]`; one forward if g = 0.

    This g is one less than the usual guidance scale: 3 here is 4 there. ValueError for a scale without a negative prompt.
    """

    def clean(prompt_embeds: Tensor) -> Tensor:
        velocity = model.velocity(noisy, timesteps, prompt_embeds, conditions.w2c, conditions.intrinsics)
        return process.clean_from_velocity(noisy, velocity, table.sigma_of(timesteps))

    conditional = clean(conditions.prompt_embeds)
    if guidance_scale == 0:
        return conditional
    if negative_embeds is None:
        raise ValueError(f"guidance scale {guidance_scale} needs negative_embeds; give them or a scale of 0")
    unconditional = clean(negative_embeds.expand(len(noisy), -1, -1))
    return conditional + guidance_scale * (conditional - unconditional)


@dataclass(frozen=True)
class Direction:
    """The student's gradient before normalising by size: `values` `[B,T,C,h,w]`, the `normalizer` `[B]`, elements set to 0."""

    values: Tensor
    normalizer: Tensor
    replaced: int


def distribution_gradient(generated: Tensor, fake: Tensor, real: Tensor, supervised: Tensor) -> Direction:
    """Return G = (fake - real) / n with n the mean of |generated - real| over the supervised elements of each sample.

    Frames outside `supervised` `[B,T]` have no part in n and G = 0. A non-finite element becomes 0 and is counted, for the caller
    to report: without a count a broken teacher would train nothing in silence.
    """
    mask = process.per_clip(supervised)
    generated, fake, real = (process.widened(x.detach()) for x in (generated, fake, real))
    elements = (supervised.sum(dim=1) * generated[0, 0].numel()).clamp_min(1)
    distance = torch.where(mask, (generated - real).abs(), 0.0).flatten(1).sum(dim=1)
    normalizer = (distance / elements).clamp_min(SMALLEST_NORMALIZER)
    values = torch.where(mask, (fake - real) / normalizer.view(-1, 1, 1, 1, 1), 0.0)
    finite = values.isfinite()
    return Direction(torch.where(finite, values, 0.0), normalizer, int((~finite).sum()))


def surrogate_loss(generated: Tensor, gradient: Tensor, supervised: Tensor) -> LossOutput:
    """Return 0.5 mean (y - sg[y - G])^2 over supervised elements, whose gradient with respect to y is G / count."""
    wide = process.widened(generated)
    per_sample = 0.5 * process.mean_square(wide - (wide - gradient).detach(), supervised)
    return LossOutput(per_sample.mean(), per_sample.detach())


@dataclass(frozen=True)
class StudentOutput:
    """The student's `loss` and the `direction` it follows, for logs."""

    loss: LossOutput
    direction: Direction


def student_loss(
    generated: Tensor,
    teacher: Backbone,
    critic: Backbone,
    conditions: Conditions,
    negative_embeds: Tensor,
    draws: Draws,
    recipe: Recipe,
) -> StudentOutput:
    """Return the student's loss of `generated` `[B,T,C,h,w]` (a replay with gradient): three score forwards, no gradient there."""
    noisy, timesteps = noised_for_score(generated, draws, recipe.table)
    supervised = process.after_anchor(generated)
    with torch.no_grad():
        fake, real = (
            denoised(model, noisy, timesteps, conditions, negative_embeds, scale, recipe.table)
            for model, scale in ((critic, recipe.fake_guidance_scale), (teacher, recipe.real_guidance_scale))
        )
        direction = distribution_gradient(generated, fake, real, supervised)
    return StudentOutput(surrogate_loss(generated, direction.values, supervised), direction)


def critic_loss(
    generated: Tensor, critic: Backbone, conditions: Conditions, draws: Draws, recipe: Recipe
) -> LossOutput:
    """Return the critic's flow-matching loss on the student's `generated` `[B,T,C,h,w]`, without timestep weights."""
    noisy, timesteps = noised_for_score(generated, draws, recipe.table)
    velocity = critic.velocity(
        noisy, timesteps, conditions.prompt_embeds, conditions.w2c, conditions.intrinsics
    )
    target = draws.score_noise.to(generated.device, generated.dtype) - generated.detach()
    error = process.widened(velocity) - process.widened(target)
    per_sample = process.mean_square(error, process.after_anchor(generated))
    return LossOutput(per_sample.mean(), per_sample.detach())


# Cadence. `g` counts completed outer steps: an outer step is one critic update, and before it, when due, one student update.


def student_is_due(g: int, critic_updates_per_student: int = 5) -> bool:
    """Whether the outer step after `g` completed ones begins with a student update; the first steps only train the critic."""
    return g > 0 and g % critic_updates_per_student == 0


def student_updates_after(g: int, critic_updates_per_student: int = 5) -> int:
    """Return how many student updates `g` completed outer steps contain: 39 after 196, 799 after the released 4000."""
    return max(0, g - 1) // critic_updates_per_student


def batches_consumed(g: int, critic_updates_per_student: int = 5) -> int:
    """Return how many batches `g` completed outer steps took, each update its own.

    The outer step after them gives batch number `batches_consumed(g)` to the student if it is due, and the next to the critic.
    """
    return g + student_updates_after(g, critic_updates_per_student)


def ema_is_due(student_updates: int, start: int = 39, every: int = 1) -> bool:
    """Whether the student's average moves after student update number `student_updates` (1-based); at `start` it is made."""
    start = max(1, start)
    return student_updates >= start and (student_updates - start) % every == 0


def ema_updates_after(student_updates: int, start: int = 39, every: int = 1) -> int:
    """Return how often the student's average has been updated: it is made, and updated once, at student update `start`."""
    start = max(1, start)
    return 0 if student_updates < start else 1 + (student_updates - start) // every
