"""A14B's stored image condition against the one diffusers' own image-to-video pipeline prepares."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline

from solarwm_lib.backbones.codec import Codec
from solarwm_lib.backbones.image_condition import image_condition
from solarwm_lib.inference.generate import to_video

FRAMES, HEIGHT, WIDTH = 13, 32, 48


@pytest.fixture(scope="module")
def vae():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1).eval()


def test_the_image_condition_is_the_one_diffusers_prepares(vae):
    frames = np.random.default_rng(1).integers(0, 256, (1, FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    video = to_video(frames)
    pipeline = WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=UniPCMultistepScheduler(), transformer=None
    )
    _, expected = pipeline.prepare_latents(
        video[:, :, 0],
        batch_size=1,
        num_channels_latents=16,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    found = image_condition(Codec(vae, "tiny"), video[:, :, :1], FRAMES)[0]
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
