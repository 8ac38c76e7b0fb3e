"""Runs a call of a described operator: directly to the extension, or through the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _torch
from ._dispatch import count_write
from ._native import module as _C
from ._operator import Operator
from ._register import as_schema, is_number, title
from ._torch import apply_function, functorch_active, is_compiling, is_grad_enabled, require_tensors

_ops = torch.ops.rl_kernel_native
get_num_threads, set_num_threads = torch.get_num_threads, _C.set_num_threads


def traced(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outputs of a traced or transformed call. The outputs of a loss include its gradients."""
    require(op, arrays, how)
    return applied(op, arrays, how)


def applied(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    how, more = op.schema_options(how[: op.num_options]), how[op.num_options :]
    if op.gradient is None:
        if not is_compiling():
            _torch.device_type(arrays[0], op.arrays[0].label(how))
        if op.written:
            found = getattr(_ops, op.name)(*arrays, *how)
            if not op.dtypes:
                return ()
        else:
            given = (x.detach() if isinstance(x, Tensor) else x for x in as_schema(op, arrays))
            found = getattr(_ops, op.name)(*given, *how)
    else:
        # Operators without main_grad have the options `more` only in eager calls.
        more = () if op.gradient.accumulates is None else more
        operator = functools.partial(registered, op) if op.num_listed else getattr(_ops, op.name)
        found = apply_function(operator, title(op), *arrays, *how, more=more)
    outputs = found if isinstance(found, tuple) else (found,)
    shapes = op.outputs(arrays, how)
    return tuple(None if shape is None else o for o, shape in zip(outputs, shapes, strict=True))


def registered(op: Operator, *arguments: Any) -> Any:
    """Calls the registered operator with arrays and options of the description."""
    count = len(op.arrays)
    return getattr(_ops, op.name)(*as_schema(op, arguments[:count]), *arguments[count:])


def straight(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> Any:
    first = arrays[op.leads]
    if first.is_cpu:
        set_num_threads(get_num_threads())
    elif not first.is_cuda:
        _torch.device_type(first, op.arrays[op.leads].label(how, arrays))
    found = op.native(arrays, how, None, 0)
    for i in op.written:
        count_write(arrays[i])
    return found or ()


def refuse_derivatives(op: Operator, arrays: Sequence[Any]) -> None:
    """Refuses calls that would lose a derivative in the arrays that an operator writes."""
    for a, x in zip(op.arrays, arrays, strict=True) if is_grad_enabled() else ():
        if x is not None and isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{a.name}: requires a gradient, which a cache does not keep; call under torch.no_grad() or pass "
                f"{a.name}.detach()"
            )
    written = op.arrays[op.written[0]]
    if functorch_active() and (written.added or not is_compiling()):
        raise ValueError(f"{written.name}: cannot be {'given' if written.added else 'written'} under torch.func")


def require(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> None:
    required: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    for a, x in sorted(zip(op.arrays, arrays, strict=True), key=lambda pair: pair[0] is not op.arrays[op.leads]):
        if not ((a.number and is_number(x)) or (a.optional and x is None)):
            name = a.label(how, arrays)
            if name in required or name in optional:  # where two arrays have one label, the second is named by `name`
                name = a.name
            (optional if a.optional or a.number else required)[name] = x
    require_tensors(**required, cures=op.cures, optional=optional)


def is_differentiated(op: Operator, of: Any, arrays: Sequence[Any], how: tuple[Any, ...]) -> bool:
    """Whether an array that may have a gradient requires a gradient. Any other array that requires a gradient is
    refused."""
    found = False
    for i, x in enumerate(arrays):
        if x is not None and getattr(x, "requires_grad", False) and isinstance(x, Tensor):
            if of.constants is not None and not (i in of.of and of.allows(i, how)):
                refuse_constant(op, of, op.arrays[i].label(how))
            found = True
    return found


def refuse_constant(op: Operator, of: Any, name: str) -> None:
    words = of.constants or f"requires a gradient, and {op.name} gives none"
    raise ValueError(f"{name}: {words}; pass {name}.detach()")
