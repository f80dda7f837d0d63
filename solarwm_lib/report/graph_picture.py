"""A picture of the graph: `snakemake --rulegraph` (or `--dag`) output drawn as SVG, without graphviz.

The classic layered drawing in small: longest-path layers, barycentre ordering, least-squares coordinates. It draws what
Snakemake printed, every edge of it, and reads well up to a few dozen nodes.
"""

from __future__ import annotations

import colorsys
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from solarwm_lib.runtime.errors import DataError

CHARACTER_PX = 7.3
LINE_PX = 17
PADDING_PX = 14
LAYER_GAP_PX = 46
NODE_GAP_PX = 26
MARGIN_PX = 16
SWEEPS = 24

_NODE = re.compile(r'^\s*"?([\w.-]+)"?\s*\[\s*label\s*=\s*"((?:[^"\\]|\\.)*)"(.*)\]\s*;?\s*$')
_EDGE = re.compile(r'^\s*"?([\w.-]+)"?\s*->\s*"?([\w.-]+)"?[^;]*;?\s*$')
_COLOR = re.compile(r'\bcolor\s*=\s*"([\d.]+)[ ,]+([\d.]+)[ ,]+([\d.]+)"')

STYLE = """
.dag text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#1c2330;text-anchor:middle}
.dag .box{fill:#ffffff;stroke-width:2}
.dag .edge{fill:none;stroke:#8a94a6;stroke-width:1.6}
.dag .tip{fill:#8a94a6}
@media (prefers-color-scheme:dark){.dag text{fill:#e8ecf3}.dag .box{fill:#1b2029}}
"""


@dataclass
class Node:
    """A box, or (without lines) a bend of an edge that passes through a layer. Sizes and places in pixels."""

    lines: tuple[str, ...] = ()
    color: str = "#8a94a6"
    layer: int = 0
    x: float = 0.0
    up: list[str] = field(default_factory=list)
    down: list[str] = field(default_factory=list)

    @property
    def width(self) -> float:
        return max(map(len, self.lines), default=0) * CHARACTER_PX + 2 * PADDING_PX if self.lines else 8.0

    @property
    def height(self) -> float:
        return len(self.lines) * LINE_PX + PADDING_PX if self.lines else 0.0


def svg_from_dot(dot: str) -> str:
    """Return an SVG document of the directed graph in `dot`, sources on top.

    Raises:
        DataError: `dot` holds no node, or an edge of an undeclared one.
    """
    nodes, edges = parse_dot(dot)
    loops = sorted({a for a, b in edges if a == b})
    forward = _acyclic([(a, b) for a, b in edges if a != b], list(nodes))
    _assign_layers(nodes, forward)
    chains = [_chain(nodes, a, b) for a, b in sorted(set(forward))]
    layers = _order(nodes)
    _place(nodes, layers)
    return _draw(nodes, layers, chains, loops, edges)


def parse_dot(dot: str) -> tuple[dict[str, Node], list[tuple[str, str]]]:
    """Read the nodes and edges that Snakemake prints; its graph, node and edge defaults are ignored."""
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    for line in dot.splitlines():
        if match := _NODE.match(line):
            label = match[2].replace('\\"', '"').replace("\\\\", "\\")
            nodes[match[1]] = Node(tuple(re.split(r"\\[nlr]", label)), _hex(match[3]))
        elif match := _EDGE.match(line):
            edges.append((match[1], match[2]))
    if not nodes:
        raise DataError("no node found; expected the dot text that `snakemake --rulegraph` prints")
    unknown = sorted({name for edge in edges for name in edge} - set(nodes))
    if unknown:
        raise DataError(f"edge of an undeclared node {unknown[0]}; the dot text is cut or not from Snakemake")
    return nodes, edges


def _hex(attributes: str) -> str:
    match = _COLOR.search(attributes)
    if not match:
        return "#8a94a6"
    hue, saturation, value = (float(part) for part in match.groups())
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _acyclic(edges: Sequence[tuple[str, str]], names: Sequence[str]) -> list[tuple[str, str]]:
    """Turn back the edges that close a cycle (a rule graph may have some where the job graph has none)."""
    following: dict[str, list[str]] = defaultdict(list)
    for a, b in edges:
        following[a].append(b)
    state: dict[str, int] = {}
    result = []
    for root in names:
        stack = [(root, iter(following[root]))] if root not in state else []
        state.setdefault(root, 1)
        while stack:
            name, rest = stack[-1]
            target = next(rest, None)
            if target is None:
                state[name] = 2
                stack.pop()
            elif state.get(target) == 1:
                result.append((target, name))
            else:
                result.append((name, target))
                if target not in state:
                    state[target] = 1
                    stack.append((target, iter(following[target])))
    return result


def _assign_layers(nodes: dict[str, Node], edges: Sequence[tuple[str, str]]) -> None:
    before: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    order: list[str] = []
    waiting = {name: len(before[name]) for name in nodes}
    ready = [name for name in nodes if not waiting[name]]
    while ready:
        name = ready.pop(0)
        order.append(name)
        for other in after[name]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    for name in order:
        nodes[name].layer = max((nodes[other].layer + 1 for other in before[name]), default=0)
    for name in reversed(order):  # sources move down to their first consumer: shorter edges
        if after[name] and not before[name]:
            nodes[name].layer = min(nodes[other].layer for other in after[name]) - 1


def _chain(nodes: dict[str, Node], a: str, b: str) -> list[str]:
    """Insert bends in the layers an edge passes and return the names from a to b."""
    names = [a]
    for layer in range(nodes[a].layer + 1, nodes[b].layer):
        name = f"{a}->{b}@{layer}"
        nodes[name] = Node(layer=layer)
        names.append(name)
    names.append(b)
    for first, second in pairwise(names):
        nodes[first].down.append(second)
        nodes[second].up.append(first)
    return names


def _order(nodes: dict[str, Node]) -> list[list[str]]:
    layers: list[list[str]] = [[] for _ in range(max(node.layer for node in nodes.values()) + 1)]
    for name, node in nodes.items():
        layers[node.layer].append(name)
    best, fewest = [list(layer) for layer in layers], _crossings(nodes, layers)
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        place = {name: index for layer in layers for index, name in enumerate(layer)}
        for layer in layers if downwards else reversed(layers):
            weight = {}
            for index, name in enumerate(layer):
                near = nodes[name].up if downwards else nodes[name].down
                weight[name] = sum(place[other] for other in near) / len(near) if near else float(index)
            layer.sort(key=weight.__getitem__)
            place.update({name: index for index, name in enumerate(layer)})
        crossings = _crossings(nodes, layers)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _crossings(nodes: dict[str, Node], layers: Sequence[Sequence[str]]) -> int:
    place = {name: index for layer in layers for index, name in enumerate(layer)}
    total = 0
    for layer in layers:
        ends = [(place[name], place[other]) for name in layer for other in nodes[name].down]
        total += sum((a - c) * (b - d) < 0 for index, (a, b) in enumerate(ends) for c, d in ends[:index])
    return total


def _place(nodes: dict[str, Node], layers: Sequence[Sequence[str]]) -> None:
    """Pull every node to the mean of its neighbours, as far as the order and the gaps of its layer allow."""
    for layer in layers:
        offset = 0.0
        for name in layer:
            nodes[name].x = offset + nodes[name].width / 2
            offset += nodes[name].width + NODE_GAP_PX
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            offsets, wanted = [], []
            offset = 0.0
            for name in layer:
                node = nodes[name]
                near = [nodes[other].x for other in (*node.up, *node.down)]
                offsets.append(offset + node.width / 2)
                wanted.append((sum(near) / len(near) if near else node.x) - offsets[-1])
                offset += node.width + NODE_GAP_PX
            for name, shift, value in zip(layer, offsets, _nondecreasing(wanted), strict=True):
                nodes[name].x = value + shift
    left = min(node.x - node.width / 2 for node in nodes.values())
    for node in nodes.values():
        node.x += MARGIN_PX - left


def _nondecreasing(values: Sequence[float]) -> list[float]:
    """Least-squares fit of a non-decreasing sequence (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            earlier, size = pools.pop()
            mean, count = (earlier * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _draw(
    nodes: dict[str, Node],
    layers: Sequence[Sequence[str]],
    chains: Sequence[Sequence[str]],
    loops: Sequence[str],
    edges: Sequence[tuple[str, str]],
) -> str:
    heights = [max(nodes[name].height for name in layer) for layer in layers]
    middles, y = [], float(MARGIN_PX)
    for height in heights:
        middles.append(y + height / 2)
        y += height + LAYER_GAP_PX
    width = max(node.x + node.width / 2 for node in nodes.values()) + MARGIN_PX + (24 if loops else 0)
    total = y - LAYER_GAP_PX + MARGIN_PX
    drawn = set(edges)
    parts = []
    for chain in chains:
        tips = [("end", (chain[0], chain[-1])), ("start", (chain[-1], chain[0]))]
        markers = "".join(f' marker-{end}="url(#dag-tip)"' for end, edge in tips if edge in drawn)
        parts.append(_curve([nodes[name] for name in chain], middles, markers))
    parts += [_loop(nodes[name], middles) for name in loops]
    parts += [_box(node, middles[node.layer]) for node in nodes.values() if node.lines]
    boxes = {name: " ".join(node.lines) for name, node in nodes.items() if node.lines}
    description = "; ".join(f"{boxes[a]} leads to {boxes[b]}" for a, b in edges) or "no edges"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="dag" role="img" aria-labelledby="dag-title dag-desc" '
        f'width="{width:.0f}" height="{total:.0f}" viewBox="0 0 {width:.0f} {total:.0f}">'
        f'<title id="dag-title">Graph of {len(boxes)} rules</title><desc id="dag-desc">{escape(description)}</desc>'
        f"<style>{STYLE}</style>"
        '<defs><marker id="dag-tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 1L10 5L0 9z"/></marker></defs>'
        + "".join(parts)
        + "</svg>\n"
    )


def _curve(chain: Sequence[Node], middles: Sequence[float], markers: str) -> str:
    start, end = chain[0], chain[-1]
    points = [(start.x, middles[start.layer] + start.height / 2)]
    points += [(node.x, middles[node.layer]) for node in chain[1:-1]]
    points.append((end.x, middles[end.layer] - end.height / 2))
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (y1 - y0) / 2
        path += f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
    return f'<path class="edge" d="{path}"{markers}/>'


def _loop(node: Node, middles: Sequence[float]) -> str:
    right, y = node.x + node.width / 2, middles[node.layer]
    return (
        f'<path class="edge" d="M{right:.1f} {y - 8:.1f}C{right + 26:.1f} {y - 20:.1f} {right + 26:.1f} {y + 20:.1f} '
        f'{right:.1f} {y + 8:.1f}" marker-end="url(#dag-tip)"/>'
    )


def _box(node: Node, middle: float) -> str:
    top = middle - node.height / 2
    text = "".join(
        f'<text x="{node.x:.1f}" y="{top + PADDING_PX / 2 + LINE_PX * (index + 0.73):.1f}">{escape(line)}</text>'
        for index, line in enumerate(node.lines)
    )
    return (
        f'<rect class="box" x="{node.x - node.width / 2:.1f}" y="{top:.1f}" width="{node.width:.1f}" '
        f'height="{node.height:.1f}" rx="9" stroke="{node.color}"/>{text}'
    )
