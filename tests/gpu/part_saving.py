"""How long training stands still for a save of a state of a few GB, beside `torch.save` of the same state.

Both ways of the trainer's own `Saver`: asynchronous (a copy to host memory, then a thread writes) and at once. Ours hashes and makes
durable what it writes, `torch.save` neither. Written to the folder for temporary files.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import REPO, Findings, wait

from solarwm_lib.training import checkpoint

sys.path.insert(0, str(REPO / "tests/benchmarks"))
from bench_save import learner, saver

MIB = 2**20
PARAMETER_MIB = {True: 1024, False: 16}  # the state is four times as large: weights, average, two slots
COPIES = 3  # two saves side by side, and what the disk should keep free


def saving(found: Findings) -> None:
    """Save three steps asynchronously, publish one, and write it by torch; stop before anything is written if the disk is too small."""
    size = PARAMETER_MIB[found.is_cuda]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free, needed = shutil.disk_usage(folder).free, COPIES * 4 * size * MIB
        found.set({"free_bytes": free})
        if free < needed:
            raise OSError(
                f"{folder}: {needed} bytes needed for {COPIES} copies of the state, {free} are free"
            )
        with torch.device(found.device):
            state = learner(size)
        found.set({"state_bytes": state.tensors().bytes()})
        rolling = saver(folder, state)
        blocked, written = [], []
        for step in range(1, 4):
            _at(state, step)
            blocked.append(_seconds(found, rolling.rolling))
            written.append(_seconds(found, rolling.finish))
        found.set(
            {
                "asynchronous_first_blocked_seconds": blocked[0],  # allocates the host buffers
                "asynchronous_blocked_seconds": min(blocked[1:]),
                "asynchronous_written_seconds": min(
                    a + b for a, b in zip(blocked[1:], written[1:], strict=True)
                ),
            }
        )
        _at(state, 4)
        target = folder / checkpoint.directory_name(4)
        synchronous = _seconds(found, lambda: rolling.publish(target))
        saved = checkpoint.open_verified(target, deep=False)
        found.check("saves_are_complete", saved.bytes >= state.tensors().bytes())
        rolling.close()
        shutil.rmtree(target)
        tensors = {
            f"{member}/{key}": tensor.detach()
            for member, part in state.tensors().members().items()
            for key, tensor in part.items()
        }
        plain = _seconds(found, lambda: torch.save(tensors, folder / "all.pt"))
        found.set(
            {
                "synchronous_seconds": synchronous,
                "torch_save_seconds": plain,
                "blocked_over_torch_save": min(blocked[1:]) / plain,
                "synchronous_over_torch_save": synchronous / plain,
            }
        )


def _at(state: Any, step: int) -> None:
    """Let `state` claim to be that of `step`."""
    state.completed_steps, state.ema.updates = step, step


def _seconds(found: Findings, operation: Callable[[], object]) -> float:
    wait(found.device)
    started = time.perf_counter()
    operation()
    wait(found.device)
    return time.perf_counter() - started
