"""What a case of bad input is, and the small world it spoils: a data set, a run, a latent generation, ways to damage them."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from solarwm_lib import artifacts
from solarwm_lib.data.camera import npz_bytes
from solarwm_lib.data.index import Row, read_index
from solarwm_lib.data.shards import ShardReader, ShardWriter
from solarwm_lib.data.writer import SCHEMA, SPLITS

Rows = list[dict[str, Any]]
CHECKPOINT = "checkpoint_model_000002"
# Whole videos are encoded: a clip that could start in several places is no stored clip.
LATENTS = {"data__random_start": False, "data__pixel_frames": 9}
SHARD = "shards/train-000000.tar"
# What may stay of a refused command: finished parts of a generation, but no index; the folder of a cache.
PARTS, CACHE = r"more(/shards(/part-.*)?)?", "cache(/.*)?"


def same(value: Any) -> Any:
    """Return what is given: the content that a case leaves alone."""
    return value


@dataclass(frozen=True)
class Bench:
    """A private folder with everything a case needs: the tiny world, a run trained for two steps, its frozen plan."""

    path: Path
    world: Any  # tinyworld.TinyWorld

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def latents(self) -> Path:
        """A latent generation of two parts."""
        return self.path / "latents"

    def config(self, name: str = "run", /, **changes: Any) -> list[str]:
        """`--config FILE` of a run that writes to `name`."""
        file = self.path / f"{name}.json"
        file.write_text(json.dumps(self.world.values(self.path / name, **changes)))
        return ["--config", str(file)]

    def text(self, content: str) -> list[str]:
        file = self.path / "run.yaml"
        file.write_text(content)
        return ["--config", str(file)]

    def infer(self, checkpoint: Path) -> list[str]:
        values = self.world.values(self.path / "out", action="infer", checkpoint={"path": str(checkpoint)})
        for key in ("micro_batch_size", "max_steps", "optimizer", "ema"):
            del values["train"][key]
        file = self.path / "infer.json"
        file.write_text(json.dumps(values))
        return ["infer", "--config", str(file)]

    def damaged(self, member: str) -> Path:
        """The checkpoint with one flipped bit in the middle of `member`."""
        path = self.run / CHECKPOINT / member
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        return self.run / CHECKPOINT

    def dataset(
        self,
        edit: Callable[[Rows], Any] = same,
        camera: Callable[[np.ndarray], Any] = same,
        video: Callable[[bytes], bytes] = same,
        manifest: Callable[[dict[str, Any]], Any] = same,
        name: str = "data",
    ) -> Path:
        """The tiny data set published again, one shard per split, with other cameras (an array or a whole file), videos and
        manifests, then with edited index rows."""
        source, target = self.world.dataset, self.path / name
        reader = ShardReader(source)
        with artifacts.Transaction(target, SCHEMA, {"name": "edited"}) as transaction:
            for split in SPLITS:
                shard = f"shards/{split}-000000.tar"
                samples = []
                for row in read_index(source / f"{split}-index.jsonl"):
                    stored = reader.read_many(row, row.members or ())
                    stored[row.camera_member] = _camera_file(camera(c2w_of(stored[row.camera_member])))
                    stored[row.video_member] = video(stored[row.video_member])
                    stored[row.manifest_member] = _edited(stored[row.manifest_member], manifest)
                    samples.append((row, stored))
                with transaction.open(shard) as stream:
                    rows = _write_shard(stream, shard, samples)
                edit(rows)
                transaction.write_text(f"{split}-index.jsonl", lines(rows))
        reader.close()
        return target

    def generation(
        self,
        edit: Callable[[Rows], Any] = same,
        tensors: Callable[[bytes], bytes] = same,
        block: Callable[[dict[str, Any]], Any] = same,
        contract: Callable[[dict[str, Any]], Any] = same,
    ) -> Path:
        """The stored latents published again in one shard per split: other tensor files, `preencoding` blocks, rows and
        encoder contract. The block's digest of the tensors is kept true."""
        source, target = self.latents, self.path / "stored"
        (target / "shards/part-000000").mkdir(parents=True)
        reader = ShardReader(source)
        with artifacts.Transaction(target / "index", "solarwm.latents.index.v1", {"name": "edited"}) as index:
            for split in SPLITS:
                shard, samples = f"shards/part-000000/{split}.tar", []
                for row in read_index(source / f"index/{split}-index.jsonl"):
                    stored = reader.read_many(row, row.members or ())
                    content = stored[row.preencoded_member] = tensors(stored[row.preencoded_member])
                    manifest = json.loads(stored[row.manifest_member])
                    manifest["preencoding"]["tensors_digest"] = hashlib.sha256(content).hexdigest()
                    block(manifest["preencoding"])
                    stored[row.manifest_member] = json.dumps(manifest).encode()
                    samples.append((row, stored))
                with (target / shard).open("wb") as stream:
                    rows = _write_shard(stream, shard, samples)
                edit(rows)
                index.write_text(f"{split}-index.jsonl", lines(rows))
            values = json.loads((source / "index/encoder-contract.json").read_bytes())
            contract(values)
            index.write_json("encoder-contract.json", values)
        reader.close()
        return target

    def on(self, dataset: Path, **changes: Any) -> list[str]:
        """`--config FILE` of a new run over `dataset`."""
        return self.config("new", data__root=str(dataset), **changes)

    def stored(self, latents: Path, **changes: Any) -> list[str]:
        """`--config FILE` of a new run over stored latents."""
        return self.config(
            "new",
            **{**LATENTS, "data__encoding": "preencoded", "data__latents_root": str(latents), **changes},
        )

    def preencode(self, output: Path, **changes: Any) -> list[str]:
        """`--config FILE` that encodes a generation at `output`."""
        values = self.world.values(output, action="preencode", **{**LATENTS, **changes})
        for section in ("train", "validation", "checkpoint"):
            del values[section]
        values["preencode"] = {"generation_id": "tiny", "parts": 2} | values.get("preencode", {})
        file = self.path / "preencode.json"
        file.write_text(json.dumps(values))
        return ["--config", str(file)]


def c2w_of(data: bytes) -> np.ndarray:
    """The array of a camera file."""
    with np.load(io.BytesIO(data)) as archive:
        return archive["c2w"].copy()


def lines(rows: Rows) -> str:
    """Rows as JSON Lines."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _camera_file(camera: Any) -> bytes:
    return camera if isinstance(camera, bytes) else npz_bytes(c2w=camera)


def _edited(manifest: bytes, edit: Callable[[dict[str, Any]], Any]) -> bytes:
    values = json.loads(manifest)
    replaced = edit(values)
    return replaced if isinstance(replaced, bytes) else json.dumps(values).encode()


def _write_shard(stream: Any, name: str, samples: Iterable[tuple[Row, dict[str, bytes]]]) -> Rows:
    """Write members and return the rows that record them."""
    writer, rows = ShardWriter(stream), []
    for row, stored in samples:
        members = {member: writer.add(member, data).model_dump() for member, data in stored.items()}
        rows.append(row.model_dump(exclude_none=True) | {"members": members})
    size, digest = writer.finish()
    for row in rows:
        row.pop("shard_md5_b64", None)
        row |= {"shard": name, "shard_size": size, "shard_digest": digest}
    return rows


def entries(shard: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    """The members of a tar."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as archive:
        return [(info, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]


def tar(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """A tar of these members."""
    stream = io.BytesIO()
    for info, data in members:
        stream.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
    return stream.getvalue() + bytes(1024)


@dataclass(frozen=True)
class Case:
    """One kind of bad input. `prepare` spoils the bench and returns the words after `solarwm`."""

    wrong: str
    message: str
    code: int
    prepare: Callable[[Bench], Sequence[str]] = field(repr=False)
    early: bool = False  # refused by numbers and names alone: no torch, under a second
    records: bool = False  # found while running: the launch records stay, no result does
    leaves: str = ""  # what stays beside that, as a regular expression
    environment: tuple[tuple[str, str], ...] = ()
    secret: str = ""  # must not be printed
    absent: str = ""  # a package that is not installed, for early cases

    @property
    def pattern(self) -> str:
        """Regular expression of the whole line on standard error."""
        return "solarwm: error: " + ".+".join(re.escape(part) for part in self.message.split("…"))


Prepare = Callable[[Bench], list[str]]


def met_by(bench: Bench, command: str, dataset: Path) -> list[str]:
    """The words of a command that meets a spoiled data set."""
    if command == "inspect":
        return ["data", "inspect", str(dataset / "train-index.jsonl")]
    words = [command, *bench.on(dataset)]
    return words if command == "train" else [*words, "--out", str(bench.path / "out")]


def rows(edit: Callable[[Rows], Any], command: str = "train") -> Prepare:
    """Edited index rows."""
    return lambda bench: met_by(bench, command, bench.dataset(edit))


def first(**fields: Any) -> Prepare:
    """Fields of the first row, met by `data inspect`."""
    return rows(lambda rows: rows[0].update(fields), "inspect")
