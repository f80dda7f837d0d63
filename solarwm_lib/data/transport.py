"""Where shards come from: a local folder, a bucket staged through a cache, or byte ranges of a bucket.

One resolver over fsspec; which samples are read, and in which order, never depends on it. (spec operations 4.11)
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from solarwm_lib.data.shard_cache import ShardCache, Wanted
from solarwm_lib.data.shards import ShardReader, survive_fork
from solarwm_lib.runtime.errors import ConfigError, DataError

BLOCK_BYTES = 16 << 20
REQUEST_SECONDS = 120.0  # one block slower than this (140 kB/s) is a dead connection
LONGEST_PAUSE_SECONDS = 10.0
SCHEMES = ("s3", "gs", "memory")
EXTRAS = {"s3": "s3", "gs": "gcs"}

log = logging.getLogger(__name__)
T = TypeVar("T")


class TransportConfig(Protocol):
    """The section `data.transport` of a run."""

    @property
    def root(self) -> str: ...
    @property
    def latents_root(self) -> str: ...
    @property
    def cache_dir(self) -> str: ...
    @property
    def cache_max_gib(self) -> float: ...
    @property
    def attempts(self) -> int: ...
    @property
    def timeout_seconds(self) -> float: ...


class ShardsConfig(Protocol):
    """What opening shards needs of the section `data` of a run."""

    @property
    def root(self) -> str: ...
    @property
    def transport(self) -> Any: ...


def open_shards(data: ShardsConfig, root: str | Path | None = None) -> ShardReader:
    """Return the reader of raw shards: under `data.transport.root`, or if that is empty under `root` or `data.root`."""
    if data.transport.root:
        return _open(data.transport, data.transport.root, "data.transport.root")
    return ShardReader(root if root is not None else data.root)


def open_latent_shards(data: ShardsConfig, latents_root: str | Path) -> ShardReader:
    """Return the reader of latent shards: under `data.transport.latents_root`, or if that is empty `latents_root`."""
    if data.transport.latents_root:
        return _open(data.transport, data.transport.latents_root, "data.transport.latents_root")
    return ShardReader(latents_root, root_key="data.latents_root")


def _open(transport: TransportConfig, root: str, key: str) -> ShardReader:
    """Return a reader of a folder, of a bucket through the cache, or of a bucket by byte ranges."""
    if "://" not in root:
        return ShardReader(root, root_key=key)
    remote = RemoteFiles(root, transport.attempts, transport.timeout_seconds)
    if not transport.cache_dir:
        return ShardReader(None, remote=remote)
    return ShardReader(
        None, cache=ShardCache(remote, transport.cache_dir, int(transport.cache_max_gib * 2**30))
    )


def warm_cache(
    index_path: str | Path,
    transport_root: str,
    cache_dir: str | Path,
    max_gib: float,
    workers: int = 4,
    timeout: float = 1800.0,
    attempts: int = 8,
) -> dict[str, Any]:
    """Stage every shard of an index; return {"shards", "bytes", "elapsed_seconds"}.

    ConfigError if the shards together are larger than the cache, before anything is read.
    """
    from tqdm import tqdm

    from solarwm_lib.data.index import read_index

    started = time.monotonic()
    for option, value in (("--max-gib", max_gib), ("--workers", workers), ("--timeout-seconds", timeout)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{option}: found {value:g}, expected a positive number")
    remote = RemoteFiles(transport_root, attempts, timeout)
    index = read_index(index_path)
    cache = ShardCache(remote, cache_dir, int(max_gib * 2**30))
    shards = []
    for ordinal, name in enumerate(index.shards):
        shards.append(Wanted.promised(name, *index.shard_identity(ordinal)))
    with ThreadPoolExecutor(workers) as pool:
        sizes = list(pool.map(cache.size, shards))
        cache.check_fits_together(sizes)
        with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="warm cache", disable=None) as bar:
            for size in pool.map(cache.stage, shards):
                bar.update(size)
    return {"shards": len(shards), "bytes": sum(sizes), "elapsed_seconds": time.monotonic() - started}


class RemoteFiles:
    """Files of a bucket by key relative to `root_url`; thread-safe, and usable again in a forked child.

    A try that fails for a passing reason (408, 429, 5xx, lost connection, short body) is repeated up to `attempts`
    times with growing pauses and within `timeout_seconds`. DataError names the URL when that is used up, and at once
    for a missing file or refused credentials.
    """

    def __init__(
        self,
        root_url: str,
        attempts: int = 8,
        timeout_seconds: float = 1800.0,
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.root_url = root_url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._attempts, self._block_bytes = attempts, block_bytes
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._inherited: list[Any] = []
        _check_installed(root_url)
        survive_fork(self)

    def url(self, key: str) -> str:
        """Return the address of a file."""
        return f"{self.root_url}/{key}"

    def size(self, key: str, deadline: float | None = None) -> int:
        """Return the bytes of a file; asked for once per key. `deadline` is a time of the monotonic clock."""
        if key not in self._sizes:

            def ask() -> int:
                info = self._call("info", self.url(key))
                if info["type"] != "file":
                    raise FileNotFoundError(key)
                return int(info["size"])

            self._sizes[key] = self._persist(ask, key, "size", deadline)
        return self._sizes[key]

    def read_range(self, key: str, start: int, stop: int, deadline: float | None = None) -> bytes:
        """Return the bytes `start` to `stop` (exclusive), which must lie inside the file."""
        blocks = list(self.read_blocks(key, start, stop, deadline))
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def read_blocks(self, key: str, start: int, stop: int, deadline: float | None = None) -> Iterator[bytes]:
        """Yield the same bytes in order, block by block; each block is repeated alone when it fails."""
        for at in range(start, stop, self._block_bytes):
            end = min(at + self._block_bytes, stop)

            def fetch(at: int = at, end: int = end) -> bytes:
                data: bytes = self._call("cat_file", self.url(key), start=at, end=end)
                if len(data) != end - at:
                    raise EOFError(f"{len(data)} of {end - at} bytes came back")
                return data

            yield self._persist(fetch, key, f"bytes {at} to {end}", deadline)

    def after_fork(self) -> None:
        # The parent's event loop does not run here. Its file system is kept: closing it would wait for that loop.
        if self._filesystem is not None:
            self._inherited.append(self._filesystem)
        self._lock, self._filesystem = threading.Lock(), None

    def _persist(self, action: Callable[[], T], key: str, what: str, deadline: float | None) -> T:
        url = self.url(key)
        deadline = time.monotonic() + self.timeout_seconds if deadline is None else deadline
        for attempt in range(self._attempts):
            if time.monotonic() > deadline:
                raise DataError(
                    f"{url}: {what} not reached within {self.timeout_seconds:g} s; "
                    "check the network or raise data.transport.timeout_seconds"
                )
            try:
                return action()
            except Exception as error:
                reason, cause = _describe(error), error
                if (problem := _final(error, what)) is not None:
                    raise DataError(f"{url}: {problem}") from error
            pause = min(LONGEST_PAUSE_SECONDS, 0.5 * 2**attempt)
            if time.monotonic() + pause > deadline:
                raise DataError(
                    f"{url}: {what} not read in time after {attempt + 1} tries, last: {reason}; "
                    "check the network or raise data.transport.timeout_seconds"
                ) from cause
            if attempt + 1 < self._attempts:
                log.warning(
                    "%s: %s: %s; try %d of %d in %g s", url, what, reason, attempt + 2, self._attempts, pause
                )
                time.sleep(pause)
        raise DataError(
            f"{url}: {what} not read in {self._attempts} tries, last: {reason}; "
            "check the network or raise data.transport.attempts"
        ) from cause

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        from fsspec.asyn import sync

        with self._lock:
            if self._filesystem is None:
                self._filesystem = _connect(self.root_url)
            filesystem = self._filesystem
        if not filesystem.async_impl:
            return getattr(filesystem, name)(*arguments, **options)
        seconds = min(REQUEST_SECONDS, self.timeout_seconds)
        return sync(filesystem.loop, getattr(filesystem, f"_{name}"), *arguments, timeout=seconds, **options)


def _check_installed(root_url: str) -> None:
    """Raise ConfigError if no installed package reads this kind of address."""
    scheme, separator, place = root_url.partition("://")
    if not separator:
        raise ConfigError(
            f"{root_url!r} is not a bucket's address, expected such as s3://BUCKET/FOLDER or gs://BUCKET/FOLDER; folders of "
            "this machine need no cache, name them in data.transport.root"
        )
    if scheme not in SCHEMES:
        raise ConfigError(f"data.transport: found scheme {scheme!r}, expected s3, gs or memory")
    if not place.strip("/"):
        raise ConfigError(
            f"data.transport: {root_url!r} names no bucket, expected such as {scheme}://BUCKET/FOLDER"
        )
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ConfigError(
            f"data.transport: {root_url} needs a package that is not here ({error}); "
            f"pip install 'solarwm-graph[{EXTRAS[scheme]}]'"
        ) from None


def _connect(root_url: str) -> Any:
    """Return a file system of this process; its own retries are off, so that ours are the bound."""
    import fsspec
    from fsspec.config import conf

    scheme = root_url.partition("://")[0]
    options: dict[str, Any] = {}
    if EXTRAS.get(scheme) == "s3":
        configured = {**conf.get("s3", {}), **conf.get("s3a", {})}.get("config_kwargs", {})
        options["config_kwargs"] = {**configured, "retries": {"total_max_attempts": 1}}
    filesystem = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    if EXTRAS.get(scheme) == "s3":
        filesystem.retries = 1
    return filesystem


def _final(error: Exception, what: str) -> str | None:
    """Return problem and remedy of a failure that repeating cannot cure; None if it may pass."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "not found; check data.transport, or upload what the index names"
    # gcsfs reports 403 as a plain OSError.
    denied = isinstance(error, PermissionError) or status in (401, 403) or str(error).startswith("Forbidden:")
    if denied or "Credentials" in type(error).__name__:
        return f"access is refused ({_describe(error)}); check this machine's credentials for the bucket"
    if status is None:
        passing = isinstance(error, (OSError, EOFError)) or _lost_connection(error)
    else:
        passing = status in (408, 429) or status >= 500
    return None if passing else f"{what} not readable ({_describe(error)}); check data.transport"


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status behind an error of botocore, aiohttp or gcsfs."""
    while error is not None and not _lost_connection(error):  # aiohttp hides a cut body behind a made-up 400
        response = getattr(error, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for status in (
            metadata.get("HTTPStatusCode"),
            getattr(error, "status", None),
            getattr(error, "code", None),
        ):
            if str(status).isdigit():
                return int(str(status))
        error = error.__cause__
    return None


def _lost_connection(error: BaseException) -> bool:
    return isinstance(error, _connection_errors(type(error).__module__.partition(".")[0]))


def _connection_errors(package: str) -> tuple[type[Exception], ...]:
    """Return a package's errors for lost connections and damaged bodies; it has raised one, so it is there."""
    if package == "botocore":
        from botocore.exceptions import ConnectionError as Lost
        from botocore.exceptions import FlexibleChecksumError, HTTPClientError, IncompleteReadError

        return (FlexibleChecksumError, HTTPClientError, IncompleteReadError, Lost)
    if package == "aiohttp":
        from aiohttp import ClientConnectionError, ClientPayloadError

        return (ClientConnectionError, ClientPayloadError)
    if package == "gcsfs":
        from gcsfs.retry import ChecksumError

        return (ChecksumError,)
    if package == "google":
        from google.auth.exceptions import RefreshError, TransportError

        return (RefreshError, TransportError)
    return ()


def _describe(error: Exception) -> str:
    """Return one short line about an error of a library."""
    text = " ".join(str(error).split())
    status = _status(error)
    label = type(error).__name__ if status is None else f"HTTP {status}"
    return f"{label}: {text[:200]}" if text else label
