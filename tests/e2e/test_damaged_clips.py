"""Damaged clips in a real training run, and training from stored latents: what is replaced is the same after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from solarwm_lib import artifacts
from solarwm_lib.config.load import resolve_values
from solarwm_lib.data.index import read_index
from solarwm_lib.runtime.errors import DataError
from solarwm_lib.training import checkpoint, metrics, train

STEPS = 4
MEMBERS = (checkpoint.MODEL, checkpoint.EMA, checkpoint.OPTIMIZER)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digests(run_dir: Path) -> dict[str, str]:
    artifact = artifacts.verify(run_dir / checkpoint.directory_name(STEPS), deep=True)
    return {m.path: m.sha256 for m in artifact.members if m.path in MEMBERS}


def state(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / checkpoint.directory_name(STEPS) / checkpoint.STATE).read_bytes())


def damage(dataset: Path, root: Path, wanted: int) -> Path:
    """Copy a data set and flip one byte in the video of training row `wanted`: sizes stay, only digests tell."""
    shutil.copytree(dataset, root)
    row = read_index(root / "train-index.jsonl")[wanted]
    with open(root / row.shard, "r+b") as shard:
        shard.seek(row.members[row.video_member].offset + 100)
        byte = shard.read(1)[0]
        shard.seek(-1, 1)
        shard.write(bytes([byte ^ 1]))
    return root


def run(world: Any, run_dir: Path, steps: tuple[int, ...], **changes: Any) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    for step in steps:
        train.run(world.resolve(run_dir, **changes), run_dir=run_dir, until_step=step)
    return run_dir


def test_a_damaged_clip_ends_the_run_unless_a_budget_allows_it(tiny_world, tmp_path):
    data = {"data__root": str(damage(tiny_world.dataset, tmp_path / "data", 2))}
    with pytest.raises(DataError, match=r"sha256 is .* the shard is damaged, restore a copy") as caught:
        run(tiny_world, tmp_path / "strict", (STEPS,), **data)
    assert caught.value.exit_code == 3

    allowed = {**data, "data__failure_budget": 9}
    whole = run(tiny_world, tmp_path / "whole", (STEPS,), **allowed)
    parts = run(tiny_world, tmp_path / "parts", (1, 3, STEPS), **allowed, data__num_workers=2)
    assert digests(whole) == digests(parts)
    records = [metrics.read(folder / metrics.FILE) for folder in (whole, parts)]
    for name in ("loss", "batch_digest", "replaced"):
        assert [r[name] for r in records[0]] == [r[name] for r in records[1]]
    replaced = records[0][-1]["replaced"]
    # Four steps of four over six clips: every clip is seen at least twice.
    assert set(replaced) == {"shard"} and replaced["shard"] >= 2
    assert state(whole)["run"]["replaced"] == state(parts)["run"]["replaced"] == replaced

    spent = (
        r"2 clips of this run could not be read \(shard 2\) and data\.failure_budget is 1: "
        r".*'tiny/train-000002'.*; repair or remove them, or raise data\.failure_budget"
    )
    with pytest.raises(DataError, match=spent):
        run(tiny_world, tmp_path / "spent", (STEPS,), **data, data__failure_budget=1)


def test_training_from_latents_resumes_exactly(tiny_world, tmp_path):
    from solarwm_lib.preencode.part import preencode

    values = tiny_world.values(tmp_path / "latents")
    for section in ("train", "validation", "checkpoint"):
        values.pop(section)
    values["action"] = "preencode"
    values["data"] |= {"random_start": False, "pixel_frames": 9}
    values["preencode"] = {"generation_id": "tiny", "parts": 2}
    preencode(resolve_values(values))
    stored = {
        "data__encoding": "preencoded",
        "data__latents_root": str(tmp_path / "latents"),
        "data__random_start": False,
        "data__pixel_frames": 9,
    }
    whole = run(tiny_world, tmp_path / "whole", (STEPS,), **stored)
    parts = run(tiny_world, tmp_path / "parts", (1, STEPS), **stored, data__decoded_cache_gib=0.0)
    assert digests(whole) == digests(parts) and state(whole) == state(parts)
    last = artifacts.read(whole / checkpoint.directory_name(STEPS))
    assert [parent.schema for parent in last.parents] == [
        "solarwm.dataset.raw.v1",
        "solarwm.latents.index.v1",
        "solarwm.assets.v1",
    ]
