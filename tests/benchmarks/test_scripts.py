"""The scripts that people run by hand still run: the benchmarks and the device check (on the CPU)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run(script: str, *words: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(TESTS / script), *words], cwd=TESTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout[done.stdout.rindex("\n{\n") if not done.stdout.startswith("{") else 0 :])


def test_the_velocity_costs_about_what_diffusers_own_forward_costs():
    ratios = run("benchmarks/bench_velocity.py", "3")["forward_backward"]
    # The gate is loose because CI machines are noisy; published ratios come from more rounds on a quiet machine.
    assert ratios["camera_off_over_diffusers"] < 1.3
    assert ratios["camera_on_over_diffusers"] < 1.4


def test_planned_reading_is_at_least_three_times_as_fast_as_webdataset():
    # Measured 3.1 to 3.8 on loaded machines; a second try keeps one bad moment from failing the build.
    report = run("benchmarks/bench_loader.py", "5")
    if report["ours_over_webdataset"] < 3:
        report = run("benchmarks/bench_loader.py", "9")
    assert report["ours_over_webdataset"] >= 3
    assert report["ours_to_last_sample_ms"] < 5


@pytest.mark.slow
def test_the_device_check_runs_without_a_device():
    assert all(run("gpu/check.py", "--device", "cpu")["checks"].values())
