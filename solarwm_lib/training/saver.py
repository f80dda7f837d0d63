"""Writing the state of a run: rolling saves inside a segment, the published checkpoint at its end.

A rolling save stops the training only for a copy of the state in host memory; a thread writes it, makes it durable, publishes it
and removes what it makes superfluous. There is never more than one under way: the next save and the end wait for it first. The
bytes are hashed as they are written and their sizes checked after publishing. They are not read back: that would only read the
page cache. Whoever loads a save, or thins older checkpoints because of it, compares all digests first.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact, Transaction
from solarwm_lib.config.identity import semantic_view
from solarwm_lib.runtime.errors import ArtifactError, SolarError
from solarwm_lib.training import checkpoint, metrics, retention, writing
from solarwm_lib.training.checkpoint import State, Tensors
from solarwm_lib.training.collectives import agree, on_main
from solarwm_lib.training.learner import Learner
from solarwm_lib.training.members import first_difference
from solarwm_lib.training.setup import Run

if TYPE_CHECKING:
    from solarwm_lib.training.stage2 import Distillation

log = logging.getLogger(__name__)

CLOSE_SECONDS = 20.0  # torchrun kills the others 30 s after one has failed


class Saver:
    """Writes the state of a run: rolling saves inside a segment, the published checkpoint at its end.

    `rolling`, `publish`, `finish` and `require_equal` are collective: every rank calls them at the same step, and a failure on
    any rank is raised on all. `poll` and `close` are not.
    """

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
        self._buffers = writing.HostBuffers()
        self._thread = ThreadPoolExecutor(1, "save")
        self._under_way: Future[None] | None = None
        self._given_up = threading.Event()

    def tensors(self) -> Tensors:
        """The tensor members of the current state."""
        return self.learner.tensors()

    def require_space(self) -> None:
        """Raise ArtifactError at the start if the disk cannot take one more save: hours later is too late to say so."""

        def check() -> None:
            for path in retention.remove_partial_saves(self.run.run_dir):
                log.info("removed %s, left by a save that did not finish", path)
            needed = self.tensors().bytes()
            free = shutil.disk_usage(self.run.run_dir).free
            if free < needed:
                raise ArtifactError(
                    f"{self.run.run_dir}: a checkpoint needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free; "
                    f"free space or change runtime.output_dir"
                )

        on_main(self.run.topology, check)

    def rolling(self, *, at_once: bool = False) -> None:
        """Save the current step under `rolling/` and remove older rolling saves once this one is complete.

        Returns when the state is copied, or with `at_once` (and without checkpoint.asynchronous) when it is saved.
        """
        started, step = time.perf_counter(), self.learner.completed_steps
        self.finish()
        if step == self.saved_step:
            return
        settings = self.run.resolved.config.checkpoint
        target = self.run.run_dir / "rolling" / f"step_{step:06d}"
        self._save(
            target, started, keep=settings.keep_rolling, background=settings.asynchronous and not at_once
        )
        self.saved_step = step

    def publish(self, target: Path) -> Artifact:
        """Publish the current step at `target`, remove the rolling saves it makes superfluous, thin older checkpoints."""
        started = time.perf_counter()
        self.finish()
        artifact = self._save(target, started, keep=0, background=False)
        assert artifact is not None
        settings = self.run.resolved.config.checkpoint

        def thin() -> None:
            pinned = settings.keep_full_steps
            for path in retention.thin_published(self.run.run_dir, artifact, settings.keep_full, pinned):
                log.info("thinned %s: its weights stay, its optimizer state is dropped", path)

        on_main(self.run.topology, thin)
        return artifact

    def poll(self) -> SolarError | None:
        """Return why the save under way on this rank has failed; None if it has not, or not yet."""
        future = self._under_way
        return _failure(future) if future is not None and future.done() else None

    def finish(self) -> None:
        """Wait for the save under way on all ranks; raise its error on all of them."""
        future, self._under_way = self._under_way, None
        if self.run.resolved.config.checkpoint.asynchronous:
            agree(None if future is None else _failure(future))

    def close(self) -> None:
        """Let a save under way end, whatever ended the training; its failure is logged.

        If a peer is gone, its part never comes: this rank then waits for it only as long as launchers wait for this rank.
        """
        future, self._under_way = self._under_way, None
        if future is not None:
            wait([future], CLOSE_SECONDS)
            self._given_up.set()
            if (error := _failure(future)) is not None:
                log.warning("the rolling save failed: %s", error)
        self._thread.shutdown()

    def require_equal(self, artifact: Artifact) -> None:
        """Raise ArtifactError naming the first tensor of `artifact` that differs in any bit from the state in memory."""
        error: ArtifactError | None = None
        members = self.tensors().members()
        if self.run.topology.is_main or not writing.writers_of(members, 0).is_alone:
            for member, held in members.items():
                if (name := first_difference(checkpoint.files_of(artifact, member), held)) is not None:
                    error = ArtifactError(
                        f"{artifact.path}: {member}: {name} read back differs from what was saved"
                    )
                    break
        agree(error)

    def _save(self, target: Path, started: float, *, keep: int, background: bool) -> Artifact | None:
        """Save the current step at `target`; return the artifact, None if a thread goes on with it.

        A complete save of this step that is there already is verified and returned.
        """
        held, rank, step = ExitStack(), self.run.topology.rank, self.learner.completed_steps
        identity = {**self.run.identity, "step": step}
        tensors = self.tensors()
        opened: list[Transaction] = []
        extra: dict[str, bytes] = {}

        def begin() -> Artifact | Path:
            existing = artifacts.reissue(target, checkpoint.SCHEMA, identity)
            if existing is not None:
                retention.remove_rolling(self.run.run_dir, step, keep)
                return existing
            extra.update(checkpoint.extra(self.state()))
            stack, transaction = checkpoint.begin(target, tensors, identity, self.parents)
            held.push(stack)
            opened.append(transaction)
            return transaction.staging

        try:
            place = on_main(self.run.topology, begin)
            if isinstance(place, Artifact):
                return place
            files, writers = self._gather(tensors, place, background)
        except BaseException:
            held.__exit__(*sys.exc_info())
            raise
        names = (*tensors.members(), checkpoint.STATE)

        def write() -> None:
            writing_since = time.perf_counter()
            if not opened:
                if files:
                    writing.write_part(place, target, rank, files)
                return
            writing.write_main(held, opened[0], files, extra, writers, self._given_up.is_set)
            # Cheap: sizes, and that no part is missing. The digests are those of what was handed to the disk just now.
            saved = checkpoint.open_verified(target, names, deep=False)
            for path in retention.remove_rolling(self.run.run_dir, step, keep):
                log.info("removed %s, superseded by the save of step %d", path, step)
            log.info("saved step %d at %s", step, target)
            metrics.append_event(
                self.run.run_dir,
                "save",
                step,
                kind="rolling" if target.parent.name == "rolling" else "published",
                asynchronous=background,
                seconds=blocked if background else time.perf_counter() - started,
                write_seconds=time.perf_counter() - writing_since,
                bytes=saved.bytes,
            )

        blocked = time.perf_counter() - started
        if background:
            self._under_way = self._thread.submit(write)
            return None
        agree(_attempt(write, target))
        return on_main(self.run.topology, lambda: artifacts.read(target, checkpoint.SCHEMA))

    def _gather(
        self, tensors: Tensors, staging: Path, background: bool
    ) -> tuple[writing.Members, writing.Writers]:
        """Return what this rank writes, and who writes. Copied to host memory, unless one rank writes at once."""
        members = tensors.members()
        writers = writing.writers_of(members, self.run.topology.rank)
        if writers.is_alone and not background:
            return (members if writers.index is not None else {}), writers
        unseen = writers.index is not None and not staging.is_dir()
        agree(
            ArtifactError(
                f"{staging.parent}: rank 0 made {staging.name} there and this rank does not see it; runtime.output_dir must be "
                "on a file system that all processes share"
            )
            if unseen
            else None
        )
        files: writing.Members = {}

        def copy() -> None:
            nonlocal files
            files = writing.stage(members, writers, self._buffers)

        agree(_attempt(copy, staging))
        return files, writers

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


def _attempt(operation: Callable[[], None], target: Path) -> SolarError | None:
    """Run `operation`; return how it failed, for `agree`."""
    try:
        operation()
    except Exception as error:
        return writing.as_artifact_error(error, target)
    return None


def _failure(future: Future[None]) -> SolarError | None:
    """Wait for a save in the background; return how it failed."""
    error = future.exception()
    if error is None or isinstance(error, SolarError):
        return error
    return ArtifactError(f"the rolling save failed: {type(error).__name__}: {error}")


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
