"""Runs that are only operated: launch records by the real writer, and real processes that beat like a rank."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tinyworld import TinyWorld

from solarwm_lib.runtime.launch import Attempt
from solarwm_lib.training.topology import from_environment

ROOT = Path(__file__).parents[2]
# A rank without a network: it beats, and ends with 75 when asked to, unless it is stubborn.
RANK = """
import sys, time
from pathlib import Path
from solarwm_lib.runtime.process import Heartbeat, StopRequest

run_dir, rank, manner = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
heartbeat = Heartbeat(run_dir, rank)
with StopRequest() as stop:
    while manner == "stubborn" or not stop.requested:
        heartbeat.beat("forward_backward", 3)
        (run_dir / f"{rank}.ready").touch()
        time.sleep(0.02)
sys.exit(75)
"""


def begin(world: TinyWorld, run_dir: Path, **changes: object) -> Attempt:
    """Bind a run directory and write the records of a first or further attempt, as `solarwm train` does."""
    resolved = world.resolve(run_dir, **changes)
    return Attempt.begin("train", resolved, run_dir, from_environment({}, 1), None)


def start_rank(run_dir: Path, rank: int = 0, manner: str = "obedient") -> subprocess.Popen:
    """Start a process that beats as `rank` of the run and wait for its first beat."""
    ready = run_dir / f"{rank}.ready"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-c", RANK, str(run_dir), str(rank), manner], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    return process


def end(process: subprocess.Popen) -> None:
    """Kill one's own process and reap it."""
    process.kill()
    process.wait()


def edit_heartbeat(run_dir: Path, rank: int, **changes: object) -> None:
    """Rewrite fields of a heartbeat whose process no longer beats."""
    path = run_dir / "heartbeats" / f"rank-{rank:05d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
