"""Small line charts as inline SVG: they follow the page's colours, stay sharp and need no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40
POINTS = 240


@dataclass(frozen=True)
class Series:
    """A line: (x, y) points in order of x. Values that are not finite are left out."""

    label: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, series: Sequence[Series], *, x_label: str, log: bool = False) -> str:
    """Return a `<figure>` of the series; `log` is used only where every value is positive."""
    lines = [Series(item.label, _thin([p for p in item.points if math.isfinite(p[1])])) for item in series]
    lines = [item for item in lines if item.points]
    if not lines:
        return ""
    xs = [x for item in lines for x, _ in item.points]
    ys = [y for item in lines for _, y in item.points]
    log = log and min(ys) > 0
    scaled = [math.log10(y) for y in ys] if log else ys
    low, high = _padded(min(scaled), max(scaled))
    first, last = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1

    def place(x: float, y: float) -> tuple[float, float]:
        value = math.log10(y) if log else y
        return (
            LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT),
            TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    parts = []
    for tick in _ticks(low, high, log):
        y = place(first, 10**tick if log else tick)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(10**tick if log else tick)}</text>'
        )
    for tick in _ticks(first, last, False):
        x = place(tick, ys[0])[0]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle">{_label(tick)}</text>')
    for number, item in enumerate(lines):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in item.points))
        parts.append(f'<path class="line series-{number % 6}" d="M{path}"/>')
        if len(item.points) <= 12:
            dots = "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in (place(*p) for p in item.points)
            )
            parts.append(f'<g class="dots series-{number % 6}">{dots}</g>')
    said = "; ".join(
        f"{item.label} from {_label(item.points[0][1])} to {_label(item.points[-1][1])}" for item in lines
    )
    legend = "".join(f'<li class="series-{n % 6}">{escape(item.label)}</li>' for n, item in enumerate(lines))
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{" (log scale)" if log else ""}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title} over {x_label}: {said}")}">'
        + "".join(parts)
        + f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end" class="axis">{escape(x_label)}</text></svg>'
        + (f'<ul class="legend">{legend}</ul>' if len(lines) > 1 else "")
        + "</figure>"
    )


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average neighbours until at most `POINTS` are left: a page needs no more, and a noisy loss reads better."""
    size = math.ceil(len(points) / POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Return round values within [low, high]; of a logarithm, whole powers or 1, 2, 5 steps between them."""
    if log:
        exponents = range(math.floor(low), math.ceil(high) + 1)
        fine = [e + math.log10(m) for e in exponents for m in (1, 2, 5)]
        inside = [tick for tick in fine if low <= tick <= high]
        whole = [tick for tick in inside if tick == round(tick)]
        chosen = whole if len(whole) >= 3 else inside
        return chosen[:: math.ceil(len(chosen) / 7)] if chosen else [(low + high) / 2]
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float) -> str:
    if value and (abs(value) >= 1e5 or abs(value) < 1e-4):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"
