"""What an objective, a trainer and a sampler may know about a backbone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    """Strides between pixels, latents and tokens; frame laws and sizes of a clip are `config.geometry`'s business."""

    latent_channels: int
    temporal_stride: int
    spatial_stride: int
    patch_size: tuple[int, int, int]

    def tokens_per_frame(self, latent_height: int, latent_width: int) -> int:
        """Return S, the tokens of one latent frame."""
        return (latent_height // self.patch_size[1]) * (latent_width // self.patch_size[2])


class Backbone(Protocol):
    """A velocity field over latents `[B,T,C,h,w]` under text, per-frame timesteps and cameras."""

    geometry: Geometry
    transformer: nn.Module

    def velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None,
        intrinsics: Tensor | None,
    ) -> Tensor:
        """Return the predicted flow (noise - clean) `[B,T,C,h,w]` at raw timesteps `[B,T]` in [0, 1000]."""
        ...

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that train, by their names in the transformer's state dict."""
        ...
