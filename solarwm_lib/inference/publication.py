"""Layout `dataset_triplet_v1` of camera-length inference: a video, a comparison and a camera file per clip of a data set.

```
generate/DATASET/CLIP.mp4   compare/DATASET/CLIP.mp4   camera/DATASET/CLIP.npy   publication/samples/slot-NNNNNN.json
```
They are members of the inference artifact, beside the slots of its pass; its completion marker stands for the release's
run-level one. The camera is the source's own: float64 camera-to-world, one per published frame. (spec wan22 6.4, 6.5)
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from solarwm_lib.data.camera import RELATIVE_KEY
from solarwm_lib.data.clip import label
from solarwm_lib.inference.latents import slot_name
from solarwm_lib.inference.slots import Slot
from solarwm_lib.runtime.errors import ConfigError, DataError
from solarwm_lib.runtime.files import json_bytes

if TYPE_CHECKING:
    from solarwm_lib.inference.cases import Cases

TRIPLET, TRANSACTION = "dataset_triplet_v1", "transaction_v1"
RECEIPT_SCHEMA = "solarwm.wan22-camera-publication-sample.v1"
COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Name = tuple[str, str]


def layout_of(config: Any) -> str:
    """Return the output layout of an inference: triplets for camera length unless it opts out; ConfigError otherwise."""
    camera = config.inference.length == "camera"
    layout = config.inference.output_layout or (TRIPLET if camera else TRANSACTION)
    if layout == TRIPLET and not camera:
        raise ConfigError(
            f"inference.output_layout: {TRIPLET} is for inference.length camera, found {config.inference.length}; set "
            f"{TRANSACTION} or remove it"
        )
    if layout == TRIPLET and config.data.camera_array_key == RELATIVE_KEY:
        raise ConfigError(
            f"inference.output_layout: {TRIPLET} publishes absolute cameras, which data.camera_array_key {RELATIVE_KEY} does "
            f"not hold; set {TRANSACTION}"
        )
    return str(layout)


def name_of(row: Any) -> Name:
    """Return (data set, clip) under which a row's results are published; DataError for a name that is no path component.

    The data set is the row's `physical_generation`, `dataset` or `source_dataset`, the clip its `clip_id` or else its key.
    """
    extra = row.model_extra or {}
    dataset = extra.get("physical_generation") or row.dataset or extra.get("source_dataset")
    clip = extra.get("clip_id") or row.key
    for field, value in (("dataset", dataset), ("clip_id", clip)):
        if not isinstance(value, str) or not COMPONENT.fullmatch(value):
            raise DataError(
                f"{label(row)}: {field} is {value!r}, which cannot name a published file; expected letters, digits and '._-', "
                "or set inference.output_layout to transaction_v1"
            )
    return str(dataset), str(clip)


def names_of(cases: Sequence[Mapping[str, Any]], rows: Sequence[Any]) -> dict[int, Name]:
    """Return slot -> name of a plan's cases; DataError if two of them would be published under one name."""
    names = {case["slot"]: name_of(rows[case["row_ordinal"]]) for case in cases}
    taken: dict[Name, int] = {}
    for slot, name in names.items():
        if name in taken:
            raise DataError(
                f"slots {taken[name]} and {slot} would both be published as {'/'.join(name)}; give their rows distinct clip_id"
            )
        taken[name] = slot
    return names


@dataclass(frozen=True)
class Publication:
    """Makes the public files of a finished slot; `facts` go into each receipt."""

    names: Mapping[int, Name]
    facts: Mapping[str, Any]

    def padding(self, case: Mapping[str, Any], frames: int) -> int:
        """Return how often the last of `frames` generated frames is repeated, to the published length."""
        return max(0, case["published_frames"] - frames)

    def __call__(self, slot: Slot, clips: Cases, frames: int, video: bytes) -> dict[str, bytes]:
        """Return path -> content of the public files of `frames` generated frames; `video` shows them, and the padding."""
        dataset, clip = self.names[slot.case["slot"]]
        published = slot.case["published_frames"]
        pad = self.padding(slot.case, frames)
        files = {
            f"generate/{dataset}/{clip}.mp4": video,
            f"compare/{dataset}/{clip}.mp4": slot.members["compare.mp4"],
            f"camera/{dataset}/{clip}.npy": npy_bytes(clips.source_c2w(slot.case, published)),
        }
        model_frames = 1 + 4 * (slot.case["latent_frames"] - 1)
        receipt = {
            **self.facts,
            "schema": RECEIPT_SCHEMA,
            "slot": slot.case["slot"],
            "sample_id": slot.case["sample_id"],
            "latent_frames": slot.case["latent_frames"],
            "model_output_pixel_frames": model_frames,
            "published_pixel_frames": published,
            "trim_frames": model_frames - frames,
            "tail_pad_frames": pad,
            "tail_padding_mode": "repeat_last_generated_frame" if pad else "none",
            "files": sorted(files),
        }
        slot.facts["publication"] = receipt
        return {
            **files,
            f"publication/samples/{slot_name(slot.case['slot'])}.json": json_bytes(receipt),
        }


def npy_bytes(c2w: np.ndarray) -> bytes:
    """Return an NPY file of float64 [P,4,4]; DataError for values that are not finite."""
    if not np.isfinite(c2w).all():
        raise DataError("published camera holds NaN or infinite values")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(c2w, dtype=np.float64), allow_pickle=False)
    return stream.getvalue()
