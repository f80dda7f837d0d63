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
from solarwm_lib.runtime import lifeline
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, Preempted
from solarwm_lib.runtime.lock import RUN_LOCK, exclusive
from solarwm_lib.runtime.process import Heartbeat, StopRequest
from solarwm_lib.runtime.watchdog import Watchdog
from solarwm_lib.training import setup
from solarwm_lib.training.setup import Run

if TYPE_CHECKING:
    import torch

    from solarwm_lib.config.load import Resolved
    from solarwm_lib.training.batches import Batches
    from solarwm_lib.training.costs import Restart
    from solarwm_lib.training.learner import Learner, Witness
    from solarwm_lib.training.loop import Trainer
    from solarwm_lib.training.saver import Saver
    from solarwm_lib.training.sharding import Layout
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

    from solarwm_lib.training import checkpoint, diagnostics, sharding
    from solarwm_lib.training.collectives import on_main, process_group
    from solarwm_lib.training.costs import Restart
    from solarwm_lib.training.saver import Saver

    restart = Restart()
    target = run_dir / checkpoint.directory_name(until_step)
    world_size, hang_seconds = run.topology.world_size, resolved.config.runtime.hang_timeout_seconds
    # Whether somebody still works is the watchdog's to say; the collectives' own limit must not come first.
    patience = max(3600.0, 2 * hang_seconds)
    with StopRequest() as stop, process_group(run.topology, patience) as device, ExitStack() as held:
        on_main(run.topology, lambda: held.enter_context(exclusive(run_dir / RUN_LOCK, "training")))
        setup.make_deterministic(device)
        heartbeat = Heartbeat(run_dir, run.topology.rank)
        heartbeat.beat("verify", 0)
        lifeline.register(run.topology.rank, heartbeat.path)
        reporter = diagnostics.Reporter(resolved, run_dir, run.topology.rank, world_size, heartbeat)
        held.enter_context(Watchdog(heartbeat, run_dir, world_size, hang_seconds))
        held.enter_context(reporter.explaining())

        identity = {**run.identity, "step": until_step}
        published = on_main(run.topology, lambda: artifacts.reissue(target, checkpoint.SCHEMA, identity))
        if published is not None:
            heartbeat.beat("complete", until_step)
            return published
        with restart.part("verify"):
            source = find_source(run, until_step, resume)

        heartbeat.beat("build", 0)
        config = resolved.config
        layout = sharding.layout(config.train.strategy, run.topology, device, config.train.precision)
        learner, trainer_of = build(run, device, layout, resumed=source is not None)
        history: list[dict[str, Any]] = []
        if source is not None:
            heartbeat.beat("load", 0)
            with restart.part("load"):
                history = restore(run, learner, source)
        saver = Saver(run, learner, source, history)
        held.callback(saver.close)
        saver.require_space()

        if learner.completed_steps < until_step:
            heartbeat.beat("data", learner.completed_steps)
            with restart.part("seek"):
                batches = setup.build_batches(resolved, device, run.topology)
            trainer = trainer_of(batches, heartbeat, stop)
            trainer.exhausted = reporter.exhausted
            trainer.background_failure = saver.poll
            fit(run, trainer, saver, until_step, restart)

        heartbeat.beat("publish", learner.completed_steps)
        artifact = saver.publish(target)
        if check_reload:
            saver.require_equal(artifact)
        heartbeat.beat("complete", learner.completed_steps)
        return artifact


def build(
    run: Run, device: torch.device, layout: Layout, *, resumed: bool
) -> tuple[Learner | Distillation, Callable[[Batches, Heartbeat, StopRequest], Trainer]]:
    """Return the learner of the run's stage at step 0, and what makes its trainer once there are batches."""
    from solarwm_lib.training import loop, prompts
    from solarwm_lib.training.network import build_backbone

    resolved, sharded = run.resolved, layout.is_sharded
    common = (run.plan, run.topology, run.run_dir)
    budget = resolved.config.data.failure_budget

    if resolved.route.stage == "stage2":
        from solarwm_lib.training import stage2

        models, distillation = stage2.build(run, device, layout, resumed=resumed)

        def distil(batches: Batches, heartbeat: Heartbeat, stop: StopRequest) -> Trainer:
            models.set_sequence_group(batches.peers.group)
            negative = prompts.negative_embeds(resolved, batches.source, device)
            student, critic = stage2.objectives(
                resolved, models, device, negative, _witness(distillation, batches)
            )
            return stage2.DistillationTrainer(
                distillation,
                critic,
                batches,
                *common,
                heartbeat,
                stop,
                budget,
                sharded,
                student_objective=student,
            )

        return distillation, distil

    backbone = build_backbone(resolved, device, layout, base_weights=not resumed)
    learner = setup.build_learner(resolved, backbone, None if resumed else run.inputs.initial)

    def train(batches: Batches, heartbeat: Heartbeat, stop: StopRequest) -> Trainer:
        backbone.set_sequence_group(batches.peers.group)
        negative = prompts.negative_embeds(resolved, batches.source, device)
        objective = setup.build_objective(resolved, backbone, device, negative, _witness(learner, batches))
        return loop.Trainer(learner, objective, batches, *common, heartbeat, stop, budget, sharded)

    return learner, train


def _witness(learner: Learner | Distillation, batches: Batches) -> Witness:
    """Return what compares a micro-batch of `learner`'s next step and its draws with those of the sequence-parallel peers."""
    return lambda batch, draws: batches.peers.same(learner.completed_steps + 1, batch, draws)


def find_source(run: Run, until_step: int, resume: str) -> Artifact | None:
    """Return the deep-verified save to continue from, None to start at step 0; every rank compares its share of the digests.

    The newest complete save of the run up to `until_step` wins, by its step, whatever its file times say. One that does not
    verify is an error on all ranks, never skipped: silently going back would repeat hours without anybody noticing the damage.
    """
    from solarwm_lib.training import checkpoint
    from solarwm_lib.training.collectives import agree, on_main

    found, advice = on_main(run.topology, lambda: _choose_source(run, until_step, resume))
    if found is None:
        return None
    error: ArtifactError | None = None
    try:
        checkpoint.verify_share(found, run.topology.rank, run.topology.world_size)
    except ArtifactError as failure:
        error = ArtifactError(f"{failure}{advice}")
    agree(error)
    return found


def _choose_source(run: Run, until_step: int, resume: str) -> tuple[Artifact | None, str]:
    """Return the save to continue from, its digests not yet compared, and what to say if they differ."""
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
        return _full_resume_source(run), ""
    newest = complete[0]
    older = f"; the next older one is {complete[1].path.name}" if complete[1:] else ""
    advice = f", or remove {newest.path} to go on without it{older}"
    try:
        artifact = checkpoint.open_verified(newest.path, inventory(run), deep=False)
    except ArtifactError as error:
        if (newest.path / artifacts.THINNED).exists():
            raise
        raise ArtifactError(f"{error}{advice}") from error
    setup.refuse_other_identity(artifact, run.identity)
    if (step := artifact.identity.get("step")) != newest.step:
        raise ArtifactError(f"{newest.path}: holds step {step}; give the directory its own name back{advice}")
    return artifact, advice


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
    artifact = checkpoint.open_verified(initial.path, deep=False)
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

    Each rank reads the rows that it holds, whatever number of ranks wrote them. Counters are compared with what the step
    implies, so a schedule, EMA or stream that restarted cannot go unnoticed.
    """
    from solarwm_lib.training import checkpoint
    from solarwm_lib.training.collectives import agree

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
    failure: ArtifactError | None = None
    try:
        for member, targets in learner.tensors().members().items():
            checkpoint.load_into(checkpoint.files_of(source, member), targets)
    except ArtifactError as error:
        failure = error
    agree(failure)
    learner.resume(step, state.ema_updates)
    learner.replaced = dict(state.run.get("replaced", {}))
    return state.history


def fit(run: Run, trainer: Trainer, saver: Saver, until_step: int, restart: Restart | None = None) -> None:
    """Step until `until_step` with metrics, progress and rolling saves; save and raise Preempted on a stop request."""
    from solarwm_lib.training import checkpoint, collectives, loop
    from solarwm_lib.training.metrics import MetricsLog, Progress, StepRecord, plot_curves

    config, learner, is_main = run.resolved.config, trainer.learner, run.topology.is_main
    every = config.runtime.log_every_steps
    metrics: MetricsLog | None = None
    if is_main:
        published, curves = checkpoint.newest_published(run.run_dir), config.runtime.tensorboard
        metrics = MetricsLog(run.run_dir, learner.completed_steps, until_step, published, tensorboard=curves)
    progress = Progress(learner.completed_steps, until_step, every, config.runtime.progress and is_main)

    def on_step(record: StepRecord) -> None:
        if metrics is not None and (record.step % every == 0 or record.step == until_step):
            metrics.append(record)
        if is_main and restart is not None:
            restart.tell(run.run_dir, record.step, record.step_seconds)
        progress.update(record)

    try:
        if collectives.any_rank(trainer.stop.requested):
            raise Preempted(
                f"stopped at step {learner.completed_steps} of {until_step} on request, before a step was made; run the "
                "same command again"
            )
        every_save = config.checkpoint.rolling_save_every_steps
        if not loop.fit(trainer, until_step, on_step, saver.rolling, every_save):
            trainer.heartbeat.beat("save", learner.completed_steps)
            saver.rolling(at_once=True)
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
