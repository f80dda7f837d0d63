"""Autoregressive sampling, chunk by chunk: Stage1 over a window of clean history, Stage2 under the key-value cache.

Chunks are independent of what comes after them: a longer rollout from the same noise begins with the shorter one.
(spec wan22 6.1)

Shapes: B batch, T latent frames, C channels, h w latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..objectives.self_gradient_forcing import Conditions, Recipe, denoise_chunk

if TYPE_CHECKING:
    from ..backbones.protocol import CausalBackbone

# Velocity of a chunk: latents `[B,c,C,h,w]`, raw t `[B,c]` and, of a flow map, raw r `[B,c]`.
ChunkVelocity = Callable[..., Tensor]
# A solver of one chunk: its velocity, its noise, and the anchor `[B,1,C,h,w]` of the first chunk, None later.
Solve = Callable[[ChunkVelocity, Tensor, Tensor | None], Tensor]
# Told of every finished chunk: chunks done, chunks in all, and its latents `[B,c,C,h,w]`.
OnChunk = Callable[[int, int, Tensor], Any]


def history_frames(first: int, chunk: int, prior_chunks: int, sink: int = 0) -> list[int]:
    """Return the latent frames that the chunk at `first` is given as clean history: the sink and the last `prior_chunks`."""
    recent = max(0, first - prior_chunks * chunk)
    return [*range(min(sink, recent)), *range(recent, first)]


def check_chunks(frames: int, chunk: int) -> None:
    """Raise ValueError unless `frames` latents are whole chunks."""
    if frames < 1 or frames % chunk:
        raise ValueError(f"{frames} latent frames; expected a multiple of the chunk of {chunk}")


def roll_out_windows(
    backbone: CausalBackbone,
    noise: Tensor,
    anchor: Tensor,
    conditions: Conditions,
    solve: Solve,
    *,
    chunk: int,
    prior_chunks: int,
    sink: int = 0,
    on_chunk: OnChunk | None = None,
) -> Tensor:
    """Return latents `[B,T,C,h,w]` grown from `noise` of that shape after `anchor` `[B,1,C,h,w]`, without a cache (Stage1).

    Every evaluation runs `[history | chunk]` again: positions count from the window's first frame, cameras are relative to
    it, the history is clean (t = r = 0). A rollout that is not finite any more in any clip ends there; the rest is NaN.
    """
    check_chunks(noise.shape[1], chunk)
    dtype = next(backbone.transformer.parameters()).dtype
    prompts = conditions.prompt_embeds.to(dtype)
    done: list[Tensor] = []
    for first in range(0, noise.shape[1], chunk):
        past = history_frames(first, chunk, prior_chunks, sink)
        here = [*past, *range(first, first + chunk)]
        history = torch.cat([noise[:, :0], *done], dim=1)[:, past].to(dtype)
        cameras = None if conditions.w2c is None else conditions.w2c[:, here]
        still = torch.zeros(len(noise), len(past), device=noise.device)

        def velocity(
            latents: Tensor,
            timesteps: Tensor,
            r: Tensor | None = None,
            history: Tensor = history,
            still: Tensor = still,
            cameras: Tensor | None = cameras,
        ) -> Tensor:
            return backbone.window_velocity(
                history,
                latents.to(dtype),
                still,
                timesteps,
                prompts,
                cameras,
                conditions.intrinsics,
                chunk=chunk,
                r=r,
            )

        done.append(solve(velocity, noise[:, first : first + chunk], anchor if first == 0 else None))
        if _ended(done, noise, on_chunk):
            break
    return _with_rest(done, noise)


def roll_out_cached(
    student: CausalBackbone,
    noise: Tensor,
    renoise: Sequence[Tensor],
    anchor: Tensor,
    conditions: Conditions,
    recipe: Recipe,
    on_chunk: OnChunk | None = None,
) -> Tensor:
    """Return latents `[B,T,C,h,w]` of a few-step student: K denoising forwards and one commit per chunk (Stage2).

    `noise` `[B,T,C,h,w]` starts all chunks, `renoise` (K-1 tensors of that shape) follows each step but the last. A chunk is
    committed as its final x0 at timestep 0. Cameras stay relative to the first frame of the clip. The network sees timesteps
    in its own precision (bfloat16 makes 1000, 936, 832, 624 of the released ones); noising and x0 take them exactly.
    """
    frames, chunk = noise.shape[1], recipe.chunk
    check_chunks(frames, chunk)
    dtype = next(student.transformer.parameters()).dtype
    state = student.rollout_state(
        conditions.prompt_embeds.to(dtype),
        conditions.intrinsics,
        chunk=chunk,
        window=recipe.window,
        sink=recipe.sink,
    )
    still = torch.zeros(len(noise), chunk, device=noise.device)
    done: list[Tensor] = []
    for first in range(0, frames, chunk):
        here = slice(first, first + chunk)
        cameras = None if conditions.w2c is None else conditions.w2c[:, here]

        def velocity(latents: Tensor, timesteps: Tensor, cameras: Tensor | None = cameras) -> Tensor:
            return student.chunk_velocity(state, latents.to(dtype), timesteps.to(dtype), cameras)

        _, cleans = denoise_chunk(
            velocity,
            noise[:, here],
            [step[:, here] for step in renoise],
            recipe.timesteps,
            recipe.table,
            anchor if first == 0 else None,
        )
        done.append(cleans[-1])
        if _ended(done, noise, on_chunk):
            break
        student.chunk_velocity(state, cleans[-1].to(dtype), still, cameras, commit=True)
    return _with_rest(done, noise)


def _ended(done: Sequence[Tensor], noise: Tensor, on_chunk: OnChunk | None) -> bool:
    """Report the chunk just done; tell whether no clip of the batch is finite any more."""
    if on_chunk is not None:
        on_chunk(len(done), noise.shape[1] // done[0].shape[1], done[-1])
    return not bool(torch.isfinite(done[-1]).flatten(1).all(dim=1).any())


def _with_rest(done: Sequence[Tensor], noise: Tensor) -> Tensor:
    """Return the chunks joined, continued with NaN to the length of `noise`."""
    latents = torch.cat([*done], dim=1)
    missing = torch.full_like(noise[:, latents.shape[1] :], float("nan"), dtype=latents.dtype)
    return torch.cat([latents, missing], dim=1)
