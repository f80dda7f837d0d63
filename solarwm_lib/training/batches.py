"""Micro-batches as tensors: which samples, their latents, prompt embeddings and cameras.

A batch is a pure function of its global sample indices: nothing counts what was fetched ahead, so a resume needs only
the step (no sample is seen twice or skipped). Clips and captions are encoded one at a time, because a kernel may round
differently for another batch size and a cached latent must equal a fresh one bit for bit.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from solarwm_lib.inference.generate import to_video

if TYPE_CHECKING:
    from solarwm_lib.backbones.codec import Codec
    from solarwm_lib.backbones.text import TextEncoder
    from solarwm_lib.data.dataset import RawClips, Sample

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Batch:
    """One micro-batch. latents `[B,T,C,h,w]`, prompt_embeds `[B,L,D]`, w2c `[B,T,4,4]`, intrinsics `[B,3,3]`."""

    indices: tuple[int, ...]
    sample_ids: tuple[str, ...]
    occurrence_ids: tuple[str, ...]
    start_frames: tuple[int, ...]
    captions: tuple[str, ...]
    latents: torch.Tensor
    prompt_embeds: torch.Tensor
    w2c: torch.Tensor
    intrinsics: torch.Tensor


class ByteCache(Generic[K, V]):
    """Least-recently-used cache bounded by the bytes of its values."""

    def __init__(self, capacity_bytes: int, size_of: Callable[[V], int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return the value of `key`, now the most recently used one, or None."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep `value`, dropping the longest unused ones; a value larger than the whole cache is not kept."""
        size = self._size_of(value)
        if key in self._values or size > self.capacity_bytes:
            return
        self._values[key] = value
        self.used_bytes += size
        while self.used_bytes > self.capacity_bytes:
            self.used_bytes -= self._size_of(self._values.popitem(last=False)[1])


@dataclass(frozen=True)
class _Clip:
    """An encoded clip: what is kept of a sample once its pixels are no longer needed."""

    sample_id: str
    start_frame: int
    caption: str
    latents: torch.Tensor
    w2c: np.ndarray
    intrinsics: np.ndarray

    def bytes(self) -> int:
        return self.latents.nbytes + self.w2c.nbytes + self.intrinsics.nbytes


class Batches:
    """Loads micro-batches, decoding ahead in `workers` threads and keeping encoded clips and prompts in memory."""

    def __init__(
        self,
        clips: RawClips,
        codec: Codec,
        text: TextEncoder,
        device: torch.device,
        latent_cache_bytes: int,
        prompt_cache_bytes: int = 2**30,
        workers: int = 0,
    ) -> None:
        self._clips, self._codec, self._text, self._device = clips, codec, text, device
        self._encoded: ByteCache[tuple[int, int], _Clip] = ByteCache(latent_cache_bytes, _Clip.bytes)
        self._prompts: ByteCache[str, torch.Tensor] = ByteCache(prompt_cache_bytes, lambda t: t.nbytes)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="clips") if workers else None
        self._ahead: dict[int, Future[Sample]] = {}

    def load(self, indices: Sequence[int], following: Sequence[int] = ()) -> Batch:
        """Return the batch of `indices` on the device; `following` names the batch to decode meanwhile."""
        self._prefetch([*indices, *following])
        found = [self._clip(index) for index in indices]
        for index in [index for index in self._ahead if index not in following]:
            self._ahead.pop(index).cancel()
        clips = [clip for clip, _ in found]
        return Batch(
            indices=tuple(indices),
            sample_ids=tuple(clip.sample_id for clip in clips),
            occurrence_ids=tuple(occurrence_id for _, occurrence_id in found),
            start_frames=tuple(clip.start_frame for clip in clips),
            captions=tuple(clip.caption for clip in clips),
            latents=torch.stack([clip.latents for clip in clips]).to(self._device),
            prompt_embeds=torch.stack([self._prompt(clip.caption) for clip in clips]).to(self._device),
            w2c=torch.from_numpy(np.stack([clip.w2c for clip in clips])).to(self._device),
            intrinsics=torch.from_numpy(np.stack([clip.intrinsics for clip in clips])).to(self._device),
        )

    def close(self) -> None:
        """Stop the decoding threads and close the shards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._clips.close()

    def _prefetch(self, indices: Sequence[int]) -> None:
        if self._pool is None:
            return
        for index in indices:
            if index not in self._ahead and self._planned(index)[0] not in self._encoded:
                self._ahead[index] = self._pool.submit(self._clips.sample, index)

    def _planned(self, index: int) -> tuple[tuple[int, int], str]:
        """Return ((row, start frame), occurrence id) that the plan gives `index`."""
        planned = self._clips.plan.occurrence_at(index)
        return (planned.row_ordinal, planned.start_frame), planned.occurrence_id

    def _clip(self, index: int) -> tuple[_Clip, str]:
        """Return the encoded clip of `index` and its occurrence id.

        Clips are kept under what they show: one that stands in for a clip outside the camera guards depends on the
        index, so it is never found under the rejected clip's name.
        """
        key, occurrence_id = self._planned(index)
        held = self._encoded.get(key)
        if held is not None:
            return held, occurrence_id
        future = self._ahead.pop(index, None)
        sample = future.result() if future is not None else self._clips.sample(index)
        for reason in sample.rejected:
            log.warning("clip replaced by %s: %s", sample.occurrence_id, reason)
        clip = self._encode(sample)
        self._encoded.put((sample.row_ordinal, sample.start_frame), clip)
        return clip, sample.occurrence_id

    def _prompt(self, caption: str) -> torch.Tensor:
        held = self._prompts.get(caption)
        if held is None:
            held = self._text.encode([caption])[0].float().cpu()
            self._prompts.put(caption, held)
        return held

    def _encode(self, sample: Sample) -> _Clip:
        latents = self._codec.encode(to_video(sample.frames[None]).to(self._device))[0].float().cpu()
        return _Clip(
            sample.sample_id, sample.start_frame, sample.caption, latents, sample.w2c, sample.intrinsics
        )
