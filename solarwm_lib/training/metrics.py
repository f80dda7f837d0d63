"""What training says about itself: one JSON line per optimizer step, a plot, and progress on the terminal."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from solarwm_lib.artifacts import write_atomic
from solarwm_lib.runtime.errors import ArtifactError

FILE = "metrics.jsonl"
PLOT = "curves.png"


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
    led to the checkpoint of `published_step`: they stay when an earlier checkpoint is made again.
    """

    def __init__(
        self, run_dir: Path, restored_step: int, until_step: int = 0, published_step: int = 0
    ) -> None:
        self.path = run_dir / FILE
        _keep(self.path, restored_step, range(until_step + 1, published_step + 1))
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, record: StepRecord) -> None:
        """Write one record."""
        self._file.write(json.dumps(asdict(record), sort_keys=True, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _keep(path: Path, restored_step: int, published: range) -> None:
    if not path.exists():
        return
    kept = [record for record in read(path) if record["step"] <= restored_step or record["step"] in published]
    text = "".join(json.dumps(record, sort_keys=True) + "\n" for record in kept)
    if text.encode() != path.read_bytes():
        write_atomic(path, text.encode())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file by step. A line cut by a kill can only be the last one and is left out."""
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ArtifactError(
                    f"{path}: line {number} is not JSON; the file was edited or damaged"
                ) from None
    return sorted(records, key=lambda record: record["step"])


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
