"""The benchmarks that people run by hand still run, and their figures stay within bounds."""

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


def within(report: dict, bounds: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The figures of `report` (dotted names) that are not between their bounds; empty if all are."""
    found = {}
    for name, (least, most) in bounds.items():
        value = report
        for part in name.split("."):
            value = value[part]
        if not least <= value <= most:
            found[name] = value
    return found


def check(script: str, rounds: tuple[int, int], bounds: dict[str, tuple[float, float]], *words: str) -> None:
    """Run a benchmark, twice more with more rounds if a figure is out of its bounds: no bad moment fails a build.

    Bounds are looser than what is promised and measured (given beside them): they are there to catch a regression, which
    shows in every attempt.
    """
    for number in (rounds[0], rounds[1], rounds[1]):
        if not (found := within(run(script, str(number), *words), bounds)):
            return
    pytest.fail(f"out of bounds in all attempts: {found}")


NO_LIMIT = float("inf")


def test_the_velocity_costs_about_what_diffusers_own_forward_costs():
    bounds = {  # promised 1.05 and 1.15, measured 0.97 and 1.06
        "forward_backward.camera_off_over_diffusers": (0, 1.15),
        "forward_backward.camera_on_over_diffusers": (0, 1.25),
    }
    check("benchmarks/bench_velocity.py", (3, 9), bounds)


def test_causal_attention_saves_the_hidden_pairs_and_the_cache_saves_the_history():
    bounds = {
        "executor.dense_over_segments": (1.8, NO_LIMIT),  # promised 2, measured 2.6
        "teacher_forcing.far_over_ours": (3.5, NO_LIMIT),  # promised 4, measured 4.6 to 6
        # Promised 2.5 and 15 %, measured 2.65 and 9.5 % with the eight samples of `make bench`. CI's four are nearer to
        # what a call costs without any work: 2.4 and 10 to 13 %.
        "rollout.cache_free_over_cached": (2.0, NO_LIMIT),
        "rollout.encoding_share": (0, 0.17),
    }
    check("benchmarks/bench_attention.py", (3, 5), bounds, "--quick")


def test_planned_reading_is_at_least_three_times_as_fast_as_webdataset():
    # Measured 3.1 to 3.8 on loaded machines.
    check(
        "benchmarks/bench_loader.py",
        (5, 9),
        {"ours_over_webdataset": (3, NO_LIMIT), "ours_to_last_sample_ms": (0, 5)},
    )


def test_a_durable_save_and_a_verified_load_cost_about_what_torchs_own_cost_and_training_waits_for_little():
    bounds = {
        # Promised 1.0. Hashing takes a second core: 0.6 to 0.8 where there is one, 0.9 to 1.1 where others use it up.
        "save_over_dcp": (0, 1.2),
        "blocked_over_torch_save": (0, 0.4),  # promised 0.5, measured 0.12 to 0.27
        "load_over_dcp": (0, 1.6),  # promised 1.5, measured 1.0 to 1.4
    }
    check("benchmarks/bench_save.py", (5, 9), bounds)
