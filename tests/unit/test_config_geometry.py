"""Frame laws, sizes and tokens against the tables of the specifications, and nearest legal values by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.config import geometry
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ConfigError

WAN = {1: 1, 5: 2, 33: 9, 81: 21, 153: 39, 237: 60, 957: 240, 969: 243}  # wan22.md 1.4
LTX = {9: 2, 153: 20, 953: 120}  # ltx25.md 2
H3 = {22: 7, 158: 47, 175: 52}  # minimax_h3.md 1.7
TABLES = {"wan22_ti2v_5b": WAN, "wan22_i2v_a14b": WAN, "ltx25_video": LTX, "minimax_h3": H3}
# Written out from the laws' text, not from the code: 4k+1, 8k+1, 17n+5 with n >= 1.
LEGAL = {
    "wan22_ti2v_5b": {f for f in range(1, 700) if f % 4 == 1},
    "wan22_i2v_a14b": {f for f in range(1, 700) if f % 4 == 1},
    "ltx25_video": {f for f in range(1, 700) if f % 8 == 1},
    "minimax_h3": {22 + 17 * n for n in range(40)},
}


@pytest.mark.parametrize("family", TABLES)
def test_frame_tables_of_the_specifications(family: str) -> None:
    for pixel, latent in TABLES[family].items():
        assert geometry.latent_frames(family, pixel) == latent
        assert geometry.pixel_frames(family, latent) == pixel


@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize("block", range(5))
def test_exactly_the_legal_counts_from_1_to_500_convert_and_all_others_name_both_neighbours(
    family: str, block: int
) -> None:
    legal = LEGAL[family]
    for found in range(block * 100 + 1, block * 100 + 101):
        if found in legal:
            assert geometry.nearest_pixel_frames(family, found) == (found,)
            assert geometry.pixel_frames(family, geometry.latent_frames(family, found)) == found
            continue
        below, above = max((f for f in legal if f < found), default=None), min(f for f in legal if f > found)
        expected = tuple(f for f in (below, above) if f is not None)
        assert geometry.nearest_pixel_frames(family, found) == expected
        with pytest.raises(ConfigError) as caught:
            geometry.latent_frames(family, found)
        assert f"found {found}" in str(caught.value) and " or ".join(map(str, expected)) in str(caught.value)


@given(st.integers(1, 600), st.integers(1, 7))
def test_nearest_counts_for_a_chunk_are_the_nearest(found: int, chunk: int) -> None:
    legal = [f for f in range(1, 700) if f % 4 == 1 and (1 + (f - 1) // 4) % chunk == 0]
    expected = (
        {found}
        if found in legal
        else {max((f for f in legal if f < found), default=0), min(f for f in legal if f > found)} - {0}
    )
    assert geometry.nearest_pixel_frames("wan22_ti2v_5b", found, chunk) == tuple(sorted(expected))


def test_wan_80_names_77_81_and_the_routes_own_counts() -> None:
    text = geometry.frames_message("wan22_ti2v_5b", 80, (81, 153))
    assert text == (
        "data.pixel_frames: found 80, expected 4k+1 for wan22_ti2v_5b; nearest: 77 or 81; the released route uses 81 or 153"
    )


def test_h3_rollouts_of_whole_chunks_decode_to_17_frames_each() -> None:
    assert geometry.pixel_frames("minimax_h3", 45) == 153
    assert geometry.pixel_frames("minimax_h3", 50) == 170
    for latent in (1, 2, 44, 46):
        with pytest.raises(ConfigError):
            geometry.pixel_frames("minimax_h3", latent)


def test_121_frames_do_not_divide_into_chunks_of_three() -> None:
    with pytest.raises(ConfigError) as caught:
        geometry.check_chunks("wan22_ti2v_5b", 121, 31, 3, (81,))
    assert "117 (30 latent frames) or 129 (33 latent frames)" in str(caught.value)
    geometry.check_chunks("wan22_ti2v_5b", 129, 33, 3, (81,))


@pytest.mark.parametrize(
    ("family", "architecture", "frames", "height", "width", "latents", "tokens_per_frame", "tokens"),
    [
        ("wan22_ti2v_5b", "wan22-ti2v-5b", 81, 480, 864, (21, 48, 30, 54), 405, 8505),
        ("wan22_ti2v_5b", "wan22-ti2v-5b", 153, 480, 864, (39, 48, 30, 54), 405, 15795),
        ("wan22_ti2v_5b", "wan22-ti2v-5b", 153, 704, 1280, (39, 48, 44, 80), 880, 34320),
        ("wan22_i2v_a14b", "wan22-i2v-a14b", 81, 480, 832, (21, 16, 60, 104), 1560, 32760),
        ("wan22_i2v_a14b", "wan22-i2v-a14b", 153, 480, 832, (39, 16, 60, 104), 1560, 60840),
        ("ltx25_video", "ltx25-22b", 153, 512, 768, (20, 128, 16, 24), 384, 7680),
        ("minimax_h3", "minimax-h3-33b", 158, 768, 1344, (47, 24, 48, 84), 1008, 47376),
    ],
)
def test_latent_shapes_and_tokens_of_the_released_profiles(
    family: str,
    architecture: str,
    frames: int,
    height: int,
    width: int,
    latents: tuple[int, ...],
    tokens_per_frame: int,
    tokens: int,
) -> None:
    found = geometry.geometry(family, load_architecture(architecture), frames, height, width)
    shape = (found.latent_frames, found.latent_channels, found.latent_height, found.latent_width)
    assert (shape, found.tokens_per_latent_frame, found.tokens) == (latents, tokens_per_frame, tokens)


@pytest.mark.parametrize(
    ("architecture", "height", "width", "message"),
    [
        ("wan22-ti2v-5b", 480, 850, "data.width: found 850, expected a multiple of 32; nearest: 832 or 864"),
        (
            "wan22-ti2v-5b",
            66,
            50,
            "data.height: found 66, expected a multiple of 32; nearest: 64 or 96; "
            "data.width: found 50, expected a multiple of 32; nearest: 32 or 64",
        ),
        (
            "wan22-i2v-a14b",
            488,
            832,
            "data.height: found 488, expected a multiple of 16; nearest: 480 or 496",
        ),
        ("minimax-h3-33b", 768, 20, "data.width: found 20, expected a multiple of 32; nearest: 32"),
    ],
)
def test_sizes_that_do_not_divide_name_the_nearest(
    architecture: str, height: int, width: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        geometry.check_size(load_architecture(architecture), height, width)
    assert str(caught.value) == message


def test_full_architectures_have_the_published_shapes() -> None:
    wan, a14b = (load_architecture(name)["transformer"] for name in ("wan22-ti2v-5b", "wan22-i2v-a14b"))
    assert wan["num_attention_heads"] * wan["attention_head_dim"] == 3072
    assert a14b["num_attention_heads"] * a14b["attention_head_dim"] == 5120
    assert (a14b["in_channels"], a14b["out_channels"]) == (36, 16)
    with pytest.raises(ConfigError, match="did you mean wan22-ti2v-5b"):
        load_architecture("wan22-ti2v5b")
