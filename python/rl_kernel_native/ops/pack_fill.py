"""The fill value of pack and unpack for slots without a token, as bytes of a dtype."""

from __future__ import annotations

import math

import numpy as np

from .._check import shown


def is_zero(fill: int | float) -> bool:
    """Tells whether all bits of the value are 0 in every dtype."""
    return fill == 0 and math.copysign(1.0, fill) > 0


def fill_bits(value: int | float, dtype: str) -> int:
    """Returns eight bytes, filled with elements of this dtype that equal ``value``, as an integer. An integer value
    must be exact in the dtype; a float is rounded to nearest."""
    if is_zero(value):
        return 0
    element = _bfloat16(value) if dtype == "bfloat16" else _element(value, dtype)
    if element is None:
        raise ValueError(f"fill_value: expected a number that dtype {dtype} holds, got {shown(value)}")
    if len(element) > 8:
        raise ValueError(f"fill_value: expected 0 for dtype {dtype}, got {shown(value)}")
    return int.from_bytes(element * (8 // len(element)), "little")


def _element(value: int | float, dtype: str) -> bytes | None:
    try:
        kind = np.dtype(dtype)
        with np.errstate(over="ignore"):
            element = np.array(int(value) if kind.kind in "iu" else value, kind)
    except (TypeError, ValueError, OverflowError):  # a dtype unknown to NumPy, or NaN or inf as an integer
        return None
    if kind.kind not in "biufc" or (kind.kind in "biu" and int(element) != value):
        return None
    if kind.kind in "fc" and bool(np.isinf(element)) and not math.isinf(value):
        return None
    return element.tobytes()


def _bfloat16(value: int | float) -> bytes | None:
    """Rounds to nearest even by integer arithmetic on the bits of float32. Returns None on overflow."""
    with np.errstate(over="ignore"):
        bits = int(np.float32(value).view(np.uint32))
    element = bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF
    if element & 0x7FFF == 0x7F80 and not math.isinf(value):
        return None
    return element.to_bytes(2, "little")
