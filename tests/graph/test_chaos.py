"""A run of two processes whose parts are killed at random, again and again, ends as if nobody had touched it.

`SOLARWM_KILLS` is the number of kills (30 for the full trial), `SOLARWM_CHAOS_SEED` chooses them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from folders import SMOKE, Folder

from solarwm_lib import artifacts

KILLS = int(os.environ.get("SOLARWM_KILLS", "4"))
SEED = int(os.environ.get("SOLARWM_CHAOS_SEED", "0"))
EVERY = 8
STEPS = EVERY * (2 + (KILLS + 1) // 2)
BOUND_SECONDS = 60
# What is hit, and what it is doing at that moment; `time` is any moment.
VICTIMS = ("rank", "torchrun", "snakemake", "term torchrun", "term snakemake", "all")
MOMENTS = ("save", "load", "validate", "forward_backward", "build", "verify", "publish", "time")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Process:
    """A live process of the trial."""

    pid: int
    words: tuple[str, ...]
    is_rank: bool

    def runs(self, *words: str) -> bool:
        return all(word in self.words for word in words)


def processes(tag: str) -> list[Process]:
    """Every live process that inherited `tag`."""
    return list(_processes(tag))


def _processes(tag: str) -> Iterator[Process]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                environment = (path / "environ").read_bytes().split(b"\0")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if f"SOLARWM_CHAOS={tag}".encode() in environment and state not in "ZX":
                    words = (path / "cmdline").read_text().split("\0")
                    is_rank = any(item.startswith(b"RANK=") for item in environment)
                    yield Process(int(path.name), tuple(words), is_rank)


def values() -> dict:
    found = {**SMOKE, "inference": {}, "comparisons": {}}
    found["runs"] = {
        "long": {
            **SMOKE["runs"]["smoke"],
            "steps": STEPS,
            "checkpoint_every": EVERY,
            "validate_steps": [EVERY, STEPS],
            "processes": 2,
            "set": {"train.micro_batch_size": 1, "checkpoint.rolling_save_every_steps": 1},
        }
    }
    return found


def snakemake(folder: Folder, tag: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "2", "long"],
        cwd=folder.path,
        env={**os.environ, "PYTHONPATH": str(folder.path), "OMP_NUM_THREADS": "1", "SOLARWM_CHAOS": tag},
        stdout=(folder.path / f"{tag}.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def is_at(moment: str, folder: Folder, found: list[Process]) -> bool:
    """Tell whether a process of the trial is where `moment` says."""
    if moment == "validate":
        return any(process.runs("validate") for process in found)
    ranks = {process.pid for process in found if process.is_rank}
    for path in (folder.results / "runs/long/heartbeats").glob("rank-*.json"):
        with contextlib.suppress(ValueError, OSError):
            beat = json.loads(path.read_text())
            if beat["pid"] in ranks and beat["phase"] == moment:
                return True
    return False


def strike(victim: str, main: subprocess.Popen, found: list[Process], draws: random.Random) -> None:
    """Send the signal of `victim`, if there is such a process at the moment."""
    ranks = [process.pid for process in found if process.is_rank]
    launchers = [
        p.pid
        for p in found
        if p.runs("-m", "solarwm_lib.runtime.torchrun") and not p.is_rank and "bash" not in p.words[0]
    ]
    number = signal.SIGTERM if victim.startswith("term") else signal.SIGKILL
    if victim == "rank" and ranks:
        targets = [draws.choice(ranks)]
    elif victim.endswith("torchrun") and launchers:
        targets = launchers
    elif victim == "all":
        targets = [process.pid for process in found]
    else:
        targets = [main.pid]
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def require_sound(folder: Folder) -> None:
    """Every marker covers complete, undamaged payload."""
    for marker in folder.results.rglob("COMPLETE.json"):
        if not any(part.startswith(".") for part in marker.relative_to(folder.results).parts):
            artifacts.verify(marker.parent, deep=True)


def unlock(folder: Folder) -> None:
    if any((folder.path / ".snakemake/locks").glob("*")):
        folder.snakemake("--unlock")


def members(folder: Folder) -> dict[str, str]:
    """Digest of every tensor of the checkpoints, and of the latents of the validations."""
    run = folder.results / "runs/long"
    found = {}
    for path in [*run.glob("checkpoint_model_*"), *run.glob("validation/step_*/*/")]:
        if (path / "COMPLETE.json").exists():
            for member in artifacts.read(path).members:
                if member.path.endswith(".safetensors"):
                    found[f"{path.relative_to(run)}/{member.path}"] = member.sha256
    return found


def test_random_kills_change_nothing(built, tmp_path):
    folders = []
    for name in ("whole", "killed"):
        folder = built.copy(tmp_path / name, "results/data", "results/assets", "results/latents")
        folder.configure(values())
        folders.append(folder)
    whole, killed = folders
    whole.snakemake("long")

    draws = random.Random(SEED)
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(KILLS)]
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(KILLS)]
    draws.shuffle(moments)
    draws.shuffle(victims)
    for victim, moment in zip(victims, moments, strict=True):
        tag = uuid.uuid4().hex
        main = snakemake(killed, tag)
        deadline = time.monotonic() + (draws.uniform(3, 25) if moment == "time" else 45)
        while time.monotonic() < deadline and main.poll() is None:
            found = processes(tag)
            if moment != "time" and is_at(moment, killed, found):
                break
            time.sleep(0.01)
        assert main.poll() is None, (
            f"ended before {victim} was hit: {(killed.path / f'{tag}.log').read_text()}"
        )
        time.sleep(draws.uniform(0, 0.3))
        strike(victim, main, processes(tag), draws)
        deadline = time.monotonic() + BOUND_SECONDS
        if victim != "term snakemake":  # which may finish the job that runs
            while main.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            main.wait(timeout=300)
            deadline = time.monotonic() + BOUND_SECONDS
        while (left := processes(tag)) and time.monotonic() < deadline:
            time.sleep(0.05)
            main.poll()
        assert not left, f"{victim} at {moment}: {left} still there after {BOUND_SECONDS} s"
        require_sound(killed)
        unlock(killed)

    killed.snakemake("long")
    require_sound(killed)
    assert members(killed) == members(whole)
    assert len(members(whole)) == 3 * STEPS // EVERY
    lines = [
        json.loads(line) for line in (killed.results / "runs/long/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "event" not in line] == list(range(1, STEPS + 1))
