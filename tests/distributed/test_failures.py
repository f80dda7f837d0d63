"""Nothing hangs silently: real faults in one of two processes end both, with the exit code and a report that name the cause."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from solarwm_lib.runtime.errors import Preempted
from solarwm_lib.runtime.owner import start_time
from solarwm_lib.training import checkpoint, metrics, setup, train

pytestmark = pytest.mark.slow  # each starts processes that train

ROOT = Path(__file__).parents[2]
BOUND = 60  # seconds from the fault to the end of everything
STEPS = 2000  # more than are reached

# Runs the command line with one thing of the outside world broken in rank 1, at the forward pass of step 4.
WORKER = """
import dataclasses, os, signal, sys, time
import torch
from solarwm_lib import cli
from solarwm_lib.objectives import flow_matching
from solarwm_lib.training import batches, writing

fault, rank, loss, save, load = os.environ["FAULT"], os.environ["RANK"], flow_matching.loss, writing.write_main, batches.Batches.load
calls = []

def broken(backbone, latents, *rest):
    if len(calls) == 4 and rank == "1":
        if fault == "sleep":
            time.sleep(600)
        elif fault == "exit":
            os._exit(9)
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "memory":
            torch.empty(2**60)
    return loss(backbone, latents, *rest)

def loaded(*words):
    calls.append(1)
    batch = load(*words)
    if fault == "nan" and len(calls) == 4 and rank == "1":
        batch.latents[1] = float("nan")
    if fault == "prompt" and len(calls) == 4 and rank == "1":
        return dataclasses.replace(batch, captions=("another prompt", *batch.captions[1:]))
    return batch

def slow(*words, **named):
    time.sleep(4)
    return save(*words, **named)

batches.Batches.load = loaded
flow_matching.loss = broken
if fault == "slow save":
    writing.write_main = slow
sys.exit(cli.main())
"""


def start(values: dict, folder: Path, fault: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "run.json").write_text(json.dumps(values))
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "solarwm_lib.runtime.torchrun", "--standalone", "--nproc-per-node=2"]
    command += [str(folder / "worker.py"), "train", "--config", str(folder / "run.json"), *words]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "FAULT": fault,
        **environment,
    }
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def two(tiny_world, run_dir: Path, **changes) -> dict:
    changes = {"train__micro_batch_size": 2, "distributed": {"world_size": 2}, **changes}
    return tiny_world.values(run_dir, train__max_steps=STEPS, **changes)


def ended(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """Return what the process printed; it must end."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still runs: {process.communicate()[1]}") from None


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps(run_dir: Path) -> int:
    return len(metrics.read(run_dir / metrics.FILE)) if (run_dir / metrics.FILE).exists() else 0


def heartbeat(run_dir: Path, rank: int) -> dict:
    return json.loads((run_dir / "heartbeats" / f"rank-{rank:05d}.json").read_text())


def report(run_dir: Path, name: str) -> dict:
    return json.loads((run_dir / "diagnostics" / name).read_text())


def saved(run_dir: Path) -> Path:
    """The newest save, which must verify."""
    newest = checkpoint.candidates(run_dir, STEPS)[0][0]
    return checkpoint.open_verified(newest.path).path


def test_a_nan_in_one_rank_s_batch_names_rank_step_and_sample(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    with start(two(tiny_world, run_dir), tmp_path, "nan") as process:
        printed = ended(process)
    assert process.returncode == 5, printed
    dump = report(run_dir, "nonfinite-step-000004-rank-00001.json")
    poisoned = dump["samples"][1]
    assert poisoned["latents"]["nan"] and not dump["samples"][0]["latents"]["nan"]
    line = f"rank 1: non-finite loss in optimizer step 4 on rank 1, samples {poisoned['sample_id']};"
    assert line in printed and "exit code 5 (non_finite)" in printed
    assert saved(run_dir).name == "step_000002"


def test_a_rank_that_gets_stuck_is_named_by_those_that_wait(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    with start(two(tiny_world, run_dir, runtime__hang_timeout_seconds=6), tmp_path, "sleep") as process:
        until(lambda: steps(run_dir) == 3)
        fault = time.monotonic()
        printed = ended(process)
    assert process.returncode == 7 and time.monotonic() - fault < BOUND, printed
    line = next(line for line in printed.splitlines() if "solarwm: error: hang" in line)
    pid = heartbeat(run_dir, 1)["pid"]
    assert re.search(rf"rank 1 \(pid {pid} on .*\) is in forward_backward of step 4 for \d+ s", line), line
    assert "ranks 0 wait" in line and printed.count("solarwm: error: hang") == 1
    dump = report(run_dir, "hang-step-000004-rank-00001.json")
    assert dump["behind"] == [1] and dump["waiting"] == [0]
    assert (
        "time.sleep(600)" in dump["stacks"][next(name for name in dump["stacks"] if "MainThread" in name)][-1]
    )
    assert report(run_dir, "hang-step-000004-rank-00000.json")["behind"] == [1]
    assert json.loads((run_dir / "run-result.json").read_bytes())["exit_code"] == 7


@pytest.mark.parametrize(
    "fault, code, last",
    [("exit", 9, "ended with exit code 9"), ("kill", 137, "was killed by SIGKILL")],
)
def test_a_rank_that_is_gone_is_named_with_its_place(tiny_world, tmp_path, fault, code, last):
    run_dir = tmp_path / "run"
    with start(two(tiny_world, run_dir), tmp_path, fault) as process:
        printed = ended(process)
    assert process.returncode == code, printed
    pid = heartbeat(run_dir, 1)["pid"]
    gone = rf"rank 0: .* rank 1 \(pid {pid} on .*\) is gone; its last heartbeat: forward_backward of step 4"
    assert re.search(gone, printed), printed
    final = printed.splitlines()[-1]
    assert f"rank 1 (pid {pid}) {last}; its last heartbeat: forward_backward of step 4" in final
    assert ("memory ran out" in final) == (fault == "kill")
    assert saved(run_dir).name == "step_000002"
    if fault == "kill":  # the same run on one process
        train.run(tiny_world.resolve(run_dir, train__max_steps=STEPS), run_dir=run_dir, until_step=5)
        assert [record["step"] for record in metrics.read(run_dir / metrics.FILE)] == [1, 2, 3, 4, 5]


def test_a_lack_of_memory_in_one_rank_names_what_to_lower(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    with start(two(tiny_world, run_dir), tmp_path, "memory") as process:
        printed = ended(process)
    assert process.returncode == 6, printed
    assert "rank 1: out of memory in forward_backward of step 4: " in printed
    assert re.search(r"peak \d+ MiB, \d+ MiB of tensors predicted, latents \[2, 2, \d+, 2, 2\]", printed), (
        printed
    )
    for key in ("activation_checkpointing", "micro_batch_size (now 2)", "sequence_parallel_size", "strategy"):
        assert key in printed
    dump = report(run_dir, "oom-step-000004-rank-00001.json")
    assert dump["measured"]["resident_bytes"] > 0 and dump["settings"]["train.micro_batch_size"] == 2
    assert all(isinstance(part, int) for part in dump["planned"].values())
    assert json.loads((run_dir / "run-result.json").read_bytes())["exit_code"] == 6


def test_in_a_sharded_network_the_peers_name_who_left_the_pass(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    with start(two(tiny_world, run_dir, train__strategy="full_shard"), tmp_path, "memory") as process:
        printed = ended(process)
    assert process.returncode == 6 and "Traceback" not in printed, printed
    assert "solarwm: error: rank 1: out of memory in forward_backward of step 4: " in printed
    assert (run_dir / "diagnostics" / "oom-step-000004-rank-00001.json").exists()


def test_a_peer_with_another_prompt_is_named_with_what_differs(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    peers = {"world_size": 2, "sequence_parallel_size": 2}
    values = two(tiny_world, run_dir, distributed=peers, train__micro_batch_size=4)
    with start(values, tmp_path, "prompt") as process:
        until(lambda: steps(run_dir) == 3)
        fault = time.monotonic()
        printed = ended(process)
    assert process.returncode == 7 and time.monotonic() - fault < BOUND, printed
    assert "optimizer step 4: sequence-parallel peers differ in prompt: rank 0 " in printed
    assert "another prompt" in printed and "exit code 7 (distributed)" in printed
    assert saved(run_dir).name == "step_000002"


def test_save_now_goes_on_and_a_stop_waits_for_a_save_that_is_slow(tiny_world, tmp_path):
    """SIGUSR1 and SIGTERM to the launcher reach all ranks; a save may take longer than torchrun would wait."""
    run_dir = tmp_path / "run"
    values = two(tiny_world, run_dir, checkpoint__rolling_save_every_steps=0)
    with start(values, tmp_path, "slow save", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1") as process:
        until(lambda: steps(run_dir))
        process.send_signal(signal.SIGUSR1)
        until(lambda: checkpoint.candidates(run_dir, STEPS)[0])
        first = saved(run_dir)
        made = steps(run_dir)
        until(lambda: steps(run_dir) > made)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        printed = ended(process)
    assert process.returncode == 75, printed
    assert saved(run_dir).name == f"step_{steps(run_dir):06d}" > first.name
    assert "Unable to shutdown" not in printed and "Traceback" not in printed
    assert json.loads((run_dir / "run-result.json").read_bytes())["status"] == "preempted"


def test_workers_do_not_outlive_their_launcher(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    with start(two(tiny_world, run_dir), tmp_path, "none") as process:
        until(lambda: steps(run_dir))
        process.kill()
        killed = [(heartbeat(run_dir, rank)["pid"], heartbeat(run_dir, rank)["start"]) for rank in range(2)]
        until(lambda: all(start_time(pid) != start for pid, start in killed), BOUND)
        assert "the torchrun that started this process" in ended(process)
    assert json.loads((run_dir / "run-result.json").read_bytes())["exit_code"] == 75
    assert saved(run_dir).name == f"step_{steps(run_dir):06d}"


def test_a_stop_while_the_run_is_loaded_comes_before_the_first_step(tiny_world, tmp_path, monkeypatch):
    def build_batches(*words):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*words)

    original = setup.build_batches
    monkeypatch.setattr(setup, "build_batches", build_batches)
    run_dir = tmp_path / "run"
    with pytest.raises(Preempted, match="before a step was made"):
        train.run(tiny_world.resolve(run_dir), run_dir=run_dir, until_step=5)
    assert not steps(run_dir) and checkpoint.candidates(run_dir, STEPS) == ([], [])


SNAKEFILE = """
from solarwm_lib.runtime import lifeline

lifeline.announce(lifeline.WORKFLOW)

rule train:
    output: "done"
    shell: "{command} 2>&1 | tee log"
"""


def test_a_job_does_not_outlive_its_snakemake(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    (tmp_path / "run.json").write_text(json.dumps(tiny_world.values(run_dir, train__max_steps=STEPS)))
    command = f"{sys.executable} -m solarwm_lib train --config {tmp_path / 'run.json'}"
    (tmp_path / "Snakefile").write_text(SNAKEFILE.replace("{command}", command))
    words = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "all"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        until(lambda: steps(run_dir) or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        process.kill()
        result = lambda: json.loads((run_dir / "run-result.json").read_bytes())  # noqa: E731
        until(lambda: result()["status"] != "running", BOUND)
    assert result()["exit_code"] == 75
    assert saved(run_dir).name == f"step_{steps(run_dir):06d}"
    assert "the Snakemake that started this process" in (tmp_path / "log").read_text()
