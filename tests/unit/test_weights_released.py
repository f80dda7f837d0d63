"""Reading and writing released packages: what is checked before anything is used."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from weights_cases import official, package, payload, released_config, seal, transformer

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.weights import released
from solarwm_lib.weights.tensors import check_archive, from_tensors


@pytest.fixture(scope="module")
def inference_package(tmp_path_factory):
    return package(tmp_path_factory.mktemp("p") / "SolarWM-5B-sgf-stage2-81f", "stage2", release=True)


@pytest.mark.parametrize("stage, kind, anyflow", [
    ("stage0p5", "stage0p5 checkpoint", False), ("stage1_fm", "stage1 checkpoint", False),
    ("stage1", "stage1 checkpoint", True), ("stage2", "stage2 inference package", False),
])  # fmt: skip
def test_both_roles_come_back_under_diffusers_names(tmp_path, stage, kind, anyflow):
    found = released.read_package(package(tmp_path / "p", stage))
    assert (found.kind, found.step, found.complete, found.contract.anyflow) == (kind, 400, True, anyflow)
    for role, seed in (("live", 1), ("ema", 2)):
        expected = transformer(seed, delta=anyflow)
        assert set(found.roles[role].infos) == set(expected)
        assert all(torch.equal(found.roles[role].get(name), tensor) for name, tensor in expected.items())


def test_the_contract_is_told_in_our_names(inference_package):
    found = released.read_package(inference_package)
    facts = found.contract
    assert facts.route == "wan22_ti2v_5b:stage2:self_gradient_forcing:flow_matching"
    assert facts["model.architecture"] == "wan22-tiny"  # by its tensors
    assert facts["model.causal.local_attention_latent_frames"] == 18
    assert facts["model.camera_intrinsics_mode"] == "wan_fixed"
    assert facts["train.self_gradient_forcing.denoising_timesteps"] == [1000, 750, 500, 250]
    assert facts.facts()["timestep_shift"] == 5.0
    assert (found.ema_updates, found.student_step, found.default_role) == (42, 79, "ema")


def test_a_bare_file_is_read_and_not_vouched_for(tmp_path):
    torch.save(payload("stage0p5"), tmp_path / "model.pt")
    found = released.read_package(tmp_path / "model.pt")
    assert not found.complete and found.default_role is None
    assert not released.read_package(tmp_path).complete


def test_a_training_pair_is_one_save(tmp_path):
    folder = tmp_path / "pair"
    folder.mkdir()
    torch.save(payload("stage2"), folder / "model.pt")
    critic = {"checkpoint_format": "solarwm.wan22-stage2-sgf.v1", "critic": official(transformer(3), "model."),
              "critic_optimizer": {}, "critic_scheduler": {}, "global_step": 400}  # fmt: skip
    torch.save(critic, folder / "critic.pt")
    found = released.read_package(seal(folder, 400))
    assert found.kind == "stage2 training pair" and [f.name for f in found.files] == ["model.pt", "critic.pt"]
    assert torch.equal(found.critic.get("patch_embedding.weight"), transformer(3)["patch_embedding.weight"])
    torch.save({**critic, "global_step": 395}, folder / "critic.pt")
    with pytest.raises(ArtifactError, match=r"critic\.pt: holds step 395, model\.pt beside it step 400"):
        released.read_package(seal(folder, 400))
    torch.save({**critic, "checkpoint_format": "v0"}, folder / "critic.pt")
    with pytest.raises(ArtifactError, match=r"format 'v0', expected 'solarwm.wan22-stage2-sgf\.v1'"):
        released.read_package(seal(folder, 400))
    torch.save(payload("stage0p5"), folder / "model.pt")
    torch.save(critic, folder / "critic.pt")
    with pytest.raises(
        ArtifactError, match=r"critic\.pt beside weights of stage0p5; only Stage2 has a critic"
    ):
        released.read_package(seal(folder, 400))


def refused(tmp_path, match, stage="stage0p5", **fields):
    with pytest.raises(ArtifactError, match=match):
        released.read_package(package(tmp_path / "p", stage, **fields))


def test_missing_parts_and_bad_counters_are_refused(tmp_path):
    refused(tmp_path / "a", r"model\.pt: no generator; found config, ema_num_updates", generator=None)
    refused(tmp_path / "b", "no config", config=None)
    refused(tmp_path / "c", "global_step is 0, expected a positive", global_step=0)
    refused(tmp_path / "d", "ema_num_updates is 401 at step 400, expected 0..400", ema_num_updates=401)
    refused(tmp_path / "e", "checkpoint_format 'v9'", checkpoint_format="v9")


def test_tensors_must_be_exactly_those_of_the_network(tmp_path):
    state = official(transformer(1))
    short = {k: v for k, v in state.items() if k != "blocks.2.norm3.bias"}
    refused(
        tmp_path / "a",
        "nearest is wan22-tiny: 1 tensors are missing, first blocks.2.norm2.bias",
        generator=short,
    )
    refused(tmp_path / "b", "generator_ema .ema.: 1 tensors are missing", generator_ema=short)
    refused(tmp_path / "c", "unexpected keys, first blocks.0.cam_self_attn.q.weight: a camera branch",
            generator={**state, "blocks.0.cam_self_attn.q.weight": torch.zeros(1)})  # fmt: skip
    wide = {**state, "head.head.bias": torch.zeros(7)}
    refused(tmp_path / "d", r"first proj_out.bias: found \[7\], expected \[192\]", generator=wide)
    mixed = {f"model.{k}" if "ffn" in k else k: v for k, v in state.items()}
    refused(tmp_path / "e", "mixes two networks", generator=mixed)
    halves = {k: v.to(torch.float8_e5m2) for k, v in state.items()}
    refused(tmp_path / "f", "not float32, bfloat16, float16", generator=halves)
    refused(tmp_path / "g", "entry 'x' is int, expected a tensor", generator={"x": 1})


def test_network_and_configuration_must_agree(tmp_path):
    delta = official(transformer(1, delta=True))
    refused(
        tmp_path / "a",
        r"generator \(live\): 4 unexpected tensors, first condition_embedder.delta",
        generator=delta,
    )
    refused(
        tmp_path / "b",
        r"generator \(live\): 4 tensors are missing",
        "stage1",
        generator=official(transformer(1)),
    )
    config = released_config("stage0p5")
    config["model"]["family"] = "wan22_i2v_a14b"
    refused(tmp_path / "c", r"config says family wan22_i2v_a14b, the tensors are wan22-tiny", config=config)
    config = released_config("stage0p5")
    del config["model"]["timestep_shift"]
    refused(tmp_path / "d", "its config has no model.timestep_shift", config=config)
    config = released_config("stage0p5")
    config["train"]["objective"] = "anyflow"
    refused(tmp_path / "e", "route wan22_ti2v_5b:stage0p5:bidirectional:anyflow is not one of", config=config)


def test_code_in_a_payload_is_never_run(tmp_path):
    refused(
        tmp_path / "a",
        "more than tensors and plain values .*(Path|path)",
        config={"root": pathlib.PurePosixPath("/x")},
    )


def test_damaged_archives_are_refused(tmp_path):
    path = package(tmp_path / "p", "stage0p5") / "model.pt"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match=r"model\.pt has \d+ bytes, checkpoint-manifest.json says"):
        released.read_package(path.parent)
    with pytest.raises(ArtifactError, match="not a complete torch archive"):
        released.read_package(path)
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    released.read_package(path.parent)  # sizes agree, as in the release
    with pytest.raises(ArtifactError, match=r"model\.pt: record model/data/\d+ does not match its checksum"):
        check_archive(path)


def test_incomplete_or_changed_folders_are_refused(tmp_path):
    folder = package(tmp_path / "p", "stage0p5")
    marker, manifest = folder / "COMPLETE.json", folder / "checkpoint-manifest.json"
    kept, text = marker.read_bytes(), manifest.read_text()
    marker.unlink()
    with pytest.raises(ArtifactError, match=r"no COMPLETE\.json; the package is not complete"):
        released.read_package(folder)
    marker.write_bytes(kept)
    manifest.write_text(text.replace('"step": 400', '"step": 401'))
    with pytest.raises(ArtifactError, match="one of the two was changed"):
        released.read_package(folder)
    manifest.unlink()
    with pytest.raises(ArtifactError, match=r"COMPLETE\.json without checkpoint-manifest"):
        released.read_package(folder)
    for name in (marker, manifest):
        name.unlink(missing_ok=True)
    with pytest.raises(ArtifactError, match=r"manifest\.json says step 3, model\.pt holds step 400"):
        released.read_package(seal(folder, 3))
    for name in (marker, manifest):
        name.unlink()
    seal(folder, 400)
    (folder / "model.pt").rename(tmp_path / "model.pt")
    (folder / "model.pt").symlink_to(tmp_path / "model.pt")
    with pytest.raises(ArtifactError, match=r"model\.pt is missing or not a regular file"):
        released.read_package(folder)


@pytest.mark.parametrize("key, value, match", [
    ("schema", "v0", "schema is 'v0', expected 'solarwm.public-weight-manifest.v1'"),
    ("load.format", "zip", "load.format is 'zip'"),
    ("load.entrypoint", "..", "load.entrypoint is '..', expected '.'"),
    ("load.default_weights", "raw", "load.default_weights is 'raw'; the manifest offers live.ema"),
    ("identity.model.weight_role", "live", "load.default_weights is 'ema'; the manifest offers live,"),
])  # fmt: skip
def test_a_release_manifest_must_name_a_role_that_is_there(inference_package, tmp_path, key, value, match):
    path = inference_package / "release-manifest.json"
    values = json.loads(path.read_text())
    part = values
    *sections, leaf = key.split(".")
    for section in sections:
        part = part[section]
    part[leaf] = value
    (tmp_path / path.name).write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=match):
        released.default_role(tmp_path, {"live": None, "ema": None})


def test_default_role_absent_in_the_payload_is_refused(tmp_path):
    folder = package(tmp_path / "p", "stage2", release=True, generator_ema=None, ema_num_updates=None)
    with pytest.raises(ArtifactError, match="holds live"):
        released.read_package(folder)


@pytest.mark.parametrize("stage", ["stage0p5", "stage1", "stage2"])
def test_a_written_package_is_read_back_bit_for_bit(tmp_path, stage):
    source = released.read_package(package(tmp_path / "p", stage, release=stage == "stage2"))
    out = tmp_path / "out"
    released.write_package(out, source.contract, source.config, source.roles, source.step, source.ema_updates)
    again = released.read_package(out)
    assert again.complete and again.config == source.config and again.step == source.step
    assert (again.ema_updates, again.default_role) == (source.ema_updates, source.default_role)
    for role, weights in source.roles.items():
        assert weights.infos == again.roles[role].infos
        assert all(torch.equal(weights.get(name), again.roles[role].get(name)) for name in weights.infos)
    raw = [torch.load(folder / "model.pt", weights_only=True) for folder in (tmp_path / "p", out)]
    assert raw[0]["generator"].keys() == raw[1]["generator"].keys()  # prefix of Stage2 included
    names = {file.name for file in out.iterdir()}
    assert ("release-manifest.json" in names) == (stage == "stage2")


def test_the_written_configuration_describes_the_same_contract(tmp_path, inference_package):
    from solarwm_lib.weights import contract

    facts = released.read_package(inference_package).contract
    written = contract.to_released(facts)
    assert written["model"]["name"] == "Wan2.2-TI2V-5B-Camera" and written["model"]["causal"] is True
    assert written["model"]["frame_sequence_length"] == 405 and written["model"]["num_output_frames"] == 21
    assert contract.from_released(written, "wan22-tiny", "x") == facts


@pytest.mark.parametrize(
    ("released_key", "ours", "value"),
    [
        ("model.camera_translation_transform", "model.camera_translation_transform", "logd4"),
        ("model.timestep_shift", "model.timestep_shift", 3.0),
        ("train.denoising_step_list", "train.self_gradient_forcing.denoising_timesteps", [1000, 500]),
    ],
)
def test_transform_shift_and_steps_travel_in_and_out(released_key, ours, value):
    from solarwm_lib.weights import contract

    section, key = released_key.split(".")
    config = released_config("stage2")
    before = contract.from_released(config, "wan22-tiny", "x")[ours]
    config[section][key] = value
    facts = contract.from_released(config, "wan22-tiny", "x")
    assert facts[ours] == value != before
    assert contract.to_released(facts)[section][key] == value


def test_only_live_weights_make_a_package_of_live(tmp_path, inference_package):
    facts = released.read_package(inference_package).contract
    released.write_package(
        tmp_path / "out", facts, released_config("stage2"), {"live": from_tensors(transformer(), "x")}, 7, 0
    )
    found = released.read_package(tmp_path / "out")
    assert list(found.roles) == ["live"] and found.default_role == "live" and found.ema_updates == 0
