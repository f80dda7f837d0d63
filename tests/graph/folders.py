"""A copy of the workflow in a folder of its own, driven by the real Snakemake."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

REPO = Path(__file__).parents[2]
SMOKE = yaml.safe_load((Path(__file__).parent / "smoke.yaml").read_text())


@dataclass(frozen=True)
class Folder:
    """A copy of the workflow with its own config and results."""

    path: Path

    @property
    def results(self) -> Path:
        return self.path / "results"

    def configure(self, values) -> None:
        (self.path / "config/config.yaml").write_text(
            yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        )

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--cores", "2", *words],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(self, *words: str, code: int = 0, timeout: float = 500) -> str:
        process = self.start(*words)
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == code, output
        return output

    def solarwm(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "solarwm_lib", *words],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": str(self.path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def copy(self, target: Path, *results: str) -> "Folder":
        """The workflow elsewhere, with a copy of the named parts of the results and no Snakemake metadata."""
        ignore = shutil.ignore_patterns(".snakemake", "results", "__pycache__")
        shutil.copytree(self.path, target, ignore=ignore, symlinks=True)
        for name in results:
            shutil.copytree(self.path / name, target / name, symlinks=True)
        return Folder(target)


def make_folder(path: Path) -> Folder:
    path.mkdir(parents=True)
    for name in ("Snakefile", "rules", "config", "profiles", "envs", "docs", "solarwm_lib"):
        source = REPO / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, path / name)
    folder = Folder(path)
    folder.configure(SMOKE)
    return folder


def jobs(output: str) -> dict[str, int]:
    """Rule -> count from Snakemake's table of job statistics."""
    table = output.split("Job stats:", 1)[1].split("total", 1)[0] if "Job stats:" in output else ""
    return {
        m[1]: int(m[2]) for m in re.finditer(r"^(\w+)\s+(\d+)\s*$", table, re.MULTILINE) if m[1] != "count"
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)
