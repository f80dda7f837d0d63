"""The words of the commands that the rules run. Pure functions of the workflow config, quoted for a shell."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from solarwm_lib.config.workflow import ExportSpec, FolderData, ImportedAssets, WindowsSpec
from solarwm_lib.data.pack_options import PackOptions

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def config_arguments(config: str, overlays: Iterable[str], sets: Mapping[str, Any]) -> str:
    """`--config ... --overlay ... --set ...`."""
    words = ["--config", config]
    for overlay in overlays:
        words += ["--overlay", overlay]
    for word in set_words(sets):
        words += ["--set", word]
    return shlex.join(words)


def set_words(sets: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` with VALUE in JSON, which the YAML parser reads back to the same value."""
    return [f"{key}={json.dumps(_number_or_same(value), ensure_ascii=False)}" for key, value in sets.items()]


def _number_or_same(value: Any) -> Any:
    """Snakemake reads workflow configs as YAML 1.1, where `5e-4` is text; everywhere else here it is a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def pack_arguments(spec: FolderData) -> str:
    """Words after `solarwm data pack`: the folder and every option that differs from its default."""
    words = [spec.source]
    for option, value in asdict(spec.pack_options()).items():
        flag = f"--{option.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value != getattr(PackOptions, option):
            words += [flag, str(value)]
    return shlex.join(words)


def windows_arguments(spec: WindowsSpec, data: str) -> str:
    """Words after `solarwm data materialize-windows`; `data` is the folder of the data set."""
    words = ["--data", data, "--profile", spec.profile, "--pixel-frames", str(spec.pixel_frames)]
    return shlex.join([*words, *(["--fps", str(spec.fps)] if spec.fps is not None else [])])


def import_arguments(spec: ImportedAssets, base: str | None) -> str:
    """Words after `solarwm weights import`; `base` is the folder of the base weights that trained ones belong to."""
    words = [spec.source]
    words += ["--architecture", spec.architecture] if spec.architecture else []
    return shlex.join([*words, *(["--assets", base] if base else [])])


def export_arguments(checkpoint: str, spec: ExportSpec) -> str:
    """Words after `solarwm weights export`."""
    words = [checkpoint, "--format", spec.form]
    words += ["--role", spec.role] if spec.role else []
    return shlex.join([*words, *(["--dtype", spec.dtype] if spec.dtype else [])])


def launcher(python: str, processes: int, threads: int) -> str:
    """The words before `-m solarwm_lib`: plain Python for one process, torchrun for several.

    Snakemake sets the thread variables to the job's threads, which is those of all processes together; PyTorch
    follows MKL's over OpenMP's, and twice as many threads as cores make a step ten times slower.
    """
    words = ["env", *(f"{name}={threads}" for name in THREAD_VARIABLES), python]
    if processes > 1:
        words += ["-m", "solarwm_lib.runtime.torchrun", "--standalone", f"--nproc-per-node={processes}"]
    return shlex.join(words)


def rulegraph(basedir: Path, configfiles: Iterable[str]) -> str:
    """Print the graph of rules behind all targets, with the same config files as this workflow."""
    words = [sys.executable, "-m", "snakemake", "--snakefile", str(basedir / "Snakefile"), "--rulegraph"]
    files = [str(path) for path in configfiles]
    return shlex.join([*words, *(["--configfile", *files] if files else []), "--", "all"])
