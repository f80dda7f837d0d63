"""Tensor members in one file or in parts, and the receipts of processes that write them together."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from solarwm_lib.artifacts import Transaction
from solarwm_lib.runtime import receipts
from solarwm_lib.runtime.errors import ArtifactError, DataError, DistributedError
from solarwm_lib.runtime.manifests import Member
from solarwm_lib.training import checkpoint, members, writing
from solarwm_lib.training.checkpoint import State

WEIGHTS = {name: torch.full((size,), float(size)) for name, size in (("a", 3), ("b", 5), ("c", 2), ("d", 1))}
IDENTITY = {"step": 3}


def in_parts(target: Path, count: int = 2, leave_out: str = "", again: str = "") -> Path:
    """Publish a checkpoint of `WEIGHTS` whose members lie in parts; `leave_out` is not written, tensor `again` is twice."""
    named = {member: WEIGHTS for member in checkpoint.INVENTORY[:-1]}
    owned = writing.owners(named, count)
    with Transaction(target, checkpoint.SCHEMA, IDENTITY) as transaction:
        for member in named:
            for part in range(count):
                mine = {n: t for n, t in WEIGHTS.items() if owned[member][n] == part or n == again}
                name = members.part_name(member, part, count)
                if name != leave_out:
                    with transaction.open(name) as stream:
                        members.write_safetensors(stream, mine)
        for name, data in checkpoint.extra(State(3, 3, 24, 1e-4, 8)).items():
            transaction.write_bytes(name, data)
    return target


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_readers_see_no_difference_between_one_file_and_parts(tmp_path, count):
    path = in_parts(tmp_path / "checkpoint_model_000003", count)
    artifact = checkpoint.open_verified(path)
    files = checkpoint.files_of(artifact, checkpoint.MODEL)
    assert len(files) == count
    targets = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    checkpoint.load_into(files, targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in WEIGHTS.items())
    assert members.first_difference(files, targets) is None
    targets["b"][4] = -5.0
    assert members.first_difference(files, targets) == "b"
    loaded = checkpoint.load_weights(path, "ema", WEIGHTS, source_step=3)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in WEIGHTS.items())
    found = checkpoint.weight_files(path, ("live", "ema"), 3)
    assert found["live"] == files and len(found["ema"]) == count


def test_a_checkpoint_published_without_a_part_is_refused_by_name(tmp_path):
    path = in_parts(tmp_path / "a", leave_out="ema-00002-of-00002.safetensors")
    with pytest.raises(ArtifactError, match=r"part ema-00002-of-00002\.safetensors of member ema"):
        checkpoint.open_verified(path)
    with pytest.raises(ArtifactError, match=r"part ema-00002-of-00002"):
        checkpoint.load_weights(path, "ema", WEIGHTS)


def test_a_part_that_was_deleted_or_changed_is_named(tmp_path):
    path = in_parts(tmp_path / "a")
    part = path / "optimizer-00001-of-00002.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"optimizer-00001-of-00002\.safetensors.*other content"):
        checkpoint.open_verified(path)
    artifact = checkpoint.open_verified(path, deep=False)
    shares = [_verifies(artifact, rank) for rank in range(2)]
    assert sorted(map(bool, shares)) == [False, True] and "optimizer-00001" in "".join(shares)
    part.unlink()
    with pytest.raises(ArtifactError, match=r"optimizer-00001-of-00002\.safetensors.*missing"):
        checkpoint.open_verified(path)


def _verifies(artifact, rank: int) -> str:
    try:
        checkpoint.verify_share(artifact, rank, 2)
    except ArtifactError as error:
        return str(error)
    return ""


def test_a_tensor_in_two_parts_and_parts_of_two_saves_are_refused(tmp_path):
    path = in_parts(tmp_path / "a", again="c")
    with pytest.raises(ArtifactError, match=r"tensor c stands in model-00001-of-00002\.safetensors too"):
        checkpoint.load_weights(path, "live", WEIGHTS)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for stray in ("model.safetensors", "model-00001-of-00001.safetensors"):
        with pytest.raises(ArtifactError, match=f"{stray} does not belong beside"):
            members.part_names("model.safetensors", [*names, stray], "here")


def test_owners_balance_bytes_and_are_the_same_whatever_the_order():
    sizes = {f"t{i}": torch.zeros(1 + 37 * i % 101) for i in range(60)}
    named = {"model.safetensors": sizes, "ema.safetensors": sizes}
    owned = writing.owners(named, 4)
    loads = [
        sum(members.size_of(t) for m in named for n, t in sizes.items() if owned[m][n] == w) for w in range(4)
    ]
    assert max(loads) - min(loads) <= 4 * 101
    turned = {"model.safetensors": dict(reversed(sizes.items())), "ema.safetensors": sizes}
    assert writing.owners(turned, 4) == owned


def test_a_receipt_hands_over_members_and_disappears(tmp_path):
    with Transaction(tmp_path / "a", "solarwm.test.v1", {}) as transaction:

        def other() -> None:
            time.sleep(0.05)
            writing.write_part(transaction.staging, transaction.target, 3, {"part.safetensors": WEIGHTS})

        thread = threading.Thread(target=other)
        thread.start()
        for member in receipts.collect(transaction.staging, [3], timeout_seconds=10):
            transaction.adopt(member)
        thread.join()
    assert [member.path for member in transaction.artifact.members] == ["part.safetensors"]


def test_a_missing_receipt_a_failed_rank_and_a_damaged_one_are_named(tmp_path):
    with pytest.raises(DistributedError, match=r"no receipt of rank 1, 2 within 0 s"):
        receipts.collect(tmp_path, [1, 2], timeout_seconds=0.05)
    with pytest.raises(DistributedError, match="no receipt of rank 1"):
        receipts.collect(tmp_path, [1], timeout_seconds=600, is_given_up=lambda: True)
    receipts.leave_error(tmp_path, 2, DataError("the disk is gone"))
    with pytest.raises(DataError, match=r"^rank 2: the disk is gone$"):
        receipts.collect(tmp_path, [1, 2], timeout_seconds=5)
    (tmp_path / ".receipt-00001.json").write_text("{}")
    with pytest.raises(ArtifactError, match="damaged receipt of rank 1"):
        receipts.collect(tmp_path, [1], timeout_seconds=5)


def test_a_member_that_is_not_as_its_writer_told_is_not_adopted(tmp_path):
    with Transaction(tmp_path / "a", "solarwm.test.v1", {}) as transaction:
        (transaction.staging / "x").write_bytes(b"123")
        with pytest.raises(ArtifactError, match=r"'x' has 3 bytes, its writer told 4"):
            transaction.adopt(Member("x", 4, "0" * 64))
        with pytest.raises(ArtifactError, match=r"'y' of another process cannot be seen here"):
            transaction.adopt(Member("y", 4, "0" * 64))


def test_a_writer_whose_save_was_given_up_ends_quietly(tmp_path):
    writing.write_part(tmp_path / "gone", tmp_path / "target", 1, {"part.safetensors": WEIGHTS})
    assert list(tmp_path.iterdir()) == []
