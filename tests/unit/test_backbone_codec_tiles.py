"""Decoding tile by tile with one temporal cache equals one decode: the linear codec and both forms of AutoencoderKLWan."""

from functools import cache
from itertools import islice

import pytest
import torch
from diffusers import AutoencoderKLWan

from solarwm_lib.backbones import tiny
from solarwm_lib.backbones.codec import Codec
from solarwm_lib.runtime.errors import NonFiniteError

NORMALISATION = {"latents_mean": [0.1, -0.2, 0.0, 0.3], "latents_std": [0.5, 2.0, 1.0, 1.5]}


def wan(**changes):
    torch.manual_seed(0)
    settings = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, **NORMALISATION}
    return Codec(AutoencoderKLWan(**settings, **changes).double(), "test")


@cache
def linear():
    architecture = {"spatial_stride": 16, "temporal_stride": 4, "latent_channels": 48}
    return Codec(
        tiny.fit_linear_codec(list(islice(tiny.calibration_clips(0), 2)), architecture).double(), "test"
    )


@pytest.fixture(scope="module", params=["linear", "wan22", "wan21"])
def codec(request):
    if request.param == "linear":
        return linear()
    if request.param == "wan21":
        return wan()
    return wan(
        patch_size=2, in_channels=12, out_channels=12, is_residual=True, scale_factor_temporal=4, scale_factor_spatial=16
    )  # fmt: skip


def latents(codec, frames, batch=1):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, frames, codec.vae.config.z_dim, 2, 3, generator=generator).double()


@pytest.mark.parametrize("tile", [1, 2, 3, 7])
def test_tiles_join_to_one_decode(codec, tile):
    """In float64, equal to 1e-12: the convolutions only see their input in other portions."""
    whole = codec.decode(latents(codec, 7, batch=2))
    tiles = list(codec.decode_tiles(latents(codec, 7, batch=2), tile))
    sizes = [min(tile, 7 - start) for start in range(0, 7, tile)]
    assert [part.shape[2] for part in tiles] == [4 * size - 3 * (i == 0) for i, size in enumerate(sizes)]
    torch.testing.assert_close(torch.cat(tiles, dim=2), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 4, 8, 8), (5, 12, 4), (9, 12)])
def test_parts_join_to_one_encoding(codec, sizes):
    """In float64, equal to 1e-12, and back through a decoder that is given the same parts."""
    height = 2 * codec.spatial_stride
    generator = torch.Generator().manual_seed(2)
    video = torch.rand(1, 3, 21, height, height, generator=generator).double() * 2 - 1
    encode, decode = codec.encoder(), codec.decoder()
    parts = []
    for part in video.split(sizes, dim=2):
        parts.append(encode(part))
        codec.encode(video[:, :, :5])  # another clip meanwhile
    whole = codec.encode(video)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)
    frames = torch.cat([decode(part) for part in parts], dim=2)
    torch.testing.assert_close(frames, codec.decode(whole), rtol=0, atol=1e-12)


def test_tiles_of_the_released_size():
    """240 latents in tiles of 60 are 237 + 240 + 240 + 240 = 957 frames."""
    codec = linear()
    tiles = list(codec.decode_tiles(latents(codec, 240)))
    assert [part.shape[2] for part in tiles] == [237, 240, 240, 240]


def test_two_decodes_may_be_interleaved(codec):
    one, other = latents(codec, 4), latents(codec, 4).flip(1)
    first, second = codec.decode_tiles(one, 2), codec.decode_tiles(other, 2)
    parts = [(a, codec.decode(one), b) for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(
        torch.cat([a for a, _, _ in parts], dim=2), codec.decode(one), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(torch.cat([b for _, _, b in parts], dim=2), codec.decode(other), rtol=0, atol=1e-12)  # fmt: skip


def test_a_bad_tile_is_refused_after_the_good_ones(codec):
    bad = latents(codec, 6)
    bad[:, 5] = float("nan")
    tiles = codec.decode_tiles(bad, 2)
    assert torch.isfinite(next(tiles)).all() and torch.isfinite(next(tiles)).all()
    with pytest.raises(NonFiniteError, match="not finite"):
        next(tiles)
