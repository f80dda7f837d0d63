"""Kills a process that saves in the background, again and again, and looks at what is left: `kill_saver.py FOLDER SEED`.

Children are forked from this process, which has loaded torch already. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import saver_world
import torch
from saver_world import set_step, values_at

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint, members

KILLS = 16
SHAPES = {"weight": (512, 512), "other": (300, 500)}


def train(run_dir: Path) -> None:
    """Save after every step, from the newest complete save on."""
    state = saver_world.learner(SHAPES)
    saver = saver_world.saver(run_dir, state)
    saver.require_space()
    complete, _ = checkpoint.candidates(run_dir, 10**6)
    for step in range(complete[0].step + 1 if complete else 1, 10**6):
        set_step(state, step)
        saver.rolling()


def damaged(run_dir: Path) -> list[str]:
    """Complete saves that do not hold exactly the state of their step."""
    found = []
    for candidate in checkpoint.candidates(run_dir, 10**6)[0]:
        try:
            artifact = checkpoint.open_verified(candidate.path)
            for member in checkpoint.INVENTORY[:-1]:
                stored = members.Stored(artifact.file(member))
                for name in stored.names:
                    whole = stored.whole(name)
                    if not torch.equal(whole, values_at(member, name, whole.shape, candidate.step)):
                        raise ArtifactError(f"{member}: {name} is not that of step {candidate.step}")
        except ArtifactError as error:
            found.append(str(error))
    return found


def main(run_dir: Path, seed: int) -> dict:
    torch.set_num_threads(1)
    moments = random.Random(seed)
    state = saver_world.learner(SHAPES)
    report = {"kills": 0, "in_the_middle": 0, "steps": [], "damaged": [], "left_behind": []}
    for _ in range(KILLS):
        pid = os.fork()
        if pid == 0:
            try:
                train(run_dir)
            finally:
                os._exit(1)
        while not any((run_dir / "rolling").glob(".*.partial")):  # its first save has begun
            time.sleep(0.001)
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise RuntimeError("the saving process ended by itself")
        time.sleep(moments.uniform(0.0, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        rolling = run_dir / "rolling"
        report["kills"] += 1
        report["in_the_middle"] += any(rolling.glob(".*.partial"))
        report["damaged"] += damaged(run_dir)
        report["steps"].append([c.step for c in checkpoint.candidates(run_dir, 10**6)[0]])
        saver_world.saver(run_dir, state).require_space()
    report["left_behind"] += [str(path) for path in (run_dir / "rolling").glob(".*.partial")]
    return report


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
