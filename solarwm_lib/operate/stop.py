"""Stop a run: SIGTERM to exactly the processes that its records name on this machine, then wait for them.

The ranks are signalled, not their torchrun: a plain one kills its ranks 30 seconds after it was told to stop, which is too soon for
a large save, and every one ends by itself when they have. One rank that knows is enough: they agree at the next step, rank 0 saves,
all end with 75. So ranks on other machines, which cannot be reached from here, end as well.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from solarwm_lib.artifacts import json_bytes, write_atomic
from solarwm_lib.operate.processes import Process, heartbeats, liveness, refusal, run_processes
from solarwm_lib.operate.run_state import STOP_REQUEST, duration
from solarwm_lib.report.facts import attempts_of
from solarwm_lib.runtime.errors import DistributedError

PATIENCE_SECONDS = 1800.0
KILL_AFTER_SECONDS = 10.0
POLL_SECONDS = 0.1
# What is left of a killed process group is gone at once.
KILLED_SECONDS = 30.0


@dataclass(frozen=True)
class Targets:
    """The processes of a run that may be signalled from here, and the others that live or may live, with the reason."""

    ours: list[Process]
    others: list[tuple[Process, str]]


def targets(run_dir: Path) -> Targets:
    """Return the live processes of the run's newest attempt.

    One that is gone is in neither list, nor is one that has completed its part: it may be a notebook that goes on.
    """
    ours: list[Process] = []
    others: list[tuple[Process, str]] = []
    beats = heartbeats(run_dir)
    done = {(beat.get("host"), beat.get("pid")) for beat in beats if beat.get("phase") == "complete"}
    for process in run_processes(run_dir, beats):
        if liveness(process) == "gone" or (process.host, process.pid) in done:
            continue
        reason = refusal(process)
        if reason is None:
            ours.append(process)
        else:
            others.append((process, reason))
    return Targets(ours, others)


def stop(
    run_dir: Path,
    processes: Sequence[Process],
    *,
    now: bool = False,
    patience: float = PATIENCE_SECONDS,
    kill_after: float = KILL_AFTER_SECONDS,
    say: Callable[[str], None] = print,
) -> None:
    """Ask `processes` to save and end, and wait; with `now`, SIGKILL those that live after `kill_after` seconds.

    Every process is checked again right before every signal. Raises DistributedError if some still run after `patience`.
    """
    _record(run_dir, processes, now)
    begun = time.monotonic()
    ranks = [process for process in processes if process.role != "launcher"]
    for process in ranks or processes:
        _signal(process, signal.SIGTERM)
    say("asked to stop; the run saves its state after the current step")
    left = _wait(processes, kill_after if now else patience)
    if left and now:
        # The launcher first: it would report its ranks' deaths as failures of theirs.
        for process in sorted(left, key=lambda process: process.role != "launcher"):
            say(f"killing {process.label}: still there after {duration(kill_after)}")
            _signal(process, signal.SIGKILL)
        left = _wait(left, KILLED_SECONDS)
    if left:
        raise DistributedError(
            f"{run_dir}: {', '.join(process.label for process in left)} still there after "
            f"{duration(time.monotonic() - begun)}; `solarwm diagnose` says where, `solarwm stop --now` kills after "
            f"{duration(kill_after)} (steps since the last save are then lost)"
        )
    say(f"all processes have ended after {time.monotonic() - begun:.1f} s")


def _signal(process: Process, number: signal.Signals) -> None:
    """Signal a process that still is the recorded one; one that has ended meanwhile is what was wanted."""
    if refusal(process) is None:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def _wait(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait until all have ended, at most `seconds`; return those that have not."""
    deadline = time.monotonic() + seconds
    while True:
        left = [process for process in processes if liveness(process) == "alive"]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_SECONDS)


def _record(run_dir: Path, processes: Sequence[Process], now: bool) -> None:
    """Write who was asked to stop, when and how, beside the attempt's records."""
    attempts = attempts_of(run_dir)
    if not attempts:
        return
    asked = [{"role": process.role, "pid": process.pid, "host": process.host} for process in processes]
    content = {"schema": "solarwm.stop-request.v1", "wall_time": time.time(), "kill": now, "processes": asked}
    write_atomic(run_dir / "launches" / attempts[-1].name / STOP_REQUEST, json_bytes(content))
