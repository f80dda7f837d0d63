"""Micro-batches as tensors: which samples, their latents, prompt embeddings and cameras.

A batch is a pure function of its global sample indices: nothing counts what was fetched ahead, so a resume needs only
the step (no sample is seen twice or skipped). What cannot be read is replaced by keyed draws, if the run allows it, and
named in the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from solarwm_lib.data.failures import (
    CAMERA_GUARD,
    BudgetSpent,
    Replacement,
    SampleFailure,
    Settled,
    draw,
    settle,
)
from solarwm_lib.data.sampling import PlannedSample
from solarwm_lib.runtime.errors import DataError
from solarwm_lib.training.peers import Failed, Peers
from solarwm_lib.training.sources import ByteCache, EncodedClip, Source
from solarwm_lib.training.topology import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """One micro-batch. latents `[B,T,C,h,w]`, prompt_embeds `[B,L,D]`, w2c `[B,T,4,4]`, intrinsics `[B,3,3]`.

    `replaced` names the clips that others stand in for; image_condition is A14B's y `[B,T,4+C,h,w]`.
    """

    indices: tuple[int, ...]
    sample_ids: tuple[str, ...]
    occurrence_ids: tuple[str, ...]
    start_frames: tuple[int, ...]
    captions: tuple[str, ...]
    latents: torch.Tensor
    prompt_embeds: torch.Tensor
    w2c: torch.Tensor
    intrinsics: torch.Tensor
    replaced: tuple[Replacement, ...] = ()
    image_condition: torch.Tensor | None = None


@dataclass(frozen=True)
class _Read:
    """How reading one place of the plan ended: with a sample (or an encoded clip that was kept), or with a failure."""

    settled: Settled[Any] | None
    failed: Failed | None
    rejected: tuple[str, ...]
    error: DataError | None = None


class Batches:
    """Loads micro-batches, reading ahead in `workers` threads and keeping encoded clips in memory.

    Every rank must make its `Batches` at the same point: sequence-parallel peers then share a group.
    """

    def __init__(
        self,
        source: Source,
        device: torch.device,
        cache_bytes: int,
        workers: int = 0,
        topology: Topology | None = None,
    ) -> None:
        self.workers = workers
        self.source, self._device = source, device
        self._plan = source.clips.plan
        self.peers = Peers(topology or Topology())
        self._kept: ByteCache[tuple[int, int], EncodedClip] = ByteCache(cache_bytes, EncodedClip.bytes)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="clips") if workers else None
        self._ahead: dict[int, Future[_Read]] = {}

    def load(self, indices: Sequence[int], following: Sequence[int] = (), allowed: int = 0) -> Batch:
        """Return the batch of `indices` on the device; `following` names the samples to read meanwhile.

        Up to `allowed` clips that cannot be read are replaced; the next one raises BudgetSpent, on all sequence-parallel
        peers alike.
        """
        self.source.clips.prefetch(indices)
        self._read_ahead([*indices, *following])
        settled, replaced = self._settle(indices, allowed)
        for index in [index for index in self._ahead if index not in following]:
            self._ahead.pop(index).cancel()
        clips = [self._clip(settled[index]) for index in indices]
        conditions = [clip.image_condition for clip in clips if clip.image_condition is not None]
        return Batch(
            indices=tuple(indices),
            sample_ids=tuple(clip.sample_id for clip in clips),
            occurrence_ids=tuple(settled[index].planned.occurrence_id for index in indices),
            start_frames=tuple(clip.start_frame for clip in clips),
            captions=tuple(clip.caption for clip in clips),
            latents=self._stack([clip.latents for clip in clips]),
            prompt_embeds=self._stack([clip.prompt_embeds for clip in clips]),
            w2c=self._stack([torch.from_numpy(clip.w2c) for clip in clips]),
            intrinsics=self._stack([torch.from_numpy(clip.intrinsics) for clip in clips]),
            replaced=tuple(replaced),
            image_condition=self._stack(conditions) if conditions else None,
        )

    def close(self) -> None:
        """Stop the reading threads and close the shards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.source.clips.close()

    def _stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the float32 batch on the device; page-locked memory lets a GPU copy it while the host goes on."""
        batch = torch.stack([tensor.float() for tensor in tensors])
        if self._device.type == "cuda":
            return batch.pin_memory().to(self._device, non_blocking=True)
        return batch.to(self._device)

    def _read_ahead(self, indices: Sequence[int]) -> None:
        if self._pool is None:
            return
        for index in indices:
            if index not in self._ahead and _key(draw(self._plan, index, 0)) not in self._kept:
                self._ahead[index] = self._pool.submit(self._read, index, 0)

    def _read(self, index: int, attempt: int) -> _Read:
        """Return what lies at `index` from draw number `attempt` on; failures are returned, for peers to hear of them.

        Clips are kept under what they show: one that stands in for a clip outside the camera guards depends on the
        index, so it is never found under the rejected clip's name.
        """

        def use(planned: PlannedSample) -> Any:
            held = self._kept.get(_key(planned))
            return held if held is not None else self.source.read(planned)

        try:
            settled = settle(self._plan, index, use, attempt)
        except SampleFailure as error:
            return _Read(None, Failed(error.attempt, error.reason, str(error)), error.rejected, error)
        except DataError as error:
            return _Read(None, Failed(attempt, "", str(error)), (), error)
        return _Read(settled, None, settled.rejected)

    def _settle(
        self, indices: Sequence[int], allowed: int
    ) -> tuple[dict[int, Settled[Any]], list[Replacement]]:
        """Return what each index ends with, and what was replaced on the way."""
        settled: dict[int, Settled[Any]] = {}
        replaced: list[Replacement] = []
        pending = {index: 0 for index in indices}
        while pending:
            reads = {index: self._await(index, attempt) for index, attempt in pending.items()}
            agreed = self.peers.agree([read.failed for read in reads.values()])
            retry: dict[int, int] = {}
            for (index, read), failed in zip(reads.items(), agreed, strict=True):
                # Guards decide alike everywhere, but a peer that failed did not get as far as the others.
                known = read.rejected if failed is None else read.rejected[: failed.attempt - pending[index]]
                replaced += [Replacement(CAMERA_GUARD, message) for message in known]
                if failed is None and read.settled is not None:
                    settled[index] = read.settled
                elif failed is not None:
                    if not failed.reason:
                        raise DataError(failed.message) from read.error
                    replaced.append(Replacement(failed.reason, failed.message))
                    if allowed < 1:
                        raise BudgetSpent(replaced) from read.error
                    allowed -= 1
                    retry[index] = failed.attempt + 1
            pending = retry
        for item in replaced:
            log.warning("clip replaced (%s): %s", item.reason, item.message)
        return settled, replaced

    def _await(self, index: int, attempt: int) -> _Read:
        future = self._ahead.pop(index, None) if attempt == 0 else None
        return future.result() if future is not None else self._read(index, attempt)

    def _clip(self, settled: Settled[Any]) -> EncodedClip:
        if isinstance(settled.value, EncodedClip):
            return settled.value
        held = self._kept.get(_key(settled.planned))
        if held is None:
            held = self.source.encode(settled.value)
            self._kept.put(_key(settled.planned), held)
        return held


def _key(planned: PlannedSample) -> tuple[int, int]:
    return planned.row_ordinal, planned.start_frame
