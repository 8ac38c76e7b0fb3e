"""Autograd of an operator from its description. The first derivative is native, and higher derivatives, if any, use
torch's own operators. For a loss, the forward has already computed the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _in_graph, _main_grad
from ._native import module as _C
from ._operator import Composed, Like, Operator, products
from ._register import title
from ._run import applied, refuse_constant, registered, straight
from ._torch import (
    Eager,
    apply_function,
    gradient,
    is_direct_gradient,
    is_grad_enabled,
    readable,
    require_tensors,
    with_memory,
)
from ._transforms import pulled, pushed, refuse_tangents

_ops = torch.ops.rl_kernel_native


def asked_for(ctx: Any, of: Any, places: Sequence[int], main_grad: Any) -> list[bool]:
    """For each differentiable array, whether the running backward asks for its gradient. ``places``: positions of these
    arrays in the arguments."""
    needs = ctx.needs_input_grad
    if main_grad is None and _main_grad.are_all_asked_for(ctx):
        return [needs[i] for i in places]
    _main_grad.refuse_create_graph(main_grad)
    nodes = [node for node, _ in ctx.next_functions if node is not None]  # a node per argument that needs a gradient
    found = [needs[i] for i in places]
    for k, (place, i) in enumerate(zip(places, of.of, strict=True)):
        if found[k] and not (i == of.beside and found[of.of.index(of.accumulates)]):
            node = nodes[sum(needs[:place])]
            found[k] = _main_grad.is_asked_for(node, main_grad if i == of.accumulates else None)
    return found


def _incoming(of: Any, i: int, d: Any, dtype: Any, asked: Sequence[bool], main_grad: Any) -> Any:
    """The incoming gradient of output ``i``, prepared as an operand for the dispatcher."""
    if d is None:
        return None
    if main_grad is not None and asked[of.of.index(of.accumulates)]:
        _main_grad.require_addable(d, main_grad)
    return gradient(with_memory(d), dtype or d.dtype, of.incoming[i], of.dims)


def _keep(ctx: Any, op: Operator, arrays: Sequence[Any], how: Any, found: Sequence[Any]) -> Sequence[Any]:
    """The tensors that a backward reads. Everything else that a backward reads is stored in ``ctx``."""
    of: Any = op.gradient
    kept: Sequence[Any] = of.kept(arrays, found)
    ctx.state = op, how, None if of.as_kept else kept[0].dtype, [Like.of(arrays[i]) for i in of.likes]
    return kept


def _saved(ctx: Any, of: Composed) -> list[Any]:
    return [x if x is None or of.as_kept else gradient(x, x.dtype) for x in ctx.saved_tensors]


class Composing(Eager):
    """Eager autograd. The arguments are the operands that may have gradients, then the tuple (operator, all its arrays,
    its options). The forward of a subclass may have other arguments, but begins with the same operands. A forward
    with ctx as an argument takes a third of the time of a forward with setup_context."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        op, arrays, how = given[-1]
        of = op.gradient
        used = how[: op.num_options] if of.prepared is None else of.prepared(arrays, how, ctx.needs_input_grad[:-1])
        found = straight(op, arrays, used)
        ctx.save_for_backward(*_keep(ctx, op, arrays, how, found))
        if len(found) == 1 or not of.asked(arrays, how):  # returning an output takes a microsecond
            return found[0]
        if constants := [o for o in found[len(of.incoming) :] if o is not None]:
            ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        (op, how, dtype, likes), needs = ctx.state, ctx.needs_input_grad
        of = op.gradient
        main_grad = None if of.accumulates is None else how[-1]
        asked = needs[: len(of.of)]
        if main_grad is not None or sum(asked) > 1:
            asked = asked_for(ctx, of, range(len(asked)), main_grad)
        direct = not is_grad_enabled()  # with create_graph, backward itself is differentiated
        if of.once and not direct:
            raise RuntimeError(of.once)
        given: list[Any] = [None] * len(of.incoming)
        comes = False
        for i, d in enumerate(incoming[: len(given)]):
            if d is not None:
                comes = True
                if direct and is_direct_gradient(d) and d.layout is torch.strided:
                    given[i] = readable(d if dtype is None or d.dtype is dtype else d.to(dtype), of.dims)
                    continue
                direct = False
                require_tensors(**{of.incoming[i]: d})
                given[i] = _incoming(of, i, d, dtype, asked, main_grad)
        if not comes:
            return (None,) * len(needs)
        kept = (*likes, *ctx.saved_tensors)
        if not direct:
            how = (*op.schema_options(how[: op.num_options]), *how[op.num_options :])
        found = of.backward(straight if direct else applied, given, kept, how, asked)
        return *found, *(None,) * (len(needs) - len(asked))


def register_composed(op: Operator, of: Composed, derived: Any, tangents_of: Any) -> None:
    count, places = len(op.arrays), of.of
    total = count + op.num_options
    outputs = len(of.incoming) or len(op.dtypes)

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return registered(op, *arguments[:total])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arrays, ctx.how, ctx.count = inputs[:count], inputs[count:], len(inputs)
            found = output if isinstance(output, tuple) else (output,)
            ctx.shown = [shape is not None for shape in op.outputs(arrays, ctx.how[: op.num_options])]
            operands = [arrays[i] for i in (*places, *of.reads)]
            there = [o if t else None for o, t in zip(found, ctx.shown, strict=True)]
            kept = operands if derived is None else _keep(ctx, op, arrays, ctx.how, there)
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*(kept if of.reads_kept else operands))
            ctx.mark_non_differentiable(
                *(o for i, (o, t) in enumerate(zip(found, ctx.shown, strict=True)) if i >= outputs or not t)
            )
            ctx.set_materialize_grads(derived is None)

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            for i, needed in enumerate(ctx.needs_input_grad[:count] if of.constants is not None else ()):
                if needed and not (i in places and of.allows(i, ctx.how)):
                    refuse_constant(op, of, op.arrays[i].label(ctx.how))
            given = [d if t else None for d, t in zip(incoming[:outputs], ctx.shown, strict=False)]
            needs = [ctx.needs_input_grad[i] for i in places]
            found: list[Any] = [None] * ctx.count
            if derived is None:
                cotangents: Any = tuple(d for d, t in zip(given, ctx.shown, strict=False) if t)
                function, operands = composed(ctx)
                results = pulled(function, operands, cotangents)
            elif all(d is None for d in given):
                results = [None] * len(places)
            else:
                main_grad = ctx.how[-1] if of.accumulates is not None and len(ctx.how) > op.num_options else None
                if main_grad is not None:
                    needs = asked_for(ctx, of, places, main_grad)
                *_, dtype, likes = ctx.state
                rounded = [_incoming(of, i, d, dtype, needs, main_grad) for i, d in enumerate(given)]
                results = list(derived(applied, rounded, [*likes, *_saved(ctx, of)], ctx.how, needs))
            for i, g in zip(places, results, strict=True):
                found[i] = g
            return tuple(found)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            given = [tangents[i] for i in places]
            if of.constants is not None:
                others = [i for i in range(count) if not (i in places and of.allows(i, ctx.how))]
                names = [op.arrays[i].label(ctx.how) for i in others]
                refuse_tangents(op.name, names, [tangents[i] for i in others], of.no_tangent)
            if tangents_of is None:
                function, operands = composed(ctx)
                found = iter(pushed(function, operands, given))
            else:
                operands = [*(ctx.state[-1] if of.reads_kept else ()), *_saved(ctx, of)]
                rounded = [
                    None if t is None else gradient(with_memory(t), x.dtype, op.arrays[i].label(ctx.how), of.dims)
                    for t, x, i in zip(given, operands, places, strict=False)
                ]
                pushed_on = tangents_of(applied, rounded, operands, ctx.how)
                there = ctx.shown if of.reads_kept else [True] * len(pushed_on)
                found = iter(o for o, t in zip(pushed_on, there, strict=False) if t)
            along = [next(found) if t and i < outputs else None for i, t in enumerate(ctx.shown)]
            return tuple(along) if len(along) > 1 else along[0]

    def composed(ctx: Any) -> Any:
        """The composed function, and the operands at which its derivatives are taken."""
        assert of.composed is not None
        function, how, (*saved,) = of.composed, ctx.how, ctx.saved_tensors
        operands, constants = saved[: len(places)], saved[len(places) :]
        return lambda *given: tuple(function((*given, *constants), how)), operands

    Forward.__name__ = Forward.__qualname__ = title(op)
    _in_graph.callable_in_graph(Forward, of.batch)


# ---- a loss whose forward also computes its gradients (`kept` in _operator) ---------------------------


class Kept(Eager):
    """Eager autograd of a loss. The first backward returns the gradients that forward kept, scaled in place if needed.
    A later backward, over a retained graph, computes the gradients again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *operands, (op, arrays, how) = given
        loss = op.gradient.loss
        ctx.wanted = (True, *ctx.needs_input_grad[1:-1])
        found = straight(op, arrays, (*how[: op.num_options], *ctx.wanted))
        ctx.save_for_backward(*(arrays if loss.scale is products else operands))
        ctx.gradients, ctx.op, ctx.how = found[loss.outputs :], op, how
        ctx.mark_non_differentiable(*found[1 : loss.outputs])
        ctx.set_materialize_grads(False)
        return found[: loss.outputs]

    @staticmethod
    def backward(ctx: Any, d_loss: Any, *_: Any) -> Any:
        needs = ctx.needs_input_grad[:-1]
        if d_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        arrays, op = ctx.saved_tensors, ctx.op  # saved_tensors raises if arrays were changed in place
        loss, found, how = op.gradient.loss, ctx.gradients, ctx.how
        direct = not is_grad_enabled() and is_direct_gradient(d_loss)
        if loss.scale is not products:
            if direct and d_loss.layout is torch.strided:
                return *loss.scale(straight, d_loss, found, how[: loss.reads]), None
            d_loss = gradient(d_loss, torch.float32, loss.incoming)
            return *scaled(op, applied, (d_loss,), (*found, *arrays), how), None
        ctx.gradients = None
        if found is None:
            detached = [None if x is None else x.detach() for x in arrays]
            found = straight(op, detached, (*how[: op.num_options], *ctx.wanted))[loss.outputs :]
        if direct:
            _C.scale_gradients(found[0], found[1] if len(found) > 1 else None, d_loss, 0)
        else:
            operands = [arrays[i] for i in op.gradient.of]
            found = scaled(op, applied, (d_loss,), (*found, *operands), how)
        return *(g if need else None for g, need in zip(found, needs, strict=True)), None


def scaled(op: Operator, call: Any, given: Any, arrays: Sequence[Any], how: Any, wanted: Any = None) -> Any:
    """The gradients times the loss's incoming gradient. ``arrays``: what the forward kept, then the operands. The
    operands are needed only to refuse a second derivative."""
    of: Any = op.gradient
    kept, operands = arrays[: -len(of.of)], arrays[-len(of.of) :]
    d_loss = apply_function(None, "Once", op.name, given[0], *operands)
    return tuple(of.loss.scale(applied, d_loss, kept, how[: of.loss.reads]))


@_in_graph.callable_in_graph
class Once(torch.autograd.Function):
    """Returns the incoming gradient, or a tangent, unchanged. The derivative of this Function along the operands of the
    loss is an error."""

    @staticmethod
    def forward(name: str, d_loss: Any, *operands: Any) -> Any:
        return d_loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, ctx.count = inputs[0], len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d: Any) -> Any:
        _refuse_second(ctx, ctx.needs_input_grad)
        return None, d, *(None,) * (ctx.count - 2)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_second(ctx, [t is not None for t in tangents])
        return tangents[1]


def tangent(op: Operator, call: Any, given: Sequence[Any], arrays: Sequence[Any], how: Any) -> tuple[Any, ...]:
    """The loss's tangent. ``given``: tangents of the operands, or None; ``arrays`` as for :func:`scaled`. The
    Function ``Once`` refuses a gradient of the tangent, which would treat the kept gradients as constants."""
    of: Any = op.gradient
    kept, operands = arrays[: -len(of.of)], arrays[-len(of.of) :]
    return (apply_function(None, "Once", op.name, of.loss.along(given, kept, how[: of.loss.reads]), *operands),)


def _refuse_second(ctx: Any, along: Sequence[bool]) -> None:
    if any(along[2:]):
        raise RuntimeError(f"{ctx.name}: has no second derivative")
