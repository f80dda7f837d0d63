"""Launch records, refusals before anything is written, and the run directory's identity."""

from __future__ import annotations

import json
import os

import pytest

from solarwm_lib import artifacts
from solarwm_lib.config.load import load_resolved
from solarwm_lib.runtime import launch as launching
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError, NonFiniteError, Preempted
from solarwm_lib.runtime.launch import Attempt, bind_run_directory, launch
from solarwm_lib.training import train
from solarwm_lib.training.topology import Topology


@pytest.fixture
def inputs(tmp_path):
    """Published data set and assets without clips or weights: launching reads markers and the index, not models."""
    row = {"sample_id": "a", "key": "a", "shard": "shards/a.tar", "num_frames": 9, "manifest": {},
           "video_member": "a.video.mp4", "camera_member": "a.camera.npz"}  # fmt: skip
    for name, schema in (("data", "solarwm.dataset.raw.v1"), ("assets", "solarwm.assets.v1")):
        with artifacts.Transaction(tmp_path / name, schema, {"name": name}) as transaction:
            transaction.write_bytes("train-index.jsonl", json.dumps(row).encode())
            transaction.write_bytes(row["shard"], b"")
    return tmp_path


@pytest.fixture
def resolve(inputs):
    from tinyworld import TinyWorld

    world = TinyWorld(inputs / "data", inputs / "assets")
    return lambda **changes: world.resolve(inputs / "run", **changes)


@pytest.fixture
def outcome(monkeypatch):
    """Replace training by whatever the test puts here."""
    box: dict[str, BaseException | None] = {"error": None}

    def run(resolved, *, run_dir, until_step):
        if box["error"] is not None:
            raise box["error"]

    monkeypatch.setattr(train, "run", run)
    return box


def read(path):
    return json.loads(path.read_bytes())


def test_a_launch_leaves_configuration_manifest_and_result(inputs, resolve, outcome):
    resolved = resolve()
    assert launch("train", resolved, until_step=4) == 0
    run = inputs / "run"
    assert load_resolved(run / "resolved-config.json").full_digest == resolved.full_digest
    manifest, result = read(run / "launch-manifest.json"), read(run / "run-result.json")
    assert manifest["semantic_digest"] == resolved.semantic_digest and manifest["until_step"] == 4
    assert manifest["inputs"]["dataset"]["digest"] == artifacts.read(inputs / "data").digest
    assert len(manifest["inputs"]["train_index"]["sha256"]) == 64
    assert manifest["world"]["world_size"] == 1 and manifest["environment"]["torch"]
    assert {"source", "seeds", "deviations", "metadata", "started", "command"} <= set(manifest)
    assert (result["status"], result["exit_code"], result["attempt"]) == ("complete", 0, "attempt-001")
    for name in ("launch-manifest.json", "run-result.json", "resolved-config.json"):
        assert (run / "launches" / "attempt-001" / name).is_file()


def test_each_start_is_a_numbered_attempt_and_none_is_overwritten(inputs, resolve, outcome):
    launch("train", resolve())
    first = (inputs / "run" / "launches" / "attempt-001" / "launch-manifest.json").read_bytes()
    launch("train", resolve(runtime__log_every_steps=5))
    assert sorted(os.listdir(inputs / "run" / "launches")) == ["attempt-001", "attempt-002"]
    assert (inputs / "run" / "launches" / "attempt-001" / "launch-manifest.json").read_bytes() == first
    assert read(inputs / "run" / "run-result.json")["attempt"] == "attempt-002"


@pytest.mark.parametrize(
    "error, status, code",
    [
        (NonFiniteError("loss"), "failed", 5),
        (ArtifactError("disk full"), "failed", 4),
        (Preempted("stopped"), "preempted", 75),
        (KeyError("bug"), "failed", 1),
        (KeyboardInterrupt(), "failed", 130),
    ],
)
def test_how_an_attempt_ended_is_recorded(inputs, resolve, outcome, error, status, code):
    outcome["error"] = error
    with pytest.raises(type(error)):
        launch("train", resolve())
    result = read(inputs / "run" / "run-result.json")
    assert (result["status"], result["exit_code"], result["error_type"]) == (
        status,
        code,
        type(error).__name__,
    )


def test_a_killed_attempt_stays_running_with_its_pid(inputs, resolve):
    Attempt.begin("train", resolve(), inputs / "run", Topology(), None)
    result = read(inputs / "run" / "run-result.json")
    assert result["status"] == "running" and result["pid"] == os.getpid()


def test_another_identity_in_the_same_directory_is_refused_with_the_fields(inputs, resolve, outcome):
    launch("train", resolve())
    before = sorted(os.listdir(inputs / "run" / "launches"))
    with pytest.raises(
        ConfigError, match=r"holds another run: .*train\.optimizer\.learning_rate.*0\.001 -> 0\.5"
    ):
        launch("train", resolve(train__optimizer__learning_rate=0.5))
    assert sorted(os.listdir(inputs / "run" / "launches")) == before


def test_other_paths_cadence_and_topology_are_the_same_run(inputs, resolve):
    bind_run_directory(inputs / "run", resolve())
    first = (inputs / "run" / "resolved-config.json").read_bytes()
    bind_run_directory(inputs / "run", resolve(data__num_workers=7, checkpoint__save_every_steps=3))
    assert (inputs / "run" / "resolved-config.json").read_bytes() == first


def test_a_rank_that_has_not_looked_at_the_data_writes_nothing_and_refuses_the_same(inputs, resolve):
    bind_run_directory(inputs / "run", resolve(), write=False)
    assert not (inputs / "run").exists()
    bind_run_directory(inputs / "run", resolve())
    with pytest.raises(ConfigError, match="holds another run"):
        bind_run_directory(inputs / "run", resolve(data__seed=7), write=False)


def test_a_damaged_configuration_is_named(inputs, resolve):
    (inputs / "run").mkdir()
    (inputs / "run" / "resolved-config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"resolved-config\.json: damaged"):
        bind_run_directory(inputs / "run", resolve())


@pytest.mark.parametrize(
    "environment, changes, message",
    [
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            {},
            "WORLD_SIZE is 2 but",
        ),
        ({}, {"distributed__world_size": 2}, "WORLD_SIZE is 1 but distributed.world_size is 2"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            {
                "train__strategy": "hybrid_shard",
                "distributed__world_size": 2,
                "train__micro_batch_size": 1,
                "train__global_batch_size": 2,
            },
            "found hybrid_shard, which needs at least 2 nodes",
        ),
        ({}, {"model__base_path": "/path/to/base"}, "placeholder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    inputs, resolve, outcome, monkeypatch, environment, changes, message
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message) as caught:
        launch("train", resolve(**changes))
    assert caught.value.exit_code == 2
    assert not (inputs / "run").exists()


def test_inputs_that_are_not_complete_are_refused_before_anything_is_written(inputs, resolve, outcome):
    (inputs / "data" / artifacts.MARKER).unlink()
    with pytest.raises(DataError, match=r"data: is not complete .*complete beside it: assets"):
        launch("train", resolve())
    assert not (inputs / "run").exists()


def test_a_configuration_of_another_action_is_refused(resolve):
    with pytest.raises(ConfigError, match="action is 'train', not 'infer'"):
        launch("infer", resolve())


def test_a_modified_source_is_refused_where_a_clean_one_is_required(inputs, resolve, outcome, monkeypatch):
    from solarwm_lib.runtime import source

    monkeypatch.setattr(source, "source_identity", lambda: {"available": True, "clean": False})
    with pytest.raises(ConfigError, match="has local changes"):
        launch("train", resolve(runtime__require_clean_source=True))
    assert not (inputs / "run").exists()


def test_source_identity_of_a_checkout_names_commit_and_cleanliness(tmp_path, monkeypatch):
    import subprocess

    from solarwm_lib.runtime import source

    package = tmp_path / "repo" / "solarwm_lib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(source, "PACKAGE", package)
    assert source.source_identity() == {"available": False}
    git = ["git", "-C", str(package), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q", ".."], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    clean = source.source_identity()
    assert clean["clean"] and len(clean["commit"]) == 40
    (package / "new.py").write_text("")
    dirty = source.source_identity()
    assert not dirty["clean"] and dirty["status_digest"] != clean["status_digest"]


def test_image_digests_are_recognised():
    assert launching._PINNED_IMAGE.fullmatch("registry/x@sha256:" + "0" * 64)
    assert not launching._PINNED_IMAGE.fullmatch("registry/x:latest")
