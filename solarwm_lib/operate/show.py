"""The state of a run as text for a terminal, and as one line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from solarwm_lib.operate.run_state import RECENT_STEPS, RunState, duration

LINE_DETAIL = 160


def text(state: RunState) -> str:
    """Return everything about a run as lines."""
    return "\n".join(_lines(state))


def one_line(state: RunState) -> str:
    """Return what changes while a run works, in one line."""
    parts = [state.state, f"step {_steps(state)}"]
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4f}")
    if state.step_seconds is not None:
        parts.append(f"{state.step_seconds:.2f} s/step")
    if state.seconds_to_checkpoint is not None:
        parts.append(f"{duration(state.seconds_to_checkpoint)} left")
    parts.append(f"{len(state.checkpoints)} checkpoints")
    if state.passes:
        done = sum(item.status == "complete" for item in state.passes)
        parts.append(f"{done}/{len(state.passes)} passes complete")
    detail = textwrap.shorten(state.detail, LINE_DETAIL, placeholder=" ...")
    return "  ".join(parts) + (f"  ({detail})" if detail else "")


def _lines(state: RunState) -> Iterator[str]:
    yield f"{state.name}: {state.state}" + (f" ({state.detail})" if state.detail else "")
    yield from _pairs(
        [
            ("directory", state.path),
            ("route", state.route),
            ("attempt", f"{state.attempt} of {state.attempts}" if state.attempt else None),
            ("step", _steps(state)),
            ("loss", _number(state.loss, ".4f")),
            ("gradient norm", _number(state.gradient_norm, ".3f")),
            ("learning rate", _number(state.learning_rate, ".3e")),
            ("step time", _step_time(state)),
            ("throughput", _number(state.samples_per_second, ".2f", " samples/s")),
            ("time to checkpoint", _duration(state.seconds_to_checkpoint)),
            ("time to the end", _duration(state.seconds_to_end)),
            ("peak memory of rank 0", _bytes(state.memory_bytes)),
            ("replaced clips", _counts(state.replaced)),
            ("time lost", _lost(state)),
            ("checkpoints", _saves(state.checkpoints) or "none"),
            ("rolling saves", _saves(state.rolling)),
        ]
    )
    if state.passes:
        yield ""
        passes = [(x.step, x.name, x.status, x.ok, x.error, x.skipped, x.problem or "") for x in state.passes]
        yield from _table(("step", "pass", "status", "ok", "error", "skipped", ""), passes)
    if state.ranks:
        yield ""
        ranks = [
            (
                rank.rank,
                rank.host,
                rank.pid,
                {True: "yes", False: "no", None: "?"}[rank.alive],
                rank.phase,
                rank.step,
                rank.collective or "-",
                duration(rank.age_seconds),
            )
            for rank in state.ranks
        ]
        yield from _table(("rank", "host", "pid", "alive", "phase", "step", "collective", "last beat"), ranks)


def _steps(state: RunState) -> str:
    shown = f"{state.step}/{state.target_step}" if state.target_step else str(state.step)
    more = state.planned_steps and state.planned_steps != state.target_step
    return shown + (f" of {state.planned_steps} planned" if more else "")


def _step_time(state: RunState) -> str | None:
    if state.step_seconds is None:
        return None
    waiting = f", {state.data_fraction:.0%} waiting for data" if state.data_fraction is not None else ""
    return f"{state.step_seconds:.3f} s (mean of up to {RECENT_STEPS} steps){waiting}"


def _lost(state: RunState) -> str | None:
    parts = [
        f"{event.replace('_', ' ')} {duration(seconds)}"
        for event, seconds in sorted(state.lost_seconds.items())
    ]
    return ", ".join(parts) or None


def _saves(saves: Sequence[dict[str, Any]]) -> str | None:
    words = [
        str(save["step"]) + ("" if save["status"] == "complete" else f" ({save['status']})") for save in saves
    ]
    return ", ".join(words) or None


def _counts(counts: dict[str, int]) -> str | None:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()) if count) or None


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _bytes(value: int | None) -> str | None:
    return f"{value / 2**30:.2f} GiB" if value else None


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else duration(seconds)


def _pairs(rows: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    shown = [(name, value) for name, value in rows if value is not None]
    width = max(len(name) for name, _ in shown)
    yield from (f"  {name:<{width}}  {value}" for name, value in shown)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {line}".rstrip()
