"""Who is behind in a hang, which worker's end was the cause, and what signals do outside of a training loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_training_loop import _trainer

from solarwm_lib import cli
from solarwm_lib.runtime import lifeline, process, torchrun, watchdog
from solarwm_lib.runtime.errors import DistributedError, MemoryExhausted, is_out_of_memory
from solarwm_lib.runtime.owner import this_process
from solarwm_lib.runtime.process import Heartbeat, StopRequest
from solarwm_lib.runtime.torchrun import Failure
from solarwm_lib.runtime.watchdog import Rank, Watchdog
from solarwm_lib.training import diagnostics, loop


def rank(number, phase="forward_backward", step=5, collective=None, gone=False, wall_time=0.0, **facts):
    record = {
        "phase": phase,
        "step": step,
        "collective": collective,
        "wall_time": wall_time,
        "pid": 1,
        **facts,
    }
    return Rank(number, record, gone)


@pytest.mark.parametrize(
    "ranks, expected",
    [
        (
            [rank(0, "status", collective="all_gather"), rank(1), rank(2, "status", collective="all_gather")],
            [1],
        ),
        ([rank(0), rank(1, gone=True), rank(2)], [1]),
        ([rank(0, step=6), rank(1, step=5), rank(2, step=5)], [1, 2]),
        # Inside a sharded forward nothing beats: what the main thread executes tells who waits.
        ([rank(0, in_collective=True), rank(1, in_collective=False)], [1]),
        # A completed step and one in the making: the save after step 6 comes after the forward pass of step 6.
        ([rank(0, "save", step=6), rank(1, step=4)], [1]),
        # All wait: whoever waits in the earliest step since the longest time has missed the others' collective.
        ([rank(0, collective="a", wall_time=9), rank(1, collective="b", wall_time=3)], [1]),
        ([rank(0, collective="a", step=6, wall_time=1), rank(1, collective="b", wall_time=3)], [1]),
        ([rank(0, collective="a"), Rank(1, None)], [0]),
    ],
)
def test_who_is_behind(ranks, expected):
    assert [found.rank for found in watchdog.behind(ranks)] == expected


def watch(tmp_path, beat_of, seconds=1.0, timeout=0.5):
    """Run a watchdog of rank 0 in a world of two for `seconds`; return the exit code it ended with, if any."""
    heartbeats = [Heartbeat(tmp_path, number) for number in range(2)]
    for heartbeat in heartbeats:
        heartbeat.beat("forward_backward", 5)
    codes: list[int] = []
    with Watchdog(heartbeats[0], tmp_path, 2, timeout, end=codes.append):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not codes:
            beat_of(heartbeats)
            time.sleep(0.05)
    return codes


def test_a_rank_may_wait_as_long_as_any_other_gets_on(tmp_path):
    assert watch(tmp_path, lambda heartbeats: heartbeats[1].beat("data", 5)) == []
    assert not (tmp_path / "diagnostics").exists()


def test_silence_of_all_ranks_ends_with_7_and_a_report(tmp_path, capfd):
    told: list[DistributedError] = []
    watchdog.last_words.append(told.append)
    try:
        assert watch(tmp_path, lambda heartbeats: None, seconds=5) == [7]
    finally:
        watchdog.last_words.remove(told.append)
    dump = json.loads((tmp_path / "diagnostics" / "hang-step-000006-rank-00000.json").read_text())
    assert dump["behind"] == [0, 1] and [item["record"]["rank"] for item in dump["ranks"]] == [0, 1]
    assert any("beat_of" in line or "sleep" in line for line in dump["stacks"][next(iter(dump["stacks"]))])
    printed = capfd.readouterr().err
    assert f"{told[0]}\n" in printed and "forward_backward of step 6 for" in printed


def test_a_note_is_no_sign_of_getting_on(tmp_path):
    assert watch(tmp_path, lambda heartbeats: heartbeats[1].note(at="x"), seconds=5) == [7]


def test_reading_counts_as_getting_on_only_where_minutes_without_a_beat_are_normal(tmp_path):
    def work(heartbeats):
        os.pread(file, 4 * watchdog.IO_STEP_BYTES, 0)

    file = os.open("/dev/zero", os.O_RDONLY)
    heartbeat = Heartbeat(tmp_path, 0)
    for phase, expected in (("verify", []), ("optimizer", [7])):
        heartbeat.beat(phase, 5)
        codes: list[int] = []
        with Watchdog(heartbeat, tmp_path, 1, 0.6, end=codes.append):
            end = time.monotonic() + 3
            while time.monotonic() < end and not codes:
                work(None)
                time.sleep(0.02)
        assert codes == expected, phase
    os.close(file)


def test_a_lost_connection_names_the_process_that_is_gone(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    other = Heartbeat(tmp_path, 1)
    other._constant |= {"pid": child.pid, "start": "1"}
    other.beat("reduce", 5)
    child.wait()
    words = watchdog.describe_lost(tmp_path, 2, 0, patience_seconds=0)
    assert (
        f"rank 1 (pid {child.pid} on " in words and "is gone; its last heartbeat: reduce of step 6" in words
    )
    assert (
        watchdog.describe_lost(tmp_path / "none", 2, 0, patience_seconds=0)
        == "no other rank has left a heartbeat"
    )


@pytest.mark.parametrize(
    "failures, rank_of_cause",
    [
        ([(0, 7, 10.0), (1, -9, 10.0)], 1),
        ([(0, -15, 10.0), (1, 5, 10.0)], 1),
        ([(0, 7, 10.0), (1, -15, 10.0)], 0),
        ([(0, 7, 10.0), (1, 75, 10.0)], 1),
        ([(0, 75, 10.0), (1, 4, 11.0)], 1),
        ([(0, 7, 10.0), (1, -9, 40.0)], 0),  # torchrun's own SIGKILL, later
        ([(0, 5, 10.0), (1, 5, 10.0)], 0),
    ],
)
def test_the_cause_among_workers_that_ended_together(failures, rank_of_cause):
    assert torchrun.cause(Failure(r, 100 + r, code, t) for r, code, t in failures).rank == rank_of_cause


def test_exit_code_and_last_line_of_a_failed_worker():
    killed = Failure(1, 42, -9, 0.0)
    assert torchrun.exit_code(killed, False) == 137 and torchrun.exit_code(killed, True) == 137
    assert torchrun.exit_code(Failure(1, 42, -15, 0.0), True) == 75
    assert torchrun.exit_code(Failure(1, 42, 6, 0.0), True) == 6
    beat = {"phase": "reduce", "step": 5, "collective": "averaging gradients"}
    line = torchrun.describe(killed, beat, False)
    assert "rank 1 (pid 42) was killed by SIGKILL; its last heartbeat: reduce of step 6, waiting" in line
    assert "memory ran out" in line
    line = torchrun.describe(Failure(0, 43, 3, 0.0), None, False)
    assert line == "solarwm: rank 0 (pid 43) ended with exit code 3 (data); it had no heartbeat yet"


def test_sigusr1_saves_after_the_step_and_goes_on(tmp_path):
    saves: list[int] = []
    with StopRequest() as stop:
        trainer = _trainer(tmp_path, stop=stop)

        def on_step(record):
            if record.step == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

        finished = loop.fit(trainer, 4, on_step, lambda: saves.append(trainer.learner.completed_steps), 0)
    assert finished and saves == [2] and not stop.save_requested and not stop.requested


def test_a_stop_that_comes_during_a_save_makes_no_further_step(tmp_path):
    with StopRequest() as stop:
        trainer = _trainer(tmp_path, stop=stop)
        save = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        assert not loop.fit(trainer, 6, lambda record: None, save, 2)
    assert trainer.learner.completed_steps == 2


def test_sigterm_ends_a_command_without_a_state_to_save_with_75(monkeypatch, capsys):
    cleaned: list[bool] = []

    def merge(arguments):
        try:
            os.kill(os.getpid(), signal.SIGUSR1)  # must not kill
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Exception:  # a retry must not take it for a failure
            raise AssertionError from None
        finally:
            cleaned.append(True)

    monkeypatch.setattr(cli, "_merge_latents", merge)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["merge-latents", "--config", "x"]) == 75
    assert cleaned and signal.getsignal(signal.SIGTERM) == before
    assert "solarwm: stopped on request (SIGTERM)" in capsys.readouterr().err


def test_who_announced_itself_is_followed_on_its_own_machine_only(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = {**this_process(), "pid": child.pid, "start": lifeline.start_time(child.pid)}
    alive = {lifeline.WORKFLOW: json.dumps(who)}
    elsewhere = {lifeline.WORKFLOW: json.dumps({**who, "boot": "another"})}
    assert lifeline.ended(alive) is None
    child.communicate(b"\n")
    assert lifeline.ended(alive) == f"the Snakemake that started this process (pid {child.pid})"
    assert lifeline.ended(elsewhere) is None and lifeline.ended({lifeline.WORKFLOW: "7"}) is None

    monkeypatch.setenv(lifeline.WORKFLOW, alive[lifeline.WORKFLOW])
    with pytest.raises(lifeline.StopNow), lifeline.stoppable():
        time.sleep(5)


def test_a_collective_is_in_the_heartbeat_while_it_lasts(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.beat("reduce", 3)
    with process.waiting("averaging gradients"):
        assert json.loads(heartbeat.path.read_text())["collective"] == "averaging gradients"
    assert json.loads(heartbeat.path.read_text())["collective"] is None


def test_lack_of_memory_is_told_from_bugs():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_only_a_broken_connection_is_explained_by_who_is_gone(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.beat("optimizer", 3)
    reporter = diagnostics.Reporter(None, tmp_path, 0, 1, heartbeat)
    with pytest.raises(DistributedError, match=r"^rank 0: lost; no other rank has"), reporter.explaining():
        raise DistributedError("lost") from RuntimeError("reset by peer")
    with pytest.raises(DistributedError, match=r"^peers disagree$"), reporter.explaining():
        raise DistributedError("peers disagree")
    with pytest.raises(MemoryExhausted, match=r"^rank 1: full$"), reporter.explaining():
        raise MemoryExhausted("rank 1: full")
    with (
        pytest.raises(DistributedError, match=r"^rank 0: .*closed by peer; no other rank"),
        reporter.explaining(),
    ):
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer\nmore")
    with pytest.raises(KeyError), reporter.explaining():
        raise KeyError("bug")
