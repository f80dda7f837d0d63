"""What a run will need before it starts: parameters, memory, FLOPs, traffic, hours. Closed forms; nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved


def memory_plan(resolved: Resolved) -> dict[str, int]:
    """Predicted bytes by part of one process of a training configuration at the peak of its step.

    The parts sum to the predicted peak of tensors; the process itself, the allocator's fragmentation and the libraries come on top.
    Raises ConfigError for an action other than train.
    """
    from solarwm_lib.estimate.memory import plan
    from solarwm_lib.estimate.workload import workload_of
    from solarwm_lib.runtime.errors import ConfigError

    if resolved.config.action != "train":
        raise ConfigError(f"action: found {resolved.config.action}, expected train for a memory plan")
    return plan(workload_of(resolved)).parts()
