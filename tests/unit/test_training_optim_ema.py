"""Learning rate as a function of the step, AdamW slots, gradient norm and clipping, the weight average."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import optim, sharding
from solarwm_lib.training.ema import Ema, EmaCadence


@pytest.mark.parametrize(
    "step, factor", [(0, 0.0), (500, 0.5), (1000, 1.0), (15500, 0.55), (30000, 0.1), (99999, 0.1)]
)
def test_learning_rate_factor_equals_the_specification(step, factor):
    assert optim.learning_rate_factor(step, 1000, 30000, 0.1) == pytest.approx(factor, abs=1e-12)


def test_without_warmup_the_first_step_runs_at_the_base_rate():
    assert optim.learning_rate(0, base=2e-6, warmup_steps=0, total_steps=10, minimum_ratio=1.0) == 2e-6


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return optim.adamw(model.parameters(), learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)


def test_every_parameter_has_exactly_the_declared_slots_before_the_first_step():
    model = _model()
    optimizer = _adamw(model)
    assert all(set(optimizer.state[p]) == set(optim.SLOTS) for p in model.parameters())


def test_adamw_follows_its_definition():
    model = _model()
    optimizer = _adamw(model)
    weight = model[0].weight
    expected = weight.detach().double().clone()
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        gradient = torch.full_like(weight, 0.1 * step)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * step)
        rate = 1e-2 * step
        optim.set_learning_rate(optimizer, rate)
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient.double() ** 2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        expected = expected * (1 - rate * 0.01) - rate * update
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_clipping_scales_to_the_limit_and_leaves_small_gradients_alone():
    gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    norm = sharding.global_norm(gradients)
    assert norm.item() == pytest.approx(5.0)
    optim.clip_gradients(gradients, norm, 10.0)
    assert gradients[0].item() == 3.0
    optim.clip_gradients(gradients, norm, 1.0)
    assert sharding.global_norm(gradients).item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_norm_shows_any_bad_entry(bad):
    assert not torch.isfinite(sharding.global_norm([torch.ones(3), torch.tensor([1.0, bad])]))


def test_ema_equals_the_recurrence():
    model = _model()
    parameters = dict(model.named_parameters())
    ema = Ema.of(parameters, EmaCadence(decay=0.9, start_step=2, update_every=2))
    by_hand = {name: p.detach().double().clone() for name, p in parameters.items()}
    for step in range(1, 8):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(0.1 * step)
        ema.update(parameters, step)
        if step % 2 == 0:
            by_hand = {n: 0.9 * by_hand[n] + 0.1 * p.detach().double() for n, p in parameters.items()}
    assert ema.updates == 3
    for name, value in ema.shadow.items():
        torch.testing.assert_close(value.double(), by_hand[name], rtol=1e-6, atol=1e-6)


def test_during_warmup_the_average_is_an_exact_copy():
    model = _model()
    parameters = dict(model.named_parameters())
    ema = Ema.of(parameters, EmaCadence(decay=0.999, warmup_steps=5))
    with torch.no_grad():
        model[0].weight.add_(0.123)
    ema.update(parameters, 4)
    assert all(torch.equal(ema.shadow[name], p) for name, p in parameters.items())


def test_before_its_start_the_average_does_not_move():
    model = _model()
    parameters = dict(model.named_parameters())
    ema = Ema.of(parameters, EmaCadence(decay=0.5, start_step=39))
    assert not ema.update(parameters, 38) and ema.updates == 0
    assert ema.update(parameters, 39) and ema.updates == 1


@given(start=st.integers(0, 20), every=st.integers(1, 7), steps=st.integers(0, 60))
def test_update_count_follows_from_the_step(start, every, steps):
    cadence = EmaCadence(0.9, start, every)
    assert cadence.updates_after(steps) == sum(cadence.is_due(step) for step in range(1, steps + 1))


def test_other_parameter_names_are_refused():
    ema = Ema.of(dict(_model().named_parameters()), EmaCadence(0.9))
    with pytest.raises(ArtifactError, match="other"):
        ema.update({"other": torch.nn.Parameter(torch.zeros(1))}, 1)
