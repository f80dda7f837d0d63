"""What the workflow config names must exist and fit together; asked while the Snakefile is parsed, before any job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from solarwm_lib.config.architectures import did_you_mean
from solarwm_lib.config.identity import flatten
from solarwm_lib.config.load import read_values
from solarwm_lib.config.workflow import PublishedData
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.graph import Workflow

RULES = (
    "all",
    "build_tiny_assets",
    "synthesize_clips",
    "index_clips",
    "materialize_windows",
    "resolve_latents",
    "preencode_shard",
    "merge_latent_index",
    "resolve_run",
    "preflight",
    "train_segment",
    "freeze_validation_plan",
    "validate",
    "infer",
    "compare",
    "completion_report",
    "draw_graph",
    "gallery",
)
# Stored latents serve a run only if these are the same in both.
LATENT_GEOMETRY = (
    "model.family",
    "model.text_length",
    "data.pixel_frames",
    "data.height",
    "data.width",
    "data.fps",
)


def known(name: str, names: Iterable[str], key: str) -> None:
    """Raise ConfigError with the nearest defined name unless `name` is one of `names`."""
    defined = list(names)
    if name not in defined:
        raise ConfigError(
            f"{key}: {name!r} is not defined{did_you_mean(name, defined)}; defined are {defined}"
        )


def check_names(workflow: Workflow) -> None:
    """Every name that data, windows, latents, runs and inferences refer to is defined. Raises ConfigError."""
    config = workflow.config
    for name, data in config.data.items():
        workflow.data_spec(name)
        if isinstance(data, PublishedData) and not Path(workflow.data_marker(name)).is_file():
            raise ConfigError(
                f"data.{name}.root: no {workflow.data_marker(name)}; expected the folder of a published raw data set, "
                "as `solarwm data pack` makes it"
            )
    for name, windows in config.windows.items():
        known(windows.data, config.data, f"windows.{name}.data")
    for name, latents in config.latents.items():
        key = f"latents.{name}"
        if (latents.data is None) == (latents.windows is None):
            raise ConfigError(f"{key}: give exactly one of `data` and `windows`")
        if latents.data is not None:
            known(latents.data, config.data, f"{key}.data")
        if latents.windows is not None:
            known(latents.windows, config.windows, f"{key}.windows")
        known(latents.assets, config.assets, f"{key}.assets")
        for other in latents.reuse:
            known(other, config.latents, f"{key}.reuse")
    for name in config.latents:
        _refuse_circle(workflow, [name])
    for name, run in config.runs.items():
        known(run.data, config.data, f"runs.{name}.data")
        known(run.assets, config.assets, f"runs.{name}.assets")
        if run.latents is not None:
            known(run.latents, config.latents, f"runs.{name}.latents")
    for name, inference in config.inference.items():
        known(inference.run, config.runs, f"inference.{name}.run")


def _refuse_circle(workflow: Workflow, path: list[str]) -> None:
    for other in workflow.config.latents[path[-1]].reuse:
        if other == path[0]:
            raise ConfigError(
                f"latents.{path[0]}.reuse: {' -> '.join([*path, other])} is a circle; a generation copies only from one "
                "that is made before it"
            )
        if other not in path:
            _refuse_circle(workflow, [*path, other])


def check_latents(workflow: Workflow) -> None:
    """The recipe of a generation preencodes, with the frames of its windows. Raises ConfigError."""
    for name, spec in workflow.config.latents.items():
        recipe = Path(workflow.config_path("recipes", spec.recipe))
        action = read_values(recipe).get("action") if recipe.is_file() else "preencode"
        if action != "preencode":
            raise ConfigError(
                f"latents.{name}.recipe: {spec.recipe} has action {action}, expected preencode; take a preencode recipe"
            )
        config = workflow.resolved_latents[name].config
        if spec.windows is None:
            continue
        frames = workflow.config.windows[spec.windows].pixel_frames
        if frames != config.data.pixel_frames:
            raise ConfigError(
                f"latents.{name}.windows: {spec.windows} has windows of {frames} frames, but data.pixel_frames of "
                f"{spec.recipe} is {config.data.pixel_frames}; change windows.{spec.windows}.pixel_frames or the recipe"
            )


def check_stored_latents(workflow: Workflow, run: str) -> None:
    """A run that trains from latents has the geometry they were made with. Raises ConfigError."""
    name = workflow.config.runs[run].latents
    if name is None:
        return
    wanted = dict(flatten(workflow.resolved[run].values))
    made = dict(flatten(workflow.resolved_latents[name].values))
    for key in LATENT_GEOMETRY:
        if wanted[key] != made[key]:
            raise ConfigError(
                f"runs.{run}.latents: {name} is made with {key} {made[key]}, but the run has {wanted[key]}; use latents of "
                f"that geometry, or change {key}"
            )


def check_target_names(workflow: Workflow) -> None:
    """Runs, stages, latents, inferences and comparisons are targets by name, beside the rules themselves."""
    config = workflow.config
    names = [*RULES, *config.runs, *workflow.stages]
    names += [f"latents_{name}" for name in config.latents]
    names += [f"infer_{name}" for name in config.inference]
    names += [f"compare_{name}" for name in config.comparisons]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{repeated[0]!r} names two targets: a run may not be called like a rule ({', '.join(RULES)}), a stage, "
            "or another target; use another name"
        )
