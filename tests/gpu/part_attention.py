"""Both executors of visibility plans: time and arithmetic rate at the size of a Wan 5B block, and equality in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from measure import Findings, median_seconds, recipe, relative_error
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention

from solarwm_lib.backbones import flex
from solarwm_lib.backbones.attention import attend
from solarwm_lib.backbones.visibility import BIDIRECTIONAL, VisibilityPlan, teacher_forcing
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.geometry import geometry

# Float32 on CUDA multiplies with other summation orders (and TF32 is off by default): 1e-4 of the output's scale.
FLOAT32_TOLERANCE = 1e-4
# bfloat16 keeps 8 bits: products of softmax weights and values stay within a few percent of the largest element.
BFLOAT16_TOLERANCE = 0.05
DENSE_TOKENS = 128  # per latent frame: a dense mask over `[clean | noisy]` then takes 29 MB, at the released 405 it takes 289 MB

Attention = Callable[[Tensor, Tensor, Tensor, VisibilityPlan], Tensor]


@dataclass(frozen=True)
class Layout:
    """`frames` latent frames in chunks, with the attention heads of one block."""

    frames: int
    chunk: int
    prior: int
    tokens: int
    heads: int
    width: int

    def plans(self, tokens: int) -> dict[str, tuple[int, VisibilityPlan]]:
        """Name -> (length in tokens, plan) of `[clean | noisy]` and of a clip in which every frame sees all."""
        forced = teacher_forcing(self.frames, self.chunk, self.prior, tokens)
        return {
            "teacher_forcing": (2 * self.frames * tokens, forced),
            "bidirectional": (self.frames * tokens, BIDIRECTIONAL),
        }


def layout(full: bool) -> Layout:
    """The released layout (81 frames at 480x864), or a few tokens."""
    if not full:
        return Layout(frames=6, chunk=2, prior=1, tokens=7, heads=2, width=16)
    config = recipe("train_stage1_tf_fm_81f", True).config
    architecture = load_architecture(config.model.architecture)
    transformer, causal, data = architecture["transformer"], config.model.causal, config.data
    size = geometry(config.model.family, architecture, data.pixel_frames, data.height, data.width)
    return Layout(
        size.latent_frames,
        causal.chunk_latent_frames,
        causal.max_prior_clean_chunks,
        size.tokens_per_latent_frame,
        transformer["num_attention_heads"],
        transformer["attention_head_dim"],
    )


def visible_pairs(plan: VisibilityPlan, length: int) -> int:
    """(query, key) pairs that `plan` lets see each other among `length` tokens."""
    if not plan.segments:
        return length**2
    return sum(s.query.length * sum(span.length for span in s.keys) for s in plan.segments)


def flops(plan: VisibilityPlan, length: int, layout: Layout, *, backward: bool) -> int:
    """Multiplications and additions on visible pairs: two products forward, four more backward; no recomputation counted."""
    return (12 if backward else 4) * visible_pairs(plan, length) * layout.heads * layout.width


@contextmanager
def gradients_of_flex(device: torch.device) -> Iterator[None]:
    """Without a kernel for a CPU torch refuses FlexAttention with gradients there; its unfused form has them."""
    kept = flex_attention._validate_device
    if device.type == "cpu":
        flex_attention._validate_device = lambda *tensors: None
    try:
        yield
    finally:
        flex_attention._validate_device = kept


def dense(mask: Tensor) -> Attention:
    """Attention over every pair with hidden ones masked, whatever the plan: what both executors are to be better than."""

    def run(query: Tensor, key: Tensor, value: Tensor, plan: VisibilityPlan) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return run


def tensors(layout: Layout, length: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and a weight of the output, `[1,L,N,D]`."""
    torch.manual_seed(0)
    shape = (1, length, layout.heads, layout.width)
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(4)]


def with_gradients(executor: Attention, inputs: list[Tensor], plan: VisibilityPlan) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    query, key, value, weight = inputs
    output = executor(query, key, value, plan)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), weight.detach())]


def timed(
    executor: Attention, layout: Layout, length: int, plan: VisibilityPlan, device: torch.device
) -> tuple[float, float]:
    """Median seconds forward, and forward with backward; bfloat16 on CUDA."""
    dtype, repetitions = (torch.bfloat16, 10) if device.type == "cuda" else (torch.float32, 1)
    inputs = tensors(layout, length, device, dtype)

    def forward() -> None:
        with torch.no_grad():
            executor(inputs[0], inputs[1], inputs[2], plan)

    return (
        median_seconds(device, forward, repetitions),
        median_seconds(device, lambda: with_gradients(executor, inputs, plan), repetitions),
    )


def speed(found: Findings) -> None:
    """Time both executors at the full layout, then all three ways at a length at which the dense mask is small."""
    device = found.device
    size = layout(found.is_cuda)
    found.set({"tokens_per_frame": size.tokens, "heads": size.heads, "head_width": size.width})
    executors: dict[str, Attention] = {"segments": attend, "flex": flex.attend}
    with gradients_of_flex(device):
        for name, (length, plan) in size.plans(size.tokens).items():
            times = {}
            for kind, executor in executors.items():
                times[kind] = timed(executor, size, length, plan, device)
                for step, value in zip(("forward", "forward_backward"), times[kind], strict=True):
                    rate = flops(plan, length, size, backward=step != "forward") / value / 1e12
                    key = f"{name}_{kind}_{step}"
                    found.set({f"{key}_ms": 1e3 * value, f"{key}_tflops": rate})
            ratios = [a / b for a, b in zip(times["segments"], times["flex"], strict=True)]
            found.set(
                {
                    f"{name}_segments_over_flex_forward": ratios[0],
                    f"{name}_segments_over_flex_forward_backward": ratios[1],
                }
            )
        tokens = min(DENSE_TOKENS, size.tokens)
        length, plan = size.plans(tokens)["teacher_forcing"]
        mask = plan.mask(length).to(device)
        times = {
            kind: timed(executor, size, length, plan, device)
            for kind, executor in {**executors, "dense": dense(mask)}.items()
        }
    found.set({"dense_tokens_per_frame": tokens, "dense_forward_backward_ms": 1e3 * times["dense"][1]})
    for kind in executors:
        found.set(
            {
                f"dense_over_{kind}_forward": times["dense"][0] / times[kind][0],
                f"dense_over_{kind}_forward_backward": times["dense"][1] / times[kind][1],
            }
        )


def equality(found: Findings) -> None:
    """Output and gradients of both executors against segments in float32, at the full layout."""
    device, size = found.device, layout(found.is_cuda)
    length, plan = size.plans(size.tokens)["teacher_forcing"]
    inputs = tensors(size, length, device, torch.float32)
    reference = with_gradients(attend, inputs, plan)
    bounds = {torch.bfloat16: BFLOAT16_TOLERANCE, torch.float32: FLOAT32_TOLERANCE}
    with gradients_of_flex(device):
        for dtype, tolerance in bounds.items():
            name = str(dtype).removeprefix("torch.")
            cast = [x.detach().to(dtype).requires_grad_() for x in inputs]
            for kind, executor in (("segments", attend), ("flex", flex.attend)):
                results = with_gradients(executor, cast, plan)
                error = max(relative_error(a, b) for a, b in zip(results, reference, strict=True))
                found.set({f"{kind}_{name}_error": error})
                found.check(f"{kind}_{name}", error <= tolerance)
