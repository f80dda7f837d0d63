"""The stages after the first: N steps and then M give the same bytes as N + M, from the checkpoints of the stage before."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from stage_world import STAGE0P5_STEPS, STAGE1_STEPS, digests, stage_world, train  # noqa: F401

from solarwm_lib import artifacts
from solarwm_lib.backbones.tiny import build_tiny_assets
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ConfigError, SolarError
from solarwm_lib.training import checkpoint, metrics
from solarwm_lib.weights.inspect import inspect

NUMBERS = ("step", "loss", "learning_rate", "gradient_norm", "batch_digest", "details")


def records(run_dir):
    return [{key: record[key] for key in NUMBERS} for record in metrics.read(run_dir / metrics.FILE)]


@pytest.mark.parametrize(
    "stage, steps",
    [
        ("flow_matching", (1, 3)),
        ("anyflow", (1, 3)),
        # Student updates come before the critic's in outer steps 3, 5 and 7; the average is made in the second of them.
        ("stage2", (2, 3, 4, 7)),
    ],
)
def test_n_plus_m_steps_equal_n_then_m_byte_for_byte(stage_world, tmp_path, stage, steps):  # noqa: F811
    whole = train(stage_world, stage, tmp_path / "whole", steps[-1])
    split = train(stage_world, stage, tmp_path / "split", *steps)
    assert digests(whole) == digests(split)
    assert records(tmp_path / "whole") == records(tmp_path / "split")


def test_stage2_saves_all_it_needs_and_counts_both_networks(stage_world, tmp_path):  # noqa: F811
    path = train(stage_world, "stage2", tmp_path / "run", 5)
    artifact = artifacts.read(path)
    assert {member.path for member in artifact.members} == set(checkpoint.STAGE2_INVENTORY)
    state = checkpoint.read_state(artifact)
    assert (state.completed_steps, state.ema_updates) == (5, 1)
    assert state.run["counters"] == {"student_updates": 2, "critic_updates": 5}
    assert state.stream_position == 7 * 2  # five critic and two student updates, two clips each
    roles = {"student": stage_world.stage1, "teacher": stage_world.stage0p5, "critic": stage_world.stage0p5}
    for role, source in roles.items():
        assert artifact.identity[role] == artifacts.read(source).digest
    parents = [parent.schema for parent in artifact.parents]
    assert parents.count(checkpoint.SCHEMA) == 2
    # The average was made at the second student update, of the student as it was then.
    live, average = (
        checkpoint.load_tensors(artifact.file(member), _shapes(artifact, member))
        for member in (checkpoint.MODEL, checkpoint.EMA)
    )
    assert all(torch.equal(live[name], average[name]) for name in live)
    assert not any("delta_embedder" in name for name in live)
    made = [record["details"] for record in metrics.read(path.parent / metrics.FILE)]
    assert [("student_loss" in d, d["student_updates"]) for d in made] == [
        (False, 0),
        (False, 0),
        (True, 1),
        (False, 1),
        (True, 2),
    ]
    report = inspect(path)
    assert report["roles"].keys() == {"live", "ema", "critic"} and not report["problems"]
    assert not any("full_resume" in load["how"] for load in report["loads"])  # which Stage2 refuses


def test_student_critic_and_teacher_start_from_their_roles(stage_world, tmp_path):  # noqa: F811
    from solarwm_lib.training import setup, stage2

    run = setup.open_run(stage_world.resolve_stage("stage2", tmp_path), tmp_path)
    models, learner = stage2.build(run, torch.device("cpu"), resumed=False)
    student = dict(models.student.trainable())
    stage1 = artifacts.read(stage_world.stage1)
    expected = checkpoint.load_tensors(stage1.file(checkpoint.EMA), _shapes(stage1, checkpoint.EMA))
    assert set(expected) - set(student) == {
        f"condition_embedder.delta_embedder.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    }
    assert all(torch.equal(student[name], expected[name]) for name in student)
    stage05 = artifacts.read(stage_world.stage0p5)
    score = checkpoint.load_tensors(stage05.file(checkpoint.MODEL), dict(student))
    for model in (models.teacher, models.critic):
        assert all(torch.equal(p, score[name]) for name, p in model.trainable())
    # The teacher is frozen, whole on every process, and nobody else's: no optimizer, average or save holds its tensors.
    assert not any(p.requires_grad for _, p in models.teacher.trainable())
    assert all(type(p) is torch.nn.Parameter for _, p in models.teacher.trainable())
    members = learner.tensors().members().values()
    held = {tensor.data_ptr() for tensors in members for tensor in tensors.values()}
    assert held.isdisjoint(p.data_ptr() for _, p in models.teacher.trainable())
    assert all(p.requires_grad for _, p in models.critic.trainable())
    assert learner.student.ema is not None and learner.critic.ema is None


def test_stage1_starts_from_the_average_and_copies_exactly_the_second_time(stage_world, tmp_path):  # noqa: F811
    from solarwm_lib.training import network, setup

    resolved = stage_world.resolve_stage("anyflow", tmp_path)
    run = setup.open_run(resolved, tmp_path)
    backbone = network.build_backbone(resolved, torch.device("cpu"))
    learner = setup.build_learner(resolved, backbone, run.inputs.initial)
    source = artifacts.read(stage_world.stage0p5)
    average = checkpoint.load_tensors(source.file(checkpoint.EMA), _shapes(source, checkpoint.EMA))
    for tensors in (learner.parameters, learner.ema.shadow):
        assert len(set(tensors) - set(average)) == 4
        for name, tensor in tensors.items():
            of = name.replace("delta_embedder", "time_embedder")
            assert torch.equal(tensor, average[of]), name
    assert (learner.completed_steps, learner.ema.updates) == (0, 0)


def test_a_stage2_state_whose_counters_do_not_fit_is_refused(stage_world, tmp_path):  # noqa: F811
    path = train(stage_world, "stage2", tmp_path / "run", 3)
    source = artifacts.read(path)
    other = tmp_path / "other"
    with artifacts.Transaction(other / path.name, checkpoint.SCHEMA, source.identity) as transaction:
        for member in checkpoint.STAGE2_INVENTORY[:-1]:
            transaction.write_bytes(member, source.file(member).read_bytes())
        values = json.loads(source.file(checkpoint.STATE).read_bytes())
        values["run"]["counters"]["student_updates"] = 0
        transaction.write_json(checkpoint.STATE, values)
    with pytest.raises(
        artifacts.ArtifactError, match=r"counters\.student_updates: found 0, wanted 1|student_updates"
    ):
        train(stage_world, "stage2", other, 4)


def test_a_stage2_save_without_its_critic_is_refused_by_name(stage_world, tmp_path):  # noqa: F811
    path = train(stage_world, "stage2", tmp_path / "run", 1)
    source, other = artifacts.read(path), tmp_path / "other"
    with artifacts.Transaction(other / path.name, checkpoint.SCHEMA, source.identity) as transaction:
        for member in checkpoint.INVENTORY:
            transaction.write_bytes(member, source.file(member).read_bytes())
    with pytest.raises(artifacts.ArtifactError, match=r"critic\.safetensors is missing"):
        train(stage_world, "stage2", other, 2)


def role(world, name, **changes):
    """Where a role of Stage2 starts from: the student from Stage1, the others from Stage0.5."""
    path, step = (world.stage1, STAGE1_STEPS) if name == "student" else (world.stage0p5, STAGE0P5_STEPS)
    return {"path": str(path), "source_step": step, "weights": "ema"} | changes


def roles(world, **changes):
    """`checkpoint` of a Stage2 run with changed roles; None leaves a role out."""
    found = {name: role(world, name) for name in ("student", "teacher", "critic")} | changes
    return {"mode": "roles", "initialization": {name: held for name, held in found.items() if held}}


def live_only(source, path):
    """A copy of a checkpoint without its average, as an import of live weights is."""
    held = artifacts.read(source)
    with artifacts.Transaction(path, checkpoint.SCHEMA, held.identity) as transaction:
        for member in (checkpoint.MODEL, checkpoint.STATE):
            transaction.write_bytes(member, held.file(member).read_bytes())
    return path


def stage1_as_teacher(world, tmp_path):
    wrong = role(world, "student")
    return {"checkpoint": roles(world, teacher=wrong, critic=wrong)}


def stage0p5_as_student(world, tmp_path):
    return {"checkpoint": roles(world, student=role(world, "teacher"))}


def live_critic(world, tmp_path):
    return {"checkpoint": roles(world, critic=role(world, "critic", weights="live"))}


def no_critic(world, tmp_path):
    return {"checkpoint": roles(world, critic=None)}


def student_without_average(world, tmp_path):
    path = live_only(world.stage1, tmp_path / world.stage1.name)
    return {"checkpoint": roles(world, student=role(world, "student", path=str(path)))}


def truncated_student(world, tmp_path):
    path = tmp_path / world.stage1.name
    shutil.copytree(world.stage1, path)
    with (path / checkpoint.EMA).open("r+b") as file:
        file.truncate(1000)
    return {"checkpoint": roles(world, student=role(world, "student", path=str(path)))}


def other_base_weights(world, tmp_path):
    build_tiny_assets(tmp_path / "assets", load_architecture("wan22-tiny"), seed=1)
    return {"model__base_path": str(tmp_path / "assets")}


def setting(**changes):
    return lambda world, tmp_path: changes


@pytest.mark.parametrize(
    "stage, changes, message",
    [
        ("stage2", stage1_as_teacher, "is of wan22_ti2v_5b:stage1:.*, the teacher of Stage2 starts from wan22_ti2v_5b:stage0p5"),
        ("stage2", stage0p5_as_student, "is of wan22_ti2v_5b:stage0p5:.*, the student of Stage2 starts from wan22_ti2v_5b:stage1"),
        ("stage2", live_critic, r"critic\.weights: found live, expected ema, as the teacher has"),
        ("stage2", no_critic, r"initialization\.critic: not set; Stage2 needs student, teacher and critic"),
        ("stage2", student_without_average, r"student\.weights: found ema, .* has live"),
        ("stage2", truncated_student, r"ema\.safetensors"),
        ("stage2", setting(model__camera_translation_transform="logd4"),
         r"camera_translation_transform linear, this run has logd4"),
        ("stage2", setting(model__timestep_shift=5.0), r"timestep_shift 3\.0, this run has 5\.0"),
        ("stage2", setting(model__causal={"chunk_latent_frames": 2, "local_attention_latent_frames": 4}),
         r"chunk_latent_frames 3, this run has 2"),
        ("anyflow", setting(model__camera_translation_transform="logd4"), "linear, this run has logd4"),
        ("anyflow", other_base_weights, "was trained on base weights .*, model.base_path .* holds"),
        ("stage2", other_base_weights, "was trained on base weights .*, model.base_path .* holds"),
    ],
)  # fmt: skip
def test_what_cannot_start_a_run_is_refused_before_a_model_exists(
    stage_world, tmp_path, monkeypatch, stage, changes, message  # noqa: F811
):  # fmt: skip
    built = []
    monkeypatch.setattr(Wan22, "__init__", lambda *words, **named: built.append(words))
    run_dir = tmp_path / "run"
    with pytest.raises(SolarError, match=message):
        train(stage_world, stage, run_dir, 1, **changes(stage_world, tmp_path))
    assert not built and list(run_dir.iterdir()) == []


def _shapes(artifact, member):
    from safetensors import safe_open

    with safe_open(str(artifact.file(member)), framework="pt") as file:
        return {name: torch.empty(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def test_compiled_attention_is_refused_where_it_has_no_gradients(stage_world, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match=r"attention_executor: found flex, .* CUDA only, and this is cpu"):
        train(stage_world, "anyflow", tmp_path / "run", 1, train__attention_executor="flex")


def test_preflight_of_stage2_goes_on_until_the_student_has_moved(stage_world, tmp_path):  # noqa: F811
    from solarwm_lib.training.preflight import preflight

    passes = [{"name": "ema", "weights": "ema", "num_inference_steps": 2}]
    resolved = stage_world.resolve_stage("stage2", tmp_path / "run", validation__passes=passes)
    report = json.loads(preflight(resolved, tmp_path / "run" / "preflight").file("report.json").read_bytes())
    assert report["measured"]["steps"] == 3 and report["measured"]["checkpoint_reloaded"] == "bit-equal"
    # The average is made at the second student update: there is nothing of it to sample yet.
    assert report["measured"]["validation"] is None


def test_a_negative_embedding_that_is_not_there_is_refused_before_anything_is_written(stage_world, tmp_path):  # noqa: F811
    with pytest.raises(artifacts.ArtifactError, match=r"conditioning/no\.pth: no such file; train\.anyflow"):
        train(
            stage_world,
            "anyflow",
            tmp_path / "run",
            1,
            train__anyflow={"negative_embedding": "conditioning/no.pth"},
        )
    assert list((tmp_path / "run").iterdir()) == []
