"""The tiny world's base assets: a diffusers pipeline folder with a fitted codec and small random networks.

Same classes, file formats and code path as the real 5B folder, in seconds and without a download. The codec is fitted in
closed form on rendered rooms; transformer and text encoder start from keyed random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..artifacts import Transaction, reissue
from ..data.room import Room
from ..data.synthetic import camera_path
from ..runtime import keyed
from .codec import LinearCausalCodec, to_blocks
from .text import quiet_progress

SCHEMA = "solarwm.assets.v1"
CALIBRATION_ROOMS = 24
CALIBRATION_FRAMES = 33
CALIBRATION_SIZE = (64, 96)
FRAME_COMPONENTS = (
    192  # per-frame components kept before the temporal PCA; rooms hold over 99.9 % of their variance in them
)

CORPUS = (
    "a camera moves through a textured room with painted walls",
    "the camera turns left and right inside a room with large colored shapes on the walls",
    "an empty room with a red wall, a green wall, a blue wall, a yellow floor and a white ceiling",
    "a slow walk forward and backward, looking around the room, smooth motion, soft light",
    "a video of a street with people, cars, bikes and trees; a person talks on the phone; a rabbit in a meadow",
)


def calibration_clips(seed: int) -> Iterator[np.ndarray]:
    """Yield rendered walks uint8 `[F,H,W,3]` through keyed rooms, one each: what the codec is fitted on."""
    for room in range(CALIBRATION_ROOMS):
        walk = camera_path(CALIBRATION_FRAMES, seed, "codec-path", room)
        yield Room(keyed.key64(seed, "codec-room", room)).render(walk, *CALIBRATION_SIZE)


def fit_linear_codec(clips: Iterable[np.ndarray], architecture: Mapping[str, Any]) -> LinearCausalCodec:
    """Fit the codec on uint8 `clips` `[F,H,W,3]` with F = 1 + 4k: two PCAs (eigh in float64) and one global scale.

    Groups are reduced frame by frame before their own PCA, which keeps the eigenproblem at 768 instead of 3072 (stride 16). Within
    the group subspace the axes are turned (orthogonal Procrustes) towards those of the single frame repeated in time:
    reconstruction stays the optimum, and a static block gets the same latent from frame 0 as from a later group.
    """
    stride, temporal = architecture["spatial_stride"], architecture["temporal_stride"]
    channels = architecture["latent_channels"]
    videos = [torch.from_numpy(clip).permute(3, 0, 1, 2)[None].float() / 127.5 - 1 for clip in clips]
    frames = torch.cat([to_blocks(video, 1, stride).flatten(0, 3) for video in videos])
    groups = torch.cat([to_blocks(video[:, :, 1:], temporal, stride).flatten(0, 3) for video in videos])

    first_mean, axes = _principal_axes(frames, min(FRAME_COMPONENTS, frames.shape[1]))
    first_basis = axes[:, :channels]
    group_mean = first_mean.repeat(temporal)
    reduced = ((groups - group_mean).view(len(groups), temporal, -1) @ axes).flatten(1)
    residual_mean, reduced_axes = _principal_axes(reduced, channels)

    def lifted(vectors: torch.Tensor) -> torch.Tensor:
        return torch.einsum("pk,tkc->tpc", axes, vectors.view(temporal, axes.shape[1], -1)).flatten(0, 1)

    group_mean = group_mean + lifted(residual_mean[:, None])[:, 0]
    group_basis = lifted(reduced_axes)
    static = first_basis.repeat(temporal, 1) / temporal**0.5
    left, _, right = torch.linalg.svd((group_basis.T @ static).double())
    group_basis = group_basis @ (left @ right).float()

    first_power = ((frames - first_mean) @ first_basis).square().mean(dtype=torch.float64)
    group_power = ((groups - group_mean) @ group_basis).square().mean(dtype=torch.float64) / temporal
    groups_per_clip = (videos[0].shape[2] - 1) // temporal
    scale = ((first_power + groups_per_clip * group_power) / (1 + groups_per_clip)).sqrt().item()

    codec = LinearCausalCodec(
        z_dim=channels,
        scale_factor_temporal=temporal,
        scale_factor_spatial=stride,
        latents_mean=[0.0] * channels,
        latents_std=[round(scale, 6)] * channels,
    )
    for name, value in (
        ("first_mean", first_mean),
        ("first_basis", first_basis),
        ("group_mean", group_mean),
        ("group_basis", group_basis),
    ):
        getattr(codec, name).data.copy_(value)
    return codec


def _principal_axes(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 (mean `[D]`, axes `[D,count]` by falling variance) of `rows` `[N,D]`; each axis has its largest entry positive."""
    mean = rows.double().mean(dim=0)
    centred = rows - mean.float()
    _, vectors = torch.linalg.eigh((centred.T @ centred).double() / len(rows))
    axes = vectors.flip(1)[:, :count]
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    return mean.float(), (axes * largest.sign()).float()


def build_transformer(architecture: Mapping[str, Any], seed: int) -> nn.Module:
    """Return a WanTransformer3DModel with keyed random weights."""
    from diffusers import WanTransformer3DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed.key64(seed, "tiny-transformer") >> 1)
        transformer = WanTransformer3DModel(**architecture["transformer"])
    # As the official model starts: a zero head predicts no flow, whatever the blocks hold.
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def build_text_encoder(architecture: Mapping[str, Any], vocabulary: int, seed: int) -> nn.Module:
    """Return a small UMT5EncoderModel with keyed random weights; its width is the transformer's `text_dim`."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=architecture["transformer"]["text_dim"],
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
        **{key: architecture["text"][key] for key in ("d_kv", "d_ff", "num_layers", "num_heads")},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed.key64(seed, "tiny-text-encoder") >> 1)
        return UMT5EncoderModel(config)


def build_tokenizer(vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer: any text encodes without an unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def build_scheduler(architecture: Mapping[str, Any]) -> Any:
    """Return the UniPC scheduler of a Wan 2.2 pipeline folder (our sampler pins its own grid on top of it)."""
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=architecture["scheduler"]["flow_shift"],
        num_train_timesteps=1000,
    )


def model_index(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return model_index.json of a TI2V-5B-shaped or I2V-A14B-shaped pipeline; diffusers' own Wan pipelines load the folder too.

    Of I2V-A14B there is the high-noise expert alone, as `transformer`.
    """
    import diffusers

    image = architecture["transformer"]["in_channels"] != architecture["latent_channels"]
    return {
        "_class_name": "WanImageToVideoPipeline" if image else "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": None,
        "expand_timesteps": not image,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["solarwm_lib.backbones.codec", "LinearCausalCodec"],
        **({"image_encoder": [None, None], "image_processor": [None, None]} if image else {}),
    }


def build_tiny_assets(out_dir: Path, architecture: Mapping[str, Any], seed: int) -> None:
    """Publish the pipeline folder of a tiny `architecture` (config/models/wan22-tiny*.yaml) as artifact `solarwm.assets.v1`."""
    identity = {"architecture": dict(architecture), "seed": seed, "calibration_rooms": CALIBRATION_ROOMS}
    if reissue(Path(out_dir), SCHEMA, identity) is not None:
        return
    with Transaction(Path(out_dir), SCHEMA, identity) as transaction:
        tokenizer = build_tokenizer(architecture["text"]["vocab_size"])
        parts = {
            "transformer": build_transformer(architecture, seed),
            "vae": fit_linear_codec(calibration_clips(seed), architecture),
            "text_encoder": build_text_encoder(architecture, len(tokenizer), seed),
            "tokenizer": tokenizer,
            "scheduler": build_scheduler(architecture),
        }
        with quiet_progress():
            for name, part in parts.items():
                part.save_pretrained(transaction.staging / name)
        index = json.dumps(model_index(architecture), indent=2, sort_keys=True)
        transaction.write_text("model_index.json", index + "\n")
