"""What `solarwm data plan` prints is what a trainer of two processes reads, from raw clips and from stored latents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tinyworld import HEIGHT, WIDTH

from solarwm_lib.artifacts import Transaction
from solarwm_lib.config.load import resolve_values
from solarwm_lib.data import video
from solarwm_lib.data.plan_report import plan_report
from solarwm_lib.data.synthetic import camera_path
from solarwm_lib.data.writer import SCHEMA, Clip, RawDatasetWriter
from solarwm_lib.training import metrics

ROOT = Path(__file__).parents[2]
STEPS = 5
WORKER = """
import json, os, sys
from pathlib import Path
from solarwm_lib.config.load import load
from solarwm_lib.training import batches, train

original = batches.Batches.load
seen = []
def noting(self, indices, *further):
    batch = original(self, indices, *further)
    seen.extend(zip(batch.indices, batch.occurrence_ids, batch.start_frames))
    return batch
batches.Batches.load = noting
resolved = load(Path(sys.argv[1]))
train.run(resolved, run_dir=Path(sys.argv[2]), until_step=int(sys.argv[3]))
Path(sys.argv[2], f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


def train_two(tmp_path: Path, values: dict) -> Path:
    """Train STEPS steps in two processes that note what they read; return the run directory."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "worker.py").write_text(WORKER)
    config = tmp_path / "run.json"
    config.write_text(json.dumps(values))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, str(tmp_path / "worker.py"), str(config), str(run_dir), str(STEPS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return run_dir


def of_two(values: dict, **data) -> dict:
    """The same run in two processes, two clips each, in two micro-batches."""
    values["distributed"] = {"world_size": 2}
    values["train"] |= {"micro_batch_size": 1, "gradient_accumulation_steps": 2, "global_batch_size": 4}
    values["data"] |= data
    return values


def latents_of(tiny_world, root: Path) -> Path:
    from solarwm_lib.preencode.part import preencode

    values = tiny_world.values(root)
    for section in ("train", "validation", "checkpoint"):
        values.pop(section)
    values["action"] = "preencode"
    values["data"] |= {"random_start": False, "pixel_frames": 9}
    values["preencode"] = {"generation_id": "tiny", "parts": 2}
    preencode(resolve_values(values))
    return root


def dataset_with_far_cameras(root: Path) -> Path:
    """Eight clips of the tiny world's size; the cameras of two of them leave the guards."""
    with Transaction(root, SCHEMA, {"test": 1}) as transaction:
        writer = RawDatasetWriter(transaction, clips_per_shard=3)
        for number in range(9):
            c2w = camera_path(9, number).copy()
            c2w[1:, 0, 3] += 50 * (number in (2, 5))
            frames = np.full((9, HEIGHT, WIDTH, 3), 20 * number, np.uint8)
            clip = Clip(
                sample_id=f"clip {number}",
                key=f"clip-{number}",
                video=video.mp4_bytes(frames, 16),
                c2w=c2w,
                fps=16.0,
                height=HEIGHT,
                width=WIDTH,
                caption=f"room {number}",
                scene="room",
                dataset="test",
            )
            writer.add("test" if number == 8 else "train", clip)
        writer.finish()
    return root


@pytest.mark.parametrize("encoding", ["online", "preencoded"])
def test_the_printed_plan_is_what_two_processes_read(tiny_world, tmp_path, encoding):
    """Online some clips leave the guards, so that what stands in for them is part of the plan."""
    values = of_two(tiny_world.values(tmp_path / "run"), num_workers=2, mixed_shards=2)
    if encoding == "preencoded":
        latents = latents_of(tiny_world, tmp_path / "latents")
        stored = {"encoding": "preencoded", "latents_root": str(latents), "pixel_frames": 9}
        values["data"] |= {**stored, "random_start": False}
    else:
        values["data"]["root"] = str(dataset_with_far_cameras(tmp_path / "data"))
    run_dir = train_two(tmp_path, values)
    resolved = resolve_values(values)
    plan = plan_report(resolved, step=0, steps=STEPS)
    records = metrics.read(run_dir / metrics.FILE)
    assert [record["batch_digest"] for record in records] == [s["batch_digest"] for s in plan["steps"]]

    for rank in (0, 1):
        seen = json.loads((run_dir / f"seen-{rank}.json").read_text())
        mine = plan_report(resolved, step=0, steps=STEPS, rank=rank)["shown"]
        assert seen == [[p["global_sample_index"], p["occurrence_id"], p["start_frame"]] for p in mine]
    rejected = sum(len(p["rejected"]) for p in plan["shown"])
    assert records[-1]["replaced"] == ({"camera_guard": rejected} if rejected else {})
    assert bool(rejected) == (encoding == "online")
