"""What the stages start from: which checkpoints are refused, with both sides named, and the released negative prompts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from solarwm_lib import artifacts
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint, initial, prompts

# What a run starts from


ASSETS = SimpleNamespace(path="/base", digest="a" * 64)


def save(
    path,
    route="stage0p5:bidirectional:flow_matching",
    step=3,
    ema_updates=3,
    assets=ASSETS.digest,
    members=("live", "ema"),
    **model,
):
    family, parts = "wan22_ti2v_5b", [*route.split(":"), ""][:4]
    keys = ("stage", "causal_mode", "objective", "objective_variant")
    described = {
        "family": family,
        "architecture": "wan22-tiny",
        "camera_attention_mode": "fused_prope",
        "camera_translation_transform": "linear",
        "camera_intrinsics_mode": "wan_fixed",
        "timestep_shift": 3.0,
        **model,
    }
    config = {"model": described, "train": dict(zip(keys, parts, strict=True))}
    state = checkpoint.State(step, ema_updates, 0, 0.0, 1, run={"config": config})
    with artifacts.Transaction(path, checkpoint.SCHEMA, {"step": step, "assets": assets}) as transaction:
        for role in members:
            with transaction.open(checkpoint.WEIGHTS[role]) as stream:
                checkpoint.write_safetensors(stream, {"w": torch.zeros(2)})
        transaction.write_json(checkpoint.STATE, dataclasses.asdict(state))
    return transaction.artifact


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
            "timestep_shift": 3.0,
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
    initial.check(resolved_of("stage2", "roles"), found, ASSETS)
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
        ("student", {"route": ANYFLOW, "timestep_shift": 5.0},
         r"student\.path: .* was trained with model\.timestep_shift 5\.0, this run has 3\.0"),
        ("teacher", {"assets": "b" * 64},
         r"teacher\.path: .* was trained on base weights bbbbbbbbbbbbbbbb, model\.base_path /base holds aaaaaaaaaaaaaaaa"),
        ("student", {"route": ANYFLOW, "members": ("live",)},
         r"checkpoint\.initialization\.student\.weights: found ema, .* has live; name weights that are there"),
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
        initial.check(resolved_of("stage2", "roles"), found, ASSETS)


def test_stage1_starts_from_stage05_only(tmp_path):
    initial.check(resolved_of("stage1"), {"initial": save(tmp_path / "a")}, ASSETS)
    with pytest.raises(ArtifactError, match=r"checkpoint\.path: .*Stage1 starts from wan22_ti2v_5b:stage0p5"):
        initial.check(resolved_of("stage1"), {"initial": save(tmp_path / "b", ANYFLOW)}, ASSETS)


def validation(path, checkpoint_digest, ok):
    """A published pass of two slots, `ok` of them successful."""
    summary = {"status": "complete" if ok == 2 else "partial", "slots": {"total": 2, "ok": ok}}
    identity = {"checkpoint_digest": checkpoint_digest}
    with artifacts.Transaction(path, "solarwm.validation.v1", identity) as transaction:
        transaction.write_json("summary.json", summary)
    return path


def test_stage2_starts_from_a_completely_validated_student(tmp_path):
    student, other = save(tmp_path / "s", ANYFLOW), save(tmp_path / "o", ANYFLOW, step=4)
    whole = validation(tmp_path / "whole", student.digest, 2)
    initial.check_validated(student, [])
    initial.check_validated(student, [whole])
    with pytest.raises(ArtifactError, match=r"partial: is partial, 1 of 2 slots, and Stage2 starts from"):
        initial.check_validated(student, [whole, validation(tmp_path / "partial", student.digest, 1)])
    of_other = rf"validates checkpoint {other.digest[:16]}, expected one of .*{student.digest[:16]}"
    with pytest.raises(ArtifactError, match=of_other):
        initial.check_validated(student, [validation(tmp_path / "other", other.digest, 2)])
    with pytest.raises(ArtifactError, match="which this run has not"):
        initial.check_validated(None, [whole])
    (whole / "summary.json").write_bytes(b"{}")
    with pytest.raises(ArtifactError, match=r"summary\.json"):
        initial.check_validated(student, [whole])


# What guidance leads away from


def test_the_released_negative_prompts_have_28_and_19_terms():
    assert len(prompts.STAGE1.split("，")) == 28 and len(prompts.STAGE2.split("，")) == 19
    left_out = set(prompts.STAGE1.split("，")) - set(prompts.STAGE2.split("，"))
    assert left_out == {
        "多余的手指", "画得不好的手部", "画得不好的脸部", "畸形的", "毁容的", "手指融合", "三条腿", "背景人很多", "倒着走",
    }  # fmt: skip


def guidance(anyflow=None, forcing=None):
    train = SimpleNamespace(anyflow=anyflow, self_gradient_forcing=forcing)
    return SimpleNamespace(config=SimpleNamespace(train=train))


def test_each_stage_leads_away_from_its_own_prompt_and_from_none_without_guidance():
    def anyflow(scale, text=""):
        return guidance(anyflow=SimpleNamespace(guidance_scale=scale, negative_prompt=text))

    def forcing(real, fake, text=""):
        block = {"real_guidance_scale": real, "fake_guidance_scale": fake, "negative_prompt": text}
        return guidance(forcing=SimpleNamespace(**block))

    assert prompts.negative_prompt(anyflow(3.0)) == prompts.STAGE1
    assert prompts.negative_prompt(forcing(3.0, 0.0)) == prompts.STAGE2
    assert prompts.negative_prompt(forcing(0.0, 1.0)) == prompts.STAGE2
    assert [prompts.negative_prompt(x) for x in (anyflow(3.0, "a"), forcing(3.0, 0.0, "b"))] == ["a", "b"]
    assert [prompts.negative_prompt(x) for x in (anyflow(1.0), forcing(0.0, 0.0), guidance())] == [None] * 3


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
