"""From any artifact back to the raw data: walk the parents recorded in the markers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.runtime.manifests import MARKER, Artifact, Parent, read

_HIGHLIGHTS = ("name", "run", "dataset", "stage", "step", "completed_steps", "pass", "weights", "seed")


@dataclass(frozen=True)
class LineageNode:
    """One artifact of a lineage, in the order of a depth-first walk.

    status: ok; missing (nothing at the recorded path); changed (complete, but its marker is not the one recorded);
    damaged (the recorded path holds something that does not verify). `digest` is the marker's digest as recorded by
    the child (for the root: as found), `child` the index of the node that named it (None for the root), `repeated`
    marks a further mention of an artifact whose parents are listed at its first one.
    """

    path: Path
    depth: int
    schema: str
    digest: str
    identity: dict[str, Any]
    status: str
    detail: str
    child: int | None
    repeated: bool


def locate(child: Path, parent: Parent) -> Path:
    """Directory of a recorded parent, seen from its child; where links make the two differ, the one that exists."""
    lexical = Path(os.path.normpath(child / parent.path))
    physical = Path(os.path.normpath(Path(os.path.realpath(child)) / parent.path))
    return physical if not lexical.exists() and physical.exists() else lexical


def lineage(path: Path | str) -> list[LineageNode]:
    """The artifact at `path` and everything it was made from; sizes are checked, digests are compared.

    A missing, changed or damaged parent is reported in its node. ArtifactError only if `path` itself does not verify.
    """
    root = read(path)
    nodes: list[LineageNode] = []
    seen: dict[Path, Artifact | ArtifactError] = {}
    pending: list[tuple[Path, Parent | None, int, int | None]] = [(root.path, None, 0, None)]
    while pending:
        directory, recorded, depth, child = pending.pop()
        digest = recorded.digest if recorded else root.digest
        schema = recorded.schema if recorded else root.schema
        identity: dict[str, Any] = {}
        parents: Sequence[Parent] = ()
        status, detail = "ok", ""
        repeated = directory in seen
        if not repeated:
            seen[directory] = _read_or_error(directory)
        found = seen[directory]
        if isinstance(found, ArtifactError):
            status, detail = "damaged" if (directory / MARKER).exists() else "missing", str(found)
        else:
            identity, parents = found.identity, found.parents
            if found.digest != digest:
                status, detail = "changed", f"marker is {found.digest[:12]}, recorded {digest[:12]}"
        nodes.append(LineageNode(directory, depth, schema, digest, identity, status, detail, child, repeated))
        if not repeated:
            index = len(nodes) - 1
            pending.extend((locate(directory, p), p, depth + 1, index) for p in reversed(parents))
    return nodes


def _read_or_error(directory: Path) -> Artifact | ArtifactError:
    try:
        return read(directory)
    except ArtifactError as error:
        return error


def format_lineage(nodes: Sequence[LineageNode]) -> str:
    """Indented text, one line per node: schema, path, short marker digest, highlights of the identity, status."""
    base = os.path.commonpath([node.path.parent for node in nodes]) if nodes else ""
    lines = []
    for node in nodes:
        parts = [node.schema, os.path.relpath(node.path, base), node.digest[:12], *_highlights(node.identity)]
        status = node.status + (f" ({node.detail})" if node.detail else "")
        note = "  (shown above)" if node.repeated and node.status != "missing" else ""
        lines.append("  " * node.depth + "  ".join([*parts, status]) + note)
    return "\n".join(lines)


def _highlights(identity: dict[str, Any], limit: int = 4) -> list[str]:
    """Up to `limit` short scalars of an identity, the telling keys first."""
    scalars = [key for key, value in sorted(identity.items()) if not isinstance(value, (dict, list))]
    order = sorted(scalars, key=lambda k: _HIGHLIGHTS.index(k) if k in _HIGHLIGHTS else len(_HIGHLIGHTS))
    return [f"{key}={_short(identity[key])}" for key in order[:limit]]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else text[:12] + "..."


def lineage_json(nodes: Sequence[LineageNode]) -> list[dict[str, Any]]:
    """JSON values, one object per node, in walk order; `child` is an index into the list."""
    return [{**vars(node), "path": str(node.path)} for node in nodes]
