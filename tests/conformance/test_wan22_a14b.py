"""I2V-A14B against diffusers itself, on the same tiny weights: the network, its gradients, and WanImageToVideoPipeline.

The reference side uses none of our modules: diffusers' processors, rotary table, image condition, pipeline and autoencoder.
The pipeline runs the high-noise expert alone over the whole range, as SolarWM does: no second transformer, no boundary.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanRotaryPosEmbed

from solarwm_lib.backbones import tiny
from solarwm_lib.backbones.codec import Codec, load_codec
from solarwm_lib.backbones.image_condition import image_condition
from solarwm_lib.backbones.text import TextEncoder
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.inference import samplers

ARCHITECTURE = load_architecture("wan22-tiny-i2v")
MODEL = SimpleNamespace(camera_attention_mode="fused_prope", camera_translation_transform="linear")
SHIFT, STEPS = 3.0, 8
FRAMES, HEIGHT, WIDTH = 9, 32, 48
LATENT = (3, 16, 4, 6)
TOKENS = 6
PROMPT = "a room with a red wall"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The tiny pipeline folder with a head that is not zero, so that the network's output depends on all of it."""
    folder = tmp_path_factory.mktemp("a14b") / "base"
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
    """A small AutoencoderKLWan of the A14B's structure: plain pixels in, strides 4, 8, 8, 16 channels with its statistics."""
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1).eval()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picture():
    return torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(2))


class PinnedUniPC(UniPCMultistepScheduler):
    """diffusers' own scheduler on the pinned grid of spec wan22 6.1, written out here once more."""

    def set_timesteps(self, num_inference_steps, device=None, **kwargs):
        super().set_timesteps(num_inference_steps, device=device)
        base = np.linspace(1 - 1 / 1000, 0, num_inference_steps + 1)[:-1]
        sigmas = SHIFT * base / (1 + (SHIFT - 1) * base)
        self.timesteps = torch.from_numpy((1000 * sigmas).astype(np.int64))
        self.sigmas = torch.from_numpy(np.append(sigmas, 0.0)).float()


def reference(base):
    """diffusers' transformer on the saved weights; nothing of ours is installed in it."""
    transformer = WanTransformer3DModel.from_pretrained(base / "transformer").eval()
    assert isinstance(transformer.rope, WanRotaryPosEmbed)
    assert all(isinstance(block.attn1.processor, WanAttnProcessor) for block in transformer.blocks)
    return transformer


def reference_pipeline(base, vae):
    pipeline = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=PinnedUniPC(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT),
        transformer=reference(base),
    )
    assert pipeline.config.boundary_ratio is None and not pipeline.config.expand_timesteps
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(ours, embeds, noise, y):
    timesteps, sigmas = samplers.unipc_grid(STEPS, SHIFT)
    with torch.no_grad():
        return samplers.sample_unipc(
            lambda latents, t: ours.velocity(latents, t, embeds, image_condition=y), noise, timesteps, sigmas
        )


def test_camera_off_the_velocity_equals_diffusers_with_one_timestep_a_clip(base, ours, embeds):
    latents, y = normal(2, *LATENT), normal(2, 3, 20, 4, 6, seed=1)
    prompts, times = embeds.expand(2, -1, -1), torch.tensor([637.0, 88.0])
    with torch.no_grad():
        expected = reference(base)(
            torch.cat([latents, y], dim=2).transpose(1, 2), times, prompts, return_dict=False
        )[0].transpose(1, 2)
        found = ours.velocity(latents, times[:, None].expand(2, 3), prompts, image_condition=y)
    assert expected.shape == latents.shape and expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_camera_off_the_gradients_equal_diffusers(base, ours, embeds):
    latents, y, times = normal(1, *LATENT), normal(1, 3, 20, 4, 6, seed=1), torch.tensor([400.0])
    other = reference(base)
    inputs = torch.cat([latents, y], dim=2).transpose(1, 2)
    other(inputs, times, embeds, return_dict=False)[0].square().mean().backward()
    ours.zero_grad()
    ours.velocity(latents, times[:, None].expand(1, 3), embeds, image_condition=y).square().mean().backward()
    for (name, parameter), (theirs, wanted) in zip(ours.trainable(), other.named_parameters(), strict=True):
        assert name == theirs
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-4, atol=1e-7, msg=name)
    ours.zero_grad()


def test_the_image_condition_is_the_one_the_pipeline_prepares(base, vae):
    video = picture() * 2 - 1
    noise, expected = reference_pipeline(base, vae).prepare_latents(
        video,
        1,
        16,
        HEIGHT,
        WIDTH,
        FRAMES,
        torch.float32,
        torch.device("cpu"),
        latents=normal(1, 16, 3, 4, 6),
    )
    found = image_condition(Codec(vae, "reference"), video[:, :, None], FRAMES)
    assert noise.shape == (1, 16, 3, 4, 6) and found.shape == (1, 3, 20, 4, 6)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-5)
    assert found[:, 0, :4].eq(1).all() and not found[:, 1:, :4].any()


def test_sampling_and_decoding_equal_wan_image_to_video_pipeline(base, ours, embeds, vae):
    noise, codec = normal(1, *LATENT), Codec(vae, "reference")
    options = {
        "image": picture(),
        "prompt_embeds": embeds,
        "height": HEIGHT,
        "width": WIDTH,
        "num_frames": FRAMES,
        "num_inference_steps": STEPS,
        "guidance_scale": 1.0,
        "latents": noise.transpose(1, 2).contiguous(),
    }
    pipeline = reference_pipeline(base, vae)
    expected = pipeline(**options, output_type="latent").frames.transpose(1, 2)
    y = image_condition(codec, picture()[:, :, None] * 2 - 1, FRAMES)
    found = sample(ours, embeds, noise, y)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # The image reaches the result: without it, another clip.
    assert (sample(ours, embeds, noise, torch.zeros_like(y)) - expected).abs().max() > 1e-2

    pixels = pipeline(**options, output_type="pt").frames
    torch.testing.assert_close((codec.decode(found).transpose(1, 2) + 1) / 2, pixels, rtol=1e-3, atol=1e-3)


def test_generation_is_sampling_with_the_condition_of_the_whole_clip(base, ours, embeds):
    """What validation and inference call, against the parts above; latent 0 is generated, not imposed."""
    from solarwm_lib.inference import generate
    from solarwm_lib.inference.generate import Models, Request, Sampling

    codec, text = load_codec(base), TextEncoder.from_pretrained(base, ARCHITECTURE["text"]["text_length"])
    frame = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    w2c = np.tile(np.eye(4, dtype=np.float32), (3, 1, 1))
    w2c[:, 0, 3] = [0.0, 0.2, 0.4]
    intrinsics = np.array([[0.5, 0, 0.5], [0, 0.9, 0.5], [0, 0, 1]], np.float32)
    request = Request(0, PROMPT, frame, w2c, intrinsics, ("key", 1))
    sampling = Sampling("bidirectional", "unipc", STEPS, SHIFT, 3)
    models = Models(ours, codec, text, "tiny", torch.device("cpu"))
    found = generate.sample_latents(models, [request], sampling)

    image = generate.to_video(frame[None, None])
    y = image_condition(codec, image, FRAMES)
    noise = torch.from_numpy(generate.initial_noise(LATENT, ("key", 1)))[None]
    camera = (torch.from_numpy(w2c)[None], torch.from_numpy(intrinsics)[None])
    timesteps, sigmas = samplers.unipc_grid(STEPS, SHIFT)
    with torch.no_grad():
        expected = samplers.sample_unipc(
            lambda latents, t: ours.velocity(latents, t, embeds, *camera, image_condition=y),
            noise,
            timesteps,
            sigmas,
        )
    assert torch.equal(found, expected)
    assert not torch.equal(found[:, :1], codec.encode(image))


def test_diffusers_loads_the_tiny_folder_and_samples_from_it(base):
    pipeline = WanImageToVideoPipeline.from_pretrained(base)
    assert not pipeline.config.expand_timesteps and pipeline.config.boundary_ratio is None
    assert pipeline.transformer_2 is None and pipeline.vae_scale_factor_spatial == 8
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        image=picture(),
        prompt=PROMPT,
        height=HEIGHT,
        width=WIDTH,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=1.0,
        max_sequence_length=16,
        output_type="np",
    ).frames
    assert frames.shape == (1, 5, HEIGHT, WIDTH, 3) and np.isfinite(frames).all()
