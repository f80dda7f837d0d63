"""What the stages demand of a configuration: objective blocks, causal windows, and the weights they start from.

Facts: wan22.md 4.2, 5.1, 5.3, 7.4.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.config.schema import RunConfig
    from solarwm_lib.config.sections import Causal, Initialization


def check_blocks(config: RunConfig) -> None:
    """The blocks of an objective are there where it is trained, and nowhere else; what they say fits together."""
    train = config.train
    for block, needed in (
        ("anyflow", train.objective == "anyflow_forward_map"),
        ("self_gradient_forcing", train.stage == "stage2"),
    ):
        if getattr(train, block) is not None and not needed:
            raise ConfigError(f"train.{block}: not used by {train.stage} {train.objective}; remove it")
        if getattr(train, block) is None and needed:
            raise ConfigError(
                f"train.{block}: found null, and {train.stage} {train.objective} needs it; remove the line"
            )
    if train.anyflow is not None and train.anyflow.diffusion_ratio + train.anyflow.consistency_ratio > 1:
        raise ConfigError("train.anyflow: diffusion_ratio + consistency_ratio is above 1; lower one of them")
    file = train.anyflow.negative_embedding if train.anyflow is not None else ""
    if file.startswith("/") or "\\" in file or ".." in file.split("/") or "://" in file:
        raise ConfigError(
            f"train.anyflow.negative_embedding: found {file!r}, expected a path below model.base_path without '..'"
        )
    forcing = train.self_gradient_forcing
    if forcing is not None and forcing.score_min_timestep >= forcing.score_max_timestep:
        raise ConfigError(
            f"train.self_gradient_forcing.score_min_timestep: found {forcing.score_min_timestep}, expected less than "
            f"score_max_timestep={forcing.score_max_timestep}"
        )
    if forcing is not None:
        _check_labels(forcing.denoising_timesteps, train.num_train_timesteps)
    if train.stage == "stage2":
        _check_window(config.model.causal)
    if train.stage == "stage2" and train.image_condition_dropout:
        raise ConfigError(
            "train.image_condition_dropout: expected 0 in Stage2, which always starts from the image"
        )


def _check_labels(labels: list[int], last: int) -> None:
    falling = all(a > b for a, b in pairwise(labels))
    if not falling or labels[0] > last or labels[-1] < 1:
        raise ConfigError(
            f"train.self_gradient_forcing.denoising_timesteps: found {labels}, expected falling labels between {last} and 1"
        )


def _check_window(causal: Causal) -> None:
    """A cached rollout sees whole chunks: its window holds the sink and the chunk being denoised."""
    chunk, window, sink = (
        causal.chunk_latent_frames,
        causal.local_attention_latent_frames,
        causal.sink_latent_frames,
    )
    for key, value in (("local_attention_latent_frames", window), ("sink_latent_frames", sink)):
        if value % chunk:
            near = " or ".join(
                str(n) for n in sorted({value // chunk * chunk or chunk, (value // chunk + 1) * chunk})
            )
            raise ConfigError(
                f"model.causal.{key}: found {value}, expected a multiple of model.causal.chunk_latent_frames={chunk}; "
                f"nearest: {near}"
            )
    if window < sink + chunk:
        raise ConfigError(
            f"model.causal.local_attention_latent_frames: found {window}, expected at least {sink + chunk}: the sink of {sink} "
            f"and a chunk of {chunk} latent frames"
        )


def check_checkpoint(config: RunConfig) -> None:
    """A run starts from what its stage starts from: base weights, a checkpoint, or the three roles of Stage2."""
    checkpoint = config.checkpoint
    if config.action == "infer":
        if not checkpoint.path:
            raise ConfigError("checkpoint.path: not set; inference needs the checkpoint to sample from")
        return
    if checkpoint.mode in ("none", "roles") and checkpoint.path:
        raise ConfigError(
            f"checkpoint.path: set, but checkpoint.mode is {checkpoint.mode}, which does not read it; set checkpoint.mode "
            "to weights_only (new run from these weights) or full_resume (continue that run), or remove the path"
        )
    if checkpoint.mode in ("weights_only", "full_resume"):
        for key in ("path", "source_step"):
            if not getattr(checkpoint, key):
                raise ConfigError(
                    f"checkpoint.{key}: not set, and checkpoint.mode {checkpoint.mode} needs it"
                )
    pair = isinstance(checkpoint.weights, list) and len(checkpoint.weights) == 2
    if checkpoint.mode == "weights_only" and not (pair or isinstance(checkpoint.weights, str)):
        raise ConfigError(
            f"checkpoint.weights: found {checkpoint.weights or 'null'}, expected live, ema, or the pair "
            "[source of live, source of EMA]; checkpoint.mode weights_only needs it"
        )
    from_average = config.train.stage == "stage1" and config.model.family.startswith("wan22_")
    if (
        from_average
        and checkpoint.mode == "weights_only"
        and checkpoint.weights not in ("ema", ["ema", "ema"])
    ):
        raise ConfigError(
            f"checkpoint.weights: found {checkpoint.weights}, expected ema: Stage1 starts from the average of Stage0.5"
        )
    if config.train.stage == "stage1" and checkpoint.mode == "none":
        raise ConfigError(
            "checkpoint.mode: Stage1 starts from Stage0.5 weights; set weights_only and checkpoint.path"
        )
    if checkpoint.mode == "roles":
        roles = checkpoint.initialization
        absent = [r for r in ("student", "teacher", "critic") if roles is None or getattr(roles, r) is None]
        if config.train.stage != "stage2":
            raise ConfigError(f"checkpoint.mode: roles is for stage2, found {config.train.stage}")
        if absent:
            raise ConfigError(
                f"checkpoint.initialization.{absent[0]}: not set; Stage2 needs student, teacher and critic"
            )
        if roles is not None:
            _check_roles(roles)
    elif config.train.stage == "stage2" and checkpoint.mode != "full_resume":
        raise ConfigError(
            "checkpoint.mode: Stage2 starts from three roles; set roles and checkpoint.initialization"
        )


def _check_roles(roles: Initialization) -> None:
    """Every role names its step, and the critic starts as the teacher: the same weights of the same checkpoint."""
    for name in ("student", "teacher", "critic"):
        role = getattr(roles, name)
        if role.source_step is None:
            raise ConfigError(
                f"checkpoint.initialization.{name}.source_step: not set; name the step that {role.path} must be of"
            )
    for key in ("path", "weights", "source_step"):
        teacher, critic = getattr(roles.teacher, key), getattr(roles.critic, key)
        if teacher != critic:
            raise ConfigError(
                f"checkpoint.initialization.critic.{key}: found {critic}, expected {teacher}, as the teacher has: the critic "
                "starts from the teacher's weights"
            )
