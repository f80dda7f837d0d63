"""torchrun that says who failed and why, passes signals on, and gives workers the time to save.

python -m solarwm_lib.runtime.torchrun --standalone --nproc-per-node=2 -m solarwm_lib train ...

torchrun itself turns every exit code into 1 and kills workers 30 s after SIGTERM. Here the exit code is that of the worker that
failed first, SIGTERM, SIGINT and SIGUSR1 are passed on and then waited for, and the last line names the worker. Workers end when
this process has ended (`lifeline`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from solarwm_lib.runtime import lifeline
from solarwm_lib.runtime.errors import DistributedError, Preempted, of_exit_code
from solarwm_lib.runtime.lifeline import say
from solarwm_lib.runtime.owner import start_time
from solarwm_lib.runtime.process import place

# What torchrun keeps to itself: it must handle at least one signal. Versions without the option handle all of them.
_KEPT_BY_TORCHRUN = "SIGQUIT"
_LATE_SECONDS = 10.0
# A worker that ends breaks the others' connections, which ends them: the same moment, as torchrun polls.
_SAME_MOMENT_SECONDS = 2.0


@dataclass(frozen=True)
class Failure:
    """How a worker ended: its exit code, or minus the number of the signal that killed it; `time` in seconds."""

    rank: int
    pid: int
    code: int
    time: float


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with `arguments`; return 0, the exit code of the first failed worker, or 75 after a stop signal."""
    with tempfile.TemporaryDirectory(prefix="solarwm-workers-") as reports:
        signals = Signals(Path(reports))
        signals.handle()
        lifeline.announce(lifeline.LAUNCHER, reports=reports)
        os.environ["PET_SIGNALS_TO_HANDLE"] = _KEPT_BY_TORCHRUN

        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            run.main(list(arguments))
        except ChildFailedError as error:
            failed = [
                Failure(rank, item.pid, item.exitcode, float(item.timestamp))
                for rank, item in error.failures.items()
            ]
            first = cause(failed)
            stopped = signals.stopped is not None
            say(describe(first, last_heartbeat(Path(reports), first.pid), stopped))
            return exit_code(first, stopped)
        except SignalException as error:
            say(f"solarwm: torchrun stopped on request (signal {int(error.sigval)})")
            return Preempted.exit_code
        return 0


def cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others followed from.

    Of those of the first moment one with a reason of its own; lost connections and the signals that torchrun sends to the
    rest only follow from another.
    """

    def follows(failure: Failure) -> int:
        sent = (-signal.SIGTERM, -signal.SIGINT)
        order = {Preempted.exit_code: 1, DistributedError.exit_code: 2, **dict.fromkeys(sent, 3)}
        return order.get(failure.code, 0)

    failures = list(failures)
    begin = min(failure.time for failure in failures)
    near = [failure for failure in failures if failure.time <= begin + _SAME_MOMENT_SECONDS]
    return min(near, key=lambda failure: (follows(failure), failure.time, failure.rank))


def exit_code(failure: Failure, stopped: bool) -> int:
    """Return the exit code for `failure`: a signal as shells number it, 75 if it was the one we passed on."""
    if stopped and failure.code in (-signal.SIGTERM, -signal.SIGINT):
        return Preempted.exit_code
    return failure.code if failure.code > 0 else 128 - failure.code


def describe(failure: Failure, heartbeat: dict[str, Any] | None, stopped: bool) -> str:
    """Return the last line: which worker ended how, and where it was."""
    who = f"rank {failure.rank} (pid {failure.pid})"
    where = f"its last heartbeat: {place(heartbeat)}" if heartbeat else "it had no heartbeat yet"
    if failure.code > 0:
        kind = of_exit_code(failure.code).kind
        cause = "" if kind == "bug" and failure.code != 1 else f" ({kind})"
        return f"solarwm: {who} ended with exit code {failure.code}{cause}; {where}"
    name = signal.Signals(-failure.code).name
    if stopped and failure.code != -signal.SIGKILL:
        return f"solarwm: {who} was stopped by {name}; {where}"
    hints = {
        signal.SIGKILL: "; if nobody sent it, the kernel or the scheduler did because memory ran out (dmesg says so): "
        "lower train.micro_batch_size, or give the job more memory",
        signal.SIGSEGV: "; native code crashed: the driver or a compiled package",
        signal.SIGBUS: "; a mapped file became shorter, or shared memory (/dev/shm) is full",
    }
    return f"solarwm: error: {who} was killed by {name}; {where}{hints.get(-failure.code, '')}"


def last_heartbeat(reports: Path, pid: int) -> dict[str, Any] | None:
    """Return the heartbeat record of the worker `pid`, None if it did not get that far."""
    try:
        path = json.loads((reports / f"{pid}.json").read_bytes())["heartbeat"]
        record = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, KeyError):
        return None
    return record if record.get("pid") == pid else None


def workers(*, ended: bool = False) -> list[int]:
    """PIDs of the processes that this one started; those that ended, and that torchrun has not yet looked at, on request."""
    import psutil

    pids = [child.pid for child in psutil.Process().children()]
    return [pid for pid in pids if ended or start_time(pid) is not None]


class Signals:
    """Passes signals on to the workers; torchrun learns of them only by how the workers end."""

    def __init__(self, reports: Path) -> None:
        self.stopped: signal.Signals | None = None
        self._reports = reports

    def handle(self) -> None:
        """Install the handlers; called before torchrun starts anything."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(number, self._stop)
        signal.signal(signal.SIGUSR1, self._save)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        first, self.stopped = self.stopped is None, signal.Signals(number)
        # The terminal is gone after SIGHUP, the state need not be.
        passed = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        running = workers()
        if not running and not workers(ended=True):
            say(f"solarwm: stopped on request ({self.stopped.name}) before there were workers")
            sys.exit(Preempted.exit_code)
        say(f"solarwm: {self.stopped.name} is passed on to {len(running)} workers, which save and end")
        _send(running, passed)
        if first:
            threading.Thread(target=_send_to_late, args=(set(running), passed), daemon=True).start()

    def _save(self, number: int, frame: FrameType | None) -> None:
        # Only to those that have said that they understand it: it kills the others.
        ready = {int(path.stem) for path in self._reports.glob("*.json")}
        _send([pid for pid in workers() if pid in ready], signal.SIGUSR1)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _send_to_late(told: set[int], number: signal.Signals) -> None:
    """Signal the workers that were being started when the signal came."""
    end = time.monotonic() + _LATE_SECONDS
    while time.monotonic() < end:
        time.sleep(0.2)
        late = set(workers()) - told
        _send(late, number)
        told |= late


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
