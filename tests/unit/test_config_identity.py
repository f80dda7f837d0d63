"""Canonical JSON, digests, field classes and differences."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.config import identity
from solarwm_lib.config.architectures import CONFIG_ROOT
from solarwm_lib.config.load import load
from solarwm_lib.config.schema import fields

RECIPES = CONFIG_ROOT / "recipes" / "wan22_ti2v_5b"
TRAIN_81 = RECIPES / "train_stage0p5_fm_81f.yaml"
INFER_81 = RECIPES / "infer_stage0p5_fm_81f.yaml"
DEMO = CONFIG_ROOT / "scales" / "demo.yaml"


def test_canonical_json_is_sorted_compact_literal_and_ends_in_one_newline() -> None:
    assert (
        identity.canonical_json({"b": [1, 2.5, None, True], "a": "é\n"})
        == '{"a":"é\\n","b":[1,2.5,null,true]}\n'
    )
    # printf '{"a":1}\n' | sha256sum
    assert identity.digest({"a": 1}) == "e346432021b04179518d9614f3560ccd71354a4ee101ddcb893d6959a9d6301c"
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            identity.canonical_json(value)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=6), st.randoms())
def test_digest_does_not_depend_on_key_order(values: dict[str, object], random: object) -> None:
    items = list(values.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert identity.digest(dict(items)) == identity.digest(values)
    assert json.loads(identity.canonical_json(values)) == values


SAME_RUN = [
    "name=other",
    "model.base_path=/elsewhere",
    "data.root=/elsewhere",
    "data.num_workers=7",
    "data.decoded_cache_gib=9",
    "runtime.output_dir=/elsewhere",
    "runtime.log_every_steps=5",
    "checkpoint.save_every_steps=7",
    "checkpoint.rolling_save_every_steps=7",
    "checkpoint.asynchronous=false",
    "checkpoint.keep_full=1",
    "checkpoint.keep_full_steps=[4]",
    "train.activation_checkpointing=true",
    "train.strategy=full_shard",
    "validation.passes.0.num_inference_steps=4",
    "validation.sample_count=4",
    "metadata.note=x",
    "model.causal.sink_latent_frames=1",  # Stage0.5 has no chunks
]
OTHER_RUN = [
    "train.optimizer.learning_rate=1e-3",
    "train.max_steps=401",
    "train.precision=bfloat16",
    "train.ema.decay=0.5",
    "train.image_condition_dropout=0.2",
    "model.timestep_shift=5.0",
    "model.camera_translation_transform=logd4",
    "data.seed=43",
    "data.pixel_frames=37",
    "data.width=128",
    "data.fps=15.0",
    "data.random_start=false",
    "data.max_relative_translation=null",
]


@pytest.mark.parametrize("change", SAME_RUN)
def test_paths_cadence_topology_and_validation_keep_a_training_run_the_same(change: str) -> None:
    base, changed = (load(TRAIN_81, overlays=[DEMO], sets=sets) for sets in ([], [change]))
    assert changed.semantic_digest == base.semantic_digest and changed.full_digest != base.full_digest
    if not change.startswith("model.causal"):
        assert "must_match" not in {row.field_class for row in identity.diff(base.values, changed.values)}


@pytest.mark.parametrize("change", OTHER_RUN)
def test_algorithm_data_and_schedule_make_another_training_run(change: str) -> None:
    base, changed = (load(TRAIN_81, overlays=[DEMO], sets=sets) for sets in ([], [change]))
    assert changed.semantic_digest != base.semantic_digest
    assert identity.diff(base.values, changed.values)[0].field_class == "must_match"


def test_the_number_of_processes_may_change_while_the_batch_stays() -> None:
    one = load(TRAIN_81, overlays=[DEMO])
    two = load(TRAIN_81, overlays=[DEMO], sets=["distributed.world_size=2", "train.micro_batch_size=8"])
    assert two.semantic_digest == one.semantic_digest
    assert [(row.key, row.field_class) for row in identity.diff(one.values, two.values)] == [
        ("distributed.world_size", "may_change"),
        ("train.micro_batch_size", "may_change"),
    ]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("train.optimizer.learning_rate=1.0", True),
        ("distributed.world_size=3", True),
        ("checkpoint.path=/elsewhere", True),
        ("validation.passes.0.num_inference_steps=4", False),
        ("validation.noise_seed=4", False),
        ("data.test_index=other.jsonl", False),
        ("checkpoint.source_step=7", False),
        ("model.timestep_shift=4.0", False),
    ],
)
def test_inference_is_identified_by_network_cases_and_passes(change: str, same: bool) -> None:
    base, changed = (load(INFER_81, overlays=[DEMO], sets=sets) for sets in ([], [change]))
    assert (changed.semantic_digest == base.semantic_digest) is same


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("model.timestep_shift=4.0", True),
        ("data.seed=7", True),
        ("data.mixed_shards=4", True),
        ("data.root=/elsewhere", True),
        ("preencode.parts=3", True),
        ("preencode.generation_id=other", True),
        ("model.text_length=512", True),
        ("data.height=448", False),
        ("data.fps=8.0", False),
        ("data.camera_axes=opengl", False),
        ("data.max_camera_absolute=10.0", False),
        ("preencode.dtype=float32", False),
    ],
)
def test_latents_are_identified_by_encoders_frames_and_cameras(change: str, same: bool) -> None:
    recipe = INFER_81.with_name("preencode_81f.yaml")
    base, changed = (load(recipe, sets=sets) for sets in ([], [change]))
    assert (changed.semantic_digest == base.semantic_digest) is same


def test_every_field_has_a_class_and_a_description() -> None:
    for key, field, section in fields():
        if section is None:
            assert identity.field_class(key) in ("must_match", "may_change", "free")
            assert field.description, key
            # A field no prefix covers would be free by accident.
            assert key in identity._CLASSES or key.partition(".")[0] in identity._CLASSES, key


def test_classes_name_only_fields_that_exist() -> None:
    known = {key for key, _, _ in fields()}
    for classes in identity._BY_ACTION.values():
        assert set(classes) <= known
    assert set(identity.PATH_KEYS) <= known


def test_diff_is_field_by_field_and_formats_in_lines_or_in_one() -> None:
    a = {
        "action": "train",
        "name": "a",
        "train": {"max_steps": 3, "optimizer": {"betas": [0.9, 0.95]}},
        "metadata": {},
    }
    b = {
        "action": "train",
        "name": "b",
        "train": {"max_steps": 4, "optimizer": {"betas": [0.9, 0.99]}},
        "metadata": {"x": None},
    }
    rows = identity.diff(a, b)
    assert [tuple(row) for row in rows] == [
        ("train.max_steps", 3, 4, "must_match"),
        ("train.optimizer.betas", [0.9, 0.95], [0.9, 0.99], "must_match"),
        ("metadata", {}, None, "free"),
        ("metadata.x", None, None, "free"),
        ("name", "a", "b", "free"),
    ]
    assert identity.format_diff(rows[:1]) == "must match  train.max_steps  3 -> 4"
    assert (
        identity.format_diff(rows[:2], oneline=True)
        == "train.max_steps 3 -> 4, train.optimizer.betas [0.9,0.95] -> [0.9,0.99]"
    )
    assert identity.format_diff([]) == "no difference"


def test_diff_descends_into_lists_of_sections_and_keeps_true_apart_from_one() -> None:
    base, changed = (
        load(TRAIN_81, sets=sets) for sets in ([], ["validation.passes.1.num_inference_steps=4"])
    )
    assert [row.key for row in identity.diff(base.values, changed.values)] == [
        "validation.passes.1.num_inference_steps"
    ]
    assert identity.diff({"name": 24}, {"name": 24.0}) == []
    assert [row.key for row in identity.diff({"name": 1}, {"name": True})] == ["name"]
