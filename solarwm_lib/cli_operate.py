"""The commands that operate a run from outside: parsing and hand-over, as in `cli`. None of them imports torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from solarwm_lib.runtime.errors import ConfigError

Handler = Callable[[argparse.Namespace], Any]
Add = Callable[[Any, str, Handler, str], argparse.ArgumentParser]


def add_commands(commands: Any, add: Add) -> None:
    """Add status, watch, stop and diagnose to `commands`; `add` is that of `cli.build_parser`."""
    status = add(commands, "status", _status, "where a run stands: state, step, losses, saves, passes, ranks")
    watch = add(commands, "watch", _watch, "show the status until the run ends, and end with its exit code")
    stop = add(commands, "stop", _stop, "ask the processes of a run on this machine to save and end")
    diagnose = add(
        commands, "diagnose", _diagnose, "first failing boundary of a run, its evidence, what to do"
    )
    for command in (status, watch, stop, diagnose):
        command.add_argument("run", help="run directory, or name of a run of the workflow")
    for command in (status, diagnose):
        command.add_argument("--json", action="store_true", help="print JSON")
    watch.add_argument("--interval", type=float, default=5.0, help="seconds between looks")
    stop.add_argument("--yes", action="store_true", help="do not ask; needed where nobody can answer")
    stop.add_argument(
        "--now", action="store_true", help="SIGKILL after 10 seconds; steps since the last save are lost"
    )


def _status(arguments: argparse.Namespace) -> None:
    from solarwm_lib.cli import print_json
    from solarwm_lib.operate import show
    from solarwm_lib.operate.run_state import find_run, read_state

    state = read_state(find_run(arguments.run))
    if arguments.json:
        print_json(state.as_json())
    else:
        print(show.text(state))


def _watch(arguments: argparse.Namespace) -> int:
    from solarwm_lib.operate.run_state import find_run
    from solarwm_lib.operate.watch import watch

    if arguments.interval <= 0:
        raise ConfigError(f"--interval is {arguments.interval:g}; expected more than 0 seconds")
    return watch(find_run(arguments.run), arguments.interval)


def _stop(arguments: argparse.Namespace) -> None:
    from solarwm_lib.operate.run_state import find_run
    from solarwm_lib.operate.stop import stop, targets

    run_dir = find_run(arguments.run)
    found = targets(run_dir)
    for process, reason in found.others:
        print(f"left alone: {process.label}: {reason}")
    if not found.ours:
        print(f"nothing to stop: no process of {run_dir} can be told to run on this machine")
        return
    for process in found.ours:
        print(f"to stop: {process.label}")
    if not arguments.yes and not _confirmed():
        print("nothing was stopped")
        return
    stop(run_dir, found.ours, now=arguments.now)


def _confirmed() -> bool:
    """Ask on the terminal. Raises ConfigError where nobody can answer."""
    if not sys.stdin.isatty():
        raise ConfigError("stop: standard input is no terminal, so nobody can confirm; give --yes")
    return input("stop these processes? [y/N] ").strip().lower() in ("y", "yes")


def _diagnose(arguments: argparse.Namespace) -> int:
    from solarwm_lib.cli import print_json
    from solarwm_lib.operate.diagnose import diagnose, text
    from solarwm_lib.operate.run_state import find_run

    diagnosis = diagnose(find_run(arguments.run))
    if arguments.json:
        print_json(diagnosis.as_json())
    else:
        print(text(diagnosis))
    return diagnosis.exit_code
