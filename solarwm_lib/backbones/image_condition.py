"""The image condition y of I2V-A14B (spec wan22 1.5): four mask channels, then the latents of the first frame followed by grey.

Training, preencoding and sampling all make it here. Shapes: B batch, F pixel frames, H W pixels, T latent frames, C channels,
h w latent size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config.geometry import MASK_CHANNELS

if TYPE_CHECKING:
    from .codec import Codec


def image_condition(codec: Codec, image: Tensor, pixel_frames: int) -> Tensor:
    """Return y `[B,T,4+C,h,w]` of a clip of `pixel_frames` frames that begins with `image` `[B,3,1,H,W]` in [-1,1]."""
    latents = codec.encode(image_then_grey(image, pixel_frames))
    return torch.cat([image_mask(latents), latents], dim=2)


def image_then_grey(image: Tensor, pixel_frames: int) -> Tensor:
    """Return the video `[B,3,F,H,W]` of `image` `[B,3,1,H,W]` and zeros, mid-grey in [-1,1]."""
    video = image.new_zeros(*image.shape[:2], pixel_frames, *image.shape[3:])
    video[:, :, :1] = image
    return video


def image_mask(latents: Tensor) -> Tensor:
    """Return the mask `[B,T,4,h,w]` that goes with `latents` `[B,T,C,h,w]`: ones for latent 0, zeros for the others.

    A pixel-frame indicator (1 for frame 0) with its first entry repeated four times, folded by four.
    """
    batch, frames, _, height, width = latents.shape
    indicator = latents.new_zeros(MASK_CHANNELS * frames)
    indicator[:MASK_CHANNELS] = 1
    return indicator.view(1, frames, MASK_CHANNELS, 1, 1).expand(batch, -1, -1, height, width)
