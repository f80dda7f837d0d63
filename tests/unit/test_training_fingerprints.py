"""Fingerprints differ where a bit does, and messages show where values part."""

import pytest
import torch

from solarwm_lib.training.fingerprints import content, excerpts, fingerprints, shown


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_one_element_or_its_place_changes_the_content(dtype):
    x = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0]).to(dtype)
    changed = [x.clone() for _ in x]
    for i, other in enumerate(changed):
        other[i] = 0 if x[i] else 1
    found = {int(content(y)) for y in (x, x.flip(0), x.roll(1), *changed)}
    assert len(found) == 16
    assert int(content(x.clone())) == int(content(x)) == int(content(torch.stack((x, x), dim=1)[:, 0]))


def test_changes_of_small_numbers_do_not_cancel():
    """Sums weighted by the position alone take these two for the same."""
    assert content(torch.tensor([1, 2, 3])) != content(torch.tensor([2, 0, 4]))
    assert content(torch.tensor([0.0])) != content(torch.tensor([-0.0]))
    assert content(torch.tensor([torch.nan])) == content(torch.tensor([torch.nan]))


def test_shape_type_text_and_absence_are_told_apart():
    x = torch.zeros(2, 8)
    values = [x, x.T, x.double(), x[:1], x.int(), torch.zeros(0), None, "", ("a", "b"), ("ab",), (1, 2), 0]
    first, second = fingerprints(values), fingerprints(values)
    assert first == second and len(set(first)) == len(values)
    assert all(-(2**63) <= number < 2**63 for number in first)


def test_messages_show_where_values_part():
    assert excerpts(["('a cat',)", "('a dog',)"]) == ["('a cat',)", "('a dog',)"]
    long = ["the same beginning of a long prompt, then " + end for end in ("rain " * 20, "sun")]
    assert excerpts(long) == [f"...t, then {'rain ' * 7}"[:43] + "...", "...t, then sun"]
    assert shown(torch.tensor([1.5, 2.0]), 0) == "[1.5, 2.0]"
    assert shown(torch.zeros(4, 8), -1) == "ffffffffffffffff of [4, 8]"
