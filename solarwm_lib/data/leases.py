"""Leases on staged shards: kernel file locks (flock), which end with their holder, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from solarwm_lib.data.shards import OpenShard
from solarwm_lib.runtime.errors import ConfigError

TOUCH_SECONDS = 10.0  # precision of the recorded last use
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class CachedShard(OpenShard):
    """A staged shard. Its lease is a shared lock on the file, held only while reads are in progress."""

    def __init__(self, descriptor: int, path: Path, name: str, receipt: Path) -> None:
        super().__init__(descriptor, path, name)
        self._receipt, self._state = receipt, file_state(descriptor)
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Record this moment as the last use."""
        self._touched = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._receipt)

    def _take(self) -> bool:
        # An exclusive lock is only ever held to remove the file, and afterwards its state differs.
        if not lock_file(self._descriptor, fcntl.LOCK_SH):
            return False
        if file_state(self._descriptor) != self._state:
            self._drop()
            return False
        if time.monotonic() - self._touched > TOUCH_SECONDS:
            self.touch()
        return True

    def _drop(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def lock_file(descriptor: int, kind: int) -> bool:
    """Take a file lock without waiting; False if others hold it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise ConfigError(
            f"data.transport.cache_dir: no file locks there ({error.strerror}); name a folder on a local disk"
        ) from None


def file_state(descriptor: int) -> list[int]:
    """Return what changes when a file is written, replaced or unlinked."""
    facts = os.fstat(descriptor)
    return [facts.st_ino, facts.st_nlink, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
