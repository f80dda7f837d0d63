"""What the stages demand of a configuration, and what this version refuses of the routes that run."""

from __future__ import annotations

import pytest
from test_config_schema import NINE, changed, minimal, refusal

from solarwm_lib.config import schema
from solarwm_lib.config.load import resolve_values
from solarwm_lib.runtime.errors import ConfigError
from solarwm_lib.training.setup import refuse_unsupported

FM, ANYFLOW, STAGE2 = (minimal(route) for route in NINE[1:4])
ROLE = {"path": "/c", "source_step": 5}
ROLES = {name: dict(ROLE) for name in ("student", "teacher", "critic")}


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (ANYFLOW, {"train__anyflow": None}, None),
        (ANYFLOW, {"train__anyflow": {"negative_embedding": "../n.pth"}},
         "train.anyflow.negative_embedding: found '../n.pth', expected a path below model.base_path without '..'"),
        (FM, {"checkpoint__weights": "live"},
         "checkpoint.weights: found live, expected ema: Stage1 starts from the average of Stage0.5"),
        (ANYFLOW, {"checkpoint__weights": ["live", "ema"]}, "expected ema"),
        (STAGE2, {"checkpoint__initialization": ROLES | {"critic": ROLE | {"weights": "live"}}},
         "checkpoint.initialization.critic.weights: found live, expected ema, as the teacher has"),
        (STAGE2, {"checkpoint__initialization": ROLES | {"critic": ROLE | {"path": "/d"}}},
         "critic.path: found /d, expected /c"),
        (STAGE2, {"checkpoint__initialization": ROLES | {"student": {"path": "/s"}}},
         "checkpoint.initialization.student.source_step: not set; name the step that /s must be of"),
        (STAGE2, {"model__causal": {"local_attention_latent_frames": 17}},
         "local_attention_latent_frames: found 17, expected a multiple of model.causal.chunk_latent_frames=3; nearest: 15 or 18"),
        (STAGE2, {"model__causal": {"local_attention_latent_frames": 18, "sink_latent_frames": 18}},
         "found 18, expected at least 21: the sink of 18 and a chunk of 3"),
        (STAGE2, {"train__self_gradient_forcing": {"denoising_timesteps": [1000, 500, 500]}},
         "denoising_timesteps: found [1000, 500, 500], expected falling labels between 1000 and 1"),
        (STAGE2, {"train__self_gradient_forcing": {"denoising_timesteps": [1000, 0]}}, "between 1000 and 1"),
    ],
)  # fmt: skip
def test_rules_of_the_stages(values, changes, message):
    if message is None:
        schema.validate(changed(values, **changes))
        return
    assert message in refusal(changed(values, **changes))


@pytest.mark.parametrize("route, block", [(NINE[2], "anyflow"), (NINE[3], "self_gradient_forcing")])
def test_the_block_of_an_objective_cannot_be_null(route, block):
    values = minimal(route)
    values["train"][block] = None
    assert f"train.{block}: found null" in refusal(values)


@pytest.mark.parametrize("route", NINE[1:4])
def test_a_pass_that_names_no_sampler_takes_that_of_its_route(route):
    values = minimal(route)
    values["validation"] = {"passes": [{"name": "p", "num_inference_steps": 4}]}
    (found,) = schema.validate(values).validation.passes
    solver = {NINE[1]: "unipc", NINE[2]: "flowmap", NINE[3]: "self_forcing"}[route]
    assert (found.mode, found.solver, found.rollout_latent_frames) == ("autoregressive", solver, 21)


@pytest.mark.parametrize("route", NINE[:5])
def test_every_route_of_wan_trains(route):
    values = minimal(route)
    values["distributed"] = {"world_size": 1}
    refuse_unsupported(resolve_values(values))


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (FM, {"train__timestep_mode": "uniform_per_video"},
         "train.timestep_mode uniform_per_video in stage1 cannot be trained by this version; use per_block"),
        (ANYFLOW, {"train__anyflow": {"gate": 0.5}}, "train.anyflow.gate 0.5 cannot be trained by this version; use 0.25"),
        (STAGE2, {"train__self_gradient_forcing": {"context_timestep": 20}}, "context_timestep 20 .*; use 0"),
        (STAGE2, {"train__self_gradient_forcing": {"rollout_latent_frames": 60}}, "rollout_latent_frames 60 .*use null"),
        (STAGE2, {"checkpoint": {"mode": "full_resume", "path": "/c", "source_step": 1}},
         "checkpoint.mode full_resume in stage2 .*continues by itself"),
        (ANYFLOW, {"train__strategy": "full_shard", "train__gradient_accumulation_steps": 2, "train__global_batch_size": 2},
         "gradient_accumulation_steps 2 of AnyFlow with train.strategy full_shard .*; use 1"),
        (minimal(NINE[5]), {}, "only wan22_ti2v_5b and wan22_i2v_a14b train"),
    ],
)  # fmt: skip
def test_what_this_version_cannot_do_is_refused_with_2(values, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        refuse_unsupported(resolve_values(changed(values, **changes)))
    assert caught.value.exit_code == 2
