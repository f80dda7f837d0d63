"""What one process does about signals, and what it leaves behind for whoever asks if it is still alive."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from solarwm_lib.runtime.owner import command_digest, start_time, this_process

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR1
# Phases of a step in the making; in the others `step` counts completed steps.
STEP_PHASES = ("data", "forward_backward", "status", "reduce", "optimizer")


class StopRequest:
    """Turn the first SIGTERM or SIGINT into a flag that a loop reads at a safe point; SIGUSR1 asks to save and go on.

    Schedulers send SIGTERM before they kill; raising inside a save or a collective would lose exactly the state the
    warning was meant to save. A second SIGINT interrupts at once, for a person who does not want to wait. Whoever saves
    because of `save_requested` resets it before it begins.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.save_requested = False
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a stop signal has arrived."""
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only; elsewhere (a notebook's worker) the caller's handlers stay.
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, SAVE_SIGNAL):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE_SIGNAL:
            self.save_requested = True
            return
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


class Heartbeat:
    """One small file per rank, `heartbeats/rank-00000.json`, rewritten at every phase change.

    It answers "is it alive, where is it, who is it waiting for": rank, pid, host, phase, step, last collective, wall
    clock and monotonic seconds, and `beats`, which grows whenever the rank gets on. Rewritten in place by one write of fixed
    length: a rename over an existing file makes ext4 flush, 3 ms four times a step, and after a power cut nobody asks.
    """

    RECORD_BYTES = 2048

    def __init__(self, run_dir: Path, rank: int) -> None:
        global _newest
        self.path = run_dir / "heartbeats" / f"rank-{rank:05d}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._descriptor)
        self._constant = {"rank": rank, **_identity()}
        self._lock = threading.Lock()
        self.rank, self.beats = rank, 0
        self.phase, self.step = "start", 0
        self._changing: dict[str, Any] = {"collective": None}
        _newest = weakref.ref(self)

    def beat(self, phase: str, step: int, collective: str | None = None, **extra: Any) -> None:
        """Record that this rank is now in `phase` of `step`, waiting in `collective` if given."""
        with self._lock:
            self.phase, self.step = phase, step
            self._changing = {"collective": collective, **extra}
        self.get_on()

    def get_on(self, **facts: Any) -> None:
        """Record that this rank gets on within its phase; `facts` are kept until the next beat."""
        with self._lock:
            self._changing |= facts
            self.beats += 1
            self._write({"wall_time": time.time(), "monotonic_time": time.monotonic()})

    def note(self, **facts: Any) -> None:
        """Add `facts` to the record; the rank does not count as getting on."""
        with self._lock:
            self._changing |= facts
            self._write({})

    @property
    def collective(self) -> str | None:
        """What this rank waits in."""
        return self._changing.get("collective")

    def _write(self, times: dict[str, float]) -> None:
        self._changing |= times
        record = {
            **self._constant,
            "phase": self.phase,
            "step": self.step,
            "beats": self.beats,
            **self._changing,
        }
        line = json.dumps(record, sort_keys=True).encode().ljust(self.RECORD_BYTES - 1) + b"\n"
        os.pwrite(self._descriptor, line, 0)


_newest: weakref.ref[Heartbeat] | None = None


@contextmanager
def waiting(collective: str) -> Iterator[None]:
    """Say in this process's heartbeat, if it has begun to beat, that it waits for its peers in `collective`."""
    heartbeat = _newest() if _newest is not None else None
    if heartbeat is None or not heartbeat.beats:
        yield
        return
    heartbeat.get_on(collective=collective)
    yield
    heartbeat.get_on(collective=None)


def place(record: dict[str, Any]) -> str:
    """Return where a heartbeat's rank is, in words: "forward_backward of step 7, waiting in all_reduce"."""
    phase, step = str(record.get("phase")), int(record.get("step") or 0)
    where = f"{phase} of step {step + 1}" if phase in STEP_PHASES else f"{phase} at step {step}"
    return f"{where}, waiting for its peers ({record['collective']})" if record.get("collective") else where


def _identity() -> dict[str, Any]:
    """What tells this process from every other one: as `this_process`, its command line's digest and its torchrun."""
    identity = {**this_process(), "command": command_digest(os.getpid()), "launcher": None}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        identity["launcher"] = {"pid": parent, "start": start_time(parent), "command": command_digest(parent)}
    return identity


def memory_bytes() -> int:
    """Largest memory this process has used: CUDA's peak if CUDA is in use, else the resident set's peak.

    Linux keeps the latter in /proc for the program itself; `ru_maxrss` would count the process it was forked from.
    """
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
