"""`solarwm diagnose`: the first failing boundary in the order of triage, by what the real writers leave behind."""

import inspect
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from operate_world import begin, edit_heartbeat, end, start_rank

from solarwm_lib import artifacts
from solarwm_lib.cli import main
from solarwm_lib.operate.boundaries import PEERS_DIFFER
from solarwm_lib.operate.diagnose import diagnose, text
from solarwm_lib.runtime.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    DistributedError,
    MemoryExhausted,
    NonFiniteError,
    Preempted,
)
from solarwm_lib.runtime.process import Heartbeat
from solarwm_lib.runtime.watchdog import Watchdog, last_words
from solarwm_lib.training import diagnostics, peers

SAMPLE = {
    "sample_id": "room-3",
    "start_frame": 8,
    "loss": "nan",
    "timestep": 711.5,
    "camera_translation_norms": [0.0, 1.25],
    "latents": {"nan": 0, "inf": 0},
}


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "results/runs/run"


@pytest.fixture(scope="module")
def validated(tiny_world, tmp_path_factory) -> Path:
    """A run trained to step 2, of which a pass was made with one of its two slots only."""
    from solarwm_lib.inference.plan import freeze_plan
    from solarwm_lib.inference.validation import validate

    run = tmp_path_factory.mktemp("validated") / "results/runs/run"
    run.mkdir(parents=True)
    config = run.parent / "run.json"
    config.write_text(json.dumps(tiny_world.values(run)))
    assert main(["train", "--config", str(config), "--until-step", "2"]) == 0
    resolved, plan = tiny_world.resolve(run), run / "validation/frozen-plan.json"
    freeze_plan(resolved, plan)
    out = run / "validation/step_000002/live"
    validate(resolved, run / "checkpoint_model_000002", plan, "live", out, slots=[0])
    return run


def dump_non_finite(run_dir: Path, step: int, rank: int, **content) -> None:
    bad = diagnostics.bad_tensors({"blocks.0.weight": torch.tensor([1.0, float("nan")])})
    facts = {"quantity": "loss", "bad_ranks": [rank], "samples": [SAMPLE], "bad_gradients": bad}
    diagnostics.write_dump(run_dir, step, rank, {**facts, "bad_parameters": [], **content})


@pytest.mark.parametrize(
    ("error", "boundary"),
    [
        (NonFiniteError("non-finite loss in optimizer step 4"), "non-finite"),
        (MemoryExhausted("rank 0: out of memory in reduce of step 4"), "out of memory"),
        (DistributedError("hang: no rank got on for 5 s"), "hang"),
        (
            DistributedError("optimizer step 4: sequence-parallel peers differ in noise"),
            "sequence-parallel mismatch",
        ),
        (
            ArtifactError("checkpoint_model_000002: member ema.safetensors is missing"),
            "checkpoint or artifact",
        ),
        (DataError("clip room-3: cannot be decoded"), "data"),
        (ArtifactError("disk full while writing results/runs/run: No space left on device"), "disk"),
        (DistributedError("rank 0: all_reduce failed: connection closed"), "lost rank"),
        (ConfigError("another run"), "configuration"),
        (ValueError("unexpected"), "a bug in this program"),
    ],
)
def test_a_recorded_error_is_put_at_its_boundary(tiny_world, run_dir, error, boundary, capsys):
    begin(tiny_world, run_dir).end(error)
    found = diagnose(run_dir)
    assert [finding.boundary for finding in found.findings] == [boundary]
    assert (
        str(error) in found.findings[0].evidence[0]
        and "attempt-001/run-result.json" in found.findings[0].evidence[0]
    )
    capsys.readouterr()
    assert main(["diagnose", str(run_dir), "--json"]) == getattr(error, "exit_code", 1)
    assert json.loads(capsys.readouterr().out)["findings"][0]["boundary"] == boundary


def test_the_message_about_peers_is_still_the_one_that_is_looked_for():
    assert PEERS_DIFFER in inspect.getsource(peers)


@pytest.mark.parametrize("error", [None, Preempted("stopped after step 3 of 12 on request (SIGTERM)")])
def test_nothing_is_wrong_with_a_run_that_ended_as_it_should(tiny_world, run_dir, error, capsys):
    attempt = begin(tiny_world, run_dir)
    attempt.end(error)
    assert main(["diagnose", str(run_dir)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out


def test_the_first_bad_step_and_rank_come_first_with_sample_and_time(tiny_world, run_dir):
    attempt = begin(tiny_world, run_dir)
    for step, rank in ((9, 0), (7, 3), (7, 1)):
        dump_non_finite(run_dir, step, rank)
    attempt.end(NonFiniteError("non-finite loss in optimizer step 7"))
    evidence = diagnose(run_dir).findings[0].evidence
    assert "nonfinite-step-000007-rank-00001.json: step 7, rank 1, quantity loss" in evidence[0]
    assert "sample room-3 from frame 8: loss nan, timestep 711.5, camera up to 1.25" in evidence[1]
    assert "bad gradients: 1, first blocks.0.weight" in evidence[2]
    assert "step 9" in evidence[6]


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ({"bad_parameters": [{"name": "w"}]}, "the weights were bad before this step"),
        ({"samples": [{**SAMPLE, "latents": {"nan": 4, "inf": 0}}]}, "repair or remove sample room-3"),
        ({}, "lower the learning rate"),
    ],
)
def test_advice_follows_what_was_not_finite(tiny_world, run_dir, content, advice):
    attempt = begin(tiny_world, run_dir)
    dump_non_finite(run_dir, 7, 0, **content)
    attempt.end(NonFiniteError("non-finite loss"))
    assert advice in diagnose(run_dir).findings[0].advice


def test_a_non_finite_rank_explains_the_peers_that_lost_it(tiny_world, run_dir):
    attempt = begin(tiny_world, run_dir)
    dump_non_finite(run_dir, 7, 1)
    attempt.end(DistributedError("rank 0: all_gather failed: connection closed"))
    assert [finding.boundary for finding in diagnose(run_dir).findings] == ["non-finite", "lost rank"]
    assert "first failing boundary: non-finite (exit code 5)" in text(diagnose(run_dir))


def test_diagnostics_of_an_earlier_attempt_are_history(tiny_world, run_dir):
    attempt = begin(tiny_world, run_dir)
    dump_non_finite(run_dir, 7, 0)
    attempt.end(NonFiniteError("non-finite loss"))
    past = time.time() - 60
    for path in (run_dir / "diagnostics").iterdir():
        os.utime(path, (past, past))
    begin(tiny_world, run_dir).end(DataError("clip room-3"))
    found = diagnose(run_dir)
    assert [finding.boundary for finding in found.findings] == ["data"]
    assert any("nonfinite-step-000007-rank-00000.json" in note for note in found.notes)


def test_a_memory_report_is_evidence(tiny_world, run_dir):
    attempt = begin(tiny_world, run_dir)
    heartbeat = Heartbeat(run_dir, 0)
    heartbeat.beat("forward_backward", 3)
    reporter = diagnostics.Reporter(tiny_world.resolve(run_dir), run_dir, 0, 1, heartbeat)
    error = reporter.exhausted(MemoryError("cannot allocate"))
    assert error is not None
    attempt.end(error)
    finding = diagnose(run_dir).findings[0]
    assert finding.exit_code == 6 and "oom-step-000004-rank-00000.json: step 4, rank 0" in finding.evidence[0]
    assert "phase forward_backward" in finding.evidence[0] and "cannot allocate" in finding.evidence[0]


def test_the_report_of_a_watchdog_is_evidence(tiny_world, run_dir):
    attempt = begin(tiny_world, run_dir)
    heartbeat, ended = Heartbeat(run_dir, 0), []
    last_words.append(attempt.end)
    heartbeat.beat("reduce", 3, collective="all_reduce")
    with Watchdog(heartbeat, run_dir, 1, 0.3, end=ended.append):
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
    last_words.remove(attempt.end)
    assert ended == [7]
    assert [found.boundary for found in diagnose(run_dir).findings] == ["hang"]
    finding = diagnose(run_dir).findings[0]
    assert (
        finding.boundary == "hang"
        and "hang-step-000004-rank-00000.json: step 4, rank 0" in finding.evidence[0]
    )


def test_a_run_that_is_silent_now_is_a_hang_with_every_rank(tiny_world, run_dir):
    begin(tiny_world, run_dir)
    end(start_rank(run_dir))
    elsewhere = {"boot": "another", "host": "node7", "collective": "all_reduce"}
    edit_heartbeat(run_dir, 0, wall_time=time.time() - 3600, **elsewhere)
    result = run_dir / "launches/attempt-001/run-result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"started": "2020-01-01T00:00:00+00:00"}))
    finding = diagnose(run_dir).findings[0]
    assert finding.boundary == "hang" and finding.exit_code == 7
    assert "forward_backward of step 4, waiting for its peers (all_reduce)" in finding.evidence[1]


def test_a_killed_run_is_a_lost_rank_with_its_log(tiny_world, run_dir):
    begin(tiny_world, run_dir)
    end(start_rank(run_dir))
    log = run_dir.parents[1] / "logs/train_segment/run/000012.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 3/12\nsolarwm: error: rank 0 was killed by SIGKILL\n")
    finding = diagnose(run_dir).findings[0]
    assert (finding.boundary, finding.exit_code) == ("lost rank", 7)
    assert any("forward_backward of step 4" in line for line in finding.evidence)
    assert "000012.log: solarwm: error: rank 0 was killed by SIGKILL" in finding.evidence[-1]


def test_a_log_that_tells_of_memory_explains_a_killed_run(tiny_world, run_dir):
    begin(tiny_world, run_dir)
    end(start_rank(run_dir))
    log = run_dir.parents[1] / "logs/train_segment/run/000012.log"
    log.parent.mkdir(parents=True)
    log.write_text("slurmstepd: Detected 1 oom-kill event in step 7\n")
    assert [finding.boundary for finding in diagnose(run_dir).findings] == ["out of memory", "lost rank"]


def test_a_refusal_before_the_start_stands_only_in_the_log(tiny_world, run_dir):
    run_dir.mkdir(parents=True)
    (run_dir / "resolved-config.json").write_text(json.dumps(tiny_world.values(run_dir)))
    assert diagnose(run_dir).exit_code == 0
    log = run_dir.parents[1] / "logs/preflight/run.log"
    log.parent.mkdir(parents=True)
    log.write_text("solarwm: error: data.root: no such folder\n")
    finding = diagnose(run_dir).findings[0]
    assert finding.exit_code == 2 and "preflight/run.log: solarwm: error: data.root" in finding.evidence[0]


def test_slots_that_were_skipped_and_passes_that_failed_are_missing_output(validated, tmp_path):
    run = tmp_path / "results/runs/run"
    shutil.copytree(validated, run)
    finding = diagnose(run).findings[0]
    assert (finding.boundary, finding.exit_code) == ("missing validation output", 4)
    assert finding.evidence == ["step 2, pass live: 1 of 2 slots skipped"]
    made = run / "validation/step_000002/live"
    failed = made.with_name("live.failed-001")
    made.rename(failed)
    manifest = failed / "slot-000000/manifest.json"
    error = {"kind": "data", "exit_code": 3, "message": "clip cannot be decoded"}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"error": error}))
    finding = diagnose(run).findings[0]
    assert (
        finding.exit_code == 3
        and "slot 0" in finding.evidence[0]
        and "clip cannot be decoded" in finding.evidence[0]
    )
    shutil.rmtree(failed)
    assert diagnose(run).findings == [] and "step 2, pass live: not made" in diagnose(run).notes


def test_a_pass_in_the_making_is_no_failure_and_an_abandoned_one_is(validated, tmp_path):
    run = tmp_path / "results/runs/run"
    shutil.copytree(validated, run)
    made = run / "validation/step_000002/live"
    shutil.rmtree(made)
    transaction = artifacts.Transaction(made, "solarwm.validation.v1", {"step": 2})
    transaction.__enter__()
    assert diagnose(run).findings == []
    owner = transaction.staging / ".owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"start": "1"}))
    assert "a write that nobody finishes" in diagnose(run).findings[0].evidence[0]


def test_a_damaged_save_is_found_in_a_run_that_is_complete(validated, tmp_path):
    run = tmp_path / "results/runs/run"
    shutil.copytree(validated, run)
    (run / "checkpoint_model_000002/optimizer.safetensors").write_bytes(b"short")
    found = diagnose(run)
    assert found.findings[0].boundary == "checkpoint or artifact" and found.exit_code == 4
    assert "optimizer.safetensors" in found.findings[0].evidence[0]
