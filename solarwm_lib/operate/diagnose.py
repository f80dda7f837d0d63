"""Find the first boundary at which a run failed, with evidence and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from solarwm_lib.operate.boundaries import BOUNDARIES, Finding, bug
from solarwm_lib.operate.evidence import Evidence, collect


@dataclass(frozen=True)
class Diagnosis:
    """State of the run, findings in the order of triage (the first is the one to act on), and what is no failure."""

    name: str
    state: str
    detail: str
    findings: list[Finding]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """That of the first finding's class, 0 without any."""
        return self.findings[0].exit_code if self.findings else 0

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "exit_code": self.exit_code}


def diagnose(run_dir: Path) -> Diagnosis:
    """Look at every boundary of a run. Raises ConfigError if the directory is none."""
    seen = collect(run_dir)
    findings = [found for look in BOUNDARIES if (found := look(seen)) is not None]
    if not findings and (other := bug(seen)) is not None:
        findings = [other]
    return Diagnosis(seen.state.name, seen.state.state, seen.state.detail, findings, [*notes(seen)])


def notes(seen: Evidence) -> Iterator[str]:
    """Yield what a reader may wonder about and that is no failure of the newest attempt."""
    if seen.state.state in ("preempted", "stopped"):
        yield "the state was saved: run the same command again to continue"
    old = [dump.path.name for dump in seen.dumps if dump.old]
    if old:
        yield f"diagnostics of earlier attempts: {', '.join(old)}"
    for item in seen.passes:
        if item.status == "missing":
            yield f"step {item.step}, pass {item.name}: not made"
    for save in (*seen.state.checkpoints, *seen.state.rolling):
        if save["problem"] and "is not complete" in save["problem"]:
            yield f"{save['name']}: has no completion marker and is ignored"
    if seen.state.replaced:
        yield "clips that others stood in for: " + ", ".join(
            f"{k} {n}" for k, n in sorted(seen.state.replaced.items())
        )


def text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as lines for a terminal."""
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    # The evidence says it again.
    detail = diagnosis.detail if not diagnosis.findings else ""
    yield f"{diagnosis.name}: {diagnosis.state}" + (f" ({detail})" if detail else "")
    if not diagnosis.findings:
        yield "nothing is wrong"
    for number, finding in enumerate(diagnosis.findings):
        head = "first failing boundary" if number == 0 else "then"
        yield f"{head}: {finding.boundary} (exit code {finding.exit_code})"
        yield from (f"  {line}" for line in finding.evidence)
        yield f"  next: {finding.advice}"
    yield from (f"note: {note}" for note in diagnosis.notes)
