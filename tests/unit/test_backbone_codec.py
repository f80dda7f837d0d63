"""Codecs: the stride law, causality, normalisation and refusals, for the linear codec and a small AutoencoderKLWan."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan

from solarwm_lib.backbones import tiny
from solarwm_lib.backbones.codec import Codec, LinearCausalCodec, from_blocks, load_codec, to_blocks
from solarwm_lib.runtime.errors import ArtifactError, NonFiniteError

ARCHITECTURE = {"spatial_stride": 16, "temporal_stride": 4, "latent_channels": 48}


@pytest.fixture(scope="module")
def linear():
    return Codec(tiny.fit_linear_codec(list(tiny.calibration_clips(0))[:6], ARCHITECTURE), "test")


@pytest.fixture(scope="module")
def wan_vae():
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, patch_size=2, in_channels=12, out_channels=12,
        is_residual=True, scale_factor_temporal=4, scale_factor_spatial=16,
        latents_mean=[0.1, -0.2, 0.0, 0.3], latents_std=[0.5, 2.0, 1.0, 1.5],
    )  # fmt: skip
    return Codec(vae, "test")


@pytest.fixture(params=["linear", "wan_vae"])
def codec(request):
    return request.getfixturevalue(request.param)


def video(frames=9, seed=0):
    return torch.rand(1, 3, frames, 32, 48, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_stride_law_both_ways(codec):
    for frames, latent_frames in ((1, 1), (5, 2), (9, 3)):
        latents = codec.encode(video(frames))
        assert latents.shape == (1, latent_frames, codec.vae.config.z_dim, 2, 3)
        pixels = codec.decode(latents)
        assert pixels.shape == (1, 3, frames, 32, 48) and pixels.abs().max() <= 1


def test_encoding_is_causal_and_latent_0_is_frame_0_alone(codec):
    whole = codec.encode(video(9))
    torch.testing.assert_close(codec.encode(video(9)[:, :, :1]), whole[:, :1], rtol=1e-4, atol=1e-5)
    changed = video(9)
    changed[:, :, 5:] = 0
    torch.testing.assert_close(codec.encode(changed)[:, :2], whole[:, :2], rtol=1e-4, atol=1e-5)


def test_encoding_is_deterministic_and_batch_independent(codec):
    both = codec.encode(torch.cat([video(5, 0), video(5, 1)]))
    torch.testing.assert_close(both[1:], codec.encode(video(5, 1)), rtol=1e-4, atol=1e-5)


def test_normalisation_uses_the_config(wan_vae):
    raw = wan_vae.vae.encode(video(5)).latent_dist.mode().transpose(1, 2)
    mean, std = (
        torch.tensor(wan_vae.vae.config[key]).view(1, 1, -1, 1, 1) for key in ("latents_mean", "latents_std")
    )
    torch.testing.assert_close(wan_vae.encode(video(5)), (raw - mean) / std, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 3, 4, 32, 48), (1, 3, 5, 30, 48), (1, 3, 5, 32, 40)])
def test_clips_that_do_not_fit_are_refused(linear, shape):
    with pytest.raises(ValueError, match=r"1 \+ 4k frames"):
        linear.encode(torch.zeros(shape))


def test_non_finite_pixels_are_an_error_that_names_the_row(linear):
    latents = linear.encode(torch.cat([video(5), video(5)]))
    latents[1, 0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"rows \[1\]"):
        linear.decode(latents)


def test_blocks_round_trip():
    clip = video(9)[:, :, 1:]
    assert torch.equal(from_blocks(to_blocks(clip, 4, 16), 4, 16), clip)


def test_codec_is_loaded_by_the_class_its_config_names(linear, wan_vae, tmp_path):
    for name, codec in (("linear", linear), ("wan", wan_vae)):
        codec.vae.save_pretrained(tmp_path / name / "vae")
        loaded = load_codec(tmp_path / name)
        assert type(loaded.vae) is type(codec.vae)
        assert torch.equal(loaded.encode(video(5)), codec.encode(video(5)))
    assert load_codec(tmp_path / "linear").identity != load_codec(tmp_path / "wan").identity


def test_missing_or_unknown_codecs_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"model\.base_path"):
        load_codec(tmp_path)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderTiny"}))
    with pytest.raises(ArtifactError, match="AutoencoderKLWan, LinearCausalCodec"):
        load_codec(tmp_path)


def test_a_codec_without_its_tensors_is_refused(tmp_path):
    from safetensors.torch import save_file

    LinearCausalCodec(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4).save_pretrained(
        tmp_path / "vae"
    )
    save_file({"first_mean": torch.zeros(768)}, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ArtifactError, match="missing"):
        load_codec(tmp_path)
