"""Encoders of clips, one per family: exactly what training does online, one clip and one caption at a time.

Float32 stores therefore equal the latents of online training bit for bit on the same machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from solarwm_lib.backbones.codec import Codec, folder_digest, load_codec
from solarwm_lib.backbones.image_condition import image_condition
from solarwm_lib.backbones.text import TextEncoder, clean_prompt, text_identity
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.geometry import IMAGE_CONDITIONED
from solarwm_lib.inference.generate import to_video
from solarwm_lib.preencode.contract import (
    ENCODER_VERSION,
    FIT,
    FORMATS,
    EncoderContract,
    wan_contract,
)
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved


class ClipEncoder(Protocol):
    """All that packing and reuse know of an encoder; a family joins by another implementation in `encoder_for`.

    The identities are digests of everything that decides the values of the two groups of tensors, so they are known
    before any weight is loaded.
    """

    @property
    def contract(self) -> EncoderContract: ...
    @property
    def latents_identity(self) -> str: ...
    @property
    def prompt_identity(self) -> str: ...
    @property
    def pixel_tensors(self) -> tuple[str, ...]:
        """Names of what `encode_pixels` returns; the contract's other stored tensors come from `encode_prompt`."""
        ...

    def clean(self, caption: str) -> str:
        """The text that is encoded; captions that clean alike have equal tensors."""
        ...

    def encode_pixels(self, frames: np.ndarray) -> dict[str, Tensor]:
        """Tensors of one clip, uint8 [F,H,W,3], on the CPU in the contract's types."""
        ...

    def encode_prompt(self, caption: str) -> dict[str, Tensor]:
        """Tensors of one caption as it is in the data, on the CPU in the contract's types."""
        ...


class WanEncoder:
    """Wan 2.2: VAE latents, UMT5 embeddings and, for A14B, the image condition. Computes in float32, stores `dtype`."""

    pixel_tensors: tuple[str, ...]

    def __init__(
        self,
        base_path: str | Path,
        family: str,
        architecture: Mapping[str, Any],
        *,
        pixel_frames: int,
        height: int,
        width: int,
        dtype: str,
        text_length: int,
        latent_schema: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self._base = Path(base_path)
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        self._text_length = text_length
        self._conditioned = family in IMAGE_CONDITIONED
        self.pixel_tensors = ("latents", "i2v_y") if self._conditioned else ("latents",)
        self.latents_identity = folder_digest(self._base / "vae")
        self.prompt_identity = text_identity(self._base)
        self.contract = wan_contract(
            family,
            architecture,
            pixel_frames=pixel_frames,
            height=height,
            width=width,
            dtype=dtype,
            text_length=text_length,
            extras={
                "latent_schema": latent_schema,
                "encoder_version": ENCODER_VERSION,
                "codec": self.latents_identity,
                "text_encoder": self.prompt_identity,
                "posterior": "mode",
                "fit": FIT,
            },
        )

    @cached_property
    def _codec(self) -> Codec:
        codec = load_codec(self._base)
        codec.vae.to(self._device)
        return codec

    @cached_property
    def _text(self) -> TextEncoder:
        text = TextEncoder.from_pretrained(self._base, self._text_length)
        text.encoder.to(self._device)
        return text

    def clean(self, caption: str) -> str:
        """Repaired, unescaped text with single spaces."""
        return clean_prompt(caption)

    def encode_pixels(self, frames: np.ndarray) -> dict[str, Tensor]:
        """Return `latents` [T,C,h,w] and, for A14B, `i2v_y` [T,4+C,h,w] of uint8 frames [F,H,W,3]."""
        video = to_video(frames[None]).to(self._device)
        tensors = {"latents": self._stored(self._codec.encode(video))}
        if self._conditioned:
            tensors["i2v_y"] = self._stored(image_condition(self._codec, video[:, :, :1], video.shape[2]))
        return tensors

    def encode_prompt(self, caption: str) -> dict[str, Tensor]:
        """Return `prompt_embeds` [L,D]."""
        return {"prompt_embeds": self._text.encode([caption])[0].float().cpu().to(self._dtype)}

    def _stored(self, batch: Tensor) -> Tensor:
        return batch[0].float().cpu().to(self._dtype)


def encoder_for(resolved: Resolved, device: torch.device | str | None = None) -> ClipEncoder:
    """Return the encoder of a resolved preencode configuration; only files are hashed, weights load when first used.

    LTX-2.5 and MiniMax-H3 enter here with their own `ClipEncoder`; ConfigError until they do.
    """
    config = resolved.config
    family, settings = config.model.family, config.preencode
    assert settings is not None  # `rules.check` refuses action preencode without the section
    if family not in FORMATS:
        raise ConfigError(
            f"model.family: found {family}, whose clips this version cannot preencode; known: {', '.join(FORMATS)}"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return WanEncoder(
        config.model.base_path,
        family,
        load_architecture(config.model.architecture),
        pixel_frames=config.data.pixel_frames,
        height=config.data.height,
        width=config.data.width,
        dtype=settings.dtype,
        text_length=config.model.text_length,
        latent_schema=str(settings.latent_schema),
        device=device,
    )
