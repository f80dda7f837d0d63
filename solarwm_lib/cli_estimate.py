"""The `solarwm estimate` command: parsing only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from solarwm_lib.runtime.errors import ConfigError

WORKFLOW_CONFIG = Path("config/config.yaml")


def add_command(
    commands: Any,
    add: Callable[[Any, str, Callable[[argparse.Namespace], Any], str], argparse.ArgumentParser],
    config_arguments: Callable[..., None],
) -> None:
    """Register the command; `add` and `config_arguments` are those of `solarwm_lib.cli`."""
    parser = add(
        commands, "estimate", estimate, "predict memory, FLOPs, traffic and GPU hours of a training run"
    )
    parser.add_argument("run", nargs="?", help="a run of the workflow config, in place of --config")
    config_arguments(parser, required=False)
    parser.add_argument(
        "--configfile",
        type=Path,
        default=WORKFLOW_CONFIG,
        help="workflow config that RUN is in (default: %(default)s)",
    )
    parser.add_argument("--gpu", default="h100-80", help="GPU to plan for (default: %(default)s)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=8, help="GPUs of a machine (default: %(default)s)"
    )
    parser.add_argument(
        "--mfu", type=float, default=0.4, help="assumed share of the GPU's peak FLOPs (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def estimate(arguments: argparse.Namespace) -> None:
    """Print the estimate of `--config` or of a workflow's run."""
    from solarwm_lib.cli import print_json
    from solarwm_lib.estimate.hardware import gpu
    from solarwm_lib.estimate.report import facts, text
    from solarwm_lib.estimate.workload import workload_of

    if not 0 < arguments.mfu <= 1:
        raise ConfigError(f"--mfu: found {arguments.mfu:g}, expected a share above 0, at most 1")
    if arguments.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node: found {arguments.gpus_per_node}, expected 1 or more")
    chosen = gpu(arguments.gpu)
    resolved = _resolved(arguments)
    if resolved.config.action != "train":
        raise ConfigError(
            f"action: found {resolved.config.action}, expected train: only training is estimated"
        )
    found = facts(resolved, workload_of(resolved, local_world=arguments.gpus_per_node), chosen, arguments.mfu)
    if arguments.json:
        print_json(found)
    else:
        print(text(found), end="")


def _resolved(arguments: argparse.Namespace) -> Any:
    if (arguments.run is None) == (arguments.config is None):
        raise ConfigError("estimate: give either a run of the workflow config or --config")
    if arguments.config is not None:
        from solarwm_lib.cli import load_arguments

        return load_arguments(arguments)
    if arguments.overlay or arguments.sets:
        raise ConfigError(
            "estimate: --overlay and --set go with --config; a run has its own in the workflow config"
        )
    from solarwm_lib.config.load import did_you_mean, read_values
    from solarwm_lib.graph import load_workflow

    workflow = load_workflow(read_values(arguments.configfile), Path(__file__).parents[1])
    if arguments.run not in workflow.config.runs:
        known = workflow.config.runs
        raise ConfigError(
            f"run: found {arguments.run}{did_you_mean(arguments.run, known)}, expected one of {', '.join(known)} of {arguments.configfile}"
        )
    return workflow.resolved[arguments.run]
