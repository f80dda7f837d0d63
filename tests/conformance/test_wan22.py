"""Against diffusers itself, on the same tiny weights: the network, the two Wan pipelines, and the folder they load.

The reference side uses none of our modules: diffusers' processors, rotary table, pipelines and autoencoder.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanRotaryPosEmbed

from solarwm_lib.backbones import tiny
from solarwm_lib.backbones.codec import Codec, load_codec
from solarwm_lib.backbones.text import TextEncoder
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.inference import samplers

ARCHITECTURE = yaml.safe_load(
    (Path(__file__).parents[2] / "config" / "models" / "wan22-tiny.yaml").read_text()
)
MODEL = SimpleNamespace(camera_attention_mode="fused_prope", camera_translation_transform="linear")
SHIFT, STEPS = 5.0, 8
PROMPT = "a room with a red wall"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The tiny pipeline folder with a head that is not zero, so that the network's output depends on all of it."""
    folder = tmp_path_factory.mktemp("wan") / "base"
    tiny.build_tiny_assets(folder, ARCHITECTURE, seed=0)
    transformer = WanTransformer3DModel.from_pretrained(folder / "transformer")
    torch.manual_seed(0)
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.05)
    transformer.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def ours(base):
    return Wan22.from_pretrained(base, ARCHITECTURE, MODEL).eval()


@pytest.fixture(scope="module")
def embeds(base):
    return TextEncoder.from_pretrained(base, ARCHITECTURE["text"]["text_length"]).encode([PROMPT])


@pytest.fixture(scope="module")
def vae():
    """A small AutoencoderKLWan of the 5B's structure: patchify, residual blocks, strides 4, 16, 16."""
    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
        latents_mean=[0.01 * i for i in range(48)],
        latents_std=[0.5 + 0.02 * i for i in range(48)],
    ).eval()


def noise(seed=0, frames=3):
    return torch.randn(1, frames, 48, 4, 6, generator=torch.Generator().manual_seed(seed))


class PinnedUniPC(UniPCMultistepScheduler):
    """diffusers' own scheduler on the pinned grid of spec wan22 6.1, written out here once more."""

    def set_timesteps(self, num_inference_steps, device=None, **kwargs):
        super().set_timesteps(num_inference_steps, device=device)
        base = np.linspace(1 - 1 / 1000, 0, num_inference_steps + 1)[:-1]
        sigmas = SHIFT * base / (1 + (SHIFT - 1) * base)
        self.timesteps = torch.from_numpy((1000 * sigmas).astype(np.int64))
        self.sigmas = torch.from_numpy(np.append(sigmas, 0.0)).float()


def scheduler():
    return PinnedUniPC(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)


def reference_pipeline(cls, base, vae):
    """A diffusers pipeline on the saved transformer; nothing of ours is installed in it."""
    transformer = WanTransformer3DModel.from_pretrained(base / "transformer").eval()
    assert isinstance(transformer.rope, WanRotaryPosEmbed)
    assert all(isinstance(block.attn1.processor, WanAttnProcessor) for block in transformer.blocks)
    pipeline = cls(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=scheduler(),
        transformer=transformer,
        expand_timesteps=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(ours, embeds, start, anchor=None):
    timesteps, sigmas = samplers.unipc_grid(STEPS, SHIFT)
    with torch.no_grad():
        return samplers.sample_unipc(
            lambda latents, t: ours.velocity(latents, t, embeds, None, None), start, timesteps, sigmas, anchor
        )


@pytest.mark.parametrize("timesteps", ["shared", "first frame clean"])
def test_camera_off_the_velocity_equals_diffusers(base, ours, embeds, timesteps):
    reference = WanTransformer3DModel.from_pretrained(base / "transformer").eval()
    per_frame = torch.full((2, 9), 637.0)
    if timesteps != "shared":
        per_frame[:, 0] = 0
    latents = torch.cat([noise(0, 9), noise(1, 9)])
    prompts = embeds.expand(2, -1, -1)
    with torch.no_grad():
        expected = reference(
            latents.transpose(1, 2), per_frame.repeat_interleave(6, dim=1), prompts, return_dict=False
        )[0]
        found = ours.velocity(latents, per_frame, prompts)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-6)


def test_camera_off_the_gradients_equal_diffusers(base, ours, embeds):
    reference = WanTransformer3DModel.from_pretrained(base / "transformer")
    per_frame = torch.full((1, 3), 400.0)
    expected = reference(
        noise().transpose(1, 2), per_frame.repeat_interleave(6, dim=1), embeds, return_dict=False
    )[0]
    expected.square().mean().backward()
    ours.zero_grad()
    ours.velocity(noise(), per_frame, embeds).square().mean().backward()
    for (name, parameter), (other, wanted) in zip(
        ours.trainable(), reference.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_text_to_video_sampling_equals_wan_pipeline(base, ours, embeds, vae):
    pipeline = reference_pipeline(WanPipeline, base, vae)
    expected = pipeline(
        prompt_embeds=embeds,
        height=64,
        width=96,
        num_frames=9,
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        latents=noise().transpose(1, 2).contiguous(),
        output_type="latent",
    ).frames
    found = sample(ours, embeds, noise())
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_first_frame_sampling_and_decoding_equal_wan_image_to_video_pipeline(base, ours, embeds, vae):
    pipeline = reference_pipeline(WanImageToVideoPipeline, base, vae)
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(2))
    options = {
        "image": image,
        "prompt_embeds": embeds,
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "num_inference_steps": STEPS,
        "guidance_scale": 1.0,
        "latents": noise().transpose(1, 2).contiguous(),
    }
    codec = Codec(vae, "reference")
    anchor = codec.encode(image[:, :, None] * 2 - 1)
    found = sample(ours, embeds, noise(), anchor)
    expected = pipeline(**options, output_type="latent").frames
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:, :1], anchor)

    pixels = pipeline(**options, output_type="pt").frames
    torch.testing.assert_close((codec.decode(found).transpose(1, 2) + 1) / 2, pixels, rtol=1e-3, atol=1e-3)


def test_prompt_embeddings_equal_wan_pipeline(base):
    text = TextEncoder.from_pretrained(base, 16)
    prompts = [PROMPT, "  a  &amp;amp; b ", "long " * 40]
    pipeline = WanPipeline.from_pretrained(base)
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(
            prompts, do_classifier_free_guidance=False, max_sequence_length=16
        )
    torch.testing.assert_close(text.encode(prompts), expected, rtol=0, atol=1e-6)
    assert torch.equal(text.encode(prompts) == 0, expected == 0)


def test_diffusers_loads_the_tiny_folder_and_samples_from_it(base):
    pipeline = WanImageToVideoPipeline.from_pretrained(base)
    assert pipeline.config.expand_timesteps and pipeline.vae_scale_factor_spatial == 16
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        image=torch.rand(1, 3, 64, 96),
        prompt=PROMPT,
        height=64,
        width=96,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=16,
        output_type="np",
    ).frames
    assert frames.shape == (1, 5, 64, 96, 3) and np.isfinite(frames).all()


def test_linear_codec_shares_the_real_codecs_interface(base, vae):
    """Every call the pipelines make on AutoencoderKLWan works on the linear codec, with the same shapes."""
    linear = load_codec(base).vae
    video = torch.zeros(1, 3, 9, 64, 96)
    raw = [codec.encode(video).latent_dist.mode() for codec in (linear, vae)]
    assert raw[0].shape == raw[1].shape == (1, 48, 3, 4, 6)
    decoded = [
        codec.decode(latents, return_dict=False)[0] for codec, latents in zip((linear, vae), raw, strict=True)
    ]
    assert decoded[0].shape == decoded[1].shape == video.shape
