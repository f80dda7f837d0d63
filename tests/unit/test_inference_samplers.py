"""The UniPC grid is pinned, the solver integrates a flow, and a given first latent survives bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from solarwm_lib.inference.samplers import sample_unipc, unipc_grid
from solarwm_lib.runtime.errors import ConfigError


def test_grid_has_the_released_numbers() -> None:
    timesteps, sigmas = unipc_grid(50, 5.0)
    assert timesteps[:4] == [999, 995, 991, 987]
    assert timesteps[-3:] == [241, 172, 92]
    assert len(sigmas) == 51 and sigmas[-1] == 0.0
    assert unipc_grid(50, 3.0)[0][-3:] == [160, 111, 57]


@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (8, 3.0), (50, 5.0), (1000, 5.0)])
def test_grid_decreases_strictly_to_zero(steps: int, shift: float) -> None:
    timesteps, sigmas = unipc_grid(steps, shift)
    assert len(timesteps) == steps
    assert all(a > b for a, b in itertools.pairwise(sigmas))
    assert all(0 <= t < 1000 for t in timesteps)


@pytest.mark.parametrize(
    ("steps", "shift", "word"), [(0, 5.0, "num_inference_steps"), (4, 0.0, "timestep_shift")]
)
def test_impossible_grid_names_the_key(steps: int, shift: float, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        unipc_grid(steps, shift)


def test_exact_velocity_of_one_target_is_recovered() -> None:
    """With v = (x - x0) / sigma the clean prediction is x0 at every step, whatever the order of the solver."""
    timesteps, sigmas = unipc_grid(12, 3.0)
    generator = torch.Generator().manual_seed(1)
    target, noise = torch.randn(2, 2, 3, 4, 5, 6, generator=generator)
    by_timestep = dict(zip(timesteps, sigmas, strict=False))

    def velocity(latents: torch.Tensor, frame_timesteps: torch.Tensor) -> torch.Tensor:
        return (latents - target) / by_timestep[int(frame_timesteps[0, -1])]

    torch.testing.assert_close(sample_unipc(velocity, noise, timesteps, sigmas), target, atol=1e-5, rtol=1e-5)


def test_anchor_has_timestep_zero_and_is_returned_unchanged() -> None:
    timesteps, sigmas = unipc_grid(6, 5.0)
    noise, anchor = torch.randn(2, 4, 3, 2, 2), torch.randn(2, 1, 3, 2, 2)
    seen = []

    def velocity(latents: torch.Tensor, frame_timesteps: torch.Tensor) -> torch.Tensor:
        seen.append((latents[:, :1].clone(), frame_timesteps.clone()))
        return torch.full_like(latents, float("nan")).index_fill(1, torch.arange(1, 4), 0.5)

    result = sample_unipc(velocity, noise, timesteps, sigmas, anchor)
    assert torch.equal(result[:, :1], anchor)
    assert torch.isfinite(result).all()
    for (first, frame_timesteps), timestep in zip(seen, timesteps, strict=True):
        assert torch.equal(first, anchor)
        assert frame_timesteps.tolist() == [[0.0] + [float(timestep)] * 3] * 2


def test_equal_integer_timesteps_do_not_skip_a_step() -> None:
    timesteps, sigmas = unipc_grid(1000, 5.0)
    assert len(set(timesteps)) < len(timesteps)
    calls = 0

    def velocity(latents: torch.Tensor, frame_timesteps: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.zeros_like(latents)

    sample_unipc(velocity, torch.randn(1, 1, 1, 1, 1), timesteps, sigmas)
    assert calls == 1000
