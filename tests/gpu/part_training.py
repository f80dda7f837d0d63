"""Runs of the tiny world through `solarwm train`: exact resume on the device, all three stages, the CPU and bfloat16 beside them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from measure import RECIPES, REPO, Findings, run_apart

from solarwm_lib import cli
from solarwm_lib.artifacts import verify

# What the runs below need, imported before they are forked.
from solarwm_lib.backbones import codec, text  # noqa: F401
from solarwm_lib.backbones.tiny import build_tiny_assets
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.data.synthetic import SynthSpec, synthesize
from solarwm_lib.training import stage1, stage2, tensorboard, train  # noqa: F401
from solarwm_lib.training.metrics import read as read_metrics

STEPS, STAGE1_STEPS, STAGE2_STEPS = 6, 2, 3  # the student of Stage2 moves in its third step
SECONDS = 150.0  # of one run
STAGES = {
    "stage0p5": ("train_stage0p5_fm_81f", ("smoke",)),
    "stage1": ("train_stage1_tf_anyflow_v1_5_81f", ("smoke", "smoke_stage1")),
    "stage2": ("train_stage2_sgf_81f", ("smoke", "smoke_stage2")),
}
LOSSES = ("stage0p5", "stage1", "stage2_critic", "stage2_student")
# Relative, after the steps above. Stage1 takes a difference of two forwards, Stage2 a rollout: both enlarge what one forward allows.
CPU_TOLERANCES = {"stage0p5": 1e-3, "stage1": 1e-2, "stage2_critic": 1e-2, "stage2_student": 1e-2}
# The student's loss is the square of a small difference of two scores, on samples that bfloat16 timesteps (1000, 936, ...) also move.
BFLOAT16_TOLERANCES = {"stage0p5": 0.05, "stage1": 0.1, "stage2_critic": 0.1, "stage2_student": 0.5}
BFLOAT16 = {"train.precision": "bfloat16"}


class Runs:
    """The runs of one check, each in a process of its own, by name below `work`."""

    def __init__(self, found: Findings, work: Path) -> None:
        self.found, self.work = found, work

    def train(
        self,
        name: str,
        stage: str,
        until: int,
        *,
        cpu: bool = False,
        sets: dict[str, Any] | None = None,
    ) -> Path:
        """Train `stage` up to step `until` in directory `name`; return the directory. RuntimeError where that fails."""
        recipe, scales = STAGES[stage]
        run = self.work / name
        places = {
            "name": name,
            "data.root": str(self.work / "data"),
            "model.base_path": str(self.work / "assets"),
            "runtime.output_dir": str(run),
        }
        words = ["train", "--config", str(RECIPES / f"{recipe}.yaml"), "--until-step", str(until)]
        for scale in scales:
            words += ["--overlay", str(REPO / f"config/scales/{scale}.yaml")]
        for key, value in {**places, **(sets or {})}.items():
            words += ["--set", f"{key}={json.dumps(value)}"]
        hidden = cpu or not self.found.is_cuda
        self.apart(f"{name}-{until}", command, words, hidden)
        return run

    def apart(self, name: str, function: Any, *arguments: Any) -> None:
        error = run_apart(self.found.method, self.work / name, SECONDS, function, *arguments, leads=False)
        if error is not None:
            raise RuntimeError(f"run {name}: {error}")

    def later(
        self, name: str, base: Path, *, cpu: bool = False, sets: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, list[float]]:
        """Some steps of Stage1 from the run `base` and of Stage2 from both: the losses of each."""
        start = {"checkpoint.path": str(saved(base, STEPS)), "checkpoint.source_step": STEPS, **sets}
        first = self.train(f"{name}-1", "stage1", STAGE1_STEPS, cpu=cpu, sets=start)
        roles: dict[str, Any] = dict(sets)
        for role in ("student", "teacher", "critic"):
            run, step = (first, STAGE1_STEPS) if role == "student" else (base, STEPS)
            key = f"checkpoint.initialization.{role}"
            roles |= {f"{key}.path": str(saved(run, step)), f"{key}.source_step": step}
        second = self.train(f"{name}-2", "stage2", STAGE2_STEPS, cpu=cpu, sets=roles)
        records = read_metrics(second / "metrics.jsonl")[STAGE2_STEPS - 1 :]
        return {
            "stage1": losses(first),
            "stage2_critic": losses(second),
            "stage2_student": [record["details"]["student_loss"] for record in records],
        }


def command(words: list[str], hidden: bool) -> None:
    """Run `solarwm` with `words`; without the GPU if `hidden`."""
    if hidden:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    raise SystemExit(cli.main(words))


def build_world(work: Path) -> None:
    """Write a tiny data set and tiny base weights."""
    synthesize(work / "data", SynthSpec(name="check", train_clips=4, test_clips=2), progress=False)
    build_tiny_assets(work / "assets", load_architecture("wan22-tiny"), 0)


def saved(run: Path, step: int) -> Path:
    return run / f"checkpoint_model_{step:06d}"


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl")]


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def members(run: Path) -> dict[str, str]:
    """Digests of the tensor files of the last checkpoint."""
    artifact = verify(saved(run, STEPS), deep=True)
    return {m.path: m.sha256 for m in artifact.members if m.path.endswith(".safetensors")}


def training(found: Findings) -> None:
    """Resume first, then the stages on the device; with CUDA the same on the CPU and in bfloat16."""
    others = ("cpu_difference", "bfloat16_difference")
    found.set({f"{stage}_{other}": None for stage in LOSSES for other in others})
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(found, Path(folder))
        runs.apart("world", build_world, runs.work)
        whole = runs.train("whole", "stage0p5", STEPS)
        runs.train("halves", "stage0p5", STEPS // 2)
        halves = runs.train("halves", "stage0p5", STEPS)
        same = members(whole) == members(halves)
        difference = relative(losses(halves), losses(whole))  # tells, where the bytes differ, by how much
        found.set({"resume_is_byte_identical": same, "resume_loss_difference": difference})
        found.check("resume", same)
        here = {"stage0p5": losses(whole), **runs.later("later", whole)}
        found.set({f"{stage}_loss": values[-1] for stage, values in here.items()})
        found.check("losses_are_finite", all(math.isfinite(x) for values in here.values() for x in values))
        if not found.is_cuda:
            return
        low = losses(runs.train("lower", "stage0p5", STEPS, sets=BFLOAT16))
        lower = {"stage0p5": low, **runs.later("later-lower", whole, sets=BFLOAT16)}
        compare(found, "bfloat16", lower, here, BFLOAT16_TOLERANCES)
        on_cpu = losses(runs.train("cpu", "stage0p5", STEPS, cpu=True))
        reference = {"stage0p5": on_cpu, **runs.later("later-cpu", whole, cpu=True)}
        compare(found, "cpu", here, reference, CPU_TOLERANCES)


def compare(
    found: Findings,
    name: str,
    values: dict[str, list[float]],
    expected: dict[str, list[float]],
    tolerances: dict[str, float],
) -> None:
    """Record the relative difference of the losses of every stage, and whether it is within its tolerance."""
    for stage, tolerance in tolerances.items():
        difference = relative(values[stage], expected[stage])
        found.set({f"{stage}_{name}_difference": difference})
        found.check(f"{stage}_{name}", difference <= tolerance)
