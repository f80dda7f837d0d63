"""Which checkpoints a run starts from, and what they must be of (spec wan22 7.4). Everything is checked before a model exists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact
from solarwm_lib.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

    from solarwm_lib.config.load import Resolved
    from solarwm_lib.config.schema import RunConfig
    from solarwm_lib.config.sections import RoleSource

ROLES = ("student", "teacher", "critic")
_STAGE0P5 = "stage0p5:bidirectional:flow_matching"
_ANYFLOW = "stage1:teacher_forcing:anyflow_forward_map:v1_5"
# Stage of a run, or role in it -> route that its weights must come from, without the family.
NEEDED = {
    "stage0p5": _STAGE0P5,
    "stage1": _STAGE0P5,
    "student": _ANYFLOW,
    "teacher": _STAGE0P5,
    "critic": _STAGE0P5,
}
# Weights work only in a network that sees cameras as they were trained to.
SHARED = (
    "model.architecture",
    "model.camera_attention_mode",
    "model.camera_translation_transform",
    "model.camera_intrinsics_mode",
    "model.timestep_shift",
)
# A student has learnt chunks of one length; its window may change.
SHARED_BY_STUDENT = ("model.causal.chunk_latent_frames",)


@dataclass(frozen=True)
class Source:
    """One checkpoint a run reads: the configuration section that names it, which of its weights, and what it must be of."""

    section: str
    path: str
    weights: tuple[str, ...]
    step: int | None
    route: str


def sources(config: RunConfig) -> dict[str, Source]:
    """Return role -> source of the weights a run starts from; the role is `initial` outside Stage2. Empty for base weights."""
    checkpoint, family = config.checkpoint, config.model.family
    if checkpoint.mode == "roles" and checkpoint.initialization is not None:
        found = {}
        for role in ROLES:
            named: RoleSource = getattr(checkpoint.initialization, role)
            found[role] = Source(
                f"checkpoint.initialization.{role}",
                named.path,
                (named.weights,),
                named.source_step,
                f"{family}:{NEEDED[role]}",
            )
        return found
    if checkpoint.mode != "weights_only":
        return {}
    weights = checkpoint.weights
    roles = (weights,) if isinstance(weights, str) else tuple(weights or ())
    route = f"{family}:{NEEDED[config.train.stage]}"
    return {"initial": Source("checkpoint", checkpoint.path, roles, checkpoint.source_step, route)}


def read_roles(config: RunConfig) -> dict[str, Artifact]:
    """Read the markers of the three role checkpoints of Stage2; empty for other stages."""
    if config.checkpoint.mode != "roles":
        return {}
    from solarwm_lib.training.checkpoint import SCHEMA

    return {role: artifacts.read(Path(source.path), SCHEMA) for role, source in sources(config).items()}


def check(resolved: Resolved, found: Mapping[str, Artifact], assets: Artifact) -> None:
    """Raise ArtifactError unless every checkpoint a run starts from is of the route, step and network that it needs.

    `assets` are the run's base weights: a network knows only the latents and prompts of the codec and text encoder it was
    trained with.
    """
    config = resolved.config
    starts = sources(config)
    if not starts:  # without the import of torch, a refusal comes at once
        return
    from solarwm_lib.training import checkpoint
    from solarwm_lib.weights.contract import lookup
    from solarwm_lib.weights.convert import facts_of, roles_of

    for role, source in starts.items():
        artifact = found[role]
        state = checkpoint.read_state(artifact)
        facts = facts_of(state.run, artifact.path)
        if facts.route != source.route:
            what = f"Stage{config.train.stage.removeprefix('stage').replace('p', '.')}"
            what = what if role == "initial" else f"the {role} of Stage2"
            raise ArtifactError(
                f"{source.section}.path: {artifact.path} is of {facts.route}, {what} starts from {source.route}; name another "
                "checkpoint"
            )
        for key in (*SHARED, *(SHARED_BY_STUDENT if role == "student" else ())):
            theirs, ours = facts[key], lookup(resolved.values, key)
            if theirs != ours:
                raise ArtifactError(
                    f"{source.section}.path: {artifact.path} was trained with {key} {theirs}, this run has {ours}; make them "
                    "the same"
                )
        theirs = artifact.identity.get("assets")
        if theirs != assets.digest:
            raise ArtifactError(
                f"{source.section}.path: {artifact.path} was trained on base weights {str(theirs)[:16]}, model.base_path "
                f"{assets.path} holds {assets.digest[:16]}; codec and text encoder must be those of training"
            )
        present = roles_of(artifact, state)
        for weights in source.weights:
            checkpoint.check_role(artifact.path, state, weights, source.step, source.section)
            if weights not in present:
                raise ArtifactError(
                    f"{source.section}.weights: found {weights}, {artifact.path} has {', '.join(present) or 'none'}; name "
                    "weights that are there or another checkpoint"
                )


def check_validated(student: Artifact | None, validations: Sequence[Path]) -> None:
    """Raise ArtifactError unless every one of `validations` is complete and of `student`, what Stage2 starts from.

    A pass with failed slots is published too, as partial: that its marker exists does not say that it is a result.
    """
    from solarwm_lib.inference.evaluation import COMPLETE
    from solarwm_lib.inference.validation import SCHEMA

    for path in validations:
        validation = artifacts.read(path, SCHEMA)
        of = validation.identity.get("checkpoint_digest")
        if student is None or of != student.digest:
            wanted = (
                f"{student.path} ({student.digest[:16]})" if student else "a student, which this run has not"
            )
            raise ArtifactError(
                f"{validation.path}: validates checkpoint {str(of)[:16]}, expected one of {wanted}; name the validation of "
                "the checkpoint that the run starts from"
            )
        summary = json.loads(validation.file("summary.json").read_bytes())
        if summary["status"] != COMPLETE:
            slots = summary["slots"]
            raise ArtifactError(
                f"{validation.path}: is {summary['status']}, {slots['ok']} of {slots['total']} slots, and Stage2 starts from "
                "completely validated weights; see its manifests, remove it and validate again"
            )


def fill_role(role: str, source: Source, artifact: Artifact, parameters: Mapping[str, Tensor]) -> None:
    """Set `parameters` to the weights of a role, after verifying the checkpoint to the last byte.

    The student's are those of a flow map without exactly its four second-time tensors. ArtifactError names a tensor that
    only one side has.
    """
    from solarwm_lib.backbones import second_time
    from solarwm_lib.training import checkpoint

    weights = source.weights[0]
    files = checkpoint.weight_files(artifact.path, (weights,), source.step)[weights]
    ignored = second_time.TENSORS if role == "student" else frozenset()
    checkpoint.load_into(files, parameters, ignored=ignored, any_dtype=True)
