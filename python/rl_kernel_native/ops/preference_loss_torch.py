"""preference_loss for torch tensors: an eager call without gradients goes straight to the extension, any other through
preference_loss_traced.py."""

from __future__ import annotations

from typing import Any

from .. import _torch
from .._native import module as _C
from .._torch import is_direct, prepare, require_tensors, wants_grad
from . import preference_loss_traced as traced
from .preference_loss import NAMES

__all__ = ["preference_loss"]


def preference_loss(*arguments: Any) -> tuple[Any, ...]:
    arrays, how = arguments[:9], arguments[9:]
    traced.require_constants(*(wants_grad(a) for a in arrays[2:]))
    if is_direct(*arrays) and not wants_grad(*arrays):
        _torch.device_type(arrays[0], NAMES[0])
        prepare(arrays[0])
        found: tuple[Any, ...] = _C.preference_loss(*arrays, *how, None, 0)
        return found
    named = dict(zip(NAMES, arrays, strict=True))
    required = {name: named.pop(name) for name in NAMES[:2]}
    require_tensors(**required, optional=named)
    return traced.preference_loss(*arrays, *how)
