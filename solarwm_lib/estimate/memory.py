"""Memory of one process: what stays, and the moments of a step at which the rest is largest. No torch.

A step has few candidates for its peak: the end of a forward pass (all activations), the end of a backward pass (all gradients and
one block), and, in Stage2, the rollout with its cache. Each is a sum of named parts; the plan is what stays plus the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from solarwm_lib.estimate import activations
from solarwm_lib.estimate.activations import Pass
from solarwm_lib.estimate.workload import Workload

Parts = dict[str, int]


@dataclass(frozen=True)
class Plan:
    """Bytes by part on one process: `resident` all the time, `temporary` at the peak, which is `moment`."""

    resident: Mapping[str, int]
    temporary: Mapping[str, int]
    moment: str
    moments: Mapping[str, int]  # bytes beside `resident` at each of the moments considered

    @property
    def total(self) -> int:
        return sum(self.resident.values()) + sum(self.temporary.values())

    def parts(self) -> Parts:
        """All parts; a name stands in one of both only."""
        return {**self.resident, **self.temporary}


def plan(workload: Workload) -> Plan:
    """The memory of one process of `workload`."""
    candidates = {name: {k: v for k, v in parts.items() if v} for name, parts in _moments(workload).items()}
    sizes = {name: sum(parts.values()) for name, parts in candidates.items()}
    moment = max(sizes, key=lambda name: sizes[name])
    stays = {name: size for name, size in resident(workload).items() if size}
    return Plan(stays, candidates[moment], moment, sizes)


def _share(workload: Workload, parameters: int) -> int:
    return -(-parameters // workload.topology.shards)


def resident(workload: Workload) -> Parts:
    """What lies in memory between steps. LoRA is whole on every process and has float32 masters beside bfloat16 weights."""
    w = workload
    low = activations.element(w)
    own = w.adapter if w.adapter else _share(w, w.trainable)
    parts = {
        "weights": 4 * own + (low * w.adapter if w.adapter and w.lower else 0),
        "optimizer": 8 * own,
        "ema": 4 * own,
        "frozen base": low * _share(w, w.frozen) * (3 if w.stage == "stage2" else 1),  # of every role its own
    }
    if w.stage == "stage2":
        parts["critic weights"], parts["critic optimizer"] = parts["weights"], parts["optimizer"]
        if not w.adapter:
            whole = w.whole_teacher or w.topology.shards == 1
            parts["teacher"] = low * w.network.total if whole else 4 * _share(w, w.network.total)
        else:
            parts["teacher adapter"] = low * w.adapter
    if w.online:
        # The encoders run in float32, one clip at a time.
        parts["codec"] = 4 * (w.codec or 0)
        parts["text encoder"] = 4 * (w.text_encoder or 0)
    return parts


def gradients(workload: Workload, parameters: int | None = None) -> int:
    """Bytes of the gradients of one network, or of so many of its parameters."""
    if parameters is not None and not workload.adapter:
        return 4 * _share(workload, parameters)
    return 4 * (workload.adapter or _share(workload, workload.trainable))


def gradient_sets(workload: Workload) -> tuple[int, int]:
    """Sets of gradients on a process (when the last backward pass of a step begins, when it ends).

    AnyFlow keeps the gradients of diffusion samples and of the others apart, and goes backward twice over a micro-batch of both.
    """
    w = workload
    if w.topology.accumulation == 1:
        return (1, 2) if w.kinds_per_micro_batch > 1 else (0, 1)
    meet = w.kinds_per_micro_batch > 1 or w.topology.accumulation > 2
    return (w.kinds_per_process if meet else 1), w.kinds_per_process


def gathered(workload: Workload) -> int:
    """Bytes of whole weights and gradients of sharded blocks: the one that computes, the next one, and what is being reduced."""
    w, net, low = workload, workload.network, activations.element(workload)
    if w.topology.shards == 1:
        return 0
    block = net.per_block * (2 * low + (0 if w.adapter else low + 4))
    return block + low * net.outside


def weight_copies(workload: Workload, blocks: int) -> int:
    """Bytes of the bfloat16 copies of whole float32 weights that autocast makes for so many blocks and the layers around them."""
    w, net = workload, workload.network
    if not w.lower or w.topology.shards > 1 or w.adapter:
        return 0
    return 2 * (blocks * (net.matrices + net.text_matrices) + net.token_outside)


def inputs(workload: Workload) -> int:
    """Bytes of a micro-batch, its noise, targets and loss: half a dozen copies of the latents, and the prompts."""
    w = workload
    return 4 * w.batch * (6 * w.latent_values + w.input_values + 2 * w.text_tokens * w.network.text_width)


def cache(workload: Workload) -> int:
    """Bytes of a rollout's key-value cache over all layers: raw history, placed window, the text's keys and values."""
    w, net = workload, workload.network
    history, window = w.window - w.chunk, w.window
    tokens = (history + window) * w.tokens_per_frame
    each = 4 + activations.element(w)  # keys leave their norm in float32
    per_layer = w.batch * net.inner * (tokens + w.text_tokens) * each
    return net.blocks * per_layer // w.topology.sequence


def _training(workload: Workload, one: Pass) -> dict[str, Parts]:
    """Moments of one pass with gradient, each with what is there at most.

    At the first block, the last that goes backward, its own gradients and those of what lies before it do not exist yet.
    """
    w, net, checkpointing = workload, workload.network, workload.topology.checkpointing
    begun, finished = (sets * gradients(w) for sets in gradient_sets(w))
    growing = finished - begun
    missing = min(growing, gradients(w, net.per_block + net.outside)) if growing and not w.adapter else 0
    common = {"batch": inputs(w), "gathered blocks": gathered(w)}
    exchanged = 0
    if w.topology.sequence > 1:
        exchanged = 4 * activations.rows(w, one) * activations.element(w) * net.inner
    block, extra = activations.block(w, one), activations.backward_extra(w, one) + exchanged
    start, modulation = activations.before(w, one), activations.modulation(w, one)
    moments = {
        "end of forward": common
        | {
            "weight copies": weight_copies(w, 1 if checkpointing else net.blocks),
            "gradients": begun,
            "activations": activations.saved(w, one) + (block if checkpointing else 0),
            "backward temporaries": extra,
        },
        "first block, backward": common
        | {
            "weight copies": weight_copies(w, 1),
            "gradients": finished - missing,
            "activations": block + start + modulation * (2 if checkpointing else 1),
            "backward temporaries": extra,
        },
        "end of backward": common
        | {
            "weight copies": weight_copies(w, 0),
            "gradients": finished,
            "activations": start,
            "backward temporaries": 2 * modulation,
        },
    }
    if w.stage == "stage0p5" and checkpointing:
        # Autocast keeps the copies of a whole forward pass; Stage1 and Stage2 turn that off.
        moments["forward"] = common | {
            "weight copies": weight_copies(w, net.blocks),
            "gradients": begun,
            "activations": activations.saved(w, one),
        }
    return moments


def _moments(workload: Workload) -> dict[str, Parts]:
    w = workload
    full, forced = activations.bidirectional(w), activations.teacher_forced(w)
    if w.stage == "stage0p5":
        return _training(w, full)
    if w.stage == "stage1":
        return _training(w, forced)
    begun = gradient_sets(w)[0] * gradients(w)
    rollout = {
        "batch": inputs(w),
        "gathered blocks": gathered(w),
        "weight copies": weight_copies(w, 1),
        "cache": cache(w),
        "forward temporaries": activations.forward_extra(w, Pass(w.chunk * w.tokens_per_frame)),
        "gradients": begun,
    }
    student = {f"student, {name}": parts for name, parts in _training(w, forced).items()}
    critic = {f"critic, {name}": parts for name, parts in _training(w, full).items()}
    scores = {
        "batch": inputs(w),
        "gathered blocks": gathered(w),
        "weight copies": weight_copies(w, 1 if w.topology.checkpointing else w.network.blocks),
        "activations": activations.saved(w, forced),
        "forward temporaries": activations.forward_extra(w, full),
        "gradients": begun,
    }
    return {"rollout": rollout, "student, scores": scores, **student, **critic}
