"""The objectives on a tiny Wan transformer: replay equals rollout, gradients reach every parameter, mixed precision holds."""

import dataclasses

import pytest
import torch
from backbone_cases import backbone, double_precision, inputs, rigid

from solarwm_lib.objectives import anyflow, teacher_forcing
from solarwm_lib.objectives import self_gradient_forcing as sgf
from solarwm_lib.objectives.anyflow import Kind
from solarwm_lib.objectives.noise import schedule

TABLE = schedule(5.0)
WINDOW = {"chunk": 3, "max_prior_clean_chunks": 5}
RECIPE = sgf.Recipe(TABLE, sgf.denoising_timesteps([1000, 750, 500, 250], TABLE))


def case(frames, dtype=torch.float64, batch=2):
    given = rigid(inputs(batch, frames, dtype))
    return given["latents"], given["prompt_embeds"], given["w2c"], given["intrinsics"]


def rolled_out(frames, transform, with_cameras):
    """A rollout with another exit step per sample, and its replay, in float64."""
    latents, prompts, w2c, intrinsics = case(frames)
    conditions = sgf.Conditions(prompts, *((w2c, intrinsics) if with_cameras else ()))
    draws = sgf.draw(tuple(latents.shape[1:]), RECIPE, seed=1, global_sample_indices=[3, 5])
    draws = dataclasses.replace(draws, exit=torch.tensor([1, 3]))
    with double_precision():
        student = backbone(transform).double()
        record = sgf.rollout(student, latents[:, :1], conditions, draws, RECIPE)
        return record.context, sgf.replay(student, record, conditions, RECIPE).detach()


@pytest.mark.parametrize("transform", ["linear", "logd4"])
def test_replay_equals_the_rollout_until_the_window_moves(transform):
    context, again = rolled_out(21, transform, with_cameras=True)
    assert context.dtype == torch.float64 and context.std() > 0.1
    torch.testing.assert_close(again[:, :18], context[:, :18], rtol=0, atol=1e-10)
    # The window is 18: the last chunk's positions count from another frame, and cameras make positions absolute.
    assert (again[:, 18:] - context[:, 18:]).abs().max() > 1e-6


def test_without_cameras_replay_equals_the_rollout_one_chunk_longer():
    context, again = rolled_out(21, "linear", with_cameras=False)
    torch.testing.assert_close(again, context, rtol=0, atol=1e-10)


def test_student_and_critic_updates_reach_every_parameter_of_their_role_only():
    latents, prompts, w2c, intrinsics = case(9, torch.float32)
    conditions = sgf.Conditions(prompts, w2c, intrinsics)
    negative = torch.randn(1, *prompts.shape[1:])
    draws = sgf.draw(tuple(latents.shape[1:]), RECIPE, seed=1, global_sample_indices=[0, 1])
    student, teacher, critic = backbone(), backbone().requires_grad_(False), backbone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record = sgf.rollout(student, latents[:, :1], conditions, draws, RECIPE)
        generated = sgf.replay(student, record, conditions, RECIPE)
        out = sgf.student_loss(generated, teacher, critic, conditions, negative, draws, RECIPE)
    assert out.loss.loss.isfinite() and out.loss.loss.dtype == torch.float32
    out.loss.loss.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert student.transformer.blocks[0].attn1.to_k.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in critic.parameters())
    student.zero_grad(set_to_none=True)
    sample = sgf.critic_sample(student, record, conditions, RECIPE)
    sgf.critic_loss(sample, critic, conditions, draws, RECIPE).loss.backward()
    assert all(p.grad is not None for p in critic.parameters())
    assert all(p.grad is None for p in student.parameters())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_anyflow_reaches_every_parameter_and_both_times(precision):
    latents, prompts, w2c, intrinsics = case(6, torch.float32, batch=4)
    model = backbone(anyflow=True)
    draws = anyflow.draw(
        tuple(latents.shape[1:]), seed=1, global_sample_indices=range(4), global_batch_size=4, shift=5.0
    )
    assert draws.kind.tolist() == [Kind.DIFFUSION] * 2 + [Kind.CONSISTENCY, Kind.FLOW_MAP]
    negative = torch.randn(1, *prompts.shape[1:])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        errors = anyflow.errors(model, latents, prompts, negative, w2c, intrinsics, draws, TABLE, **WINDOW)
    out = anyflow.loss(errors, anyflow.diffusion_mean([anyflow.diffusion_sum(errors)]))
    assert out.loss.isfinite() and out.loss.dtype == torch.float32
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    second = model.transformer.condition_embedder.delta_embedder.linear_1.weight
    assert second.grad.abs().sum() > 0


def test_a_diffusion_sample_of_anyflow_is_teacher_forced_flow_matching():
    latents, prompts, w2c, intrinsics = case(6, batch=1)
    index = 400
    noise = torch.randn(latents.shape, dtype=torch.float64)
    t = torch.tensor([TABLE.timesteps[index]], dtype=torch.float32)
    draws = anyflow.Draws(t, t, torch.tensor([Kind.DIFFUSION]), noise)
    plain = teacher_forcing.Draws(torch.full((1, 6), index), noise, torch.tensor([False]))
    arguments = (prompts, None, w2c, intrinsics)
    with double_precision():
        forward_map, flow = backbone(anyflow=True).double(), backbone().double()
        errors = anyflow.errors(forward_map, latents, *arguments, draws, TABLE, guidance_scale=1.0, **WINDOW)
        one = teacher_forcing.loss(flow, latents, prompts, w2c, intrinsics, plain, TABLE, **WINDOW)
    # The second time MLP starts as a copy of the first, so r = t is the flow-matching model. sigma is the float32 timestep's.
    torch.testing.assert_close(anyflow.loss(errors, 2.0).loss, one.loss, rtol=1e-6, atol=0)
