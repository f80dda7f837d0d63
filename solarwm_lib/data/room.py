"""A box room with painted walls: textures by seed, exact pinhole ray casting.

The room is centred at the origin; x and z run along the floor, y points down (floor at +height/2). Each face is a square
texture in one atlas; every pixel averages four rays. Edges are soft over a quarter of a metre and shapes are few and large:
that is what a codec with 48 numbers per 16x16x4 block keeps and what a small model learns.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from solarwm_lib.data.camera import Matrices, fixed_intrinsics
from solarwm_lib.data.video import Frames
from solarwm_lib.runtime import keyed

TEXELS = 256
RAYS_PER_SIDE = 2
HALF_HEIGHT = 1.5
SOFT_METRES = 0.25

Colour = tuple[float, float, float]

WALL_COLOURS: dict[str, Colour] = {
    "terracotta": (0.80, 0.38, 0.26),
    "teal": (0.18, 0.55, 0.58),
    "mustard": (0.90, 0.70, 0.20),
    "lavender": (0.66, 0.55, 0.86),
    "green": (0.40, 0.66, 0.32),
    "rose": (0.93, 0.58, 0.62),
    "navy": (0.22, 0.32, 0.60),
    "cream": (0.92, 0.85, 0.68),
    "plum": (0.54, 0.27, 0.50),
    "sky blue": (0.45, 0.70, 0.92),
}
WOODS: dict[str, Colour] = {
    "oak": (0.72, 0.52, 0.32),
    "walnut": (0.42, 0.27, 0.17),
    "birch": (0.85, 0.74, 0.57),
}
RUG_COLOURS: dict[str, Colour] = {
    "red": (0.76, 0.13, 0.14),
    "blue": (0.14, 0.30, 0.72),
    "green": (0.10, 0.48, 0.26),
    "violet": (0.45, 0.16, 0.58),
}
WHITE, DARK, LEAF, BRASS = (0.96, 0.95, 0.92), (0.16, 0.15, 0.18), (0.18, 0.50, 0.20), (0.90, 0.74, 0.32)
LARGE = ("window", "door", "painting", "bookcase")
SMALL = ("clock", "mirror", "plant", "lamp")


class Canvas:
    """A face of the room being painted, RGB float [TEXELS, TEXELS, 3] over `u`, `v` in metres."""

    def __init__(self, half_u: float, half_v: float, base: Colour) -> None:
        ticks = (np.arange(TEXELS) + 0.5) / TEXELS * 2 - 1
        self.half_u, self.half_v = half_u, half_v
        self.u, self.v = np.meshgrid(ticks * half_u, ticks * half_v)
        self.rgb = np.broadcast_to(np.array(base), (TEXELS, TEXELS, 3)).copy()

    def paint(
        self, distance: NDArray, colour: Colour | NDArray, opacity: float = 0.8, soft: float = SOFT_METRES
    ) -> None:
        """Blend `colour` where the signed `distance` in metres is negative, with a soft edge."""
        inside = np.clip(0.5 - distance / (2 * soft), 0, 1)
        alpha = (opacity * inside * inside * (3 - 2 * inside))[..., None]
        self.rgb += alpha * (np.asarray(colour) - self.rgb)

    def box(self, u: float, v: float, width: float, height: float) -> NDArray:
        """Return the signed distance to an axis-aligned rectangle centred at (u, v)."""
        du, dv = np.abs(self.u - u) - width / 2, np.abs(self.v - v) - height / 2
        return np.hypot(np.maximum(du, 0), np.maximum(dv, 0)) + np.minimum(np.maximum(du, dv), 0)

    def ellipse(self, u: float, v: float, width: float, height: float) -> NDArray:
        """Return the approximate signed distance to an axis-aligned ellipse."""
        radius = np.hypot((self.u - u) / (width / 2), (self.v - v) / (height / 2))
        return (radius - 1) * min(width, height) / 2

    def darken_edges(self, strength: float, reach: float) -> None:
        """Shade toward the face's borders, where less light arrives."""
        gap = np.minimum(self.half_u - np.abs(self.u), self.half_v - np.abs(self.v))
        self.rgb *= (1 - strength * np.exp(-gap / reach))[..., None]

    def ripple(self, amplitude: float, *key: keyed.Part) -> None:
        """Modulate brightness by three smooth keyed waves, a few metres long."""
        for wave in range(3):
            angle, phase = (2 * math.pi * keyed.uniform(*key, wave, name) for name in ("angle", "phase"))
            length = 1.8 + 2 * keyed.uniform(*key, wave, "length")
            along = math.cos(angle) * self.u + math.sin(angle) * self.v
            self.rgb *= (1 + amplitude * np.sin(2 * math.pi * along / length + phase))[..., None]


class Room:
    """A furnished room; everything about it follows from `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.half = np.array(
            [2.8 + 0.5 * keyed.uniform(seed, "x"), HALF_HEIGHT, 2.8 + 0.5 * keyed.uniform(seed, "z")]
        )
        self._walls = _pick(list(WALL_COLOURS), 4, seed, "walls")
        self._large = _pick(list(LARGE), 4, seed, "large")
        self._small = _pick(list(SMALL), 4, seed, "small")
        self._wood = _pick(list(WOODS), 1, seed, "wood")[0]
        self._rug = _pick(list(RUG_COLOURS), 1, seed, "rug")[0]
        # Faces in the order -x, +x, -y (ceiling), +y (floor), -z, +z; walls 0..3 are -x, +x, -z, +z.
        faces = [self._wall(0), self._wall(1), self._ceiling(), self._floor(), self._wall(2), self._wall(3)]
        atlas = np.zeros((6, TEXELS, TEXELS, 4), np.uint8)
        atlas[..., :3] = np.clip(np.stack(faces) * 255 + 0.5, 0, 255)
        self._atlas = atlas.reshape(-1).view(np.uint32)

    @property
    def caption(self) -> str:
        """A scene-static description: objects, layout and light, no motion."""
        walls = [
            f"a {colour} wall with a {large} and a {small}"
            for colour, large, small in zip(self._walls, self._large, self._small, strict=True)
        ]
        return (
            f"A square room in soft daylight: {'; '.join(walls)}. A round {self._rug} rug lies on the {self._wood} "
            "floor, a pale lamp hangs under the white ceiling."
        )

    def render(self, c2w: Matrices, height: int, width: int) -> Frames:
        """Return the views of cameras [T, 4, 4] inside the room as uint8 [T, height, width, 3]."""
        rays = _rays(height, width)
        return np.stack([self._view(matrix, rays).reshape(height, width, 3) for matrix in c2w])

    def _view(self, c2w: Matrices, rays: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Cast rays [3, S, P] of one camera and average their S samples: uint8 [P, 3]."""
        samples = rays.shape[1]
        x, y, z = rays.reshape(3, -1)
        half, centre = self.half.astype(np.float32), c2w[:3, 3]
        # Elementwise on purpose: a BLAS product rounds differently from machine to machine.
        direction = [row[0] * x + row[1] * y + row[2] * z for row in c2w[:3, :3]]
        direction = [np.where(np.abs(d) < 1e-9, np.float32(1e-9), d) for d in direction]
        dx, dy, dz = ((np.copysign(h, d) - c) / d for h, d, c in zip(half, direction, centre, strict=True))
        nearest = np.minimum(np.minimum(dx, dy), dz)
        on_x, on_y = dx == nearest, dy == nearest
        hit_x, hit_y, hit_z = ((c + nearest * d) / h for h, d, c in zip(half, direction, centre, strict=True))
        # Texture axes (u, v): x walls (z, y), floor and ceiling (x, z), z walls (x, y).
        u, v = np.where(on_x, hit_z, hit_x), np.where(on_y & ~on_x, hit_z, hit_y)
        faces = [axis * 2 + (d > 0) for axis, d in enumerate(direction)]
        face = np.where(on_x, faces[0], np.where(on_y, faces[1], faces[2]))
        column, line = (np.clip((t + 1) * (TEXELS / 2), 0, TEXELS - 1).astype(np.int32) for t in (u, v))
        texel = (face * TEXELS + line) * TEXELS + column
        colour = self._atlas[texel].view(np.uint8).reshape(samples, -1, 4)[..., :3]
        total = colour.sum(axis=0, dtype=np.uint16)
        return ((total + samples // 2) // samples).astype(np.uint8)

    def _wall(self, wall: int) -> NDArray:
        half_u = float(self.half[2] if wall < 2 else self.half[0])
        canvas = Canvas(half_u, HALF_HEIGHT, WALL_COLOURS[self._walls[wall]])
        key = (self.seed, "wall", wall)
        canvas.ripple(0.05, *key)
        canvas.rgb *= (1.06 - 0.12 * (canvas.v + HALF_HEIGHT) / (2 * HALF_HEIGHT))[..., None]
        side = 1 if keyed.integer(2, *key, "side") else -1
        _draw(canvas, self._large[wall], side * (0.55 + 0.5 * keyed.uniform(*key, "large")), *key)
        _draw(canvas, self._small[wall], -side * (1.65 + 0.3 * keyed.uniform(*key, "small")), *key)
        canvas.paint(canvas.box(0, HALF_HEIGHT, 9, 0.34), WHITE)
        canvas.darken_edges(0.30, 0.35)
        return canvas.rgb * (0.92, 1.0, 0.96, 0.88)[wall]

    def _floor(self) -> NDArray:
        canvas = Canvas(float(self.half[0]), float(self.half[2]), WOODS[self._wood])
        canvas.ripple(0.05, self.seed, "floor")
        canvas.rgb *= (1 + 0.07 * np.sin(2 * math.pi * canvas.u / 1.2))[..., None]
        u, v = (1.2 * keyed.uniform(self.seed, "rug", axis) - 0.6 for axis in "uv")
        rug = RUG_COLOURS[self._rug]
        for size, colour in ((3.2, rug), (2.1, WHITE), (1.2, rug)):
            canvas.paint(canvas.ellipse(u, v, size, size), colour)
        canvas.darken_edges(0.35, 0.4)
        return canvas.rgb

    def _ceiling(self) -> NDArray:
        canvas = Canvas(float(self.half[0]), float(self.half[2]), (0.90, 0.90, 0.92))
        canvas.darken_edges(0.30, 0.5)
        canvas.paint(canvas.ellipse(0, 0, 3.2, 3.2), WHITE, opacity=0.6, soft=0.8)
        canvas.paint(canvas.ellipse(0, 0, 1.3, 1.3), BRASS)
        canvas.paint(canvas.ellipse(0, 0, 0.9, 0.9), (1.0, 0.98, 0.86))
        return canvas.rgb


def _pick(names: list[str], count: int, *key: keyed.Part) -> list[str]:
    """Return `count` different names in keyed order."""
    return [names[keyed.permutation_at(position, len(names), *key)] for position in range(count)]


def _rays(height: int, width: int) -> NDArray[np.float32]:
    """Return camera-space ray directions [3, samples per pixel, height * width] of the fixed intrinsics."""
    intrinsics = fixed_intrinsics()
    n = RAYS_PER_SIDE
    x = ((np.arange(width * n) + 0.5) / (width * n) - intrinsics[0, 2]) / intrinsics[0, 0]
    y = ((np.arange(height * n) + 0.5) / (height * n) - intrinsics[1, 2]) / intrinsics[1, 1]
    grid = np.stack([*np.meshgrid(x, y), np.ones((height * n, width * n))])
    return (
        grid.reshape(3, height, n, width, n).transpose(0, 2, 4, 1, 3).reshape(3, n * n, -1).astype(np.float32)
    )


def _draw(canvas: Canvas, what: str, u: float, *key: keyed.Part) -> None:
    """Paint one piece of furniture onto a wall around horizontal position `u`."""
    floor = HALF_HEIGHT
    accents = list(RUG_COLOURS.values())
    accent = accents[keyed.integer(len(accents), *key, "accent")]
    if what == "window":
        blue = np.array([0.42, 0.70, 0.96]) + np.array([0.3, 0.15, 0.0]) * (canvas.v[..., None] + 1) / 2
        glass = canvas.box(u, -0.25, 1.9, 1.35)
        canvas.paint(canvas.box(u, -0.25, 2.4, 1.85), WHITE)
        canvas.paint(glass, np.clip(blue, 0, 1))
        canvas.paint(np.maximum(canvas.ellipse(u, 0.60, 2.8, 1.3), glass), LEAF)
        canvas.paint(canvas.box(u, -0.25, 0.24, 1.5), WHITE)
    elif what == "door":
        canvas.paint(canvas.box(u, floor - 1.1, 1.65, 2.4), WHITE)
        canvas.paint(canvas.box(u, floor - 1.0, 1.2, 2.05), (0.40, 0.23, 0.13))
        canvas.paint(canvas.box(u, floor - 1.45, 0.7, 0.75), (0.58, 0.37, 0.22))
        canvas.paint(canvas.ellipse(u + 0.4, floor - 0.75, 0.26, 0.26), BRASS)
    elif what == "painting":
        canvas.paint(canvas.box(u, -0.3, 2.2, 1.6), BRASS)
        canvas.paint(canvas.box(u, -0.3, 1.8, 1.2), WHITE)
        canvas.paint(canvas.ellipse(u - 0.2, -0.3, 1.0, 1.0), accent)
    elif what == "bookcase":
        canvas.paint(canvas.box(u, floor - 1.15, 2.1, 2.3), (0.38, 0.23, 0.14))
        for shelf in range(3):
            books = accents[keyed.permutation_at(shelf, len(accents), *key, "books")]
            canvas.paint(canvas.box(u, floor - 0.45 - 0.68 * shelf, 1.7, 0.46), books)
            canvas.paint(canvas.box(u + 0.5, floor - 0.45 - 0.68 * shelf, 0.45, 0.46), WHITE)
    elif what == "clock":
        canvas.paint(canvas.ellipse(u, -0.45, 1.15, 1.15), DARK)
        canvas.paint(canvas.ellipse(u, -0.45, 0.80, 0.80), WHITE)
        canvas.paint(canvas.box(u, -0.57, 0.13, 0.36), DARK)
    elif what == "mirror":
        canvas.paint(canvas.ellipse(u, -0.2, 1.1, 1.9), BRASS)
        canvas.paint(canvas.ellipse(u, -0.2, 0.72, 1.5), (0.78, 0.88, 0.92))
    elif what == "plant":
        canvas.paint(canvas.box(u, floor - 0.35, 0.55, 0.7), accent)
        for du, dv, size in ((-0.22, 1.05, 0.75), (0.22, 1.15, 0.75), (0.0, 1.5, 0.8)):
            canvas.paint(canvas.ellipse(u + du, floor - dv, size, size), LEAF)
    elif what == "lamp":
        canvas.paint(canvas.ellipse(u, -0.35, 1.7, 1.7), (1.0, 0.93, 0.70), opacity=0.55, soft=0.4)
        canvas.paint(canvas.box(u, 0.65, 0.16, 1.6), DARK)
        canvas.paint(canvas.ellipse(u, -0.35, 0.8, 0.8), (1.0, 0.90, 0.55))
    else:
        raise ValueError(f"nothing to draw is called {what!r}")
