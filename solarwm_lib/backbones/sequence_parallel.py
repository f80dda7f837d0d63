"""Ulysses sequence parallelism: the ranks of a group share the tokens of one pass (spec wan22 8, layout `whole_frame_uneven`).

Between patch embedding and output projection every rank holds its share of the tokens. Self-attention exchanges shares of
tokens for shares of heads, and back; what follows the output projection is whole again on every rank.

One collective does all of it, and its backward is its true adjoint: gradients are those of the sum of all ranks' losses.
So where every rank of the group computes the same loss of the whole output, the MEAN over the group of the ranks' parameter
gradients is the gradient of that loss. A trainer that averages gradients over all ranks needs no factor for the group's size.

Shapes: B batch, L tokens of the pass, l of this rank, n ranks, N heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.connection import connection
from ..runtime.errors import ConfigError


@dataclass(frozen=True)
class Shares:
    """How the tokens of a pass lie on the ranks of `group`: its rank i holds the next `lengths[i]`; this is rank `rank`."""

    group: dist.ProcessGroup
    lengths: tuple[int, ...]
    rank: int

    @property
    def own(self) -> slice:
        """Return this rank's run of tokens."""
        start = sum(self.lengths[: self.rank])
        return slice(start, start + self.lengths[self.rank])

    def scatter_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return `parts` `[B,l,N,D]` as `[B,L,N/n,D]`, all tokens of this rank's heads, in one exchange."""
        ranks = len(self.lengths)
        dtypes = [part.dtype for part in parts]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        # Tokens lead, so that shares of unequal length arrive in their place.
        rows = torch.stack(
            [part.to(widest).unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4) for part in parts], dim=2
        )
        rows = self._exchange(rows.flatten(0, 1), self._own_to_each, self.lengths)
        return tuple(rows[:, i].transpose(0, 1).to(dtype) for i, dtype in enumerate(dtypes))

    def gather_heads(self, x: Tensor) -> Tensor:
        """Return `x` `[B,L,N/n,D]` as `[B,l,N,D]`: the reverse of `scatter_heads`."""
        rows = self._exchange(x.transpose(0, 1), self.lengths, self._own_to_each)
        return rows.unflatten(0, (len(self.lengths), -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return `x` `[B,l,...]` of every rank as `[B,L,...]`. For small tensors: a rank sends its share to each other one."""
        rows = x.transpose(0, 1)
        rows = rows.expand(len(self.lengths), *rows.shape).flatten(0, 1)
        return self._exchange(rows, self._own_to_each, self.lengths).transpose(0, 1)

    @property
    def _own_to_each(self) -> tuple[int, ...]:
        return (self.lengths[self.rank],) * len(self.lengths)

    def _exchange(self, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        return _Exchange.apply(rows, sent, received, self.group)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: the next `sent[i]` go to rank i, and `received[i]` come from it. Its adjoint is the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
) -> Tensor:
    rows = rows.contiguous()
    output = rows.new_empty(sum(received), *rows.shape[1:])
    with connection("exchanging tokens with the sequence-parallel peers"):
        dist.all_to_all_single(output, rows, list(received), list(sent), group=group)
    return output


def shares(group: dist.ProcessGroup, frames: int, tokens_per_frame: int) -> Shares:
    """Return how a pass over `frames` latent frames is shared by `group`. Raises ValueError as `deal`."""
    return Shares(group, deal(frames, tokens_per_frame, dist.get_world_size(group)), dist.get_rank(group))


@lru_cache(maxsize=64)
def deal(frames: int, tokens_per_frame: int, ranks: int) -> tuple[int, ...]:
    """Return how many tokens each of `ranks` holds: whole latent frames, the first ranks one more where they do not go round.

    Fewer frames than ranks (a rollout's chunk) are dealt in single tokens. Raises ValueError for fewer tokens than ranks.
    """
    tokens = frames * tokens_per_frame
    if tokens < ranks:
        raise ValueError(f"a pass over {tokens} tokens cannot be shared by {ranks} sequence-parallel ranks")
    units, size = (frames, tokens_per_frame) if frames >= ranks else (tokens, 1)
    each, left = divmod(units, ranks)
    return tuple((each + (rank < left)) * size for rank in range(ranks))


def check_heads(heads: int, ranks: int) -> None:
    """Raise ConfigError unless `ranks` sequence-parallel ranks can share `heads` attention heads evenly."""
    if heads % ranks:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"distributed.sequence_parallel_size: found {ranks}, expected a divisor of the {heads} attention heads; "
            f"legal values: {legal}"
        )
