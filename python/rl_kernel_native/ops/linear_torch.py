"""linear for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through linear_autograd.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _check, _main_grad, _torch
from .._arithmetic import AS_CALLED, product_unit
from .._dispatch import count_write
from .._native import module as _C
from .._torch import (
    CODES,
    DTYPES,
    PLAIN,
    Eager,
    autocast,
    functorch_active,
    gradient,
    is_autocasting,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import linear_autograd as traced

__all__ = ["PLAIN", "bias_grad", "input_grad", "is_autocasting", "is_compiling", "linear", "tree_sum", "weight_grad"]

_require_tensors = functools.partial(
    require_tensors, sharded=", or for a sharded in_features linear_partial and tree_sum"
)


def _unit() -> int:
    """Compiling cannot read the context of rk.arithmetic; linear_traced.py resolves it when the graph runs."""
    return AS_CALLED if is_compiling() else product_unit()


def linear(
    x: Tensor,
    weight: Any,
    bias: Any,
    k_segments: int,
    out: int,
    allow_vendor: bool,
    main_grad: Any,
    weight_grad: int,
) -> Tensor:
    if is_autocasting():
        x, weight, bias = autocast(x, weight, bias)
    direct = is_direct(x, weight, bias)
    unit = _unit()
    weight_dtype = _main_grad.check_weight_grad(weight, weight_grad, main_grad)
    if main_grad is not None:
        _main_grad.check(main_grad, weight, x=x, bias=bias)
    if direct and not wants_grad(x, weight, bias):
        _torch.device_type(x, "x")
        prepare(x)
        return _C.linear(x, weight, bias, k_segments, out, allow_vendor, unit, None, 0)
    if not direct:
        _require_tensors(x=x, weight=weight, optional={"bias": bias})
        k_segments = _check.segment_count("k_segments", k_segments)
        out_dtype = x.dtype if out < 0 else DTYPES[out]
        return traced.linear(x, weight, bias, k_segments, out_dtype, allow_vendor, unit, weight_dtype, main_grad)
    return _Linear.run(x, weight, bias, k_segments, out, allow_vendor, unit, weight_dtype, main_grad)


class _Linear(Eager):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, k_segments: int, out: int, allow_vendor: bool, unit: int,
        weight_dtype: torch.dtype, main_grad: Any,
    ) -> Tensor:  # fmt: skip
        prepare(x)
        y = _C.linear(x, weight, bias, k_segments, out, allow_vendor, unit, None, 0)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.how = (allow_vendor, unit)
        ctx.dtype, ctx.weight_dtype = x.dtype, weight_dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.main_grad = main_grad  # not saved: other backwards add to it in between, as they should
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if dy is None:
            return (None,) * 9
        x, weight = ctx.saved_tensors
        main_grad = ctx.main_grad
        _main_grad.refuse_create_graph(main_grad)
        needs_x, needs_weight, needs_bias = traced.wanted(ctx)
        # create_graph, a backward that has a backward, goes through the dispatcher, too.
        direct = not is_grad_enabled() and is_direct_gradient(dy)
        if not direct:
            _require_tensors(dy=dy)
        dy = gradient(dy, ctx.dtype)
        dx = dweight = dbias = None
        if direct:
            prepare(dy)
            if needs_x:
                dx = _C.linear_input_grad(dy, weight, *ctx.how, None, 0)
            if needs_weight:
                code = -1 if main_grad is not None else CODES[ctx.weight_dtype]
                dweight = _C.linear_weight_grad(dy, x, main_grad, None, code, *ctx.how, None, 0)
                if main_grad is not None:
                    count_write(main_grad)
                    dweight = None
            if needs_bias:
                dbias = _C.linear_bias_grad(dy, CODES[ctx.bias_dtype], None, 0)
        else:
            if needs_x:
                dx = traced.input_grad(dy, weight, *ctx.how)
            if needs_weight and main_grad is not None:
                traced.accumulate(main_grad, dy, x, *ctx.how)
            elif needs_weight:
                dweight = traced.weight_grad(dy, x, ctx.weight_dtype, *ctx.how)
            if needs_bias:
                dbias = traced.bias_gradient(dy, ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None, None, None, None


def input_grad(dy: Tensor, weight: Any, allow_vendor: bool) -> Tensor:
    unit = _unit()
    if is_direct(dy, weight) and not wants_grad(dy, weight):
        prepare(dy)
        return _C.linear_input_grad(dy, weight, allow_vendor, unit, None, 0)
    _require_tensors(dy=dy, weight=weight)
    return traced.input_grad(dy, weight, allow_vendor, unit)


def weight_grad(dy: Tensor, x: Any, main_grad: Any, out: Any, code: int, allow_vendor: bool) -> Tensor:
    unit = _unit()
    direct = is_direct(dy, x, main_grad, out)
    differentiable = wants_grad(dy, x)
    given = main_grad if main_grad is not None else out
    if given is not None:
        name = "out" if main_grad is None else "main_grad"
        if differentiable or (isinstance(given, Tensor) and given.requires_grad):
            raise ValueError(f"{name}: cannot be given where a gradient is wanted; call under torch.no_grad()")
        _torch.refuse_jit_trace()
        if not direct and (out is not None or functorch_active()):
            _require_tensors(dy=dy, x=x)  # a meta tensor beside others is named itself
            raise ValueError(f"{name}: cannot be given under torch.compile, torch.func or a dispatch mode")
    if direct and not differentiable:
        prepare(dy)
        detached = [t.detach() if isinstance(t, Tensor) else t for t in (main_grad, out)]
        dweight = _C.linear_weight_grad(dy, x, *detached, code, allow_vendor, unit, None, 0)
        if given is None:
            return dweight
        count_write(given)
        return given
    _require_tensors(dy=dy, x=x, optional={"main_grad": main_grad})
    if main_grad is not None:
        torch.ops.rl_kernel_native.linear_weight_grad_(main_grad, dy, x, allow_vendor, unit)
        return main_grad
    return traced.weight_grad(dy, x, dy.dtype if code < 0 else DTYPES[code], allow_vendor, unit)


def bias_grad(dy: Tensor, code: int) -> Tensor:
    if is_direct(dy) and not wants_grad(dy):
        prepare(dy)
        return _C.linear_bias_grad(dy, code, None, 0)
    _require_tensors(dy=dy)
    return traced.bias_grad(dy, dy.dtype if code < 0 else DTYPES[code])


def tree_sum(parts: list[Any], bias: Any, code: int) -> Tensor:
    if is_direct(*parts, bias) and not wants_grad(*parts, bias):
        prepare(parts[0])
        return _C.tree_sum(parts, bias, code, None, 0)
    _require_tensors(**{f"parts[{i}]": part for i, part in enumerate(parts)}, optional={"bias": bias})
    return traced.tree_sum(parts, bias, torch.float32 if code < 0 else DTYPES[code])
