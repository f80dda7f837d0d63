"""Which saves of a run stay: rolling saves go when a later one is safe, published checkpoints lose their optimizer state.

Order is always: the new one is complete and verified, then something older goes. Which one is newer is a matter of steps, never
of file times, so a wrong clock removes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact
from solarwm_lib.runtime.owner import is_abandoned
from solarwm_lib.runtime.thinning import droppable, thin
from solarwm_lib.training import checkpoint

_REMOVED = ".removed"
_DAY_SECONDS = 24 * 3600.0


def remove_rolling(run_dir: Path, newest_verified: int, keep: int) -> list[Path]:
    """Remove rolling saves of steps up to `newest_verified`, keeping the newest `keep` of them; return the removed.

    A save is first renamed to a hidden name, so a crash on the way never leaves a half-removed directory in the place
    of a save; leftovers of such a crash are swept here.
    """
    rolling = run_dir / "rolling"
    saves = [c for c in checkpoint.candidates(run_dir, newest_verified)[0] if c.rolling]
    removed = [candidate.path for candidate in saves[keep:]]
    for path in removed:
        path.rename(rolling / f".{path.name}{_REMOVED}")
    for leftover in rolling.glob(f".*{_REMOVED}") if rolling.is_dir() else []:
        shutil.rmtree(leftover)
    return removed


def remove_partial_saves(run_dir: Path) -> list[Path]:
    """Remove what killed processes left of rolling saves; return the removed.

    A save of the same step would find them, but after a kill the next save may be of another step.
    """
    rolling = run_dir / "rolling"
    found = sorted(rolling.glob(".step_*.partial")) if rolling.is_dir() else []
    removed = [path for path in found if is_abandoned(path, max_age_s=_DAY_SECONDS)]
    for path in removed:
        shutil.rmtree(path)
    return removed


def thin_published(run_dir: Path, newest: Artifact, keep_full: int, pinned: Collection[int]) -> list[Path]:
    """Drop the optimizer state of the run's published checkpoints before `newest`, the one just published; return the thinned.

    Kept whole: the newest `keep_full` of them all (0: every one), and the steps in `pinned`. `newest` is compared with its
    digests first, unless there is nothing to do: what goes cannot be made again.
    """
    newest_step = checkpoint.step_of(newest.path)
    if keep_full == 0 or newest_step is None:
        return []
    published = sorted(
        (step, path)
        for path, rolling in checkpoint.save_directories(run_dir)
        if not rolling and (step := checkpoint.step_of(path)) and (path / artifacts.MARKER).exists()
    )
    old = [(step, path) for step, path in published[:-keep_full] if step < newest_step and step not in pinned]
    affected = [artifact for _, path in old if _has_more_than_weights(artifact := artifacts.read(path))]
    if affected:
        artifacts.verify(newest.path, deep=True, schema=checkpoint.SCHEMA)
    for artifact in affected:
        thin(artifact)
    return [artifact.path for artifact in affected]


def _has_more_than_weights(artifact: Artifact) -> bool:
    return any((artifact.path / member.path).exists() for member in droppable(artifact))
