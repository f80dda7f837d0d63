"""Velocity of the tiny Wan 2.2 against diffusers' own forward: one thread, interleaved rounds, ratio of medians.

    python tests/benchmarks/bench_velocity.py [ROUNDS]

Prints one JSON object. The seconds are of this machine now; only the ratios are worth keeping.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from diffusers import WanTransformer3DModel

from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.data.camera import fixed_intrinsics

BATCH, FRAMES, HEIGHT, WIDTH, WARM_UPS = 16, 9, 4, 6, 2


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    architecture = load_architecture("wan22-tiny")
    diffusers_model = WanTransformer3DModel(**architecture["transformer"])
    ours = Wan22.from_config(
        architecture,
        SimpleNamespace(camera_attention_mode="fused_prope", camera_translation_transform="linear"),
    )
    ours.transformer.load_state_dict(diffusers_model.state_dict())

    latents = torch.randn(BATCH, FRAMES, architecture["latent_channels"], HEIGHT, WIDTH)
    timesteps = torch.rand(BATCH, FRAMES) * 1000
    token_timesteps = timesteps.repeat_interleave(HEIGHT * WIDTH // 4, dim=1)
    prompt = torch.randn(BATCH, architecture["text"]["text_length"], architecture["transformer"]["text_dim"])
    w2c = torch.eye(4).repeat(BATCH, FRAMES, 1, 1)
    w2c[..., :3, 3] = torch.randn(BATCH, FRAMES, 3)
    intrinsics = torch.from_numpy(fixed_intrinsics()).expand(BATCH, 3, 3)

    forwards = {
        "diffusers": lambda: diffusers_model(
            latents.transpose(1, 2), token_timesteps, prompt, return_dict=False
        )[0],
        "camera_off": lambda: ours.velocity(latents, timesteps, prompt),
        "camera_on": lambda: ours.velocity(latents, timesteps, prompt, w2c, intrinsics),
    }
    report = {}
    for kind, wrap in (("forward", no_grad), ("forward_backward", with_grad)):
        medians = interleaved({name: wrap(run) for name, run in forwards.items()}, rounds)
        report[kind] = {
            **{f"{name}_ms": round(1e3 * seconds, 1) for name, seconds in medians.items()},
            "camera_off_over_diffusers": round(medians["camera_off"] / medians["diffusers"], 3),
            "camera_on_over_diffusers": round(medians["camera_on"] / medians["diffusers"], 3),
        }
    print(json.dumps(report, indent=2))


def no_grad(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            run()

    return call


def with_grad(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    return lambda: run().square().mean().backward()


def interleaved(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in alternation so that a busy moment hits all of them.

    Seconds of this process's one thread: what other processes take from it in the meantime is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UPS + rounds):
        for name, run in runs.items():
            started = time.process_time()
            run()
            if number >= WARM_UPS:
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
