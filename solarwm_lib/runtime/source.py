"""Which version of this program ran: package version and, from a checkout, the exact git state."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent


def source_identity() -> dict[str, Any]:
    """Return commit, tree and cleanliness of the checkout the package runs from; `available` is False without one.

    `status_digest` is the SHA-256 of `git status --porcelain` with untracked files, so two different sets of local
    changes are told apart. A package installed below somebody else's repository does not count as its checkout.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"available": False}
    status = _git("status", "--porcelain", "--untracked-files=all") or ""
    return {
        "available": True,
        "root": _git("rev-parse", "--show-toplevel"),
        "commit": _git("rev-parse", "HEAD"),
        "tree": _git("rev-parse", "HEAD^{tree}"),
        "clean": status == "",
        "status_digest": hashlib.sha256(status.encode()).hexdigest(),
    }


def _git(*arguments: str) -> str | None:
    """Output of a git command in the package's folder; None if git or the repository is missing."""
    try:
        result = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
