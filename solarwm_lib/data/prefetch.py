"""Staging shards ahead of their first read, in the background. (spec operations 4.12)"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solarwm_lib.data.shard_cache import ShardCache, Wanted

THREADS = 4

log = logging.getLogger(__name__)


class Stopped(Exception):
    """A transfer was given up because nobody will read the shard any more."""


class Prefetcher:
    """Asks a cache for shards on a few threads; what fails is only logged, the read that needs it tries again.

    A window of shards is staged from its front, as far as it fills half of the cache: staging more would evict what is
    being read now.
    """

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Wanted, ...]] = queue.SimpleQueue()
        self._pending: set[str] = set()
        self._threads: list[threading.Thread] = []

    def add(self, shards: Iterable[Wanted]) -> None:
        """Queue the shards of a window, next one first; those already queued are left as they are."""
        window: list[Wanted] = []
        for wanted in shards:
            window.append(wanted)
            with self._lock:
                if wanted.shard in self._pending or self._stop.is_set():
                    continue
                self._pending.add(wanted.shard)
                if len(self._threads) < THREADS:
                    # Daemons: an exit does not wait for a transfer; the next one sweeps up what is left of it.
                    self._threads.append(threading.Thread(target=self._work, daemon=True))
                    self._threads[-1].start()
            self._jobs.put(tuple(window))

    def stop(self) -> None:
        """Give up all transfers; the threads end after the block they are fetching."""
        with self._lock:
            self._stop.set()
            for _ in self._threads:
                self._jobs.put(())

    def _work(self) -> None:
        while (window := self._jobs.get()) and not self._stop.is_set():
            try:
                if self._cache.fit_in_half(window):
                    self._cache.stage(window[-1], self._stop)
            except Stopped:
                return
            except Exception as error:
                log.info("%s: prefetching failed: %s", window[-1].shard, error)
            finally:
                with self._lock:
                    self._pending.discard(window[-1].shard)
