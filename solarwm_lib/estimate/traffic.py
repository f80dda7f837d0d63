"""Bytes that one process moves in an optimizer step: through its memory, and to and from other processes. No torch.

Collectives count what a process sends in a ring; memory counts each weight and each kept activation once per use, a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from solarwm_lib.estimate import activations
from solarwm_lib.estimate.activations import Pass
from solarwm_lib.estimate.flops import works
from solarwm_lib.estimate.workload import Workload

UPDATE_BYTES = 40  # weight, gradient, both moments and average: read, and all but the gradient written


@dataclass(frozen=True)
class Traffic:
    """Bytes per process and optimizer step."""

    memory: int
    all_gather: int
    reduce_scatter: int
    all_reduce: int
    all_to_all: int

    @property
    def sent(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all


def traffic(workload: Workload) -> Traffic:
    """The traffic of one process."""
    w, net, t = workload, workload.network, workload.topology
    low, parts = activations.element(w), t.shards
    weights, trained = low * net.total, 4 * w.trainable
    others = (parts - 1) / parts
    peers = (t.sequence - 1) / t.sequence
    forwards = backwards = memory = exchanged = 0.0
    for work in works(w):
        one = Pass(work.tokens)
        calls = work.calls * t.accumulation
        again = calls if work.gradient and t.checkpointing else 0
        kept = net.blocks * activations.block(w, one)
        forwards += 0 if work.role == "teacher" and w.whole_teacher else calls
        backwards += calls if work.gradient else 0
        memory += (calls + again) * (weights + 2 * kept) + (
            calls * (2 * weights + 3 * kept) if work.gradient else 0
        )
        rows = activations.rows(w, one) * low * net.inner
        times = (calls + again) + (calls if work.gradient else 0)
        exchanged += times * net.blocks * 4 * rows * peers
    updates = 1 + 1 / w.critic_ratio if w.stage == "stage2" else 1.0
    memory += updates * UPDATE_BYTES * (w.adapter or -(-w.trainable // parts))
    replicas = max(1, t.world // parts)
    shared = trained if w.adapter or parts == 1 else trained / parts
    copies = t.world if w.adapter else replicas
    sharded = parts > 1 and not w.adapter
    reductions = (
        backwards if sharded else updates
    )  # whole gradients are averaged once, after all micro-batches
    return Traffic(
        memory=int(memory),
        all_gather=int((forwards + backwards) * weights * others),
        reduce_scatter=int(backwards * trained * others) if sharded else 0,
        all_reduce=int(reductions * 2 * shared * (copies - 1) / copies),
        all_to_all=int(exchanged),
    )
