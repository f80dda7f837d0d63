"""Facts about the machine and the installed software, for `solarwm environment probe` and every launch manifest.

Versions come from package metadata, so diffusers, transformers and the like are never imported; torch is, and only for what
nothing else knows: the CUDA build, the devices and NCCL.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "accelerate",
    "av",
    "diffusers",
    "flash-attn",
    "fsspec",
    "matplotlib",
    "numpy",
    "pandas",
    "peft",
    "pillow",
    "psutil",
    "pydantic",
    "pyyaml",
    "safetensors",
    "snakemake",
    "snakemake-executor-plugin-kubernetes",
    "snakemake-executor-plugin-slurm",
    "solarwm-graph",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
    "triton",
)

_LAUNCH_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "RANK",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "WORLD_SIZE",
)


def probe(disk_path: Path | str = ".") -> dict[str, Any]:
    """JSON values describing interpreter, packages, accelerator, host and launch environment.

    `torch`, `cuda`, `cuda_available` and (with torch) `nccl` follow OPS section 1.3. Byte counts are integers in bytes;
    `disk` is the file system that holds `disk_path` or its nearest existing parent.
    """
    packages = package_versions()
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "host": platform.node(),
        },
        "packages": packages,
        **torch_facts("torch" in packages),
        "nvidia_driver": nvidia_driver(),
        "cpu": {"logical": os.cpu_count(), "usable": usable_cpus()},
        "memory": memory(),
        "disk": disk(disk_path),
        "launch_environment": {name: os.environ[name] for name in _LAUNCH_VARIABLES if name in os.environ},
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter here and are installed, without importing any."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def torch_facts(installed: bool) -> dict[str, Any]:
    """torch, CUDA and NCCL versions and one entry per visible device; an unloadable torch is reported, not raised."""
    absent: dict[str, Any] = {"torch": None, "cuda": None, "cuda_available": False, "devices": []}
    if not installed:
        return absent
    try:
        import torch
    except (ImportError, OSError) as error:
        return {**absent, "torch_error": f"{type(error).__name__}: {error}"}
    available = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_available": available,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(torch.cuda.nccl.version()) if available else None,
        "devices": [_device(torch, index) for index in range(torch.cuda.device_count())] if available else [],
    }


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def nvidia_driver() -> str | None:
    """Driver version by nvidia-smi; None where there is none or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(result.stdout.split()), None)


def usable_cpus() -> int:
    """Processors this process may run on: affinity and the container's CPU quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        affinity = min(affinity, max(1, int(quota[0]) // int(quota[1])))
    return affinity


def memory() -> dict[str, int | None]:
    """Total and available host memory and the container's limit (None without one), in bytes."""
    import psutil

    virtual = psutil.virtual_memory()
    limit = _cgroup("memory.max").strip()
    return {
        "total_bytes": virtual.total,
        "available_bytes": virtual.available,
        "limit_bytes": int(limit) if limit.isdigit() else None,
    }


def _cgroup(name: str) -> str:
    """Content of a file of this process's own version-2 control group; empty text where there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), "/")
        return Path("/sys/fs/cgroup" + group.rstrip("/"), name).read_text()
    except OSError:
        return ""


def disk(path: Path | str) -> dict[str, Any]:
    """Free and total bytes of the file system that holds `path` or its nearest existing parent."""
    nearest = Path(path).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    usage = shutil.disk_usage(nearest)
    return {"path": str(nearest), "total_bytes": usage.total, "free_bytes": usage.free}
