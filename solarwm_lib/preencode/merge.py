"""The index over all parts of a latent generation: coverage is proved row by row before anything is published."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from solarwm_lib import artifacts
from solarwm_lib.artifacts import Artifact, Transaction, reissue
from solarwm_lib.data.index import Index, LatentRow, RawRow, index_bytes
from solarwm_lib.data.windows import Window, field_of
from solarwm_lib.data.writer import SPLITS
from solarwm_lib.preencode.contract import EncoderContract
from solarwm_lib.preencode.part import CONTRACT, ROWS, SUMMARY, part_name, part_rows
from solarwm_lib.preencode.part import SCHEMA as PART_SCHEMA
from solarwm_lib.preencode.reuse import INDEX_SCHEMA
from solarwm_lib.preencode.source import SourceRows, check_split
from solarwm_lib.runtime.errors import ArtifactError, DataError
from solarwm_lib.runtime.manifests import check_members

if TYPE_CHECKING:
    from solarwm_lib.config.load import Resolved

RECIPE_SCHEMA = "solarwm.latent-generation.v1"
STATS_SCHEMA = "solarwm.latent-stats.v1"


def merge_parts(resolved: Resolved, out: str | Path | None = None) -> Artifact:
    """Publish the index of a generation at `out` (default: `index` below `runtime.output_dir`).

    `out` lies beside `shards/`, whose parts it covers. Members: train-index.jsonl and test-index.jsonl in source order,
    encoder-contract.json, generation.json, stats.json. ArtifactError for a part that is missing, of another encoder or of
    other rows; DataError for a source row that no part covers, or a source clip in both splits. The result depends on the
    parts' rows alone, never on how often or in which order they were made.
    """
    out = Path(out) if out is not None else Path(resolved.config.runtime.output_dir) / "index"
    settings = resolved.config.preencode
    assert settings is not None  # `rules.check` refuses action preencode without the section
    rows = SourceRows(resolved)
    try:
        parts = _read_parts(out.parent, settings.parts, len(rows))
        contract = _common_contract(parts)
        rows_sha256 = [_member(part, ROWS) for part in parts]
        identity = {
            "encoder_contract": contract.digest,
            "rows": hashlib.sha256("\n".join(rows_sha256).encode()).hexdigest(),
            "source": rows.facts(),
        }
        if (existing := reissue(out, INDEX_SCHEMA, identity)) is not None:
            return existing
        parents = [rows.artifact, *parts]
        with Transaction(out, INDEX_SCHEMA, identity, parents) as transaction:
            stats = _Stats()
            _write_indexes(transaction, rows, parts, contract.digest, stats)
            transaction.write_json(CONTRACT, contract.values())
            transaction.write_json("generation.json", _recipe(resolved, contract, rows, rows_sha256, stats))
            transaction.write_json("stats.json", stats.values())
        return transaction.artifact
    finally:
        rows.close()


def _read_parts(root: Path, parts: int, total: int) -> list[Artifact]:
    """Return the artifacts of all parts, in order; ArtifactError for one that is absent or of other rows."""
    found = []
    for part in range(parts):
        artifact = artifacts.read(root / part_name(part), PART_SCHEMA)
        # What is copied into the index is checked to the bit; the shards are when they are read.
        copied = [member for member in artifact.members if member.path in (ROWS, SUMMARY, CONTRACT)]
        check_members(artifact.path, copied, deep=True)
        wanted = {"part": part, "parts": parts, "rows": list(part_rows(part, parts, total))}
        if differences := artifacts.identity_diff(
            {key: artifact.identity.get(key) for key in wanted}, wanted
        ):
            raise ArtifactError(
                f"{artifact.path}: not part {part} of {parts} over {total} source rows ({'; '.join(differences)}); "
                "restore preencode.parts and the index it was made with, or remove it and make it again"
            )
        found.append(artifact)
    return found


def _common_contract(parts: Sequence[Artifact]) -> EncoderContract:
    contracts: list[EncoderContract] = []
    for part in parts:
        path = part.file(CONTRACT)
        contract = EncoderContract.from_values(json.loads(path.read_bytes()), str(path))
        if contract.digest != part.identity.get("encoder_contract"):
            raise ArtifactError(
                f"{path}: is not the encoder contract the part was made under; restore a copy"
            )
        if contracts and contract.digest != contracts[0].digest:
            raise ArtifactError(
                f"{part.path}: encoder contract {contract.digest[:12]} differs from {contracts[0].digest[:12]} of "
                f"{parts[0].path.name}; all parts need one codec, text encoder and geometry, make the odd one again"
            )
        contracts.append(contract)
    return contracts[0]


def _member(artifact: Artifact, name: str) -> str:
    return next(member.sha256 for member in artifact.members if member.path == name)


class _Stats:
    """What a generation holds, counted while its rows pass by."""

    def __init__(self) -> None:
        self.excluded: list[dict[str, Any]] = []
        self._samples: Counter[tuple[str, str]] = Counter()
        self._ids = {split: hashlib.blake2s() for split in SPLITS}
        self._shards: dict[str, int] = {}

    def add(self, split: str, row: LatentRow) -> None:
        self._samples[split, row.dataset or ""] += 1
        self._ids[split].update(f"{row.sample_id}\n".encode())
        self._shards[row.shard] = int(row.shard_size or 0)

    def of_split(self, split: str) -> int:
        return sum(count for (name, _), count in self._samples.items() if name == split)

    def values(self) -> dict[str, Any]:
        datasets = {
            split: {
                dataset: count for (name, dataset), count in sorted(self._samples.items()) if name == split
            }
            for split in SPLITS
        }
        return {
            "schema": STATS_SCHEMA,
            "samples": {split: self.of_split(split) for split in SPLITS},
            "samples_by_dataset": datasets,
            "shards": len(self._shards),
            "shard_bytes": sum(self._shards.values()),
            "excluded": dict(Counter(entry["reason"] for entry in self.excluded)),
            "ordered_sample_id_digest": {split: digest.hexdigest() for split, digest in self._ids.items()},
        }


def _write_indexes(
    transaction: Transaction, rows: SourceRows, parts: Sequence[Artifact], contract_digest: str, stats: _Stats
) -> None:
    """Write both indexes in source order; refuse rows that do not cover the source exactly."""
    tested = rows.tested_sources()
    files: dict[str, BinaryIO] = {split: transaction.open(f"{split}-index.jsonl") for split in SPLITS}
    stored = _stored_rows(parts, stats)
    for ordinal, split, raw, window in rows.rows():
        entry = next(stored, None)
        if entry is None or entry[0] != ordinal:
            raise DataError(
                f"latents: source row {ordinal} ({raw.sample_id!r}) is in no part; make its part again"
            )
        latent = entry[1]
        check_split(split, window, tested)
        if latent is None:
            continue
        _check_row(latent, split, raw, window, contract_digest)
        stats.add(split, latent)
        files[split].write(index_bytes([latent]))
    for file in files.values():
        file.close()
    for split in SPLITS:
        if stats.of_split(split):
            Index.open(
                transaction.staging / f"{split}-index.jsonl"
            ).close()  # ids, keys and shard fields agree
        elif split in rows.facts():
            raise DataError(
                f"latents: every {split} clip is excluded ({stats.excluded[0]['message']}, ...); "
                "raise data.max_relative_translation or data.max_camera_absolute, or clean the index"
            )


def _stored_rows(parts: Sequence[Artifact], stats: _Stats) -> Iterator[tuple[int, LatentRow | None]]:
    """Yield (source ordinal, row) over all parts; None for a row its part excluded, which is noted in `stats`."""
    for part in parts:
        summary = json.loads(part.file(SUMMARY).read_bytes())
        excluded = {entry["ordinal"]: entry for entry in summary["excluded"]}
        stats.excluded += summary["excluded"]
        first, stop = part.identity["rows"]
        with part.file(ROWS).open("rb") as stream:
            for ordinal in range(first, stop):
                if ordinal in excluded:
                    yield ordinal, None
                elif line := stream.readline():
                    yield ordinal, LatentRow.model_validate_json(line)
            if stream.readline():
                raise ArtifactError(f"{part.path}: {ROWS} holds more rows than the part has; make it again")


def _check_row(latent: LatentRow, split: str, raw: RawRow, window: Window, contract_digest: str) -> None:
    """Raise ArtifactError unless a stored row is that of a source row, under the generation's contract."""
    wanted: dict[str, Any] = {
        "sample_id": window.sample_id,
        "key": window.key,
        "source_sample_id": window.source_sample_id,
        "start_frame": window.start,
        "split": split,
        "encoder_contract_digest": contract_digest,
        **{name: getattr(raw, name) for name in ("epoch_repeats", "num_frames", "fps", "dataset")},
    }
    if raw.caption is not None:
        wanted["caption"] = raw.caption
    found: dict[str, Any] = {name: getattr(latent, name) for name in wanted}
    if raw.members is not None:  # the digests of the clip that was encoded, and of the one there is now
        stated = field_of(latent, "metadata") or {}
        for name, member in (
            ("source_identity", raw.video_member),
            ("camera_sidecar_digest", raw.camera_member),
        ):
            found[name], wanted[name] = stated.get(name), raw.members[member].sha256
    if differences := artifacts.identity_diff(found, wanted):
        raise ArtifactError(
            f"{latent.shard}: sample {latent.sample_id!r} is not that of the source row ({'; '.join(differences)}); "
            "the index changed since the part was made, remove the part and make it again"
        )


def _recipe(
    resolved: Resolved, contract: EncoderContract, rows: SourceRows, rows_sha256: Sequence[str], stats: _Stats
) -> dict[str, Any]:
    config, settings = resolved.config, resolved.config.preencode
    assert settings is not None
    return {
        "schema": RECIPE_SCHEMA,
        "generation_id": settings.generation_id,
        "family": config.model.family,
        "architecture": config.model.architecture,
        "latent_schema": settings.latent_schema,
        "encoder_contract_digest": contract.digest,
        "pixel_frames": config.data.pixel_frames,
        "latent_frames": contract.latent_frames,
        "height": config.data.height,
        "width": config.data.width,
        "fps": config.data.fps,
        "dtype": settings.dtype,
        "caption_source": "frozen",
        "camera_source": "preserve",
        "source": rows.facts(),
        "parts": [
            {"path": part_name(part), "rows_sha256": digest} for part, digest in enumerate(rows_sha256)
        ],
        "excluded": stats.excluded,
    }
