"""What a run left behind that speaks about a failure: its newest attempt, dumps, logs, writes in progress."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solarwm_lib.operate.processes import began, liveness, of_record
from solarwm_lib.operate.run_state import RunState, read_state
from solarwm_lib.report.facts import Attempt, Pass, attempts_of, pass_names, passes_of, read_json
from solarwm_lib.runtime.owner import OWNER

TAIL_BYTES = 2**16
ERROR_LINE = re.compile(r"^solarwm: (error|bug): .+", re.MULTILINE)


@dataclass(frozen=True)
class Dump:
    """A file under `diagnostics/`. It is `old` if the newest attempt completed or began after it was written."""

    path: Path
    content: dict[str, Any]
    old: bool

    @property
    def order(self) -> tuple[int, int]:
        """Step, then rank."""
        return int(self.content.get("step") or 0), int(self.content.get("rank") or 0)


@dataclass(frozen=True)
class Log:
    """The end of a job's log, if the run lies in a results folder that has one."""

    path: Path
    tail: str

    @property
    def error(self) -> str | None:
        """The last error line of the program."""
        return next((match.group() for match in reversed([*ERROR_LINE.finditer(self.tail)])), None)


@dataclass(frozen=True)
class Evidence:
    """What `solarwm diagnose` looks at. `log` is that of the newest training job, None if older than the newest attempt."""

    run_dir: Path
    state: RunState
    attempt: Attempt
    dumps: list[Dump]
    passes: list[Pass]
    log: Log | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str | None:
        """`error_kind` of the newest attempt."""
        return self.attempt.result.get("error_kind") if self.state.state == "failed" else None

    @property
    def message(self) -> str:
        return str(self.attempt.result.get("message") or "")

    @property
    def exit_code(self) -> int | None:
        return self.attempt.result.get("exit_code")

    def fresh(self, prefix: str) -> list[Dump]:
        """Dumps of the newest attempt whose names start with `prefix`, first step and lowest rank first."""
        found = [dump for dump in self.dumps if dump.path.name.startswith(prefix) and not dump.old]
        return sorted(found, key=lambda dump: dump.order)

    def log_lines(self) -> list[str]:
        """Evidence from the log: its last error, or its last lines."""
        if self.log is None:
            return []
        last = [self.log.error] if self.log.error else self.log.tail.strip().splitlines()[-3:]
        return [f"{self.log.path}: {line.strip()}" for line in last if line]

    def record_lines(self) -> list[str]:
        """Evidence from the newest attempt's record."""
        if not self.attempt.result:
            return []
        where = self.run_dir / "launches" / self.attempt.name / "run-result.json"
        return [
            f"{where}: {self.attempt.result.get('status')}" + (f", {self.message}" if self.message else "")
        ]


def collect(run_dir: Path) -> Evidence:
    """Read the evidence of a run. Raises ConfigError if the directory is none."""
    state = read_state(run_dir)
    attempts = attempts_of(run_dir)
    newest = attempts[-1] if attempts else Attempt("", {}, {})
    begun = began(newest)
    dumps = [
        Dump(path, read_json(path), state.state == "complete" or path.stat().st_mtime < begun)
        for path in sorted((run_dir / "diagnostics").glob("*.json"))
    ]
    config = read_json(run_dir / "resolved-config.json")
    passes = passes_of(run_dir / "validation", pass_names(config))
    return Evidence(run_dir, state, newest, dumps, passes, newest_log(run_dir, begun))


def newest_log(run_dir: Path, since: float) -> Log | None:
    """Return the newest log of the run's training or preflight that changed after `since`."""
    logs = run_dir.resolve().parent.parent / "logs"
    name = run_dir.resolve().name
    found = [*logs.glob(f"train_segment/{name}/*.log"), *logs.glob(f"preflight/{name}.log")]
    fresh = [path for path in found if path.stat().st_mtime >= since]
    return read_log(max(fresh, key=lambda path: path.stat().st_mtime)) if fresh else None


def pass_log(run_dir: Path, step: int, name: str) -> Log | None:
    """Return the log of the job that made, or did not make, a validation pass."""
    path = (
        run_dir.resolve().parent.parent / "logs/validate" / run_dir.resolve().name / f"{step:06d}.{name}.log"
    )
    path = path if path.is_file() else path.with_name(f"{step}.{name}.log")
    return read_log(path) if path.is_file() else None


def read_log(path: Path) -> Log:
    """Return the end of a log."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return Log(path, file.read().decode(errors="replace"))


def failed_slots(directory: Path) -> list[dict[str, Any]]:
    """Return the failures in the newest evidence of a pass of which no slot succeeded, as its summary would list them."""
    folders = sorted(directory.parent.glob(f"{directory.name}.failed-*"))
    manifests = (
        [read_json(path) for path in sorted(folders[-1].glob("slot-*/manifest.json"))] if folders else []
    )
    return [
        {
            "slot": manifest.get("slot"),
            "sample_id": manifest.get("case", {}).get("sample_id"),
            **manifest["error"],
        }
        for manifest in manifests
        if manifest.get("error")
    ]


def unfinished(directory: Path) -> Sequence[tuple[Path, bool]]:
    """Return the staging folders of an artifact, each with whether its writer lives here."""
    found = []
    for path in sorted(directory.parent.glob(f".{directory.name}.*.partial")):
        owner = of_record("writer", read_json(path / OWNER))
        found.append((path, owner is not None and liveness(owner) == "alive"))
    return found
