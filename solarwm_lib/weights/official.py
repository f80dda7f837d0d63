"""Base weights on disk in three layouts: diffusers pipeline folder, SolarWM base folder, official Wan repository.

`find_base` says where each part lies; `transformer`, `vae` and `text_encoder` return each part under the names of the
class that loads it (WanTransformer3DModel, AutoencoderKLWan, UMT5EncoderModel) after an exact inventory check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.runtime.errors import ArtifactError, ConfigError
from solarwm_lib.weights import inventory, keys

if TYPE_CHECKING:
    from solarwm_lib.weights.tensors import Weights

TEXT_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
VAE_FILES = ("Wan2.2_VAE.pth", "Wan2.1_VAE.pth")
SIDECAR = "solarwm-weights.json"
# Folder of A14B's low-noise expert -> that of the high-noise one, which alone is used over the whole range (spec wan22 1.5).
LOW_NOISE = {"transformer_2": "transformer", "low_noise_model": "high_noise_model"}
DIFFUSERS, BASE, OFFICIAL, BARE = (
    "diffusers pipeline",
    "SolarWM base",
    "official Wan repository",
    "transformer only",
)

_MEAN_5B = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
]  # fmt: skip
_STD_5B = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
]  # fmt: skip
# Latent statistics by channels, spec wan22 1.2: the defaults of AutoencoderKLWan are those of the Wan 2.1 VAE.
_STATISTICS: dict[int, dict[str, Any]] = {48: {"latents_mean": _MEAN_5B, "latents_std": _STD_5B}, 16: {}}


@dataclass(frozen=True)
class Base:
    """Where the parts of base weights lie; a part that is not there is None."""

    layout: str
    root: Path
    transformer: Path
    vae: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    scheduler: Path | None = None
    conditioning: Path | None = None

    def missing(self) -> list[str]:
        """Parts that a complete pipeline needs and this one lacks (a lone transformer lacks nothing)."""
        needed = () if self.layout == BARE else ("vae", "text_encoder", "tokenizer")
        return [name for name in needed if getattr(self, name) is None]

    def left_out(self) -> Path | None:
        """The folder of the low-noise expert beside the transformer, which is not used; None where there is none."""
        beside = [low for low, high in LOW_NOISE.items() if high == self.transformer.name]
        return next((f for low in beside if (f := self.transformer.with_name(low)).is_dir()), None)


def find_base(path: Path | str) -> Base:
    """Return the parts under `path`: a folder in one of the three layouts, or shards, an index or a file of a transformer.

    Of an A14B repository the high-noise expert is taken: it is the only one SolarWM uses (spec wan22 1.5). The low-noise one
    named by itself is refused: its tensors have the same names and shapes.
    """
    path = Path(path)
    if not path.exists():
        raise ArtifactError(f"{path}: does not exist")
    folder = path if path.is_dir() else path.parent
    if folder.name in LOW_NOISE:
        raise ConfigError(
            f"{path}: the low-noise expert of A14B; SolarWM runs the high-noise expert over the whole range, name "
            f"{folder.with_name(LOW_NOISE[folder.name])}"
        )
    if path.is_dir():
        transformer = path / "transformer"
        if (path / "model_index.json").is_file():
            return Base(
                DIFFUSERS, path, transformer, *_folders(path, "vae", "text_encoder", "tokenizer", "scheduler")
            )
        if transformer.is_dir() and ((path / "vae").is_dir() or (path / "text_encoder").is_dir()):
            vae = _first(path / "vae", VAE_FILES)
            tokenizer, conditioning = _folders(path, "tokenizer", "conditioning")
            text = _first(path / "text_encoder", (TEXT_FILE,))
            return Base(BASE, path, transformer, vae, text, tokenizer, conditioning=conditioning)
        if vae := _first(path, VAE_FILES):
            expert = path / "high_noise_model"
            tokenizer = path / "google" / "umt5-xxl"
            return Base(
                OFFICIAL,
                path,
                expert if expert.is_dir() else path,
                vae,
                _first(path, (TEXT_FILE,)),
                tokenizer if tokenizer.is_dir() else None,
            )
        if transformer.is_dir():
            return Base(BARE, path, transformer)
    return Base(BARE, path, path)


def _folders(root: Path, *names: str) -> list[Path | None]:
    return [root / name if (root / name).is_dir() else None for name in names]


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def transformer(path: Path, architecture: str | None = None) -> tuple[Weights, str]:
    """Return (tensors under diffusers names, name of the architecture file they are exactly).

    ArtifactError names what is missing, unexpected, of another shape or not a float type; also if `config.json` beside
    the shards says something else than their shapes.
    """
    from solarwm_lib.weights.tensors import from_safetensors

    weights = from_safetensors(path)
    weights = weights.renamed(keys.transformer_names(weights.infos, "diffusers", weights.where))
    if inventory.has_delta(weights.infos):
        raise ArtifactError(
            f"{path}: holds the second time embedding of AnyFlow: trained Stage1 weights, not base weights; import the "
            "package or export they came in"
        )
    if architecture is None:
        architecture, difference = inventory.match_architecture(weights.infos)
        if architecture is None:
            raise ArtifactError(f"{path}: no architecture of config/models has these tensors; {difference}")
    arguments = load_architecture(architecture)["transformer"]
    inventory.require(
        weights.infos,
        inventory.transformer_shapes(arguments),
        str(path),
        f"the architecture ({architecture})",
    )
    check_config(path if path.is_dir() else path.parent, arguments)
    return weights, architecture


_OFFICIAL_ARGUMENTS = {
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "num_heads": "num_attention_heads",
    "num_layers": "num_layers",
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "eps": "eps",
}


def official_config(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json` of an official Wan transformer folder."""
    arguments = architecture["transformer"]
    return {
        "_class_name": "WanModel",
        "model_type": "ti2v" if arguments["in_channels"] == arguments["out_channels"] else "i2v",
        "dim": arguments["num_attention_heads"] * arguments["attention_head_dim"],
        "text_len": architecture["text"]["text_length"],
        **{name: arguments[key] for name, key in _OFFICIAL_ARGUMENTS.items()},
    }


def check_config(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Compare `config.json` of a transformer folder, if there is one, with an architecture: heads have no shape."""
    path = folder / "config.json"
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path}: damaged ({error})") from None
    official = found.get("_class_name") == "WanModel"
    for theirs, key in _OFFICIAL_ARGUMENTS.items():
        name = theirs if official else key
        if name in found and key in arguments and found[name] != arguments[key]:
            raise ArtifactError(
                f"{path}: {name} is {found[name]}, the architecture of its tensors has {arguments[key]}"
            )


def vae(path: Path, latent_channels: int) -> tuple[Weights, dict[str, Any]]:
    """Return (tensors under AutoencoderKLWan names, its `config.json`) of a Wan VAE `.pth` file.

    Widths follow from the shapes, the rest from spec wan22 1.2. ArtifactError if its latents are not those of the
    transformer: 48 channels belong to TI2V-5B, 16 to A14B.
    """
    import torch
    from diffusers import AutoencoderKLWan

    from solarwm_lib.weights.tensors import from_archive, info_of

    weights = from_archive(path)
    weights = weights.renamed(keys.vae_names(weights.infos, str(path)))
    arguments = _vae_arguments(weights.infos, path)
    if arguments["z_dim"] != latent_channels:
        raise ArtifactError(
            f"{path}: a VAE of {arguments['z_dim']} latent channels, the transformer takes {latent_channels}; expected "
            f"{VAE_FILES[0]} for TI2V-5B, {VAE_FILES[1]} for A14B"
        )
    with torch.device("meta"):
        model = AutoencoderKLWan(**arguments)
    expected = {name: info_of(tensor).shape for name, tensor in model.state_dict().items()}
    inventory.require(weights.infos, expected, str(path), "which VAE file belongs to the model")
    return weights, json.loads(model.to_json_string())


def _vae_arguments(infos: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        base_dim, in_channels = infos["encoder.conv_in.weight"].shape[:2]
        out_channels, decoder_base_dim = infos["decoder.conv_out.weight"].shape[:2]
        z_dim = infos["post_quant_conv.weight"].shape[0]
    except (KeyError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: not a Wan VAE (first or last layer incomplete: {error})") from None
    if z_dim not in _STATISTICS:
        raise ArtifactError(f"{path}: a VAE of {z_dim} latent channels; statistics are known for 48 and 16")
    residual = any(name.startswith("encoder.down_blocks.0.resnets.") for name in infos)
    return {
        "base_dim": base_dim,
        "decoder_base_dim": decoder_base_dim,
        "z_dim": z_dim,
        "is_residual": residual,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "patch_size": 2 if residual else None,
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 16 if residual else 8,
        **_STATISTICS[z_dim],
    }


def text_encoder(path: Path, text_dim: int) -> tuple[Weights, dict[str, Any]]:
    """Return (tensors under UMT5EncoderModel names, its `config.json`) of Wan's text encoder `.pth` file.

    The configuration follows from the shapes (spec wan22 1.3); `text_dim` is what the transformer takes.
    """
    import torch
    from transformers import UMT5Config, UMT5EncoderModel

    from solarwm_lib.weights.tensors import from_archive, info_of

    weights = from_archive(path)
    weights = weights.renamed(keys.text_names(weights.infos, str(path)))
    config = UMT5Config(
        **_umt5_arguments(weights.infos, path), is_encoder_decoder=False, use_cache=False, pad_token_id=0, eos_token_id=1,
        architectures=["UMT5EncoderModel"],
    )  # fmt: skip
    if config.d_model != text_dim:
        raise ConfigError(
            f"{path}: gives {config.d_model} channels, the transformer takes {text_dim}; other text encoder"
        )
    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    expected = {name: info_of(tensor).shape for name, tensor in model.state_dict().items()}
    expected.pop("encoder.embed_tokens.weight", None)  # the same tensor as shared.weight
    inventory.require(weights.infos, expected, str(path), "which file holds the text encoder")
    return weights, json.loads(config.to_json_string(use_diff=False))


def _umt5_arguments(infos: Mapping[str, Any], path: Path) -> dict[str, int]:
    block = "encoder.block.0.layer"
    try:
        vocabulary, width = infos["shared.weight"].shape
        buckets, heads = infos[f"{block}.0.SelfAttention.relative_attention_bias.weight"].shape
        attention = infos[f"{block}.0.SelfAttention.q.weight"].shape[0]
        hidden = infos[f"{block}.1.DenseReluDense.wi_0.weight"].shape[0]
    except (KeyError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: not a UMT5 encoder (first block incomplete: {error})") from None
    layers = sum(name.endswith("SelfAttention.q.weight") for name in infos)
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": attention // heads,
        "d_ff": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }
