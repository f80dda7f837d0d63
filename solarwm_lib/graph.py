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

from solarwm_lib.config import commands, overrides, references
from solarwm_lib.config.architectures import did_you_mean
from solarwm_lib.config.identity import canonical_json
from solarwm_lib.config.load import Resolved, load
from solarwm_lib.config.published import published_segments, refuse_changed_identities
from solarwm_lib.config.references import known
from solarwm_lib.config.workflow import FolderData, PublishedData, WorkflowConfig, parse_config
from solarwm_lib.runtime.errors import ConfigError, SolarError
from solarwm_lib.training.setup import refuse_unsupported

MARKER = "COMPLETE.json"


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
        return _one_of(name for name, spec in self.config.data.items() if spec.kind == kind)

    def section_pattern(self, section: Literal["windows", "latents"]) -> str:
        return _one_of(self.config.windows if section == "windows" else self.config.latents)

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
        return _one_of(find(name) for name in names)

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

    def training_inputs(self, run: str) -> dict[str, str]:
        """`run_inputs`, and the stored latents if the run trains from some: sampling reads only clips."""
        latents = self.config.runs[run].latents
        return self.run_inputs(run) | ({"latents": self.latents_index(latents)} if latents else {})

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
        return self.checkpoint(spec.run, self._step(spec.run, spec.step, f"inference.{name}.step"))

    def inference_inputs(self, name: str) -> dict[str, str]:
        return {
            **self.run_inputs(self.config.inference[name].run),
            "checkpoint": self.inference_checkpoint(name),
        }

    def inference_identity(self, name: str) -> str:
        return self.resolved_inference(name).semantic_digest

    def comparison_inputs(self, name: str) -> list[str]:
        """Markers of the artifacts that a comparison puts side by side."""
        found: list[str] = []
        for number, side in enumerate(self.config.comparisons[name]):
            key = f"comparisons.{name}[{number}]"
            if (side.run is None) == (side.inference is None):
                raise ConfigError(f"{key}: give exactly one of `run` and `inference`")
            if side.inference is not None:
                known(side.inference, self.config.inference, f"{key}.inference")
                found.append(self.inference_marker(side.inference))
            elif side.run is not None:
                known(side.run, self.config.runs, f"{key}.run")
                step = self._step(side.run, side.step, f"{key}.step")
                for name_ in side.passes:
                    known(name_, self.passes(side.run), f"{key}.passes")
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
        return [*self.gallery_inputs(), *([self.gallery] if self.config.runs else [])]

    def named_targets(self) -> dict[str, list[str]]:
        """Target rules: one per run, per stage, per generation of latents, per inference and per comparison."""
        targets = {run: self.run_targets(run) for run in self.config.runs}
        targets |= {
            stage: [path for run in self.stage_runs(stage) for path in self.run_targets(run)]
            for stage in self.stages
        }
        targets |= {
            # With its parts: a part that was removed is asked for by this name, and by nothing that is made already.
            f"latents_{name}": [self.latents_index(name), *self.latents_parts(name)]
            for name in self.config.latents
        }
        targets |= {f"infer_{name}": [self.inference_marker(name)] for name in self.config.inference}
        return targets | {
            f"compare_{name}": [self.comparison_marker(name)] for name in self.config.comparisons
        }

    def gallery_inputs(self) -> list[str]:
        """Results that nothing here is made from; latents that a run used may be removed when it is trained."""
        used = {spec.latents for spec in self.config.runs.values()}
        used.update(other for spec in self.config.latents.values() for other in spec.reuse)
        return [
            *(self.latents_index(name) for name in self.config.latents if name not in used),
            *(path for run in self.config.runs for path in self.run_targets(run)),
            *(self.comparison_marker(name) for name in self.config.comparisons),
            *(self.inference_marker(name) for name in self.config.inference),
        ]

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
        words = ["--data", str(Path(self.data_marker(spec.data)).parent)]
        words += ["--profile", spec.profile, "--pixel-frames", str(spec.pixel_frames)]
        return shlex.join([*words, *(["--fps", str(spec.fps)] if spec.fps is not None else [])])

    def pack_arguments(self, name: str) -> str:
        """Words after `solarwm data pack`."""
        spec = self.config.data[name]
        if not isinstance(spec, FolderData):
            raise ConfigError(f"data.{name}: kind is {spec.kind!r}, expected 'folder'")
        return commands.pack_arguments(spec)

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

    def identity(self, run: str) -> str:
        """Rule param of everything a run makes: it changes only when the results would."""
        return self.resolved[run].semantic_digest

    def latents_identity(self, name: str) -> str:
        return self.resolved_latents[name].semantic_digest

    # refusals at parse time

    def check(self) -> None:
        """Refuse what cannot work, before Snakemake plans anything. Raises ConfigError."""
        references.check_names(self)
        references.check_latents(self)
        for run in self.config.runs:
            self.validated_steps(run)
            references.check_stored_latents(self, run)
            try:
                refuse_unsupported(self.resolved[run])
            except ConfigError as error:
                raise ConfigError(f"runs.{run}: {error}") from None
        references.check_target_names(self)
        for name in self.config.inference:
            self.resolved_inference(name)
        for name in self.config.comparisons:
            self.comparison_inputs(name)
        refuse_changed_identities(self)

    # internals

    def resolved_inference(self, name: str) -> Resolved:
        """The resolved configuration of an inference. Raises ConfigError when it is not legal."""
        spec = self.config.inference[name]
        return self._resolve(f"inference.{name}", spec.recipe, spec.scale, overrides.of_inference(self, name))

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
                sets=commands.set_words(sets),
            )
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

    def _config_arguments(self, recipe: str, scale: str | None, sets: Mapping[str, Any]) -> str:
        overlays = [self.config_path("scales", scale)] if scale else []
        return commands.config_arguments(self.config_path("recipes", recipe), overlays, sets)

    def _step(self, run: str, step: int | None, key: str) -> int:
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
