"""Tensors that an earlier generation already holds under the same content key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from solarwm_lib import artifacts
from solarwm_lib.data.index import Index, LatentRow, Member
from solarwm_lib.data.shards import ShardReader
from solarwm_lib.data.writer import SPLITS
from solarwm_lib.runtime.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

INDEX_SCHEMA = "solarwm.latents.index.v1"


class Reuse:
    """Finds the tensors of content keys in earlier generations; every byte used is checked against its index.

    Only the wanted keys are kept in memory, each with the first sample that has it.
    """

    def __init__(
        self, generations: Sequence[str | Path], latents: Collection[str], prompts: Collection[str]
    ) -> None:
        self._readers: list[ShardReader] = []
        self._latents: dict[str, tuple[int, LatentRow]] = {}
        self._prompts: dict[str, tuple[int, LatentRow]] = {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        for root in map(Path, generations):
            try:
                index = artifacts.read(root / "index", INDEX_SCHEMA)
            except ArtifactError as error:
                raise ConfigError(
                    f"preencode.reuse: {error}; give the folder of a merged latent generation"
                ) from None
            self._readers.append(ShardReader(root))
            for split in SPLITS:
                path = index.file(f"{split}-index.jsonl")
                if path.stat().st_size:
                    self._collect(path, latents, prompts)

    def has_latents(self, key: str) -> bool:
        """Whether the tensors made from pixels are at hand."""
        return key in self._latents

    def has_prompt(self, key: str) -> bool:
        """Whether the tensors made from the caption are at hand."""
        return key in self._prompts

    def latents(self, key: str, names: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors `names` stored under a latents key; DataError if their shard is damaged."""
        return self._tensors(self._latents[key], names)

    def prompt(self, key: str, names: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors `names` stored under a prompt key; DataError if their shard is damaged."""
        return self._tensors(self._prompts[key], names)

    def close(self) -> None:
        """Close the shards."""
        for reader in self._readers:
            reader.close()

    def _collect(self, path: Path, latents: Collection[str], prompts: Collection[str]) -> None:
        place = len(self._readers) - 1
        index = Index.open(path)
        for row in index:
            if not isinstance(row, LatentRow) or row.members is None:
                continue
            if row.latents_key in latents:
                self._latents.setdefault(str(row.latents_key), (place, row))
            if row.prompt_key in prompts:
                self._prompts.setdefault(str(row.prompt_key), (place, row))
        index.close()

    def _tensors(self, found: tuple[int, LatentRow], names: Collection[str]) -> dict[str, Tensor]:
        from safetensors.torch import load

        place, row = found
        record = row.members[row.preencoded_member] if row.members is not None else None
        assert isinstance(record, Member)  # `_collect` takes rows with recorded offsets only
        if self._last[0] != record.sha256:  # a sample's latents and prompt usually come from the same member
            self._last = (record.sha256, load(self._readers[place].read(row, row.preencoded_member)))
        return {name: self._last[1][name] for name in names}
