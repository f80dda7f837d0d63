"""Markdown to HTML for the reports this package writes: headings, bullet lists, tables, `code` and **bold**.

Everything else is text. All text is escaped, so no file name or error message can inject markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby

_INLINE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*")
_CELLS = re.compile(r"(?<!\\)\|")


def to_html(markdown: str, *, top_level: int = 1) -> str:
    """Return the HTML of a report; its `#` headings become `<h{top_level}>`."""
    parts = []
    for kind, lines in groupby((line for line in markdown.splitlines()), key=_kind):
        block = list(lines)
        if kind == "heading":
            parts += [_heading(line, top_level) for line in block]
        elif kind == "bullet":
            parts.append("<ul>" + "".join(f"<li>{inline(line[2:])}</li>" for line in block) + "</ul>")
        elif kind == "table":
            parts.append(_table(block))
        elif kind == "text":
            parts.append(f"<p>{inline(' '.join(block))}</p>")
    return "\n".join(parts)


def inline(text: str) -> str:
    """Return escaped text with `code` and **bold** marked up."""
    parts, position = [], 0
    for match in _INLINE.finditer(text):
        tag, content = ("code", match[1]) if match[1] else ("strong", match[2])
        parts += [escape(text[position : match.start()]), f"<{tag}>{escape(content)}</{tag}>"]
        position = match.end()
    return "".join(parts) + escape(text[position:])


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a scrolling table of plain text cells; numbers are aligned right."""
    return _table_html([inline(cell) for cell in head], [[inline(cell) for cell in row] for row in rows])


def _kind(line: str) -> str:
    if line.startswith("#"):
        return "heading"
    if line.startswith("- "):
        return "bullet"
    if line.startswith("|"):
        return "table"
    return "text" if line.strip() else "blank"


def _heading(line: str, top_level: int) -> str:
    marks = len(line) - len(line.lstrip("#"))
    level = min(6, top_level + marks - 1)
    return f"<h{level}>{inline(line[marks:].strip())}</h{level}>"


def _table(lines: Sequence[str]) -> str:
    rows = [[inline(cell.strip().replace("\\|", "|")) for cell in _CELLS.split(line)[1:-1]] for line in lines]
    return _table_html(rows[0], rows[2:])


def _table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    header = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: str) -> str:
    number = re.fullmatch(r"[+-]?\d[\d.,]*(e[+-]?\d+)?( (dB|MiB|s))?|-", cell)
    return f'<td class="number">{cell}</td>' if number else f"<td>{cell}</td>"
