"""Keyed randomness: pure functions of their parts, and permutations that reach every order."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solarwm_lib.runtime import keyed
from solarwm_lib.runtime.keyed import Permutation


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64), st.text(max_size=8))
def test_a_permutation_holds_every_element_once(n: int, seed: int, name: str) -> None:
    permutation = Permutation(n, seed, name)
    assert len(permutation) == n
    assert sorted(permutation) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(st.integers(2**32, 2**62), st.integers(0, 2**64), st.data())
def test_large_permutations_stay_in_range_and_are_one_to_one(n: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation(n, seed)
    positions = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=30))
    values = [permutation[position] for position in positions]
    assert all(0 <= value < n for value in values) and len(set(values)) == len(values)


def test_a_permutation_is_a_function_of_its_parts() -> None:
    order = list(Permutation(50, 3, "order", 0))
    assert order == list(Permutation(50, 3, "order", 0))
    assert (
        len({tuple(order), tuple(Permutation(50, 3, "order", 1)), tuple(Permutation(50, 4, "order", 0))}) == 3
    )
    # Resumes on other machines and versions depend on these values.
    assert list(Permutation(10, 42, "order", 0)) == [1, 2, 6, 4, 5, 0, 8, 7, 9, 3]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_tiny_permutations_reach_every_order_equally_often(n: int) -> None:
    orders = math.factorial(n)
    counts = Counter(tuple(Permutation(n, seed)) for seed in range(60 * orders))
    assert len(counts) == orders
    chi_square = sum((count - 60) ** 2 / 60 for count in counts.values())
    assert chi_square < orders - 1 + 5 * math.sqrt(2 * orders)


@pytest.mark.parametrize("n", [5, 6])
def test_small_permutations_reach_every_order(n: int) -> None:
    orders = math.factorial(n)
    assert len({tuple(Permutation(n, seed)) for seed in range(30 * orders)}) == orders


def test_every_position_reaches_every_element_about_equally_often() -> None:
    n, draws = 12, 6000
    table = np.zeros((n, n))
    for seed in range(draws):
        table[np.arange(n), list(Permutation(n, seed, "table"))] += 1
    assert np.abs(table - draws / n).max() < 5.5 * math.sqrt(draws / n)


def test_neighbours_are_torn_apart() -> None:
    order = np.array(list(Permutation(10_000, 1)))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.04


def test_an_element_takes_microseconds() -> None:
    permutation = Permutation(2_000_003, 7)
    rounds = []
    for _ in range(5):
        start = time.thread_time()
        for position in range(2000):
            permutation[position]
        rounds.append((time.thread_time() - start) / 2000)
    assert min(rounds) < 20e-6  # about 3 us on an idle core


def test_positions_outside_and_empty_ranges_are_refused() -> None:
    with pytest.raises(IndexError, match=r"position 5 outside range\(5\)"):
        Permutation(5, 0)[5]
    with pytest.raises(IndexError, match="position -1"):
        Permutation(5, 0)[-1]
    with pytest.raises(ValueError, match="needs n >= 1, got 0"):
        Permutation(0, 1)


def test_array_keys_differ_between_names_and_between_parts() -> None:
    names = np.arange(100_000, dtype=np.uint64)
    first, second = keyed.keys64(names, 42, "epoch", 0), keyed.keys64(names, 42, "epoch", 1)
    assert first.dtype == np.uint64 and len(np.unique(first)) == len(names)
    assert not np.any(first == second)
    assert np.array_equal(
        keyed.keys64(names[7:9], 42, "epoch", 0), first[7:9]
    )  # each key is of its name alone
    # Orders of two epochs are unrelated.
    ranks = np.argsort(np.argsort(first[:10_000])), np.argsort(np.argsort(second[:10_000]))
    assert abs(np.corrcoef(*ranks)[0, 1]) < 0.04


def test_keys_are_blake2b_little_endian_of_joined_parts() -> None:
    import hashlib

    digest = hashlib.blake2b(b"42|clip|7", digest_size=8).digest()
    assert keyed.key64(42, "clip", 7) == int.from_bytes(digest, "little")
