"""Fingerprints of what a micro-batch is made of: 64 bits that differ where a single bit of the content does.

Exact on bits, so 0.0 and -0.0 are not the same; cheap, so that they can be compared at every micro-batch: a tensor is read
once on its own device, and nothing but the result travels to the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SHOWN_NUMBERS = 16
SHOWN_CHARACTERS = 40
CONTEXT_CHARACTERS = 8
# Odd 64-bit constants of splitmix64, as torch's signed integers.
_STEP, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def fingerprints(values: Sequence[Any]) -> list[int]:
    """Return one fingerprint per value: a tensor, or text, numbers, None and tuples of them; one wait for the device in all."""
    heads = [hashed(_head(value)) for value in values]
    places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    if places:
        device = values[places[0]].device
        sums = torch.stack([content(values[i]).to(device) for i in places]).tolist()
        for i, total in zip(places, sums, strict=True):
            heads[i] = hashed(f"{heads[i]} {total}")
    return heads


def content(x: Tensor) -> Tensor:
    """Return the int64 `[]` fingerprint of the bits of `x` in their order, on its device; not of its shape and type."""
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    words = F.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    # Every word is scrambled with its position before the sum, which wraps around: no two changes cancel except by chance.
    words = words + _STEP * torch.arange(1, len(words) + 1, device=x.device)
    for _ in range(2):
        words = words * _MIX
        words = words ^ (words >> 32 & 0xFFFFFFFF)
    return words.sum()


def hashed(text: str) -> int:
    """Return a signed 64-bit hash of `text`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _head(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def shown(value: Any, fingerprint: int) -> str:
    """Return `value` as text for a message: numbers of a small tensor, shape and fingerprint of a large one."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() <= SHOWN_NUMBERS:
        return str(value.tolist())
    return f"{fingerprint & (2**64 - 1):016x} of {list(value.shape)}"


def excerpts(texts: Sequence[str]) -> list[str]:
    """Return `texts` shortened to where they begin to differ."""
    shortest = min(len(text) for text in texts)
    same = next((i for i in range(shortest) if len({text[i] for text in texts}) > 1), shortest)
    start = max(0, same - CONTEXT_CHARACTERS) if same >= SHOWN_CHARACTERS // 2 else 0
    stop = start + SHOWN_CHARACTERS
    return [
        f"{'...' if start else ''}{text[start:stop]}{'...' if len(text) > stop else ''}" for text in texts
    ]
