"""The encoder contract and the content keys: published digests, published shapes, and what each key depends on."""

import pytest
import torch

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.preencode.contract import (
    EncoderContract,
    TensorSpec,
    latents_key,
    prompt_key,
    wan_contract,
)
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, NonFiniteError


def test_the_contract_of_another_family_can_be_stated():
    """Tensors and bytes of spec ltx25 6.1."""
    shapes = {
        "video_latent": ([128, 20, 16, 24], "bfloat16"),
        "first_frame_latent": ([128, 1, 16, 24], "bfloat16"),
        "video_prompt_embeds": ([1024, 4096], "bfloat16"),
        "prompt_attention_mask": ([1024], "int64"),
        "relative_w2c": ([20, 4, 4], "float32"),
        "camera_K": ([20, 3, 3], "float32"),
        "source_indices": ([153], "int64"),
        "camera_source_indices": ([20], "int64"),
    }
    contract = EncoderContract(
        "ltx25_video",
        "solarwm_ltx25_video_153f_h512_w768_v1",
        153,
        20,
        512,
        768,
        "relative_w2c+normalized_K",
        tuple(TensorSpec(name, tuple(shape), dtype) for name, (shape, dtype) in shapes.items()),
        {},
    )
    assert contract.values()["schema"] == "solarwm.encoder.v1"
    assert sum(spec.bytes for spec in contract.tensors) == 10_464_568
    assert EncoderContract.from_values(contract.values(), "x") == contract


def wan(family="wan22_ti2v_5b", architecture="wan22-ti2v-5b", **changes):
    fields = {"pixel_frames": 153, "height": 480, "width": 864, "dtype": "bfloat16", "text_length": 512}
    return wan_contract(family, load_architecture(architecture), extras={}, **fields | changes)


def shapes_of(contract):
    return {spec.name: (spec.shape, spec.dtype) for spec in contract.tensors}


def test_the_5b_contract_has_the_published_tensors():
    contract = wan()
    assert shapes_of(contract) == {
        "latents": ((39, 48, 30, 54), "bfloat16"),
        "prompt_embeds": ((512, 4096), "bfloat16"),
        "camera_viewmats": ((39 * 405, 4, 4), "float32"),
        "camera_K": ((39 * 405, 3, 3), "float32"),
    }
    assert contract.format_version == "solarwm.wan22-ti2v-5b.online.v1"
    assert contract.camera_convention == "first-frame-relative-w2c-fp32"
    assert [spec.name for spec in contract.stored] == ["latents", "prompt_embeds"]
    assert contract.sample_bytes == 2 * (39 * 48 * 30 * 54 + 512 * 4096)
    assert shapes_of(wan(pixel_frames=81))["latents"][0] == (21, 48, 30, 54)
    assert shapes_of(wan(height=704, width=1280))["latents"][0] == (39, 48, 44, 80)


def test_the_a14b_contract_adds_the_image_condition():
    contract = wan("wan22_i2v_a14b", "wan22-i2v-a14b", width=832)
    assert shapes_of(contract) == {
        "latents": ((39, 16, 60, 104), "bfloat16"),
        "prompt_embeds": ((512, 4096), "bfloat16"),
        "i2v_y": ((39, 20, 60, 104), "bfloat16"),
        "camera_viewmats": ((39 * 1560, 4, 4), "float32"),
        "camera_K": ((39 * 1560, 3, 3), "float32"),
    }
    assert contract.format_version == "solarwm.wan22-i2v-a14b.online.v1"


def test_a_contract_survives_its_file_and_every_field_moves_its_digest():
    contract = wan()
    assert EncoderContract.from_values(contract.values(), "x").digest == contract.digest
    others = [
        wan(pixel_frames=81),
        wan(dtype="float32"),
        wan(text_length=256),
        wan(height=704, width=1280),
        wan_contract(
            "wan22_ti2v_5b",
            load_architecture("wan22-ti2v-5b"),
            pixel_frames=153,
            height=480,
            width=864,
            dtype="bfloat16",
            text_length=512,
            extras={"codec": "another"},
        ),
    ]
    assert len({contract.digest, *(other.digest for other in others)}) == 6


@pytest.mark.parametrize("values", [None, [], {}, {"schema": "other"}, {**wan().values(), "more": 1}])
def test_what_is_no_contract_is_refused(values):
    with pytest.raises(ArtifactError, match="here: not an encoder contract"):
        EncoderContract.from_values(values, "here")


def tiny():
    return EncoderContract(
        "f",
        "v",
        5,
        2,
        32,
        32,
        "c",
        (TensorSpec("latents", (2, None), "float32"), TensorSpec("camera_K", (1,), "float32")),
    )


def test_tensors_are_compared_with_the_contract():
    tiny().check({"latents": torch.zeros(2, 7)}, "sample 'a'")
    cases = [
        ({}, ConfigError, "the contract names latents"),
        ({"latents": torch.zeros(2, 7), "more": torch.zeros(1)}, ConfigError, r"\(more differ\)"),
        (
            {"latents": torch.zeros(3, 7)},
            ConfigError,
            r"latents is float32 \[3, 7\], expected float32 \[2, None\]",
        ),
        ({"latents": torch.zeros(2, 7).bfloat16()}, ConfigError, "latents is bfloat16"),
        ({"latents": torch.full((2, 7), float("nan"))}, NonFiniteError, "latents holds NaN or infinite"),
    ]
    for tensors, error, message in cases:
        with pytest.raises(error, match=f"sample 'a': .*{message}"):
            tiny().check(tensors, "sample 'a'")


LATENTS = {
    "video_sha256": "0" * 64,
    "source_frame_indices": (0, 1, 2),
    "height": 32,
    "width": 48,
    "codec": "c",
    "dtype": "float32",
    "latent_schema": "s",
}
PROMPT = {"text": "a room", "encoder": "e", "text_length": 16, "dtype": "float32"}


@pytest.mark.parametrize(
    "change",
    [
        {"video_sha256": "1" * 64},
        {"source_frame_indices": (0, 2, 4)},
        {"height": 48},
        {"width": 32},
        {"codec": "d"},
        {"dtype": "bfloat16"},
        {"latent_schema": "t"},
    ],
)
def test_everything_that_decides_latents_moves_their_key(change):
    assert latents_key(**LATENTS) != latents_key(**LATENTS | change)


@pytest.mark.parametrize(
    "change", [{"text": "a hall"}, {"encoder": "f"}, {"text_length": 32}, {"dtype": "bfloat16"}]
)
def test_everything_that_decides_prompts_moves_their_key(change):
    assert prompt_key(**PROMPT) != prompt_key(**PROMPT | change)


def test_keys_of_this_version_never_change():
    """A key that moves without a new ENCODER_VERSION would make every stored generation useless for reuse."""
    assert latents_key(**LATENTS) == "d12c24ae3ea539b3b6862ca6fbe5627e0eeeb907de5f573b42a9de9427f0b3c1"
    assert prompt_key(**PROMPT) == "ae26721ef8480ffd4a3fc8fa7d469bc4cf6ac3357028686e452babe4bf95f98c"
