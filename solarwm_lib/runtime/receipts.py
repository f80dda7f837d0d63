"""How processes that fill one staging directory tell the one that commits it: a small file each, no connection needed.

A receipt lists what its process wrote (path, size, SHA-256), or says why it failed. It appears whole (written aside, renamed)
and after the members it lists are durable; the committing process removes it, so it never becomes a member.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from solarwm_lib.runtime.errors import ArtifactError, DistributedError, SolarError, of_exit_code
from solarwm_lib.runtime.files import json_bytes, write_atomic
from solarwm_lib.runtime.manifests import Member

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.5


def leave(staging: Path, rank: int, members: Sequence[Member]) -> None:
    """Tell that `rank` has written `members`."""
    write_atomic(_path(staging, rank), json_bytes({"members": [asdict(member) for member in members]}))


def leave_error(staging: Path, rank: int, error: BaseException) -> None:
    """Tell that `rank` failed."""
    code = error.exit_code if isinstance(error, SolarError) else ArtifactError.exit_code
    write_atomic(_path(staging, rank), json_bytes({"error": str(error), "exit_code": code}))


def collect(
    staging: Path,
    ranks: Sequence[int],
    timeout_seconds: float,
    is_given_up: Callable[[], bool] = lambda: False,
) -> list[Member]:
    """Wait for the receipts of `ranks`, remove them and return the members they list.

    Raises a failed rank's error as soon as it is told; DistributedError names the ranks still missing after
    `timeout_seconds`, or when the wait is given up; ArtifactError one whose receipt is damaged.
    """
    members: list[Member] = []
    missing, pause = list(ranks), _FIRST_PAUSE_SECONDS
    started = time.monotonic()
    while missing:
        for rank in [rank for rank in missing if _path(staging, rank).exists()]:
            members += _take(_path(staging, rank), rank)
            missing.remove(rank)
        if not missing:
            break
        waited = time.monotonic() - started
        if waited > timeout_seconds or is_given_up():
            raise DistributedError(
                f"{staging}: no receipt of rank {', '.join(map(str, missing))} within {waited:.0f} s, so their parts "
                "of the checkpoint are not known to be whole; see their output"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return members


def _path(staging: Path, rank: int) -> Path:
    return staging / f".receipt-{rank:05d}.json"


def _take(path: Path, rank: int) -> list[Member]:
    try:
        value = json.loads(path.read_bytes())
        if "error" in value:
            raise of_exit_code(value["exit_code"])(f"rank {rank}: {value['error']}")
        members = [Member(**member) for member in value["members"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path}: damaged receipt of rank {rank} ({type(error).__name__}: {error})"
        ) from None
    path.unlink()
    return members
