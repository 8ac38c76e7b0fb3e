"""Turns an operator's description into a torch schema, and a call's arguments into the schema's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._operator import Operator
from ._torch import DTYPES


def title(op: Operator) -> str:
    """The name of the operator's Function."""
    return op.name.title().replace("_", "")


def schema(op: Operator) -> str:
    found = [f"Tensor[] {op.arrays[0].listed}"] if op.num_listed else []
    for i, a in enumerate(op.arrays[op.num_listed :]):
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
    """Arrays in the schema's form: a list holds its arrays, and an array that may be a number is followed by it."""
    if op.is_schema:
        return arrays
    first = op.num_listed
    found: list[Any] = [[x for x in arrays[:first] if x is not None]] if first else []
    for a, x in zip(op.arrays[first:], arrays[first:], strict=True):
        if not a.number:
            found.append(x)
        else:
            found += (None, x) if is_number(x) else (x, _NO_NUMBER[a.number])
    return found


def apart(op: Operator, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits a schema's arguments into arrays and options."""
    if op.is_schema:
        count = len(op.arrays)
        return tuple(arguments[:count]), tuple(arguments[count:])
    given, first = iter(arguments), op.num_listed
    arrays: list[Any] = list(next(given)) if first else []
    arrays += [None] * (first - len(arrays))
    for a in op.arrays[first:]:
        x = next(given)
        number = next(given) if a.number else None
        arrays.append(number if x is None else x)
    return tuple(arrays), tuple(given)


def dtype_of(entry: Any, how: tuple[Any, ...], arrays: Sequence[Any]) -> Any:
    if type(entry) is int:
        return None if arrays[entry] is None else arrays[entry].dtype
    if callable(entry):
        found = entry(how)
        return DTYPES[found] if type(found) is int else found
    return entry
