"""Weights in and out of the graph: every form there and back, bit for bit."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from backbone_cases import model_section
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file
from weights_cases import TINY, base_folder, official, package, shards, transformer

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Transaction
from solarwm_lib.backbones.codec import load_codec
from solarwm_lib.backbones.text import TextEncoder
from solarwm_lib.backbones.wan22 import Wan22
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ArtifactError, ConfigError
from solarwm_lib.training import checkpoint
from solarwm_lib.weights import released, tensors
from solarwm_lib.weights.convert import export_weights, import_weights


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A base the trained weights belong to; only its digest matters here."""
    target = tmp_path_factory.mktemp("assets") / "base"
    with Transaction(target, "solarwm.assets.v1", {"name": "base"}) as transaction:
        transaction.write_text("note.txt", "base")
    return target


@pytest.fixture(scope="module")
def imported(tmp_path_factory, assets):
    """Released packages of every stage as our checkpoints: {stage: (package, artifact)}."""
    root = tmp_path_factory.mktemp("imported")
    result = {}
    for stage in ("stage0p5", "stage1", "stage2"):
        source = package(root / f"package-{stage}", stage, release=stage == "stage2")
        result[stage] = (source, import_weights(source, root / stage, assets=assets))
    return result


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )


@pytest.mark.parametrize("layout", ["official", "solarwm"])
def test_base_weights_become_a_folder_that_every_part_loads_from(tmp_path, layout):
    source = base_folder(tmp_path / "source", layout)
    artifact = import_weights(source, tmp_path / "assets")
    assert artifact.schema == "solarwm.assets.v1" and artifact.identity["architecture"] == "wan22-tiny"
    backbone = Wan22.from_pretrained(artifact.path, TINY, model_section())
    assert equal(backbone.transformer.state_dict(), transformer(0))

    codec = load_codec(artifact.path)
    assert (codec.temporal_stride, codec.spatial_stride, codec.vae.config.z_dim) == (4, 16, 48)
    assert (
        codec.vae.config.latents_mean[:2] == [-0.2289, -0.0052] and codec.vae.config.latents_std[-1] == 0.7744
    )
    assert codec.encode(torch.zeros(1, 3, 5, 32, 32)).shape == (1, 2, 48, 2, 2)

    text = TextEncoder.from_pretrained(artifact.path, text_length=16)
    from solarwm_lib.backbones.tiny import build_text_encoder

    original = build_text_encoder(TINY, len(text.tokenizer), seed=0).eval()
    expected = TextEncoder(original, text.tokenizer, 16).encode(["a room with red walls"])
    assert torch.equal(text.encode(["a room with red walls"]), expected)
    index = json.loads((artifact.path / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline" and index["expand_timesteps"] is True
    pipeline = WanPipeline.from_pretrained(artifact.path)
    assert pipeline.config.expand_timesteps and type(pipeline.vae).__name__ == "AutoencoderKLWan"
    assert (artifact.path / "conditioning" / "wan_negemb_cn.pth").is_file() == (layout == "solarwm")


def test_a_repeated_import_verifies_and_another_source_is_refused(tmp_path):
    source = shards(tmp_path / "shards", official(transformer(0)))
    first = import_weights(source, tmp_path / "assets")
    assert import_weights(source, tmp_path / "assets").digest == first.digest
    other = shards(tmp_path / "other", official(transformer(5)))
    with pytest.raises(ArtifactError, match=r"another identity .*source.diffusion_pytorch_model"):
        import_weights(other, tmp_path / "assets")


def test_a_diffusers_folder_is_copied_without_its_second_expert(tmp_path):
    source = tmp_path / "pipeline"
    shards(source / "transformer", transformer(0, dtype=torch.bfloat16), count=3)
    shards(source / "transformer_2", transformer(1))
    for part in ("vae", "text_encoder", "tokenizer", "scheduler"):
        (source / part).mkdir()
        (source / part / "config.json").write_text("{}")
    index = {
        "_class_name": "WanPipeline",
        "boundary_ratio": 0.9,
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
    }
    (source / "model_index.json").write_text(json.dumps(index))
    artifact = import_weights(source, tmp_path / "assets")
    assert equal(
        load_file(artifact.file("transformer/diffusion_pytorch_model.safetensors")),
        transformer(0, dtype=torch.bfloat16),
    )
    index = json.loads(artifact.file("model_index.json").read_text())
    assert index["transformer_2"] == [None, None] and index["boundary_ratio"] is None
    assert not any(member.path.startswith("transformer_2") for member in artifact.members)
    shutil.rmtree(source / "vae")
    with pytest.raises(ArtifactError, match="a diffusers pipeline without vae; fetch the missing files"):
        import_weights(source, tmp_path / "again")


def test_of_an_official_a14b_repository_the_high_noise_expert_is_taken(tmp_path):
    from solarwm_lib.weights import official as layouts

    for name in ("high_noise_model", "low_noise_model"):
        shards(tmp_path / name, official(transformer(0)))
    (tmp_path / "Wan2.1_VAE.pth").write_bytes(b"x")
    base = layouts.find_base(tmp_path)
    assert base.transformer == tmp_path / "high_noise_model" and base.missing() == [
        "text_encoder",
        "tokenizer",
    ]


def a14b_folder(root):
    """A diffusers pipeline of the tiny twin of A14B with both experts; returns the high-noise expert's tensors too."""
    from solarwm_lib.backbones.tiny import build_transformer, model_index

    architecture = load_architecture("wan22-tiny-i2v")
    experts = [build_transformer(architecture, seed).state_dict() for seed in (0, 1)]
    for name, state in zip(("transformer", "transformer_2"), experts, strict=True):
        shards(root / name, state)
    for part in ("vae", "text_encoder", "tokenizer", "scheduler"):
        (root / part).mkdir()
        (root / part / "config.json").write_text("{}")
    second = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}
    (root / "model_index.json").write_text(json.dumps(model_index(architecture) | second))
    return root, architecture, experts[0]


def test_of_a_diffusers_a14b_pipeline_the_high_noise_expert_is_taken_and_the_other_named(tmp_path, caplog):
    source, architecture, high = a14b_folder(tmp_path / "pipeline")
    artifact = import_weights(source, tmp_path / "assets")
    assert artifact.identity["architecture"] == "wan22-tiny-i2v"
    assert "pipeline/transformer_2: the low-noise expert is not imported" in caplog.text
    backbone = Wan22.from_pretrained(artifact.path, architecture, model_section())
    assert backbone.image_conditioned and equal(backbone.transformer.state_dict(), high)
    index = json.loads(artifact.file("model_index.json").read_text())
    assert index["_class_name"] == "WanImageToVideoPipeline" and index["expand_timesteps"] is False
    assert index["transformer_2"] == [None, None] and index["boundary_ratio"] is None
    assert not any("transformer_2" in member.path for member in artifact.members)


def test_the_low_noise_expert_named_by_itself_is_refused(tmp_path):
    source, _, high = a14b_folder(tmp_path / "pipeline")
    official_one = shards(tmp_path / "official" / "low_noise_model", high)
    file = next((source / "transformer_2").glob("*.safetensors"))
    for path, instead in (
        (source / "transformer_2", source / "transformer"),
        (file, source / "transformer"),
        (official_one, tmp_path / "official" / "high_noise_model"),
    ):
        with pytest.raises(
            ConfigError, match=rf"the low-noise expert of A14B; .* name {re.escape(str(instead))}$"
        ):
            import_weights(path, tmp_path / "assets")
    assert not (tmp_path / "assets").exists()


def test_inspecting_an_a14b_pipeline_says_which_expert_would_load(tmp_path):
    from solarwm_lib.weights.inspect import format_report, inspect

    report = inspect(a14b_folder(tmp_path / "pipeline")[0])
    assert (report["family"], report["architecture"]) == ("wan22_i2v_a14b", "wan22-tiny-i2v")
    assert "note: transformer_2: the low-noise expert is not imported" in format_report(report)


def test_bad_base_weights_are_refused_before_anything_is_written(tmp_path):
    def refused(match, source):
        with pytest.raises(ArtifactError, match=match):
            import_weights(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    state = official(transformer(0))
    twice = shards(tmp_path / "twice", state, index=False)
    tensors_of_one = load_file(twice / "diffusion_pytorch_model-00001-of-00002.safetensors")
    shards(twice, {**state, **tensors_of_one}, count=1, index=False)
    refused(r"key .* is also in diffusion_pytorch_model-00001-of-00001", twice)
    lost = shards(tmp_path / "lost", state)
    (lost / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    refused("1 shards are missing, first diffusion_pytorch_model-00002-of-00002", lost)
    few = {key: value for key, value in state.items() if not key.startswith("blocks.5.")}
    refused("nearest is wan22-tiny: 27 tensors are missing, first blocks.5.", shards(tmp_path / "few", few))
    refused(
        "second time embedding of AnyFlow", shards(tmp_path / "delta", official(transformer(0, delta=True)))
    )
    heads = shards(tmp_path / "heads", state)
    (heads / "config.json").write_text(json.dumps({"_class_name": "WanModel", "num_heads": 24, "dim": 192}))
    refused("num_heads is 24, the architecture of its tensors has 4", heads)
    refused("does not exist", tmp_path / "nowhere")
    folder = base_folder(tmp_path / "base", "official")
    vae = torch.load(folder / "Wan2.2_VAE.pth", weights_only=True)
    torch.save({k: v for k, v in vae.items() if k != "decoder.head.0.gamma"}, folder / "Wan2.2_VAE.pth")
    refused(r"Wan2.2_VAE.pth: 1 tensors are missing, first decoder.norm_out.gamma", folder)
    torch.save(
        {k: v[:16] if k.startswith("conv2.") else v for k, v in vae.items()}, folder / "Wan2.2_VAE.pth"
    )
    refused(
        "a VAE of 16 latent channels, the transformer takes 48; expected Wan2.2_VAE.pth for TI2V-5B", folder
    )


def test_released_weights_become_a_checkpoint_that_initialises(imported):
    source, artifact = imported["stage1"]
    state = checkpoint.read_state(artifact)
    assert (state.completed_steps, state.ema_updates) == (400, 400)
    assert state.run["route"] == "wan22_ti2v_5b:stage1:teacher_forcing:anyflow_forward_map:v1_5"
    for role, seed in (("live", 1), ("ema", 2)):
        expected = transformer(seed, delta=True)
        assert equal(checkpoint.load_weights(artifact.path, role, expected, source_step=400), expected)
    with pytest.raises(ArtifactError, match=r"optimizer\.safetensors is missing"):
        checkpoint.open_verified(artifact.path)
    assert (
        import_weights(source, artifact.path, assets=artifact.path / artifact.parents[0].path).digest
        == artifact.digest
    )


def test_bfloat16_live_weights_become_float32_masters_of_the_same_value(tmp_path, assets):
    small = transformer(1, dtype=torch.bfloat16)
    source = package(tmp_path / "p", "stage0p5", generator=official(small))
    artifact = import_weights(source, tmp_path / "c", assets=assets)
    wide = {name: value.float() for name, value in small.items()}
    assert equal(load_file(artifact.file("model.safetensors")), wide)
    assert list(checkpoint.read_state(artifact).run["imported"]["dtypes"]["live"]) == ["bfloat16"]
    back = export_weights(artifact.path, tmp_path / "e", "released", dtype="bfloat16").path / "package"
    raw = [torch.load(folder / "model.pt", weights_only=True) for folder in (source, back)]
    for field in ("generator", "generator_ema"):
        assert equal(raw[1][field], raw[0][field])


@pytest.mark.parametrize("stage", ["stage0p5", "stage1", "stage2"])
def test_a_package_survives_import_and_export_bit_for_bit(tmp_path, imported, stage):
    source, artifact = imported[stage]
    out = export_weights(artifact.path, tmp_path / "e", "released")
    raw = [torch.load(f / "model.pt", weights_only=True) for f in (source, out.path / "package")]
    for field in ("generator", "generator_ema"):
        assert equal(raw[1][field], raw[0][field])
    assert raw[0]["config"] == raw[1]["config"] and raw[0]["global_step"] == raw[1]["global_step"]
    assert raw[0]["ema_num_updates"] == raw[1]["ema_num_updates"]
    assert released.read_package(out.path / "package").complete
    base = artifact.path / artifact.parents[0].path
    again = import_weights(out.path, tmp_path / "c", assets=base)
    for member in checkpoint.WEIGHTS.values():
        assert again.file(member).read_bytes() == artifact.file(member).read_bytes()
    assert artifacts.verify(out.path, deep=True).parents[0].digest == artifact.digest


@pytest.mark.parametrize("form", ["diffusers", "official"])
@pytest.mark.parametrize("stage, role, seed", [("stage0p5", "live", 1), ("stage1", "ema", 2)])
def test_one_role_goes_out_and_comes_back_bit_for_bit(tmp_path, imported, form, stage, role, seed, assets):
    artifact = imported[stage][1]
    expected = transformer(seed, delta=stage == "stage1")
    out = export_weights(artifact.path, tmp_path / "e", form, role=role)
    stored = load_file(out.file("transformer/diffusion_pytorch_model.safetensors"))
    assert equal(stored, expected if form == "diffusers" else official(expected))
    again = import_weights(out.path, tmp_path / "c", assets=assets)
    member, absent = (checkpoint.WEIGHTS[r] for r in ((role, "ema") if role == "live" else (role, "live")))
    assert equal(load_file(again.file(member)), expected)
    state, original = checkpoint.read_state(again), checkpoint.read_state(artifact)
    assert state.run["config"] == original.run["config"] and state.completed_steps == 400
    with pytest.raises(ArtifactError, match=f"no member '{absent}'"):
        again.file(absent)
    if role == "ema":
        with pytest.raises(ArtifactError, match=r"has no live weights at step 400 .*; it has ema"):
            export_weights(again.path, tmp_path / "r", "released")


def test_diffusers_loads_the_exported_transformer(tmp_path, imported):
    out = export_weights(
        imported["stage2"][1].path, tmp_path / "e", "diffusers", role="ema", dtype="bfloat16"
    )
    model, info = WanTransformer3DModel.from_pretrained(
        out.path, subfolder="transformer", torch_dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    assert torch.equal(model.proj_out.weight, transformer(2)["proj_out.weight"].bfloat16())


def test_what_an_export_cannot_give_is_refused(tmp_path, imported):
    path = imported["stage2"][1].path
    with pytest.raises(ConfigError, match="format 'gguf'; expected one of diffusers"):
        export_weights(path, tmp_path / "e", "gguf")
    with pytest.raises(
        ConfigError, match="format diffusers with no role; diffusers and official take live or ema"
    ):
        export_weights(path, tmp_path / "e", "diffusers")
    with pytest.raises(ConfigError, match="format released with role ema"):
        export_weights(path, tmp_path / "e", "released", role="ema")
    with pytest.raises(ConfigError, match="dtype 'int8'; expected one of float32"):
        export_weights(path, tmp_path / "e", "official", role="ema", dtype="int8")
    with pytest.raises(ArtifactError, match="schema is"):
        export_weights(
            imported["stage2"][1].path / imported["stage2"][1].parents[0].path, tmp_path / "e", "released"
        )


def test_an_average_never_updated_is_not_exported(tmp_path, assets):
    source = package(tmp_path / "p", "stage2", generator_ema=None, ema_num_updates=None)
    artifact = import_weights(source, tmp_path / "c", assets=assets)
    with pytest.raises(
        ArtifactError, match=r"has no ema weights at step 400 \(EMA updates: 0\); it has live"
    ):
        export_weights(artifact.path, tmp_path / "e", "official", role="ema")
    with pytest.raises(ArtifactError, match="the EMA was never updated"):
        checkpoint.load_weights(artifact.path, "ema", transformer())
    out = export_weights(artifact.path, tmp_path / "e", "released")
    assert list(released.read_package(out.path / "package").roles) == ["live"]


def test_an_average_without_a_count_is_taken_as_updated(tmp_path, assets):
    artifact = import_weights(
        package(tmp_path / "p", "stage2", ema_num_updates=None), tmp_path / "c", assets=assets
    )
    state = checkpoint.read_state(artifact)
    assert state.ema_updates == 1 and state.run["imported"]["ema_updates_recorded"] is False


def test_base_assets_are_named_exactly_when_the_weights_are_trained(tmp_path, assets):
    with pytest.raises(
        ConfigError, match="holds trained weights; name the base assets they belong to with --assets"
    ):
        import_weights(package(tmp_path / "p", "stage0p5"), tmp_path / "c")
    with pytest.raises(ConfigError, match="holds base weights, which need no --assets"):
        import_weights(shards(tmp_path / "s", transformer(0)), tmp_path / "c", assets=assets)


def test_the_critic_of_a_pair_is_kept(tmp_path, assets):
    from weights_cases import payload, seal

    folder = tmp_path / "pair"
    folder.mkdir()
    torch.save(payload("stage2"), folder / "model.pt")
    critic = {
        "checkpoint_format": released.STAGE2_FORMAT,
        "critic": official(transformer(3), "model."),
        "global_step": 400,
    }
    torch.save(critic, folder / "critic.pt")
    artifact = import_weights(seal(folder, 400), tmp_path / "c", assets=assets)
    assert equal(load_file(artifact.file("critic.safetensors")), transformer(3))


def test_a_flipped_bit_in_a_package_is_found_before_anything_is_written(tmp_path, assets):
    path = package(tmp_path / "p", "stage0p5") / "model.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="does not match its checksum"):
        import_weights(path.parent, tmp_path / "c", assets=assets)
    assert not (tmp_path / "c").exists()


def test_large_components_are_sharded_as_diffusers_does(tmp_path):
    state = transformer(0)
    weights = tensors.from_tensors(state, "memory")
    with Transaction(tmp_path / "a", "solarwm.assets.v1", {}) as transaction:
        tensors.write_component(transaction, "transformer", weights, shard_bytes=2**21)
        transaction.write_json(
            "transformer/config.json", {"_class_name": "WanTransformer3DModel", **TINY["transformer"]}
        )
    files = sorted((tmp_path / "a" / "transformer").glob("*.safetensors"))
    assert (
        len(files) > 5 and files[0].name == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
    )
    assert all(file.stat().st_size < 2**21 + 2**16 for file in files)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "a" / "transformer").state_dict()
    assert equal(loaded, state)
    again = tensors.from_safetensors(tmp_path / "a" / "transformer")
    assert equal({name: again.get(name) for name in again.infos}, state)


def test_writing_matches_the_safetensors_library_and_our_checkpoints(tmp_path):
    state = {"b": torch.arange(3, dtype=torch.uint8), "é": torch.tensor(2.5), "h": torch.randn(5).bfloat16(),
             "t": torch.arange(6.0).reshape(2, 3).T, "empty": torch.zeros(0, 4)}  # fmt: skip
    for name, write in (("a", lambda f: tensors.write_stream(f, tensors.from_tensors(state, "x"))),
                        ("b", lambda f: checkpoint.write_safetensors(f, state))):  # fmt: skip
        with open(tmp_path / name, "wb") as stream:
            write(stream)
    assert equal(load_file(tmp_path / "a"), state)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
