"""What the workflow config names must exist and fit together; asked while the Snakefile is parsed, before any job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from solarwm_lib.config import targets
from solarwm_lib.config.architectures import did_you_mean
from solarwm_lib.config.identity import flatten
from solarwm_lib.config.load import read_values
from solarwm_lib.config.workflow import ImportedAssets, PublishedData
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.graph import Workflow

RULES = (
    "all",
    "build_tiny_assets",
    "import_weights",
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
    "export_model",
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


def check_file(workflow: Workflow, key: str, kind: str, name: str) -> None:
    """Raise ConfigError with the nearest name unless there is a file `name` of `kind`, recipes or scales."""
    path = Path(workflow.config_path(kind, name))
    if not path.is_file():
        root = workflow.basedir / "config" / kind
        names = [file.relative_to(root).with_suffix("").as_posix() for file in sorted(root.rglob("*.yaml"))]
        raise ConfigError(f"{key}.{kind[:-1]}: no file {path}{did_you_mean(name, names)}; there are {names}")


def check_names(workflow: Workflow) -> None:
    """Every name that data, windows, assets, latents, runs, inferences and exports refer to is defined. Raises ConfigError."""
    config = workflow.config
    for name, data in config.data.items():
        workflow.data_spec(name)
        if isinstance(data, PublishedData) and not Path(workflow.data_marker(name)).is_file():
            raise ConfigError(
                f"data.{name}.root: no {workflow.data_marker(name)}; expected the folder of a published raw data set, "
                "as `solarwm data pack` makes it"
            )
    _check_assets(workflow)
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
        check_base(workflow, latents.assets, f"{key}.assets")
        for other in latents.reuse:
            known(other, config.latents, f"{key}.reuse")
    for name in config.latents:
        _refuse_circle(workflow, [name])
    for name, run in config.runs.items():
        known(run.data, config.data, f"runs.{name}.data")
        known(run.assets, config.assets, f"runs.{name}.assets")
        check_base(workflow, run.assets, f"runs.{name}.assets")
        if run.latents is not None:
            known(run.latents, config.latents, f"runs.{name}.latents")
    for name, inference in config.inference.items():
        key = f"inference.{name}"
        if (inference.run is None) == (inference.assets is None):
            raise ConfigError(f"{key}: give exactly one of `run` and `assets`")
        if inference.run is not None:
            known(inference.run, config.runs, f"{key}.run")
        elif inference.data is None:
            raise ConfigError(f"{key}.data: not set; imported weights need the data set of the cases")
        elif inference.step is not None:
            raise ConfigError(f"{key}.step: imported weights have one step; remove it")
        if inference.data is not None:
            known(inference.data, config.data, f"{key}.data")
    for name, export in config.exports.items():
        known(export.run, config.runs, f"exports.{name}.run")


def _check_assets(workflow: Workflow) -> None:
    """Imported weights have a source, and trained ones base weights. Raises ConfigError."""
    for name, spec in workflow.config.assets.items():
        if not isinstance(spec, ImportedAssets):
            continue
        key = f"assets.{name}"
        if spec.base is not None:
            known(spec.base, workflow.config.assets, f"{key}.base")
            check_base(workflow, spec.base, f"{key}.base")
        if not Path(spec.source).exists() and not Path(workflow.assets_marker(name)).is_file():
            raise ConfigError(
                f"{key}.source: no file or folder {spec.source}; expected weights that `solarwm weights inspect` knows"
            )


def check_base(workflow: Workflow, name: str, key: str) -> None:
    """Raise ConfigError unless assets `name` are base weights, with a codec and a text encoder."""
    spec = workflow.config.assets[name]
    if isinstance(spec, ImportedAssets) and spec.base is not None:
        raise ConfigError(
            f"{key}: {name} holds trained weights, without codec and text encoder; name their base, {spec.base}, here, and "
            f"{name} as what a run or role starts from"
        )


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


def check_inference(workflow: Workflow, name: str) -> None:
    """An inference resolves, samples from a checkpoint that is there, and by the route it was trained for."""
    spec, resolved = workflow.config.inference[name], workflow.resolved_inference[name]
    if spec.run is None:
        return
    trained = workflow.resolved[spec.run].route
    if resolved.route.key != trained.key:
        raise ConfigError(
            f"inference.{name}.recipe: {spec.recipe} samples {resolved.route.key}, but run {spec.run} trains {trained.key}; "
            "take a recipe of that route"
        )


def check_export(workflow: Workflow, name: str) -> None:
    """An export takes a checkpoint that is there. Raises ConfigError."""
    spec = workflow.config.exports[name]
    workflow.export_checkpoint(name)
    if spec.form == "released" and spec.weights is not None:
        raise ConfigError(
            f"exports.{name}.weights: found {spec.weights}, but a released package holds both live and ema; remove it"
        )


def comparison_inputs(workflow: Workflow, name: str) -> list[str]:
    """Markers of the artifacts that a comparison puts side by side. Raises ConfigError for fewer than two passes."""
    config = workflow.config
    found: list[str] = []
    count = 0
    for number, side in enumerate(config.comparisons[name]):
        key = f"comparisons.{name}[{number}]"
        if (side.run is None) == (side.inference is None):
            raise ConfigError(f"{key}: give exactly one of `run` and `inference`")
        if side.inference is not None:
            known(side.inference, config.inference, f"{key}.inference")
            found.append(workflow.inference_marker(side.inference))
            count += len(workflow.resolved_inference[side.inference].config.validation.passes)
        elif side.run is not None:
            known(side.run, config.runs, f"{key}.run")
            step, passes = workflow.step(side.run, side.step, f"{key}.step"), workflow.passes(side.run)
            for name_ in side.passes:
                known(name_, passes, f"{key}.passes")
            found += [workflow.validation(side.run, step, item) for item in side.passes or passes]
            count += len(side.passes or passes)
    if count < 2:
        raise ConfigError(f"comparisons.{name}: two or more passes are needed, found {count}")
    return found


def check_target_names(workflow: Workflow) -> None:
    """Runs, stages, latents, inferences, exports and comparisons are targets by name, beside the rules themselves."""
    names = [*RULES, *targets.names(workflow)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{repeated[0]!r} names two targets: a run may not be called like a rule ({', '.join(RULES)}), a stage, "
            "or another target; use another name"
        )
