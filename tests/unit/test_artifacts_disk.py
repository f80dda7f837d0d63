"""A full disk, with the kernel's own errors, is one line, publishes nothing and leaves nothing; single files stay whole."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Transaction, verify
from solarwm_lib.runtime.errors import ArtifactError

SCHEMA = "solarwm.test.v1"


def publish(target: Path, payload: dict[str, bytes], **options: int) -> None:
    with Transaction(target, SCHEMA, {}, **options) as tx:
        for name, data in payload.items():
            tx.write_bytes(name, data)


@contextmanager
def small_disk(directory: Path, size: int) -> Iterator[Path]:
    """A place where about `size` bytes fit: a tmpfs where mounting is allowed, else a file size limit."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
    else:
        with file_size_limit(size):
            yield directory


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fill_stream(tx: Transaction) -> None:
    with tx.open("big") as file:
        for _ in range(64):
            file.write(bytes(1 << 16))


def _fill_by_tool(tx: Transaction) -> None:
    tx.path("big").write_bytes(bytes(1 << 22))


def _fill_by_native_code(tx: Transaction) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(1 << 20, np.float32)}, tx.path("big.safetensors"))


@pytest.mark.parametrize("fill", [_fill_stream, _fill_by_tool, _fill_by_native_code])
@pytest.mark.parametrize("limit", ["disk", "file size"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, fill: Callable[[Transaction], None], limit: str
) -> None:
    with small_disk(tmp_path / "d", 1 << 20) if limit == "disk" else file_size_limit(1 << 20):
        directory = tmp_path / "d"
        directory.mkdir(exist_ok=True)
        with (
            pytest.raises(ArtifactError, match=r"^disk full while writing .*free space or change") as failure,
            Transaction(directory / "a", SCHEMA, {}) as tx,
        ):
            fill(tx)
        assert failure.value.exit_code == 4 and "\n" not in str(failure.value)
        assert list(directory.iterdir()) == []
        publish(directory / "a", {"small": b"fits"})
        verify(directory / "a", deep=True)


def test_a_disk_that_fills_at_the_commit_publishes_nothing(tmp_path: Path) -> None:
    """Many tiny members: the payload fits, the manifest that lists it does not."""
    with file_size_limit(1 << 14), pytest.raises(ArtifactError, match="disk full"):
        publish(tmp_path / "a", {f"member-{i:04d}": b"" for i in range(200)})
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"disk full: .* needs about .* MiB are free"):
        publish(tmp_path / "a", {}, expected_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_place_is_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write beside"):
        publish(tmp_path / "file" / "a", {})
    with pytest.raises(ArtifactError, match="name too long"):
        publish(tmp_path / ("n" * 250), {})


# single files


def test_write_atomic_replaces_whole_files_and_keeps_the_old_one_when_the_disk_is_full(
    tmp_path: Path,
) -> None:
    path = tmp_path / "deep" / "report.md"
    artifacts.write_atomic(path, "old")
    artifacts.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    with file_size_limit(1000), pytest.raises(ArtifactError, match="disk full"):
        artifacts.write_atomic(path, bytes(2000))
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["report.md"]


def test_write_once_creates_compares_and_refuses(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert artifacts.write_once(path, "{}\n") is True
    assert artifacts.write_once(path, b"{}\n") is False
    with pytest.raises(ArtifactError, match="exists with other content"):
        artifacts.write_once(path, "[]\n")
    assert path.read_text() == "{}\n" and os.listdir(tmp_path) == ["plan.json"]
