"""The lock on a run directory: one holder, named to the others, gone when the holder is."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.runtime.lock import exclusive

HOLDER = """
import sys, time, pathlib
from solarwm_lib.runtime.lock import exclusive
with exclusive(pathlib.Path(sys.argv[1]), "training"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds `tmp_path/lock`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_process_is_refused_and_told_who_the_first_is(holder, tmp_path):
    with (
        pytest.raises(ArtifactError, match=rf"process {holder.pid} on .* is training here") as caught,
        exclusive(tmp_path / "lock", "training"),
    ):
        pytest.fail("entered")
    assert caught.value.exit_code == 4


def test_a_killed_holder_leaves_no_lock(holder, tmp_path):
    holder.kill()
    holder.wait()
    with exclusive(tmp_path / "lock", "training"):
        assert f'"pid": {os.getpid()},' in (tmp_path / "lock").read_text()


def test_the_same_process_may_enter_again_and_the_outer_block_keeps_the_lock(tmp_path):
    probe = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def free() -> bool:
        command = [sys.executable, "-c", probe, str(tmp_path / "lock")]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    with exclusive(tmp_path / "lock", "training"):
        with exclusive(tmp_path / "lock", "training"):
            assert not free()
        assert not free()
    assert free()


def test_a_file_system_without_locks_is_reported_and_does_not_stop_the_work(tmp_path, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive(tmp_path / "lock", "training"):
        pass
    assert "Function not implemented" in caplog.text
