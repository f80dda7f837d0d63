"""The optimizer step and the loop around it. One counter, `completed_steps`, decides everything that depends on time.

Order of a step (spec operations 9.8): micro-batches forward and backward; ranks exchange a status, so that a non-finite
loss or gradient, a failed read or a stop request is known to all before anyone acts on it; gradients are averaged and
clipped; optimizer; counter; EMA; log. Whatever raises does so before the optimizer has moved. The status also carries
which samples were read (`batch_digest`) and how many clips were replaced, so that the failure budget holds for the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from solarwm_lib.data import failures
from solarwm_lib.data.failures import REASONS, BudgetSpent, Replacement
from solarwm_lib.data.sampling import batch_digest, digest_text
from solarwm_lib.runtime.errors import DataError, NonFiniteError, SolarError
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
    """Everything a step changes: the parameters, the optimizer's slots, the average, the counters.

    `replaced` counts the clips that others stood in for so far, by reason and over all ranks.
    """

    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    ema: Ema
    learning_rate: Callable[[int], float]
    gradient_clip: float
    completed_steps: int = 0
    replaced: dict[str, int] = field(default_factory=dict)

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

    def replaced(self) -> list[Replacement]:
        return [item for batch, _ in self.micro_batches for item in batch.replaced]

    def digest(self) -> int:
        return batch_digest(
            pair
            for batch, _ in self.micro_batches
            for pair in zip(batch.indices, batch.occurrence_ids, strict=True)
        )


@dataclass(frozen=True)
class _Status:
    """What all ranks know of a step: mean loss, whether any was asked to stop, digest of the batch, replaced so far."""

    loss: float
    stop: bool
    batch_digest: int
    replaced: dict[str, int]


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
    failure_budget: int = 0

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
        status = self._exchange(share, gradients, local_norm.item())
        self.heartbeat.beat("reduce", number, collective="all_reduce")
        collectives.average_(tensors)
        norm = local_norm if collectives.world_size() == 1 else optim.gradient_norm(tensors)
        if not math.isfinite(norm.item()):
            self._refuse(share, gradients, "gradient (after averaging over ranks)", [0])

        self.heartbeat.beat("optimizer", number)
        rate = self.learner.apply(tensors, norm)
        self.learner.replaced = status.replaced
        seconds = time.perf_counter() - started
        record = StepRecord(
            step=self.learner.completed_steps,
            loss=status.loss,
            learning_rate=rate,
            gradient_norm=norm.item(),
            step_seconds=seconds,
            data_seconds=share.data_seconds,
            samples_per_second=self.plan.global_batch_size / seconds,
            memory_bytes=memory_bytes(),
            wall_time=time.time(),
            monotonic_time=time.monotonic(),
            batch_digest=digest_text(status.batch_digest),
            replaced=status.replaced,
        )
        return record, status.stop

    def _compute(self, number: int) -> _Share:
        """Forward and backward of this rank's micro-batches; a failure is kept until the peers know of it."""
        share = _Share()
        try:
            for position, indices in enumerate(self.plan.micro_batches(number, self.topology.data_rank)):
                waiting = time.perf_counter()
                spent = failures.cost(self.learner.replaced) + failures.cost(
                    failures.counts(share.replaced())
                )
                batch = self.batches.load(
                    indices, self._following(number, position), self.failure_budget - spent
                )
                share.data_seconds += time.perf_counter() - waiting
                loss = self.objective(batch)
                (loss.loss / self.plan.accumulation_steps).backward()
                share.micro_batches.append((batch, loss))
        except BudgetSpent as error:
            share.error = self._spent([*share.replaced(), *error.replaced])
        except SolarError as error:
            share.error = error
        return share

    def _spent(self, replaced: list[Replacement], totals: dict[str, int] | None = None) -> DataError:
        """Return the error of a spent failure budget; without any budget that is the clip's own."""
        failed = [item for item in replaced if item.reason != failures.CAMERA_GUARD]
        if self.failure_budget == 0:
            return DataError(failed[-1].message)
        totals = totals or failures.total(self.learner.replaced, failures.counts(replaced))
        return DataError(failures.budget_message(self.failure_budget, totals, failed))

    def _following(self, number: int, position: int) -> list[int]:
        """Return what is read while a micro-batch computes: the next one, or more if more threads read."""
        indices: list[int] = []
        while len(indices) < max(1, self.batches.workers):
            position += 1
            if position == self.plan.accumulation_steps:
                number, position = number + 1, 0
            indices += self.plan.micro_batches(number, self.topology.data_rank)[position]
        return indices

    def _exchange(self, share: _Share, gradients: dict[str, torch.Tensor], local_norm: float) -> _Status:
        """Tell all ranks how this one fared; return what they told.

        Raises on every rank if any rank failed to compute its share, has a non-finite loss or gradient, or if together
        they replaced more clips than the run's failure budget allows.
        """
        loss_sum, mine = share.loss_sum(), failures.counts(share.replaced())
        # Sequence-parallel peers read the same samples: one of them reports for all.
        reports = self.topology.sequence_rank == 0
        status = [
            float(share.error is not None),
            float(not math.isfinite(loss_sum)),
            float(not math.isfinite(local_norm)),
            float(self.stop.requested),
            loss_sum if math.isfinite(loss_sum) else 0.0,
            float(share.digest() * reports),
            *(float(mine.get(reason, 0) * reports) for reason in REASONS),
        ]
        rows = collectives.gather(status)
        if any(row[0] for row in rows):
            collectives.agree(share.error)
        totals = self._replaced_so_far(share, [row[6:] for row in rows])
        for column, what in ((1, "loss"), (2, "gradient")):
            if bad := [rank for rank, row in enumerate(rows) if row[column]]:
                self._refuse(share, gradients, what, bad)
        return _Status(
            loss=sum(row[4] for row in rows) / self.plan.global_batch_size,
            stop=any(row[3] for row in rows),
            batch_digest=sum(int(row[5]) for row in rows),
            replaced=totals,
        )

    def _replaced_so_far(self, share: _Share, rows: list[list[float]]) -> dict[str, int]:
        """Return the run's counts with this step's; DataError on every rank if they exceed the failure budget."""
        ranks = [dict(zip(REASONS, map(int, row), strict=True)) for row in rows]
        totals = failures.total(self.learner.replaced, *ranks)
        # A budget lowered below what was spent before a resume forbids further replacements, not the run.
        if failures.cost(failures.total(*ranks)) and failures.cost(totals) > self.failure_budget:
            mine = share.replaced()
            self.learner.optimizer.zero_grad(set_to_none=True)
            collectives.agree(self._spent(mine, totals) if failures.cost(failures.counts(mine)) else None)
        return totals

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
