"""Videos that grow while their clips are generated: `<out>.latents/preview/slot-NNNNNN.mp4`, playable at any moment.

A preview is for looking on. It is no result and nothing reads it: the published video is decoded from the kept latents
afterwards, and is the same with and without it. What goes wrong with a preview ends the preview, never the sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solarwm_lib.data.video import Mp4Writer
from solarwm_lib.inference.generate import to_pixels
from solarwm_lib.inference.latents import slot_name
from solarwm_lib.inference.metrics import to_uint8
from solarwm_lib.inference.slots import VIDEO_CRF
from solarwm_lib.runtime.errors import ConfigError, Preempted

if TYPE_CHECKING:
    import torch

    from solarwm_lib.backbones.codec import Codec
    from solarwm_lib.inference.generate import Request

FOLDER = "preview"

log = logging.getLogger(__name__)


def wanted(config: Any) -> bool:
    """Return whether the passes of a configuration are shown while they are sampled: by default at camera length only."""
    if config.action != "infer":
        return False
    asked = config.inference.preview
    return config.inference.length == "camera" if asked is None else bool(asked)


def check(config: Any) -> None:
    """Raise ConfigError if a preview is asked for of a pass that has no chunks to show."""
    for entry in config.validation.passes if wanted(config) else ():
        if entry.mode != "autoregressive":
            raise ConfigError(
                f"inference.preview: found true, but pass {entry.name!r} is {entry.mode} and makes all its frames at once, "
                "expected autoregressive; set false"
            )


@dataclass(frozen=True)
class _Growing:
    decode: Callable[[torch.Tensor], torch.Tensor]
    writer: Mp4Writer


class Previews:
    """Shows the clips of a pass: call it with every finished chunk of a batch. A context manager that ends all videos.

    Each clip has its own decoder, whose temporal cache goes on from chunk to chunk as in the final decode.
    """

    def __init__(self, latents_dir: Path, codec: Codec, fps: float) -> None:
        self._folder = latents_dir / FOLDER
        self._codec = codec
        self._fps = fps
        self._growing: dict[int, _Growing] = {}
        self._given_up: set[int] = set()

    def __enter__(self) -> Previews:
        return self

    def __exit__(self, *_: object) -> None:
        for slot in [*self._growing]:
            self._end(slot)

    def __call__(self, requests: Sequence[Request], done: int, chunks: int, latents: torch.Tensor) -> None:
        """Append chunk `done` of `chunks`, latents `[B,c,C,h,w]` of the clips of `requests`; 1 begins a video anew."""
        for request, chunk in zip(requests, latents, strict=True):
            if done == 1:
                self._given_up.discard(request.slot)
            if request.slot in self._given_up:
                continue
            try:
                self._show(request.slot, done == 1, chunk)
            except Preempted:
                raise
            except Exception as error:
                reason = " ".join(str(error).split())
                log.warning("preview of slot %d ends before chunk %d: %s", request.slot, done, reason)
                self._given_up.add(request.slot)
                self._end(request.slot)
            else:
                if done == chunks:
                    self._end(request.slot)

    def _show(self, slot: int, anew: bool, chunk: torch.Tensor) -> None:
        if anew:
            self._end(slot)
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{slot_name(slot)}.mp4"
            # On one that was being watched, the watcher keeps what it has.
            path.unlink(missing_ok=True)
            writer = Mp4Writer(path, self._fps, crf=VIDEO_CRF, growing=True)
            self._growing[slot] = _Growing(self._codec.decoder(), writer)
        growing = self._growing[slot]
        for frame in to_uint8(to_pixels(growing.decode(chunk[None]))[0]):
            growing.writer.write(frame)

    def _end(self, slot: int) -> None:
        """Close a video; one that cannot be closed stays as far as it is."""
        growing = self._growing.pop(slot, None)
        if growing is None:
            return
        try:
            growing.writer.close()
        except Exception as error:
            log.warning("preview of slot %d was not ended: %s", slot, " ".join(str(error).split()))
