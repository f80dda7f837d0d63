"""A run that was interrupted, in whatever way, ends with the same bytes as one that was not.

Bit equality is claimed for equal thread counts on the CPU; every process here uses one thread.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from solarwm_lib import artifacts
from solarwm_lib.runtime.errors import ArtifactError
from solarwm_lib.training import checkpoint, metrics, network, setup, train

MEMBERS = (checkpoint.MODEL, checkpoint.EMA, checkpoint.OPTIMIZER)
STEPS = 8
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def uninterrupted(tiny_world, tmp_path_factory):
    """Run of 8 steps in one go."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    out.mkdir()
    train.run(tiny_world.resolve(out), run_dir=out, until_step=STEPS)
    return out


def digests(run_dir: Path, step: int = STEPS) -> dict[str, str]:
    artifact = artifacts.verify(run_dir / checkpoint.directory_name(step), deep=True)
    return {m.path: m.sha256 for m in artifact.members if m.path in MEMBERS}


def state(run_dir: Path, step: int = STEPS) -> dict:
    return json.loads((run_dir / checkpoint.directory_name(step) / checkpoint.STATE).read_bytes())


def records(run_dir: Path) -> list[dict]:
    wanted = ("step", "loss", "learning_rate", "gradient_norm")
    return [{key: r[key] for key in wanted} for r in metrics.read(run_dir / metrics.FILE)]


def start(values: dict, run_dir: Path, *words: str) -> subprocess.Popen:
    config = run_dir.parent / f"{run_dir.name}.json"
    config.write_text(json.dumps(values))
    command = [
        sys.executable,
        "-m",
        "solarwm_lib",
        "train",
        "--config",
        str(config),
        "--until-step",
        str(STEPS),
        *words,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / metrics.FILE
        if path.exists() and path.read_bytes().count(b'"loss"') >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


def test_n_plus_m_steps_equal_n_then_m_byte_for_byte(tiny_world, uninterrupted, tmp_path):
    for step in (3, 5, STEPS):
        train.run(tiny_world.resolve(tmp_path), run_dir=tmp_path, until_step=step)
    assert digests(tmp_path) == digests(uninterrupted)
    assert records(tmp_path) == records(uninterrupted)
    assert state(tmp_path) == state(uninterrupted)
    last = artifacts.read(tmp_path / "checkpoint_model_000008")
    assert [p.schema for p in last.parents] == [
        checkpoint.SCHEMA,
        "solarwm.dataset.raw.v1",
        "solarwm.assets.v1",
    ]
    assert last.parents[0].path == "../checkpoint_model_000005"


def test_an_average_that_starts_and_warms_up_across_the_resume_is_exact(tiny_world, tmp_path):
    late = {"train__ema": {"decay": 0.9, "start_step": 3, "update_every": 2, "warmup_steps": 5}}
    whole, split = tmp_path / "whole", tmp_path / "split"
    for folder, steps in ((whole, (7,)), (split, (2, 4, 7))):
        folder.mkdir()
        for step in steps:
            train.run(tiny_world.resolve(folder, **late), run_dir=folder, until_step=step)
    assert digests(whole, 7) == digests(split, 7)
    assert state(split, 7)["ema_updates"] == 2


def test_decoding_ahead_and_a_cache_too_small_change_no_byte(tiny_world, uninterrupted, tmp_path):
    other = tiny_world.resolve(tmp_path, data__num_workers=2, data__decoded_cache_gib=1e-5)
    train.run(other, run_dir=tmp_path, until_step=STEPS)
    assert digests(tmp_path) == digests(uninterrupted)


def test_kill_minus_nine_in_a_segment_then_rerun_gives_identical_weights(tiny_world, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    process = start(tiny_world.values(run_dir), run_dir)
    wait_for_step(run_dir, 5, process)
    process.kill()
    process.wait()
    assert not (run_dir / "checkpoint_model_000008").exists()
    assert json.loads((run_dir / "run-result.json").read_bytes())["status"] == "running"
    survivors, _ = checkpoint.candidates(run_dir, STEPS)
    assert survivors and survivors[0].rolling

    again = start(tiny_world.values(run_dir), run_dir)
    assert again.wait(timeout=240) == 0, again.stderr.read()
    assert digests(run_dir) == digests(uninterrupted)
    assert records(run_dir) == records(uninterrupted)
    assert os.listdir(run_dir / "rolling") == []
    assert sorted(os.listdir(run_dir / "launches")) == ["attempt-001", "attempt-002"]
    lineage = artifacts.read(run_dir / "checkpoint_model_000008").parents
    assert [p.schema for p in lineage] == ["solarwm.dataset.raw.v1", "solarwm.assets.v1"]


def test_a_second_trainer_in_the_run_directory_is_refused_and_disturbs_nothing(
    tiny_world, uninterrupted, tmp_path
):
    run_dir = tmp_path / "run"
    first = start(tiny_world.values(run_dir), run_dir)
    wait_for_step(run_dir, 1, first)
    first.send_signal(signal.SIGSTOP)  # an orphan that is still there, wherever in the step it is
    try:
        before = (run_dir / "run-result.json").read_bytes()
        second = start(tiny_world.values(run_dir), run_dir)
        _, message = second.communicate(timeout=240)
        assert second.returncode == 4 and f"process {first.pid} on" in message
        with pytest.raises(ArtifactError, match=f"process {first.pid} on"):
            train.run(tiny_world.resolve(run_dir), run_dir=run_dir, until_step=STEPS)
        assert (run_dir / "run-result.json").read_bytes() == before
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=240) == 0, first.stderr.read()
    assert digests(run_dir) == digests(uninterrupted)


def test_sigterm_saves_and_exits_75_and_the_same_command_finishes(tiny_world, uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    values = tiny_world.values(run_dir, checkpoint__rolling_save_every_steps=0)
    process = start(values, run_dir)
    wait_for_step(run_dir, 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75, process.stderr.read()
    assert "SIGTERM" in process.stderr.read()
    result = json.loads((run_dir / "run-result.json").read_bytes())
    assert (result["status"], result["exit_code"]) == ("preempted", 75)
    saved, _ = checkpoint.candidates(run_dir, STEPS)
    assert saved[0].step >= 3

    train.run(tiny_world.resolve(run_dir), run_dir=run_dir, until_step=STEPS)
    assert digests(run_dir) == digests(uninterrupted)


def test_a_published_target_is_verified_and_its_marker_issued_again(tiny_world, uninterrupted, monkeypatch):
    marker = uninterrupted / "checkpoint_model_000008" / artifacts.MARKER
    before = marker.read_bytes()
    marker.unlink()
    monkeypatch.setattr(network, "build_backbone", lambda *a: pytest.fail("a model was loaded"))
    train.run(tiny_world.resolve(uninterrupted), run_dir=uninterrupted, until_step=STEPS)
    assert marker.read_bytes() == before


def copy_of(run_dir: Path, target: Path) -> Path:
    shutil.copytree(run_dir, target)
    return target


def test_a_corrupt_member_is_refused_before_any_model_exists(
    tiny_world, uninterrupted, tmp_path, monkeypatch
):
    run_dir = copy_of(uninterrupted, tmp_path / "run")
    path = run_dir / "checkpoint_model_000008" / checkpoint.OPTIMIZER
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(network, "build_backbone", lambda *a: pytest.fail("a model was loaded"))
    with pytest.raises(
        ArtifactError, match=r"optimizer\.safetensors.*remove .*checkpoint_model_000008"
    ) as caught:
        train.run(tiny_world.resolve(run_dir), run_dir=run_dir, until_step=9)
    assert caught.value.exit_code == 4


def test_older_checkpoints_are_thinned_and_a_thinned_one_is_no_start(tiny_world, uninterrupted, tmp_path):
    for step in (2, 4, STEPS):
        resolved = tiny_world.resolve(tmp_path, checkpoint__keep_full=1)
        train.run(resolved, run_dir=tmp_path, until_step=step)
    assert digests(tmp_path) == digests(uninterrupted)
    listed = {path.parent.name for path in tmp_path.glob("*/THINNED.json")}
    assert listed == {"checkpoint_model_000002", "checkpoint_model_000004"}
    assert train.run(resolved, run_dir=tmp_path, until_step=4).dropped  # issued again, not trained again
    with pytest.raises(
        ArtifactError, match=r"checkpoint_model_000004: was thinned .*no full one is before it"
    ):
        train.run(resolved, run_dir=tmp_path, until_step=5)

    events = metrics.read_events(tmp_path / metrics.FILE)
    published = [e["step"] for e in events if e["event"] == "save" and e["kind"] == "published"]
    restarts = [e for e in events if e["event"] == "restart"]
    assert published == [2, 4, STEPS] and [e["step"] for e in restarts] == [2, 4]
    for event in restarts:
        parts = sum(event[f"{name}_seconds"] for name in ("verify", "load", "seek"))
        assert 0 < parts < event["first_step_seconds"]


def test_a_save_under_the_name_of_another_step_is_refused(tiny_world, uninterrupted, tmp_path):
    run_dir = copy_of(uninterrupted, tmp_path / "run")
    (run_dir / "checkpoint_model_000008").rename(run_dir / "checkpoint_model_000009")
    with pytest.raises(ArtifactError, match=r"checkpoint_model_000009: holds step 8"):
        train.run(tiny_world.resolve(run_dir), run_dir=run_dir, until_step=10)


def test_other_data_or_assets_are_refused_with_both_digests(tiny_world, uninterrupted, tmp_path):
    from solarwm_lib.data.synthetic import SynthSpec, synthesize

    spec = SynthSpec("other", train_clips=6, test_clips=2, frames=9, height=32, width=32, seed=5)
    synthesize(tmp_path / "data", spec)
    # Beside the original, so that parents recorded relative to the run still resolve.
    run_dir = copy_of(uninterrupted, uninterrupted.parent / "other-data")
    here, there = (artifacts.read(path).digest for path in (tmp_path / "data", tiny_world.dataset))
    with pytest.raises(ArtifactError, match=f"dataset: found .{there}.*wanted .{here}"):
        train.run(
            tiny_world.resolve(run_dir, data__root=str(tmp_path / "data")), run_dir=run_dir, until_step=9
        )


def test_a_state_that_does_not_fit_its_step_is_refused(tiny_world, uninterrupted, tmp_path):
    source = artifacts.read(uninterrupted / "checkpoint_model_000008")
    run_dir = tmp_path / "run"
    with artifacts.Transaction(
        run_dir / "checkpoint_model_000008", checkpoint.SCHEMA, source.identity
    ) as transaction:
        for member in MEMBERS:
            transaction.write_bytes(member, source.file(member).read_bytes())
        values = json.loads(source.file(checkpoint.STATE).read_bytes())
        transaction.write_json(checkpoint.STATE, {**values, "learning_rate": 0.5, "ema_updates": 1})
    with pytest.raises(ArtifactError, match=r"ema_updates: found 1, wanted 8; learning_rate: found 0.5"):
        train.run(tiny_world.resolve(run_dir), run_dir=run_dir, until_step=9)


def test_weights_of_a_checkpoint_start_a_new_run_with_everything_else_fresh(
    tiny_world, uninterrupted, tmp_path
):
    initial = {"mode": "weights_only", "path": str(uninterrupted / "checkpoint_model_000008"),
               "weights": ["live", "ema"], "source_step": 8}  # fmt: skip
    resolved = tiny_world.resolve(tmp_path, checkpoint=initial)
    inputs = setup.read_inputs(resolved)
    backbone = network.build_backbone(resolved, __import__("torch").device("cpu"))
    learner = setup.build_learner(resolved, backbone, inputs.initial)
    source = uninterrupted / "checkpoint_model_000008"
    live = checkpoint.load_tensors(source / checkpoint.MODEL, learner.parameters)
    average = checkpoint.load_tensors(source / checkpoint.EMA, learner.parameters)
    assert all(t.equal(learner.parameters[n]) for n, t in live.items())
    assert all(t.equal(learner.ema.shadow[n]) for n, t in average.items())
    assert (learner.completed_steps, learner.ema.updates) == (0, 0)
    artifact = train.run(resolved, run_dir=tmp_path, until_step=1)
    assert artifact.identity["initial"] == artifacts.read(source).digest
    assert checkpoint.SCHEMA in [p.schema for p in artifact.parents]


def test_full_resume_from_another_run_continues_it_exactly(tiny_world, tmp_path):
    first, second, whole = (tmp_path / name for name in ("first", "second", "whole"))
    for folder in (first, second, whole):
        folder.mkdir()
    train.run(tiny_world.resolve(first), run_dir=first, until_step=3)
    resume = {"mode": "full_resume", "path": str(first / "checkpoint_model_000003"), "source_step": 3}
    train.run(tiny_world.resolve(second, checkpoint=resume), run_dir=second, until_step=6)
    train.run(tiny_world.resolve(whole), run_dir=whole, until_step=6)
    assert digests(second, 6) == digests(whole, 6)
    with pytest.raises(ArtifactError, match=r"other settings: train\.optimizer\.learning_rate"):
        other = tiny_world.resolve(tmp_path / "x", checkpoint=resume, train__optimizer__learning_rate=5e-4)
        train.run(other, run_dir=tmp_path / "x", until_step=6)


def test_a_missing_initial_checkpoint_lists_the_complete_ones(tiny_world, uninterrupted, tmp_path):
    resume = {
        "mode": "full_resume",
        "path": str(uninterrupted / "checkpoint_model_000099"),
        "source_step": 99,
    }
    with pytest.raises(ArtifactError, match=r"does not exist .*complete beside it: checkpoint_model_000008"):
        train.run(tiny_world.resolve(tmp_path, checkpoint=resume), run_dir=tmp_path, until_step=9)


@contextmanager
def limited_disk(folder: Path) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Make `folder` a 150 MiB tmpfs where mounting is allowed; yield a context in which a checkpoint does not fit.

    Elsewhere a limit on the size of a file takes the place of the full disk.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0

    @contextmanager
    def full() -> Iterator[None]:
        if mounted:
            ballast = folder / "ballast"
            ballast.write_bytes(b"x" * (shutil.disk_usage(folder).free - 40 * 2**20))
            yield
            ballast.unlink()
        else:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20, hard))
            yield
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    try:
        yield full
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def free_space(free: int) -> Callable[[object], object]:
    return lambda path: SimpleNamespace(total=2**50, used=0, free=free)


def test_too_little_space_is_refused_before_a_step_is_taken(tiny_world, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", free_space(40 * 2**20))
    with pytest.raises(ArtifactError, match=r"needs 6\d\.\d MiB and 40\.0 MiB are free") as caught:
        train.run(tiny_world.resolve(tmp_path), run_dir=tmp_path, until_step=2)
    assert caught.value.exit_code == 4
    assert not (tmp_path / metrics.FILE).exists()


def test_a_disk_that_fills_up_during_a_save_leaves_earlier_checkpoints_intact(tiny_world, tmp_path):
    with limited_disk(tmp_path / "disk") as full:
        run_dir = tmp_path / "disk" / "run"
        run_dir.mkdir()
        resolved = tiny_world.resolve(run_dir, checkpoint__rolling_save_every_steps=0)
        train.run(resolved, run_dir=run_dir, until_step=2)
        before = digests(run_dir, 2)
        # Somebody else takes the space between the check and the write.
        with full(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", free_space(2**40))
            with pytest.raises(ArtifactError, match="disk full while writing") as caught:
                train.run(resolved, run_dir=run_dir, until_step=4)
        assert caught.value.exit_code == 4
        assert digests(run_dir, 2) == before
        assert [p.name for p in run_dir.iterdir() if "partial" in p.name or p.name.endswith("4")] == []
        train.run(resolved, run_dir=run_dir, until_step=4)


def test_preflight_trains_saves_reloads_and_validates_one_slot(tiny_world, tmp_path, capsys):
    from solarwm_lib.training.preflight import preflight

    run_dir = tmp_path / "run"
    resolved = tiny_world.resolve(run_dir)
    artifact = preflight(resolved, run_dir / "preflight")
    report = json.loads(artifact.file("report.json").read_bytes())
    assert report["measured"]["checkpoint_reloaded"] == "bit-equal"
    assert report["measured"]["step_seconds"] > 0 and report["measured"]["checkpoint_bytes"] > 6e7
    assert report["measured"]["validation"]["pass"] == "live"
    assert report["estimated"]["disk_suffices"] is True
    assert "preflight ok" in capsys.readouterr().out
    assert sorted(os.listdir(run_dir)) == [".preflight.lock", "preflight"]
    assert preflight(resolved, run_dir / "preflight").digest == artifact.digest
