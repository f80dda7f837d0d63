"""I2V-A14B through the trainer's parts: online and stored image conditions, what a step moves, what is refused and when."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tinyworld import HEIGHT, WIDTH, TinyWorld

from solarwm_lib.config.load import resolve_values
from solarwm_lib.runtime.errors import ConfigError, DataError
from solarwm_lib.training import network, setup, train
from solarwm_lib.training.checkpoint import load_weights

CPU = torch.device("cpu")
LATENT = (3, 16, HEIGHT // 8, WIDTH // 8)


class A14bWorld(TinyWorld):
    """The small data set with the tiny twin of A14B."""

    def values(self, output: Path, **changes: Any) -> dict[str, Any]:
        own = {
            "model__family": "wan22_i2v_a14b",
            "model__architecture": "wan22-tiny-i2v",
            "data__pixel_frames": 9,
            "data__random_start": False,
            "train__micro_batch_size": 2,
            "train__optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        }
        return super().values(output, **(own | changes))


@pytest.fixture(scope="module")
def world(tiny_world, tmp_path_factory) -> A14bWorld:
    from solarwm_lib.backbones.tiny import build_tiny_assets
    from solarwm_lib.config.architectures import load_architecture

    torch.set_num_threads(1)
    assets = tmp_path_factory.mktemp("a14b") / "assets"
    build_tiny_assets(assets, load_architecture("wan22-tiny-i2v"), seed=0)
    return A14bWorld(tiny_world.dataset, assets)


@pytest.fixture(scope="module")
def latents(world, tmp_path_factory) -> Path:
    """A float32 generation of the training clips."""
    from solarwm_lib.preencode.part import preencode

    root = tmp_path_factory.mktemp("latents") / "tiny"
    values = copy.deepcopy(world.values(root))
    for section in ("train", "validation", "checkpoint"):
        values.pop(section)
    values["action"] = "preencode"
    values["preencode"] = {"generation_id": "tiny", "dtype": "float32"}
    preencode(resolve_values(values))
    return root


def stored(latents: Path) -> dict[str, Any]:
    return {"data__encoding": "preencoded", "data__latents_root": str(latents)}


def test_stored_float32_conditions_equal_online_ones_bit_for_bit(world, latents, tmp_path):
    cached = setup.build_source(world.resolve(tmp_path, **stored(latents)), CPU)
    online = setup.build_source(world.resolve(tmp_path), CPU)
    clips = {
        clip.sample_id: clip for clip in (online.load(online.clips.locate(index)[0]) for index in range(6))
    }
    for index in range(6):
        clip = cached.load(cached.clips.locate(index)[0])
        fresh = clips[clip.sample_id.split("/latent-")[0]]
        assert clip.latents.shape == LATENT and torch.equal(clip.latents, fresh.latents)
        y = clip.image_condition
        assert y.shape == (3, 20, *LATENT[2:]) and y.dtype == fresh.image_condition.dtype == torch.float32
        assert torch.equal(y, fresh.image_condition)
        assert y[0, :4].eq(1).all() and not y[1:, :4].any()
        # The codec is causal: the first latent of the clip and that of its first frame alone are one.
        torch.testing.assert_close(y[0, 4:], clip.latents[0], rtol=1e-5, atol=1e-5)
        assert not torch.equal(y[1:, 4:], clip.latents[1:])
    online.clips.close()


def test_a_batch_carries_the_conditions_of_its_clips_and_a_5b_batch_none(world, tiny_world, tmp_path):
    from solarwm_lib.training.topology import Topology

    for place, expected in ((world, (2, 3, 20, *LATENT[2:])), (tiny_world, None)):
        batches = setup.build_batches(place.resolve(tmp_path), CPU, Topology())
        found = batches.load(range(2)).image_condition
        assert (None if found is None else found.shape) == expected
        batches.close()


@pytest.mark.parametrize("encoding", ["online", "preencoded"])
def test_training_reaches_the_weights_of_mask_and_image(world, latents, tmp_path, encoding):
    """The head starts at zero, so the second step is the first that moves anything behind it."""
    changes = stored(latents) if encoding == "preencoded" else {}
    resolved = world.resolve(tmp_path / "run", **changes)
    (tmp_path / "run").mkdir()
    target = dict(network.build_backbone(resolved, CPU).trainable())
    name = "patch_embedding.weight"
    before = target[name].detach().clone()
    checkpoint = train.run(resolved, run_dir=tmp_path / "run", until_step=2)
    after = load_weights(checkpoint.path, "live", target)[name]
    for channels in (slice(0, 16), slice(16, 20), slice(20, 36)):
        assert (after[:, channels] - before[:, channels]).abs().max() > 1e-5


@pytest.mark.parametrize(
    ("stage", "causal_mode", "objective"),
    [
        ("stage1", "teacher_forcing", "flow_matching"),
        ("stage1", "teacher_forcing", "anyflow_forward_map"),
        ("stage2", "self_gradient_forcing", "flow_matching"),
    ],
)
@pytest.mark.parametrize("action", ["train", "infer"])
def test_causal_stages_are_refused_before_anything_is_allocated(
    world, tmp_path, stage, causal_mode, objective, action
):
    values = world.values(
        tmp_path / "run",
        action=action,
        train__stage=stage,
        train__causal_mode=causal_mode,
        train__objective=objective,
        validation={"sample_count": 2},
        checkpoint={"path": str(tmp_path / "nowhere")},
    )
    with pytest.raises(
        ConfigError,
        match=rf"unsupported route wan22_i2v_a14b:{stage}:{causal_mode}:{objective}.*; routes of wan22_i2v_a14b: "
        r"wan22_i2v_a14b:stage0p5:bidirectional:flow_matching; change train\.stage",
    ) as caught:
        resolve_values(values)
    assert caught.value.exit_code == 2 and not (tmp_path / "run").exists()


def test_stored_latents_of_the_other_family_are_refused(world, tiny_world, latents, tmp_path):
    resolved = tiny_world.resolve(tmp_path, data__pixel_frames=9, data__random_start=False, **stored(latents))
    with pytest.raises(
        DataError,
        match=r"data\.latents_root: model\.family: the generation was encoded for wan22_i2v_a14b, this run needs wan22_ti2v_5b",
    ):
        setup.open_clips(resolved)


def test_autoregressive_sampling_of_an_image_conditioned_model_is_refused(world, tmp_path):
    import numpy as np

    from solarwm_lib.backbones.codec import load_codec
    from solarwm_lib.backbones.text import TextEncoder
    from solarwm_lib.inference.generate import Causal, Models, Request, Sampling, sample_latents

    models = Models(
        network.build_backbone(world.resolve(tmp_path), CPU),
        load_codec(world.assets),
        TextEncoder.from_pretrained(world.assets, 16),
        "tiny",
        CPU,
    )
    frame = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    w2c = np.tile(np.eye(4, dtype=np.float32), (3, 1, 1))
    request = Request(0, "a room", frame, w2c, np.eye(3, dtype=np.float32), ("key",))
    with pytest.raises(ConfigError, match="an image-conditioned model generates whole clips only"):
        sample_latents(models, [request], Sampling("autoregressive", "unipc", 2, 3.0, 3, Causal(3, 1, 6)))
