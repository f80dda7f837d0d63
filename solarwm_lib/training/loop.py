"""The optimizer step and the loop around it. One counter, `completed_steps`, decides everything that depends on time.

Order of a step (spec operations 9.8): micro-batches forward and backward; ranks exchange a status, so that a non-finite
loss or gradient, a failed read or a stop request is known to all before anyone acts on it; gradients are averaged and
clipped; optimizer; counter; EMA; log. Whatever raises does so before the optimizer has moved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from solarwm_lib.runtime.errors import NonFiniteError, SolarError
from solarwm_lib.runtime.process import Heartbeat, StopRequest, memory_bytes
from solarwm_lib.training import collectives, diagnostics, optim
from solarwm_lib.training.batches import Batch, Batches
from solarwm_lib.training.ema import Ema
from solarwm_lib.training.metrics import StepRecord
from solarwm_lib.training.topology import BatchPlan, Topology


@dataclass(frozen=True)
class Loss:
    """Loss of one micro-batch: scalar with gradient, detached per-sample terms `[B]`, raw timestep of each sample."""

    loss: torch.Tensor
    per_sample: torch.Tensor
    timesteps: list[float]


Objective = Callable[[Batch], Loss]


@dataclass
class Learner:
    """Everything a step changes: the parameters, the optimizer's slots, the average and the counter."""

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema
    learning_rate: Callable[[int], float]
    gradient_clip: float
    completed_steps: int = 0

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by parameter name; a parameter the loss does not reach has a zero gradient, on every rank alike."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def apply(self, gradients: list[torch.Tensor], norm: torch.Tensor) -> float:
        """Take one optimizer step with `gradients` of global norm `norm`; return the learning rate it used."""
        optim.clip_gradients(gradients, norm, self.gradient_clip)
        rate = self.learning_rate(self.completed_steps)
        optim.set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.completed_steps += 1
        self.ema.update(self.parameters, self.completed_steps)
        self.optimizer.zero_grad(set_to_none=True)
        return rate


@dataclass
class _Share:
    """What this rank computed of the current step."""

    micro_batches: list[tuple[Batch, Loss]] = field(default_factory=list)
    data_seconds: float = 0.0
    error: SolarError | None = None

    def loss_sum(self) -> float:
        return sum(loss.per_sample.double().sum().item() for _, loss in self.micro_batches)


@dataclass
class Trainer:
    """Runs optimizer steps of one rank's share of the global batch."""

    learner: Learner
    objective: Objective
    batches: Batches
    plan: BatchPlan
    topology: Topology
    run_dir: Path
    heartbeat: Heartbeat
    stop: StopRequest

    def step(self) -> tuple[StepRecord, bool]:
        """Take one optimizer step; return its record and whether any rank was asked to stop.

        Raises NonFiniteError, or the lowest failing rank's SolarError, on every rank and with the state unchanged.
        """
        started = time.perf_counter()
        number = self.learner.completed_steps
        self.heartbeat.beat("forward_backward", number)
        share = self._compute(number)
        gradients = self.learner.gradients()
        tensors = list(gradients.values())
        local_norm = optim.gradient_norm(tensors)

        self.heartbeat.beat("status", number, collective="all_gather")
        loss, stop = self._exchange(share, gradients, local_norm.item())
        self.heartbeat.beat("reduce", number, collective="all_reduce")
        collectives.average_(tensors)
        norm = local_norm if collectives.world_size() == 1 else optim.gradient_norm(tensors)
        if not math.isfinite(norm.item()):
            self._refuse(share, gradients, "gradient (after averaging over ranks)", [0])

        self.heartbeat.beat("optimizer", number)
        rate = self.learner.apply(tensors, norm)
        seconds = time.perf_counter() - started
        record = StepRecord(
            step=self.learner.completed_steps,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm.item(),
            step_seconds=seconds,
            data_seconds=share.data_seconds,
            samples_per_second=self.plan.global_batch_size / seconds,
            memory_bytes=memory_bytes(),
            wall_time=time.time(),
            monotonic_time=time.monotonic(),
        )
        return record, stop

    def _compute(self, number: int) -> _Share:
        """Forward and backward of this rank's micro-batches; a failure is kept until the peers know of it."""
        share = _Share()
        try:
            micro_batches = self.plan.micro_batches(number, self.topology.data_rank)
            for position, indices in enumerate(micro_batches):
                waiting = time.perf_counter()
                following = (
                    micro_batches[position + 1]
                    if position + 1 < len(micro_batches)
                    else self.plan.micro_batches(number + 1, self.topology.data_rank)[0]
                )
                batch = self.batches.load(indices, following)
                share.data_seconds += time.perf_counter() - waiting
                loss = self.objective(batch)
                (loss.loss / self.plan.accumulation_steps).backward()
                share.micro_batches.append((batch, loss))
        except SolarError as error:
            share.error = error
        return share

    def _exchange(
        self, share: _Share, gradients: dict[str, torch.Tensor], local_norm: float
    ) -> tuple[float, bool]:
        """Tell all ranks how this one fared; return (mean loss of the global batch, stop requested anywhere).

        Raises on every rank if any rank failed to compute its share or has a non-finite loss or gradient.
        """
        loss_sum = share.loss_sum()
        status = [
            float(share.error is not None),
            float(not math.isfinite(loss_sum)),
            float(not math.isfinite(local_norm)),
            float(self.stop.requested),
            loss_sum if math.isfinite(loss_sum) else 0.0,
        ]
        rows = collectives.gather(status)
        if any(row[0] for row in rows):
            collectives.agree(share.error)
        for column, what in ((1, "loss"), (2, "gradient")):
            if bad := [rank for rank, row in enumerate(rows) if row[column]]:
                self._refuse(share, gradients, what, bad)
        return sum(row[4] for row in rows) / self.plan.global_batch_size, any(row[3] for row in rows)

    def _refuse(
        self, share: _Share, gradients: dict[str, torch.Tensor], what: str, bad_ranks: list[int]
    ) -> None:
        """Dump this rank's part if it is a bad one, then raise the first bad rank's error on every rank."""
        number = self.learner.completed_steps
        error: NonFiniteError | None = None
        if self.topology.rank in bad_ranks:
            samples = [
                entry
                for batch, loss in share.micro_batches
                for entry in diagnostics.describe_batch(batch, loss.timesteps, loss.per_sample.tolist())
            ]
            suspects = [s["sample_id"] for s in samples if isinstance(s["loss"], str)] or [
                s["sample_id"] for s in samples
            ]
            content = {
                "quantity": what,
                "bad_ranks": bad_ranks,
                "learning_rate": self.learner.learning_rate(number),
                "samples": samples,
                "bad_gradients": diagnostics.bad_tensors(gradients),
                "bad_parameters": diagnostics.bad_tensors(self.learner.parameters),
            }
            dump = diagnostics.write_dump(self.run_dir, number + 1, self.topology.rank, content)
            error = NonFiniteError(
                f"non-finite {what} in optimizer step {number + 1} on rank {self.topology.rank}, samples "
                f"{', '.join(suspects[:4])}{' ...' if len(suspects) > 4 else ''}; optimizer, EMA and checkpoints are "
                f"untouched; details in {dump}"
            )
        self.learner.optimizer.zero_grad(set_to_none=True)
        collectives.agree(error)


def fit(
    trainer: Trainer,
    until_step: int,
    on_step: Callable[[StepRecord], None],
    save: Callable[[], None],
    save_every_steps: int,
) -> bool:
    """Step until `until_step` steps are completed; return False if a stop request ended the loop earlier.

    `save` runs every `save_every_steps` completed steps (0: never), though not at `until_step`, where the caller
    publishes. A stop request is honoured between steps; the caller saves.
    """
    learner = trainer.learner
    while learner.completed_steps < until_step:
        record, stop = trainer.step()
        on_step(record)
        if learner.completed_steps >= until_step:
            break
        if stop:
            return False
        if save_every_steps and learner.completed_steps % save_every_steps == 0:
            trainer.heartbeat.beat("save", learner.completed_steps)
            save()
    return True
