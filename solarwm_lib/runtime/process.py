"""What one process does about signals, and what it leaves behind for whoever asks if it is still alive."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Turn the first SIGTERM or SIGINT into a flag that a loop reads at a safe point.

    Schedulers send SIGTERM before they kill; raising inside a save or a collective would lose exactly the state the
    warning was meant to save. A second SIGINT interrupts at once, for a person who does not want to wait.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a stop signal has arrived."""
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only; elsewhere (a notebook's worker) the caller's handlers stay.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


class Heartbeat:
    """One small file per rank, `heartbeats/rank-00000.json`, rewritten at every phase change.

    It answers "is it alive, where is it, who is it waiting for": rank, pid, host, phase, step, last collective, wall
    clock and monotonic seconds. Rewritten in place by one write of fixed length: a rename over an existing file makes
    ext4 flush, 3 ms four times a step, and after a power cut nobody asks.
    """

    RECORD_BYTES = 2048

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = run_dir / "heartbeats" / f"rank-{rank:05d}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._descriptor)
        self._constant = {"rank": rank, "pid": os.getpid(), "host": os.uname().nodename}

    def beat(self, phase: str, step: int, collective: str | None = None, **extra: Any) -> None:
        """Record that this rank is now in `phase` of `step`, waiting in `collective` if given."""
        record = {
            **self._constant,
            "phase": phase,
            "step": step,
            "collective": collective,
            "wall_time": time.time(),
            "monotonic_time": time.monotonic(),
            **extra,
        }
        line = json.dumps(record, sort_keys=True).encode().ljust(self.RECORD_BYTES - 1) + b"\n"
        os.pwrite(self._descriptor, line, 0)


def memory_bytes() -> int:
    """Largest memory this process has used: CUDA's peak if CUDA is in use, else the resident set's peak."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
