"""Thinning a published artifact: what only going on with a training needs is removed, the rest stays and still verifies."""

from __future__ import annotations

from solarwm_lib.runtime.files import fsync_dir, write_once
from solarwm_lib.runtime.manifests import DROPPABLE, THINNED, Artifact, Member, thinned_bytes


def droppable(artifact: Artifact) -> tuple[Member, ...]:
    """Members that a thinning of `artifact` removes; () for a schema that is never thinned."""
    allowed = DROPPABLE.get(artifact.schema)
    return tuple(m for m in artifact.members if allowed is not None and allowed.fullmatch(m.path))


def thin(artifact: Artifact) -> int:
    """Remove the droppable members of `artifact`; return the bytes this call freed.

    The list of them is durable before the first is removed, so a crash in between leaves an artifact that reads as thinned;
    the next call removes the rest. ArtifactError if a `THINNED.json` of other content is there.
    """
    members = droppable(artifact)
    present = [m for m in members if (artifact.path / m.path).exists()]
    if not present:
        return 0
    write_once(artifact.path / THINNED, thinned_bytes(artifact.digest, members))
    for member in present:
        (artifact.path / member.path).unlink(missing_ok=True)
    fsync_dir(artifact.path)
    return sum(member.bytes for member in present)
