"""The processes of a run as its records name them, and what this machine knows of them.

A process is the one that was recorded only if boot, PID namespace, PID, start time and command line all agree: PIDs are reused.
Nothing here looks for processes by a pattern.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from solarwm_lib.report.facts import Attempt, attempts_of, read_json
from solarwm_lib.runtime.lock import RUN_LOCK
from solarwm_lib.runtime.owner import command_digest, start_time, this_process

Liveness = Literal["alive", "gone", "unknown"]


@dataclass(frozen=True)
class Process:
    """A recorded process. `role` is `rank N`, `launcher` or `holder of the lock`; other fields as `this_process` writes.

    `command` is the digest of its command line, None in records that have none.
    """

    role: str
    pid: int
    host: str
    start: str | None = None
    boot: str | None = None
    pid_namespace: str | None = None
    command: str | None = None

    @property
    def here(self) -> bool:
        """True if its PID means the same on this machine, since the boot, in this PID namespace."""
        mine = this_process()
        return (self.boot, self.pid_namespace) == (mine["boot"], mine["pid_namespace"])

    @property
    def label(self) -> str:
        """`rank 0, process 4711 on node1`."""
        return f"{self.role}, process {self.pid} on {self.host}"


def of_record(role: str, record: Mapping[str, Any]) -> Process | None:
    """Return the process that a heartbeat or lock file describes; None without a PID."""
    if not isinstance(record.get("pid"), int):
        return None
    fields = {key: record.get(key) for key in ("start", "boot", "pid_namespace", "command")}
    return Process(role, record["pid"], str(record.get("host", "an unknown host")), **fields)


def liveness(process: Process) -> Liveness:
    """Say whether the process still runs; unknown for one elsewhere, or of a record without a start time."""
    if not process.here or process.start is None:
        return "unknown"
    return "alive" if start_time(process.pid) == process.start else "gone"


def lock_holder(run_dir: Path) -> Process | None:
    """Return the last process that held the run directory's lock; whether it still runs is another question."""
    return of_record("holder of the lock", read_json(run_dir / RUN_LOCK))


def run_processes(run_dir: Path, beats: Sequence[Mapping[str, Any]]) -> list[Process]:
    """Return the launchers and ranks that the heartbeats name and the holder of the lock, each process once."""
    found: dict[tuple[str, int, str | None], Process] = {}

    def add(process: Process | None) -> None:
        if process is not None:
            found.setdefault((process.host, process.pid, process.start), process)

    for beat in beats:
        if isinstance(launcher := beat.get("launcher"), dict):
            place = {key: beat.get(key) for key in ("host", "boot", "pid_namespace")}
            add(of_record("launcher", {**place, **launcher}))
    for beat in beats:
        add(of_record(f"rank {beat['rank']}", beat))
    add(lock_holder(run_dir))
    return list(found.values())


def heartbeats(run_dir: Path) -> list[dict[str, Any]]:
    """Return the heartbeats of the newest attempt in order of rank; files of earlier ones stay until overwritten."""
    attempts = attempts_of(run_dir)
    begun = began(attempts[-1]) if attempts else 0.0
    found = [read_json(path) for path in sorted((run_dir / "heartbeats").glob("rank-*.json"))]
    return [
        beat for beat in found if isinstance(beat.get("rank"), int) and beat.get("wall_time", 0.0) >= begun
    ]


def began(attempt: Attempt) -> float:
    """Return when an attempt began, in seconds since the epoch; no rank of it has a heartbeat before. 0 if unknown."""
    try:
        return datetime.fromisoformat(
            attempt.result.get("started") or attempt.manifest["started"]
        ).timestamp()
    except (KeyError, TypeError, ValueError):
        return 0.0


def refusal(process: Process) -> str | None:
    """Return why this process may not be signalled from here, None if it may.

    Only a live process that is the recorded one in every respect and belongs to this user may.
    """
    if not process.here:
        return f"runs on {process.host} and cannot be reached from here"
    if process.start is None or process.command is None:
        return "its record has no start time and command line, so it cannot be told from another process"
    if start_time(process.pid) != process.start:
        return "is gone"
    if command_digest(process.pid) != process.command:
        return "has another command line than the recorded one"
    try:
        owner = os.stat(f"/proc/{process.pid}").st_uid if os.path.exists("/proc/self") else os.geteuid()
    except OSError:
        return "is gone"
    return None if owner == os.geteuid() else "belongs to another user"
