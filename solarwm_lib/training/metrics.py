"""What training says about itself: one JSON line per optimizer step, a plot, and progress on the terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from solarwm_lib.artifacts import write_atomic
from solarwm_lib.runtime.errors import ArtifactError

FILE = "metrics.jsonl"
PLOT = "curves.png"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `loss` is the mean over the global batch; `step` counts completed steps, from 1.

    `data_seconds` is the part of `step_seconds` that the step waited for its batch; `learning_rate` is the rate the
    step used; `gradient_norm` is before clipping; `memory_bytes` is the peak of rank 0's process or device so far.
    `batch_digest` is that of the samples the step read, as `solarwm data plan` prints it; `replaced` counts the clips of
    the run, up to this step, that others stood in for, by reason. `details` are numbers that only some objectives have.

    In Stage2 a step is an outer step: the numbers are the critic's, those of a student update stand in `details`.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    step_seconds: float
    data_seconds: float
    samples_per_second: float
    memory_bytes: int
    wall_time: float
    monotonic_time: float
    batch_digest: str = ""
    replaced: dict[str, int] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)


class MetricsLog:
    """Append-only `metrics.jsonl` of a run; each line is flushed, so a kill costs at most the line being written.

    Steps after `restored_step` describe state that was lost and is computed again, except those after `until_step` that
    led to the checkpoint of `published_step`: they stay when an earlier checkpoint is made again. What was lost becomes
    an event. `tensorboard` also writes the numbers to the run's event files, whose failure costs a warning.
    """

    def __init__(
        self,
        run_dir: Path,
        restored_step: int,
        until_step: int = 0,
        published_step: int = 0,
        *,
        tensorboard: bool = False,
    ) -> None:
        self.path = run_dir / FILE
        published = range(until_step + 1, published_step + 1)
        lost = _keep(self.path, restored_step, published)
        if lost:
            seconds = sum(record["step_seconds"] for record in lost)
            append_event(run_dir, "lost_steps", restored_step, steps=len(lost), seconds=seconds)
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._curves: Any = None
        if tensorboard:
            from solarwm_lib.training.tensorboard import TrainingCurves

            later = [record for record in read(self.path) if record["step"] in published]
            self._curves = TrainingCurves(run_dir, restored_step, later)

    def append(self, record: StepRecord) -> None:
        """Write one record."""
        self._file.write(json.dumps(asdict(record), sort_keys=True, allow_nan=False) + "\n")
        self._file.flush()
        if self._curves is not None:
            self._curves.add(asdict(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._curves is not None:
            self._curves.close()


def append_event(run_dir: Path, event: str, step: int, **facts: Any) -> None:
    """Add an event to a run's file from any thread, also while a `MetricsLog` is open: a short line is one write.

    `step` is the number of completed steps when it happened; `seconds` are those in which training stood still for it.
    A file that cannot be written costs a warning: what happened is done, and an account of it must not undo it.
    """
    line = {"event": event, "step": step, "wall_time": time.time(), **facts}
    try:
        with open(run_dir / FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True, allow_nan=False) + "\n")
    except OSError as error:
        log.warning("%s: the record of a %s was not written (%s)", run_dir / FILE, event, error)


def _keep(path: Path, restored_step: int, published: range) -> list[dict[str, Any]]:
    """Remove the step records of lost state from the file and return them; events are history and stay."""
    if not path.exists():
        return []
    kept: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    for line in _lines(path):
        stays = "event" in line or line["step"] <= restored_step or line["step"] in published
        (kept if stays else lost).append(line)
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in kept)
    if text.encode() != path.read_bytes():
        write_atomic(path, text.encode())
    return lost


def read(path: Path) -> list[dict[str, Any]]:
    """Return the step records of a metrics file by step. A line cut by a kill can only be the last; it is left out."""
    records = [line for line in _lines(path) if "event" not in line]
    return sorted(records, key=lambda record: record["step"])


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file that are no step records, in file order: saves, lost steps."""
    found = []
    with open(path, "rb") as file:
        for line in file:
            # Steps are not parsed: there are many of them, and whoever watches a run asks often.
            if b'"event"' in line and line.endswith(b"\n"):
                try:
                    found.append(json.loads(line))
                except ValueError as error:
                    raise ArtifactError(f"{path}: the line of an event is not JSON ({error})") from None
    return [line for line in found if "event" in line]


def read_tail(path: Path, count: int, block: int = 2**16) -> list[dict[str, Any]]:
    """Return the last `count` step records in file order without reading the whole file; ArtifactError if damaged."""
    size = path.stat().st_size
    while True:
        start = max(0, size - block)
        with open(path, "rb") as file:
            file.seek(start)
            lines = file.read().split(b"\n")
        # The first line of a piece is cut, the last is empty or still being written.
        try:
            records = [json.loads(line) for line in lines[1 if start else 0 : -1] if b'"event"' not in line]
        except ValueError as error:
            raise ArtifactError(f"{path}: a line near its end is not JSON ({error})") from None
        if start == 0 or len(records) >= count:
            return records[-count:]
        block *= 4


def _lines(path: Path) -> list[dict[str, Any]]:
    """Parse all lines. ArtifactError for one that is not JSON, unless it is the last."""
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ArtifactError(
                    f"{path}: line {number} is not JSON; the file was edited or damaged"
                ) from None
    return found


def plot_curves(run_dir: Path) -> Path | None:
    """Draw loss, learning rate, gradient norm and step time of a run to `curves.png`; None if there are no records."""
    path = run_dir / FILE
    records = read(path) if path.exists() else []
    if not records:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record["step"] for record in records]
    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True)
    for axes, (key, label, scale) in zip(
        panels.flat,
        (
            ("loss", "loss (global mean)", "log"),
            ("learning_rate", "learning rate", "linear"),
            ("gradient_norm", "gradient norm before clipping", "log"),
            ("step_seconds", "seconds per step", "linear"),
        ),
        strict=True,
    ):
        values = [record[key] for record in records]
        axes.plot(steps, values, color="tab:blue", alpha=0.35 if key == "loss" else 0.9, linewidth=0.8)
        if key == "loss":
            axes.plot(steps, smoothed(values), color="tab:blue", linewidth=1.6)
        if scale == "log" and min(values) > 0:
            axes.set_yscale("log")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in panels[1]:
        axes.set_xlabel("completed steps")
    figure.suptitle(run_dir.name, fontsize=11)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    write_atomic(run_dir / PLOT, buffer.getvalue())
    return run_dir / PLOT


def smoothed(values: list[float], decay: float = 0.95) -> list[float]:
    """Return the bias-corrected exponential moving average of `values`."""
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = decay * average + (1.0 - decay) * value
        weight = decay * weight + (1.0 - decay)
        result.append(average / weight)
    return result


SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Progress on stderr: a tqdm bar on a terminal, else a line every `every_steps` steps and a few seconds at least."""

    def __init__(self, first_step: int, until_step: int, every_steps: int, enabled: bool) -> None:
        self._until, self._every, self._enabled = until_step, max(1, every_steps), enabled
        self._bar: Any = None
        self._started, self._first = time.monotonic(), first_step
        self._last_line = float("-inf")
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=until_step, initial=first_step, unit="step", dynamic_ncols=True)

    def update(self, record: StepRecord) -> None:
        """Show one finished step; once whoever reads stderr is gone, nothing more is shown and training goes on.

        A stop signal to the whole process group ends the `tee` behind us first: a broken pipe must not cost the save.
        """
        try:
            self._show(record)
        except OSError:
            self._bar, self._enabled = None, False

    def _show(self, record: StepRecord) -> None:
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix(loss=f"{record.loss:.4f}", lr=f"{record.learning_rate:.2e}", refresh=False)
        elif self._enabled and (self._line_due(record.step) or record.step == self._until):
            self._last_line = time.monotonic()
            pace = (time.monotonic() - self._started) / max(1, record.step - self._first)
            left = pace * (self._until - record.step)
            print(
                f"step {record.step}/{self._until}  loss {record.loss:.4f}  lr {record.learning_rate:.3e}  "
                f"grad {record.gradient_norm:.3f}  {record.step_seconds:.2f} s/step (data {record.data_seconds:.2f})  "
                f"{record.samples_per_second:.1f} samples/s  {record.memory_bytes / 2**20:.0f} MiB  "
                f"{_clock(left)} left",
                file=sys.stderr,
                flush=True,
            )

    def _line_due(self, step: int) -> bool:
        return step % self._every == 0 and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES

    def close(self) -> None:
        """Finish the bar."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
