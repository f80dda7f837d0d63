"""Labelled side-by-side frames: a grid of clips under a header band, with defects made visible.

A frame that is not finite is crossed out and named; a clip that ends early is continued by a panel that says so. Pixels are
uint8 RGB; clips are `[F,H,W,3]` of one height and width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MIN_CELL_HEIGHT = 256
BAND_HEIGHT = 44
GAP = 4
TITLE_SIZE, NOTE_SIZE, SMALLEST_SIZE = 18, 14, 9
BACKGROUND, INK, FAINT, ALARM = (24, 24, 28), (240, 240, 240), (170, 170, 178), (220, 40, 40)
DIFFERENCE_GAIN = 2


@dataclass(frozen=True)
class Panel:
    """One clip of the grid: its title, a note per frame (fewer notes than frames are legal) and its bad frames.

    `frames` may be a stretch of a clip, which then has `length` frames; notes and bad frames count from its first.
    """

    title: str
    frames: np.ndarray
    notes: Sequence[str] = ()
    bad_frames: frozenset[int] = field(default_factory=frozenset)
    length: int | None = None


def difference(truth: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return `|truth - other| * 2`, clipped to uint8, over the frames both clips have."""
    frames = min(len(truth), len(other))
    delta = np.abs(truth[:frames].astype(np.int16) - other[:frames].astype(np.int16))
    return np.minimum(DIFFERENCE_GAIN * delta, 255).astype(np.uint8)


def magnification(height: int) -> int:
    """Return the smallest integer factor that makes a clip of `height` pixels at least 256 high."""
    return max(1, -(-MIN_CELL_HEIGHT // height))


def grid_frames(rows: Sequence[Sequence[Panel | None]], first: int = 0) -> Iterator[np.ndarray]:
    """Yield uint8 RGB frames of the grid, as many as its longest clip has; `None` leaves a cell empty.

    Of stretches of clips, `first` is the number of their first frame.

    Clips are enlarged by an integer factor (nearest neighbour: no pixel is invented). Sizes are even, as H.264 needs.
    """
    panels = [panel for row in rows for panel in row if panel is not None]
    height, width = panels[0].frames.shape[1:3]
    for panel in panels:
        if panel.frames.shape[1:] != (height, width, 3):
            raise ValueError(
                f"{panel.title}: frames are {panel.frames.shape[1:]}, expected {(height, width, 3)}"
            )
    factor = magnification(height)
    cell = (height * factor, width * factor)
    columns = max(len(row) for row in rows)
    total_height = len(rows) * (BAND_HEIGHT + cell[0] + GAP) - GAP
    total_width = columns * (cell[1] + GAP) - GAP
    for index in range(max(len(panel.frames) for panel in panels)):
        canvas = Image.new(
            "RGB", (total_width + total_width % 2, total_height + total_height % 2), BACKGROUND
        )
        for r, row in enumerate(rows):
            for c, cell_panel in enumerate(row):
                if cell_panel is not None:
                    corner = (c * (cell[1] + GAP), r * (BAND_HEIGHT + cell[0] + GAP))
                    _draw_cell(canvas, cell_panel, index, first, corner, cell, factor)
        yield np.asarray(canvas)


def _draw_cell(
    canvas: Image.Image,
    panel: Panel,
    index: int,
    first: int,
    corner: tuple[int, int],
    cell: tuple[int, int],
    factor: int,
) -> None:
    x, y = corner
    height, width = cell
    draw = ImageDraw.Draw(canvas)
    _text(draw, panel.title, (x + 6, y + 3), width - 12, TITLE_SIZE, INK)
    if index < len(panel.notes):
        _text(draw, panel.notes[index], (x + 6, y + 25), width - 12, NOTE_SIZE, FAINT)
    top = y + BAND_HEIGHT
    if index >= len(panel.frames):
        draw.rectangle((x, top, x + width - 1, top + height - 1), outline=FAINT)
        message = f"no frame {first + index}: this clip has {panel.length or len(panel.frames)}"
        _text(draw, message, (x + 6, top + height // 2 - 8), width - 12, NOTE_SIZE, INK)
        return
    frame = panel.frames[index].repeat(factor, axis=0).repeat(factor, axis=1)
    canvas.paste(Image.fromarray(frame), (x, top))
    if index in panel.bad_frames:
        box = (x + 1, top + 1, x + width - 2, top + height - 2)
        draw.rectangle(box, outline=ALARM, width=4)
        draw.line(box, fill=ALARM, width=4)
        draw.line((box[0], box[3], box[2], box[1]), fill=ALARM, width=4)
        middle = top + height // 2
        draw.rectangle((x + 8, middle - 14, x + width - 9, middle + 14), fill=ALARM)
        _text(draw, f"NON-FINITE frame {first + index}", (x + 14, middle - 11), width - 28, TITLE_SIZE, INK)


def _text(
    draw: ImageDraw.ImageDraw,
    text: str,
    position: tuple[int, int],
    room: int,
    size: int,
    colour: tuple[int, int, int],
) -> None:
    """Write one line, smaller and then shortened until it fits `room` pixels."""
    text = " ".join(text.split())
    while size > SMALLEST_SIZE and draw.textlength(text, font=font(size)) > room:
        size -= 1
    shown = text
    while len(shown) > 2 and draw.textlength(shown, font=font(size)) > room:
        shown = shown[:-2].rstrip() + "…"
    draw.text(position, shown, font=font(size), fill=colour)


@functools.cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
