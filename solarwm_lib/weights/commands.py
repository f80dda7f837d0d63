"""The `solarwm weights ...` commands: parsing and hand-over, as in `cli`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Handler = Callable[[argparse.Namespace], Any]
Add = Callable[[Any, str, Handler, str], argparse.ArgumentParser]


def add_commands(group: Any, add: Add) -> None:
    """Add every weights command to `group`; `add` is that of `cli.build_parser`."""
    look = add(
        group, "inspect", inspect_weights, "what a file or folder of weights is and where it would load"
    )
    look.add_argument("path", type=Path, help="file, index, folder or artifact")
    look.add_argument("--json", action="store_true", help="print JSON")

    take = add(
        group, "import", import_weights, "turn official, diffusers or released weights into an artifact"
    )
    take.add_argument("source", type=Path, help="file or folder")
    take.add_argument(
        "--assets", type=Path, help="base assets that trained weights belong to (artifact directory)"
    )
    take.add_argument("--architecture", help="name under config/models (default: found from the tensors)")
    take.add_argument("--out", type=Path, required=True, help="artifact directory")

    give = add(group, "export", export_weights, "write a checkpoint's weights for other programs")
    give.add_argument("checkpoint", type=Path, help="checkpoint directory")
    give.add_argument(
        "--format",
        dest="form",
        required=True,
        choices=("diffusers", "official", "released"),
        help="layout and key names",
    )
    give.add_argument("--role", choices=("live", "ema"), help="which weights (diffusers and official)")
    give.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="cast to this type (default: as stored)"
    )
    give.add_argument("--out", type=Path, required=True, help="artifact directory")


def inspect_weights(arguments: argparse.Namespace) -> None:
    """Print the report; ArtifactError if the file is damaged or no weights."""
    from solarwm_lib.weights.inspect import format_report, inspect

    report = inspect(arguments.path)
    if arguments.json:
        print(json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False))
    else:
        print(format_report(report))


def import_weights(arguments: argparse.Namespace) -> None:
    """Publish the artifact and name it."""
    from solarwm_lib.weights.convert import import_weights as run

    artifact = run(
        arguments.source, arguments.out, assets=arguments.assets, architecture=arguments.architecture
    )
    print(f"{artifact.path}: {artifact.schema}, {artifact.bytes} bytes")


def export_weights(arguments: argparse.Namespace) -> None:
    """Publish the artifact and name it."""
    from solarwm_lib.weights.convert import export_weights as run

    artifact = run(
        arguments.checkpoint, arguments.out, arguments.form, role=arguments.role, dtype=arguments.dtype
    )
    print(f"{artifact.path}: {artifact.schema}, {artifact.bytes} bytes")
