"""Autograd of a loss whose forward also computes its gradients, as ``kept`` of :mod:`_operator` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _in_graph
from ._native import module as _C
from ._operator import Operator, products
from ._run import applied, straight
from ._torch import Eager, apply_function, gradient, is_direct_gradient, is_grad_enabled


class Kept(Eager):
    """Eager autograd. The first backward returns the gradients that forward kept, scaled in place where needed. A later
    backward, over a retained graph, computes them again."""

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
            return *backward(op, applied, (d_loss,), (*found, *arrays), how), None
        ctx.gradients = None
        if found is None:
            detached = [None if x is None else x.detach() for x in arrays]
            found = straight(op, detached, (*how[: op.num_options], *ctx.wanted))[loss.outputs :]
        if direct:
            _C.scale_gradients(found[0], found[1] if len(found) > 1 else None, d_loss, 0)
        else:
            operands = [arrays[i] for i in op.gradient.of]
            found = backward(op, applied, (d_loss,), (*found, *operands), how)
        return *(g if need else None for g, need in zip(found, needs, strict=True)), None


def backward(op: Operator, call: Any, given: Any, arrays: Sequence[Any], how: Any, wanted: Any = None) -> Any:
    """The gradients times the loss's incoming gradient. ``arrays``: what the forward kept, then the operands, which
    serve only to refuse a second derivative."""
    of: Any = op.gradient
    kept, operands = arrays[: -len(of.of)], arrays[-len(of.of) :]
    d_loss = apply_function(None, "Once", op.name, given[0], *operands)
    return tuple(of.loss.scale(applied, d_loss, kept, how[: of.loss.reads]))


@_in_graph.callable_in_graph
class Once(torch.autograd.Function):
    """The gradient that comes in, or a tangent, with an error for its derivative along the operands of the loss."""

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


def along(op: Operator, call: Any, given: Sequence[Any], arrays: Sequence[Any], how: Any) -> tuple[Any, ...]:
    """The loss's tangent. ``given``: tangents of the operands, or None; ``arrays`` as for :func:`backward`. A gradient
    of the tangent would take what the forward kept as constants."""
    of: Any = op.gradient
    kept, operands = arrays[: -len(of.of)], arrays[-len(of.of) :]
    return (apply_function(None, "Once", op.name, of.loss.along(given, kept, how[: of.loss.reads]), *operands),)


def _refuse_second(ctx: Any, along: Sequence[bool]) -> None:
    if any(along[2:]):
        raise RuntimeError(f"{ctx.name}: has no second derivative")
