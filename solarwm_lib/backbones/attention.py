"""Self-attention with explicit positions, cameras and visibility, as a processor for diffusers' WanAttention.

What a forward pass needs beyond the hidden states travels as one `Placement` in the place of diffusers' rotary embedding:
an argument of every block, so activation checkpointing recomputes with the same positions and cameras and no module holds
per-call state. It is a plain dataclass on purpose: mixed-precision wrappers cast the floating tensors they find in tuples.

Shapes: B batch, L tokens, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from . import prope, rope


@dataclass(frozen=True)
class Segment:
    """A run of query tokens and the runs of key tokens all of them see."""

    query: slice
    keys: tuple[slice, ...]


@dataclass(frozen=True)
class VisibilityPlan:
    """Which keys each query sees. Segments are in token order and cover every query once; no segment means everything is visible."""

    segments: tuple[Segment, ...] = ()

    def mask(self, tokens: int) -> Tensor:
        """Return the dense bool mask `[tokens, tokens]`, True where visible: the reference every executor must equal."""
        if not self.segments:
            return torch.ones(tokens, tokens, dtype=torch.bool)
        mask = torch.zeros(tokens, tokens, dtype=torch.bool)
        for segment in self.segments:
            for keys in segment.keys:
                mask[segment.query, keys] = True
        return mask


BIDIRECTIONAL = VisibilityPlan()


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one forward pass are: complex rotations `[1,L,1,D/2]`, cameras or None, and who sees whom."""

    rotation: Tensor
    camera: prope.CameraTransforms | None = None
    visibility: VisibilityPlan = BIDIRECTIONAL


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: VisibilityPlan, backend: str | None = None
) -> Tensor:
    """Return attention `[B,L,N,D]` under `plan`, one mask-free call per segment: any device, no work on hidden pairs."""

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dispatch_attention_fn(q, k, v, backend=backend)

    if not plan.segments:
        return dense(query, key, value)
    outputs = []
    for segment in plan.segments:
        visible_key = torch.cat([key[:, part] for part in segment.keys], dim=1)
        visible_value = torch.cat([value[:, part] for part in segment.keys], dim=1)
        outputs.append(dense(query[:, segment.query], visible_key, visible_value))
    return torch.cat(outputs, dim=1)


class CameraAttnProcessor:
    """WanAttention's self-attention in the released order: qk RMS norm, RoPE, PRoPE, attention, inverse PRoPE, output projection."""

    _attention_backend = None  # set by diffusers' `set_attention_backend`
    _parallel_config = None

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Placement | None = None,
    ) -> Tensor:
        """Return the attention output `[B,L,dim]` of `hidden_states` `[B,L,dim]` placed by `rotary_emb`."""
        if rotary_emb is None or encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("CameraAttnProcessor serves self-attention with a Placement and no mask")
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))

        query = rope.apply(query, rotary_emb.rotation)
        key = rope.apply(key, rotary_emb.rotation)
        camera = rotary_emb.camera
        if camera is not None:
            query = prope.apply(query, camera.query)
            key = prope.apply(key, camera.key_value)
            value = prope.apply(value, camera.key_value)

        output = attend(query, key, value, rotary_emb.visibility, self._attention_backend)
        if camera is not None:
            output = prope.apply(output, camera.output)
        output = output.flatten(2, 3).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](output))


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


def install(transformer: nn.Module) -> None:
    """Put the placement source and the self-attention processors into a diffusers WanTransformer3DModel."""
    config = transformer.config
    transformer.rope = PlacementSource(config.attention_head_dim, tuple(config.patch_size))
    for block in transformer.blocks:
        block.attn1.set_processor(CameraAttnProcessor())
