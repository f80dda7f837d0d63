"""What a CPU cannot show, in one short run: CUDA against CPU, bfloat16 against float32, exact resume on the device.

    python tests/gpu/check.py [--device cuda|cpu] [--out FILE]

Builds the tiny world, prints one JSON object of figures and exits 1 if a check fails. With `--device cpu` the same code
runs without a GPU (bfloat16 is then left out: it is about 90 times slower there).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from solarwm_lib.artifacts import verify
from solarwm_lib.backbones.tiny import build_tiny_assets
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


def train(work: Path, name: str, device: str, *words: str) -> Path:
    """Run `solarwm train` on the tiny world and return the run directory."""
    run = work / name
    sets = {
        "name": json.dumps(name),
        "data.root": json.dumps(str(work / "data")),
        "model.base_path": json.dumps(str(work / "assets")),
        "runtime.output_dir": json.dumps(str(run)),
    }
    command = [sys.executable, "-m", "solarwm_lib", "train"]
    command += ["--config", str(REPO / "config/recipes/wan22_ti2v_5b/train_stage0p5_fm_81f.yaml")]
    command += ["--overlay", str(REPO / "config/scales/smoke.yaml")]
    for key, value in sets.items():
        command += ["--set", f"{key}={value}"]
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
        if device == "cuda":
            reference = train(work, "cpu", "cpu", *until)
            figures["loss_relative_difference_from_cpu"] = relative(losses(whole), losses(reference))
            checks["loss"] = figures["loss_relative_difference_from_cpu"] <= 1e-3
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
