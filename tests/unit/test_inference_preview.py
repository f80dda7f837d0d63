"""Videos that grow while a rollout runs: off the record, playable after SIGKILL, and without a trace in the result."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_world import a_pass, kept_latents, long_world, publish_checkpoint, resolve
from tinyworld import TinyWorld

from solarwm_lib.data.video import Mp4Writer, decode, iterate
from solarwm_lib.inference import preview
from solarwm_lib.inference.generate import Request, decode_stretches
from solarwm_lib.inference.infer import infer, open_infer
from solarwm_lib.inference.latents import beside
from solarwm_lib.inference.slots import VIDEO_CRF
from solarwm_lib.runtime.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def world(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return long_world(tiny_world, tmp_path_factory.mktemp("long clips"))


@pytest.fixture(scope="module")
def root(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for stage in ("sgf", "fm"):
        publish_checkpoint(world, root, stage)
    return root


@pytest.fixture(scope="module")
def codec(world: TinyWorld) -> Any:
    from solarwm_lib.backbones.codec import load_codec

    return load_codec(world.assets)


def video_of(out: Path, name: str = "live", slot: int = 0) -> Path:
    return beside(out, name) / "preview" / f"slot-{slot:06d}.mp4"


def request(slot: int) -> Request:
    still = np.zeros((32, 32, 3), np.uint8)
    return Request(slot, "", still, np.zeros((6, 4, 4)), np.eye(3), (0, "clip", 0))


def chunks_of(latents: torch.Tensor, size: int = 2) -> list[torch.Tensor]:
    return list(latents.split(size, dim=1))


def test_a_growing_file_is_playable_up_to_the_last_frame_but_one(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (5, 32, 48, 3), np.uint8)
    with Mp4Writer(tmp_path / "a.mp4", 16, growing=True) as writer:
        for count, frame in enumerate(frames):
            writer.write(frame)
            assert playable(tmp_path / "a.mp4") == count
    assert len(decode(tmp_path / "a.mp4")) == 5
    with Mp4Writer(tmp_path / "b.mp4", 16) as writer:
        writer.write(frames[0])
        with pytest.raises(DataError):
            decode(tmp_path / "b.mp4")
    assert writer.size == (32, 48)


@pytest.mark.parametrize("stage", ["sgf", "fm"])
def test_the_result_is_the_same_bit_for_bit_with_and_without(
    world: TinyWorld, root: Path, stage: str, tmp_path: Path
) -> None:
    """Two clips in one batch, 4 chunks each: the 29 frames that are shown are those that are published."""
    shown, hidden = (
        infer(resolve(world, root, stage, [a_pass(stage, latents=8)], inference__preview=on), tmp_path / out)
        for on, out in ((True, "shown"), (False, "hidden"))
    )
    measured = {"manifest.json", "summary.json", "ordered-manifest.jsonl"}  # these hold times
    members = {m.path: m.sha256 for m in shown.members if m.path.split("/")[-1] not in measured}
    assert members == {m.path: m.sha256 for m in hidden.members if m.path.split("/")[-1] not in measured}
    assert shown.identity == hidden.identity
    for slot in (0, 1):
        assert torch.equal(*(kept_latents(tmp_path / out, "live", slot) for out in ("shown", "hidden")))
        published = decode(shown.file(f"live/slot-{slot:06d}/generated.mp4"))
        assert np.array_equal(decode(video_of(tmp_path / "shown", slot=slot)), published)
    assert not (beside(tmp_path / "hidden", "live") / "preview").exists()
    assert not any("preview" in member.path for member in shown.members)


def test_a_chunk_is_decoded_as_in_one_decode(codec: Any, tmp_path: Path) -> None:
    latents = torch.randn(2, 6, 48, 2, 2, generator=torch.Generator().manual_seed(0)) / 4
    with preview.Previews(tmp_path, codec, 16.0) as previews:
        for done, chunk in enumerate(chunks_of(latents), start=1):
            previews([request(0), request(1)], done, 3, chunk)
            for slot in (0, 1):
                assert playable(tmp_path / f"preview/slot-{slot:06d}.mp4") == (4, 12, 21)[done - 1]
    for slot in (0, 1):
        expected = np.concatenate([frames for frames, _ in decode_stretches(codec, latents[slot], 21)])
        with Mp4Writer(tmp_path / "expected.mp4", 16.0, crf=VIDEO_CRF) as writer:
            for frame in expected:
                writer.write(frame)
        assert np.array_equal(decode(tmp_path / f"preview/slot-{slot:06d}.mp4"), decode(tmp_path / "expected.mp4"))  # fmt: skip


def test_a_preview_that_fails_costs_only_itself(
    codec: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN in the second chunk of one clip; a clip that is sampled again begins a new video."""
    latents = torch.zeros(2, 6, 48, 2, 2)
    latents[0, 3] = float("nan")
    with caplog.at_level(logging.WARNING), preview.Previews(tmp_path, codec, 16.0) as previews:
        for done, chunk in enumerate(chunks_of(latents), start=1):
            previews([request(0), request(1)], done, 3, chunk)
        assert [r.getMessage() for r in caplog.records] == [
            "preview of slot 0 ends before chunk 2: decoded pixels are not finite in batch rows [0]; the latents or the "
            "codec are damaged"
        ]
        counts = [len(decode(tmp_path / f"preview/slot-{slot:06d}.mp4")) for slot in (0, 1)]
        assert counts == [5, 21]
        previews([request(0)], 1, 3, latents[:1, :2])
        previews([request(0)], 2, 3, latents[1:, :2])
    assert len(decode(tmp_path / "preview/slot-000000.mp4")) == 13


def test_a_folder_that_cannot_be_written_costs_only_the_preview(
    world: TinyWorld, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (beside(tmp_path / "out", "live")).mkdir()
    (beside(tmp_path / "out", "live") / "preview").write_text("in the way")
    resolved = resolve(world, root, "sgf", [a_pass("sgf", latents=4)], inference__preview=True)
    with caplog.at_level(logging.WARNING):
        result = infer(resolved, tmp_path / "out")
    assert json.loads(result.file("live/summary.json").read_bytes())["status"] == "complete"
    assert sum("preview of slot" in record.getMessage() for record in caplog.records) == 2


def test_previews_are_for_inference_and_by_default_for_camera_length(world: TinyWorld, root: Path) -> None:
    def config(**changes: Any) -> Any:
        return resolve(world, root, "sgf", [a_pass("sgf")], **changes)

    assert not preview.wanted(config().config)
    assert preview.wanted(config(inference__length="camera").config)
    assert not preview.wanted(config(inference__length="camera", inference__preview=False).config)
    assert preview.wanted(config(inference__preview=True).config)
    assert not preview.wanted(world.resolve(root).config)  # a run that validates
    assert config(inference__preview=True).semantic_digest == config().semantic_digest


def test_a_preview_of_whole_clip_sampling_is_refused(world: TinyWorld, root: Path) -> None:
    bidirectional = {"name": "live", "mode": "bidirectional", "solver": "unipc", "num_inference_steps": 2}
    values = world.values(root, validation__passes=[bidirectional], inference__preview=True)
    values |= {"action": "infer", "checkpoint": {"path": str(root / "fm")}}
    from solarwm_lib.config.load import resolve_values

    with pytest.raises(
        ConfigError, match=r"inference.preview: found true, but pass 'live' is bidirectional .* set false"
    ):
        open_infer(resolve_values(values))


def playable(path: Path) -> int:
    try:
        return len(list(iterate(path)))
    except DataError:
        return 0


def test_a_killed_inference_leaves_what_it_has_shown_and_no_result(
    world: TinyWorld, root: Path, tmp_path: Path
) -> None:
    """SIGKILL in the middle of 400 chunks; what was shown until then is what an undisturbed rollout shows."""
    passes = [a_pass("sgf", latents=800)]
    out = tmp_path / "out"
    changes = {"inference__preview": True, "runtime__output_dir": str(out)}
    resolved = resolve(world, root, "sgf", passes, **changes)
    (tmp_path / "config.json").write_text(json.dumps(resolved.values))
    process = subprocess.Popen(
        [sys.executable, "-m", "solarwm_lib", "infer", "--config", str(tmp_path / "config.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 300
    while (seen := playable(video_of(out))) < 100:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline, "no preview in time"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = decode(video_of(out))
    assert seen <= len(left) < 3197
    assert not out.exists() and not list(beside(out, "live").glob("slot-*"))
    short = resolve(world, root, "sgf", [a_pass("sgf", latents=8)], **changes)
    infer(short, tmp_path / "undisturbed")
    assert np.array_equal(left[:29], decode(video_of(tmp_path / "undisturbed")))
