"""sequence_logprob as torch operators: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

A sum is linear, and its gradient is its transpose: each is the other's derivative, of any order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_first, check_mask, check_offsets, dtype_name
from .._torch import CODES, DTYPES, apply_function, gradient, memory, prepare
from .._transforms import looped

# The status is an empty tensor where it is not asked for. dtype: 0 float32, 1 bfloat16, 2 float16.
define(
    "sequence_logprob(Tensor logprob, Tensor? mask, Tensor? cu_seqlens, bool return_status) -> (Tensor, Tensor, Tensor)"
)
define(
    "sequence_logprob_backward(Tensor dsum, Tensor? mask, Tensor? cu_seqlens, SymInt num_tokens, int dtype) -> Tensor"
)
_ops = torch.ops.rl_kernel_native


def _kernel(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> tuple[Tensor, Tensor, Tensor]:
    prepare(logprob)
    found = _C.sequence_logprob(memory(logprob), memory(mask), memory(cu_seqlens), return_status, None, 0)
    return found[0], found[1], found[2] if return_status else found[1].new_empty(0, dtype=torch.int32)


def _backward_kernel(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: int, code: int) -> Tensor:
    prepare(dsum)
    how = (num_tokens, code, is_flat(mask, cu_seqlens))
    return _C.sequence_logprob_backward(memory(dsum), memory(mask), memory(cu_seqlens), *how, None, 0)


def is_flat(mask: Any, cu_seqlens: Any) -> bool:
    """Whether the gradient of one sequence is ``[num_tokens]``: that of a mask says so."""
    return cu_seqlens is None and getattr(mask, "ndim", 2) == 1


implement("sequence_logprob", _kernel, functools.partial(apply, "SequenceLogprob"))
implement("sequence_logprob_backward", _backward_kernel,
    functools.partial(apply, "SequenceLogprobBackward"),
)  # fmt: skip


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


@fake("sequence_logprob")
def _fake(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = check_first(logprob, "logprob", cu_seqlens, (torch.float32, torch.bfloat16, torch.float16))
    check_mask(mask, logprob.shape, "logprob")
    total = logprob.new_empty(rows, dtype=torch.float32)
    count = logprob.new_empty(rows, dtype=torch.int64)
    return total, count, logprob.new_empty(rows if return_status else 0, dtype=torch.int32)


@fake("sequence_logprob_backward")
def _backward_fake(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: Any, code: int) -> Tensor:
    if dsum.dtype != torch.float32:
        raise TypeError(f"dsum: expected dtype float32, got {dtype_name(dsum.dtype)}")
    check_offsets(cu_seqlens)
    if dsum.dim() != 1:
        raise ValueError(f"dsum: expected shape [num_sequences], got {list(dsum.shape)}")
    packed = cu_seqlens is not None or is_flat(mask, cu_seqlens)
    shape = [num_tokens] if packed else [dsum.shape[0], num_tokens]
    check_mask(mask, shape, "logprob")
    return dsum.new_empty(shape, dtype=DTYPES[code])


# ---- derivatives ----------------------------------------------------------------------------------------------------


def sequence_logprob(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> tuple[Any, Any, Any]:
    inputs = (logprob, mask, cu_seqlens, return_status)
    total, count, status = apply_function(_ops.sequence_logprob, "SequenceLogprob", *inputs)
    return total, count, status if return_status else None


def backward(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: Any, code: int) -> Any:
    inputs = (dsum, mask, cu_seqlens, num_tokens, code)
    return apply_function(_ops.sequence_logprob_backward, "SequenceLogprobBackward", *inputs)


@callable_in_graph
class SequenceLogprob(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.sequence_logprob(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logprob, mask, cu_seqlens, _ = inputs
        ctx.how = (logprob.shape[-1], CODES[logprob.dtype])
        ctx.is_flat = logprob.dim() == 1
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(mask, cu_seqlens)
        ctx.save_for_forward(mask, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, _count: Any, _status: Any) -> Any:
        found = backward(gradient(dsum, torch.float32, "dsum"), *ctx.saved_tensors, *ctx.how)
        return found.reshape(-1) if ctx.is_flat else found, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(SequenceLogprob.apply, info, in_dims, inputs), (0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        mask, cu_seqlens = ctx.saved_tensors
        total, _count, _status = sequence_logprob(tangent.contiguous(), mask, cu_seqlens, False)
        return total, None, None


@callable_in_graph
class SequenceLogprobBackward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.sequence_logprob_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _dsum, mask, cu_seqlens, *ctx.how = inputs
        ctx.save_for_backward(mask, cu_seqlens)
        ctx.save_for_forward(mask, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        mask, cu_seqlens = ctx.saved_tensors
        total, _count, _status = sequence_logprob(gradient(dy, dy.dtype), mask, cu_seqlens, False)
        return total, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(SequenceLogprobBackward.apply, info, in_dims, inputs), 0

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return backward(tangent.contiguous(), *ctx.saved_tensors, *ctx.how)
