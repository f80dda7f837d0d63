"""Durable single files: temporary sibling, fsync, rename; hashing while writing; recognising a full disk."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from solarwm_lib.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Below this size the hand-over to another thread costs more than it hides.
_PARALLEL_BYTES = 2**20
# More than this is not held back for the thread that hashes.
_UNHASHED_BYTES = 2**26

log = logging.getLogger(__name__)


def json_bytes(value: Any) -> bytes:
    """UTF-8 JSON for files: two-space indent, sorted keys, non-ASCII kept, NaN refused, one trailing newline."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def fsync_dir(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network filesystems cannot sync a directory; there a rename is as durable as it gets.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Create a file (FileExistsError if there is one) and fsync it."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _temporary_beside(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write_synced(temporary, data)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if disk_full(error):
            raise ArtifactError(disk_full_message(path, error)) from error
        raise
    return temporary


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Write a single file (a view: report, picture, launch record) so that readers see the old or the new content.

    Replaces an existing file. ArtifactError when the disk is full; the old content then stays.
    """
    path = Path(path)
    temporary = _temporary_beside(path, data.encode() if isinstance(data, str) else data)
    try:
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def write_once(path: Path | str, data: bytes | str) -> bool:
    """Create a single file that may never change (frozen plan, resolved config).

    Returns True if this call created it, False if it was there with the same bytes; other bytes are an ArtifactError.
    Of two racing writers one wins and the other compares.
    """
    path = Path(path)
    data = data.encode() if isinstance(data, str) else data
    if not path.exists():
        temporary = _temporary_beside(path, data)
        try:
            os.link(temporary, path)
            fsync_dir(path.parent)
            return True
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP):
                raise
            os.rename(temporary, path)  # no hard links here: the check above must do
            fsync_dir(path.parent)
            return True
        finally:
            temporary.unlink(missing_ok=True)
    if path.read_bytes() != data:
        raise ArtifactError(
            f"{path}: exists with other content and is never overwritten; remove it or use another name"
        )
    return False


def disk_full(error: BaseException | None) -> bool:
    """True if `error`, or what caused it, says the disk, the quota or the file size limit is exhausted.

    Native writers (safetensors, ffmpeg) raise their own classes, so their text counts too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(os.strerror(code) in str(error) for code in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full_message(target: Path, error: BaseException) -> str:
    """One line for a write of `target` that `disk_full` recognised; call it before the unfinished files are removed."""
    free = shutil.disk_usage(target.parent).free
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return (
        f"disk full while writing {target}: {reason} ({free / 2**20:.1f} MiB free); nothing was published and the "
        "unfinished files were removed; free space or change the output directory, then run the same command again"
    )


class HashingWriter(io.BufferedIOBase):
    """Sequential writer of one new file: hashes what passes, fsyncs at close, then reports
    its size in bytes and its SHA-256.

    Large pieces are hashed by a second thread while this one writes (hashlib and write both release the lock).
    Leaving its `with` block by an exception discards the file instead: a half-written member is never reported.
    """

    def __init__(self, path: Path, done: Callable[[int, str], None]) -> None:
        self._path, self._done = path, done
        self._hash, self._size = hashlib.sha256(), 0
        self._hasher: ThreadPoolExecutor | None = None
        self._unhashed: deque[tuple[Future[None], int]] = deque()
        self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        """Write `data`, whose memory may change when this returns."""
        written = self.write_stable(data)
        self._wait_for_hash(0)
        return written

    def write_stable(self, data: Any) -> int:
        """Write `data`, whose memory must not change before the file is closed: its hash may come later."""
        view = memoryview(data).cast("B")
        if view.nbytes < _PARALLEL_BYTES and not self._unhashed:
            self._hash.update(view)
        else:
            self._unhashed.append((self._second_thread().submit(self._hash.update, view), view.nbytes))
        self._file.write(view)
        self._size += view.nbytes
        self._wait_for_hash(_UNHASHED_BYTES)
        return view.nbytes

    def _second_thread(self) -> ThreadPoolExecutor:
        if self._hasher is None:
            from concurrent.futures import ThreadPoolExecutor

            self._hasher = ThreadPoolExecutor(1, "sha256")
        return self._hasher

    def _wait_for_hash(self, most: int) -> None:
        """Wait until at most `most` written bytes are not hashed yet."""
        waiting = sum(size for _, size in self._unhashed)
        while self._unhashed and (waiting > most or self._unhashed[0][0].done()):
            hashed, size = self._unhashed.popleft()
            hashed.result()
            waiting -= size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._release()
        self._wait_for_hash(0)
        self._done(self._size, self._hash.hexdigest())

    def discard(self) -> None:
        """Close without reporting and remove the file."""
        if not self.closed:
            try:
                self._release()
            except OSError:
                log.debug("closing a discarded file failed", exc_info=True)
            self._path.unlink(missing_ok=True)

    def _release(self) -> None:
        try:
            self._file.close()
        finally:
            if self._hasher is not None:
                self._hasher.shutdown()
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
