"""Standalone inference: the passes of a config over cases chosen as in validation, from any checkpoint.

The cases are frozen by the same function as a run's plan, so equal settings give an equal plan, equal noise and, from the
same checkpoint, the same latents bit for bit. One folder per pass: `PASS/slot-NNNNNN/...` as in a validation artifact.
Camera-length inference (Stage2) generates as long as each track and publishes its results by clip (`publication`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts
from solarwm_lib.data.index import read_index
from solarwm_lib.inference import horizon, latents, preview, publication
from solarwm_lib.inference.evaluation import PassRun, prepare
from solarwm_lib.inference.plan import build_plan, index_path, plan_bytes
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
    _check_camera_length(resolved)
    _check_weights(resolved)
    preview.check(config)
    layout = publication.layout_of(config)
    plan = build_plan(resolved)
    runs = {
        f"{p.name}/": prepare(resolved, config.checkpoint.path, plan, p) for p in config.validation.passes
    }
    if layout == publication.TRIPLET:
        rows = read_index(index_path(resolved))
        names = publication.names_of(plan["cases"], rows)
        rows.close()
        runs = {prefix: replace(run, public=_publication(run, names)) for prefix, run in runs.items()}
    return plan, runs


def _publication(run: PassRun, names: dict[int, publication.Name]) -> publication.Publication:
    from solarwm_lib.backbones.codec import DECODE_TILE
    from solarwm_lib.training.checkpoint import read_state

    imported = read_state(run.checkpoint).run.get("imported", {})
    facts = {
        "weights_id": run.weights_id,
        "weights": run.settings.weights,
        # What the release manifest of a package says to load; None for weights that came without one.
        "release_default_weights": imported.get("default_role"),
        "plan_digest": run.plan["payload_digest"],
        "horizon_rounding": horizon.rounding_of(run.config),
        "vae_decode": {"mode": "continuous_cached_tiles", "chunk_latent_frames": DECODE_TILE},
    }
    return publication.Publication(names, facts)


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
    triplet = any(run.public for run in runs.values())
    return publish(
        runs,
        out,
        SCHEMA,
        {
            "passes": [run.identity() for run in runs.values()],
            **({"layout": publication.TRIPLET} if triplet else {}),
        },
        _parents(runs),
        {prefix: latents.beside(out, prefix[:-1]) for prefix in runs},
        {"frozen-plan.json": plan_bytes(plan)},
    )


def _parents(runs: dict[str, PassRun]) -> list[Path]:
    return next(iter(runs.values())).parents()


def _check_camera_length(resolved: Resolved) -> None:
    config = resolved.config
    if config.inference.length != "camera":
        return
    if config.train.stage != "stage2":
        raise ConfigError(
            f"inference.length is 'camera', which only a stage2 model can follow, found {config.train.stage}; set "
            "inference.length to 'fixed'"
        )
    if len(config.validation.passes) != 1:
        names = ", ".join(entry.name for entry in config.validation.passes)
        raise ConfigError(
            f"validation.passes: found {names}, expected exactly one pass with inference.length camera; remove the others"
        )


def _check_weights(resolved: Resolved) -> None:
    allowed = resolved.config.checkpoint.weights
    allowed = [allowed] if isinstance(allowed, str) else allowed
    for item in resolved.config.validation.passes:
        if allowed and item.weights not in allowed:
            raise ConfigError(
                f"pass {item.name!r} samples {item.weights} weights, checkpoint.weights allows {', '.join(allowed)}; "
                "change one of the two"
            )
