"""Latents made by the graph: kills, lost markers, copies of what is there already. The real Snakemake on the real rules."""

import copy
import json
import os
import signal
from pathlib import Path

import pytest
from folders import SMOKE, Folder, digest, jobs, wait_for

from solarwm_lib.artifacts import verify

pytestmark = pytest.mark.slow
NOTHING = "Nothing to be done"
STORED = "results/latents/stored"
INDEX = f"{STORED}/index/COMPLETE.json"


def files(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file of a generation but its resolved configuration, which holds paths."""
    return {
        path.relative_to(folder).as_posix(): digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "resolved-config.json"
    }


def latents_only(**changes):
    """The smoke config without its run, with changed keys of its latents."""
    values = copy.deepcopy(SMOKE)
    values["latents"]["stored"].update(changes)
    return values | {"runs": {}, "inference": {}, "comparisons": {}}


def summary(part: Path) -> dict:
    return json.loads((part / "summary.json").read_text())


def encoder_calls(part: Path) -> tuple[int, int]:
    """(clips encoded, clips copied) of a part."""
    facts = summary(part)
    return facts["encoded"], facts["reused"]


@pytest.fixture
def sources(built, tmp_path) -> Folder:
    """The workflow with its data set and base model, and nothing encoded."""
    return built.copy(tmp_path / "Zoé's latents #1", "results/data", "results/assets")


def test_killing_everything_while_encoding_repeats_no_part_and_changes_no_byte(built, sources, tmp_path):
    whole = built.copy(tmp_path / "whole", "results/data", "results/assets")
    for folder in (whole, sources):
        folder.configure(latents_only(parts=4))
    whole.snakemake("latents_stored")

    shards = sources.path / STORED / "shards"
    process = sources.start("--cores", "1", "latents_stored")
    try:
        wait_for(lambda: any(shards.glob("part-*/COMPLETE.json")))
        wait_for(lambda: any(shards.glob(".part-*.partial")) or process.poll() is not None)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # Snakemake, its shell and the encoder
        process.communicate()
    finished = {
        path: path.stat() for path in shards.glob("part-*/*") if (path.parent / "COMPLETE.json").exists()
    }
    parts = {path.parent.name for path in finished}
    assert 1 <= len(parts) < 4 and not (sources.path / INDEX).exists()
    assert "snakemake --unlock" in sources.snakemake("latents_stored", code=1)
    sources.snakemake("--unlock")
    planned = jobs(sources.snakemake("-n", "latents_stored"))
    assert planned["preencode_shard"] == 4 - len(parts) and planned["merge_latent_index"] == 1
    sources.snakemake("latents_stored")
    for path, before in finished.items():
        now = path.stat()
        assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), path
    assert not list(shards.glob(".*.partial"))
    assert files(sources.path / STORED) == files(whole.path / STORED)
    assert NOTHING in sources.snakemake("-n", "latents_stored")


def test_a_lost_marker_of_a_part_is_issued_again_without_encoding(built, tmp_path):
    folder = built.copy(tmp_path / "lost", "results/data", "results/assets", "results/latents")
    folder.configure(latents_only())
    part = folder.path / STORED / "shards/part-000001"
    before = {path.name: (digest(path), path.stat().st_mtime_ns) for path in part.iterdir()}
    (part / "COMPLETE.json").unlink()
    assert jobs(folder.snakemake("-n", "latents_stored"))["preencode_shard"] == 1
    folder.snakemake("latents_stored")
    after = {path.name: (digest(path), path.stat().st_mtime_ns) for path in part.iterdir()}
    assert before.pop("COMPLETE.json")[0] == after.pop("COMPLETE.json")[0]
    assert after == before


def test_a_damaged_part_is_refused_by_the_merge_and_named(built, tmp_path):
    folder = built.copy(tmp_path / "damaged", "results/data", "results/assets", "results/latents")
    folder.configure(latents_only())
    shard = next((folder.path / STORED / "shards/part-000000").glob("*.tar"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-512])
    (folder.path / INDEX).unlink()
    for path in (folder.path / STORED / "index").iterdir():
        path.unlink()
    output = folder.snakemake(INDEX, code=1)
    assert shard.name in output and "part-000000" in output and "Traceback" not in output


def test_samples_of_equal_content_are_copied_into_another_generation(built, tmp_path):
    folder = built.copy(tmp_path / "reuse", "results/data", "results/assets", "results/latents")
    values = latents_only()
    values["latents"]["again"] = {**values["latents"]["stored"], "parts": 3, "reuse": ["stored"]}
    folder.configure(values)
    folder.snakemake("latents_again")
    again = folder.results / "latents/again"
    counts = [encoder_calls(again / f"shards/part-00000{n}") for n in range(3)]
    assert [sum(column) for column in zip(*counts, strict=True)] == [0, 8]
    verify(again / "index", deep=True)
    rows = [
        [json.loads(line) for line in (folder.results / f"latents/{name}/index/train-index.jsonl").open()]
        for name in ("stored", "again")
    ]
    for a, b in zip(*rows, strict=True):
        assert (a["sample_id"], a["latents_key"], a["prompt_key"]) == (
            b["sample_id"], b["latents_key"], b["prompt_key"])  # fmt: skip


def test_naming_another_generation_to_copy_from_repeats_nothing(sources):
    values = latents_only(parts=1)
    values["latents"]["first"] = copy.deepcopy(values["latents"]["stored"])
    sources.configure(values)
    sources.snakemake("latents_first", "latents_stored")
    values["latents"]["stored"]["reuse"] = ["first"]
    sources.configure(values)
    assert set(jobs(sources.snakemake("-n", "latents_stored"))) == {"resolve_latents"}
    sources.snakemake("latents_stored")
    assert NOTHING in sources.snakemake("-n", "latents_stored")


def test_another_deal_or_setting_of_existing_latents_is_refused_at_parse_time(built, tmp_path):
    folder = built.copy(tmp_path / "changed", "results")
    folder.configure(SMOKE | {"latents": latents_only(parts=3)["latents"]})
    output = folder.snakemake("-n", code=2)
    assert (
        "latents stored exists with another identity: parts 2 -> 3" in output and "reuse: [stored]" in output
    )
    folder.configure(SMOKE | {"latents": latents_only(set={"preencode.dtype": "bfloat16"})["latents"]})
    assert 'preencode.dtype "float32" -> "bfloat16"' in folder.snakemake("-n", code=2)


def test_latents_may_be_removed_when_what_is_trained_from_them_is_there(built, tmp_path):
    kept = ("data", "assets", "runs", "inference", "comparisons", "report")
    folder = built.copy(tmp_path / "thin", *(f"results/{name}" for name in kept))
    assert NOTHING in folder.snakemake("-n")
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"]["steps"] = 6
    folder.configure(values)
    planned = jobs(folder.snakemake("-n", "results/runs/smoke/checkpoint_model_000006/COMPLETE.json"))
    assert planned["preencode_shard"] == 2 and "synthesize_clips" not in planned


def test_windows_of_published_data_are_encoded_and_trained_on(built, tmp_path):
    elsewhere = built.copy(tmp_path / "someone else's", "results/data").results / "data/room"
    folder = built.copy(tmp_path / "windows", "results/assets")
    values = copy.deepcopy(SMOKE)
    values["data"]["room"] = {"kind": "published", "root": str(elsewhere)}
    values["windows"] = {"cut": {"data": "room", "profile": "spread", "pixel_frames": 33}}
    del values["latents"]["stored"]["data"]
    values["latents"]["stored"]["windows"] = "cut"
    values["runs"]["smoke"] |= {"steps": 2, "validate_steps": [2]}
    folder.configure(values)
    before = files(elsewhere)
    planned = jobs(folder.snakemake("-n"))
    assert planned["materialize_windows"] == 1 and not {"synthesize_clips", "index_clips"} & set(planned)
    folder.snakemake("results/runs/smoke/checkpoint_model_000002/COMPLETE.json")
    rows = [json.loads(line) for line in (folder.path / STORED / "index/train-index.jsonl").open()]
    assert len(rows) == 6 and all(row["sample_id"].endswith("/latent-33f-w00") for row in rows)
    assert files(elsewhere) == before and not (folder.results / "data").exists()
    verify(folder.results / "windows/cut", deep=True)
    values["windows"]["cut"]["profile"] = "hashed"
    folder.configure(values)
    assert "profile 'spread' -> 'hashed'" in folder.snakemake("-n", code=2)
