"""Video codecs behind one interface: pixels `[B,3,F,H,W]` in [-1,1] to normalised latents `[B,T,C,h,w]` and back.

The class is named by `vae/config.json`: diffusers' AutoencoderKLWan for the real models, `LinearCausalCodec` for the tiny
world. Both obey T = 1 + (F-1)/4: the first latent comes from frame 0 alone, each later one from four frames.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import AutoencoderKLWan, ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor, nn

from ..runtime.errors import ArtifactError, NonFiniteError

DECODE_TILE = 60  # latents decoded together at most (spec wan22 6.4)


class LinearCausalCodec(ModelMixin, ConfigMixin):
    """A linear codec with the interface and stride law of AutoencoderKLWan, fitted in closed form (`backbones.tiny`).

    Every spatial block of `stride x stride` pixels (of one frame, or of a group of frames) is a vector; a latent is its
    coordinates in an orthonormal basis after the mean is removed. Raw latents are normalised by `latents_mean` and
    `latents_std` from the config, as for the real VAE.
    """

    @register_to_config
    def __init__(
        self,
        z_dim: int = 48,
        scale_factor_temporal: int = 4,
        scale_factor_spatial: int = 16,
        latents_mean: list[float] | None = None,
        latents_std: list[float] | None = None,
    ) -> None:
        super().__init__()
        block = 3 * scale_factor_spatial**2
        self.first_mean = nn.Parameter(torch.zeros(block), requires_grad=False)
        self.first_basis = nn.Parameter(torch.zeros(block, z_dim), requires_grad=False)
        self.group_mean = nn.Parameter(torch.zeros(scale_factor_temporal * block), requires_grad=False)
        self.group_basis = nn.Parameter(
            torch.zeros(scale_factor_temporal * block, z_dim), requires_grad=False
        )

    @property
    def group_scale(self) -> float:
        """Divides group latents: a static block then has nearly the same latent in the first frame and in a group."""
        return self.config.scale_factor_temporal**0.5

    def encode(self, x: Tensor, return_dict: bool = True) -> SimpleNamespace | tuple[SimpleNamespace]:
        """Encode `x` `[B,3,F,H,W]`; `.latent_dist.mode()` is `[B,z_dim,T,h,w]` (the codec is deterministic)."""
        stride = self.config.scale_factor_spatial
        first = (to_blocks(x[:, :, :1], 1, stride) - self.first_mean) @ self.first_basis
        latents = torch.cat([first.movedim(-1, 1), self.encode_groups(x[:, :, 1:])], dim=2)
        posterior = SimpleNamespace(mode=lambda: latents, sample=lambda generator=None: latents, mean=latents)
        return SimpleNamespace(latent_dist=posterior) if return_dict else (posterior,)

    def encode_groups(self, x: Tensor) -> Tensor:
        """Encode the frames that follow a clip's first, `[B,3,4n,H,W]`, to raw latents `[B,z_dim,n,h,w]`."""
        groups = to_blocks(x, self.config.scale_factor_temporal, self.config.scale_factor_spatial)
        coordinates = (groups - self.group_mean) @ self.group_basis / self.group_scale
        return coordinates.movedim(-1, 1)

    def decode(self, z: Tensor, return_dict: bool = True) -> SimpleNamespace | tuple[Tensor]:
        """Decode raw latents `[B,z_dim,T,h,w]` to `.sample` `[B,3,F,H,W]`, clamped to [-1,1]."""
        stride = self.config.scale_factor_spatial
        first = z[:, :, :1].movedim(1, -1) @ self.first_basis.T + self.first_mean
        video = torch.cat([from_blocks(first, 1, stride), self.decode_groups(z[:, :, 1:])], dim=2)
        video = video.clamp(-1, 1)
        return SimpleNamespace(sample=video) if return_dict else (video,)

    def decode_groups(self, z: Tensor) -> Tensor:
        """Decode raw latents that follow a clip's first, `[B,z_dim,n,h,w]`, to `[B,3,4n,H,W]`, not clamped."""
        coordinates = z.movedim(1, -1) * self.group_scale
        groups = coordinates @ self.group_basis.T + self.group_mean
        return from_blocks(groups, self.config.scale_factor_temporal, self.config.scale_factor_spatial)


def to_blocks(video: Tensor, temporal: int, stride: int) -> Tensor:
    """Cut `[B,3,F,H,W]` into vectors `[B, F/temporal, H/stride, W/stride, temporal*3*stride*stride]`."""
    batch, channels, frames, height, width = video.shape
    grid = video.reshape(
        batch, channels, frames // temporal, temporal, height // stride, stride, width // stride, stride
    )
    return grid.permute(0, 2, 4, 6, 3, 1, 5, 7).flatten(4)


def from_blocks(blocks: Tensor, temporal: int, stride: int) -> Tensor:
    """Undo `to_blocks`."""
    batch, groups, rows, columns, _ = blocks.shape
    grid = blocks.view(batch, groups, rows, columns, temporal, 3, stride, stride).permute(
        0, 5, 1, 4, 2, 6, 3, 7
    )
    return grid.reshape(batch, 3, groups * temporal, rows * stride, columns * stride)


class Codec:
    """A loaded codec: deterministic encoding (posterior mode), per-channel normalisation, checked decoding."""

    def __init__(self, vae: AutoencoderKLWan | LinearCausalCodec, identity: str) -> None:
        self.vae = vae.eval().requires_grad_(False)
        self.identity = identity
        self.temporal_stride: int = vae.config.scale_factor_temporal
        self.spatial_stride: int = vae.config.scale_factor_spatial

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        # Cast before the reciprocal, as released: in bfloat16 the two orders differ.
        mean = torch.tensor(self.vae.config.latents_mean).to(like).view(1, -1, 1, 1, 1)
        reciprocal = 1.0 / torch.tensor(self.vae.config.latents_std).to(like).view(1, -1, 1, 1, 1)
        return mean, reciprocal

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Return normalised latents `[B,T,C,h,w]` of `video` `[B,3,F,H,W]` in [-1,1]; F must be 1 + 4k, H and W multiples of the stride."""
        _, _, frames, height, width = video.shape
        if (frames - 1) % self.temporal_stride or height % self.spatial_stride or width % self.spatial_stride:
            raise ValueError(
                f"video of {frames} frames, {height}x{width}; expected 1 + {self.temporal_stride}k frames and "
                f"multiples of {self.spatial_stride} pixels"
            )
        latents = self.vae.encode(video.to(self.vae.device, self.vae.dtype)).latent_dist.mode()
        mean, reciprocal = self._moments(latents)
        return ((latents - mean) * reciprocal).transpose(1, 2)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return pixels `[B,3,F,H,W]` in [-1,1] of normalised `latents` `[B,T,C,h,w]`; raise NonFiniteError instead of bad pixels."""
        return _checked(self.vae.decode(self._raw(latents), return_dict=False)[0])

    @torch.no_grad()
    def decode_tiles(self, latents: Tensor, tile: int = DECODE_TILE) -> Iterator[Tensor]:
        """Yield the pixels of `decode` in stretches `[B,3,f,H,W]` of `tile` latents (spec wan22 6.4).

        The codec's temporal cache goes on from tile to tile, so the stretches join without a seam: together they equal one
        decode, while no more than one of them is in memory. Raises NonFiniteError as `decode`, at the stretch it is in.
        """
        if latents.shape[1] <= tile:
            yield self.decode(latents)
            return
        decode = self.decoder()
        for part in latents.split(tile, dim=1):
            yield decode(part)

    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Return a decoder of consecutive parts `[B,n,C,h,w]` of one clip's latents to `[B,3,f,H,W]`, as `decode` does the whole.

        Several clips may be decoded at once, each by a decoder of its own; raises NonFiniteError as `decode`.
        """
        decode = _continued(self.vae)

        @torch.no_grad()
        def part(latents: Tensor) -> Tensor:
            return _checked(decode(self._raw(latents)))

        return part

    def encoder(self) -> Callable[[Tensor], Tensor]:
        """Return an encoder of consecutive parts `[B,3,f,H,W]` of one clip, as `encode` does the whole: 1 + 4k frames, then 4k."""
        encode = _continued_encoding(self.vae)

        @torch.no_grad()
        def part(video: Tensor) -> Tensor:
            latents = encode(video.to(self.vae.device, self.vae.dtype))
            mean, reciprocal = self._moments(latents)
            return ((latents - mean) * reciprocal).transpose(1, 2)

        return part

    def _raw(self, latents: Tensor) -> Tensor:
        """Return the codec's own latents `[B,C,T,h,w]` of normalised ones `[B,T,C,h,w]`."""
        raw = latents.transpose(1, 2).to(self.vae.device, self.vae.dtype)
        mean, reciprocal = self._moments(raw)
        return raw / reciprocal + mean


def _checked(video: Tensor) -> Tensor:
    """Return pixels clamped to [-1,1]; NonFiniteError for pixels that are none."""
    video = video.clamp(-1, 1)
    if not torch.isfinite(video).all():
        bad = [i for i, clip in enumerate(video) if not torch.isfinite(clip).all()]
        raise NonFiniteError(
            f"decoded pixels are not finite in batch rows {bad}; the latents or the codec are damaged"
        )
    return video


def _continued(vae: AutoencoderKLWan | LinearCausalCodec) -> Callable[[Tensor], Tensor]:
    """Return a decoder of consecutive parts `[B,C,n,h,w]` of one clip's raw latents, the clip's first latent in the first.

    For AutoencoderKLWan this is the loop of its `_decode` with the cache kept between calls, beside the module: another
    clip may be decoded meanwhile. (its spatial tiling is off here, as in `load_codec`)
    """
    begun = False
    if isinstance(vae, LinearCausalCodec):

        def linear(part: Tensor) -> Tensor:
            nonlocal begun
            video = vae.decode_groups(part) if begun else vae.decode(part, return_dict=False)[0]
            begun = True
            return video

        return linear

    vae.clear_cache()
    cache = [None] * len(vae._feat_map)

    def wan(part: Tensor) -> Tensor:
        nonlocal begun
        frames = []
        for latent in vae.post_quant_conv(part).split(1, dim=2):
            frames.append(vae.decoder(latent, feat_cache=cache, feat_idx=[0], first_chunk=not begun))
            begun = True
        video = torch.cat(frames, dim=2)
        return video if vae.config.patch_size is None else unpatchify(video, vae.config.patch_size)

    return wan


def _continued_encoding(vae: AutoencoderKLWan | LinearCausalCodec) -> Callable[[Tensor], Tensor]:
    """Return an encoder of consecutive parts `[B,3,f,H,W]` of one clip to raw latents, as `_continued` decodes them."""
    begun = False
    if isinstance(vae, LinearCausalCodec):

        def linear(part: Tensor) -> Tensor:
            nonlocal begun
            latents = vae.encode_groups(part) if begun else vae.encode(part).latent_dist.mode()
            begun = True
            return latents

        return linear

    vae.clear_cache()
    cache = [None] * len(vae._enc_feat_map)

    def wan(part: Tensor) -> Tensor:
        nonlocal begun
        video = part if vae.config.patch_size is None else patchify(part, vae.config.patch_size)
        pieces = [] if begun else [video[:, :, :1]]
        pieces += [piece for piece in video[:, :, len(pieces) :].split(4, dim=2) if piece.shape[2]]
        begun = True
        encoded = [vae.encoder(piece, feat_cache=cache, feat_idx=[0]) for piece in pieces]
        return vae.quant_conv(torch.cat(encoded, dim=2)).chunk(2, dim=1)[0]

    return wan


CODECS = {"AutoencoderKLWan": AutoencoderKLWan, "LinearCausalCodec": LinearCausalCodec}
IDENTITY_SUFFIXES = (".json", ".safetensors", ".bin", ".model", ".txt")


def load_codec(base_path: str | Path, dtype: torch.dtype = torch.float32) -> Codec:
    """Load the codec of a diffusers pipeline folder; `identity` is the digest of its class, config and weights."""
    folder = Path(base_path) / "vae"
    try:
        name = json.loads((folder / "config.json").read_text())["_class_name"]
    except (OSError, KeyError, ValueError) as error:
        raise ArtifactError(
            f"no codec at {folder}: {error}; set model.base_path to a diffusers pipeline folder"
        ) from error
    if name not in CODECS:
        raise ArtifactError(f"{folder / 'config.json'} names codec {name!r}; known: {', '.join(CODECS)}")
    vae, info = CODECS[name].from_pretrained(folder, torch_dtype=dtype, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise ArtifactError(
            f"{folder}: missing {info['missing_keys'][:3]}, unexpected {info['unexpected_keys'][:3]} tensors"
        )
    return Codec(vae, folder_digest(folder))


def folder_digest(folder: str | Path) -> str:
    """Return the SHA-256 over names and contents of a component's files: configuration, weights, vocabulary.

    The content is read, whatever recorded digests say: it decides whether stored latents or prompts may be used again.
    """
    digest, folder = hashlib.sha256(), Path(folder)
    if not folder.is_dir():
        raise ArtifactError(
            f"no {folder.name} at {folder}; set model.base_path to a diffusers pipeline folder"
        )
    for file in sorted(folder.iterdir()):
        if file.suffix in IDENTITY_SUFFIXES:
            digest.update(file.name.encode() + b"\0")
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
