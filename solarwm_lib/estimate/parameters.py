"""Parameter counts of the networks, exact and without torch: the graph and `solarwm estimate` use the same numbers.

The closed forms below are those of diffusers' classes; `config/models/*.yaml` records what the full-size networks hold on the
meta device (`estimate.meta`), and a test compares all three. Of LTX-2.5 the video branch counts: the audio branch is never built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

LTX_MODULATION, LTX_PROMPT_MODULATION = 9, 2  # chunks of the AdaLN of a block and of its text (ltx25.md 1.2)
H3_MODALITIES = 3  # video, text and audio rows have modulations of their own (minimax_h3.md 1.3)


@dataclass(frozen=True)
class Network:
    """A transformer as the memory and FLOP models see it; sizes in channels, counts in parameters.

    `matrices` are the weights that multiply every token, per block: what FLOPs and lower-precision copies are counted from.
    `text_matrices` multiply every text token instead. `outside` is everything that is not in a block.
    """

    width: int
    inner: int
    heads: int
    ffn: int
    blocks: int
    per_block: int
    tensors_per_block: int
    matrices: int
    text_matrices: int
    outside: int
    outside_tensors: int
    token_outside: int  # of `outside`, the weights that multiply every token
    modulation: int  # chunks of `width` per token and block that the time embedding gives; 0: one table for all tokens
    text_width: int
    gated_ffn: bool = False
    cross_attention: bool = True

    @property
    def total(self) -> int:
        return self.outside + self.blocks * self.per_block

    @property
    def tensors(self) -> int:
        return self.outside_tensors + self.blocks * self.tensors_per_block

    def adapter(self, rank: int, extra_blocks: int = 0) -> int:
        """Parameters of LoRA of `rank` on q, k, v, out of every attention and both layers of every FFN."""
        attentions = 2 if self.cross_attention else 1
        attention = attentions * 4 * rank * (self.width + self.inner)
        ffn = rank * (self.width + (2 if self.gated_ffn else 1) * self.ffn) + rank * (self.ffn + self.width)
        return (self.blocks + extra_blocks) * (attention + ffn)


def network_of(architecture: Mapping[str, Any], anyflow: bool = False) -> Network:
    """The network of a `config/models/*.yaml` mapping; `anyflow` adds the second time embedding (Wan)."""
    family = str(architecture["family"])
    arguments = architecture["transformer"]
    if family == "ltx25_video":
        return _ltx(arguments)
    if family == "minimax_h3":
        return _h3(arguments)
    return _wan(arguments, anyflow)


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _wan(a: Mapping[str, Any], anyflow: bool) -> Network:
    heads, d = int(a["num_attention_heads"]), int(a["num_attention_heads"]) * int(a["attention_head_dim"])
    ffn, freq, text = int(a["ffn_dim"]), int(a["freq_dim"]), int(a["text_dim"])
    pixels = prod(a["patch_size"])
    attention = 4 * _linear(d, d) + 2 * d
    norm = 2 * d if a.get("cross_attn_norm", True) else 0
    block = 2 * attention + norm + _linear(d, ffn) + _linear(ffn, d) + 6 * d
    time = _linear(freq, d) + _linear(d, d)
    patch, head = _linear(int(a["in_channels"]) * pixels, d), _linear(d, int(a["out_channels"]) * pixels)
    outside = patch + time + _linear(d, 6 * d) + _linear(text, d) + _linear(d, d) + head + 2 * d
    return Network(
        width=d,
        inner=d,
        heads=heads,
        ffn=ffn,
        blocks=int(a["num_layers"]),
        per_block=block,
        tensors_per_block=25 + (2 if norm else 0),
        matrices=4 * d * d + 2 * d * d + 2 * d * ffn,
        text_matrices=2 * d * d,
        outside=outside + (time if anyflow else 0),
        outside_tensors=15 + (4 if anyflow else 0),
        token_outside=patch + (2 if anyflow else 1) * time + 6 * d * d + head,
        modulation=6,
        text_width=text,
    )


def _ltx(a: Mapping[str, Any]) -> Network:
    heads, head = int(a["num_attention_heads"]), int(a["attention_head_dim"])
    d, cross = heads * head, int(a["cross_attention_dim"])
    ffn, bias = 4 * d, bool(a.get("ff_bias", True))
    gate = _linear(d, heads) if a.get("gated_attn") else 0
    own = 4 * _linear(d, d) + 2 * d + gate
    text = 2 * _linear(d, d) + 2 * _linear(cross, d) + 2 * d + gate
    tables = (LTX_MODULATION + LTX_PROMPT_MODULATION) * d
    block = own + text + _linear(d, ffn, bias) + _linear(ffn, d, bias) + tables
    embedder = _linear(256, d) + _linear(d, d)
    ada, prompt = embedder + _linear(d, LTX_MODULATION * d), embedder + _linear(d, LTX_PROMPT_MODULATION * d)
    patch, out = _linear(int(a["in_channels"]), d), _linear(d, int(a["out_channels"]))
    keyframe = d if a.get("use_keyframes_abs_pos_embedding") else 0
    return Network(
        width=d,
        inner=d,
        heads=heads,
        ffn=ffn,
        blocks=int(a["num_layers"]),
        per_block=block,
        tensors_per_block=2 * (10 + (2 if gate else 0)) + (4 if bias else 2) + 2,
        matrices=6 * d * d + 2 * d * ffn,
        text_matrices=2 * cross * d,
        outside=patch + ada + prompt + 2 * d + keyframe + out,
        outside_tensors=2 + 6 + 6 + 1 + (1 if keyframe else 0) + 2,
        token_outside=patch + ada + out,
        modulation=LTX_MODULATION,
        text_width=cross,
    )


def _h3(a: Mapping[str, Any]) -> Network:
    d, heads, head = int(a["hidden_size"]), int(a["num_attention_heads"]), int(a["attention_head_dim"])
    inner, ffn, time = heads * head, int(a["ffn_dim"]), int(a["time_embed_dim"])
    pixels = prod(a["patch_size"])
    video, audio = int(a["in_channels"]) * pixels, int(a["audio_in_channels"])
    plain = 4 * d * inner + 3 * d * ffn + 2 * d + 2 * head
    ada = _linear(time, 6 * H3_MODALITIES * d)
    ends = _linear(video, d) + _linear(audio, d) + _linear(d, video) + _linear(d, audio)
    embedder = _linear(int(a["freq_dim"]), int(a["time_embed_hidden_dim"]))
    embedder += _linear(int(a["time_embed_hidden_dim"]), time)
    refiner = int(a["num_refiner_layers"]) * plain + d
    return Network(
        width=d,
        inner=inner,
        heads=heads,
        ffn=ffn,
        blocks=int(a["num_layers"]),
        per_block=plain + ada,
        tensors_per_block=12,
        matrices=4 * d * inner + 3 * d * ffn,
        text_matrices=0,
        outside=ends + embedder + _linear(int(a["text_dim"]), d) + refiner + d + _linear(time, 2 * d),
        outside_tensors=8 + 4 + 2 + 10 * int(a["num_refiner_layers"]) + 1 + 3,
        token_outside=ends,
        modulation=0,
        text_width=int(a["text_dim"]),
        gated_ffn=True,
        cross_attention=False,
    )


def text_encoder_parameters(architecture: Mapping[str, Any]) -> int | None:
    """Parameters of the text encoder: recorded, or those of the small UMT5 encoder an architecture describes; None: unknown."""
    recorded = architecture.get("parameters", {}).get("text_encoder")
    text = architecture["text"]
    if recorded is not None or "d_ff" not in text:
        return None if recorded is None else int(recorded)
    return umt5_parameters(
        int(text["vocab_size"]), int(architecture["transformer"]["text_dim"]), int(text["d_kv"]), int(text["d_ff"]),
        int(text["num_layers"]), int(text["num_heads"]),
    )  # fmt: skip


def umt5_parameters(vocabulary: int, width: int, d_kv: int, d_ff: int, layers: int, heads: int) -> int:
    """Parameters of a UMT5 encoder; every layer has 32 relative position buckets per head."""
    layer = 4 * width * heads * d_kv + 32 * heads + 3 * width * d_ff + 2 * width
    return vocabulary * width + layers * layer + width


def codec_parameters(architecture: Mapping[str, Any]) -> int | None:
    """Parameters of the codec: recorded, or those of the tiny linear codec; None: unknown."""
    recorded = architecture.get("parameters", {}).get("codec")
    if recorded is not None or "scheduler" not in architecture:
        return None if recorded is None else int(recorded)
    block = 3 * int(architecture["spatial_stride"]) ** 2
    groups = 1 + int(architecture["temporal_stride"])
    return block * groups * (1 + int(architecture["latent_channels"]))
