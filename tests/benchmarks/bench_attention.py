"""Causal Wan 2.2 against its alternatives: one thread, interleaved rounds, ratios of medians.

    python tests/benchmarks/bench_attention.py [ROUNDS] [--quick]

executor: visibility plan by segments against one dense-masked SDPA on `[clean | noisy]`, 7 chunks, forward and backward.
teacher_forcing: our forward against diffusers' AnyFlowFARTransformer3DModel of the same tiny widths at 21 latents, its block
mask built before: `far` as it comes (early chunks compressed, a fraction of our work), `far_full` with every chunk in full.
rollout: 7 chunks of 4 steps and a commit with the cache, against 4 steps over `[history | chunk]` without; and the share of
position and camera encoding in the cached one; eight samples and two layers of the tiny model, 24 tokens per latent frame.
`--quick`, for CI: no `far_full`, four samples.

Prints one JSON object. The seconds are of this machine now; only the ratios are worth keeping.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from bench_velocity import interleaved
from diffusers import AnyFlowFARTransformer3DModel
from torch import Tensor
from torch.nn import functional as F

from solarwm_lib.backbones import prope, rope
from solarwm_lib.backbones.attention import attend
from solarwm_lib.backbones.visibility import teacher_forcing
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.data.camera import fixed_intrinsics

CHUNK, CHUNKS, PRIOR, WINDOW, STEPS = 3, 7, 5, 18, 4
FRAMES = CHUNK * CHUNKS
MODEL = SimpleNamespace(camera_attention_mode="fused_prope", camera_translation_transform="linear")


def main(rounds: int, quick: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = {
        "executor": executor(rounds),
        "teacher_forcing": teacher_forced(rounds, {"far": 3} if quick else {"far": 3, "far_full": CHUNKS}),
        "rollout": rollout(rounds, batch=4 if quick else 8),
    }
    print(json.dumps(report, indent=2))


def executor(rounds: int, tokens: int = 24, heads: int = 4, width: int = 48) -> dict[str, float]:
    plan = teacher_forcing(FRAMES, CHUNK, PRIOR, tokens)
    length = 2 * FRAMES * tokens
    mask = plan.mask(length)
    query, key, value = (torch.randn(1, length, heads, width, requires_grad=True) for _ in range(3))

    def dense() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    runs = {"segments": lambda: attend(query, key, value, plan), "dense": dense}
    medians = interleaved({name: with_backward(run) for name, run in runs.items()}, rounds)
    return figures(medians, "dense", "segments")


def with_backward(run: Callable[[], Tensor]) -> Callable[[], None]:
    return lambda: run().square().mean().backward()


def teacher_forced(rounds: int, full_chunks: dict[str, int]) -> dict[str, float]:
    widths = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 256,
        "ffn_dim": 32,
        "num_layers": 2,
        "cross_attn_norm": True,
    }
    architecture = {"transformer": widths, "latent_channels": 4, "temporal_stride": 4, "spatial_stride": 8}
    ours = Wan22.from_config(architecture, MODEL, anyflow=True).eval()
    clean, noisy = torch.randn(2, 1, FRAMES, 4, 16, 16).unbind(0)
    times, text = torch.full((1, FRAMES), 600.0), torch.randn(1, 12, 16)
    zeros, r = torch.zeros_like(times), times / 2

    def far(full_chunks: int) -> Callable[[], Tensor]:
        partition, full = [CHUNK] * CHUNKS, slice(-CHUNK * full_chunks, None)
        model = AnyFlowFARTransformer3DModel(**widths, full_chunk_limit=full_chunks).eval()
        mask = model.build_attention_mask(
            chunk_partition=partition, height=16, width=16, has_clean_context=True
        )
        clean_part = {"clean_hidden_states": clean[:, full], "clean_timestep": zeros[:, full]}
        return lambda: model(noisy, times, r, text, partition, attention_mask=mask, **clean_part)

    runs = {
        **{name: far(count) for name, count in full_chunks.items()},
        "ours": lambda: ours.teacher_forced_velocity(
            clean, noisy, times, text, r=r, chunk=CHUNK, max_prior_clean_chunks=PRIOR
        ),
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # FlexAttention says that it runs unfused outside torch.compile
        medians = interleaved(runs, rounds)
    ratios: dict[str, float] = {}
    for name in full_chunks:
        ratios |= figures(medians, name, "ours")
    return ratios


def rollout(rounds: int, batch: int, height: int = 8, width: int = 12, layers: int = 2) -> dict[str, float]:
    architecture = load_architecture("wan22-tiny")
    architecture = architecture | {"transformer": architecture["transformer"] | {"num_layers": layers}}
    model = Wan22.from_config(architecture, MODEL).eval()
    latents = torch.randn(batch, FRAMES, architecture["latent_channels"], height, width)
    text = torch.randn(batch, architecture["text"]["text_length"], architecture["transformer"]["text_dim"])
    intrinsics = torch.from_numpy(fixed_intrinsics()).expand(batch, 3, 3)
    w2c = torch.eye(4).repeat(batch, FRAMES, 1, 1)
    w2c[..., :3, 3] = torch.randn(batch, FRAMES, 3)
    times, clean_times = torch.full((batch, CHUNK), 600.0), torch.zeros(batch, CHUNK)

    def cached() -> None:
        state = model.rollout_state(text, intrinsics, chunk=CHUNK, window=WINDOW)
        for start in range(0, FRAMES, CHUNK):
            part = slice(start, start + CHUNK)
            for _ in range(STEPS):
                model.chunk_velocity(state, latents[:, part], times, w2c[:, part])
            model.chunk_velocity(state, latents[:, part], clean_times, w2c[:, part], commit=True)

    def cache_free() -> None:
        for start in range(0, FRAMES, CHUNK):
            first = max(0, start - (WINDOW - CHUNK))
            history = latents[:, first:start]
            for _ in range(STEPS):
                model.window_velocity(
                    history, latents[:, start : start + CHUNK], torch.zeros(history.shape[:2]), times,
                    text, w2c[:, first : start + CHUNK], intrinsics, chunk=CHUNK,
                )  # fmt: skip

    with torch.no_grad():
        medians = interleaved({"cached": cached, "cache_free": cache_free}, rounds)
        shares = [encoding_share(cached) for _ in range(rounds)]
    return {
        **figures(medians, "cache_free", "cached"),
        "encoding_share": round(sorted(shares)[len(shares) // 2], 3),
    }


def encoding_share(run: Callable[[], None]) -> float:
    """Share of the time of `run` spent in rotations and camera products and in building their tables."""
    spent = 0.0

    @contextmanager
    def timed(module, name):
        original = getattr(module, name)

        def call(*arguments, **words):
            nonlocal spent
            started = time.process_time()
            result = original(*arguments, **words)
            spent += time.process_time() - started
            return result

        setattr(module, name, call)
        try:
            yield
        finally:
            setattr(module, name, original)

    parts = ((rope, "apply"), (rope, "frame_rotations"), (prope, "apply"), (prope, "camera_transforms"))
    with timed(*parts[0]), timed(*parts[1]), timed(*parts[2]), timed(*parts[3]):
        started = time.process_time()
        run()
        return spent / (time.process_time() - started)


def figures(medians: dict[str, float], slow: str, fast: str) -> dict[str, float]:
    return {
        **{f"{name}_ms": round(1e3 * seconds, 1) for name, seconds in medians.items()},
        f"{slow}_over_{fast}": round(medians[slow] / medians[fast], 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rounds", nargs="?", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    main(**vars(parser.parse_args()))
