"""Thinned checkpoints: what goes, what refuses to go, and that everything made from them still verifies."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import saver_world
from safetensors.torch import load_file
from test_artifacts_disk import file_size_limit

from solarwm_lib import artifacts, cli
from solarwm_lib.artifacts import MANIFEST, MARKER, THINNED, Artifact, Transaction
from solarwm_lib.runtime import thinning
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.runtime.manifests import thinned_bytes
from solarwm_lib.training import checkpoint, retention
from solarwm_lib.training.checkpoint import State

IDENTITY = {"semantic_digest": "a"}


def publish(run_dir: Path, step: int) -> Artifact:
    state = saver_world.learner()
    saver_world.set_step(state, step)
    counters = State(step, step, step * 8, 1e-4, 8)
    target = run_dir / checkpoint.directory_name(step)
    return checkpoint.save(target, state.tensors(), counters, {**IDENTITY, "step": step}, [])


def full_steps(run_dir: Path) -> list[int]:
    found = [path.parent for path in sorted(run_dir.glob(f"*/{checkpoint.OPTIMIZER}"))]
    return [checkpoint.step_of(path) for path in found]


@pytest.mark.parametrize(
    "keep, pinned, newest, kept",
    [
        (0, [], 8, [2, 4, 6, 8]),
        (1, [], 8, [8]),
        (2, [], 8, [6, 8]),
        (1, [2, 4], 8, [2, 4, 8]),
        (9, [], 8, [2, 4, 6, 8]),
        (1, [], 4, [4, 6, 8]),  # an earlier one was made again: what is later is not its business
        (1, [], 2, [2, 4, 6, 8]),
    ],
)
def test_only_older_ones_that_nobody_needs_whole_are_thinned(tmp_path, keep, pinned, newest, kept):
    made = {step: publish(tmp_path, step) for step in (2, 4, 6, 8)}
    thinned = retention.thin_published(tmp_path, made[newest], keep, pinned)
    assert full_steps(tmp_path) == kept
    assert [checkpoint.step_of(path) for path in thinned] == [s for s in made if s not in kept]
    assert retention.thin_published(tmp_path, made[newest], keep, pinned) == []
    for step, before in made.items():
        after = artifacts.verify(before.path, deep=True)
        assert after.digest == before.digest
        assert load_file(after.file(checkpoint.EMA)).keys() == set(saver_world.SHAPES)
        assert [m.path for m in after.dropped] == ([] if step in kept else [checkpoint.OPTIMIZER])


def test_nothing_goes_because_of_a_new_checkpoint_that_is_damaged(tmp_path):
    old, new = publish(tmp_path, 2), publish(tmp_path, 4)
    path = new.file(checkpoint.MODEL)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        retention.thin_published(tmp_path, new, 1, [])
    assert full_steps(tmp_path) == [2, 4] and not (old.path / THINNED).exists()


def test_a_crash_between_the_list_and_the_removal_reads_as_thinned_and_is_finished_later(tmp_path):
    old, new = publish(tmp_path, 2), publish(tmp_path, 4)
    artifacts.write_once(old.path / THINNED, thinned_bytes(old.digest, thinning.droppable(old)))
    assert full_steps(tmp_path) == [2, 4]
    assert [m.path for m in artifacts.verify(old.path, deep=True).dropped] == [checkpoint.OPTIMIZER]
    with pytest.raises(ArtifactError, match="was thinned"):
        checkpoint.open_verified(old.path)
    assert retention.thin_published(tmp_path, new, 1, []) == [old.path]
    assert full_steps(tmp_path) == [4]


def test_nothing_goes_before_the_list_is_written(tmp_path):
    made = publish(tmp_path, 2)
    with file_size_limit(100), pytest.raises(ArtifactError, match="disk full"):
        thinning.thin(made)
    assert full_steps(tmp_path) == [2] and artifacts.verify(made.path, deep=True).dropped == ()


def test_who_reads_while_it_is_thinned_sees_it_whole_or_thinned(tmp_path):
    with Transaction(tmp_path / "0", checkpoint.SCHEMA, IDENTITY) as transaction:
        for part in range(100):  # the more there is to look at, the likelier it goes in the meantime
            transaction.write_bytes(f"optimizer-{part:05d}-of-00100.safetensors", b"x")
    made = [transaction.artifact.path]
    for number in range(1, 25):
        made.append(Path(shutil.copytree(made[0], tmp_path / str(number))))
    failures: list[str] = []
    current, is_over = [made[0]], threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                artifacts.read(current[0])
            except ArtifactError as error:
                failures.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for path in made:
        current[0] = path
        artifact = artifacts.read(path)
        thinning.thin(artifact)
    is_over.set()
    reader.join()
    assert failures == []


def test_a_missing_member_that_no_list_names_is_damage(tmp_path):
    artifact = publish(tmp_path, 2)
    artifact.file(checkpoint.OPTIMIZER).unlink()
    with pytest.raises(ArtifactError, match=r"optimizer\.safetensors' is missing"):
        artifacts.read(artifact.path)


@pytest.mark.parametrize("change", ["weights", "edited", "other marker", "not json", "other size"])
def test_a_list_that_thinning_did_not_write_is_refused(tmp_path, change):
    artifact, other = publish(tmp_path, 2), publish(tmp_path, 4)
    members = {member.path: member for member in artifact.members}
    optimizer = members[checkpoint.OPTIMIZER]
    smaller = type(optimizer)(optimizer.path, 1, optimizer.sha256)
    data = {
        "weights": thinned_bytes(artifact.digest, [optimizer, members[checkpoint.MODEL]]),
        "edited": thinned_bytes(artifact.digest, [optimizer]) + b" ",
        "other marker": thinned_bytes(other.digest, [optimizer]),
        "not json": b"{",
        "other size": thinned_bytes(artifact.digest, [smaller]),
    }[change]
    (artifact.path / THINNED).write_bytes(data)
    artifact.file(checkpoint.OPTIMIZER).unlink()
    for read in (artifacts.read, lambda path: artifacts.reissue(path, checkpoint.SCHEMA, artifact.identity)):
        with pytest.raises(ArtifactError, match=THINNED):
            read(artifact.path)


def test_an_artifact_of_another_schema_is_never_thinned(tmp_path):
    with Transaction(tmp_path / "a", "solarwm.assets.v1", {}) as transaction:
        transaction.write_bytes(checkpoint.OPTIMIZER, b"x")
    assert thinning.thin(transaction.artifact) == 0
    (tmp_path / "a" / THINNED).write_bytes(
        thinned_bytes(transaction.artifact.digest, transaction.artifact.members)
    )
    with pytest.raises(ArtifactError, match="never drops"):
        artifacts.read(tmp_path / "a")


def test_what_was_made_from_a_thinned_checkpoint_still_holds(tmp_path):
    made = publish(tmp_path, 2)
    with Transaction(
        tmp_path / "validation", "solarwm.validation.v1", {"checkpoint_digest": made.digest}, [made]
    ) as transaction:
        transaction.write_bytes("summary.json", b"{}")
    before = {name: (made.path / name).read_bytes() for name in (MARKER, MANIFEST)}
    freed = sum(m.bytes for m in made.members if m.path == checkpoint.OPTIMIZER)
    assert thinning.thin(made) == freed > 0
    assert {name: (made.path / name).read_bytes() for name in before} == before
    assert [node.status for node in artifacts.lineage(tmp_path / "validation")] == ["ok", "ok"]
    assert artifacts.read(made.path).bytes == made.bytes - freed


def test_a_lost_marker_of_a_thinned_checkpoint_is_issued_again(tmp_path):
    made = publish(tmp_path, 2)
    thinning.thin(made)
    before = (made.path / MARKER).read_bytes()
    (made.path / MARKER).unlink()
    again = artifacts.reissue(made.path, checkpoint.SCHEMA, made.identity)
    assert (made.path / MARKER).read_bytes() == before
    assert [member.path for member in again.dropped] == [checkpoint.OPTIMIZER]


def test_it_gives_weights_but_no_training_and_says_where_to_go_on(tmp_path):
    steps = {step: publish(tmp_path, step) for step in (2, 4, 6)}
    thinning.thin(steps[4])
    live = checkpoint.load_weights(steps[4].path, "live", saver_world.learner().parameters)
    assert live.keys() == saver_world.SHAPES.keys()
    with pytest.raises(ArtifactError, match=r"was dropped when the artifact was thinned"):
        artifacts.read(steps[4].path).file(checkpoint.OPTIMIZER)
    with pytest.raises(
        ArtifactError, match=r"thinned.*nearest full one before it is checkpoint_model_000002"
    ) as caught:
        checkpoint.open_verified(steps[4].path)
    assert "\n" not in str(caught.value)
    thinning.thin(steps[2])
    with pytest.raises(ArtifactError, match=r"no full one is before it"):
        checkpoint.open_verified(steps[4].path)


def test_verify_says_thinned(tmp_path, capsys):
    made = publish(tmp_path, 2)
    thinning.thin(made)
    for words in (["verify", str(made.path)], ["verify", str(made.path), "--deep"]):
        assert cli.main(words) in (0, None)
        out = capsys.readouterr().out
        assert out.startswith("ok ") and "3 members" in out
        assert "thinned: optimizer.safetensors dropped, training cannot go on from it" in out
    assert sorted(os.listdir(made.path)) == sorted(
        [MARKER, MANIFEST, THINNED, *checkpoint.INVENTORY[:2], "state.json"]
    )
