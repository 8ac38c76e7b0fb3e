"""Builds everything that torch needs from an operator's description in :mod:`_operator`.

The parts are a schema, a kernel, a fake kernel, the eager call and its autograd Function. Traces and transforms use a
second Function, which has the rules of torch.func.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _composed, _in_graph, _main_grad
from ._arithmetic import resolve_traced, resolve_traced_unit
from ._described import check
from ._dispatch import count_write
from ._native import module as _C
from ._operator import Operator
from ._register import LIBRARY, apart, define, dtype_of, fake, implement, schema, title
from ._run import is_differentiated, refuse_derivatives, straight, traced
from ._torch import (
    autocast,
    device_type,
    is_autocasting,
    is_compiling,
    is_grad_enabled,
    is_read_by_dynamo,
    memory,
    prepare,
    require_dense,
    require_tensors,
    wants_grad,
)
from ._transforms import in_batches

_ops = torch.ops.rl_kernel_native


def register(operators: Iterable[Operator]) -> None:
    for op in operators:
        _register(op)
        if (of := op.gradient) is not None:
            backward, along = of.backward, of.tangents
            if of.loss is not None:
                op.function = _composed.Kept
                backward, along = functools.partial(_composed.scaled, op), functools.partial(_composed.tangent, op)
            elif backward is not None:
                op.function = of.eager() if of.eager else _composed.Composing
            _composed.register_composed(op, of, backward, along)


def _register(op: Operator) -> None:
    dtypes: list[Any] = [getattr(torch, name) if isinstance(name, str) else name for name in op.dtypes]
    results = "()" if not dtypes else "Tensor" if len(dtypes) == 1 else f"({', '.join(['Tensor'] * len(dtypes))})"
    define(f"{op.name}({schema(op)}) -> {results}")

    def given(outputs: Any) -> Any:
        return outputs[0] if len(dtypes) == 1 else tuple(outputs)

    in_context = [(i, resolve_traced if is_exp else resolve_traced_unit) for i, is_exp in op.in_context]

    def when_run(arrays: Any, how: Any) -> Any:
        """The options, with the numbers of exp and unit that a trace could not read from the context. A backward uses
        the numbers that its forward used. A compiled forward on a CPU uses the portable exponential."""
        found = list(how)
        for i, resolve in in_context:
            kind = device_type(arrays[op.leads], op.arrays[op.leads].name)
            found[i] = max(found[i], 0) if op.follows and kind == "cpu" else resolve(found[i], kind)
        return tuple(found)

    def native(arrays: Any, how: Any) -> Any:
        return op.native(arrays, when_run(arrays, how) if in_context else how, None, 0)

    def run(arrays: Any, how: Any) -> Any:
        first = arrays[op.leads]
        prepare(first)
        found = native(arrays, how)
        for i in op.written:
            count_write(arrays[i])
        if len(dtypes) > 1:
            named = zip(found, dtypes, strict=True)
            found = [first.new_empty(0, dtype=dtype_of(d, how, arrays)) if o is None else o for o, d in named]
        return given(found) if dtypes else None

    def kernel(*arguments: Any) -> Any:
        arrays, how = apart(op, arguments)  # the extension refuses a written array with a negative bit
        return run(tuple(x if i in op.written else memory(x) for i, x in enumerate(arrays)), how)

    def shapes(*arguments: Any) -> Any:
        arrays, how = apart(op, arguments)
        check(native, arrays, how)
        if not dtypes:
            return None
        found = zip(op.outputs(arrays, how), dtypes, strict=True)
        return given(
            [arrays[op.leads].new_empty((0,) if s is None else s, dtype=dtype_of(d, how, arrays)) for s, d in found]
        )

    def differentiable(*arguments: Any) -> Any:
        return _in_graph.apply(title(op), *itertools.chain(*apart(op, arguments)))

    direct = lambda *arguments: run(*apart(op, arguments))  # noqa: E731
    implement(op.name, kernel, None if op.gradient is None else differentiable, direct)
    fake(op.name, shapes)
    if (flops := op.flops) is not None:
        register_flop_formula(getattr(_ops, op.name))(lambda *given, **_: flops(*given))
    if op.gradient is None and not op.written:
        rule = in_batches(getattr(_ops, op.name))
        torch.library.register_vmap(f"rl_kernel_native::{op.name}", rule, lib=LIBRARY)


# ---- calls ----------------------------------------------------------------------------------------------------------


def call(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    if op.casts and is_autocasting():
        arrays = _cast(op, arrays)
    of = op.gradient
    if op.has_float32:
        arrays = _of_float32(op, arrays)
    # Bit i of `wanted`: array i needs a gradient. A negative number: the call must go through the dispatcher.
    wanted = -1 if is_read_by_dynamo() else _C.wanted_gradients(arrays)
    if op.in_context:
        first = arrays[op.leads] if op.has_exp else None
        device = "cpu" if first is None or first.is_cpu else device_type(first, op.arrays[op.leads].name)
        how = op.resolved(how, device, wanted < 0 and is_compiling())
    if wanted == 0:
        return straight(op, arrays, how)
    if of is None:
        if op.written:
            refuse_derivatives(op, arrays)
        return straight(op, arrays, how) if wanted > 0 else traced(op, arrays, how)
    if wanted < 0:
        if is_grad_enabled():
            is_differentiated(op, of, arrays, how)
        return traced(op, arrays, how)
    if wanted & ~op.differentiable and not is_differentiated(op, of, arrays, how):
        return straight(op, arrays, how)
    if op.function is None:
        return traced(op, arrays, how)
    found = op.function.run(*[arrays[i] for i in of.of], (op, arrays, how))
    return found if type(found) is tuple else (found,)


def _cast(op: Operator, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays, with the operands of a matrix product in the dtype of torch.autocast."""
    found = list(arrays)
    for i, x in zip(op.casts, autocast(*(arrays[i] for i in op.casts)), strict=True):
        found[i] = x
    return tuple(found)


def call_with_main_grad(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], main_grad: Any, dtype: int) -> Any:
    """Outputs of an operator whose backward may use main_grad. The backward gets the forward's options, the dtype of
    the weight's gradient, and main_grad."""
    if op.casts and is_autocasting():
        arrays = _cast(op, arrays)
    of: Any = op.gradient
    weight = arrays[of.accumulates]
    of_gradient = _main_grad.check_weight_grad(weight, dtype, main_grad)
    if main_grad is not None:
        others = {a.name: x for a, x in zip(op.arrays, arrays, strict=True) if x is not weight}
        _main_grad.check(main_grad, weight, **others)
    return call(op, arrays, (*how, of_gradient, main_grad))


def refuse_gradients(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> None:
    """Refuses arrays that require a gradient, for a call that returns gradients as outputs."""
    for i in op.gradient.of if op.gradient else ():
        if wants_grad(arrays[i]):
            name = op.arrays[i].label(how)
            raise ValueError(
                f"{name}: requires a gradient; {op.name}_and_grad gives it as a constant: detach, or call {op.name}"
            )


def _of_float32(op: Operator, arrays: Sequence[Any]) -> Sequence[Any]:
    """The arrays. If the last array is a number on the device, it is cast to float32."""
    number = arrays[-1]
    if not isinstance(number, Tensor) or number.dtype is torch.float32:
        return arrays
    if number.dtype.is_complex or number.dtype is torch.bool:
        raise TypeError(f"{op.arrays[-1].name}: expected a real number, got {number.dtype}")
    require_dense(number, op.arrays[-1].name)
    return (*arrays[:-1], number.to(torch.float32))


class TensorFrame:
    """The state of an eager call without autograd with torch tensors. :class:`_dispatch.Frame` is the state of a call
    from another framework."""

    allocate, stream = None, 0

    def __init__(self, names: Sequence[str], arrays: tuple[Any, ...], out: tuple[Any, ...], cures: Any) -> None:
        self._name, self._first = names[0], arrays[0]
        self.wanted = wanted = -1 if is_read_by_dynamo() else _C.wanted_gradients(arrays)
        for o in out:
            if (wanted and wants_grad(*arrays)) or (isinstance(o, Tensor) and o.requires_grad):
                raise ValueError("out: cannot be given where a gradient is wanted; call under torch.no_grad()")
        if wanted < 0:
            leading: Any = {names[0]: arrays[0]}
            require_tensors(**leading, cures=cures, optional=dict(zip(names[1:], arrays[1:], strict=True)))
            at = next((i for i, x in enumerate(arrays) if x is not None and _C.wanted_gradients((x,)) < 0), 0)
            if arrays[at].is_neg():
                raise ValueError(f"{names[at]}: has torch's negative bit; call .resolve_neg()")
            if out:
                raise ValueError("out: cannot be given under torch.compile, torch.func or a dispatch mode")
            kind = type(arrays[at]).__name__
            raise TypeError(f"{names[at]}: expected a plain torch.Tensor in eager mode, got {kind} or a trace")
        prepare(arrays[0])

    @property
    def device(self) -> str:
        return device_type(self._first, self._name)

    def export(self, x: Any, name: str) -> Any:
        return x

    export_output = export

    def exports(self, arrays: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
        return arrays

    def result(self, x: Any) -> Any:
        return x
