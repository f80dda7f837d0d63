"""Checkpoints of parameters in parts: any number of processes writes and reads the same content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from solarwm_lib.training import checkpoint, members

CASES = Path(__file__).with_name("checkpoint_cases.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Worlds of 4 (2 copies x 2 parts), 2 and 1 processes have saved and loaded."""
    folder = tmp_path_factory.mktemp("parts")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_each_of_the_first_copy_writes_a_part_of_every_member(report):
    tensors = checkpoint.INVENTORY[:-1]
    wanted = sorted(members.part_name(member, part, 2) for member in tensors for part in range(2))
    assert sorted(report["hybrid_weights"]) == sorted(report["two_weights"]) == wanted
    assert sorted(report["one_weights"]) == sorted(tensors)


def test_the_number_of_copies_changes_no_byte_and_the_number_of_parts_no_tensor(report):
    assert report["hybrid_weights"] == report["two_weights"]
    assert report["other_content"] == []


@pytest.mark.parametrize(
    "way", ["hybrid to two", "hybrid to one", "two to hybrid", "one to two", "two to one"]
)
def test_every_world_loads_what_every_other_saved(report, way):
    assert report["load"][way] and not any(report["load"][way])


def test_what_differs_from_the_file_is_named_on_every_rank(report):
    for errors in (rank for ranks in report["save"].values() for rank in ranks):
        assert len(errors) == 1 and "first.weight read back differs" in errors[0]


def test_a_part_that_cannot_be_written_fails_the_save_on_all_ranks_and_leaves_nothing(report):
    for errors in report["fail"]:  # at once, then in the background
        assert len(errors) == 2
        assert all("ArtifactError: rank 0: rank 1: disk full while writing" in error for error in errors)
    assert report["fail_left"] == []
