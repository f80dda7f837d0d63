"""The demo as shipped: three stages run and learn the room, and a second run has nothing to do."""

import shutil
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from folders import REPO, make_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_first_and_last_stage_of_the_demo_beat_both_baselines_by_a_decibel(tmp_path):
    folder = make_folder(tmp_path / "demo")
    shutil.copy(REPO / "config/config.yaml", folder.path / "config/config.yaml")
    folder.snakemake(timeout=2300)
    ema = (
        pd.read_csv(folder.results / "comparisons/demo_step_001000/summary.csv").set_index("pass").loc["ema"]
    )
    assert ema["status"] == "complete" and ema["n"] == ema["cases"]
    assert ema["margin_db"] >= 1.0, ema.to_dict()
    assert ema["margin_over_shuffled_db"] >= 1.0, ema.to_dict()
    stages = pd.read_csv(folder.results / "comparisons/stages/summary.csv").set_index("pass")
    stages = stages.drop(index="repeat_first_frame")
    assert set(stages["status"]) == {"complete"} and len(stages) == 5, stages.to_dict()
    fast = stages.loc["ema · wan5b_tiny_stage2"]
    assert fast["margin_db"] >= 1.0 and fast["margin_over_shuffled_db"] >= 1.0, fast.to_dict()
    started = time.monotonic()
    assert "Nothing to be done" in folder.snakemake()
    assert time.monotonic() - started < 10
