"""What a run directory says about its run: read-only, from markers, launch records and metrics; no torch.

What does not verify is reported in place (a `problem`), because a report exists to say so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    """A published checkpoint, or why it does not count. `state` is its `state.json`."""

    step: int
    name: str
    bytes: int = 0
    digest: str = ""
    state: dict[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Pass:
    """A validation pass of a checkpoint. `summary` is its `summary.json`; `status` also knows missing and damaged."""

    step: int
    name: str
    path: Path
    status: str
    summary: dict[str, Any] | None = None
    problem: str | None = None

    def mean(self, metric: str) -> float | None:
        return (self.summary or {}).get("means", {}).get(metric)


@dataclass(frozen=True)
class Attempt:
    """One start of the run: its launch manifest and result record (either may be absent after a kill)."""

    name: str
    manifest: dict[str, Any]
    result: dict[str, Any]


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

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.name)

    @property
    def launch(self) -> dict[str, Any]:
        """Manifest of the newest attempt that has one."""
        return next((attempt.manifest for attempt in reversed(self.attempts) if attempt.manifest), {})

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
    config = _json(path / "resolved-config.json")
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
        attempts=[
            Attempt(folder.name, _json(folder / "launch-manifest.json"), _json(folder / "run-result.json"))
            for folder in sorted((path / "launches").glob("attempt-*"))
        ],
        records=metrics.read(log) if log.is_file() else [],
        checkpoints=[
            _checkpoint(folder) for folder in sorted(path.glob("checkpoint_model_*")) if folder.is_dir()
        ],
        passes=_passes(
            path / "validation", [item["name"] for item in _section(config, "validation").get("passes") or []]
        ),
        preflight=_preflight(path / "preflight"),
    )


def setting(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """Value of a dotted key of a resolved configuration."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return default
        config = config[part]
    return config


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    return config.get(name) or {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _checkpoint(folder: Path) -> Checkpoint:
    digits = folder.name.removeprefix("checkpoint_model_")
    step = int(digits) if digits.isdigit() else 0
    try:
        artifact = artifacts.read(folder, CHECKPOINT_SCHEMA)
        return Checkpoint(
            step, folder.name, artifact.bytes, artifact.digest, _json(artifact.file("state.json"))
        )
    except ArtifactError as error:
        return Checkpoint(step, folder.name, problem=_local(str(error), folder))


def _passes(folder: Path, names: list[str]) -> list[Pass]:
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
    if not path.is_dir():
        failed = sorted(path.parent.glob(f"{path.name}.failed-*"))
        problem = f"every slot failed, see {failed[-1].name}" if failed else "not made"
        return Pass(step, path.name, path, "failed" if failed else "missing", problem=problem)
    try:
        artifact = artifacts.read(path, VALIDATION_SCHEMA)
        summary = _json(artifact.file("summary.json"))
        return Pass(step, path.name, path, str(summary["status"]), summary)
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
            merged |= _json(artifact.path / member.path)
    return merged


def _local(message: str, folder: Path) -> str:
    """Shorten the artifact's own absolute path, which is of no use on another machine."""
    return message.replace(str(folder.absolute()), folder.name).replace(f"{folder.absolute().parent}/", "")
