"""Builds everything that torch needs from an operator's description in :mod:`_operator`.

These are a schema, a kernel, a fake kernel, the eager call and its autograd Function. A second Function, with the rules
of torch.func, serves traces and transforms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import _composed, _in_graph, _main_grad
from ._arithmetic import AS_CALLED, product_unit, resolve_traced, resolve_traced_unit
from ._described import check
from ._dispatch import count_write
from ._native import module as _C
from ._operator import OPERATORS, Composed, Kept, Operator, products
from ._register import LIBRARY, define, fake, implement
from ._run import (
    applied,
    is_differentiated,
    named,
    refuse_derivatives,
    straight,
    traced,
)
from ._schema import apart, dtype_of, operand, schema, title
from ._torch import (
    Eager,
    apply_function,
    autocast,
    device_type,
    functorch_active,
    gradient,
    is_autocasting,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    is_read_by_dynamo,
    prepare,
    require_dense,
    wants_grad,
)
from ._transforms import in_batches, refuse_tangents

_ops = torch.ops.rl_kernel_native


def register(operators: Iterable[Operator]) -> None:
    for op in operators:
        _register(op)
        if isinstance(op.gradient, Kept):
            op.function = _Kept
            _register_kept(op, op.gradient)
        elif isinstance(op.gradient, Composed):
            if op.gradient.backward is not None:
                op.function = op.gradient.eager() if op.gradient.eager else _composed.Composing
            _composed.register_composed(op, op.gradient)


def _register(op: Operator) -> None:
    dtypes: list[Any] = [getattr(torch, name) if isinstance(name, str) else name for name in op.dtypes]
    of = op.gradient if isinstance(op.gradient, Kept) else None
    if of is not None:  # gradients follow the outputs
        dtypes += [torch.float32] * len(of.of) + [getattr(torch, name) for name in of.extra]
    results = "()" if not dtypes else "Tensor" if len(dtypes) == 1 else f"({', '.join(['Tensor'] * len(dtypes))})"
    define(f"{op.name}({schema(op)}) -> {results}")

    def given(outputs: Any) -> Any:
        return outputs[0] if len(dtypes) == 1 else tuple(outputs)

    resolvers = {"int exp": resolve_traced, "int unit": resolve_traced_unit}
    in_context = [(i, resolvers[option]) for i, option in op.in_context]

    def when_run(arrays: Any, how: Any) -> Any:
        """The options, with the numbers of exp and unit that a trace could not read from the context. A backward has
        the numbers of its forward. A compiled forward on a CPU uses the portable exponential."""
        found = list(how)
        for i, resolve in in_context:
            kind = device_type(arrays[op.leads], op.arrays[op.leads].name)
            found[i] = max(found[i], 0) if op.follows and kind == "cpu" else resolve(found[i], kind)
        return tuple(found)

    def native(arrays: Any, how: Any) -> Any:
        how = when_run(arrays, how)
        if of is None:
            return op.native(arrays, how, None, 0)
        return of.native(arrays, how, tuple(arrays[i] is not None for i in of.of), None, 0)

    def kernel(*arguments: Any) -> Any:
        arrays, how = apart(op, arguments)
        for i in op.written:
            if isinstance(arrays[i], Tensor) and arrays[i].is_neg():
                raise ValueError(f"{op.arrays[i].name}: has torch's negative bit; call .resolve_neg()")
        first = arrays[op.leads]
        prepare(first)
        found = native(tuple(map(operand, arrays)), how) or ()
        for i in op.written:
            count_write(arrays[i])
        named = zip(found, dtypes, strict=True)
        results = [first.new_empty(0, dtype=dtype_of(d, how, arrays)) if o is None else o for o, d in named]
        return given(results) if results else None

    def shapes(*arguments: Any) -> Any:
        arrays, how = apart(op, arguments)
        check(native, arrays, how)
        if not dtypes:
            return None
        gradients = () if of is None else (None if arrays[i] is None else arrays[i].shape for i in of.of)
        outputs = op.outputs(arrays, how)
        found = zip((*outputs[: len(op.dtypes)], *gradients, *outputs[len(op.dtypes) :]), dtypes, strict=True)
        return given(
            [arrays[op.leads].new_empty((0,) if s is None else s, dtype=dtype_of(d, how, arrays)) for s, d in found]
        )

    differentiable = None if op.gradient is None else functools.partial(_in_graph.apply, title(op))
    implement(op.name, kernel, differentiable)
    fake(op.name)(shapes)
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
    if type(of) is Kept:
        arrays = _of_float32(op, arrays)
    wanted = -1 if is_read_by_dynamo() else _C.wanted_gradients(arrays)  # bit i: of array i; negative: not direct
    if op.in_context:
        how = _numbers(op, arrays, how, wanted)
    if wanted == 0:
        return straight(op, arrays, how)
    if of is None:
        if op.written:
            refuse_derivatives(op, arrays)
        return straight(op, arrays, how) if wanted > 0 else traced(op, arrays, how)
    if wanted < 0:
        if is_grad_enabled():
            is_differentiated(op, of, arrays, how)
        return traced(op, arrays, how)[: len(op.dtypes)]
    if wanted & ~op.differentiable and not is_differentiated(op, of, arrays, how):
        return straight(op, arrays, how)
    if op.function is None:
        return traced(op, arrays, how)
    found = op.function.run(*[arrays[i] for i in of.of], (op, arrays, how))
    return found if type(found) is tuple else (found,)


def _numbers(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], wanted: int) -> tuple[Any, ...]:
    """The options with the numbers of exp and unit."""
    is_traced = wanted < 0 and is_compiling()
    if not op.has_exp:
        ((i, _),) = op.in_context
        unit = how[i] if how[i] is not None else AS_CALLED if is_traced else product_unit()
        return (*how[:i], unit, *how[i + 1 :])
    first = arrays[op.leads]
    return op.resolved(how, "cpu" if first.is_cpu else device_type(first, op.arrays[op.leads].name), is_traced)


def _cast(op: Operator, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays, with the operands of a matrix product in the dtype of torch.autocast."""
    found = list(arrays)
    for i, x in zip(op.casts, autocast(*(arrays[i] for i in op.casts)), strict=True):
        found[i] = x
    return tuple(found)


def call_with_main_grad(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], main_grad: Any, dtype: int) -> Any:
    """The options of the backward are those of the forward, the dtype of the weight's gradient, and main_grad."""
    if op.casts and is_autocasting():
        arrays = _cast(op, arrays)
    of: Any = op.gradient
    weight = arrays[of.accumulates]
    of_gradient = _main_grad.check_weight_grad(weight, dtype, main_grad)
    if main_grad is not None:
        others = {a.name: x for a, x in zip(op.arrays, arrays, strict=True) if x is not weight}
        _main_grad.check(main_grad, weight, **others)
    return call(op, arrays, (*how, of_gradient, main_grad))


def accumulate(op: Operator, main_grad: Any, arrays: Sequence[Any], how: tuple[Any, ...]) -> Any:
    """Calls an operator that adds a gradient to main_grad, for callers that compute backward by themselves."""
    if wants_grad(*arrays) or (isinstance(main_grad, Tensor) and main_grad.requires_grad):
        raise ValueError("main_grad: cannot be given where a gradient is wanted; call under torch.no_grad()")
    wanted = -1 if is_read_by_dynamo() else _C.wanted_gradients((main_grad, *arrays))
    if op.in_context:
        how = _numbers(op, (main_grad, *arrays), how, wanted)
    if wanted >= 0:
        return straight(op, (main_grad, *arrays), how)
    if functorch_active():
        raise ValueError("main_grad: cannot be given under torch.func")
    return traced(op, (main_grad, *arrays), how)


# ---- a loss whose forward gives its gradients -----------------------------------------------------------------------


def call_with_gradients(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    of = op.gradient
    assert isinstance(of, Kept)
    for i in of.of:
        if wants_grad(arrays[i]):
            name = op.arrays[i].label(how)
            raise ValueError(
                f"{name}: requires a gradient; {op.name}_and_grad gives it as a constant: detach, or call {op.name}"
            )
    if is_grad_enabled():
        is_differentiated(op, of, arrays, how)
    arrays = _of_float32(op, arrays)
    if not is_direct(*arrays):
        return traced(op, arrays, how)
    return _with_gradients(op, arrays, how, tuple(arrays[i] is not None for i in of.of))


def _with_gradients(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    first = arrays[0]
    device_type(first, op.arrays[0].label(how))
    prepare(first)
    return op.gradient.native(arrays, how, wanted, None, 0)  # type: ignore[union-attr]


def _of_float32(op: Operator, arrays: Sequence[Any]) -> Sequence[Any]:
    """The arrays, with the last one cast to float32 where it is a number on the device."""
    number = arrays[-1]
    if not isinstance(number, Tensor) or number.dtype is torch.float32 or not op.arrays[-1].is_float32:
        return arrays
    if number.dtype.is_complex or number.dtype is torch.bool:
        raise TypeError(f"{op.arrays[-1].name}: expected a real number, got {number.dtype}")
    require_dense(number, op.arrays[-1].name)
    return (*arrays[:-1], number.to(torch.float32))


class _Kept(Eager):
    """Eager autograd. The first backward returns the gradients that forward kept, scaled in place where needed. A later
    one, over a retained graph, computes them again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *operands, (op, arrays, how) = given
        of = op.gradient
        if of.scale is products:
            ctx.wanted = (True, *ctx.needs_input_grad[1:-1])
            found = _with_gradients(op, arrays, how, ctx.wanted)
            ctx.save_for_backward(*arrays)
        else:
            found = straight(op, arrays, how)
            ctx.save_for_backward(*operands)
        count = len(op.dtypes)
        ctx.gradients, ctx.op, ctx.how = found[count:], op, how
        ctx.mark_non_differentiable(*found[1:count])
        ctx.set_materialize_grads(False)
        return found[:count]

    @staticmethod
    def backward(ctx: Any, d_loss: Any, *_: Any) -> Any:
        needs = ctx.needs_input_grad[:-1]
        if d_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        arrays, op = ctx.saved_tensors, ctx.op  # saved_tensors raises if arrays were changed in place
        of, found = op.gradient, ctx.gradients
        direct = not is_grad_enabled() and is_direct_gradient(d_loss)
        if of.scale is not products:
            if direct and d_loss.layout is torch.strided:
                return *of.scale(straight, d_loss, found, ctx.how[: of.reads]), None
            d_loss = gradient(d_loss, torch.float32, of.incoming)
            return *scaled(op, d_loss, found, arrays, ctx.how), None
        ctx.gradients = None
        if found is None:
            detached = [None if x is None else x.detach() for x in arrays]
            found = _with_gradients(op, detached, ctx.how, ctx.wanted)[len(op.dtypes) :]
        if direct:
            _C.scale_gradients(found[0], found[1] if len(found) > 1 else None, d_loss, 0)
        else:
            found = scaled(op, d_loss, found, [arrays[i] for i in of.of], ctx.how)
        return *(g if need else None for g, need in zip(found, needs, strict=True)), None


def scaled(op: Operator, d_loss: Tensor, kept: Sequence[Any], operands: Sequence[Any], how: tuple[Any, ...]) -> Any:
    """The gradients times the loss's incoming gradient. The operands serve only to refuse a second derivative."""
    of: Any = op.gradient
    found = apply_function(None, "Scaled", op.name, *how[: of.reads], d_loss, *kept, *operands)
    return tuple(None if g is None else o for o, g in zip(found, kept, strict=False))


@_in_graph.callable_in_graph
class Scaled(torch.autograd.Function):
    """The call is linear in d_loss and has no derivative along the operands."""

    @staticmethod
    def forward(name: str, *arguments: Any) -> Any:
        of, how, (d_loss, *rest) = _scale_of(name, arguments)
        found = of.scale(_dispatched, d_loss, rest[: -len(of.of)], how)
        return tuple(d_loss.new_empty(0) if g is None else g for g in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, ctx.count = inputs[0], len(inputs)
        ctx.of, ctx.how, (_, *rest) = _scale_of(ctx.name, inputs[1:])
        kept = rest[: -len(ctx.of.of)]
        ctx.mark_non_differentiable(*(o for o, g in zip(output, kept, strict=False) if g is None))
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        _refuse_second(ctx, ctx.needs_input_grad)
        found: list[Any] = [None] * ctx.count
        if any(x is not None for x in incoming):
            found[1 + ctx.of.reads] = ctx.of.along(incoming, ctx.saved_tensors, ctx.how)
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_second(ctx, [t is not None for t in tangents])
        kept, d_loss = ctx.saved_tensors, tangents[1 + ctx.of.reads]
        if d_loss is None:
            return tuple(None if g is None else torch.zeros_like(g) for g in kept[: len(ctx.of.of)])
        return tuple(ctx.of.scale(applied, d_loss, kept, ctx.how))


def _scale_of(name: str, arguments: Sequence[Any]) -> tuple[Kept, tuple[Any, ...], Sequence[Any]]:
    """The rule, the options that it reads, and the tensors, from arguments of :class:`Scaled`."""
    of: Any = next(op.gradient for op in OPERATORS if op.name == name)
    return of, tuple(arguments[: of.reads]), arguments[of.reads :]


def _dispatched(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> Any:
    """Calls an operator inside a Function's forward, where batches of ``is_grads_batched`` may arrive."""
    return getattr(_ops, op.name)(*arrays, *how)


def _refuse_second(ctx: Any, along: Sequence[bool]) -> None:
    if any(along[-len(ctx.of.of) :]):
        raise RuntimeError(f"{ctx.name}: has no second derivative")


def _register_kept(op: Operator, of: Kept) -> None:
    count, places, constants = len(op.arrays), of.of, len(op.dtypes)

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return getattr(_ops, op.name)(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            operands = [inputs[i] for i in places]
            ctx.how, ctx.count = inputs[count:], len(inputs)
            shown = [x is not None for x in operands]
            shown += [shape is not None for shape in op.outputs(inputs[:count], ctx.how)[constants:]]
            kept = [o if there else None for o, there in zip(output[constants:], shown, strict=True)]
            ctx.mark_non_differentiable(*output[1:])
            ctx.save_for_backward(*kept, *operands)
            ctx.save_for_forward(*kept, *operands)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, d_loss: Any, *_: Any) -> Any:
            found: list[Any] = [None] * ctx.count
            if d_loss is not None:
                saved = ctx.saved_tensors
                if of.scale is not products:
                    d_loss = gradient(d_loss, torch.float32, of.incoming)
                gradients = scaled(op, d_loss, saved[: -len(places)], saved[-len(places) :], ctx.how)
                for i, g in zip(places, gradients, strict=True):
                    found[i] = g
            return tuple(found)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            others = [i for i in range(count) if i not in places]
            names = [op.arrays[i].label(ctx.how) for i in others]
            refuse_tangents(op.name, names, [tangents[i] for i in others])
            along = of.along([tangents[i] for i in places], ctx.saved_tensors[: -len(places)], ctx.how[: of.reads])
            return along, *(None,) * (constants + len(places) + len(of.extra) - 1)

    named(Forward, title(op))
