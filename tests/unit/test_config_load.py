"""Loading: layers, `--set`, environment, paths, placeholders, secrets, deviations, and what a refusal costs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from solarwm_lib.config import load as loading
from solarwm_lib.config.architectures import CONFIG_ROOT
from solarwm_lib.config.load import load, load_resolved, refuse_placeholders, resolve_values, write_resolved
from solarwm_lib.runtime.errors import ConfigError

RECIPES = CONFIG_ROOT / "recipes" / "wan22_ti2v_5b"
TRAIN_81 = RECIPES / "train_stage0p5_fm_81f.yaml"
DEMO = CONFIG_ROOT / "scales" / "demo.yaml"


def refusal(*sets: str, path: Path = TRAIN_81, overlays: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overlays=overlays, sets=sets)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The released examples (wan22.md 9.1) and the two preencodings that the release has no example of (81 frames, A14B's own).
EXAMPLES = {
    "wan22_ti2v_5b": (
        "train_stage0p5_fm_81f", "train_stage0p5_fm_153f", "train_stage1_tf_fm_81f", "train_stage1_tf_anyflow_v1_5_81f",
        "train_stage2_sgf_81f", "infer_stage0p5_fm_81f", "infer_stage0p5_fm_153f", "infer_stage1_tf_anyflow_v1_5_81f",
        "infer_stage2_sgf_81f", "infer_stage2_sgf_camera_length", "preencode_81f", "preencode_153f",
    ),
    "wan22_i2v_a14b": ("train_stage0p5_fm_81f", "train_stage0p5_fm_153f", "infer_stage0p5_fm_81f", "preencode_153f"),
}  # fmt: skip
ROUTES = {
    "preencode": "preencode:none:none",
    "stage0p5": "stage0p5:bidirectional:flow_matching",
    "stage1_tf_fm": "stage1:teacher_forcing:flow_matching",
    "stage1_tf_anyflow": "stage1:teacher_forcing:anyflow_forward_map:v1_5",
    "stage2": "stage2:self_gradient_forcing:flow_matching",
}


def route_of(recipe: Path) -> str:
    return f"{recipe.parent.name}:{next(route for word, route in ROUTES.items() if word in recipe.stem)}"


def overlays_for(recipe: Path, scale: str) -> list[Path]:
    """The overlay of a scale, and the one that goes with it for the causal stages."""
    stages = [word for word in ("stage1", "stage2") if word in recipe.stem]
    return [CONFIG_ROOT / "scales" / f"{name}.yaml" for name in (scale, *(f"{scale}_{s}" for s in stages))]


def test_there_is_a_recipe_for_every_released_example() -> None:
    found = {(path.parent.name, path.stem) for path in RECIPES.parent.rglob("*.yaml")}
    assert found == {(family, name) for family, names in EXAMPLES.items() for name in names}


@pytest.mark.parametrize(
    "recipe", sorted(RECIPES.parent.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_recipe_resolves_to_its_route_and_deviates_from_nothing(recipe: Path) -> None:
    resolved = load(recipe)
    assert resolved.route.key == route_of(recipe)
    assert resolved.deviations == []
    assert resolved.recipe == f"{recipe.parent.name}/{recipe.name}"


# Of Stage1, the larger scales train what is released: AnyFlow.
SCALED = [
    (recipe, scale)
    for recipe in sorted(RECIPES.glob("*.yaml"))
    for scale in ("smoke", "demo", "study")
    if scale == "smoke" or "tf_fm" not in recipe.stem
]


@pytest.mark.parametrize(
    ("recipe", "scale"), SCALED, ids=lambda part: part if isinstance(part, str) else part.stem
)
def test_every_recipe_resolves_at_every_scale(recipe: Path, scale: str) -> None:
    overlays = overlays_for(recipe, scale)
    one_pass = "validation.passes=[{name: model, weights: ema, num_inference_steps: 4}]"
    sets = [one_pass] if recipe.stem.endswith("camera_length") else []
    resolved = load(recipe, overlays=overlays, sets=sets)
    assert resolved.route.key == route_of(recipe) and resolved.route.runs
    assert resolved.config.data.latent_frames == 9 and resolved.config.model.architecture == "wan22-tiny"
    assert {"key": "data.height", "value": 64, "released": 480} in resolved.deviations


@pytest.mark.parametrize("scale", ["smoke", "demo", "study"])
def test_a_scale_gives_stored_latents_the_geometry_of_the_run_in_the_type_of_online_encoding(
    scale: str,
) -> None:
    overlay = CONFIG_ROOT / "scales" / f"{scale}.yaml"
    stored, run = (load(RECIPES / f"{name}.yaml", [overlay]) for name in ("preencode_81f", TRAIN_81.stem))
    assert stored.config.preencode is not None and stored.config.preencode.dtype == "float32"
    assert "preencode" not in run.values and not stored.config.data.random_start
    for key in ("pixel_frames", "latent_frames", "height", "width", "fps"):
        assert getattr(stored.config.data, key) == getattr(run.config.data, key)
    assert stored.config.model.text_length == run.config.model.text_length


def test_the_81_frame_recipe_holds_the_released_numbers() -> None:
    values = load(TRAIN_81).values
    # wan22.md 3.3, operations.md 3.7.3 and 8.5
    train = values["train"]
    assert train["optimizer"] == {
        "learning_rate": 5e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "gradient_clip": 1.0,
        "warmup_steps": 1000, "min_learning_rate_ratio": 0.1,
    }  # fmt: skip
    assert train["ema"] == {"decay": 0.9999, "start_step": 0, "update_every": 1, "warmup_steps": 0}
    assert (train["max_steps"], train["global_batch_size"], train["image_condition_dropout"]) == (
        30000,
        256,
        0.1,
    )
    assert (values["model"]["timestep_shift"], values["data"]["fps"], values["data"]["latent_frames"]) == (
        5.0,
        16.0,
        21,
    )
    assert [(p["weights"], p["solver"], p["num_inference_steps"], p["rollout_latent_frames"]) for p in values["validation"]["passes"]] == [
        ("live", "unipc", 50, 21), ("ema", "unipc", 50, 21),
    ]  # fmt: skip


def test_the_153_frame_recipe_continues_from_the_81_frame_checkpoint_on_stored_latents() -> None:
    config = load(RECIPES / "train_stage0p5_fm_153f.yaml").config
    assert (config.data.pixel_frames, config.data.latent_frames, config.data.encoding) == (
        153,
        39,
        "preencoded",
    )
    assert (config.checkpoint.mode, config.checkpoint.weights, config.checkpoint.source_step) == (
        "weights_only",
        ["live", "ema"],
        30000,
    )
    assert config.train.activation_checkpointing and not config.data.random_start


def passes_of(values: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = ("name", "weights", "mode", "solver", "num_inference_steps", "rollout_latent_frames")
    return [tuple(entry[key] for key in keys) for entry in values["validation"]["passes"]]


ADAMW = {"learning_rate": 5e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "gradient_clip": 1.0}


@pytest.mark.parametrize(
    ("name", "decay", "warmup", "solver", "steps"),
    [
        ("train_stage1_tf_fm_81f", 0.9999, 0, "unipc", (50,)),
        ("train_stage1_tf_anyflow_v1_5_81f", 0.999, 1000, "flowmap", (50, 4)),
    ],
)
def test_the_stage1_recipes_hold_the_released_numbers(name, decay, warmup, solver, steps) -> None:
    values = load(RECIPES / f"{name}.yaml").values
    train, checkpoint = values["train"], values["checkpoint"]
    # wan22.md 4.2, 4.3, 6.1
    assert train["optimizer"] == {**ADAMW, "warmup_steps": 500, "min_learning_rate_ratio": 0.1}
    assert (train["max_steps"], train["global_batch_size"], train["timestep_mode"]) == (
        20000,
        256,
        "per_block",
    )
    assert train["ema"] == {"decay": decay, "start_step": 0, "update_every": 1, "warmup_steps": warmup}
    causal = values["model"]["causal"]
    assert (
        causal["chunk_latent_frames"],
        causal["max_prior_clean_chunks"],
        causal["sink_latent_frames"],
    ) == (3, 5, 0)
    assert causal["local_attention_latent_frames"] == 21
    assert (checkpoint["mode"], checkpoint["weights"], checkpoint["source_step"]) == (
        "weights_only",
        "ema",
        30000,
    )
    sampled = [
        (weights, mode, found, number, rollout)
        for _, weights, mode, found, number, rollout in passes_of(values)
    ]
    assert sampled == [(w, "autoregressive", solver, n, 60) for w in ("live", "ema") for n in steps]
    assert (
        values["validation"]["variable_rollout_by_source"]
        and values["validation"]["min_rollout_latent_frames"] == 21
    )
    if name.endswith("v1_5_81f"):
        wanted = {"gate": 0.25, "delta_time": "r", "epsilon": 5.0, "diffusion_ratio": 0.5, "consistency_ratio": 0.25,
                  "guidance_scale": 3.0, "weight_type": "gaussian"}  # fmt: skip
        assert wanted.items() <= train["anyflow"].items()


def test_the_stage2_recipe_holds_the_released_numbers() -> None:
    values = load(RECIPES / "train_stage2_sgf_81f.yaml").values
    train, roles = values["train"], values["checkpoint"]["initialization"]
    # wan22.md 5, operations.md 3.7.3
    student = {"learning_rate": 2e-6, "betas": [0.0, 0.999], "eps": 1e-8, "weight_decay": 0.0, "gradient_clip": 10.0,
               "warmup_steps": 0, "min_learning_rate_ratio": 1.0}  # fmt: skip
    forcing = train["self_gradient_forcing"]
    assert train["optimizer"] == student
    assert forcing["critic_optimizer"] == {**student, "learning_rate": 4e-7}
    assert train["ema"] == {"decay": 0.99, "start_step": 39, "update_every": 1, "warmup_steps": 0}
    assert (train["max_steps"], train["global_batch_size"], train["gradient_accumulation_steps"]) == (
        4000,
        256,
        1,
    )
    assert (forcing["critic_updates_per_student"], forcing["denoising_timesteps"]) == (
        5,
        [1000, 750, 500, 250],
    )
    assert (forcing["score_min_timestep"], forcing["score_max_timestep"]) == (20, 980)
    assert (forcing["real_guidance_scale"], forcing["fake_guidance_scale"]) == (3.0, 0.0)
    assert values["model"]["causal"]["local_attention_latent_frames"] == 18
    assert [(roles[r]["weights"], roles[r]["source_step"]) for r in ("student", "teacher", "critic")] == [
        ("ema", 3000), ("live", 30000), ("live", 30000),
    ]  # fmt: skip
    assert passes_of(values) == [(w, w, "autoregressive", "self_forcing", 4, 60) for w in ("live", "ema")]


def test_the_camera_length_recipe_samples_one_case_without_guards() -> None:
    config = load(RECIPES / "infer_stage2_sgf_camera_length.yaml").config
    assert (config.inference.length, config.inference.sample_count, config.data.random_start) == (
        "camera",
        1,
        False,
    )
    assert (config.inference.horizon_rounding, config.inference.output_layout) == (
        "documented",
        "dataset_triplet_v1",
    )
    assert config.validation.max_relative_translation is config.validation.max_camera_absolute is None
    assert [(item.name, item.weights) for item in config.validation.passes] == [("model", "ema")]


def test_set_and_file_give_the_same_digests(tmp_path: Path) -> None:
    edited = tmp_path / "run.yaml"
    edited.write_text(TRAIN_81.read_text().replace("learning_rate: 5e-5", "learning_rate: 7e-5"))
    by_file, by_set = load(edited), load(TRAIN_81, sets=["train.optimizer.learning_rate=7e-5"])
    assert by_file.full_digest == by_set.full_digest and by_file.values == by_set.values
    assert by_set.deviations == [{"key": "train.optimizer.learning_rate", "value": 7e-5, "released": 5e-5}]
    assert by_set.source_digest == hashlib.sha256(TRAIN_81.read_bytes()).hexdigest()


@pytest.mark.parametrize("spelling", ["5e-5", "5.0e-5", "0.00005", "5E-05", ".5e-4"])
def test_spellings_of_one_number_are_one_run(spelling: str) -> None:
    assert (
        load(TRAIN_81, sets=[f"train.optimizer.learning_rate={spelling}"]).full_digest
        == load(TRAIN_81).full_digest
    )


def test_key_order_comments_and_stated_defaults_do_not_change_identity(tmp_path: Path) -> None:
    values = loading.read_values(TRAIN_81)
    reordered = {key: values[key] for key in reversed(values)}
    reordered["data"] = {
        **{key: values["data"][key] for key in reversed(values["data"])},
        "decoded_cache_gib": 2,
        "latent_frames": 21,
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(reordered))
    assert load(path).full_digest == load(TRAIN_81).full_digest


def test_resolved_config_fed_back_gives_the_same_digests(tmp_path: Path) -> None:
    first = load(
        TRAIN_81,
        overlays=[DEMO],
        sets=["data.root=clips", "runtime.output_dir=run", "metadata={note: é, n: 1e-3}"],
        base_dir=tmp_path,
    )
    write_resolved(first, tmp_path / "resolved-config.json")
    text = (tmp_path / "resolved-config.json").read_text()
    assert text.count("\n") == 1 and "é" in text
    again = load_resolved(tmp_path / "resolved-config.json")
    assert again.values == first.values
    assert (again.semantic_digest, again.full_digest) == (first.semantic_digest, first.full_digest)
    assert again.deviations == first.deviations


def test_paths_become_absolute_and_only_full_identity_sees_them(tmp_path: Path) -> None:
    here, there = (
        load(
            TRAIN_81,
            overlays=[DEMO],
            sets=["data.root=été d'or/clips", "model.base_path=../base"],
            base_dir=base,
        )
        for base in (tmp_path / "a", tmp_path / "b c")
    )
    assert here.config.data.root == str(tmp_path / "a" / "été d'or" / "clips")
    assert there.config.model.base_path == str(tmp_path / "base")
    assert here.semantic_digest == there.semantic_digest and here.full_digest != there.full_digest


def test_environment_is_expanded_after_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOLARWM_DATA", str(tmp_path))
    monkeypatch.delenv("SOLARWM_UNSET", raising=False)
    resolved = load(
        TRAIN_81, sets=["data.root=${SOLARWM_DATA}/x-${SOLARWM_DATA}", "metadata={list: ['${SOLARWM_DATA}']}"]
    )
    assert resolved.config.data.root == f"{tmp_path}/x-{tmp_path}"
    assert resolved.config.metadata == {"list": [str(tmp_path)]}
    path = tmp_path / "run.yaml"
    path.write_text(TRAIN_81.read_text().replace("root: /path/to/raw-wds", "root: ${SOLARWM_UNSET}/raw"))
    assert "data.root: environment variable SOLARWM_UNSET is not set" in refusal(path=path)
    assert load(path, sets=["data.root=/clips"]).config.data.root == "/clips"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.optimizer.learning_rat=1", "did you mean train.optimizer.learning_rate?"),
        ("train.optimizer.lr=1", "here it is called train.optimizer.learning_rate"),
        ("train.grad_accum=2", "here it is called train.gradient_accumulation_steps"),
        ("data.max_rel_translation=2", "here it is called data.max_relative_translation"),
        ("trian.stage=stage1", "did you mean train?"),
        ("data.learning_rate=1", "did you mean train.optimizer.learning_rate?"),
        ("validation.passes.0.nmae=x", "did you mean validation.passes.0.name?"),
        ("validation.passes=[{name: a, weigths: live}]", "did you mean validation.passes.0.weights?"),
        ("train.anyflow.gaet=1", "did you mean train.anyflow.gate?"),
        ("checkpoint.initialization.student.pth=x", "did you mean checkpoint.initialization.student.path?"),
        ("runtime.zzz=1", "runtime has: hang_timeout_seconds, image, log_every_steps"),
    ],
)
def test_unknown_keys_at_any_depth_name_the_likely_one(text: str, message: str) -> None:
    assert refusal(text).startswith("--set: unknown key ") and message in refusal(text)


def test_an_unknown_key_names_the_file_it_stands_in(tmp_path: Path) -> None:
    overlay = tmp_path / "scale.yaml"
    overlay.write_text("data: {hieght: 64}\n")
    assert refusal(overlays=(overlay,)).startswith(
        f"{overlay}: unknown key data.hieght; did you mean data.height?"
    )
    run = tmp_path / "run.yaml"
    run.write_text(TRAIN_81.read_text() + "\nextra: 1\n")
    assert refusal(path=run).startswith(f"{run}: unknown key extra")


@pytest.mark.parametrize(
    "sets",
    [
        "metadata.api_key=HUNTER2",
        "metadata.HF-Token=HUNTER2",
        "metadata={deep: [{Password: HUNTER2}]}",
        "access_token=HUNTER2",
        "secret=[HUNTER2]",
        "metadata.aws_secret_access_key=HUNTER2",
        "metadata.url='https://me:HUNTER2@host/x'",
        "data.transport.root='s3://key:HUNTER2@bucket'",
        "metadata.api_key=*HUNTER2",
        "metadata.x=[HUNTER2",
    ],
)
def test_secrets_are_refused_without_being_repeated(sets: str) -> None:
    assert "HUNTER2" not in refusal(sets)


def test_secrets_from_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "HUNTER2")
    assert "HUNTER2" not in refusal("metadata.x=${HF_TOKEN}")
    monkeypatch.setenv("SOLARWM_URL", "https://me:HUNTER2@host")
    assert "HUNTER2" not in refusal("metadata.x=${SOLARWM_URL}")


def test_references_to_secret_files_and_empty_secrets_are_allowed() -> None:
    assert (
        load(TRAIN_81, sets=["metadata.api_key_file=/keys/a", "metadata.token="]).config.metadata["token"]
        is None
    )


def test_placeholders_are_listed_and_refused_only_where_used() -> None:
    resolved = load(TRAIN_81)
    assert resolved.placeholders == ["model.base_path", "data.root", "runtime.output_dir"]
    with pytest.raises(ConfigError, match=r"runtime.output_dir.*still the placeholder"):
        refuse_placeholders(resolved.values)
    refuse_placeholders(resolved.values, used_keys=["checkpoint.path"])
    unused = load(
        TRAIN_81,
        sets=["model.base_path=/b", "data.root=/d", "runtime.output_dir=/o", "metadata.x=/path/to/x"],
    )
    refuse_placeholders(unused.values)
    infer = load(
        RECIPES / "infer_stage0p5_fm_81f.yaml",
        sets=["model.base_path=/b", "data.root=/d", "runtime.output_dir=/o"],
    )
    with pytest.raises(ConfigError, match=r"^checkpoint\.path: still"):
        refuse_placeholders(infer.values)
    pathlike = load(
        TRAIN_81, sets=["model.base_path=/path/too/b", "data.root=/path/to", "runtime.output_dir=/o"]
    )
    assert pathlike.placeholders == ["data.root"]


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(path=tmp_path / "absent.yaml")
    assert "cannot be read: Is a directory" in refusal(path=tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refusal(path=binary)
    listing = tmp_path / "list.yaml"
    listing.write_text("- a\n")
    assert "expected a mapping" in refusal(path=listing)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert "expected a mapping" in refusal(path=empty)


def test_neither_input_nor_overlay_is_changed_by_resolving() -> None:
    values: dict[str, Any] = loading.read_values(TRAIN_81)
    overlay: dict[str, Any] = loading.read_values(DEMO)
    before = json.dumps([values, overlay])
    resolve_values(values, overlays=[overlay], sets=["validation.passes.0.num_inference_steps=3"])
    assert json.dumps([values, overlay]) == before


def test_metadata_without_a_json_form_is_refused() -> None:
    values = {**loading.read_values(TRAIN_81), "metadata": {"path": Path("x")}}
    with pytest.raises(ConfigError, match="metadata"):
        resolve_values(values)


def test_a_refusal_takes_well_under_a_second_and_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from solarwm_lib.config import identity, load, routes, schema\n"
        "routes.format_table()\n"
        "try:\n"
        f"    load.load({str(TRAIN_81)!r}, sets=['data.pixel_frames=80'])\n"
        "except Exception as error:\n"
        "    print(error)\n"
        "heavy = {'torch', 'numpy', 'diffusers', 'transformers', 'pandas', 'snakemake'} & sys.modules.keys()\n"
        "print(sorted(heavy), time.process_time())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CONFIG_ROOT.parent, capture_output=True, text=True, check=True
    )
    message, facts = done.stdout.splitlines()
    assert "nearest: 77 or 81" in message
    assert facts.startswith("[] ") and float(facts.split()[-1]) < 1.0, facts
