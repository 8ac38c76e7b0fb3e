"""silu_mul and gelu_mul for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through silu_mul_traced.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _torch
from .._main_grad import is_asked_for
from .._native import module as _C
from .._torch import (
    PLAIN,
    Eager,
    gradient,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import silu_mul_traced as traced

__all__ = ["PLAIN", "backward", "gated_mul", "is_compiling"]


def _named(gate: Any, up: Any) -> dict[str, Any]:
    return {"gate_up": gate} if up is None else {"gate": gate, "up": up}


def gated_mul(gate: Tensor, up: Any, activation: int, round_before_mul: bool) -> Any:
    direct = is_direct(gate, up)
    if direct and not wants_grad(gate, up):
        _torch.device_type(gate, "gate_up" if up is None else "gate")
        prepare(gate)
        return _C.gated_mul(gate, up, activation, round_before_mul, None, 0)
    if not direct:
        require_tensors(**_named(gate, up))
        return traced.gated_mul(gate, up, activation, round_before_mul)
    return _GatedMul.run(gate, up, activation, round_before_mul)


class _GatedMul(Eager):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Any, activation: int, round_before_mul: bool) -> Any:
        prepare(gate)
        y = _C.gated_mul(gate, up, activation, round_before_mul, None, 0)
        ctx.save_for_backward(gate, up)
        ctx.how = (activation, round_before_mul)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if all(needs):  # one of both may be wanted by torch.autograd.grad alone
            needs = tuple(is_asked_for(edge[0]) for edge in ctx.next_functions[:2])
        if is_grad_enabled() or not is_direct_gradient(dy):  # create_graph: a backward that has a backward
            require_tensors(dy=dy)
            d_gate, d_up = traced.backward(gradient(dy, gate.dtype), gate, up, *ctx.how, *needs)
        else:
            dy = gradient(dy, gate.dtype)
            prepare(dy)
            found = _C.gated_mul_backward(dy, gate, up, *ctx.how, *needs, None, 0)
            d_gate, d_up = found if up is not None else (found, None)
        return d_gate, d_up, None, None


def backward(
    dy: Any, gate: Tensor, up: Any, activation: int, round_before_mul: bool, return_d_gate: bool, return_d_up: bool
) -> Any:
    how = (activation, round_before_mul, return_d_gate, return_d_up)
    if is_direct(dy, gate, up) and not wants_grad(dy, gate, up):
        prepare(gate)
        return _C.gated_mul_backward(dy, gate, up, *how, None, 0)
    require_tensors(**_named(gate, up), dy=dy)
    d_gate, d_up = traced.backward(dy, gate, up, *how)
    return d_gate if up is None else (d_gate, d_up)
