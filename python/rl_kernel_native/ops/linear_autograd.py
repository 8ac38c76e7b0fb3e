"""Derivatives of linear's functions, composed from one another: each is linear in either operand, so the set is
closed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _main_grad
from .._arithmetic import AS_CALLED, IEEE
from .._in_graph import callable_in_graph
from .._main_grad import is_asked_for
from .._torch import apply_function, gradient, rows_of
from .._transforms import looped
from . import linear_traced  # noqa: F401 - registers the operators

_ops = torch.ops.rl_kernel_native


def _backwards(unit: int) -> int:
    """The unit of a backward: the forward's, whatever context backward runs in. A compiled one was ieee."""
    return IEEE if unit == AS_CALLED else unit


def linear(x: Tensor, weight: Tensor, bias: Any, k_segments: int, out_dtype: torch.dtype, *rest: Any) -> Tensor:
    """``rest``: allow_vendor, unit, and what only a forward has: the dtype of dweight and main_grad."""
    allow_vendor, unit, *ours = rest
    weight_dtype, main_grad = ours or (weight.dtype, None)
    arguments = (x, weight, bias, k_segments, out_dtype, allow_vendor, unit)
    return apply_function(_ops.linear, "Linear", *arguments, more=(weight_dtype, main_grad))


def input_grad(dy: Tensor, weight: Tensor, allow_vendor: bool, unit: int) -> Tensor:
    return apply_function(_ops.linear_input_grad, "InputGrad", dy, weight, allow_vendor, unit)


def weight_grad(dy: Tensor, x: Tensor, out_dtype: torch.dtype, allow_vendor: bool, unit: int) -> Tensor:
    return apply_function(_ops.linear_weight_grad, "WeightGrad", dy, x, out_dtype, allow_vendor, unit)


def bias_grad(dy: Tensor, out_dtype: torch.dtype) -> Tensor:
    return apply_function(_ops.linear_bias_grad, "BiasGrad", dy, out_dtype)


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """dbias in any dtype: the operator gives that of dy or float32."""
    return bias_grad(dy, dtype) if dtype == dy.dtype else bias_grad(dy, torch.float32).to(dtype)


def tree_sum(parts: list[Any], bias: Any, out_dtype: torch.dtype) -> Tensor:
    return apply_function(_tree_sum, "TreeSum", bias, out_dtype, *parts)


def _tree_sum(bias: Any, out_dtype: torch.dtype, *parts: Tensor) -> Tensor:
    found: Tensor = _ops.tree_sum(list(parts), bias, out_dtype)
    return found


def _folded(tensor: Tensor, dim: int) -> Tensor:
    """The batch as one more dimension of rows."""
    return tensor.movedim(dim, 0).contiguous()


def _sum(*terms: Tensor | None) -> Any:
    """The sum of the tangents that are there; None if none is."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


@callable_in_graph
class Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Any, k_segments: int, out_dtype: Any, allow_vendor: bool, unit: int,
        weight_dtype: Any, main_grad: Any,
    ) -> Tensor:  # fmt: skip
        return _ops.linear(x, weight, bias, k_segments, out_dtype, allow_vendor, unit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.k_segments, ctx.out_dtype, ctx.allow_vendor, ctx.unit, ctx.weight_dtype = inputs[:8]
        ctx.main_grad = inputs[8]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        _main_grad.refuse_create_graph(ctx.main_grad)
        x, weight = ctx.saved_tensors
        how = (ctx.allow_vendor, _backwards(ctx.unit))
        dy = gradient(dy, x.dtype)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = input_grad(dy, weight, *how) if needs_x else None
        dweight = None
        if needs_weight and ctx.main_grad is not None:
            if wanted(ctx)[1]:
                accumulate(ctx.main_grad, dy, x, *how)
        elif needs_weight:
            dweight = weight_grad(dy, rows_of(x), ctx.weight_dtype, *how)
        dbias = bias_gradient(dy, ctx.bias_dtype) if needs_bias else None
        return dx, dweight, dbias, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        if in_dims[1] is None and in_dims[2] is None:
            return Linear.apply(_folded(x, in_dims[0]), weight, bias, *rest), 0
        return looped(Linear.apply, info, in_dims, (x, weight, bias, *rest)), 0

    @staticmethod
    def jvp(ctx: Any, dx: Any, dweight: Any, dbias: Any, *_: Any) -> Any:
        x, weight = ctx.saved_tensors
        how = (ctx.k_segments, torch.float32, ctx.allow_vendor, _backwards(ctx.unit))
        total = _sum(
            None if dx is None else linear(rows_of(dx), weight, None, *how),
            None if dweight is None else linear(rows_of(x), rows_of(dweight), None, *how),
        )
        if dbias is not None:
            rows = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=torch.float32, device=x.device)
            total = _sum(total, rows + dbias)
        return None if total is None else total.to(ctx.out_dtype)


def wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether the running backward asks for the gradients of x, weight and bias. Who asks for that of weight gets the
    cheap one of bias unasked."""
    edges, (x, weight, bias) = ctx.next_functions, ctx.needs_input_grad[:3]
    weight = weight and is_asked_for(edges[1][0], ctx.main_grad)
    return x and is_asked_for(edges[0][0]), weight, bias and (weight or is_asked_for(edges[2][0]))


def accumulate(main_grad: Tensor, dy: Tensor, x: Tensor, allow_vendor: bool, unit: int) -> None:
    """Adds the gradient of weight to main_grad through the dispatcher."""
    _main_grad.require_addable(dy, main_grad)
    _ops.linear_weight_grad_(main_grad, dy, rows_of(x), allow_vendor, unit)


@callable_in_graph
class InputGrad(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.linear_input_grad(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, weight, ctx.allow_vendor, ctx.unit = inputs
        ctx.save_for_backward(dy, weight)
        ctx.save_for_forward(dy, weight)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> Any:
        dy, weight = ctx.saved_tensors
        how = (ctx.allow_vendor, _backwards(ctx.unit))
        ddx = rows_of(ddx)
        ddy = linear(ddx, weight, None, 1, dy.dtype, *how) if ctx.needs_input_grad[0] else None
        dweight = weight_grad(rows_of(dy), ddx, weight.dtype, *how) if ctx.needs_input_grad[1] else None
        return ddy, dweight, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], dy: Any, weight: Any, *rest: Any) -> Any:
        if in_dims[1] is None:
            return InputGrad.apply(_folded(dy, in_dims[0]), weight, *rest), 0
        return looped(InputGrad.apply, info, in_dims, (dy, weight, *rest)), 0

    @staticmethod
    def jvp(ctx: Any, ddy: Any, dweight: Any, *_: Any) -> Any:
        dy, weight = ctx.saved_tensors
        how = (ctx.allow_vendor, _backwards(ctx.unit))
        return _sum(
            None if ddy is None else input_grad(rows_of(ddy), weight, *how),
            None if dweight is None else input_grad(rows_of(dy), rows_of(dweight), *how),
        )


@callable_in_graph
class WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.linear_weight_grad(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, x, ctx.out_dtype, ctx.allow_vendor, ctx.unit = inputs
        ctx.save_for_backward(dy, x)
        ctx.save_for_forward(dy, x)

    @staticmethod
    def backward(ctx: Any, ddweight: Tensor) -> Any:
        dy, x = ctx.saved_tensors
        how = (ctx.allow_vendor, _backwards(ctx.unit))
        ddweight = gradient(ddweight, x.dtype)
        ddy = linear(rows_of(x), ddweight, None, 1, dy.dtype, *how) if ctx.needs_input_grad[0] else None
        dx = input_grad(rows_of(dy), ddweight, *how) if ctx.needs_input_grad[1] else None
        return ddy, dx, None, None, None

    @staticmethod
    def jvp(ctx: Any, ddy: Any, dx: Any, *_: Any) -> Any:
        dy, x = ctx.saved_tensors
        how = (ctx.out_dtype, ctx.allow_vendor, _backwards(ctx.unit))
        return _sum(
            None if ddy is None else weight_grad(rows_of(ddy), rows_of(x), *how),
            None if dx is None else weight_grad(rows_of(dy), rows_of(dx), *how),
        )


@callable_in_graph
class BiasGrad(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.linear_bias_grad(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype
        ctx.out_dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, ddbias: Tensor) -> Any:
        return ddbias.to(ctx.dtype).expand(ctx.shape), None

    @staticmethod
    def jvp(ctx: Any, ddy: Any, *_: Any) -> Any:
        return None if ddy is None else bias_grad(rows_of(ddy), ctx.out_dtype)


@callable_in_graph
class TreeSum(torch.autograd.Function):
    @staticmethod
    def forward(bias: Any, out_dtype: Any, *parts: Tensor) -> Tensor:
        return _tree_sum(bias, out_dtype, *parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.bias_dtype = None if inputs[0] is None else inputs[0].dtype
        ctx.out_dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dbias = bias_gradient(rows_of(dy), ctx.bias_dtype) if ctx.needs_input_grad[0] else None
        return dbias, None, *(dy.float() if needed else None for needed in ctx.needs_input_grad[2:])

    @staticmethod
    def jvp(ctx: Any, dbias: Any, _: Any, *dparts: Any) -> Any:
        total = _sum(*dparts, None if dbias is None else dbias.float())
        return None if total is None else total.to(ctx.out_dtype)
