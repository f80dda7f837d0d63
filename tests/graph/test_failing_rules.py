"""What Snakemake prints and returns when a rule, or the workflow config itself, meets bad input."""

import copy

import pytest
from folders import SMOKE, Folder, make_folder


@pytest.fixture
def folder(tmp_path) -> Folder:
    return make_folder(tmp_path / "workflow")


def error_lines(output: str) -> list[str]:
    return [line.strip() for line in output.splitlines() if "solarwm: error:" in line]


def test_a_failing_rule_shows_its_one_line_and_leaves_no_artifact(folder):
    values = copy.deepcopy(SMOKE)
    options = {"static_camera": True, "caption": "a room"}
    values["data"]["broken"] = {"kind": "folder", "source": "videos", "options": options}
    folder.configure(values)
    (folder.path / "videos").mkdir()
    (folder.path / "videos/broken.mp4").write_bytes(b"not a video")
    output = folder.snakemake("results/data/broken/COMPLETE.json", code=1)
    (line,) = error_lines(output)
    assert line.startswith(
        "solarwm: error: nothing packed, refused 1 files: broken.mp4: not a readable video"
    )
    assert "Traceback" not in output
    log = folder.results / "logs/index_clips/broken.log"
    assert line in log.read_text()
    assert [path for path in (folder.results / "data").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "data.pixel_frames",
            80,
            "data.pixel_frames: found 80, expected 4k+1 for wan22_ti2v_5b; nearest: 77 or 81",
        ),
        ("data.pixel_frmes", 81, "unknown key data.pixel_frmes; did you mean data.pixel_frames?"),
        ("train.global_batch_size", 3, "nearest batches: 2 or 4"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_is_planned(folder, key, value, words):
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"]["set"] = {key: value}
    folder.configure(values)
    output = folder.snakemake("-n", code=2)
    (line,) = error_lines(output)
    assert words in line and "runs.smoke" in line
    assert "Traceback" not in output and not folder.results.exists()


@pytest.mark.slow
def test_a_training_segment_that_fails_shows_its_one_line_through_the_pipe_to_its_log(built, tmp_path):
    folder = built.copy(tmp_path / "damaged", "results")
    member = folder.results / "runs/smoke/checkpoint_model_000004/optimizer.safetensors"
    member.chmod(0o644)
    data = bytearray(member.read_bytes())
    data[len(data) // 2] ^= 1
    member.write_bytes(data)
    values = copy.deepcopy(SMOKE)
    values["runs"]["smoke"]["steps"] = 6
    folder.configure(values)
    output = folder.snakemake("results/runs/smoke/checkpoint_model_000006/COMPLETE.json", code=1)
    lines = set(error_lines(output))
    assert len(lines) == 1 and "optimizer.safetensors" in lines.pop()
    assert "Traceback" not in output
    assert not (folder.results / "runs/smoke/checkpoint_model_000006/COMPLETE.json").exists()
