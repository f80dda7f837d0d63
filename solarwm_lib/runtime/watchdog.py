"""A hang becomes a report: who waits, for whom, since when and where; then the process ends with exit code 7.

A rank that waits for its peers may wait as long as any of them gets on, so nobody is judged by his own silence: a hang is
when no rank's heartbeat has moved for the whole time-out. Time is that of this process's own observations, because wall
clocks jump and differ between hosts.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solarwm_lib.artifacts import json_bytes, write_atomic
from solarwm_lib.runtime.errors import DistributedError, SolarError
from solarwm_lib.runtime.lifeline import say
from solarwm_lib.runtime.owner import start_time, this_process
from solarwm_lib.runtime.process import STEP_PHASES, Heartbeat, place

SCHEMA = "solarwm.hang.v1"
FOLDER = "diagnostics"
# Minutes without a beat are normal here for large states; bytes that are read or written count as getting on.
IO_PHASES = ("verify", "build", "load", "data", "save", "publish")
IO_STEP_BYTES = 2**20
_WRITE_SECONDS = 30.0

# Called with the error before a hung process ends: its launch record must not stay "running".
last_words: list[Callable[[SolarError], None]] = []


@dataclass(frozen=True)
class Rank:
    """What is known of one rank: its heartbeat (None: there is none), whether its process is gone, seconds of silence."""

    rank: int
    record: dict[str, Any] | None
    gone: bool = False
    silent_seconds: float = 0.0

    @property
    def waits(self) -> bool:
        """True if it waits for its peers, by its own word or by what its main thread executes."""
        return bool(self.record and (self.record.get("collective") or self.record.get("in_collective")))

    def words(self) -> str:
        """The rank, its process and where it is, or last was."""
        if self.record is None:
            return f"rank {self.rank} has left no heartbeat"
        who = f"rank {self.rank} (pid {self.record.get('pid')} on {self.record.get('host')})"
        if self.gone:
            return f"{who} is gone; its last heartbeat: {place(self.record)}"
        at = f", at {self.record['at']}" if self.record.get("at") else ""
        return f"{who} is in {place(self.record)} for {self.silent_seconds:.0f} s{at}"


def read(run_dir: Path, world_size: int) -> list[Rank]:
    """Read the heartbeats of all ranks; seconds of silence are known for processes of this machine only."""
    mine = this_process()
    return [_read(run_dir / "heartbeats" / f"rank-{rank:05d}.json", rank, mine) for rank in range(world_size)]


def _read(path: Path, rank: int, mine: dict[str, Any]) -> Rank:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):  # absent, or read while it was written
        return Rank(rank, None)
    if not all(record.get(key) == mine[key] for key in ("boot", "pid_namespace")):
        return Rank(rank, record)
    gone = start_time(record["pid"]) != record["start"]
    return Rank(rank, record, gone, max(0.0, time.monotonic() - record.get("monotonic_time", 0.0)))


def behind(ranks: Iterable[Rank]) -> list[Rank]:
    """Return the ranks that the others wait for, the likeliest first.

    Those whose process is gone; else those that do not wait for peers, at the earliest step among them; else the one that
    waits in the earliest step since the longest time.
    """
    known = [rank for rank in ranks if rank.record is not None]
    if gone := [rank for rank in known if rank.gone]:
        return gone

    def step(rank: Rank) -> int:
        record = rank.record or {}
        return int(record.get("step") or 0) + (record.get("phase") in STEP_PHASES)

    working = [rank for rank in known if not rank.waits]
    candidates = working or known
    if not candidates:
        return list(ranks)
    first = min(map(step, candidates))
    late = [rank for rank in candidates if step(rank) == first]
    return late if working else [min(late, key=lambda rank: (rank.record or {}).get("wall_time", 0.0))]


class Watchdog:
    """Watches, from a thread, that some rank of the run gets on; `with Watchdog(...):` around what has heartbeats."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        run_dir: Path,
        world_size: int,
        timeout_seconds: float,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._heartbeat, self._run_dir, self._world_size = heartbeat, run_dir, world_size
        self._timeout, self._end = timeout_seconds, end
        self._interval = min(30.0, max(0.2, timeout_seconds / 20))
        self._main = threading.current_thread().ident or 0
        self._done = threading.Event()
        self._io_bytes = 0
        self._reset(time.monotonic())

    def __enter__(self) -> Watchdog:
        if self._timeout > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()

    def _reset(self, now: float) -> None:
        """This rank got on: what was seen of the others no longer counts."""
        self._beats, self._quiet_since = self._heartbeat.beats, now
        self._seen: dict[int, tuple[Any, float]] = {}

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._done.wait(self._interval):
            now = time.monotonic()
            # A process that was stopped and continued has observed nothing meanwhile.
            if now - last > 5 * self._interval + 5:
                self._reset(now)
            last = now
            try:
                hung = self._look(now)
            except Exception as error:  # a full disk or a lost mount must not end the watch
                say(f"solarwm: warning: the watchdog could not look: {type(error).__name__}: {error}")
                continue
            if hung is not None and not self._done.is_set():
                self._report(hung)
                return

    def _look(self, now: float) -> list[Rank] | None:
        """Return all ranks if none has moved for the time-out, else None."""
        if self._heartbeat.phase in IO_PHASES and not self._heartbeat.collective and self._reads_or_writes():
            self._heartbeat.get_on()
        if self._heartbeat.beats != self._beats:
            self._reset(now)
            return None
        # Steps take seconds: only a rank that is silent for longer makes everybody's files be read.
        if now - self._quiet_since < min(60.0, self._timeout / 5):
            return None
        if not self._seen:
            self._heartbeat.note(**where(self._main))
        ranks = read(self._run_dir, self._world_size)
        for rank in ranks:
            record = rank.record or {}
            state = (record.get("pid"), record.get("start"), record.get("beats"))
            if rank.rank not in self._seen or self._seen[rank.rank][0] != state:
                self._seen[rank.rank] = (state, now)
        quiet = min([now - self._quiet_since, *(now - since for _, since in self._seen.values())])
        return ranks if quiet >= self._timeout else None

    def _reads_or_writes(self) -> bool:
        """True if this process has read or written a MiB since the last one, not counting this thread."""
        total = _io_bytes("/proc/self/io") - _io_bytes("/proc/thread-self/io")
        if total - self._io_bytes < IO_STEP_BYTES:
            return False
        self._io_bytes = total
        return True

    def _report(self, ranks: list[Rank]) -> None:
        """Say who is behind, write what is known, and end this process."""
        mine = self._heartbeat
        late = behind(ranks)
        step = mine.step + (mine.phase in STEP_PHASES)
        path = self._run_dir / FOLDER / f"hang-step-{step:06d}-rank-{mine.rank:05d}.json"
        error = DistributedError(self._line(ranks, late, path))
        # One line for all: the lowest rank that others do not wait for speaks, if any is there.
        blamed = {rank.rank for rank in late}
        speakers = [r.rank for r in ranks if r.record is not None and not r.gone and r.rank not in blamed]
        if mine.rank == min(speakers or blamed):
            say(f"solarwm: error: {error}")
        # A file system that hangs, too, must not keep the process.
        written = threading.Thread(target=self._write, args=(path, step, ranks, late, error), daemon=True)
        written.start()
        written.join(_WRITE_SECONDS)
        # The first rank to end breaks the others' connections: leave them the time to see the hang, too.
        time.sleep(2 * self._interval + 0.5)
        self._end(DistributedError.exit_code)

    def _write(
        self, path: Path, step: int, ranks: list[Rank], late: list[Rank], error: DistributedError
    ) -> None:
        try:
            content = {
                "schema": SCHEMA,
                "rank": self._heartbeat.rank,
                "step": step,
                "timeout_seconds": self._timeout,
                "behind": [rank.rank for rank in late],
                "waiting": [rank.rank for rank in ranks if rank.waits],
                "ranks": [vars(rank) for rank in ranks],
                "stacks": stacks(),
            }
            write_atomic(path, json_bytes(json.loads(json.dumps(content, default=str))))
        except Exception as failure:
            say(f"solarwm: warning: {path} not written: {failure}")
        for tell in last_words:
            tell(error)

    def _line(self, ranks: list[Rank], late: list[Rank], path: Path) -> str:
        waiting = [rank.rank for rank in ranks if rank not in late and not rank.gone]
        waiters = f"; ranks {_ranges(waiting)} wait" if waiting else ""
        first = late[0].words() if late else "nothing is known of any rank"
        more = f" (and ranks {_ranges(rank.rank for rank in late[1:])})" if late[1:] else ""
        return (
            f"hang: no rank got on for {self._timeout:g} s; {first}{more}{waiters}; details in {path}; the time allowed is "
            "runtime.hang_timeout_seconds"
        )


def describe_lost(run_dir: Path, world_size: int, rank: int, patience_seconds: float = 3.0) -> str:
    """Return who is gone, from the heartbeats of the other ranks; the silent ones if all processes are there.

    The process that broke the connection may still be ending: it is given `patience_seconds`.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        others = [item for item in read(run_dir, world_size) if item.rank != rank]
        gone = [item for item in others if item.gone]
        if gone or not others or time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    if gone:
        return "; ".join(item.words() for item in _oldest_first(gone)[:3])
    known = [item for item in others if item.record is not None]
    told = "; ".join(item.words() for item in _oldest_first(known)[:3])
    return f"no process of this machine is gone; {told}" if told else "no other rank has left a heartbeat"


def _oldest_first(ranks: list[Rank]) -> list[Rank]:
    return sorted(ranks, key=lambda rank: (rank.record or {}).get("wall_time", 0.0))


def stacks() -> dict[str, list[str]]:
    """Return the Python stack of every thread of this process, innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": traceback.format_stack(frame)
        for ident, frame in sys._current_frames().items()
    }


def where(thread: int) -> dict[str, Any]:
    """Return what `thread` executes: `at` its innermost line and `in_collective`, whether PyTorch's distributed package is below."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return {}
    summary = traceback.extract_stack(frame)
    at = summary[-1]
    inside = any(re.search(r"torch[/\\]distributed[/\\]", entry.filename) for entry in summary[-12:])
    return {"at": f"{Path(at.filename).name}:{at.lineno} {at.name}"[-200:], "in_collective": inside}


def _io_bytes(path: str) -> int:
    """Bytes that were read and written, through the page cache or by faults; 0 where the system does not tell."""
    try:
        pairs = (line.split(": ") for line in Path(path).read_text().splitlines())
        return sum(
            int(value) for key, value in pairs if key in ("rchar", "wchar", "read_bytes", "write_bytes")
        )
    except (OSError, ValueError):
        return 0


def _ranges(ranks: Iterable[int]) -> str:
    """`0, 2-5` for 0, 2, 3, 4, 5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
