"""No orphans: a process ends when the one that started it has ended, however that ended.

A SIGKILL of torchrun or of Snakemake reaches nobody else: trainers would go on, hold their devices and meet their own
successors in the run directory. Whoever starts processes therefore announces itself in the environment, and a thread of each
of them looks once a second whether it is still there; if not, the process treats that as SIGTERM: it saves and ends with 75.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from solarwm_lib.runtime.errors import Preempted
from solarwm_lib.runtime.owner import start_time, this_process

WORKFLOW, LAUNCHER = "SOLARWM_WORKFLOW", "SOLARWM_LAUNCHER"
NAMES = {WORKFLOW: "the Snakemake", LAUNCHER: "the torchrun"}
POLL_SECONDS = 1.0


class StopNow(BaseException):
    """SIGTERM where nothing but open transactions needs care: they drop what is unfinished, the exit code is 75.

    No `Exception`, so that no retry and no per-case error report takes it for a failure.
    """

    kind = Preempted.kind


def announce(variable: str, **facts: Any) -> None:
    """Let the processes that this one starts know it, under `variable` in their environment."""
    os.environ[variable] = json.dumps({**this_process(), **facts}, sort_keys=True)


def announced(variable: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return who announced itself under `variable`; None if nobody did or it is a process of another machine."""
    try:
        who = json.loads(environment[variable])
        mine = this_process()
        near = all(who[key] == mine[key] for key in ("boot", "pid_namespace"))
        return who if near and isinstance(who["pid"], int) else None
    except (KeyError, ValueError, TypeError):
        return None


def ended(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return, in words, the announced process that is gone, or None."""
    for variable, name in NAMES.items():
        who = announced(variable, environment)
        if who is not None and start_time(who["pid"]) != who["start"]:
            return f"{name} that started this process (pid {who['pid']})"
    return None


@contextmanager
def attached() -> Iterator[None]:
    """Send this process SIGTERM, once, when a process that announced itself to it has ended."""
    done = threading.Event()

    def watch() -> None:
        while True:
            if gone := ended():
                if os.environ.get("LOCAL_RANK", "0") == "0":  # once a machine
                    say(f"solarwm: {gone} has ended; stopping as if by SIGTERM")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if done.wait(POLL_SECONDS):
                return

    if any(announced(variable) for variable in NAMES):
        threading.Thread(target=watch, name="lifeline", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block SIGTERM raises StopNow, SIGUSR1 (save now) does not kill, and nobody becomes an orphan.

    `StopRequest` replaces both for the time in which there is a state to save.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, _stop),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    }
    try:
        with attached():
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
    raise StopNow("stopped on request (SIGTERM); what was unfinished is dropped, run the same command again")


def register(rank: int, heartbeat: Path) -> None:
    """Tell the torchrun that started this process where its heartbeat is and that it understands SIGUSR1."""
    launcher = announced(LAUNCHER)
    if launcher is not None and launcher.get("reports"):
        with suppress(OSError):  # the folder went with its torchrun
            path = Path(launcher["reports"]) / f"{os.getpid()}.json"
            path.write_text(json.dumps({"rank": rank, "heartbeat": str(heartbeat.absolute())}))


def say(line: str) -> None:
    """Print to stderr from any thread, whatever the main thread holds."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))
