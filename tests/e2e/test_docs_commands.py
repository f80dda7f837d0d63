"""Every command that README.md and docs/ show is run, in page order, in a copy of the project where the demo has run.

The copy is the demo at a size for tests: the same names, config files and commands, with fewer clips and training
steps. `SMALLER` and `in_workspace` are the whole difference. A ```diff block is an edit the reader is asked for
and is applied; a command must exit with 0, or with N where the block says `# exits N`, and print TEXT after `says: TEXT`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from folders import REPO, Folder, make_folder

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
# Minutes to hours, or another environment: their target must exist, and the snakemake command in its recipe must plan.
LONG = ("make demo", "make study", "make test", "make lint", "make bench")
# (file, pattern, replacement): each pattern must occur.
SMALLER = (
    ("config/config.yaml", r"train_clips: \d+", "train_clips: 6"),
    ("config/config.yaml", r"test_clips: \d+", "test_clips: 2"),
    ("config/scales/demo.yaml", r"sample_count: \d+", "sample_count: 2"),
    ("config/scales/demo_stage2.yaml", r"start_step: \d+", "start_step: 1"),
)
# Training steps of the demo and of the pages that extend it -> steps in the workspace, also inside names (001000).
STEPS = {"1500": "6", "1000": "4", "500": "2", "160": "2", "80": "6"}
SECONDS_BEFORE_THE_KILL = ("--signal=KILL 60", "--signal=KILL 4")


def in_workspace(text: str) -> str:
    """The command, edit or config as it is used in the smaller copy."""
    for number, smaller in STEPS.items():
        text = re.sub(
            rf"(?<![\d.])(0*){number}(?![\d.])",
            lambda match, smaller=smaller: smaller.zfill(len(match[0]) if match[1] else 1),
            text,
        )
    return text.replace(*SECONDS_BEFORE_THE_KILL)


@dataclass(frozen=True)
class Command:
    """A shown command, the exit code that the page promises, and text that its output must hold."""

    text: str
    code: int = 0
    says: str = ""


@dataclass(frozen=True)
class Edit:
    """A shown change of a file."""

    path: str
    old: str
    new: str


def steps(page: str) -> Iterator[Command | Edit]:
    """Commands and edits of a Markdown text in order: `$` lines of console blocks, all lines of bash blocks, diff blocks."""
    for kind, body in re.findall(r"^```(console|bash|diff)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if kind == "diff":
            header, _, *lines = body.splitlines()
            kept, removed, added = " -", " -", " +"
            yield Edit(
                header.removeprefix("--- "),
                "".join(f"{line[1:]}\n" for line in lines if line[:1] in removed),
                "".join(f"{line[1:]}\n" for line in lines if line[:1] in added),
            )
            assert all(line[:1] in kept + added for line in lines), body
            continue
        for line in body.replace("\\\n", " ").splitlines():
            if kind == "console" and not line.startswith("$ "):
                continue
            text, _, remark = line.removeprefix("$ ").partition("  # ")
            code, says = re.search(r"exits (\d+)", remark), re.search(r"says: (.+)", remark)
            if text.strip():
                yield Command(" ".join(text.split()), int(code[1]) if code else 0, says[1] if says else "")


def with_steps() -> list[Path]:
    return [page for page in PAGES if any(steps(page.read_text(encoding="utf-8")))]


def write_clips(folder: Path) -> None:
    """Two videos with cameras and captions, and two files that are refused: what docs/how-to/pack-your-videos.md shows."""
    from solarwm_lib.data.camera import invert_rigid
    from solarwm_lib.data.room import Room
    from solarwm_lib.data.synthetic import camera_path
    from solarwm_lib.data.video import encode_mp4

    (folder / "holiday").mkdir(parents=True)
    for name, seed in (("kitchen", 1), ("holiday/IMG 0041", 2), ("holiday/IMG 0042", 3)):
        c2w = camera_path(40, seed, "docs")
        encode_mp4(folder / f"{name}.mp4", Room(seed).render(c2w, 64, 96), 16.0)
        if seed == 1:
            np.savez(folder / f"{name}.camera.npz", c2w=c2w)
        if seed == 2:
            rows = (
                " ".join(map(str, [round(frame * 1e6 / 16), 0.5, 0.9, 0.5, 0.5, 0, 0, *w2c[:3].ravel()]))
                for frame, w2c in enumerate(invert_rigid(c2w))
            )
            (folder / f"{name}.camera.txt").write_text("# rendered\n" + "\n".join(rows) + "\n")
        (folder / f"{name}.caption.txt").write_text("A room.\n")
    (folder / "notes.md").write_text("not a video\n")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The project after `make demo`, at the size for tests."""
    folder = make_folder(tmp_path_factory.mktemp("docs") / "project")
    for name in ("Makefile", "README.md", "pyproject.toml", "config/config.yaml"):
        shutil.copy(REPO / name, folder.path / name)
    for name, pattern, replacement in SMALLER:
        path = folder.path / name
        text, count = re.subn(pattern, replacement, path.read_text())
        assert count, f"{name} has no {pattern}"
        path.write_text(text)
    config = folder.path / "config/config.yaml"
    config.write_text(in_workspace(config.read_text()))
    activate = folder.path / ".venv/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH='{Path(sys.executable).parent}':$PATH\n")
    write_clips(folder.path / "clips")
    folder.snakemake()
    return folder


def copy_of(folder: Folder, target: Path) -> Folder:
    """The workspace again; the large members, which nothing may change, as hard links."""

    def place(source: str, destination: str) -> str:
        large = source.endswith((".safetensors", ".mp4", ".tar"))
        os.link(source, destination) if large else shutil.copy2(source, destination)
        return destination

    ignore = shutil.ignore_patterns(".snakemake", "__pycache__")
    shutil.copytree(folder.path, target, copy_function=place, ignore=ignore)
    shutil.copytree(folder.path / ".snakemake/metadata", target / ".snakemake/metadata")
    return Folder(target)


def run(command: str, folder: Folder) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder.path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder.path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode < 0:  # as a shell reports a signal
        done.returncode = 128 - done.returncode
    return done


def check_long(command: str, folder: Folder) -> None:
    """The Makefile has the target, and what its recipe asks of Snakemake is a valid plan."""
    shown = run(command.replace("make ", "make --dry-run ", 1), folder)
    assert shown.returncode == 0, shown.stderr
    for line in shown.stdout.splitlines():
        if "bin/snakemake --cores" in line:
            planned = run(f"{line.strip().replace('.venv/bin/', '')} --dry-run", folder)
            assert planned.returncode == 0, planned.stdout + planned.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", with_steps(), ids=lambda page: page.relative_to(REPO).as_posix())
def test_every_shown_command_does_what_the_page_says(page, demo, tmp_path):
    folder = copy_of(demo, tmp_path / "project")
    for step in steps(page.read_text(encoding="utf-8")):
        if isinstance(step, Edit):
            path = folder.path / step.path
            old, new, text = in_workspace(step.old), in_workspace(step.new), path.read_text()
            assert text.count(old) == 1, f"{step.path} does not hold exactly once:\n{old}"
            path.write_text(text.replace(old, new))
        elif step.text in LONG:
            check_long(step.text, folder)
        else:
            done = run(in_workspace(step.text), folder)
            output = done.stdout + done.stderr
            assert done.returncode == step.code, f"$ {in_workspace(step.text)}\n{output}"
            assert in_workspace(step.says) in output, f"$ {in_workspace(step.text)}\n{output}"
            assert "Traceback" not in output, output


def test_a_page_is_read_as_commands_with_codes_and_edits():
    page = (
        "```console\n$ solarwm verify a \\\n    --deep\nok\n$ snakemake -n  # exits 2, says: a name\n```\n"
        "```bash\nmake demo\n```\n```diff\n--- a.yaml\n+++ a.yaml\n x: 1\n-y: 2\n+y: 3\n```\n"
        "```yaml\n$ not a command\n```\n"
    )
    assert list(steps(page)) == [
        Command("solarwm verify a --deep"),
        Command("snakemake -n", 2, "a name"),
        Command("make demo"),
        Edit("a.yaml", "x: 1\ny: 2\n", "x: 1\ny: 3\n"),
    ]
    assert in_workspace("steps: 1500, step_001000/x, 5000, 0.500") == "steps: 6, step_000004/x, 5000, 0.500"
