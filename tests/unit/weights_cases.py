"""Wan weights in every foreign form, made small and named by loops of their own, not by the maps under test."""

from __future__ import annotations

import copy
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.weights.inventory import transformer_shapes

TINY = load_architecture("wan22-tiny")
LAYERS = TINY["transformer"]["num_layers"]
RELEASED_CONFIG: dict[str, Any] = {
    "schema": "solarwm.run.v1",
    "model": {
        "family": "wan2.2-ti2v-5b",
        "name": "Wan2.2-TI2V-5B-Camera",
        "timestep_shift": 5.0,
        "causal": True,
        "camera_attention_mode": "fused_prope",
        "camera_translation_transform": "linear",
        "num_frame_per_block": 3,
        "max_prior_clean_chunks": 5,
        "local_attn_size": 18,
        "sink_size": 0,
    },
    "data": {"pixel_frames": 81, "height": 480, "width": 864, "max_rel_translation": 20.0},
    "train": {
        "stage": "stage2",
        "causal_mode": "self_gradient_forcing",
        "objective": "flow_matching",
        "denoising_step_list": [1000, 750, 500, 250],
        "context_timestep": 0,
    },
}


def released_config(stage: str) -> dict[str, Any]:
    """A released configuration of "stage0p5", "stage1_fm", "stage1" (AnyFlow) or "stage2"."""
    config = copy.deepcopy(RELEASED_CONFIG)
    if stage == "stage2":
        return config
    del config["train"]["denoising_step_list"], config["train"]["context_timestep"]
    mode, objective = {
        "stage0p5": ("bidirectional", "flow_matching"),
        "stage1_fm": ("teacher_forcing", "flow_matching"),
        "stage1": ("teacher_forcing", "anyflow_forward_map"),
    }[stage]
    config["model"]["causal"] = stage != "stage0p5"
    config["train"].update(stage=stage.removesuffix("_fm"), causal_mode=mode, objective=objective)
    if stage == "stage1":
        config["train"].update(objective_variant="v1_5", anyflow_gate=0.25, anyflow_deltatime_type="r")
    return config


def official_of(layers: int, delta: bool = False) -> dict[str, str]:
    """{official name: diffusers name} of a transformer, written out."""
    names = {"head.modulation": "scale_shift_table"}
    modules = {
        "patch_embedding": "patch_embedding",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "head.head": "proj_out",
    }
    if delta:
        modules["delta_embedding.0"] = "condition_embedder.delta_embedder.linear_1"
        modules["delta_embedding.2"] = "condition_embedder.delta_embedder.linear_2"
    for i in range(layers):
        names[f"blocks.{i}.modulation"] = f"blocks.{i}.scale_shift_table"
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2")):
            for letter, to in zip("qkvo", ("to_q", "to_k", "to_v", "to_out.0"), strict=True):
                modules[f"blocks.{i}.{ours}.{letter}"] = f"blocks.{i}.{theirs}.{to}"
            for norm in ("norm_q", "norm_k"):
                names[f"blocks.{i}.{ours}.{norm}.weight"] = f"blocks.{i}.{theirs}.{norm}.weight"
        modules[f"blocks.{i}.norm3"] = f"blocks.{i}.norm2"
        modules[f"blocks.{i}.ffn.0"] = f"blocks.{i}.ffn.net.0.proj"
        modules[f"blocks.{i}.ffn.2"] = f"blocks.{i}.ffn.net.2"
    for ours, theirs in modules.items():
        for leaf in ("weight", "bias"):
            names[f"{ours}.{leaf}"] = f"{theirs}.{leaf}"
    return names


@cache
def _transformer(seed: int, delta: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = transformer_shapes(TINY["transformer"], anyflow=delta)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def transformer(
    seed: int = 0, delta: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Tiny transformer weights under diffusers names, every tensor random and different."""
    return dict(_transformer(seed, delta, dtype))


def official(state: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """`state` under official names."""
    delta = any("delta_embedder" in name for name in state)
    return {prefix + ours: state[theirs] for ours, theirs in official_of(LAYERS, delta).items()}


def payload(stage: str, step: int = 400, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What a released `model.pt` of `stage` holds, without optimizer."""
    delta, prefix = stage == "stage1", "model." if stage == "stage2" else ""
    result = {
        "generator": official(transformer(1, delta, dtype), prefix),
        "generator_ema": official(transformer(2, delta), prefix),
        "ema_num_updates": 42 if stage == "stage2" else step,
        "global_step": step,
        "config": released_config(stage),
        "scheduler": {"last_epoch": step, "base_lrs": [5e-5]},
    }
    if stage == "stage2":
        result.update(
            checkpoint_format="solarwm.wan22-stage2-sgf.v1",
            student_step=79,
            rng_state_by_rank=[{"torch": torch.zeros(16, dtype=torch.uint8)}],
            role_receipts="roles:teacher=stage0p5",
        )
    return result


def seal(folder: Path, step: int, release: bool = False) -> Path:
    """Add checkpoint manifest and marker (and release manifest) to a folder of payload files, as the release does."""
    files = [{"path": f.name, "size": f.stat().st_size} for f in sorted(folder.glob("*.pt"))]
    manifest = {
        "schema": "solarwm.checkpoint.v2",
        "step": step,
        "contract": {},
        "files": files,
        "metadata": {},
    }
    data = json.dumps(manifest).encode()
    (folder / "checkpoint-manifest.json").write_bytes(data)
    marker = {"step": step, "manifest_digest": hashlib.blake2s(data).hexdigest()}
    (folder / "COMPLETE.json").write_text(json.dumps({"schema": "solarwm.checkpoint-complete.v2", **marker}))
    if release:
        load = {"default_weights": "ema", "entrypoint": ".", "format": "solarwm_wan_stage2_transaction_v1"}
        values = {
            "schema": "solarwm.public-weight-manifest.v1",
            "identity": {"model": {"weight_role": "live+ema"}},
            "load": load,
        }
        (folder / "release-manifest.json").write_text(json.dumps(values))
    return folder


def package(folder: Path, stage: str, release: bool = False, **fields: Any) -> Path:
    """Write a released package of `stage`; `fields` replace entries of the payload, None removes one."""
    folder.mkdir(parents=True)
    content = {k: v for k, v in {**payload(stage), **fields}.items() if v is not None}
    torch.save(content, folder / "model.pt")
    return seal(folder, content.get("global_step", 0), release)


def shards(folder: Path, state: dict[str, torch.Tensor], count: int = 2, index: bool = True) -> Path:
    """Write `state` as `count` safetensors shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(state), {}
    for i in range(count):
        file = f"diffusion_pytorch_model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {name: state[name].contiguous() for name in names[i::count]}
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    if index:
        path = folder / "diffusion_pytorch_model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def official_vae_names(nested: bool) -> dict[str, str]:
    """{official name: AutoencoderKLWan name} of the Wan 2.2 (nested levels) or 2.1 (flat) VAE, written out."""
    names: dict[str, str] = {}

    def add(official: str, diffusers: str, leaves: str = "weight bias") -> None:
        for leaf in leaves.split():
            names[f"{official}.{leaf}"] = f"{diffusers}.{leaf}"

    def residual(official: str, diffusers: str, shortcut: bool) -> None:
        for index, name in ((0, "norm1"), (3, "norm2")):
            add(f"{official}.residual.{index}", f"{diffusers}.{name}", "gamma")
        for index, name in ((2, "conv1"), (6, "conv2")):
            add(f"{official}.residual.{index}", f"{diffusers}.{name}")
        if shortcut:
            add(f"{official}.shortcut", f"{diffusers}.conv_shortcut")

    add("conv1", "quant_conv")
    add("conv2", "post_quant_conv")
    for side in ("encoder", "decoder"):
        add(f"{side}.conv1", f"{side}.conv_in")
        residual(f"{side}.middle.0", f"{side}.mid_block.resnets.0", False)
        add(f"{side}.middle.1.norm", f"{side}.mid_block.attentions.0.norm", "gamma")
        add(f"{side}.middle.1.to_qkv", f"{side}.mid_block.attentions.0.to_qkv")
        add(f"{side}.middle.1.proj", f"{side}.mid_block.attentions.0.proj")
        residual(f"{side}.middle.2", f"{side}.mid_block.resnets.1", False)
        add(f"{side}.head.0", f"{side}.norm_out", "gamma")
        add(f"{side}.head.2", f"{side}.conv_out")

    def resample(official: str, diffusers: str, temporal: bool) -> None:
        add(f"{official}.resample.1", f"{diffusers}.resample.1")
        if temporal:
            add(f"{official}.time_conv", f"{diffusers}.time_conv")

    flat = 0
    for level in range(
        4
    ):  # widths 1 2 4 4: a shortcut where the width changes; encoder resamples (2d, 3d, 3d)
        for block in range(2):
            there = (
                f"encoder.down_blocks.{level}.resnets.{block}" if nested else f"encoder.down_blocks.{flat}"
            )
            here = (
                f"encoder.downsamples.{level}.downsamples.{block}"
                if nested
                else f"encoder.downsamples.{flat}"
            )
            residual(here, there, shortcut=level in (1, 2) and block == 0)
            flat += 1
        if level < 3:
            there = f"encoder.down_blocks.{level}.downsampler" if nested else f"encoder.down_blocks.{flat}"
            here = f"encoder.downsamples.{level}.downsamples.2" if nested else f"encoder.downsamples.{flat}"
            resample(here, there, temporal=level > 0)
            flat += 1
    flat = 0
    for level in range(4):  # widths 4 4 2 1; the flat decoder halves the width in its resamplers
        for block in range(3):
            there = f"decoder.up_blocks.{level}.resnets.{block}"
            here = f"decoder.upsamples.{level}.upsamples.{block}" if nested else f"decoder.upsamples.{flat}"
            residual(here, there, shortcut=block == 0 and level in ((2, 3) if nested else (1,)))
            flat += 1
        if level < 3:
            there = f"decoder.up_blocks.{level}." + ("upsampler" if nested else "upsamplers.0")
            here = f"decoder.upsamples.{level}.upsamples.3" if nested else f"decoder.upsamples.{flat}"
            resample(here, there, temporal=level < 2)
            flat += 1
    return names


def official_text_names(layers: int) -> dict[str, str]:
    """{official name: UMT5EncoderModel name}, written out."""
    names = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
    for i in range(layers):
        block, there = f"blocks.{i}", f"encoder.block.{i}.layer"
        names[f"{block}.norm1.weight"] = f"{there}.0.layer_norm.weight"
        names[f"{block}.norm2.weight"] = f"{there}.1.layer_norm.weight"
        for letter in "qkvo":
            names[f"{block}.attn.{letter}.weight"] = f"{there}.0.SelfAttention.{letter}.weight"
        bias = f"{there}.0.SelfAttention.relative_attention_bias.weight"
        names[f"{block}.pos_embedding.embedding.weight"] = bias
        for here, name in (("gate.0", "wi_0"), ("fc1", "wi_1"), ("fc2", "wo")):
            names[f"{block}.ffn.{here}.weight"] = f"{there}.1.DenseReluDense.{name}.weight"
    return names


def base_folder(root: Path, layout: str) -> Path:
    """Write tiny base weights as an official Wan repository or a SolarWM base folder; returns `root`."""
    from diffusers import AutoencoderKLWan
    from transformers import UMT5EncoderModel

    from solarwm_lib.backbones.tiny import build_text_encoder, build_tokenizer

    official_layout = layout == "official"
    shards(root if official_layout else root / "transformer", official(transformer(0)))
    torch.manual_seed(0)
    codec = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=12,
        z_dim=48,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
    ).state_dict()
    vae = {ours: codec[theirs] for ours, theirs in official_vae_names(nested=True).items()}
    tokenizer = build_tokenizer(TINY["text"]["vocab_size"])
    encoder: UMT5EncoderModel = build_text_encoder(TINY, len(tokenizer), seed=0)
    states = encoder.state_dict()
    text = {ours: states[theirs] for ours, theirs in official_text_names(TINY["text"]["num_layers"]).items()}
    folders = ("", "", "google/umt5-xxl") if official_layout else ("vae", "text_encoder", "tokenizer")
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    torch.save(vae, root / folders[0] / "Wan2.2_VAE.pth")
    torch.save(text, root / folders[1] / "models_t5_umt5-xxl-enc-bf16.pth")
    tokenizer.save_pretrained(root / folders[2])
    if not official_layout:
        (root / "conditioning").mkdir()
        torch.save(torch.zeros(16, 64), root / "conditioning" / "wan_negemb_cn.pth")
    return root
