"""Who fills a staging directory, and whether that process is still there.

A process is known by boot id, PID namespace, PID and start time: host names repeat between machines and containers, PIDs
are reused. Only when boot and namespace are ours does the PID decide; otherwise only time can tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

OWNER = ".owner.json"


def start_time(pid: int) -> str | None:
    """Start time of a live process as opaque text; None if it is gone or a zombie."""
    if not os.path.exists("/proc/self/stat"):
        return start_time_portable(pid)
    try:
        # The command name may hold spaces and parentheses, so fields count from the last ')'.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def start_time_portable(pid: int) -> str | None:
    """As `start_time` where there is no /proc (macOS)."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None


def _boot() -> str:
    """Identity of this machine's current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"{os.uname().nodename} {psutil.boot_time():.0f}"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "only"


def this_process() -> dict[str, Any]:
    """Identity of the calling process."""
    pid = os.getpid()
    return {
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "host": os.uname().nodename,
        "pid": pid,
        "start": start_time(pid),
    }


def command_digest(pid: int) -> str | None:
    """SHA-256 of a process's command line, 16 hexadecimal digits; None if it is gone or cannot be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        if os.path.exists("/proc/self/cmdline"):
            return None
        import psutil

        try:
            words = "\0".join([*psutil.Process(pid).cmdline(), ""]).encode()
        except psutil.Error:
            return None
    return hashlib.sha256(words).hexdigest()[:16] if words else None


def write_owner(directory: Path) -> None:
    """Record the calling process as the owner of a new staging directory."""
    (directory / OWNER).write_text(json.dumps(this_process(), indent=2, sort_keys=True) + "\n")


def is_abandoned(directory: Path, max_age_s: float) -> bool:
    """True if the owner is dead on this machine, or unknown and nothing in the directory changed for `max_age_s`."""
    mine = this_process()
    try:
        owner = json.loads((directory / OWNER).read_bytes())
        if all(owner[key] == mine[key] for key in ("boot", "pid_namespace")):
            return bool(start_time(owner["pid"]) != owner["start"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no readable owner: age decides
    return time.time() - _newest_change(directory) > max_age_s


def _newest_change(directory: Path) -> float:
    newest = 0.0
    for root, _, files in os.walk(directory):
        for path in [root, *(os.path.join(root, name) for name in files)]:
            try:
                newest = max(newest, os.lstat(path).st_mtime)
            except FileNotFoundError:
                newest = time.time()  # files come and go: somebody is at work
    return newest
