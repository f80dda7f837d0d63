"""Train a run up to a step: find where it stands, load that state, step, publish. Reads top to bottom."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, Preempted
from solarwm_lib.runtime.lock import RUN_LOCK, exclusive
from solarwm_lib.runtime.process import Heartbeat, StopRequest
from solarwm_lib.training import setup
from solarwm_lib.training.setup import Run

if TYPE_CHECKING:
    import torch

    from solarwm_lib.config.load import Resolved
    from solarwm_lib.training.batches import Batches
    from solarwm_lib.training.learner import Learner
    from solarwm_lib.training.loop import Trainer
    from solarwm_lib.training.saver import Saver
    from solarwm_lib.training.stage2 import Distillation

log = logging.getLogger(__name__)


def run(
    resolved: Resolved,
    *,
    run_dir: Path,
    until_step: int | None = None,
    resume: str = "auto",
    check_reload: bool = False,
) -> Artifact:
    """Train until `until_step` (default: train.max_steps) and publish `run_dir/checkpoint_model_NNNNNN`.

    Continues from the newest complete save of this run (`resume="auto"`), or refuses to if there is one
    (`resume="never"`). A target that is already published with this identity is verified and returned at once.
    `check_reload` reads the published checkpoint back and compares it bit for bit with the state in memory.
    Rank 0 holds the run directory's lock meanwhile: ArtifactError names the process that already works there.
    Raises Preempted (exit 75) after a rolling save when asked to stop; the same call then continues.
    """
    until_step = resolved.config.train.max_steps if until_step is None else until_step
    if until_step < 1:
        raise ConfigError(f"--until-step is {until_step}; expected at least 1")
    run = setup.open_run(resolved, run_dir)

    from solarwm_lib.training import checkpoint
    from solarwm_lib.training.collectives import on_main, process_group
    from solarwm_lib.training.saver import Saver

    target = run_dir / checkpoint.directory_name(until_step)
    with StopRequest() as stop, process_group(run.topology) as device, ExitStack() as held:
        on_main(run.topology, lambda: held.enter_context(exclusive(run_dir / RUN_LOCK, "training")))
        setup.make_deterministic(device)
        heartbeat = Heartbeat(run_dir, run.topology.rank)

        heartbeat.beat("verify", 0)
        identity = {**run.identity, "step": until_step}
        published = on_main(run.topology, lambda: artifacts.reissue(target, checkpoint.SCHEMA, identity))
        if published is not None:
            heartbeat.beat("complete", until_step)
            return published
        source = on_main(run.topology, lambda: find_source(run, until_step, resume))

        heartbeat.beat("build", 0)
        learner, trainer_of = build(run, device, resumed=source is not None)
        history = restore(run, learner, source) if source is not None else []
        saver = Saver(run, learner, source, history)
        saver.require_space()

        if learner.completed_steps < until_step:
            batches = setup.build_batches(resolved, device, run.topology)
            fit(run, trainer_of(batches, heartbeat, stop), saver, until_step)

        heartbeat.beat("publish", learner.completed_steps)
        artifact = saver.publish(target)
        if check_reload:
            on_main(run.topology, lambda: saver.require_equal(artifact))
        heartbeat.beat("complete", learner.completed_steps)
        return artifact


def build(
    run: Run, device: torch.device, *, resumed: bool
) -> tuple[Learner | Distillation, Callable[[Batches, Heartbeat, StopRequest], Trainer]]:
    """Return the learner of the run's stage at step 0, and what makes its trainer once there are batches."""
    from solarwm_lib.training import loop, prompts

    resolved = run.resolved
    common = (run.plan, run.topology, run.run_dir)
    budget = resolved.config.data.failure_budget

    if resolved.route.stage == "stage2":
        from solarwm_lib.training import stage2

        models, distillation = stage2.build(run, device, resumed=resumed)

        def distil(batches: Batches, heartbeat: Heartbeat, stop: StopRequest) -> Trainer:
            negative = prompts.negative_embeds(resolved, batches.source, device)
            student, critic = stage2.objectives(resolved, models, device, negative)
            return stage2.DistillationTrainer(
                distillation, critic, batches, *common, heartbeat, stop, budget, student_objective=student
            )

        return distillation, distil

    backbone = setup.build_backbone(resolved, device)
    learner = setup.build_learner(resolved, backbone, None if resumed else run.inputs.initial)

    def train(batches: Batches, heartbeat: Heartbeat, stop: StopRequest) -> Trainer:
        negative = prompts.negative_embeds(resolved, batches.source, device)
        objective = setup.build_objective(resolved, backbone, device, negative)
        return loop.Trainer(learner, objective, batches, *common, heartbeat, stop, budget)

    return learner, train


def find_source(run: Run, until_step: int, resume: str) -> Artifact | None:
    """Return the deep-verified save to continue from, None to start at step 0.

    The newest complete save of the run up to `until_step` wins. One that does not verify is an error, never skipped:
    silently going back would repeat hours without anybody noticing the damage.
    """
    from solarwm_lib.training import checkpoint

    complete, unfinished = checkpoint.candidates(run.run_dir, until_step)
    for path in unfinished:
        log.warning("%s has no completion marker and is ignored", path)
    if resume == "never" and complete:
        raise ArtifactError(
            f"{run.run_dir}: holds {len(complete)} saves (newest {complete[0].path.name}) but a fresh start was asked "
            f"for; use a new runtime.output_dir"
        )
    if not complete:
        return _full_resume_source(run)
    try:
        artifact = checkpoint.open_verified(complete[0].path, inventory(run))
    except ArtifactError as error:
        older = f"; the next older one is {complete[1].path.name}" if complete[1:] else ""
        raise ArtifactError(f"{error}, or remove {complete[0].path} to go on without it{older}") from error
    setup.refuse_other_identity(artifact, run.identity)
    return artifact


def inventory(run: Run) -> tuple[str, ...]:
    """Members that a save of this run has."""
    from solarwm_lib.training import checkpoint

    is_stage2 = run.resolved.route.stage == "stage2"
    return checkpoint.STAGE2_INVENTORY if is_stage2 else checkpoint.INVENTORY


def _full_resume_source(run: Run) -> Artifact | None:
    """Return the checkpoint that checkpoint.mode full_resume names, after comparing settings and inputs with it."""
    from solarwm_lib.config.identity import flatten, semantic_view
    from solarwm_lib.training import checkpoint

    settings, initial = run.resolved.config.checkpoint, run.inputs.initial
    if settings.mode != "full_resume" or initial is None:
        return None
    artifact = checkpoint.open_verified(initial.path)
    inputs: dict[str, Any] = {
        key: run.identity[key] for key in ("dataset", "assets", "latents") if key in run.identity
    }
    setup.refuse_other_identity(artifact, inputs)
    state = checkpoint.read_state(artifact)
    if settings.source_step not in (None, state.completed_steps):
        raise ArtifactError(
            f"{artifact.path}: holds step {state.completed_steps}, but checkpoint.source_step is {settings.source_step}"
        )
    before, now = dict(flatten(state.run["config"])), semantic_view(run.resolved.values)
    changed = [d for d in artifacts.identity_diff(before, now) if not d.startswith("checkpoint.")]
    if changed:
        raise ArtifactError(f"{artifact.path}: was trained with other settings: {'; '.join(changed)}")
    return artifact


def restore(run: Run, learner: Learner | Distillation, source: Artifact) -> list[dict[str, Any]]:
    """Load the whole state of `source` into `learner`; return its history.

    Counters are compared with what the step implies, so a schedule, EMA or stream that restarted cannot go unnoticed.
    """
    from solarwm_lib.training import checkpoint

    state = checkpoint.read_state(source)
    step = state.completed_steps
    implied = {
        "step": source.identity.get("step"),
        "ema_updates": learner.ema_updates_after(step),
        "global_batch_size": run.plan.global_batch_size,
        "stream_position": learner.batches_after(step) * run.plan.global_batch_size,
        "learning_rate": learner.learning_rate(step),
        "counters": learner.counters_after(step),
    }
    held = {
        "step": step,
        "ema_updates": state.ema_updates,
        "global_batch_size": state.global_batch_size,
        "stream_position": state.stream_position,
        "learning_rate": state.learning_rate,
        "counters": state.run.get("counters", {}),
    }
    # Another machine's libm may differ in the last bit of the cosine.
    if math.isclose(state.learning_rate, implied["learning_rate"], rel_tol=1e-12):
        held["learning_rate"] = implied["learning_rate"]
    if differences := artifacts.identity_diff(held, implied):
        raise ArtifactError(
            f"{source.path}: its state does not fit step {step} of this run: {'; '.join(differences)}"
        )
    device = next(iter(learner.parameters.values())).device
    for member, targets in learner.tensors().members().items():
        checkpoint.copy_into(targets, checkpoint.load_tensors(source.file(member), targets, device))
    learner.resume(step, state.ema_updates)
    learner.replaced = dict(state.run.get("replaced", {}))
    return state.history


def fit(run: Run, trainer: Trainer, saver: Saver, until_step: int) -> None:
    """Step until `until_step` with metrics, progress and rolling saves; save and raise Preempted on a stop request."""
    from solarwm_lib.training import checkpoint, loop
    from solarwm_lib.training.metrics import MetricsLog, Progress, StepRecord, plot_curves

    config, learner, is_main = run.resolved.config, trainer.learner, run.topology.is_main
    every = config.runtime.log_every_steps
    published = checkpoint.newest_published(run.run_dir)
    metrics = MetricsLog(run.run_dir, learner.completed_steps, until_step, published) if is_main else None
    progress = Progress(learner.completed_steps, until_step, every, config.runtime.progress and is_main)

    def on_step(record: StepRecord) -> None:
        if metrics is not None and (record.step % every == 0 or record.step == until_step):
            metrics.append(record)
        progress.update(record)

    try:
        every_save = config.checkpoint.rolling_save_every_steps
        if not loop.fit(trainer, until_step, on_step, saver.rolling, every_save):
            saver.rolling()
            reason = trainer.stop.signal_name or "by another rank"
            raise Preempted(
                f"stopped after step {learner.completed_steps} of {until_step} on request ({reason}); the state is "
                f"saved, run the same command again"
            )
    finally:
        trainer.batches.close()
        progress.close()
        if metrics is not None:
            metrics.close()
            _quietly(lambda: plot_curves(run.run_dir))


def _quietly(operation: Callable[[], Any]) -> None:
    """Run a nicety whose failure must not hide how training ended."""
    try:
        operation()
    except Exception:
        log.warning("drawing the curves failed", exc_info=True)
