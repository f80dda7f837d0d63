"""The `solarwm data ...` commands: parsing and hand-over, as in `cli`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from solarwm_lib.data.pack_options import add_arguments as add_pack_arguments
from solarwm_lib.runtime.errors import ConfigError, DataError

Handler = Callable[[argparse.Namespace], Any]
Add = Callable[[Any, str, Handler, str], argparse.ArgumentParser]
PROFILES = ("spread", "hashed", "wan_153f")


def add_commands(group: Any, add: Add, add_config: Callable[..., None]) -> None:
    """Add every data command to `group`; `add` and `add_config` are those of `cli.build_parser`."""
    synthesize = add(group, "synthesize", _synthesize, "render the tiny world into raw-WDS shards")
    synthesize.add_argument(
        "--spec", required=True, help="JSON object: rooms, train_clips, test_clips, frames, ..."
    )
    synthesize.add_argument("--out", type=Path, required=True, help="artifact directory")

    pack = add(group, "pack", _pack, "turn a folder of videos with sidecars into raw-WDS shards")
    pack.add_argument("source", type=Path, help="folder of videos with sidecars")
    pack.add_argument("--out", type=Path, required=True, help="artifact directory")
    add_pack_arguments(pack)

    _add_inspect(add(group, "inspect", _inspect, "what an index holds, and whether its shards hold it"))
    _add_plan(add(group, "plan", _plan, "which samples a trainer reads, in which order"), add_config)

    warm = add(group, "warm-cache", _warm_cache, "stage the shards of an index from a bucket into a cache")
    warm.add_argument("index", type=Path)
    warm.add_argument("--root", required=True, help="bucket address that shard keys are relative to")
    warm.add_argument("--cache-dir", type=Path, required=True, help="folder for staged shards")
    warm.add_argument("--max-gib", type=float, required=True, help="size the cache may grow to")
    warm.add_argument("--workers", type=int, default=4, help="transfers at once")
    warm.add_argument("--timeout-seconds", type=float, default=7200.0, help="longest wait for one shard")

    windows = add(
        group, "materialize-windows", _materialize_windows, "give every clip of a raw data set its windows"
    )
    windows.add_argument("--data", type=Path, required=True, help="raw data set (artifact directory)")
    windows.add_argument("--profile", choices=PROFILES, required=True, help="how window starts are laid")
    windows.add_argument("--pixel-frames", type=int, required=True, help="frames of a window")
    windows.add_argument(
        "--fps", type=float, help="rate clips are resampled to (default: windows count source frames)"
    )
    windows.add_argument("--out", type=Path, required=True, help="artifact directory")

    join = add(
        group,
        "materialize-wan153f",
        _materialize_wan153f,
        "join raw indexes with the published 153-frame window indexes",
    )
    for name in ("--train-index", "--test-index", "--train-window-index", "--test-window-index"):
        join.add_argument(name, type=Path, required=True)
    join.add_argument("--output", type=Path, required=True, help="gzip JSONL to create")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path)
    parser.add_argument("--root", type=Path, help="folder of the shards (default: found beside the index)")
    parser.add_argument("--camera-array-key", default="c2w", help="array of the camera files")
    parser.add_argument(
        "--camera-axes", choices=("opencv", "opengl"), default="opencv", help="declared camera axes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_plan(parser: argparse.ArgumentParser, add_config: Callable[..., None]) -> None:
    parser.add_argument("index", type=Path, nargs="?", help="an index; or give --config")
    add_config(parser, required=False)
    parser.add_argument("--step", type=int, default=0, help="first optimizer step, from 0")
    parser.add_argument("--steps", type=int, default=1, help="number of steps")
    parser.add_argument("--epoch", type=int, help="start where this epoch does, in place of --step")
    parser.add_argument("--rank", type=int, help="only this process's share (default: all)")
    parser.add_argument("--limit", type=int, default=16, help="records shown; digests cover all of them")
    only = parser.add_argument_group("with an index instead of --config")
    only.add_argument("--seed", type=int, default=42)
    only.add_argument("--pixel-frames", type=int)
    only.add_argument("--fps", type=float, default=16.0, help="rate of a clip")
    only.add_argument("--global-batch-size", type=int, help="clips per step (default: one per reader)")
    only.add_argument("--world-size", type=int, default=1, help="processes")
    only.add_argument("--sequence-parallel-size", type=int, default=1, help="processes that share a sample")
    only.add_argument("--mixed-shards", type=int, default=1, help="shards shuffled together")
    only.add_argument("--fixed-start", action="store_true", help="starts from the index, not drawn")


def _synthesize(arguments: argparse.Namespace) -> None:
    from solarwm_lib.data.synthetic import SynthSpec, synthesize

    synthesize(arguments.out, SynthSpec.from_json(arguments.spec))


def _pack(arguments: argparse.Namespace) -> None:
    from solarwm_lib.data.pack import pack
    from solarwm_lib.data.pack_options import from_arguments

    pack(arguments.source, arguments.out, from_arguments(arguments))


def _inspect(arguments: argparse.Namespace) -> None:
    from solarwm_lib.cli import print_json
    from solarwm_lib.data.inspect import format_inspection, inspect

    facts = inspect(
        arguments.index,
        root=arguments.root,
        camera_array_key=arguments.camera_array_key,
        camera_axes=arguments.camera_axes,
    )
    if arguments.json:
        print_json(facts)
    else:
        print(format_inspection(facts))
    if problems := facts["problems"]:
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise DataError(f"{problems[0]}{more}")


def _plan(arguments: argparse.Namespace) -> None:
    from solarwm_lib.cli import load_arguments, print_json
    from solarwm_lib.data.plan_report import plan_index, plan_report

    if (arguments.index is None) == (arguments.config is None):
        raise ConfigError("data plan: give either an index or --config")
    place = {
        "step": arguments.step,
        "steps": arguments.steps,
        "epoch": arguments.epoch,
        "rank": arguments.rank,
        "limit": arguments.limit,
    }
    if arguments.config is not None:
        print_json(plan_report(load_arguments(arguments, "train"), **place))
        return
    if arguments.pixel_frames is None:
        raise ConfigError("data plan: --pixel-frames is needed with an index")
    report = plan_index(
        arguments.index,
        seed=arguments.seed,
        pixel_frames=arguments.pixel_frames,
        fps=arguments.fps,
        global_batch_size=arguments.global_batch_size,
        world_size=arguments.world_size,
        sequence_parallel_size=arguments.sequence_parallel_size,
        random_start=not arguments.fixed_start,
        mixed_shards=arguments.mixed_shards,
        **place,
    )
    print_json(report)


def _warm_cache(arguments: argparse.Namespace) -> None:
    from solarwm_lib.cli import print_json
    from solarwm_lib.data.transport import warm_cache

    facts = warm_cache(
        arguments.index,
        arguments.root,
        arguments.cache_dir,
        max_gib=arguments.max_gib,
        workers=arguments.workers,
        timeout=arguments.timeout_seconds,
    )
    print_json(facts)


def _materialize_windows(arguments: argparse.Namespace) -> None:
    from solarwm_lib.data.windows import materialize_windows

    materialize_windows(
        arguments.data,
        arguments.profile,
        arguments.out,
        pixel_frames=arguments.pixel_frames,
        fps=arguments.fps,
    )


def _materialize_wan153f(arguments: argparse.Namespace) -> None:
    from solarwm_lib.cli import print_json
    from solarwm_lib.data.windows import materialize_wan153f

    summary = materialize_wan153f(
        arguments.train_index,
        arguments.test_index,
        arguments.train_window_index,
        arguments.test_window_index,
        arguments.output,
    )
    print_json(summary)
