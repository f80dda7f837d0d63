"""The workflow config as files: chains, names, refusals. No Snakemake, no torch."""

import copy
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from solarwm_lib import graph
from solarwm_lib.config import overrides, published, references
from solarwm_lib.runtime.errors import ConfigError

REPO = Path(__file__).parents[2]
SMOKE = yaml.safe_load((Path(__file__).parent / "smoke.yaml").read_text())


def workflow(**changes):
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"].update(changes)
    return graph.load_workflow(values, REPO)


def test_training_is_a_chain_of_segments_ending_at_the_last_step():
    chain = workflow(steps=5, validate_steps=[5])
    assert chain.checkpoint_steps("smoke") == [2, 4, 5]
    assert chain.previous_checkpoint("smoke", 2) == []
    assert chain.previous_checkpoint("smoke", 5) == [
        "results/runs/smoke/checkpoint_model_000004/COMPLETE.json"
    ]


def test_a_checkpoint_that_another_run_goes_on_from_keeps_everything():
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"].setdefault("set", {})["checkpoint.keep_full_steps"] = [4]
    resume = {
        "checkpoint.mode": "full_resume",
        "checkpoint.path": "results/runs/smoke/checkpoint_model_000002",
    }
    values["runs"]["more"] = {
        **copy.deepcopy(values["runs"]["smoke"]),
        "set": {**resume, "checkpoint.source_step": 2},
    }
    found = graph.load_workflow(values, REPO)
    assert overrides.of_run(found, "smoke")["checkpoint.keep_full_steps"] == [2, 4]
    assert "checkpoint.keep_full_steps" not in overrides.of_run(workflow(), "smoke")
    assert found.identity("smoke") == workflow().identity("smoke")


def test_raising_the_steps_keeps_every_earlier_file_and_its_identity():
    before, after = workflow(), workflow(steps=6)
    assert set(before.run_checkpoints("smoke")) < set(after.run_checkpoints("smoke"))
    assert before.identity("smoke") == after.identity("smoke")


@pytest.mark.parametrize(
    "every, steps, chain",
    [
        (2, 5, [2, 4, 5]),
        (1, 7, [2, 4, 5, 6, 7]),
        (4, 12, [2, 4, 5, 8, 12]),
        (2, 8, [2, 4, 5, 6, 8]),
        (2, 4, [2, 4]),
    ],
)
def test_published_segments_keep_their_place_under_another_cadence(
    tmp_path, monkeypatch, every, steps, chain
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published, "_check_inputs", lambda *_: None)  # their markers are not made here
    before = {2: None, 4: 2, 5: 4}
    for step, parent in before.items():
        marker = Path(workflow().checkpoint("smoke", step))
        marker.parent.mkdir(parents=True)
        paths = ["../../../data/room", "../../other/checkpoint_model_000003"]
        paths += [f"../checkpoint_model_{parent:06d}"] if parent else []
        marker.write_text(json.dumps({"parents": [{"path": path, "digest": ""} for path in paths]}))
    after = workflow(checkpoint_every=every, steps=steps, validate_steps=[steps])
    assert after.checkpoint_steps("smoke") == chain
    for step, parent in before.items():
        wanted = [after.checkpoint("smoke", parent)] if parent else []
        assert step > steps or after.previous_checkpoint("smoke", step) == wanted


def test_a_deleted_segment_is_made_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    marker = Path(workflow().checkpoint("smoke", 4))
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"parents": [{"path": "../checkpoint_model_000002", "digest": ""}]}))
    monkeypatch.setattr(published, "_check_inputs", lambda *_: None)
    assert workflow(steps=6).checkpoint_steps("smoke") == [2, 4, 6]


def test_what_follows_the_last_checkpoint_carries_its_step_in_the_name():
    assert workflow().comparison_marker("smoke") == "results/comparisons/smoke_step_000004/COMPLETE.json"
    assert workflow(steps=6).comparison_marker("smoke").endswith("smoke_step_000006/COMPLETE.json")
    assert workflow().by_artifact("comparison", "smoke_step_000004") == "smoke"


def test_a_comparison_takes_every_pass_of_the_last_validated_checkpoint():
    inputs = workflow().comparison_inputs("smoke")
    assert len(inputs) == len(workflow().passes("smoke")) >= 2
    assert all("/validation/step_000004/" in path for path in inputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chekpoint_every": 2}, ["unknown key", "chekpoint_every", "checkpoint_every"]),
        ({"recipe": "wan22_ti2v_5b/train_stage0p5_fm_81"}, ["recipe", "train_stage0p5_fm_81f"]),
        ({"data": "rooom"}, ["runs.smoke.data", "rooom", "room"]),
        ({"validate_steps": [3]}, ["validate_steps", "[3]", "[2, 4]"]),
        ({"steps": 0}, ["steps"]),
        ({"set": {"train.optimizer.learning_rat": 1e-4}}, ["learning_rate"]),
        ({"set": {"data.pixel_frames": 80}}, ["77", "81"]),
        ({"processes": 3}, ["global_batch_size"]),
        (
            {"set": {"train.timestep_mode": "per_block"}},
            ["runs.smoke", "train.timestep_mode", "uniform_per_video"],
        ),
        ({"steps": 1_000_000}, ["steps", "999999"]),
    ],
)
def test_refusals_name_the_key_and_the_nearest_valid_value(change, words):
    with pytest.raises(ConfigError) as error:
        workflow(**change)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_inference_is_one_process_however_many_train():
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"]["processes"] = 2
    values["runs"]["smoke"]["set"] = {"train.micro_batch_size": 1}
    assert "distributed.world_size=1" in graph.load_workflow(values, REPO).inference_arguments("tour")


def test_each_process_has_its_own_threads_whatever_the_job_has_in_all():
    spread = workflow(processes=2, threads=3, set={"train.micro_batch_size": 1})
    assert spread.run_threads("smoke") == 6
    words = spread.launcher("smoke").split()
    assert {"OMP_NUM_THREADS=3", "MKL_NUM_THREADS=3", "--nproc-per-node=2"} < set(words)


def test_both_spellings_of_a_number_are_numbers():
    text, number = (workflow(set={"train.optimizer.learning_rate": value}) for value in ("5e-4", 5e-4))
    assert text.identity("smoke") == number.identity("smoke") != workflow().identity("smoke")


def test_a_new_validation_pass_is_a_target_of_the_run():
    passes = [{"name": name, "weights": "ema", "num_inference_steps": 2} for name in ("ema", "again")]
    longer = workflow(set={"validation.passes": passes})
    assert longer.validation("smoke", 4, "again") in longer.named_targets()["smoke"]


def test_a_changed_identity_of_an_existing_run_is_refused_with_a_diff(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path(workflow().run_dir("smoke"))
    run.mkdir(parents=True)
    (run / "resolved-config.json").write_text(json.dumps(workflow().resolved["smoke"].values))
    workflow(steps=6, threads=2)  # neither is part of the identity
    with pytest.raises(ConfigError, match=r"train\.optimizer\.learning_rate") as error:
        workflow(set={"train.optimizer.learning_rate": 0.5})
    assert "new run name" in str(error.value)


@pytest.mark.parametrize("name", ["validate", "all", "stage0p5", "infer_tour"])
def test_a_run_called_like_another_target_is_refused(name):
    values = json.loads(json.dumps(SMOKE).replace('"smoke": {"recipe"', f'"{name}": {{"recipe"'))
    values["inference"]["tour"]["run"] = values["comparisons"]["smoke"][0]["run"] = name
    with pytest.raises(ConfigError, match=f"'{name}' names two targets"):
        graph.load_workflow(values, REPO)


def test_the_rules_that_names_are_kept_apart_from_are_those_of_the_files():
    text = "".join(path.read_text() for path in [REPO / "Snakefile", *(REPO / "rules").glob("*.smk")])
    assert sorted(references.RULES) == sorted(re.findall(r"(?m)^rule (\w+):", text))


def test_a_run_whose_data_set_was_swapped_or_made_again_otherwise_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = workflow()
    inputs = [Path(path) for path in chain.training_inputs("smoke").values()]
    for marker in inputs:
        marker.parent.mkdir(parents=True)
        marker.write_text(json.dumps({"identity": {}, "of": str(marker)}))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in inputs]
    preflight = Path(chain.preflight("smoke"))
    preflight.parent.mkdir(parents=True)
    parents = [
        {"path": f"../../../{path.parent.relative_to('results')}", "digest": digest}
        for path, digest in zip(inputs, digests, strict=True)
    ]
    identity = dict(zip(("dataset", "assets", "latents"), digests, strict=True))
    preflight.write_text(json.dumps({"identity": identity, "parents": parents}))
    workflow()
    values = copy.deepcopy(SMOKE)
    values["data"]["other"] = {**values["data"]["room"], "seed": 8}
    values["runs"]["smoke"]["data"] = "other"
    with pytest.raises(ConfigError, match=r"runs\.smoke: data other .* not what the run began with"):
        graph.load_workflow(values, REPO)
    inputs[0].unlink()
    workflow()  # it will be made again
    inputs[0].write_text(json.dumps({"identity": {}, "of": "something else"}))
    with pytest.raises(ConfigError, match=r"runs\.smoke: data room .* not what the run began with"):
        workflow()
    inputs[0].write_text(json.dumps({"identity": {}, "of": str(inputs[0])}))
    inputs[2].write_text(json.dumps({"identity": {}, "of": "other latents"}))
    with pytest.raises(ConfigError, match=r"runs\.smoke: latents stored .* not what the run began with"):
        workflow()


def test_a_changed_data_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    marker = Path(workflow().data_marker("room"))
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"identity": json.loads(workflow().data_spec("room"))}))
    workflow()
    values = copy.deepcopy(SMOKE)
    values["data"]["room"]["train_clips"] = 7
    with pytest.raises(ConfigError, match=r"train_clips.*6 -> 7"):
        graph.load_workflow(values, REPO)


def test_the_order_of_keys_changes_nothing():
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"] = dict(reversed(values["runs"]["smoke"].items()))
    values["data"]["room"] = dict(reversed(values["data"]["room"].items()))
    reordered = graph.load_workflow(dict(reversed(values.items())), REPO)
    assert reordered.identity("smoke") == workflow().identity("smoke")
    assert reordered.data_spec("room") == workflow().data_spec("room")


def test_arguments_survive_a_shell_and_the_override_parser(tmp_path, monkeypatch):
    import shlex

    from solarwm_lib.config.load import load

    odd = tmp_path / "a room's #1: é"
    odd.mkdir()
    monkeypatch.chdir(odd)
    words = shlex.split(workflow().run_arguments("smoke"))
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    resolved = load(
        REPO / "config/recipes/wan22_ti2v_5b/train_stage0p5_fm_81f.yaml",
        [REPO / "config/scales/smoke.yaml"],
        sets,
    )
    assert resolved.config.runtime.output_dir == str(odd / "results/runs/smoke")


def test_importing_the_graph_imports_no_torch():
    code = (
        "import sys, solarwm_lib.graph; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
