"""The Wan encoder: stored tensors equal online training's bit for bit, and A14B's image condition follows its definition."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from preencode_cases import FRAMES, SIZE, pixels, resolved

from solarwm_lib.backbones import tiny
from solarwm_lib.backbones.codec import folder_digest, load_codec
from solarwm_lib.backbones.image_condition import image_mask, image_then_grey
from solarwm_lib.backbones.text import TextEncoder, clean_prompt, text_identity
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.inference.generate import to_video
from solarwm_lib.preencode.encode import WanEncoder, encoder_for
from solarwm_lib.runtime.errors import ArtifactError, ConfigError

CAPTION = "A room &amp;amp; a\n  hall"


@pytest.fixture(scope="module")
def a14b(tmp_path_factory):
    """A pipeline folder with a small random AutoencoderKLWan of 16 channels, and the architecture it belongs to."""
    base = tmp_path_factory.mktemp("a14b")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vae = AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1)
    vae.save_pretrained(base / "vae")
    architecture = load_architecture("wan22-i2v-a14b")
    architecture = architecture | {"transformer": architecture["transformer"] | {"text_dim": 64}}
    tokenizer = tiny.build_tokenizer(512)
    small = load_architecture("wan22-tiny")
    tiny.build_text_encoder(small, len(tokenizer), 0).save_pretrained(base / "text_encoder")
    tokenizer.save_pretrained(base / "tokenizer")
    return base, architecture


def encoder(a14b, dtype="float32", **changes):
    base, architecture = a14b
    fields = {
        "pixel_frames": FRAMES,
        "height": SIZE,
        "width": SIZE,
        "dtype": dtype,
        "text_length": 16,
        "latent_schema": "s",
    }
    return WanEncoder(base, "wan22_i2v_a14b", architecture, **fields | changes)


def test_a14b_condition_is_four_mask_channels_and_the_latents_of_the_first_frame_on_grey(a14b):
    frames = pixels(1)[:FRAMES]
    tensors = encoder(a14b).encode_pixels(frames)
    condition = np.full_like(frames, 0).astype(np.float32)  # pixel 127.5 is zero in [-1, 1]
    condition[0] = frames[0].astype(np.float32) / 127.5 - 1
    vae = AutoencoderKLWan.from_pretrained(a14b[0] / "vae").eval()
    with torch.no_grad():
        mean = vae.encode(torch.from_numpy(condition).permute(3, 0, 1, 2)[None]).latent_dist.mean
    shift = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    scale = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    expected = ((mean - shift) / scale)[0].transpose(0, 1)
    y = tensors["i2v_y"]
    assert y.shape == (2, 20, SIZE // 8, SIZE // 8)
    assert y[0, :4].eq(1).all() and y[1:, :4].eq(0).all()
    torch.testing.assert_close(y[:, 4:], expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(y[:, 4:], tensors["latents"])
    encoder(a14b).contract.check(tensors | encoder(a14b).encode_prompt(CAPTION), "a14b")


def test_the_mask_folds_the_pixel_frame_indicator_by_four():
    frames, latents = 13, torch.zeros(2, 4, 16, 2, 3)
    indicator = [1.0] + [0.0] * (frames - 1)
    repeated = torch.tensor([indicator[0]] * 4 + indicator[1:]).view(4, 4)
    assert torch.equal(image_mask(latents), repeated[None, :, :, None, None].expand(2, 4, 4, 2, 3))
    image = torch.rand(1, 3, 1, 2, 2)
    video = image_then_grey(image, frames)
    assert video.shape[2] == frames and torch.equal(video[:, :, :1], image) and not video[:, :, 1:].any()


def test_float32_tensors_are_those_of_the_codec_and_text_encoder_and_bfloat16_their_rounding(a14b):
    base = a14b[0]
    frames = pixels(2)[:FRAMES]
    latents = load_codec(base).encode(to_video(frames[None]))[0]
    prompt = TextEncoder.from_pretrained(base, 16).encode([CAPTION])[0]
    full, half = encoder(a14b), encoder(a14b, "bfloat16")
    assert torch.equal(full.encode_pixels(frames)["latents"], latents)
    assert torch.equal(full.encode_prompt(CAPTION)["prompt_embeds"], prompt)
    assert torch.equal(half.encode_pixels(frames)["latents"], latents.bfloat16())
    assert torch.equal(half.encode_prompt(CAPTION)["prompt_embeds"], prompt.bfloat16())
    assert full.clean(CAPTION) == clean_prompt(CAPTION) == "A room & a hall"


def test_identities_follow_content_and_name_what_is_missing(a14b, tmp_path):
    base = a14b[0]
    found = encoder(a14b)
    assert found.latents_identity == folder_digest(base / "vae") == load_codec(base).identity
    assert found.prompt_identity == text_identity(base)
    assert found.contract.extras["codec"] == found.latents_identity
    with pytest.raises(
        ArtifactError, match=r"no vae at .*set model.base_path to a diffusers pipeline folder"
    ):
        encoder((tmp_path, a14b[1]))
    copy = tmp_path / "copy"
    for name in ("vae", "text_encoder", "tokenizer"):
        (copy / name).mkdir(parents=True)
        for file in (base / name).iterdir():
            (copy / name / file.name).write_bytes(file.read_bytes())
    (copy / "vae" / "README.md").write_text("not part of the model")
    assert encoder((copy, a14b[1])).contract == found.contract
    config = copy / "tokenizer" / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    changed = encoder((copy, a14b[1]))
    assert changed.latents_identity == found.latents_identity
    assert changed.prompt_identity != found.prompt_identity


def test_families_without_an_encoder_are_refused(tmp_path, tiny_world):
    found = resolved(
        tmp_path,
        tiny_world.dataset,
        tiny_world.assets,
        model__family="ltx25_video",
        model__architecture="ltx25-22b",
        model__text_length=1024,
        data__pixel_frames=153,
        data__height=512,
        data__width=768,
        preencode__latent_schema="solarwm_ltx25_video_preencoded_v1",
    )
    with pytest.raises(
        ConfigError, match="found ltx25_video, whose clips this version cannot preencode; known: wan22"
    ):
        encoder_for(found)
