"""rms_norm as torch operators: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

The forward is native and so is the first derivative. Forward-mode and second derivatives are composed from torch's own
operators in float64: they exist to be right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._native import module as _C
from .._torch import is_compiling, prepare
from .._transforms import batched, check_like, check_rows, filled, looped, memory, present, pushed
from .linear_autograd import gradient
from .linear_traced import CODES, DTYPES

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_NUMBERS = "float weight_offset, bool round_before_weight"
_BACKWARD = f"Tensor dy, Tensor h, Tensor? weight, Tensor rstd, Tensor? d_new_residual, {_NUMBERS}, bool return_dx"
# What is not asked for, or is not there, is an empty tensor.
_library.define(
    f"rms_norm(Tensor x, Tensor? weight, Tensor? residual, float eps, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
)
_library.define(f"rms_norm_backward({_BACKWARD}, ScalarType? dweight_dtype) -> (Tensor, Tensor)")
_library.define(f"rms_norm_backward_(Tensor(a!) main_grad, {_BACKWARD}) -> Tensor")
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
    dy, h, weight, rstd, d_new_residual, weight_offset, round_before_weight = inputs
    prepare(dy)
    return _C.rms_norm_backward(
        memory(dy), memory(h), memory(weight), 1.0, memory(rstd), memory(d_new_residual), weight_offset,
        round_before_weight, main_grad, return_dx, dtype is not None, -1 if dtype is None else CODES[dtype], None, 0,
    )  # fmt: skip


def _backward_kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    *inputs, return_dx, dtype = arguments
    dx, dweight = _call_backward(tuple(inputs), None, return_dx, dtype)
    nothing = inputs[0].new_empty(0)
    return nothing if dx is None else dx, inputs[0].new_empty(0) if dweight is None else dweight


def _backward_into(main_grad: Tensor, *arguments: Any) -> Tensor:
    *inputs, return_dx = arguments
    dx, _ = _call_backward(tuple(inputs), main_grad.detach(), return_dx, torch.float32)
    return inputs[0].new_empty(0) if dx is None else dx


for _key in ("CPU", "CUDA"):
    _library.impl("rms_norm", _forward_kernel, _key)
    _library.impl("rms_norm_backward", _backward_kernel, _key)
    _library.impl("rms_norm_backward_", _backward_into, _key)


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def _check_vector(tensor: Any, name: str, like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor is None:
        return
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {tensor.dtype}")
    if tensor.dim() != 1 or tensor.shape[0] != like.shape[-1]:
        raise ValueError(f"{name}: expected shape [{like.shape[-1]}], got {list(tensor.shape)}")


@torch.library.register_fake("rl_kernel_native::rms_norm", lib=_library)
def _forward_fake(x: Tensor, weight: Any, residual: Any, eps: float, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_rows(x, "x")
    _check_vector(weight, "weight", x, (torch.float32, x.dtype))
    check_like(residual, "residual", x, "x")
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps: expected a finite number > 0 in float32, got {eps}")
    new_residual = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), new_residual, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _check_backward(dy: Tensor, h: Tensor, weight: Any, rstd: Tensor, d_new_residual: Any) -> None:
    check_rows(dy, "dy")
    check_like(h, "h", dy, "dy")
    _check_vector(weight, "weight", dy, (torch.float32, dy.dtype))
    check_like(d_new_residual, "d_new_residual", dy, "dy")
    if rstd.dtype != torch.float32:
        raise TypeError(f"rstd: expected dtype float32, got {rstd.dtype}")
    if tuple(rstd.shape) != tuple(dy.shape[:-1]):
        raise ValueError(f"rstd: expected shape {list(dy.shape[:-1])}, got {list(rstd.shape)}")


@torch.library.register_fake("rl_kernel_native::rms_norm_backward", lib=_library)
def _backward_fake(
    dy: Tensor, h: Tensor, weight: Any, rstd: Tensor, d_new_residual: Any, _o: float, _r: bool, return_dx: bool,
    dtype: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_backward(dy, h, weight, rstd, d_new_residual)
    if dtype not in (None, torch.float32, dy.dtype):
        raise TypeError(f"dweight_dtype: expected float32 or {dy.dtype} (that of dy), got {dtype}")
    dweight = dy.new_empty(0) if dtype is None else dy.new_empty(dy.shape[-1:], dtype=dtype)
    return dy.new_empty(dy.shape if return_dx else 0), dweight


@torch.library.register_fake("rl_kernel_native::rms_norm_backward_", lib=_library)
def _backward_into_fake(
    main_grad: Tensor, dy: Tensor, h: Tensor, weight: Any, rstd: Tensor, d_new_residual: Any, _o: float, _r: bool,
    return_dx: bool,
) -> Tensor:  # fmt: skip
    _check_backward(dy, h, weight, rstd, d_new_residual)
    _check_vector(main_grad, "main_grad", dy, (torch.float32,))
    return dy.new_empty(dy.shape if return_dx else 0)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor, weight: Any, residual: Any, eps: float, weight_offset: float, round_before_weight: bool, main_grad: Any
) -> tuple[Any, Any, Any]:
    """y, new_residual (empty without a residual), rstd."""
    function = _TracedRmsNorm if is_compiling() else _TransformedRmsNorm
    return function.apply(x, weight, residual, eps, weight_offset, round_before_weight, main_grad)


def backward(
    dy: Tensor, h: Tensor, weight: Any, rstd: Tensor, d_new_residual: Any, eps: float, weight_offset: float,
    round_before_weight: bool, return_dx: bool, dweight_dtype: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """dx and dweight, None for what is not wanted."""
    function = _TracedBackward if is_compiling() else _TransformedBackward
    dx, dweight = function.apply(
        dy, h, weight, rstd, d_new_residual, eps, weight_offset, round_before_weight, return_dx, dweight_dtype
    )
    return dx if return_dx else None, None if dweight_dtype is None else dweight


def statistics(h: Tensor, eps: float) -> Tensor:
    """rstd of rows: a saved intermediate, whose dependence on h the derivatives of backward account for."""
    return _ops.rms_norm(h.detach(), None, None, eps, 0.0, False)[2]


def require_first_order() -> None:
    if torch.is_grad_enabled():
        raise ValueError("main_grad: a gradient that is added to it has no derivative; backward without create_graph")


def _composed_forward(x: Tensor, weight: Any, residual: Any, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    """y and new_residual, by torch's operators in float64; roundings are left out."""
    h = x.double() if residual is None else x.double() + residual.double()
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.double() + weight_offset)
    return y.to(x.dtype), h.to(x.dtype)


def _composed_backward(
    dy: Tensor, h: Tensor, weight: Any, d_new_residual: Any, eps: float, weight_offset: float, dweight_dtype: Any
) -> tuple[Tensor, Tensor]:
    """dx and dweight as differentiable functions of all of these."""
    g, wide = dy.double(), h.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    xhat = wide * rstd
    dweight = (g * xhat).reshape(-1, h.shape[-1]).sum(0)
    if weight is not None:
        g = g * (weight.double() + weight_offset)
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if d_new_residual is not None:
        dx = dx + d_new_residual.double()
    return dx.to(h.dtype), dweight.to(dweight_dtype or h.dtype)


class _TracedRmsNorm(torch.autograd.Function):
    """For torch.compile, which takes no jvp of one's own and needs every parameter by name."""

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
        h, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight, needs_residual = ctx.needs_input_grad[:3]
        if not ctx.has_residual:
            d_new_residual = None
        if dy is None and d_new_residual is None:
            return (None,) * 7
        dy = torch.zeros_like(h) if dy is None else gradient(dy, h.dtype)
        if d_new_residual is not None:
            d_new_residual = gradient(d_new_residual, h.dtype)
        return_dx = needs_x or needs_residual
        eps, weight_offset, round_before_weight = ctx.numbers
        if needs_weight and ctx.main_grad is not None:
            require_first_order()
            dweight = None
            dx = _ops.rms_norm_backward_(
                ctx.main_grad, dy, h, weight, rstd, d_new_residual, weight_offset, round_before_weight, return_dx
            )
        else:
            dtype = weight.dtype if needs_weight else None
            dx, dweight = backward(
                dy, h, weight, rstd, d_new_residual, eps, weight_offset, round_before_weight, return_dx, dtype
            )
        return dx if needs_x else None, dweight, dx if needs_residual else None, None, None, None, None


class _TransformedRmsNorm(_TracedRmsNorm):
    """For torch.func: with vmap and jvp."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        x, weight, residual, *rest = inputs
        if in_dims[1] is not None:
            outputs = looped(_TransformedRmsNorm.apply, info, in_dims, inputs)
        else:
            x, residual = batched(info, (in_dims[0], in_dims[2]), (x, residual))
            outputs = _TransformedRmsNorm.apply(x, weight, residual, *rest)
        return outputs, (0, None if residual is None and in_dims[1] is None else 0, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        tensors = ctx.saved_tensors
        eps, weight_offset = ctx.numbers[:2]
        primals, given = present(tensors, tangents[:3])

        def composed(*present: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, residual = filled(tensors, present)
            return _composed_forward(x, weight, residual, eps, weight_offset)

        y, new_residual = pushed(composed, primals, given)
        return y, new_residual if ctx.has_residual else None, None


class _TracedBackward(torch.autograd.Function):
    """The native backward, itself differentiable through a composition of torch's operators (create_graph)."""

    @staticmethod
    def forward(
        dy: Tensor, h: Tensor, weight: Any, rstd: Tensor, d_new_residual: Any, eps: float, weight_offset: float,
        round_before_weight: bool, return_dx: bool, dweight_dtype: Any,
    ) -> Any:  # fmt: skip
        return _ops.rms_norm_backward(
            dy, h, weight, rstd, d_new_residual, weight_offset, round_before_weight, return_dx, dweight_dtype
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        dy, h, weight, _rstd, d_new_residual, *numbers = inputs
        ctx.eps, ctx.weight_offset, _round, ctx.return_dx, ctx.dtype = numbers
        ctx.save_for_backward(dy, h, weight, d_new_residual)
        ctx.save_for_forward(dy, h, weight, d_new_residual)
        unwanted = [o for o, wanted in zip(output, (ctx.return_dx, ctx.dtype is not None), strict=True) if not wanted]
        ctx.mark_non_differentiable(*unwanted)

    @staticmethod
    def backward(ctx: Any, ddx: Any, ddweight: Any) -> Any:
        composed, primals, tensors = _composed_call(ctx)
        outputs, pullback, *_ = torch.func.vjp(composed, *primals)
        wanted = (ctx.return_dx, ctx.dtype is not None)
        cotangents = tuple(
            d if w else torch.zeros_like(o) for d, w, o in zip((ddx, ddweight), wanted, outputs, strict=True)
        )
        found = iter(pullback(cotangents))
        ddy, dh, dweight, third = (None if t is None else next(found) for t in tensors)
        return ddy, dh, dweight, None, third, None, None, None, None, None


def _composed_call(ctx: Any) -> tuple[Any, tuple[Tensor, ...], tuple[Any, ...]]:
    """The composed backward as a function of the tensors that are there, and where it was called."""
    tensors = ctx.saved_tensors

    def composed(*present: Tensor) -> tuple[Tensor, Tensor]:
        dy, h, weight, d_new_residual = filled(tensors, present)
        return _composed_backward(dy, h, weight, d_new_residual, ctx.eps, ctx.weight_offset, ctx.dtype)

    return composed, tuple(t for t in tensors if t is not None), tensors


class _TransformedBackward(_TracedBackward):
    """For torch.func: with vmap and jvp."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        dy, h, weight, rstd, third, *rest = inputs
        if in_dims[2] is not None or rest[-1] is not None:  # a weight, or its gradient, for each element
            return looped(_TransformedBackward.apply, info, in_dims, inputs), (0, 0)
        dims = (in_dims[0], in_dims[1], in_dims[3], in_dims[4])
        dy, h, rstd, third = batched(info, dims, (dy, h, rstd, third))
        return _TransformedBackward.apply(dy, h, weight, rstd, third, *rest), (0 if rest[-2] else None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        composed, primals, tensors = _composed_call(ctx)
        given = present(tensors, (tangents[0], tangents[1], tangents[2], tangents[4]))[1]
        dx, dweight = pushed(composed, primals, given)
        return dx if ctx.return_dx else None, None if ctx.dtype is None else dweight


__all__ = ["DTYPES", "backward", "require_first_order", "rms_norm", "statistics"]
