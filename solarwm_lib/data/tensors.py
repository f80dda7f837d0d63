"""Safetensors bytes as named arrays of bytes, without torch: a header that lies is refused before a value is used."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from solarwm_lib.runtime.errors import DataError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a file: safetensors dtype name, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def describe(self) -> str:
        """Return dtype and shape for a message."""
        return f"{DTYPE_NAMES.get(self.dtype, self.dtype)} {list(self.shape)}"

    def finite(self) -> bool:
        """Return whether no value is NaN or infinite; a bfloat16 is one of these if all its exponent bits are set."""
        if self.dtype == "BF16":
            bits = np.frombuffer(self.data, "<u2")
            return not bool(((bits & 0x7F80) == 0x7F80).any())
        if self.dtype in ("F64", "F32", "F16"):
            return bool(np.isfinite(np.frombuffer(self.data, f"<f{ITEM_BYTES[self.dtype]}")).all())
        return True


def parse_safetensors(content: bytes, name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file; they share its memory. DataError, labelled `name`, if it is not one."""
    try:
        if len(content) < 8:
            raise ValueError(f"{len(content)} bytes")
        (size,) = struct.unpack_from("<Q", content)
        if size > len(content) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(content)}")
        header = json.loads(content[8 : 8 + size])
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        header.pop("__metadata__", None)
        return _tensors(header, memoryview(content)[8 + size :])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{name}: not a readable safetensors file ({error!s:.200}); encode the sample again"
        ) from None


def _tensors(header: dict[str, Any], body: memoryview) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"shape {list(shape)} of {name!r}")
        if (item := ITEM_BYTES.get(entry["dtype"])) is None:
            raise ValueError(f"dtype {entry['dtype']!r} of {name!r}, known: {', '.join(ITEM_BYTES)}")
        if start != end or stop - start != math.prod(shape) * item or stop > len(body):
            raise ValueError(
                f"{name!r} lies at bytes {start} to {stop} of {len(body)}, expected {math.prod(shape) * item} from {end}"
            )
        tensors[name] = StoredTensor(entry["dtype"], shape, body[start:stop])
        end = stop
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes belong to no tensor")
    return tensors
