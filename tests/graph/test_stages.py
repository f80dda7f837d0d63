"""Three stages, imported weights and exports as files of the graph: order, references, refusals."""

import copy
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from folders import REPO, SMOKE, digest, jobs, make_folder
from test_latents_graph import publish, sets_of

from solarwm_lib import graph
from solarwm_lib.artifacts import verify
from solarwm_lib.config import sources
from solarwm_lib.runtime.errors import ConfigError

STAGES = yaml.safe_load((Path(__file__).parent / "stages.yaml").read_text())


def values(section="runs", name=None, **changes):
    """The config of the three stages with changed keys of one entry."""
    result = copy.deepcopy(STAGES)
    if name:
        result[section].setdefault(name, {}).update(changes)
    return result


def workflow(config=None):
    return graph.load_workflow(values() if config is None else config, REPO)


def refusal(config) -> str:
    with pytest.raises(ConfigError) as error:
        workflow(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def checkpoint(run, step):
    return f"results/runs/{run}/checkpoint_model_{step:06d}/COMPLETE.json"


def test_a_stage_starts_from_the_checkpoints_it_names_and_stage2_waits_for_the_validated_student():
    chain = workflow()
    assert "initial" not in chain.training_inputs("base")
    assert chain.training_inputs("causal")["initial"] == [checkpoint("base", 4)]
    assert chain.training_inputs("fast")["initial"] == [checkpoint("causal", 4), checkpoint("base", 4)]
    assert chain.preflight_inputs("fast")["validated"] == [
        f"results/runs/causal/validation/step_000004/{name}/COMPLETE.json" for name in ("live", "ema")
    ]
    assert "validated" not in chain.preflight_inputs("causal")
    # A partial validation has a marker as well: the preflight is told where to look for more.
    folder = "results/runs/causal/validation/step_000004"
    assert chain.validated_arguments("fast") == f"--validated {folder}/live --validated {folder}/ema"
    assert chain.validated_arguments("causal") == ""
    # Sampling needs no source: it must not wait for one that was removed.
    assert chain.run_inputs("fast").keys() == {"data", "assets"}


def test_references_become_paths_steps_and_weights_of_the_configuration():
    stage1, stage2 = (workflow().resolved[name].config.checkpoint for name in ("causal", "fast"))
    here = Path.cwd() / "results/runs"
    assert (stage1.mode, stage1.weights, stage1.source_step) == ("weights_only", "ema", 4)
    assert stage1.path == str(here / "base/checkpoint_model_000004")
    roles = stage2.initialization
    assert (stage2.mode, roles.student.path) == ("roles", str(here / "causal/checkpoint_model_000004"))
    assert (roles.student.weights, roles.student.source_step) == ("ema", 4)
    assert roles.teacher == roles.critic  # the critic starts as the teacher
    sets = sets_of(workflow().run_arguments("fast"))
    assert sets["checkpoint.initialization.teacher.weights"] == '"ema"'


def test_the_weights_of_the_recipe_hold_where_the_reference_names_none():
    config = values("runs", "long", **{**STAGES["runs"]["base"], "initial": {"run": "base"}})
    config["runs"]["long"]["set"] = {"checkpoint.weights": ["live", "ema"]}
    assert workflow(config).resolved["long"].config.checkpoint.weights == ["live", "ema"]
    config["runs"]["long"] |= {"initial": {"run": "base", "weights": ["ema", "ema"]}}
    assert workflow(config).resolved["long"].config.checkpoint.weights == ["ema", "ema"]


def test_the_place_of_a_source_is_no_part_of_the_identity_but_its_step_and_weights_are(tmp_path, monkeypatch):
    first = workflow().identity("causal")
    monkeypatch.chdir(tmp_path)
    assert workflow().identity("causal") == first
    earlier = values("runs", "causal", initial={"run": "base", "step": 2})
    assert workflow(earlier).identity("causal") != first


def test_stages_and_families_are_targets():
    targets = workflow().named_targets()
    assert targets["stage1"] == targets["wan5b_stage1"] == targets["causal"]
    assert targets["wan5b_all"] == [*targets["base"], *targets["causal"], *targets["fast"]]
    assert {"wan5b_stage0p5", "wan5b_stage2", "export_causal_diffusers", "infer_fast_tour"} < set(targets)
    assert "wan14b_all" not in targets


def test_several_scales_are_merged_in_their_order():
    words = shlex.split(workflow().run_arguments("fast"))
    overlays = [Path(words[i + 1]).stem for i, word in enumerate(words) if word == "--overlay"]
    assert overlays == ["smoke", "smoke_stage2"]
    assert workflow().resolved["fast"].config.train.optimizer.learning_rate == 1e-4
    assert "smoke_stage2" in refusal(values("runs", "fast", scale=["smoke", "smoke_stage_2"]))


BASE, CAUSAL = STAGES["runs"]["base"], STAGES["runs"]["causal"]
TEACHER = {"run": "base", "weights": "ema"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("causal", {"initial": None}, ["runs.causal.initial: not set", "train_stage1_tf_anyflow_v1_5_81f"]),
        ("fast", {"roles": None}, ["runs.fast.roles: not set", "student"]),
        ("fast", {"roles": {"student": {"run": "causal"}}}, ["runs.fast.roles.teacher is missing"]),
        ("causal", {"initial": {"run": "bse"}}, ["runs.causal.initial.run", "'bse'", "did you mean base"]),
        ("causal", {"initial": {"run": "base", "step": 3}}, ["runs.causal.initial.step", "no checkpoint at 3", "[2, 4]"]),
        ("causal", {"initial": {"run": "base", "stepp": 4}}, ["unknown key runs.causal.initial.stepp", "did you mean step"]),
        ("causal", {"initial": {}}, ["runs.causal.initial: give exactly one of `run` and `assets`"]),
        ("causal", {"initial": {"run": "causal"}}, ["runs.causal: causal -> causal is a circle"]),
        ("causal", {"initial": {"run": "fast"}}, ["is a circle"]),
        ("causal", {"initial": {"assets": "tiny", "step": 4}}, ["runs.causal.initial.assets: tiny holds base weights"]),
        ("causal", {"initial": {"run": "base", "weights": "live"}}, ["checkpoint.weights", "live", "expected ema"]),
        ("fast", {"initial": {"run": "base"}}, ["runs.fast: has both initial and roles"]),
        ("fast", {"roles": {"student": {"run": "causal"}, "teacher": {"run": "causal"}}},
         ["runs.fast.roles.teacher: run causal trains wan22_ti2v_5b:stage1:", "the teacher of a Stage2 run starts from wan22_ti2v_5b:stage0p5:"]),
        ("fast", {"roles": {"student": {"run": "base"}, "teacher": TEACHER}},
         ["runs.fast.roles.student: run base trains wan22_ti2v_5b:stage0p5:", "the student of a Stage2 run starts from wan22_ti2v_5b:stage1:"]),
        ("causal", {"recipe": "wan22_ti2v_5b/train_stage1_tf_fm_81f"},
         ["runs.fast.roles.student: run causal trains", "teacher_forcing:flow_matching", "anyflow_forward_map"]),
        ("fast", {"roles": {"student": {"run": "causal"}, "teacher": TEACHER, "critic": {**TEACHER, "weights": "live"}}},
         ["runs.fast", "critic", "live", "expected ema"]),
        ("fast", {"roles": {"student": {"run": "causal", "step": 2}, "teacher": TEACHER}},
         ["runs.fast.roles.student: step 2 of run causal is not validated", "runs.causal.validate_steps"]),
        ("base", {"set": {"model.camera_translation_transform": "logd4"}},
         ["runs.causal.initial: run base", "camera_translation_transform logd4", "causal has linear"]),
        ("causal", {"set": {"model.timestep_shift": 5.0}}, ["model.timestep_shift 3.0", "causal has 5.0"]),
        ("causal", {"set": {"model.causal.chunk_latent_frames": 9}},
         ["runs.fast.roles.student: run causal", "chunk_latent_frames 9", "fast has 3"]),
        ("base", {"set": {"train.ema.start_step": 5}, "validate_steps": []},
         ["runs.causal.initial.weights: takes ema weights", "run base starts at step 5", "not there at step 4"]),
        ("fast", {"set": {"train.ema.start_step": 2}},
         ["runs.fast: validation pass ema", "student update 2", "step 4"]),
    ],
)  # fmt: skip
def test_a_source_that_cannot_fit_is_refused_naming_both_sides(name, changes, words):
    message = refusal(values("runs", name, **changes))
    assert all(word in message for word in words), message


def test_the_graph_and_the_trainer_ask_for_the_same_routes():
    from solarwm_lib.training import initial

    assert sources.NEEDED == initial.NEEDED and set(initial.SHARED) < set(sources.SHARED)
    assert sources.SHARED_BY_STUDENT == initial.SHARED_BY_STUDENT


def test_a_source_with_other_base_weights_is_refused():
    config = values("assets", "other", kind="tiny", seed=1)
    config["runs"]["causal"]["assets"] = "other"
    assert "runs.causal.initial: run base belongs to assets tiny, but the run has assets other" in refusal(
        config
    )


def test_the_average_of_the_released_stage2_begins_at_step_196():
    from types import SimpleNamespace as Settings

    from solarwm_lib.objectives import self_gradient_forcing as sgf
    from solarwm_lib.training.ema import EmaCadence

    def updates(step, start, every, ratio=None):
        forcing = Settings(critic_updates_per_student=ratio) if ratio else None
        ema = Settings(start_step=start, update_every=every)
        config = Settings(train=Settings(ema=ema, self_gradient_forcing=forcing))
        return sources.average_updates(config, step)

    assert [updates(step, 39, 1, 5) for step in (195, 196, 200, 201)] == [0, 1, 1, 2]
    for step in range(300):
        for start in (0, 1, 7, 39):
            for every in (1, 2, 3):
                assert updates(step, start, every) == EmaCadence(0.9, start, every).updates_after(step)
                students = sgf.student_updates_after(step, 5)
                assert updates(step, start, every, 5) == sgf.ema_updates_after(students, start, every)


@pytest.mark.parametrize(
    ("section", "name", "changes", "words"),
    [
        ("inference", "fast_tour", {"run": "causal"}, ["fast_tour", "run causal trains", "stage1"]),
        ("inference", "fast_tour", {"run": None}, ["give exactly one of `run` and `assets`"]),
        ("inference", "fast_tour", {"data": "rooom"}, ["inference.fast_tour.data", "did you mean room"]),
        ("exports", "causal_diffusers", {"run": "x"}, ["exports.causal_diffusers.run"]),
        ("exports", "causal_diffusers", {"step": 3}, ["exports.causal_diffusers.step", "[2, 4]"]),
        ("exports", "causal_diffusers", {"form": "comfy"}, ["exports.causal_diffusers.form", "'comfy'"]),
        (
            "exports",
            "causal_diffusers",
            {"form": "released", "weights": "ema"},
            ["a released package holds both"],
        ),
    ],
)
def test_an_inference_or_export_that_cannot_work_is_refused(section, name, changes, words):
    message = refusal(values(section, name, **changes))
    assert all(word in message for word in words), message


def test_an_export_that_follows_the_last_checkpoint_carries_its_step():
    chain = workflow()
    marker = "results/exports/causal_diffusers_step_000004/COMPLETE.json"
    assert chain.export_marker("causal_diffusers") == marker and marker in chain.all_targets()
    assert marker not in chain.gallery_inputs()
    assert chain.export_checkpoint("causal_diffusers") == checkpoint("causal", 4)
    words = "results/runs/causal/checkpoint_model_000004 --format diffusers --role ema --dtype bfloat16"
    assert chain.export_arguments("causal_diffusers") == words
    package = values("exports", "causal_diffusers", form="released", dtype=None, step=2)
    assert (
        workflow(package).export_marker("causal_diffusers").endswith("exports/causal_diffusers/COMPLETE.json")
    )
    assert workflow(package).export_arguments("causal_diffusers").endswith("2 --format released")


def imported(tmp_path):
    """The config with imported weights in place of the first two stages."""
    config = values()
    package = tmp_path / "a package"
    package.mkdir(exist_ok=True)
    config["assets"]["released_student"] = {"kind": "imported", "source": str(package), "base": "tiny"}
    config["assets"]["released_teacher"] = {"kind": "imported", "source": str(package), "base": "tiny"}
    fast = config["runs"]["fast"]
    fast["roles"] = {
        "student": {"assets": "released_student", "step": 3000},
        "teacher": {"assets": "released_teacher", "step": 30000},
    }
    config["runs"] = {"fast": fast}
    tour = {**STAGES["inference"]["causal_tour"], "data": "room", "assets": "released_student"}
    config["inference"] = {"tour": {key: value for key, value in tour.items() if key != "run"}}
    config["exports"], config["comparisons"] = {}, {}
    return config


def test_imported_weights_stand_where_a_checkpoint_does(tmp_path):
    config = imported(tmp_path)
    chain = workflow(config)
    student = "results/assets/released_student/COMPLETE.json"
    assert chain.training_inputs("fast")["initial"] == [
        student,
        "results/assets/released_teacher/COMPLETE.json",
    ]
    assert "validated" not in chain.preflight_inputs("fast")
    assert chain.resolved["fast"].config.checkpoint.initialization.student.source_step == 3000
    assert chain.import_inputs("released_student") == {"base": "results/assets/tiny/COMPLETE.json"}
    words = shlex.split(chain.import_arguments("released_student"))
    assert words == [str(tmp_path / "a package"), "--assets", "results/assets/tiny"]
    assert chain.inference_inputs("tour") == {
        "assets": "results/assets/tiny/COMPLETE.json",
        "data": "results/data/room/COMPLETE.json",
        "checkpoint": student,
    }
    assert chain.inference_marker("tour") == "results/inference/tour/COMPLETE.json"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("assets.released_student.source", "nowhere", ["assets.released_student.source", "nowhere"]),
        ("assets.released_student.base", "tinny", ["assets.released_student.base", "did you mean tiny"]),
        ("assets.released_student.base", "released_teacher", ["released_teacher holds trained weights"]),
        ("runs.fast.assets", "released_student", ["runs.fast.assets", "released_student holds trained weights"]),
        ("runs.fast.roles.student.step", None, ["runs.fast.roles.student.step: not set"]),
        ("runs.fast.roles.student.assets", "tiny", ["runs.fast.roles.student.assets: tiny holds base weights"]),
        ("inference.tour.data", None, ["inference.tour.data: not set"]),
        ("inference.tour.step", 2, ["inference.tour.step", "remove it"]),
    ],
)  # fmt: skip
def test_imported_weights_that_cannot_work_are_refused(tmp_path, path, value, words):
    config = imported(tmp_path)
    *sections, key = path.split(".")
    target = config
    for section in sections:
        target = target[section]
    target[key] = value
    message = refusal(config)
    assert all(word in message for word in words), message


def test_imported_base_weights_are_assets_of_a_run(tmp_path):
    config = values("assets", "tiny", kind="imported", source=str(tmp_path), architecture="wan22-tiny")
    assert workflow(config).import_arguments("tiny") == f"{tmp_path} --architecture wan22-tiny"
    assert workflow(config).import_inputs("tiny") == {}
    assert workflow(config).names_pattern("assets", "tiny") == "(?!)"


def test_a_source_that_moved_on_is_refused_with_the_step_to_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path(workflow().run_dir("causal"))
    run.mkdir(parents=True)
    (run / "resolved-config.json").write_text(json.dumps(workflow().resolved["causal"].values))
    message = refusal(values("runs", "base", steps=6))
    assert "checkpoint.source_step 4 -> 6" in message and "name the step it started from" in message
    config = values("runs", "base", steps=6)
    config["runs"]["causal"]["initial"]["step"] = 4
    workflow(config)


def publish_made(marker: str, chain, run: str, **note) -> None:
    """Publish a marker of `run` as its jobs would: with the identity and the parents of its inputs."""
    inputs = chain.training_inputs(run)
    parents = [inputs["data"], inputs["assets"], *inputs.get("initial", ())]
    for parent in parents[:2]:
        publish(parent, {"of": parent})
    data, assets = (digest(Path(path)) for path in parents[:2])
    publish(marker, {"dataset": data, "assets": assets, **note}, *parents)


def test_a_run_keeps_the_very_weights_it_began_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = workflow()
    publish_made(checkpoint("base", 4), chain, "base")
    publish_made(chain.preflight("causal"), chain, "causal")
    workflow()
    publish_made(checkpoint("base", 4), chain, "base", made="again")
    message = refusal(values())
    assert "runs.causal: initial weights" in message and "base/checkpoint_model_000004" in message


def test_a_changed_export_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chain = workflow()
    publish_made(checkpoint("base", 4), chain, "base")
    publish_made(checkpoint("causal", 4), chain, "causal")
    identity = {"source": "x", "format": "diffusers", "role": "ema", "dtype": "bfloat16"}
    publish(chain.export_marker("causal_diffusers"), identity, checkpoint("causal", 4))
    workflow()
    assert "'ema' -> 'live'" in refusal(values("exports", "causal_diffusers", weights="live"))
    publish_made(checkpoint("causal", 4), chain, "causal", made="again")
    assert "exports.causal_diffusers: run causal" in refusal(values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("stages") / "three stages")
    folder.configure(STAGES)
    return folder


def order(output: str) -> list[str]:
    """`rule of run` of every planned job, in the order of the plan."""
    found = []
    for block in output.split("\nrule ")[1:]:
        run = re.search(r"wildcards: run=(\w+)", block)
        found += [f"{block.partition(':')[0]} {run[1]}"] if run else []
    return found


@pytest.mark.slow
def test_the_dry_run_shows_the_stages_in_their_order(folder):
    output = folder.snakemake("-n", "-p")
    planned = order(output)
    assert output.count("--validated") == 2 and "/step_000004/ema --out" in output
    segments = [item for item in planned if item.startswith("train_segment")]
    assert segments == [
        f"train_segment {run}" for run in ("base", "base", "causal", "causal", "fast", "fast")
    ]
    last_validation = max(i for i, item in enumerate(planned) if item == "validate causal")
    assert planned.index("preflight causal") > planned.index("train_segment base")
    assert planned.index("preflight fast") > last_validation
    counts = jobs(output)
    assert counts["preflight"] == counts["resolve_run"] == 3 and counts["export_model"] == 1


@pytest.mark.slow
def test_asking_for_the_last_comparison_plans_everything_below_it(folder):
    planned = jobs(folder.snakemake("-n", "compare_stages"))
    assert planned["train_segment"] == 6 and planned["synthesize_clips"] == 1
    # The three passes that are compared, and those of the student that Stage2 waits for.
    assert planned["validate"] == 4 and "infer" not in planned and "export_model" not in planned


@pytest.mark.slow
def test_one_stage_by_name_plans_the_stages_below_it_and_none_above(folder):
    runs = {item.split()[1] for item in order(folder.snakemake("-n", "wan5b_stage1"))}
    assert runs == {"base", "causal"}


@pytest.mark.slow
def test_weights_go_out_and_come_back_through_the_graph(built, tmp_path):
    folder = built.copy(tmp_path / "weights", "results")
    config = copy.deepcopy(SMOKE)
    config["exports"] = {
        "network": {"run": "smoke", "form": "diffusers"},
        "package": {"run": "smoke", "step": 4, "form": "released"},
    }
    folder.configure(config)
    folder.snakemake("export_network", "export_package")
    for name in ("network_step_000004", "package"):
        verify(folder.results / "exports" / name, deep=True)

    config["assets"] |= {
        "network": {"kind": "imported", "source": "results/exports/network_step_000004", "base": "tiny"},
        "package": {"kind": "imported", "source": "results/exports/package", "base": "tiny"},
    }
    one_pass = [{"name": "ema", "weights": "ema", "num_inference_steps": 2}]
    tour = {**SMOKE["inference"]["tour"], "data": "room", "set": {"validation.passes": one_pass}}
    del tour["run"]
    config["inference"] |= {f"from_{name}": {**tour, "assets": name} for name in ("network", "package")}
    folder.configure(config)
    folder.snakemake("infer_from_network", "infer_from_package")
    video = Path("ema/slot-000000/generated.mp4")
    wanted = digest(folder.results / "inference/tour_step_000004" / video)
    assert digest(folder.results / "inference/from_network" / video) == wanted
    assert digest(folder.results / "inference/from_package" / video) == wanted
    assert "Nothing to be done" in folder.snakemake("-n", "infer_from_network", "infer_from_package")
