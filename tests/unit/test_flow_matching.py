"""Stage0.5 objective: the acceptance numbers of spec wan22 section 3, keyed draws and the loss's invariances."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solarwm_lib.objectives import flow_matching as fm

SHAPE = (3, 4, 2, 2)


def draw(indices, batch=8, dropout=0.1, seed=42, **changes):
    options = {"seed": seed, "global_batch_size": batch, "image_condition_dropout": dropout} | changes
    return fm.draw(SHAPE, global_sample_indices=indices, **options)


class Recorder:
    """A backbone whose velocity is a given function of its inputs."""

    def __init__(self, field):
        self.field = field

    def velocity(self, latents, timesteps, prompt_embeds, w2c, intrinsics, image_condition=None):
        self.latents, self.timesteps, self.image_condition = latents, timesteps, image_condition
        return self.field(latents, timesteps)


def weight_at(table, timestep):
    """The weight of the nearest table entry, which is what the spec lists."""
    return table.weights[np.abs(table.timesteps - timestep).argmin()]


def test_weights_of_the_released_5b_table():
    table = fm.schedule(5.0)
    assert table.timesteps[0] == 1000 and table.timesteps[-1] == pytest.approx(4.98008, abs=1e-5)
    assert table.weights[0] == 0 and table.weights.mean() == pytest.approx(1)
    expected = {500: 2.0764, 600: 1.9713, 700: 1.6714, 800: 1.2086, 900: 0.6309, 950: 0.3184, 100: 0.6380}
    for timestep, weight in expected.items():
        assert weight_at(table, timestep) == pytest.approx(weight, abs=1e-4)
    assert table.weights[-1] == pytest.approx(0.0319, abs=1e-4)


def test_weights_of_the_a14b_table():
    table = fm.schedule(3.0)
    assert table.timesteps[-1] == pytest.approx(2.99401, abs=1e-5)
    assert weight_at(table, 500) == pytest.approx(1.7979, abs=1e-3)
    assert table.weights[-1] == pytest.approx(0.0166, abs=1e-4)


def test_released_dropout_steps():
    dropped = [step for step in range(100) if fm.image_condition_dropped(42, step, 0, 0, 0, 0.1)]
    assert dropped == [5, 18, 38, 40, 42, 59, 60, 68, 75, 80, 97, 99]


def test_dropout_limits_and_rate():
    assert not any(fm.image_condition_dropped(1, step, 0, 0, 0, 0.0) for step in range(100))
    assert all(fm.image_condition_dropped(1, step, 0, 0, 0, 1.0) for step in range(100))
    rate = np.mean([fm.image_condition_dropped(1, step, 0, 0, 0, 0.1) for step in range(4000)])
    assert rate == pytest.approx(0.1, abs=0.02)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]))
def test_draws_do_not_depend_on_how_a_global_batch_is_split(step, parts):
    indices = list(range(step * 8, step * 8 + 8))
    whole = draw(indices)
    split = [draw(indices[part::parts]) for part in range(parts)]
    for part in range(parts):
        for name in ("index", "noise", "dropped"):
            assert torch.equal(getattr(split[part], name), getattr(whole, name)[part::parts])


def test_draws_differ_by_seed_and_purpose_and_cover_the_table():
    a, b, c = draw([0, 1]), draw([0, 1], seed=43), draw([0, 1], purpose="preflight")
    assert not torch.equal(a.noise, b.noise) and not torch.equal(a.noise, c.noise)
    assert not torch.equal(a.noise[0], a.noise[1])
    index = draw(range(4000)).index
    assert 0 <= index.min() < 10 and 990 <= index.max() < 1000
    assert index.float().mean().item() == pytest.approx(499.5, abs=15)


def test_the_dropped_row_is_the_position_within_the_global_batch():
    dropped = draw(range(40), batch=8, dropout=0.3).dropped.tolist()
    assert dropped == [fm.image_condition_dropped(42, g // 8, 0, 0, g % 8, 0.3) for g in range(40)]


def test_first_latent_stays_clean_unless_dropped():
    latents = torch.randn(2, *SHAPE)
    draws = fm.Draws(torch.tensor([100, 900]), torch.randn(2, *SHAPE), torch.tensor([False, True]))
    table = fm.schedule(5.0)
    noised = fm.add_noise(latents, draws, table)
    assert torch.equal(noised.latents[0, 0], latents[0, 0])
    assert noised.timesteps[0, 0] == 0 and not noised.supervised[0, 0]
    assert noised.supervised[0, 1:].all() and noised.supervised[1].all()
    for row, index in enumerate((100, 900)):
        sigma = table.sigmas[index]
        expected = (1 - sigma) * latents[row, 1:] + sigma * draws.noise[row, 1:]
        torch.testing.assert_close(noised.latents[row, 1:], expected.float())
        assert noised.timesteps[row, 1:].tolist() == pytest.approx([table.timesteps[index]] * 2)
    assert noised.timesteps[1, 0].item() == pytest.approx(table.timesteps[900])


def test_loss_is_zero_for_the_true_velocity_and_the_weight_for_an_error_of_one():
    latents, draws, table = torch.randn(2, *SHAPE), draw([3, 4]), fm.schedule(5.0)
    exact = fm.loss(Recorder(lambda x, t: draws.noise - latents), latents, None, None, None, draws, table)
    assert exact.loss == 0
    off = fm.loss(Recorder(lambda x, t: draws.noise - latents + 1), latents, None, None, None, draws, table)
    assert off.per_sample.tolist() == pytest.approx(table.weights[draws.index.numpy()].tolist(), rel=1e-5)


def test_loss_does_not_depend_on_the_micro_batch():
    latents, table = torch.randn(4, *SHAPE), fm.schedule(3.0)
    model = Recorder(lambda x, t: x * 0.3)
    whole = fm.loss(model, latents, None, None, None, draw(range(4), dropout=0.5), table)
    single = [
        fm.loss(model, latents[row : row + 1], None, None, None, draw([row], dropout=0.5), table).loss
        for row in range(4)
    ]
    torch.testing.assert_close(whole.loss, torch.stack(single).mean())


def test_non_finite_values_in_an_excluded_frame_do_not_leak():
    latents, table = torch.randn(1, *SHAPE), fm.schedule(5.0)
    scale = torch.ones((), requires_grad=True)

    def field(x, t):
        bad = torch.zeros_like(x)
        bad[:, 0] = float("nan")
        return x * scale + bad

    out = fm.loss(Recorder(field), latents, None, None, None, draw([0], dropout=0.0), table)
    out.loss.backward()
    assert out.loss.isfinite() and scale.grad.isfinite()


def test_non_finite_values_in_a_supervised_frame_reach_the_loss():
    latents, table = torch.randn(1, *SHAPE), fm.schedule(5.0)
    out = fm.loss(Recorder(lambda x, t: x * float("nan")), latents, None, None, None, draw([0]), table)
    assert not out.loss.isfinite() and not out.per_sample.isfinite().all()


def test_bfloat16_latents_give_a_float32_loss():
    latents, draws, table = torch.randn(2, *SHAPE).bfloat16(), draw([0, 1]), fm.schedule(5.0)
    model = Recorder(lambda x, t: x)
    out = fm.loss(model, latents, None, None, None, draws, table)
    assert model.latents.dtype == torch.bfloat16 and model.timesteps.dtype == torch.float32
    assert out.loss.dtype == torch.float32 and out.loss.isfinite()


# --- with an image condition (I2V-A14B)


def image_condition(batch, seed=3):
    return torch.randn(batch, 3, 8, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_with_an_image_condition_the_loss_is_the_formula_over_all_frames():
    """Against the formula of spec wan22 3.1 in NumPy float64; nothing is anchored, dropped or not."""
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64)
    draws = fm.Draws(
        torch.tensor([200, 700]),
        torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64),
        torch.tensor([False, True]),
    )
    model = Recorder(lambda x, t: 0.3 * x + t.double().view(2, 3, 1, 1, 1) / 1000)
    found = fm.loss(model, latents, None, None, None, draws, fm.schedule(3.0), image_condition(2))

    x0, eps, losses = latents.numpy(), draws.noise.numpy(), []
    u = 1 - np.arange(1000) / 1000
    sigma = 3 * u / (1 + 2 * u)
    bell = np.exp(-2 * ((1000 * sigma - 500) / 1000) ** 2)
    weight = (bell - bell.min()) * 1000 / (bell - bell.min()).sum()
    for row, index in enumerate((200, 700)):
        noisy = (1 - sigma[index]) * x0[row] + sigma[index] * eps[row]
        np.testing.assert_allclose(model.latents[row].numpy(), noisy, rtol=0, atol=1e-12)
        assert model.timesteps[row].tolist() == [np.float32(1000 * sigma[index])] * 3
        prediction = 0.3 * noisy + np.float32(1000 * sigma[index]) / 1000
        losses.append(weight[index] * np.square(prediction - (eps[row] - x0[row])).mean())
    np.testing.assert_allclose(found.per_sample.numpy(), losses, rtol=1e-6)
    assert found.loss.item() == pytest.approx(np.mean(losses), rel=1e-6)


def test_dropping_zeroes_the_whole_image_condition_of_the_sample_and_nothing_else():
    indices = range(40)
    draws = draw(indices, batch=8, dropout=0.3)
    y = image_condition(40)
    y[draws.dropped.nonzero()[0], 0, 0] = float("nan")  # by selection: not even this is left
    latents, model = torch.zeros(40, *SHAPE), Recorder(lambda x, t: x)
    fm.loss(model, latents, None, None, None, draws, fm.schedule(3.0), y)
    dropped = [fm.image_condition_dropped(42, g // 8, 0, 0, g % 8, 0.3) for g in indices]
    assert any(dropped) and not all(dropped)
    for row, gone in enumerate(dropped):
        assert torch.equal(model.image_condition[row], torch.zeros_like(y[row]) if gone else y[row])


def test_no_image_condition_reaches_a_backbone_that_has_none():
    model = Recorder(lambda x, t: x)
    fm.loss(model, torch.zeros(2, *SHAPE), None, None, None, draw([0, 1]), fm.schedule(5.0))
    assert model.image_condition is None
