"""kill -9 at any moment: what is published verifies deeply, what is not is never read, and the next attempt succeeds."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from solarwm_lib.artifacts import (
    MANIFEST,
    MARKER,
    Transaction,
    reissue,
    remove_stale,
    scan,
    stale_partials,
    verify,
    write_atomic,
)
from solarwm_lib.runtime import owner
from solarwm_lib.runtime.errors import ArtifactError

SCHEMA = "solarwm.test.v1"
PAYLOAD = {"model.bin": b"w" * 300_000, "state/optimizer.bin": b"o" * 200_000, "state.json": b"{}\n"}
FILE_EVENTS = ("open", "os.mkdir", "os.remove", "os.rename", "os.truncate", "os.link", "os.rmdir")


def save(target: Path) -> None:
    with Transaction(target, SCHEMA, {"name": target.name}) as tx:
        for name, data in PAYLOAD.items():
            if name == "state.json":
                tx.path(name).write_bytes(data)
                continue
            with tx.open(name) as file:
                for start in range(0, len(data), 10_000):
                    file.write(data[start : start + 10_000])


def in_child(work: Callable[[], None]) -> int:
    """Fork; the child runs `work` and exits 0, or 1 on an exception."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def killed(pid: int) -> bool:
    """Wait for a child; True if SIGKILL ended it, False if it finished."""
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def check_after_crash(root: Path) -> set[str]:
    """Everything a reader would accept is whole; returns its names. Only a published artifact has a visible name."""
    good, rejected = scan(root, SCHEMA)
    assert rejected == []
    for artifact in good:
        verify(artifact.path, deep=True)
        assert {m.path: artifact.file(m.path).read_bytes() for m in artifact.members} == PAYLOAD
    return {artifact.path.name for artifact in good}


def test_kill_9_at_random_moments_of_a_series_of_saves(tmp_path: Path) -> None:
    rng = random.Random(7)
    started = time.perf_counter()
    save(tmp_path / "timing" / "x")
    one_save_s = time.perf_counter() - started
    for trial in range(20):
        root = tmp_path / f"trial-{trial}"

        def write_forever(root: Path = root) -> None:
            for step in itertools.count():
                save(root / f"step-{step:04d}")

        pid = in_child(write_forever)
        time.sleep(rng.uniform(0, 4 * one_save_s))
        os.kill(pid, signal.SIGKILL)
        assert killed(pid)
        complete = check_after_crash(root)
        assert complete == {f"step-{step:04d}" for step in range(len(complete))}
        save(root / f"step-{len(complete):04d}")
        assert len(check_after_crash(root)) == len(complete) + 1
        assert all(sum(p.stat().st_size for p in left.iterdir()) == 0 for left in root.glob(".*.partial"))


def test_kill_9_before_every_single_file_operation_of_a_save(tmp_path: Path) -> None:
    """Exhaustive where the random test samples: the writer kills itself before its n-th open, mkdir, unlink, rename."""
    published = 0
    for n in range(1, 200):
        target = tmp_path / f"n-{n}" / "a"

        def die_at_event(n: int = n, target: Path = target) -> None:
            count = 0

            def hook(event: str, arguments: tuple) -> None:
                nonlocal count
                if event in FILE_EVENTS:
                    count += 1
                    if count == n:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            save(target)

        if not killed(in_child(die_at_event)):
            assert n > 15, "the hook saw too few file operations"
            break
        if target.parent.exists():
            if target.exists():
                assert check_after_crash(target.parent) == {"a"}
                assert reissue(target, SCHEMA, {"name": "a"}) is not None
                published += 1
            else:
                with pytest.raises(ArtifactError, match="does not exist"):
                    verify(target)
                save(target)
            verify(target, deep=True)
            for leftover in target.parent.iterdir():
                # A writer killed between creating the directory and naming itself leaves it empty, to be judged by age.
                assert leftover == target or sum(p.stat().st_size for p in leftover.iterdir()) == 0
            assert sorted(p.name for p in target.iterdir()) == sorted(
                [MARKER, MANIFEST, *(n.split("/")[0] for n in PAYLOAD)]
            )
    else:
        raise AssertionError("the save never finished")
    assert published >= 1


def test_kill_9_while_reissuing_leaves_the_old_marker_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "a"
    save(target)
    marker = (target / MARKER).read_bytes()
    for n in range(1, 40):
        (target / MARKER).unlink(missing_ok=True)

        def die_at_event(n: int = n) -> None:
            count = 0

            def hook(event: str, arguments: tuple) -> None:
                nonlocal count
                # Opening for writing and renaming; reads cannot hurt.
                if event == "os.rename" or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                    count += 1
                    if count == n:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            reissue(target, SCHEMA, {"name": "a"})

        crashed = killed(in_child(die_at_event))
        assert not (target / MARKER).exists() or (target / MARKER).read_bytes() == marker
        assert reissue(target, SCHEMA, {"name": "a"}) is not None
        if not crashed:
            assert n > 2
            break


def test_kill_9_while_replacing_a_single_file_leaves_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    old, new = b"old" * 50_000, b"new" * 50_000
    rng = random.Random(11)
    seen = set()
    for _ in range(20):
        write_atomic(path, old)
        pid = in_child(lambda: write_atomic(path, new))
        time.sleep(rng.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        killed(pid)
        seen.add(path.read_bytes())
    assert seen <= {old, new}


def test_of_two_writers_one_publishes_and_the_other_is_told(tmp_path: Path) -> None:
    target = tmp_path / "a"
    refusal = pytest.raises(ArtifactError, match="already holds a published artifact")
    with refusal, Transaction(target, SCHEMA, {"name": "a"}) as slow:
        slow.write_bytes("x", b"slow")
        assert not killed(in_child(lambda: save(target)))
        assert slow.staging.exists(), "a living writer's staging directory is not stale"
    assert check_after_crash(tmp_path) == {"a"}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def abandoned(tmp_path: Path) -> Path:
    """The staging directory of a writer of `tmp_path/a` that was killed."""

    def work() -> None:
        with Transaction(tmp_path / "a", SCHEMA, {}) as tx:
            tx.write_bytes("x", b"1")
            os.kill(os.getpid(), signal.SIGKILL)

    assert killed(in_child(work))
    (partial,) = tmp_path.glob(".a.*.partial")
    return partial


def test_a_dead_writers_directory_is_named_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = abandoned(tmp_path)
    assert stale_partials(tmp_path / "a") == stale_partials(tmp_path / "a" / MARKER) == [partial]
    assert stale_partials(tmp_path / "other") == stale_partials(tmp_path / "no" / "where") == []
    save(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert str(partial) in caplog.text


def edit_owner(partial: Path, **changes: object) -> None:
    path = partial / owner.OWNER
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def set_age(partial: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    for path in [*partial.rglob("*"), partial]:
        os.utime(path, (then, then))


@pytest.mark.parametrize(
    "changes",
    [{"boot": "another"}, {"pid_namespace": "pid:[1]"}, {"boot": "another", "host": "elsewhere"}],
)
def test_a_writer_elsewhere_is_left_alone_for_a_day(tmp_path: Path, changes: dict) -> None:
    partial = abandoned(tmp_path)
    edit_owner(partial, **changes)
    set_age(partial, 23)
    assert stale_partials(tmp_path / "a") == []
    set_age(partial, 25)
    assert remove_stale(tmp_path / "a") == [partial]
    assert not partial.exists()


def test_a_writer_elsewhere_that_still_writes_is_not_stale(tmp_path: Path) -> None:
    partial = abandoned(tmp_path)
    edit_owner(partial, boot="another")
    set_age(partial, 100)
    (partial / "x").write_bytes(b"fresh")
    assert stale_partials(tmp_path / "a") == []


def test_a_reused_pid_does_not_keep_a_dead_writer_alive(tmp_path: Path) -> None:
    partial = abandoned(tmp_path)
    edit_owner(partial, pid=os.getpid())
    assert stale_partials(tmp_path / "a") == [partial]
    edit_owner(partial, pid=os.getpid(), start=owner.start_time(os.getpid()))
    assert stale_partials(tmp_path / "a") == []


def test_a_directory_without_an_owner_is_judged_by_age(tmp_path: Path) -> None:
    partial = abandoned(tmp_path)
    for content in (b"", b"[]", b'{"boot": 1}', None):
        if content is None:
            (partial / owner.OWNER).unlink()
        else:
            (partial / owner.OWNER).write_bytes(content)
        set_age(partial, 23)
        assert stale_partials(tmp_path / "a") == []
        set_age(partial, 25)
        assert stale_partials(tmp_path / "a") == [partial]


@pytest.mark.parametrize("start", [owner.start_time, owner.start_time_portable])
def test_start_time_tells_living_from_dead_and_zombie(start: Callable[[int], str | None]) -> None:
    assert start(os.getpid()) is not None
    assert start(os.getpid()) == start(os.getpid())
    pid = in_child(lambda: None)
    while " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.001)
    assert start(pid) is None
    os.waitpid(pid, 0)
    assert start(pid) is None


def test_names_that_look_alike_are_not_confused(tmp_path: Path) -> None:
    abandoned(tmp_path)
    for name in (".a.b.0123456789abcdef0123456789abcdef.partial", ".a.notes.partial", ".aXpartial"):
        (tmp_path / name).mkdir()
        set_age(tmp_path / name, 100)
    assert len(stale_partials(tmp_path / "a")) == 1
    assert [p.name for p in stale_partials(tmp_path / "a.b")] == [
        ".a.b.0123456789abcdef0123456789abcdef.partial"
    ]
