"""Stage2: a student and a critic that take turns, and a frozen teacher (spec wan22 5).

One counter decides: g completed outer steps. An outer step is one critic update, and before it, when due, one student update
on a batch of its own. `Distillation` is what the loop and a save see of it: its `completed_steps` is g, the student's own
counter is the number of its updates.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from solarwm_lib.objectives import noise
from solarwm_lib.objectives import self_gradient_forcing as sgf
from solarwm_lib.training import initial, loop, setup
from solarwm_lib.training.checkpoint import Tensors
from solarwm_lib.training.ema import Ema, EmaCadence
from solarwm_lib.training.learner import Learner, Loss, Witness, unwitnessed
from solarwm_lib.training.metrics import StepRecord
from solarwm_lib.training.network import build_backbone
from solarwm_lib.training.sharding import WHOLE, Layout
from solarwm_lib.training.stage1 import arithmetic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from solarwm_lib.backbones.wan22 import Wan22
    from solarwm_lib.config.load import Resolved
    from solarwm_lib.config.sections import SelfGradientForcing
    from solarwm_lib.training.batches import Batch
    from solarwm_lib.training.learner import Objective
    from solarwm_lib.training.setup import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudentCadence(EmaCadence):
    """When the student's average moves, in student updates: update number `start_step` makes it, as a copy of the student."""

    def is_due(self, completed_steps: int) -> bool:
        return sgf.ema_is_due(completed_steps, self.start_step, self.update_every)

    def decay_at(self, completed_steps: int) -> float:
        first = max(1, self.start_step)
        return 0.0 if completed_steps <= first else super().decay_at(completed_steps)

    def updates_after(self, completed_steps: int) -> int:
        return sgf.ema_updates_after(completed_steps, self.start_step, self.update_every)


@dataclass
class Distillation:
    """Student and critic as one learner. Until its first update the student's average holds the student's first weights."""

    student: Learner
    critic: Learner
    critic_updates_per_student: int
    replaced: dict[str, int] = field(default_factory=dict)

    @property
    def completed_steps(self) -> int:
        """Outer steps: each has one critic update."""
        return self.critic.completed_steps

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The student's: what is sampled from."""
        return self.student.parameters

    def learning_rate(self, step: int) -> float:
        """The rate of the student's next update after `step` outer steps."""
        return self.student.learning_rate(self._student_updates(step))

    def tensors(self) -> Tensors:
        """The tensor members of the current state."""
        student, critic = self.student.tensors(), self.critic.tensors()
        return Tensors(student.model, student.ema, student.optimizer, critic.model, critic.optimizer)

    def ema_updates(self) -> int:
        """How often the average was updated."""
        return self.student.ema_updates()

    def ema_updates_after(self, step: int) -> int:
        """How often it must have been updated after `step` outer steps."""
        return self.student.ema_updates_after(self._student_updates(step))

    def batches_after(self, step: int) -> int:
        """How many global batches `step` outer steps take: every update its own."""
        return sgf.batches_consumed(step, self.critic_updates_per_student)

    def counters(self) -> dict[str, int]:
        """What else a save records."""
        return {
            "student_updates": self.student.completed_steps,
            "critic_updates": self.critic.completed_steps,
        }

    def counters_after(self, step: int) -> dict[str, int]:
        """What `counters` must be after `step` outer steps."""
        return {"student_updates": self._student_updates(step), "critic_updates": step}

    def resume(self, step: int, ema_updates: int) -> None:
        """Set the counters to those of a save of `step` whose tensors are in place."""
        self.student.resume(self._student_updates(step), ema_updates)
        self.critic.resume(step, 0)

    def _student_updates(self, step: int) -> int:
        return sgf.student_updates_after(step, self.critic_updates_per_student)


@dataclass
class DistillationTrainer(loop.Trainer):
    """Runs outer steps: `objective` is the critic's, `student_objective` the student's."""

    learner: Distillation  # type: ignore[assignment]
    student_objective: Objective | None = None

    def step(self) -> tuple[StepRecord, bool]:
        """Take one outer step; return its record and whether any rank was asked to stop.

        Raises as `Trainer.step`. If it is the critic's update that fails, the student has moved in memory, not on disk.
        """
        started = time.perf_counter()
        learner, details = self.learner, {}
        g, ratio = learner.completed_steps, learner.critic_updates_per_student
        batch_number, updates = sgf.batches_consumed(g, ratio), []
        if self.student_objective is not None and sgf.student_is_due(g, ratio):
            student = self.update(learner.student, self.student_objective, batch_number)
            updates.append(student)
            batch_number += 1
            details = {
                "student_loss": student.loss,
                "student_learning_rate": student.learning_rate,
                "student_gradient_norm": student.gradient_norm,
                "zeroed_elements": float(student.zeroed),
            }
            if student.zeroed:
                log.warning(
                    "student update %d: %d non-finite elements of the scores' difference were set to 0",
                    learner.student.completed_steps,
                    student.zeroed,
                )
        critic = self.update(learner.critic, self.objective, batch_number)
        updates.append(critic)
        details["student_updates"] = float(learner.student.completed_steps)
        return self.record(started, critic, details, updates), any(update.stop for update in updates)


@dataclass(frozen=True)
class Models:
    """The three networks; the teacher is frozen."""

    student: Wan22
    teacher: Wan22
    critic: Wan22

    def set_sequence_group(self, group: ProcessGroup | None) -> None:
        """Share the tokens of every pass of the three among `group`."""
        for backbone in (self.student, self.teacher, self.critic):
            backbone.set_sequence_group(group)


def build(
    run: Run, device: torch.device, layout: Layout = WHOLE, *, resumed: bool
) -> tuple[Models, Distillation]:
    """Return the networks with their initial weights and the learner at step 0.

    A `layout` in parts holds for student and critic, and for the teacher unless `shard_teacher` is off.
    `resumed` leaves out the initial weights of student and critic, which a save then replaces. ArtifactError for a role
    checkpoint that does not verify or is of another network.
    """
    config = run.resolved.config
    settings = _settings(run.resolved)
    lower = config.train.precision == "bfloat16" and device.type == "cuda"
    student, critic = (
        build_backbone(run.resolved, device, layout, base_weights=False).eval() for _ in range(2)
    )
    kept = layout if config.train.shard_teacher else WHOLE
    teacher = build_backbone(run.resolved, device, kept, base_weights=False).eval().requires_grad_(False)
    teacher.transformer.disable_gradient_checkpointing()
    if lower and not kept.is_sharded:  # in parts it computes in bfloat16 as it is
        teacher.to(torch.bfloat16)
    for role, source in initial.sources(config).items():
        if role == "teacher" or not resumed:
            parameters = dict(getattr(Models(student, teacher, critic), role).trainable())
            initial.fill_role(role, source, run.inputs.roles[role], parameters)
    train, ratio = config.train, settings.critic_updates_per_student
    cadence = StudentCadence(
        train.ema.decay, train.ema.start_step, train.ema.update_every, train.ema.warmup_steps
    )
    updates = max(1, sgf.student_updates_after(train.max_steps, ratio))
    learners = []
    for backbone, optimizer, total, average in (
        (student, train.optimizer, updates, cadence),
        (critic, settings.critic_optimizer, train.max_steps, None),
    ):
        parameters = dict(backbone.trainable())
        learners.append(
            Learner(
                parameters,
                setup.build_optimizer(optimizer, parameters),
                Ema.of(parameters, average) if average is not None else None,
                setup.schedule(optimizer, total),
                optimizer.gradient_clip,
            )
        )
    return Models(student, teacher, critic), Distillation(learners[0], learners[1], ratio)


def recipe(resolved: Resolved) -> sgf.Recipe:
    """Return what stays the same over a run."""
    config, causal, settings = resolved.config, resolved.config.model.causal, _settings(resolved)
    table = noise.schedule(config.model.timestep_shift, config.train.num_train_timesteps)
    return sgf.Recipe(
        table,
        sgf.denoising_timesteps(settings.denoising_timesteps, table),
        chunk=causal.chunk_latent_frames,
        window=causal.local_attention_latent_frames,
        sink=causal.sink_latent_frames,
        max_prior_clean_chunks=causal.max_prior_clean_chunks,
        score_min_timestep=settings.score_min_timestep,
        score_max_timestep=settings.score_max_timestep,
        real_guidance_scale=settings.real_guidance_scale,
        fake_guidance_scale=settings.fake_guidance_scale,
    )


def objectives(
    resolved: Resolved,
    models: Models,
    device: torch.device,
    negative_embeds: torch.Tensor | None,
    same: Witness = unwitnessed,
) -> tuple[Objective, Objective]:
    """Return the losses of a micro-batch of (student, critic). Of its latents only the first, the anchor, is looked at."""
    fixed = recipe(resolved)
    draw = partial(sgf.draw, recipe=fixed, seed=resolved.config.data.seed)
    none = torch.zeros(1, 1, 1, device=device)  # never looked at: without guidance there is no second forward

    def parts(batch: Batch) -> tuple[torch.Tensor, sgf.Conditions, sgf.Draws]:
        draws = draw(tuple(batch.latents.shape[1:]), global_sample_indices=batch.indices)
        same(batch, draws)
        conditions = sgf.Conditions(batch.prompt_embeds, batch.w2c, batch.intrinsics)
        return batch.latents[:, :1], conditions, draws

    def student(batch: Batch) -> Loss:
        anchor, conditions, draws = parts(batch)
        with arithmetic(resolved, device):
            record = sgf.rollout(models.student, anchor, conditions, draws, fixed)
            generated = sgf.replay(models.student, record, conditions, fixed)
            negative = none if negative_embeds is None else negative_embeds
            output = sgf.student_loss(
                generated, models.teacher, models.critic, conditions, negative, draws, fixed
            )
        loss = output.loss
        return Loss(loss.loss, loss.per_sample, times(record, draws), zeroed=output.direction.replaced)

    def critic(batch: Batch) -> Loss:
        anchor, conditions, draws = parts(batch)
        with arithmetic(resolved, device):
            record = sgf.rollout(models.student, anchor, conditions, draws, fixed)
            generated = sgf.critic_sample(models.student, record, conditions, fixed)
            loss = sgf.critic_loss(generated, models.critic, conditions, draws, fixed)
        return Loss(loss.loss, loss.per_sample, times(record, draws))

    def times(record: sgf.Record, draws: sgf.Draws) -> list[dict[str, Any]]:
        exits = record.timesteps[:, -1].tolist()
        return [{"exit": a, "score": b} for a, b in zip(exits, draws.score_timestep.tolist(), strict=True)]

    return student, critic


def _settings(resolved: Resolved) -> SelfGradientForcing:
    settings = resolved.config.train.self_gradient_forcing
    if settings is None:
        raise ValueError("train.self_gradient_forcing is null; a checked configuration has it")
    return settings
