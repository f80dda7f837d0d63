"""FLOPs of an optimizer step: every forward and backward pass by its matrix products and attention. No torch.

A multiplication with an addition is two. The optimizer, norms, rotations and the encoders of text and video are left out. The model's
FLOPs are those of passes without recomputation: what a model FLOPs utilisation refers to.
"""

from __future__ import annotations

from dataclasses import dataclass

from solarwm_lib.estimate import visible
from solarwm_lib.estimate.workload import Workload


@dataclass(frozen=True)
class Work:
    """Calls of one network in an optimizer step, per clip. `pairs` of tokens attend to each other; calls may be a mean."""

    what: str
    role: str
    tokens: int
    pairs: int
    calls: float
    gradient: bool = False
    text_share: float = 1.0  # calls that compute the text's keys and values; a rollout keeps them


@dataclass(frozen=True)
class Flops:
    """Of one optimizer step on one process and on all; `model` without, `hardware` with recomputed activations."""

    model: float
    hardware: float
    model_total: float
    hardware_total: float


def works(workload: Workload) -> list[Work]:
    """The passes of an optimizer step per clip; of an outer step of Stage2 on average."""
    w, s = workload, workload.tokens_per_frame
    full = w.tokens + w.prompt_rows
    if w.stage == "stage0p5":
        return [Work("loss", "student", full, full**2, 1, gradient=True)]
    forced, pairs = 2 * w.tokens, visible.pairs(w.frames, w.chunk, w.prior_chunks, w.sink) * s * s
    pairs += forced * w.prompt_rows
    if w.stage == "stage1":
        found = [Work("loss", "student", forced, pairs, 1, gradient=True)]
        if w.objective == "anyflow_forward_map":
            found.append(Work("slope", "student", forced, pairs, 3 * w.moving_share))
        return [*found, Work("guidance", "student", forced, pairs, 1)] if w.guidance else found
    student = 1 / w.critic_ratio
    chunks = w.frames // w.chunk
    each = visible.rollout_pairs(w.frames, w.chunk, w.window) * s * s // chunks
    repeats = w.frames <= min(w.window, (w.prior_chunks + 1) * w.chunk)
    passes = (1 + student) * chunks * (w.denoising_steps + 1)
    found = [
        Work("rollout", "student", w.chunk * s, each, passes, text_share=(1 + student) / passes),
        Work("replay", "student", forced, pairs, student, gradient=True),
        Work("scores", "teacher", full, full**2, student * (2 if w.real_guidance else 1)),
        Work("scores", "critic", full, full**2, student * (2 if w.fake_guidance else 1)),
        Work("critic loss", "critic", full, full**2, 1, gradient=True),
    ]
    return found if repeats else [*found, Work("replay of the critic", "student", forced, pairs, 1)]


def forward(workload: Workload, work: Work) -> tuple[float, float]:
    """FLOPs of one call on one clip: (of matrices, of attention)."""
    w, net = workload, workload.network
    per_token = net.blocks * net.matrices + net.token_outside + w.adapter
    per_text_token = work.text_share * net.blocks * net.text_matrices
    matrices = 2 * (work.tokens * per_token + w.text_tokens * per_text_token)
    pairs = work.pairs + (work.tokens * w.text_tokens if net.cross_attention else 0)
    return float(matrices), float(4 * net.blocks * net.inner * pairs)


def flops(workload: Workload) -> Flops:
    """FLOPs of an optimizer step. Frozen weights need no gradient of their own: half of a backward pass' matrix products."""
    model = again = 0.0
    for work in works(workload):
        matrices, attention = forward(workload, work)
        once = matrices + attention
        backward = (matrices if workload.adapter else 2 * matrices) + 2 * attention
        passes = workload.kinds_per_micro_batch if workload.stage == "stage1" else 1
        model += work.calls * (once + (backward * passes if work.gradient else 0))
        again += work.calls * once * passes if work.gradient and workload.topology.checkpointing else 0
    world = workload.topology.world
    total, hardware = model * workload.global_batch, (model + again) * workload.global_batch
    return Flops(total / world, hardware / world, total, hardware)
