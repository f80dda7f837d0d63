"""`solarwm weights inspect`: right about every kind of file, without reading tensors, and strict about damage."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from weights_cases import (
    base_folder,
    official,
    official_of,
    package,
    payload,
    released_config,
    seal,
    shards,
    transformer,
)

from solarwm_lib.artifacts import Transaction
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint, members
from solarwm_lib.weights import commands, inventory
from solarwm_lib.weights.convert import export_weights, import_weights
from solarwm_lib.weights.inspect import format_report, inspect

PARAMETERS_5B = 4_999_787_712


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    target = tmp_path_factory.mktemp("assets") / "base"
    with Transaction(target, "solarwm.assets.v1", {"name": "base"}) as transaction:
        transaction.write_text("note.txt", "base")
    return target


def loads(report):
    return {(load["where"], load["role"]) for load in report["loads"]}


def test_official_shards(tmp_path):
    report = inspect(shards(tmp_path / "t", official(transformer(0, dtype=torch.bfloat16), "model.")))
    assert report["kind"] == "base weights (transformer only)" and report["shards"] == 2
    assert (report["family"], report["architecture"]) == ("wan22_ti2v_5b", "wan22-tiny")
    role = report["roles"]["base"]
    assert (role["style"], role["prefix"], role["tensors"], role["anyflow"]) == (
        "official",
        "model.",
        177,
        False,
    )
    assert role["dtypes"] == {"bfloat16": 4_000_512} and role["bytes"] == 2 * role["parameters"]
    assert loads(report) == {("model.base_path", "base")} and "weights import" in report["loads"][0]["how"]
    assert report["stage"] is None and report["step"] is None and not report["problems"]


def test_one_shard_an_index_and_a_file_are_told_apart(tmp_path):
    folder = shards(tmp_path / "t", transformer(0))
    by_index = inspect(folder / "diffusion_pytorch_model.safetensors.index.json")
    assert by_index["roles"] == inspect(folder)["roles"] and not by_index["problems"]
    part = inspect(folder / "diffusion_pytorch_model-00001-of-00002.safetensors")
    assert part["loads"] == [] and "nearest is wan22-tiny: 88 tensors are missing" in part["problems"][0]


@pytest.mark.parametrize(
    "layout, kind", [("official", "official Wan repository"), ("solarwm", "SolarWM base")]
)
def test_base_folders_and_their_parts(tmp_path, layout, kind):
    source = base_folder(tmp_path / "source", layout)
    report = inspect(source)
    assert report["kind"] == f"base weights ({kind})" and not report["problems"]
    assert set(report["parts"]) >= {"transformer", "vae", "text_encoder", "tokenizer"}
    vae, text = (next(source.rglob(name)) for name in ("Wan2.2_VAE.pth", "models_t5*.pth"))
    assert (inspect(vae)["kind"], inspect(vae)["family"]) == ("Wan VAE", "wan22_ti2v_5b")
    assert inspect(text)["kind"] == "UMT5 text encoder"
    ready = inspect(import_weights(source, tmp_path / "assets").path)
    assert ready["loads"][0]["how"] == "as it is, with model.architecture: wan22-tiny"
    vae.unlink()
    assert layout == "official" or inspect(source)["problems"] == ["missing vae"]


@pytest.mark.parametrize("stage, expected", [
    ("stage0p5", {("checkpoint.path", "live"), ("checkpoint.path", "ema"),
                  ("checkpoint.initialization.teacher and .critic", "live"),
                  ("checkpoint.initialization.teacher and .critic", "ema")}),
    ("stage1_fm", set()),
    ("stage1", {("checkpoint.initialization.student", "ema")}),
    ("stage2", set()),
])  # fmt: skip
def test_released_packages_of_every_stage(tmp_path, stage, expected):
    report = inspect(package(tmp_path / "p", stage, release=stage == "stage2"))
    name = stage.removesuffix("_fm")
    assert (report["stage"], report["step"], report["family"]) == (name, 400, "wan22_ti2v_5b")
    assert set(report["roles"]) == {"live", "ema"} and report["roles"]["ema"]["anyflow"] == (
        stage == "stage1"
    )
    assert report["roles"]["live"]["prefix"] == ("model." if stage == "stage2" else "")
    inference = {(f"validation and inference of {report['route']}", role) for role in ("live", "ema")}
    assert loads(report) == expected | inference
    assert report["default_role"] == ("ema" if stage == "stage2" else None)
    assert report["facts"]["camera_translation_transform"] == "linear"
    assert ("denoising_timesteps" in report["facts"]) == (stage == "stage2")


def test_a_pair_and_a_bare_file(tmp_path):
    folder = tmp_path / "pair"
    folder.mkdir()
    torch.save(payload("stage2"), folder / "model.pt")
    critic = {
        "checkpoint_format": "solarwm.wan22-stage2-sgf.v1",
        "critic": official(transformer(3)),
        "global_step": 400,
    }
    torch.save(critic, folder / "critic.pt")
    pair = inspect(seal(folder, 400))
    assert pair["kind"] == "released stage2 training pair" and set(pair["roles"]) == {"live", "ema", "critic"}
    bare = inspect(folder / "model.pt")
    assert bare["kind"] == "bare model.pt of a stage2 inference package"
    assert bare["notes"] == ["no manifest vouches for this file: weight initialisation only"]


def test_our_checkpoints_and_exports(tmp_path, assets):
    artifact = import_weights(package(tmp_path / "p", "stage1"), tmp_path / "c", assets=assets)
    report = inspect(artifact.path / "COMPLETE.json")
    assert report["kind"] == "checkpoint without optimizer (weights only)" and report["step"] == 400
    assert ("checkpoint.initialization.student", "ema") in loads(report)
    out = export_weights(artifact.path, tmp_path / "e", "official", role="ema")
    report = inspect(out.path)
    assert report["kind"] == "export of a stage1 checkpoint in official form" and list(report["roles"]) == [
        "ema"
    ]
    assert report["roles"]["ema"]["style"] == "official" and report["roles"]["ema"]["anyflow"]
    out = export_weights(artifact.path, tmp_path / "r", "released")
    assert inspect(out.path)["kind"] == "released stage1 checkpoint"


def test_a_trained_checkpoint_resumes_and_an_unused_average_is_named(tmp_path, assets):
    weights = transformer(0)
    run = checkpoint.read_state(
        import_weights(package(tmp_path / "p", "stage0p5"), tmp_path / "c", assets=assets)
    ).run
    slots = {"x": torch.zeros(1)}
    tensors = checkpoint.Tensors(weights, weights, slots)
    checkpoint.save(tmp_path / "a", tensors, checkpoint.State(7, 0, 56, 1e-4, 8, run=run), {}, [])
    report = inspect(tmp_path / "a")
    assert report["kind"] == "checkpoint" and report["loads"] == []
    assert report["problems"] == ["the EMA was never updated up to step 7: role ema does not load"]
    checkpoint.save(tmp_path / "b", tensors, checkpoint.State(7, 7, 56, 1e-4, 8, run=run), {}, [])
    report = inspect(tmp_path / "b")
    assert report["loads"][0]["how"] == "checkpoint.mode: full_resume, same run" and not report["problems"]


def test_a_checkpoint_in_parts_is_described_and_exported_as_one_in_whole_files(tmp_path, assets):
    weights = transformer(0)
    run = checkpoint.read_state(
        import_weights(package(tmp_path / "p", "stage0p5"), tmp_path / "c", assets=assets)
    ).run
    tensors, state = checkpoint.Tensors(weights, weights, {}), checkpoint.State(7, 7, 56, 1e-4, 8, run=run)
    whole = checkpoint.save(tmp_path / "whole", tensors, state, {}, [])
    names = sorted(weights)
    with Transaction(tmp_path / "parts", checkpoint.SCHEMA, {}) as transaction:
        for member in checkpoint.INVENTORY[:-1]:
            for part in range(2):
                mine = {} if member == checkpoint.OPTIMIZER else {n: weights[n] for n in names[part::2]}
                with transaction.open(members.part_name(member, part, 2)) as stream:
                    checkpoint.write_safetensors(stream, mine)
        transaction.write_bytes(checkpoint.STATE, whole.file(checkpoint.STATE).read_bytes())
    assert inspect(tmp_path / "parts") | {"path": 0} == inspect(tmp_path / "whole") | {"path": 0}
    exports = [
        export_weights(tmp_path / n, tmp_path / f"{n}-out", "official", role="ema")
        for n in ("whole", "parts")
    ]
    files = [{m.path: m.sha256 for m in artifact.members} for artifact in exports]
    assert files[0] == files[1]


def test_what_nothing_here_loads_is_said(tmp_path):
    save_file({"lora.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    assert inspect(tmp_path / "x.safetensors")["problems"] == [
        "no Wan 2.2 transformer: nothing here loads it"
    ]
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pth")
    assert "nothing here loads it" in inspect(tmp_path / "x.pth")["problems"][0]
    torch.save(official(transformer(0)), tmp_path / "y.pth")
    assert "nothing says what it was trained for" in inspect(tmp_path / "y.pth")["problems"][0]
    delta = inspect(shards(tmp_path / "t", official(transformer(0, delta=True))))
    assert "AnyFlow" in delta["problems"][0] and delta["loads"] == []


def header_file(path, entries, payload_bytes):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(payload_bytes))
    return path


def test_damaged_safetensors_are_refused(tmp_path):
    def refused(match, entries, size=4):
        with pytest.raises(ArtifactError, match=match):
            inventory.read_header(header_file(tmp_path / "x.safetensors", entries, size))

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    assert inventory.read_header(header_file(tmp_path / "ok", {"a": one}, 4))[0] == {
        "a": inventory.TensorInfo("F32", (1,))
    }
    refused("truncated or was changed", {"a": one}, 3)
    refused("a lies at bytes|a .F32 .2..", {"a": {**one, "shape": [2]}})
    refused("does not fit its size or its neighbour", {"a": one, "b": one})
    refused("dtype 'F3'", {"a": {**one, "dtype": "F3"}})
    refused("header is damaged .KeyError", {"a": {"dtype": "F32"}})
    refused("header is damaged", b"{nonsense")
    twice = b'{"a": %s, "a": %s}' % ((json.dumps(one).encode(),) * 2)
    refused("key a occurs 2 times; expected once", twice)
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(ArtifactError, match=r"not a safetensors file .3 bytes"):
        inspect(tmp_path / "short")
    with pytest.raises(ArtifactError, match="does not exist"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"no \*\.safetensors file"):
        inspect(tmp_path / "empty")


def test_an_index_must_agree_with_its_shards(tmp_path):
    folder = shards(tmp_path / "t", transformer(0))
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    values = json.loads(index.read_text())

    def refused(match, **changes):
        index.write_text(json.dumps({"weight_map": {**values["weight_map"], **changes}}))
        with pytest.raises(ArtifactError, match=match):
            inspect(folder)

    refused("says nothing or another file of proj_out.bias", **{
        "proj_out.bias": next(f for f in values["weight_map"].values() if f != values["weight_map"]["proj_out.bias"])})  # fmt: skip
    refused("1 tensors are not in their shard, first more", more=values["weight_map"]["proj_out.bias"])
    refused("a shard name is not a plain file name", more="../x.safetensors")
    index.write_text(json.dumps(values))
    save_file({"stale": torch.zeros(1)}, folder / "stale.safetensors")
    with pytest.raises(ArtifactError, match=r"stale\.safetensors is not listed in"):
        inspect(folder)


def sparse_5b(tmp_path):
    """The full 5B transformer as a safetensors file and as a `model.pt`, 10 GB each, all holes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = load_architecture("wan22-ti2v-5b")["transformer"]
    shapes = inventory.transformer_shapes(arguments)
    header, offset = {}, 0
    for name, shape in shapes.items():
        info = inventory.TensorInfo("BF16", shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + info.bytes]}
        offset += info.bytes
    file = header_file(tmp_path / "5b.safetensors", header, 0)
    os.truncate(file, file.stat().st_size + offset)
    names = official_of(arguments["num_layers"])
    with FakeTensorMode():
        state = {key: torch.empty(shapes[name], dtype=torch.bfloat16) for key, name in names.items()}
    content = {
        "generator": state,
        "global_step": 22000,
        "config": released_config("stage0p5"),
        "ema_num_updates": 0,
    }
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, tmp_path / "model.pt")
    return [file, tmp_path / "model.pt"]


def test_the_full_5b_model_is_described_without_loading_it(tmp_path):
    """Resident memory stays below 1 GB where the weights are 10 GB, and safetensors need no torch."""
    code = (
        "import json, re, sys; from solarwm_lib.weights.inspect import inspect; r = inspect(sys.argv[1]);"
        # getrusage would report the peak of the process that started this one, if it was larger.
        "peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]);"
        "print(json.dumps([r, peak, 'torch' in sys.modules]))"
    )
    for file, needs_torch in zip(sparse_5b(tmp_path), (False, True), strict=True):
        assert file.stat().st_size > 9.9e9 > 1e9 > file.stat().st_blocks * 512
        done = subprocess.run(
            [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
        )
        report, kilobytes, torch_loaded = json.loads(done.stdout)
        assert report["architecture"] == "wan22-ti2v-5b" and not report["problems"]
        counts = next(iter(report["roles"].values()))
        assert (counts["parameters"], counts["tensors"]) == (PARAMETERS_5B, 825)
        assert kilobytes < 1_000_000 and torch_loaded == needs_torch


def run(add_arguments, *words):
    parser = argparse.ArgumentParser()
    group = parser.add_subparsers()

    def add(group, name, handler, help):
        command = group.add_parser(name, help=help)
        command.set_defaults(handler=handler)
        return command

    add_arguments(group, add)
    arguments = parser.parse_args([str(word) for word in words])
    return arguments.handler(arguments)


def test_the_commands_print_what_a_person_needs(tmp_path, assets, capsys):
    source = package(tmp_path / "p", "stage2", release=True)
    run(commands.add_commands, "inspect", source)
    text = capsys.readouterr().out
    assert text == format_report(inspect(source)) + "\n"
    for part in ("released stage2 inference package", "step: 400", "default_role: ema", "4,000,512 parameters in 177 tensors",
                 "float32 4,000,512", "prefix 'model.'", "denoising_timesteps [1000, 750, 500, 250]", "loads: validation"):  # fmt: skip
        assert part in text
    run(commands.add_commands, "inspect", source, "--json")
    assert json.loads(capsys.readouterr().out)["stage"] == "stage2"
    run(commands.add_commands, "import", source, "--assets", assets, "--out", tmp_path / "c")
    run(
        commands.add_commands,
        "export",
        tmp_path / "c",
        "--format",
        "diffusers",
        "--role",
        "ema",
        "--out",
        tmp_path / "e",
    )
    assert "solarwm.checkpoint.v1" in (out := capsys.readouterr().out) and "solarwm.export.v1" in out
