"""The losses of Stage1 and the cadence of Stage2 inside a step: what is set apart, in which order networks move.

Tolerances: float64 arithmetic in another order, 1e-12 relative; float32 gradients of a toy network, 1e-5.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from backbone_cases import backbone as small_backbone
from backbone_cases import inputs
from objective_cases import ToyBackbone, clips
from test_training_loop import Stream, _snapshot, _trainer

from solarwm_lib.objectives import anyflow
from solarwm_lib.objectives import self_gradient_forcing as sgf
from solarwm_lib.runtime.errors import NonFiniteError
from solarwm_lib.runtime.process import Heartbeat, StopRequest
from solarwm_lib.training import checkpoint, metrics, optim, sharding, stage1
from solarwm_lib.training.ema import Ema
from solarwm_lib.training.learner import Learner, Loss
from solarwm_lib.training.stage2 import Distillation, DistillationTrainer, StudentCadence
from solarwm_lib.training.topology import BatchPlan, Topology

# Stage1: what is relative to the mean


def errors_of(values, kinds):
    error = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    weight = torch.linspace(0.5, 1.5, len(values), dtype=torch.float64)
    return error, anyflow.Errors(error, weight, torch.tensor([kind == "d" for kind in kinds]))


@pytest.mark.parametrize("kinds", ["dd", "dm", "mm", "dmmd"])
@pytest.mark.parametrize("mean", [0.25, 3.0])
def test_the_two_parts_of_a_loss_are_the_loss_for_every_mean(kinds, mean):
    values = [0.3, 2.0, 0.7, 1.1][: len(kinds)]
    error, errors = errors_of(values, kinds)
    expected = anyflow.loss(errors, mean)
    (wanted,) = torch.autograd.grad(expected.loss, error, retain_graph=True)
    loss = stage1.split(errors, [[0.0, 0.0]] * len(kinds))
    parts = [(1.0, loss.loss), (mean, loss.relative.loss)]
    found = sum(
        factor * torch.autograd.grad(part, error, retain_graph=True)[0]
        for factor, part in parts
        if part.requires_grad
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    total = loss.loss + mean * loss.relative.loss
    torch.testing.assert_close(total, expected.loss, rtol=1e-12, atol=0)
    per_sample = loss.per_sample + mean * loss.relative.per_sample
    torch.testing.assert_close(per_sample, expected.per_sample, rtol=1e-12, atol=0)
    assert (loss.relative.total, loss.relative.count) == pytest.approx(anyflow.diffusion_sum(errors))
    # A part that no sample belongs to has no backward pass.
    assert loss.loss.requires_grad == ("d" in kinds) and loss.relative.loss.requires_grad == ("m" in kinds)


def relative_trainer(run_dir, micro, accumulation, poison=None):
    """A trainer whose samples with an odd index are relative to the mean error of the even ones."""
    trainer = _trainer(run_dir, Stream(poison=poison), micro=micro, accumulation=accumulation)
    weight, bias = trainer.learner.parameters["weight"], trainer.learner.parameters["bias"]

    def objective(batch):
        error = (
            (torch.nn.functional.linear(batch.latents, weight, bias) - 2 * batch.latents)
            .square()
            .flatten(1)
            .mean(1)
        )
        even = torch.tensor([index % 2 == 0 for index in batch.indices])
        errors = anyflow.Errors(error, torch.ones_like(error), even)
        return stage1.split(errors, [[float(i), 0.0] for i in batch.indices])

    trainer.objective = objective
    return trainer


@pytest.mark.parametrize("micro, accumulation", [(1, 4), (2, 2), (4, 1)])
def test_the_mean_is_that_of_the_whole_step_however_it_is_split(tmp_path, micro, accumulation):
    split = relative_trainer(tmp_path, micro, accumulation)
    whole = relative_trainer(tmp_path, 4, 1)
    for first in (0, 4, 8):
        batch = whole.batches.load(range(first, first + 4))
        learner = whole.learner
        predicted = torch.nn.functional.linear(batch.latents, *learner.parameters.values())
        error = (predicted - 2 * batch.latents).square().flatten(1).mean(1)
        even = torch.tensor([True, False, True, False])
        errors = anyflow.Errors(error, torch.ones_like(error), even)
        mean = anyflow.diffusion_mean([anyflow.diffusion_sum(errors)])
        expected = anyflow.loss(errors, mean)
        expected.loss.backward()
        gradients = list(learner.gradients().values())
        norm = sharding.global_norm(gradients)
        record, _ = split.step()
        assert record.loss == pytest.approx(expected.loss.item(), rel=1e-5)
        assert record.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
        assert record.details["diffusion_loss"] == pytest.approx(mean, rel=1e-6)
        learner.apply(gradients, norm)
        for name, value in split.learner.parameters.items():
            torch.testing.assert_close(value, learner.parameters[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("index", [6, 7])
def test_a_non_finite_relative_loss_changes_nothing_and_names_the_sample(tmp_path, index):
    trainer = relative_trainer(tmp_path, 2, 2, poison={index: float("nan")})
    trainer.step()
    before = _snapshot(trainer.learner)
    with pytest.raises(NonFiniteError, match=rf"step 2 on rank 0, samples clip-{index};"):
        trainer.step()
    assert all(torch.equal(before[n], t) for n, t in _snapshot(trainer.learner).items())
    dump = json.loads((tmp_path / "diagnostics" / "nonfinite-step-000002-rank-00000.json").read_text())
    assert [s["timestep"] for s in dump["samples"]] == [[4.0, 0.0], [5.0, 0.0], [6.0, 0.0], [7.0, 0.0]]


def forward_map_configuration(precision="float32", batch=4):
    causal = SimpleNamespace(chunk_latent_frames=3, max_prior_clean_chunks=5, sink_latent_frames=0)
    settings = SimpleNamespace(
        diffusion_ratio=0.5, consistency_ratio=0.25, epsilon=5.0, guidance_scale=3.0, gate=0.25
    )
    train = SimpleNamespace(
        precision=precision,
        num_train_timesteps=1000,
        global_batch_size=batch,
        anyflow=settings,
        image_condition_dropout=0.1,
    )
    config = SimpleNamespace(
        model=SimpleNamespace(causal=causal, timestep_shift=5.0),
        train=train,
        data=SimpleNamespace(seed=42),
    )
    return SimpleNamespace(config=config)


def batch_of(case, indices):
    return SimpleNamespace(
        latents=case["latents"],
        prompt_embeds=case["prompt_embeds"],
        w2c=case["w2c"],
        intrinsics=case["intrinsics"],
        indices=tuple(indices),
    )


def gradients_of(build, precision):
    network = small_backbone(anyflow=True)
    case = inputs(batch=4, frames=6)
    objective = build(forward_map_configuration(precision), network)
    loss = objective(batch_of(case, range(4)))
    loss.loss.backward(retain_graph=loss.relative is not None)
    if loss.relative is not None:
        loss.relative.loss.backward()
    return {name: p.grad for name, p in network.trainable()}


@pytest.mark.parametrize("kind", ["anyflow", "baseline"])
def test_bfloat16_reaches_every_parameter_with_the_gradient_of_float32(kind):
    """Passes without gradient come first, whose cast weights must not serve the pass with gradient."""
    device = torch.device("cpu")

    def build(resolved, network):
        if kind == "anyflow":
            return stage1.forward_map(
                resolved, network, device, torch.randn(1, 5, 12, generator=torch.manual_seed(3))
            )
        return stage1.flow_matching(resolved, network, device)

    exact, lower = gradients_of(build, "float32"), gradients_of(build, "bfloat16")
    for name, wanted in exact.items():
        found = lower[name]
        if wanted is None:  # the second time is not looked at by the baseline
            assert found is None or not found.any()
            continue
        assert found is not None, name
        if wanted.norm() > 1e-4:
            assert torch.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.9, name


def test_a_recomputed_forward_gives_the_same_gradients_for_both_parts():
    def build(resolved, network):
        return stage1.forward_map(resolved, network, torch.device("cpu"), torch.zeros(1, 5, 12))

    def recomputed(resolved, network):
        network.transformer.enable_gradient_checkpointing()
        return build(resolved, network)

    kept, again = gradients_of(build, "float32"), gradients_of(recomputed, "float32")
    for name, wanted in kept.items():
        torch.testing.assert_close(again[name], wanted, rtol=1e-6, atol=1e-8)


# Stage2: who moves when


@pytest.mark.parametrize("start, every", [(39, 1), (0, 1), (2, 3), (5, 2)])
def test_the_students_average_is_made_once_and_counted_as_the_objective_counts(start, every):
    cadence = StudentCadence(0.5, start, every)
    parameters = {"w": torch.nn.Parameter(torch.zeros(3))}
    ema, expected = Ema.of(parameters, cadence), torch.zeros(3)
    for n in range(1, 60):
        parameters["w"].data.fill_(float(n))
        moved = ema.update(parameters, n)
        assert moved == sgf.ema_is_due(n, start, every)
        if moved:
            made = ema.updates == 1
            expected = torch.full((3,), float(n)) if made else 0.5 * expected + 0.5 * n
        assert torch.allclose(ema.shadow["w"], expected)
        assert ema.updates == cadence.updates_after(n) == sgf.ema_updates_after(n, start, every)
    if (start, every) == (39, 1):
        assert ema.updates == 21


def toy_distillation(run_dir, stream=None, ratio=5, start=2):
    """A distillation of two small linear networks; `order` records (network, first sample) of every update."""
    order: list[tuple[str, int]] = []

    def learner(name, cadence):
        torch.manual_seed(len(name))
        model = torch.nn.Linear(3, 3)
        parameters = dict(model.named_parameters())
        optimizer = optim.adamw(
            parameters.values(), learning_rate=0.05, betas=(0.0, 0.999), eps=1e-8, weight_decay=0.0
        )
        rate = partial(optim.learning_rate, base=0.05, warmup_steps=0, total_steps=20, minimum_ratio=1.0)
        average = None if cadence is None else Ema.of(parameters, cadence)

        def objective(batch):
            order.append((name, batch.indices[0]))
            error = (model(batch.latents) - 2 * batch.latents).square().flatten(1).mean(1)
            return Loss(error.mean(), error.detach(), [0.0] * len(batch.indices), zeroed=name == "student")

        return Learner(parameters, optimizer, average, rate, 10.0), objective

    student, student_objective = learner("student", StudentCadence(0.9, start))
    critic, critic_objective = learner("critic", None)
    trainer = DistillationTrainer(
        Distillation(student, critic, ratio),
        critic_objective,
        stream or Stream(),
        BatchPlan(2, 2, 1, 1),
        Topology(),
        run_dir,
        Heartbeat(run_dir, 0),
        StopRequest(),
        student_objective=student_objective,
    )
    return trainer, order


def test_the_critic_moves_every_step_and_the_student_before_it_every_fifth(tmp_path):
    trainer, order = toy_distillation(tmp_path)
    records = [trainer.step()[0] for _ in range(12)]
    names = [name for name, _ in order]
    assert names == ["critic"] * 5 + ["student"] + ["critic"] * 5 + ["student"] + ["critic"] * 2
    # Every update has a global batch of its own, in the order of the stream.
    assert [first for _, first in order] == list(range(0, 28, 2))
    learner = trainer.learner
    assert learner.completed_steps == 12 and learner.counters() == learner.counters_after(12)
    assert learner.counters() == {"student_updates": 2, "critic_updates": 12}
    assert learner.ema_updates() == learner.ema_updates_after(12) == 1
    assert learner.batches_after(12) == 14
    assert [r.step for r in records] == list(range(1, 13))
    assert [r.details["student_updates"] for r in records] == [0] * 5 + [1] * 5 + [2] * 2
    assert [r.details.get("zeroed_elements") for r in records if "student_loss" in r.details] == [1.0, 1.0]


def test_released_cadence_ends_with_799_student_updates_and_761_of_the_average():
    learner = Distillation(
        *(SimpleNamespace(ema_updates_after=StudentCadence(0.99, 39).updates_after),) * 2, 5
    )
    assert learner.counters_after(4000) == {"student_updates": 799, "critic_updates": 4000}
    assert learner.batches_after(4000) == 4799
    assert [learner.ema_updates_after(g) for g in (195, 196, 200, 201, 4000)] == [0, 1, 1, 2, 761]


def test_every_tensor_of_both_networks_is_saved_and_a_resume_sets_both_counters(tmp_path):
    trainer, _ = toy_distillation(tmp_path, ratio=2)
    for _ in range(4):
        trainer.step()
    members = trainer.learner.tensors().members()
    assert tuple(members) == checkpoint.STAGE2_INVENTORY[:-1]
    assert [len(tensors) for tensors in members.values()] == [2, 2, 6, 2, 6]
    fresh, _ = toy_distillation(tmp_path, ratio=2)
    fresh.learner.resume(4, ema_updates=trainer.learner.ema_updates())
    assert (
        fresh.learner.counters() == trainer.learner.counters() == {"student_updates": 1, "critic_updates": 4}
    )
    assert fresh.learner.critic.completed_steps == 4
    for step, updates in ((2, 0), (3, 1), (6, 2), (7, 3), (9, 4)):
        fresh.learner.resume(step, ema_updates=0)
        assert fresh.learner.counters() == {"student_updates": updates, "critic_updates": step}


def test_a_failing_student_update_moves_neither_network(tmp_path):
    trainer, _ = toy_distillation(tmp_path, Stream(poison={5: float("nan")}), ratio=2)
    trainer.step()
    trainer.step()
    before = _snapshot(trainer.learner.student)
    critic = {n: p.detach().clone() for n, p in trainer.learner.critic.parameters.items()}
    with pytest.raises(NonFiniteError, match="samples clip-5"):
        trainer.step()
    assert trainer.learner.counters() == {"student_updates": 0, "critic_updates": 2}
    assert all(torch.equal(before[n], t) for n, t in _snapshot(trainer.learner.student).items())
    assert all(torch.equal(critic[n], p) for n, p in trainer.learner.critic.parameters.items())


def test_only_the_network_that_moves_gets_a_gradient():
    from solarwm_lib.training import stage2

    models = stage2.Models(ToyBackbone(1), ToyBackbone(2), ToyBackbone(3))
    models.teacher.requires_grad_(False)
    config = SimpleNamespace(
        model=SimpleNamespace(
            timestep_shift=5.0,
            causal=SimpleNamespace(
                chunk_latent_frames=3,
                local_attention_latent_frames=6,
                sink_latent_frames=0,
                max_prior_clean_chunks=1,
            ),
        ),
        train=SimpleNamespace(
            precision="float32",
            num_train_timesteps=1000,
            self_gradient_forcing=SimpleNamespace(
                denoising_timesteps=[1000, 750, 500, 250],
                score_min_timestep=20,
                score_max_timestep=980,
                real_guidance_scale=3.0,
                fake_guidance_scale=0.0,
            ),
        ),
        data=SimpleNamespace(seed=42),
    )
    latents, prompts_, w2c, intrinsics = clips(2, 9)
    case = {"latents": latents, "prompt_embeds": prompts_, "w2c": w2c, "intrinsics": intrinsics}
    student, critic = stage2.objectives(
        SimpleNamespace(config=config), models, torch.device("cpu"), torch.zeros(1, 5, 3, dtype=torch.float64)
    )
    loss = student(batch_of(case, [4, 5]))
    loss.loss.backward()
    assert models.student.context.grad.abs().sum() > 0 and loss.zeroed == 0
    assert models.critic.own.grad is None and models.teacher.own.grad is None
    models.student.zero_grad(set_to_none=True)
    critic(batch_of(case, [6, 7])).loss.backward()
    assert models.critic.own.grad.abs().sum() > 0 and models.student.own.grad is None
    # The anchor is all that is taken from the clip.
    other = dict(case, latents=torch.cat([latents[:, :1], torch.full_like(latents[:, 1:], 7.0)], dim=1))
    assert torch.equal(student(batch_of(other, [4, 5])).per_sample, loss.per_sample)


def test_details_are_written_with_the_record(tmp_path):
    log = metrics.MetricsLog(tmp_path, 0)
    record = metrics.StepRecord(
        1, 1.0, 1e-4, 0.5, 0.2, 0.01, 20.0, 1, 1.0, 1.0, details={"student_loss": 2.0}
    )
    log.append(record)
    log.close()
    assert metrics.read(tmp_path / metrics.FILE)[0]["details"] == {"student_loss": 2.0}
