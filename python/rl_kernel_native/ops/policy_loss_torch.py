"""policy_loss for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function, whose forward keeps
the gradients. Whatever traces or transforms goes through policy_loss_traced.py.
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
from . import policy_loss_traced as traced
from .policy_spec import PolicySpec, names_of

__all__ = ["policy_loss", "policy_loss_and_grad"]

_CONSTANTS = (1, 2, 3, 5, 6, 8, 9)  # operands that must not require a gradient


def _checked(operands: tuple[Any, ...], spec: PolicySpec) -> tuple[Any, ...]:
    """Operands, of which only logprob and entropy may require a gradient; the denominator as float32."""
    if is_grad_enabled():
        for i in _CONSTANTS:
            x = operands[i]
            if isinstance(x, Tensor) and x.requires_grad:
                name = names_of(spec)[i]
                raise ValueError(f"{name}: requires a gradient, and policy_loss gives none; pass {name}.detach()")
    denominator = operands[9]
    if isinstance(denominator, Tensor) and denominator.dtype is not torch.float32:
        if denominator.dtype.is_complex or denominator.dtype is torch.bool:
            raise TypeError(f"denominator: expected a real number, got {denominator.dtype}")
        return (*operands[:9], denominator.to(torch.float32))
    return operands


def _direct(
    operands: tuple[Any, ...], spec: PolicySpec, value: float, ratio: bool, d_logprob: bool, d_entropy: bool
) -> Any:
    logprob = operands[0]
    _torch.device_type(logprob, "logprob")
    prepare(logprob)
    denominator = value if value else operands[9]
    return _C.policy_loss(*operands[:9], spec.packed, denominator, ratio, d_logprob, d_entropy, None, 0)


def _traced(operands: tuple[Any, ...], spec: PolicySpec, value: float, ratio: bool) -> tuple[Tensor, ...]:
    optional = {
        n: x for n, x in zip(names_of(spec), operands, strict=True) if n not in ("logprob", "advantage", "mask")
    }
    require_tensors(logprob=operands[0], advantage=operands[2], mask=operands[3], optional=optional)
    return traced.policy_loss(operands, spec, value, ratio)


def policy_loss(operands: tuple[Any, ...], spec: PolicySpec, value: float, ratio: bool) -> tuple[Tensor, Tensor]:
    operands = _checked(operands, spec)
    if not is_direct(*operands):
        loss, vector, *_ = _traced(operands, spec, value, ratio)
        return loss, vector
    if not wants_grad(operands[0], operands[7]):
        loss, vector, *_ = _direct(operands, spec, value, ratio, False, False)
        return loss, vector
    return _PolicyLoss.apply(operands[0], operands[7], operands, spec, value, ratio)


def policy_loss_and_grad(operands: tuple[Any, ...], spec: PolicySpec, value: float, ratio: bool) -> tuple[Any, ...]:
    for name, x in (("logprob", operands[0]), ("entropy", operands[7])):
        if wants_grad(x):
            raise ValueError(
                f"{name}: requires a gradient; policy_loss_and_grad gives it as a constant: detach, or call policy_loss"
            )
    operands = _checked(operands, spec)
    if is_direct(*operands):
        return _direct(operands, spec, value, ratio, True, operands[7] is not None)
    loss, vector, d_logprob, d_entropy = _traced(operands, spec, value, ratio)
    return loss, vector, d_logprob, None if operands[7] is None else d_entropy


class _PolicyLoss(torch.autograd.Function):
    """Eager autograd. The first backward hands the gradients out as they are, scaled in place where that is needed; one
    that follows, over a retained graph, computes them again."""

    @staticmethod
    def forward(
        ctx: Any,
        logprob: Tensor,
        entropy: Any,
        operands: tuple[Any, ...],
        spec: PolicySpec,
        value: float,
        ratio: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_entropy = ctx.needs_input_grad[1]
        loss, vector, *ctx.gradients = _direct(operands, spec, value, ratio, True, needs_entropy)
        ctx.save_for_backward(*operands)
        ctx.how = (spec, value, needs_entropy)
        ctx.mark_non_differentiable(vector)
        ctx.set_materialize_grads(False)
        return loss, vector

    @staticmethod
    def backward(ctx: Any, d_loss: Any, _: Any) -> Any:
        if d_loss is None:
            return None, None, None, None, None, None
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            spec, value, needs_entropy = ctx.how
            operands = tuple(None if x is None else x.detach() for x in ctx.saved_tensors)
            found = _direct(operands, spec, value, False, True, needs_entropy)[2:]
        d_logprob, d_entropy = found
        if not is_grad_enabled() and is_direct_gradient(d_loss):
            _C.scale_gradients(d_logprob, d_entropy, d_loss, _torch_stream)
        else:
            logprob, entropy = ctx.saved_tensors[0], ctx.saved_tensors[7]
            d_logprob, d_entropy = traced.scaled(d_loss, d_logprob, d_entropy, logprob, entropy)
        needs_logprob, needs_entropy = ctx.needs_input_grad[:2]
        return d_logprob if needs_logprob else None, d_entropy if needs_entropy else None, None, None, None, None


_torch_stream = 0  # of torch tensors the extension asks torch itself
