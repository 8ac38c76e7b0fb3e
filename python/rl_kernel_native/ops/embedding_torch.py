"""embedding for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through embedding_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _check, _main_grad, _torch
from .._dispatch import count_write
from .._native import module as _C
from .._torch import (
    CODES,
    DTYPES,
    PLAIN,
    Eager,
    functorch_active,
    gradient,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import embedding_traced as traced

__all__ = ["PLAIN", "backward", "embedding", "is_compiling"]


def embedding(
    ids: Any, weight: Tensor, vocab_start: Any, vocab_size: Any, padding_idx: Any, main_grad: Any, code: int
) -> Tensor:
    if main_grad is not None:
        _main_grad.check(main_grad, weight, ids=ids)
    dtype = _main_grad.check_weight_grad(weight, code, main_grad)
    direct = is_direct(weight, ids)
    if direct and not wants_grad(weight):
        _torch.device_type(weight, "weight")
        prepare(weight)
        return _C.embedding(ids, weight, vocab_start, vocab_size, padding_idx, None, 0)
    if not direct:
        require_tensors(weight=weight, ids=ids)
        return traced.embedding(ids, weight, *_numbers(vocab_start, vocab_size, padding_idx), dtype, main_grad)
    return _Embedding.run(ids, weight, vocab_start, vocab_size, padding_idx, dtype, main_grad)


def _numbers(vocab_start: Any, vocab_size: Any, padding_idx: Any) -> tuple[int, int | None, int | None]:
    """As a schema takes them."""
    return (
        _check.integer64("vocab_start", vocab_start),
        None if vocab_size is None else _check.integer64("vocab_size", vocab_size),
        None if padding_idx is None else _check.integer64("padding_idx", padding_idx),
    )


class _Embedding(Eager):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, vocab_start: Any, vocab_size: Any, padding_idx: Any,
        weight_dtype: torch.dtype, main_grad: Any,
    ) -> Tensor:  # fmt: skip
        prepare(weight)
        y = _C.embedding(ids, weight, vocab_start, vocab_size, padding_idx, None, 0)
        ctx.save_for_backward(ids)
        ctx.where = (vocab_start, vocab_size, padding_idx)
        ctx.num_rows, ctx.dtype, ctx.weight_dtype = weight.shape[0], weight.dtype, weight_dtype
        ctx.main_grad = main_grad  # not saved: other backwards add to it in between, as they should
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        # create_graph, a backward that has a backward, goes through the dispatcher, too.
        direct = not is_grad_enabled() and is_direct_gradient(dy)
        if not direct:
            require_tensors(dy=dy)
        dy = gradient(dy, ctx.dtype)
        if not traced.wanted(ctx):
            return (None,) * 7
        if direct:
            prepare(dy)
            code = CODES[ctx.weight_dtype] if ctx.main_grad is None else -1
            dweight = _C.embedding_backward(dy, ids, ctx.num_rows, *ctx.where, ctx.main_grad, code, None, 0)
            if ctx.main_grad is not None:
                count_write(ctx.main_grad)
                dweight = None
        else:
            dweight = traced.gradients(dy, ids, ctx.num_rows, _numbers(*ctx.where), ctx.weight_dtype, ctx.main_grad)
        return None, dweight, None, None, None, None, None


def backward(
    dy: Tensor, ids: Any, num_rows: Any, vocab_start: Any, vocab_size: Any, padding_idx: Any, main_grad: Any, code: int
) -> Any:
    direct = is_direct(dy, ids, main_grad)
    differentiable = wants_grad(dy)
    if main_grad is not None:
        if differentiable or (isinstance(main_grad, Tensor) and main_grad.requires_grad):
            raise ValueError("main_grad: cannot be given where a gradient is wanted; call under torch.no_grad()")
        if not direct and functorch_active():
            raise ValueError("main_grad: cannot be given under torch.func")
        # Not while compiling: torch 2.11's Dynamo has no name for the bit, and the call itself asks again.
        if not is_compiling() and isinstance(main_grad, Tensor) and main_grad.is_neg():
            raise ValueError("main_grad: has torch's negative bit; call .resolve_neg()")
    if direct and not differentiable:
        prepare(dy)
        memory = main_grad.detach() if isinstance(main_grad, Tensor) else main_grad
        dweight = _C.embedding_backward(dy, ids, num_rows, vocab_start, vocab_size, padding_idx, memory, code, None, 0)
        if main_grad is None:
            return dweight
        count_write(main_grad)
        return main_grad
    require_tensors(dy=dy, ids=ids, optional={"main_grad": main_grad})
    numbers = _numbers(vocab_start, vocab_size, padding_idx)
    if main_grad is not None:
        torch.ops.rl_kernel_native.embedding_backward_(main_grad, dy, ids, num_rows, *numbers)
        return main_grad
    dtype = dy.dtype if code < 0 else DTYPES[code]
    return traced.backward(dy, ids, _check.integer64("num_rows", num_rows), numbers, dtype)
