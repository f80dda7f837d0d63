"""What the stages start from: which checkpoints are refused, with both sides named, and the released negative prompts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint, initial, prompts

# What a run starts from


def save(path, route="stage0p5:bidirectional:flow_matching", step=3, ema_updates=3, **model):
    family, parts = "wan22_ti2v_5b", [*route.split(":"), ""][:4]
    keys = ("stage", "causal_mode", "objective", "objective_variant")
    described = {
        "family": family,
        "architecture": "wan22-tiny",
        "camera_attention_mode": "fused_prope",
        "camera_translation_transform": "linear",
        "camera_intrinsics_mode": "wan_fixed",
        **model,
    }
    config = {"model": described, "train": dict(zip(keys, parts, strict=True))}
    tensors = {"w": torch.zeros(2)}
    state = checkpoint.State(step, ema_updates, 0, 0.0, 1, run={"config": config})
    return checkpoint.save(path, checkpoint.Tensors(tensors, tensors, {}), state, {"step": step}, [])


def resolved_of(stage, mode="weights_only", weights="ema"):
    source = {"path": "/c", "source_step": 3}
    initialization = SimpleNamespace(
        **{name: SimpleNamespace(weights="ema", **source) for name in initial.ROLES}
    )
    values = {
        "model": {
            "family": "wan22_ti2v_5b",
            "architecture": "wan22-tiny",
            "camera_attention_mode": "fused_prope",
            "camera_translation_transform": "linear",
            "camera_intrinsics_mode": "wan_fixed",
        }
    }
    config = SimpleNamespace(
        model=SimpleNamespace(**values["model"]),
        train=SimpleNamespace(stage=stage),
        checkpoint=SimpleNamespace(mode=mode, weights=weights, initialization=initialization, **source),
    )
    return SimpleNamespace(config=config, values=values)


ANYFLOW = "stage1:teacher_forcing:anyflow_forward_map:v1_5"


def test_the_three_roles_are_accepted_from_the_routes_they_need(tmp_path):
    found = {
        "student": save(tmp_path / "s", ANYFLOW),
        "teacher": save(tmp_path / "t"),
        "critic": save(tmp_path / "c"),
    }
    initial.check(resolved_of("stage2", "roles"), found)
    assert initial.sources(resolved_of("stage1", "none").config) == {}


@pytest.mark.parametrize(
    "role, changes, message",
    [
        ("student", {"route": "stage0p5:bidirectional:flow_matching"},
         r"checkpoint\.initialization\.student\.path: .* is of wan22_ti2v_5b:stage0p5:bidirectional:flow_matching, "
         r"the student of Stage2 starts from wan22_ti2v_5b:stage1:teacher_forcing:anyflow_forward_map:v1_5"),
        ("student", {"route": "stage1:teacher_forcing:flow_matching"}, "the student of Stage2 starts from .*anyflow"),
        ("teacher", {"route": ANYFLOW}, "the teacher of Stage2 starts from .*stage0p5"),
        ("critic", {"camera_translation_transform": "logd4"},
         r"critic\.path: .* was trained with model\.camera_translation_transform logd4, this run has linear"),
        ("teacher", {"architecture": "wan22-ti2v-5b"}, "model.architecture wan22-ti2v-5b, this run has wan22-tiny"),
        ("teacher", {"step": 4}, r"holds step 4, but checkpoint\.initialization\.teacher\.source_step is 3"),
        ("student", {"route": ANYFLOW, "ema_updates": 0}, "the EMA was never updated up to step 3"),
    ],
)  # fmt: skip
def test_a_role_of_another_kind_is_refused_with_both_sides(tmp_path, role, changes, message):
    routes = {"student": {"route": ANYFLOW}, "teacher": {}, "critic": {}}
    found = {
        name: save(tmp_path / name, **(changes if name == role else kind)) for name, kind in routes.items()
    }
    with pytest.raises(ArtifactError, match=message):
        initial.check(resolved_of("stage2", "roles"), found)


def test_stage1_starts_from_stage05_only(tmp_path):
    initial.check(resolved_of("stage1"), {"initial": save(tmp_path / "a")})
    with pytest.raises(ArtifactError, match=r"checkpoint\.path: .*Stage1 starts from wan22_ti2v_5b:stage0p5"):
        initial.check(resolved_of("stage1"), {"initial": save(tmp_path / "b", ANYFLOW)})


# What guidance leads away from


def test_the_released_negative_prompts_have_28_and_19_terms():
    assert len(prompts.STAGE1.split("，")) == 28 and len(prompts.STAGE2.split("，")) == 19
    left_out = set(prompts.STAGE1.split("，")) - set(prompts.STAGE2.split("，"))
    assert left_out == {
        "多余的手指", "画得不好的手部", "画得不好的脸部", "畸形的", "毁容的", "手指融合", "三条腿", "背景人很多", "倒着走",
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4), (5, 4)])
def test_a_stored_embedding_is_padded_with_zeros_to_the_text_length(tmp_path, shape):
    values = torch.randn(shape)
    torch.save({prompts.EMBEDDING_KEY: values.bfloat16()}, tmp_path / "n.pth")
    found = prompts.read_embedding(tmp_path / "n.pth", 5, 4)
    rows = values.reshape(-1, 4).bfloat16().float()
    assert found.shape == (5, 4) and found.dtype == torch.float32
    assert torch.equal(found[: len(rows)], rows) and not found[len(rows) :].any()


@pytest.mark.parametrize(
    "held, message",
    [
        ({"other": torch.zeros(3, 4)}, r"holds \['other'\], expected a tensor negative_prompt_embeds"),
        ({prompts.EMBEDDING_KEY: torch.zeros(6, 4)}, r"is \[6, 4\], the model takes \[up to 5, 4\]"),
        ({prompts.EMBEDDING_KEY: torch.zeros(3, 8)}, r"is \[3, 8\], the model takes"),
        (torch.zeros(3), "holds Tensor"),
    ],
)
def test_a_stored_embedding_of_another_model_is_refused(tmp_path, held, message):
    torch.save(held, tmp_path / "n.pth")
    with pytest.raises(ArtifactError, match=message):
        prompts.read_embedding(tmp_path / "n.pth", 5, 4)


def test_code_in_a_stored_embedding_is_not_run(tmp_path):
    torch.save({prompts.EMBEDDING_KEY: SimpleNamespace(a=1)}, tmp_path / "n.pth")
    with pytest.raises(ArtifactError, match="cannot be read as tensors"):
        prompts.read_embedding(tmp_path / "n.pth", 5, 4)
