"""Visibility plans against dense masks, and what reaches the blocks with a forward pass."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from backbone_cases import backbone, inputs
from torch.nn import functional as F

from solarwm_lib.backbones.attention import (
    BIDIRECTIONAL,
    CameraAttnProcessor,
    Segment,
    VisibilityPlan,
    attend,
)


@pytest.mark.parametrize(
    "plan",
    [
        BIDIRECTIONAL,
        VisibilityPlan(tuple(Segment(slice(s, s + 3), (slice(0, s + 3),)) for s in (0, 3, 6))),
        VisibilityPlan(
            (Segment(slice(0, 4), (slice(0, 4),)), Segment(slice(4, 9), (slice(0, 2), slice(4, 9))))
        ),
    ],
    ids=["bidirectional", "chunk-causal", "sink-and-window"],
)
def test_the_executor_equals_dense_masked_attention(plan):
    q, k, v = torch.randn(3, 2, 9, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=plan.mask(9))
    torch.testing.assert_close(attend(q, k, v, plan), expected.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_recomputes_with_the_same_cameras():
    """Recomputation runs in backward, when the forward's context is gone."""
    gradients = []
    for checkpointing in (False, True):
        model = backbone().train()
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()
        model.velocity(**inputs()).square().sum().backward()
        gradients.append([parameter.grad for _, parameter in model.trainable()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_concurrent_forwards_keep_their_own_cameras():
    model = backbone().eval()
    cases = [inputs() | {"w2c": inputs()["w2c"].roll(shift, dims=0)} for shift in (0, 1)] * 4
    with torch.no_grad():
        alone = [model.velocity(**case) for case in cases]
    with ThreadPoolExecutor(4) as pool:

        def run(case):
            with torch.no_grad():
                return model.velocity(**case)

        together = list(pool.map(run, cases))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_the_processor_refuses_what_it_does_not_serve():
    attn = backbone().transformer.blocks[0].attn1
    assert isinstance(attn.processor, CameraAttnProcessor)
    with pytest.raises(ValueError, match="Placement"):
        attn(torch.randn(1, 4, 48))
