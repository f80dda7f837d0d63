"""What saving and loading a checkpoint costs, beside torch.save and torch.distributed.checkpoint (DCP) with the same state.

The state is a learner's: parameters, average and two Adam slots, 64 MiB each. One process, one thread for torch; all ways take
turns in every round, and the figures are medians over rounds. Ours also hashes every byte, writes a marker and makes all of it
durable; DCP makes its files durable; torch.save neither. Loads read from the page cache and end in tensors that exist already.

    python tests/benchmarks/bench_save.py [ROUNDS]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from solarwm_lib.training import checkpoint, optim
from solarwm_lib.training.ema import Ema, EmaCadence
from solarwm_lib.training.learner import Learner
from solarwm_lib.training.saver import Saver
from solarwm_lib.training.setup import Run
from solarwm_lib.training.topology import BatchPlan, Topology

MIB = 2**20


def learner(mib: int = 64) -> Learner:
    """A learner of `mib` MiB of float32 parameters in the shapes of a transformer's blocks."""
    shapes = {"attention": (1024, 1024), "up": (1024, 512), "down": (512, 1024), "norm": (1024,)}
    blocks = -(-mib * MIB // 4 // sum(torch.Size(shape).numel() for shape in shapes.values()))
    parameters = {
        f"blocks.{index}.{name}.weight": torch.nn.Parameter(torch.randn(shape))
        for index in range(blocks)
        for name, shape in shapes.items()
    }
    optimizer = optim.adamw(
        parameters.values(), learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    return Learner(parameters, optimizer, Ema.of(parameters, EmaCadence(0.99)), lambda step: 1e-3, 1.0)


def saver(folder: Path, state: Learner) -> Saver:
    """The saver of a run that is nothing but its directory."""
    settings = SimpleNamespace(keep_rolling=1, asynchronous=True, keep_full=0, keep_full_steps=[])
    resolved: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=settings),
        route=SimpleNamespace(key="benchmark"),
        semantic_digest="",
        values={},
    )
    inputs: Any = SimpleNamespace(parents=[])
    run = Run(resolved, folder, Topology(), BatchPlan(1, 1, 1, 1), inputs, {})
    return Saver(run, state, None, [])


def seconds(operation: Callable[[], object]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def main(rounds: int) -> dict[str, Any]:
    """Return medians in seconds and their ratios."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    state = learner()
    tensors = state.tensors()
    flat = {
        f"{member}/{name}": t.detach()
        for member, part in tensors.members().items()
        for name, t in part.items()
    }
    targets = {
        member: {name: torch.zeros_like(t) for name, t in part.items()}
        for member, part in tensors.members().items()
    }
    flat_targets = {f"{member}/{name}": t for member, part in targets.items() for name, t in part.items()}
    times: dict[str, list[float]] = {
        key: [] for key in ("durable_save", "dcp_save", "blocked", "torch_save", "verified_load", "dcp_load")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, theirs = folder / "ours", folder / "dcp"
        rolling = saver(folder, state)
        for step in range(1, rounds + 2):
            shutil.rmtree(ours, ignore_errors=True)
            shutil.rmtree(theirs, ignore_errors=True)
            state.completed_steps, state.ema.updates = step, step  # type: ignore[union-attr]

            def save(step: int = step) -> None:
                checkpoint.save(ours, tensors, checkpoint.State(step, step, step, 0.0, 1), {"step": step}, [])

            def load() -> None:
                artifact = checkpoint.open_verified(ours)
                for member, part in targets.items():
                    checkpoint.load_into(checkpoint.files_of(artifact, member), part)

            ways = {
                "durable_save": save,
                "dcp_save": lambda: dcp.save(flat, checkpoint_id=theirs, no_dist=True),
                "torch_save": lambda: torch.save(flat, folder / "all.pt"),
                "verified_load": load,
                "dcp_load": lambda: dcp.load(flat_targets, checkpoint_id=theirs, no_dist=True),
            }
            if step % 2:  # whatever one way leaves to the disk meets the other in every second round
                ways = {
                    key: ways[key]
                    for key in ("dcp_save", "durable_save", "torch_save", "dcp_load", "verified_load")
                }
            measured = {}
            for key, operation in ways.items():
                os.sync()
                measured[key] = seconds(operation)
            measured["blocked"] = seconds(rolling.rolling)
            rolling.finish()
            if step > 1:  # the first round allocates what later ones reuse
                for key, value in measured.items():
                    times[key].append(value)
        rolling.close()
        equal = all(torch.equal(flat[key], value) for key, value in flat_targets.items())
    median = {key: statistics.median(values) for key, values in times.items()}
    return {
        "rounds": rounds,
        "state_mib": tensors.bytes() / MIB,
        "seconds": {key: round(value, 4) for key, value in median.items()},
        "loaded_equal": equal,
        "save_over_dcp": round(median["durable_save"] / median["dcp_save"], 3),
        "blocked_over_torch_save": round(median["blocked"] / median["torch_save"], 3),
        "load_over_dcp": round(median["verified_load"] / median["dcp_load"], 3),
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 7), indent=2))
