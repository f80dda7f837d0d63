"""The chain of stages at a size that trains in seconds: two chunks of one token per latent frame.

`stage_world` holds clips of 21 frames (6 latents), the tiny base model, and a Stage0.5 and a Stage1 checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tinyworld import HEIGHT, WIDTH, TinyWorld

STAGE0P5_STEPS, STAGE1_STEPS = 2, 2
PASS = {"name": "live", "weights": "live", "num_inference_steps": 2}
CAUSAL = {"chunk_latent_frames": 3, "local_attention_latent_frames": 6, "max_prior_clean_chunks": 1}
SMALL_OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 0}


class StageWorld(TinyWorld):
    """Where the checkpoints of the earlier stages are, and configurations of runs of every stage."""

    @property
    def stage0p5(self) -> Path:
        return self.dataset.parent / "stage0p5" / f"checkpoint_model_{STAGE0P5_STEPS:06d}"

    @property
    def stage1(self) -> Path:
        return self.dataset.parent / "stage1" / f"checkpoint_model_{STAGE1_STEPS:06d}"

    def stage(self, stage: str, output: Path, **changes: Any) -> dict[str, Any]:
        """Values of a run of `stage`: stage0p5, flow_matching, anyflow or stage2."""
        found: dict[str, Any] = {"data__pixel_frames": 21, "model__causal": dict(CAUSAL)}
        start = {"mode": "weights_only", "weights": "ema"}
        if stage in ("flow_matching", "anyflow"):
            objective = "anyflow_forward_map" if stage == "anyflow" else stage
            found |= {
                "train__stage": "stage1",
                "train__causal_mode": "teacher_forcing",
                "train__objective": objective,
                "train__optimizer": dict(SMALL_OPTIMIZER),
                "train__ema": {"decay": 0.9, "warmup_steps": 0},
                "validation__passes": [dict(PASS)],
                "checkpoint": start | {"path": str(self.stage0p5), "source_step": STAGE0P5_STEPS},
            }
        if stage == "stage2":
            score = {"path": str(self.stage0p5), "source_step": STAGE0P5_STEPS, "weights": "live"}
            student = {"path": str(self.stage1), "source_step": STAGE1_STEPS, "weights": "ema"}
            found |= {
                "train__stage": "stage2",
                "train__causal_mode": "self_gradient_forcing",
                "train__micro_batch_size": 2,
                "train__optimizer": dict(SMALL_OPTIMIZER),
                "train__ema": {"decay": 0.9, "start_step": 2},
                "train__self_gradient_forcing": {
                    "critic_updates_per_student": 2,
                    "denoising_timesteps": [1000, 500],
                    "critic_optimizer": dict(SMALL_OPTIMIZER),
                },
                "validation__passes": [dict(PASS)],
                "checkpoint": {
                    "mode": "roles",
                    "initialization": {"student": student, "teacher": score, "critic": dict(score)},
                },
            }
        found["checkpoint__rolling_save_every_steps"] = 0
        return self.values(output, **(found | changes))

    def resolve_stage(self, stage: str, output: Path, **changes: Any) -> Any:
        """Resolved configuration of `stage`."""
        from solarwm_lib.config.load import resolve_values

        return resolve_values(self.stage(stage, output, **changes))


def train(world: StageWorld, stage: str, output: Path, *steps: int, **changes: Any) -> Path:
    """Train to each of `steps` in turn, each in a segment of its own; return the last checkpoint."""
    from solarwm_lib.training import train as training

    output.mkdir(exist_ok=True)
    resolved = world.resolve_stage(stage, output, **changes)
    return [training.run(resolved, run_dir=output, until_step=step) for step in steps][-1].path


def digests(checkpoint: Path) -> Mapping[str, str]:
    """Digest of every member of a checkpoint."""
    from solarwm_lib import artifacts

    return {member.path: member.sha256 for member in artifacts.verify(checkpoint, deep=True).members}


@pytest.fixture(scope="session")
def stage_world(tmp_path_factory: pytest.TempPathFactory) -> StageWorld:
    """Build data, assets and the checkpoints of Stage0.5 and Stage1 once per test session."""
    import torch

    from solarwm_lib.backbones.tiny import build_tiny_assets
    from solarwm_lib.config.architectures import load_architecture
    from solarwm_lib.data.synthetic import SynthSpec, synthesize

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("stage-world")
    spec = SynthSpec(
        "tiny", train_clips=5, test_clips=2, frames=21, height=HEIGHT, width=WIDTH, clips_per_shard=4
    )
    synthesize(root / "data", spec)
    build_tiny_assets(root / "assets", load_architecture("wan22-tiny"), seed=0)
    world = StageWorld(root / "data", root / "assets")
    train(world, "stage0p5", root / "stage0p5", STAGE0P5_STEPS)
    train(world, "anyflow", root / "stage1", STAGE1_STEPS)
    return world
