"""Checkpoint members, verification before loading, and which saves a run may continue from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from solarwm_lib import artifacts
from solarwm_lib.artifacts import MARKER
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint, retention
from solarwm_lib.training.checkpoint import State, Tensors

IDENTITY = {"semantic_digest": "a", "dataset": "b", "assets": "c", "initial": None}


def _tensors() -> Tensors:
    torch.manual_seed(0)
    weights = {"block.weight": torch.randn(4, 3), "block.bias": torch.randn(4)}
    slots = {f"{n}.{s}": torch.zeros(()) if s == "step" else torch.randn_like(t)
             for n, t in weights.items() for s in ("step", "exp_avg", "exp_avg_sq")}  # fmt: skip
    return Tensors(weights, {n: t + 1 for n, t in weights.items()}, slots)


def _save(target: Path, step: int = 3, ema_updates: int = 3) -> artifacts.Artifact:
    state = State(step, ema_updates, step * 8, 1e-4, 8)
    return checkpoint.save(target, _tensors(), state, {**IDENTITY, "step": step}, [])


def test_members_read_back_with_the_safetensors_library(tmp_path):
    artifact = _save(tmp_path / "checkpoint_model_000003")
    assert {m.path for m in artifact.members} == set(checkpoint.INVENTORY)
    for member, tensors in _tensors().members().items():
        loaded = load_file(artifact.file(member))
        assert set(loaded) == set(tensors)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_mixed_dtypes_scalars_and_unicode_names_are_written_aligned(tmp_path):
    tensors = {
        "b": torch.arange(3, dtype=torch.uint8),
        "é": torch.tensor(2.5),
        "h": torch.randn(5).to(torch.bfloat16),
        "d": torch.randn(2, 2).double(),
        "empty": torch.zeros(0, 4),
        "strided": torch.arange(6.0).reshape(2, 3).T,
    }
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as stream:
        checkpoint.write_safetensors(stream, tensors)
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_equal_state_gives_equal_bytes(tmp_path):
    first, second = _save(tmp_path / "a"), _save(tmp_path / "b")
    assert first.digest == second.digest


def test_payload_size_is_known_before_writing(tmp_path):
    artifact = _save(tmp_path / "a")
    assert _tensors().bytes() == sum(m.bytes for m in artifact.members if m.path != checkpoint.STATE)


def test_a_save_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ArtifactError, match=r"needs about [\d.]+ MiB and [\d.]+ MiB are free") as caught:
        checkpoint.save(
            tmp_path / "a", _tensors(), State(1, 1, 8, 0.0, 8), IDENTITY, [], expected_bytes=2**60
        )
    assert caught.value.exit_code == 4
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("member", checkpoint.INVENTORY)
def test_one_flipped_byte_is_found_before_any_tensor_is_read(tmp_path, member):
    path = _save(tmp_path / "a").file(member)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=member):
        checkpoint.open_verified(tmp_path / "a")


@pytest.mark.parametrize("member", checkpoint.INVENTORY)
def test_a_truncated_or_deleted_member_is_named(tmp_path, member):
    path = _save(tmp_path / "a").file(member)
    path.write_bytes(b"")
    with pytest.raises(ArtifactError, match=member):
        checkpoint.open_verified(tmp_path / "a")
    path.unlink()
    with pytest.raises(ArtifactError, match=member):
        checkpoint.open_verified(tmp_path / "a")


def test_a_checkpoint_published_without_a_declared_member_is_refused_by_name(tmp_path):
    with artifacts.Transaction(tmp_path / "a", checkpoint.SCHEMA, IDENTITY) as transaction:
        for member in (checkpoint.MODEL, checkpoint.EMA, checkpoint.STATE):
            transaction.write_bytes(member, b"x")
    with pytest.raises(ArtifactError, match=r"member optimizer\.safetensors is missing"):
        checkpoint.open_verified(tmp_path / "a")


def test_a_state_without_a_declared_field_is_refused_by_name(tmp_path):
    with artifacts.Transaction(tmp_path / "a", checkpoint.SCHEMA, IDENTITY) as transaction:
        for member in checkpoint.INVENTORY[:3]:
            transaction.write_bytes(member, b"x")
        transaction.write_json(checkpoint.STATE, {"completed_steps": 3})
    with pytest.raises(ArtifactError, match="learning_rate"):
        checkpoint.read_state(checkpoint.open_verified(tmp_path / "a"))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop("block.bias"), "block.bias"),
        (lambda w: w.update(more=torch.zeros(1)), "more"),
        (
            lambda w: w.update({"block.bias": torch.zeros(5)}),
            r"block.bias is F32 \[4\], the model has F32 \[5\]",
        ),
        (lambda w: w.update({"block.bias": torch.zeros(4).half()}), "block.bias is F32"),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(tmp_path, change, message):
    artifact = _save(tmp_path / "a")
    expected = dict(_tensors().model)
    change(expected)
    with pytest.raises(ArtifactError, match=message):
        checkpoint.load_tensors(artifact.file(checkpoint.MODEL), expected)


def test_weights_load_by_role_and_step(tmp_path):
    _save(tmp_path / "a")
    expected = _tensors()
    live = checkpoint.load_weights(tmp_path / "a", "live", expected.model, source_step=3)
    average = checkpoint.load_weights(tmp_path / "a", "ema", expected.model)
    assert torch.equal(live["block.bias"] + 1, average["block.bias"])
    with pytest.raises(ArtifactError, match=r"holds step 3, but checkpoint\.source_step is 4"):
        checkpoint.load_weights(tmp_path / "a", "live", expected.model, source_step=4)


def test_an_average_that_was_never_updated_is_not_a_role(tmp_path):
    _save(tmp_path / "a", ema_updates=0)
    with pytest.raises(ArtifactError, match="EMA was never updated"):
        checkpoint.load_weights(tmp_path / "a", "ema", _tensors().model)


def test_newest_complete_save_up_to_the_target_is_the_candidate(tmp_path):
    _save(tmp_path / "checkpoint_model_000004", 4)
    _save(tmp_path / "rolling" / "step_000006", 6)
    _save(tmp_path / "rolling" / "step_000004", 4)
    _save(tmp_path / "rolling" / "step_000009", 9)
    half = tmp_path / "rolling" / "step_000007"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (tmp_path / "validation").mkdir()
    complete, unfinished = checkpoint.candidates(tmp_path, until_step=8)
    assert [(c.step, c.rolling) for c in complete] == [(6, True), (4, False), (4, True)]
    assert unfinished == [half]


def test_older_rolling_saves_go_only_up_to_the_verified_step(tmp_path):
    for step in (2, 4, 6, 8):
        _save(tmp_path / "rolling" / f"step_{step:06d}", step)
    _save(tmp_path / "checkpoint_model_000002", 2)
    removed = retention.remove_rolling(tmp_path, newest_verified=6, keep=1)
    assert sorted(p.name for p in removed) == ["step_000002", "step_000004"]
    assert sorted(os.listdir(tmp_path / "rolling")) == ["step_000006", "step_000008"]
    assert (tmp_path / "checkpoint_model_000002" / MARKER).exists()


def test_a_crash_while_removing_leaves_nothing_in_the_place_of_a_save(tmp_path):
    leftover = tmp_path / "rolling" / ".step_000002.removed"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"x")
    assert checkpoint.candidates(tmp_path, 10) == ([], [])
    retention.remove_rolling(tmp_path, 10, keep=1)
    assert not leftover.exists()


def test_state_json_is_plain_and_complete(tmp_path):
    artifact = _save(tmp_path / "a")
    values = json.loads(artifact.file(checkpoint.STATE).read_bytes())
    assert values["completed_steps"] == 3 and values["stream_position"] == 24
    assert checkpoint.read_state(artifact) == State(3, 3, 24, 1e-4, 8)
