"""A copy of the workflow in a folder of its own, driven by the real Snakemake."""

import os
import shutil
import subprocess
import sys
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

    def copy(self, target: Path, results: str | None = "results") -> "Folder":
        """The workflow elsewhere, with a copy of the results (or of the named part of them) and no Snakemake metadata."""
        ignore = shutil.ignore_patterns(".snakemake", "results", "__pycache__")
        shutil.copytree(self.path, target, ignore=ignore, symlinks=True)
        if results:
            shutil.copytree(self.path / results, target / results, symlinks=True)
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
