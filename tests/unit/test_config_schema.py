"""Routes, types, batch arithmetic and the rules across fields, with the values each refusal offers."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solarwm_lib.config import routes, rules, schema
from solarwm_lib.config.defaults import FORMER_NAMES
from solarwm_lib.runtime.errors import ConfigError

# The nine train/infer routes of operations.md 2.2.
NINE = [
    "wan22_ti2v_5b:stage0p5:bidirectional:flow_matching",
    "wan22_ti2v_5b:stage1:teacher_forcing:flow_matching",
    "wan22_ti2v_5b:stage1:teacher_forcing:anyflow_forward_map:v1_5",
    "wan22_ti2v_5b:stage2:self_gradient_forcing:flow_matching",
    "wan22_i2v_a14b:stage0p5:bidirectional:flow_matching",
    "ltx25_video:stage0p5:bidirectional:native_rectified_flow",
    "minimax_h3:stage0p5:bidirectional:flow_matching",
    "minimax_h3:stage1:teacher_forcing:anyflow_forward_map:v1_5",
    "minimax_h3:stage2:self_gradient_forcing:flow_matching",
]
SIZES = {
    "wan22_ti2v_5b": ("wan22-ti2v-5b", 81, 480, 864),
    "wan22_i2v_a14b": ("wan22-i2v-a14b", 81, 480, 832),
    "ltx25_video": ("ltx25-22b", 153, 512, 768),
    "minimax_h3": ("minimax-h3-33b", 158, 768, 1344),
}


def minimal(route: str, action: str = "train") -> dict[str, Any]:
    """The least a configuration of `route` says; everything else is a default."""
    family, stage, causal, objective = route.split(":")[:4]
    architecture, frames, height, width = SIZES[family]
    values: dict[str, Any] = {
        "schema": "solarwm.run.v1",
        "action": action,
        "name": "run",
        "model": {"family": family, "architecture": architecture, "base_path": "/base"},
        "data": {"root": "/data", "pixel_frames": frames, "height": height, "width": width},
        "runtime": {"output_dir": "/out"},
    }
    if action == "preencode":
        values["preencode"] = {"generation_id": "g"}
        if not family.startswith("wan22_"):  # for Wan it follows from the geometry
            values["preencode"]["latent_schema"] = "s"
        return values
    values["train"] = {"stage": stage, "causal_mode": causal, "objective": objective}
    role = {"path": "/c", "source_step": 5}
    if action == "infer":
        mode, solver = next(r for r in routes.ROUTES if r.key == route).solvers[0]
        steps = 4 if stage == "stage2" else 50
        rollout = {"rollout_latent_frames": 60} if stage != "stage0p5" else {}
        values["validation"] = {
            "passes": [{"name": "p", "mode": mode, "solver": solver, "num_inference_steps": steps, **rollout}]
        }
        values["checkpoint"] = {"path": "/c"}
    elif stage == "stage1":
        values["checkpoint"] = {"mode": "weights_only", "weights": "ema", **role}
    elif stage == "stage2":
        values["checkpoint"] = {"initialization": {name: role for name in ("student", "teacher", "critic")}}
    if family == "minimax_h3":
        values["data"] |= {"latent_schema": "h3.158f.v1", "latents_root": "/latents"}
    return values


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with `section__key=value` set; None removes the key."""
    result = copy.deepcopy(values)
    for name, value in changes.items():
        *sections, leaf = name.split("__")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        if value is None:
            target.pop(leaf, None)
        else:
            target[leaf] = value
    return result


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        schema.validate(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


STAGE05 = minimal(NINE[0])


@pytest.mark.parametrize("action", ["train", "infer"])
@pytest.mark.parametrize("route", NINE)
def test_all_nine_routes_are_legal_from_a_minimal_configuration(route: str, action: str) -> None:
    config = schema.validate(minimal(route, action))
    assert routes.route_for(config).key == route
    again = schema.validate(config.values())
    assert again.values() == config.values()


@pytest.mark.parametrize("family", SIZES)
def test_preencode_is_legal_for_every_family_and_needs_no_train_section(family: str) -> None:
    config = schema.validate(minimal(f"{family}:preencode:none:none", "preencode"))
    assert routes.route_for(config).key == f"{family}:preencode:none:none"
    assert config.values().keys() & {"train", "validation", "checkpoint", "inference"} == set()


def test_the_table_lists_nine_routes_and_four_preencodes_with_all_columns() -> None:
    rows = routes.table()
    assert [row["key"] for row in rows if row["actions"] == ["train", "infer"]] == NINE
    assert sorted(row["family"] for row in rows if row["actions"] == ["preencode"]) == sorted(SIZES)
    first = rows[0]
    assert first["frames"] == [{"pixel": 81, "latent": 21}, {"pixel": 153, "latent": 39}]
    assert first["encodings"] == ["online", "preencoded"] and first["resolutions"][0] == {
        "height": 480,
        "width": 864,
    }
    text = routes.format_table()
    assert all(row["key"] in text for row in rows) and len(text.splitlines()) == 14


@pytest.mark.parametrize(
    ("route", "changes", "allowed"),
    [
        (NINE[4], {"stage": "stage1", "causal_mode": "teacher_forcing"}, NINE[4]),
        (NINE[4], {"stage": "stage2", "causal_mode": "self_gradient_forcing"}, NINE[4]),
        (
            NINE[5],
            {"stage": "stage1", "causal_mode": "teacher_forcing", "objective": "anyflow_forward_map"},
            NINE[5],
        ),
        (NINE[5], {"stage": "stage2", "causal_mode": "self_gradient_forcing"}, NINE[5]),
        (NINE[6], {"objective": "native_rectified_flow"}, ", ".join(NINE[6:])),
        (NINE[0], {"causal_mode": "teacher_forcing"}, ", ".join(NINE[:4])),
        (NINE[0], {"objective_variant": "v1_5"}, ", ".join(NINE[:4])),
    ],
)
def test_unsupported_routes_are_refused_with_the_allowed_list(
    route: str, changes: dict[str, str], allowed: str
) -> None:
    values = minimal(route)
    values["train"].update(changes)
    message = refusal(values)
    assert "unsupported route" in message and f": {allowed};" in message


def test_a_missing_route_field_is_named() -> None:
    assert "train.objective not set" in refusal(changed(STAGE05, train__objective=None))


@pytest.mark.parametrize(
    ("alias", "family"),
    [("wan2.2-ti2v-5b", "wan22_ti2v_5b"), ("WAN22_TI2V_5B", "wan22_ti2v_5b")],
)
def test_family_aliases_become_the_canonical_name(alias: str, family: str) -> None:
    assert schema.validate(changed(STAGE05, model__family=alias)).model.family == family


def test_released_objective_spellings_become_canonical() -> None:
    assert (
        schema.validate(changed(minimal(NINE[5]), train__objective="flow_matching")).train.objective
        == "native_rectified_flow"
    )
    assert schema.validate(minimal(NINE[2])).train.objective_variant == "v1_5"


@pytest.mark.parametrize(
    ("route", "key", "value"),
    [
        # wan22.md 3.3, 4.2, 4.3, 5; ltx25.md 9; minimax_h3.md 4.3, 11
        (NINE[0], "train.optimizer.learning_rate", 5e-5),
        (NINE[1], "train.optimizer.warmup_steps", 500),
        (NINE[2], "train.ema.warmup_steps", 1000),
        (NINE[2], "train.anyflow.guidance_scale", 3.0),
        (NINE[3], "train.optimizer.learning_rate", 2e-6),
        (NINE[3], "train.optimizer.betas", [0.0, 0.999]),
        (NINE[3], "train.ema.start_step", 39),
        (NINE[3], "train.self_gradient_forcing.critic_optimizer.learning_rate", 4e-7),
        (NINE[3], "model.causal.local_attention_latent_frames", 18),
        (NINE[3], "train.image_condition_dropout", 0.0),
        (NINE[4], "model.timestep_shift", 3.0),
        (NINE[5], "train.optimizer.learning_rate", 1e-4),
        (NINE[5], "data.latent_frames", 20),
        (NINE[5], "data.fps", 24.0),
        (NINE[5], "model.text_length", 1024),
        (NINE[6], "model.timestep_shift", 12.0),
        (NINE[6], "model.camera_translation_transform", "logd4"),
        (NINE[6], "model.adapter.rank", 384),
        (NINE[7], "train.optimizer.learning_rate", 3e-5),
        (NINE[7], "model.minimax_h3.target_latent_frames", 45),
        (NINE[7], "model.causal.chunk_latent_frames", 5),
        (NINE[8], "train.self_gradient_forcing.rollout_latent_frames", 50),
        (NINE[8], "data.latent_frames", 47),
    ],
)
def test_route_defaults_are_the_released_numbers(route: str, key: str, value: object) -> None:
    found: Any = schema.validate(minimal(route)).values()
    for part in key.split("."):
        found = found[part]
    assert found == value


def test_a_given_value_wins_over_a_route_default() -> None:
    values = changed(
        minimal(NINE[3]), train__optimizer={"learning_rate": 1e-3}, model__causal={"sink_latent_frames": 3}
    )
    config = schema.validate(values)
    assert config.train.optimizer.learning_rate == 1e-3 and config.train.optimizer.warmup_steps == 0
    assert config.model.causal.local_attention_latent_frames == 18


# World, SP, micro, accumulation and batch of the released launches: wan22.md 3.3, operations.md 8.5.
@pytest.mark.parametrize(
    ("world", "parallel", "micro", "accumulation", "batch"),
    [
        (256, 1, 1, 1, 256),
        (8, 1, 1, 1, 8),
        (256, 2, 1, 1, 128),
        (16, 2, 1, 2, 16),
        (256, 4, 1, 1, 64),
        (16, 2, 1, 1, 8),
    ],
)
def test_released_launch_shapes_satisfy_the_arithmetic_and_follow_when_absent(
    world: int, parallel: int, micro: int, accumulation: int, batch: int
) -> None:
    values = changed(
        STAGE05,
        distributed__world_size=world,
        distributed__sequence_parallel_size=parallel,
        train__micro_batch_size=micro,
        train__gradient_accumulation_steps=accumulation,
    )
    assert schema.validate(values).train.global_batch_size == batch
    assert schema.validate(changed(values, train__global_batch_size=batch)).train.global_batch_size == batch


def batch_of(world: int, parallel: int, micro: int, accumulation: int, batch: int) -> Any:
    return SimpleNamespace(
        distributed=SimpleNamespace(world_size=world, sequence_parallel_size=parallel),
        train=SimpleNamespace(
            micro_batch_size=micro, gradient_accumulation_steps=accumulation, global_batch_size=batch
        ),
    )


@given(
    st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(1, 6), st.integers(1, 200)
)
def test_batch_arithmetic_is_exact_and_every_remedy_it_offers_works(
    samples: int, parallel: int, micro: int, accumulation: int, batch: int
) -> None:
    world = samples * parallel
    if samples * micro * accumulation == batch:
        rules.check_batch(batch_of(world, parallel, micro, accumulation, batch))
        return
    with pytest.raises(ConfigError) as caught:
        rules.check_batch(batch_of(world, parallel, micro, accumulation, batch))
    _, _, remedies = str(caught.value).partition(f"= {samples * micro * accumulation}; ")
    offered = {
        key: int(value) for key, value in re.findall(r"([a-z_]+)=(\d+)", remedies.partition(" or ")[0])
    }
    kept = re.search(r"keeps? (the batch|\d+)", remedies)
    nearest = re.search(r"nearest batches: ([\d or]+)", remedies)
    if kept and "the batch" in kept.group():
        rules.check_batch(batch_of(world, parallel, micro, offered["gradient_accumulation_steps"], batch))
    elif kept:
        found = {key: int(value) for key, value in re.findall(r"([a-z_]+)=(\d+)", remedies)}
        steps = found["gradient_accumulation_steps"]
        rules.check_batch(
            batch_of(
                found.get("world_size", world), parallel, found.get("micro_batch_size", micro), steps, batch
            )
        )
    if nearest:
        for near in map(int, re.findall(r"\d+", nearest.group(1))):
            assert near % (samples * micro) == 0 and abs(near - batch) < samples * micro
            rules.check_batch(batch_of(world, parallel, micro, near // (samples * micro), near))
    else:
        assert batch % (samples * micro) == 0


def test_fewer_devices_are_told_the_accumulation_that_keeps_the_batch() -> None:
    message = refusal(changed(STAGE05, distributed__world_size=4, train__global_batch_size=256))
    assert "world 4 / SP 1 x micro 1 x accumulation 1 = 4" in message
    assert (
        "set train.gradient_accumulation_steps=64 to keep the batch, or train.global_batch_size=4" in message
    )


def test_processes_and_heads_must_divide_by_sequence_parallel() -> None:
    shape = {"distributed__world_size": 9, "distributed__sequence_parallel_size": 2}
    assert "distributed.world_size: found 9" in refusal(changed(STAGE05, **shape))
    assert "nearest: 8 or 10" in refusal(changed(STAGE05, **shape))
    shape = {"distributed__world_size": 10, "distributed__sequence_parallel_size": 5}
    assert "divisor of the 24 attention heads; nearest: 4 or 6" in refusal(changed(STAGE05, **shape))


def test_inference_needs_no_batch_arithmetic() -> None:
    config = schema.validate(changed(minimal(NINE[0], "infer"), distributed__world_size=7))
    assert config.inference.sample_count == config.validation.sample_count == 16
    given = schema.validate(changed(minimal(NINE[0], "infer"), inference__sample_count=3))
    assert given.validation.sample_count == 3


@pytest.mark.parametrize(
    ("route", "action", "changes", "message"),
    [
        (
            NINE[0],
            "train",
            {"data__pixel_frames": 80},
            "nearest: 77 or 81; the released route uses 81 or 153",
        ),
        (NINE[5], "train", {"data__pixel_frames": 150}, "nearest: 145 or 153; the released route uses 153"),
        (NINE[6], "train", {"data__pixel_frames": 155}, "nearest: 141 or 158; the released route uses 158"),
        (NINE[6], "train", {"data__pixel_frames": 4}, "nearest: 22; the released route uses 158"),
        (NINE[1], "train", {"data__pixel_frames": 121}, "117 (30 latent frames) or 129 (33 latent frames)"),
        (NINE[0], "train", {"data__latent_frames": 20}, "expected 21 for data.pixel_frames=81"),
        (
            NINE[0],
            "train",
            {"data__width": 850},
            "nearest: 832 or 864; the released route uses 480x864 or 704x1280",
        ),
        (NINE[0], "train", {"model__architecture": "wan22-i2v-a14b"}, "change one of them"),
        (NINE[0], "train", {"model__text_length": 77}, "expected 512"),
        (NINE[0], "train", {"model__minimax_h3": {}}, "only for model.family minimax_h3"),
        (NINE[6], "train", {"model__camera_translation_transform": "linear"}, "expected logd4"),
        (NINE[1], "train", {"data__encoding": "preencoded"}, "takes online"),
        (NINE[6], "train", {"data__encoding": "online"}, "takes preencoded"),
        (NINE[0], "train", {"data__encoding": "preencoded"}, "data.latents_root: not set"),
        (
            NINE[0],
            "train",
            {
                "data__encoding": "preencoded",
                "data__latents_root": "/l",
                "data__latent_schema": "solarwm.wan22_ti2v_5b.480p.153f.v1",
            },
            "data.latent_schema: found solarwm.wan22_ti2v_5b.480p.153f.v1, expected solarwm.wan22_ti2v_5b.480p.81f.v1",
        ),
        (NINE[6], "train", {"data__latent_schema": None}, "data.latent_schema: not set"),
        (NINE[0], "train", {"data__train_index": "../x.jsonl"}, "data.train_index"),
        (NINE[0], "train", {"data__test_index": "/x.jsonl"}, "data.test_index"),
        (NINE[0], "train", {"data__transport": {"root": "ftp://b"}}, "starts with s3://, gs://, memory://"),
        (NINE[0], "train", {"data__transport": {"latents_root": "http://b"}}, "data.transport.latents_root"),
        (NINE[0], "train", {"data__transport": {"cache_dir": "/c"}}, "data.transport.cache_dir: set, but"),
        (
            NINE[0],
            "train",
            {"data__transport": {"kind": "s3", "root": "s3://b"}},
            "data.transport.kind; here it is called data.transport.root",
        ),
        (NINE[0], "train", {"train__optimizer": {"warmup_steps": 30001}}, "at most train.max_steps=30000"),
        (NINE[0], "train", {"train__anyflow": {}}, "train.anyflow: not used by stage0p5"),
        (NINE[0], "train", {"train__self_gradient_forcing": {}}, "not used by stage0p5"),
        (NINE[2], "train", {"train__anyflow": {"diffusion_ratio": 0.9}}, "above 1"),
        (
            NINE[3],
            "train",
            {"train__self_gradient_forcing": {"score_min_timestep": 980}},
            "less than score_max_timestep=980",
        ),
        (NINE[3], "train", {"train__image_condition_dropout": 0.1}, "expected 0 in Stage2"),
        (
            NINE[3],
            "train",
            {"checkpoint__initialization": {"student": {"path": "/s"}}},
            "initialization.teacher: not set",
        ),
        (NINE[3], "train", {"checkpoint": {"mode": "none"}}, "Stage2 starts from three roles"),
        (NINE[1], "train", {"checkpoint": {"mode": "none"}}, "Stage1 starts from Stage0.5"),
        (
            NINE[0],
            "train",
            {"checkpoint": {"mode": "weights_only", "path": "/c", "weights": "ema"}},
            "checkpoint.source_step: not set",
        ),
        (
            NINE[0],
            "train",
            {"checkpoint": {"mode": "weights_only", "path": "/c", "source_step": 1}},
            "checkpoint.weights: found null",
        ),
        (NINE[0], "train", {"checkpoint": {"mode": "full_resume"}}, "checkpoint.path: not set"),
        (NINE[0], "train", {"checkpoint": {"path": "/c"}}, "checkpoint.mode is none"),
        (NINE[0], "train", {"inference": {}}, "section inference is not used by action train"),
        (NINE[0], "infer", {"checkpoint__path": None}, "checkpoint.path: not set"),
        (NINE[0], "infer", {"validation__passes": []}, "validation.passes: empty"),
        (NINE[0], "infer", {"inference__length": "camera"}, "camera is for infer with stage2"),
        (NINE[0], "infer", {"inference__sample_count": 3, "validation__sample_count": 4}, "set one of them"),
    ],
)
def test_what_cannot_work_is_refused_with_the_key_to_change(
    route: str, action: str, changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(changed(minimal(route, action), **changes))


@pytest.mark.parametrize(
    ("route", "entry", "message"),
    [
        (NINE[0], {"solver": "flowmap"}, "takes mode bidirectional, solver unipc"),
        (NINE[0], {"mode": "autoregressive"}, "takes mode bidirectional, solver unipc"),
        (NINE[0], {"rollout_latent_frames": 20}, "expected data.latent_frames=21"),
        (NINE[0], {"num_inference_steps": 1001}, "at most train.num_train_timesteps=1000"),
        (NINE[0], {"name": "a/b"}, "validation.passes.0.name: found text 'a/b', expected letters"),
        (NINE[1], {"mode": "autoregressive", "rollout_latent_frames": 61}, "nearest: 60 or 63"),
        (
            NINE[3],
            {"mode": "autoregressive", "solver": "self_forcing", "num_inference_steps": 8},
            "expected 4: the steps the student",
        ),
    ],
)
def test_passes_must_fit_their_route(route: str, entry: dict[str, Any], message: str) -> None:
    assert message in refusal(changed(minimal(route), validation__passes=[{"name": "p", **entry}]))


def test_pass_names_are_unique() -> None:
    passes = [{"name": "p"}, {"name": "p"}]
    assert "names are unique" in refusal(changed(STAGE05, validation__passes=passes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__max_steps": "8"}, "train.max_steps: found text '8', expected a whole number"),
        ({"train__max_steps": 8.0}, "train.max_steps: found 8.0, expected a whole number"),
        ({"train__max_steps": True}, "train.max_steps: found true, expected a whole number"),
        ({"train__max_steps": 0}, "train.max_steps: found 0, expected 1 or more"),
        ({"data__random_start": 1}, "data.random_start: found 1, expected true or false"),
        ({"data__fps": "16"}, "data.fps: found text '16', expected a number"),
        ({"data__fps": 0}, "data.fps: found 0, expected more than 0"),
        (
            {"train__optimizer": {"betas": [0.9]}},
            "train.optimizer.betas: found a list of 1, expected 2 entries or more",
        ),
        ({"train__optimizer": 3}, "train.optimizer: found 3, expected a mapping"),
        ({"train__stage": "stage3"}, "train.stage: found text 'stage3', expected stage0p5, stage1 or stage2"),
        ({"model__family": "wan"}, "model.family: found text 'wan', expected wan22_ti2v_5b"),
        ({"schema": "solarwm.run.v2"}, "schema: found text 'solarwm.run.v2', expected solarwm.run.v1"),
        ({"name": ""}, "name: found text '', expected text that is not empty"),
        ({"runtime__output_dir": None}, "runtime.output_dir: not set, and it has no default; add it"),
        (
            {"data__height": None, "data__width": None},
            "data.height: not set, and it has no default; add it; data.width: not set",
        ),
        (
            {"checkpoint__weights": ["live", "foo"]},
            "checkpoint.weights.1: found text 'foo', expected live or ema",
        ),
        ({"model": {}}, "model.family: not set"),
        ({"data__pixel_frames": "81"}, "data.pixel_frames: found text '81', expected a whole number"),
        ({"validation__passes": [3]}, "validation.passes.0: found 3, expected a mapping"),
    ],
)
def test_types_and_ranges_say_what_was_found_and_what_is_expected(
    changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(changed(STAGE05, **changes))


@pytest.mark.parametrize("values", [None, [], "text", 3])
def test_a_configuration_is_a_mapping(values: Any) -> None:
    assert "a configuration is a mapping" in refusal(values)


def test_former_names_lead_to_fields_that_exist_and_are_no_fields_themselves() -> None:
    known = set(schema.known_keys())
    assert set(FORMER_NAMES.values()) <= known
    assert not set(FORMER_NAMES) & known


def test_the_reference_describes_every_field_with_its_range_and_unit() -> None:
    text = schema.reference_markdown()
    for key, _, section in schema.fields():
        assert f"`{key.rpartition('.')[2]}`" in text
        if section is not None:
            assert f"## `{key}`" in text
    assert (
        "| `warmup_steps` | integer | `1000` | >= 0 | steps | must match | Steps from rate 0 to the peak. |"
        in text
    )
    assert "| `world_size` | integer | `1` | >= 1, <= 1000000 | processes | may change |" in text
    assert all(
        line.count(" | ") == text.splitlines()[8].count(" | ")
        for line in text.splitlines()
        if line.startswith("| `")
    )
