"""Random access to the decompressed bytes of a gzip file.

One pass through the file keeps copies of the inflater's state (about 45 KB each) at regular distances; a read continues
from the copy before it. Files of several members and zero padding between them are read as gzip reads them.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

GZIP = 31  # zlib's name for a gzip header and trailer
OUTPUT = 1 << 18
INPUT = 1 << 16


@dataclass(frozen=True)
class _State:
    """The inflater after `output` decompressed bytes; the next compressed byte is at `position`.

    `inflater` is None between two members and is never fed, only copied: threads may share a state.
    """

    output: int
    position: int
    inflater: Any


class RandomGzip:
    """Decompressed bytes of an open gzip file; after `chunks` has been read to its end, `pread` reads any part.

    Safe between threads and across fork: reads are positioned and nothing shared is changed in place.
    """

    def __init__(self, descriptor: int, *, spacing: int = OUTPUT, most_points: int = 2048) -> None:
        self._descriptor, self._spacing, self._most = descriptor, spacing, most_points
        self._points = [_State(0, 0, None)]
        self._recent = (self._points[0], b"", self._points[0])

    def chunks(self, seen: Callable[[bytes], Any] = lambda compressed: None) -> Iterator[bytes]:
        """Yield the whole content in pieces of at most 256 KiB and remember access points; `seen` gets the file's bytes.

        Raises zlib.error for bytes that are not gzip or fail its checksum, EOFError for a cut file.
        """
        self._points = [_State(0, 0, None)]
        for data, state in _inflate(self._descriptor, self._points[0], seen):
            if state.output - self._points[-1].output >= self._spacing:
                self._points.append(_copied(state))
                if len(self._points) > self._most:
                    # Bounded memory: halve the points, double the distance between them.
                    self._points, self._spacing = self._points[::2], 2 * self._spacing
            if data:
                yield data

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` decompressed bytes from `offset`; fewer only at the end of the content."""
        point = self._points[bisect_right(self._points, offset, key=lambda state: state.output) - 1]
        start, data, reached = self._recent
        if start is not point:
            start, data, reached = point, b"", point
        if reached.output < offset + size:
            pieces, state = [data], reached
            for piece, state in _inflate(self._descriptor, _copied(reached)):
                pieces.append(piece)
                if state.output >= offset + size:
                    break
            data = b"".join(pieces)
            self._recent = (start, data, _copied(state))
        return data[offset - start.output : offset - start.output + size]


def _copied(state: _State) -> _State:
    return _State(state.output, state.position, None if state.inflater is None else state.inflater.copy())


def _inflate(
    descriptor: int, state: _State, seen: Callable[[bytes], Any] = lambda compressed: None
) -> Iterator[tuple[bytes, _State]]:
    """Yield (output, state after it) from a state on; the state's inflater is fed and belongs to the generator."""
    output, position, inflater, pending = state.output, state.position, state.inflater, b""
    while True:
        if not pending:
            pending = os.pread(descriptor, INPUT, position)
            seen(pending)
            if not pending and inflater is None:
                return
            if not pending:
                raise EOFError("the compressed file ends before its end-of-stream marker")
        if inflater is None:
            padded, pending = pending, pending.lstrip(b"\0") if position else pending
            position += len(padded) - len(pending)
            if not pending:
                continue
            inflater = zlib.decompressobj(GZIP)
        data = inflater.decompress(pending, OUTPUT)
        rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        position, pending, output = position + len(pending) - len(rest), rest, output + len(data)
        if inflater.eof:
            inflater = None
        yield data, _State(output, position, inflater)
