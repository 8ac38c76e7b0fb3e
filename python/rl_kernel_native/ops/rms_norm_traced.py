"""rms_norm as torch operators: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

The forward is native and so is the first derivative. Forward-mode and second derivatives are composed from torch's own
operators in float64: they exist to be right.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _main_grad
from .._dispatch import count_write
from .._in_graph import apply, callable_in_graph
from .._main_grad import is_asked_for
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import (
    check_columns_below,
    check_float32_or,
    check_like,
    check_narrowing,
    check_rows,
    dtype_name,
    is_static,
)
from .._torch import CODES, apply_function, gradient, memory, prepare, rows_of
from .._transforms import batched, looped, pulled, pushed

_NUMBERS = "float eps, float weight_offset, bool round_before_weight"
_BACKWARD = f"Tensor dy, Tensor h, Tensor? weight, Tensor? rstd, Tensor? d_new_residual, {_NUMBERS}, bool return_dx"
# What is not asked for, or is not there, is an empty tensor.
define(f"rms_norm(Tensor x, Tensor? weight, Tensor? residual, {_NUMBERS}) -> (Tensor, Tensor, Tensor)")
define(f"rms_norm_backward({_BACKWARD}, ScalarType? dweight_dtype) -> (Tensor, Tensor)")
define(f"rms_norm_backward_(Tensor(a!) main_grad, {_BACKWARD}) -> Tensor")
_ops = torch.ops.rl_kernel_native


def _forward_kernel(
    x: Tensor, weight: Any, residual: Any, eps: float, weight_offset: float, round_before_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    prepare(x)
    y, new_residual, rstd = _C.rms_norm(
        memory(x), memory(weight), memory(residual), eps, weight_offset, round_before_weight, True, None, 0
    )
    return y, x.new_empty(0) if new_residual is None else new_residual, rstd


def _call_backward(inputs: tuple[Any, ...], main_grad: Any, return_dx: bool, dtype: Any) -> tuple[Any, Any]:
    dy, h, weight, rstd, d_new_residual, eps, weight_offset, round_before_weight = inputs
    prepare(dy)
    return _C.rms_norm_backward(
        memory(dy), memory(h), memory(weight), eps, memory(rstd), memory(d_new_residual), weight_offset,
        round_before_weight, main_grad, return_dx, dtype is not None, CODES.get(dtype, -1), None, 0,
    )  # fmt: skip


def _backward_kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    *inputs, return_dx, dtype = arguments
    dx, dweight = _call_backward(tuple(inputs), None, return_dx, dtype)
    nothing = inputs[0].new_empty(0)
    return nothing if dx is None else dx, inputs[0].new_empty(0) if dweight is None else dweight


def _backward_into(main_grad: Tensor, *arguments: Any) -> Tensor:
    *inputs, return_dx = arguments
    dx, _ = _call_backward(tuple(inputs), main_grad.detach(), return_dx, torch.float32)
    count_write(main_grad)
    return inputs[0].new_empty(0) if dx is None else dx


def _differentiable_forward(*arguments: Any) -> tuple[Tensor, ...]:
    return apply("RmsNorm", *arguments, None)


implement("rms_norm", _forward_kernel, _differentiable_forward)
implement("rms_norm_backward", _backward_kernel, functools.partial(apply, "RmsNormBackward"))
implement("rms_norm_backward_", _backward_into)


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def _check_vector(tensor: Tensor, name: str, like: Tensor, like_name: str) -> None:
    if tensor.dim() != 1 or tensor.shape[0] != like.shape[-1]:
        raise ValueError(
            f"{name}: expected shape [{like.shape[-1]}] (the last dimension of {like_name}), got {list(tensor.shape)}"
        )
    if is_static(tensor) and tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name}: expected contiguous elements (stride 1), got stride {tensor.stride(0)}")


def _check_weight(weight: Any, offset: float, like: Tensor, like_name: str) -> None:
    if not -float("inf") < offset < float("inf"):
        raise ValueError(f"weight_offset: expected a finite number, got {offset}")
    if weight is not None:
        check_float32_or(weight, "weight", like.dtype, f" (that of {like_name})")
        _check_vector(weight, "weight", like, like_name)
    elif offset != 0:
        raise ValueError("weight_offset: expected 0 where weight is None")


def _check_eps(eps: float) -> None:
    if not 2.0**-150 < eps < 2.0**128 - 2.0**103:  # what rounds to 0 or to infinity
        raise ValueError(f"eps: expected a finite number > 0 in float32, got {eps}")


@fake("rms_norm")
def _forward_fake(
    x: Tensor, weight: Any, residual: Any, eps: float, weight_offset: float, _: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_rows(x, "x")
    check_columns_below(x, "x", 31)
    _check_weight(weight, weight_offset, x, "x")
    _check_eps(eps)
    check_like(residual, "residual", x, "x")
    new_residual = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), new_residual, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _check_backward(
    dy: Tensor, h: Tensor, weight: Any, rstd: Any, d_new_residual: Any, eps: float, weight_offset: float
) -> None:
    check_rows(dy, "dy")
    check_columns_below(dy, "dy", 31)
    check_like(h, "h", dy, "dy")
    _check_weight(weight, weight_offset, dy, "dy")
    check_like(d_new_residual, "d_new_residual", dy, "dy")
    if rstd is None:
        _check_eps(eps)
        return
    if rstd.dtype != torch.float32:
        raise TypeError(f"rstd: expected dtype float32, got {dtype_name(rstd.dtype)}")
    if tuple(rstd.shape) != tuple(dy.shape[:-1]) or (is_static(rstd) and not rstd.is_contiguous()):
        raise ValueError(
            f"rstd: expected a contiguous array of shape {list(dy.shape[:-1])} (the leading dimensions of dy), got "
            f"{list(rstd.shape)}"
        )


@fake("rms_norm_backward")
def _backward_fake(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *inputs, _round_before_weight, return_dx, dtype = arguments
    _check_backward(dy, *inputs)
    if dtype is not None:
        check_narrowing("dweight_dtype", dtype, dy.dtype)
    dweight = dy.new_empty(0) if dtype is None else dy.new_empty(dy.shape[-1:], dtype=dtype)
    return dy.new_empty(dy.shape if return_dx else 0), dweight


@fake("rms_norm_backward_")
def _backward_into_fake(main_grad: Tensor, dy: Tensor, *arguments: Any) -> Tensor:
    *inputs, _round_before_weight, return_dx = arguments
    _check_backward(dy, *inputs)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad: expected dtype float32, got {dtype_name(main_grad.dtype)}")
    _check_vector(main_grad, "main_grad", dy, "dy")
    return dy.new_empty(dy.shape if return_dx else 0)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Any, residual: Any, eps: float, weight_offset: float, round_before_weight: bool, main_grad: Any
) -> tuple[Any, Any, Any]:
    """y, new_residual (empty without a residual), rstd."""
    arguments = (x, weight, residual, eps, weight_offset, round_before_weight)
    return apply_function(_ops.rms_norm, "RmsNorm", *arguments, more=(main_grad,))


def backward(
    dy: Tensor, h: Tensor, weight: Any, rstd: Any, d_new_residual: Any, eps: float, weight_offset: float,
    round_before_weight: bool, return_dx: bool, dweight_dtype: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """dx and dweight, None for what is not wanted."""
    how = (eps, weight_offset, round_before_weight, return_dx, dweight_dtype)
    dx, dweight = apply_function(_ops.rms_norm_backward, "RmsNormBackward", dy, h, weight, rstd, d_new_residual, *how)
    return dx if return_dx else None, None if dweight_dtype is None else dweight


def wanted(ctx: Any) -> tuple[bool, bool]:
    """Whether the running backward asks for dx, which is the gradient of x and of the residual, and for dweight. It
    asks for one of them."""
    edges, (x, dweight, residual) = ctx.next_functions, ctx.needs_input_grad[:3]
    if not dweight or not is_asked_for(edges[1][0], ctx.main_grad):
        return x or residual, False
    return (x and is_asked_for(edges[0][0])) or (residual and is_asked_for(edges[2][0])), True


def past_the_norm(ctx: Any, d_new_residual: Any) -> tuple[Any, ...]:
    """The gradients where y has none."""
    needs_x, _, needs_residual = ctx.needs_input_grad[:3]
    return d_new_residual if needs_x else None, None, d_new_residual if needs_residual else None, *(None,) * 4


def gradients(
    dy: Tensor, h: Tensor, weight: Any, rstd: Tensor, d_new_residual: Any, numbers: tuple[float, float, bool],
    return_dx: bool, return_dweight: bool, main_grad: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """dx, and dweight where main_grad does not take it, through the dispatcher."""
    if not return_dweight or main_grad is None:
        dtype = weight.dtype if return_dweight else None
        return backward(dy, h, weight, rstd, d_new_residual, *numbers, return_dx, dtype)
    _main_grad.require_addable(dy, main_grad)
    dx = _ops.rms_norm_backward_(main_grad, dy, h, weight, rstd, d_new_residual, *numbers, return_dx)
    return dx if return_dx else None, None


def _composed_forward(x: Tensor, weight: Any, residual: Any, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    """y and new_residual, by torch's operators in float64; roundings are left out."""
    h = x.double() if residual is None else x.double() + residual.double()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.double() + weight_offset)
    return y.to(x.dtype), h.to(x.dtype)


def _composed_backward(
    dy: Tensor, h: Tensor, weight: Any, d_new_residual: Any, eps: float, weight_offset: float, return_dx: bool,
    dweight_dtype: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What is wanted of dx and dweight, as differentiable functions of all of these."""
    g, wide = dy.double(), h.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    xhat = wide * rstd
    outputs: list[Tensor] = []
    if return_dx:
        gw = g if weight is None else g * (weight.double() + weight_offset)
        dx = rstd * (gw - xhat * (gw * xhat).mean(-1, keepdim=True))
        outputs.append((dx if d_new_residual is None else dx + d_new_residual.double()).to(h.dtype))
    if dweight_dtype is not None:
        outputs.append((g * xhat).reshape(-1, h.shape[-1]).sum(0).to(dweight_dtype))
    return tuple(outputs)


@callable_in_graph
class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Any, residual: Any, eps: float, weight_offset: float, round_before_weight: bool,
        main_grad: Any,
    ) -> Any:  # fmt: skip
        return _ops.rms_norm(x, weight, residual, eps, weight_offset, round_before_weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, residual = inputs[:3]
        ctx.numbers = tuple(inputs[3:6])
        ctx.main_grad = inputs[6]
        ctx.has_residual = residual is not None
        h = output[1] if ctx.has_residual else x
        ctx.save_for_backward(h, weight, output[2])
        ctx.save_for_forward(x, weight, residual)
        if ctx.has_residual:
            ctx.mark_non_differentiable(output[2])
        else:
            ctx.mark_non_differentiable(output[1], output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Any, d_new_residual: Any, _: Any) -> Any:
        if not ctx.has_residual:
            d_new_residual = None
        if dy is None:
            return past_the_norm(ctx, d_new_residual)
        h, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight, needs_residual = ctx.needs_input_grad[:3]
        _main_grad.refuse_create_graph(ctx.main_grad)
        if ctx.main_grad is not None:
            needs_weight = wanted(ctx)[1]
        if d_new_residual is not None:
            d_new_residual = gradient(d_new_residual, h.dtype, "d_new_residual")
        dx, dweight = gradients(
            gradient(dy, h.dtype), rows_of(h), weight, rstd, d_new_residual, ctx.numbers, needs_x or needs_residual,
            needs_weight, ctx.main_grad,
        )  # fmt: skip
        return dx if needs_x else None, dweight, dx if needs_residual else None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        x, weight, residual, *rest = inputs
        if in_dims[1] is not None:
            outputs = looped(RmsNorm.apply, info, in_dims, inputs)
        else:
            x, residual = batched(info, (in_dims[0], in_dims[2]), (x, residual))
            outputs = RmsNorm.apply(x, weight, residual, *rest)
        return outputs, (0, None if residual is None and in_dims[1] is None else 0, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        eps, weight_offset, _ = ctx.numbers

        def composed(x: Tensor, weight: Any, residual: Any) -> tuple[Tensor, Tensor]:
            return _composed_forward(x, weight, residual, eps, weight_offset)

        y, new_residual = pushed(composed, ctx.saved_tensors, tangents[:3])
        return y, new_residual if ctx.has_residual else None, None


@callable_in_graph
class RmsNormBackward(torch.autograd.Function):
    """The native backward, itself differentiable through a composition of torch's operators (create_graph)."""

    @staticmethod
    def forward(
        dy: Tensor, h: Tensor, weight: Any, rstd: Any, d_new_residual: Any, eps: float, weight_offset: float,
        round_before_weight: bool, return_dx: bool, dweight_dtype: Any,
    ) -> Any:  # fmt: skip
        return _ops.rms_norm_backward(
            dy, h, weight, rstd, d_new_residual, eps, weight_offset, round_before_weight, return_dx, dweight_dtype
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        dy, h, weight, _rstd, d_new_residual, eps, weight_offset, _round, return_dx, dtype = inputs
        ctx.how = (eps, weight_offset, return_dx, dtype)
        ctx.wanted = (return_dx, dtype is not None)
        ctx.save_for_backward(dy, h, weight, d_new_residual)
        ctx.save_for_forward(dy, h, weight, d_new_residual)
        ctx.mark_non_differentiable(*(o for o, w in zip(output, ctx.wanted, strict=True) if not w))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cotangents = tuple(g for g, w in zip(gradients, ctx.wanted, strict=True) if w)
        ddy, dh, dweight, third = pulled(_composed_call(ctx), ctx.saved_tensors, cotangents)
        return ddy, dh, dweight, None, third, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        dy, h, weight, rstd, third, *rest = inputs
        if in_dims[2] is not None or rest[-1] is not None:  # a weight, or its gradient, for each element
            return looped(RmsNormBackward.apply, info, in_dims, inputs), (0, 0)
        dims = (in_dims[0], in_dims[1], in_dims[3], in_dims[4])
        dy, h, rstd, third = batched(info, dims, (dy, h, rstd, third))
        outputs = RmsNormBackward.apply(dy, h, weight, rstd, third, *rest)
        return outputs, (0 if rest[-2] else None, None)

    @staticmethod
    def jvp(ctx: Any, ddy: Any, dh: Any, dweight: Any, _: Any, third: Any, *__: Any) -> Any:
        found = iter(pushed(_composed_call(ctx), ctx.saved_tensors, (ddy, dh, dweight, third)))
        return tuple(next(found) if w else None for w in ctx.wanted)


def _composed_call(ctx: Any) -> Any:
    """The composed backward as a function of dy, h, weight and d_new_residual."""
    how = ctx.how
    return lambda *tensors: _composed_backward(*tensors, *how)
