"""What a CPU cannot show, in one short run: CUDA against CPU, bfloat16 against float32, exact resume on the device, steps of
all three stages, and compiled FlexAttention against the segments it must equal, at the size of the released layout.

    python tests/gpu/check.py [--device cuda|cpu] [--out FILE]

Builds the tiny world, prints one JSON object of figures and exits 1 if a check fails. With `--device cpu` the same code
runs without a GPU, with small attention (and without bfloat16 training, which is about 90 times slower there).
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from solarwm_lib.artifacts import verify
from solarwm_lib.backbones import flex
from solarwm_lib.backbones.attention import attend
from solarwm_lib.backbones.tiny import build_tiny_assets
from solarwm_lib.backbones.visibility import teacher_forcing
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.data.camera import fixed_intrinsics
from solarwm_lib.data.synthetic import SynthSpec, synthesize
from solarwm_lib.training.metrics import read as read_metrics

REPO = Path(__file__).parents[2]
# Float32 on CUDA multiplies with other summation orders (and TF32 is off by default): 1e-4 of the output's scale.
DEVICE_TOLERANCE = 1e-4
# bfloat16 keeps 8 bits; through six blocks the relative error of the velocity stays below a few percent.
BFLOAT16_TOLERANCE = 0.05
STEPS = 6
# Stage1 takes a difference of two forwards, Stage2 a rollout: both enlarge what DEVICE_TOLERANCE allows one forward.
STAGE_TOLERANCE = 1e-2
STAGE1_STEPS, STAGE2_STEPS = 2, 3  # the student moves in the third
RECIPES = {
    "stage0p5": ("train_stage0p5_fm_81f", ("smoke",)),
    "stage1": ("train_stage1_tf_anyflow_v1_5_81f", ("smoke", "smoke_stage1")),
    "stage2": ("train_stage2_sgf_81f", ("smoke", "smoke_stage2")),
}


def velocity_error(device: str, dtype: torch.dtype) -> float:
    """Largest difference of the tiny velocity from the CPU's float32 one, relative to its scale."""
    torch.manual_seed(0)
    cfg = SimpleNamespace(camera_attention_mode="fused_prope", camera_translation_transform="linear")
    backbone = Wan22.from_config(load_architecture("wan22-tiny"), cfg)
    torch.nn.init.normal_(backbone.transformer.proj_out.weight, std=0.1)
    latents, timesteps, prompt = torch.randn(2, 9, 48, 4, 6), torch.rand(2, 9) * 1000, torch.randn(2, 16, 64)
    w2c = torch.eye(4).repeat(2, 9, 1, 1)
    w2c[..., :3, 3] = torch.randn(2, 9, 3)
    intrinsics = torch.from_numpy(fixed_intrinsics()).expand(2, 3, 3)
    with torch.no_grad():
        expected = backbone.velocity(latents, timesteps, prompt, w2c, intrinsics)
        backbone.to(device)
        inputs = [x.to(device) for x in (latents, timesteps, prompt, w2c, intrinsics)]
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = backbone.velocity(*inputs).float().cpu()
    return ((found - expected).abs().max() / expected.abs().max()).item()


@contextmanager
def gradients_of_flex(device: str) -> Iterator[None]:
    """Without a kernel for a CPU torch refuses FlexAttention with gradients there; its unfused form has them."""
    kept = flex_attention._validate_device
    if device == "cpu":
        flex_attention._validate_device = lambda *tensors: None
    try:
        yield
    finally:
        flex_attention._validate_device = kept


def executors(device: str) -> dict[str, Any]:
    """Compare FlexAttention with segments on `[clean | noisy]` of seven chunks: differences and time, forward and backward.

    Differences are from segments in float32, by the largest element; `ratio` is time of flex by time of segments.
    """
    tokens, heads, width, rounds = (405, 24, 128, 10) if device == "cuda" else (7, 2, 16, 2)
    plan = teacher_forcing(21, 3, 5, tokens)
    torch.manual_seed(0)
    inputs = [torch.randn(1, 42 * tokens, heads, width, device=device) for _ in range(4)]

    def run(executor: Callable[..., Tensor], dtype: torch.dtype) -> tuple[float, list[Tensor]]:
        """Seconds of the fastest round, and the output and gradients of query, key and value."""
        *leaves, weight = (x.to(dtype).requires_grad_() for x in inputs)
        seconds = []
        for _ in range(2 + rounds):
            _wait(device)
            started = time.perf_counter()
            output = executor(*leaves, plan)
            gradients = torch.autograd.grad(output, leaves, weight.detach())
            _wait(device)
            seconds.append(time.perf_counter() - started)
        return min(seconds[2:]), [output.detach(), *gradients]

    figures: dict[str, Any] = {"tokens": 42 * tokens, "heads": heads, "width": width}
    reference = run(attend, torch.float32)[1]
    with gradients_of_flex(device):
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            times = {}
            for executor, function in (("segments", attend), ("flex", flex.attend)):
                times[executor], found = run(function, dtype)
                error = [
                    (a.float() - b).abs().max() / b.abs().max() for a, b in zip(found, reference, strict=True)
                ]
                figures[f"{executor}_{name}_error"] = [round(x.item(), 8) for x in error]
            figures[f"{name}_ratio"] = round(times["flex"] / times["segments"], 3)
    return figures


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def stages(work: Path, name: str, device: str, base: Path, *words: str) -> dict[str, list[float]]:
    """Train some steps of Stage1 from the run `base` and of Stage2 from both; return the losses of each."""
    start = {
        "checkpoint.path": str(base / f"checkpoint_model_{STEPS:06d}"),
        "checkpoint.source_step": STEPS,
    }
    first = train(
        work, f"{name}-1", device, "--until-step", str(STAGE1_STEPS), *words, stage="stage1", sets=start
    )
    roles: dict[str, Any] = {}
    for role in ("student", "teacher", "critic"):
        run, step = (first, STAGE1_STEPS) if role == "student" else (base, STEPS)
        key = f"checkpoint.initialization.{role}"
        roles[f"{key}.path"] = str(run / f"checkpoint_model_{step:06d}")
        roles[f"{key}.source_step"] = step
    second = train(
        work, f"{name}-2", device, "--until-step", str(STAGE2_STEPS), *words, stage="stage2", sets=roles
    )
    student = [
        r["details"]["student_loss"] for r in read_metrics(second / "metrics.jsonl")[STAGE2_STEPS - 1 :]
    ]
    return {"stage1": losses(first), "stage2_critic": losses(second), "stage2_student": student}


def train(
    work: Path,
    name: str,
    device: str,
    *words: str,
    stage: str = "stage0p5",
    sets: dict[str, Any] | None = None,
) -> Path:
    """Run `solarwm train` on the tiny world and return the run directory."""
    recipe, scales = RECIPES[stage]
    run = work / name
    places = {
        "name": name,
        "data.root": str(work / "data"),
        "model.base_path": str(work / "assets"),
        "runtime.output_dir": str(run),
    }
    command = [sys.executable, "-m", "solarwm_lib", "train"]
    command += ["--config", str(REPO / f"config/recipes/wan22_ti2v_5b/{recipe}.yaml")]
    for scale in scales:
        command += ["--overlay", str(REPO / f"config/scales/{scale}.yaml")]
    for key, value in {**places, **(sets or {})}.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    subprocess.run([*command, *words], cwd=REPO, env=environment, check=True)
    return run


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl")]


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def members(run: Path) -> dict[str, str]:
    artifact = verify(run / f"checkpoint_model_{STEPS:06d}", deep=True)
    return {m.path: m.sha256 for m in artifact.members if m.path.endswith(".safetensors")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; use --device cpu to run the same code without one")
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    checks: dict[str, bool] = {}

    figures["velocity_float32_relative_error"] = velocity_error(device, torch.float32)
    checks["velocity_float32"] = figures["velocity_float32_relative_error"] <= DEVICE_TOLERANCE
    figures["executors"] = executors(device)
    for dtype, tolerance in (("float32", DEVICE_TOLERANCE), ("bfloat16", BFLOAT16_TOLERANCE)):
        errors = [
            *figures["executors"][f"flex_{dtype}_error"],
            *figures["executors"][f"segments_{dtype}_error"],
        ]
        checks[f"executors_{dtype}"] = max(errors) <= tolerance
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        synthesize(work / "data", SynthSpec(name="check", train_clips=4, test_clips=2), progress=False)
        build_tiny_assets(work / "assets", load_architecture("wan22-tiny"), 0)
        until = ("--until-step", str(STEPS))
        whole = train(work, "whole", device, *until)
        train(work, "halves", device, "--until-step", str(STEPS // 2))
        halves = train(work, "halves", device, *until)
        figures["resume_is_byte_identical"] = members(whole) == members(halves)
        checks["resume"] = figures["resume_is_byte_identical"]
        later = stages(work, "later", device, whole)
        figures["losses"] = later
        checks["stages_are_finite"] = all(math.isfinite(x) for found in later.values() for x in found)
        if device == "cuda":
            reference = train(work, "cpu", "cpu", *until)
            figures["loss_relative_difference_from_cpu"] = relative(losses(whole), losses(reference))
            checks["loss"] = figures["loss_relative_difference_from_cpu"] <= 1e-3
            on_cpu = stages(work, "later-cpu", "cpu", whole)
            lower_stages = stages(work, "later-bfloat16", device, whole, "--set", "train.precision=bfloat16")
            for stage, found in later.items():
                figures[f"{stage}_relative_difference_from_cpu"] = relative(found, on_cpu[stage])
                checks[stage] = figures[f"{stage}_relative_difference_from_cpu"] <= STAGE_TOLERANCE
                figures[f"{stage}_bfloat16_relative_difference"] = relative(lower_stages[stage], found)
                checks[f"{stage}_bfloat16"] = all(map(math.isfinite, lower_stages[stage]))
            figures["velocity_bfloat16_relative_error"] = velocity_error(device, torch.bfloat16)
            checks["velocity_bfloat16"] = figures["velocity_bfloat16_relative_error"] <= BFLOAT16_TOLERANCE
            lower = train(work, "bfloat16", device, *until, "--set", "train.precision=bfloat16")
            figures["loss_bfloat16_relative_difference"] = relative(losses(lower), losses(whole))
            checks["loss_bfloat16"] = figures["loss_bfloat16_relative_difference"] <= BFLOAT16_TOLERANCE
    figures["checks"] = checks
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
