"""Turns an operator's description into a torch schema, and into its fake kernel's checks of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._operator import Operator
from ._shapes import (
    FLOAT32,
    FLOATS,
    INDICES,
    check_contiguous,
    check_element,
    check_first,
    check_logits,
    check_mask,
    check_offsets,
    check_row_integers,
    check_row_vector,
    check_tokens,
    check_vector,
)
from ._torch import DTYPES, memory


class _Seen:
    """The facts that a fake kernel has collected about a call: its leading array with its name, and the number of
    sequences."""

    def __init__(self, op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> None:
        self.first, self.name, self.sequences = arrays[op.leads], op.arrays[op.leads].label(how, arrays), None
        self.offsets = next((x for a, x in zip(op.arrays, arrays, strict=True) if a.kind == "cu_seqlens"), None)


def _first(*dtypes: str) -> Callable[[_Seen, Any, str], None]:
    def check(seen: _Seen, x: Any, name: str) -> None:
        seen.sequences = check_first(x, name, seen.offsets, dtypes)

    return check


def _one_a_sequence(seen: _Seen, x: Any, name: str) -> None:
    check_vector(x, name, FLOAT32, seen.sequences, "num_sequences")
    check_contiguous(x, name)


# The checks of a fake kernel for each kind of array.
KINDS: dict[str, Callable[[_Seen, Any, str], None]] = {
    "first tokens": _first(*FLOAT32),
    "first mask": _first(),
    "first ids": _first(*INDICES),
    "first floats": _first(*FLOATS),
    "tokens": lambda seen, x, name: check_tokens(x, name, seen.first, seen.name),
    "tokens or sequences": lambda seen, x, name: check_tokens(x, name, seen.first, seen.name, seen.sequences),
    "mask": lambda seen, x, name: check_mask(x, seen.first.shape, seen.name),
    "cu_seqlens": lambda seen, x, name: None,  # the first array's check covers it
    "offsets": lambda seen, x, name: check_offsets(x, name),
    "sequences": _one_a_sequence,
    "number": lambda seen, x, name: check_element(x, name),
    "first integers": lambda seen, x, name: check_row_integers(x, name, None),
    "integers": lambda seen, x, name: check_row_integers(x, name, seen.first),
    "row numbers": lambda seen, x, name: check_row_vector(x, name, "float32", seen.first),
    "row flags": lambda seen, x, name: check_row_vector(x, name, "bool", seen.first),
    "logits": lambda seen, x, name: check_logits(x, name),
    "by hand": lambda seen, x, name: None,
}


def check_arrays(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> None:
    """The extension's checks of shapes and dtypes, with its error messages."""
    seen = _Seen(op, arrays, how)
    for a, x in zip(op.arrays, arrays, strict=True):
        if x is not None:
            if a.number and is_number(x):
                continue
            KINDS[a.kind if isinstance(a.kind, str) else a.kind(how)](seen, x, a.label(how, arrays))
        elif not a.optional:
            raise TypeError(f"{a.label(how, arrays)}: expected an array that speaks DLPack, got NoneType")
    if op.check is not None:
        op.check(arrays, how, seen.sequences)


def title(op: Operator) -> str:
    """The name of the operator's Function."""
    return op.name.title().replace("_", "")


def schema(op: Operator) -> str:
    found: list[str] = []
    for i, a in enumerate(op.arrays):
        alias = f"({'abcd'[op.written.index(i)]}!)" if a.written else ""
        found.append(f"Tensor{alias}{'?' * (a.optional or bool(a.number))} {a.name}")
        if a.number:
            found.append(f"{a.number} {a.name}_value")
    return ", ".join([*found, *([op.options] if op.options else [])])


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_NO_NUMBER: dict[str, Any] = {"SymInt": 0, "float": 0.0, "bool": False}


def is_number(x: Any) -> bool:
    return isinstance(x, _NUMBERS)


def as_schema(op: Operator, arrays: Sequence[Any]) -> Sequence[Any]:
    """Arrays in the schema's form: an array that may be a number is followed by that number."""
    if not op.has_numbers:
        return arrays
    found: list[Any] = []
    for a, x in zip(op.arrays, arrays, strict=True):
        if not a.number:
            found.append(x)
        else:
            found += (None, x) if is_number(x) else (x, _NO_NUMBER[a.number])
    return found


def apart(op: Operator, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits a schema's arguments into arrays and options."""
    if not op.has_numbers:
        count = len(op.arrays)
        return tuple(arguments[:count]), tuple(arguments[count:])
    given = iter(arguments)
    arrays: list[Any] = []
    for a in op.arrays:
        x = next(given)
        number = next(given) if a.number else None
        arrays.append(number if x is None else x)
    return tuple(arrays), tuple(given)


def dtype_of(entry: Any, how: tuple[Any, ...], arrays: Sequence[Any]) -> Any:
    if type(entry) is int:
        return None if arrays[entry] is None else arrays[entry].dtype
    if callable(entry):
        code = entry(how)
        return None if code is None else DTYPES[code]
    return entry


def operand(x: Any) -> Any:
    return memory(x) if isinstance(x, Tensor) else x
