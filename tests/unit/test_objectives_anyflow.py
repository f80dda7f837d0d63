"""TF-AnyFlow v1.5: the numbers of spec wan22 4.3 and 4.4, a float64 reference of the loss, and what gradients may touch."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import CHANNELS, SIZE, ToyBackbone, clips, random

from solarwm_lib.objectives import anyflow
from solarwm_lib.objectives.anyflow import Kind
from solarwm_lib.objectives.noise import schedule, shift_time

FRAMES, CHUNK = 6, 3
SHAPE = (FRAMES, CHANNELS, SIZE, SIZE)
WINDOW = {"chunk": CHUNK, "max_prior_clean_chunks": 5}
TABLE = schedule(5.0)
D, C, F = Kind.DIFFUSION, Kind.CONSISTENCY, Kind.FLOW_MAP


def draw(indices, batch=8, **changes):
    return anyflow.draw(SHAPE, global_sample_indices=indices, **{"seed": 42, "global_batch_size": batch, "shift": 5.0} | changes)  # fmt: skip


def draws_of(t, r, kind, frames=FRAMES):
    """Draws with given raw times; noise in float64, so that references can be compared to 1e-10."""
    noise = random(len(t), frames, CHANNELS, SIZE, SIZE, seed=9)
    return anyflow.Draws(torch.tensor(t), torch.tensor(r), torch.tensor(kind), noise)


def errors(model, draws, **options):
    latents, prompts, w2c, intrinsics = clips(len(draws.t), FRAMES)
    negative = random(1, 5, 3, seed=77)
    return anyflow.errors(
        model, latents, prompts, negative, w2c, intrinsics, draws, TABLE, **WINDOW | options
    )


# Pairs and kinds.


def test_kinds_of_the_two_ranks_of_the_spec():
    assert anyflow.kinds([4, 5, 6, 7], 8, 0.5, 0.25).tolist() == [C, C, F, F]
    assert anyflow.kinds([0, 1, 2, 3], 8, 0.5, 0.25).tolist() == [D, D, D, D]


@pytest.mark.parametrize(
    ("batch", "diffusion", "consistency"), [(1, 0, 0), (2, 1, 0), (4, 2, 1), (8, 4, 2), (256, 128, 64)]
)
def test_kinds_round_half_to_even(batch, diffusion, consistency):
    kinds = anyflow.kinds(range(batch), batch, 0.5, 0.25).tolist()
    assert kinds.count(D) == diffusion and kinds.count(C) == consistency


def test_pairs_of_given_uniforms():
    u1, u2 = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.5, 0.6, 0.7, 0.8])
    t, r = anyflow.time_pairs(u1, u2, np.array([C, C, F, F]), 5.0)
    assert t.dtype == r.dtype == np.float32
    np.testing.assert_allclose(t, 1000 * shift_time(u1, 5.0), rtol=1e-6)
    np.testing.assert_allclose(r, [0, 0, *1000 * shift_time(u1 * u2, 5.0)[2:]], rtol=1e-6)
    t, r = anyflow.time_pairs(u1, u2, np.array([D, D, D, D]), 5.0)
    assert np.array_equal(t, r)


BITS = st.integers(0, 2**24 - 1)


@given(BITS, BITS, st.sampled_from([1.0, 3.0, 5.0, 12.0]))
def test_flow_map_pairs_are_strict_and_other_kinds_exact(a, b, shift):
    u1, u2 = np.float32([a * 2.0**-24]), np.float32([b * 2.0**-24])
    t, r = anyflow.time_pairs(u1, u2, np.array([F]), shift)
    assert 0 < r[0] < t[0] <= 1000
    t, r = anyflow.time_pairs(u1, u2, np.array([C]), shift)
    assert r[0] == 0 <= t[0]


@pytest.mark.parametrize("uniforms", [(0.0, 0.0), (0.0, 0.9), (0.7, 0.0), (1 - 2**-24, 1 - 2**-24)])
def test_repair_moves_by_the_next_representable_values_only(uniforms):
    u1, u2 = (np.float32([u]) for u in uniforms)
    t, r = anyflow.time_pairs(u1, u2, np.array([F]), 5.0)
    plain = [
        np.float32(1000 * shift_time(float(u), 5.0)) for u in (np.float32(u1[0]), np.float32(u1[0] * u2[0]))
    ]
    assert 0 < r[0] < t[0]
    np.testing.assert_allclose([t[0], r[0]], plain, rtol=2e-7, atol=1e-44)


def test_draws_follow_the_sample_and_not_the_process():
    whole = draw(range(16, 24))
    assert whole.kind.tolist() == [D] * 4 + [C] * 2 + [F] * 2
    for parts in (2, 4):
        for part in range(parts):
            split = draw(range(16 + part, 24, parts))
            for field in dataclasses.fields(whole):
                assert torch.equal(getattr(split, field.name), getattr(whole, field.name)[part::parts])
    assert not torch.equal(whole.t, draw(range(24, 32)).t)


def test_times_have_the_stated_distribution():
    pairs = draw(range(8000), batch=8000, diffusion_ratio=0.0, consistency_ratio=0.0)
    # Undo the shift: u = sigma / (s - (s-1) sigma).
    t, r = (x.double() / 1000 for x in (pairs.t, pairs.r))
    u, product = (x / (5 - 4 * x) for x in (t, r))
    assert u.mean().item() == pytest.approx(0.5, abs=0.015)
    assert (product / u).mean().item() == pytest.approx(0.5, abs=0.015)


# Difference, target, schedule.


def test_bounded_window_of_the_spec():
    upper, lower = anyflow.bounded_window(torch.tensor([998.0, 7.0]), torch.tensor([0.0, 6.0]), 5.0)
    assert upper.tolist() == [1000, 12] and lower.tolist() == [993, 6]


def test_slope_is_exact_for_a_quadratic_in_time_whatever_the_window():
    latents = random(3, FRAMES, CHANNELS, SIZE, SIZE)
    t = torch.tensor([500.0, 998.0, 7.0])[:, None].repeat(1, FRAMES)
    r = torch.tensor([0.0, 0.0, 6.0])[:, None].repeat(1, FRAMES)
    t[:, 0] = r[:, 0] = 0

    def field(noisy, t, r):
        return torch.ones_like(noisy) * (t.double() ** 2)[..., None, None, None]

    change = anyflow.slope(field, latents, t, r, 5.0)[:, 1:]
    # (t+^2 - t-^2) / (t+ - t-) = t+ + t-
    expected = torch.tensor([1000.0, 1993.0, 18.0], dtype=torch.float64)
    torch.testing.assert_close(change, expected.view(3, 1, 1, 1, 1).expand_as(change), rtol=1e-12, atol=0)


def test_slope_follows_the_predicted_velocity_and_holds_latent_0():
    latents = random(1, FRAMES, CHANNELS, SIZE, SIZE)
    t, r = torch.full((1, FRAMES), 600.0), torch.full((1, FRAMES), 100.0)
    t[:, 0] = r[:, 0] = 0
    seen = []

    def field(noisy, t, r):
        seen.append((noisy, t, r))
        return torch.full_like(noisy, float("nan")) if len(seen) == 1 else noisy * 2

    def finite_field(noisy, t, r):
        seen.append((noisy, t, r))
        return noisy * 2

    change = anyflow.slope(finite_field, latents, t, r, 5.0)
    # U = 2 z, direction 2 z: z+- = z (1 +- 2 * 5/1000), so D = 2 * (z+ - z-) / 10 = 4 z / 1000.
    torch.testing.assert_close(change[:, 1:], latents[:, 1:] * 4 / 1000, rtol=1e-10, atol=1e-14)
    assert [times[0, 1].item() for _, times, _ in seen] == [600, 605, 595]
    assert [second[0, 1].item() for _, _, second in seen] == [600, 100, 100]
    for noisy, times, second in seen:
        assert torch.equal(noisy[:, 0], latents[:, 0]) and times[0, 0] == second[0, 0] == 0
    seen.clear()
    anyflow.slope(field, latents, t, r, 5.0)
    assert torch.equal(seen[1][0][:, 0], latents[:, 0])


def test_where_r_is_t_the_difference_does_not_matter_even_if_it_is_not_finite():
    class Broken(ToyBackbone):
        def teacher_forced_velocity(self, clean, noisy, timesteps, *rest, **options):
            out = super().teacher_forced_velocity(clean, noisy, timesteps, *rest, **options)
            return out if timesteps[0, 1] == 700 else out * float("nan")

    out = errors(Broken(), draws_of([700.0], [700.0], [D]))
    out.error.sum().backward()
    assert out.error.isfinite().all()
    assert not errors(Broken(), draws_of([700.0], [200.0], [F])).error.isfinite().any()


def test_sampling_pairs_of_the_spec():
    pairs = anyflow.sampling_pairs(4, 5.0)
    assert [t for t, _ in pairs] == pytest.approx([1000, 937.5, 833.333, 625], abs=1e-3)
    assert [r for _, r in pairs] == pytest.approx([937.5, 833.333, 625, 0], abs=1e-3)
    assert len(anyflow.sampling_pairs(50, 5.0)) == 50


def test_weights_have_mean_1_and_are_0_at_pure_noise():
    assert TABLE.weights.mean() == pytest.approx(1) and TABLE.weights[0] == 0
    out = errors(ToyBackbone(), draws_of([1000.0, 500.0], [1000.0, 500.0], [D, D]))
    assert out.weight.tolist() == pytest.approx([0, 2.0764], abs=1e-3)


# The loss.


def reference(model, draws, epsilon=5.0, guidance=3.0):
    """Spec 4.3 written out for one sample at a time, in float64; returns the errors l_i."""
    latents, prompts, w2c, intrinsics = clips(len(draws.t), FRAMES)
    negative = random(1, 5, 3, seed=77)
    out = []
    for i in range(len(draws.t)):
        row = slice(i, i + 1)
        x0, noise = latents[row], draws.noise[row]

        def frame_times(value):
            times = torch.full((1, FRAMES), value, dtype=torch.float64)
            times[:, 0] = 0
            return times

        def held(z, x0=x0):
            return torch.cat([x0[:, :1], z[:, 1:]], dim=1)

        def field(z, t, r, text, row=row, x0=x0):
            return model.teacher_forced_velocity(
                x0, z, frame_times(t), text, w2c[row], intrinsics[row], r=frame_times(r), **WINDOW
            )

        t, r = draws.t[i].item(), draws.r[i].item()
        z = held((1 - t / 1000) * x0 + t / 1000 * noise)
        u = field(z, t, r, prompts[row])
        with torch.no_grad():
            target = noise - x0
            if guidance != 1:
                target = guidance * target + (1 - guidance) * field(z, t, t, negative)
            v_hat = field(z, t, t, prompts[row])
            upper, lower = min(t + epsilon, 1000.0), max(t - epsilon, r)
            z_up, z_down = held(z + v_hat * (upper - t) / 1000), held(z - v_hat * (t - lower) / 1000)
            change = field(z_up, upper, r, prompts[row]) - field(z_down, lower, r, prompts[row])
            change = change / max(upper - lower, 1e-6)
        prediction = u + (t - r) * change
        out.append((((prediction - target)[:, 1:] / guidance) ** 2).mean())
    return torch.stack(out)


# Times whose sums and differences with epsilon are exact in float32, as the backbone is given float32.
PAIRS = draws_of([750.5, 998.0, 640.25, 7.5, 312.5], [750.5, 0.0, 120.5, 6.25, 0.0], [D, C, F, F, C])


@pytest.mark.parametrize("guidance", [3.0, 1.0, 2.0])
def test_errors_and_gradients_equal_the_reference(guidance):
    model, other = ToyBackbone(), ToyBackbone()
    out = errors(model, PAIRS, guidance_scale=guidance)
    expected = reference(other, PAIRS, guidance=guidance)
    torch.testing.assert_close(out.error, expected, rtol=1e-10, atol=0)
    out.error.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kinds", [[D, D], [D, F], [F, C]])
@pytest.mark.parametrize(("guidance", "forwards"), [(3.0, 5), (1.0, 4)])
def test_every_rank_makes_the_same_number_of_forwards(kinds, guidance, forwards):
    model = ToyBackbone()
    r = [600.0 if kind == D else 100.0 for kind in kinds]
    errors(model, draws_of([600.0, 600.0], r, kinds), guidance_scale=guidance)
    calls = model.made("teacher_forced")
    assert len(calls) == forwards
    # The forward with gradient comes last; the difference is taken for the samples that need it only.
    assert len(calls[-1][1]) == 2 and len(calls[-2][1]) == max(1, sum(kind != D for kind in kinds))


def test_latent_0_is_clean_at_time_0_in_every_forward():
    model = ToyBackbone()
    errors(model, PAIRS)
    latents = clips(5, FRAMES)[0]
    for _, noisy, t, r, _ in model.calls:
        rows = latents if len(noisy) == 5 else latents[1:]
        assert torch.equal(noisy[:, 0], rows[:, 0])
        assert not t[:, 0].any() and not r[:, 0].any()


def test_a_constant_velocity_field_is_its_own_forward_map():
    class Straight(ToyBackbone):
        def teacher_forced_velocity(self, clean, noisy, *arguments, **options):
            return (
                (PAIRS.noise - clips(5, FRAMES)[0])[: len(noisy)]
                if len(noisy) == 5
                else torch.zeros_like(noisy)
            )

    out = errors(Straight(), PAIRS, guidance_scale=1.0)
    assert out.error.max() < 1e-28


def test_guidance_needs_the_negative_embedding():
    latents, prompts, w2c, intrinsics = clips(1, FRAMES)
    with pytest.raises(ValueError, match=r"guidance scale 3\.0 needs negative_embeds"):
        anyflow.errors(
            ToyBackbone(),
            latents,
            prompts,
            None,
            w2c,
            intrinsics,
            draws_of([500.0], [0.0], [C]),
            TABLE,
            **WINDOW,
        )


def test_rescaling_gives_every_kind_the_size_of_the_diffusion_error():
    error = torch.tensor([2.0, 8.0, 0.5], requires_grad=True)
    given = anyflow.Errors(error, torch.tensor([1.0, 0.5, 2.0]), torch.tensor([True, False, False]))
    mean = anyflow.diffusion_mean([anyflow.diffusion_sum(given), (4.0, 1)])
    assert mean == 3.0
    out = anyflow.loss(given, mean)
    expected = [2.0, 0.5 * 8 * 3 / (8 + 1e-5), 2 * 0.5 * 3 / (0.5 + 1e-5)]
    assert out.per_sample.tolist() == pytest.approx(expected, rel=1e-6)
    out.loss.backward()
    # The scale carries no gradient: d/dl = w m / (l + 1e-5).
    assert error.grad.tolist() == pytest.approx(
        [1 / 3, 0.5 * 3 / (8 + 1e-5) / 3, 2 * 3 / (0.5 + 1e-5) / 3], rel=1e-6
    )


def test_without_a_finite_diffusion_error_anywhere_nothing_is_rescaled():
    given = anyflow.Errors(
        torch.tensor([float("nan"), 8.0]), torch.tensor([1.0, 0.5]), torch.tensor([True, False])
    )
    assert anyflow.diffusion_sum(given) == (0.0, 0)
    assert anyflow.diffusion_mean([anyflow.diffusion_sum(given), (0.0, 0)]) is None
    assert anyflow.loss(given, None).per_sample[1] == 4.0


def test_a_batch_of_diffusion_samples_is_plain_flow_matching():
    given = anyflow.Errors(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 0.5]), torch.tensor([True, True]))
    assert anyflow.loss(given, 17.0).per_sample.tolist() == [2.0, 2.0]


def test_gradients_survive_forwards_without_gradient_under_autocast():
    # Mixed precision caches cast weights; casts made without gradient must not be taken for the forward that has one.
    class Linear(ToyBackbone):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(CHANNELS, CHANNELS)

        def teacher_forced_velocity(self, clean, noisy, *arguments, **options):
            return self.layer(noisy.float().movedim(2, -1)).movedim(-1, 2)

    model = Linear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = anyflow.loss(errors(model, PAIRS), 1.0)
    out.loss.backward()
    assert model.layer.weight.grad.abs().sum() > 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([D, C, F]), min_size=1, max_size=4), st.integers(0, 1000))
def test_losses_of_a_split_batch_are_those_of_the_whole(kinds, seed):
    n = len(kinds)
    random_times = np.random.default_rng(seed).random((2, n))
    t, r = anyflow.time_pairs(*random_times, np.array(kinds), 5.0)
    draws = draws_of(t.tolist(), r.tolist(), kinds)
    model = ToyBackbone()
    whole = errors(model, draws).error
    latents, prompts, w2c, intrinsics = clips(n, FRAMES)
    for i in range(n):
        row = slice(i, i + 1)
        one = anyflow.Draws(draws.t[row], draws.r[row], draws.kind[row], draws.noise[row])
        error = anyflow.errors(
            model, latents[row], prompts[row], random(1, 5, 3, seed=77), w2c[row], intrinsics[row], one, TABLE, **WINDOW
        ).error  # fmt: skip
        torch.testing.assert_close(error[0], whole[i], rtol=1e-9, atol=0)
