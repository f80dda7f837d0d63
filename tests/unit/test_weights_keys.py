"""Key maps against diffusers' classes and its own converter, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_wan_transformer_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from hypothesis import given
from hypothesis import strategies as st
from weights_cases import LAYERS, official_of, official_vae_names

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.weights import inventory, keys

NAMES = official_of(LAYERS, delta=True)


def test_every_official_name_maps_to_its_diffusers_name_and_back():
    assert {key: keys.translate(key, "diffusers") for key in NAMES} == NAMES
    assert {name: keys.translate(name, "official") for name in NAMES.values()} == {
        v: k for k, v in NAMES.items()
    }


def test_the_map_agrees_with_diffusers_own_converter():
    plain = official_of(LAYERS)
    assert convert_wan_transformer_to_diffusers({key: key for key in plain}) == {
        v: k for k, v in plain.items()
    }


def test_norm_names_are_swapped_in_both_directions():
    assert keys.translate("blocks.3.norm3.weight", "diffusers") == "blocks.3.norm2.weight"
    assert keys.translate("blocks.3.norm2.weight", "diffusers") == "blocks.3.norm3.weight"
    assert keys.translate("blocks.3.norm2.bias", "official") == "blocks.3.norm3.bias"


@given(st.sampled_from(sorted(NAMES)), st.integers(0, 99))
def test_translating_twice_is_the_identity(key, block):
    key = key.replace("blocks.0.", f"blocks.{block}.")
    assert keys.translate(keys.translate(key, "diffusers"), "official") == key


@pytest.mark.parametrize(
    "key", ["blocks.00.modulation", "blocks.1.self_attn.q", "head.head.scale", "blocks.x.norm3.bias", ""]
)
def test_names_that_are_nearly_right_are_unknown(key):
    assert keys.translate(key, "diffusers") is None


@pytest.mark.parametrize("name, tensors, parameters",
                         [("wan22-ti2v-5b", 825, 4_999_787_712), ("wan22-i2v-a14b", 1095, 14_288_901_184), ("wan22-tiny", 177, 4_000_512), ("wan22-tiny-i2v", 177, 3_966_592)])  # fmt: skip
def test_expected_shapes_are_those_of_diffusers_class(name, tensors, parameters):
    arguments = load_architecture(name)["transformer"]
    shapes = inventory.transformer_shapes(arguments)
    with torch.device("meta"):
        model = WanTransformer3DModel(**arguments)
    assert shapes == {key: tuple(value.shape) for key, value in model.state_dict().items()}
    infos = {key: inventory.TensorInfo("F32", shape) for key, shape in shapes.items()}
    counts = inventory.summary(infos)
    assert (counts["tensors"], counts["parameters"]) == (tensors, parameters)
    assert inventory.match_architecture(infos) == (name, "")


def test_anyflow_adds_exactly_four_tensors():
    arguments = load_architecture("wan22-tiny")["transformer"]
    plain, more = (inventory.transformer_shapes(arguments, anyflow) for anyflow in (False, True))
    assert set(more) - set(plain) == set(keys.DELTA) and len(keys.DELTA) == 4
    assert not inventory.has_delta(plain) and inventory.has_delta(more)


def test_a_uniform_prefix_is_stripped_and_a_mixture_refused():
    prefixed = [f"model.{key}" for key in NAMES]
    assert keys.transformer_names(prefixed, "diffusers", "x") == {v: f"model.{k}" for k, v in NAMES.items()}
    with pytest.raises(
        ArtifactError, match=r"x: 2 of 3 keys start with 'model\.' \(such as model\.a\).*such as c\)"
    ):
        keys.strip_prefix(["model.a", "model.b", "c"], "x")


def test_names_of_the_wanted_style_pass_through_with_prefix_removed():
    assert keys.transformer_names([f"model.{k}" for k in NAMES], "official", "x") == {
        k: f"model.{k}" for k in NAMES
    }
    assert keys.transformer_names(NAMES.values(), "diffusers", "x") == {v: v for v in NAMES.values()}


@pytest.mark.parametrize("extra, reason", [
    ("blocks.0.cam_self_attn.q.weight", "camera branch"),
    ("blocks.0.self_attn.q.lora_A.weight", "an adapter"),
    ("blocks.0.cross_attn.k_img.weight", "image branch of Wan 2.1"),
    ("blocks.0.attn1.to_q.weight", "diffusers style among official ones"),
    ("blocks.0.self_attn.qq.weight", r"nearest blocks\.0\.self_attn\."),
])  # fmt: skip
def test_unexpected_keys_are_refused_with_the_reason(extra, reason):
    with pytest.raises(ArtifactError, match=f"x: 1 unexpected keys, first {extra}.*{reason}"):
        keys.transformer_names([*NAMES, extra], "diffusers", "x")


def test_other_networks_are_refused():
    with pytest.raises(ArtifactError, match="no Wan transformer: found keys such as a, b, expected"):
        keys.transformer_names(["a", "b"], "diffusers", "x")
    with pytest.raises(ArtifactError, match="no Wan VAE: found keys such as a, b"):
        keys.vae_names(["a", "b"], "x")
    with pytest.raises(ArtifactError, match="unexpected key a; expected Wan's UMT5"):
        keys.text_names(["a"], "x")


@pytest.mark.parametrize("nested", [True, False])
def test_vae_names_are_exactly_those_of_diffusers_class(nested):
    names = official_vae_names(nested)
    assert keys.vae_names(names, "x") == {v: k for k, v in names.items()}
    sizes = {"base_dim": 8, "decoder_base_dim": 12, "z_dim": 48, "is_residual": True, "in_channels": 12,
             "out_channels": 12, "patch_size": 2} if nested else {"base_dim": 8}  # fmt: skip
    with torch.device("meta"):
        model = AutoencoderKLWan(**sizes)
    assert set(names.values()) == set(model.state_dict())
    assert keys.vae_names(model.state_dict(), "x") == {name: name for name in model.state_dict()}


def test_flat_vae_agrees_with_diffusers_own_converter():
    names = official_vae_names(nested=False)
    assert convert_wan_vae_to_diffusers({key: key for key in names}) == {v: k for k, v in names.items()}
