"""The forward process: nearest table entries, mixing and its inverse, the anchor, masked means."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_cases import random

from solarwm_lib.objectives import noise as process


def test_timesteps_outside_the_table_take_its_nearest_entry():
    table = process.schedule(5.0)
    timesteps = torch.tensor([[1000.0, 0.0], [937.5, 20.0]])
    assert table.nearest(timesteps).tolist()[0] == [0, 999]
    assert table.sigma_of(timesteps)[0].tolist() == pytest.approx([1.0, 0.00498008], abs=1e-8)
    assert table.sigma_of(timesteps)[1, 0] == 0.9375
    for value in (20.0, 700.3, 980.0):
        expected = table.sigmas[np.abs(table.timesteps - value).argmin()]
        assert table.sigma_of(torch.tensor([value])).item() == expected
    assert table.weight_of(torch.tensor([1000.0])).item() == 0
    assert table.num_train_timesteps == 1000


@given(st.floats(0, 1), st.sampled_from([1.0, 3.0, 5.0, 12.0]))
def test_the_shift_keeps_the_ends_and_only_moves_towards_noise(u, shift):
    assert process.shift_time(0.0, shift) == 0 and process.shift_time(1.0, shift) == 1
    assert u - 1e-15 <= process.shift_time(u, shift) <= 1


def test_clean_latents_come_back_from_the_true_velocity():
    clean, noise = random(2, 3, 4, 2, 2), random(2, 3, 4, 2, 2, seed=1)
    for sigma in (torch.tensor([0.25, 1.0]), torch.rand(2, 3)):
        noisy = process.mix(clean, noise, sigma)
        back = process.clean_from_velocity(noisy, noise - clean, sigma)
        torch.testing.assert_close(back, clean, rtol=0, atol=1e-12)


def test_arithmetic_is_wide_and_results_keep_the_dtype():
    clean, noise = torch.randn(1, 2, 4, 2, 2).bfloat16(), torch.randn(1, 2, 4, 2, 2)
    noisy = process.mix(clean, noise, torch.tensor([0.3]))
    expected = (0.7 * clean.double() + 0.3 * noise.bfloat16().double()).bfloat16()
    assert noisy.dtype == torch.bfloat16
    # One unit in the last place of bfloat16, 2**-7 at most, where float32 and float64 round to different neighbours.
    torch.testing.assert_close(noisy, expected, rtol=2**-7, atol=0)
    assert process.widened(clean).dtype == torch.float32
    assert process.widened(clean.double()).dtype == torch.float64


def test_excluded_frames_reach_neither_mean_nor_gradient():
    error = torch.ones(1, 3, 4, 2, 2, dtype=torch.float64) * 2
    error[:, 0] = float("nan")
    error.requires_grad_()
    mean = process.mean_square(error, process.after_anchor(error))
    mean.sum().backward()
    assert mean.item() == 4
    assert error.grad[:, 0].abs().sum() == 0 and error.grad[:, 1:].unique().tolist() == [4 / 32]


def test_nothing_supervised_is_a_mean_of_zero():
    assert process.mean_square(random(1, 2, 4, 2, 2), torch.zeros(1, 2, dtype=torch.bool)).item() == 0


def test_the_anchor_stands_in_latent_0_at_timestep_0():
    latents, anchor = random(2, 3, 4, 2, 2), random(2, 1, 4, 2, 2, seed=5)
    placed = process.with_anchor(latents, anchor)
    assert torch.equal(placed[:, :1], anchor) and torch.equal(placed[:, 1:], latents[:, 1:])
    timesteps = process.anchored_timesteps(torch.tensor([700.0, 3.5]), 3)
    assert timesteps.tolist() == [[0, 700, 700], [0, 3.5, 3.5]] and timesteps.dtype == torch.float32


def test_noise_is_keyed_by_place_in_the_stream():
    whole = process.clip_noise((2, 3), range(4), 42, "train", "noise")
    assert torch.equal(whole[2:3], process.clip_noise((2, 3), [2], 42, "train", "noise"))
    assert not torch.equal(whole[0], whole[1])
