"""Parts of a latent generation: what is stored, what is never done twice, what is copied, what is left out or refused."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest
import torch
from preencode_cases import (
    COUNT,
    FRAMES,
    SIZE,
    changed_assets,
    clip,
    keys_of,
    publish,
    resolved,
    rows_of,
)
from safetensors.torch import load

from solarwm_lib import artifacts
from solarwm_lib.backbones.codec import load_codec
from solarwm_lib.backbones.text import TextEncoder
from solarwm_lib.config.architectures import load_architecture
from solarwm_lib.config.geometry import geometry
from solarwm_lib.data import video
from solarwm_lib.data.dataset import RawClips
from solarwm_lib.data.index import index_bytes, read_index
from solarwm_lib.data.latents import LatentClips
from solarwm_lib.data.sampling import PlannedSample
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.windows import materialize_windows
from solarwm_lib.data.writer import SCHEMA
from solarwm_lib.preencode.merge import merge_parts
from solarwm_lib.preencode.part import part_name, part_rows, preencode, preencode_part
from solarwm_lib.runtime.errors import ArtifactError, ConfigError, DataError
from solarwm_lib.training.sources import LatentSource, OnlineSource


@pytest.fixture(scope="module")
def assets(tiny_world):
    return tiny_world.assets


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("raw") / "data"
    return publish(root, [clip(n) for n in range(5)], [clip(7), clip(8)])


@pytest.fixture(scope="module")
def generation(tmp_path_factory, data, assets):
    """A merged generation in float32: root and its configuration."""
    root = tmp_path_factory.mktemp("latents") / "g"
    config = resolved(root, data, assets)
    preencode(config)
    return root, config


def summaries(root):
    return [
        json.loads((path / "summary.json").read_text())
        for path in sorted((root / "shards").iterdir())
        if not path.name.startswith(".")
    ]


def totals(root, *names):
    return tuple(sum(summary[name] for summary in summaries(root)) for name in names)


def members(root, row):
    reader = ShardReader(root)
    names = (row.preencoded_member, row.camera_member, row.manifest_member, row.provenance_member)
    found = {name.rsplit("/", 1)[1]: reader.read(row, name) for name in names}
    reader.close()
    return found


def test_stored_clips_are_what_training_encodes_online_bit_for_bit(generation, data, assets):
    root, config = generation
    settings = config.config.model_copy(
        update={
            "data": config.config.data.model_copy(
                update={"latent_schema": config.config.preencode.latent_schema}
            )
        }
    )
    architecture = load_architecture("wan22-tiny")
    online = OnlineSource(
        RawClips(data, "train-index.jsonl", settings.data),
        load_codec(assets),
        TextEncoder.from_pretrained(assets, 16),
        torch.device("cpu"),
    )
    stored = LatentSource(
        LatentClips(
            root,
            settings.data,
            family="wan22_ti2v_5b",
            geometry=geometry("wan22_ti2v_5b", architecture, FRAMES, SIZE, SIZE),
            text_length=16,
            text_dim=architecture["transformer"]["text_dim"],
        )
    )
    stored.clips.check()
    for ordinal in range(5):
        planned = PlannedSample(0, ordinal, 0, 0, 0, "x")
        a, b = online.load(planned), stored.load(planned)
        assert b.latents.dtype == torch.float32
        assert torch.equal(a.latents, b.latents)
        assert torch.equal(a.prompt_embeds, b.prompt_embeds)
        assert np.array_equal(a.w2c, b.w2c) and np.array_equal(a.intrinsics, b.intrinsics)
        assert (a.caption, a.start_frame) == (b.caption, b.start_frame)


def test_bfloat16_latents_are_the_rounded_ones(generation, data, assets, tmp_path):
    preencode(resolved(tmp_path / "half", data, assets, preencode__dtype="bfloat16"))
    full, half = rows_of(generation[0])[0], rows_of(tmp_path / "half")[0]
    full = load(members(generation[0], full)["preencoded.safetensors"])
    half = load(members(tmp_path / "half", half)["preencoded.safetensors"])
    assert {name: tensor.bfloat16().tolist() for name, tensor in full.items()} == {
        name: tensor.tolist() for name, tensor in half.items()
    }


def test_a_sample_holds_the_original_camera_and_says_where_it_comes_from(generation, data):
    root, _config = generation
    raw, row = read_index(data / "train-index.jsonl")[1], rows_of(root)[1]
    found = members(root, row)
    reader = ShardReader(data)
    assert found["camera.npz"] == reader.read(raw, raw.camera_member)
    manifest = json.loads(found["manifest.json"])
    original = json.loads(reader.read(raw, raw.manifest_member))
    block = manifest.pop("preencoding")
    assert manifest == original
    assert block["version"] == "solarwm.wan22_ti2v_5b.32p.5f.v1"
    assert (block["latent_shape"], block["prompt_shape"]) == ([2, 48, 2, 2], [16, 64])
    assert block["tensors_digest"] == row.members[row.preencoded_member].sha256
    assert (block["source_frame_first"], block["source_frame_last"]) == (0, 4)
    provenance = json.loads(found["provenance.json"])
    assert provenance["schema"] == "solarwm.preencoded-sample.v1"
    assert provenance["members"]["camera.npz"] == row.camera_member
    assert (row.sample_id, row.source_sample_id) == ("set/clip-1/latent-5f-w00", "set/clip-1")
    assert row.metadata["source_identity"] == raw.members[raw.video_member].sha256
    assert row.shard == "shards/part-000000/samples-00000.tar"
    names = [name.rsplit("/", 1)[1] for name in row.members]
    by_offset = sorted(row.members, key=lambda name: row.members[name].offset)
    assert [name.rsplit("/", 1)[1] for name in by_offset] == [*sorted(names)[:3], "provenance.json"]


def test_the_merged_index_covers_the_source_in_its_order(generation, data):
    root, _ = generation
    for split, count in (("train", 5), ("test", 2)):
        raw = read_index(data / f"{split}-index.jsonl")
        rows = rows_of(root, split)
        assert [row.source_sample_id for row in rows] == [row.sample_id for row in raw]
        assert len(rows) == count and {row.split for row in rows} == {split}
    stats = json.loads((root / "index/stats.json").read_text())
    assert stats["samples"] == {"train": 5, "test": 2}
    assert stats["shards"] == len({row.shard for split in ("train", "test") for row in rows_of(root, split)})
    artifacts.verify(root / "index", deep=True)


@pytest.mark.parametrize(("parts", "total"), [(1, 7), (3, 7), (7, 7), (9, 7), (64, 1_430_000)])
def test_parts_cover_all_rows_once_and_evenly(parts, total):
    bounds = [part_rows(part, parts, total) for part in range(parts)]
    assert bounds[0][0] == 0 and bounds[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


def bytes_of(root):
    """Contents of all members that say what a generation holds."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in ("COMPLETE.json", "manifest.json")
    }


def test_a_generation_made_in_another_order_with_interruptions_is_the_same_bytes(
    generation, data, assets, tmp_path
):
    config = resolved(tmp_path / "g", data, assets, data__num_workers=2)
    made = [preencode_part(config, part, tmp_path / "g" / part_name(part)) for part in (2, 0)]
    (made[0].path / "COMPLETE.json").unlink()  # as a forced rerun does
    before = {path: path.stat().st_mtime_ns for path in made[0].path.glob("*.tar")}
    with pytest.raises(ArtifactError, match="part-000001: does not exist"):
        merge_parts(config)
    preencode(config)
    assert before == {path: path.stat().st_mtime_ns for path in made[0].path.glob("*.tar")}
    assert (made[0].path / "COMPLETE.json").is_file()
    assert bytes_of(tmp_path / "g") == bytes_of(generation[0])
    assert preencode(config) == merge_parts(config)


def test_shards_end_at_their_limits(data, assets, tmp_path):
    config = resolved(tmp_path / "g", data, assets, preencode__parts=1, preencode__shard_max_bytes=1)
    preencode(config)
    assert len({row.shard for row in rows_of(tmp_path / "g")}) == 5
    size = max(path.stat().st_size for path in (tmp_path / "g").rglob("*.tar"))
    config = resolved(
        tmp_path / "h",
        data,
        assets,
        preencode__parts=1,
        preencode__shard_max_bytes=2 * size,
        preencode__shard_max_samples=9,
    )
    preencode(config)
    found = sorted(path.stat().st_size for path in (tmp_path / "h").rglob("*.tar"))
    assert len(found) == 4 and found[-1] <= 2 * size


def test_more_parts_than_rows_leave_some_empty(data, assets, tmp_path):
    preencode(resolved(tmp_path / "g", data, assets, preencode__parts=9))
    assert len(rows_of(tmp_path / "g")) == 5


def test_a_new_generation_over_an_old_one_copies_everything_and_is_the_same_bytes(
    generation, data, assets, tmp_path
):
    root, _ = generation
    preencode(resolved(tmp_path / "g", data, assets, preencode__reuse=[str(root)]))
    assert totals(tmp_path / "g", "encoded", "reused", "latents_reused", "prompts_reused") == (0, 7, 7, 7)
    assert (tmp_path / "g/index/train-index.jsonl").read_bytes() == (
        root / "index/train-index.jsonl"
    ).read_bytes()


def changed_keys(before, after):
    """Source ids whose latents key changed, and whose prompt key changed."""
    names = lambda place: {  # noqa: E731
        sample.split("/latent-")[0] for sample in before if before[sample][place] != after[sample][place]
    }
    return names(0), names(1)


def reencode(tmp_path, generation, data, assets, **changes):
    """Preencode with the old generation at hand; return changed keys and how much was copied."""
    root = tmp_path / "new"
    preencode(resolved(root, data, assets, preencode__reuse=[str(generation[0])], **changes))
    before, after = keys_of(generation[0]), keys_of(root)
    after = dict(zip(before, after.values(), strict=True))
    return *changed_keys(before, after), totals(root, "latents_reused", "prompts_reused")


EVERYONE = {f"set/clip-{n}" for n in range(5)}
TESTED = [clip(7), clip(8)]


def test_a_changed_caption_changes_that_prompt_only(generation, assets, tmp_path):
    clips = [clip(n, caption="another" if n == 2 else f"room {n}") for n in range(5)]
    data = publish(tmp_path / "data", clips, TESTED)
    assert reencode(tmp_path, generation, data, assets) == (set(), {"set/clip-2"}, (7, 6))
    new = rows_of(tmp_path / "new")[2]
    assert new.caption == "another"
    old = load(members(generation[0], rows_of(generation[0])[2])["preencoded.safetensors"])
    found = load(members(tmp_path / "new", new)["preencoded.safetensors"])
    assert torch.equal(old["latents"], found["latents"])
    assert not torch.equal(old["prompt_embeds"], found["prompt_embeds"])


def test_a_caption_that_cleans_to_the_same_text_keeps_its_prompt(generation, assets, tmp_path):
    clips = [clip(n, caption=f" room &#32; {n} ") for n in range(5)]
    data = publish(tmp_path / "data", clips, TESTED)
    assert reencode(tmp_path, generation, data, assets) == (set(), set(), (7, 7))


def test_another_video_under_the_same_name_size_and_time_changes_those_latents_only(
    generation, data, assets, tmp_path
):
    old = clip(3).video
    other = clip(4).video  # the same scene shifted; padded to the old size, as a careful forger would
    length = max(len(old), len(other))
    forged = other + b"\0\0\0\x08free" + bytes(length - len(other)) if len(other) < length else other
    clips = [clip(n, video=forged if n == 3 else clip(n).video) for n in range(5)]
    changed = publish(tmp_path / "data", clips, TESTED)
    for path in changed.rglob("*.tar"):
        status = (data / path.relative_to(changed)).stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert reencode(tmp_path, generation, changed, assets) == ({"set/clip-3"}, set(), (6, 7))


def test_one_changed_codec_weight_changes_all_latents_and_no_prompt(generation, data, assets, tmp_path):
    other = changed_assets(assets, tmp_path / "assets", "vae", "first_basis")
    assert reencode(tmp_path, generation, data, other) == (EVERYONE, set(), (0, 7))


def test_one_changed_text_weight_changes_all_prompts_and_no_latents(generation, data, assets, tmp_path):
    name = "encoder.final_layer_norm.weight"
    other = changed_assets(assets, tmp_path / "assets", "text_encoder", name)
    assert reencode(tmp_path, generation, data, other) == (set(), EVERYONE, (7, 0))


def test_another_resolution_changes_all_latents_and_no_prompt(generation, data, assets, tmp_path):
    changes = {"data__height": 64, "data__width": 64}
    assert reencode(tmp_path, generation, data, assets, **changes) == (EVERYONE, set(), (0, 7))


def test_a_changed_weight_inside_published_assets_is_noticed_by_its_content(
    generation, data, assets, tmp_path
):
    other = tmp_path / "assets"
    shutil.copytree(assets, other)
    path = other / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)  # same name and size: the marker's cheap check cannot see it
    assert reencode(tmp_path, generation, data, other) == (EVERYONE, set(), (0, 7))


def test_a_damaged_old_generation_is_never_copied_from(generation, data, assets, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(generation[0], old)
    row = rows_of(old)[0]
    with (old / row.shard).open("r+b") as file:
        file.seek(row.members[row.preencoded_member].offset + 900)
        file.write(b"\xff\xff")
    with pytest.raises(DataError, match=r"sha256 is .* the index promises"):
        preencode(resolved(tmp_path / "g", data, assets, preencode__reuse=[str(old)]))
    with pytest.raises(ConfigError, match=r"preencode.reuse: .*does not exist.*give the folder of a merged"):
        preencode(resolved(tmp_path / "g", data, assets, preencode__reuse=[str(tmp_path / "none")]))


def far(number):
    c2w = np.tile(np.eye(4, dtype=np.float32), (9, 1, 1))
    c2w[1:, 0, 3] = 50
    return clip(number, c2w=c2w)


def test_a_clip_outside_the_camera_guards_is_left_out_and_listed(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(0), far(1), clip(2)], [clip(3)])
    preencode(resolved(tmp_path / "g", data, assets, preencode__parts=2))
    assert [row.source_sample_id for row in rows_of(tmp_path / "g")] == ["set/clip-0", "set/clip-2"]
    (entry,) = [entry for summary in summaries(tmp_path / "g") for entry in summary["excluded"]]
    assert (entry["ordinal"], entry["sample_id"], entry["reason"]) == (
        1,
        "set/clip-1/latent-5f-w00",
        "camera_guard",
    )
    recipe = json.loads((tmp_path / "g/index/generation.json").read_text())
    assert recipe["excluded"] == [entry] and "exceeds data.max_relative_translation" in entry["message"]
    assert json.loads((tmp_path / "g/index/stats.json").read_text())["excluded"] == {"camera_guard": 1}


def test_a_split_of_which_every_clip_is_left_out_is_refused(assets, tmp_path):
    data = publish(tmp_path / "data", [far(1)])
    with pytest.raises(DataError, match="every train clip is excluded"):
        preencode(resolved(tmp_path / "g", data, assets))
    assert not (tmp_path / "g/index").exists()


def test_training_data_without_a_test_split_gives_an_empty_test_index(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(1)])
    preencode(resolved(tmp_path / "g", data, assets))
    assert (tmp_path / "g/index/test-index.jsonl").read_bytes() == b""


def test_a_source_in_both_splits_is_refused(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(1)])
    rows = [row.model_copy(update={"split": None}) for row in read_index(data / "train-index.jsonl")]
    with artifacts.Transaction(tmp_path / "both", SCHEMA, {"rows": "twice"}) as transaction:
        for split in ("train", "test"):
            transaction.write_bytes(f"{split}-index.jsonl", index_bytes(rows))
    with pytest.raises(DataError, match="its source 'set/clip-1' is in both splits"):
        preencode(resolved(tmp_path / "g", tmp_path / "both", assets, data__transport={"root": str(data)}))
    assert not (tmp_path / "g").exists()  # refused before the first part is encoded
    with pytest.raises(DataError, match="'split' is 'train' in the test index"):
        preencode(resolved(tmp_path / "h", data, assets, data__test_index="train-index.jsonl"))


def test_windows_are_encoded_from_the_shards_of_the_raw_data(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(1), clip(2)], [clip(3)])
    windows = materialize_windows(data, "spread", tmp_path / "windows", pixel_frames=FRAMES)
    root = tmp_path / "g"
    preencode(resolved(root, windows.path, assets, data__transport={"root": str(data)}))
    rows = rows_of(root)
    assert [(row.sample_id, row.start_frame) for row in rows] == [
        (f"set/clip-{n}/latent-5f-w0{i}", 4 * i) for n in (1, 2) for i in (0, 1)
    ]
    block = json.loads(members(root, rows[1])["manifest.json"])["preencoding"]
    assert (block["window_index"], block["window_count"], block["start_frame"]) == (1, 2, 4)
    assert block["window_hash_namespace"] == "solarwm-latent-5f-v1"
    assert rows[0].latents_key != rows[1].latents_key and rows[0].prompt_key == rows[1].prompt_key
    frames = video.decode(clip(1).video, range(4, 9))
    encoded = load_codec(assets).encode(
        torch.from_numpy(frames[None]).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    )
    assert torch.equal(load(members(root, rows[1])["preencoded.safetensors"])["latents"], encoded[0])


def test_clips_of_another_rate_are_resampled_and_say_which_frames_they_show(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(1, fps=32.0)])
    root = tmp_path / "g"
    preencode(resolved(root, data, assets, data__pixel_frames=5))
    (row,) = rows_of(root)
    assert (row.source_frame_indices, row.fps, row.num_frames) == ([0, 2, 4, 6, 8], 32.0, 9)


def test_rows_of_a_broken_clip_publish_nothing(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(1), clip(2, video=b"no video")])
    config = resolved(tmp_path / "g", data, assets, preencode__parts=1)
    with pytest.raises(DataError, match=r"sample 'set/clip-2': not a readable video"):
        preencode(config)
    assert list((tmp_path / "g/shards").iterdir()) == []


def test_a_longer_clip_without_a_start_is_refused(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(0, start_frame=None)], [clip(9)])
    config = resolved(tmp_path / "g", data, assets, preencode__parts=1)
    with pytest.raises(
        DataError, match=r"'set/clip-0'.*9 frames, the clip spans 5 and the index states no start_frame"
    ):
        preencode(config)
    exact = resolved(tmp_path / "whole", data, assets, preencode__parts=1, data__pixel_frames=COUNT)
    preencode(exact)
    assert [row.start_frame for row in rows_of(tmp_path / "whole")] == [0]


def test_a_clip_shorter_than_its_window_is_refused_before_anything_is_decoded(assets, tmp_path):
    data = publish(tmp_path / "data", [clip(1), clip(2, start_frame=5)])
    with pytest.raises(
        DataError, match="'set/clip-2': video has 9 frames, the clip needs source frames 5 to 9"
    ):
        preencode(resolved(tmp_path / "g", data, assets))


@pytest.mark.parametrize(
    ("part", "out", "message"),
    [
        (3, "g/shards/part-000003", "--part: found 3, expected 0 to 2 for preencode.parts 3"),
        (0, "g/part-000000", "expected a path that ends in shards/part-000000"),
        (0, "g/shards/part-000001", "expected a path that ends in shards/part-000000"),
    ],
)
def test_a_part_in_the_wrong_place_is_refused(data, assets, tmp_path, part, out, message):
    with pytest.raises(ConfigError, match=message):
        preencode_part(resolved(tmp_path / "g", data, assets), part, tmp_path / out)


def test_a_part_of_other_content_is_never_overwritten(data, assets, tmp_path):
    config = resolved(tmp_path / "g", data, assets)
    preencode_part(config, 0, tmp_path / "g" / part_name(0))
    other = publish(tmp_path / "other", [clip(n, caption="new") for n in range(5)], TESTED)
    with pytest.raises(ArtifactError, match=r"holds another identity .content: found"):
        preencode_part(resolved(tmp_path / "g", other, assets), 0, tmp_path / "g" / part_name(0))


def test_parts_that_do_not_belong_together_are_never_merged(generation, data, assets, tmp_path):
    root = tmp_path / "g"
    shutil.copytree(generation[0] / "shards", root / "shards")
    other = changed_assets(assets, tmp_path / "assets", "vae", "first_basis")
    preencode(resolved(tmp_path / "o", data, other))
    shutil.rmtree(root / part_name(1))
    shutil.copytree(tmp_path / "o" / part_name(1), root / part_name(1))
    with pytest.raises(
        ArtifactError, match=r"part-000001: encoder contract .* differs from .* of part-000000"
    ):
        merge_parts(resolved(root, data, assets))
    with pytest.raises(ArtifactError, match=r"not part 0 of 2 over 7 source rows .parts: found 3, wanted 2"):
        merge_parts(resolved(root, data, assets, preencode__parts=2))


def test_an_index_that_changed_after_its_parts_were_made_is_refused(generation, assets, tmp_path):
    root = tmp_path / "g"
    shutil.copytree(generation[0] / "shards", root / "shards")
    other = publish(tmp_path / "data", [clip(n, caption="new") for n in range(5)], TESTED)
    with pytest.raises(ArtifactError, match=r"is not that of the source row .caption: found .*room 0"):
        merge_parts(resolved(root, other, assets))
    assert not (root / "index").exists()


def test_damaged_rows_of_a_part_are_never_merged(generation, data, assets, tmp_path):
    root = tmp_path / "g"
    shutil.copytree(generation[0] / "shards", root / "shards")
    rows = root / part_name(1) / "rows.jsonl"
    rows.chmod(0o644)
    text = rows.read_text()
    digest = json.loads(text.splitlines()[0])["latents_key"]
    rows.write_text(text.replace(digest, "0" * 64))  # nothing but the marker's digest tells
    with pytest.raises(
        ArtifactError, match=r"part-000001: member 'rows.jsonl' has the right size and other content"
    ):
        merge_parts(resolved(root, data, assets))


def test_a_wrong_reuse_leaves_nothing_behind(data, assets, tmp_path):
    with pytest.raises(ConfigError, match=r"preencode\.reuse"):
        preencode(resolved(tmp_path / "g", data, assets, preencode__reuse=[str(tmp_path / "none")]))
    assert not (tmp_path / "g").exists()
