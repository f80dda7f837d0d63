"""What is published already must agree with the workflow config; asked while the Snakefile is parsed, before any job.

A changed setting would otherwise either contradict a result that stays in place, or make Snakemake remove its marker first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.config import sources
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.identity import diff, digest, flatten, format_diff, semantic_view
from solarwm_lib.config.workflow import ImportedAssets
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.graph import Workflow


def refuse_changed_identities(workflow: Workflow) -> None:
    """Refuse a config that would give an existing run, validation, inference, export, data set, generation of latents or
    base model another identity.

    Raises ConfigError with a field-by-field diff. Paths, cadence, topology, the step count and further validation passes
    are free.
    """
    for run, resolved in workflow.resolved.items():
        _check_run(run, resolved, Path(workflow.run_dir(run)))
        _check_inputs(workflow, run)
        _check_validation(workflow, run, resolved)
    for name in workflow.config.inference:
        _check_inference(workflow, name)
    _check_declared(workflow)
    for name, windows in workflow.config.windows.items():
        marker = Path(workflow.windows_marker(name))
        _check_origin(f"windows.{name}", marker, {f"data {windows.data}": workflow.data_marker(windows.data)})
    for name, assets in workflow.config.assets.items():
        if isinstance(assets, ImportedAssets) and assets.base:
            origins = {f"assets {assets.base}": workflow.assets_marker(assets.base)}
            _check_origin(f"assets.{name}", Path(workflow.assets_marker(name)), origins)
    for name, export in workflow.config.exports.items():
        origins = {f"run {export.run}": workflow.export_checkpoint(name)}
        _check_origin(f"exports.{name}", Path(workflow.export_marker(name)), origins)
    for name in workflow.config.latents:
        _check_latents(workflow, name)


def published_segments(run_dir: Path) -> dict[int, int]:
    """Return step -> the step it was continued from (0: the start) of every published checkpoint of a run."""
    segments = {}
    for marker in run_dir.glob("checkpoint_model_*/COMPLETE.json"):
        parents = [parent["path"] for parent in _read_json(marker).get("parents", ())]
        before = [step for path in parents if (step := _segment_step(path, "../"))]
        step = _segment_step(marker.parent.name)
        if step:
            segments[step] = max(before, default=0)
    return segments


def _segment_step(path: str, prefix: str = "") -> int:
    """Return the step of a checkpoint directory of this run, 0 for anything else."""
    match = re.fullmatch(re.escape(prefix) + r"checkpoint_model_(\d+)", path)
    return int(match[1]) if match else 0


def _check_run(run: str, resolved: Resolved, run_dir: Path) -> None:
    path = run_dir / "resolved-config.json"
    if not path.is_file():
        return
    existing = _read_json(path)
    if digest(semantic_view(existing)) != resolved.semantic_digest:
        differences = diff(semantic_view(existing), semantic_view(resolved.values))
        # A source without a step follows the last checkpoint of its run, which has moved.
        moved = any(row.key.endswith("source_step") for row in differences)
        raise ConfigError(
            f"run {run} exists with another identity: {format_diff(differences, oneline=True)}; "
            f"use a new run name, or remove {run_dir}{', or name the step it started from' if moved else ''}"
        )


def _check_inputs(workflow: Workflow, run: str) -> None:
    """A run keeps the data set, base model and latents it began with, under whatever names: their digests are its identity."""
    steps = reversed(workflow.checkpoint_steps(run))
    made = [*(workflow.checkpoint(run, step) for step in steps), workflow.preflight(run)]
    marker = next((path for path in map(Path, made) if path.is_file()), None)
    if marker is None:
        return
    identity, spec = _identity(marker), workflow.config.runs[run]
    inputs = [
        (f"data {spec.data}", workflow.data_marker(spec.data), identity.get("dataset")),
        (f"assets {spec.assets}", workflow.assets_marker(spec.assets), identity.get("assets")),
    ]
    if spec.latents:
        inputs.append(
            (f"latents {spec.latents}", workflow.latents_index(spec.latents), identity.get("latents"))
        )
    places = _places(marker)
    for label, path, wanted in inputs:
        if not _is_made_from(Path(path), {wanted: places.get(wanted)}):
            raise ConfigError(
                f"runs.{run}: {label} ({Path(path).parent}) is not what the run began with, {places.get(wanted) or wanted}; "
                "use a new run name, or restore it"
            )
    starts = sources.markers(workflow, run)
    _check_origin(f"runs.{run}", marker, {f"{role} weights": path for role, path in starts.items()})


def _check_latents(workflow: Workflow, name: str) -> None:
    """A generation keeps its settings, its deal to parts, and what it is made from."""
    folder = Path(workflow.latents_dir(name))
    resolved, path = workflow.resolved_latents[name], Path(workflow.latents_config(name))
    if path.is_file():
        existing = _read_json(path)
        before, now = semantic_view(existing), semantic_view(resolved.values)
        for values, view in ((existing, before), (resolved.values, now)):
            view["parts"] = values["preencode"][
                "parts"
            ]  # rows are dealt by it, so other parts are other files
        if before != now:
            raise ConfigError(
                f"latents {name} exists with another identity: {format_diff(diff(before, now), oneline=True)}; use a new name "
                f"with reuse: [{name}], which copies every sample that stays the same, or remove {folder}"
            )
    made = (marker for marker in map(Path, workflow.latents_parts(name)) if marker.is_file())
    spec, inputs = workflow.config.latents[name], workflow.latents_inputs(name)
    source = f"windows {spec.windows}" if spec.windows else f"data {spec.data}"
    origins = {source: inputs["source"], f"assets {spec.assets}": inputs["assets"]}
    _check_origin(f"latents.{name}", next(made, None), origins)


def _check_origin(key: str, marker: Path | None, origins: Mapping[str, str]) -> None:
    """Refuse if a published artifact is made from something else than `origins`, label -> marker."""
    if marker is None or not marker.is_file():
        return
    places = _places(marker)
    for label, origin in origins.items():
        if not _is_made_from(Path(origin), places):
            raise ConfigError(
                f"{key}: {label} ({Path(origin).parent}) is not what {marker.parent} is made from, "
                f"{', '.join(sorted(filter(None, places.values()))) or 'nothing'}; use a new name, or restore it"
            )


def _places(marker: Path) -> dict[Any, str | None]:
    """Digest of the marker -> directory of every artifact that a published one is made from."""
    parents = _read_json(marker).get("parents", ())
    return {parent["digest"]: os.path.realpath(marker.parent / parent["path"]) for parent in parents}


def _is_made_from(origin: Path, places: Mapping[Any, str | None]) -> bool:
    if origin.is_file():
        return hashlib.sha256(origin.read_bytes()).hexdigest() in places
    # Not made yet, or removed and made again the same.
    return os.path.realpath(origin.parent) in places.values()


def _check_validation(workflow: Workflow, run: str, resolved: Resolved) -> None:
    folder = Path(workflow.run_dir(run)) / "validation"
    plan = folder / "frozen-plan.json"
    if plan.is_file() and (changed := _changed_plan(_read_json(plan), resolved)):
        raise ConfigError(
            f"run {run} has a frozen validation plan with other settings: {changed}; use a new run name, or remove {folder}"
        )
    passes = _passes(resolved)
    for name, settings in passes.items():
        steps = reversed(workflow.validated_steps(run))
        made = (marker for step in steps if (marker := Path(workflow.validation(run, step, name))).is_file())
        newest = next(made, None)
        if newest is not None and (changed := _changes(_identity(newest).get("pass", {}), settings)):
            raise ConfigError(
                f"validation pass {name} of run {run} exists with other settings: {changed}; give the changed pass a new "
                f"name, or remove {folder}/step_*/{name} and {name}.latents beside it"
            )


def _check_inference(workflow: Workflow, name: str) -> None:
    marker = Path(workflow.inference_marker(name))
    if not marker.is_file():
        return
    inputs, spec = workflow.inference_inputs(name), workflow.config.inference[name]
    labels = {
        "data": f"data {spec.data or ''}".strip(),
        "checkpoint": f"weights of {spec.run or spec.assets}",
    }
    _check_origin(f"inference.{name}", marker, {label: inputs[key] for key, label in labels.items()})
    resolved = workflow.resolved_inference[name]
    passes = _passes(resolved)
    made = {item["pass"]["name"]: item["pass"] for item in _identity(marker).get("passes", ())}
    changed = _changed_plan(_read_json(marker.parent / "frozen-plan.json"), resolved) or "; ".join(
        text
        for key, settings in passes.items()
        if (text := _changes(made.get(key, {"name": None}), settings))
    )
    if not changed and made.keys() != passes.keys():
        changed = f"passes {', '.join(made)} -> {', '.join(passes)}"
    if changed:
        raise ConfigError(
            f"inference {name} exists with other settings: {changed}; use a new name, or remove {marker.parent}*"
        )


def _check_declared(workflow: Workflow) -> None:
    for marker, key, spec in _declared(workflow):
        if not Path(marker).is_file():
            continue
        identity = _identity(Path(marker))
        identity = identity.get("spec", identity)
        changed = [
            f"{name} {identity[name]!r} -> {value!r}" if not isinstance(value, dict) else name
            for name, value in spec.items()
            if name in identity and identity[name] != value
        ]
        if changed:
            raise ConfigError(
                f"{key} exists with another identity: {', '.join(changed)}; use a new name, or remove {Path(marker).parent}"
            )


def _declared(workflow: Workflow) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, data in workflow.config.data.items():
        if data.kind != "published":
            yield workflow.data_marker(name), f"data.{name}", json.loads(workflow.data_spec(name))
    for name in workflow.config.windows:
        yield workflow.windows_marker(name), f"windows.{name}", json.loads(workflow.windows_spec(name))
    for name, assets in workflow.config.assets.items():
        if isinstance(assets, ImportedAssets):
            spec: dict[str, Any] = {"architecture": assets.architecture} if assets.architecture else {}
        else:
            spec = {"architecture": load_architecture(assets.architecture), "seed": assets.seed}
        yield workflow.assets_marker(name), f"assets.{name}", spec
    for name in workflow.config.exports:
        export = json.loads(workflow.export_spec(name))
        yield workflow.export_marker(name), f"exports.{name}", _export_identity(export)


def _export_identity(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an export as its artifact says them; a package holds the roles that there were."""
    role = {"role": spec["role"]} if spec["role"] else {}
    return {"format": spec["form"], "dtype": spec["dtype"], **role}


def _changed_plan(plan: Mapping[str, Any], resolved: Resolved) -> str:
    """Return which settings that decide the cases are not those of `plan`; empty if all are."""
    now = dict(flatten(resolved.values))
    # The bound of source-variable cases is one for all passes and stands in each of them.
    lengths = {item["rollout_latent_frames"] for item in _passes(resolved).values()}
    now["validation.passes.rollout_latent_frames"] = max(lengths) if len(lengths) == 1 else sorted(lengths)
    frozen = plan.get("settings", {})
    return _changes(frozen, {key: now.get(key) for key in frozen})


def _passes(resolved: Resolved) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in resolved.values["validation"]["passes"]}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return `key old -> new` for every key of `before` that has another value now."""
    return ", ".join(
        f"{key} {before[key]!r} -> {now.get(key)!r}" for key in before if before[key] != now.get(key)
    )


def _identity(marker: Path) -> dict[str, Any]:
    identity = _read_json(marker).get("identity")
    return identity if isinstance(identity, dict) else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing beside its marker; remove {path.parent} or restore it"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}); it was cut or edited: remove it or restore it"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values
