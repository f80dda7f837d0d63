"""How long a case is generated: as long as its pass says, as its source allows, or as its camera track lasts.

Pure numbers, no torch. Lengths in pixel frames at the output rate unless they are said to be latent or source frames.
(spec wan22 2.4, 6.3, 6.4)
"""

from __future__ import annotations

import math
from typing import Any

from solarwm_lib.config.geometry import pixel_frames
from solarwm_lib.data.sampling import last_offset
from solarwm_lib.runtime.errors import ConfigError, DataError

FIXED, SOURCE, CAMERA = "fixed", "source", "camera"
DOCUMENTED, COVERING = "documented", "covering"


def mode_of(config: Any) -> str:
    """Return what decides the length of a configuration's cases: `fixed`, `source` or `camera`."""
    if config.action == "infer" and config.inference.length == "camera":
        return CAMERA
    return SOURCE if config.validation.variable_rollout_by_source else FIXED


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings that decide the length of each case, by configuration key; none for fixed lengths.

    ConfigError for a source-variable validation of a bidirectional stage, or whose passes differ in length: its cases must
    suit all of them.
    """
    mode, chunk = mode_of(config), config.model.causal.chunk_latent_frames
    if mode == FIXED:
        return {}
    if mode == CAMERA:
        return {
            "inference.length": CAMERA,
            "inference.horizon_rounding": rounding_of(config),
            "model.causal.chunk_latent_frames": chunk,
        }
    if config.train.stage not in ("stage1", "stage2"):
        raise ConfigError(
            f"validation.variable_rollout_by_source: found true, but a {config.train.stage} model generates "
            f"{config.data.latent_frames} latent frames at once; set false"
        )
    lengths = sorted({entry.rollout_latent_frames for entry in config.validation.passes})
    if len(lengths) > 1:
        raise ConfigError(
            f"validation.passes: rollout_latent_frames are {', '.join(map(str, lengths))}, expected one value for all passes "
            "with validation.variable_rollout_by_source, as it bounds the length of every case"
        )
    return {
        "validation.variable_rollout_by_source": True,
        "validation.min_rollout_latent_frames": config.validation.min_rollout_latent_frames,
        "validation.passes.rollout_latent_frames": lengths[0] if lengths else config.data.latent_frames,
        "model.causal.chunk_latent_frames": chunk,
    }


def rounding_of(config: Any) -> str:
    """Return the camera-length policy: `documented` ends inside the track, `covering` behind its end."""
    return config.inference.horizon_rounding


def published_frames(num_frames: int, source_fps: float, fps: float) -> int:
    """Return P, the output frames that fit the times of `num_frames` source frames: floor((n - 1) fps / source) + 1."""
    return math.floor((num_frames - 1) * fps / source_fps) + 1


def source_variable(frames: int, chunk: int, minimum: int, maximum: int, *, name: str = "clip") -> int:
    """Return the latent horizon of a clip of `frames`: min(maximum, whole chunks of the latents it encodes to).

    `frames` are counted at the output rate; released, the raw count is taken, which for a faster source promises frames that
    it does not have. DataError below `minimum` latents. (spec wan22 6.3)
    """
    available = 1 + (frames - 1) // 4
    horizon = min(maximum, available // chunk * chunk)
    if horizon < minimum:
        raise DataError(
            f"{name}: {frames} frames give {horizon} latent frames in whole chunks of {chunk}, expected at least {minimum}; "
            "remove the row or lower validation.min_rollout_latent_frames"
        )
    return horizon


def camera_length(
    num_frames: int,
    source_fps: float,
    fps: float,
    chunk: int,
    rounding: str = DOCUMENTED,
    *,
    family: str = "wan22_ti2v_5b",
    name: str = "clip",
) -> int:
    """Return the latent horizon of a camera track of `num_frames` source frames, in whole chunks. (spec wan22 6.4)

    `documented`: the most latents whose last frame falls inside the track, DataError if not one chunk does. `covering`: the
    fewest that hold all published frames, at least one chunk.
    """
    if rounding == COVERING:
        latents = 1 + math.ceil((published_frames(num_frames, source_fps, fps) - 1) / 4)
        return max(1, math.ceil(latents / chunk)) * chunk
    # The span grows by chunks: start above any that fits, and step down (at most twice).
    latents = (2 + published_frames(num_frames, source_fps, fps) // (4 * chunk)) * chunk
    while latents and last_offset(pixel_frames(family, latents), source_fps, fps) >= num_frames:
        latents -= chunk
    if not latents:
        needed = last_offset(pixel_frames(family, chunk), source_fps, fps) + 1
        raise DataError(
            f"{name}: the camera track has {num_frames} frames, one chunk of {chunk} latent frames needs {needed}; remove the "
            "row or set inference.horizon_rounding to covering"
        )
    return latents
