"""preference_loss for torch tensors: an eager call goes straight to the extension, with a gradient wanted through one
autograd.Function; whatever traces or transforms goes through preference_loss_traced.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._torch import Eager, is_direct, is_direct_gradient, is_grad_enabled, prepare, require_tensors, wants_grad
from . import preference_loss_traced as traced
from .preference_kinds import NAMES, UNSORTED

__all__ = ["preference_loss"]


def preference_loss(*arguments: Any) -> tuple[Any, ...]:
    arrays, how = arguments[:9], arguments[9:]
    if wants_grad(*arrays[2:]):
        traced.require_constants(*(wants_grad(a) for a in arrays[2:]))
    if is_direct(*arrays):
        _torch.device_type(arrays[0], NAMES[0])
        prepare(arrays[0])
        if wants_grad(*arrays[:2]):
            return _PreferenceLoss.run(*arrays[:2], arrays[2:], how)
        found: tuple[Any, ...] = _C.preference_loss(*arrays, *how, None, 0)
        return found
    named = dict(zip(NAMES, arrays, strict=True))
    required = {name: named.pop(name) for name in NAMES[:2]}
    require_tensors(**required, optional=named)
    return traced.preference_loss(*arrays, *how)


class _PreferenceLoss(Eager):
    """Eager autograd: what the forward found is multiplied by the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, chosen: Tensor, rejected: Tensor, constants: tuple[Any, ...], how: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        found = _C.preference_loss(chosen, rejected, *constants, *how, None, 0)
        ctx.mark_non_differentiable(*found[1:4])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(chosen, rejected)
        ctx.found, ctx.sort = found[4:], how[1]
        return found[:4]

    @staticmethod
    def backward(ctx: Any, dlosses: Any, *_: Any) -> Any:
        if dlosses is None:
            return None, None, None, None
        d_chosen, d_rejected, ranks = ctx.found
        ranks = None if ctx.sort == UNSORTED else ranks
        if not is_grad_enabled() and is_direct_gradient(dlosses) and dlosses.layout is torch.strided:
            found = _C.preference_loss_backward(dlosses, d_chosen, d_rejected, ranks, ctx.sort, None, 0)
        else:
            found = traced.gradients(dlosses, d_chosen, d_rejected, ranks, ctx.sort, *ctx.saved_tensors)
        return *found, None, None
