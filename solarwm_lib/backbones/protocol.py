"""What an objective, a trainer and a sampler may know about a backbone.

Latents are `[B,T,C,h,w]`; timesteps and second times r are raw in [0, 1000], one per latent frame; w2c `[B,T,4,4]` is
relative to the clip's first frame, intrinsics `[B,3,3]` divided by the image size, both or neither; a velocity is
noise - clean. An image-conditioned backbone (I2V-A14B) always takes the image condition y `[B,T,4+C,h,w]`, the others never.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
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


class Rollout(Protocol):
    """A cached rollout as its caller sees it: how many latent frames are committed. The rest is the backbone's."""

    frames: int


class Backbone(Protocol):
    """A velocity field over latents `[B,T,C,h,w]` under text, per-frame timesteps and cameras."""

    geometry: Geometry
    transformer: nn.Module
    anyflow: bool  # has a second time: r may be given
    image_conditioned: bool  # takes an image condition, and no clean first latent

    def velocity(
        self,
        latents: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None,
        intrinsics: Tensor | None,
        r: Tensor | None = None,
        image_condition: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted flow `[B,T,C,h,w]` at raw timesteps `[B,T]`, every frame seeing all; r None means r = t."""
        ...

    def set_sequence_group(self, group: dist.ProcessGroup | None) -> None:
        """Share the tokens of every pass among the ranks of `group`, which all make the same passes; None runs alone.

        Every rank gets the whole output; the mean of the ranks' parameter gradients is that of one process. Raises ConfigError
        where the group's size does not divide the attention heads.
        """
        ...

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that train, by their names in the transformer's state dict."""
        ...


class CausalBackbone(Backbone, Protocol):
    """A backbone that also runs chunk by chunk: Stage1 and Stage2. `chunk`, `window` and `sink` are in latent frames."""

    def teacher_forced_velocity(
        self,
        clean: Tensor,
        noisy: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None,
        intrinsics: Tensor | None,
        *,
        chunk: int,
        max_prior_clean_chunks: int,
        sink: int = 0,
        r: Tensor | None = None,
        clean_timesteps: Tensor | None = None,
        clean_r: Tensor | None = None,
    ) -> Tensor:
        """Return the flow `[B,T,C,h,w]` of the noisy half of `[clean | noisy]`; clean times are 0 unless given."""
        ...

    def window_velocity(
        self,
        history: Tensor,
        noisy: Tensor,
        history_timesteps: Tensor,
        timesteps: Tensor,
        prompt_embeds: Tensor,
        w2c: Tensor | None,
        intrinsics: Tensor | None,
        *,
        chunk: int,
        window: int | None = None,
        sink: int = 0,
        r: Tensor | None = None,
        history_r: Tensor | None = None,
        rebase: bool = True,
    ) -> Tensor:
        """Return the flow of `noisy` `[B,Fn,C,h,w]` after clean `history` `[B,Fc,C,h,w]`, without a cache."""
        ...

    def rollout_state(
        self, prompt_embeds: Tensor, intrinsics: Tensor | None, *, chunk: int, window: int, sink: int = 0
    ) -> Rollout:
        """Return a fresh rollout of a batch; `window` includes the chunk being denoised and the sink."""
        ...

    def chunk_velocity(
        self,
        state: Any,
        noisy_chunk: Tensor,
        timesteps: Tensor,
        w2c_chunk: Tensor | None,
        *,
        r: Tensor | None = None,
        commit: bool = False,
    ) -> Tensor:
        """Return the flow `[B,chunk,C,h,w]` of the next chunk, without gradient; `commit` appends it to the cache."""
        ...
