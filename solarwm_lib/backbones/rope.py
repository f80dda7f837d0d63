"""Three-axis rotary positions from explicit position ids (spec wan22 1.1: theta 10000, float64 angles, adjacent channel pairs).

Positions are an argument, so windows, clean and noisy halves and packed rows need no special case and no table length
limits them. Rotations are complex numbers: one complex product per pair is several times faster on a CPU than diffusers'
strided writes, and equal to it within float32 rounding.

Shapes: L tokens, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

THETA = 10_000.0


def axis_widths(head_dim: int) -> tuple[int, int, int]:
    """Return the channels given to time, height and width, as diffusers' WanRotaryPosEmbed splits them (128 -> 44, 42, 42)."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def frame_positions(frame_ids: Sequence[int], height: int, width: int) -> Tensor:
    """Return int64 `[len(frame_ids)*height*width, 3]` ids of token grids whose latent frames stand at `frame_ids`.

    Ids may repeat (the clean and the noisy half share theirs) and start anywhere (a window counts from its oldest frame).
    """
    axes = (
        torch.tensor(tuple(frame_ids), dtype=torch.int64, device="cpu"),
        torch.arange(height, device="cpu"),
        torch.arange(width, device="cpu"),
    )
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)


def angles(positions: Tensor, head_dim: int, theta: float = THETA) -> Tensor:
    """Return float64 angles `[L, D/2]`, one per channel pair, of position ids `[L,3]`."""
    parts = []
    for axis, width in enumerate(axis_widths(head_dim)):
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
        parts.append(torch.outer(positions[:, axis].double(), 1.0 / theta**exponents))
    return torch.cat(parts, dim=-1)


def rotations(
    positions: Tensor, head_dim: int, theta: float = THETA, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return rotations `[1,L,1,D/2]` of position ids `[L,3]`: complex64, or complex128 for `dtype` float64."""
    table = angles(positions, head_dim, theta)[None, :, None]
    return torch.complex(table.cos().to(dtype), table.sin().to(dtype))


@lru_cache(maxsize=32)
def frame_rotations(
    frame_ids: Sequence[int],
    height: int,
    width: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the rotations of token grids at `frame_ids` (a range or tuple); a run uses few of them, so they are built once."""
    with torch.inference_mode(False):  # a table first built while sampling must still serve training
        return rotations(frame_positions(frame_ids, height, width), head_dim, dtype=dtype).to(device)


def grid_rotations(frames: int, height: int, width: int, head_dim: int, device: torch.device) -> Tensor:
    """Return the complex64 rotations of a whole token grid of `frames` latent frames, counted from 0."""
    return frame_rotations(range(frames), height, width, head_dim, device)


def apply(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the adjacent channel pairs of `x` `[B,L,N,D]`; arithmetic in float32 or wider, result in the dtype of `x`."""
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)
