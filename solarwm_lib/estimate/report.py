"""The estimate of a run as numbers (`facts`) and as text (`text`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from solarwm_lib.estimate import sizes
from solarwm_lib.estimate.flops import Flops, flops
from solarwm_lib.estimate.hardware import GIB, Gpu
from solarwm_lib.estimate.memory import plan
from solarwm_lib.estimate.topology import describe, smallest
from solarwm_lib.estimate.traffic import traffic
from solarwm_lib.estimate.workload import Workload

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved


def hours(found: Flops, workload: Workload, gpu: Gpu, mfu: float) -> float:
    """GPU hours of the whole run at model FLOPs utilisation `mfu`."""
    seconds = found.model / (gpu.peak(workload.lower) * mfu)
    return seconds * workload.max_steps * workload.topology.world / 3600


def facts(resolved: Resolved, workload: Workload, gpu: Gpu, mfu: float) -> dict[str, Any]:
    """Everything the command prints, as JSON values: bytes, FLOPs, counts, hours."""
    w, memory, work, moved = workload, plan(workload), flops(workload), traffic(workload)
    small = smallest(w, gpu, w.topology.local_world if w.topology.world > 1 else 8)
    used = hours(work, w, gpu, mfu)
    return {
        "name": resolved.config.name,
        "route": resolved.route.key,
        "trains_here": resolved.route.runs,
        "topology": _topology(w),
        "global_batch": w.global_batch,
        "steps": w.max_steps,
        "tokens_per_clip": w.tokens,
        "parameters": sizes.parameters(w),
        "memory": {
            "parts": memory.parts(),
            "total": memory.total,
            "moment": memory.moment,
            "moments": {k: v + sum(memory.resident.values()) for k, v in memory.moments.items()},
            "host": sizes.host(resolved, w),
        },
        "flops_per_step": {
            "model_per_gpu": work.model,
            "hardware_per_gpu": work.hardware,
            "model_total": work.model_total,
            "hardware_total": work.hardware_total,
        },
        "bytes_per_step_and_gpu": {
            "memory": moved.memory,
            "all_gather": moved.all_gather,
            "reduce_scatter": moved.reduce_scatter,
            "all_reduce": moved.all_reduce,
            "all_to_all": moved.all_to_all,
        },
        "checkpoint_bytes": sizes.checkpoint(w),
        "gpu": {"name": gpu.name, "memory": gpu.memory, "usable": gpu.usable, "peak": gpu.peak(w.lower)},
        "fits": memory.total <= gpu.usable,
        "smallest": None
        if small is None
        else {**_topology(small), "memory": plan(small).total, "description": describe(small.topology)},
        "assumptions": {"mfu": mfu},
        "gpu_hours": used,
        "wall_hours": used / w.topology.world,
        "seconds_per_step": used * 3600 / w.topology.world / w.max_steps,
    }


def _topology(workload: Workload) -> dict[str, Any]:
    t = workload.topology
    return {
        "world_size": t.world,
        "gpus_per_node": t.local_world,
        "strategy": t.strategy,
        "sequence_parallel_size": t.sequence,
        "micro_batch_size": t.micro_batch,
        "gradient_accumulation_steps": t.accumulation,
        "activation_checkpointing": t.checkpointing,
        "description": describe(t),
    }


def size(value: float) -> str:
    """`1.50 GiB`, `12.0 MiB`: three significant digits or more."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value / 1024:,.1f} KiB"


def text(found: Mapping[str, Any]) -> str:
    """The estimate for people, as aligned lines."""
    lines = [f"{found['name']}  ({found['route']})", f"  {found['topology']['description']}"]
    lines += [f"  global batch {found['global_batch']}, {found['steps']:,} steps, {found['tokens_per_clip']:,} tokens per clip", ""]  # fmt: skip
    if not found["trains_here"]:
        lines += ["This version checks this route and does not train it: the numbers have no measurement behind them.", ""]  # fmt: skip
    for title, rows in _tables(found):
        lines += [title, *_aligned(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _tables(found: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    counts = found["parameters"]
    yield "Parameters", [(role, "unknown" if n is None else f"{n:,}") for role, n in counts.items()]
    memory, gpu = found["memory"], found["gpu"]
    rows = [(name, size(value)) for name, value in memory["parts"].items()]
    verdict = "fits" if found["fits"] else "does not fit"
    rows += [("total", size(memory["total"])), (gpu["name"], f"{size(gpu['usable'])} usable of {size(gpu['memory'])}: {verdict}")]  # fmt: skip
    yield f"Memory of a GPU at the peak of a step ({memory['moment']})", rows
    yield "Host memory of a process", [(name, size(value)) for name, value in memory["host"].items()]
    work, moved = found["flops_per_step"], found["bytes_per_step_and_gpu"]
    yield (
        "An optimizer step",
        [
            (
                "FLOPs per GPU",
                f"{work['model_per_gpu']:.3e} ({work['hardware_per_gpu']:.3e} with recomputation)",
            ),
            (
                "FLOPs of all GPUs",
                f"{work['model_total']:.3e} ({work['hardware_total']:.3e} with recomputation)",
            ),
            *((f"{name.replace('_', '-')} bytes per GPU", size(value)) for name, value in moved.items()),
        ],
    )
    share = found["assumptions"]["mfu"]
    peak = f"{gpu['peak'] / 1e12:g} TFLOP/s of {gpu['name']}"
    yield (
        "The run",
        [
            ("checkpoint", size(found["checkpoint_bytes"])),
            ("step", f"{found['seconds_per_step']:,.2f} s (assumed: {share:.0%} of {peak})"),
            ("whole run", f"{found['gpu_hours']:,.0f} GPU hours, {found['wall_hours']:,.1f} h"),
        ],
    )
    least = found["smallest"]
    text = "none up to 1024 GPUs" if least is None else f"{least['description']}: {size(least['memory'])}"
    yield f"Smallest topology of {gpu['name']} at this global batch", [("", text)]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" if width else f"  {value}" for name, value in rows]
