"""The workflow config as runs, targets, inputs and commands. Pure functions of the config; imports no torch.

Every cluster job parses the Snakefile again, so this module stays cheap. The rules only name files; whatever needs an `if`
is here, where a unit test reaches it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from solarwm_lib.config import commands, overrides, references, sources, targets
from solarwm_lib.config.identity import canonical_json
from solarwm_lib.config.load import Resolved, load
from solarwm_lib.config.published import published_segments, refuse_changed_identities
from solarwm_lib.config.workflow import (
    FolderData,
    ImportedAssets,
    PublishedData,
    WorkflowConfig,
    parse_config,
)
from solarwm_lib.estimate import jobs
from solarwm_lib.runtime.errors import ConfigError, SolarError
from solarwm_lib.training.setup import refuse_unsupported

MARKER = "COMPLETE.json"
Kind = Literal["inference", "comparison", "export"]


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

    def names_pattern(self, section: Literal["data", "assets"], kind: str) -> str:
        """Regular expression of the data sets or assets of one kind; matches nothing when there are none."""
        found = self.config.data if section == "data" else self.config.assets
        return _one_of(name for name, spec in found.items() if spec.kind == kind)

    def section_pattern(self, section: Literal["windows", "latents"]) -> str:
        return _one_of(self.config.windows if section == "windows" else self.config.latents)

    def artifact(self, kind: Kind, name: str) -> str:
        """Artifact name: one that follows the last checkpoint carries its step, so that extending a run makes a new
        artifact instead of contradicting the old one; a comparison carries the steps of all runs that it follows."""
        followed = {run for run in self._followed(kind, name) if run in self.config.runs}
        steps = sorted({self.checkpoint_steps(run)[-1] for run in followed})
        return "_step_".join([name, *(f"{step:06d}" for step in steps)])

    def _followed(self, kind: Kind, name: str) -> list[str]:
        """The runs whose last checkpoint an artifact is made from."""
        if kind != "comparison":
            spec = self.config.inference[name] if kind == "inference" else self.config.exports[name]
            return [spec.run] if spec.run is not None and spec.step is None else []
        sides = self.config.comparisons[name]
        found = [side.run for side in sides if side.run and side.step is None]
        inferences = [side.inference for side in sides if side.inference in self.config.inference]
        return found + [run for other in inferences for run in self._followed("inference", str(other))]

    def _artifacts(self, kind: Kind) -> dict[str, str]:
        names = {
            "inference": [*self.config.inference],
            "comparison": [*self.config.comparisons],
            "export": [*self.config.exports],
        }
        return {self.artifact(kind, name): name for name in names[kind]}

    def by_artifact(self, kind: Kind, artifact: str) -> str:
        """The config name of an inference, comparison or export artifact."""
        return self._artifacts(kind)[artifact]

    def artifacts_pattern(self, kind: Kind) -> str:
        return _one_of(self._artifacts(kind))

    @cached_property
    def resolved(self) -> dict[str, Resolved]:
        """The resolved configuration of every run. Raises ConfigError when one is not legal."""
        return {
            name: self._resolve(f"runs.{name}", spec.recipe, spec.scale, overrides.of_run(self, name))
            for name, spec in self.config.runs.items()
        }

    @cached_property
    def resolved_latents(self) -> dict[str, Resolved]:
        """The resolved configuration of every generation of latents. Raises ConfigError when one is not legal."""
        return {
            name: self._resolve(f"latents.{name}", spec.recipe, spec.scale, overrides.of_latents(self, name))
            for name, spec in self.config.latents.items()
        }

    @cached_property
    def resolved_inference(self) -> dict[str, Resolved]:
        """The resolved configuration of every inference. Raises ConfigError when one is not legal."""
        return {
            name: self._resolve(
                f"inference.{name}", spec.recipe, spec.scale, overrides.of_inference(self, name)
            )
            for name, spec in self.config.inference.items()
        }

    # files

    def data_marker(self, name: str) -> str:
        spec = self.config.data[name]
        if isinstance(spec, PublishedData):
            return str(Path(spec.root).expanduser() / MARKER)
        return f"{self.results}/data/{name}/{MARKER}"

    def windows_marker(self, name: str) -> str:
        return f"{self.results}/windows/{name}/{MARKER}"

    def latents_dir(self, name: str) -> str:
        return f"{self.results}/latents/{name}"

    def latents_config(self, name: str) -> str:
        return f"{self.latents_dir(name)}/resolved-config.json"

    def latents_index(self, name: str) -> str:
        return f"{self.latents_dir(name)}/index/{MARKER}"

    def latents_parts(self, name: str) -> list[str]:
        """Markers of the parts, one job each; `parts` of the config, not the data, says how many there are."""
        shards = f"{self.latents_dir(name)}/shards"
        return [f"{shards}/part-{part:06d}/{MARKER}" for part in range(self.config.latents[name].parts)]

    def assets_marker(self, name: str) -> str:
        return f"{self.results}/assets/{name}/{MARKER}"

    def run_dir(self, run: str) -> str:
        return f"{self.results}/runs/{run}"

    def checkpoint(self, run: str, step: int) -> str:
        return f"{self.run_dir(run)}/checkpoint_model_{step:06d}/{MARKER}"

    def preflight(self, run: str) -> str:
        return f"{self.run_dir(run)}/preflight/{MARKER}"

    def validation(self, run: str, step: int, name: str) -> str:
        return f"{self.run_dir(run)}/validation/step_{step:06d}/{name}/{MARKER}"

    def inference_marker(self, name: str) -> str:
        return f"{self.results}/inference/{self.artifact('inference', name)}/{MARKER}"

    def comparison_marker(self, name: str) -> str:
        return f"{self.results}/comparisons/{self.artifact('comparison', name)}/{MARKER}"

    def export_marker(self, name: str) -> str:
        return f"{self.results}/exports/{self.artifact('export', name)}/{MARKER}"

    def completion_report(self, run: str) -> str:
        return f"{self.run_dir(run)}/completion-report.md"

    @property
    def gallery(self) -> str:
        return f"{self.results}/report/gallery.html"

    # the chain of segments

    def checkpoint_steps(self, run: str) -> list[int]:
        """Steps of the run's checkpoints: every multiple of `checkpoint_every`, and the last step.

        What is published keeps its place and its predecessor, so another cadence holds from the newest checkpoint on:
        Snakemake would otherwise find the old segments' inputs changed, and refuse or repeat them.
        """
        spec, published = self.config.runs[run], self._published[run]
        wanted = {*range(spec.checkpoint_every, spec.steps + 1, spec.checkpoint_every), spec.steps}
        kept = {step for step in wanted if not any(a < step < b for b, a in published.items())}
        return sorted(kept | {step for step in published if step <= spec.steps})

    @cached_property
    def _published(self) -> dict[str, dict[int, int]]:
        return {run: published_segments(Path(self.run_dir(run))) for run in self.config.runs}

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

    def latents_source(self, name: str) -> str:
        """Marker of what is encoded: windows, or a data set."""
        spec = self.config.latents[name]
        return self.windows_marker(spec.windows) if spec.windows else self.data_marker(str(spec.data))

    def latents_inputs(self, name: str) -> dict[str, str]:
        """What a part is made from; the shards behind windows are those of their data set."""
        spec = self.config.latents[name]
        inputs = {"source": self.latents_source(name), "assets": self.assets_marker(spec.assets)}
        if spec.windows:
            inputs["raw"] = self.data_marker(self.config.windows[spec.windows].data)
        return inputs

    def latents_reused(self, name: str) -> list[str]:
        return [self.latents_index(other) for other in self.config.latents[name].reuse]

    def run_inputs(self, run: str) -> dict[str, str]:
        spec = self.config.runs[run]
        return {"data": self.data_marker(spec.data), "assets": self.assets_marker(spec.assets)}

    def training_inputs(self, run: str) -> dict[str, str | list[str]]:
        """`run_inputs`, the stored latents if the run trains from some (sampling reads only clips), and what it starts
        from."""
        inputs: dict[str, str | list[str]] = dict(self.run_inputs(run))
        if latents := self.config.runs[run].latents:
            inputs["latents"] = self.latents_index(latents)
        if markers := list(dict.fromkeys(sources.markers(self, run).values())):
            inputs["initial"] = markers
        return inputs

    def preflight_inputs(self, run: str) -> dict[str, str | list[str]]:
        """`training_inputs`, and the validations without which a run may not start."""
        gates = sources.gates(self, run)
        return self.training_inputs(run) | ({"validated": gates} if gates else {})

    def run_checkpoints(self, run: str) -> list[str]:
        return [self.checkpoint(run, step) for step in self.checkpoint_steps(run)]

    def run_targets(self, run: str) -> list[str]:
        """A run's report and what it reports on: a new pass is seen also where Snakemake remembers no inputs."""
        return [self.completion_report(run), *self.run_validations(run)]

    def run_validations(self, run: str) -> list[str]:
        return [
            self.validation(run, step, name)
            for step in self.validated_steps(run)
            for name in self.passes(run)
        ]

    def inference_checkpoint(self, name: str) -> str:
        spec = self.config.inference[name]
        if spec.run is None:
            return self.assets_marker(str(spec.assets))
        return self.checkpoint(spec.run, self.step(spec.run, spec.step, f"inference.{name}.step"))

    def inference_inputs(self, name: str) -> dict[str, str]:
        """Clips, codec and text encoder, checkpoint."""
        spec = self.config.inference[name]
        inputs = self.run_inputs(spec.run) if spec.run else {"assets": self.imported_base(str(spec.assets))}
        data = {"data": self.data_marker(spec.data)} if spec.data else {}
        return {**inputs, **data, "checkpoint": self.inference_checkpoint(name)}

    def imported_base(self, name: str) -> str:
        """Marker of the base weights that imported trained weights belong to."""
        return self.assets_marker(str(sources.check_trained(self, name, f"assets.{name}").base))

    def import_inputs(self, name: str) -> dict[str, str]:
        spec = self.config.assets[name]
        return {"base": self.imported_base(name)} if isinstance(spec, ImportedAssets) and spec.base else {}

    def export_checkpoint(self, name: str) -> str:
        spec = self.config.exports[name]
        return self.checkpoint(spec.run, self.step(spec.run, spec.step, f"exports.{name}.step"))

    def inference_identity(self, name: str) -> str:
        return self.resolved_inference[name].semantic_digest

    def comparison_inputs(self, name: str) -> list[str]:
        """Markers of the artifacts that a comparison puts side by side."""
        return references.comparison_inputs(self, name)

    def all_targets(self) -> list[str]:
        return targets.everything(self)

    def named_targets(self) -> dict[str, list[str]]:
        return targets.named(self)

    def gallery_inputs(self) -> list[str]:
        return targets.gallery(self)

    # commands and params

    def config_path(self, kind: str, name: str) -> str:
        return str(self.basedir / "config" / kind / f"{name}.yaml")

    def run_arguments(self, run: str) -> str:
        """`--config ... --overlay ... --set ...` of a run as it is configured now.

        Every job of a run gets them rather than its resolved-config.json, which keeps what the run began with: paths,
        cadence, number of processes and validation passes may have changed since.
        """
        spec = self.config.runs[run]
        return self._config_arguments(spec.recipe, spec.scale, overrides.of_run(self, run))

    def validated_arguments(self, run: str) -> str:
        """`--validated DIRECTORY` of every validation that must be complete: its marker alone does not say that it is."""
        folders = [str(Path(marker).parent) for marker in sources.gates(self, run)]
        return " ".join(f"--validated {shlex.quote(folder)}" for folder in folders)

    def latents_arguments(self, name: str) -> str:
        spec = self.config.latents[name]
        return self._config_arguments(spec.recipe, spec.scale, overrides.of_latents(self, name))

    def inference_arguments(self, name: str) -> str:
        spec = self.config.inference[name]
        return self._config_arguments(spec.recipe, spec.scale, overrides.of_inference(self, name))

    def data_spec(self, name: str) -> str:
        """Canonical JSON of a data set's description: argument of the command and param of the rule."""
        spec = self.config.data[name]
        if isinstance(spec, FolderData):
            return canonical_json({"name": name, **asdict(spec.pack_options())}).strip()
        return canonical_json({"name": name, **spec.model_dump(exclude={"kind"})}).strip()

    def windows_spec(self, name: str) -> str:
        """Canonical JSON of what decides the windows of a data set: param of the rule."""
        return canonical_json(self.config.windows[name].model_dump(exclude={"data"})).strip()

    def windows_arguments(self, name: str) -> str:
        """Words after `solarwm data materialize-windows`."""
        spec = self.config.windows[name]
        return commands.windows_arguments(spec, str(Path(self.data_marker(spec.data)).parent))

    def pack_arguments(self, name: str) -> str:
        """Words after `solarwm data pack`."""
        spec = self.config.data[name]
        if not isinstance(spec, FolderData):
            raise ConfigError(f"data.{name}: kind is {spec.kind!r}, expected 'folder'")
        return commands.pack_arguments(spec)

    def assets_spec(self, name: str) -> str:
        """Canonical JSON of what decides base or imported weights: param of the rule. Paths never change a result."""
        return canonical_json(self.config.assets[name].model_dump(exclude={"kind", "source", "base"})).strip()

    def import_arguments(self, name: str) -> str:
        """Words after `solarwm weights import`."""
        spec = self.config.assets[name]
        if not isinstance(spec, ImportedAssets):
            raise ConfigError(f"assets.{name}: kind is {spec.kind!r}, expected 'imported'")
        return commands.import_arguments(
            spec, str(Path(self.imported_base(name)).parent) if spec.base else None
        )

    def export_spec(self, name: str) -> str:
        """Canonical JSON of the form of an export: param of the rule."""
        spec = self.config.exports[name]
        return canonical_json({"form": spec.form, "role": spec.role, "dtype": spec.dtype}).strip()

    def export_arguments(self, name: str) -> str:
        """Words after `solarwm weights export`."""
        return commands.export_arguments(
            str(Path(self.export_checkpoint(name)).parent), self.config.exports[name]
        )

    def launcher(self, run: str) -> str:
        """The words before `-m solarwm_lib` of a run's jobs."""
        spec = self.config.runs[run]
        return commands.launcher(self.python, spec.processes, spec.threads)

    def rulegraph_command(self, configfiles: Iterable[str]) -> str:
        return commands.rulegraph(self.basedir, configfiles)

    @property
    def command(self) -> str:
        return f"{shlex.quote(self.python)} -m solarwm_lib"

    def run_threads(self, run: str) -> int:
        return self.config.runs[run].processes * self.config.runs[run].threads

    def training_job(self, run: str) -> jobs.Job:
        """Memory and GPUs of a run's training jobs and preflight, by `solarwm estimate`."""
        return jobs.training_job(self.resolved[run], self.config.runs[run].processes)

    def sampling_job(self, kind: Literal["runs", "inference"], name: str) -> jobs.Job:
        """Memory and GPUs of the validations of a run, or of an inference."""
        return jobs.sampling_job((self.resolved if kind == "runs" else self.resolved_inference)[name])

    def identity(self, run: str) -> str:
        """Rule param of everything a run makes: it changes only when the results would."""
        return self.resolved[run].semantic_digest

    def latents_identity(self, name: str) -> str:
        return self.resolved_latents[name].semantic_digest

    # refusals at parse time

    def check(self) -> None:
        """Refuse what cannot work, before Snakemake plans anything. Raises ConfigError."""
        references.check_names(self)
        sources.check_names(self)
        references.check_latents(self)
        for run in self.config.runs:
            self.validated_steps(run)
            references.check_stored_latents(self, run)
            try:
                refuse_unsupported(self.resolved[run])
            except ConfigError as error:
                raise ConfigError(f"runs.{run}: {error}") from None
        for run in self.config.runs:
            sources.check_fit(self, run)
        references.check_target_names(self)
        for name in self.config.inference:
            references.check_inference(self, name)
        for name in self.config.exports:
            references.check_export(self, name)
        sources.check_averages(self)
        for name in self.config.comparisons:
            self.comparison_inputs(name)
        refuse_changed_identities(self)

    # internals

    def _resolve(self, key: str, recipe: str, scales: list[str], sets: Mapping[str, Any]) -> Resolved:
        for kind, name in (("recipes", recipe), *(("scales", scale) for scale in scales)):
            references.check_file(self, key, kind, name)
        try:
            return load(
                Path(self.config_path("recipes", recipe)),
                overlays=[Path(self.config_path("scales", scale)) for scale in scales],
                sets=commands.set_words(sets),
            )
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

    def _config_arguments(self, recipe: str, scales: list[str], sets: Mapping[str, Any]) -> str:
        overlays = [self.config_path("scales", scale) for scale in scales]
        return commands.config_arguments(self.config_path("recipes", recipe), overlays, sets)

    def step(self, run: str, step: int | None, key: str) -> int:
        """The checkpoint step that a reference means; ConfigError for one that is not there."""
        steps = self.checkpoint_steps(run)
        if step is None:
            return steps[-1]
        if step not in steps:
            raise ConfigError(f"{key}: run {run} has no checkpoint at {step}; its checkpoints are {steps}")
        return step


def load_workflow(values: Mapping[str, Any], basedir: Path, python: str = sys.executable) -> Workflow:
    """Build and check the graph of a workflow config. Raises ConfigError."""
    workflow = Workflow(parse_config(values), Path(basedir), python)
    workflow.check()
    return workflow


def _one_of(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names) or "(?!)"


def load_workflow_or_exit(values: Mapping[str, Any], basedir: Path, deployed: bool) -> Workflow:
    """`load_workflow` for the Snakefile: a refusal is one line and the documented exit code, not a traceback.

    `deployed`: jobs run in a conda environment or container, whose own `python` must then be taken.
    """
    try:
        return load_workflow(values, basedir, "python" if deployed else sys.executable)
    except SolarError as error:
        print(f"solarwm: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
