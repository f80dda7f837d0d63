"""Writing the state of a run: rolling saves inside a segment, the published checkpoint at its end."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact
from solarwm_lib.config.identity import semantic_view
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint
from solarwm_lib.training.checkpoint import State, Tensors
from solarwm_lib.training.collectives import on_main
from solarwm_lib.training.learner import Learner
from solarwm_lib.training.setup import Run

if TYPE_CHECKING:
    from solarwm_lib.training.stage2 import Distillation

log = logging.getLogger(__name__)


class Saver:
    """Writes the state of a run: rolling saves inside a segment, the published checkpoint at its end."""

    def __init__(
        self,
        run: Run,
        learner: Learner | Distillation,
        source: Artifact | None,
        history: list[dict[str, Any]],
    ) -> None:
        self.run, self.learner, self.history = run, learner, history
        self.parents: list[Any] = [*_published_ancestor(source), *run.inputs.parents]
        self.first_step = learner.completed_steps
        self.saved_step = learner.completed_steps if source is not None else -1

    def tensors(self) -> Tensors:
        """The tensor members of the current state."""
        return self.learner.tensors()

    def require_space(self) -> None:
        """Raise ArtifactError at the start if the disk cannot take one more save: hours later is too late to say so."""

        def check() -> None:
            needed = self.tensors().bytes()
            free = shutil.disk_usage(self.run.run_dir).free
            if free < needed:
                raise ArtifactError(
                    f"{self.run.run_dir}: a checkpoint needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free; "
                    f"free space or change runtime.output_dir"
                )

        on_main(self.run.topology, check)

    def rolling(self) -> None:
        """Save the current step under `rolling/` and remove older rolling saves once this one verifies."""
        step = self.learner.completed_steps
        if step == self.saved_step:
            return
        self._save(self.run.run_dir / "rolling" / f"step_{step:06d}")
        self._remove_rolling(step, self.run.resolved.config.checkpoint.keep_rolling)
        self.saved_step = step
        log.info("rolling save of step %d", step)

    def publish(self, target: Path) -> Artifact:
        """Publish the current step at `target` and remove the rolling saves it makes superfluous."""
        artifact = self._save(target)
        self._remove_rolling(self.learner.completed_steps, keep=0)
        return artifact

    def require_equal(self, artifact: Artifact) -> None:
        """Raise ArtifactError naming the first tensor of `artifact` that differs in any bit from the state in memory."""
        for member, held in self.tensors().members().items():
            loaded = checkpoint.load_tensors(artifact.file(member), held)
            for name, tensor in held.items():
                if not torch.equal(loaded[name], tensor.detach().cpu()):
                    raise ArtifactError(
                        f"{artifact.path}: {member}: {name} read back differs from what was saved"
                    )

    def _save(self, target: Path) -> Artifact:
        identity = {**self.run.identity, "step": self.learner.completed_steps}

        def save() -> Artifact:
            existing = artifacts.reissue(target, checkpoint.SCHEMA, identity)
            if existing is not None:
                return existing
            tensors = self.tensors()
            checkpoint.save(target, tensors, self.state(), identity, self.parents)
            return checkpoint.open_verified(target, (*tensors.members(), checkpoint.STATE))

        return on_main(self.run.topology, save)

    def _remove_rolling(self, step: int, keep: int) -> None:
        if self.run.topology.is_main:
            for path in checkpoint.remove_rolling(self.run.run_dir, step, keep):
                log.info("removed %s, superseded by the verified save of step %d", path, step)

    def state(self) -> State:
        """Everything but the tensors, at the current step. Raises ArtifactError if counters are not what the step implies."""
        step, counters = self.learner.completed_steps, self.learner.counters()
        if counters != self.learner.counters_after(step):
            raise ArtifactError(
                f"{self.run.run_dir}: counters {counters} at step {step}, expected {self.learner.counters_after(step)}; not saved"
            )
        return State(
            completed_steps=step,
            ema_updates=self.learner.ema_updates(),
            stream_position=self.learner.batches_after(step) * self.run.plan.global_batch_size,
            learning_rate=self.learner.learning_rate(step),
            global_batch_size=self.run.plan.global_batch_size,
            history=_extended(self.history, self._stretch(step)),
            run={
                "route": self.run.resolved.route.key,
                "semantic_digest": self.run.resolved.semantic_digest,
                "config": _nested(semantic_view(self.run.resolved.values)),
                "replaced": self.learner.replaced,
                **({"counters": counters} if counters else {}),
            },
        )

    def _stretch(self, step: int) -> dict[str, Any]:
        """The steps of this process and the circumstances under which their bits are reproducible."""
        device = next(iter(self.learner.parameters.values())).device
        return {
            "from_step": self.first_step,
            "to_step": step,
            "world_size": self.run.topology.world_size,
            "micro_batch_size": self.run.plan.micro_batch_size,
            "gradient_accumulation_steps": self.run.plan.accumulation_steps,
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }


def _extended(history: list[dict[str, Any]], stretch: dict[str, Any]) -> list[dict[str, Any]]:
    """Append `stretch`, or lengthen the last one if only the steps differ: a resume on the same terms leaves no trace."""
    if history:
        last = history[-1]
        joined = {**stretch, "from_step": last["from_step"]}
        if last["to_step"] == stretch["from_step"] and {**last, "to_step": stretch["to_step"]} == joined:
            return [*history[:-1], joined]
    return [*history, stretch]


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} as nested mappings."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    return result


def _published_ancestor(source: Artifact | None) -> list[Path]:
    """Return the published checkpoint that `source` is or descends from: rolling saves are removed, so never a parent."""
    if source is None:
        return []
    if source.path.parent.name != "rolling":
        return [source.path]
    parents = [source.path / parent.path for parent in source.parents if parent.schema == checkpoint.SCHEMA]
    return [Path(artifacts.read(parent).path) for parent in parents[:1]]
