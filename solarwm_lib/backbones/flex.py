"""Visibility plans through FlexAttention: block-sparse compiled kernels on CUDA (spec wan22 4.1, block size 128).

Block metadata is computed per segment in units of blocks, never as a dense `[L, L]` mask, and cached per plan, size and
device. Only CUDA compiles; elsewhere the same block mask runs unfused and without gradients, which serves tests.

Shapes: B batch, L tokens, N heads, D head width.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .visibility import VisibilityPlan

BLOCK = 128
SHAPES = 256  # compiled variants allowed, spec wan22 4.1


def attend(query: Tensor, key: Tensor, value: Tensor, plan: VisibilityPlan) -> Tensor:
    """Return attention `[B,Lq,N,D]` of `query` `[B,Lq,N,D]` over `key`, `value` `[B,Lk,N,D]` under `plan`."""
    mask = block_mask(plan, query.shape[1], key.shape[1], query.device) if plan.segments else None
    # A kernel multiplies operands of one type. Autocast may leave query and key wider, and casts for SDPA, not for FlexAttention.
    query, key = query.to(value.dtype), key.to(value.dtype)
    run = _compiled() if query.device.type == "cuda" else flex_attention
    return run(*(x.transpose(1, 2) for x in (query, key, value)), block_mask=mask).transpose(1, 2)


@cache
def _compiled():  # type: ignore[no-untyped-def]
    # Static shapes keep the block structure. Windows of a rollout are many shapes, and past the limit the compiler would
    # quietly run the dense form.
    import torch._dynamo.config as compiler

    compiler.recompile_limit = max(compiler.recompile_limit, SHAPES)
    compiler.accumulated_recompile_limit = max(compiler.accumulated_recompile_limit, 2 * SHAPES)
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def block_mask(plan: VisibilityPlan, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Return the BlockMask of `plan` for `queries` x `keys` tokens on `device`; equal to `plan.mask(queries, keys)`."""
    with torch.inference_mode(False):  # a mask first built while sampling must still serve training
        some, full = block_coverage(plan, queries, keys)
        # One tensor of its own per run of keys: kernels capture buffers, not views.
        starts, stops = ([row.to(device).clone() for row in bounds] for bounds in key_bounds(plan, queries))

        def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            inside = (kv >= starts[0][q]) & (kv < stops[0][q])
            for start, stop in zip(starts[1:], stops[1:], strict=True):
                inside = inside | ((kv >= start[q]) & (kv < stop[q]))
            return inside

        return BlockMask.from_kv_blocks(
            *_block_lists(some & ~full, device),
            *_block_lists(full, device),
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(queries, keys),
        )


def block_coverage(plan: VisibilityPlan, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return bool `[query blocks, key blocks]`: blocks with any visible pair, and blocks whose every pair is visible."""
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    starts = torch.arange(columns) * BLOCK
    some = torch.zeros(rows, columns, dtype=torch.bool)
    full = torch.ones(rows, columns, dtype=torch.bool)
    for segment in plan.segments:
        seen = sum(
            (torch.clamp(starts + BLOCK, max=span.stop) - torch.clamp(starts, min=span.start)).clamp_min(0)
            for span in segment.keys
        )
        touched = slice(segment.query.start // BLOCK, -(-segment.query.stop // BLOCK))
        some[touched] |= seen > 0
        full[touched] &= seen == BLOCK
    return some, full


def key_bounds(plan: VisibilityPlan, queries: int) -> tuple[Tensor, Tensor]:
    """Return int32 starts and stops `[runs, queries rounded up to blocks]` of the key runs each query sees, empty runs as 0, 0."""
    runs = max(len(segment.keys) for segment in plan.segments)
    bounds = torch.zeros(2, runs, -(-queries // BLOCK) * BLOCK, dtype=torch.int32)
    for segment in plan.segments:
        for run, span in enumerate(segment.keys):
            bounds[0, run, segment.query.slice] = span.start
            bounds[1, run, segment.query.slice] = span.stop
    return bounds[0], bounds[1]


def _block_lists(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's (count `[1,1,rows]`, indices `[1,1,rows,columns]`) of bool `blocks`, chosen columns first."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    count = blocks.sum(dim=-1)
    return count.int()[None, None].to(device), order.int()[None, None].to(device)
