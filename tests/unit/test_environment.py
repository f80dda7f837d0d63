"""The probe states what is installed and what the machine has, without importing what it reports."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from solarwm_lib.runtime import environment


def test_probe_has_the_documented_fields_as_json() -> None:
    facts = json.loads(json.dumps(environment.probe()))
    assert facts["python"] == sys.executable and facts["python_version"] == platform.python_version()
    assert {"diffusers", "transformers", "safetensors", "torch", "snakemake"} <= facts["packages"].keys()
    assert facts["torch"].startswith(facts["packages"]["torch"].split("+")[0])
    assert (
        facts["cuda_available"] == bool(facts["devices"])
        and {"cuda", "nccl", "cudnn", "nvidia_driver"} <= facts.keys()
    )
    assert 1 <= facts["cpu"]["usable"] <= facts["cpu"]["logical"]
    assert 0 < facts["memory"]["available_bytes"] <= facts["memory"]["total_bytes"]
    assert 0 < facts["disk"]["free_bytes"] <= facts["disk"]["total_bytes"]


def test_probe_without_torch_says_so_and_leaves_nccl_out() -> None:
    facts = environment.torch_facts(installed=False)
    assert facts == {"torch": None, "cuda": None, "cuda_available": False, "devices": []}


def test_a_torch_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    """A shared library that is missing on this host must not hide the rest of the report."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.99: cannot open shared object file')\n")
    code = "import json; from solarwm_lib.runtime import environment; print(json.dumps(environment.probe()))"
    root = Path(environment.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(result.stdout)
    assert facts["torch"] is None and "libcudart.so.99" in facts["torch_error"]
    assert facts["packages"]["torch"]


def test_package_versions_import_nothing_heavy() -> None:
    code = (
        "import sys; from solarwm_lib.runtime import environment; environment.package_versions(); "
        "print(*sorted({'torch', 'diffusers', 'transformers', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "\n"


def test_disk_of_a_directory_that_does_not_exist_yet_is_its_nearest_parents(tmp_path: Path) -> None:
    assert environment.disk(tmp_path / "results" / "runs")["path"] == str(tmp_path)


def test_launch_variables_are_copied_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    facts = environment.probe()
    assert facts["launch_environment"]["SLURM_JOB_ID"] == "42"
    assert "hidden" not in json.dumps(facts)
