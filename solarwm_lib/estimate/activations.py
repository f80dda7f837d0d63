"""Bytes that a forward pass leaves for its backward pass, in closed form.

Counted from the tensors that autograd keeps in diffusers' blocks with this project's attention (`estimate.md` names them): per token
of a Wan block 25 rows of the width and 2 of the FFN, and the 6 modulation rows that the time embedding gives every token. In
bfloat16 autocast 14 of the 25 and the modulation stay float32. What a backend fuses (RMS norm on CUDA) makes the real number
smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

from solarwm_lib.estimate import visible
from solarwm_lib.estimate.workload import Workload


@dataclass(frozen=True)
class Pass:
    """One forward pass of one network: tokens per clip before sequence parallelism, and key frames that attention copies."""

    tokens: int
    copied_keys: int = 0  # tokens, by teacher forcing


def bidirectional(workload: Workload) -> Pass:
    return Pass(workload.tokens + workload.prompt_rows)


def teacher_forced(workload: Workload) -> Pass:
    w = workload
    copied = visible.copied(w.frames, w.chunk, w.prior_chunks, w.sink)
    return Pass(2 * w.tokens + w.prompt_rows, copied * w.tokens_per_frame)


def element(workload: Workload) -> int:
    """Bytes of a number in the arithmetic of the run."""
    return 2 if workload.lower else 4


def rows(workload: Workload, one: Pass) -> int:
    """Tokens of a micro-batch on one process."""
    return -(-workload.batch * one.tokens // workload.topology.sequence)


def block(workload: Workload, one: Pass) -> int:
    """Bytes that one block keeps, without copies of weights."""
    w, net, low = workload, workload.network, element(workload)
    n, d, text = rows(w, one), net.width, w.batch * w.text_tokens
    if w.family.startswith("wan22_"):
        wide, narrow = (14, 11) if w.lower else (0, 25)
        per_token = 4 * (wide + net.modulation) * d + low * (narrow * d + 2 * net.ffn)
        statistics = 4 * (9 + 2 * net.heads)
        copies = 2 * low * d * w.batch * one.copied_keys // w.topology.sequence
        return n * (per_token + statistics) + copies + text * d * (12 if w.lower else 16)
    rank = w.adapter // net.adapter(1) if w.adapter else 0
    if net.cross_attention:
        return low * (n * ((25 + net.modulation) * d + 2 * net.ffn + 10 * rank) + 4 * text * d)
    copies = 2 * low * net.inner * w.batch * one.copied_keys // w.topology.sequence
    return low * n * (15 * d + 8 * net.inner + 4 * net.ffn + 6 * rank) + copies


def entry(workload: Workload, one: Pass) -> int:
    """Bytes that an activation-checkpointed block keeps: its input."""
    return rows(workload, one) * element(workload) * workload.network.width


def modulation(workload: Workload, one: Pass) -> int:
    """Bytes of the time embedding's rows for all blocks: alive in every forward, and in a checkpointed backward."""
    return rows(workload, one) * element(workload) * workload.network.modulation * workload.network.width


def before(workload: Workload, one: Pass) -> int:
    """Bytes kept by what lies before the blocks: time embedding, first layer, rotary table."""
    w, net, n = workload, workload.network, rows(workload, one)
    per_token = (2 * (256 + 3 * net.width) + 4 * net.width) if w.lower else 4 * (256 + 4 * net.width)
    values = 4 * w.input_values * w.batch * one.tokens // w.tokens // w.topology.sequence
    return n * (per_token + 4 * net.inner // net.heads) + values


def after(workload: Workload, one: Pass) -> int:
    """Bytes kept by what follows the blocks: last norm and layer, prediction."""
    w = workload
    values = 4 * w.latent_values * w.batch * one.tokens // w.tokens // w.topology.sequence
    return rows(w, one) * (14 if w.lower else 16) * w.network.width + values


def saved(workload: Workload, one: Pass) -> int:
    """Bytes kept at the end of a forward pass with gradient."""
    checkpointing = workload.topology.checkpointing
    per_block = entry(workload, one) if checkpointing else block(workload, one)
    kept = modulation(workload, one) if checkpointing else 0
    return workload.network.blocks * per_block + kept + before(workload, one) + after(workload, one)


def backward_extra(workload: Workload, one: Pass) -> int:
    """Bytes that come while the last layers of a block go backward and all it kept is still there: the FFN's gradients."""
    net = workload.network
    return rows(workload, one) * 4 * (3 * net.width + net.ffn)


def forward_extra(workload: Workload, one: Pass) -> int:
    """Bytes that come and go while a block runs without gradient."""
    net = workload.network
    per_token = (4 + element(workload)) * net.modulation * net.width + element(workload) * (
        4 * net.width + 2 * net.ffn
    )
    return rows(workload, one) * per_token
