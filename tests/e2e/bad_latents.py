"""The table of bad input: windows, preencoding, stored latents; see `bad_input.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bad_bench import PARTS, Bench, Case, Prepare, Rows

from solarwm_lib import artifacts
from solarwm_lib.data.index import read_index
from solarwm_lib.preencode.contract import EncoderContract

PART = "shards/part-000001"
LATENT_SCHEMA = "solarwm.wan22_ti2v_5b.32p.5f.v1"


def _windows(bench: Bench, *words: str, data: Path | None = None) -> list[str]:
    source, out = str(data or bench.world.dataset), str(bench.path / "windows")
    return ["data", "materialize-windows", "--data", source, "--out", out, *words]


def windows(*words: str) -> Prepare:
    """Windows of the tiny data set."""
    return lambda bench: _windows(bench, *words)


def _windows_of(edit: Callable[[Rows], Any]) -> Prepare:
    return lambda bench: _windows(
        bench, "--profile", "spread", "--pixel-frames", "5", data=bench.dataset(edit)
    )


def _windows_of_windows(bench: Bench) -> list[str]:
    from solarwm_lib.data.windows import materialize_windows

    materialize_windows(bench.world.dataset, "spread", bench.path / "w", pixel_frames=5)
    return _windows(bench, "--profile", "spread", "--pixel-frames", "5", data=bench.path / "w")


def _other_windows(bench: Bench) -> list[str]:
    from solarwm_lib.data.windows import materialize_windows

    materialize_windows(bench.world.dataset, "hashed", bench.path / "windows", pixel_frames=5)
    return _windows(bench, "--profile", "spread", "--pixel-frames", "5")


def _join(bench: Bench, windows: Path, **others: Path) -> list[str]:
    paths = {
        "train": bench.world.dataset / "train-index.jsonl",
        "test": bench.world.dataset / "test-index.jsonl",
    } | others
    words = ["data", "materialize-wan153f", "--output", str(bench.path / "joined.jsonl.gz")]
    for split in ("train", "test"):
        words += [f"--{split}-index", str(paths[split]), f"--{split}-window-index", str(windows)]
    return words


def _no_windows(bench: Bench) -> list[str]:
    return _join(bench, bench.world.dataset / "train-index.jsonl")


def _shared_source(bench: Bench) -> list[str]:
    index = bench.dataset(lambda rows: [row.pop("split") for row in rows]) / "train-index.jsonl"
    return _join(bench, index, train=index, test=index)


def _join_twice(bench: Bench) -> list[str]:
    (bench.path / "joined.jsonl.gz").write_bytes(b"")
    return _join(bench, bench.world.dataset / "train-index.jsonl")


def stored(command: str = "train", change: dict[str, Any] | None = None, **edits: Any) -> Prepare:
    """An edited generation, met by a run."""

    def prepare(bench: Bench) -> list[str]:
        return [command, *bench.stored(bench.generation(**edits), **(change or {}))]

    return prepare


def _row(**fields: Any) -> Callable[[Rows], None]:
    return lambda rows: [row.update(fields) for row in rows] and None


def _block(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda block: block.update(fields)


def _value(number: float) -> Callable[[bytes], bytes]:
    """The tensors with another last value."""

    def change(content: bytes) -> bytes:
        return content[:-4] + np.array([number], "<f4").tobytes()

    return change


def _other_encoder(bench: Bench) -> list[str]:
    """A generation that is right in itself, made by another codec."""
    values = json.loads((bench.latents / "index/encoder-contract.json").read_bytes())
    values["extras"]["codec"] = "0" * 64
    digest = EncoderContract.from_values(values, "contract").digest
    fields = {"encoder_contract_digest": digest}
    latents = bench.generation(
        _row(**fields), block=_block(**fields), contract=lambda contract: contract.update(values)
    )
    return ["train", *bench.stored(latents)]


def _without_index(bench: Bench) -> list[str]:
    shutil.rmtree(bench.latents / "index")
    return ["train", *bench.stored(bench.latents)]


def _without_contract(bench: Bench) -> list[str]:
    (bench.latents / "index/encoder-contract.json").unlink()
    return ["train", *bench.stored(bench.latents)]


def _cut_latents(bench: Bench) -> list[str]:
    shard = bench.latents / PART / "samples-00000.tar"
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-512])
    return ["train", *bench.stored(bench.latents)]


def _flipped_latents(bench: Bench) -> list[str]:
    row = read_index(bench.latents / "index/train-index.jsonl")[0]
    shard = bench.latents / row.shard
    data = bytearray(shard.read_bytes())
    data[row.members[row.preencoded_member].offset + 2000] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    return ["train", *bench.stored(bench.latents)]


def _raw_index(bench: Bench) -> list[str]:
    target = bench.path / "raw/index"
    with artifacts.Transaction(target, "solarwm.latents.index.v1", {"name": "raw"}) as index:
        index.write_bytes("train-index.jsonl", (bench.world.dataset / "train-index.jsonl").read_bytes())
        index.write_bytes(
            "encoder-contract.json", (bench.latents / "index/encoder-contract.json").read_bytes()
        )
    return ["train", *bench.stored(bench.path / "raw")]


def _latents_as_clips(bench: Bench) -> list[str]:
    target = bench.path / "data"
    with artifacts.Transaction(target, "solarwm.dataset.raw.v1", {"name": "latents"}) as transaction:
        for split in ("train", "test"):
            transaction.write_bytes(
                f"{split}-index.jsonl", (bench.latents / f"index/{split}-index.jsonl").read_bytes()
            )
    return ["train", *bench.on(target, data__random_start=False, data__transport__root=str(bench.latents))]


def preencode(*words: str, **changes: Any) -> Prepare:
    """The tiny data set encoded into a new generation."""
    return lambda bench: [
        "preencode",
        *bench.preencode(bench.path / "more", **changes),
        *_placed(bench, words),
    ]


def _placed(bench: Bench, words: tuple[str, ...]) -> list[str]:
    return [word.replace("BENCH", str(bench.path)) for word in words]


def _other_family(bench: Bench) -> list[str]:
    changes = {
        "model.family": "ltx25_video",
        "model.architecture": "ltx25-22b",
        "model.text_length": 1024,
        "data.pixel_frames": 9,
        "data.height": 64,
        "data.width": 64,
        "preencode.latent_schema": "ltx",
    }
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return ["preencode", *bench.preencode(bench.path / "more"), *sets]


def merge(damage: Callable[[Bench], Any] = lambda bench: None, **changes: Any) -> Prepare:
    """The parts of the stored generation merged again, after some damage."""

    def prepare(bench: Bench) -> list[str]:
        shutil.rmtree(bench.latents / "index")
        damage(bench)
        return ["merge-latents", *bench.preencode(bench.latents, **changes)]

    return prepare


def _foreign_part(bench: Bench) -> None:
    from solarwm_lib.config.load import resolve_values
    from solarwm_lib.preencode.part import preencode_part

    bench.preencode(bench.path / "other", preencode__dtype="float32")
    values = json.loads((bench.path / "preencode.json").read_text())
    preencode_part(resolve_values(values), 1, bench.path / "other" / PART)
    shutil.rmtree(bench.latents / PART)
    (bench.path / "other" / PART).rename(bench.latents / PART)


def _flipped_rows(bench: Bench) -> None:
    rows = bench.latents / PART / "rows.jsonl"
    rows.chmod(0o644)
    rows.write_bytes(rows.read_bytes().replace(b"tiny/", b"tinY/"))


def _other_part(bench: Bench) -> list[str]:
    """A part of another caption where one was already published."""
    dataset = bench.dataset(_row(caption="another room"))
    words = bench.preencode(bench.latents, data__root=str(dataset))
    return ["preencode", *words, "--part", "1", "--out", str(bench.latents / PART)]


def _changed_source(bench: Bench) -> list[str]:
    shutil.rmtree(bench.latents / "index")
    dataset = bench.dataset(_row(caption="another room"))
    return ["merge-latents", *bench.preencode(bench.latents, data__root=str(dataset))]


def _encode(dataset: Callable[[Bench], Path], **changes: Any) -> Prepare:
    return lambda bench: [
        "preencode",
        *bench.preencode(bench.path / "more", data__root=str(dataset(bench)), **changes),
    ]


def _far(c2w: np.ndarray) -> np.ndarray:
    c2w[:, 0, 3] += 100 * np.arange(len(c2w))
    return c2w


CASES: tuple[Case, ...] = (
    # windows
    Case("clip shorter than a window", "sample 'tiny/train-000000': video has 9 frames, a window spans 10 source "
         "frames; use a smaller --pixel-frames or remove the row", 3, windows("--profile", "spread", "--pixel-frames", "10")),
    Case("clip shorter than a resampled window", "sample 'tiny/train-000000': video has 9 frames, a window spans 17 "
         "source frames; use a smaller --pixel-frames or remove the row", 3, windows("--profile", "spread", "--pixel-frames", "9", "--fps", "8")),
    Case("window longer than any video", "sample 'tiny/train-000000': video has 9 frames, a window spans 7999999999 "
         "source frames; use a smaller --pixel-frames or remove the row", 3, windows("--profile", "hashed", "--pixel-frames", str(4 * 10**9), "--fps", "8")),
    Case("windows of windows", "sample 'tiny/train-000000/latent-5f-w00': is a window already; give the raw data "
         "set that it was cut from", 3, _windows_of_windows),
    Case("windows of stored latents", "sample 'tiny/train-000000/latent-9f-w00': a row of stored latents, expected "
         "raw clips; give a raw data set or index", 3,
         lambda bench: _windows(bench, "--profile", "spread", "--pixel-frames", "5", data=bench.latents / "index")),
    Case("windows of what is no data set", "data.root: …/absent: does not exist (no COMPLETE.json); nothing beside "
         "it is complete; rebuild the data set or change data.root", 3,
         lambda bench: _windows(bench, "--profile", "spread", "--pixel-frames", "5", data=bench.path / "absent")),
    Case("windows without frames", "--pixel-frames: found 0, expected 1 or more", 2, windows("--profile", "spread", "--pixel-frames", "0")),
    Case("windows at no frame rate", "--fps: found nan, expected a positive number of frames per second", 2, windows("--profile", "spread", "--pixel-frames", "5", "--fps", "nan")),
    Case("wan_153f of another length", "profile wan_153f has windows of 153 pixel frames, found 5; use that length, "
         "or profile spread or hashed", 2, windows("--profile", "wan_153f", "--pixel-frames", "5")),
    Case("windows of another profile are there", "…/windows: holds another identity (profile: found \"hashed\", "
         "wanted \"spread\"); it is never overwritten: use another name or remove it", 4, _other_windows),
    Case("row of the other split", "sample 'tiny/train-000000': field 'split' is 'test' in the train index; a row "
         "lies in the index of its split", 3, _windows_of(_row(split="test"))),
    Case("window without frame count", "sample 'tiny/train-000000': field 'num_frames' is absent, expected the "
         "decoded frame count", 3, _windows_of(lambda rows: rows[0].pop("num_frames"))),
    Case("window index is missing", "--train-window-index: …/absent.jsonl: is not a file; give the published window "
         "index", 3, lambda bench: _join(bench, bench.path / "absent.jsonl")),
    Case("window index has other rows", "…/train-index.jsonl line 1: field 'sample_id' is 'tiny/train-000000', "
         "expected SOURCE/latent-153f-wNN", 3, _no_windows),
    Case("a source in both raw indexes", "sample 'tiny/train-000000': in both raw indexes, expected in one; splits "
         "may not share a source", 3, _shared_source),
    Case("joined index is there", "…/joined.jsonl.gz: exists and is never overwritten; use another name or remove it", 4, _join_twice),
    Case("window of another length, encoding", "sample 'tiny/a/latent-5f-w00': window of 5 frames, "
         "data.pixel_frames is 9; make windows of that length (`solarwm data materialize-windows "
         "--pixel-frames 9`)", 3,
         _encode(lambda bench: bench.dataset(lambda rows: rows[0].update(sample_id="tiny/a/latent-5f-w00")))),
    # preencoding
    Case("preencode without its section", "…/preencode.json: preencode: not set; add preencode.generation_id", 2,
         lambda bench: ["preencode", *bench.preencode(bench.path / "more"), "--set", "preencode=null"]),
    Case("preencode a training configuration", "…/new.json: action is 'train', but the command is `solarwm "
         "preencode`; use `solarwm train` or change the key `action`", 2, lambda bench: ["preencode", *bench.config("new")]),
    Case("part without its folder", "preencode: give --part and --out together, or neither to encode everything", 2, preencode("--part", "0")),
    Case("part beyond the last", "--part: found 2, expected 0 to 1 for preencode.parts 2", 2, preencode("--part", "2", "--out", "BENCH/more/shards/part-000002")),
    Case("part at another place", "--out: found …/more/one, expected a path that ends in shards/part-000001; rows "
         "name their shards relative to the generation", 2, preencode("--part", "1", "--out", "BENCH/more/one")),
    Case("part of other content is there", "…/latents/shards/part-000001: holds another identity (content: found "
         "\"…\", wanted \"…\"); it is never overwritten: use another name or remove it", 4, _other_part),
    Case("random starts while encoding", "…/preencode.json: data.random_start: found true, expected false: latents "
         "are encoded from the starts in the index", 2, preencode("--set", "data.random_start=true")),
    Case("layout of another geometry", "…/preencode.json: preencode.latent_schema: found "
         "solarwm.wan22_ti2v_5b.32p.5f.v1, expected solarwm.wan22_ti2v_5b.32p.9f.v1 for data.height 32 and "
         "data.pixel_frames 9; remove it, it follows from them", 2, preencode(preencode__latent_schema=LATENT_SCHEMA)),
    Case("family that cannot be encoded yet", "model.family: found ltx25_video, whose clips this version cannot "
         "preencode; known: wan22_ti2v_5b, wan22_i2v_a14b", 2, _other_family),
    Case("reuse of what is no generation", "preencode.reuse: /absent/index: does not exist (no COMPLETE.json); "
         "nothing beside it is complete; give the folder of a merged latent generation", 2, preencode(preencode__reuse=["/absent"])),
    Case("clip longer than its video, encoding", "sample 'tiny/train-000000': video has 9 frames, the clip needs "
         "source frames 0 to 12; make windows of this length and rate, or lower data.pixel_frames", 3, preencode(data__pixel_frames=13)),
    Case("start too late, encoding", "sample 'tiny/train-000000': video has 9 frames, the clip needs source frames "
         "7 to 15; make windows of this length and rate, or lower data.pixel_frames", 3, _encode(lambda bench: bench.dataset(lambda rows: rows[0].update(start_frame=7)))),
    Case("clip without a start, encoding", "sample 'tiny/train-000000': video has 9 frames, the clip spans 5 and the index "
         "states no start_frame; cut the videos into windows (`solarwm data materialize-windows`), or state start_frame", 3,
         preencode(data__pixel_frames=5)),
    Case("broken video, encoding", "sample 'tiny/train-000000': not a readable video (Invalid data found when "
         "processing input); re-encode it or remove the clip", 3, _encode(lambda bench: bench.dataset(video=lambda data: b"not a video")), leaves=PARTS),
    Case("caption is missing, encoding", "sample 'tiny/train-000000': no caption in the row and no prompt.text in "
         "the manifest; write one, it may be empty", 3, _encode(lambda bench: bench.dataset(
        lambda rows: [row.pop("caption") for row in rows], manifest=lambda manifest: manifest.pop("prompt") and None))),
    Case("every clip leaves the guards, encoding", "latents: every train clip is excluded (sample "
         "'tiny/train-000000': translation … at pixel frame … exceeds data.max_relative_translation = 20 "
         "within the first 10 s, ...); raise data.max_relative_translation or data.max_camera_absolute, or "
         "clean the index", 3, _encode(lambda bench: bench.dataset(camera=_far)), leaves=PARTS),
    Case("a source in both splits", "sample 'tiny/both/latent-9f-w00': its source 'tiny/both' is in both splits, "
         "expected in one; remove it from one index", 3, _encode(lambda bench: bench.dataset(
        lambda rows: rows[0].update(sample_id="tiny/both", key="both")))),
    # merging
    Case("part is missing", "…/latents/shards/part-000001: does not exist (no COMPLETE.json); complete beside it: "
         "part-000000", 4, merge(lambda bench: shutil.rmtree(bench.latents / PART))),
    Case("part without its marker", "…/latents/shards/part-000001: is not complete (no COMPLETE.json); complete "
         "beside it: part-000000", 4, merge(lambda bench: (bench.latents / PART / artifacts.MARKER).unlink())),
    Case("part of another encoder", "…/latents/shards/part-000001: encoder contract … differs from … of "
         "part-000000; all parts need one codec, text encoder and geometry, make the odd one again", 4, merge(_foreign_part)),
    Case("part of another number of parts", "…/latents/shards/part-000000: not part 0 of 1 over 8 source rows "
         "(parts: found 2, wanted 1; rows: found [0, 4], wanted [0, 8]); restore preencode.parts and the "
         "index it was made with, or remove it and make it again", 4, merge(preencode__parts=1)),
    Case("rows of a part are damaged", "…/latents/shards/part-000001: member 'rows.jsonl' has the right size and "
         "other content (sha256 …, expected …); it is damaged, restore a copy", 4, merge(_flipped_rows)),
    Case("source changed after encoding", "shards/part-000000/samples-00000.tar: sample "
         "'tiny/train-000000/latent-9f-w00' is not that of the source row (camera_sidecar_digest: found \"…\", "
         "wanted \"…\"; caption: found …, wanted \"another room\"); the index changed since the part was made, "
         "remove the part and make it again", 4, _changed_source),
    # stored latents
    Case("generation is missing", "data.latents_root: …/absent/index: does not exist (no COMPLETE.json); nothing "
         "beside it is complete; run `solarwm preencode` and `solarwm merge-latents`, or change "
         "data.latents_root", 3, lambda bench: ["train", *bench.stored(bench.path / "absent")]),
    Case("generation was not merged", "data.latents_root: …/latents/index: does not exist (no COMPLETE.json); "
         "nothing beside it is complete; run `solarwm preencode` and `solarwm merge-latents`, or change "
         "data.latents_root", 3, _without_index, early=True),
    Case("contract is missing", "data.latents_root: …/latents/index: member 'encoder-contract.json' is missing (No "
         "such file or directory); run `solarwm preencode` and `solarwm merge-latents`, or change "
         "data.latents_root", 3, _without_contract, early=True),
    Case("latents_root is not set", "…/new.json: data.latents_root: not set; data.encoding preencoded trains from "
         "the latent generation there", 2, lambda bench: ["train", *bench.config("new", data__encoding="preencoded")], early=True),
    Case("random starts of stored latents", "…/new.json: data.random_start: found true, expected false: stored "
         "latents have fixed starts", 2, lambda bench: [
        "train", *bench.stored(bench.latents, data__random_start=True)], early=True),
    Case("raw clips as latents", "sample 'tiny/train-000000': a row of raw clips, expected stored latents; set "
         "data.latents_root to a latent generation or data.encoding to online", 3, _raw_index),
    Case("latents as raw clips", "sample 'tiny/train-000000/latent-9f-w00': a row of stored latents, expected raw "
         "clips; set data.encoding to preencoded and data.latents_root to its generation", 3, _latents_as_clips),
    Case("latents of another resolution", "data.latents_root: data.width: the generation was encoded for 32, this "
         "run needs 64; encode the clips for this configuration or change data.latents_root", 3, lambda bench: ["train", *bench.stored(bench.latents, data__width=64)]),
    Case("latents of another length", "data.latents_root: data.pixel_frames: the generation was encoded for 9, this "
         "run needs 5; encode the clips for this configuration or change data.latents_root", 3, lambda bench: ["train", *bench.stored(bench.latents, data__pixel_frames=5)]),
    Case("latents at another frame rate", "sample 'tiny/train-000000/latent-9f-w00': source_frame_indices are 9 "
         "frames 0, 1 ... 8, expected 9 frames 0, 2 ... 16 for data.pixel_frames 9 at 16 to data.fps 8 "
         "frames/s; the generation was encoded otherwise", 3, lambda bench: ["train", *bench.stored(bench.latents, data__fps=8)]),
    Case("latents of another encoder (launch records stay)", "data.latents_root: the latents were made by codec …, "
         "model.base_path …/assets holds …; encode the clips again or restore the base weights they were made "
         "with", 3, _other_encoder, records=True),
    Case("contract of another generation", "sample 'tiny/train-000000/latent-9f-w00': encoder_contract_digest is …, "
         "encoder-contract.json of the generation has …; index and contract do not belong together, merge "
         "again", 3, stored(contract=lambda values: values["extras"].update(codec="0" * 64))),
    Case("rows of another contract", "sample 'tiny/train-000000/latent-9f-w00': encoder_contract_digest is …, "
         "encoder-contract.json of the generation has …; index and contract do not belong together, merge "
         "again", 3, stored(edit=_row(encoder_contract_digest="0" * 64))),
    Case("row of other frames", "sample 'tiny/train-000000/latent-9f-w00': source_frame_indices are 5 frames 0, 2 "
         "... 8, expected 9 frames 0, 1 ... 8 for data.pixel_frames 9 at 16 to data.fps 16 frames/s; the "
         "generation was encoded otherwise", 3, stored(edit=_row(source_frame_indices=[0, 2, 4, 6, 8]))),
    Case("row starts elsewhere than its frames", "…/stored/index/train-index.jsonl line 1: field 'start_frame': "
         "found 1, source_frame_indices start at 0", 3, stored(edit=_row(start_frame=1))),
    Case("latent shard is cut", "shards/part-000001/samples-00000.tar: shard has … bytes, the index promises "
         "shard_size …; it is truncated or of another build, copy or rebuild it", 3, _cut_latents),
    Case("latent shard is missing", "shards/part-000007/x.tar: shard is missing under data.latents_root …/stored "
         "(sample 'tiny/train-000005/latent-9f-w00')", 3, stored(edit=_row(shard="shards/part-000007/x.tar"))),
    Case("damaged byte in stored latents (launch records stay)", "shards/part-000000/samples-00000.tar member "
         "'samples/…/preencoded.safetensors' of sample 'tiny/train-…/latent-9f-w00': sha256 is …, the index "
         "promises …; the shard is damaged, restore a copy", 3, _flipped_latents, records=True),
    Case("stored file is no safetensors (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': "
         "samples/…/preencoded.safetensors: not a readable safetensors file (a header of … bytes in a file of "
         "100); encode the sample again", 3, stored(tensors=lambda content: b"x" * 100), records=True),
    Case("stored file is cut (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': "
         "samples/…/preencoded.safetensors: not a readable safetensors file ('prompt_embeds' lies at bytes "
         "… to … of …, expected … from …); encode the sample again", 3, stored(tensors=lambda content: content[:-4]), records=True),
    Case("stored NaN (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': "
         "samples/…/preencoded.safetensors: prompt_embeds holds NaN or infinite values; encode the sample "
         "again", 3, stored(tensors=_value(float("nan"))), records=True),
    Case("manifest of other latents (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': manifest "
         "preencoding.tensors_digest is '0…', expected '…'; the sample was encoded otherwise than this run "
         "and its index say, encode it again", 3, stored(block=_block(tensors_digest="0" * 64)), records=True),
    Case("manifest of another geometry (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': manifest "
         "preencoding.target_h is 64, expected 32; the sample was encoded otherwise than this run and its "
         "index say, encode it again", 3, stored(block=_block(target_h=64)), records=True),
    Case("manifest of another layout (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': manifest "
         "preencoding.version is 'x', expected 'solarwm.wan22_ti2v_5b.32p.9f.v1' (data.latent_schema)", 3, stored(block=_block(version="x")), records=True),
    Case("manifest of another window (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': window 1 of 2 at "
         "frame 0 is neither named by the id ('tiny/train-…/latent-9f-w01') nor the hashed window of its "
         "source (frame 0)", 3, stored(block=_block(window_index=1, window_count=2)),
         records=True),
    Case("manifest without block (launch records stay)", "sample 'tiny/train-…/latent-9f-w00': manifest "
         "preencoding.version is None, expected 'solarwm.wan22_ti2v_5b.32p.9f.v1' (data.latent_schema)", 3, stored(block=lambda block: block.clear()), records=True),
)  # fmt: skip
