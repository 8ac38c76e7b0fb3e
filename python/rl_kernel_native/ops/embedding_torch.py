"""Eager autograd of embedding, written by hand. A call is so short that the engine's general Function would add a third
to its time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _engine, _main_grad, _torch
from .._native import module as _C
from .._operator import Operator
from .._run import applied, straight
from .._torch import Eager, gradient, is_direct, is_direct_gradient, is_grad_enabled, require_tensors, wants_grad

Operators = tuple[Operator, Operator, Operator]  # forward, backward, backward into main_grad


def embedding(operators: Operators, ids: Any, weight: Tensor, where: Any, main_grad: Any, code: int) -> Any:
    dtype = code
    if main_grad is not None or code >= 0:
        if main_grad is not None:
            _main_grad.check(main_grad, weight, ids=ids)
        dtype = _main_grad.check_weight_grad(weight, code, main_grad)
    if not is_direct(weight, ids):
        return _engine.traced(operators[0], (ids, weight), (*where, dtype, main_grad))[0]
    if not wants_grad(weight):
        _torch.device_type(weight, "weight")
        _torch.prepare(weight)
        return _C.embedding(ids, weight, *where, None, 0)
    return _Embedding.run(operators, ids, weight, where, dtype, main_grad)


def backward(operators: Operators, dy: Any, ids: Any, how: Any) -> Any:
    if is_direct(dy, ids) and not wants_grad(dy):
        _torch.prepare(dy)
        return _C.embedding_backward(dy, ids, *how[:4], None, how[4], None, 0)
    return _engine.call(operators[1], (dy, ids), how)[0]


class _Embedding(Eager):
    """Eager autograd. A forward that takes ctx costs a third of the time of one with setup_context."""

    @staticmethod
    def forward(
        ctx: Any, operators: Operators, ids: Tensor, weight: Tensor, where: Any, dtype: Any, main_grad: Any
    ) -> Tensor:
        _torch.prepare(weight)
        y: Tensor = _C.embedding(ids, weight, *where, None, 0)
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
        ctx.operators, ctx.where, ctx.weight_dtype = operators, where, dtype
        ctx.main_grad = main_grad  # not saved, because other backwards may add to it in between
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (ids,), main_grad = ctx.saved_tensors, ctx.main_grad
        # With create_graph, backward itself is differentiated, so the call also goes through the dispatcher.
        direct = not is_grad_enabled() and is_direct_gradient(dy)
        if not direct:
            require_tensors(dy=dy)
        dy, how = gradient(dy, ctx.dtype), (ctx.num_rows, *ctx.where)
        if not ctx.needs_input_grad[2]:
            return (None,) * 6
        if main_grad is None:
            call = straight if direct else applied
            return None, None, call(ctx.operators[1], (dy, ids), (*how, ctx.weight_dtype))[0], None, None, None
        if _main_grad.is_asked_for(ctx.next_functions[1][0], main_grad):
            if not direct:
                _main_grad.require_addable(dy, main_grad)
            (straight if direct else applied)(ctx.operators[2], (main_grad, dy, ids), how)
        return (None,) * 6
