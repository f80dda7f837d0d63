"""Autoregressive sampling against references written out chunk by chunk, in float64, and its invariants."""

from __future__ import annotations

from functools import partial

import backbone_cases as cases
import numpy as np
import pytest
import torch
from torch import Tensor

from solarwm_lib.inference.generate import Causal, Sampling, initial_noise, step_noise
from solarwm_lib.inference.rollout import history_frames, roll_out_cached, roll_out_windows
from solarwm_lib.inference.samplers import sample_flowmap, sample_unipc, unipc_grid
from solarwm_lib.objectives import self_gradient_forcing as sgf
from solarwm_lib.objectives.anyflow import sampling_pairs
from solarwm_lib.objectives.noise import schedule
from solarwm_lib.runtime.errors import ConfigError

CHUNK = 2
RECIPE = sgf.Recipe(schedule(5.0), (1000.0, 937.5, 2500 / 3, 625.0), chunk=CHUNK, window=6)


def case(frames: int, batch: int = 2) -> tuple[Tensor, Tensor, sgf.Conditions]:
    """Return noise `[B,T,C,h,w]`, anchor and conditions in float64."""
    given = {name: value.double() for name, value in cases.inputs(batch, frames).items()}
    anchor = torch.randn(batch, 1, 8, 4, 6, generator=torch.Generator().manual_seed(3)).double()
    return given["latents"], anchor, sgf.Conditions(given["prompt_embeds"], given["w2c"], given["intrinsics"])


def renoise(noise: Tensor, steps: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(noise.shape, generator=generator).double() for _ in range(steps - 1))


@pytest.fixture(scope="module")
def model():
    return cases.backbone().double().eval()


@pytest.fixture(scope="module")
def flow_map():
    backbone = cases.backbone(anyflow=True).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # the second time MLP starts as a copy of the first; here it must tell r from t
        for name, value in backbone.trainable():
            if "delta_embedder" in name:
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return backbone


def counted(backbone) -> list[int]:
    """Return a list that gets the number of frames of every forward of the transformer."""
    seen: list[int] = []
    backbone.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["hidden_states"].shape[2]), with_kwargs=True
    )
    return seen


def test_history_is_the_last_prior_chunks_and_the_sink() -> None:
    assert history_frames(0, 3, 5) == []
    assert history_frames(15, 3, 5) == list(range(15))
    assert history_frames(18, 3, 5) == list(range(3, 18))
    assert history_frames(18, 3, 5, sink=3) == list(range(18))
    assert history_frames(21, 3, 5, sink=3) == [0, 1, 2, *range(6, 21)]


def test_flow_map_follows_its_pairs() -> None:
    """Against x - (t - r)/N U written out; shift 5 in 4 steps passes 937.5, 833.3 and 625."""
    pairs = sampling_pairs(4, 5.0)
    assert [t for t, _ in pairs] == pytest.approx([1000, 937.5, 833.33333, 625]) and pairs[-1][1] == 0
    noise, anchor, _ = case(3)
    seen = []

    def field(latents: Tensor, t: Tensor, r: Tensor) -> Tensor:
        seen.append((t.clone(), r.clone()))
        return 0.1 * latents + t[:, :, None, None, None] / 1000 - r[:, :, None, None, None] / 2000

    expected = torch.cat([anchor, noise[:, 1:]], dim=1)
    for t, r in pairs:
        step = (t - r) / 1000 * (0.1 * expected + t / 1000 - r / 2000)
        expected = torch.cat([anchor, (expected - step)[:, 1:]], dim=1)
    result = sample_flowmap(field, noise, pairs, anchor)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)  # times are float32
    assert torch.equal(result[:, :1], anchor)
    for (t, r), (pair_t, pair_r) in zip(seen, pairs, strict=True):
        assert (t[:, 0] == 0).all() and (r[:, 0] == 0).all()
        assert t[0, 1].item() == pytest.approx(pair_t) and r[0, 1].item() == pytest.approx(pair_r)


def test_a_bad_velocity_of_the_anchor_does_not_spread() -> None:
    noise, anchor, _ = case(3)

    def field(latents: Tensor, t: Tensor, r: Tensor) -> Tensor:
        return torch.where(t[:, :, None, None, None] == 0, float("nan"), 0.5)

    result = sample_flowmap(field, noise, sampling_pairs(3, 3.0), anchor)
    assert torch.isfinite(result).all() and torch.equal(result[:, :1], anchor)


def test_cached_rollout_equals_recomputation_without_a_cache(model) -> None:
    """Float64, 1e-10, while the window has not moved: reference by `window_velocity` over all chunks so far."""
    noise, anchor, conditions = case(6)
    fresh = renoise(noise)
    with cases.double_precision(), torch.no_grad():
        found = roll_out_cached(model, noise, fresh, anchor, conditions, RECIPE)
        done = noise[:, :0]
        for first in range(0, 6, CHUNK):
            here = slice(first, first + CHUNK)
            still = torch.zeros(2, first).double()

            def velocity(latents, timesteps, history=done, still=still, last=first + CHUNK):
                cameras = conditions.w2c[:, :last]
                return model.window_velocity(
                    history, latents, still, timesteps, conditions.prompt_embeds, cameras, conditions.intrinsics,
                    chunk=CHUNK, rebase=False,
                )  # fmt: skip

            steps = [step[:, here] for step in fresh]
            start = anchor if first == 0 else None
            cleans = sgf.denoise_chunk(
                velocity, noise[:, here], steps, RECIPE.timesteps, RECIPE.table, start
            )[1]
            done = torch.cat([done, cleans[-1]], dim=1)
    torch.testing.assert_close(found, done, rtol=0, atol=1e-10)
    assert torch.equal(found[:, :1], anchor)


def test_sampling_repeats_the_training_rollout_whose_exit_is_the_last_step(model) -> None:
    """Bit for bit: the same student, noise and window."""
    noise, anchor, conditions = case(8)
    fresh = renoise(noise)
    draws = sgf.Draws(torch.tensor([3, 3]), noise, torch.stack(fresh), torch.zeros(2), noise)
    with cases.double_precision():
        record = sgf.rollout(model, anchor, conditions, draws, RECIPE)
        with torch.no_grad():
            found = roll_out_cached(model, noise, fresh, anchor, conditions, RECIPE)
    assert torch.equal(found, record.context)


@pytest.mark.parametrize("solver", ["unipc", "flowmap"])
def test_window_rollout_equals_its_chunks_written_out(flow_map, solver) -> None:
    """Two prior chunks, four chunks: the last one's history starts at frame 2, its cameras are relative to that frame."""
    noise, anchor, conditions = case(8)
    noise, anchor = noise.float(), anchor.float()
    grid, pairs = unipc_grid(3, 5.0), sampling_pairs(3, 5.0)
    model = cases.backbone(anyflow=True).eval()
    model.load_state_dict(flow_map.state_dict())
    conditions = sgf.Conditions(*(value.float() for value in vars(conditions).values()))

    def solve(velocity, noise, anchor):
        if solver == "flowmap":
            return sample_flowmap(velocity, noise, pairs, anchor)
        return sample_unipc(velocity, noise, *grid, anchor)

    with torch.no_grad():
        found = roll_out_windows(model, noise, anchor, conditions, solve, chunk=CHUNK, prior_chunks=2)
        done = noise[:, :0]
        for first in range(0, 8, CHUNK):
            past = max(0, first - 4)
            cameras = conditions.w2c[:, past : first + CHUNK]
            rebased = cameras @ torch.linalg.inv(cameras[:, :1])

            def velocity(latents, t, r=None, history=done[:, past:], rebased=rebased):
                return model.window_velocity(
                    history, latents, torch.zeros(history.shape[:2]), t, conditions.prompt_embeds, rebased,
                    conditions.intrinsics, chunk=CHUNK, r=r, rebase=False,
                )  # fmt: skip

            chunk = solve(velocity, noise[:, first : first + CHUNK], anchor if first == 0 else None)
            done = torch.cat([done, chunk], dim=1)
    torch.testing.assert_close(found, done, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:, :1], anchor)


def test_forwards_per_chunk(model, flow_map) -> None:
    """4 + 1 per chunk of a student, one per step of a Stage1 chunk over at most its history."""
    noise, anchor, conditions = case(6)
    student, stage1 = counted(model), counted(flow_map)
    steps = []
    solve = partial(sample_flowmap, pairs=sampling_pairs(2, 5.0))
    with cases.double_precision(), torch.no_grad():
        roll_out_cached(model, noise, renoise(noise), anchor, conditions, RECIPE)
        found = roll_out_windows(
            flow_map, noise, anchor, conditions, lambda v, n, a: solve(v, n, anchor=a), chunk=CHUNK, prior_chunks=1,
            on_chunk=lambda *progress: steps.append(progress),
        )  # fmt: skip
    assert student == [CHUNK] * 3 * 5
    assert stage1 == [2, 2, 4, 4, 4, 4]
    assert [progress[:2] for progress in steps] == [(1, 3), (2, 3), (3, 3)]
    assert torch.equal(torch.cat([latents for _, _, latents in steps], dim=1), found)


def test_a_longer_horizon_begins_with_the_shorter_one(model) -> None:
    """Noise of a case and chunks of a rollout do not depend on what follows: bit for bit."""
    key = (42, "clip", 0)
    shape = (8, 4, 6)
    assert np.array_equal(initial_noise((8, *shape), key)[:4], initial_noise((4, *shape), key))
    assert np.array_equal(step_noise((8, *shape), key, 4)[:, :4], step_noise((4, *shape), key, 4))
    assert step_noise((4, *shape), key, 1).shape == (0, 4, *shape)
    noise, anchor, conditions = case(8)
    short = sgf.Conditions(conditions.prompt_embeds, conditions.w2c[:, :4], conditions.intrinsics)
    fresh = renoise(noise)
    with cases.double_precision(), torch.no_grad():
        long = roll_out_cached(model, noise, fresh, anchor, conditions, RECIPE)
        begun = roll_out_cached(model, noise[:, :4], [s[:, :4] for s in fresh], anchor, short, RECIPE)
    assert torch.equal(long[:, :4], begun)


def test_a_rollout_that_is_not_finite_ends(model) -> None:
    noise, anchor, conditions = case(6)
    noise = noise.clone()
    noise[:, 2:4] = float("nan")
    seen = []
    with cases.double_precision(), torch.no_grad():
        found = roll_out_cached(
            model, noise, renoise(noise), anchor, conditions, RECIPE, on_chunk=lambda *p: seen.append(p)
        )
    assert [progress[:2] for progress in seen] == [(1, 3), (2, 3)]
    assert torch.equal(seen[0][2], found[:, :2])
    assert torch.isfinite(found[:, :2]).all() and torch.isnan(found[:, 4:]).all()
    assert found.shape == noise.shape


@pytest.mark.parametrize("anyflow", [False, True])
def test_bfloat16_weights_keep_float32_latents(anyflow) -> None:
    """As on a GPU: the network computes in bfloat16, the solver does not; the anchor survives bit for bit."""
    noise, anchor, conditions = (
        x.float() if isinstance(x, Tensor) else sgf.Conditions(*(value.float() for value in vars(x).values()))
        for x in case(6)
    )
    wide = cases.backbone(anyflow=anyflow).eval()
    narrow = cases.backbone(anyflow=anyflow).bfloat16().eval()
    fresh = [step.float() for step in renoise(noise)]

    def solve(velocity, noise, anchor):
        if anyflow:
            return sample_flowmap(velocity, noise, sampling_pairs(2, 5.0), anchor)
        return sample_unipc(velocity, noise, *unipc_grid(2, 5.0), anchor)

    def both(model):
        windows = roll_out_windows(model, noise, anchor, conditions, solve, chunk=CHUNK, prior_chunks=2)
        return windows, roll_out_cached(model, noise, fresh, anchor, conditions, RECIPE)

    with torch.no_grad():
        for found, expected in zip(both(narrow), both(wide), strict=True):
            assert found.dtype == torch.float32 and torch.equal(found[:, :1], anchor)
            assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_broken_chunks_are_refused(model) -> None:
    noise, anchor, conditions = case(3)
    with pytest.raises(ValueError, match="3 latent frames; expected a multiple of the chunk of 2"):
        roll_out_cached(model, noise, renoise(noise), anchor, conditions, RECIPE)


def test_steps_of_each_solver() -> None:
    causal = Causal(3, 5, 18, denoising_labels=(1000, 750, 500, 250))
    student = Sampling("autoregressive", "self_forcing", 4, 5.0, 21, causal)
    assert student.timesteps() == pytest.approx([1000, 937.5, 833.33333, 625])
    assert torch.tensor(student.timesteps()).bfloat16().tolist() == [1000, 936, 832, 624]
    assert Sampling("autoregressive", "unipc", 50, 5.0, 21, causal).timesteps()[:4] == [999, 995, 991, 987]
    assert Sampling("autoregressive", "flowmap", 2, 5.0, 21, causal).timesteps() == pytest.approx(
        [1000, 833.33333]
    )
    for steps in (50, 4):
        raw = Sampling("autoregressive", "flowmap", steps, 5.0, 21, causal).timesteps()
        base = np.linspace(1, 0, steps + 1)[:-1]
        assert raw == pytest.approx(5000 * base / (1 + 4 * base))
    assert (causal.visible("self_forcing"), causal.visible("unipc")) == (18, 18)
    with pytest.raises(ConfigError, match=r"num_inference_steps is 8, the student is trained for 4 steps"):
        Sampling("autoregressive", "self_forcing", 8, 5.0, 21, causal).timesteps()
    with pytest.raises(ConfigError, match="'bidirectional' with solver 'flowmap' is not a way to sample"):
        Sampling("bidirectional", "flowmap", 4, 5.0, 21).timesteps()
