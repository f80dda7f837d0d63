"""I2V-A14B as files of the graph: trained from clips, continued from stored latents with their y, sampled and compared."""

import json
from pathlib import Path

import pytest
import yaml
from folders import REPO, digest, jobs, make_folder

from solarwm_lib import graph
from solarwm_lib.artifacts import read, verify

A14B = yaml.safe_load((Path(__file__).parent / "a14b.yaml").read_text())
SMOKE_A14B = ["smoke", "smoke_a14b"]


def test_the_released_recipes_run_at_the_scale_of_the_tiny_twin():
    chain = graph.load_workflow(A14B, REPO)
    base, long = (chain.resolved[name] for name in ("base", "long"))
    for resolved in (base, long):
        assert (
            resolved.route.key == "wan22_i2v_a14b:stage0p5:bidirectional:flow_matching"
            and resolved.route.runs
        )
        assert resolved.config.distributed.sequence_parallel_size == 1
        assert resolved.config.model.architecture == "wan22-tiny-i2v"
        assert (resolved.config.data.height, resolved.config.data.width) == (32, 48)
    assert (base.config.data.encoding, long.config.data.encoding) == ("online", "preencoded")
    assert long.config.checkpoint.weights == ["live", "ema"] and long.config.checkpoint.source_step == 4
    targets = chain.named_targets()
    assert targets["wan14b_stage0p5"] == [*targets["base"], *targets["long"]]


@pytest.mark.slow
def test_online_training_stored_latents_validation_inference_and_comparison(tmp_path):
    folder = make_folder(tmp_path / "high noise")
    folder.configure(A14B)
    planned = jobs(folder.snakemake("-n"))
    assert (planned["train_segment"], planned["validate"], planned["preencode_shard"]) == (2, 4, 1)
    folder.snakemake(timeout=1500)
    assert "Nothing to be done" in folder.snakemake("-n")

    contract = json.loads((folder.results / "latents/stored/index/encoder-contract.json").read_text())
    shapes = {spec["name"]: spec["shape"] for spec in contract["tensors"]}
    assert (shapes["latents"], shapes["i2v_y"]) == ([9, 16, 4, 6], [9, 20, 4, 6])

    runs = folder.results / "runs"
    for run, steps in (("base", 4), ("long", 2)):
        lines = [json.loads(line) for line in (runs / run / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "event" not in line]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert all(line["loss"] > 0 for line in lines)
    parents = {parent.path for parent in read(runs / "long/checkpoint_model_000002").parents}
    assert any(path.endswith("base/checkpoint_model_000004") for path in map(str, parents))

    # Validation and inference of the same weights over the same plan: the same pictures.
    tour = folder.results / "inference/tour_step_000002"
    validation = runs / "long/validation/step_000002/live"
    verify(tour, deep=True)
    plans = [
        json.loads(path.read_text())["payload_digest"]
        for path in (tour / "frozen-plan.json", runs / "long/validation/frozen-plan.json")
    ]
    assert plans[0] == plans[1]
    for slot in ("slot-000000", "slot-000001"):
        assert digest(tour / "live" / slot / "generated.mp4") == digest(validation / slot / "generated.mp4")
    (comparison,) = (folder.results / "comparisons").glob("lengths_step_*")
    verify(comparison, deep=True)
