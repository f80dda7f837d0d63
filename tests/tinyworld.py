"""Where the tests' small data set and base model are, and the configuration of a run over them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FRAMES, HEIGHT, WIDTH = 5, 32, 32


@dataclass(frozen=True)
class TinyWorld:
    """Published data set and assets, and the configuration of a small Stage0.5 run over them."""

    dataset: Path
    assets: Path

    def values(self, output: Path, **changes: Any) -> dict[str, Any]:
        """Configuration values of a run that writes to `output`; `changes` are dotted keys with `__` for the dot."""
        values: dict[str, Any] = {
            "schema": "solarwm.run.v1",
            "action": "train",
            "name": output.name,
            "model": {
                "family": "wan22_ti2v_5b",
                "architecture": "wan22-tiny",
                "base_path": str(self.assets),
                "timestep_shift": 3.0,
                "text_length": 16,
            },
            "data": {
                "root": str(self.dataset),
                "pixel_frames": FRAMES,
                "height": HEIGHT,
                "width": WIDTH,
                "num_workers": 0,
                "decoded_cache_gib": 0.1,
            },
            "train": {
                "stage": "stage0p5",
                "causal_mode": "bidirectional",
                "objective": "flow_matching",
                "micro_batch_size": 4,
                "max_steps": 12,
                "precision": "float32",
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
                "ema": {"decay": 0.9},
            },
            "validation": {
                "sample_count": 2,
                "passes": [{"name": "live", "weights": "live", "num_inference_steps": 2}],
            },
            "checkpoint": {"rolling_save_every_steps": 2},
            "runtime": {"output_dir": str(output), "progress": False},
        }
        values = copy.deepcopy(values)
        for key, value in changes.items():
            *sections, leaf = key.split("__")
            target = values
            for section in sections:
                target = target.setdefault(section, {})
            target[leaf] = value
        return values

    def resolve(self, output: Path, **changes: Any) -> Any:
        """Resolved configuration of `values`."""
        from solarwm_lib.config.load import resolve_values

        return resolve_values(self.values(output, **changes))
