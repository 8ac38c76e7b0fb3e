"""Autograd of an operator with a native first derivative and higher ones composed of torch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _main_grad
from ._operator import Composed, Operator
from ._run import applied, named, straight
from ._schema import title
from ._torch import Eager, gradient, is_direct_gradient, is_grad_enabled, require_tensors, rows_of
from ._transforms import pulled, pushed

_ops = torch.ops.rl_kernel_native


def _main_grad_of(of: Composed, how: tuple[Any, ...]) -> Any:
    """The memory to which backward adds a gradient: the last option, after those of the schema."""
    return None if of.accumulates is None or not how else how[-1]


def _asked(ctx: Any, of: Composed, needs: Sequence[bool], main_grad: Any) -> list[bool]:
    """The gradients that the running backward asks for, one entry per input tensor."""
    edges = iter(ctx.next_functions)
    nodes = [next(edges)[0] if is_there else None for is_there in ctx.there]
    found = list(needs)
    for place, (i, need) in enumerate(zip(of.of, needs, strict=True)):
        accumulates = main_grad is not None and i == of.accumulates
        if need and (accumulates or sum(needs) > 1):
            found[place] = _main_grad.is_asked_for(nodes[place], main_grad if accumulates else None)
    return found


def _require_addable(of: Composed, d: Any, needs: Sequence[bool], main_grad: Any) -> None:
    if d is not None and main_grad is not None and needs[of.of.index(of.accumulates)]:
        _main_grad.require_addable(d, main_grad)


def _readable(x: Any) -> Any:
    return None if x is None else rows_of(x)


class _Composed(Eager):
    """Eager autograd. The old form of forward takes a third of the time of setup_context."""

    @staticmethod
    def forward(ctx: Any, op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], *operands: Any) -> Any:
        of: Any = op.gradient
        found = straight(op, arrays, how[: op.num_options])
        ctx.save_for_backward(*of.kept(arrays, found))
        ctx.op, ctx.how, ctx.there = op, how, [x is not None for x in operands]
        if len(found) == 1 or not of.asked(arrays, how):  # an output costs a microsecond
            return found[0]
        ctx.mark_non_differentiable(*(o for o in found[len(of.incoming) :] if o is not None))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        of, how, names = ctx.op.gradient, ctx.how, ctx.op.gradient.incoming
        given = [*incoming[: len(names)], *(None,) * (len(names) - len(incoming))]
        needs = ctx.needs_input_grad[3:]
        main_grad = _main_grad_of(of, how)
        kept = ctx.saved_tensors
        direct, dtype = not is_grad_enabled(), kept[0].dtype
        if given[0] is not None:
            _main_grad.refuse_create_graph(main_grad)
            needs = _asked(ctx, of, needs, main_grad)
        present = {name: d for name, d in zip(names, given, strict=True) if d is not None}
        direct = direct and all(map(is_direct_gradient, present.values()))
        if present and not direct:  # create_graph: backward itself is differentiated
            require_tensors(**present)
            _require_addable(of, given[0], needs, main_grad)
        given = [None if d is None else gradient(d, dtype, n) for d, n in zip(given, names, strict=True)]
        found = of.backward(straight if direct else applied, given, kept, how, needs)
        return None, None, None, *(g if need else None for g, need in zip(found, ctx.needs_input_grad[3:], strict=True))


def register_composed(op: Operator, of: Composed) -> None:
    count, places = len(op.arrays), of.of
    total = count + op.num_options
    outputs = len(of.incoming) or len(op.dtypes)

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return getattr(_ops, op.name)(*arguments[:total])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arrays, ctx.how, ctx.count = inputs[:count], inputs[count:], len(inputs)
            found = output if isinstance(output, tuple) else (output,)
            ctx.shown = [shape is not None for shape in op.outputs(arrays, ctx.how[: op.num_options])]
            operands = [arrays[i] for i in (*places, *of.reads)]
            ctx.there = [arrays[i] is not None for i in places]
            there = [o if t else None for o, t in zip(found, ctx.shown, strict=True)]
            ctx.save_for_backward(*(operands if of.backward is None else of.kept(arrays, there)))
            ctx.save_for_forward(*operands)
            ctx.mark_non_differentiable(
                *(o for i, (o, t) in enumerate(zip(found, ctx.shown, strict=True)) if i >= outputs or not t)
            )
            ctx.set_materialize_grads(of.backward is None)

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            given = [d if t else None for d, t in zip(incoming[:outputs], ctx.shown, strict=False)]
            needs = [ctx.needs_input_grad[i] for i in places]
            found: list[Any] = [None] * ctx.count
            if of.backward is None:
                cotangents: Any = tuple(d for d, t in zip(given, ctx.shown, strict=False) if t)
                function, operands = composed(ctx)
                results = pulled(function, operands, cotangents)
            elif all(d is None for d in given):
                results = [None] * len(places)
            else:
                main_grad = _main_grad_of(of, ctx.how[op.num_options :])
                if given[0] is not None:
                    _main_grad.refuse_create_graph(main_grad)
                    if main_grad is not None:
                        needs = _asked(ctx, of, needs, main_grad)
                kept = list(map(_readable, ctx.saved_tensors))
                _require_addable(of, given[0], needs, main_grad)
                rounded = [
                    None if d is None else gradient(d, kept[0].dtype, name)
                    for d, name in zip(given, of.incoming, strict=True)
                ]
                results = list(of.backward(applied, rounded, kept, ctx.how, needs))
            for i, g in zip(places, results, strict=True):
                found[i] = g if ctx.needs_input_grad[i] else None
            return tuple(found)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            given = [tangents[i] for i in places]
            if of.tangents is None:
                function, operands = composed(ctx)
                found = iter(pushed(function, operands, given))
            else:
                operands = ctx.saved_tensors
                found = iter(of.tangents(applied, *(list(map(_readable, xs)) for xs in (given, operands)), ctx.how))
            along = [next(found) if t and i < outputs else None for i, t in enumerate(ctx.shown)]
            return tuple(along) if len(along) > 1 else along[0]

    def composed(ctx: Any) -> Any:
        """The composed function, and the place of its call."""
        assert of.composed is not None
        function, how, (*saved,) = of.composed, ctx.how, ctx.saved_tensors
        operands, constants = saved[: len(places)], saved[len(places) :]
        return lambda *given: tuple(function((*given, *constants), how)), operands

    named(Forward, title(op), of.batch)


EAGER = _Composed
