"""Velocities: CUDA against the CPU, bfloat16 against float32, and one attention executor against the other in a network."""

from __future__ import annotations

from typing import Any

import torch
from measure import CAMERA, Findings, cameras, relative_error
from part_attention import Layout, layout

from solarwm_lib.backbones import attention
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture

# Summation order alone, through six blocks.
DEVICE_TOLERANCE = 1e-4
# bfloat16 keeps 8 bits; through a few blocks the relative error of the velocity stays below a few percent.
BFLOAT16_TOLERANCE = 0.05
WIDE_BLOCKS = 3


def network(architecture: dict[str, Any], device: torch.device) -> Any:
    """A network of random weights whose last layer is not nearly zero."""
    torch.manual_seed(0)
    backbone: Any = Wan22.from_config(architecture, CAMERA, device)
    torch.nn.init.normal_(backbone.transformer.proj_out.weight, std=0.1)
    return backbone.requires_grad_(False)


def inputs(
    architecture: dict[str, Any], frames: int, size: tuple[int, int], device: torch.device, text: int = 16
) -> list[torch.Tensor]:
    """Latents, timesteps, prompt and cameras of one clip of `frames` latents of `size`."""
    torch.manual_seed(1)
    channels, width = architecture["latent_channels"], architecture["transformer"]["text_dim"]
    drawn = (
        torch.randn(1, frames, channels, *size),
        torch.rand(1, frames) * 1000,
        torch.randn(1, text, width),
    )
    return [x.to(device) for x in drawn] + [*cameras(1, frames, device)]


@torch.no_grad()
def velocity(backbone: Any, given: list[torch.Tensor], lower: bool = False) -> torch.Tensor:
    """The velocity in float32 on the CPU, computed in bfloat16 autocast if `lower`."""
    with torch.autocast(given[0].device.type, dtype=torch.bfloat16, enabled=lower):
        return backbone.velocity(*given).float().cpu()


@torch.no_grad()
def forced(backbone: Any, given: list[torch.Tensor], causal: Layout, executor: str) -> torch.Tensor:
    """The teacher-forced velocity by one of the attention executors, in bfloat16 autocast."""
    latents, times, prompt, *camera = given
    attention.set_executor(backbone.transformer, executor)
    try:
        with torch.autocast(latents.device.type, dtype=torch.bfloat16):
            return backbone.teacher_forced_velocity(
                latents,
                latents.flip(1),
                times,
                prompt,
                *camera,
                chunk=causal.chunk,
                max_prior_clean_chunks=causal.prior,
            )
    finally:
        attention.set_executor(backbone.transformer, "segments")


def parity(found: Findings) -> None:
    """Tiny network on both devices, then the full width in both precisions."""
    cpu, device = torch.device("cpu"), found.device
    tiny = load_architecture("wan22-tiny")
    backbone, given = network(tiny, cpu), inputs(tiny, 9, (4, 6), cpu)
    expected = velocity(backbone, given)
    backbone.to(device)
    given = [x.to(device) for x in given]
    for name, lower, tolerance in (
        ("float32", False, DEVICE_TOLERANCE),
        ("bfloat16", True, BFLOAT16_TOLERANCE),
    ):
        error = relative_error(velocity(backbone, given, lower), expected)
        found.set({f"tiny_{name}_error": error})
        found.check(f"tiny_{name}", error <= tolerance)

    wide = load_architecture("wan22-ti2v-5b" if found.is_cuda else "wan22-tiny")
    wide = {**wide, "transformer": {**wide["transformer"], "num_layers": WIDE_BLOCKS}}
    causal, size = layout(found.is_cuda), (30, 54) if found.is_cuda else (4, 6)
    backbone, given = network(wide, device), inputs(wide, causal.frames, size, device)
    expected = velocity(backbone, given)
    heads, width = (wide["transformer"][key] for key in ("num_attention_heads", "attention_head_dim"))
    found.set({"wide_blocks": WIDE_BLOCKS, "wide_width": heads * width})
    error = relative_error(velocity(backbone, given, lower=True), expected)
    found.set({"wide_bfloat16_error": error})
    found.check("wide_bfloat16", error <= BFLOAT16_TOLERANCE)
    error = relative_error(*(forced(backbone, given, causal, name) for name in ("flex", "segments")))
    found.set({"wide_flex_error": error})
    found.check("wide_flex", error <= BFLOAT16_TOLERANCE)
    # As samples are drawn: weights, latents and prompt in bfloat16, times and cameras in float32.
    backbone.to(torch.bfloat16)
    latents, times, prompt, *camera = given
    rounded = [latents.to(torch.bfloat16), times, prompt.to(torch.bfloat16), *camera]
    pure = relative_error(velocity(backbone, rounded), expected)
    found.set({"wide_bfloat16_weights_error": pure})
    found.check("wide_bfloat16_weights", pure <= 2 * BFLOAT16_TOLERANCE)
