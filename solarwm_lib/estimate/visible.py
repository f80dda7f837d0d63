"""How many keys attention reads, in latent frames: the sums behind `backbones.visibility`, without torch."""

from __future__ import annotations

from collections.abc import Iterator


def teacher_forcing(frames: int, chunk: int, prior: int, sink: int = 0) -> Iterator[tuple[int, int, bool]]:
    """(query frames, key frames, whether the keys lie apart) of every segment of `[clean | noisy]`.

    As `visibility.teacher_forcing`: keys that lie apart are copied together before attention.
    """
    for start in range(0, frames, chunk):
        first = max(0, start - prior * chunk)
        context = start - first + min(sink, first)
        yield chunk, (context if sink else start) + chunk, bool(sink) and first > sink
        yield chunk, context + chunk, context > 0


def pairs(frames: int, chunk: int, prior: int, sink: int = 0) -> int:
    """Pairs of latent frames that a teacher-forced pass over `[clean | noisy]` attends to."""
    return sum(queries * keys for queries, keys, _ in teacher_forcing(frames, chunk, prior, sink))


def copied(frames: int, chunk: int, prior: int, sink: int = 0) -> int:
    """Key frames that a teacher-forced pass copies because a segment's keys lie apart."""
    return sum(keys for _, keys, apart in teacher_forcing(frames, chunk, prior, sink) if apart)


def rollout_pairs(frames: int, chunk: int, window: int) -> int:
    """Pairs of latent frames of one denoising pass over every chunk of a cached rollout."""
    return sum(chunk * (min(start, window - chunk) + chunk) for start in range(0, frames, chunk))
