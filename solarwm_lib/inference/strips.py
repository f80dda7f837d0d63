"""Film strips: cases and passes as one still picture, for pages where nothing can play."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from solarwm_lib.inference.panels import BACKGROUND, INK, NOTE_SIZE, font

MOMENTS = 8
GAP = 6
SCALE = 2


def strip_png(groups: Sequence[Sequence[tuple[str, np.ndarray]]]) -> bytes:
    """Return a PNG with one row per (label, uint8 clip `[F,H,W,3]`), `MOMENTS` frames of it in order; groups stand apart.

    A clip that is shorter than its group's first ends early: its missing moments stay dark.
    """
    rows = [row for group in groups for row in group]
    height, width = rows[0][1].shape[1:3]
    cell = (width * SCALE, height * SCALE)
    band = NOTE_SIZE + 4
    heights = [sum(cell[1] + band for _ in group) + GAP for group in groups]
    sheet = Image.new("RGB", (MOMENTS * cell[0], sum(heights)), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    top = 0
    for group in groups:
        length = len(group[0][1])
        moments = np.linspace(0, length - 1, MOMENTS).round().astype(int)
        for label, frames in group:
            draw.text((4, top + 1), label, INK, font(NOTE_SIZE))
            top += band
            for column, moment in enumerate(moments):
                if moment < len(frames):
                    picture = Image.fromarray(frames[moment]).resize(cell, Image.Resampling.NEAREST)
                    sheet.paste(picture, (column * cell[0], top))
            top += cell[1]
        top += GAP
    stream = io.BytesIO()
    sheet.save(stream, format="png", optimize=True)
    return stream.getvalue()
