"""What the caller of several processes learns: the exit code of the worker that failed first, not torchrun's 1."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
if sys.argv[2] != "wait":
    sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
time.sleep(120)
"""


def start(folder: Path, what: str) -> subprocess.Popen:
    (folder / "worker.py").write_text(WORKER)
    words = ["--standalone", "--nproc-per-node=2", str(folder / "worker.py"), str(folder), what]
    command = [sys.executable, "-m", "solarwm_lib.runtime.torchrun", *words]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 5, 75])
def test_the_exit_code_is_the_failed_worker_s(tmp_path, code):
    process = start(tmp_path, str(code))
    _, text = process.communicate(timeout=120)
    assert process.returncode == code, text


def test_a_stop_signal_to_the_launcher_ends_in_75(tmp_path):
    process = start(tmp_path, "wait")
    deadline = time.monotonic() + 120
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 75, text
