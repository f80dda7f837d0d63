"""Counter-based randomness: every draw is a pure function of what it is for.

Order, start frame, noise, timestep and dropout are keyed by (seed, purpose, step or occurrence), never by rank, worker or
process history. A resume or a change of world size therefore needs no replay, and sequence-parallel peers agree by
construction. Keys are BLAKE2b-64 (little endian) of the parts joined with `|`, as in spec operations section 0.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Part = str | int

_MASK = 2**64 - 1
# The constants of the splitmix64 finaliser.
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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


def keys64(names: np.ndarray, *parts: Part) -> np.ndarray:
    """Return a 64-bit key for each element of `names` (uint64, themselves keys) under `parts`, as uint64.

    The map is a bijection, so different names keep different keys; a million of them take milliseconds.
    """
    import numpy as np

    mixed = names ^ np.uint64(key64(*parts))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    return mixed ^ (mixed >> np.uint64(31))


class Permutation:
    """A keyed permutation of range(n): `permutation[i]` in O(1) time and memory, a few microseconds.

    A Feistel network of eight rounds on the smallest near-square grid that holds n, walked until it falls back inside
    range(n). The grid has at most sqrt(n) + 1 cells too many, so a walk is rarely longer than one step. Round keys come
    from one BLAKE2b of the parts, rounds mix them by multiplication: good for shuffling, not for secrets.
    """

    _FORMAT = struct.Struct("<8Q")

    def __init__(self, n: int, *parts: Part) -> None:
        if n < 1:
            raise ValueError(f"Permutation() needs n >= 1, got {n}")
        self._n = n
        self._height = math.isqrt(n - 1) + 1
        self._width = -(-n // self._height)
        text = "|".join(str(part) for part in parts).encode()
        keys = self._FORMAT.unpack(hashlib.blake2b(text, digest_size=self._FORMAT.size).digest())
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, position: int) -> int:
        """Return element `position`; IndexError outside range(n)."""
        if not 0 <= position < self._n:
            raise IndexError(f"position {position} outside range({self._n})")
        height, width = self._height, self._width
        row, column = divmod(position, width)
        while True:
            for row_key, column_key in self._keys:
                mixed = (column ^ row_key) * _MIX_1 & _MASK
                mixed = (mixed ^ (mixed >> 29)) * _MIX_2 & _MASK
                row = (row + (mixed ^ (mixed >> 32))) % height
                mixed = (row ^ column_key) * _MIX_1 & _MASK
                mixed = (mixed ^ (mixed >> 29)) * _MIX_2 & _MASK
                column = (column + (mixed ^ (mixed >> 32))) % width
            value = row * width + column
            if value < self._n:
                return value


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
