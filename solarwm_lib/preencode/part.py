"""One part of a latent generation: a slice of the source rows, encoded or copied, published as one artifact.

Parts know nothing of each other. What was finished is never redone: a part whose payload is there, of the same identity,
only has its marker issued again.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact, Transaction, reissue
from solarwm_lib.data.camera import CameraGuardError
from solarwm_lib.data.failures import CAMERA_GUARD
from solarwm_lib.data.index import index_bytes
from solarwm_lib.preencode.pack import LatentShards
from solarwm_lib.preencode.reuse import Reuse
from solarwm_lib.preencode.source import Item, RawBytes, SourceRows
from solarwm_lib.runtime.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from solarwm_lib.config.load import Resolved
    from solarwm_lib.data.video import Frames
    from solarwm_lib.preencode.encode import ClipEncoder

SCHEMA = "solarwm.latents.part.v1"
ROWS, SUMMARY, CONTRACT = "rows.jsonl", "summary.json", "encoder-contract.json"
PROMPTS_KEPT = 64  # windows of one clip, and whole data sets of one room, share a caption
T = TypeVar("T")
R = TypeVar("R")


def part_name(part: int) -> str:
    """Where a part lies below its generation, `shards/part-000003`."""
    return f"shards/part-{part:06d}"


def part_rows(part: int, parts: int, total: int) -> tuple[int, int]:
    """The source rows [first, stop) of a part; parts differ by at most one row."""
    return part * total // parts, (part + 1) * total // parts


def preencode(resolved: Resolved) -> Artifact:
    """Encode every part of a generation in this process and publish its index, below `runtime.output_dir`."""
    from solarwm_lib.preencode.merge import merge_parts

    root, job = Path(resolved.config.runtime.output_dir), _Job(resolved)
    try:
        for part in range(job.parts):
            _preencode_part(job, part, root / part_name(part))
    finally:
        job.close()
    return merge_parts(resolved)


def preencode_part(resolved: Resolved, part: int, out: str | Path) -> Artifact:
    """Publish part `part` at `out`, which must be `GENERATION/shards/part-NNNNNN`: rows name their shards that way.

    Members: samples-NNNNN.tar, rows.jsonl, encoder-contract.json, summary.json. A clip whose camera leaves the guards is
    left out and listed in the summary; any other failure raises (DataError, NonFiniteError), and nothing is published.
    """
    _check_place(resolved, part, Path(out))
    job = _Job(resolved)
    try:
        return _preencode_part(job, part, Path(out))
    finally:
        job.close()


class _Job:
    """What all parts share: the rows, the raw bytes and the encoder of one configuration."""

    def __init__(self, resolved: Resolved) -> None:
        from solarwm_lib.preencode.encode import encoder_for

        settings = resolved.config.preencode
        assert settings is not None  # `rules.check` refuses action preencode without the section
        self.resolved, self.settings, self.parts = resolved, settings, settings.parts
        self.assets = artifacts.read(resolved.config.model.base_path)
        self.rows = SourceRows(resolved)
        self.raw = RawBytes(resolved)
        self.encoder: ClipEncoder = encoder_for(resolved)
        self.prompts: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def items(self, part: int) -> list[Item]:
        first, stop = part_rows(part, self.parts, len(self.rows))
        return [self.raw.item(*row, encoder=self.encoder) for row in self.rows.rows(first, stop)]

    def close(self) -> None:
        self.raw.close()
        self.rows.close()


def _check_place(resolved: Resolved, part: int, out: Path) -> None:
    """Raise ConfigError for a part that there is not, or one at another place; before any weight is hashed."""
    settings = resolved.config.preencode
    assert settings is not None  # `rules.check` refuses action preencode without the section
    if not 0 <= part < settings.parts:
        raise ConfigError(
            f"--part: found {part}, expected 0 to {settings.parts - 1} for preencode.parts {settings.parts}"
        )
    expected = Path(part_name(part))
    if out.parts[-2:] != expected.parts:
        raise ConfigError(
            f"--out: found {out}, expected a path that ends in {expected}; rows name their shards relative to the generation"
        )


def _preencode_part(job: _Job, part: int, out: Path) -> Artifact:
    if part == 0:
        # One job looks at both indexes, before all of them have encoded what the merge would refuse.
        job.rows.check_splits()
    items = job.items(part)
    identity = _identity(job, part, items)
    if (existing := reissue(out, SCHEMA, identity)) is not None:
        return existing
    settings, contract = job.settings, job.encoder.contract
    parents = [job.rows.artifact, job.assets]
    size = len(items) * contract.sample_bytes
    with (
        closing(_reuse(job, items)) as reuse,
        Transaction(out, SCHEMA, identity, parents, expected_bytes=size) as transaction,
    ):
        shards = LatentShards(
            transaction,
            part_name(part),
            contract,
            str(settings.latent_schema),
            # As many shards as needed, of nearly equal length: a short last one would be read out of proportion.
            max_samples=_even(len(items), settings.shard_max_samples),
            max_bytes=settings.shard_max_bytes,
        )
        summary = _fill(job, part, items, shards, reuse)
        transaction.write_bytes(ROWS, index_bytes(shards.finish()))
        transaction.write_json(CONTRACT, contract.values())
        transaction.write_json(SUMMARY, summary)
    return transaction.artifact


def _even(samples: int, most: int) -> int:
    """Samples per shard when `samples` fill as few shards as `most` allows."""
    return math.ceil(samples / max(1, math.ceil(samples / most)))


def _identity(job: _Job, part: int, items: Sequence[Item]) -> dict[str, Any]:
    """What decides a part's samples: contents by digest, never by path, nor how many lie in a shard."""
    content = hashlib.sha256()
    for item in items:
        content.update(item.content().encode())
    data = job.resolved.config.data
    camera = (
        "camera_array_key",
        "camera_axes",
        "camera_scale",
        "max_relative_translation",
        "max_camera_absolute",
    )
    return {
        "encoder_contract": job.encoder.contract.digest,
        "content": content.hexdigest(),
        "rows": list(part_rows(part, job.parts, len(job.rows))),
        "part": part,
        "parts": job.parts,
        "camera": {name: getattr(data, name) for name in camera},
    }


@dataclass(frozen=True)
class _Loaded:
    """An item's bytes: the camera file and manifest, and the frames unless its latents are at hand."""

    camera: bytes
    manifest: Mapping[str, Any]
    frames: Frames | None


def _reuse(job: _Job, items: Sequence[Item]) -> Reuse:
    """Return what earlier generations hold of these items."""
    return Reuse(
        job.settings.reuse, {item.latents_key for item in items}, {item.prompt_key for item in items}
    )


def _fill(job: _Job, part: int, items: Sequence[Item], shards: LatentShards, reuse: Reuse) -> dict[str, Any]:
    """Write the samples of `items` into `shards` and return the part's summary."""
    counts = dict.fromkeys(("encoded", "reused", "latents_reused", "prompts_reused"), 0)
    excluded: list[dict[str, Any]] = []

    def load(item: Item) -> _Loaded | CameraGuardError:
        manifest = job.raw.manifest(item.row)
        try:
            camera = job.raw.camera(item, manifest)
        except CameraGuardError as error:
            return error
        return _Loaded(
            camera, manifest, None if reuse.has_latents(item.latents_key) else job.raw.frames(item)
        )

    bar = tqdm(
        total=len(items),
        desc=f"preencode part {part} of {job.parts}",
        unit="clip",
        disable=not job.resolved.config.runtime.progress,
    )
    with bar:
        for item, loaded in _ahead(load, items, job.resolved.config.data.num_workers):
            if isinstance(loaded, CameraGuardError):
                excluded.append(
                    {
                        "ordinal": item.ordinal,
                        "sample_id": item.window.sample_id,
                        "reason": CAMERA_GUARD,
                        "message": str(loaded),
                    }
                )
            else:
                tensors, copied = _tensors(job, item, loaded, reuse)
                shards.add(item, tensors, loaded.camera, loaded.manifest)
                counts["latents_reused"] += copied[0]
                counts["prompts_reused"] += copied[1]
                counts["reused" if all(copied) else "encoded"] += 1
            bar.update()
    first, stop = part_rows(part, job.parts, len(job.rows))
    return {
        **counts,
        "excluded": excluded,
        "part": part,
        "parts": job.parts,
        "rows": [first, stop],
        "source": job.rows.facts(),
        "shards": {
            "max_samples": job.settings.shard_max_samples,
            "max_bytes": job.settings.shard_max_bytes,
        },
        "encoder_contract_digest": job.encoder.contract.digest,
    }


def _tensors(
    job: _Job, item: Item, loaded: _Loaded, reuse: Reuse
) -> tuple[dict[str, Tensor], tuple[bool, bool]]:
    """Return an item's tensors, and whether those of pixels and of the caption were copied from another generation."""
    encoder = job.encoder
    pixel_names = encoder.pixel_tensors
    prompt_names = [spec.name for spec in encoder.contract.stored if spec.name not in pixel_names]
    if loaded.frames is None:
        pixels = reuse.latents(item.latents_key, pixel_names)
    else:
        pixels = encoder.encode_pixels(loaded.frames)
    copied = reuse.has_prompt(item.prompt_key)
    prompt = job.prompts.pop(item.prompt_key, None)
    if prompt is None:
        prompt = (
            reuse.prompt(item.prompt_key, prompt_names) if copied else encoder.encode_prompt(item.caption)
        )
    job.prompts[item.prompt_key] = prompt
    if len(job.prompts) > PROMPTS_KEPT:
        job.prompts.popitem(last=False)
    return pixels | prompt, (loaded.frames is None, copied)


def _ahead(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[tuple[T, R]]:
    """Yield (item, function(item)) in order, computing up to `workers` items ahead in threads."""
    if not workers:
        yield from ((item, function(item)) for item in items)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="clips")
    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            pending.append((item, pool.submit(function, item)))
            if len(pending) > workers:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
