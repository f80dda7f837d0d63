"""The one generation path: a checkpoint's weights and prepared requests give latents; latents give pixels.

Validation and standalone inference call these same functions, so what one shows the other reproduces.
Tensor layout: B batch, T latent frames, C channels, h w latent size; F pixel frames, H W pixels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from solarwm_lib.inference.samplers import sample_unipc, unipc_grid
from solarwm_lib.runtime import keyed
from solarwm_lib.runtime.errors import ConfigError, NonFiniteError, Preempted

if TYPE_CHECKING:
    import torch

    from solarwm_lib.backbones.codec import Codec
    from solarwm_lib.backbones.protocol import Backbone
    from solarwm_lib.backbones.text import TextEncoder

SLOTS_PER_BATCH = 16
TOKENS_PER_BATCH = 16384


@dataclass(frozen=True)
class Sampling:
    """How a pass turns noise into latents: everything, beside weights and case, that the result depends on."""

    mode: str
    solver: str
    num_inference_steps: int
    timestep_shift: float
    latent_frames: int

    def grid(self) -> tuple[list[int], list[float]]:
        """Return (timesteps, sigmas) of the solver; ConfigError for a solver of a later stage."""
        if (self.mode, self.solver) != ("bidirectional", "unipc"):
            raise ConfigError(
                f"mode {self.mode!r} with solver {self.solver!r} is not a way to sample a stage0p5 model, expected "
                "'bidirectional' with 'unipc': change validation.passes"
            )
        return unipc_grid(self.num_inference_steps, self.timestep_shift)


@dataclass
class Models:
    """Loaded networks and where they run. `weights_id` names the checkpoint and the role its weights have."""

    backbone: Backbone
    codec: Codec
    text: TextEncoder
    weights_id: str
    device: torch.device

    def numerics(self) -> dict[str, str]:
        """Return device and number formats, for the record."""
        transformer = next(self.backbone.transformer.parameters()).dtype
        formats = {"transformer": transformer, "codec": self.codec.vae.dtype}
        return {"device": self.device.type, **{k: str(v).removeprefix("torch.") for k, v in formats.items()}}


@dataclass(frozen=True)
class Request:
    """What one slot is generated from: nothing of the ground truth beyond its first frame.

    first_frame: uint8 [H,W,3]. w2c: float32 [T,4,4], relative to the first frame. intrinsics: [3,3], divided by the
    image size. noise_key: the parts that key the initial noise.
    """

    slot: int
    prompt: str
    first_frame: np.ndarray
    w2c: np.ndarray
    intrinsics: np.ndarray
    noise_key: tuple[str | int, ...]


def initial_noise(shape: Sequence[int], noise_key: Sequence[str | int]) -> np.ndarray:
    """Return float32 noise `[T,C,h,w]` of a case: the same in every batch, pass, process and on every device."""
    return keyed.normal(tuple(shape), "validation-noise", *noise_key)


def sample_latents(models: Models, requests: Sequence[Request], sampling: Sampling) -> torch.Tensor:
    """Return float32 latents `[B,T,C,h,w]` on the CPU for `requests`, sampled as one batch."""
    import torch

    timesteps, sigmas = sampling.grid()
    with torch.inference_mode():
        # One at a time: a kernel may round differently for another batch, and these must equal training's.
        firsts = (to_video(request.first_frame[None, None]).to(models.device) for request in requests)
        anchor = torch.cat([models.codec.encode(first) for first in firsts])
        shape = (sampling.latent_frames, *anchor.shape[2:])
        noise = torch.from_numpy(np.stack([initial_noise(shape, r.noise_key) for r in requests])).to(
            models.device
        )
        prompts = torch.cat([models.text.encode([request.prompt]) for request in requests]).to(models.device)
        w2c = torch.from_numpy(np.stack([request.w2c for request in requests])).to(models.device)
        intrinsics = torch.from_numpy(np.stack([request.intrinsics for request in requests])).to(
            models.device
        )
        dtype = next(models.backbone.transformer.parameters()).dtype

        def velocity(latents: torch.Tensor, frame_timesteps: torch.Tensor) -> torch.Tensor:
            return models.backbone.velocity(
                latents.to(dtype), frame_timesteps, prompts.to(dtype), w2c, intrinsics
            )

        return sample_unipc(velocity, noise, timesteps, sigmas, anchor).float().cpu()


def batch_size_of(models: Models, first: Request, sampling: Sampling) -> int:
    """Return how many slots are sampled together: 16 tiny clips, one at 480p; a function of geometry alone."""
    geometry, (height, width, _) = models.backbone.geometry, first.first_frame.shape
    per_frame = geometry.tokens_per_frame(height // geometry.spatial_stride, width // geometry.spatial_stride)
    return max(1, min(SLOTS_PER_BATCH, TOKENS_PER_BATCH // (per_frame * sampling.latent_frames)))


def sample_all(
    models: Models, requests: Sequence[Request], sampling: Sampling, batch_size: int | None = None
) -> Iterator[tuple[Request, torch.Tensor | Exception, float]]:
    """Yield (request, its latents `[T,C,h,w]` or what went wrong, seconds), in batches of slot order.

    The batch size is `batch_size_of` by default. A batch that fails is sampled again slot by slot, so one slot does
    not cost the others.
    """
    size = batch_size or (batch_size_of(models, requests[0], sampling) if requests else 1)
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        begun = time.perf_counter()
        try:
            latents = sample_latents(models, batch, sampling)
        except Preempted:
            raise
        except Exception as error:
            if len(batch) > 1:
                yield from sample_all(models, batch, sampling, batch_size=1)
            else:
                yield batch[0], error, time.perf_counter() - begun
            continue
        seconds = (time.perf_counter() - begun) / len(batch)
        yield from ((request, row, seconds) for request, row in zip(batch, latents, strict=True))


def decode(
    codec: Codec, latents: torch.Tensor, pixel_frames: int, device: Any = "cpu"
) -> tuple[np.ndarray, str | None]:
    """Return (float32 pixels `[F,H,W,3]` in [-1,1], complaint) of one clip's latents `[T,C,h,w]`.

    Latents that are not finite from some frame on are decoded up to it and continued with NaN, so the damage can be
    seen; the complaint then names the first bad latent frame.
    """
    import torch

    finite = torch.isfinite(latents).flatten(1).all(dim=1)
    good = int(finite.long().cumprod(0).sum())
    if good == len(latents):
        return to_pixels(codec.decode(latents[None].to(device)))[0], None
    complaint = f"latent frame {good} of {len(latents)} holds NaN or infinite values after sampling"
    if good == 0:
        raise NonFiniteError(complaint)
    pixels = to_pixels(codec.decode(latents[None, :good].to(device)))[0]
    missing = np.full((pixel_frames - len(pixels), *pixels.shape[1:]), np.nan, np.float32)
    return np.concatenate([pixels, missing]), complaint


def reconstruct(codec: Codec, frames: np.ndarray, device: Any = "cpu") -> np.ndarray:
    """Return uint8 `[F,H,W,3]`: `frames` through the codec and back, the best a model in its latents could show."""
    from solarwm_lib.inference.metrics import to_uint8

    return to_uint8(to_pixels(codec.decode(codec.encode(to_video(frames[None]).to(device))))[0])


def to_video(frames: np.ndarray) -> torch.Tensor:
    """Return float32 `[B,3,F,H,W]` in [-1,1] of uint8 `[B,F,H,W,3]`."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def to_pixels(video: torch.Tensor) -> np.ndarray:
    """Return float32 `[B,F,H,W,3]` of `[B,3,F,H,W]`."""
    return video.permute(0, 2, 3, 4, 1).float().cpu().numpy()


def load_models(config: Any, checkpoint: Path, role: str, weights_id: str, device: Any = "cpu") -> Models:
    """Load base codec and text encoder, and the backbone with the `role` ("live" or "ema") weights of `checkpoint`.

    On the CPU everything runs in float32 (bfloat16 matrix products are about 90 times slower there); on a GPU in
    bfloat16, as released.
    """
    import torch

    from solarwm_lib.backbones.codec import load_codec
    from solarwm_lib.backbones.text import TextEncoder
    from solarwm_lib.backbones.wan22 import Wan22
    from solarwm_lib.config.architectures import load_architecture
    from solarwm_lib.training.checkpoint import copy_into, load_weights

    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = config.model
    # The checkpoint holds every tensor, so the base transformer is never read.
    backbone = Wan22.from_config(load_architecture(model.architecture), model)
    backbone.eval().requires_grad_(False)
    target = dict(backbone.trainable())
    copy_into(target, load_weights(checkpoint, role, target))
    codec = load_codec(model.base_path, dtype)
    codec.vae.to(device)
    text = TextEncoder.from_pretrained(model.base_path, model.text_length, dtype)
    text.encoder.to(device)
    return Models(backbone.to(device, dtype), codec, text, weights_id, device)
