"""rms_norm for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through rms_norm_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._torch import (
    PLAIN,
    functorch_active,
    is_compiling,
    is_direct,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import rms_norm_traced as traced
from .linear_autograd import gradient

__all__ = ["PLAIN", "backward", "is_compiling", "rms_norm"]


def _number(value: Any, name: str) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    return float(value)


def rms_norm(
    x: Tensor,
    weight: Any,
    residual: Any,
    eps: Any,
    weight_offset: Any,
    round_before_weight: bool,
    return_rstd: bool,
    main_grad: Any,
) -> Any:
    if main_grad is not None:
        _check_main_grad(main_grad, weight)
    direct = is_direct(x, weight, residual)
    if direct and not wants_grad(x, weight, residual):
        _torch.device_type(x, "x")
        prepare(x)
        return _C.rms_norm(x, weight, residual, eps, weight_offset, round_before_weight, return_rstd, None, 0)
    if not direct:
        require_tensors(x=x, weight=weight, residual=residual)
        numbers = (_number(eps, "eps"), _number(weight_offset, "weight_offset"))
        return traced.rms_norm(x, weight, residual, *numbers, round_before_weight, main_grad)
    return _RmsNorm.apply(x, weight, residual, eps, weight_offset, round_before_weight, main_grad)


def _check_main_grad(main_grad: Any, weight: Any) -> None:
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"main_grad: expected a torch.Tensor, got {type(main_grad).__name__}")
    if not isinstance(weight, Tensor):
        raise ValueError(f"main_grad: expected None where weight is no tensor but {type(weight).__name__}")
    if is_compiling() or functorch_active():
        raise ValueError(
            "main_grad: cannot be given under torch.compile or torch.func, whose backward may write nothing"
        )
    if main_grad.requires_grad:
        raise ValueError("main_grad: is memory that backward adds to and has no gradient; pass main_grad.detach()")
    if is_grad_enabled() and not weight.requires_grad:
        raise ValueError("main_grad: weight requires no gradient, so nothing would be added")
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad: expected dtype float32, got {main_grad.dtype}")
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"main_grad: expected shape {list(weight.shape)} (that of weight), got {list(main_grad.shape)}"
        )
    if main_grad.device != weight.device:
        raise ValueError(f"main_grad: expected device {weight.device} (that of weight), got {main_grad.device}")
    if not main_grad.is_contiguous():
        raise ValueError("main_grad: expected contiguous elements (stride 1)")


def _count_write(memory: Tensor) -> None:
    """Tells autograd that the numbers changed: a backward that saved them must refuse to run."""
    if not memory.is_inference():
        torch.autograd.graph.increment_version(memory)


class _RmsNorm(torch.autograd.Function):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, residual: Any, eps: Any, weight_offset: Any, round_before_weight: bool,
        main_grad: Any,
    ) -> Any:  # fmt: skip
        prepare(x)
        y, new_residual, rstd = _C.rms_norm(x, weight, residual, eps, weight_offset, round_before_weight, True, None, 0)
        # rstd costs four bytes a row and spares backward a second sum over each.
        ctx.save_for_backward(x if residual is None else new_residual, weight, rstd)
        ctx.numbers = (eps, weight_offset, round_before_weight)
        ctx.main_grad = main_grad  # not saved: other backwards add to it in between, as they should
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, new_residual, rstd

    @staticmethod
    def backward(ctx: Any, dy: Any, d_new_residual: Any, _: Any) -> Any:
        if dy is None and d_new_residual is None:
            return (None,) * 7
        h, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight, needs_residual = ctx.needs_input_grad[:3]
        if dy is None:  # y was not used: nothing reaches the norm
            return (
                d_new_residual if needs_x else None,
                None,
                d_new_residual if needs_residual else None,
                None,
                None,
                None,
                None,
            )
        dy = gradient(dy, h.dtype)
        d_new_residual = None if d_new_residual is None else gradient(d_new_residual, h.dtype)
        eps, weight_offset, round_before_weight = ctx.numbers
        return_dx = needs_x or needs_residual
        if is_grad_enabled():  # create_graph: a backward that has a backward
            if ctx.main_grad is not None:
                traced.require_first_order()
            dx, dweight = traced.backward(
                dy, h, weight, rstd, d_new_residual, float(eps), float(weight_offset), round_before_weight, return_dx,
                weight.dtype if needs_weight else None,
            )  # fmt: skip
        else:
            prepare(dy)
            dx, dweight = _C.rms_norm_backward(
                dy, h, weight, eps, rstd, d_new_residual, weight_offset, round_before_weight,
                ctx.main_grad if needs_weight else None, return_dx, needs_weight, -1, None, 0,
            )  # fmt: skip
            if needs_weight and ctx.main_grad is not None:
                _count_write(ctx.main_grad)
                dweight = None
        return dx if needs_x else None, dweight, dx if needs_residual else None, None, None, None, None


def backward(
    dy: Tensor,
    h: Any,
    weight: Any,
    eps: Any,
    rstd: Any,
    d_new_residual: Any,
    weight_offset: Any,
    round_before_weight: bool,
    main_grad: Any,
    return_dx: bool,
    return_dweight: bool,
    code: int,
) -> tuple[Any, Any]:
    inputs = (dy, h, weight, rstd, d_new_residual)
    direct = is_direct(*inputs, main_grad)
    wanted = wants_grad(*inputs)
    if main_grad is not None:
        if wanted or (isinstance(main_grad, Tensor) and main_grad.requires_grad):
            raise ValueError("main_grad: cannot be given where a gradient is wanted; call under torch.no_grad()")
        if not direct and functorch_active():
            raise ValueError("main_grad: cannot be given under torch.func")
    if direct and not wanted:
        prepare(dy)
        memory = main_grad.detach() if isinstance(main_grad, Tensor) else main_grad
        dx, dweight = _C.rms_norm_backward(
            dy, h, weight, eps, rstd, d_new_residual, weight_offset, round_before_weight, memory, return_dx,
            return_dweight, code, None, 0,
        )  # fmt: skip
        if main_grad is None:
            return dx, dweight
        _count_write(main_grad)
        return dx, main_grad
    require_tensors(dy=dy, h=h, weight=weight, rstd=rstd, d_new_residual=d_new_residual, main_grad=main_grad)
    if h is None:
        raise TypeError("h: expected a torch.Tensor, got NoneType")
    eps, weight_offset = _number(eps, "eps"), _number(weight_offset, "weight_offset")
    if rstd is None:
        rstd = traced.statistics(h, eps)
    if main_grad is not None:
        dx = torch.ops.rl_kernel_native.rms_norm_backward_(
            main_grad, dy, h, weight, rstd, d_new_residual, weight_offset, round_before_weight, return_dx
        )
        return dx if return_dx else None, main_grad
    dtype = None
    if return_dweight:
        dtype = weight.dtype if code < 0 else traced.DTYPES[code]
    return traced.backward(
        dy, h, weight, rstd, d_new_residual, eps, weight_offset, round_before_weight, return_dx, dtype
    )
