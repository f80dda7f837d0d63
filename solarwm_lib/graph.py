"""The workflow config as runs, targets, inputs and commands. Pure functions of the config; imports no torch.

Every cluster job parses the Snakefile again, so this module stays cheap. The rules only name files; whatever needs an `if`
is here, where a unit test reaches it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from solarwm_lib.config.architectures import did_you_mean, load_architecture
from solarwm_lib.config.identity import canonical_json, diff, digest, format_diff, semantic_view
from solarwm_lib.config.load import Resolved, load
from solarwm_lib.data.pack_options import PackOptions
from solarwm_lib.runtime.errors import ConfigError, SolarError

MARKER = "COMPLETE.json"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SyntheticData(Strict):
    """Rooms rendered along random camera paths; the fields are those of `solarwm_lib.data.synthetic.SynthSpec`."""

    kind: Literal["synthetic"]
    rooms: int = Field(1, ge=1, description="number of different rooms")
    train_clips: int = Field(96, ge=1)
    test_clips: int = Field(8, ge=1, description="clips on held-out camera paths")
    frames: int = Field(33, ge=1, description="pixel frames per clip")
    height: int = Field(64, ge=16)
    width: int = Field(96, ge=16)
    fps: float = Field(16.0, gt=0)
    seed: int = Field(7, ge=0)
    clips_per_shard: int = Field(32, ge=1)


class FolderData(Strict):
    """A folder of videos with sidecars, packed by `solarwm data pack`."""

    kind: Literal["folder"]
    source: str = Field(description="folder of videos")
    options: dict[str, Any] = Field(default_factory=dict, description="options of `solarwm data pack`")

    def pack_options(self) -> PackOptions:
        """Raises ConfigError for an unknown option or a value out of range."""
        known = [field.name for field in fields(PackOptions)]
        for name in self.options:
            if name not in known:
                raise ConfigError(f"unknown pack option {name}{did_you_mean(name, known)}; known are {known}")
        options = PackOptions(**self.options)
        options.check()
        return options


class TinyAssets(Strict):
    """Random base weights of a tiny architecture, with a codec fitted in closed form."""

    kind: Literal["tiny"]
    architecture: Name = "wan22-tiny"
    seed: int = Field(0, ge=0)


class RunSpec(Strict):
    """One training run: a recipe, its overlays and how far it goes."""

    recipe: str = Field(description="file under config/recipes, without .yaml")
    scale: str | None = Field(
        None, description="file under config/scales, without .yaml, merged over the recipe"
    )
    data: Name
    assets: Name
    steps: int = Field(
        ge=1, description="completed steps of the last checkpoint; raising it extends the chain"
    )
    checkpoint_every: int = Field(ge=1, description="steps per segment; one checkpoint each")
    validate_steps: list[int] | None = Field(None, description="checkpoints to validate; default: all")
    processes: int = Field(1, ge=1, description="data-parallel processes on this machine (torchrun)")
    threads: int = Field(1, ge=1, description="CPU threads per process")
    set: dict[str, Any] = Field(default_factory=dict, description="overrides by dotted key")


class InferenceSpec(Strict):
    """Standalone inference from a checkpoint of a run."""

    run: Name
    step: int | None = Field(None, description="checkpoint step; default: the last one")
    recipe: str
    scale: str | None = None
    threads: int = Field(1, ge=1)
    set: dict[str, Any] = Field(default_factory=dict)


class Side(Strict):
    """One column of a comparison: a validation pass of a run, or an inference artifact."""

    run: Name | None = None
    step: int | None = Field(None, description="checkpoint step; default: the last one")
    passes: list[Name] = Field(default_factory=list, description="validation passes; default: all of the run")
    inference: Name | None = None


class WorkflowConfig(Strict):
    """The whole workflow: `config/config.yaml`."""

    results: str = Field("results", description="results root, relative to the working directory")
    title: str = "SolarWM results"
    data: dict[Name, Annotated[SyntheticData | FolderData, Field(discriminator="kind")]]
    assets: dict[Name, TinyAssets]
    runs: dict[Name, RunSpec]
    inference: dict[Name, InferenceSpec] = Field(default_factory=dict)
    comparisons: dict[Name, list[Side]] = Field(default_factory=dict)


def parse_config(values: Mapping[str, Any]) -> WorkflowConfig:
    """Validate the workflow config. Raises ConfigError naming the key and the nearest valid one."""
    try:
        return WorkflowConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(
            "workflow config: " + "; ".join(_problem(item) for item in error.errors())
        ) from None


def _problem(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        names = {name for model in _MODELS for name in model.model_fields}
        return f"unknown key {key}{did_you_mean(str(item['loc'][-1]), names)}"
    return (
        f"{key}: {item['msg']} (found {item['input']!r})"
        if item["type"] != "missing"
        else f"{key} is missing"
    )


_MODELS = (SyntheticData, FolderData, TinyAssets, RunSpec, InferenceSpec, Side, WorkflowConfig)


@dataclass(frozen=True)
class Workflow:
    """The graph of one workflow config. Paths are strings relative to the working directory."""

    config: WorkflowConfig
    basedir: Path
    python: str = sys.executable

    # names, used as wildcard constraints and targets

    @property
    def results(self) -> str:
        return self.config.results

    def names_pattern(self, kind: str) -> str:
        """Regular expression of the data sets of one kind; matches nothing when there are none."""
        return "|".join(re.escape(n) for n, spec in self.config.data.items() if spec.kind == kind) or "(?!)"

    def inference_artifact(self, name: str) -> str:
        """Artifact name: one that follows the last checkpoint carries its step, so that extending a run makes a new
        artifact instead of contradicting the old one."""
        spec = self.config.inference[name]
        return name if spec.step is not None else f"{name}_step_{self.checkpoint_steps(spec.run)[-1]:06d}"

    def comparison_artifact(self, name: str) -> str:
        """As `inference_artifact`, with the last steps of all runs that the comparison follows."""
        runs = [side.run for side in self.config.comparisons[name] if side.run and side.step is None]
        runs += [
            self.config.inference[side.inference].run
            for side in self.config.comparisons[name]
            if side.inference in self.config.inference and self.config.inference[side.inference].step is None
        ]
        steps = sorted({self.checkpoint_steps(run)[-1] for run in runs if run in self.config.runs})
        return "_step_".join([name, *(f"{step:06d}" for step in steps)])

    def by_artifact(self, kind: Literal["inference", "comparison"], artifact: str) -> str:
        """The config name of an inference or comparison artifact."""
        names = self.config.inference if kind == "inference" else self.config.comparisons
        find = self.inference_artifact if kind == "inference" else self.comparison_artifact
        return next(name for name in names if find(name) == artifact)

    def artifacts_pattern(self, kind: Literal["inference", "comparison"]) -> str:
        names = self.config.inference if kind == "inference" else self.config.comparisons
        find = self.inference_artifact if kind == "inference" else self.comparison_artifact
        return "|".join(re.escape(find(name)) for name in names) or "(?!)"

    @cached_property
    def resolved(self) -> dict[str, Resolved]:
        """The resolved configuration of every run. Raises ConfigError when one is not legal."""
        return {name: self._resolve_run(name) for name in self.config.runs}

    # files

    def data_marker(self, name: str) -> str:
        return f"{self.results}/data/{name}/{MARKER}"

    def assets_marker(self, name: str) -> str:
        return f"{self.results}/assets/{name}/{MARKER}"

    def run_dir(self, run: str) -> str:
        return f"{self.results}/runs/{run}"

    def checkpoint(self, run: str, step: int) -> str:
        return f"{self.run_dir(run)}/checkpoint_model_{step:06d}/{MARKER}"

    def validation(self, run: str, step: int, name: str) -> str:
        return f"{self.run_dir(run)}/validation/step_{step:06d}/{name}/{MARKER}"

    def inference_marker(self, name: str) -> str:
        return f"{self.results}/inference/{self.inference_artifact(name)}/{MARKER}"

    def comparison_marker(self, name: str) -> str:
        return f"{self.results}/comparisons/{self.comparison_artifact(name)}/{MARKER}"

    def completion_report(self, run: str) -> str:
        return f"{self.run_dir(run)}/completion-report.md"

    @property
    def gallery(self) -> str:
        return f"{self.results}/report/gallery.html"

    # the chain of segments

    def checkpoint_steps(self, run: str) -> list[int]:
        """Steps of the run's checkpoints: every multiple of `checkpoint_every`, and the last step."""
        spec = self.config.runs[run]
        return sorted({*range(spec.checkpoint_every, spec.steps + 1, spec.checkpoint_every), spec.steps})

    def previous_checkpoint(self, run: str, step: int) -> list[str]:
        """The marker that a segment ending at `step` continues from; empty for the first segment."""
        earlier = [s for s in self.checkpoint_steps(run) if s < step]
        return [self.checkpoint(run, earlier[-1])] if earlier else []

    def validated_steps(self, run: str) -> list[int]:
        chosen = self.config.runs[run].validate_steps
        steps = self.checkpoint_steps(run)
        unknown = sorted(set(chosen or ()) - set(steps))
        if unknown:
            raise ConfigError(
                f"runs.{run}.validate_steps: no checkpoint at {unknown}; the checkpoints are {steps}"
            )
        return steps if chosen is None else sorted(chosen)

    def passes(self, run: str) -> list[str]:
        return [item.name for item in self.resolved[run].config.validation.passes]

    def run_inputs(self, run: str) -> dict[str, str]:
        spec = self.config.runs[run]
        return {"data": self.data_marker(spec.data), "assets": self.assets_marker(spec.assets)}

    def run_checkpoints(self, run: str) -> list[str]:
        return [self.checkpoint(run, step) for step in self.checkpoint_steps(run)]

    def run_validations(self, run: str) -> list[str]:
        return [
            self.validation(run, step, name)
            for step in self.validated_steps(run)
            for name in self.passes(run)
        ]

    def inference_checkpoint(self, name: str) -> str:
        spec = self.config.inference[name]
        return self.checkpoint(spec.run, self._step(spec.run, spec.step, f"inference.{name}.step"))

    def inference_inputs(self, name: str) -> dict[str, str]:
        return {
            **self.run_inputs(self.config.inference[name].run),
            "checkpoint": self.inference_checkpoint(name),
        }

    def inference_identity(self, name: str) -> str:
        return self._resolve_inference(name).semantic_digest

    def comparison_inputs(self, name: str) -> list[str]:
        """Markers of the artifacts that a comparison puts side by side."""
        found: list[str] = []
        for number, side in enumerate(self.config.comparisons[name]):
            key = f"comparisons.{name}[{number}]"
            if (side.run is None) == (side.inference is None):
                raise ConfigError(f"{key}: give exactly one of `run` and `inference`")
            if side.inference is not None:
                self._known(side.inference, self.config.inference, f"{key}.inference")
                found.append(self.inference_marker(side.inference))
            elif side.run is not None:
                self._known(side.run, self.config.runs, f"{key}.run")
                step = self._step(side.run, side.step, f"{key}.step")
                for name_ in side.passes:
                    self._known(name_, self.passes(side.run), f"{key}.passes")
                found += [self.validation(side.run, step, p) for p in side.passes or self.passes(side.run)]
        if len(found) < 2:
            raise ConfigError(f"comparisons.{name}: two or more artifacts are needed, found {len(found)}")
        return found

    def stage_runs(self, stage: str) -> list[str]:
        return [name for name, resolved in self.resolved.items() if resolved.route.stage == stage]

    @cached_property
    def stages(self) -> list[str]:
        return sorted({resolved.route.stage for resolved in self.resolved.values()})

    def all_targets(self) -> list[str]:
        return [
            *(self.completion_report(run) for run in self.config.runs),
            *(self.comparison_marker(name) for name in self.config.comparisons),
            *(self.inference_marker(name) for name in self.config.inference),
            self.gallery,
        ]

    def named_targets(self) -> dict[str, list[str]]:
        """Target rules: one per run, per stage, per inference and per comparison."""
        targets = {run: [self.completion_report(run)] for run in self.config.runs}
        targets |= {
            stage: [self.completion_report(run) for run in self.stage_runs(stage)] for stage in self.stages
        }
        targets |= {f"infer_{name}": [self.inference_marker(name)] for name in self.config.inference}
        return targets | {
            f"compare_{name}": [self.comparison_marker(name)] for name in self.config.comparisons
        }

    def gallery_inputs(self) -> list[str]:
        return self.all_targets()[:-1]

    # commands and params

    def config_path(self, kind: str, name: str) -> str:
        return str(self.basedir / "config" / kind / f"{name}.yaml")

    def run_arguments(self, run: str) -> str:
        """`--config ... --overlay ... --set ...` of a run: what `resolve_run` resolves."""
        spec = self.config.runs[run]
        return _arguments(
            self.config_path("recipes", spec.recipe),
            [self.config_path("scales", spec.scale)] if spec.scale else [],
            self._run_sets(run),
        )

    def path_arguments(self, run: str) -> str:
        """`--set` of the current places of a run's inputs and outputs, so that a moved results tree keeps working."""
        return _arguments(None, [], self._path_sets(run))

    def inference_arguments(self, name: str) -> str:
        spec = self.config.inference[name]
        return _arguments(
            self.config_path("recipes", spec.recipe),
            [self.config_path("scales", spec.scale)] if spec.scale else [],
            self._inference_sets(name),
        )

    def data_spec(self, name: str) -> str:
        """Canonical JSON of a data set's description: argument of the command and param of the rule."""
        spec = self.config.data[name]
        if isinstance(spec, FolderData):
            return canonical_json({"name": name, **asdict(spec.pack_options())}).strip()
        return canonical_json({"name": name, **spec.model_dump(exclude={"kind"})}).strip()

    def pack_arguments(self, name: str) -> str:
        """Words after `solarwm data pack`: the folder and every option that differs from its default."""
        spec = self.config.data[name]
        if not isinstance(spec, FolderData):
            raise ConfigError(f"data.{name}: kind is {spec.kind!r}, expected 'folder'")
        words = [spec.source]
        for option, value in asdict(spec.pack_options()).items():
            flag = f"--{option.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value != getattr(PackOptions, option):
                words += [flag, str(value)]
        return shlex.join(words)

    def launcher(self, run: str) -> str:
        """The words before `-m solarwm_lib`: plain Python for one process, torchrun for several."""
        processes = self.config.runs[run].processes
        words = [self.python]
        if processes > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return shlex.join(words)

    def rulegraph_command(self, configfiles: Iterable[str]) -> str:
        """Print the graph of rules behind all targets, with the same config files as this workflow."""
        words = [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(self.basedir / "Snakefile"),
            "--rulegraph",
        ]
        words += ["--configfile", *map(str, configfiles)] if configfiles else []
        return shlex.join([*words, "--", "all"])

    @property
    def command(self) -> str:
        return f"{shlex.quote(self.python)} -m solarwm_lib"

    def run_threads(self, run: str) -> int:
        return self.config.runs[run].processes * self.config.runs[run].threads

    def identity(self, run: str) -> str:
        """Rule param of everything a run makes: it changes only when the results would."""
        return self.resolved[run].semantic_digest

    # refusals at parse time

    def check(self) -> None:
        """Refuse what cannot work, before Snakemake plans anything. Raises ConfigError."""
        for name in self.config.data:
            self.data_spec(name)
        for run, spec in self.config.runs.items():
            self._known(spec.data, self.config.data, f"runs.{run}.data")
            self._known(spec.assets, self.config.assets, f"runs.{run}.assets")
            self.validated_steps(run)
        for name, inference in self.config.inference.items():
            self._known(inference.run, self.config.runs, f"inference.{name}.run")
            self._resolve_inference(name)
        for name in self.config.comparisons:
            self.comparison_inputs(name)
        refuse_changed_identities(self)

    # internals

    def _resolve_run(self, run: str) -> Resolved:
        spec = self.config.runs[run]
        return self._resolve(f"runs.{run}", spec.recipe, spec.scale, self._run_sets(run))

    def _resolve_inference(self, name: str) -> Resolved:
        spec = self.config.inference[name]
        return self._resolve(f"inference.{name}", spec.recipe, spec.scale, self._inference_sets(name))

    def _resolve(self, key: str, recipe: str, scale: str | None, sets: Mapping[str, Any]) -> Resolved:
        for kind, name in (("recipes", recipe), ("scales", scale)):
            if name and not Path(self.config_path(kind, name)).is_file():
                root = self.basedir / "config" / kind
                names = [
                    path.relative_to(root).with_suffix("").as_posix() for path in sorted(root.rglob("*.yaml"))
                ]
                raise ConfigError(
                    f"{key}.{kind[:-1]}: no file {self.config_path(kind, name)}{did_you_mean(name, names)}; there are {names}"
                )
        try:
            return load(
                Path(self.config_path("recipes", recipe)),
                overlays=[Path(self.config_path("scales", scale))] if scale else [],
                sets=_set_words(sets),
            )
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

    def _path_sets(self, run: str) -> dict[str, Any]:
        spec = self.config.runs[run]
        return {
            "data.root": _absolute(self.data_marker(spec.data)),
            "model.base_path": _absolute(self.assets_marker(spec.assets)),
            "runtime.output_dir": str(Path(self.run_dir(run)).absolute()),
        }

    def _run_sets(self, run: str) -> dict[str, Any]:
        spec = self.config.runs[run]
        return {
            "name": run,
            "distributed.world_size": spec.processes,
            **spec.set,
            **self._path_sets(run),
        }

    def _inference_sets(self, name: str) -> dict[str, Any]:
        spec = self.config.inference[name]
        return {
            "name": name,
            **spec.set,
            **self._path_sets(spec.run),
            "runtime.output_dir": _absolute(self.inference_marker(name)),
            "checkpoint.path": _absolute(self.inference_checkpoint(name)),
        }

    def _step(self, run: str, step: int | None, key: str) -> int:
        steps = self.checkpoint_steps(run)
        if step is None:
            return steps[-1]
        if step not in steps:
            raise ConfigError(f"{key}: run {run} has no checkpoint at {step}; its checkpoints are {steps}")
        return step

    def _known(self, name: str, known: Iterable[str], key: str) -> None:
        names = list(known)
        if name not in names:
            raise ConfigError(
                f"{key}: {name!r} is not defined{did_you_mean(name, names)}; defined are {names}"
            )


def load_workflow(values: Mapping[str, Any], basedir: Path, python: str = sys.executable) -> Workflow:
    """Build and check the graph of a workflow config. Raises ConfigError."""
    workflow = Workflow(parse_config(values), Path(basedir), python)
    workflow.check()
    return workflow


def refuse_changed_identities(workflow: Workflow) -> None:
    """Refuse a config that would give an existing run, data set or base model another identity.

    Raises ConfigError with a field-by-field diff. Paths, cadence, topology and the step count are free.
    """
    for run, resolved in workflow.resolved.items():
        path = Path(workflow.run_dir(run)) / "resolved-config.json"
        if path.is_file():
            existing = _read_json(path)
            if digest(semantic_view(existing)) != resolved.semantic_digest:
                differences = diff(semantic_view(existing), semantic_view(resolved.values))
                raise ConfigError(
                    f"run {run} exists with another identity: {format_diff(differences, oneline=True)}; "
                    f"use a new run name, or remove {workflow.run_dir(run)}"
                )
    declared = [
        (workflow.data_marker(name), f"data.{name}", json.loads(workflow.data_spec(name)))
        for name in workflow.config.data
    ]
    declared += [
        (
            workflow.assets_marker(name),
            f"assets.{name}",
            {"architecture": load_architecture(spec.architecture), "seed": spec.seed},
        )
        for name, spec in workflow.config.assets.items()
    ]
    for marker, key, spec in declared:
        if not Path(marker).is_file():
            continue
        identity = _read_json(Path(marker)).get("identity", {})
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}); it was cut or edited: remove it or restore it"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _absolute(marker: str) -> str:
    return str(Path(marker).parent.absolute())


def _arguments(config: str | None, overlays: list[str], sets: Mapping[str, Any]) -> str:
    words = ["--config", config] if config else []
    for overlay in overlays:
        words += ["--overlay", overlay]
    for word in _set_words(sets):
        words += ["--set", word]
    return shlex.join(words)


def _set_words(sets: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` with VALUE in JSON, which the YAML parser reads back to the same value."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sets.items()]


def load_workflow_or_exit(values: Mapping[str, Any], basedir: Path, deployed: bool) -> Workflow:
    """`load_workflow` for the Snakefile: a refusal is one line and the documented exit code, not a traceback.

    `deployed`: jobs run in a conda environment or container, whose own `python` must then be taken.
    """
    try:
        return load_workflow(values, basedir, "python" if deployed else sys.executable)
    except SolarError as error:
        print(f"solarwm: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def announce_leftovers(workdir: Path) -> None:
    """Say in one line how to clear the lock that a killed Snakemake left in `workdir`."""
    locks = workdir / ".snakemake" / "locks"
    if "--unlock" in sys.argv or not locks.is_dir() or not any(locks.iterdir()):
        return
    import psutil

    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        others = process.info["pid"] not in (os.getpid(), os.getppid())
        if (
            others
            and process.info["cwd"] == str(workdir)
            and any("snakemake" in Path(word).name for word in words[:4])
        ):
            return
    print(
        f"solarwm: the lock in {locks} was left by a killed Snakemake (no other one works in this folder); "
        "clear it with: snakemake --unlock",
        file=sys.stderr,
    )
