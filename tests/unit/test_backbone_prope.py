"""PRoPE against a float64 reference that builds a dense matrix per token, and the translation transform's anchors."""

import math

import pytest
import torch
from backbone_cases import cameras

from solarwm_lib.backbones import prope


def per_token_attention(q, k, v, w2c, intrinsics, tokens_per_frame):
    """Attention with q'=P_q^T q, k'=P_k^-1 k, v'=P_k^-1 v, o'=P_q o, each P a dense D x D matrix per token, float64."""
    batch, tokens, heads, width = q.shape
    output = torch.zeros(batch, tokens, heads, width, dtype=torch.float64)
    for b in range(batch):
        matrices = []
        for token in range(tokens):
            lifted = torch.eye(4, dtype=torch.float64)
            lifted[0, 0], lifted[1, 1] = intrinsics[b, 0, 0].double(), intrinsics[b, 1, 1].double()
            small = lifted @ w2c[b, token // tokens_per_frame].double()
            matrices.append(torch.kron(torch.eye(width // 4, dtype=torch.float64), small))
        P = torch.stack(matrices)
        inverse = torch.linalg.inv(P)
        for h in range(heads):
            q_, k_, v_ = (x[b, :, h].double() for x in (q, k, v))
            q_ = torch.einsum("lji,lj->li", P, q_)
            k_ = torch.einsum("lij,lj->li", inverse, k_)
            v_ = torch.einsum("lij,lj->li", inverse, v_)
            weights = torch.softmax(q_ @ k_.T / math.sqrt(width), dim=-1)
            output[b, :, h] = torch.einsum("lij,lj->li", P, weights @ v_)
    return output


def frame_attention(q, k, v, camera):
    q = prope.apply(q, camera.query)
    k, v = prope.apply(k, camera.key_value), prope.apply(v, camera.key_value)
    attended = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return prope.apply(attended.transpose(1, 2), camera.output)


def test_equals_the_dense_per_token_reference():
    w2c, intrinsics = cameras(2, 3)
    q, k, v = torch.randn(3, 2, 12, 2, 8, generator=torch.Generator().manual_seed(3)).unbind(0)
    expected = per_token_attention(q, k, v, w2c, intrinsics, tokens_per_frame=4)
    found = frame_attention(q, k, v, prope.camera_transforms(w2c, intrinsics))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_principal_point_is_ignored():
    w2c, intrinsics = cameras(1, 3)
    moved = intrinsics.clone()
    moved[:, :2, 2] = 0.1
    assert torch.equal(
        prope.camera_transforms(w2c, intrinsics).query, prope.camera_transforms(w2c, moved).query
    )


def test_matrices_stay_float32_for_bfloat16_cameras_and_activations():
    w2c, intrinsics = cameras(1, 2)
    camera = prope.camera_transforms(w2c.bfloat16(), intrinsics.bfloat16())
    assert camera.query.dtype == camera.key_value.dtype == camera.output.dtype == torch.float32
    assert prope.apply(torch.randn(1, 4, 1, 8).bfloat16(), camera.query).dtype == torch.bfloat16


def test_one_camera_per_clip_cancels():
    """Tokens that share one camera attend as if there were none: P P^-1 = I."""
    w2c, intrinsics = cameras(1, 3)
    same = w2c[:, 1:2].expand(-1, 3, -1, -1)
    q, k, v = torch.randn(3, 1, 6, 1, 8).unbind(0)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v))
    ).transpose(1, 2)
    torch.testing.assert_close(
        frame_attention(q, k, v, prope.camera_transforms(same, intrinsics)), plain, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("mode", "invariant"), [("linear", True), ("logd4", False)])
def test_a_common_rebasing_changes_nothing_under_linear_only(mode, invariant):
    w2c, intrinsics = cameras(1, 4)
    q, k, v = torch.randn(3, 1, 8, 1, 8, generator=torch.Generator().manual_seed(5)).unbind(0)
    rebased = w2c @ prope.invert_rigid(w2c[:, 2:3])
    a, b = (
        frame_attention(q, k, v, prope.camera_transforms(prope.transform_translation(x, mode), intrinsics))
        for x in (w2c, rebased)
    )
    assert torch.allclose(a, b, rtol=1e-3, atol=1e-4) == invariant


def test_a_channel_range_leaves_the_other_channels_alone():
    w2c, intrinsics = cameras(1, 2)
    matrix = prope.camera_transforms(w2c, intrinsics).query
    x = torch.randn(1, 4, 1, 16)
    found = prope.apply(x, matrix, slice(12, 16))
    assert torch.equal(found[..., :12], x[..., :12])
    assert torch.equal(found[..., 12:], prope.apply(x[..., 12:].contiguous(), matrix))


def test_invert_rigid_is_the_inverse():
    w2c, _ = cameras(2, 3)
    torch.testing.assert_close(prope.invert_rigid(w2c), torch.linalg.inv(w2c), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (0.5, 0.101366), (1, 0.173287), (2, 0.274653), (3, 0.34657359), (20, 0.761131)],
)
def test_logd4_anchors(length, expected):
    w2c = torch.eye(4).repeat(2, 1, 1)
    w2c[1, :3, 3] = torch.tensor([0.0, float(length), 0.0])
    found = prope.transform_translation(w2c, "logd4")
    assert found[1, 1, 3].item() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(found[0], torch.eye(4)) and torch.equal(found[..., :3, :3], w2c[..., :3, :3])
    assert torch.equal(prope.transform_translation(w2c, "linear"), w2c)


def test_an_unknown_transform_is_refused():
    with pytest.raises(ValueError, match="linear, logd4"):
        prope.transform_translation(torch.eye(4), "log")
