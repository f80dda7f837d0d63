"""Shards of a bucket staged in a folder that processes share: bounded, verified, never evicted under a reader.

    HASH-NAME.data          the shard; a shared lock on it is a lease: it is in use and stays
    HASH-NAME.part          room reserved for a transfer, at full size from the start, then its bytes
    HASH-NAME.lock          held during the transfer; a `.part` whose lock is free was left by a dead process
    HASH-NAME.receipt.json  what was verified, and the state of the file then; its mtime is the last use
    HASH-NAME.failed.json   the last failure, so that those who waited for the transfer share it
    evict.lock              held while room is made and reserved

Locks are the kernel's (flock): whatever ends a process also ends its locks. Whoever holds evict.lock only tries the other
locks and never waits for one, so nobody waits in a circle. The folder must be on a disk of this machine.
(spec operations 4.11, 4.12)
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.data.index import Row
from solarwm_lib.data.leases import CachedShard, file_state, lock_file
from solarwm_lib.data.prefetch import Prefetcher, Stopped
from solarwm_lib.data.shards import survive_fork
from solarwm_lib.runtime.errors import ConfigError, DataError, SolarError
from solarwm_lib.runtime.files import disk_full, json_bytes, write_atomic

if TYPE_CHECKING:
    from solarwm_lib.data.transport import RemoteFiles

RECEIPT_SCHEMA = "solarwm.shard-receipt.v1"
FAILURE_SCHEMA = "solarwm.shard-failure.v1"
SIDE_BYTES = 4096  # room counted for the small files beside each shard
POLL_SECONDS = 0.05
_OURS = re.compile(r"([0-9a-f]{24}-.*)\.(?:data|part|lock)")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A shard and what the index promises about it; absent promises are None."""

    shard: str
    size: int | None = None
    sha256: str | None = None
    md5_b64: str | None = None
    blake2s: str | None = None

    @staticmethod
    def of(row: Wanted | Row | str) -> Wanted:
        """Return the promises of an index row; a bare shard name promises nothing."""
        if isinstance(row, Wanted):
            return row
        if isinstance(row, str):
            return Wanted(row)
        size = None if row.shard_size is None else int(row.shard_size)
        identity = (row.shard_generation, size, row.shard_md5_b64, row.shard_digest)
        return Wanted.promised(row.shard, *identity)

    @staticmethod
    def promised(
        shard: str, generation: str | None, size: int | None, md5_b64: str | None, digest: str | None
    ) -> Wanted:
        """Return the promises of an index's shard fields. Released latent rows carry a BLAKE2s digest, and say so in their
        generation `local-digest:DIGEST`; ours is SHA-256. (spec ltx25 6.3)"""
        if digest is not None and generation == f"local-digest:{digest}":
            return Wanted(shard, size, None, md5_b64, digest)
        return Wanted(shard, size, digest, md5_b64)


class ShardCache:
    """Stages shards of `remote` in `cache_dir`, in at most `max_bytes`; safe between threads, processes and forks.

    Waiting (for a transfer, another process's transfer, or room) is bounded by `remote.timeout_seconds`.
    """

    def __init__(self, remote: RemoteFiles, cache_dir: str | Path, max_bytes: int) -> None:
        self.directory = Path(cache_dir)
        self._remote, self._max_bytes = remote, max_bytes
        self._held: set[int] = set()
        self._prefetcher: Prefetcher | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked("evict.lock"):
                pass
        except OSError as error:
            raise ConfigError(
                f"data.transport.cache_dir: {self.directory} is not usable ({error.strerror}); name a folder on a "
                "local disk that this user may write"
            ) from None
        survive_fork(self)

    def acquire(self, row: Wanted | Row | str, stop: threading.Event | None = None) -> CachedShard:
        """Return the staged shard, leased to the caller, who calls `release` after reading; transfer it if need be.

        Raises DataError for a shard that the bucket lacks, does not deliver in time, or delivers with other bytes than
        the index promises; ConfigError for one that is larger than the cache.
        """
        wanted, stop = Wanted.of(row), stop or threading.Event()
        started, deadline = time.time_ns(), time.monotonic() + self._remote.timeout_seconds
        while True:
            if (shard := self._hit(wanted)) is not None:
                return shard
            with self._locked(f"{self._stem(wanted)}.lock") as locked:
                if locked:
                    if (shard := self._hit(wanted)) is not None:
                        return shard
                    self._share_failure(wanted, started)
                    return self._transfer(wanted, deadline, stop)
            if time.monotonic() > deadline:
                raise DataError(
                    f"{wanted.shard}: another process did not finish staging it in {self.directory} within "
                    f"{self._remote.timeout_seconds:g} s; look at that process, or raise data.transport.timeout_seconds"
                )
            _pause(stop)

    def stage(self, row: Wanted | Row | str, stop: threading.Event | None = None) -> int:
        """Have a shard staged without reading it now; return its bytes. Raises as `acquire` does."""
        shard = self.acquire(row, stop)
        shard.release()
        shard.close()
        return shard.size

    def size(self, row: Wanted | Row | str) -> int:
        """Return the bytes of a shard without staging it (nor asking the bucket, once it is staged).

        Raises as `acquire` does for a shard that is missing or too large.
        """
        wanted = Wanted.of(row)
        if (staged := self._hit(wanted)) is not None:
            staged.release()
            staged.close()
            return staged.size
        size = self._remote.size(wanted.shard)
        self._check_fits(wanted.shard, size)
        return size

    def check_fits_together(self, sizes: Iterable[int]) -> None:
        """Raise ConfigError if shards of these sizes cannot be staged at the same time."""
        counted = [size + SIDE_BYTES for size in sizes]
        if sum(counted) > self._max_bytes:
            raise ConfigError(
                f"data.transport.cache_max_gib: {len(counted)} shards with {sum(counted)} bytes do not fit in a cache of "
                f"{self._max_bytes} bytes; set at least {sum(counted) / 2**30:.3g}"
            )

    def prefetch(self, shards: Iterable[Wanted | Row | str]) -> None:
        """Stage these shards in the background, the one needed first at the front; see `Prefetcher`."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self)
        self._prefetcher.add(map(Wanted.of, shards))

    def fit_in_half(self, shards: Iterable[Wanted]) -> bool:
        """True if these shards leave half of the cache for those that are being read."""
        return sum(self._remote.size(wanted.shard) + SIDE_BYTES for wanted in shards) <= self._max_bytes // 2

    def close(self) -> None:
        """Give up prefetching; staged shards stay for the next reader."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None

    def after_fork(self) -> None:
        # A lock is shared with the parent through its descriptor; closing ours leaves the parent's in place.
        for descriptor in self._held:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._held, self._prefetcher = set(), None

    def _stem(self, wanted: Wanted) -> str:
        url = self._remote.url(wanted.shard)
        base = re.sub(r"[^A-Za-z0-9._-]", "_", wanted.shard.rpartition("/")[2])[-120:]
        return f"{hashlib.blake2s(url.encode()).hexdigest()[:24]}-{base}"

    def _path(self, stem: str, suffix: str) -> Path:
        return self.directory / f"{stem}.{suffix}"

    def _hit(self, wanted: Wanted) -> CachedShard | None:
        """Return the staged shard, leased, if it is what was verified and what the index promises."""
        stem = self._stem(wanted)
        path = self._path(stem, "data")
        receipt = _load(self._path(stem, "receipt.json"))
        if receipt is None or receipt.get("schema") != RECEIPT_SCHEMA or not _agrees(receipt, wanted):
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        if not lock_file(descriptor, fcntl.LOCK_SH) or file_state(descriptor) != receipt.get("state"):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough while a forked child has a copy
            os.close(descriptor)
            return None
        shard = CachedShard(descriptor, path, wanted.shard, self._path(stem, "receipt.json"))
        shard.touch()
        return shard

    def _transfer(self, wanted: Wanted, deadline: float, stop: threading.Event) -> CachedShard:
        """Fetch a shard whose lock we hold."""
        stem = self._stem(wanted)
        part = self._path(stem, "part")
        descriptor = None
        try:
            size = self._remote.size(wanted.shard, deadline)
            self._check_promised(wanted, size)
            part.unlink(missing_ok=True)  # we hold the lock, so its writer is dead
            self._discard(stem, wanted, deadline, stop)
            descriptor = self._reserve(stem, wanted, size, deadline, stop)
            digests = self._fill(descriptor, wanted, size, deadline, stop)
            if _mismatch(wanted, digests):
                log.warning("%s: %s; fetching it once more", wanted.shard, _mismatch(wanted, digests))
                digests = self._fill(descriptor, wanted, size, deadline, stop)
            if problem := _mismatch(wanted, digests):
                raise DataError(
                    f"{wanted.shard}: {problem} (fetched twice from {self._remote.url(wanted.shard)}); the bucket holds "
                    "a damaged shard or another build, upload it again or use the index that belongs to it"
                )
            return self._publish(descriptor, stem, wanted, digests)
        except BaseException as error:
            if descriptor is not None:
                os.close(descriptor)
            part.unlink(missing_ok=True)
            if isinstance(error, OSError):
                error = self._write_failure(error)
            if isinstance(error, SolarError):
                self._record_failure(stem, error)
            raise error

    def _publish(self, descriptor: int, stem: str, wanted: Wanted, digests: dict[str, str]) -> CachedShard:
        """Turn a verified part into the staged shard, leased from before it is visible."""
        os.fsync(descriptor)
        lock_file(descriptor, fcntl.LOCK_SH)
        data, receipt = self._path(stem, "data"), self._path(stem, "receipt.json")
        os.rename(self._path(stem, "part"), data)
        self._path(stem, "failed.json").unlink(missing_ok=True)
        facts = {
            "schema": RECEIPT_SCHEMA,
            "url": self._remote.url(wanted.shard),
            **digests,
            "state": file_state(descriptor),
        }
        write_atomic(receipt, json_bytes(facts))
        return CachedShard(descriptor, data, wanted.shard, receipt)

    def _fill(
        self, descriptor: int, wanted: Wanted, size: int, deadline: float, stop: threading.Event
    ) -> dict[str, str]:
        """Write the shard's bytes and return their digests: what is staged by name alone is compared with its row later."""
        sha256, blake2s, md5 = hashlib.sha256(), hashlib.blake2s(), hashlib.md5(usedforsecurity=False)
        at = 0
        for block in self._remote.read_blocks(wanted.shard, 0, size, deadline):
            if stop.is_set():
                raise Stopped
            for digest in (sha256, blake2s, md5):
                digest.update(block)
            view = memoryview(block)
            while view:
                written = os.pwrite(descriptor, view, at)
                at, view = at + written, view[written:]
        return {
            "sha256": sha256.hexdigest(),
            "blake2s": blake2s.hexdigest(),
            "md5_b64": base64.b64encode(md5.digest()).decode(),
        }

    def _reserve(self, stem: str, wanted: Wanted, size: int, deadline: float, stop: threading.Event) -> int:
        """Return the descriptor of a part that already counts with its full size."""
        used = 0
        while True:
            with self._locked("evict.lock") as locked:
                if locked and (used := self._make_room(size)) + size + SIDE_BYTES <= self._max_bytes:
                    descriptor = os.open(self._path(stem, "part"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
                    os.ftruncate(descriptor, size)
                    return descriptor
            if time.monotonic() > deadline:
                raise DataError(
                    f"{wanted.shard}: no room for {size} bytes in {self.directory} within "
                    f"{self._remote.timeout_seconds:g} s, {used} of {self._max_bytes} bytes are being read or transferred; "
                    "raise data.transport.cache_max_gib or use fewer readers on this cache"
                )
            _pause(stop)

    def _make_room(self, size: int) -> int:
        """Evict the least recently used shards until `size` bytes fit; return the bytes that stay. Under evict.lock."""
        used, idle = 0, []
        for stem in self._stems():
            # A transfer may end now: looking at its part first, then at the shard, it is counted at least once.
            part = _size(self._path(stem, "part"))
            if part is not None and not self._sweep(stem):
                used += part + SIDE_BYTES
            data = _size(self._path(stem, "data"))
            if data is not None:
                used += data + SIDE_BYTES
                idle.append((self._last_use(stem), stem, data + SIDE_BYTES))
        for _, stem, counted in sorted(idle):
            if used + size + SIDE_BYTES <= self._max_bytes:
                break
            if self._evict(stem):
                used -= counted
        return used

    def _stems(self) -> set[str]:
        """Return the names of all shards ever staged here. Their lock files stay; files that are not ours do not count."""
        return {match[1] for name in os.listdir(self.directory) if (match := _OURS.fullmatch(name))}

    def _last_use(self, stem: str) -> int:
        """Return the recorded time of the last use in ns; 0 for a shard without a receipt, which nothing can use."""
        try:
            return self._path(stem, "receipt.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _sweep(self, stem: str) -> bool:
        """Remove the part of a dead process; False if its transfer goes on."""
        with self._locked(f"{stem}.lock") as locked:
            if locked:
                self._path(stem, "part").unlink(missing_ok=True)
            return locked

    def _evict(self, stem: str) -> bool:
        """Remove a staged shard with its receipt; False if somebody reads it."""
        path = self._path(stem, "data")
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            if not lock_file(descriptor, fcntl.LOCK_EX):
                return False
            try:
                if path.stat().st_ino != os.fstat(descriptor).st_ino:
                    return False  # replaced while we waited: this lock is not on the new file
            except FileNotFoundError:
                return True
            self._path(stem, "receipt.json").unlink(missing_ok=True)
            path.unlink()
            # Readers may keep it open between two reads: without its bytes that takes no room.
            os.ftruncate(descriptor, 0)
            return True
        finally:
            os.close(descriptor)

    def _discard(self, stem: str, wanted: Wanted, deadline: float, stop: threading.Event) -> None:
        """Remove an unusable staged shard before it is fetched again."""
        while not self._evict(stem):
            if time.monotonic() > deadline:
                raise DataError(
                    f"{wanted.shard}: {self._path(stem, 'data')} has changed but is in use; end its readers"
                )
            _pause(stop)

    @contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Try the lock file `name` once; the block learns whether it holds it. The file stays, so all lock the same."""
        descriptor = os.open(self.directory / name, os.O_RDWR | os.O_CREAT, 0o666)
        self._held.add(descriptor)
        try:
            yield lock_file(descriptor, fcntl.LOCK_EX)
        finally:
            self._held.discard(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough while a forked child has a copy
            os.close(descriptor)

    def _check_fits(self, shard: str, size: int) -> None:
        if size + SIDE_BYTES > self._max_bytes:
            raise ConfigError(
                f"{shard}: has {size} bytes, more than the whole cache of {self._max_bytes} bytes; "
                f"set data.transport.cache_max_gib to {(size + SIDE_BYTES) / 2**30:.3g} or more"
            )

    def _check_promised(self, wanted: Wanted, size: int) -> None:
        if wanted.size is not None and size != wanted.size:
            raise DataError(
                f"{wanted.shard}: {self._remote.url(wanted.shard)} has {size} bytes, the index promises shard_size "
                f"{wanted.size}; it is truncated or of another build, upload it again"
            )
        self._check_fits(wanted.shard, size)

    def _share_failure(self, wanted: Wanted, started: int) -> None:
        """Raise the failure of a transfer that ended while we waited for it."""
        record = _load(self._path(self._stem(wanted), "failed.json"))
        if record is not None and int(record.get("failed_at_ns", 0)) > started:
            kind = ConfigError if record.get("kind") == ConfigError.kind else DataError
            raise kind(str(record.get("message")))

    def _record_failure(self, stem: str, error: SolarError) -> None:
        record = {
            "schema": FAILURE_SCHEMA,
            "kind": error.kind,
            "message": str(error),
            "failed_at_ns": time.time_ns(),
        }
        with contextlib.suppress(OSError, SolarError):  # a full disk must not hide the failure itself
            write_atomic(self._path(stem, "failed.json"), json_bytes(record))

    def _write_failure(self, error: OSError) -> DataError:
        remedy = (
            "free space or lower data.transport.cache_max_gib"
            if disk_full(error)
            else "check data.transport.cache_dir"
        )
        return DataError(f"{self.directory}: cannot write a staged shard ({error.strerror}); {remedy}")


def _pause(stop: threading.Event) -> None:
    """Wait before looking again; Stopped if the caller gave up."""
    if stop.wait(POLL_SECONDS):
        raise Stopped


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _load(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, None if there is none or it was cut by a crash."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _agrees(receipt: dict[str, Any], wanted: Wanted) -> bool:
    """True if a verified file is what the index promises."""
    state = receipt.get("state")
    sized = wanted.size is None or (isinstance(state, list) and wanted.size in state[2:3])
    return sized and _mismatch(wanted, receipt) is None


def _mismatch(wanted: Wanted, found: dict[str, Any]) -> str | None:
    """Return how digests differ from the promised ones, None if they agree."""
    promises = (
        ("sha256", wanted.sha256, "shard_digest"),
        ("blake2s", wanted.blake2s, "shard_digest"),
        ("md5_b64", wanted.md5_b64, "shard_md5_b64"),
    )
    for kind, promised, field in promises:
        if promised is not None and found.get(kind) != promised:
            return f"{kind} is {found.get(kind)}, the index promises {field} {promised}"
    return None
