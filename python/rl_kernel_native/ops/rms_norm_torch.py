"""rms_norm for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through rms_norm_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _check, _main_grad, _torch
from .._dispatch import count_write
from .._native import module as _C
from .._torch import (
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
from . import rms_norm_traced as traced

__all__ = ["PLAIN", "backward", "is_compiling", "rms_norm"]


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
        _main_grad.check(main_grad, weight, x=x, residual=residual)
    direct = is_direct(x, weight, residual)
    if direct and not wants_grad(x, weight, residual):
        _torch.device_type(x, "x")
        prepare(x)
        return _C.rms_norm(x, weight, residual, eps, weight_offset, round_before_weight, return_rstd, None, 0)
    if not direct:
        require_tensors(x=x, optional={"weight": weight, "residual": residual})
        numbers = (_check.number("eps", eps), _check.number("weight_offset", weight_offset))
        return traced.rms_norm(x, weight, residual, *numbers, round_before_weight, main_grad)
    found = _RmsNorm.run(x, weight, residual, eps, weight_offset, round_before_weight, main_grad, return_rstd)
    return found if isinstance(found, tuple) else (found, None, None)


class _RmsNorm(Eager):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, residual: Any, eps: Any, weight_offset: Any, round_before_weight: bool,
        main_grad: Any, return_rstd: bool,
    ) -> Any:  # fmt: skip
        prepare(x)
        y, new_residual, rstd = _C.rms_norm(x, weight, residual, eps, weight_offset, round_before_weight, True, None, 0)
        # rstd costs four bytes a row and spares backward a second sum over each.
        ctx.numbers = (eps, weight_offset, round_before_weight)
        ctx.main_grad = main_grad  # not saved: other backwards add to it in between, as they should
        if residual is None and not return_rstd:  # an output costs a microsecond
            ctx.save_for_backward(x, weight)
            ctx.rstd = rstd
            return y
        ctx.save_for_backward(x if residual is None else new_residual, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, new_residual, rstd

    @staticmethod
    def backward(ctx: Any, dy: Any, d_new_residual: Any = None, _: Any = None) -> Any:
        if dy is None:  # y was not used: nothing reaches the norm
            return *traced.past_the_norm(ctx, d_new_residual), None
        _main_grad.refuse_create_graph(ctx.main_grad)
        h, weight, *saved = ctx.saved_tensors
        rstd = saved[0] if saved else ctx.rstd
        # create_graph, a backward that has a backward, goes through the dispatcher, too.
        direct = not is_grad_enabled() and is_direct_gradient(dy)
        direct = direct and (d_new_residual is None or is_direct_gradient(d_new_residual))
        if not direct:
            require_tensors(dy=dy, optional={"d_new_residual": d_new_residual})
        if d_new_residual is not None:
            d_new_residual = gradient(d_new_residual, h.dtype, "d_new_residual")
        dy = gradient(dy, h.dtype)
        eps, weight_offset, round_before_weight = ctx.numbers
        return_dx, return_dweight = traced.wanted(ctx)
        if direct:
            prepare(dy)
            dx, dweight = _C.rms_norm_backward(
                dy, h, weight, eps, rstd, d_new_residual, weight_offset, round_before_weight,
                ctx.main_grad if return_dweight else None, return_dx, return_dweight, -1, None, 0,
            )  # fmt: skip
            if return_dweight and ctx.main_grad is not None:
                count_write(ctx.main_grad)
                dweight = None
        else:
            numbers = (float(eps), float(weight_offset), round_before_weight)
            dx, dweight = traced.gradients(
                dy, h, weight, rstd, d_new_residual, numbers, return_dx, return_dweight, ctx.main_grad
            )
        needs_x, _, needs_residual = ctx.needs_input_grad[:3]
        return dx if needs_x else None, dweight, dx if needs_residual else None, None, None, None, None, None


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
    differentiable = wants_grad(*inputs)
    if main_grad is not None:
        if differentiable or (isinstance(main_grad, Tensor) and main_grad.requires_grad):
            raise ValueError("main_grad: cannot be given where a gradient is wanted; call under torch.no_grad()")
        if not direct and functorch_active():
            raise ValueError("main_grad: cannot be given under torch.func")
    if direct and not differentiable:
        prepare(dy)
        memory = main_grad.detach() if isinstance(main_grad, Tensor) else main_grad
        dx, dweight = _C.rms_norm_backward(
            dy, h, weight, eps, rstd, d_new_residual, weight_offset, round_before_weight, memory, return_dx,
            return_dweight, code, None, 0,
        )  # fmt: skip
        if main_grad is None:
            return dx, dweight
        count_write(main_grad)
        return dx, main_grad
    optional = {"weight": weight, "rstd": rstd, "d_new_residual": d_new_residual, "main_grad": main_grad}
    require_tensors(dy=dy, h=h, optional=optional)
    numbers = (_check.number("eps", eps), _check.number("weight_offset", weight_offset), round_before_weight)
    if main_grad is not None:
        dx = torch.ops.rl_kernel_native.rms_norm_backward_(
            main_grad, dy, h, weight, rstd, d_new_residual, *numbers, return_dx
        )
        return dx if return_dx else None, main_grad
    dtype = None
    if return_dweight:
        dtype = weight.dtype if code < 0 else DTYPES[code]
    return traced.backward(dy, h, weight, rstd, d_new_residual, *numbers, return_dx, dtype)
