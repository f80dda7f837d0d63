"""TensorBoard event file of a validation pass, `RUN/tensorboard/validation/PASS/`: its means and some moving pictures.

Tags are `PASS/METRIC` and `PASS/slot-NNNNNN`. One file per pass and step, made again under the same name when the pass is. A
folder per pass keeps the steps of a folder in order, whatever order passes end in. As with training it is only a view.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from solarwm_lib.training.tensorboard import FOLDER, EventFile

MAX_SLOTS, MAX_FRAMES, MAX_SIDE, MAX_BYTES, COLOURS = 4, 32, 640, 2**20, 128

log = logging.getLogger(__name__)


def show_pass(artifact_dir: Path) -> Path | None:
    """Write the event file of a published pass and return it; None if it is not a run's pass. Never raises."""
    place = event_path(artifact_dir)
    if place is None:
        return None
    path, step = place
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        events = EventFile(staged)
        try:
            _write(events, artifact_dir, step)
        finally:
            events.close()
        os.replace(staged, path)
    except Exception as error:
        staged.unlink(missing_ok=True)
        log.warning("no TensorBoard events of %s: %s", artifact_dir, " ".join(str(error).split()))
        return None
    return path


def event_path(artifact_dir: Path) -> tuple[Path, int] | None:
    """Return event file and step of `RUN/validation/step_NNNNNN/PASS`; None for a directory elsewhere."""
    step_dir = artifact_dir.parent
    digits = step_dir.name.removeprefix("step_")
    if step_dir.parent.name != "validation" or not digits.isdigit():
        return None
    folder = step_dir.parent.parent / FOLDER / "validation" / artifact_dir.name
    return folder / f"events.out.tfevents.step_{digits}", int(digits)


def _write(events: EventFile, artifact_dir: Path, step: int) -> None:
    summary = json.loads((artifact_dir / "summary.json").read_bytes())
    name = summary["pass"]["name"]
    counts = {f"slots_{status}": summary["slots"][status] for status in ("ok", "error", "skipped")}
    events.scalars(step, {f"{name}/{key}": float(x) for key, x in (summary["means"] | counts).items()})
    for slot in _shown_slots(artifact_dir):
        gif, width, height = animation(slot / "compare.mp4", summary["fps"])
        events.image(step, f"{name}/{slot.name}", gif, width, height)


def _shown_slots(artifact_dir: Path) -> list[Path]:
    videos = sorted(artifact_dir.glob("slot-*/compare.mp4"))
    return [path.parent for path in videos[:MAX_SLOTS]]


def animation(video: Path, fps: float) -> tuple[bytes, int, int]:
    """Return a looping GIF of a video within the limits above, its width and its height in pixels.

    Frames are left out evenly and the pace is kept; a GIF that is too large is made again from half the pixels.
    """
    from PIL import Image

    frames, stride = _thin(_images(video))
    while True:
        # The default, median cut, takes 200 times as long and is hardly better to look at.
        indexed = [frame.quantize(COLOURS, method=Image.Quantize.FASTOCTREE) for frame in frames]
        stream = io.BytesIO()
        indexed[0].save(
            stream,
            "GIF",
            save_all=True,
            append_images=indexed[1:],
            duration=max(20, round(1000 * stride / fps)),
            loop=0,
        )
        width, height = frames[0].size
        if stream.tell() <= MAX_BYTES or min(width, height) < 32:
            return stream.getvalue(), width, height
        half = (round(width / 2**0.5), round(height / 2**0.5))
        frames = [frame.resize(half) for frame in frames]


def _images(video: Path) -> Iterator[Any]:
    """Yield the frames of a video as PIL images of at most `MAX_SIDE` pixels."""
    from PIL import Image

    from solarwm_lib.data.video import iterate

    for _, pixels in iterate(video):
        image = Image.fromarray(pixels)
        image.thumbnail((MAX_SIDE, MAX_SIDE))
        yield image


def _thin(images: Iterator[Any]) -> tuple[list[Any], int]:
    """Return every n-th image, n the smallest power of two that leaves at most `MAX_FRAMES`, and n."""
    kept: list[Any] = []
    stride = 1
    for ordinal, image in enumerate(images):
        if ordinal % stride:
            continue
        kept.append(image)
        if len(kept) > MAX_FRAMES:
            kept, stride = kept[::2], 2 * stride
    return kept, stride
