"""`solarwm data plan`: what a run reads, listed before it reads it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyworld import TinyWorld

from solarwm_lib.artifacts import Transaction
from solarwm_lib.data import video
from solarwm_lib.data.index import Index, write_index
from solarwm_lib.data.plan_report import Fingerprint, plan_index, plan_report
from solarwm_lib.data.rows import RawRow
from solarwm_lib.data.sampling import Plan, batch_digest, digest_text
from solarwm_lib.data.synthetic import camera_path
from solarwm_lib.data.writer import SCHEMA, Clip, RawDatasetWriter
from solarwm_lib.runtime.errors import ConfigError, DataError

FRAMES, HEIGHT, WIDTH = 9, 32, 32
FIELDS = {
    "sample_id",
    "key",
    "shard",
    "row_ordinal",
    "repeat_ordinal",
    "epoch",
    "start_frame",
    "source_frame_indices",
    "reader_rank",
    "global_sample_index",
    "step",
    "occurrence_id",
    "rejected",
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten clips in three shards, twelve occurrences, 24 frames/s."""
    rows = [
        RawRow(
            sample_id=f"clip {number}",
            key=f"{number:02d}",
            shard=f"shards/part-{number // 4}.tar",
            video_member="v",
            camera_member="c",
            manifest_member="m",
            num_frames=40,
            fps=24.0,
            start_frame=number,
            epoch_repeats=1 + number % 5 // 4,
        )
        for number in range(10)
    ]
    path = tmp_path_factory.mktemp("plan") / "train-index.jsonl"
    write_index(path, rows)
    return path


def listed(index: Path, **changes: Any) -> dict[str, Any]:
    settings = {"seed": 42, "pixel_frames": 9, "fps": 16.0, "global_batch_size": 4, "step": 0}
    return plan_index(index, **settings | changes)


def test_a_step_lists_the_whole_batch_with_its_readers(index: Path) -> None:
    report = listed(index, world_size=2, step=5, steps=2)
    assert [record["global_sample_index"] for record in report["shown"]] == list(range(20, 28))
    assert [record["reader_rank"] for record in report["shown"]] == [0, 0, 1, 1] * 2
    assert [record["step"] for record in report["shown"]] == [5] * 4 + [6] * 4
    assert report["count"] == 8 and report["occurrences"] == 12
    assert all(set(record) == FIELDS for record in report["shown"])
    json.dumps(report, allow_nan=False)


def test_records_are_what_the_plan_says(index: Path) -> None:
    rows = Index.open(index)
    plan = Plan(rows, seed=42, pixel_frames=9, fps=16.0, global_batch_size=4)
    report = listed(index, step=3, steps=3)
    for record in report["shown"]:
        planned = plan.occurrence_at(record["global_sample_index"])
        row = rows[planned.row_ordinal]
        assert (record["sample_id"], record["key"], record["shard"]) == (row.sample_id, row.key, row.shard)
        assert record["occurrence_id"] == planned.occurrence_id and record["epoch"] == planned.epoch
        start = planned.start_frame
        # 24 frames/s shown at 16: ties to even (spec operations 4.7).
        assert record["source_frame_indices"] == [start + k for k in (0, 2, 3, 4, 6, 8, 9, 10, 12)]
    for step in report["steps"]:
        pairs = [
            (g, plan.occurrence_at(g).occurrence_id) for g in range(step["step"] * 4, step["step"] * 4 + 4)
        ]
        assert step["batch_digest"] == digest_text(batch_digest(pairs))
        assert step["completed_steps"] == step["step"] + 1
    rows.close()


def test_ranks_share_the_batch_in_any_topology(index: Path) -> None:
    whole = listed(index, step=2)
    for world in (1, 2, 4):
        parts = [listed(index, step=2, world_size=world, rank=rank) for rank in range(world)]
        found = [record["occurrence_id"] for part in parts for record in part["shown"]]
        assert found == [record["occurrence_id"] for record in whole["shown"]]
        assert all(part["steps"] == whole["steps"] for part in parts)  # digests are of the whole batch


def test_sequence_parallel_peers_read_the_same(index: Path) -> None:
    peers = [listed(index, world_size=4, sequence_parallel_size=2, rank=rank) for rank in range(4)]
    assert peers[0]["shown"] == peers[1]["shown"] and peers[2]["shown"] == peers[3]["shown"]
    assert [record["reader_rank"] for record in peers[2]["shown"]] == [1, 1]
    assert peers[0]["data_world_size"] == 2 and peers[0]["world_size"] == 4


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("batch", [4, 5, 32])
def test_an_epoch_starts_in_the_step_that_reads_its_first_sample(index: Path, batch: int, epoch: int) -> None:
    report = listed(index, epoch=epoch, steps=-(-24 // batch), global_batch_size=batch)
    mine = [record for record in report["shown"] if record["epoch"] == epoch]
    found = {(record["row_ordinal"], record["repeat_ordinal"]) for record in mine}
    assert found == {(number, 0) for number in range(10)} | {(4, 1), (9, 1)} and len(mine) == 12
    assert report["steps"][0]["step"] == epoch * 12 // batch
    assert mine[0]["step"] == report["steps"][0]["step"]


def test_a_limit_shortens_what_is_shown_and_nothing_else(index: Path) -> None:
    report, first = listed(index, steps=3), listed(index, steps=3, limit=5)
    assert first["shown"] == report["shown"][:5] and first["count"] == 12
    assert {**first, "shown": None} == {**report, "shown": None}
    assert listed(index, limit=0)["shown"] == []


def test_without_a_batch_size_every_reader_takes_one_clip(index: Path) -> None:
    report = listed(index, global_batch_size=None, world_size=6, sequence_parallel_size=2)
    assert report["global_batch_size"] == 3
    assert [record["reader_rank"] for record in report["shown"]] == [0, 1, 2]


def test_the_fingerprint_covers_nine_fields_of_every_plan(index: Path) -> None:
    records = listed(index)["shown"]
    text = "solarwm.sample-plan.v2\n"
    for r in records:
        frames = ",".join(str(frame) for frame in r["source_frame_indices"])
        text += f"{r['sample_id']}\t{r['key']}\t{r['shard']}\t{r['row_ordinal']}\t{r['repeat_ordinal']}\t{r['epoch']}"
        text += f"\t{r['start_frame']}\t{frames}\t{r['reader_rank']}\n"
    assert listed(index)["fingerprint"] == hashlib.blake2s(text.encode()).hexdigest()
    again = Fingerprint()
    for record in records:
        again.add(record)
    assert again.hexdigest() == listed(index)["fingerprint"]
    assert listed(index, seed=43)["fingerprint"] != listed(index)["fingerprint"]


def test_fixed_starts_come_from_the_index(index: Path) -> None:
    report = listed(index, random_start=False, steps=3)
    assert all(record["start_frame"] == record["row_ordinal"] for record in report["shown"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": -1}, "epoch is -1, expected at least 0"),
        ({"step": -1}, "step is -1, expected at least 0"),
        ({"steps": 0}, "steps is 0, expected at least 1"),
        ({"limit": -1}, "limit is -1, expected at least 0"),
        ({"world_size": 3}, "train.global_batch_size is 4, expected a multiple of the 3 .*such as 3 or 6"),
        ({"world_size": 8}, "train.global_batch_size is 4, expected a multiple of the 8 .*such as 8"),
        ({"world_size": 2, "rank": 2}, "rank 2 .* is outside the world of 2"),
        ({"world_size": 4, "sequence_parallel_size": 3}, "sequence_parallel_size 3 .*legal values"),
        ({"pixel_frames": 0}, "data.pixel_frames is 0"),
        ({"seed": -1}, "data.seed is -1, expected 0 to 9223372036854775807"),
        ({"seed": 2**63}, "data.seed is 9223372036854775808"),
        ({"step": 3, "epoch": 1}, "step is 3 and epoch is 1, expected one of them"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(index: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        listed(index, **changes)


def test_an_index_that_cannot_be_planned_is_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"12 occurrence\(s\) per epoch for 16 data-parallel ranks"):
        listed(index, world_size=16, global_batch_size=16)
    with pytest.raises(DataError, match="the clip spans 49 source frames"):
        listed(index, pixel_frames=33)
    with pytest.raises(DataError, match="missing"):
        listed(tmp_path / "absent.jsonl")


def test_no_plan_imports_torch(index: Path) -> None:
    code = (
        "import sys\n"
        "from solarwm_lib.data.plan_report import plan_index\n"
        f"plan_index({str(index)!r}, seed=1, pixel_frames=9, fps=16.0, global_batch_size=4, step=0)\n"
        "print(*sorted({'torch', 'pandas', 'av'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# --- from a run's configuration -----------------------------------------------------------------------------------------


def _clip(number: int) -> Clip:
    frames = np.full((FRAMES, HEIGHT, WIDTH, 3), 40 * number, np.uint8)
    c2w = camera_path(FRAMES, number)
    if number == 2:
        c2w[:, 0, 3] += 30 * np.arange(FRAMES)  # leaves the guards: every plan must replace it
    return Clip(
        sample_id=f"clip {number}",
        key=f"clip-{number}",
        video=video.mp4_bytes(frames, 16, crf=20),
        c2w=c2w,
        fps=16.0,
        height=HEIGHT,
        width=WIDTH,
        caption="a room",
        scene="room",
        dataset="test",
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    root = tmp_path_factory.mktemp("world")
    with Transaction(root / "data", SCHEMA, {"test": 1}) as transaction:
        writer = RawDatasetWriter(transaction, clips_per_shard=2)
        for number in range(5):
            writer.add("train", _clip(number))
        writer.finish()
    return TinyWorld(root / "data", root / "assets")


def test_a_run_lists_what_its_clips_locate(world: TinyWorld, tmp_path: Path) -> None:
    from solarwm_lib.training.setup import open_clips

    resolved = world.resolve(tmp_path / "run")
    report = plan_report(resolved, step=3, steps=5)
    clips = open_clips(resolved)
    samples = {record["global_sample_index"]: record for record in report["shown"]}
    assert list(samples) == list(range(12, 32))
    for g, record in samples.items():
        planned, rejected = clips.locate(g)
        assert record["occurrence_id"] == planned.occurrence_id and record["rejected"] == list(rejected)
        assert record["start_frame"] == planned.start_frame
    for step in report["steps"]:
        pairs = [(g, samples[g]["occurrence_id"]) for g in range(step["step"] * 4, step["step"] * 4 + 4)]
        assert step["batch_digest"] == digest_text(batch_digest(pairs))
    clips.close()


def test_clips_outside_the_guards_are_shown_as_what_replaces_them(world: TinyWorld, tmp_path: Path) -> None:
    records = plan_report(world.resolve(tmp_path / "run"), steps=5)["shown"]
    assert all(record["sample_id"] != "clip 2" for record in records)
    replaced = [record for record in records if record["rejected"]]
    assert len(replaced) >= 4  # four epochs, each holds the clip once
    assert all("'clip 2'" in record["rejected"][0] for record in replaced)
    assert all(record["occurrence_id"].endswith(f".{len(record['rejected'])}") for record in replaced)


def test_a_rank_of_a_run_is_listed_as_the_batch_is_dealt(world: TinyWorld, tmp_path: Path) -> None:
    alone = plan_report(world.resolve(tmp_path / "run"), step=1)
    settings = {"distributed__world_size": 2, "train__micro_batch_size": 2, "train__global_batch_size": 4}
    pair = [plan_report(world.resolve(tmp_path / "run", **settings), step=1, rank=rank) for rank in range(2)]
    assert [len(part["shown"]) for part in pair] == [2, 2]
    ids = [record["occurrence_id"] for part in pair for record in part["shown"]]
    assert ids == [record["occurrence_id"] for record in alone["shown"]]
    assert pair[0]["steps"] == pair[1]["steps"] == alone["steps"]
