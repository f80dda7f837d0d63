"""One process at a time: an advisory lock on a file, which the kernel releases when its holder ends, however it ends.

A trainer can outlive the Snakemake that started it. Two of them in one run directory would thin each other's rolling saves
and mix their metrics, so the second is refused and told who the first is.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.runtime.owner import this_process

RUN_LOCK = ".run.lock"
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

log = logging.getLogger(__name__)
_held: set[str] = set()


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` (its directory is made); the same process may enter again.

    Raises ArtifactError naming the process that holds it; `what` says what it does there ("training"). A file system
    without locks is reported in the log and the block runs unprotected.
    """
    key = os.path.realpath(path)
    if key in _held:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _acquire(descriptor, path, what)
        _held.add(key)
        yield
    finally:
        _held.discard(key)
        # The file stays: removing it would let a third process lock a new one while the second waits on the old.
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArtifactError(_refusal(_holder(descriptor), path, what)) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        log.warning("%s: no locks here (%s); make sure that nothing else is %s", path, error.strerror, what)
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(this_process(), sort_keys=True) + "\n").encode(), 0)


def _holder(descriptor: int) -> dict[str, Any]:
    """Return what the holder wrote about itself; empty in the instant before it did."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _refusal(holder: dict[str, Any], path: Path, what: str) -> str:
    pid, host = holder.get("pid", "unknown"), holder.get("host", "an unknown host")
    return (
        f"{path.parent}: process {pid} on {host} is {what} here; wait until it ends, or stop it there with `kill {pid}` "
        f"(training saves its state first), then run the same command again"
    )
