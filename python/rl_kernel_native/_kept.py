"""Autograd of a loss whose forward also computes its gradients, as ``kept`` of :mod:`_operator` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _in_graph
from ._native import module as _C
from ._operator import OPERATORS, Operator, products
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
    found = apply_function(None, "Scaled", op.name, *how[: of.loss.reads], *given, *arrays)
    return tuple(None if g is None else o for o, g in zip(found, arrays[: len(of.of)], strict=True))


@_in_graph.callable_in_graph
class Scaled(torch.autograd.Function):
    """The call is linear in d_loss and has no derivative along the operands."""

    @staticmethod
    def forward(name: str, *arguments: Any) -> Any:
        count, loss = _loss_of(name)
        d_loss, *kept = arguments[loss.reads : -count]
        found = loss.scale(_dispatched, d_loss, kept, arguments[: loss.reads])
        return tuple(d_loss.new_empty(0) if g is None else g for g in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, *arguments = inputs
        ctx.count, ctx.loss = _loss_of(ctx.name)
        ctx.how, kept = tuple(arguments[: ctx.loss.reads]), arguments[ctx.loss.reads + 1 : -ctx.count]
        ctx.mark_non_differentiable(*(o for o, g in zip(output, kept, strict=False) if g is None))
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        _refuse_second(ctx, ctx.needs_input_grad)
        found: list[Any] = [None] * len(ctx.needs_input_grad)
        if any(x is not None for x in incoming):
            found[1 + ctx.loss.reads] = ctx.loss.along(incoming, ctx.saved_tensors, ctx.how)
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_second(ctx, [t is not None for t in tangents])
        kept, d_loss = ctx.saved_tensors, tangents[1 + ctx.loss.reads]
        if d_loss is None:
            return tuple(None if g is None else torch.zeros_like(g) for g in kept[: ctx.count])
        return tuple(ctx.loss.scale(applied, d_loss, kept, ctx.how))


def _loss_of(name: str) -> tuple[int, Any]:
    """The number of arrays with a gradient, and the rule."""
    of: Any = next(op.gradient for op in OPERATORS if op.name == name)
    return len(of.of), of.loss


def _dispatched(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> Any:
    """Calls an operator inside a Function's forward, where batches of ``is_grads_batched`` may arrive."""
    return getattr(torch.ops.rl_kernel_native, op.name)(*arrays, *how)


def _refuse_second(ctx: Any, along: Sequence[bool]) -> None:
    if any(along[-ctx.count :]):
        raise RuntimeError(f"{ctx.name}: has no second derivative")
