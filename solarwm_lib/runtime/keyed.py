"""Counter-based randomness: every draw is a pure function of what it is for.

Order, start frame, noise, timestep and dropout are keyed by (seed, purpose, step or occurrence), never by rank, worker or
process history. A resume or a change of world size therefore needs no replay, and sequence-parallel peers agree by
construction. Keys are BLAKE2b-64 (little endian) of the parts joined with `|`, as in spec operations section 0.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Part = str | int


def key64(*parts: Part) -> int:
    """Return the 64-bit key of `parts`."""
    text = "|".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def key128(*parts: Part) -> int:
    """Return the 128-bit key of `parts`, for generators whose streams must not collide."""
    text = "|".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def uniform(*parts: Part) -> float:
    """Return a float in [0, 1) with 53 random bits."""
    return (key64(*parts) >> 11) * 2.0**-53


def integer(n: int, *parts: Part) -> int:
    """Return an integer in [0, n). The bias of the modulus is below n / 2**128."""
    if n < 1:
        raise ValueError(f"integer() needs n >= 1, got {n}")
    return key128(*parts) % n


def generator(*parts: Part) -> np.random.Generator:
    """Return a Philox generator whose 128-bit key is that of `parts`."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=key128(*parts)))


def normal(shape: tuple[int, ...], *parts: Part) -> np.ndarray:
    """Return standard normal float32 values of `shape`, the same on every platform and device."""
    import numpy as np

    return generator(*parts).standard_normal(shape, dtype=np.float32)


def permutation_at(position: int, n: int, *parts: Part) -> int:
    """Return element `position` of a keyed permutation of range(n), in O(1) time and memory.

    A four-round Feistel network over the smallest even-width bit domain that holds n, walked until it falls back inside
    range(n); the domain is less than 4n, so the expected walk is below four steps.
    """
    if not 0 <= position < n:
        raise ValueError(f"position {position} outside range({n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for round_ in range(4):
            left, right = right, left ^ (key64(*parts, round_, right) & mask)
        value = (left << half) | right
        if value < n:
            return value
