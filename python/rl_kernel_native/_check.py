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
