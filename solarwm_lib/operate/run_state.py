"""The state of a run, read from its directory: records, heartbeats, metrics, markers. Nothing is written, no torch.

What it costs grows with the number of checkpoints and passes: their members' sizes are compared, once per marker in a process
that asks again. Of the metrics only the last steps are parsed; the rest is searched for events.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from solarwm_lib.operate.processes import Liveness, Process, heartbeats, liveness, of_record, run_processes
from solarwm_lib.report import facts
from solarwm_lib.report.facts import Attempt, Checkpoint, Pass, attempts_of, read_json, setting
from solarwm_lib.runtime.errors import ConfigError
from solarwm_lib.runtime.manifests import MARKER, THINNED
from solarwm_lib.runtime.process import STEP_PHASES, place
from solarwm_lib.training import metrics

RECENT_STEPS = 20
# A step is late after this many times its usual time, and nothing is late before QUIET_SECONDS; starting and saving take
# longer than a step and say nothing meanwhile.
QUIET_STEPS, QUIET_SECONDS, QUIET_SECONDS_ASIDE = 20, 120.0, 900.0
ENDED = ("stopped", "preempted", "failed", "complete")
STOP_REQUEST = "stop-request.json"
INTERRUPTED = 130


@dataclass(frozen=True)
class Rank:
    """What one rank last said: seconds since then, and whether its process still runs (None: cannot be told here)."""

    rank: int
    host: str
    pid: int
    alive: bool | None
    phase: str
    step: int
    collective: str | None
    age_seconds: float


@dataclass(frozen=True)
class PassCounts:
    """A validation pass of a step: status, and its slots by how they ended."""

    step: int
    name: str
    status: str
    ok: int = 0
    error: int = 0
    skipped: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class RunState:
    """Everything `solarwm status` shows. Seconds and means are over the last `RECENT_STEPS` records.

    `target_step` is where the newest attempt stops, `planned_steps` where the learning-rate schedule does. `data_fraction` is
    the share of the step time that waited for data. Times to come count steps alone, and are None unless the run works.
    `lost_seconds` is by kind of event.
    """

    path: str
    name: str
    route: str | None
    state: str
    detail: str
    exit_code: int | None
    attempt: str | None
    attempts: int
    step: int
    target_step: int | None
    planned_steps: int | None
    loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    step_seconds: float | None = None
    data_fraction: float | None = None
    samples_per_second: float | None = None
    seconds_to_checkpoint: float | None = None
    seconds_to_end: float | None = None
    memory_bytes: int | None = None
    replaced: dict[str, int] = field(default_factory=dict)
    lost_seconds: dict[str, float] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    rolling: list[dict[str, Any]] = field(default_factory=list)
    passes: list[PassCounts] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """True once the newest attempt is over."""
        return self.state in ENDED

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def find_run(run: str, workdir: Path = Path()) -> Path:
    """Return the directory of a run given by its path, or by its name in the workflow of `workdir`.

    Raises ConfigError naming the runs there are.
    """
    runs = workdir / _results_root(workdir) / "runs"
    for path in (workdir / run, runs / run):
        if (path / "resolved-config.json").is_file():
            return path
    known = sorted(path.parent.name for path in runs.glob("*/resolved-config.json"))
    raise ConfigError(
        f"{run}: neither a run directory (with resolved-config.json) nor a run in {runs}; runs there: "
        f"{', '.join(known) or 'none'}"
    )


def _results_root(workdir: Path) -> str:
    """`results` of the workflow config, if there is one that can be read."""
    path = workdir / "config" / "config.yaml"
    if not path.is_file():
        return "results"
    import yaml

    try:
        values = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, OSError):
        return "results"
    return str(values.get("results", "results")) if isinstance(values, dict) else "results"


def read_state(run_dir: Path, now: float | None = None) -> RunState:
    """Return the state of a run directory at wall-clock time `now`. Raises ConfigError if it is none."""
    now = time.time() if now is None else now
    config = read_json(run_dir / "resolved-config.json")
    if not config:
        raise ConfigError(f"{run_dir}: not a run directory (no readable resolved-config.json)")
    attempts = attempts_of(run_dir)
    newest = attempts[-1] if attempts else Attempt("", {}, {})
    beats = heartbeats(run_dir)
    log = run_dir / metrics.FILE
    records = metrics.read_tail(log, RECENT_STEPS) if log.is_file() else []
    seconds = fmean(record["step_seconds"] for record in records) if records else None

    ranks = [_rank(beat, now) for beat in beats]
    alive = {process: liveness(process) for process in run_processes(run_dir, beats)}
    stop = read_json(run_dir / "launches" / newest.name / STOP_REQUEST) if newest.name else {}
    state, detail = judge(newest.result, ranks, alive, stop, seconds)

    planned = setting(config, "train.max_steps")
    target = newest.manifest.get("until_step") or planned
    step = max([*(record["step"] for record in records[-1:]), *(rank.step for rank in ranks)], default=0)
    works = state == "running" and seconds is not None
    return RunState(
        path=str(run_dir),
        name=str(config.get("name") or run_dir.name),
        route=newest.manifest.get("route"),
        state=state,
        detail=detail,
        exit_code=newest.result.get("exit_code"),
        attempt=newest.name or None,
        attempts=len(attempts),
        step=step,
        target_step=target,
        planned_steps=planned,
        seconds_to_checkpoint=seconds * max(0, target - step) if works and target and seconds else None,
        seconds_to_end=seconds * max(0, planned - step) if works and planned and seconds else None,
        lost_seconds=facts.seconds_lost(metrics.read_events(log)) if log.is_file() else {},
        checkpoints=_saves(run_dir, "checkpoint_model_*"),
        rolling=_saves(run_dir / "rolling", "step_*"),
        passes=[_counts(item) for item in _passes(run_dir, facts.pass_names(config))],
        ranks=ranks,
        **_recent(records),
    )


def judge(
    result: Mapping[str, Any],
    ranks: Sequence[Rank],
    alive: Mapping[Process, Liveness],
    stop: Mapping[str, Any],
    step_seconds: float | None,
) -> tuple[str, str]:
    """Return the state of the newest attempt in a word, and what it is judged from.

    `result` is its run-result.json, `alive` the liveness of every recorded process, `stop` who asked it to stop.
    """
    status = result.get("status")
    message = str(result.get("message") or "")
    if status == "complete":
        return "complete", ""
    if status == "preempted":
        asked = bool(stop) or "(SIGINT)" in message
        return "stopped" if asked else "preempted", message
    if status == "failed":
        return "stopped" if result.get("exit_code") == INTERRUPTED else "failed", message
    if status is None and not alive:
        return "never started", ""

    if "alive" in alive.values():
        done = {f"rank {rank.rank}" for rank in ranks if rank.phase == "complete"}
        gone = [p.label for p, found in alive.items() if found == "gone" and p.role not in done]
        if gone:
            return "hanging?", f"{gone[0]}, is gone and others still run"
        return _quiet(ranks, step_seconds)
    if "unknown" in alive.values():
        hosts = sorted({process.host for process, found in alive.items() if found == "unknown"})
        state, detail = _quiet(ranks, step_seconds)
        return (
            state,
            detail
            or f"judged by its heartbeats: its processes on {', '.join(hosts)} cannot be seen from here",
        )
    if not alive:
        return (
            "failed",
            f"process {result.get('pid')} on {result.get('host')} left no heartbeat and no result",
        )
    first = next(iter(alive))
    if stop:
        return "stopped", f"{first.label}, was ended as asked"
    return "failed", f"{first.label}, is gone and left no result: it was killed"


def _quiet(ranks: Sequence[Rank], step_seconds: float | None) -> tuple[str, str]:
    """Judge a run whose processes live by how long no rank has said anything."""
    if not ranks:
        return "running", "no heartbeat yet"
    last = min(ranks, key=lambda rank: rank.age_seconds)
    if last.age_seconds <= quiet_limit(last.phase, step_seconds):
        return "running", ""
    return "hanging?", (
        f"no rank got on for {duration(last.age_seconds)}; the last was rank {last.rank}, {place(vars(last))}"
    )


def quiet_limit(phase: str, step_seconds: float | None) -> float:
    """Return after how many seconds without a heartbeat a run in `phase` is late."""
    usual = QUIET_STEPS * (step_seconds or 0.0)
    return max(usual, QUIET_SECONDS if phase in STEP_PHASES else QUIET_SECONDS_ASIDE)


def _rank(beat: Mapping[str, Any], now: float) -> Rank:
    process = of_record(f"rank {beat['rank']}", beat)
    known = {"alive": True, "gone": False, "unknown": None}
    return Rank(
        rank=beat["rank"],
        host=str(beat.get("host", "")),
        pid=int(beat.get("pid", 0)),
        alive=known[liveness(process)] if process else None,
        phase=str(beat.get("phase", "")),
        step=int(beat.get("step", 0)),
        collective=beat.get("collective"),
        age_seconds=round(max(0.0, now - float(beat.get("wall_time", now))), 3),
    )


def _recent(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The newest record's numbers, and means over all of them."""
    if not records:
        return {}
    last = records[-1]
    seconds = fmean(record["step_seconds"] for record in records)
    waited = fmean(record["data_seconds"] for record in records)
    return {
        **{key: last.get(key) for key in ("loss", "gradient_norm", "learning_rate", "memory_bytes")},
        "step_seconds": seconds,
        "data_fraction": waited / seconds if seconds else None,
        "samples_per_second": fmean(record["samples_per_second"] for record in records),
        "replaced": dict(last.get("replaced") or {}),
    }


def _saves(folder: Path, pattern: str) -> list[dict[str, Any]]:
    found = [_checkpoint(path) for path in facts.save_folders(folder, pattern)]
    return [
        {
            "step": item.step,
            "name": item.name,
            "status": item.status,
            "bytes": item.bytes,
            "problem": item.problem,
        }
        for item in sorted(found, key=lambda item: item.step)
    ]


def _checkpoint(folder: Path) -> Checkpoint:
    return _verified_checkpoint(folder, *(_changed(folder / name) for name in (MARKER, THINNED)))


# A marker never changes: `watch` compares the members of an artifact once.
@functools.lru_cache(maxsize=4096)
def _verified_checkpoint(folder: Path, *_: int) -> Checkpoint:
    return facts.checkpoint_of(folder)


def _passes(run_dir: Path, names: Sequence[str]) -> list[Pass]:
    folder = run_dir / "validation"
    markers = [*folder.glob("step_*/*"), *folder.glob("step_*/*/COMPLETE.json")]
    changed = tuple(sorted((str(path), _changed(path)) for path in markers))
    return _verified_passes(folder, tuple(names), changed)


@functools.lru_cache(maxsize=16)
def _verified_passes(folder: Path, names: tuple[str, ...], _: object) -> list[Pass]:
    return facts.passes_of(folder, list(names))


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _counts(item: Pass) -> PassCounts:
    slots = (item.summary or {}).get("slots") or {}
    counts = {key: int(slots.get(key, 0)) for key in ("ok", "error", "skipped")}
    return PassCounts(item.step, item.name, item.status, **counts, problem=item.problem)


def duration(seconds: float) -> str:
    """Return `3 d 04 h`, `2 h 05 min`, `4 min 09 s`, `17 s` or `0.4 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, smaller, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller:02d} {rest}"
    return f"{whole} s"
