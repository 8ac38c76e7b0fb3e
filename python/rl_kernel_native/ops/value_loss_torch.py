"""value_loss for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function, whose forward keeps
the gradient. Whatever traces or transforms goes through value_loss_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._torch import (
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import value_loss_traced as traced
from .policy_loss_traced import scaled
from .value_loss import NAMES

__all__ = ["value_loss", "value_loss_and_grad"]

_TORCH_STREAM = 0  # of torch tensors the extension asks torch itself


def _checked(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands, of which only value may require a gradient; the denominator as float32."""
    if is_grad_enabled():
        for name, x in zip(NAMES[1:], operands[1:], strict=True):
            if isinstance(x, Tensor) and x.requires_grad:
                raise ValueError(f"{name}: requires a gradient, and value_loss gives none; pass {name}.detach()")
    denominator = operands[5]
    if isinstance(denominator, Tensor) and denominator.dtype is not torch.float32:
        if denominator.dtype.is_complex or denominator.dtype is torch.bool:
            raise TypeError(f"denominator: expected a real number, got {denominator.dtype}")
        return (*operands[:5], denominator.to(torch.float32))
    return operands


def _direct(operands: tuple[Any, ...], how: tuple[Any, ...], number: float, gradient: bool) -> Any:
    _torch.device_type(operands[0], "value")
    prepare(operands[0])
    denominator = number if number else operands[5]
    return _C.value_loss(*operands[:5], *how, denominator, gradient, None, _TORCH_STREAM)


def _traced(operands: tuple[Any, ...], how: tuple[Any, ...], number: float) -> tuple[Tensor, ...]:
    optional = {n: x for n, x in zip(NAMES, operands, strict=True) if n not in ("value", "returns")}
    require_tensors(value=operands[0], returns=operands[2], optional=optional)
    return traced.value_loss(operands, how, number)


def value_loss(operands: tuple[Any, ...], how: tuple[Any, ...], number: float) -> tuple[Tensor, Tensor]:
    operands = _checked(operands)
    if not is_direct(*operands):
        loss, vector, _ = _traced(operands, how, number)
        return loss, vector
    if not wants_grad(operands[0]):
        loss, vector, _ = _direct(operands, how, number, False)
        return loss, vector
    return _ValueLoss.apply(operands[0], operands, how, number)


def value_loss_and_grad(operands: tuple[Any, ...], how: tuple[Any, ...], number: float) -> Any:
    if wants_grad(operands[0]):
        raise ValueError(
            "value: requires a gradient; value_loss_and_grad gives it as a constant: detach, or call value_loss"
        )
    operands = _checked(operands)
    return _direct(operands, how, number, True) if is_direct(*operands) else _traced(operands, how, number)


class _ValueLoss(torch.autograd.Function):
    """Eager autograd. The first backward hands the gradient out as it is, scaled in place where that is needed; one
    that follows, over a retained graph, computes it again."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, operands: tuple[Any, ...], how: tuple[Any, ...], number: float
    ) -> tuple[Tensor, Tensor]:
        loss, vector, ctx.gradient = _direct(operands, how, number, True)
        ctx.save_for_backward(*operands)
        ctx.how = (how, number)
        ctx.mark_non_differentiable(vector)
        ctx.set_materialize_grads(False)
        return loss, vector

    @staticmethod
    def backward(ctx: Any, d_loss: Any, _: Any) -> Any:
        if d_loss is None:
            return None, None, None, None
        d_value, ctx.gradient = ctx.gradient, None
        operands = ctx.saved_tensors  # refuses those that were changed in place
        if d_value is None:
            how, number = ctx.how
            d_value = _direct(tuple(None if x is None else x.detach() for x in operands), how, number, True)[2]
        if not is_grad_enabled() and is_direct_gradient(d_loss):
            _C.scale_gradients(d_value, None, d_loss, _TORCH_STREAM)
        else:
            d_value, _ = scaled(d_loss, d_value, None, operands[0], None)
        return d_value, None, None, None
