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
from .._shapes import COPY, check_columns, dtype_name, is_static
from .._torch import CODES, DTYPES, apply_function, gradient, implement, memory, prepare
from .._transforms import looped

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
# The status is an empty tensor where it is not asked for. dtype: 0 float32, 1 bfloat16, 2 float16.
_library.define(
    "sequence_logprob(Tensor logprob, Tensor? mask, Tensor? cu_seqlens, bool return_status) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "sequence_logprob_backward(Tensor dsum, Tensor? mask, Tensor? cu_seqlens, SymInt num_tokens, int dtype) -> Tensor"
)
_ops = torch.ops.rl_kernel_native


def _kernel(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> tuple[Tensor, Tensor, Tensor]:
    prepare(logprob)
    found = _C.sequence_logprob(memory(logprob), memory(mask), memory(cu_seqlens), return_status, None, 0)
    return found[0], found[1], found[2] if return_status else found[1].new_empty(0, dtype=torch.int32)


def _backward_kernel(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: int, code: int) -> Tensor:
    prepare(dsum)
    return _C.sequence_logprob_backward(memory(dsum), memory(mask), memory(cu_seqlens), num_tokens, code, None, 0)


implement(_library, "sequence_logprob", _kernel, functools.partial(apply, "_TransformedSequenceLogprob"))
implement(
    _library, "sequence_logprob_backward", _backward_kernel,
    functools.partial(apply, "_TransformedSequenceLogprobBackward"),
)  # fmt: skip


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def check_mask(mask: Any, shape: Any, whose: str) -> None:
    if mask is None:
        return
    if mask.is_complex() or (mask.is_floating_point() and mask.itemsize == 1):
        wanted = "bool, of integers or of floats of 16 bits and more"
        raise TypeError(f"mask: expected dtype {wanted}, got {dtype_name(mask.dtype)}")
    if mask.dim() != len(shape) or (is_static(mask) and tuple(mask.shape) != tuple(shape)):
        raise ValueError(f"mask: expected shape {list(shape)} (the tokens of {whose}), got {list(mask.shape)}")
    check_columns(mask, "mask")


def check_offsets(cu_seqlens: Any) -> None:
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected dtype int32 or int64, got {dtype_name(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or (is_static(cu_seqlens) and cu_seqlens.shape[0] < 1):
        raise ValueError(f"cu_seqlens: expected shape [num_sequences + 1], got {list(cu_seqlens.shape)}")
    if is_static(cu_seqlens) and not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens: expected a contiguous array, got stride {cu_seqlens.stride(0)}{COPY}")


@torch.library.register_fake("rl_kernel_native::sequence_logprob", lib=_library)
def _fake(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> tuple[Tensor, Tensor, Tensor]:
    if logprob.dtype not in CODES:
        raise TypeError(f"logprob: expected dtype float32, bfloat16 or float16, got {dtype_name(logprob.dtype)}")
    packed = cu_seqlens is not None
    if logprob.dim() != (1 if packed else 2):
        wanted = "[num_tokens] beside cu_seqlens" if packed else "[num_sequences, num_tokens]"
        raise ValueError(f"logprob: expected shape {wanted}, got {list(logprob.shape)}")
    check_columns(logprob, "logprob")
    check_mask(mask, logprob.shape, "logprob")
    check_offsets(cu_seqlens)
    rows = cu_seqlens.shape[0] - 1 if packed else logprob.shape[0]
    total = logprob.new_empty(rows, dtype=torch.float32)
    count = logprob.new_empty(rows, dtype=torch.int64)
    return total, count, logprob.new_empty(rows if return_status else 0, dtype=torch.int32)


@torch.library.register_fake("rl_kernel_native::sequence_logprob_backward", lib=_library)
def _backward_fake(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: Any, code: int) -> Tensor:
    if dsum.dtype != torch.float32:
        raise TypeError(f"dsum: expected dtype float32, got {dtype_name(dsum.dtype)}")
    check_offsets(cu_seqlens)
    if dsum.dim() != 1:
        raise ValueError(f"dsum: expected shape [num_sequences], got {list(dsum.shape)}")
    shape = [num_tokens] if cu_seqlens is not None else [dsum.shape[0], num_tokens]
    check_mask(mask, shape, "logprob")
    return dsum.new_empty(shape, dtype=DTYPES[code])


# ---- derivatives ----------------------------------------------------------------------------------------------------


def sequence_logprob(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> tuple[Any, Any, Any]:
    inputs = (logprob, mask, cu_seqlens, return_status)
    total, count, status = apply_function(_TracedSequenceLogprob, "_TransformedSequenceLogprob", *inputs)
    return total, count, status if return_status else None


def backward(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: Any, code: int) -> Any:
    inputs = (dsum, mask, cu_seqlens, num_tokens, code)
    return apply_function(_TracedSequenceLogprobBackward, "_TransformedSequenceLogprobBackward", *inputs)


class _TracedSequenceLogprob(torch.autograd.Function):
    @staticmethod
    def forward(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> Any:
        return _ops.sequence_logprob(logprob, mask, cu_seqlens, return_status)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logprob, mask, cu_seqlens, _ = inputs
        ctx.how = (logprob.shape[-1], CODES[logprob.dtype])
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(mask, cu_seqlens)
        ctx.save_for_forward(mask, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, _count: Any, _status: Any) -> Any:
        return backward(gradient(dsum, torch.float32, "dsum"), *ctx.saved_tensors, *ctx.how), None, None, None


@callable_in_graph
class _TransformedSequenceLogprob(_TracedSequenceLogprob):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(_TransformedSequenceLogprob.apply, info, in_dims, inputs), (0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        mask, cu_seqlens = ctx.saved_tensors
        total, _count, _status = sequence_logprob(tangent.contiguous(), mask, cu_seqlens, False)
        return total, None, None


class _TracedSequenceLogprobBackward(torch.autograd.Function):
    @staticmethod
    def forward(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: Any, code: int) -> Tensor:
        return _ops.sequence_logprob_backward(dsum, mask, cu_seqlens, num_tokens, code)

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


@callable_in_graph
class _TransformedSequenceLogprobBackward(_TracedSequenceLogprobBackward):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(_TransformedSequenceLogprobBackward.apply, info, in_dims, inputs), 0

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return backward(tangent.contiguous(), *ctx.saved_tensors, *ctx.how)
