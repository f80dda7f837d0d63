"""Who sees whom: visibility plans, the one description of every attention pattern (spec wan22 4.1, 5.3 and 6.1).

A plan is a list of segments: a run of query tokens and the runs of key tokens all of them see. Executors (`attention`,
`flex`) turn it into work without ever building a dense mask; `VisibilityPlan.mask` is the dense reference they must equal.

Builders take frames and give tokens: a latent frame has `tokens_per_frame` tokens, a chunk has `chunk` latent frames.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The half-open run `start..stop-1` of tokens or frames."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Return the number of entries."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """Return the run as a Python slice."""
        return slice(self.start, self.stop)

    def scaled(self, factor: int) -> Span:
        """Return the run in units `factor` times finer: frames to tokens."""
        return Span(self.start * factor, self.stop * factor)


@dataclass(frozen=True)
class Segment:
    """A run of query tokens and the runs of key tokens all of them see, in token order and not touching each other."""

    query: Span
    keys: tuple[Span, ...]


@dataclass(frozen=True)
class VisibilityPlan:
    """Which keys each query sees. Segments are in token order and cover every query once; no segment means everything is visible.

    Plans are hashable by value, so that what an executor derives from one is built once per geometry.
    """

    segments: tuple[Segment, ...] = ()

    def mask(self, queries: int, keys: int | None = None) -> Tensor:
        """Return the dense bool mask `[queries, keys]` (square when `keys` is None), True where visible."""
        keys = queries if keys is None else keys
        if not self.segments:
            return torch.ones(queries, keys, dtype=torch.bool)
        mask = torch.zeros(queries, keys, dtype=torch.bool)
        for segment in self.segments:
            for span in segment.keys:
                mask[segment.query.slice, span.slice] = True
        return mask


BIDIRECTIONAL = VisibilityPlan()


def bidirectional() -> VisibilityPlan:
    """Return the plan of everything seeing everything, whatever the lengths."""
    return BIDIRECTIONAL


@lru_cache(maxsize=64)
def teacher_forcing(
    frames: int, chunk: int, max_prior_clean_chunks: int, tokens_per_frame: int, sink: int = 0
) -> VisibilityPlan:
    """Return the plan of `[clean | noisy]`, each half `frames` latent frames (spec 4.1).

    A clean chunk sees the clean prefix up to itself. A noisy chunk sees itself and at most `max_prior_clean_chunks` clean
    chunks before it, never the clean copy of itself. With `sink` frames (whole chunks) the clean half is limited to the
    same number of prior chunks and both halves see the sink as well. Raises ValueError for frames that are not whole chunks.
    """
    _check_chunks(chunk, frames=frames, sink=sink)
    if max_prior_clean_chunks < 0:
        raise ValueError(f"max_prior_clean_chunks {max_prior_clean_chunks}; expected 0 or more")
    prior = max_prior_clean_chunks * chunk
    clean, noisy = [], []
    for start in range(0, frames, chunk):
        stop = start + chunk
        context = (Span(0, min(sink, start)), Span(max(0, start - prior), start))
        clean.append((Span(start, stop), (*context, Span(start, stop)) if sink else (Span(0, stop),)))
        own = Span(frames + start, frames + stop)
        noisy.append((own, (*context, own)))
    return _plan(clean + noisy, tokens_per_frame)


@lru_cache(maxsize=64)
def causal_window(
    history_frames: int,
    new_frames: int,
    chunk: int,
    tokens_per_frame: int,
    window: int | None = None,
    sink: int = 0,
) -> VisibilityPlan:
    """Return the chunk-causal plan over `[history | new]` latent frames: every chunk sees itself and the chunks before it.

    `window` (latent frames, the chunk itself and the sink included; None is no limit) drops the oldest chunks that are
    not of the sink. Raises ValueError for frames that are not whole chunks.
    """
    frames = history_frames + new_frames
    check_window(chunk, window, sink)
    _check_chunks(chunk, history=history_frames, new=new_frames)
    return _plan(
        [
            (Span(start, start + chunk), prefix(start + chunk, window, sink))
            for start in range(0, frames, chunk)
        ],
        tokens_per_frame,
    )


@lru_cache(maxsize=64)
def cached_window(cached_frames: int, new_frames: int, chunk: int, tokens_per_frame: int) -> VisibilityPlan:
    """Return the rectangular plan of a cached rollout: queries `new`, keys `[visible cache | new]`, chunk-causal among the new.

    For one new chunk everything is visible. Raises ValueError for new frames that are not whole chunks.
    """
    _check_chunks(chunk, new=new_frames)
    rows = [
        (Span(start, start + chunk), (Span(0, cached_frames + start + chunk),))
        for start in range(0, new_frames, chunk)
    ]
    return _plan(rows, tokens_per_frame)


def prefix(stop: int, window: int | None = None, sink: int = 0) -> tuple[Span, ...]:
    """Return the runs of frames a chunk that ends before frame `stop` sees under `window` and `sink` frames (its own included)."""
    if window is None or stop <= window:
        return (Span(0, stop),)
    return merged((Span(0, sink), Span(stop - (window - sink), stop)))


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return `spans` sorted, without empty ones, overlapping and touching ones joined: fewer runs, fewer copies."""
    joined: list[Span] = []
    for span in sorted(span for span in spans if span.length > 0):
        if joined and span.start <= joined[-1].stop:
            joined[-1] = Span(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return tuple(joined)


def _plan(rows: Iterable[tuple[Span, tuple[Span, ...]]], tokens_per_frame: int) -> VisibilityPlan:
    """Turn rows of frames into segments of tokens; one row that is everything is the plan without segments."""
    segments = tuple(
        Segment(query.scaled(tokens_per_frame), merged(key.scaled(tokens_per_frame) for key in keys))
        for query, keys in rows
    )
    if len(segments) == 1:  # the only chunk sees itself and all it was given
        return BIDIRECTIONAL
    return VisibilityPlan(segments)


def _check_chunks(chunk: int, **frames: int) -> None:
    for name, count in frames.items():
        if chunk < 1 or count < 0 or count % chunk:
            raise ValueError(f"{name} has {count} latent frames; expected whole chunks of {chunk}")


def check_window(chunk: int, window: int | None, sink: int) -> None:
    """Raise ValueError unless `window` (latent frames, None is no limit) holds `sink` and one chunk, all of them whole chunks."""
    _check_chunks(chunk, sink=sink)
    if window is None:
        if sink:
            raise ValueError(f"sink of {sink} latent frames without a window; a whole prefix needs no sink")
        return
    _check_chunks(chunk, window=window)
    if window < sink + chunk:
        raise ValueError(
            f"window of {window} latent frames; expected room for a sink of {sink} and a chunk of {chunk}"
        )
