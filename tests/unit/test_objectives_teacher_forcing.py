"""Stage1 baseline (spec wan22 4.2): one timestep per chunk, Stage0.5's loss with a weight per frame, the clean half clean."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import CHANNELS, SIZE, ToyBackbone, clips

from solarwm_lib.objectives import flow_matching as fm
from solarwm_lib.objectives import teacher_forcing as tf

FRAMES, CHUNK = 9, 3
SHAPE = (FRAMES, CHANNELS, SIZE, SIZE)
WINDOW = {"chunk": CHUNK, "max_prior_clean_chunks": 5}


def draw(indices, dropout=0.1, **changes):
    options = {
        "seed": 42,
        "global_batch_size": 8,
        "chunk": CHUNK,
        "image_condition_dropout": dropout,
    } | changes
    return tf.draw(SHAPE, global_sample_indices=indices, **options)


class Fixed:
    """A backbone that predicts a given velocity and keeps what it was called with."""

    def __init__(self, field):
        self.field = field

    def teacher_forced_velocity(self, clean, noisy, timesteps, *arguments, **options):
        self.clean, self.noisy, self.timesteps, self.options = clean, noisy, timesteps, options
        return self.field(noisy)


def test_the_frames_of_a_chunk_share_a_timestep_and_chunks_do_not():
    index = draw(range(64)).index.view(64, FRAMES // CHUNK, CHUNK)
    assert torch.equal(index.amin(dim=2), index.amax(dim=2))
    different = [len(set(row[:, 0].tolist())) == 3 for row in index]
    assert sum(different) >= 60


def test_timesteps_are_uniform_over_the_table():
    index = draw(range(2000)).index
    assert index.min() < 10 and index.max() >= 990
    assert index.double().mean().item() == pytest.approx(499.5, abs=12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]))
def test_draws_do_not_depend_on_how_a_global_batch_is_split(step, parts):
    indices = list(range(step * 8, step * 8 + 8))
    whole = draw(indices)
    for part in range(parts):
        split = draw(indices[part::parts])
        for name in ("index", "noise", "dropped"):
            assert torch.equal(getattr(split, name), getattr(whole, name)[part::parts])


def test_noise_and_dropped_samples_are_those_of_stage0p5():
    bidirectional = fm.draw(
        SHAPE, seed=42, global_sample_indices=range(40), global_batch_size=8, image_condition_dropout=0.3
    )
    causal = draw(range(40), dropout=0.3)
    assert torch.equal(causal.noise, bidirectional.noise)
    assert torch.equal(causal.dropped, bidirectional.dropped) and 0 < causal.dropped.sum() < 40


def test_frames_that_do_not_fill_chunks_are_refused():
    with pytest.raises(ValueError, match="9 latent frames; expected a multiple of the chunk of 4"):
        draw([0], chunk=4)


def test_latent_0_is_clean_unless_dropped_and_the_clean_half_always():
    latents, *rest = clips(2, FRAMES)
    draws = draw([0, 1])
    draws = fm.Draws(draws.index, draws.noise, torch.tensor([False, True]))
    table = fm.schedule(5.0)
    model = Fixed(torch.zeros_like)
    tf.loss(model, latents, *rest, draws, table, **WINDOW)
    assert model.clean is latents and "clean_timesteps" not in model.options
    assert torch.equal(model.noisy[0, 0], latents[0, 0]) and model.timesteps[0, 0] == 0
    assert not torch.equal(model.noisy[1, 0], latents[1, 0])
    assert model.timesteps[1].tolist() == pytest.approx(table.timesteps[draws.index[1].numpy()].tolist())
    assert model.timesteps[0, 1] == model.timesteps[0, 2] > 0
    assert model.options == {"chunk": 3, "max_prior_clean_chunks": 5, "sink": 0}


def test_loss_equals_a_frame_by_frame_reference():
    latents, *rest = clips(3, FRAMES)
    draws, table, model = draw(range(3), dropout=0.4), fm.schedule(5.0), ToyBackbone()
    draws = fm.Draws(draws.index, draws.noise.double(), torch.tensor([False, True, False]))
    out = tf.loss(model, latents, *rest, draws, table, **WINDOW)

    expected = []
    for row in range(3):
        noisy, times = latents[row].clone(), torch.zeros(FRAMES, dtype=torch.float64)
        first = 0 if draws.dropped[row] else 1
        for frame in range(first, FRAMES):
            entry = draws.index[row, frame]
            sigma = table.sigmas[entry]
            noisy[frame] = (1 - sigma) * latents[row, frame] + sigma * draws.noise[row, frame]
            # The backbone is given float32 timesteps.
            times[frame] = torch.tensor(table.timesteps[entry]).float()
        context, *conditions = (x[row : row + 1] for x in (latents, *rest))
        velocity = model.teacher_forced_velocity(context, noisy[None], times[None], *conditions, **WINDOW)[0]
        total = sum(
            # The weights of the table are float32 in the loss.
            float(torch.tensor(table.weights[draws.index[row, frame]]).float())
            * (velocity[frame] - (draws.noise[row, frame] - latents[row, frame])).square().sum()
            for frame in range(first, FRAMES)
        )
        expected.append(total / ((FRAMES - first) * CHANNELS * SIZE**2))
    torch.testing.assert_close(out.per_sample, torch.stack(expected).detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(out.loss, torch.stack(expected).mean(), rtol=1e-10, atol=0)


def test_the_true_velocity_has_no_loss_and_non_finite_anchors_do_not_leak():
    latents, *rest = clips(2, FRAMES)
    draws = draw([3, 4], dropout=0.0)

    def field(noisy):
        velocity = draws.noise.double() - latents
        velocity[:, 0] = float("nan")
        return velocity

    assert tf.loss(Fixed(field), latents, *rest, draws, fm.schedule(5.0), **WINDOW).loss == 0


def test_loss_does_not_depend_on_the_micro_batch():
    latents, *rest = clips(4, FRAMES)
    table, model = fm.schedule(3.0), ToyBackbone()
    whole = tf.loss(model, latents, *rest, draw(range(4)), table, **WINDOW).loss
    single = [
        tf.loss(model, *(x[i : i + 1] for x in (latents, *rest)), draw([i]), table, **WINDOW).loss
        for i in range(4)
    ]
    torch.testing.assert_close(whole, torch.stack(single).mean(), rtol=1e-12, atol=0)
