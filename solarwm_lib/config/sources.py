"""What a run starts from: checkpoints of other runs and imported weights. Stage order is nothing but these references.

Pure functions of the workflow; what cannot fit is refused here, before any job, from the configurations of both runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.config import rules
from solarwm_lib.config.identity import flatten
from solarwm_lib.config.references import known
from solarwm_lib.config.workflow import ImportedAssets, RunSpec, Start
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.config.schema import RunConfig
    from solarwm_lib.graph import Workflow

ROLES = ("student", "teacher", "critic")
# Stage of a run, or role in it -> route that its source must be of, without the family (spec wan22 7.4, 11).
NEEDED = {
    "stage0p5": "stage0p5:bidirectional:flow_matching",
    "stage1": "stage0p5:bidirectional:flow_matching",
    "student": "stage1:teacher_forcing:anyflow_forward_map:v1_5",
    "teacher": "stage0p5:bidirectional:flow_matching",
    "critic": "stage0p5:bidirectional:flow_matching",
}
# Weights mean something only under the settings they were trained with.
SHARED = (
    "model.family",
    "model.architecture",
    "model.timestep_shift",
    "model.camera_attention_mode",
    "model.camera_translation_transform",
    "model.camera_intrinsics_mode",
    "model.text_length",
    "train.num_train_timesteps",
)
# A student has learnt chunks of one length; its window may change.
SHARED_BY_STUDENT = ("model.causal.chunk_latent_frames",)


def starts(name: str, spec: RunSpec) -> Iterator[tuple[str, str, Start]]:
    """Yield (role, config key, source) of everything a run starts from; the role is `initial` outside Stage2."""
    if spec.initial is not None:
        yield "initial", f"runs.{name}.initial", spec.initial
    if spec.roles is not None:
        for role in ROLES:
            yield role, f"runs.{name}.roles.{role}", getattr(spec.roles, role) or spec.roles.teacher


def step(workflow: Workflow, key: str, start: Start) -> int:
    """The step a source must be of. Raises ConfigError for a step that the run has no checkpoint of."""
    if start.run is not None:
        return workflow.step(start.run, start.step, f"{key}.step")
    if start.step is None:
        raise ConfigError(f"{key}.step: not set; name the step that {start.assets} was trained to")
    return start.step


def marker(workflow: Workflow, key: str, start: Start) -> str:
    """The marker of a source: what Snakemake makes first."""
    if start.run is not None:
        return workflow.checkpoint(start.run, step(workflow, key, start))
    return workflow.assets_marker(str(start.assets))


def markers(workflow: Workflow, run: str) -> dict[str, str]:
    """Role -> marker of everything a run starts from."""
    spec = workflow.config.runs[run]
    return {role: marker(workflow, key, start) for role, key, start in starts(run, spec)}


def gates(workflow: Workflow, run: str) -> list[str]:
    """Validations that must be complete before a run may start: those of the student's checkpoint."""
    roles = workflow.config.runs[run].roles
    if roles is None or roles.student.run is None:
        return []
    source, key = roles.student.run, f"runs.{run}.roles.student"
    number = step(workflow, key, roles.student)
    return [workflow.validation(source, number, name) for name in workflow.passes(source)]


def overrides(workflow: Workflow, run: str) -> dict[str, Any]:
    """Dotted key -> value that the references of a run set in its configuration; weights only where it names some."""
    found: dict[str, Any] = {}
    for role, key, start in starts(run, workflow.config.runs[run]):
        prefix = "checkpoint" if role == "initial" else f"checkpoint.initialization.{role}"
        found["checkpoint.mode"] = "weights_only" if role == "initial" else "roles"
        found[f"{prefix}.path"] = str(Path(marker(workflow, key, start)).parent.absolute())
        found[f"{prefix}.source_step"] = step(workflow, key, start)
        if start.weights is not None:
            found[f"{prefix}.weights"] = start.weights
    return found


def check_names(workflow: Workflow) -> None:
    """Every source exists, and no run starts from itself by any way. Raises ConfigError."""
    config = workflow.config
    for run, spec in config.runs.items():
        if spec.initial is not None and spec.roles is not None:
            raise ConfigError(f"runs.{run}: has both initial and roles; roles are for Stage2, remove one")
        for _, key, start in starts(run, spec):
            if (start.run is None) == (start.assets is None):
                raise ConfigError(f"{key}: give exactly one of `run` and `assets`")
            if start.run is not None:
                known(start.run, config.runs, f"{key}.run")
            else:
                check_trained(workflow, str(start.assets), f"{key}.assets")
            step(workflow, key, start)
    for run in config.runs:
        _refuse_circle(workflow, [run])


def check_trained(workflow: Workflow, name: str, key: str) -> ImportedAssets:
    """Return the imported trained weights of that name. Raises ConfigError for base weights."""
    known(name, workflow.config.assets, key)
    spec = workflow.config.assets[name]
    if not isinstance(spec, ImportedAssets) or spec.base is None:
        raise ConfigError(
            f"{key}: {name} holds base weights; expected imported trained weights, assets of kind imported with a `base`"
        )
    return spec


def _refuse_circle(workflow: Workflow, path: list[str]) -> None:
    for _, _, start in starts(path[-1], workflow.config.runs[path[-1]]):
        if start.run is None:
            continue
        if start.run == path[0]:
            raise ConfigError(
                f"runs.{path[0]}: {' -> '.join([*path, start.run])} is a circle; a run starts only from one that is made "
                "before it"
            )
        if start.run not in path:
            _refuse_circle(workflow, [*path, start.run])


def check_fit(workflow: Workflow, run: str) -> None:
    """What a run starts from is named, of the right stage, and trained under the same settings. Raises ConfigError."""
    config, spec = workflow.resolved[run].config, workflow.config.runs[run]
    _check_named(run, config, spec)
    for role, key, start in starts(run, spec):
        if start.run is None:
            base = check_trained(workflow, str(start.assets), key).base
            _check_assets(key, spec.assets, str(start.assets), str(base))
            continue
        route = workflow.resolved[start.run].route
        wanted = f"{config.model.family}:{NEEDED[config.train.stage if role == 'initial' else role]}"
        if route.key != wanted:
            what = f"a {config.train.stage} run" if role == "initial" else f"the {role} of a Stage2 run"
            raise ConfigError(
                f"{key}: run {start.run} trains {route.key}, but {what} starts from {wanted}; name another run"
            )
        _check_assets(key, spec.assets, f"run {start.run}", workflow.config.runs[start.run].assets)
        _check_shared(
            workflow, key, run, start.run, (*SHARED, *(SHARED_BY_STUDENT if role == "student" else ()))
        )
        if "ema" in _weights(config, role):
            check_average(workflow, f"{key}.weights", start.run, step(workflow, key, start))
    _check_gate(workflow, run, spec)


def _check_named(run: str, config: RunConfig, spec: RunSpec) -> None:
    """A recipe that starts from weights says where they are; its own path is a placeholder."""
    checkpoint = config.checkpoint
    if checkpoint.mode == "weights_only" and rules.placeholder(checkpoint.path):
        raise ConfigError(
            f"runs.{run}.initial: not set, but {spec.recipe} starts from trained weights; set initial: {{run: ..., step: ...}}"
        )
    roles = checkpoint.initialization
    paths = [getattr(roles, role).path for role in ROLES] if checkpoint.mode == "roles" else []
    if any(map(rules.placeholder, paths)):
        raise ConfigError(
            f"runs.{run}.roles: not set, but {spec.recipe} starts from three roles; set roles: {{student: {{run: ...}}, "
            "teacher: {run: ...}, critic: {run: ...}}"
        )


def _check_assets(key: str, own: str, source: str, theirs: str) -> None:
    if own != theirs:
        raise ConfigError(
            f"{key}: {source} belongs to assets {theirs}, but the run has assets {own}; weights work only with the codec and "
            "text encoder that they were trained with"
        )


def _check_shared(workflow: Workflow, key: str, run: str, source: str, settings: tuple[str, ...]) -> None:
    own, theirs = (dict(flatten(workflow.resolved[name].values)) for name in (run, source))
    for setting in settings:
        if own[setting] != theirs[setting]:
            raise ConfigError(
                f"{key}: run {source} is trained with {setting} {theirs[setting]}, but {run} has {own[setting]}; make them "
                "the same"
            )


def _weights(config: RunConfig, role: str) -> list[str]:
    """The weights that are read from a source."""
    if role == "initial":
        weights = config.checkpoint.weights
        return list(weights) if isinstance(weights, list) else [str(weights)]
    return [str(getattr(config.checkpoint.initialization, role).weights)]


def _check_gate(workflow: Workflow, run: str, spec: RunSpec) -> None:
    """The student of a Stage2 run is a validated checkpoint."""
    if spec.roles is None or spec.roles.student.run is None:
        return
    source, key = spec.roles.student.run, f"runs.{run}.roles.student"
    number = step(workflow, key, spec.roles.student)
    if not workflow.passes(source) or number not in workflow.validated_steps(source):
        raise ConfigError(
            f"{key}: step {number} of run {source} is not validated, and Stage2 starts from validated weights; add {number} to "
            f"runs.{source}.validate_steps, and a pass if it has none"
        )


def average_updates(config: RunConfig, step: int) -> int:
    """How often the average of a run has been updated after `step` steps (spec wan22 3.3, 5.2, 5.4)."""
    ema = config.train.ema
    start, forcing = max(1, ema.start_step), config.train.self_gradient_forcing
    if forcing is None:
        return max(0, step // ema.update_every - (start - 1) // ema.update_every)
    updates = max(0, step - 1) // forcing.critic_updates_per_student
    return 0 if updates < start else 1 + (updates - start) // ema.update_every


def check_average(workflow: Workflow, key: str, run: str, step: int) -> None:
    """An average that was never updated is no result. Raises ConfigError for what would be made from it."""
    config = workflow.resolved[run].config
    if average_updates(config, step):
        return
    unit = "step" if config.train.self_gradient_forcing is None else "student update"
    raise ConfigError(
        f"{key}: takes ema weights, but the average of run {run} starts at {unit} {max(1, config.train.ema.start_step)} and is "
        f"not there at step {step}; take live weights or a later step, or change train.ema.start_step"
    )


def check_averages(workflow: Workflow) -> None:
    """Every validation, inference and export of an average comes after it began. Raises ConfigError."""
    for run, resolved in workflow.resolved.items():
        for item in resolved.config.validation.passes:
            for number in workflow.validated_steps(run) if item.weights == "ema" else ():
                check_average(workflow, f"runs.{run}: validation pass {item.name}", run, number)
    for name, inference in workflow.config.inference.items():
        passes = workflow.resolved_inference[name].config.validation.passes
        if inference.run is not None and any(item.weights == "ema" for item in passes):
            number = workflow.step(inference.run, inference.step, f"inference.{name}.step")
            check_average(workflow, f"inference.{name}", inference.run, number)
    for name, export in workflow.config.exports.items():
        number = workflow.step(export.run, export.step, f"exports.{name}.step")
        if export.role == "ema":
            check_average(workflow, f"exports.{name}.weights", export.run, number)
