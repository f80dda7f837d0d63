"""What a run directory says about its run: read-only, from markers, launch records and metrics; no torch.

What does not verify is reported in place (a `problem`), because a report exists to say so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from solarwm_lib import artifacts
from solarwm_lib.runtime.errors import ArtifactError, ConfigError
from solarwm_lib.training import metrics

CHECKPOINT_SCHEMA = "solarwm.checkpoint.v1"
VALIDATION_SCHEMA = "solarwm.validation.v1"
PREFLIGHT_SCHEMA = "solarwm.preflight.v1"
TAIL_STEPS = 50


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint or rolling save, or why it does not count. `state` is its `state.json`.

    One that was `thinned` has weights to sample from and none of the state to continue from.
    """

    step: int
    name: str
    bytes: int = 0
    digest: str = ""
    state: dict[str, Any] | None = None
    problem: str | None = None
    thinned: bool = False

    @property
    def status(self) -> str:
        return "damaged" if self.problem else "thinned" if self.thinned else "complete"


@dataclass(frozen=True)
class Pass:
    """A validation pass of a checkpoint. `summary` is its `summary.json`; `status` also knows missing and damaged.

    `comparisons` counts the slots with a comparison video.
    """

    step: int
    name: str
    path: Path
    status: str
    summary: dict[str, Any] | None = None
    problem: str | None = None
    comparisons: int = 0

    def mean(self, metric: str) -> float | None:
        return (self.summary or {}).get("means", {}).get(metric)


@dataclass(frozen=True)
class Attempt:
    """One start of the run: its launch manifest, result record and configuration (each may be absent after a kill)."""

    name: str
    manifest: dict[str, Any]
    result: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    """Everything known about a run. `config` is its resolved configuration, `records` its metrics by step."""

    path: Path
    config: dict[str, Any]
    attempts: list[Attempt]
    records: list[dict[str, Any]]
    checkpoints: list[Checkpoint]
    passes: list[Pass]
    preflight: dict[str, Any] | None
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.name)

    @property
    def launch(self) -> dict[str, Any]:
        """Manifest of the newest attempt that has one."""
        return next((attempt.manifest for attempt in reversed(self.attempts) if attempt.manifest), {})

    @property
    def in_force(self) -> dict[str, Any]:
        """Configuration of the newest attempt: topology and cadence may differ from what the run began with."""
        return next((attempt.config for attempt in reversed(self.attempts) if attempt.config), self.config)

    @property
    def final(self) -> Checkpoint | None:
        """The checkpoint of the highest step that verifies."""
        return next((item for item in reversed(self.checkpoints) if item.problem is None), None)

    def tail(self, key: str, *, how: Any = fmean) -> float | None:
        """Mean (or `how`) of a metric over the last 50 recorded steps."""
        values = [record[key] for record in self.records[-TAIL_STEPS:] if record.get(key) is not None]
        return how(values) if values else None

    def step_seconds(self) -> float | None:
        return self.tail("step_seconds", how=median)


def read_run(run_dir: Path | str) -> RunFacts:
    """Read a run directory. Raises ConfigError if it holds no `resolved-config.json`."""
    path = Path(run_dir)
    config = read_json(path / "resolved-config.json")
    if not config:
        beside = (
            sorted(p.parent.name for p in path.parent.glob("*/resolved-config.json"))
            if path.parent.is_dir()
            else []
        )
        raise ConfigError(
            f"{path}: not a run directory (no readable resolved-config.json); runs beside it: {', '.join(beside) or 'none'}"
        )
    log = path / metrics.FILE
    return RunFacts(
        path=path,
        config=config,
        attempts=attempts_of(path),
        records=metrics.read(log) if log.is_file() else [],
        checkpoints=[checkpoint_of(folder) for folder in save_folders(path, "checkpoint_model_*")],
        passes=passes_of(path / "validation", pass_names(config)),
        preflight=_preflight(path / "preflight"),
        events=metrics.read_events(log) if log.is_file() else [],
    )


def attempts_of(run_dir: Path) -> list[Attempt]:
    """Return the starts of a run in order."""
    folders = sorted(
        (run_dir / "launches").glob("attempt-*"), key=lambda folder: (len(folder.name), folder.name)
    )
    return [
        Attempt(
            folder.name,
            *(
                read_json(folder / f"{name}.json")
                for name in ("launch-manifest", "run-result", "resolved-config")
            ),
        )
        for folder in folders
    ]


def pass_names(config: dict[str, Any]) -> list[str]:
    """Return the names of the passes that a run is to make of its validated checkpoints."""
    return [item["name"] for item in _section(config, "validation").get("passes") or []]


def seconds_lost(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return event -> seconds in which no step was made: saves, and steps that a restart had to repeat."""
    lost: dict[str, float] = {}
    for event in events:
        if isinstance(seconds := event.get("seconds"), int | float):
            lost[event["event"]] = lost.get(event["event"], 0.0) + seconds
    return lost


def setting(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """Value of a dotted key of a resolved configuration."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return default
        config = config[part]
    return config


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    return config.get(name) or {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none, it is being written or it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def is_begun(directory: Path) -> bool:
    """True for a directory with something in it."""
    return directory.is_dir() and any(directory.iterdir())


def save_folders(parent: Path, pattern: str) -> list[Path]:
    """Return the directories of checkpoints or rolling saves by name."""
    return [folder for folder in sorted(parent.glob(pattern)) if is_begun(folder)]


def checkpoint_of(folder: Path) -> Checkpoint:
    """Return the checkpoint or rolling save in `folder` after comparing its members' sizes with its marker."""
    digits = folder.name.rpartition("_")[2]
    step = int(digits) if digits.isdigit() else 0
    try:
        artifact = artifacts.read(folder, CHECKPOINT_SCHEMA)
        return Checkpoint(
            step,
            folder.name,
            artifact.bytes,
            artifact.digest,
            read_json(artifact.file("state.json")),
            thinned=bool(artifact.dropped),
        )
    except ArtifactError as error:
        return Checkpoint(step, folder.name, problem=_local(str(error), folder))


def passes_of(folder: Path, names: list[str]) -> list[Pass]:
    """Return the passes of every step that was validated, the intended `names` first, in order of steps."""
    found = []
    for step_dir in sorted(folder.glob("step_*")):
        digits = step_dir.name.removeprefix("step_")
        if not digits.isdigit():
            continue
        marked = {path.parent.name for path in step_dir.glob(f"*/{artifacts.MARKER}")}
        others = sorted(
            name for name in marked - set(names) if not name.endswith(".latents") and ".failed-" not in name
        )
        found += [_pass(int(digits), step_dir / name) for name in [*names, *others]]
    return found


def _pass(step: int, path: Path) -> Pass:
    # Snakemake makes the directory before the job fills it.
    if not is_begun(path):
        failed = sorted(path.parent.glob(f"{path.name}.failed-*"))
        problem = f"every slot failed, see {failed[-1].name}" if failed else "not made"
        return Pass(step, path.name, path, "failed" if failed else "missing", problem=problem)
    try:
        artifact = artifacts.read(path, VALIDATION_SCHEMA)
        summary = read_json(artifact.file("summary.json"))
        comparisons = sum(member.path.endswith("/compare.mp4") for member in artifact.members)
        return Pass(step, path.name, path, str(summary["status"]), summary, comparisons=comparisons)
    except (ArtifactError, KeyError) as error:
        return Pass(step, path.name, path, "damaged", problem=_local(str(error), path))


def _preflight(folder: Path) -> dict[str, Any] | None:
    """The JSON members of the preflight artifact, merged; None without one that verifies."""
    try:
        artifact = artifacts.read(folder, PREFLIGHT_SCHEMA)
    except ArtifactError:
        return None
    merged: dict[str, Any] = {}
    for member in artifact.members:
        if member.path.endswith(".json") and "/" not in member.path:
            merged |= read_json(artifact.path / member.path)
    return merged


def _local(message: str, folder: Path) -> str:
    """Shorten the artifact's own absolute path, which is of no use on another machine."""
    return message.replace(str(folder.absolute()), folder.name).replace(f"{folder.absolute().parent}/", "")
