"""The `solarwm` command line: parsing only.

Each handler imports what it needs when it runs, so `--help`, `config`, `verify` and every refusal start without torch.
Errors are one line on stderr with the documented exit code (docs/reference/exit-codes.md); `--traceback` shows the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from solarwm_lib import __version__, cli_data, cli_estimate, cli_operate
from solarwm_lib.runtime.errors import (
    ArtifactError,
    ConfigError,
    MemoryExhausted,
    Preempted,
    SolarError,
    is_out_of_memory,
)
from solarwm_lib.runtime.lifeline import StopNow, stoppable
from solarwm_lib.weights import commands as weights_commands

Handler = Callable[[argparse.Namespace], Any]
# What SIGTERM ends with 75, and what does not outlive the Snakemake or torchrun that started it.
LONG_COMMANDS = ("train", "preflight", "validate", "infer", "preencode", "merge-latents")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        with stoppable() if arguments.command in LONG_COMMANDS else contextlib.nullcontext():
            return arguments.handler(arguments) or 0
    except StopNow as stop:
        _complain(f"solarwm: {stop}")
        return Preempted.exit_code
    except KeyboardInterrupt:
        _complain("solarwm: interrupted")
        return 130
    except BrokenPipeError:
        _complain("solarwm: whoever read the output is gone (broken pipe)")
        # Closing stdout at exit would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        known = as_solar_error(error)
        if arguments.traceback or known is None:
            import traceback

            traceback.print_exc()
        if known is None:
            _complain(f"solarwm: bug: {type(error).__name__}: {error}")
            return 1
        _complain(f"solarwm: error: {' '.join(str(known).split())}")
        return known.exit_code


def _complain(line: str) -> None:
    """Print to stderr if somebody still reads it: the exit code must survive a broken pipe."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def as_solar_error(error: Exception) -> SolarError | None:
    """Map an exception to the error a person can act on, or None for a bug."""
    if isinstance(error, SolarError):
        return error
    if is_out_of_memory(error):
        return MemoryExhausted(f"out of memory: {error}; lower train.micro_batch_size or the resolution")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ArtifactError(f"disk full while writing {error.filename or 'a file'}: {error.strerror}")
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return ConfigError(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
    return None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="solarwm", description="Training and inference of camera-controlled video world models."
    )
    parser.add_argument("--version", action="version", version=f"solarwm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(group: Any, name: str, handler: Handler, help: str) -> argparse.ArgumentParser:
        command = group.add_parser(name, help=help, description=help)
        command.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        command.set_defaults(handler=handler)
        return command

    def add_group(name: str, help: str) -> Any:
        group = commands.add_parser(name, help=help, description=help)
        return group.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")

    train = add(commands, "train", _train, "train a run up to a step, resuming from its newest valid state")
    _config_arguments(train)
    train.add_argument(
        "--until-step", type=int, help="stop after this many completed steps (default: train.max_steps)"
    )
    infer = add(commands, "infer", _infer, "generate videos from a checkpoint")
    _config_arguments(infer)
    preencode = add(commands, "preencode", _preencode, "encode raw clips into a generation of stored latents")
    _config_arguments(preencode)
    preencode.add_argument("--part", type=int, help="only this part, from 0 (default: all, then the index)")
    preencode.add_argument("--out", type=Path, help="artifact directory of the part")
    merge = add(commands, "merge-latents", _merge_latents, "check all parts and publish their index")
    _config_arguments(merge)
    merge.add_argument("--out", type=Path, help="artifact directory (default: index/ of the generation)")
    preflight = add(
        commands, "preflight", _preflight, "two real steps, a save and reload, one validation slot"
    )
    _config_arguments(preflight)
    preflight.add_argument("--out", type=Path, required=True, help="artifact directory")
    preflight.add_argument(
        "--validated",
        type=Path,
        action="append",
        default=[],
        help="validation of Stage2's student that must be complete; repeatable",
    )
    plan = add(commands, "freeze-plan", _freeze_plan, "select and freeze the validation cases of a run")
    _config_arguments(plan)
    plan.add_argument("--out", type=Path, required=True, help="frozen-plan.json to create")
    validate = add(
        commands, "validate", _validate, "generate and measure one validation pass of a checkpoint"
    )
    _config_arguments(validate)
    validate.add_argument("--checkpoint", type=Path, required=True, help="checkpoint directory")
    validate.add_argument("--plan", type=Path, required=True, help="frozen-plan.json")
    validate.add_argument(
        "--pass", dest="pass_name", required=True, help="name of a pass in validation.passes"
    )
    validate.add_argument("--out", type=Path, required=True, help="artifact directory")
    compare = add(commands, "compare", _compare, "put validation or inference artifacts side by side")
    compare.add_argument(
        "artifacts", type=Path, nargs="+", help="artifact directories, two or more passes in all"
    )
    compare.add_argument("--out", type=Path, required=True, help="artifact directory")
    verify = add(commands, "verify", _verify, "check an artifact against its marker")
    verify.add_argument("path", type=Path, help="artifact directory or COMPLETE.json")
    verify.add_argument("--deep", action="store_true", help="also compare the SHA-256 of every member")
    lineage = add(commands, "lineage", _lineage, "show the chain of artifacts behind a result")
    lineage.add_argument("path", type=Path, help="artifact directory or COMPLETE.json")
    lineage.add_argument("--json", action="store_true", help="print JSON")
    cli_operate.add_commands(commands, add)

    cli_estimate.add_command(commands, add, _config_arguments)

    config = add_group("config", "routes, resolution and differences of run configurations")
    routes = add(config, "routes", _config_routes, "list the supported routes")
    routes.add_argument("--json", action="store_true", help="print JSON")
    resolve = add(
        config, "resolve", _config_resolve, "fill in all defaults and print the resolved configuration"
    )
    _config_arguments(resolve)
    resolve.add_argument("--output", type=Path, help="write the resolved values here instead of printing")
    resolve.add_argument("--strict", action="store_true", help="refuse placeholder paths")
    diff = add(config, "diff", _config_diff, "compare two configurations field by field")
    diff.add_argument("a", type=Path)
    diff.add_argument("b", type=Path)
    diff.add_argument("--json", action="store_true", help="print JSON")
    add(config, "reference", _config_reference, "print the reference of every configuration key as Markdown")

    data = add_group("data", "make, inspect and plan data sets")
    cli_data.add_commands(data, add, _config_arguments)

    assets = add_group("assets", "base weights")
    tiny = add(assets, "tiny", _assets_tiny, "build the tiny base model as a diffusers pipeline folder")
    tiny.add_argument("--architecture", default="wan22-tiny", help="name under config/models")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--out", type=Path, required=True, help="artifact directory")

    weights = add_group("weights", "weights of other programs, in and out")
    weights_commands.add_commands(weights, add)

    report = add_group("report", "what a run produced")
    completion = add(report, "completion", _report_completion, "write the completion report of a run")
    completion.add_argument("run", type=Path, help="run directory")
    completion.add_argument("--out", type=Path, required=True, help="completion-report.md")
    gallery = add(report, "gallery", _report_gallery, "write the self-contained HTML gallery")
    gallery.add_argument("results", type=Path, help="results root")
    gallery.add_argument("--out", type=Path, required=True, help="gallery.html")
    gallery.add_argument("--title", default="SolarWM results")
    gallery.add_argument("--graph", type=Path, help="`snakemake --rulegraph` output to draw")
    graph = add(report, "graph", _report_graph, "draw `snakemake --rulegraph` output (stdin) as SVG")
    graph.add_argument("--out", type=Path, required=True, help="SVG file")

    environment = add_group("environment", "facts about this machine")
    add(environment, "probe", _environment_probe, "print versions and devices as JSON")
    return parser


def _config_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--config", type=Path, required=required, help="recipe, run configuration or resolved-config.json"
    )
    parser.add_argument(
        "--overlay",
        type=Path,
        action="append",
        default=[],
        help="partial configuration merged over --config; repeatable",
    )
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key; repeatable",
    )


def load_arguments(arguments: argparse.Namespace, action: str | None = None) -> Any:
    """Return the resolved configuration of `--config`, `--overlay` and `--set`; its action must be `action`."""
    from solarwm_lib.config.load import load

    resolved = load(arguments.config, overlays=arguments.overlay, sets=arguments.sets)
    if action is not None and resolved.config.action != action:
        raise ConfigError(
            f"{arguments.config}: action is {resolved.config.action!r}, but the command is `solarwm {action}`; "
            f"use `solarwm {resolved.config.action}` or change the key `action`"
        )
    return resolved


def print_json(value: Any) -> None:
    """Print JSON for people and programs: indented, sorted, non-ASCII kept."""
    print(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False))


def _train(arguments: argparse.Namespace) -> int:
    resolved = load_arguments(arguments, "train")
    from solarwm_lib.runtime.launch import launch

    return launch("train", resolved, until_step=arguments.until_step)


def _infer(arguments: argparse.Namespace) -> int:
    resolved = load_arguments(arguments, "infer")
    from solarwm_lib.runtime.launch import launch

    return launch("infer", resolved)


def _preencode(arguments: argparse.Namespace) -> None:
    resolved = load_arguments(arguments, "preencode")
    from solarwm_lib.runtime.launch import refuse_before_start

    refuse_before_start(resolved)
    from solarwm_lib.preencode.part import preencode, preencode_part

    if arguments.part is None and arguments.out is None:
        preencode(resolved)
    elif arguments.part is None or arguments.out is None:
        raise ConfigError("preencode: give --part and --out together, or neither to encode everything")
    else:
        preencode_part(resolved, arguments.part, arguments.out)


def _merge_latents(arguments: argparse.Namespace) -> None:
    resolved = load_arguments(arguments, "preencode")
    from solarwm_lib.runtime.launch import refuse_before_start

    refuse_before_start(resolved)
    from solarwm_lib.preencode.merge import merge_parts

    merge_parts(resolved, arguments.out)


def _preflight(arguments: argparse.Namespace) -> None:
    resolved = load_arguments(arguments, "train")
    from solarwm_lib.training.preflight import preflight

    preflight(resolved, arguments.out, arguments.validated)


def _freeze_plan(arguments: argparse.Namespace) -> None:
    resolved = load_arguments(arguments)
    from solarwm_lib.inference.plan import freeze_plan

    freeze_plan(resolved, arguments.out)


def _validate(arguments: argparse.Namespace) -> None:
    resolved = load_arguments(arguments)
    from solarwm_lib.inference.validation import validate

    validate(resolved, arguments.checkpoint, arguments.plan, arguments.pass_name, arguments.out)


def _compare(arguments: argparse.Namespace) -> None:
    from solarwm_lib.inference.comparison import compare

    compare(arguments.artifacts, arguments.out)


def _verify(arguments: argparse.Namespace) -> None:
    from solarwm_lib.artifacts import verify

    artifact = verify(arguments.path, deep=arguments.deep)
    depth = "sizes and SHA-256" if arguments.deep else "sizes (use --deep for SHA-256)"
    dropped = ", ".join(member.path for member in artifact.dropped)
    thinned = f"; thinned: {dropped} dropped, training cannot go on from it" if dropped else ""
    count = len(artifact.members) - len(artifact.dropped)
    print(
        f"ok {artifact.path}: {artifact.schema}, {count} members, {artifact.bytes} bytes, checked {depth}{thinned}"
    )


def _lineage(arguments: argparse.Namespace) -> None:
    from solarwm_lib.artifacts import format_lineage, lineage, lineage_json

    nodes = lineage(arguments.path)
    if arguments.json:
        print_json(lineage_json(nodes))
    else:
        print(format_lineage(nodes))


def _config_routes(arguments: argparse.Namespace) -> None:
    from solarwm_lib.config.routes import format_table, table

    if arguments.json:
        print_json(table())
    else:
        print(format_table())


def _config_resolve(arguments: argparse.Namespace) -> None:
    resolved = load_arguments(arguments)
    from solarwm_lib.config.load import placeholders, write_resolved

    found = placeholders(resolved.values)
    if found and arguments.strict:
        raise ConfigError(f"placeholder paths in {', '.join(found)}; set them to real paths")
    for key in found:
        print(f"solarwm: warning: {key} holds a placeholder path", file=sys.stderr)
    if arguments.output:
        write_resolved(resolved, arguments.output)
    else:
        print_json(
            {
                "source": resolved.source,
                "source_digest": resolved.source_digest,
                "semantic_digest": resolved.semantic_digest,
                "full_digest": resolved.full_digest,
                "route": resolved.route.key,
                "deviations": resolved.deviations,
                "config": resolved.values,
            }
        )


def _config_diff(arguments: argparse.Namespace) -> None:
    from solarwm_lib.config.identity import diff, format_diff
    from solarwm_lib.config.load import load

    differences = diff(load(arguments.a).values, load(arguments.b).values)
    if arguments.json:
        print_json([difference._asdict() for difference in differences])
    else:
        print(format_diff(differences))


def _config_reference(arguments: argparse.Namespace) -> None:
    from solarwm_lib.config.schema import reference_markdown

    print(reference_markdown(), end="")


def _assets_tiny(arguments: argparse.Namespace) -> None:
    from solarwm_lib.backbones.tiny import build_tiny_assets
    from solarwm_lib.config.architectures import load_architecture

    build_tiny_assets(arguments.out, load_architecture(arguments.architecture), arguments.seed)


def _report_completion(arguments: argparse.Namespace) -> None:
    from solarwm_lib.report.completion import write_completion_report

    write_completion_report(arguments.run, arguments.out)


def _report_gallery(arguments: argparse.Namespace) -> None:
    from solarwm_lib.report.gallery import build

    build(arguments.results, arguments.out, title=arguments.title, graph=arguments.graph)
    print(f"gallery: {arguments.out.resolve()}")


def _report_graph(arguments: argparse.Namespace) -> None:
    from solarwm_lib.artifacts import write_atomic
    from solarwm_lib.report.graph_picture import svg_from_dot

    write_atomic(arguments.out, svg_from_dot(sys.stdin.read()).encode())


def _environment_probe(arguments: argparse.Namespace) -> None:
    from solarwm_lib.runtime.environment import probe

    print_json(probe())
