"""Several processes end with the code that one would: bad input 2, preempted 75, and no traceback over the message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from solarwm_lib.training import checkpoint, metrics

ROOT = Path(__file__).parents[2]
STEPS = 400  # more than are reached before the signal


def start(values: dict, folder: Path, *words: str) -> subprocess.Popen[str]:
    config = folder / "run.json"
    config.write_text(json.dumps(values))
    command = [sys.executable, "-m", "solarwm_lib.runtime.torchrun", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "solarwm_lib", "train", "--config", str(config), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def two(tiny_world, run_dir: Path, **changes) -> dict:
    changes = {"train__micro_batch_size": 2, "distributed": {"world_size": 2}, **changes}
    return tiny_world.values(run_dir, **changes)


def test_bad_input_ends_with_its_own_code_and_its_own_line(tiny_world, tmp_path):
    with start(two(tiny_world, tmp_path / "run", data__pixel_frames=80), tmp_path) as process:
        printed = process.communicate(timeout=120)[1]
    assert process.returncode == 2, printed
    assert "solarwm: error:" in printed and "nearest: 77 or 81" in printed
    assert "Traceback" not in printed and not (tmp_path / "run").exists()


def test_data_that_only_the_main_rank_looked_at_ends_all_before_anything_is_written(tiny_world, tmp_path):
    with start(two(tiny_world, tmp_path / "run", data__pixel_frames=21), tmp_path) as process:
        printed = process.communicate(timeout=120)[1]
    assert process.returncode == 3, printed
    assert printed.count("solarwm: error:") == 1 and "the clip spans 21 source frames" in printed
    assert "Traceback" not in printed and not (tmp_path / "run").exists()


def test_a_request_to_stop_saves_and_ends_with_75(tiny_world, tmp_path):
    run_dir = tmp_path / "run"
    values = two(tiny_world, run_dir, train__max_steps=STEPS, checkpoint__rolling_save_every_steps=0)
    with start(values, tmp_path) as process:
        deadline = time.monotonic() + 180
        while not (run_dir / metrics.FILE).exists() or not metrics.read(run_dir / metrics.FILE):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=120)[1]
    assert process.returncode == 75, printed
    assert "Traceback" not in printed
    assert json.loads((run_dir / "run-result.json").read_bytes())["exit_code"] == 75
    saved, _ = checkpoint.candidates(run_dir, STEPS)
    assert saved[0].rolling and checkpoint.open_verified(saved[0].path)
