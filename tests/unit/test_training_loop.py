"""The optimizer step on a small model: order of effects, non-finite values, failures, stop requests, metrics."""

from __future__ import annotations

import json
import os
import signal
from functools import partial

import pytest
import torch

from solarwm_lib.data.failures import Replacement
from solarwm_lib.data.sampling import batch_digest, digest_text
from solarwm_lib.runtime.errors import ArtifactError, DataError, NonFiniteError
from solarwm_lib.runtime.process import Heartbeat, StopRequest
from solarwm_lib.training import loop, metrics, optim
from solarwm_lib.training.batches import Batch
from solarwm_lib.training.ema import Ema, EmaCadence
from solarwm_lib.training.topology import BatchPlan, Topology


class Stream:
    """Batches whose latents are a function of the sample index; `poison` replaces the latents of one index.

    `unreadable` maps an index to the reason for which another clip stands in for its own.
    """

    def __init__(self, poison=None, missing=None, unreadable=None, workers=0):
        self.poison, self.missing, self.unreadable = poison or {}, missing, unreadable or {}
        self.workers, self.loaded, self.ahead, self.allowed = workers, [], [], []

    def load(self, indices, following=(), allowed=0):
        self.loaded += list(indices)
        self.ahead.append(list(following))
        self.allowed.append(allowed)
        if self.missing in indices:
            raise DataError(f"shard of sample {self.missing} is gone")
        latents = torch.stack([torch.full((2, 1, 1, 3), self.poison.get(i, (i % 7) / 7)) for i in indices])
        n = len(indices)
        w2c = torch.eye(4).repeat(n, 2, 1, 1)
        w2c[:, 1, 0, 3] = 0.25
        return Batch(
            tuple(indices),
            tuple(f"clip-{i}" for i in indices),
            tuple(f"clip-{i}#0.0" for i in indices),
            (0,) * n,
            ("a room",) * n,
            latents,
            torch.zeros(n, 1, 2),
            w2c,
            torch.eye(3).repeat(n, 1, 1),
            tuple(
                Replacement(self.unreadable[i], f"sample 'clip-{i}': damaged")
                for i in indices
                if i in self.unreadable
            ),
        )


def _trainer(run_dir, stream=None, micro=2, accumulation=2, stop=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    parameters = dict(model.named_parameters())

    def objective(batch):
        error = (model(batch.latents) - 2 * batch.latents).square().flatten(1).mean(1)
        return loop.Loss(error.mean(), error.detach(), [100.0 + i for i in batch.indices])

    schedule = partial(optim.learning_rate, base=0.05, warmup_steps=2, total_steps=20, minimum_ratio=0.1)
    learner = loop.Learner(
        parameters,
        optim.adamw(parameters.values(), learning_rate=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01),
        Ema.of(parameters, EmaCadence(0.9)),
        schedule,
        gradient_clip=1.0,
    )
    plan = BatchPlan(micro * accumulation, micro, accumulation, 1)
    return loop.Trainer(
        learner,
        objective,
        stream or Stream(),
        plan,
        Topology(),
        run_dir,
        Heartbeat(run_dir, 0),
        stop or StopRequest(),
    )


def _snapshot(learner):
    state = {n: p.detach().clone() for n, p in learner.parameters.items()}
    state |= {f"ema.{n}": t.clone() for n, t in learner.ema.shadow.items()}
    for i, slots in enumerate(learner.optimizer.state.values()):
        state |= {f"{i}.{slot}": t.clone() for slot, t in slots.items()}
    return state


def test_each_step_consumes_the_next_global_batch_in_order(tmp_path):
    trainer = _trainer(tmp_path)
    for _ in range(3):
        trainer.step()
    assert trainer.batches.loaded == list(range(12))
    assert trainer.learner.completed_steps == 3 and trainer.learner.ema.updates == 3


def test_a_save_that_failed_in_the_background_ends_the_next_step_before_it_changes_anything(tmp_path):
    trainer = _trainer(tmp_path)
    trainer.step()
    before = _snapshot(trainer.learner)
    trainer.background_failure = lambda: ArtifactError("disk full while writing step 1")
    with pytest.raises(ArtifactError, match="disk full while writing step 1"):
        trainer.step()
    assert trainer.learner.completed_steps == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in _snapshot(trainer.learner).items())


def test_record_holds_the_global_mean_loss_and_the_rate_the_step_used(tmp_path):
    trainer = _trainer(tmp_path)
    expected = trainer.objective(trainer.batches.load(range(4))).loss.item()
    first, _ = trainer.step()
    second, _ = trainer.step()
    assert first.loss == pytest.approx(expected, rel=1e-6)
    assert (first.learning_rate, second.learning_rate) == (0.0, 0.025)
    assert first.step == 1 and first.memory_bytes > 0 and first.samples_per_second > 0


def test_accumulation_and_one_large_micro_batch_give_the_same_gradient(tmp_path):
    split, whole = _trainer(tmp_path, micro=1, accumulation=4), _trainer(tmp_path, micro=4, accumulation=1)
    for _ in range(3):
        a, b = split.step()[0], whole.step()[0]
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-5)
    for name, value in split.learner.parameters.items():
        torch.testing.assert_close(value, whole.learner.parameters[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_non_finite_loss_changes_nothing_and_names_the_sample(tmp_path, value):
    trainer = _trainer(tmp_path, Stream(poison={9: value}))
    trainer.step()
    trainer.step()
    before = _snapshot(trainer.learner)
    with pytest.raises(NonFiniteError, match=r"step 3 on rank 0, samples clip-9;") as caught:
        trainer.step()
    assert caught.value.exit_code == 5
    assert trainer.learner.completed_steps == 2 and trainer.learner.ema.updates == 2
    after = _snapshot(trainer.learner)
    assert all(torch.equal(before[name], after[name]) for name in before)

    dump = json.loads((tmp_path / "diagnostics" / "nonfinite-step-000003-rank-00000.json").read_text())
    bad = next(s for s in dump["samples"] if s["sample_id"] == "clip-9")
    assert dump["step"] == 3 and dump["quantity"] == "loss" and len(dump["samples"]) == 4
    assert bad["timestep"] == 109.0 and bad["camera_translation_norms"] == [0.0, 0.25]
    assert isinstance(bad["loss"], str) and bad["latents"]["shape"] == [2, 1, 1, 3]


def test_a_non_finite_gradient_under_a_finite_loss_is_refused_too(tmp_path):
    trainer = _trainer(tmp_path)
    trainer.learner.parameters["weight"].register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(NonFiniteError, match="non-finite gradient"):
        trainer.step()
    dump = json.loads((tmp_path / "diagnostics" / "nonfinite-step-000001-rank-00000.json").read_text())
    assert dump["bad_gradients"][0]["name"] == "weight" and dump["bad_gradients"][0]["nan"] == 9


def test_a_failed_read_is_raised_with_the_state_unchanged(tmp_path):
    trainer = _trainer(tmp_path, Stream(missing=6))
    trainer.step()
    before = _snapshot(trainer.learner)
    with pytest.raises(DataError, match="shard of sample 6 is gone"):
        trainer.step()
    assert all(torch.equal(before[n], t) for n, t in _snapshot(trainer.learner).items())


def test_the_record_tells_which_samples_the_step_read(tmp_path):
    trainer = _trainer(tmp_path)
    trainer.step()
    record, _ = trainer.step()
    assert record.batch_digest == digest_text(batch_digest((i, f"clip-{i}#0.0") for i in range(4, 8)))
    assert record.replaced == {}


def test_enough_samples_are_named_ahead_for_every_thread(tmp_path):
    trainer = _trainer(tmp_path, Stream(workers=5))
    trainer.step()
    assert trainer.batches.ahead == [[2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 8, 9]]
    trainer = _trainer(tmp_path, Stream())
    trainer.step()
    assert trainer.batches.ahead == [[2, 3], [4, 5]]


def test_replaced_clips_are_counted_over_the_run_and_guards_cost_nothing(tmp_path):
    unreadable = {0: "video", 3: "camera_guard", 5: "camera_guard", 9: "video", 10: "shard"}
    trainer = _trainer(tmp_path, Stream(unreadable=unreadable))
    trainer.failure_budget = 3
    records = [trainer.step()[0].replaced for _ in range(3)]
    assert records == [
        {"camera_guard": 1, "video": 1},
        {"camera_guard": 2, "video": 1},
        {"camera_guard": 2, "video": 2, "shard": 1},
    ]
    assert trainer.learner.replaced == records[-1]
    assert trainer.batches.allowed == [3, 2, 2, 2, 2, 1]


def test_a_spent_failure_budget_ends_the_run_before_the_optimizer_moves(tmp_path):
    trainer = _trainer(tmp_path, Stream(unreadable={1: "video", 4: "shard", 7: "camera_guard"}))
    trainer.failure_budget = 1
    trainer.step()
    before = _snapshot(trainer.learner)
    message = (
        r"2 clips of this run could not be read \(video 1, shard 1\) and data\.failure_budget is 1: "
        r"sample 'clip-4': damaged; repair or remove them, or raise data\.failure_budget"
    )
    with pytest.raises(DataError, match=message) as caught:
        trainer.step()
    assert caught.value.exit_code == 3
    assert trainer.learner.replaced == {"video": 1} and trainer.learner.completed_steps == 1
    assert all(torch.equal(before[n], t) for n, t in _snapshot(trainer.learner).items())


def test_a_budget_lowered_below_what_was_spent_only_forbids_more(tmp_path):
    trainer = _trainer(tmp_path, Stream(unreadable={6: "video"}))
    trainer.learner.replaced = {"video": 3}
    trainer.failure_budget = 2
    assert trainer.step()[0].replaced == {"video": 3}
    with pytest.raises(DataError, match=r"4 clips of this run .*video 4.* data\.failure_budget is 2"):
        trainer.step()


def test_rolling_saves_follow_the_cadence_but_not_at_the_end(tmp_path):
    trainer, saved = _trainer(tmp_path), []
    finished = loop.fit(trainer, 6, lambda r: None, lambda: saved.append(trainer.learner.completed_steps), 2)
    assert finished and saved == [2, 4]


def test_sigterm_ends_the_loop_after_the_step_in_progress(tmp_path):
    with StopRequest() as stop:
        trainer = _trainer(tmp_path, stop=stop)

        def on_step(record):
            if record.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        assert loop.fit(trainer, 10, on_step, lambda: None, 0) is False
        assert stop.signal_name == "SIGTERM" and trainer.learner.completed_steps == 3


def test_a_second_interrupt_does_not_wait():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_heartbeat_names_phase_step_and_collective(tmp_path):
    trainer = _trainer(tmp_path)
    trainer.step()
    beat = json.loads((tmp_path / "heartbeats" / "rank-00000.json").read_text())
    assert beat["phase"] == "optimizer" and beat["step"] == 0 and beat["pid"] == os.getpid()
    Heartbeat(tmp_path, 0).beat("reduce", 7, collective="all_reduce")
    beat = json.loads((tmp_path / "heartbeats" / "rank-00000.json").read_text())
    assert (beat["phase"], beat["step"], beat["collective"]) == ("reduce", 7, "all_reduce")
    assert os.listdir(tmp_path / "heartbeats") == ["rank-00000.json"]


def _record(step):
    return metrics.StepRecord(step, 1.0 / step, 1e-4, 0.5, 0.2, 0.01, 20.0, 1000, 1.0 * step, 1.0 * step)


def test_metrics_past_the_restored_step_are_dropped(tmp_path):
    log = metrics.MetricsLog(tmp_path, 0)
    for step in range(1, 6):
        log.append(_record(step))
    log.close()
    with open(tmp_path / metrics.FILE, "a") as file:
        file.write('{"step": 6, "loss"')
    log = metrics.MetricsLog(tmp_path, 3)
    log.append(_record(4))
    log.close()
    assert [r["step"] for r in metrics.read(tmp_path / metrics.FILE)] == [1, 2, 3, 4]


def test_making_an_early_checkpoint_again_keeps_the_records_of_later_published_steps(tmp_path):
    log = metrics.MetricsLog(tmp_path, 0)
    for step in range(1, 8):
        log.append(_record(step))
    log.close()
    log = metrics.MetricsLog(tmp_path, restored_step=1, until_step=3, published_step=6)
    for step in (2, 3):
        log.append(_record(step))
    log.close()
    assert [r["step"] for r in metrics.read(tmp_path / metrics.FILE)] == [1, 2, 3, 4, 5, 6]


def test_curves_are_drawn(tmp_path):
    assert metrics.plot_curves(tmp_path) is None
    log = metrics.MetricsLog(tmp_path, 0)
    for step in range(1, 30):
        log.append(_record(step))
    log.close()
    assert metrics.plot_curves(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_unbiased_at_the_start():
    assert metrics.smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])


def test_progress_without_a_terminal_is_one_line_per_interval(capsys):
    progress = metrics.Progress(0, 4, every_steps=2, enabled=True)
    for step in range(1, 5):
        progress.update(_record(step))
    progress.close()
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]


@pytest.mark.parametrize("every_steps", [1, 2])
def test_progress_whose_reader_is_gone_does_not_end_the_training(monkeypatch, every_steps):
    read_end, write_end = os.pipe()
    os.close(read_end)
    monkeypatch.setattr("sys.stderr", os.fdopen(write_end, "w", buffering=1))
    progress = metrics.Progress(0, 4, every_steps=every_steps, enabled=True)
    for step in range(1, 5):
        progress.update(metrics.StepRecord(step, 0.5, 1e-3, 1.0, 0.1, 0.0, 8.0, 1, 0.0, 0.0))
    progress.close()
