"""Checks of what is Python's alone: flags, tuples, names. Arrays are checked once, in the extension."""

from __future__ import annotations

from typing import Any


def kept_arrays(kept: Any) -> tuple[Any, Any]:
    """The two arrays of a kept set: ids int32 ``[num_ids]`` and offsets int64 ``[num_rows + 1]``."""
    if kept is None:
        return None, None
    if not isinstance(kept, (tuple, list)) or len(kept) != 2:
        raise TypeError(f"kept: expected None or (ids, offsets), got {type(kept).__name__}")
    if kept[1] is None:
        raise TypeError("kept offsets: expected an array that speaks DLPack, got NoneType")
    return kept[0], kept[1]


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(f'"{c}"' for c in choices)
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def given_outputs(out: Any, names: tuple[str, ...], wanted: int) -> tuple[Any, ...]:
    """``out`` as one entry per output, None where it is to be allocated; bit i of ``wanted`` asks for output i."""
    given = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(given) > len(names):
        raise ValueError(f"out: expected at most {len(names)} arrays ({', '.join(names)}), got {len(given)}")
    given += (None,) * (len(names) - len(given))
    for i, (name, array) in enumerate(zip(names, given, strict=True)):
        if array is not None and not wanted >> i & 1:
            raise ValueError(f"out: expected None for {name}, which is not asked for, got an array")
        if array is not None and type(array).__module__.split(".")[0] in ("jax", "jaxlib"):
            raise TypeError("out: expected an array that can be written, got a JAX array, which is immutable")
    return given
