"""What a killed Snakemake leaves behind, said in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def announce_leftovers(workdir: Path) -> None:
    """Say in one line how to clear the lock that a killed Snakemake left in `workdir`."""
    locks = workdir / ".snakemake" / "locks"
    if "--unlock" in sys.argv or not locks.is_dir() or not any(locks.iterdir()):
        return
    import psutil

    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        others = process.info["pid"] not in (os.getpid(), os.getppid())
        if (
            others
            and process.info["cwd"] == str(workdir)
            and any("snakemake" in Path(word).name for word in words[:4])
        ):
            return
    print(
        f"solarwm: the lock in {locks} was left by a killed Snakemake (no other one works in this folder); "
        "clear it with: snakemake --unlock",
        file=sys.stderr,
    )
