"""The Wan backbone: full size by numbers, what it refuses, and that cameras matter."""

from pathlib import Path

import pytest
import torch
import yaml
from backbone_cases import ARCHITECTURE, backbone, i2v_backbone, inputs, model_section
from safetensors.torch import load_file, save_file

from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.runtime.errors import ArtifactError, ConfigError

MODELS = Path(__file__).parents[2] / "config" / "models"


def test_the_full_5b_model_has_the_released_size():
    architecture = yaml.safe_load((MODELS / "wan22-ti2v-5b.yaml").read_text())
    model = Wan22.from_config(architecture, model_section(), device="meta")
    parameters = dict(model.trainable())
    assert sum(p.numel() for p in parameters.values()) == 4_999_787_712
    assert len(parameters) == len(model.transformer.state_dict()) == 825
    assert model.geometry.tokens_per_frame(30, 54) == 405 and model.geometry.tokens_per_frame(44, 80) == 880


def test_cameras_change_the_velocity_and_each_sample_sees_its_own():
    model, case = backbone().eval(), inputs()
    with torch.no_grad():
        both = model.velocity(**case)
        assert both.shape == case["latents"].shape
        swapped = model.velocity(**(case | {"w2c": case["w2c"].flip(0)}))
        assert (both - swapped).abs().max() > 1e-3
        for row in range(2):
            alone = model.velocity(**{name: value[row : row + 1] for name, value in case.items()})
            torch.testing.assert_close(alone[0], both[row], rtol=1e-4, atol=1e-5)


def test_the_translation_transform_is_applied_once():
    case = inputs()
    transformed = case["w2c"].clone()
    norm = transformed[..., :3, 3].norm(dim=-1, keepdim=True)
    transformed[..., :3, 3] *= torch.where(norm > 0, torch.log1p(norm) / (4 * norm.clamp_min(1e-9)), 0.0)
    with torch.no_grad():
        expected = backbone("linear").velocity(**(case | {"w2c": transformed}))
        found = backbone("logd4").velocity(**case)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("missing", ["w2c", "intrinsics"])
def test_half_a_camera_is_refused(missing):
    with pytest.raises(ValueError, match="both or neither"):
        backbone().velocity(**(inputs() | {missing: None}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timesteps": torch.zeros(2)}, "one per latent frame"),
        ({"w2c": torch.eye(4).repeat(2, 2, 1, 1)}, "one camera per latent frame"),
        ({"latents": torch.zeros(2, 3, 8, 3, 6)}, "multiples of the patch"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        backbone().velocity(**(inputs() | change))


def test_the_full_a14b_expert_has_the_released_size_and_takes_an_image_condition():
    architecture = yaml.safe_load((MODELS / "wan22-i2v-a14b.yaml").read_text())
    model = Wan22.from_config(architecture, model_section(), device="meta")
    parameters = dict(model.trainable())
    assert sum(p.numel() for p in parameters.values()) == 14_288_901_184 and len(parameters) == 1095
    assert model.image_conditioned and not backbone().image_conditioned
    assert model.geometry.tokens_per_frame(60, 104) == 1560


@pytest.mark.parametrize("channels", [{"in_channels": 16}, {"in_channels": 20, "out_channels": 20}])
def test_channels_that_are_neither_form_are_refused(channels):
    other = ARCHITECTURE | {"transformer": ARCHITECTURE["transformer"] | channels}
    with pytest.raises(ConfigError, match=r"expected 8 in \(TI2V\) or 20 \(I2V.*8 out: choose another model"):
        Wan22.from_config(other, model_section(), device="meta")


def i2v_case():
    y = torch.randn(2, 3, 12, 4, 6, generator=torch.Generator().manual_seed(2))
    return inputs() | {"image_condition": y}


def test_the_network_takes_latents_mask_and_image_in_this_order():
    model, case, seen = i2v_backbone().eval(), i2v_case(), []
    model.transformer.patch_embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        found = model.velocity(**case)
        other = model.velocity(**(case | {"image_condition": case["image_condition"].flip(0)}))
    assert found.shape == case["latents"].shape and (found - other).abs().max() > 1e-3
    assert torch.equal(seen[0][:, :8].transpose(1, 2), case["latents"])
    assert torch.equal(seen[0][:, 8:].transpose(1, 2), case["image_condition"])


def test_an_image_condition_belongs_to_i2v_always_and_to_ti2v_never():
    case = i2v_case()
    with pytest.raises(ValueError, match=r"given to a TI2V model, whose image is a clean latent 0"):
        backbone().velocity(**case)
    with pytest.raises(
        ValueError, match=r"no image_condition given to an I2V model; expected \(2, 3, 12, 4, 6\)"
    ):
        i2v_backbone().velocity(**inputs())
    short = case | {"image_condition": case["image_condition"][:, :, 4:]}
    with pytest.raises(ValueError, match=r"image_condition \(2, 3, 8, 4, 6\) .* expected \(2, 3, 12, 4, 6\)"):
        i2v_backbone().velocity(**short)


def test_an_i2v_model_has_no_causal_form():
    model, case = i2v_backbone(), inputs()
    latents, times, text = case["latents"], case["timesteps"], case["prompt_embeds"]
    causal = backbone()
    state = causal.rollout_state(text, chunk=3, window=6)
    for call in (
        lambda m: m.teacher_forced_velocity(latents, latents, times, text, chunk=3, max_prior_clean_chunks=1),
        lambda m: m.window_velocity(latents, latents, times, times, text, chunk=3),
        lambda m: m.rollout_state(text, chunk=3, window=6),
        lambda m: m.chunk_velocity(state, latents, times),
    ):
        with pytest.raises(
            ValueError, match="I2V model sees all frames of a clip at once and has no causal form"
        ):
            call(model)
        call(causal)


@pytest.mark.parametrize(("transform", "mode"), [("log", "fused_prope"), ("linear", "parallel")])
def test_unknown_camera_modes_are_refused(transform, mode):
    with pytest.raises(ConfigError, match="expected"):
        Wan22.from_config(ARCHITECTURE, model_section(transform, mode))


@pytest.fixture()
def saved(tmp_path):
    backbone().transformer.save_pretrained(tmp_path / "transformer")
    return tmp_path


def edit_weights(base, edit):
    file = base / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_weights_survive_the_folder(saved):
    loaded = Wan22.from_pretrained(saved, ARCHITECTURE, model_section())
    expected = backbone().transformer.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.transformer.state_dict().items())
    assert loaded.transformer.state_dict().keys() == expected.keys()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("proj_out.weight"), "missing keys: proj_out.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unexpected keys: extra"),
    ],
)
def test_a_folder_with_other_tensors_is_refused(saved, edit, message):
    edit_weights(saved, edit)
    with pytest.raises(ArtifactError, match=message):
        Wan22.from_pretrained(saved, ARCHITECTURE, model_section())


def test_a_folder_of_another_architecture_is_refused(saved, tmp_path):
    other = ARCHITECTURE | {"transformer": ARCHITECTURE["transformer"] | {"num_layers": 3}}
    with pytest.raises(ArtifactError, match="num_layers is 2, the architecture says 3"):
        Wan22.from_pretrained(saved, other, model_section())
    with pytest.raises(ArtifactError, match=r"model\.base_path"):
        Wan22.from_pretrained(tmp_path / "nowhere", ARCHITECTURE, model_section())
