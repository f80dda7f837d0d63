"""The stages after the first: N steps and then M give the same bytes as N + M, from the checkpoints of the stage before."""

from __future__ import annotations

import json

import pytest
import torch
from stage_world import STAGE1_STEPS, digests, stage_world, train  # noqa: F401

from solarwm_lib import artifacts
from solarwm_lib.training import checkpoint, metrics

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
    assert not any(p.requires_grad for _, p in models.teacher.trainable())
    assert all(p.requires_grad for _, p in models.critic.trainable())
    assert learner.student.ema is not None and learner.critic.ema is None


def test_stage1_starts_from_the_average_and_copies_exactly_the_second_time(stage_world, tmp_path):  # noqa: F811
    from solarwm_lib.training import setup

    resolved = stage_world.resolve_stage("anyflow", tmp_path)
    run = setup.open_run(resolved, tmp_path)
    backbone = setup.build_backbone(resolved, torch.device("cpu"))
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


def _shapes(artifact, member):
    from safetensors import safe_open

    with safe_open(str(artifact.file(member)), framework="pt") as file:
        return {name: torch.empty(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


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
