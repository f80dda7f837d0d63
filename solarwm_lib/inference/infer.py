"""Standalone inference: the passes of a config over cases chosen as in validation, from any checkpoint.

The cases are frozen by the same function as a run's plan, so equal settings give an equal plan, equal noise and, from the
same checkpoint, the same latents bit for bit. One folder per pass: `PASS/slot-NNNNNN/...` as in a validation artifact.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.inference import latents
from solarwm_lib.inference.evaluation import PassRun, prepare
from solarwm_lib.inference.plan import build_plan, plan_bytes
from solarwm_lib.inference.validation import publish
from solarwm_lib.runtime.errors import ConfigError
from solarwm_lib.runtime.manifests import artifact_dir

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

SCHEMA = "solarwm.inference.v1"


def open_infer(resolved: Resolved) -> tuple[dict[str, Any], dict[str, PassRun]]:
    """Return the plan and the passes by folder prefix, after every check that needs no model; nothing is written.

    Raises ConfigError for a config without checkpoint or passes, or whose weights no pass may use; DataError for
    clips that cannot be used; ArtifactError for a checkpoint that is not one.
    """
    config = resolved.config
    if not config.checkpoint.path:
        raise ConfigError(
            "checkpoint.path is empty: inference needs a checkpoint artifact, set checkpoint.path"
        )
    if not config.validation.passes:
        raise ConfigError("validation.passes is empty: list at least one pass to sample")
    if config.inference.length != "fixed":
        raise ConfigError(
            f"inference.length is {config.inference.length!r}: only a stage2 model generates as long as the camera "
            "track; set inference.length to 'fixed'"
        )
    _check_weights(resolved)
    plan = build_plan(resolved)
    runs = {
        f"{p.name}/": prepare(resolved, config.checkpoint.path, plan, p) for p in config.validation.passes
    }
    return plan, runs


def infer(
    resolved: Resolved,
    out_dir: Path | str,
    opened: tuple[dict[str, Any], dict[str, PassRun]] | None = None,
) -> artifacts.Artifact:
    """Publish every pass of `validation.passes`, sampled from `checkpoint.path`, at `out_dir`.

    `opened` is what `open_infer` returned, if it was called. Raises as `open_infer` and `validation.validate`.
    """
    plan, runs = opened or open_infer(resolved)
    out = artifact_dir(out_dir)
    return publish(
        runs,
        out,
        SCHEMA,
        {"passes": [run.identity() for run in runs.values()]},
        _parents(runs),
        {prefix: latents.beside(out, prefix[:-1]) for prefix in runs},
        {"frozen-plan.json": plan_bytes(plan)},
    )


def _parents(runs: dict[str, PassRun]) -> list[Path]:
    return next(iter(runs.values())).parents()


def _check_weights(resolved: Resolved) -> None:
    allowed = resolved.config.checkpoint.weights
    allowed = [allowed] if isinstance(allowed, str) else allowed
    for item in resolved.config.validation.passes:
        if allowed and item.weights not in allowed:
            raise ConfigError(
                f"pass {item.name!r} samples {item.weights} weights, checkpoint.weights allows {', '.join(allowed)}; "
                "change one of the two"
            )
