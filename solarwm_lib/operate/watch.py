"""Show the state of a run again and again until it ends: in place on a terminal, else one line per change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from solarwm_lib.operate import show
from solarwm_lib.operate.run_state import RunState, read_state
from solarwm_lib.runtime.errors import DistributedError

CLEAR = "\x1b[H\x1b[2J"


def watch(
    run_dir: Path,
    interval: float,
    out: TextIO | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Show the run until its newest attempt has ended; return that one's exit code.

    A run that has not started yet is waited for. One that was killed has no exit code of its own: 7.
    """
    out = out or sys.stdout
    in_place, before = out.isatty(), ""
    while True:
        state = read_state(run_dir)
        line = show.one_line(state)
        if in_place:
            print(f"{CLEAR}{show.text(state)}", file=out, flush=True)
        elif line != before:
            print(f"{time.strftime('%H:%M:%S')}  {line}", file=out, flush=True)
        if state.ended:
            return exit_code(state)
        before = line
        wait(interval)


def exit_code(state: RunState) -> int:
    """Return the exit code of an attempt that has ended."""
    if state.exit_code is not None:
        return state.exit_code
    return 0 if state.state == "complete" else DistributedError.exit_code
