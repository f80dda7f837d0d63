"""TensorBoard event files of a run, `RUN/tensorboard/training/`: the numbers of `metrics.jsonl` as curves.

They are a view: nothing reads them back, they are part of no artifact and of no identity, and what goes wrong with them is
one warning. A resumed run begins a new file, which tells TensorBoard from which step on the older ones no longer hold.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
SCALARS = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "gradient_norm": "gradient_norm",
    "step_seconds": "time/step_seconds",
    "data_seconds": "time/data_seconds",
    "samples_per_second": "time/samples_per_second",
    "memory_bytes": "memory/peak_bytes",
}

log = logging.getLogger(__name__)


class EventFile:
    """Writes one event file; every event is on disk when its call returns. Raises what the disk raises."""

    def __init__(self, path: Path, purge_step: int | None = None) -> None:
        """Create `path`, whose name must hold `tfevents`; TensorBoard forgets older events from `purge_step` on."""
        # A quarter of a second: only a process that writes events pays for it.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=purge_step, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float], wall_time: float | None = None) -> None:
        """Write tag -> value at `step`."""
        pairs = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=self._summary(value=pairs), wall_time=wall_time)

    def image(self, step: int, tag: str, encoded: bytes, width: int, height: int) -> None:
        """Write an encoded image (PNG, JPEG, GIF) at `step`."""
        image = self._summary.Image(width=width, height=height, colorspace=3, encoded_image_string=encoded)
        self._write(step=step, summary=self._summary(value=[self._summary.Value(tag=tag, image=image)]))

    def _write(self, *, wall_time: float | None = None, **content: Any) -> None:
        event = self._event(wall_time=time.time() if wall_time is None else wall_time, **content)
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TrainingCurves:
    """The curves of one attempt, which continues after `restored_step`. Never raises: after a failure it is silent.

    `later` are records of steps that come after those that are made now and that stay valid: an earlier checkpoint of
    the run is being made again. TensorBoard has forgotten them, so they are written once more at the end.
    """

    def __init__(self, run_dir: Path, restored_step: int, later: Sequence[Mapping[str, Any]] = ()) -> None:
        self._later = later
        self._events: EventFile | None = None
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{os.uname().nodename}.{os.getpid()}"
        try:
            self._events = EventFile(run_dir / FOLDER / "training" / name, restored_step + 1)
        except Exception as error:
            self._give_up(error)

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of one step."""
        if self._events is None:
            return
        try:
            self._events.scalars(record["step"], scalars(record), record.get("wall_time"))
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Write the later steps and close the file."""
        for record in self._later:
            self.add(record)
        if self._events is not None:
            try:
                self._events.close()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._events = None
        log.warning("no more TensorBoard events of this attempt: %s", " ".join(str(error).split()))


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return tag -> value of a step record; its details come under `details/`."""
    values = {tag: float(record[key]) for key, tag in SCALARS.items() if record.get(key) is not None}
    return values | {f"details/{name}": float(value) for name, value in record.get("details", {}).items()}
