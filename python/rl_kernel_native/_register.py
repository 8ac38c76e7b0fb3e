"""Registers an operator with torch: schema, kernel, fake kernel, derivatives, and open numbers, whose values a trace
does not fix.

A schema's ``float`` makes torch.compile compile again for each value. A ``Scalar`` also accepts an open number. An open
number is passed as a float64 tensor in the last argument ``open_numbers``. The argument itself is then NaN, a value
that every operator refuses from a user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._native import module as _C
from ._operator import Operator
from ._torch import DTYPES, functorch_active, is_grad_enabled

may_skip_dispatcher = _C.may_skip_dispatcher

LIBRARY = torch.library.Library("rl_kernel_native", "FRAGMENT")


class _Unknown(float):
    """The value that a fake kernel sees for an open number: it is in the range of every check."""


UNKNOWN = _Unknown(1.0)

_numbers: dict[str, tuple[int, ...]] = {}  # for each operator with numbers, their positions


def define(schema: str) -> None:
    """Defines an operator from a schema in which numbers have the types ``float``, ``float?`` or ``float[]``."""
    name, _, rest = schema.partition("(")
    arguments, _, results = rest.partition(") -> ")
    found = arguments.split(", ")
    places = tuple(i for i, argument in enumerate(found) if argument.startswith("float"))
    if places:
        _numbers[name] = places
        arguments = re.sub(r"\bfloat(?=\W)", "Scalar", arguments) + ", Tensor[]? open_numbers=None"
    LIBRARY.define(f"{name}({arguments}) -> {results}")


def fake(name: str, kernel: Callable[..., Any]) -> None:
    """Registers an operator's fake kernel."""
    torch.library.register_fake(f"rl_kernel_native::{name}", _known(name, kernel, _unknown), lib=LIBRARY)


def implement(name: str, kernel: Any, differentiable: Any = None, direct: Any = None) -> None:
    """Registers an operator's kernel. ``differentiable`` computes the same by autograd Functions, for a graph that was
    exported without these Functions. If it is None, a call that would lose a derivative is an error. Under a transform
    of torch.func, such a call is always an error, because the transform must reach the Function first. ``direct`` is
    the kernel for plain tensors."""
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, _known(name, kernel, _value), key)
    operator = getattr(torch.ops.rl_kernel_native, name).default
    places = _numbers.get(name, ())
    if direct is not None:
        _skip_dispatcher(name, operator, direct)

    def derived(*arguments: Any) -> Any:
        flat = [t for a in arguments for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]
        if not (is_grad_enabled() and any(t.requires_grad for t in flat)) and not any(map(_has_tangent, flat)):
            if places:
                arguments = _as_tensors(arguments, places)
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)
        if differentiable is None or functorch_active():
            raise RuntimeError(
                f"{name}: a derivative is wanted where it would be lost; torch.ops.rl_kernel_native.{name} has none "
                "here, the functions of rl_kernel_native have"
            )
        return differentiable(*arguments)

    LIBRARY.impl(name, derived, "Autograd")


def _skip_dispatcher(name: str, operator: Any, direct: Any) -> None:
    """Lets calls with plain tensors, as in a compiled graph, reach ``direct`` without the dispatcher, which takes more
    time than such a call itself. A call of an OpOverload runs its attribute ``_op``, so this function replaces
    ``_op``."""
    dispatched, count = operator._op, len(operator._schema.arguments) - (name in _numbers)

    def called(*arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != count or not may_skip_dispatcher(arguments):
            return dispatched(*arguments, **named)
        return direct(*arguments)

    operator._op = called


def _has_tangent(tensor: Tensor) -> bool:
    return (
        forward_ad._current_level >= 0
        and torch._C._is_fwd_grad_enabled()
        and forward_ad.unpack_dual(tensor).tangent is not None
    )


def _mapped(arguments: Any, places: tuple[int, ...], each: Callable[[Any], Any]) -> list[Any]:
    """The arguments, with ``each`` applied to their numbers."""
    found = list(arguments)
    for i in places:
        given = found[i]
        found[i] = [each(x) for x in given] if isinstance(given, (list, tuple)) else each(given)
    return found


def _as_tensors(arguments: tuple[Any, ...], places: tuple[int, ...]) -> Any:
    """The arguments of a trace in the kernel's form. Each open number becomes a tensor: a tensor 1 times
    the number, an expression that torch's compiler passes know. NaN marks the number's place in the arguments, so a NaN
    from the caller is also passed as a tensor."""
    tensors: list[Tensor] = []
    is_open = False

    def each(x: Any) -> Any:
        nonlocal is_open
        is_traced = isinstance(x, (torch.SymFloat, torch.SymInt))
        if not is_traced and not (isinstance(x, float) and math.isnan(x)):
            return x
        is_open |= is_traced
        one: Any = torch.ones((), dtype=torch.float64, device="cpu")
        tensors.append(one * x)
        return math.nan

    found = _mapped(arguments, places, each)
    return (*found, tensors) if is_open else arguments


def _value(tensors: Iterator[Tensor], x: Any) -> Any:
    """The value of a number. NaN means that the next tensor holds it."""
    if x is None:
        return None
    tensor = next(tensors, None) if x != x else None
    return float(x) if tensor is None else tensor.item()


def _unknown(tensors: Iterator[Tensor], x: Any) -> Any:
    if x is None:
        return None
    if isinstance(x, (torch.SymFloat, torch.SymInt)):
        return UNKNOWN
    return UNKNOWN if x != x and next(tensors, None) is not None else float(x)


def _known(name: str, function: Callable[..., Any], number: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel so that each number among its arguments passes through ``number``."""
    places = _numbers.get(name)
    if places is None:
        return function
    count = len(getattr(torch.ops.rl_kernel_native, name).default._schema.arguments) - 1

    def kernel(*arguments: Any) -> Any:
        tensors = iter(arguments[count] or ()) if len(arguments) > count else iter(())
        return function(*_mapped(arguments[:count], places, lambda x: number(tensors, x)))

    return kernel


# ---- the schema of a description -------------------------------------------------------------------------------------


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
    """Arrays in the schema's form. Listed arrays are in one list. An array that a number may replace is followed by an
    argument for the number."""
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
