"""Rollouts of four times the training length as a part of the graph: over clips of their own, with shuffled cameras beside."""

import copy
import csv
import io
import json
from pathlib import Path

import pytest
import yaml
from folders import REPO, make_folder
from test_latents_graph import publish

from solarwm_lib import graph
from solarwm_lib.artifacts import verify
from solarwm_lib.data.video import decode
from solarwm_lib.inference.plan import plan_settings
from solarwm_lib.runtime.errors import ConfigError

LONG_WALK = yaml.safe_load((Path(__file__).parent / "long_walk.yaml").read_text())
INFERENCE = "results/inference/long_walk_step_000004/COMPLETE.json"


def test_an_inference_over_other_clips_is_compared_with_itself():
    chain = graph.load_workflow(copy.deepcopy(LONG_WALK), REPO)
    assert chain.inference_inputs("long_walk")["data"] == "results/data/long_walks/COMPLETE.json"
    assert chain.comparison_inputs("far") == [INFERENCE]
    passes = chain.resolved_inference["long_walk"].config.validation.passes
    assert [(p.name, p.rollout_latent_frames, p.camera, p.solver) for p in passes] == [
        ("ema", 36, "recorded", "self_forcing"),
        ("shuffled_camera", 36, "shuffled", "self_forcing"),
    ]


def test_one_pass_is_nothing_to_compare():
    config = copy.deepcopy(LONG_WALK)
    del config["inference"]["long_walk"]["set"]["validation.passes"][1]
    with pytest.raises(ConfigError, match=r"comparisons.far: two or more passes are needed, found 1"):
        graph.load_workflow(config, REPO)


def test_a_published_long_walk_is_recognised_and_a_shorter_one_refused(tmp_path, monkeypatch):
    """The bound of source-variable cases stands in the passes, not under a key of its own."""
    monkeypatch.chdir(tmp_path)
    chain = graph.load_workflow(copy.deepcopy(LONG_WALK), REPO)
    resolved = chain.resolved_inference["long_walk"]
    inputs = chain.inference_inputs("long_walk").values()
    for marker in inputs:
        publish(marker, {"of": marker})
    passes = [{"pass": item.model_dump()} for item in resolved.config.validation.passes]
    publish(INFERENCE, {"passes": passes}, *inputs)
    Path(chain.inference_checkpoint("long_walk")).unlink()  # no checkpoint that a training could go on from
    plan = Path(INFERENCE).with_name("frozen-plan.json")
    plan.write_text(json.dumps({"settings": plan_settings(resolved)}))
    graph.load_workflow(copy.deepcopy(LONG_WALK), REPO)
    changed = copy.deepcopy(LONG_WALK)
    for item in changed["inference"]["long_walk"]["set"]["validation.passes"]:
        item["rollout_latent_frames"] = 39
    with pytest.raises(
        ConfigError, match=r"long_walk exists with other settings: .*rollout_latent_frames 36 -> 39"
    ):
        graph.load_workflow(changed, REPO)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stage2_walks_four_times_as_far_as_it_was_trained(tmp_path):
    folder = make_folder(tmp_path / "long walk")
    folder.configure(LONG_WALK)
    folder.snakemake("compare_far", timeout=1500)
    walk = folder.results / "inference/long_walk_step_000004"
    far = folder.results / "comparisons/far_step_000004"
    for artifact in (walk, far):
        verify(artifact, deep=True)
    for name in ("ema", "shuffled_camera"):
        for slot in range(2):
            manifest = json.loads((walk / name / f"slot-{slot:06d}/manifest.json").read_bytes())
            assert (manifest["status"], manifest["latent_frames"], manifest["pixel_frames"]) == (
                "ok",
                36,
                141,
            )
            # Cameras and ground truth to the end, those of another walk under shuffled cameras.
            assert manifest["case"]["start_frame"] == 0 and "ground_truth_frames" not in manifest
            assert "repeated_from_latent" not in manifest["camera"]
            assert (manifest["camera"]["slot"] == slot) == (name == "ema")
            assert len(decode(walk / name / f"slot-{slot:06d}/generated.mp4")) == 141
    rows = list(csv.DictReader(io.StringIO((far / "summary.csv").read_text())))
    assert {row["shuffled_pass"] for row in rows} >= {"shuffled_camera"}
    assert not json.loads((far / "summary.json").read_bytes())["plans_differ"]
    assert "Nothing to be done" in folder.snakemake("-n", "compare_far")
