"""Checks of arguments that only Python sees: flags, tuples, names. The extension checks arrays. This module imports
only the standard library, because contract.py imports this module."""

from __future__ import annotations

import functools
import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any


def kept_arrays(kept: Any) -> tuple[Any, Any]:
    """The two arrays that say which token ids sampling kept in each row: ids int32 ``[num_ids]`` and offsets int64
    ``[num_rows + 1]``."""
    if kept is None:
        return None, None
    if not isinstance(kept, (tuple, list)) or len(kept) != 2:
        raise TypeError(f"kept: expected None or (ids, offsets), got {type(kept).__name__}")
    if kept[1] is None:
        raise TypeError("kept offsets: expected an array that speaks DLPack, got NoneType")
    return kept[0], kept[1]


def is_choice(value: object, choices: Collection[Any]) -> bool:
    """Whether the value is a string in ``choices``, or is None and ``choices`` has None. Only strings are compared,
    because comparing an array with a string gives an array or an error."""
    return (value is None or isinstance(value, str)) and value in choices


def one_of(name: str, value: object, choices: tuple[str, ...], known_as: Mapping[str, str] | None = None) -> None:
    """Refuses a value outside ``choices``. ``known_as`` maps names that other libraries use to choices; the error then
    suggests the choice."""
    if not is_choice(value, choices):
        expected = ", ".join(f'"{c}"' for c in choices)
        ours = (known_as or {}).get(value) if isinstance(value, str) else None
        cure = f', which is "{ours}" here' if ours else ""
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}{cure}")


def neutral_rollout(rollout_nan: Any) -> bool:
    """Whether the option ``rollout_nan`` gives a token with a NaN as rollout log-probability a ratio of 1."""
    one_of("rollout_nan", rollout_nan, ("nan", "neutral"))
    return bool(rollout_nan == "neutral")


def given_outputs(out: Any, names: tuple[str, ...], wanted: int) -> tuple[Any, ...]:
    """``out`` with one entry per output, and None for an output that must be allocated. Bit i of ``wanted`` asks for
    output i."""
    given = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(given) > len(names):
        raise ValueError(f"out: expected at most {len(names)} arrays ({', '.join(names)}), got {len(given)}")
    given += (None,) * (len(names) - len(given))
    for i, (name, array) in enumerate(zip(names, given, strict=True)):
        if array is not None and not wanted >> i & 1:
            raise ValueError(f"out: expected None for {name}, which is not asked for, got an array")
        writable("out", array)
    return given


def writable(name: str, array: Any) -> None:
    if array is not None and type(array).__module__.split(".")[0] in ("jax", "jaxlib"):
        raise TypeError(f"{name}: expected an array that can be written, got a JAX array, which is immutable")


def parts(arrays: Any) -> list[Any]:
    """The partial results of ranks as a list. The caller adds them in the order of a binary tree."""
    try:
        found = list(arrays)
    except (TypeError, RuntimeError):  # `arrays` is an array without dimensions or a nested tensor
        raise TypeError(f"parts: expected a sequence of arrays, got {type(arrays).__name__}") from None
    for part in found:
        if part is None:
            place = [x is None for x in found].index(True)
            raise TypeError(f"parts[{place}]: expected an array that speaks DLPack, got NoneType")
    if len(found) not in (1, 2, 4, 8):
        raise ValueError(f"parts: expected 1, 2, 4 or 8 arrays, got {len(found)}")
    return found


def shown(value: Any, number: str = "an integer") -> str:
    """The text of a value in an error. A large integer is described by its bits: Python refuses to print thousands of
    digits. ``number`` names this integer: "one" in an error that expects an integer."""
    if isinstance(value, int) and not -(1 << 64) < value < 1 << 64:
        return f"{number} of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # the object holds a huge integer, or its repr fails
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def integer(name: str, value: Any, expected: str = "an integer") -> int:
    """An integer of 64 bits, with or without a sign."""
    found = value
    if type(value) is not int:
        try:
            if isinstance(value, bool) or hasattr(value, "__dlpack__"):  # reading an array would wait for its device
                raise TypeError
            found = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}") from None
    if not -(1 << 63) <= found < 1 << 64:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {shown(found, 'one')}")
    return found


def integer64(name: str, value: Any, expected: str = "an integer") -> int:
    """An integer that fits the extension's signed 64 bits."""
    found = integer(name, value, expected)
    if not found < 1 << 63:
        raise ValueError(f"{name}: expected an integer of 64 bits, got {shown(found, 'one')}")
    return found


def flag(name: str, value: Any) -> bool:
    """A bool. A value of another type is refused, because, for example, the string "False" would count as true."""
    if isinstance(value, bool):
        return value
    import numpy as np

    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of options that checks each combination of options only once. For unhashable options, the function is
    called each time, and must refuse them with an error of its own."""
    known = functools.lru_cache(maxsize=256, typed=True)(function)

    def call(*options: Any) -> Any:
        try:
            hash(options)
        except TypeError:
            return function(*options)
        return known(*options)

    return call


def mask_dtype(name: str, dtype: str) -> None:
    """Refuses mask dtypes for which the rule of zeros (docs/tokens.md) is not defined."""
    if not re.fullmatch(r"bool|u?int(8|16|32|64)|b?float(16|32|64)", dtype):
        raise TypeError(f"{name}: expected dtype {MASKS}, got {dtype}")


MASKS = "bool, of integers or of floats of 16 bits and more"


def held_by(array: str, value: int, name: str, dtype: str) -> None:
    """Refuses a number that an int32 or int64 array cannot hold."""
    bits = 31 if dtype.endswith("int32") else 63
    if not -(1 << bits) <= value < 1 << bits:
        raise ValueError(f"{name}: expected an integer of {bits + 1} bits (those of {array}), got {value}")


def number(name: str, value: Any, expected: str = "a number") -> float:
    """A number as Python's float. A tensor is refused, because reading it would wait for its device and lose its
    gradient. NumPy's float64 is converted, because it would widen float32 arrays in arithmetic."""
    if isinstance(value, float):
        return value if type(value) is float else float(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1023:  # in a trace, also a SymInt
        return float(value)
    import numpy as np

    is_tensor = hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray)
    has_value = hasattr(value, "__float__") or hasattr(value, "__index__")
    if has_value and not is_tensor and not isinstance(value, (bool, np.bool_, str)):
        try:
            return float(value)
        except OverflowError:
            got = shown(value) if isinstance(value, int) else f"a larger {type(value).__name__}"
            raise ValueError(f"{name}: expected {expected} below 2^1024 in magnitude, got {got}") from None
        except (TypeError, ValueError):  # `value` holds several numbers
            pass
    raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


SMALLEST_NORMAL = 2.0**-126  # in float32; a smaller number may have an infinite inverse
_BEYOND = 2.0**128 - 2.0**103  # from this value on, rounding to float32 gives inf


def is_compiling() -> bool:
    """A stub. :mod:`_dispatch` replaces it with a function that asks torch."""
    return False


def in_float32(x: float) -> float:
    """A number rounded to float32 (a tie may go to either side). A number below the smallest normal number becomes 0,
    because its inverse may be infinite. A number in a trace is not rounded, because rounding would put a guard on its
    value."""
    if x != x:
        return math.nan
    if abs(x) >= _BEYOND:
        return math.inf if x > 0 else -math.inf  # constants: a trace cannot compute with an infinity
    if abs(x) < SMALLEST_NORMAL:
        return 0.0
    if is_compiling():
        return x
    scaled = x * (2.0**29 + 1)
    return scaled - (scaled - x)


def single(name: str, value: Any, allows: Callable[[float], bool], expected: str | Callable[[], str]) -> float:
    """Checks a number, and its value in float32, which the operator uses. A finite number that is infinite in float32
    is refused. ``expected`` is a text. A text with a number of the call is given as a function, because a number in a
    trace has no text.

    Returns: the number, not rounded."""
    x = number(name, value)
    rounded = in_float32(x)
    if not (allows(x) and allows(rounded)) or abs(x) < abs(rounded) == math.inf:
        if is_compiling():
            range_of = expected if isinstance(expected, str) else "a number in the range of the docstring"
            raise ValueError(f"{name}: expected {range_of}, got another number while torch traces")
        of_float32 = f"{rounded:g} in float32" if rounded else "below the normal numbers of float32"
        why = f", which is {of_float32}" if allows(x) else ""
        words = expected if isinstance(expected, str) else expected()
        raise ValueError(f"{name}: expected {words}, got {shown(value)}{why}")
    return x


def is_number(value: Any) -> bool:
    """Whether the value is a number of Python or NumPy, for arguments that may also be arrays."""
    return isinstance(value, (int, float, numbers.Number))  # NumPy registers its scalars; a Decimal is a number, too


def denominator(value: Any) -> tuple[Any, float]:
    """A pair: the array, or None if the value is a number; and the number, or 0 if the value is an array."""
    if value is not None and is_number(value):
        return None, single("denominator", value, lambda x: 0 < x < math.inf, "a finite number > 0")
    return value, 0.0


def shape_of(array: Any) -> tuple[int, ...]:
    """The shape; () for a value without a shape, such as a nested tensor."""
    try:
        shape = array.shape
    except (AttributeError, RuntimeError):
        return ()
    return shape if isinstance(shape, tuple) else ()


def segment_count(name: str, value: Any) -> int:
    count = integer(name, value)
    if count not in (1, 2, 4, 8):
        raise ValueError(f"{name}: expected 1, 2, 4 or 8, got {count}")
    return count


def of_shard(error: Exception) -> Exception:
    """An error of :func:`linear`, rephrased for :func:`linear_partial`, whose operands are shards."""
    return type(error)(re.sub(r"\b(x|weight)\b", r"\1_shard", str(error)))


def segments(k_segments: Any, first_segment: Any, num_segments: Any, x_shard: Any) -> int:
    """Checks the segments of K that a rank of a row-parallel layer holds. They must form an aligned subtree whose ends
    are multiples of 16 columns.

    Returns: the number of segments."""
    k_segments = segment_count("k_segments", k_segments)
    first_segment, num_segments = integer("first_segment", first_segment), integer("num_segments", num_segments)
    if num_segments not in (1, 2, 4, 8) or num_segments > k_segments:
        raise ValueError(f"num_segments: expected a power of two up to {k_segments} (k_segments), got {num_segments}")
    if first_segment % num_segments or not 0 <= first_segment < k_segments:
        raise ValueError(
            f"first_segment: expected a multiple of {num_segments} (num_segments) in [0, {k_segments}), got "
            f"{first_segment}"
        )
    shape = shape_of(x_shard)
    if k_segments > 1 and shape and shape[-1] % (16 * num_segments):
        raise ValueError(
            f"x_shard: expected a last dimension that is a multiple of {16 * num_segments} (16 * num_segments), got "
            f"{shape[-1]}; pad the layer's in_features with zero columns to a multiple of {16 * k_segments}"
        )
    return num_segments
