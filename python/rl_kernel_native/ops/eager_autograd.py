"""Hand-written autograd Functions for eager calls of short operators. The engine's general Function would add a tenth
to the time of these operators. See ``eager`` of :class:`Composed`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._composed import Composing
from .._dispatch import count_write
from .._main_grad import is_asked_for
from .._native import module as _C
from .._operator import Like
from .._torch import CODES, gradient, is_direct_gradient, is_grad_enabled, prepare


class Embedding(Composing):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, given: tuple[Any, ...]) -> Tensor:
        op, arrays, how = given
        prepare(weight)
        y: Tensor = _C.embedding(*arrays, *how[:3], None, 0)
        ctx.save_for_backward(arrays[0])
        ctx.state = op, how, None, (Like.of(weight),)
        return y


class Linear(Composing):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, given: tuple[Any, ...]) -> Tensor:
        op, _, how = given
        prepare(x)
        y: Tensor = _C.linear(x, weight, bias, *how[:4], None, 0)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.state = op, how, x.dtype, (Like.of(bias),)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if dy is None or is_grad_enabled() or not is_direct_gradient(dy):
            return Composing.backward(ctx, dy)
        (_, how, dtype, (bias,)), (x, weight) = ctx.state, ctx.saved_tensors
        *engine, weight_dtype, main_grad = how[2:]
        edges, (needs_x, needs_weight, needs_bias) = ctx.next_functions, ctx.needs_input_grad[:3]
        needs_x = needs_x and is_asked_for(edges[0][0])
        needs_weight = needs_weight and is_asked_for(edges[1][0], main_grad)
        needs_bias = needs_bias and (needs_weight or is_asked_for(edges[2][0]))
        dy, code = gradient(dy, dtype), -1 if weight_dtype is None or main_grad is not None else CODES[weight_dtype]
        prepare(dy)
        dx = _C.linear_input_grad(dy, weight, *engine, None, 0) if needs_x else None
        dweight = _C.linear_weight_grad(dy, x, main_grad, None, code, *engine, None, 0) if needs_weight else None
        if needs_weight and main_grad is not None:
            count_write(main_grad)
            dweight = None
        dbias = _C.linear_bias_grad(dy, CODES[bias.dtype], None, 0) if needs_bias else None
        return dx, dweight, dbias, None
