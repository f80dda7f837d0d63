"""`solarwm stop`: it ends the recorded processes of one run and nothing else, with real processes that can be ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from operate_world import ROOT, begin, edit_heartbeat, end, start_rank

from solarwm_lib.cli import main
from solarwm_lib.operate.run_state import STOP_REQUEST, read_state
from solarwm_lib.operate.stop import stop, targets
from solarwm_lib.runtime.errors import DistributedError
from solarwm_lib.runtime.process import Heartbeat


@pytest.fixture(scope="module")
def run_dir(tiny_world, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "one"
    begin(tiny_world, path)
    return path


@pytest.fixture
def rank(run_dir) -> Iterator[subprocess.Popen]:
    process = start_rank(run_dir)
    yield process
    end(process)


@pytest.fixture
def frozen(run_dir) -> Iterator[subprocess.Popen]:
    """A rank that beats no more, so that its heartbeat can be edited."""
    process = start_rank(run_dir)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    yield process
    end(process)


def test_only_the_run_that_is_named_is_stopped(run_dir, rank, tiny_world, tmp_path):
    other = tmp_path / "other"
    begin(tiny_world, other)
    bystander = start_rank(other)
    try:
        found = targets(run_dir)
        assert [process.pid for process in found.ours] == [rank.pid] and not found.others
        said: list[str] = []
        stop(run_dir, found.ours, say=said.append)
        assert rank.wait(10) == 75 and "all processes have ended" in said[-1]
        assert bystander.poll() is None and targets(other).ours[0].pid == bystander.pid
    finally:
        end(bystander)
    record = json.loads((run_dir / "launches/attempt-001" / STOP_REQUEST).read_text())
    assert [process["pid"] for process in record["processes"]] == [rank.pid]
    assert read_state(run_dir).state == "stopped"
    assert targets(run_dir).ours == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"command": "0" * 16}, "another command line"),
        ({"command": None}, "cannot be told from another process"),
        ({"start": None}, "cannot be told from another process"),
        ({"boot": "another", "host": "node7"}, "runs on node7 and cannot be reached from here"),
        ({"pid_namespace": "pid:[1]"}, "cannot be reached from here"),
    ],
)
def test_a_process_that_is_not_surely_the_recorded_one_is_left_alone(
    run_dir, frozen, changes, reason, capsys
):
    edit_heartbeat(run_dir, 0, **changes)
    found = targets(run_dir)
    assert found.ours == [] and reason in found.others[0][1]
    assert main(["stop", str(run_dir), "--yes"]) == 0
    assert reason in capsys.readouterr().out and frozen.poll() is None


def test_a_reused_pid_is_a_process_that_is_gone(run_dir, frozen, capsys):
    edit_heartbeat(run_dir, 0, start="1")
    found = targets(run_dir)
    assert found.ours == [] and found.others == []
    assert main(["stop", str(run_dir), "--yes"]) == 0
    assert "nothing to stop" in capsys.readouterr().out and frozen.poll() is None
    assert read_state(run_dir).ranks[0].alive is False


def test_a_process_that_becomes_another_one_before_the_signal_is_not_signalled(run_dir, rank):
    found = targets(run_dir)
    end(rank)
    successor = start_rank(run_dir)  # the run goes on in another process
    try:
        stop(run_dir, found.ours, say=lambda line: None)
        assert successor.poll() is None
    finally:
        end(successor)


def test_a_pid_that_is_reused_between_the_list_and_the_signal_is_not_signalled(run_dir, rank):
    found = targets(run_dir).ours[0]
    reused = replace(found, start="1")  # the list named a process that ended; its PID has a new owner
    stop(run_dir, [reused], say=lambda line: None)
    time.sleep(0.3)
    assert rank.poll() is None


def test_a_process_that_has_completed_its_part_is_not_stopped(run_dir, frozen):
    edit_heartbeat(run_dir, 0, phase="complete")
    assert targets(run_dir).ours == [] and targets(run_dir).others == []


def test_nobody_can_confirm_without_a_terminal(run_dir, rank):
    command = [sys.executable, "-m", "solarwm_lib", "stop", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2 and "give --yes" in done.stderr and str(rank.pid) in done.stdout
    assert rank.poll() is None


def test_a_process_that_does_not_end_is_killed_only_with_now(run_dir):
    stubborn = start_rank(run_dir, manner="stubborn")
    try:
        found = targets(run_dir).ours
        with pytest.raises(DistributedError, match=rf"process {stubborn.pid} on .* still there after"):
            stop(run_dir, found, patience=0.3, say=lambda line: None)
        assert stubborn.poll() is None
        said: list[str] = []
        stop(run_dir, found, now=True, kill_after=0.3, say=said.append)
        assert stubborn.wait(10) == -signal.SIGKILL and "killing rank 0" in said[1]
    finally:
        end(stubborn)


def test_the_launcher_of_a_rank_is_among_the_processes(run_dir, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    heartbeat = Heartbeat(run_dir, 0)
    heartbeat.beat("build", 0)
    found = targets(run_dir)
    assert [(process.role, process.pid) for process in found.ours] == [
        ("launcher", os.getppid()),
        ("rank 0", os.getpid()),
    ]
