"""A run of two processes under torchrun, seen and stopped from outside."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from solarwm_lib.cli import main
from solarwm_lib.operate.run_state import read_state
from solarwm_lib.operate.stop import targets
from solarwm_lib.training import checkpoint

ROOT = Path(__file__).parents[2]
STEPS = 4000


@pytest.mark.slow
def test_status_sees_both_ranks_and_stop_saves_and_ends_them_all(tiny_world, tmp_path, capsys):
    run_dir, config = tmp_path / "run", tmp_path / "run.json"
    changes = {"train__micro_batch_size": 2, "distributed": {"world_size": 2}, "train__max_steps": STEPS}
    config.write_text(
        json.dumps(tiny_world.values(run_dir, checkpoint__rolling_save_every_steps=0, **changes))
    )
    words = ["--standalone", "--nproc-per-node=2", "-m", "solarwm_lib", "train", "--config", str(config)]
    command = [sys.executable, "-m", "solarwm_lib.runtime.torchrun", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 180
        while not (run_dir / "resolved-config.json").exists() or read_state(run_dir).loss is None:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        state = read_state(run_dir)
        assert state.state == "running" and state.target_step == STEPS and state.seconds_to_end > 0
        assert [(rank.rank, rank.alive) for rank in state.ranks] == [(0, True), (1, True)]
        found = targets(run_dir)
        assert [p.role for p in found.ours] == ["launcher", "rank 0", "rank 1"] and not found.others
        assert found.ours[0].pid == process.pid
        assert main(["stop", str(run_dir), "--yes"]) == 0
        printed = process.communicate(timeout=60)[1]
    assert process.returncode == 75, printed
    # The launcher was not told: told, it kills its ranks when they take long to save.
    assert "stopped on request" not in printed and "Traceback" not in printed
    assert "all processes have ended" in capsys.readouterr().out
    state = read_state(run_dir)
    assert (state.state, state.exit_code) == ("stopped", 75) and len(state.rolling) == 1
    saved, _ = checkpoint.candidates(run_dir, STEPS)
    assert saved[0].rolling and checkpoint.open_verified(saved[0].path)
    assert main(["diagnose", str(run_dir)]) == 0
