"""Bad input meets the real command line: the documented code, one clear line, and nothing written.

The table itself is in `bad_input.py` and the files it joins; docs/reference/errors.md shows it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from bad_bench import CHECKPOINT, Bench, Case
from bad_input import CASES, CHECKPOINTS, CONFIGURATION, FILLING_DISK, FULL_DISK, LOW_DISK, table

from solarwm_lib import artifacts
from solarwm_lib.cli import main
from solarwm_lib.runtime.errors import EXIT_CODES

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/reference/errors.md"
RECORDS = re.compile(
    r".*(launches(/.*)?|heartbeats(/.*)?|tensorboard(/.*)?|launch-manifest\.json|run-result\.json|resolved-config\.json|metrics\.jsonl"
    r"|\.run\.lock|new|out\.launch)"
)
# Runs the command line, then says on the last line of standard output what starting it has cost.
WATCHED = """
import json, os, resource, sys
if absent := os.environ.get("ABSENT_PACKAGE"):
    sys.modules[absent] = None
from solarwm_lib.cli import main
code = main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
heavy = sorted({"torch", "diffusers", "transformers", "pandas"} & set(sys.modules))
print(json.dumps({"code": code, "heavy": heavy, "cpu": usage.ru_utime + usage.ru_stime}))
"""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tiny_world, tmp_path_factory) -> Path:
    """A folder with a run of two steps and its frozen plan."""
    bench = Bench(tmp_path_factory.mktemp("bad-input"), tiny_world)
    assert main(["train", *bench.config(), "--until-step", "2"]) == 0
    plan = bench.run / "validation/frozen-plan.json"
    assert main(["freeze-plan", *bench.config(), "--out", str(plan)]) == 0
    assert main(["preencode", *bench.preencode(bench.latents)]) == 0
    return bench.path


@pytest.fixture
def bench(tiny_world, trained, tmp_path) -> Bench:
    """A copy that a case may spoil, in a place of its own."""
    shutil.copytree(trained, tmp_path / "bench", symlinks=True)
    return Bench(tmp_path / "bench", tiny_world)


@pytest.fixture
def latents_bench(tiny_world, trained, tmp_path) -> Bench:
    """The same without the run, which is most of its bytes."""
    shutil.copytree(trained / "latents", tmp_path / "bench/latents", symlinks=True)
    return Bench(tmp_path / "bench", tiny_world)


def tree(folder: Path) -> dict[str, str]:
    """Every path below `folder` with its content's digest; a directory has none."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
    }


def walking(c2w: np.ndarray) -> np.ndarray:
    """A straight walk along the view, in the same number of frames."""
    walk = np.tile(np.eye(4, dtype=np.float32), (len(c2w), 1, 1))
    walk[:, 2, 3] = 0.1 * np.arange(len(c2w))
    return walk


def check(case: Case, code: int, out: str, err: str) -> None:
    assert code == case.code and code in EXIT_CODES, err
    assert re.fullmatch(case.pattern, err.rstrip("\n")), f"printed:\n{err}\nexpected:\n{case.message}"
    assert err.count("\n") == 1 and "Traceback" not in out
    assert not case.secret or case.secret not in out + err


def check_nothing_written(case: Case, before: dict[str, str], after: dict[str, str]) -> None:
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    allowed = RECORDS if case.records else re.compile(case.leaves)
    left = {path for path in changed if not allowed.fullmatch(path)}
    assert not left, left
    assert bool(changed) == bool(case.records or case.leaves)


WITH_RUN = {*CONFIGURATION, *CHECKPOINTS}


@pytest.mark.parametrize("case", [c for c in CASES if not c.early], ids=lambda case: case.wrong)
def test_bad_input_is_one_line_and_writes_nothing(case, request, capsys, monkeypatch):
    bench = request.getfixturevalue("bench" if case in WITH_RUN else "latents_bench")
    words = case.prepare(bench)
    before = tree(bench.path)
    for name, value in case.environment:
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    code = main(words)
    printed = capsys.readouterr()
    check(case, code, printed.out, printed.err)
    check_nothing_written(case, before, tree(bench.path))
    if case.records:
        results = [json.loads(path.read_bytes()) for path in bench.path.rglob("launches/*/run-result.json")]
        assert [(r["status"], r["exit_code"]) for r in results if r["status"] != "complete"] == [
            ("failed", code)
        ]


@pytest.mark.parametrize("case", [c for c in CASES if c.early], ids=lambda case: case.wrong)
def test_what_numbers_and_names_show_is_refused_at_once_without_torch(case, bench):
    words = case.prepare(bench)
    before = tree(bench.path)
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words],
        cwd=bench.path,
        env={**environment, "PYTHONPATH": str(ROOT), "ABSENT_PACKAGE": case.absent, **dict(case.environment)},
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    check(case, facts["code"], done.stdout, done.stderr)
    check_nothing_written(case, before, tree(bench.path))
    assert facts["heavy"] == []
    # Wall time of a machine that others load says nothing; processor time is the claim.
    assert facts["cpu"] < 1 and seconds < 10, (facts["cpu"], seconds)


@pytest.mark.parametrize("axes", ["opencv", "opengl"])
def test_a_doubt_about_the_declared_convention_is_a_warning_not_an_error(latents_bench, axes, capsys):
    """Cameras that could be trained on but seem to walk backward are told with numbers; the person decides."""
    dataset = latents_bench.dataset(camera=walking)
    words = ["data", "inspect", str(dataset / "train-index.jsonl"), "--camera-axes", axes, "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["problems"] == []
    assert any("forward_dot_step -1.00" in text for text in facts["warnings"]) == (axes == "opengl")


def test_the_module_exits_with_the_documented_code(bench):
    case = next(c for c in CASES if c.wrong == "frame count")
    command = [sys.executable, "-m", "solarwm_lib", *case.prepare(bench)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    check(case, done.returncode, done.stdout, done.stderr)


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[bool]:
    """Mount a tmpfs of that size at `folder`; yields False where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def start_training(
    bench: Bench, until_step: int, largest_file: int = resource.RLIM_INFINITY
) -> subprocess.Popen[str]:
    config = bench.config(checkpoint__rolling_save_every_steps=0)
    return subprocess.Popen(
        [sys.executable, "-m", "solarwm_lib", "train", *config, "--until-step", str(until_step)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)),
    )


def check_earlier_checkpoint(bench: Bench, before: dict[str, str]) -> None:
    assert tree(bench.run / CHECKPOINT) == before
    artifacts.verify(bench.run / CHECKPOINT, deep=True)
    names = [path.name for path in bench.run.iterdir()]
    assert [name for name in names if "partial" in name or name.startswith("checkpoint")] == [CHECKPOINT]
    assert json.loads((bench.run / "run-result.json").read_bytes())["exit_code"] == 4


def require(mounted: bool) -> None:
    """Only root can mount a small disk; continuous integration is root, so there it is never left out."""
    if not mounted:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs the right to mount a small file system")


def test_space_that_somebody_else_takes_during_the_steps_leaves_the_earlier_checkpoint_whole(
    tiny_world, trained, tmp_path
):
    disk = tmp_path / "disk"
    with small_disk(disk, 200) as mounted:
        require(mounted)
        shutil.copytree(trained, disk / "bench", symlinks=True)
        bench = Bench(disk / "bench", tiny_world)
        before = tree(bench.run / CHECKPOINT)
        metrics = bench.run / "metrics.jsonl"
        with start_training(bench, 12) as process:
            while process.poll() is None and metrics.read_text().count('"loss"') < 3:
                time.sleep(0.002)
            (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 40 * 2**20))
            out, err = process.communicate(timeout=300)
        check(FULL_DISK, process.returncode, out, err)
        check_earlier_checkpoint(bench, before)


def test_a_disk_that_fills_up_in_the_middle_of_a_member_leaves_the_earlier_checkpoint_whole(bench):
    """The kernel refuses the rest of a file, as it does when a disk is full."""
    before = tree(bench.run / CHECKPOINT)
    with start_training(bench, 3, largest_file=20 * 2**20) as process:
        out, err = process.communicate(timeout=300)
    check(FILLING_DISK, process.returncode, out, err)
    check_earlier_checkpoint(bench, before)


def test_too_little_space_is_refused_before_the_first_step(tiny_world, trained, tmp_path, capsys):
    disk = tmp_path / "disk"
    with small_disk(disk, 100) as mounted:
        require(mounted)
        shutil.copytree(trained, disk / "bench", symlinks=True)
        bench = Bench(disk / "bench", tiny_world)
        before = tree(bench.run / CHECKPOINT)
        code = main(["train", *bench.config(), "--until-step", "4"])
        printed = capsys.readouterr()
        check(LOW_DISK, code, printed.out, printed.err)
        assert tree(bench.run / CHECKPOINT) == before


def test_the_documentation_shows_this_table():
    assert table() in DOCUMENT.read_text(encoding="utf-8"), "python tests/e2e/bad_input.py prints the table"
