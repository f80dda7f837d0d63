"""Stage2 (spec wan22 5): rollout, replay, both losses and the cadence, against references in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import CHANNELS, SIZE, ToyBackbone, clips, random

from solarwm_lib.objectives import self_gradient_forcing as sgf
from solarwm_lib.objectives.noise import schedule
from solarwm_lib.runtime.errors import ConfigError

TABLE = schedule(5.0)
RECIPE = sgf.Recipe(TABLE, sgf.denoising_timesteps([1000, 750, 500, 250], TABLE))
FRAMES = 21


def draw(indices, frames=FRAMES, recipe=RECIPE, **changes):
    """Keyed draws with noise in float64, so that references can be compared to 1e-10."""
    shape = (frames, CHANNELS, SIZE, SIZE)
    drawn = sgf.draw(shape, recipe, **{"seed": 42, "global_sample_indices": indices} | changes)
    wide = {name: getattr(drawn, name).double() for name in ("noise", "renoise", "score_noise")}
    return dataclasses.replace(drawn, **wide)


def case(batch=2, frames=FRAMES):
    """An anchor, conditions and a negative prompt."""
    latents, prompts, w2c, intrinsics = clips(batch, frames)
    return latents[:, :1], sgf.Conditions(prompts, w2c, intrinsics), random(1, 5, 3, seed=77)


# Draws.


def test_released_labels_become_the_released_timesteps():
    assert RECIPE.timesteps == pytest.approx((1000, 937.5, 833.3333, 625), abs=1e-4)
    assert sgf.denoising_timesteps([1000, 750, 500, 250, 0], TABLE) == RECIPE.timesteps
    assert sgf.denoising_timesteps([1000], schedule(3.0)) == (1000,)


@pytest.mark.parametrize("labels", [[], [0], [1001, 500], [500, 750], [750, 750], [1000, 0, 500], [500, -1]])
def test_labels_that_are_no_falling_steps_are_refused(labels):
    with pytest.raises(
        ConfigError, match=r"denoising_timesteps: found .*, expected falling labels between 1000 and 1"
    ):
        sgf.denoising_timesteps(labels, TABLE)


def test_score_timesteps_are_shifted_and_clamped():
    values = sgf.score_timesteps([0, 1, 4, 5, 500, 900, 907, 908, 999], RECIPE)

    def shifted(n):
        return min(max(5000 * n / 1000 / (1 + 4 * n / 1000), 20), 980)

    assert values.tolist() == pytest.approx(
        [shifted(n) for n in (0, 1, 4, 5, 500, 900, 907, 908, 999)], abs=1e-4
    )
    assert values[0] == values[1] == 20 and values[-1] == 980
    bounded = dataclasses.replace(RECIPE, score_min_timestep=0.0, score_max_timestep=1000.0)
    assert sgf.score_timesteps([0], bounded).item() == 0


def test_draws_follow_the_sample_and_not_the_process():
    whole = draw(range(8), frames=3)
    for part in range(4):
        split = draw(range(part, 8, 4), frames=3)
        for name in ("exit", "noise", "score_timestep", "score_noise"):
            assert torch.equal(getattr(split, name), getattr(whole, name)[part::4])
        assert torch.equal(split.renoise, whole.renoise[:, part::4])
    kinds = [whole.noise[0], *whole.renoise[:, 0], whole.score_noise[0]]
    assert len({float(x.sum()) for x in kinds}) == 5
    assert not torch.equal(draw([0], frames=3, seed=43).noise, draw([0], frames=3).noise)


def test_exit_steps_are_uniform_over_samples():
    exits = draw(range(2000), frames=1).exit
    assert [(exits == k).sum().item() / 2000 for k in range(4)] == pytest.approx([0.25] * 4, abs=0.04)


# Rollout and replay.


def reference_rollout(model, anchor, conditions, draws, row):
    """Pass 1 of spec 5.3 written out for one sample: lists of recorded inputs and contexts of each chunk."""
    one = slice(row, row + 1)
    state = model.rollout_state(conditions.prompt_embeds[one], chunk=3, window=18)
    labels = [1000, 750, 500, 250]
    timesteps = [TABLE.timesteps[1000 - label] for label in labels]
    exit_step = draws.exit[row].item()
    inputs, contexts = [], []
    for first in range(0, draws.noise.shape[1], 3):
        here = slice(first, first + 3)
        cameras = conditions.w2c[one, here]
        x = draws.noise[one, here].clone()
        if first == 0:
            x[:, 0] = anchor[one, 0]
        for k, t in enumerate(timesteps):
            if k == exit_step:
                inputs.append(x.clone())
            times = torch.full((1, 3), t)
            if first == 0:
                times[:, 0] = 0
            x0 = x - t / 1000 * model.chunk_velocity(state, x, times, cameras)
            if first == 0:
                x0[:, 0] = anchor[one, 0]
            if k == exit_step:
                context = x0.clone()
            if k < 3:
                following = timesteps[k + 1] / 1000
                x = (1 - following) * x0 + following * draws.renoise[k, one, here]
                if first == 0:
                    x[:, 0] = anchor[one, 0]
        contexts.append(context)
        model.chunk_velocity(state, context, torch.zeros(1, 3), cameras, commit=True)
    return torch.cat(inputs, dim=1), torch.cat(contexts, dim=1)


def test_rollout_equals_a_reference_per_sample():
    anchor, conditions, _ = case(3)
    draws = dataclasses.replace(draw(range(3)), exit=torch.tensor([3, 0, 2]))
    record = sgf.rollout(ToyBackbone(), anchor, conditions, draws, RECIPE)
    with torch.no_grad():
        for row in range(3):
            noisy, context = reference_rollout(ToyBackbone(), anchor, conditions, draws, row)
            torch.testing.assert_close(record.noisy[row : row + 1], noisy, rtol=0, atol=1e-12)
            torch.testing.assert_close(record.context[row : row + 1], context, rtol=0, atol=1e-12)
    assert record.timesteps[:, 1:].unique(dim=1).flatten().tolist() == pytest.approx(
        [625, 1000, 833.3333], abs=1e-4
    )
    assert not record.timesteps[:, 0].any()


def test_rollout_makes_35_forwards_whatever_the_exit_and_no_gradient():
    anchor, conditions, _ = case(1)
    for exit_step in range(4):
        model = ToyBackbone()
        draws = dataclasses.replace(draw([0]), exit=torch.tensor([exit_step]))
        record = sgf.rollout(model, anchor, conditions, draws, RECIPE)
        assert [name for name, *_ in model.calls] == (["chunk"] * 4 + ["commit"]) * 7
        assert not record.context.requires_grad and not record.noisy.requires_grad
        assert all(not timesteps.any() for _, _, timesteps, *_ in model.made("commit"))
        first = model.calls[:5]
        assert all(torch.equal(x[:, :1], anchor) and timesteps[0, 0] == 0 for _, x, timesteps, *_ in first)
        assert [x[2][0, 1].item() for x in first] == pytest.approx([1000, 937.5, 833.3333, 625, 0], abs=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.sampled_from([3, 9, 21]))
def test_replay_repeats_the_rollout_where_window_and_prefix_agree(exits, frames):
    anchor, conditions, _ = case(len(exits), frames)
    draws = dataclasses.replace(draw(range(len(exits)), frames), exit=torch.tensor(exits))
    model = ToyBackbone()
    record = sgf.rollout(model, anchor, conditions, draws, RECIPE)
    again = sgf.replay(model, record, conditions, RECIPE)
    torch.testing.assert_close(again.detach(), record.context, rtol=0, atol=1e-10)
    assert torch.equal(again[:, :1], anchor) and again.requires_grad


def test_replay_and_rollout_part_when_a_window_cuts_the_prefix_off():
    anchor, conditions, _ = case(1, 27)
    draws, model = draw([0], 27), ToyBackbone()
    record = sgf.rollout(model, anchor, conditions, draws, RECIPE)
    again = sgf.replay(model, record, conditions, RECIPE).detach()
    torch.testing.assert_close(again[:, :21], record.context[:, :21], rtol=0, atol=1e-10)
    assert (again[:, 21:] - record.context[:, 21:]).abs().max() > 1e-6


def test_replay_is_known_to_repeat_the_rollout_until_the_window_moves():
    assert [sgf.replay_repeats_rollout(frames, RECIPE) for frames in (3, 18, 21)] == [True, True, False]
    assert not sgf.replay_repeats_rollout(18, dataclasses.replace(RECIPE, window=15))
    assert not sgf.replay_repeats_rollout(18, dataclasses.replace(RECIPE, max_prior_clean_chunks=4))
    assert sgf.replay_repeats_rollout(15, dataclasses.replace(RECIPE, max_prior_clean_chunks=4))


def test_a_late_chunk_trains_how_its_context_is_encoded_but_not_the_context_itself():
    anchor, conditions, _ = case(1)
    model = ToyBackbone()
    record = sgf.rollout(model, anchor, conditions, draw([0]), RECIPE)
    record = dataclasses.replace(record, context=record.context.requires_grad_(False))
    sgf.replay(model, record, conditions, RECIPE)[:, -3:].sum().backward()
    assert model.context.grad.abs().sum() > 0 and model.own.grad.abs().sum() > 0
    model.zero_grad()
    sgf.replay(model, record, conditions, RECIPE)[:, :3].sum().backward()
    assert model.context.grad is None or not model.context.grad.any()


@pytest.mark.parametrize(("frames", "replays"), [(18, 0), (21, 1)])
def test_the_critic_learns_from_the_rollout_itself_where_a_replay_would_repeat_it(frames, replays):
    anchor, conditions, _ = case(1, frames)
    model = ToyBackbone()
    record = sgf.rollout(model, anchor, conditions, draw([0], frames), RECIPE)
    sample = sgf.critic_sample(model, record, conditions, RECIPE)
    assert len(model.made("teacher_forced")) == replays and not sample.requires_grad
    torch.testing.assert_close(sample, record.context, rtol=0, atol=1e-10)


def test_rollouts_that_do_not_fill_chunks_are_refused():
    anchor, conditions, _ = case(1, 20)
    with pytest.raises(ValueError, match="20 latent frames; expected a multiple of the chunk of 3"):
        sgf.rollout(ToyBackbone(), anchor, conditions, draw([0], 20), RECIPE)


def test_without_cameras_and_with_one_step():
    anchor, conditions, _ = case(2, 6)
    recipe = dataclasses.replace(RECIPE, timesteps=(1000.0,))
    draws = draw([0, 1], 6, recipe)
    blind = sgf.Conditions(conditions.prompt_embeds)
    record = sgf.rollout(ToyBackbone(), anchor, blind, draws, recipe)
    assert draws.renoise.shape[0] == 0 and not draws.exit.any()
    assert torch.equal(record.noisy[:, 1:], draws.noise[:, 1:])


# Losses.


def test_score_input_of_a_sample():
    generated = random(2, 6, CHANNELS, SIZE, SIZE).requires_grad_()
    draws = dataclasses.replace(draw([0, 1], 6), score_timestep=torch.tensor([20.0, 980.0]))
    noisy, timesteps = sgf.noised_for_score(generated, draws, TABLE)
    assert not noisy.requires_grad and torch.equal(noisy[:, 0], generated[:, 0])
    assert timesteps.tolist() == [[0] + [20] * 5, [0] + [980] * 5]
    for row, timestep in enumerate((20.0, 980.0)):
        sigma = TABLE.sigmas[abs(TABLE.timesteps - timestep).argmin()]
        expected = (1 - sigma) * generated[row] + sigma * draws.score_noise[row]
        torch.testing.assert_close(noisy[row, 1:], expected[1:].detach(), rtol=0, atol=1e-12)


def test_guidance_of_3_is_the_usual_scale_of_4():
    noisy, conditions, negative = random(2, 6, CHANNELS, SIZE, SIZE), case(2, 6)[1], random(1, 5, 3, seed=77)
    timesteps = torch.full((2, 6), 625.0)
    model = ToyBackbone()
    guided = sgf.denoised(model, noisy, timesteps, conditions, negative, 3.0, TABLE)
    plain = sgf.denoised(model, noisy, timesteps, conditions, None, 0.0, TABLE)
    assert len(model.calls) == 3
    other = sgf.Conditions(negative.expand(2, -1, -1), conditions.w2c, conditions.intrinsics)
    unconditional = sgf.denoised(model, noisy, timesteps, other, None, 0.0, TABLE)
    torch.testing.assert_close(guided, unconditional + 4 * (plain - unconditional), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"guidance scale 3\.0 needs negative_embeds"):
        sgf.denoised(model, noisy, timesteps, conditions, None, 3.0, TABLE)


def clip_of(*values):
    """One clip of frames `values`, a latent element each."""
    return torch.tensor(values, dtype=torch.float64).view(1, len(values), 1, 1, 1)


def test_gradient_of_the_spec_and_its_masked_element():
    supervised = torch.tensor([[False, True]])
    out = sgf.distribution_gradient(clip_of(float("nan"), 5), clip_of(3, 3), clip_of(1, 1), supervised)
    assert out.values.flatten().tolist() == [0, 0.5]
    assert out.normalizer.item() == 4 and out.replaced == 0


def test_non_finite_scores_become_zero_and_are_counted():
    supervised = torch.ones(1, 3, dtype=torch.bool)
    fake = clip_of(float("nan"), float("inf"), 4)
    out = sgf.distribution_gradient(clip_of(2, 2, 2), fake, clip_of(1, 1, 1), supervised)
    assert out.values.flatten().tolist() == [0, 0, 3] and out.replaced == 2


def test_the_normaliser_is_per_sample_and_bounded_below():
    generated = torch.cat([clip_of(1, 1), clip_of(5, 9)])
    real, fake = torch.ones_like(generated), torch.ones_like(generated) * 3
    out = sgf.distribution_gradient(generated, fake, real, torch.ones(2, 2, dtype=torch.bool))
    assert out.normalizer.tolist() == [1e-8, 6]
    assert out.values[1].flatten().tolist() == pytest.approx([1 / 3, 1 / 3])


def test_the_gradient_of_the_loss_is_the_direction_over_the_count():
    generated = torch.zeros(2, 47, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    real, fake = torch.full_like(generated, 2), torch.full_like(generated, 3)
    supervised = torch.ones(2, 47, dtype=torch.bool)
    direction = sgf.distribution_gradient(generated, fake, real, supervised)
    out = sgf.surrogate_loss(generated, direction.values, supervised)
    out.loss.backward()
    assert (generated.grad == 0.5 / generated.numel()).all()
    assert out.loss.item() == pytest.approx(0.125) and out.per_sample.tolist() == pytest.approx([0.125] * 2)


def test_student_loss_equals_a_reference_and_trains_the_student_alone():
    anchor, conditions, negative = case(2)
    draws = draw([4, 5])
    student, teacher, critic = ToyBackbone(0), ToyBackbone(1), ToyBackbone(2)
    record = sgf.rollout(student, anchor, conditions, draws, RECIPE)
    generated = sgf.replay(student, record, conditions, RECIPE)
    out = sgf.student_loss(generated, teacher, critic, conditions, negative, draws, RECIPE)
    out.loss.loss.backward()
    assert [len(model.made("velocity")) for model in (teacher, critic)] == [2, 1]
    assert all(p.grad is None for model in (teacher, critic) for p in model.parameters())
    assert student.own.grad.abs().sum() > 0 and out.direction.replaced == 0

    noisy, timesteps = sgf.noised_for_score(generated, draws, TABLE)
    cameras = (conditions.w2c, conditions.intrinsics)
    sigma = (TABLE.sigma_of(timesteps))[:, :, None, None, None]
    with torch.no_grad():
        c, u = (
            noisy - sigma * teacher.velocity(noisy, timesteps, text, *cameras)
            for text in (conditions.prompt_embeds, negative.expand(2, -1, -1))
        )
        fake = noisy - sigma * critic.velocity(noisy, timesteps, conditions.prompt_embeds, *cameras)
        real, y = c + 3 * (c - u), generated
        size = (y - real)[:, 1:].abs().mean(dim=(1, 2, 3, 4), keepdim=True)
        expected = 0.5 * (((fake - real) / size)[:, 1:] ** 2).mean()
    torch.testing.assert_close(out.loss.loss, expected, rtol=1e-10, atol=0)


def test_critic_loss_is_zero_for_the_flow_of_the_sample_and_ignores_latent_0():
    _, conditions, _ = case(2, 6)
    generated = random(2, 6, CHANNELS, SIZE, SIZE, seed=5).requires_grad_()
    draws = draw([0, 1], 6)

    class Exact(ToyBackbone):
        def velocity(self, *arguments, **options):
            velocity = (draws.score_noise - generated).clone()
            velocity[:, 0] = float("nan")
            return velocity + (1 if self.off else 0)

    critic = Exact()
    critic.off = False
    out = sgf.critic_loss(generated, critic, conditions, draws, RECIPE)
    assert out.loss == 0
    critic.off = True
    assert sgf.critic_loss(generated, critic, conditions, draws, RECIPE).per_sample.tolist() == [1, 1]


def test_critic_loss_trains_the_critic_alone():
    anchor, conditions, _ = case(2)
    student, critic, draws = ToyBackbone(0), ToyBackbone(1), draw([0, 1])
    record = sgf.rollout(student, anchor, conditions, draws, RECIPE)
    sample = sgf.critic_sample(student, record, conditions, RECIPE)
    sgf.critic_loss(sample, critic, conditions, draws, RECIPE).loss.backward()
    assert critic.own.grad.abs().sum() > 0 and all(p.grad is None for p in student.parameters())


def test_the_student_moves_to_the_teachers_distribution():
    # Scores of Gaussians are known in closed form: x0 = mean + (1 - sigma) v / ((1 - sigma)^2 v + sigma^2) (x_t - (1 - sigma) mean).
    class Gaussian(ToyBackbone):
        def __init__(self, mean):
            super().__init__()
            self.mean = mean

        def velocity(self, latents, timesteps, *rest, **options):
            sigma = TABLE.sigma_of(timesteps)[..., None, None, None]
            mean = torch.as_tensor(self.mean, dtype=torch.float64).detach()
            gain = (1 - sigma) / ((1 - sigma) ** 2 + sigma**2)
            clean = mean + gain * (latents - (1 - sigma) * mean)
            return (latents - clean) / sigma

    mean = torch.nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))
    _, conditions, _ = case(4, 3)
    recipe = dataclasses.replace(RECIPE, real_guidance_scale=0.0)
    optimizer = torch.optim.SGD([mean], lr=0.5)
    for step in range(120):
        draws = draw(range(4 * step, 4 * step + 4), 3)
        generated = mean + draws.noise
        out = sgf.student_loss(generated, Gaussian(1.0), Gaussian(mean), conditions, None, draws, recipe)
        optimizer.zero_grad()
        out.loss.loss.backward()
        optimizer.step()
    assert mean.item() == pytest.approx(1.0, abs=0.1)


# Cadence.


def test_student_updates_of_the_released_run():
    assert [g for g in range(16) if sgf.student_is_due(g)] == [5, 10, 15]
    assert sgf.student_updates_after(4000) == 799
    assert [sgf.student_updates_after(g) for g in (0, 1, 5, 6, 195, 196, 200, 201)] == [
        0,
        0,
        0,
        1,
        38,
        39,
        39,
        40,
    ]
    assert [sgf.student_updates_after(g) for g in (20, 100, 200)] == [3, 19, 39]


@given(st.integers(0, 3000), st.integers(1, 9))
def test_counts_are_sums_over_the_steps(completed, ratio):
    due = sum(sgf.student_is_due(g, ratio) for g in range(completed))
    assert sgf.student_updates_after(completed, ratio) == due
    assert sgf.batches_consumed(completed, ratio) == completed + due


def test_every_update_has_its_own_batch():
    order = []
    for g in range(12):
        first = sgf.batches_consumed(g)
        order += [("student", first), ("critic", first + 1)] if sgf.student_is_due(g) else [("critic", first)]
    assert [number for _, number in order] == list(range(14))
    assert [number for role, number in order if role == "student"] == [5, 11]


def test_the_average_is_made_at_student_update_39():
    assert [sgf.ema_updates_after(n) for n in (0, 38, 39, 40, 799)] == [0, 0, 1, 2, 761]
    assert [sgf.ema_updates_after(n, every=4) for n in (38, 39, 42, 43)] == [0, 1, 1, 2]
    assert [sgf.ema_updates_after(n, start=0) for n in range(4)] == [0, 1, 2, 3]


@given(st.integers(0, 200), st.integers(0, 50), st.integers(1, 7))
def test_updates_of_the_average_are_counted(student_updates, start, every):
    due = sum(sgf.ema_is_due(n, start, every) for n in range(1, student_updates + 1))
    assert sgf.ema_updates_after(student_updates, start, every) == due
