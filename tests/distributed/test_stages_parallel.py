"""Stage1 and Stage2 on one and two gloo processes: the same training within tolerance.

Tolerance as in test_data_parallel: float32 sums in another order, then Adam: losses and gradient norms within 1e-4 relative (a
finite difference and a rollout amplify rounding), weights within 1e-3 relative (L2 norm of the difference by that of the change).
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
from stage_world import stage_world, train  # noqa: F401

from solarwm_lib.training import checkpoint, metrics

ROOT = Path(__file__).parents[2]
# AnyFlow: of four rows two are diffusion, so one of two processes has all of them and the other none.
STEPS = {"flow_matching": 3, "anyflow": 3, "stage2": 5}


def under_torchrun(values: dict, run_dir: Path, until_step: int) -> Path:
    config = run_dir.parent / f"{run_dir.name}.json"
    config.write_text(json.dumps(values))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "solarwm_lib", "train", "--config", str(config), "--until-step", str(until_step)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return run_dir / checkpoint.directory_name(until_step)


@pytest.mark.parametrize("stage", STEPS)
def test_two_processes_train_like_one(stage_world, tmp_path, stage):  # noqa: F811
    torch.set_num_threads(1)
    size = 4
    batch = {"train__global_batch_size": size, "train__optimizer": {"learning_rate": 1e-4, "warmup_steps": 0}}
    one = train(stage_world, stage, tmp_path / "one", STEPS[stage], train__micro_batch_size=size, **batch)
    changes = {"train__micro_batch_size": 1, "train__gradient_accumulation_steps": 2}
    values = stage_world.stage(stage, tmp_path / "two", distributed={"world_size": 2}, **changes, **batch)
    two = under_torchrun(values, tmp_path / "two", STEPS[stage])

    for a, b in zip(*(metrics.read(path.parent / metrics.FILE) for path in (one, two)), strict=True):
        assert a["step"] == b["step"] and a["batch_digest"] == b["batch_digest"]
        assert a["details"].keys() == b["details"].keys()
        for x, y in [(a[k], b[k]) for k in ("loss", "gradient_norm")] + [
            (a["details"][k], b["details"][k]) for k in a["details"]
        ]:
            assert y == pytest.approx(x, rel=1e-4, abs=1e-9)
    source = load_file((stage_world.stage1 if stage == "stage2" else stage_world.stage0p5) / checkpoint.EMA)
    members = [checkpoint.MODEL] + ([checkpoint.CRITIC] if stage == "stage2" else [])
    for member in members:
        left, right = (load_file(path / member) for path in (one, two))
        if member == checkpoint.CRITIC:
            source = load_file(stage_world.stage0p5 / checkpoint.MODEL)
        names = [name for name in left if name in source]
        difference = sum((left[n] - right[n]).double().square().sum() for n in names)
        change = sum((left[n] - source[n]).double().square().sum() for n in names)
        assert change > 0 and float((difference / change).sqrt()) < 1e-3
