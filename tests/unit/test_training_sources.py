"""Batches from pixels and from stored latents: same numbers, same decisions, whatever is read ahead or kept."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from solarwm_lib import artifacts
from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.data.failures import BudgetSpent, Replacement, SampleFailure
from solarwm_lib.runtime.errors import DataError
from solarwm_lib.training import setup
from solarwm_lib.training.batches import Batches
from solarwm_lib.training.sources import (
    ByteCache,
    EncodedClip,
    check_encoders,
    component_digest,
    to_tensor,
)
from solarwm_lib.training.topology import Topology

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


# --- a source without files: what a batch does is a matter of the plan alone


class Plan:
    """Sample g is row g % 10; a replacement of attempt a is row 100 a + g % 10."""

    def occurrence_at(self, index):
        return self.replacement(index, 0)

    def replacement(self, index, attempt):
        from solarwm_lib.data.sampling import PlannedSample

        row = 100 * attempt + index % 10
        return PlannedSample(index, row, 0, 0, 0, f"{row}#{index}.{attempt}")


class Made:
    """Clips whose rows in `guarded` leave the guards and whose rows in `broken` cannot be read for that reason."""

    def __init__(self, guarded=(), broken=None):
        self.plan, self.guarded, self.broken = Plan(), set(guarded), broken or {}
        self.clips, self.reads, self.closed = self, [], False

    def prefetch(self, indices): ...

    def close(self):
        self.closed = True

    def read(self, planned):
        row = planned.row_ordinal
        self.reads.append(row)
        if row in self.guarded:
            raise CameraGuardError(f"row {row} is far away")
        if row in self.broken:
            raise SampleFailure(self.broken[row], f"row {row} is damaged")
        return row

    def encode(self, row):
        value = torch.full((1, 1, 1, 1), float(row))
        eye = np.eye(4, dtype=np.float32)[None]
        return EncodedClip(f"clip {row}", 0, "a room", value, value[0, 0], eye, eye[0, :3, :3])


def load(source, indices, allowed=0, workers=0, following=(), cache=0):
    batches = Batches(source, CPU, cache, workers)
    batch = batches.load(indices, following, allowed)
    batches.close()
    return batch


def test_a_batch_is_its_indices_in_order():
    source = Made()
    batch = load(source, [3, 1, 4])
    assert batch.sample_ids == ("clip 3", "clip 1", "clip 4") and batch.replaced == ()
    assert batch.occurrence_ids == ("3#3.0", "1#1.0", "4#4.0") and source.closed
    assert batch.latents.flatten().tolist() == [3.0, 1.0, 4.0] and batch.latents.shape == (3, 1, 1, 1, 1)


@pytest.mark.parametrize("workers", [0, 3])
def test_clips_outside_the_guards_are_replaced_without_any_budget(workers):
    batch = load(Made(guarded={2, 102}), [1, 2], workers=workers)
    assert batch.sample_ids == ("clip 1", "clip 202") and batch.occurrence_ids[1] == "202#2.2"
    assert batch.replaced == (
        Replacement("camera_guard", "row 2 is far away"),
        Replacement("camera_guard", "row 102 is far away"),
    )


@pytest.mark.parametrize("workers", [0, 3])
def test_the_first_damaged_clip_is_an_error_by_default(workers):
    with pytest.raises(BudgetSpent, match=r"^row 2 is damaged$") as caught:
        load(Made(broken={2: "video"}), [1, 2], workers=workers)
    assert caught.value.exit_code == 3
    assert caught.value.replaced == (Replacement("video", "row 2 is damaged"),)


@pytest.mark.parametrize("workers", [0, 3])
def test_damaged_clips_are_replaced_while_the_budget_lasts(workers):
    made = {"guarded": {102}, "broken": {2: "video", 3: "shard"}}
    batch = load(Made(**made), [1, 2, 3], allowed=2, workers=workers)
    assert batch.sample_ids == ("clip 1", "clip 202", "clip 103")
    assert [item.reason for item in batch.replaced] == ["video", "shard", "camera_guard"]
    with pytest.raises(DataError, match="row 3 is damaged"):
        load(Made(**made), [1, 2, 3], allowed=1, workers=workers)


def test_a_configuration_error_is_never_replaced():
    class Broken(Made):
        def read(self, planned):
            raise DataError("16 clips in a row leave the camera guards")

    with pytest.raises(DataError, match="16 clips in a row"):
        load(Broken(), [1], allowed=5)


def test_what_is_kept_is_not_read_again_and_reading_ahead_changes_nothing():
    source = Made(guarded={4})
    batches = Batches(source, CPU, 2**20, 2)
    seen = []
    for step in range(6):
        indices = range(5 * step, 5 * step + 5)
        seen.append(batches.load(indices, range(5 * step + 5, 5 * step + 10)))
    batches.close()
    plain = Batches(Made(guarded={4}), CPU, 0)
    for batch in seen:
        again = plain.load(batch.indices)
        assert again.occurrence_ids == batch.occurrence_ids
        assert torch.equal(again.latents, batch.latents)
    assert source.reads.count(3) == 1 and source.reads.count(104) == 1


# --- the real sources over the tiny world


def preencode_values(world: Any, output: Path, dtype: str = "float32") -> dict[str, Any]:
    values = copy.deepcopy(world.values(output))
    for section in ("train", "validation", "checkpoint"):
        values.pop(section)
    values["action"] = "preencode"
    values["data"] |= {"random_start": False, "pixel_frames": 9}
    values["preencode"] = {"generation_id": "tiny", "dtype": dtype, "parts": 2}
    return values


@pytest.fixture(scope="module")
def latents(tiny_world, tmp_path_factory):
    """A float32 generation of the tiny world."""
    from solarwm_lib.config.load import resolve_values
    from solarwm_lib.preencode.part import preencode

    root = tmp_path_factory.mktemp("latents") / "tiny"
    preencode(resolve_values(preencode_values(tiny_world, root)))
    return root


def preencoded(world: Any, latents: Path, output: Path, **changes: Any) -> Any:
    changes = {"data__encoding": "preencoded", "data__latents_root": str(latents), **changes}
    return world.resolve(output, data__random_start=False, data__pixel_frames=9, **changes)


def test_stored_float32_latents_equal_online_ones_bit_for_bit(tiny_world, latents, tmp_path):
    stored = setup.build_source(preencoded(tiny_world, latents, tmp_path), CPU)
    online = setup.build_source(
        tiny_world.resolve(tmp_path, data__random_start=False, data__pixel_frames=9), CPU
    )
    clips = {
        clip.sample_id: clip for clip in (online.load(online.clips.locate(index)[0]) for index in range(6))
    }
    assert len(clips) == 6
    for index in range(6):
        clip = stored.load(stored.clips.locate(index)[0])
        other = clips[clip.sample_id.split("/latent-")[0]]
        assert clip.latents.dtype == torch.float32 and torch.equal(clip.latents, other.latents)
        assert torch.equal(clip.prompt_embeds, other.prompt_embeds)
        np.testing.assert_array_equal(clip.w2c, other.w2c)
        np.testing.assert_array_equal(clip.intrinsics, other.intrinsics)
        assert (clip.caption, clip.start_frame) == (other.caption, other.start_frame)


def test_training_from_latents_loads_no_encoder(tiny_world, latents, tmp_path):
    config = tmp_path / "run.json"
    from solarwm_lib.config.identity import canonical_json

    config.write_text(canonical_json(preencoded(tiny_world, latents, tmp_path / "run").values))
    script = f"""
import sys, torch
from pathlib import Path
from solarwm_lib.config.load import load
from solarwm_lib.training import setup
from solarwm_lib.training.topology import Topology
resolved = load(Path({str(config)!r}))
batches = setup.build_batches(resolved, torch.device("cpu"), Topology())
batch = batches.load(range(4))
batches.close()
assert batch.latents.shape == (4, 3, 48, 2, 2) and batch.latents.dtype == torch.float32
loaded = [name for name in ("solarwm_lib.backbones.codec", "transformers") if name in sys.modules]
print(loaded)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_a_run_from_latents_is_identified_by_its_generation(tiny_world, latents, tmp_path):
    resolved = preencoded(tiny_world, latents, tmp_path / "run")
    run = setup.open_run(resolved, tmp_path / "run")
    index = artifacts.read(latents / "index")
    assert run.identity["latents"] == index.digest and index in run.inputs.parents
    online = setup.open_run(tiny_world.resolve(tmp_path / "run"), tmp_path / "run")
    assert "latents" not in online.identity


def test_latents_of_another_codec_are_refused(tiny_world, latents, tmp_path):
    from dataclasses import replace

    from solarwm_lib.backbones.codec import folder_digest
    from solarwm_lib.backbones.text import text_identity

    clips = setup.open_clips(preencoded(tiny_world, latents, tmp_path))
    assets = artifacts.read(tiny_world.assets)
    assert component_digest(assets, "vae") == folder_digest(tiny_world.assets / "vae")
    assert clips.contract.extras["text_encoder"] == text_identity(tiny_world.assets)
    check_encoders(clips.contract, assets)
    for key in ("codec", "text_encoder"):
        other = replace(clips.contract, extras={**clips.contract.extras, key: "0" * 64})
        with pytest.raises(DataError, match=f"were made by {key} 0000000000000000, model.base_path"):
            check_encoders(other, assets)
    check_encoders(replace(clips.contract, extras={}), assets)


def test_more_ranks_than_clips_are_refused(tiny_world, latents, tmp_path):
    wide = {"distributed__world_size": 8, "train__micro_batch_size": 1}
    for resolved in (
        tiny_world.resolve(tmp_path, **wide),
        preencoded(tiny_world, latents, tmp_path, **wide),
    ):
        with pytest.raises(DataError, match=r"6 occurrence\(s\) per epoch for 8 data-parallel ranks"):
            setup.open_clips(resolved)


def test_only_the_main_rank_looks_through_the_shards(tiny_world, tmp_path):
    resolved = tiny_world.resolve(tmp_path, data__root=str(tmp_path / "nowhere"))
    setup.check_clips(resolved, Topology(rank=1, world_size=2, local_rank=1, local_world_size=2))
    with pytest.raises(DataError):
        setup.check_clips(resolved, Topology())


def test_bfloat16_is_read_bit_for_bit():
    from solarwm_lib.data.tensors import StoredTensor

    values = torch.randn(3, 5).bfloat16()
    data = memoryview(values.view(torch.uint8).numpy().tobytes())
    assert torch.equal(to_tensor(StoredTensor("BF16", (3, 5), data)), values)


def test_a_cache_is_bounded_by_bytes():
    cache: ByteCache[int, bytes] = ByteCache(10, len)
    for key in range(5):
        cache.put(key, bytes(4))
    assert [key in cache for key in range(5)] == [False, False, False, True, True] and cache.used_bytes == 8
    cache.get(3)
    cache.put(9, bytes(4))
    assert 3 in cache and 4 not in cache
    cache.put(10, bytes(11))
    assert 10 not in cache


def test_stage2_encodes_the_first_frame_alone_and_gets_the_same_latent(tiny_world, tmp_path):
    from solarwm_lib.training.sources import OnlineSource

    whole = setup.build_source(tiny_world.resolve(tmp_path), CPU)
    first = OnlineSource(whole.clips, whole._codec, whole._text, CPU, anchor_only=True)
    planned = whole.clips.plan.occurrence_at(0)
    expected, found = whole.load(planned), first.load(planned)
    assert found.latents.shape == expected.latents.shape and found.latents.dtype == torch.float32
    # Another number of frames in the batch is another matrix product: equal but for rounding.
    torch.testing.assert_close(found.latents[0], expected.latents[0], rtol=1e-5, atol=1e-5)
    assert not found.latents[1:].any() and torch.equal(found.prompt_embeds, expected.prompt_embeds)
    whole.clips.close()
