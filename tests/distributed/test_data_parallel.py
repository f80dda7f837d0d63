"""One and two data-parallel gloo processes: the same training within tolerance, and failures that nobody waits on.

Tolerance, in float32: the two worlds add the same gradients in another order (relative difference about 1e-7 each);
Adam divides by their root, so a weight whose gradient is near zero may move by up to the learning rate in the other
direction. Stated: losses and gradient norms within 1e-5 relative, weights within 1e-4 relative (L2 norm of the
difference by the L2 norm of the change that training made). Measured over these 6 steps: 1.1e-7 and 2.1e-6.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from solarwm_lib import artifacts
from solarwm_lib.config.load import resolve_values
from solarwm_lib.training import checkpoint, metrics, train

ROOT = Path(__file__).parents[2]
STEPS, MIDDLE = 6, 3


def run_segment(values: dict, run_dir: Path, until_step: int, processes: int) -> None:
    """Train to `until_step` with a global batch of 4: under torchrun, or in this process if it is one."""
    values = {**values, "distributed": {"world_size": processes}}
    values["train"] = {**values["train"], "micro_batch_size": 4 // processes, "global_batch_size": 4}
    run_dir.mkdir(parents=True, exist_ok=True)
    if processes == 1:
        train.run(resolve_values(values), run_dir=run_dir, until_step=until_step)
        return
    config = run_dir.parent / f"{run_dir.name}-{until_step}.json"
    config.write_text(json.dumps(values))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "solarwm_lib", "train", "--config", str(config), "--until-step", str(until_step)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def records(run_dir: Path) -> list[dict]:
    return metrics.read(run_dir / metrics.FILE)


def weights(run_dir: Path, step: int, member: str) -> dict[str, torch.Tensor]:
    return load_file(run_dir / checkpoint.directory_name(step) / member)


def relative_difference(a: Path, b: Path, start: dict[str, torch.Tensor], member: str) -> float:
    left, right = weights(a, STEPS, member), weights(b, STEPS, member)
    difference = sum((left[n] - right[n]).double().square().sum() for n in left)
    change = sum((left[n] - start[n]).double().square().sum() for n in left)
    return float((difference / change).sqrt())


@pytest.fixture(scope="module")
def worlds(tiny_world, tmp_path_factory):
    """Directories of three runs: one process, two processes, two processes continued by one."""
    root = tmp_path_factory.mktemp("worlds")
    torch.set_num_threads(1)
    plans = {"one": [(STEPS, 1)], "two": [(STEPS, 2)], "changed": [(MIDDLE, 2), (STEPS, 1)]}
    for name, segments in plans.items():
        for until_step, processes in segments:
            run_segment(tiny_world.values(root / name), root / name, until_step, processes)
    return root


@pytest.mark.parametrize("other", ["two", "changed"])
def test_world_size_does_not_change_training(tiny_world, worlds, other):
    for a, b in zip(records(worlds / "one"), records(worlds / other), strict=True):
        assert a["step"] == b["step"] and a["learning_rate"] == b["learning_rate"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=1e-5)
    start = load_file(next((tiny_world.assets / "transformer").glob("*.safetensors")))
    for member in (checkpoint.MODEL, checkpoint.EMA):
        assert relative_difference(worlds / "one", worlds / other, start, member) < 1e-4


def test_a_change_of_world_size_is_the_same_run_and_is_recorded(worlds):
    artifact = artifacts.read(worlds / "changed" / checkpoint.directory_name(STEPS))
    history = checkpoint.read_state(artifact).history
    assert [(h["from_step"], h["to_step"], h["world_size"]) for h in history] == [(0, 3, 2), (3, 6, 1)]
    plain = artifacts.read(worlds / "one" / checkpoint.directory_name(STEPS))
    assert artifact.identity == plain.identity


def test_every_rank_leaves_a_heartbeat_and_only_rank_0_writes_records(worlds):
    assert sorted(os.listdir(worlds / "two" / "heartbeats")) == ["rank-00000.json", "rank-00001.json"]
    assert os.listdir(worlds / "two" / "launches") == ["attempt-001"]


def test_a_world_of_another_size_ends_with_2_before_anything_is_written(tiny_world, tmp_path):
    values = tiny_world.values(tmp_path / "run")
    config = tmp_path / "run.json"
    config.write_text(json.dumps(values))
    command = [sys.executable, "-m", "solarwm_lib", "train", "--config", str(config)]
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "WORLD_SIZE is 2 but distributed.world_size is 1" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


WORKER = """
import json, os, signal, sys
from datetime import timedelta
from pathlib import Path
sys.path[:0] = [{tests!r}]
import torch
from test_training_loop import Stream, _trainer
from solarwm_lib.runtime.errors import SolarError
from solarwm_lib.runtime.process import StopRequest
from solarwm_lib.training import collectives, loop
from solarwm_lib.training.topology import BatchPlan, from_environment

torch.set_num_threads(1)
topology = from_environment(os.environ, 2)
run_dir, scenario = Path(sys.argv[1]), sys.argv[2]
# Step 3 of rank 1 reads samples 20 to 23.
streams = {{"nan": Stream(poison={{21: float("nan")}}), "missing": Stream(missing=22)}}
with StopRequest() as stop, collectives.process_group(topology, timeout_seconds=60):
    trainer = _trainer(run_dir, streams.get(scenario), stop=stop)
    trainer.topology, trainer.plan = topology, BatchPlan(8, 2, 2, 2)
    def on_step(record):
        if scenario == "stop" and topology.rank == 1 and record.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if scenario == "die" and topology.rank == 1 and record.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    report = {{}}
    try:
        report["finished"] = loop.fit(trainer, 6, on_step, lambda: None, 0)
    except SolarError as error:
        report |= {{"error": type(error).__name__, "text": str(error)}}
    report["steps"] = trainer.learner.completed_steps
    report["weight"] = trainer.learner.parameters["weight"].double().sum().item()
    (run_dir / f"report-{{topology.rank}}.json").write_text(json.dumps(report))
"""


def run_workers(tmp_path: Path, scenario: str) -> list[dict]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(ROOT / "tests" / "unit")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), str(tmp_path), scenario]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, capture_output=True, timeout=120)
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("report-*.json"))]


def test_a_non_finite_loss_on_one_rank_stops_all_with_its_samples(tmp_path):
    first, second = run_workers(tmp_path, "nan")
    for report in (first, second):
        assert report["error"] == "NonFiniteError" and report["steps"] == 2
        assert "step 3 on rank 1, samples clip-21" in report["text"]
    assert first["weight"] == second["weight"]
    dumps = os.listdir(tmp_path / "diagnostics")
    assert dumps == ["nonfinite-step-000003-rank-00001.json"]


def test_a_failed_read_on_one_rank_is_the_same_error_everywhere(tmp_path):
    for report in run_workers(tmp_path, "missing"):
        assert report["error"] == "DataError" and "rank 1: shard of sample 22 is gone" in report["text"]
        assert report["steps"] == 2


def test_a_stop_request_to_one_rank_ends_all_after_the_same_step(tmp_path):
    reports = run_workers(tmp_path, "stop")
    assert [(r["finished"], r["steps"]) for r in reports] == [(False, 3), (False, 3)]


def test_a_peer_that_dies_is_an_error_not_a_wait(tmp_path):
    (report,) = run_workers(tmp_path, "die")
    assert report["error"] == "DistributedError" and "a peer has ended" in report["text"]
