"""What a checkpoint and the configuration that samples it must agree on; a disagreement is refused naming both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

# A checkpoint and the run that samples it must agree on each of these (pain D7, F5).
CONTRACT = (
    "model.family",
    "model.architecture",
    "model.timestep_shift",
    "model.camera_attention_mode",
    "model.camera_translation_transform",
    "model.camera_intrinsics_mode",
    "model.text_length",
    "data.pixel_frames",
    "data.height",
    "data.width",
    "data.fps",
    "train.stage",
    "train.causal_mode",
    "train.objective",
)
# And the causal stages on these: what a chunk sees, and the steps a student is trained for.
CAUSAL_CONTRACT = (
    "model.causal.chunk_latent_frames",
    "model.causal.max_prior_clean_chunks",
    "model.causal.local_attention_latent_frames",
    "model.causal.sink_latent_frames",
    "train.objective_variant",
    "train.anyflow.gate",
    "train.self_gradient_forcing.denoising_timesteps",
    "train.self_gradient_forcing.context_timestep",
)


def check_contract(checkpoint: artifacts.Artifact, resolved: Resolved) -> None:
    """Raise ConfigError, naming both sides, if the weights were trained for something else than `resolved` says."""
    from solarwm_lib.training.checkpoint import read_state

    trained = read_state(checkpoint).run["config"]
    causal = CAUSAL_CONTRACT if resolved.config.train.stage in ("stage1", "stage2") else ()
    for key in (*CONTRACT, *causal):
        there, here = lookup(trained, key), lookup(resolved.values, key)
        if there != here:
            raise ConfigError(
                f"{key}: checkpoint {checkpoint.path.name} was trained with {there!r}, this configuration says {here!r}; "
                f"set {key} to {there!r} or choose another checkpoint"
            )
    base = artifacts.read(resolved.config.model.base_path)
    if checkpoint.identity["assets"] != base.digest:
        raise ConfigError(
            f"model.base_path: checkpoint {checkpoint.path.name} was trained on base weights "
            f"{checkpoint.identity['assets'][:16]}, {base.path} holds {base.digest[:16]}; codec and text encoder must be "
            "those of training"
        )


def lookup(values: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, None if there is none."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return None
        values = values[part]
    return values
