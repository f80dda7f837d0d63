"""What a CPU cannot show, in one prepared run of under ten minutes on one GPU of 141 GB: speed, memory and agreement.

    python tests/gpu/check.py [--device cuda|cpu] [--out FILE] [--budget SECONDS] [--part NAME ...]

Prints one JSON object of figures (docs/reference/gpu-check.md names them all) and writes it to FILE after every part, so that what
ended early loses nothing. Exits 1 if a check or a part fails or had no time left, after running the others. `--device cpu` runs the
same code without a GPU at tiny sizes.

Needs no network, and beside torch (with triton, on CUDA) these packages and what they require: diffusers, transformers, accelerate,
safetensors, numpy, pydantic, pyyaml, av, pillow, psutil, fsspec, ftfy, tqdm, tensorboard, matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Asked otherwise whether there is a GPU, the CUDA driver starts, and the forked parts could not use it any more.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch
from measure import REPO, Findings, read_findings, run_apart
from part_attention import equality, speed
from part_parity import parity
from part_rollout import rollout
from part_saving import saving
from part_step import step
from part_training import training

from solarwm_lib.runtime.files import write_atomic

PACKAGES = ("diffusers", "transformers", "accelerate", "safetensors", "numpy")


def environment(found: Findings) -> None:
    """What the figures are of."""
    if found.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
            "compute_capability": f"{properties.major}.{properties.minor}",
        }
        torch.zeros(1, device="cuda")
    else:
        gpu = dict.fromkeys(("gpu", "gpu_bytes", "driver", "compute_capability"))
    found.set(
        {
            "device": found.device.type,
            **gpu,
            "python": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{name: importlib.metadata.version(name) for name in PACKAGES},
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "commit": _first_line(["git", "-C", str(REPO), "rev-parse", "HEAD"]),
        }
    )


def _first_line(command: list[str]) -> str | None:
    """What a command says, None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


@dataclass(frozen=True)
class Part:
    """One part of the check and the seconds it may take."""

    run: Callable[[Findings], None]
    seconds: float


# In order of importance: what comes late goes without where time is short.
PARTS = {
    "environment": Part(environment, 40),
    "step": Part(step, 130),
    "attention": Part(speed, 140),
    "parity": Part(parity, 50),
    "rollout": Part(rollout, 90),
    "saving": Part(saving, 90),
    "executors": Part(equality, 60),
    "training": Part(training, 240),
}
SHORTEST = 5.0  # seconds; with less left a part is not begun


class Report:
    """The parts with what they found; written to `out` whenever something changes."""

    def __init__(self, device: str, out: Path | None) -> None:
        self.values: dict[str, Any] = {"device": device, "seconds": 0.0, "ok": False, "parts": {}}
        self.out, self.started = out, time.monotonic()

    @property
    def ok(self) -> bool:
        """Whether every part ended well and every check of it passed."""
        parts = self.values["parts"].values()
        return bool(parts) and all(p["status"] == "ok" and all(p["checks"].values()) for p in parts)

    def put(self, name: str, status: str, seconds: float, found: dict[str, Any], error: str | None) -> None:
        """Replace what is known of part `name`."""
        self.values["parts"][name] = {"status": status, "seconds": round(seconds, 2), "error": error, **found}
        self.values |= {"seconds": round(time.monotonic() - self.started, 2), "ok": self.ok}
        if self.out is not None:
            write_atomic(self.out, self.text() + "\n")

    def text(self) -> str:
        return json.dumps(self.values, indent=2)


def run_part(report: Report, name: str, limit: float, method: str, folder: Path) -> bool:
    """Run part `name` for at most `limit` seconds and put it into `report`; return whether it ended by itself and without error."""
    device, path, started = torch.device(report.values["device"]), folder / f"{name}.json", time.monotonic()
    path.unlink(missing_ok=True)
    found = Findings(path, device, method)
    last = ""

    def tick() -> None:
        nonlocal last
        text = path.read_text() if path.exists() else "{}"
        if text != last:
            last = text
            report.put(name, "running", time.monotonic() - started, read_findings(path), None)

    tick()
    error = run_apart(method, path, limit, PARTS[name].run, found, tick=tick)
    status = "ok" if error is None else "failed"
    report.put(name, status, time.monotonic() - started, read_findings(path), error)
    print(f"{name}: {error or 'ok'} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True)
    return error is None


def run_all(report: Report, names: list[str], budget: float) -> None:
    """Run the parts in order while there is time; where CUDA does not survive a fork, in fresh processes."""
    method, end = "fork", report.started + budget
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            left = end - time.monotonic()
            if left < SHORTEST:
                error = f"not begun: {left:.0f} s left of the budget of {budget:.0f} s"
                report.put(name, "skipped", 0.0, {"figures": {}, "checks": {}}, error)
                continue
            limit = min(left, PARTS[name].seconds)
            well = run_part(report, name, limit, method, Path(folder))
            failed = report.values["parts"][name]["error"]
            if number == 0 and not well and "fork" in failed:
                method = "spawn"
                run_part(report, name, limit, method, Path(folder))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write the figures here too, after every part")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all parts (default: 540)")
    parser.add_argument(
        "--part", action="append", choices=(*PARTS,), help="only these parts; give it again for more"
    )
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; use --device cpu to run the same code without one")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # an ordinary end, which takes the running part along
    report = Report(arguments.device, arguments.out)
    run_all(report, [name for name in PARTS if name in (arguments.part or PARTS)], arguments.budget)
    print(report.text())
    return 0 if report.ok else 1


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # an ordinary end, which takes the running part along
    raise SystemExit(main())
