"""rope for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through rope_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._torch import PLAIN, is_compiling, is_grad_enabled, is_plain, is_untraced, prepare
from . import rope_traced as traced

__all__ = ["PLAIN", "is_compiling", "rope"]


def _require_tensors(**tensors: Any) -> None:
    """For a call through the dispatcher, whose own words for a wrong argument are about schemas. The first decides on
    the device; None is an argument that may be left out."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if type(tensor).__name__ == "DTensor":
            raise TypeError(f"{name}: expected a local tensor, got a DTensor; pass tensor.to_local()")
        if tensor is None and name in ("k", "dk_out", "position_ids"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != first.device:
            raise ValueError(f"{name}: expected device {first.device}, got {tensor.device}")


def _require_constants(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(f"{name}: is a constant of the rotation and gets no gradient; pass {name}.detach()")


def rope(
    q: Tensor, k: Any, cos: Any, sin: Any, position_ids: Any, interleaved: bool, partial_dim: Any,
    round_products: bool, mrope_sections: Any, head_axis: Any, transposed: bool,
) -> tuple[Any, Any]:  # fmt: skip
    inputs = (q, k, cos, sin, position_ids)
    options = (interleaved, partial_dim, round_products, mrope_sections, head_axis, transposed)
    wants_grad = is_grad_enabled()
    if wants_grad:
        _require_constants(cos=cos, sin=sin)
        wants_grad = q.requires_grad or (isinstance(k, Tensor) and k.requires_grad)
    # What is no tensor is for the extension to refuse.
    direct = is_untraced() and all(is_plain(t) for t in inputs if isinstance(t, Tensor))
    if direct and not wants_grad:
        _torch.device_type(q, "dq_out" if transposed else "q")
        prepare(q)
        result: tuple[Any, Any] = _C.rope(*inputs, *options, None, 0)
        return result
    if direct:
        return _Rope.apply(*inputs, *options)
    names = ("dq_out", "dk_out") if transposed else ("q", "k")
    _require_tensors(**{names[0]: q, names[1]: k, "cos": cos, "sin": sin, "position_ids": position_ids})
    return traced.rope(*inputs, *options)


class _Rope(torch.autograd.Function):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, *options: Any) -> Any:
        prepare(q)
        outputs = _C.rope(q, k, cos, sin, position_ids, *options, None, 0)
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dq_out: Any, dk_out: Any) -> Any:
        constants = ctx.saved_tensors
        *options, transposed = ctx.options

        def rotate(dq_out: Tensor, dk_out: Any) -> tuple[Any, Any]:
            gradients = (dq_out, dk_out, *constants, *options, not transposed)
            if is_grad_enabled():  # create_graph: a backward that has a backward
                return rope(*gradients)
            prepare(dq_out)
            result: tuple[Any, Any] = _C.rope(*gradients, None, 0)
            return result

        needs_q, needs_k = ctx.needs_input_grad[:2]
        dq, dk = traced.each(rotate, dq_out if needs_q else None, dk_out if needs_k else None)
        return dq, dk, *(None,) * 9
