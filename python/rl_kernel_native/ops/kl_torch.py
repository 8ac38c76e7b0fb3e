"""kl for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms goes through kl_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._torch import (
    gradient,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import kl_traced as traced
from .kl import weight_name

__all__ = ["backward", "kl"]

_IMPORTANCE = 2  # the kind of weight that may have a gradient


def _refuse_constants(operands: tuple[Any, ...], how: tuple[Any, ...]) -> None:
    if not is_grad_enabled():
        return
    _, ref_logprob, weight, mask = operands
    constants = {"ref_logprob": ref_logprob, "mask": mask}
    if how[2] != _IMPORTANCE:
        constants[weight_name(how)] = weight
    for name, x in constants.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(f"{name}: requires a gradient, and kl gives none; pass {name}.detach()")


def _require(operands: tuple[Any, ...], how: tuple[Any, ...], **more: Any) -> None:
    logprob, ref_logprob, weight, mask = operands
    require_tensors(logprob=logprob, ref_logprob=ref_logprob, optional={weight_name(how): weight, "mask": mask, **more})


def kl(operands: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
    _refuse_constants(operands, how)
    if not is_direct(*operands):
        _require(operands, how)
        return traced.kl(*operands, *how)
    logprob, _, weight, _ = operands
    if wants_grad(logprob, weight):
        return _Kl.apply(logprob, weight, operands, how)
    _torch.device_type(logprob, "logprob")
    prepare(logprob)
    return _C.kl(*operands, None, *how, False, False, None, 0)[0]


def backward(
    d_kl: Any, operands: tuple[Any, ...], how: tuple[Any, ...], return_d_logprob: bool, return_d_weight: bool
) -> tuple[Any, Any]:
    """d_logprob and d_importance_weight, None for what is not wanted."""
    if is_direct(d_kl, *operands) and not wants_grad(d_kl, *operands):
        prepare(operands[0])
        found = _C.kl(*operands, d_kl, *how, return_d_logprob, return_d_weight, None, 0)
        return found[1], found[2]
    _require(operands, how, d_kl=d_kl)
    return traced.backward(d_kl, *operands, *how, return_d_logprob, return_d_weight)


class _Kl(torch.autograd.Function):
    """Eager autograd. The backward computes the slopes again and saves only what it was given."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor, weight: Any, operands: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
        _torch.device_type(logprob, "logprob")
        prepare(logprob)
        result = _C.kl(*operands, None, *how, False, False, None, 0)[0]
        ctx.save_for_backward(*operands)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, d_kl: Tensor) -> Any:
        needs = ctx.needs_input_grad[:2]
        operands = ctx.saved_tensors
        if is_grad_enabled() or not is_direct_gradient(d_kl):  # create_graph, which the traced Functions answer
            require_tensors(d_kl=d_kl)
            found = traced.backward(gradient(d_kl, torch.float32, "d_kl"), *operands, *ctx.how, *needs)
        else:
            prepare(d_kl)
            dense = gradient(d_kl, torch.float32, "d_kl")
            found = _C.kl(*operands, dense, *ctx.how, *needs, None, 0)[1:]
        return *found, None, None
