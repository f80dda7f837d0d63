"""Why a clip could not be read, as a type: what may be replaced, what is counted, and what ends the run.

A clip whose camera leaves the guards is data that was never meant to be trained on; it is replaced and costs nothing.
Every other failure is damage. It ends the run unless `data.failure_budget` allows some. (remedy of spec operations 15.2
for 4.10, where every exception was printed and skipped)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.data.sampling import Plan, PlannedSample
from solarwm_lib.runtime.errors import DataError

T = TypeVar("T")
CAMERA_GUARD = "camera_guard"
REASONS = (CAMERA_GUARD, "camera", "video", "caption", "shard", "tensors")
GUARD_ATTEMPTS = 16
NAMED_FAILURES = 3


@dataclass(frozen=True)
class Replacement:
    """A clip that another one stands in for, and why."""

    reason: str
    message: str


class SampleFailure(DataError):
    """A clip that cannot be read; `reason` is one of REASONS.

    `settle` adds the attempt (which draw for its place in the plan it was) and what the guards rejected before it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.attempt = 0
        self.rejected: tuple[str, ...] = ()


class BudgetSpent(DataError):
    """A clip that cannot be read and may not be replaced; `replaced` names it last, after those that were."""

    def __init__(self, replaced: Sequence[Replacement]) -> None:
        super().__init__(replaced[-1].message)
        self.replaced = tuple(replaced)


@contextmanager
def reading(reason: str) -> Iterator[None]:
    """Give a DataError of the block its reason; one that has a reason, and a guard's, keep theirs."""
    try:
        yield
    except (CameraGuardError, SampleFailure):
        raise
    except DataError as error:
        raise SampleFailure(reason, str(error)) from error


@dataclass(frozen=True)
class Settled(Generic[T]):
    """What stands at a place of the plan: the sample, what was made of it, and the guards' messages on the way."""

    planned: PlannedSample
    value: T
    rejected: tuple[str, ...]


def settle(
    plan: Plan, global_sample_index: int, use: Callable[[PlannedSample], T], first_attempt: int = 0
) -> Settled[T]:
    """Return the first draw for a global index, from attempt `first_attempt` on, that lies inside the camera guards.

    `use` raises CameraGuardError for a clip outside them; every rank gets the same answer, because draws are keyed.
    Raises DataError after GUARD_ATTEMPTS rejections, and SampleFailure (with its attempt) as `use` raises it.
    """
    rejected: list[str] = []
    while True:
        attempt = first_attempt + len(rejected)
        planned = draw(plan, global_sample_index, attempt)
        try:
            return Settled(planned, use(planned), tuple(rejected))
        except CameraGuardError as error:
            rejected.append(str(error))
        except SampleFailure as error:
            error.attempt, error.rejected = attempt, tuple(rejected)
            raise
        if len(rejected) == GUARD_ATTEMPTS:
            raise DataError(
                f"{GUARD_ATTEMPTS} clips in a row leave the camera guards, last: {rejected[-1]}; "
                "raise data.max_relative_translation or data.max_camera_absolute, or clean the index"
            )


def draw(plan: Plan, global_sample_index: int, attempt: int) -> PlannedSample:
    """Return the planned sample of a global index (attempt 0) or what stands in for it."""
    if attempt == 0:
        return plan.occurrence_at(global_sample_index)
    return plan.replacement(global_sample_index, attempt)


def counts(replaced: Sequence[Replacement]) -> dict[str, int]:
    """Return how many clips were replaced for each reason, in the order of REASONS, absent ones left out."""
    return total(Counter(item.reason for item in replaced))


def total(*parts: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of counts, in the order of REASONS, zeros left out."""
    sums = {reason: sum(part.get(reason, 0) for part in parts) for reason in REASONS}
    return {reason: number for reason, number in sums.items() if number}


def cost(replaced: Mapping[str, int]) -> int:
    """Return what counts against `data.failure_budget`: everything but the guards."""
    return sum(number for reason, number in replaced.items() if reason != CAMERA_GUARD)


def budget_message(budget: int, totals: Mapping[str, int], failed: Sequence[Replacement]) -> str:
    """Return the error of a spent budget: reasons and numbers of the whole run, samples of this step."""
    by_reason = ", ".join(f"{reason} {n}" for reason, n in totals.items() if reason != CAMERA_GUARD)
    named = [item.message for item in failed if item.reason != CAMERA_GUARD]
    more = f"; and {len(named) - NAMED_FAILURES} more" if len(named) > NAMED_FAILURES else ""
    return (
        f"{cost(totals)} clips of this run could not be read ({by_reason}) and data.failure_budget is {budget}: "
        f"{'; '.join(named[:NAMED_FAILURES])}{more}; repair or remove them, or raise data.failure_budget"
    )
