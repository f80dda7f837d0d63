"""The cache of a causal rollout: what committed chunks leave for later ones to see (spec wan22 5.3).

Every layer keeps raw keys (after the qk norm, before RoPE and PRoPE) and raw values of the visible latent frames in a ring
buffer allocated once. Positions are relative to the window, so keys are placed anew when the window moves: once per chunk,
into a second buffer that all denoising steps of the chunk read and whose tail holds the chunk itself, so that attention
reads one run without concatenating. Cameras of the window and the text's keys and values are kept beside.

A window of W latent frames includes the chunk being denoised and the sink (the first frames, never dropped): a chunk sees
the sink, the latest W - sink - chunk frames, and itself.

Shapes: B batch, S tokens per latent frame, N heads (of this rank, where sequence-parallel ranks share them), D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .visibility import Span, check_window, merged


class LayerCache:
    """One layer's ring of raw keys and values, and its placed window for the current chunk."""

    def __init__(self, key: Tensor, value: Tensor, chunk: int, capacity: int) -> None:
        """Allocate for chunks like `key` and `value` `[B,chunk*S,N,D]` and `capacity` frames of history."""
        batch, tokens = key.shape[:2]
        self.tokens_per_frame = tokens // chunk
        history = capacity * self.tokens_per_frame
        self.key = key.new_empty(batch, history, *key.shape[2:])
        self.value = value.new_empty(batch, history, *value.shape[2:])
        self.window_key = key.new_empty(batch, history + tokens, *key.shape[2:])
        self.window_value = value.new_empty(batch, history + tokens, *value.shape[2:])
        self.window_tokens = 0
        self.placed_at = -1  # state.frames for which the window is placed

    def read(self, state: RolloutState) -> tuple[Tensor, Tensor]:
        """Return the raw keys and values `[B,n*S,N,D]` of the visible frames, oldest first."""
        spans = [span.scaled(self.tokens_per_frame) for span in state.slots()]
        key, value = (
            torch.cat([x[:, span.slice] for span in spans], dim=1) if spans else x[:, :0]
            for x in (self.key, self.value)
        )
        return key, value

    def place(self, key: Tensor, value: Tensor, frames: int) -> None:
        """Keep the placed window `[B,n*S,N,D]` for the chunk that follows `frames` committed frames."""
        self.window_tokens = key.shape[1]
        self.window_key[:, : self.window_tokens] = key
        self.window_value[:, : self.window_tokens] = value
        self.placed_at = frames

    def joined(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[window | chunk]` for the chunk's placed `key` and `value` `[B,chunk*S,N,D]`: views of the cache's own buffers."""
        stop = self.window_tokens + key.shape[1]
        self.window_key[:, self.window_tokens : stop] = key
        self.window_value[:, self.window_tokens : stop] = value
        return self.window_key[:, :stop], self.window_value[:, :stop]

    def write(self, state: RolloutState, key: Tensor, value: Tensor) -> None:
        """Put a chunk's raw `key` and `value` `[B,chunk*S,N,D]` over the oldest frames that are not of the sink.

        The placed window stays valid until `state.frames` moves, so a forward pass that failed half way can be repeated.
        """
        slot = state.next_slot()
        if slot is not None:
            part = slot.scaled(self.tokens_per_frame).slice
            self.key[:, part] = key
            self.value[:, part] = value


@dataclass
class RolloutState:
    """A batch of causal rollouts in step: text, cameras, layer caches and how many latent frames are committed.

    prompt_embeds `[B,Lt,D]`; intrinsics `[B,3,3]` or None; chunk, window, sink in latent frames, whole chunks.
    Made by a backbone's `rollout_state` and advanced by its `chunk_velocity`.
    """

    prompt_embeds: Tensor
    intrinsics: Tensor | None
    chunk: int
    window: int
    sink: int = 0
    frames: int = 0
    placed_at: int = -1  # `frames` for which every layer's window is placed
    w2c: Tensor | None = None  # cameras of the visible frames `[B,n,4,4]`, untransformed
    layers: dict[int, LayerCache] = field(default_factory=dict)
    text: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_window(self.chunk, self.window, self.sink)

    @property
    def capacity(self) -> int:
        """Return the frames of history a chunk can see."""
        return self.window - self.chunk

    @property
    def visible(self) -> int:
        """Return how many committed frames the next chunk sees."""
        return min(self.frames, self.capacity)

    @property
    def is_placed(self) -> bool:
        """Return whether every layer's window is placed for the next chunk."""
        return self.placed_at == self.frames

    def layer(self, number: int, key: Tensor, value: Tensor) -> LayerCache:
        """Return the cache of layer `number`, allocated for chunks like `key` and `value` on first use.

        Raises ValueError for a chunk of another size or of other heads than the first.
        """
        if number not in self.layers:
            self.layers[number] = LayerCache(key, value, self.chunk, self.capacity)
        cache = self.layers[number]
        if key.shape[1] != self.chunk * cache.tokens_per_frame:
            raise ValueError(
                f"chunk of {key.shape[1]} tokens; this rollout began with {self.chunk * cache.tokens_per_frame}"
            )
        if key.shape[2] != cache.key.shape[2]:
            raise ValueError(
                f"chunk of {key.shape[2]} attention heads; this rollout began with {cache.key.shape[2]}: "
                "set the sequence group between rollouts"
            )
        return cache

    def slots(self) -> tuple[Span, ...]:
        """Return the runs of frame slots that hold the visible frames, oldest frame first."""
        if self.frames <= self.capacity:
            return merged((Span(0, self.frames),))
        ring = self.capacity - self.sink
        oldest = self.sink + ((self.frames - self.sink) % ring if ring else 0)
        runs = (Span(0, self.sink), Span(oldest, self.capacity), Span(self.sink, oldest))
        return tuple(run for run in runs if run.length)

    def next_slot(self) -> Span | None:
        """Return the frame slots the next committed chunk takes; None where the window holds nothing but sink and chunk."""
        ring = self.capacity - self.sink
        if self.frames < self.sink:
            return Span(self.frames, self.frames + self.chunk)
        if not ring:
            return None
        start = self.sink + (self.frames - self.sink) % ring
        return Span(start, start + self.chunk)

    def advance(self, w2c: Tensor | None) -> None:
        """Count a committed chunk and keep its cameras `[B,chunk,4,4]`."""
        if w2c is not None:
            window = w2c if self.w2c is None else torch.cat((self.w2c, w2c), dim=1)
            recent = max(self.sink, window.shape[1] - (self.capacity - self.sink))
            self.w2c = torch.cat((window[:, : self.sink], window[:, recent:]), dim=1)
        self.frames += self.chunk
