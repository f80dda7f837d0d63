"""Names of the same tensors in official Wan files, diffusers, and transformers' UMT5 (spec wan22 1.6).

A map is exact: a key it does not know is an error, never passed on. Maps go new name -> name in the file, so a reader can
fetch tensors one at a time. The transformer's maps are bijections; official files, SolarWM checkpoints and `model.pt`
share the official names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Literal

from solarwm_lib.runtime.errors import ArtifactError

Style = Literal["official", "diffusers"]
PREFIX = "model."

_TOP = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "delta_embedding.0": "condition_embedder.delta_embedder.linear_1",
    "delta_embedding.2": "condition_embedder.delta_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
}
_BLOCK = {
    **{
        f"{official}.{name}": f"{diffusers}.{target}"
        for official, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for name, target in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm1": "norm1",
    # The order of the norms in the name differs: the affine one before cross attention is official norm3.
    "norm2": "norm3",
    "norm3": "norm2",
}
_MODULATION = {"official": "modulation", "diffusers": "scale_shift_table"}
_HEAD_MODULATION = {"official": "head.modulation", "diffusers": "scale_shift_table"}
_MODULES: dict[Style, tuple[dict[str, str], dict[str, str]]] = {
    "diffusers": (_TOP, _BLOCK),
    "official": ({v: k for k, v in _TOP.items()}, {v: k for k, v in _BLOCK.items()}),
}
_BLOCK_KEY = re.compile(r"blocks\.(0|[1-9]\d*)\.(.+)")
_LEAF = re.compile(r"(.+)\.(weight|bias)")

DELTA = tuple(
    f"condition_embedder.delta_embedder.linear_{i}.{leaf}" for i in (1, 2) for leaf in ("weight", "bias")
)


def translate(key: str, to: Style) -> str | None:
    """Return the name in style `to` of a transformer tensor named in the other style; None if there is none."""
    source: Style = "official" if to == "diffusers" else "diffusers"
    top, block = _MODULES[to]
    if key == _HEAD_MODULATION[source]:
        return _HEAD_MODULATION[to]
    if match := _BLOCK_KEY.fullmatch(key):
        index, rest = match.groups()
        if rest == _MODULATION[source]:
            return f"blocks.{index}.{_MODULATION[to]}"
        name = _module(rest, block)
        return name and f"blocks.{index}.{name}"
    return _module(key, top)


def _module(key: str, table: Mapping[str, str]) -> str | None:
    match = _LEAF.fullmatch(key)
    if match is None or match.group(1) not in table:
        return None
    return f"{table[match.group(1)]}.{match.group(2)}"


def strip_prefix(keys: Iterable[str], where: str) -> dict[str, str]:
    """Return {name without `model.`: key}; the prefix is on all keys or on none, a mixture is an ArtifactError."""
    keys = list(keys)
    prefixed = [key for key in keys if key.startswith(PREFIX)]
    if not prefixed:
        return {key: key for key in keys}
    if len(prefixed) != len(keys):
        bare = next(key for key in keys if not key.startswith(PREFIX))
        raise ArtifactError(
            f"{where}: {len(prefixed)} of {len(keys)} keys start with {PREFIX!r} (such as {prefixed[0]}) and the others do "
            f"not (such as {bare}); expected all or none, the file mixes two networks"
        )
    return {key.removeprefix(PREFIX): key for key in keys}


def style_of(keys: Iterable[str]) -> Style | None:
    """Return the style of transformer keys without prefix, None if it is not a Wan transformer."""
    keys = set(keys)
    if "head.modulation" in keys or any(".self_attn." in key for key in keys):
        return "official"
    if "scale_shift_table" in keys or any(".attn1." in key for key in keys):
        return "diffusers"
    return None


def transformer_names(keys: Iterable[str], to: Style, where: str) -> dict[str, str]:
    """Return {name in style `to`: key in the file} of a Wan transformer in either style, with or without prefix.

    ArtifactError for keys of neither style, of both, or that a Wan 2.2 transformer does not have.
    """
    bare = strip_prefix(keys, where)
    style = style_of(bare)
    if style is None:
        raise ArtifactError(
            f"{where}: no Wan transformer: found keys such as {', '.join(sorted(bare)[:3]) or 'none'}, expected "
            "'blocks.0.self_attn.q.weight' (official) or 'blocks.0.attn1.to_q.weight' (diffusers)"
        )
    other: Style = "official" if style == "diffusers" else "diffusers"
    there = {key: translate(key, other) for key in bare}
    if unknown := sorted(key for key, name in there.items() if name is None):
        raise ArtifactError(
            f"{where}: {len(unknown)} unexpected keys, first {unknown[0]}{_reason(unknown[0], style, there)}"
        )
    if to == style:
        return bare
    return {name: bare[key] for key, name in there.items() if name is not None}


def _reason(key: str, style: Style, known: Mapping[str, object]) -> str:
    other: Style = "official" if style == "diffusers" else "diffusers"
    if translate(key, style) is not None:
        return f": a name in {other} style among {style} ones; the file mixes two networks"
    if "cam_self_attn" in key:
        return ": a camera branch, which camera_attention_mode fused_prope does not have"
    if "lora_" in key:
        return ": an adapter, not a full transformer"
    if "_img" in key or "img_emb" in key or "add_k_proj" in key or "image_embedder" in key:
        return ": the CLIP image branch of Wan 2.1, which Wan 2.2 does not have"
    close = get_close_matches(key, [name for name, value in known.items() if value is not None], n=1)
    return f" (nearest {close[0]})" if close else ""


def vae_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Return {AutoencoderKLWan name: key} of a Wan 2.1 or 2.2 VAE in official or (as some files are) diffusers style.

    diffusers converts the flat levels of Wan 2.1; those of Wan 2.2 (a list of levels, each a list of blocks) are
    renamed here. What the map does not know keeps its name and is found by the inventory check.
    """
    keys = list(keys)
    if not any(key.startswith(("encoder.middle.", "decoder.middle.")) for key in keys):
        if any(key.startswith("encoder.mid_block.") for key in keys):
            return {key: key for key in keys}
        raise ArtifactError(
            f"{where}: no Wan VAE: found keys such as {', '.join(sorted(keys)[:3]) or 'none'}, expected "
            "'encoder.middle.0.residual.0.gamma' or 'encoder.mid_block.resnets.0.norm1.gamma'"
        )
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    nested = {key: name for key in keys if (name := _nested_level(key))}
    names = convert_wan_vae_to_diffusers({key: key for key in keys if key not in nested})
    names.update({name: key for key, name in nested.items()})
    if len(names) != len(keys):
        raise ArtifactError(
            f"{where}: {len(keys)} keys give {len(names)} names; the file holds tensors twice"
        )
    return names


_NESTED = re.compile(r"(encoder\.down|decoder\.up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)")
_RESIDUAL = {"residual.0.": "norm1.", "residual.2.": "conv1.", "residual.3.": "norm2.", "residual.6.": "conv2.",
             "shortcut.": "conv_shortcut."}  # fmt: skip


def _nested_level(key: str) -> str | None:
    match = _NESTED.fullmatch(key)
    if match is None:
        return None
    side, level, block, rest = match.groups()
    for official, diffusers in _RESIDUAL.items():
        if rest.startswith(official):
            return f"{side}_blocks.{level}.resnets.{block}.{diffusers}{rest.removeprefix(official)}"
    return f"{side}_blocks.{level}.{side.split('.')[1]}sampler.{rest}"


_TEXT_TOP = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
_TEXT_BLOCK = {
    "norm1.weight": "layer.0.layer_norm.weight",
    **{f"attn.{name}.weight": f"layer.0.SelfAttention.{name}.weight" for name in "qkvo"},
    "pos_embedding.embedding.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "norm2.weight": "layer.1.layer_norm.weight",
    "ffn.gate.0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.fc1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.fc2.weight": "layer.1.DenseReluDense.wo.weight",
}


def text_names(keys: Iterable[str], where: str) -> dict[str, str]:
    """Return {UMT5EncoderModel name: key} of Wan's text encoder file; ArtifactError for a key it should not hold."""
    names: dict[str, str] = {}
    for key in keys:
        match = _BLOCK_KEY.fullmatch(key)
        if key in _TEXT_TOP:
            names[_TEXT_TOP[key]] = key
        elif match and match.group(2) in _TEXT_BLOCK:
            names[f"encoder.block.{match.group(1)}.{_TEXT_BLOCK[match.group(2)]}"] = key
        else:
            raise ArtifactError(
                f"{where}: unexpected key {key}; expected Wan's UMT5 encoder ('blocks.0.attn.q.weight', ...)"
            )
    return names
