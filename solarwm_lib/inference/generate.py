"""The one generation path: a checkpoint's weights and prepared requests give latents; latents give pixels.

Validation and standalone inference call these same functions, so what one shows the other reproduces.
Tensor layout: B batch, T latent frames, C channels, h w latent size; F pixel frames, H W pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from solarwm_lib.inference.metrics import PixelStatistics, pixel_statistics, to_uint8
from solarwm_lib.inference.samplers import sample_flowmap, sample_unipc, unipc_grid
from solarwm_lib.runtime import keyed
from solarwm_lib.runtime.errors import ConfigError, NonFiniteError, Preempted

if TYPE_CHECKING:
    import torch

    from solarwm_lib.backbones.codec import Codec
    from solarwm_lib.backbones.protocol import CausalBackbone
    from solarwm_lib.backbones.text import TextEncoder
    from solarwm_lib.inference.rollout import OnChunk
    from solarwm_lib.objectives.self_gradient_forcing import Conditions, Recipe

    # `OnChunk` with the requests of the batch before its own arguments.
    OnBatchChunk = Callable[[Sequence["Request"], int, int, torch.Tensor], Any]

SLOTS_PER_BATCH = 16
TOKENS_PER_BATCH = 16384
SOLVERS = (
    ("bidirectional", "unipc"),
    ("autoregressive", "unipc"),
    ("autoregressive", "flowmap"),
    ("autoregressive", "self_forcing"),
)


@dataclass(frozen=True)
class Sampling:
    """How a pass turns noise into latents: everything, beside weights and case, that the result depends on.

    `latent_frames` is the horizon of a request that has none of its own. `causal` belongs to the autoregressive solvers.
    """

    mode: str
    solver: str
    num_inference_steps: int
    timestep_shift: float
    latent_frames: int
    causal: Causal | None = None

    def timesteps(self) -> list[float]:
        """Return the raw timesteps of the steps; ConfigError for a solver of another stage or an impossible grid."""
        if (self.mode, self.solver) not in SOLVERS:
            expected = " or ".join(f"{mode!r} with {solver!r}" for mode, solver in SOLVERS)
            raise ConfigError(
                f"mode {self.mode!r} with solver {self.solver!r} is not a way to sample a Wan model, expected {expected}: "
                "change validation.passes"
            )
        if self.solver == "unipc":
            return list(unipc_grid(self.num_inference_steps, self.timestep_shift)[0])
        if self.solver == "flowmap":
            return [t for t, _ in self.pairs()]
        return list(self.recipe().timesteps)

    def pairs(self) -> list[tuple[float, float]]:
        """Return the flow map's raw pairs (t, r)."""
        from solarwm_lib.objectives.anyflow import sampling_pairs

        return sampling_pairs(self.num_inference_steps, self.timestep_shift)

    def recipe(self) -> Recipe:
        """Return table, steps and window of a few-step student; ConfigError unless the steps are those it is trained for."""
        from solarwm_lib.objectives.noise import schedule
        from solarwm_lib.objectives.self_gradient_forcing import Recipe, denoising_timesteps

        assert self.causal is not None
        table = schedule(self.timestep_shift)
        steps = denoising_timesteps(self.causal.denoising_labels, table)
        if len(steps) != self.num_inference_steps:
            raise ConfigError(
                f"num_inference_steps is {self.num_inference_steps}, the student is trained for {len(steps)} steps "
                f"({', '.join(map(str, self.causal.denoising_labels))}): change it in validation.passes"
            )
        return Recipe(table, steps, self.causal.chunk, self.causal.window, self.causal.sink)


@dataclass(frozen=True)
class Causal:
    """Chunk and windows of autoregressive sampling in latent frames, and the step labels of a Stage2 student.

    Stage1 sees `prior_chunks` clean chunks before its own; Stage2 `window` frames, its own chunk among them.
    """

    chunk: int
    prior_chunks: int
    window: int
    sink: int = 0
    denoising_labels: tuple[int, ...] = ()

    def visible(self, solver: str) -> int:
        """Return the most latent frames one forward holds."""
        before = (
            self.window - self.chunk
            if solver == "self_forcing"
            else self.sink + self.prior_chunks * self.chunk
        )
        return before + self.chunk


@dataclass
class Models:
    """Loaded networks and where they run. `weights_id` names the checkpoint and the role its weights have."""

    backbone: CausalBackbone
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
    image size. noise_key: the parts that key the initial noise. latent_frames: T, 0 for the horizon of the pass.
    """

    slot: int
    prompt: str
    first_frame: np.ndarray
    w2c: np.ndarray
    intrinsics: np.ndarray
    noise_key: tuple[str | int, ...]
    latent_frames: int = 0

    def horizon(self, sampling: Sampling) -> int:
        """Return how many latent frames are generated."""
        return self.latent_frames or sampling.latent_frames


def initial_noise(shape: Sequence[int], noise_key: Sequence[str | int]) -> np.ndarray:
    """Return float32 noise `[T,C,h,w]` of a case: the same in every batch, pass, process and on every device.

    A longer horizon begins with the noise of a shorter one.
    """
    return keyed.normal(tuple(shape), "validation-noise", *noise_key)


def step_noise(shape: Sequence[int], noise_key: Sequence[str | int], steps: int) -> np.ndarray:
    """Return float32 noise `[steps-1,T,C,h,w]` that follows each step of a few-step student but the last."""
    draws = [keyed.normal(tuple(shape), "validation-renoise", step, *noise_key) for step in range(steps - 1)]
    return np.stack(draws) if draws else np.empty((0, *shape), np.float32)


def sample_latents(
    models: Models, requests: Sequence[Request], sampling: Sampling, on_chunk: OnChunk | None = None
) -> torch.Tensor:
    """Return float32 latents `[B,T,C,h,w]` on the CPU for `requests` of one horizon, sampled as one batch."""
    import torch

    from solarwm_lib.objectives.self_gradient_forcing import Conditions

    sampling.timesteps()
    with torch.inference_mode():
        anchor, condition = _first_images(models, requests, sampling)
        image = condition if anchor is None else anchor
        shape = (requests[0].horizon(sampling), models.backbone.geometry.latent_channels, *image.shape[3:])
        noise = torch.from_numpy(np.stack([initial_noise(shape, r.noise_key) for r in requests])).to(
            models.device
        )
        prompts = torch.cat([models.text.encode([request.prompt]) for request in requests]).to(models.device)
        w2c = torch.from_numpy(np.stack([request.w2c for request in requests])).to(models.device)
        intrinsics = torch.from_numpy(np.stack([request.intrinsics for request in requests])).to(
            models.device
        )
        if sampling.mode == "autoregressive":
            assert anchor is not None
            conditions = Conditions(prompts, w2c, intrinsics)
            return _autoregressive(models, requests, sampling, noise, anchor, conditions, on_chunk)
        dtype = next(models.backbone.transformer.parameters()).dtype
        condition = None if condition is None else condition.to(dtype)

        def velocity(latents: torch.Tensor, frame_timesteps: torch.Tensor) -> torch.Tensor:
            return models.backbone.velocity(
                latents.to(dtype),
                frame_timesteps,
                prompts.to(dtype),
                w2c,
                intrinsics,
                image_condition=condition,
            )

        grid = unipc_grid(sampling.num_inference_steps, sampling.timestep_shift)
        return sample_unipc(velocity, noise, *grid, anchor).float().cpu()


def _first_images(
    models: Models, requests: Sequence[Request], sampling: Sampling
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the clean latent 0 `[B,1,C,h,w]`, or the image condition `[B,T,4+C,h,w]` of a backbone that takes one.

    One clip at a time: a kernel may round differently for another batch, and these must equal training's.
    """
    import torch

    from solarwm_lib.backbones.image_condition import image_condition

    codec = models.codec
    firsts = (to_video(request.first_frame[None, None]).to(models.device) for request in requests)
    if not models.backbone.image_conditioned:
        return torch.cat([codec.encode(first) for first in firsts]), None
    if sampling.mode != "bidirectional":
        raise ConfigError(
            f"mode {sampling.mode!r}: an image-conditioned model generates whole clips only, expected 'bidirectional': change "
            "validation.passes"
        )
    frames = 1 + codec.temporal_stride * (requests[0].horizon(sampling) - 1)
    return None, torch.cat([image_condition(codec, first, frames) for first in firsts])


def _autoregressive(
    models: Models,
    requests: Sequence[Request],
    sampling: Sampling,
    noise: torch.Tensor,
    anchor: torch.Tensor,
    conditions: Conditions,
    on_chunk: OnChunk | None,
) -> torch.Tensor:
    """Return float32 latents `[B,T,C,h,w]` on the CPU, generated chunk by chunk after `anchor` `[B,1,C,h,w]`."""
    import torch

    from solarwm_lib.inference.rollout import roll_out_cached, roll_out_windows

    causal, frames = sampling.causal, noise.shape[1]
    if causal is None:
        raise ValueError("autoregressive sampling needs Sampling.causal")
    if conditions.w2c is not None and conditions.w2c.shape[1] != frames:
        raise ValueError(
            f"w2c has {conditions.w2c.shape[1]} cameras, expected one per latent frame: {frames}"
        )
    anchor = anchor.float()
    if sampling.solver == "self_forcing":
        recipe = sampling.recipe()
        steps = [step_noise(noise.shape[1:], r.noise_key, len(recipe.timesteps)) for r in requests]
        renoise = torch.from_numpy(np.stack(steps, axis=1)).to(noise).unbind()
        latents = roll_out_cached(
            models.backbone, noise, renoise, anchor, conditions, recipe, on_chunk=on_chunk
        )
        return latents.float().cpu()

    def solve(velocity: Any, noise: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        if sampling.solver == "flowmap":
            return sample_flowmap(velocity, noise, sampling.pairs(), anchor)
        grid = unipc_grid(sampling.num_inference_steps, sampling.timestep_shift)
        return sample_unipc(velocity, noise, *grid, anchor)

    latents = roll_out_windows(
        models.backbone,
        noise,
        anchor,
        conditions,
        solve,
        chunk=causal.chunk,
        prior_chunks=causal.prior_chunks,
        sink=causal.sink,
        on_chunk=on_chunk,
    )
    return latents.float().cpu()


def batch_size_of(models: Models, first: Request, sampling: Sampling) -> int:
    """Return how many slots are sampled together: 16 tiny clips, one at 480p; a function of geometry alone."""
    geometry, (height, width, _) = models.backbone.geometry, first.first_frame.shape
    per_frame = geometry.tokens_per_frame(height // geometry.spatial_stride, width // geometry.spatial_stride)
    frames = first.horizon(sampling)
    if sampling.causal is not None:
        frames = min(frames, sampling.causal.visible(sampling.solver))
    return max(1, min(SLOTS_PER_BATCH, TOKENS_PER_BATCH // (per_frame * frames)))


def batches_of(
    models: Models, requests: Sequence[Request], sampling: Sampling, batch_size: int | None = None
) -> Iterator[list[Request]]:
    """Yield what is sampled together: neighbours of one horizon, `batch_size_of` at most unless a size is given."""
    for _, group in groupby(requests, lambda request: request.horizon(sampling)):
        alike = list(group)
        size = batch_size or batch_size_of(models, alike[0], sampling)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def sample_all(
    models: Models,
    requests: Sequence[Request],
    sampling: Sampling,
    batch_size: int | None = None,
    on_chunk: OnBatchChunk | None = None,
) -> Iterator[tuple[Request, torch.Tensor | Exception, float]]:
    """Yield (request, its latents `[T,C,h,w]` or what went wrong, seconds), in batches of slot order.

    The batch size is `batch_size_of` by default. A batch that fails is sampled again slot by slot, so one slot does
    not cost the others. `on_chunk(requests, done, chunks, latents)` is told of every chunk of autoregressive sampling.
    """
    for batch in batches_of(models, requests, sampling, batch_size):
        begun = time.perf_counter()
        try:
            latents = sample_latents(models, batch, sampling, on_chunk and partial(on_chunk, batch))
        except Preempted:
            raise
        except Exception as error:
            if len(batch) > 1:
                yield from sample_all(models, batch, sampling, 1, on_chunk)
            else:
                yield batch[0], error, time.perf_counter() - begun
            continue
        seconds = (time.perf_counter() - begun) / len(batch)
        yield from ((request, row, seconds) for request, row in zip(batch, latents, strict=True))


def sound_latents(latents: torch.Tensor) -> tuple[int, str | None]:
    """Return how many leading latents of `[T,C,h,w]` are finite, and the complaint about the first that is not."""
    import torch

    finite = torch.isfinite(latents).flatten(1).all(dim=1)
    good = int(finite.long().cumprod(0).sum())
    if good == len(latents):
        return good, None
    return good, f"latent frame {good} of {len(latents)} holds NaN or infinite values after sampling"


def decode_stretches(
    codec: Codec, latents: torch.Tensor, pixel_frames: int, device: Any = "cpu"
) -> Iterator[tuple[np.ndarray, PixelStatistics]]:
    """Yield `pixel_frames` frames of one clip's latents `[T,C,h,w]`, uint8 [n,H,W,3], with statistics before rounding.

    Long clips come tile by tile (`Codec.decode_tiles`): no more than a tile of pixels is in memory. Latents that are not
    finite from some frame on are decoded up to it and continued with NaN, so the damage can be seen; NonFiniteError if that
    is the first.
    """
    from solarwm_lib.backbones.codec import DECODE_TILE

    good, complaint = sound_latents(latents)
    if good == 0:
        raise NonFiniteError(complaint or "no latents")
    left = pixel_frames
    for tile in codec.decode_tiles(latents[None, :good].to(device)):
        pixels = to_pixels(tile)[0][:left]
        yield to_uint8(pixels), pixel_statistics(pixels)
        left -= len(pixels)
        if not left:
            return
    height, width, channels = pixels.shape[1:]
    while left:
        count = min(left, DECODE_TILE * codec.temporal_stride)
        missing = np.full((count, height, width, channels), np.nan, np.float32)
        yield to_uint8(missing), pixel_statistics(missing)
        left -= count


def reconstructor(codec: Codec, device: Any = "cpu") -> Callable[[np.ndarray], np.ndarray]:
    """Return a function of consecutive stretches uint8 [n,H,W,3] of a clip that gives them through the codec and back.

    That is the best a model in its latents could show. Stretches are what the codec's tiles decode to, 1 + 4k frames and then
    4k; the last may end anywhere: it is filled up with its last frame for the purpose.
    """
    encode, decode = codec.encoder(), codec.decoder()
    begun = False

    def stretch(frames: np.ndarray) -> np.ndarray:
        nonlocal begun
        if not len(frames):
            return frames
        extra = -(len(frames) - (not begun)) % codec.temporal_stride
        whole = np.concatenate([frames, frames[-1:].repeat(extra, axis=0)])
        latents = encode(to_video(whole[None]).to(device))
        begun = True
        return to_uint8(to_pixels(decode(latents))[0])[: len(frames)]

    return stretch


def to_video(frames: np.ndarray) -> torch.Tensor:
    """Return float32 `[B,3,F,H,W]` in [-1,1] of uint8 `[B,F,H,W,3]`."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def to_pixels(video: torch.Tensor) -> np.ndarray:
    """Return float32 `[B,F,H,W,3]` of `[B,3,F,H,W]`."""
    return video.permute(0, 2, 3, 4, 1).float().cpu().numpy()


def load_models(config: Any, checkpoint: Path, role: str, weights_id: str, device: Any = "cpu") -> Models:
    """Load base codec and text encoder, and the backbone with the `role` ("live" or "ema") weights of `checkpoint`.

    A Stage1 AnyFlow model has the second time, all others do not: Stage2 students are plain flow models.
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
    anyflow = config.train.objective == "anyflow_forward_map"
    backbone = Wan22.from_config(load_architecture(model.architecture), model, anyflow=anyflow)
    backbone.eval().requires_grad_(False)
    target = dict(backbone.trainable())
    copy_into(target, load_weights(checkpoint, role, target))
    codec = load_codec(model.base_path, dtype)
    codec.vae.to(device)
    text = TextEncoder.from_pretrained(model.base_path, model.text_length, dtype)
    text.encoder.to(device)
    return Models(backbone.to(device, dtype), codec, text, weights_id, device)
