"""What a restart costs, told in `metrics.jsonl` beside what saves cost (event `restart`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from solarwm_lib.training import metrics


@dataclass
class Restart:
    """Seconds of the parts of a restart: `verify` the save, `load` it, `seek` in the data; counted from its creation."""

    started: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)
    is_told: bool = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of this block as that of `name`."""
        since = time.perf_counter()
        yield
        self.parts[name] = time.perf_counter() - since

    def tell(self, run_dir: Path, step: int, step_seconds: float) -> None:
        """After the first new step, number `step`: write the event, once. `seconds` is the time until that step began."""
        if self.is_told or "load" not in self.parts:
            return
        self.is_told = True
        total = time.perf_counter() - self.started
        parts = {f"{name}_seconds": seconds for name, seconds in self.parts.items()}
        metrics.append_event(
            run_dir,
            "restart",
            step - 1,
            seconds=max(0.0, total - step_seconds),
            first_step_seconds=total,
            **parts,
        )
