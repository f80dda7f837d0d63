"""The update of a network and the loop around it. One counter, `completed_steps`, decides everything that depends on time.

Order of an update (spec operations 9.8): micro-batches forward and backward; ranks exchange a status, so that a non-finite
loss or gradient, a failed read or a stop request is known to all before anyone acts on it; gradients are averaged and
clipped; optimizer; counter; EMA; log. Whatever raises does so before the optimizer has moved. The status also carries
which samples were read (`batch_digest`) and how many clips were replaced, so that the failure budget holds for the run.

A step of Stage0.5 and Stage1 is one update; Stage2 (`stage2`) makes its outer step of two kinds of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from solarwm_lib.data import failures
from solarwm_lib.data.failures import REASONS, BudgetSpent, Replacement
from solarwm_lib.data.sampling import batch_digest, digest_text
from solarwm_lib.runtime.errors import DataError, NonFiniteError, SolarError
from solarwm_lib.runtime.process import Heartbeat, StopRequest, memory_bytes
from solarwm_lib.training import collectives, diagnostics, sharding
from solarwm_lib.training.batches import Batch, Batches
from solarwm_lib.training.learner import Learner, Loss, Objective, Relative
from solarwm_lib.training.metrics import StepRecord
from solarwm_lib.training.topology import BatchPlan, Topology

__all__ = ["Learner", "Loss", "Objective", "Relative", "Trainer", "Update", "fit"]


@dataclass
class _Share:
    """What this rank computed of the current update. `aside`: gradients of the relative part, by parameter name.

    `abandoned`: a clip could not be read or computed here or, where ranks wait for each other, on any rank.
    """

    micro_batches: list[tuple[Batch, Loss]] = field(default_factory=list)
    data_seconds: float = 0.0
    error: SolarError | None = None
    aside: dict[str, torch.Tensor] = field(default_factory=dict)
    abandoned: bool = False

    def loss_sum(self) -> float:
        return sum(loss.per_sample.double().sum().item() for _, loss in self.micro_batches)

    def relative_sums(self) -> list[float]:
        """Sum of the relative terms, and this rank's part of the mean they are multiplied by."""
        parts = [loss.relative for _, loss in self.micro_batches if loss.relative is not None]
        terms = sum(part.per_sample.double().sum().item() for part in parts)
        return [float(terms), sum(part.total for part in parts), float(sum(part.count for part in parts))]

    def zeroed(self) -> int:
        return sum(loss.zeroed for _, loss in self.micro_batches)

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
    """What all ranks know of an update: mean loss, whether any was asked to stop, digest of the batch, replaced so far.

    `mean` is what relative losses are multiplied by, None if there are none; `zeroed` as in `Loss`.
    """

    loss: float
    stop: bool
    batch_digest: int
    replaced: dict[str, int]
    mean: float | None
    zeroed: int


@dataclass(frozen=True)
class Update:
    """One finished update of a network, the same on every rank but for `data_seconds`. Norms are before clipping."""

    loss: float
    learning_rate: float
    gradient_norm: float
    data_seconds: float
    stop: bool
    batch_digest: int
    mean: float | None = None
    zeroed: int = 0


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
    sharded: bool = False  # parameters lie in parts: gradients are means over all ranks when they come
    save_agreed: bool = False  # some rank was asked (SIGUSR1) to save after this step and go on; all know
    exhausted: Callable[[Exception, Batch], SolarError | None] | None = None  # names a lack of memory
    background_failure: Callable[[], SolarError | None] = lambda: (
        None
    )  # of a save that a thread of this rank makes

    @property
    def coupled(self) -> bool:
        """True if ranks wait for each other inside a forward pass: none may then leave it alone."""
        return self.sharded or self.topology.sequence_parallel_size > 1

    def step(self) -> tuple[StepRecord, bool]:
        """Take one optimizer step; return its record and whether any rank was asked to stop.

        Raises NonFiniteError, or the lowest failing rank's SolarError, on every rank and with the state unchanged.
        """
        started = time.perf_counter()
        update = self.update(self.learner, self.objective, self.learner.completed_steps)
        details = {} if update.mean is None else {"diffusion_loss": update.mean}
        return self.record(started, update, details, [update]), update.stop

    def update(self, learner: Learner, objective: Objective, batch_number: int) -> Update:
        """Move `learner` by one optimizer step on global batch `batch_number` under `objective`.

        Raises NonFiniteError, or the lowest failing rank's SolarError, on every rank and with `learner` unchanged.
        """
        number = self.learner.completed_steps
        self.heartbeat.beat("forward_backward", number)
        share = self._compute(learner, objective, batch_number)
        if share.aside:
            # No zeros are allocated beside the relative gradients: a rank may have nothing but them.
            gradients = {n: p.grad for n, p in learner.parameters.items() if p.grad is not None}
            gradients |= {f"{name} (relative)": gradient for name, gradient in share.aside.items()}
        else:
            gradients = learner.gradients()
        self.heartbeat.beat("status", number, collective="all_gather")
        # A norm of parts is itself a collective, which a rank without gradients must not wait in.
        norm = torch.tensor(math.nan) if share.abandoned else sharding.global_norm([*gradients.values()])
        status = self._exchange(learner, share, gradients, norm.item())
        self.heartbeat.beat("reduce", number, collective="all_reduce")
        if share.aside:
            _add_relative(learner.parameters, share.aside, status.mean)
            gradients = learner.gradients()
        tensors = list(gradients.values())
        if not self.sharded:
            # Over sequence peers, too: each has its tokens' part of the gradient times their number.
            collectives.average_(tensors)
            if collectives.world_size() > 1 or share.aside:
                norm = sharding.global_norm(tensors)
        if not math.isfinite(norm.item()):
            self._refuse(learner, share, gradients, "gradient (after averaging over ranks)", [0])

        self.heartbeat.beat("optimizer", number)
        rate = learner.apply(tensors, norm)
        self.learner.replaced = status.replaced
        return Update(
            loss=status.loss,
            learning_rate=rate,
            gradient_norm=norm.item(),
            data_seconds=share.data_seconds,
            stop=status.stop,
            batch_digest=status.batch_digest,
            mean=status.mean,
            zeroed=status.zeroed,
        )

    def record(
        self, started: float, main: Update, details: Mapping[str, float], updates: Sequence[Update]
    ) -> StepRecord:
        """Return the record of the step that `updates` made since `started`; its curves are those of `main`."""
        seconds = time.perf_counter() - started
        return StepRecord(
            step=self.learner.completed_steps,
            loss=main.loss,
            learning_rate=main.learning_rate,
            gradient_norm=main.gradient_norm,
            step_seconds=seconds,
            data_seconds=sum(update.data_seconds for update in updates),
            samples_per_second=len(updates) * self.plan.global_batch_size / seconds,
            memory_bytes=memory_bytes(),
            wall_time=time.time(),
            monotonic_time=time.monotonic(),
            batch_digest=digest_text(sum(update.batch_digest for update in updates)),
            replaced=self.learner.replaced,
            details=dict(details),
        )

    def _compute(self, learner: Learner, objective: Objective, number: int) -> _Share:
        """Forward and backward of this rank's micro-batches; a failure is kept until the peers know of it.

        Where ranks wait for each other inside a pass, they agree before it that all have read their clips; what fails in the
        pass itself is raised at once, because peers can learn of it only from the end of this process.
        """
        share = _Share()
        for position, indices in enumerate(self.plan.micro_batches(number, self.topology.data_rank)):
            waiting = time.perf_counter()
            self.heartbeat.beat("data", self.learner.completed_steps, micro_batch=position)
            batch = self._load(share, indices, self._following(number, position))
            share.data_seconds += time.perf_counter() - waiting
            share.abandoned = share.error is not None
            if self.coupled:
                share.abandoned = collectives.any_rank(share.abandoned)
            if share.abandoned or batch is None:
                break
            self.heartbeat.beat("forward_backward", self.learner.completed_steps, micro_batch=position)
            try:
                loss = objective(batch)
                self._backward(learner, loss, share)
            except Exception as error:
                known = self._known(error, batch)
                if known is None:
                    raise
                if self.coupled:
                    raise known from error
                share.error, share.abandoned = known, True
                break
            share.micro_batches.append((batch, loss))
        return share

    def _known(self, error: Exception, batch: Batch) -> SolarError | None:
        """Return what the peers are told of `error`; None for a bug."""
        if isinstance(error, SolarError) or self.exhausted is None:
            return error if isinstance(error, SolarError) else None
        return self.exhausted(error, batch)

    def _load(self, share: _Share, indices: range, following: list[int]) -> Batch | None:
        """Return the micro-batch of `indices`; None, and the error in `share`, if it cannot be read."""
        spent = failures.cost(self.learner.replaced) + failures.cost(failures.counts(share.replaced()))
        try:
            return self.batches.load(indices, following, self.failure_budget - spent)
        except BudgetSpent as error:
            share.error = self._spent([*share.replaced(), *error.replaced])
        except SolarError as error:
            share.error = error
        return None

    def _backward(self, learner: Learner, loss: Loss, share: _Share) -> None:
        """Add the gradients of `loss` to the parameters'; those of its relative part go aside until its mean is known.

        Parameters in parts have one backward pass, on all ranks alike: the mean is exchanged before it.
        """
        relative, steps, aside = loss.relative, self.plan.accumulation_steps, share.aside
        if relative is None:
            (loss.loss / steps).backward()
            return
        if self.sharded:
            mean = _mean(collectives.gather([relative.total, float(relative.count)]))
            (loss.loss + (1.0 if mean is None else mean) * relative.loss).backward()
            return
        if loss.loss.requires_grad:  # not so where every sample's loss is relative
            (loss.loss / steps).backward(retain_graph=relative.loss.requires_grad)
        if relative.loss.requires_grad:
            kept = {name: p.grad for name, p in learner.parameters.items()}
            for name, parameter in learner.parameters.items():
                parameter.grad = aside.get(name)
            (relative.loss / steps).backward()
            for name, parameter in learner.parameters.items():
                if parameter.grad is not None:
                    aside[name] = parameter.grad
                parameter.grad = kept[name]

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

    def _exchange(
        self, learner: Learner, share: _Share, gradients: dict[str, torch.Tensor], local_norm: float
    ) -> _Status:
        """Tell all ranks how this one fared; return what they told.

        Raises on every rank if any rank failed to compute its share, has a non-finite loss or gradient, or if together
        they replaced more clips than the run's failure budget allows.
        """
        loss_sum, mine = share.loss_sum(), failures.counts(share.replaced())
        relative = share.relative_sums()
        finite = math.isfinite(loss_sum) and all(map(math.isfinite, relative))
        # Sequence-parallel peers read the same samples: one of them reports for all.
        reports = self.topology.sequence_rank == 0
        share.error = share.error or self.background_failure()
        status = [
            float(share.error is not None),
            float(not finite),
            float(not math.isfinite(local_norm) and not self.sharded),
            2.0 if self.stop.requested else float(self.stop.save_requested),
            loss_sum * reports if finite else 0.0,
            float(share.digest() * reports),
            *(float(mine.get(reason, 0) * reports) for reason in REASONS),
            *(relative if finite and reports else [0.0] * len(relative)),
            float(share.zeroed() * reports),
        ]
        rows = collectives.gather(status)
        if any(row[0] for row in rows):
            collectives.agree(share.error)
        totals = self._replaced_so_far(learner, share, [row[6:-4] for row in rows])
        self.save_agreed |= any(row[3] == 1.0 for row in rows)
        for column, what in ((1, "loss"), (2, "gradient")):
            if bad := [rank for rank, row in enumerate(rows) if row[column]]:
                self._refuse(learner, share, gradients, what, bad)
        terms, zeroed = (math.fsum(row[column] for row in rows) for column in (-4, -1))
        mean = _mean([row[-3:-1] for row in rows])
        return _Status(
            loss=(sum(row[4] for row in rows) + (terms * mean if mean is not None else 0.0))
            / self.plan.global_batch_size,
            stop=any(row[3] == 2.0 for row in rows),
            batch_digest=sum(int(row[5]) for row in rows),
            replaced=totals,
            mean=mean,
            zeroed=int(zeroed),
        )

    def _replaced_so_far(self, learner: Learner, share: _Share, rows: list[list[float]]) -> dict[str, int]:
        """Return the run's counts with this step's; DataError on every rank if they exceed the failure budget."""
        ranks = [dict(zip(REASONS, map(int, row), strict=True)) for row in rows]
        totals = failures.total(self.learner.replaced, *ranks)
        # A budget lowered below what was spent before a resume forbids further replacements, not the run.
        if failures.cost(failures.total(*ranks)) and failures.cost(totals) > self.failure_budget:
            mine = share.replaced()
            learner.optimizer.zero_grad(set_to_none=True)
            collectives.agree(self._spent(mine, totals) if failures.cost(failures.counts(mine)) else None)
        return totals

    def _refuse(
        self,
        learner: Learner,
        share: _Share,
        gradients: dict[str, torch.Tensor],
        what: str,
        bad_ranks: list[int],
    ) -> None:
        """Dump this rank's part if it is a bad one, then raise the first bad rank's error on every rank."""
        number = self.learner.completed_steps
        error: NonFiniteError | None = None
        if self.topology.rank in bad_ranks:
            samples = [
                entry
                for batch, loss in share.micro_batches
                for entry in diagnostics.describe_batch(batch, loss.timesteps, loss.terms().tolist())
            ]
            suspects = [s["sample_id"] for s in samples if isinstance(s["loss"], str)] or [
                s["sample_id"] for s in samples
            ]
            content = {
                "quantity": what,
                "bad_ranks": bad_ranks,
                "learning_rate": learner.learning_rate(learner.completed_steps),
                "samples": samples,
                "bad_gradients": diagnostics.bad_tensors(sharding.locals_of(gradients)),
                "bad_parameters": diagnostics.bad_tensors(sharding.locals_of(learner.parameters)),
            }
            dump = diagnostics.write_dump(self.run_dir, number + 1, self.topology.rank, content)
            error = NonFiniteError(
                f"non-finite {what} in optimizer step {number + 1} on rank {self.topology.rank}, samples "
                f"{', '.join(suspects[:4])}{' ...' if len(suspects) > 4 else ''}; optimizer, EMA and checkpoints are "
                f"untouched; details in {dump}"
            )
        learner.optimizer.zero_grad(set_to_none=True)
        collectives.agree(error)


def _mean(rows: Sequence[Sequence[float]]) -> float | None:
    """Return the mean of all ranks' (sum, count); None where nothing was counted."""
    total, count = (math.fsum(column) for column in zip(*rows, strict=True))
    return total / count if count else None


@torch.no_grad()
def _add_relative(
    parameters: Mapping[str, torch.nn.Parameter], aside: Mapping[str, torch.Tensor], mean: float | None
) -> None:
    """Add `mean` times the relative gradients to those of `parameters`; ranks without a finite mean have been refused."""
    factor = 1.0 if mean is None else mean
    for name, gradient in aside.items():
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = gradient.mul_(factor)
        else:
            parameter.grad.add_(gradient, alpha=factor)


def fit(
    trainer: Trainer,
    until_step: int,
    on_step: Callable[[StepRecord], None],
    save: Callable[[], None],
    save_every_steps: int,
) -> bool:
    """Step until `until_step` steps are completed; return False if a stop request ended the loop earlier.

    `save` runs every `save_every_steps` completed steps (0: never) and when it was asked for (SIGUSR1), though not at
    `until_step`, where the caller publishes. A stop request is honoured between steps and after a save; the caller saves.
    """
    learner = trainer.learner
    while learner.completed_steps < until_step:
        record, stop = trainer.step()
        on_step(record)
        if learner.completed_steps >= until_step:
            break
        if stop:
            return False
        due = save_every_steps and learner.completed_steps % save_every_steps == 0
        if due or trainer.save_agreed:
            # Before the save: a request that comes during it wants the state after it.
            trainer.save_agreed = trainer.stop.save_requested = False
            trainer.heartbeat.beat("save", learner.completed_steps)
            save()
            if collectives.any_rank(trainer.stop.requested):
                return False
    return True
