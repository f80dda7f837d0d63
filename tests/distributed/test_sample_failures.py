"""Clips that cannot be read, in two gloo processes: one budget for the run, and sequence peers that decide alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PEERS = """
import json, os, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
import torch
from test_training_sources import Made
from solarwm_lib.runtime.errors import SolarError
from solarwm_lib.training import collectives
from solarwm_lib.training.batches import Batches
from solarwm_lib.training.topology import from_environment

torch.set_num_threads(1)
topology = from_environment(os.environ, 2, 2)
folder, allowed = Path(sys.argv[1]), int(sys.argv[2])
# Peer 0 finds row 102 outside the guards, as peer 1 would; only peer 1 cannot read rows 2 and 5.
source = Made(guarded={{102, 4}}, broken={{2: "video", 5: "shard"}} if topology.rank == 1 else {{}})
report = {{}}
with collectives.process_group(topology, timeout_seconds=60):
    batches = Batches(source, torch.device("cpu"), 2**20, int(sys.argv[3]), topology)
    try:
        for step in range(2):
            indices = range(4 * step, 4 * step + 4)
            batch = batches.load(indices, range(4 * step + 4, 4 * step + 8), allowed)
            report[str(step)] = [list(batch.occurrence_ids), batch.latents.flatten().tolist(),
                                 [[item.reason, item.message] for item in batch.replaced]]
    except SolarError as error:
        report |= {{"error": type(error).__name__, "text": str(error)}}
    batches.close()
(folder / f"report-{{topology.rank}}.json").write_text(json.dumps(report))
"""

BUDGET = """
import json, os, sys
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
folder, budget = Path(sys.argv[1]), int(sys.argv[2])
# Steps of eight samples, four per rank: samples 1 and 13 of ranks 0 and 1, then 17 of rank 0 and 22 of rank 1.
unreadable = {{1: "video", 2: "camera_guard", 13: "shard", 17: "video", 22: "caption"}}
with StopRequest() as stop, collectives.process_group(topology, timeout_seconds=60):
    trainer = _trainer(folder, Stream(unreadable=unreadable), stop=stop)
    trainer.topology, trainer.plan, trainer.failure_budget = topology, BatchPlan(8, 2, 2, 2), budget
    report = {{"records": []}}
    def on_step(record):
        report["records"].append([record.batch_digest, record.replaced])
    try:
        report["finished"] = loop.fit(trainer, 4, on_step, lambda: None, 0)
    except SolarError as error:
        report |= {{"error": type(error).__name__, "text": str(error)}}
    report |= {{"steps": trainer.learner.completed_steps, "replaced": trainer.learner.replaced}}
(folder / f"report-{{topology.rank}}.json").write_text(json.dumps(report))
"""


def run(tmp_path: Path, script: str, *words: str) -> list[dict]:
    path = tmp_path / "worker.py"
    path.write_text(script.format(tests=str(ROOT / "tests" / "unit")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, str(path), str(tmp_path), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("report-*.json"))]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_clip_that_one_sequence_peer_cannot_read_is_replaced_on_both(tmp_path, workers):
    first, second = run(tmp_path, PEERS, "4", workers)
    assert first == second
    assert first["0"][0] == ["0#0.0", "1#1.0", "202#2.2", "3#3.0"]
    assert first["0"][2] == [["video", "row 2 is damaged"], ["camera_guard", "row 102 is far away"]]
    assert first["1"][0] == ["104#4.1", "105#5.1", "6#6.0", "7#7.0"]
    assert [reason for reason, _ in first["1"][2]] == ["camera_guard", "shard"]


def test_without_a_budget_both_sequence_peers_raise_the_one_reason(tmp_path):
    for report in run(tmp_path, PEERS, "0", "0"):
        assert report == {"error": "BudgetSpent", "text": "row 2 is damaged"}


def test_replaced_clips_of_all_ranks_are_counted(tmp_path):
    first, second = run(tmp_path, BUDGET, "4")
    assert first == second and first["finished"] is True
    assert [replaced for _, replaced in first["records"]] == [
        {"camera_guard": 1, "video": 1},
        {"camera_guard": 1, "video": 1, "shard": 1},
        {"camera_guard": 1, "video": 2, "shard": 1, "caption": 1},
        {"camera_guard": 1, "video": 2, "shard": 1, "caption": 1},
    ]


def test_a_budget_spent_by_several_ranks_together_ends_all_of_them(tmp_path):
    """Each rank alone stays within what is left; together they do not."""
    for report in run(tmp_path, BUDGET, "3"):
        assert report["error"] == "DataError" and report["steps"] == 2
        assert "rank 0: 4 clips of this run could not be read (video 2, caption 1, shard 1)" in report["text"]
        assert "sample 'clip-17': damaged" in report["text"] and "(also failed: ranks 1)" in report["text"]
        assert report["replaced"] == {"camera_guard": 1, "video": 1, "shard": 1}
