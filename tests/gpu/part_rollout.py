"""Few-step rollouts of a Stage2 student with the whole network of Wan 5B, with and without the key-value cache.

Random weights in bfloat16, chunk, window and denoising steps as released; without the codec. Every chunk takes K denoising forwards;
with the cache one more commits it, without it every forward runs over `[history | chunk]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import Findings, cameras, elapsed, peak_bytes, recipe, reset_peak, wait
from torch import Tensor

from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.inference.rollout import roll_out_cached, roll_out_windows
from solarwm_lib.objectives.self_gradient_forcing import Conditions, Recipe, denoise_chunk
from solarwm_lib.training import stage2

LONG_FRAMES = 60  # latent frames of the released validation rollouts
TEMPORAL_STRIDE = 4


def rollouts(
    backbone: Any, noise: Tensor, conditions: Conditions, recipe: Recipe
) -> dict[str, Callable[[], Tensor]]:
    """The two ways to the same chunks of `noise` `[B,T,C,h,w]`."""
    renoise = [torch.randn_like(noise) for _ in recipe.timesteps[1:]]
    anchor = noise[:, :1]

    def solve(velocity: Callable[..., Tensor], chunk: Tensor, first: Tensor | None) -> Tensor:
        again = [step[:, : chunk.shape[1]] for step in renoise]
        return denoise_chunk(velocity, chunk, again, recipe.timesteps, recipe.table, first)[1][-1]

    prior = (recipe.window - recipe.chunk) // recipe.chunk
    return {
        "cached": lambda: roll_out_cached(backbone, noise, renoise, anchor, conditions, recipe),
        "cache_free": lambda: roll_out_windows(
            backbone, noise, anchor, conditions, solve, chunk=recipe.chunk, prior_chunks=prior
        ),
    }


@torch.no_grad()
def rollout(found: Findings) -> None:
    """Time a rollout as long as a training clip both ways, then a long cached one."""
    device = found.device
    resolved = recipe("train_stage2_sgf_81f", found.is_cuda, "smoke", "smoke_stage2")
    config, fixed = resolved.config, stage2.recipe(resolved)
    architecture = load_architecture(config.model.architecture)
    torch.manual_seed(0)
    reset_peak(device)
    backbone = Wan22.from_config(architecture, config.model, device).eval().requires_grad_(False)
    if found.is_cuda:
        backbone.to(torch.bfloat16)
    text = torch.randn(1, config.model.text_length, architecture["transformer"]["text_dim"], device=device)
    size = (architecture["latent_channels"], config.data.height // 16, config.data.width // 16)

    def timed(frames: int, ways: tuple[str, ...], warm_up: bool) -> dict[str, float]:
        noise = torch.randn(1, frames, *size, device=device)
        conditions = Conditions(text, *cameras(1, frames, device))
        runs = rollouts(backbone, noise, conditions, fixed)
        seconds = {}
        for way in ways:
            if warm_up:
                runs[way]()
            wait(device)
            seconds[way], latents = elapsed(device, runs[way])
            found.check(f"{'clip' if warm_up else 'long'}_{way}_is_finite", bool(latents.isfinite().all()))
        return seconds

    frames = config.data.latent_frames
    found.set(
        {
            "denoising_steps": len(fixed.timesteps),
            "chunk_latent_frames": fixed.chunk,
            "window_latent_frames": fixed.window,
            "clip_latent_frames": frames,
        }
    )
    seconds = timed(frames, ("cached", "cache_free"), warm_up=True)
    found.set(
        {
            "clip_cached_seconds": seconds["cached"],
            "clip_cache_free_seconds": seconds["cache_free"],
            "cache_free_over_cached": seconds["cache_free"] / seconds["cached"],
            "clip_pixel_frames_per_second": _pixel_frames(frames) / seconds["cached"],
        }
    )
    long = LONG_FRAMES if found.is_cuda else 2 * frames
    seconds = timed(long, ("cached",), warm_up=False)
    found.set(
        {
            "long_latent_frames": long,
            "long_cached_seconds": seconds["cached"],
            "long_latent_frames_per_second": long / seconds["cached"],
            "long_pixel_frames_per_second": _pixel_frames(long) / seconds["cached"],
            "peak_bytes": peak_bytes(device),
        }
    )


def _pixel_frames(latents: int) -> int:
    return 1 + TEMPORAL_STRIDE * (latents - 1)
