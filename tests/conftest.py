"""A world small enough to train in seconds: one room, a few short clips, the tiny base model."""

from __future__ import annotations

import sys

import pytest
from tinyworld import HEIGHT, WIDTH, TinyWorld


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Tests that draw with torch draw the same in every run."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """Build data set and assets once per test session."""
    from solarwm_lib.backbones.tiny import build_tiny_assets
    from solarwm_lib.config.architectures import load_architecture
    from solarwm_lib.data.synthetic import SynthSpec, synthesize

    root = tmp_path_factory.mktemp("tiny-world")
    spec = SynthSpec(
        "tiny", train_clips=6, test_clips=2, frames=9, height=HEIGHT, width=WIDTH, clips_per_shard=4
    )
    synthesize(root / "data", spec)
    build_tiny_assets(root / "assets", load_architecture("wan22-tiny"), seed=0)
    return TinyWorld(root / "data", root / "assets")
