"""Sampled latents, kept before anything is decoded: a decode that fails, or a killed job, never costs the sampling again.

`<out>.latents/slot-NNNNNN/` is an artifact of its own per slot, published by the process that sampled it as soon as its
batch is done. Its member `latents.safetensors` holds `latents` `[T,C,h,w]` in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib import artifacts

if TYPE_CHECKING:
    import torch

SCHEMA = "solarwm.latents.v1"
MEMBER = "latents.safetensors"


def slot_name(slot: int) -> str:
    """Name of a slot's directory."""
    return f"slot-{slot:06d}"


def beside(out_dir: Path, label: str = "") -> Path:
    """Where the latents of the artifact `out_dir` are kept: `<out_dir>.latents`, or `<out_dir>.<label>.latents`."""
    return out_dir.with_name(f"{out_dir.name}.{label}.latents" if label else f"{out_dir.name}.latents")


@dataclass(frozen=True)
class LatentStore:
    """The kept latents of one pass. `identity` is the pass's: latents of another one are refused, not overwritten."""

    root: Path
    identity: dict[str, Any]
    parents: Sequence[Path]

    def load(self, slot: int) -> torch.Tensor | None:
        """Return the deep-verified latents of a slot, None if there are none.

        Raises ArtifactError if they belong to another pass, checkpoint or plan, or are damaged.
        """
        from safetensors.torch import load

        target = self.root / slot_name(slot)
        artifact = artifacts.reissue(target, SCHEMA, self._identity(slot), parents=self.parents)
        return None if artifact is None else load(artifact.file(MEMBER).read_bytes())["latents"]

    def publish(self, slot: int, latents: torch.Tensor) -> None:
        """Keep the latents of a slot."""
        from safetensors.torch import save

        target = self.root / slot_name(slot)
        with artifacts.Transaction(target, SCHEMA, self._identity(slot), self.parents) as transaction:
            transaction.write_bytes(MEMBER, save({"latents": latents.contiguous()}))

    def _identity(self, slot: int) -> dict[str, Any]:
        return {**self.identity, "slot": slot}
