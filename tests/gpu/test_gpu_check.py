"""The device check is ready before there is a device: its parts run on the CPU, its full size is built without memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import check
import measure
import part_attention
import part_rollout
import part_step
import psutil
import pytest
import torch
from measure import REPO, Findings, read_findings, run_apart

from solarwm_lib.estimate import visible
from solarwm_lib.estimate.hardware import gpu
from solarwm_lib.training import setup, stage2

PAGE = REPO / "docs/reference/gpu-check.md"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run on the CPU."""
    out = tmp_path_factory.mktemp("check") / "figures.json"
    done = subprocess.run(
        [sys.executable, str(REPO / "tests/gpu/check.py"), "--device", "cpu", "--out", str(out)],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    report = json.loads(out.read_text())
    assert json.loads(done.stdout[done.stdout.rindex('{\n  "device"') :]) == report
    failed = {name: part["error"] for name, part in report["parts"].items() if part["status"] != "ok"}
    assert not failed, done.stderr[-2000:]
    assert done.returncode == 0 and report["ok"]
    return report


def documented(heading: str) -> dict[tuple[str, str], list[str]]:
    """(part, name) -> the other columns of the table below `heading`, the first of them unit or condition."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in section.splitlines()
        if line[:1] == "|"
    ]
    return {(row[0], row[1].strip("`")): row[2:] for row in rows[2:]}


@pytest.mark.slow
def test_every_part_runs_on_the_cpu_and_every_check_passes(whole):
    assert all(all(part["checks"].values()) for part in whole["parts"].values())
    assert whole["parts"]["training"]["figures"]["resume_is_byte_identical"]


@pytest.mark.slow
@pytest.mark.parametrize(("heading", "kind"), [("Figures", "figures"), ("Checks", "checks")])
def test_the_page_names_every_figure_and_check_and_no_other(whole, heading, kind):
    rows = documented(heading)
    only_cuda = {key for key, row in rows.items() if "CUDA only" in row[0]}
    found = {(name, key): value for name, part in whole["parts"].items() for key, value in part[kind].items()}
    if kind == "checks":
        assert set(found) == set(rows) - only_cuda
    else:
        assert set(found) == set(rows)
        empty = {key for key, value in found.items() if value is None}
        assert empty <= only_cuda | {("environment", "commit")}


def test_the_page_gives_the_limit_of_every_part_in_order():
    rows = re.findall(r"^\| (\w+) \| (\d+) s \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(name, int(seconds)) for name, seconds in rows] == [
        (k, p.seconds) for k, p in check.PARTS.items()
    ]


def test_parts_without_time_are_not_begun_and_fail_the_check(capsys):
    words = ["--device", "cpu", "--budget", "1", "--part", "parity", "--part", "environment"]
    assert check.main(words) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert {name: part["status"] for name, part in report["parts"].items()} == {
        "environment": "skipped",
        "parity": "skipped",
    }
    assert "budget of 1 s" in report["parts"]["parity"]["error"]


def fails(found: Findings) -> None:
    found.set({"before": 1.23456789})
    raise ValueError("of this part\n alone")


def hangs(found: Findings) -> None:
    found.set({"before": 1})
    run_apart(
        found.method,
        found.path.with_suffix(".inner"),
        60,
        sleeps,
        found.path.with_suffix(".pid"),
        leads=False,
    )


def sleeps(told: Path) -> None:
    import os

    told.write_text(str(os.getpid()))
    time.sleep(60)


def test_a_failed_part_leaves_its_error_and_what_it_had_found(tmp_path):
    path = tmp_path / "part.json"
    error = run_apart("fork", path, 30, fails, Findings(path, CPU))
    assert error == "ValueError: of this part alone"
    assert read_findings(path)["figures"] == {"before": 1.23457}


def test_a_part_out_of_time_ends_with_all_its_processes_and_leaves_what_it_had_found(tmp_path):
    path, ticks = tmp_path / "part.json", []
    started = time.monotonic()
    error = run_apart("fork", path, 2, hangs, Findings(path, CPU), tick=lambda: ticks.append(1))
    assert error == "TimeoutError: not done within 2 s" and time.monotonic() - started < 15
    assert read_findings(path)["figures"] == {"before": 1} and ticks
    inner = int(path.with_suffix(".pid").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(inner) and psutil.Process(inner).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a process of the part is still there"
        time.sleep(0.05)


def test_fewer_blocks_run_where_memory_runs_out():
    def attempt(blocks: int) -> dict[str, Any]:
        if blocks > 10:
            raise torch.OutOfMemoryError(f"{blocks}")
        return {"blocks": blocks}

    assert part_step.first_that_fits((30, 20, 10), attempt) == (10, {"blocks": 10})
    with pytest.raises(MemoryError, match="20 blocks"):
        part_step.first_that_fits((30, 20), attempt)


def test_every_assumed_peak_is_in_the_table_of_data_sheets():
    assert all(gpu(name).bfloat16 > 1e14 for name in part_step.DATA_SHEETS.values())


def test_the_arithmetic_of_attention_counts_what_the_plan_lets_see():
    size = part_attention.layout(full=True)
    assert (size.frames, size.tokens, size.heads, size.width) == (21, 405, 24, 128)
    frames = visible.pairs(size.frames, size.chunk, size.prior)
    length, plan = size.plans(size.tokens)["teacher_forcing"]
    assert length == 2 * 21 * 405
    assert part_attention.visible_pairs(plan, length) == frames * 405**2
    length, plan = size.plans(2)["teacher_forcing"]
    assert part_attention.visible_pairs(plan, length) == plan.mask(length).sum()
    length, plan = size.plans(size.tokens)["bidirectional"]
    assert part_attention.flops(plan, length, size, backward=False) == 4 * (21 * 405) ** 2 * 24 * 128


def test_the_step_of_the_whole_network_has_the_right_shapes_on_the_meta_device():
    resolved, architecture = part_step.run(full=True)
    backbone = part_step.network(resolved, architecture, "meta")
    assert part_step.tokens_of(resolved, architecture) == 21 * 15 * 27
    learner = setup.build_learner(resolved, backbone, None)
    expected = part_step.prediction(resolved, architecture)
    assert sum(p.numel() for p in learner.parameters.values()) == 4_999_787_712 == expected["parameters"]
    assert 100e9 < expected["estimated_bytes"] < 141e9
    batch = part_step.RandomClips(resolved, architecture, "meta").load([0])
    assert batch.latents.shape == (1, 21, 48, 30, 54) and batch.prompt_embeds.shape == (1, 512, 4096)
    velocity = backbone.velocity(
        batch.latents, torch.zeros(1, 21, device="meta"), batch.prompt_embeds, batch.w2c, batch.intrinsics
    )
    assert velocity.shape == batch.latents.shape
    velocity.square().mean().backward()
    assert all(
        g.shape == p.shape
        for g, p in zip(learner.gradients().values(), learner.parameters.values(), strict=True)
    )


def test_a_chunk_of_the_released_rollout_has_the_right_shapes_on_the_meta_device():
    resolved = measure.recipe("train_stage2_sgf_81f", True)
    fixed, (_, architecture) = stage2.recipe(resolved), part_step.run(full=True)
    backbone = part_step.network(resolved, architecture, "meta").eval()
    batch = part_step.RandomClips(resolved, architecture, "meta").load([0])
    state = backbone.rollout_state(
        batch.prompt_embeds, batch.intrinsics, chunk=fixed.chunk, window=fixed.window
    )
    chunk, cameras = batch.latents[:, : fixed.chunk], batch.w2c[:, : fixed.chunk]
    flow = backbone.chunk_velocity(
        state, chunk, torch.zeros(1, fixed.chunk, device="meta"), cameras, commit=True
    )
    assert flow.shape == chunk.shape and (fixed.chunk, fixed.window, len(fixed.timesteps)) == (3, 18, 4)
    assert state.layers[0].key.shape == (1, 15 * 405, 24, 128)
    longest = max(item.rollout_latent_frames for item in resolved.config.validation.passes)
    assert longest == part_rollout.LONG_FRAMES
