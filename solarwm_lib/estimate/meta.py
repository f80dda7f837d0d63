"""Parameter counts from the networks themselves, on the meta device: no memory, a few seconds. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLASSES = {"ltx25_video": "LTX2VideoTransformer3DModel", "minimax_h3": "MiniMaxH3Transformer3DModel"}
# What only the audio branch of diffusers' LTX class has; this project never builds it.
AUDIO_MARKS = ("audio", "av_cross", "video_a2v", "video_to")


def build(architecture: Mapping[str, Any]) -> Any:
    """diffusers' class of an architecture mapping, on the meta device."""
    import diffusers
    import torch

    name = CLASSES.get(str(architecture["family"]), "WanTransformer3DModel")
    with torch.device("meta"):
        return getattr(diffusers, name)(**architecture["transformer"])


def counts(architecture: Mapping[str, Any], audio: bool = False) -> tuple[int, int]:
    """(parameters, tensors) of an architecture's transformer; of LTX-2.5 with its audio branch on demand."""
    left_out = AUDIO_MARKS if architecture["family"] == "ltx25_video" and not audio else ()
    kept = [
        parameter.numel()
        for name, parameter in build(architecture).named_parameters()
        if not any(mark in name for mark in left_out)
    ]
    return sum(kept), len(kept)
