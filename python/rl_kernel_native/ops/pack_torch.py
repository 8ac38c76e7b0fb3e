"""pack and unpack for torch tensors.

An eager call without gradients goes straight to the extension; any other through pack_traced.py, at most eight tensors
at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from .._native import module as _C
from .._torch import is_direct, prepare, require_tensors, wants_grad
from . import pack_traced as traced

__all__ = ["pack", "unpack"]


def _named(tensors: list[Any]) -> dict[str, Any]:
    return {"tensors": tensors[0]} if len(tensors) == 1 else {f"tensors[{i}]": t for i, t in enumerate(tensors)}


def _resolved(tensors: list[Any]) -> list[Any]:
    """Refuses a conjugated view, whose numbers in memory are others."""
    return [t.resolve_conj() if isinstance(t, torch.Tensor) else t for t in tensors]


def pack(
    tensors: list[Any], lengths: Any, mask: Any, num_tokens: Any, capacity: Any, fills: list[int | float]
) -> tuple[list[Any], Any, Any, Any]:
    """(packed, cu_seqlens, positions, status)"""
    tensors = _resolved(tensors)
    if is_direct(*tensors, lengths, mask) and not wants_grad(*tensors):
        _torch.device_type(tensors[0], "tensors")
        prepare(tensors[0])
        layout = _C.pack_layout(lengths, mask, num_tokens, capacity, None, 0)
        cu_seqlens, positions, _ = layout
        return traced.move(tensors, cu_seqlens, positions, False, True, num_tokens, capacity, fills), *layout
    require_tensors(**_named(tensors), optional={"lengths": lengths, "mask": mask})
    cu_seqlens, positions, status = traced.layout(lengths, mask, num_tokens, capacity)

    def packed(some: list[Any], fill: list[int | float]) -> list[Any]:
        return traced.pack(some, cu_seqlens, positions, num_tokens, capacity, fill, True)

    return _in_groups(packed, tensors, fills), cu_seqlens, positions, status


def unpack(tensors: list[Any], cu_seqlens: Any, positions: Any, num_tokens: Any, fills: list[int | float]) -> list[Any]:
    tensors = _resolved(tensors)
    if is_direct(*tensors, cu_seqlens, positions) and not wants_grad(*tensors):
        _torch.device_type(tensors[0], "tensors")
        prepare(tensors[0])
        return traced.move(tensors, cu_seqlens, positions, True, True, num_tokens, 0, fills)
    require_tensors(**_named(tensors), cu_seqlens=cu_seqlens, optional={"positions": positions})

    def unpacked(some: list[Any], fill: list[int | float]) -> list[Any]:
        return traced.unpack(some, cu_seqlens, positions, num_tokens, fill)

    return _in_groups(unpacked, tensors, fills)


def _in_groups(call: Any, tensors: list[Any], fills: list[int | float]) -> list[Any]:
    """Calls of at most eight tensors, those that require a gradient apart: all results of one call would require it."""
    found: dict[int, Any] = {}
    for wanted in (True, False):
        group = [i for i, t in enumerate(tensors) if t.requires_grad == wanted]
        for first in range(0, len(group), traced.MOST):
            some = group[first : first + traced.MOST]
            found |= zip(some, call([tensors[i] for i in some], [fills[i] for i in some]), strict=True)
    return [found[i] for i in range(len(tensors))]
