"""Both executors against dense masked attention, and what reaches the blocks with a forward pass."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from backbone_cases import backbone, inputs
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from solarwm_lib.backbones import flex
from solarwm_lib.backbones.attention import CameraAttnProcessor, attend, set_executor
from solarwm_lib.backbones.visibility import (
    BIDIRECTIONAL,
    Segment,
    Span,
    VisibilityPlan,
    cached_window,
    causal_window,
    teacher_forcing,
)

# name: plan, query tokens, key tokens. Lengths are no multiples of 128, some runs end inside a block, some fill blocks.
PLANS = {
    "bidirectional": (BIDIRECTIONAL, 9, 9),
    "chunk-causal": (causal_window(6, 3, 3, 5), 45, 45),
    "window": (causal_window(9, 3, 3, 5, 6), 60, 60),
    "window and sink": (causal_window(12, 3, 3, 5, 9, 3), 75, 75),
    "teacher forcing": (teacher_forcing(12, 3, 2, 5), 120, 120),
    "teacher forcing, sink": (teacher_forcing(12, 3, 1, 5, 3), 120, 120),
    "teacher forcing, whole blocks": (teacher_forcing(12, 3, 2, 43), 1032, 1032),
    "cached chunk": (cached_window(6, 3, 3, 5), 15, 45),
    "cached chunks": (cached_window(6, 6, 3, 50), 300, 600),
    "packed rows": (
        VisibilityPlan((Segment(Span(0, 4), (Span(0, 4),)), Segment(Span(4, 9), (Span(4, 9),)))),
        9,
        9,
    ),
}


def tensors(queries, keys):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, 8)
    q = torch.randn(2, queries, *shape[1:], generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, keys, *shape[1:], generator=generator, dtype=torch.float64).unbind(0)
    return q, k, v


def dense(q, k, v, mask):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(
        1, 2
    )


@pytest.mark.parametrize("name", PLANS)
def test_segments_equal_dense_masked_attention_with_gradients(name):
    plan, queries, keys = PLANS[name]
    found, expected = ([x.clone().requires_grad_() for x in tensors(queries, keys)] for _ in range(2))
    outputs = attend(*found, plan), dense(*expected, plan.mask(queries, keys))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    weight = torch.randn(outputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for output in outputs:
        (output * weight).sum().backward()
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in PLANS if PLANS[name][0].segments])
def test_the_block_mask_is_the_plan(name):
    plan, queries, keys = PLANS[name]
    mask = flex.block_mask(plan, queries, keys, torch.device("cpu"))
    assert mask.seq_lengths == (queries, keys)
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None]
    pairs = mask.mask_mod(torch.tensor(0), torch.tensor(0), q.expand(-1, keys), k.expand(queries, -1))
    assert torch.equal(pairs, plan.mask(queries, keys))
    some, full = flex.block_coverage(plan, queries, keys)
    for row in range(some.shape[0]):
        for column in range(some.shape[1]):
            block = pairs[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            assert some[row, column] == block.any()
            assert full[row, column] == (block.all() and block.shape[1] == 128)
    # What a kernel visits: partial and full blocks together are those with a visible pair, each listed once.
    partial, complete = mask.kv_num_blocks[0, 0], mask.full_kv_num_blocks[0, 0]
    assert torch.equal(partial + complete, some.sum(1).int())
    for row in range(some.shape[0]):
        visited = {*mask.kv_indices[0, 0, row, : partial[row]].tolist()}
        visited |= {*mask.full_kv_indices[0, 0, row, : complete[row]].tolist()}
        assert visited == set(some[row].nonzero().flatten().tolist())
    # And backward, for each block of keys: the same blocks, transposed.
    partial, complete = mask.q_num_blocks[0, 0], mask.full_q_num_blocks[0, 0]
    for column in range(some.shape[1]):
        visited = {*mask.q_indices[0, 0, column, : partial[column]].tolist()}
        assert visited == set((some & ~full)[:, column].nonzero().flatten().tolist())
        visited = {*mask.full_q_indices[0, 0, column, : complete[column]].tolist()}
        assert visited == set(full[:, column].nonzero().flatten().tolist())


@pytest.mark.parametrize("name", PLANS)
def test_flex_attention_equals_dense_masked_attention_with_gradients(name, monkeypatch):
    """On a CPU torch refuses FlexAttention with gradients, for want of a kernel; its unfused form has them.

    Kernels, which skip blocks, are compared on a device (tests/gpu/check.py); what they skip is tested above.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    plan, queries, keys = PLANS[name]
    found, expected = ([x.clone().requires_grad_() for x in tensors(queries, keys)] for _ in range(2))
    outputs = flex.attend(*found, plan), dense(*expected, plan.mask(queries, keys))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    weight = torch.randn(outputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for output in outputs:
        (output * weight).sum().backward()
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["teacher forcing, whole blocks", "cached chunks"])
def test_a_compiled_kernel_follows_the_block_lists(name):
    """The unfused form asks `mask_mod` for every pair; a kernel skips blocks by the lists, so they are tested compiled."""
    if shutil.which("g++") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("torch.compile needs a C++ compiler")
    plan, queries, keys = PLANS[name]
    q, k, v = (x.float() for x in tensors(queries, keys))
    mask = flex.block_mask(plan, queries, keys, q.device)
    with torch.no_grad():
        found = flex._compiled()(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)
    torch.testing.assert_close(found, dense(q, k, v, plan.mask(queries, keys)), rtol=1e-4, atol=1e-5)


def test_flex_attention_takes_a_query_and_key_that_autocast_left_wider_than_the_value():
    plan, queries, keys = PLANS["teacher forcing"]
    q, k, v = (x.bfloat16() for x in tensors(queries, keys))
    assert torch.equal(flex.attend(q.float(), k.float(), v, plan), flex.attend(q, k, v, plan))


def test_block_masks_are_built_once_per_geometry():
    device = torch.device("cpu")
    assert flex.block_mask(teacher_forcing(12, 3, 2, 5), 120, 120, device) is flex.block_mask(
        teacher_forcing(12, 3, 2, 5), 120, 120, device
    )


def test_both_executors_give_one_velocity():
    model, case = backbone().eval(), inputs(frames=6)
    noisy = case.pop("latents")
    with torch.no_grad():
        velocities = []
        for executor in ("segments", "flex"):
            set_executor(model.transformer, executor)
            velocities.append(
                model.teacher_forced_velocity(noisy.flip(0), noisy, **case, chunk=3, max_prior_clean_chunks=5)
            )
    torch.testing.assert_close(*velocities, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="segments, flex"):
        set_executor(model.transformer, "dense")


def test_a_plan_of_another_length_is_refused():
    q, k, v = tensors(40, 40)
    with pytest.raises(ValueError, match="40 query tokens; the visibility plan covers 45"):
        attend(q, k, v, PLANS["chunk-causal"][0])


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


def test_activation_checkpointing_recomputes_with_the_same_visibility_and_second_times():
    gradients = []
    for checkpointing in (False, True):
        model, case = backbone(anyflow=True).train(), inputs(frames=6)
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()
        noisy = case.pop("latents")
        model.teacher_forced_velocity(
            noisy.flip(0), noisy, **case, r=case["timesteps"] / 2, chunk=3, max_prior_clean_chunks=5
        ).square().sum().backward()
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
