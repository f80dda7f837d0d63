"""Rolling saves in the background: what is saved, what a failure does, what stays on the disk, what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import saver_world
import torch
from safetensors.torch import load_file
from saver_world import set_step, values_at
from test_artifacts_disk import file_size_limit, small_disk

from solarwm_lib import artifacts
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint, metrics, retention

TESTS = Path(__file__).parents[1]


def holds_step(path: Path, step: int) -> bool:
    """Whether a deep-verified save holds exactly the tensors of `step`."""
    artifact = artifacts.verify(path, deep=True)
    return checkpoint.read_state(artifact).completed_steps == step and all(
        torch.equal(tensor, values_at(member, name, tensor.shape, step))
        for member in checkpoint.INVENTORY[:-1]
        for name, tensor in load_file(artifact.file(member)).items()
    )


def saves(run_dir: Path) -> list[str]:
    return sorted(os.listdir(run_dir / "rolling"))


@pytest.fixture
def state():
    return saver_world.learner()


def test_a_save_holds_the_state_of_its_step_though_training_goes_on(tmp_path, state):
    saver = saver_world.saver(tmp_path, state)
    for step in (1, 2, 3):
        set_step(state, step)
        saver.rolling()
        set_step(state, 99)
        state.resume(step, step)
        saver.finish()
        assert saves(tmp_path) == [f"step_{step:06d}"]
        assert holds_step(tmp_path / "rolling" / f"step_{step:06d}", step)


def test_there_is_one_save_at_a_time_and_host_memory_is_reused(tmp_path, state):
    saver = saver_world.saver(tmp_path, state)
    places = []
    for step in range(1, 6):
        set_step(state, step)
        saver.rolling()
        assert sum(thread.name.startswith("save") for thread in threading.enumerate()) == 1
        places.append({key: buffer.data_ptr() for key, buffer in saver._buffers._buffers.items()})
    saver.finish()
    assert all(place == places[0] for place in places)
    assert saves(tmp_path) == ["step_000005"]


def test_both_ways_of_saving_and_publishing_write_the_same_bytes(tmp_path, state):
    set_step(state, 4)
    found = {}
    for name, settings in (("background", {}), ("at_once", {"asynchronous": False})):
        saver = saver_world.saver(tmp_path / name, state, **settings)
        saver.rolling()
        saver.finish()
        found[name] = artifacts.read(tmp_path / name / "rolling/step_000004").digest
        assert saver.publish(tmp_path / name / "checkpoint_model_000004").digest == found[name]
        assert saves(tmp_path / name) == []
    assert found["background"] == found["at_once"]


def test_a_failed_save_is_told_at_the_next_step_and_leaves_the_earlier_one(tmp_path, state):
    saver = saver_world.saver(tmp_path, state)
    set_step(state, 1)
    saver.rolling()
    saver.finish()
    assert saver.poll() is None
    set_step(state, 2)
    with file_size_limit(4000):
        saver.rolling()
        saver._under_way.exception()
    error = saver.poll()
    assert isinstance(error, ArtifactError) and "disk full while writing" in str(error)
    with pytest.raises(ArtifactError, match="disk full while writing"):
        saver.rolling()
    assert saves(tmp_path) == ["step_000001"] and holds_step(tmp_path / "rolling/step_000001", 1)


def test_a_failure_in_the_background_that_nobody_asked_for_is_logged_at_the_end(tmp_path, state, caplog):
    saver = saver_world.saver(tmp_path, state)
    set_step(state, 1)
    with file_size_limit(4000):
        saver.rolling()
        saver.close()
    assert "the rolling save failed: disk full" in caplog.text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fills_during_a_save_is_one_line_and_earlier_saves_stay(tmp_path, asynchronous):
    state = saver_world.learner({"weight": (256, 1024)})
    with small_disk(tmp_path / "disk", 9 << 20) as disk:
        saver = saver_world.saver(disk, state, asynchronous=asynchronous)
        set_step(state, 1)
        saver.rolling(at_once=True)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(1 << 20))
        set_step(state, 2)
        with pytest.raises(ArtifactError, match="disk full") as caught:
            saver.rolling()
            saver.finish()
        assert caught.value.exit_code == 4 and "\n" not in str(caught.value)
        assert saves(disk) == ["step_000001"] and holds_step(disk / "rolling/step_000001", 1)
        ballast.unlink()
        saver.close()


def test_a_directory_that_became_read_only_is_one_line_and_earlier_saves_stay(tmp_path, state):
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        if not os.path.ismount(disk):
            (pytest.fail if os.environ.get("CI") else pytest.skip)(
                "needs the right to mount a small file system"
            )
        saver = saver_world.saver(disk, state)
        set_step(state, 1)
        saver.rolling(at_once=True)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        set_step(state, 2)
        with pytest.raises(ArtifactError, match="Read-only file system"):
            saver.rolling()
        assert holds_step(disk / "rolling/step_000001", 1)
        saver.close()


def test_file_times_do_not_decide_which_save_is_newest_or_goes(tmp_path, state):
    saver = saver_world.saver(tmp_path, state, keep_rolling=2)
    for step in (1, 2, 3):
        set_step(state, step)
        saver.rolling(at_once=True)
        past, future = 0, 4_000_000_000
        for path in (tmp_path / "rolling" / f"step_{step:06d}").iterdir():
            os.utime(path, (past, past) if step == 2 else (future, future))
    assert saves(tmp_path) == ["step_000002", "step_000003"]
    assert [c.step for c in checkpoint.candidates(tmp_path, 9)[0]] == [3, 2]


def test_saves_tell_what_they_cost(tmp_path, state):
    saver = saver_world.saver(tmp_path, state)
    set_step(state, 1)
    saver.rolling(at_once=True)
    artifact = saver.publish(tmp_path / "checkpoint_model_000001")
    events = metrics.read_events(tmp_path / metrics.FILE)
    assert [(e["event"], e["step"], e["kind"], e["bytes"]) for e in events] == [
        ("save", 1, "rolling", artifact.bytes),
        ("save", 1, "published", artifact.bytes),
    ]
    assert all(e["write_seconds"] > 0 and 0 < e["seconds"] < 10 for e in events)
    assert metrics.read(tmp_path / metrics.FILE) == []


def test_a_partial_save_of_a_dead_process_is_removed_at_the_start_of_the_next(tmp_path, state):
    dead = tmp_path / "rolling" / f".step_000007.{'a' * 32}.partial"
    alive = tmp_path / "rolling" / f".step_000008.{'b' * 32}.partial"
    alive.mkdir(parents=True)
    dead.mkdir()
    owner = "from pathlib import Path; import sys; from solarwm_lib.runtime.owner import write_owner; write_owner(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", owner, str(dead)], check=True)
    saver_world.saver(tmp_path, state).require_space()
    assert not dead.exists() and alive.exists()


def test_killed_at_any_moment_there_are_complete_saves_and_ignored_ones(tmp_path):
    script = TESTS / "kill_saver.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "0"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["kills"] == 16 and report["in_the_middle"] > 0, report
    assert report["damaged"] == [] and report["left_behind"] == [], report
    assert any(report["steps"])


def test_thinning_at_the_end_keeps_the_newest(tmp_path, state):
    for step in (2, 4, 6):
        set_step(state, step)
        saver = saver_world.saver(tmp_path, state, keep_full=1, keep_full_steps=[2])
        saver.publish(tmp_path / checkpoint.directory_name(step))
        saver.close()
    full = [
        path.name for path in sorted(tmp_path.glob("checkpoint_*")) if (path / checkpoint.OPTIMIZER).exists()
    ]
    assert full == ["checkpoint_model_000002", "checkpoint_model_000006"]
    assert retention.thin_published(tmp_path, artifacts.read(tmp_path / full[-1]), 1, [2]) == []
