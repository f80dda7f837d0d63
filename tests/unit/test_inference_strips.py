"""Film strips show the right moments, and a clip that ends early shows it."""

import io

import numpy as np
from PIL import Image

from solarwm_lib.inference.panels import BACKGROUND, NOTE_SIZE
from solarwm_lib.inference.strips import GAP, MOMENTS, SCALE, strip_png


def test_a_strip_holds_evenly_spaced_frames_and_leaves_missing_ones_dark():
    long = np.stack([np.full((8, 12, 3), 10 * frame, np.uint8) for frame in range(15)])
    picture = np.asarray(Image.open(io.BytesIO(strip_png([[("whole", long), ("cut", long[:7])]]))))
    band, height, width = NOTE_SIZE + 4, 8 * SCALE, 12 * SCALE
    assert picture.shape == (2 * (band + height) + GAP, MOMENTS * width, 3)
    centres = [column * width + width // 2 for column in range(MOMENTS)]
    assert [int(picture[band + height // 2, x, 0]) for x in centres] == [0, 20, 40, 60, 80, 100, 120, 140]
    below = [tuple(picture[2 * band + height + height // 2, x]) for x in centres]
    assert below[3] == (60, 60, 60) and below[4] == BACKGROUND
