"""Rotary positions against diffusers' own module and processor arithmetic."""

import pytest
import torch
from backbone_cases import cos_sin
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from solarwm_lib.backbones import rope


@pytest.mark.parametrize("head_dim", [24, 48, 128])
def test_cos_and_sin_equal_diffusers_bit_for_bit(head_dim):
    reference = WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)(torch.zeros(1, 1, 5, 6, 8))
    found = cos_sin(rope.frame_positions(range(5), 3, 4), head_dim)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


def test_released_channel_split():
    assert rope.axis_widths(128) == (44, 42, 42)


def test_complex_rotation_equals_the_processor_arithmetic():
    positions = rope.frame_positions(range(3), 2, 2)
    x = torch.randn(2, 12, 2, 24, generator=torch.Generator().manual_seed(0))
    cos, sin = cos_sin(positions, 24)
    even, odd = x[..., 0::2], x[..., 1::2]
    expected = torch.empty_like(x)
    expected[..., 0::2] = even * cos[..., 0::2] - odd * sin[..., 1::2]
    expected[..., 1::2] = even * sin[..., 1::2] + odd * cos[..., 0::2]
    torch.testing.assert_close(rope.apply(x, rope.rotations(positions, 24)), expected, rtol=1e-6, atol=1e-6)


def test_positions_are_relative_and_unbounded():
    """Shifting all positions leaves q.k unchanged, far beyond the 1024 rows of a table."""
    q, k = torch.randn(2, 1, 4, 1, 24, generator=torch.Generator().manual_seed(0)).unbind(0)
    near = torch.tensor([[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 0, 1]])
    logits = []
    for positions in (near, near + torch.tensor([5000, 7, 9])):
        table = rope.rotations(positions, 24)
        logits.append(torch.einsum("blnd,bmnd->blm", rope.apply(q, table), rope.apply(k, table)))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=2e-3)


def test_bfloat16_keeps_its_dtype():
    table = rope.rotations(rope.frame_positions(range(2), 1, 1), 24)
    assert rope.apply(torch.randn(1, 2, 1, 24).bfloat16(), table).dtype == torch.bfloat16


def test_a_table_first_built_while_sampling_serves_training():
    with torch.inference_mode():
        table = rope.grid_rotations(2, 7, 3, 24, torch.device("cpu"))
    x = torch.randn(1, 42, 1, 24, requires_grad=True)
    rope.apply(x, table).sum().backward()
    assert x.grad is not None


def test_frames_stand_where_their_ids_say():
    """Clean and noisy halves share ids; a window's frames may start anywhere."""
    grid = rope.frame_positions(range(5), 2, 3)
    assert torch.equal(rope.frame_positions((0, 1, 0, 1), 2, 3), torch.cat((grid[:12], grid[:12])))
    assert torch.equal(rope.frame_positions(range(3, 5), 2, 3), grid[18:])
    table = rope.frame_rotations(range(5), 2, 3, 24, torch.device("cpu"))
    assert torch.equal(table, rope.grid_rotations(5, 2, 3, 24, torch.device("cpu")))
    assert torch.equal(table[:, 18:], rope.frame_rotations((3, 4), 2, 3, 24, torch.device("cpu")))


def test_float64_stays_exact():
    """Shifted positions leave q.k unchanged to rounding in float64; a float32 table would show at 1e-7."""
    q, k = torch.randn(2, 1, 12, 1, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = []
    for ids in ((0, 1), (300, 301)):
        table = rope.frame_rotations(ids, 2, 3, 24, torch.device("cpu"), torch.float64)
        rotated = [rope.apply(x, table) for x in (q, k)]
        assert rotated[0].dtype == torch.float64
        logits.append(torch.einsum("blnd,bmnd->blm", *rotated))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10)
