"""What every part of the device check measures with: seconds, peak memory, figures that outlive a time-out, isolation.

Parts run in forked processes, so that each has the whole device, its time can be ended, and a fault that poisons the device ends one
part only. The parent never touches the device: CUDA does not survive a fork.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from solarwm_lib.config.load import Resolved, load
from solarwm_lib.data.camera import fixed_intrinsics
from solarwm_lib.runtime.files import write_atomic
from solarwm_lib.runtime.process import memory_bytes

REPO = Path(__file__).parents[2]
RECIPES = REPO / "config/recipes/wan22_ti2v_5b"
CAMERA = SimpleNamespace(camera_attention_mode="fused_prope", camera_translation_transform="linear")

T = TypeVar("T")


@dataclass
class Findings:
    """Figures and checks of one part, written to `path` at every change: what was found before a time-out stays."""

    path: Path
    device: torch.device
    method: str = "fork"  # how further processes start
    figures: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def set(self, figures: Mapping[str, Any]) -> None:
        """Add figures; floats are kept to six significant digits."""
        self.figures |= {key: _rounded(value) for key, value in figures.items()}
        self._write()

    def check(self, name: str, passed: bool) -> None:
        self.checks[name] = bool(passed)
        self._write()

    def _write(self) -> None:
        write_atomic(self.path, json.dumps({"figures": self.figures, "checks": self.checks}))


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_findings(path: Path) -> dict[str, Any]:
    """What a part has written so far."""
    return json.loads(path.read_text()) if path.exists() else {"figures": {}, "checks": {}}


def _contained(function: Callable[..., None], path: Path, leads: bool, arguments: Sequence[Any]) -> None:
    """Run `function`, as the leader of a process group if it `leads`; an exception is left beside `path`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if leads:
        os.setpgid(0, 0)
    try:
        function(*arguments)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        traceback.print_exc()
        Path(f"{path}.error").write_text(f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000])
        os._exit(1)


def run_apart(
    method: str,
    path: Path,
    seconds: float,
    function: Callable[..., None],
    *arguments: Any,
    tick: Callable[[], None] = lambda: None,
    leads: bool = True,
) -> str | None:
    """Run `function(*arguments)` in a process of its own for at most `seconds`; return why it failed, None if it did not.

    `path` is where its error text goes (with a suffix); `tick` is called about twice a second. A process that `leads` ends with all
    those it has started, whatever ends this call.
    """
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_contained, args=(function, path, leads, arguments))
    left = Path(f"{path}.error")
    left.unlink(missing_ok=True)
    process.start()
    deadline = time.monotonic() + seconds
    try:
        while process.is_alive() and time.monotonic() < deadline:
            process.join(min(0.5, max(0.0, deadline - time.monotonic())))
            tick()
        timed_out = process.is_alive()
    finally:
        if process.is_alive():
            _end(process.pid, leads)
        process.join()
    if timed_out:
        return f"TimeoutError: not done within {seconds:.0f} s"
    if process.exitcode == 0:
        return None
    return left.read_text() if left.exists() else f"process ended with {process.exitcode}"


def _end(process: int, leads: bool) -> None:
    try:
        (os.killpg if leads else os.kill)(process, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(process, signal.SIGKILL)  # has not begun to lead


def wait(device: torch.device) -> None:
    """Return when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def elapsed(device: torch.device, operation: Callable[[], T]) -> tuple[float, T]:
    """Seconds of one run of `operation`, between CUDA events or by the wall clock, and what it returned."""
    if device.type != "cuda":
        started = time.perf_counter()
        result = operation()
        return time.perf_counter() - started, result
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = operation()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, result


def median_seconds(
    device: torch.device, operation: Callable[[], object], repetitions: int, warm_up: int = 2
) -> float:
    """Median seconds of `operation` over `repetitions`, after `warm_up` runs (which compile and fill caches)."""
    for _ in range(warm_up):
        operation()
    wait(device)
    return statistics.median(elapsed(device, operation)[0] for _ in range(repetitions))


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak again; a CPU process has one peak for its whole life."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int:
    """Peak of the tensors on a GPU since `reset_peak`; on a CPU that of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return memory_bytes()


def cameras(batch: int, frames: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """World-to-camera `[B,T,4,4]` of a camera that drifts from the first frame, and intrinsics `[B,3,3]`."""
    w2c = torch.eye(4).repeat(batch, frames, 1, 1)
    w2c[..., :3, 3] = 0.05 * torch.arange(frames)[None, :, None]
    return w2c.to(device), torch.from_numpy(fixed_intrinsics()).expand(batch, 3, 3).to(device)


def recipe(name: str, full: bool, *scales: str, sets: Sequence[str] = ()) -> Resolved:
    """The released recipe `name`, at the size of the tests unless `full`."""
    overlays = [] if full else [REPO / f"config/scales/{scale}.yaml" for scale in scales]
    return load(RECIPES / f"{name}.yaml", overlays, sets)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected element."""
    expected = expected.float()
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()
