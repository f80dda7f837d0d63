"""Self-attention with explicit positions, cameras and visibility, as a processor for diffusers' WanAttention.

What a forward pass needs beyond the hidden states travels as one `Placement` in the place of diffusers' rotary embedding:
an argument of every block, so activation checkpointing recomputes with the same positions and cameras and no module holds
per-call state. It is a plain dataclass on purpose: mixed-precision wrappers cast the floating tensors they find in tuples.

Where a pass is shared by sequence-parallel ranks, hidden states are this rank's tokens, while positions, cameras, visibility
and cache are of all tokens and this rank's heads.

Shapes: B batch, L tokens, l tokens of this rank, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from . import flex, prope, rope
from .kv_cache import RolloutState
from .sequence_parallel import Shares
from .visibility import BIDIRECTIONAL, Segment, Span, VisibilityPlan

EXECUTORS = ("segments", "flex")


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward pass are.

    rotation: complex `[1,L,1,D/2]`. camera: of these tokens' latent frames, or None. visibility: who sees whom.
    second_times: raw r per token of this rank `[B,l]` for a flow-map model, None where r = t. rollout: the cache these tokens
    extend, if any; `window_rotation` and `window_camera` then place the frames it already holds, and `commit` appends these
    tokens. shares: which of the L tokens each sequence-parallel rank holds, None where this process holds all.
    """

    rotation: Tensor
    camera: prope.CameraTransforms | None = None
    visibility: VisibilityPlan = BIDIRECTIONAL
    second_times: Tensor | None = None
    rollout: RolloutState | None = None
    window_rotation: Tensor | None = None
    window_camera: prope.CameraTransforms | None = None
    commit: bool = False
    shares: Shares | None = None


class _Runs(torch.autograd.Function):
    """Runs of `x` `[B,L,...]` along L without a copy. Autograd's own slices would each fill a full-length gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: tuple[Span, ...]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.shape = spans, x.shape
        return tuple(x[:, span.slice] for span in spans)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        for span, gradient in zip(ctx.spans, gradients, strict=True):
            total[:, span.slice] += gradient
        return total, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: VisibilityPlan, backend: str | None = None
) -> Tensor:
    """Return attention `[B,Lq,N,D]` of `query` over `key` and `value` `[B,Lk,N,D]` under `plan`.

    One mask-free call per segment: any device, no work on hidden pairs. Key runs are read in place unless a segment sees
    several that do not touch. Raises ValueError for a plan of another length.
    """

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dispatch_attention_fn(q, k, v, backend=backend)

    if not plan.segments:
        return dense(query, key, value)
    if query.shape[1] != plan.segments[-1].query.stop:
        raise ValueError(
            f"{query.shape[1]} query tokens; the visibility plan covers {plan.segments[-1].query.stop}"
        )
    spans = tuple(span for segment in plan.segments for span in segment.keys)
    key_runs, value_runs = iter(_Runs.apply(key, spans)), iter(_Runs.apply(value, spans))
    queries = query.split([segment.query.length for segment in plan.segments], dim=1)
    outputs = [
        dense(part, _joined(key_runs, segment), _joined(value_runs, segment))
        for part, segment in zip(queries, plan.segments, strict=True)
    ]
    return torch.cat(outputs, dim=1)


def _joined(runs: Iterator[Tensor], segment: Segment) -> Tensor:
    """Return the next `len(segment.keys)` runs as one tensor."""
    parts = [next(runs) for _ in segment.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def place_keys(
    key: Tensor, value: Tensor, rotation: Tensor, camera: prope.CameraTransforms | None
) -> tuple[Tensor, Tensor]:
    """Return raw keys and values `[B,L,N,D]` at their positions and seen by their cameras: what attention reads."""
    key = rope.apply(key, rotation)
    if camera is None:
        return key, value
    return prope.apply(key, camera.key_value), prope.apply(value, camera.key_value)


class CameraAttnProcessor:
    """WanAttention's self-attention in the released order: qk RMS norm, RoPE, PRoPE, attention, inverse PRoPE, output projection.

    `layer` is the block's number, by which a rollout keeps its keys; `executor` is `segments` or `flex`.
    """

    _attention_backend = None  # set by diffusers' `set_attention_backend`
    _parallel_config = None

    def __init__(self, layer: int = 0) -> None:
        self.layer = layer
        self.executor = "segments"

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Placement | None = None,
    ) -> Tensor:
        """Return the attention output `[B,l,dim]` of `hidden_states` `[B,l,dim]` placed by `rotary_emb`."""
        if rotary_emb is None or encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("CameraAttnProcessor serves self-attention with a Placement and no mask")
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        raw_key = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        raw_value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        shares = rotary_emb.shares
        if shares is not None:
            query, raw_key, raw_value = shares.scatter_heads(query, raw_key, raw_value)

        camera = rotary_emb.camera
        query = rope.apply(query, rotary_emb.rotation)
        if camera is not None:
            query = prope.apply(query, camera.query)
        key, value = place_keys(raw_key, raw_value, rotary_emb.rotation, camera)
        if rotary_emb.rollout is not None:
            key, value = self._extend(rotary_emb, raw_key, raw_value, key, value)

        if self.executor == "flex":
            output = flex.attend(query, key, value, rotary_emb.visibility)
        else:
            output = attend(query, key, value, rotary_emb.visibility, self._attention_backend)
        if camera is not None:
            output = prope.apply(output, camera.output)
        if shares is not None:
            output = shares.gather_heads(output)
        output = output.flatten(2, 3).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](output))

    def _extend(
        self, placement: Placement, raw_key: Tensor, raw_value: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `[visible cache | these tokens]` as attention reads them; the cache is transformed once per chunk."""
        state = placement.rollout
        cache = state.layer(self.layer, raw_key, raw_value)
        if cache.placed_at != state.frames:
            window = cache.read(state)
            if state.visible:
                window = place_keys(*window, placement.window_rotation, placement.window_camera)
            cache.place(*window, state.frames)
        if placement.commit:
            cache.write(state, raw_key, raw_value)
        return cache.joined(key, value)


class TextAttnProcessor(WanAttnProcessor):
    """diffusers' cross-attention; inside a cached rollout the text's keys and values are computed once and kept."""

    def __init__(self, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """Return the cross-attention output `[B,L,dim]` of `hidden_states` over text `[B,Lt,dim]`."""
        placement = _PLACEMENT.get()
        if placement is None or placement.rollout is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        text = placement.rollout.text
        if self.layer not in text:
            text[self.layer] = (
                attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1)),
                attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1)),
            )
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        output = dispatch_attention_fn(query, *text[self.layer], backend=self._attention_backend)
        return attn.to_out[1](attn.to_out[0](output.flatten(2, 3).type_as(query)))


_PLACEMENT: ContextVar[Placement | None] = ContextVar("placement", default=None)


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Give `placement` to the transformer forward run inside the block (its signature has no room for one)."""
    token = _PLACEMENT.set(placement)
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


class PlacementSource(nn.Module):
    """Takes the place of WanTransformer3DModel.rope: hands the blocks the placement of the current call.

    A call from outside `placed` (diffusers' own pipelines) gets the ordinary grid without a camera.
    """

    def __init__(self, head_dim: int, patch_size: tuple[int, int, int]) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.patch_size = patch_size

    def forward(self, hidden_states: Tensor) -> Placement:
        """Return the placement for `hidden_states` `[B,C,T,h,w]`."""
        placement = _PLACEMENT.get()
        if placement is not None:
            return placement
        grid = (size // patch for size, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True))
        return Placement(rope.grid_rotations(*grid, self.head_dim, hidden_states.device))


def current_placement() -> Placement | None:
    """Return the placement of the forward pass under way, None outside `placed`."""
    return _PLACEMENT.get()


def _keep_share(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Return this rank's tokens `[B,dim,l]` of the patch embedding `[B,dim,T,h,w]`; nothing is replaced where it holds all."""
    placement = _PLACEMENT.get()
    if placement is None or placement.shares is None:
        return None
    return output.flatten(2)[:, :, placement.shares.own]


def _restore_tokens(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Return all ranks' tokens `[B,L,C]` of the output projection `[B,l,C]`; nothing is replaced where this rank holds all."""
    placement = _PLACEMENT.get()
    if placement is None or placement.shares is None:
        return None
    return placement.shares.gather_tokens(output)


def install(transformer: nn.Module) -> None:
    """Put the placement source, the attention processors and the ends of a shared pass into a diffusers WanTransformer3DModel."""
    config = transformer.config
    transformer.rope = PlacementSource(config.attention_head_dim, tuple(config.patch_size))
    transformer.patch_embedding.register_forward_hook(_keep_share)
    transformer.proj_out.register_forward_hook(_restore_tokens)
    for layer, block in enumerate(transformer.blocks):
        block.attn1.set_processor(CameraAttnProcessor(layer))
        block.attn2.set_processor(TextAttnProcessor(layer))


def set_executor(transformer: nn.Module, executor: str) -> None:
    """Choose what runs visibility plans in `transformer`: `segments` (any device) or `flex` (compiled, CUDA)."""
    if executor not in EXECUTORS:
        raise ValueError(f"attention executor {executor!r}; known: {', '.join(EXECUTORS)}")
    for block in transformer.blocks:
        block.attn1.processor.executor = executor
