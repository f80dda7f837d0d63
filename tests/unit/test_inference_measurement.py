"""A clip measured stretch by stretch: equal to measuring it at once, and never all in memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_world import FRAMES, a_pass, long_world, resolve
from tinyworld import TinyWorld

from solarwm_lib.inference.cases import Cases
from solarwm_lib.inference.generate import decode_stretches, reconstructor
from solarwm_lib.inference.measurement import Measurement, measure
from solarwm_lib.inference.metrics import pixel_statistics, to_uint8
from solarwm_lib.inference.plan import build_plan
from solarwm_lib.inference.slots import Slot


def clip(frames: int, seed: int) -> np.ndarray:
    """Smooth float pixels [F,32,32,3]."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(frames, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    return np.clip(coarse / 2, -1, 1).astype(np.float32)


def a_slot() -> Slot:
    return Slot({"slot": 0, "sample_id": "clip", "start_frame": 3})


def in_stretches(sizes: list[int], truth: np.ndarray, pixels: np.ndarray, pad: int = 0) -> Measurement:
    with Measurement(a_slot(), len(pixels), len(truth), 16.0, "a pass", pad) as measurement:
        first = 0
        for size in sizes:
            here = slice(first, first + size)
            part, recorded = pixels[here], truth[here]
            measurement.add(to_uint8(part), pixel_statistics(part), recorded, recorded)
            first += size
        measurement.finish()
    return measurement


@pytest.mark.parametrize(("recorded", "damaged"), [(21, None), (13, None), (21, 15), (11, 15)])
def test_stretches_give_what_the_whole_clip_gives(recorded: int, damaged: int | None) -> None:
    """Metrics, statistics, captions and all three videos, byte for byte; ground truth may end, pixels may be NaN."""
    truth, pixels = to_uint8(clip(recorded, 0)), clip(21, 1)
    if damaged:
        pixels[damaged] = np.nan
    whole = a_slot()
    measure(whole, truth, pixels, truth, 16.0, "a pass")
    found = in_stretches([5, 8, 8], truth, pixels).slot
    assert found.members == whole.members and set(found.members) == {
        "generated.mp4", "ground_truth.mp4", "compare.mp4", "frames.csv"
    }  # fmt: skip
    assert found.metrics == whole.metrics and found.facts == whole.facts and found.status == whole.status
    assert found.status == ("error" if damaged else "ok")
    assert found.facts["first_bad_frame"] == damaged
    assert found.facts.get("ground_truth_frames") == (recorded if recorded < 21 else None)


def test_padding_repeats_the_last_frame_in_a_second_video() -> None:
    truth, pixels = to_uint8(clip(13, 0)), clip(13, 1)
    padded = np.concatenate([pixels, pixels[-1:].repeat(3, axis=0)])
    measurement = in_stretches([5, 8], truth, pixels, pad=3)
    assert (
        measurement.padded == in_stretches([16], to_uint8(clip(16, 0)), padded).slot.members["generated.mp4"]
    )
    assert in_stretches([13], truth, pixels).padded is None


def test_a_clip_that_was_not_measured_to_its_end_is_a_bug() -> None:
    with pytest.raises(ValueError, match="5 frames were measured, expected 13"):
        in_stretches([5], to_uint8(clip(13, 0)), clip(13, 1))


def test_an_earlier_failure_of_the_slot_stays() -> None:
    """Bad latents behind the published end leave only good frames; the slot is an error all the same."""
    slot = a_slot()
    slot.fail(ValueError("bad latents"))
    measure(slot, to_uint8(clip(5, 0)), clip(5, 1), to_uint8(clip(5, 0)), 16.0, "a pass")
    assert slot.status == "error" and slot.metrics is None and "bad latents" in slot.failure.message


def test_no_stretch_is_kept() -> None:
    truth, pixels = to_uint8(clip(8, 0)), clip(8, 1)
    with Measurement(a_slot(), 16, 16, 16.0, "a pass", 1) as measurement:
        for _ in range(2):
            generated, recorded = to_uint8(pixels), truth.copy()
            kept = [weakref.ref(generated), weakref.ref(recorded)]
            measurement.add(generated, pixel_statistics(pixels), recorded, recorded)
            del generated, recorded
            assert [ref() for ref in kept] == [None, None]
        measurement.finish()


def peak_growth_mb(work: Any) -> float:
    """Return by how much `work` raises this process's peak memory over what it holds now."""
    status = Path("/proc/self/status")

    def read(name: str) -> float:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def test_decoding_a_long_clip_takes_the_memory_of_a_tile(world: TinyWorld) -> None:
    """960 latents, 3837 frames of 64x64: 180 MiB as float pixels, 45 MiB as uint8. Two tiles of 60 take as much as 16."""
    from solarwm_lib.backbones.codec import load_codec

    codec = load_codec(world.assets)
    latents = torch.randn(960, 48, 4, 4, generator=torch.Generator().manual_seed(0)) / 4
    counted = 0

    def work(frames: int) -> None:
        nonlocal counted
        counted = 0
        through = reconstructor(codec)
        for pixels, _ in decode_stretches(codec, latents, frames):
            assert through(pixels).shape == pixels.shape
            counted += len(pixels)

    work(477)  # what allocators and libraries take once
    two = peak_growth_mb(lambda: work(477))
    all_of_them = peak_growth_mb(lambda: work(3837))
    assert counted == 3837 and all_of_them < two + 25, (two, all_of_them)
    assert peak_growth_mb(lambda: codec.decode(latents[None])) > two + 150


@pytest.fixture(scope="module")
def world(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return long_world(tiny_world, tmp_path_factory.mktemp("long clips"))


def test_ground_truth_in_stretches(world: TinyWorld, tmp_path: Path) -> None:
    """19 frames, read from any of them on; none behind the end."""
    resolved = resolve(world, tmp_path, "sgf", [a_pass("sgf")], inference__length="camera")
    clips, case = Cases(resolved), build_plan(resolved)["cases"][0]
    whole = clips.truth(case, 100)
    assert clips.truth_frames(case, 100) == len(whole) == FRAMES and clips.truth_frames(case, 7) == 7
    parts = [clips.truth(case, last, first) for first, last in ((0, 5), (5, 17), (17, 100))]
    assert np.array_equal(np.concatenate(parts), whole)
    assert clips.truth(case, 100, FRAMES).shape == (0, 32, 32, 3)
    clips.close()


def test_stretches_go_through_the_codec_as_the_whole_clip_does(world: TinyWorld) -> None:
    """The last stretch may end within a group of frames; stretches behind the ground truth are empty."""
    from solarwm_lib.backbones.codec import load_codec

    codec = load_codec(world.assets)
    frames = to_uint8(clip(18, 0))
    whole = reconstructor(codec)(frames)
    stretches = reconstructor(codec)
    parts = [stretches(frames[first:last]) for first, last in ((0, 5), (5, 13), (13, 18), (18, 18))]
    assert np.array_equal(np.concatenate(parts), whole)
    assert whole.shape == frames.shape and len(np.unique(whole)) > 100
