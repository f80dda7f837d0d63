"""A pass of two processes, each with its slots or both on every slot, is the pass of one: same latents within rounding, one artifact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from solarwm_lib import artifacts
from solarwm_lib.config.identity import canonical_json
from solarwm_lib.inference.plan import freeze_plan
from solarwm_lib.inference.validation import validate
from solarwm_lib.training import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_two_processes_publish_what_one_does(tiny_world: Any, tmp_path: Path, sequence_parallel: int) -> None:
    resolved = tiny_world.resolve(tmp_path / "run", train__optimizer__warmup_steps=0)
    plan, config = tmp_path / "frozen-plan.json", tmp_path / "resolved-config.json"
    freeze_plan(resolved, plan)
    processes = {"world_size": 2, "sequence_parallel_size": sequence_parallel}
    batch = resolved.values["train"] | {"micro_batch_size": 2 * sequence_parallel}
    config.write_text(canonical_json({**resolved.values, "distributed": processes, "train": batch}))
    checkpoint = train.run(resolved, run_dir=tmp_path / "run", until_step=2).path
    one = validate(resolved, checkpoint, plan, "live", tmp_path / "one")

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "solarwm_lib", "validate", "--config", config, "--checkpoint", checkpoint]
    result = subprocess.run(
        [*launcher, *command, "--plan", plan, "--pass", "live", "--out", tmp_path / "two"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("complete, 2 of 2 slots") == 1
    two = artifacts.verify(tmp_path / "two", deep=True)
    assert [m.path for m in two.members] == [m.path for m in one.members]
    for slot in (0, 1):
        name = f"slot-{slot:06d}"
        mine, theirs = (
            load_file(tmp_path / f"{d}.latents" / name / "latents.safetensors")["latents"]
            for d in ("one", "two")
        )
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        a, b = (json.loads(x.file(f"{name}/manifest.json").read_bytes())["metrics"] for x in (one, two))
        assert abs(a["psnr"] - b["psnr"]) < 0.05
