"""silu_mul and gelu_mul as torch operators: what torch.compile, export, FakeTensor and torch.func see.

The forward is native and so is the first derivative. Forward-mode and second derivatives are composed from torch's own
operators in float64: they exist to be right.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_columns_below, check_dtype_like, check_like, check_rows
from .._torch import apply_function, gradient, memory, prepare, rows_of
from .._transforms import batched, pulled, pushed

# activation: 0 silu, 1 gelu, 2 gelu by tanh. Without `up`, `gate` is both. What is not asked for is an empty tensor.
_ACTIVATION = "int activation, bool round_before_mul"
define(f"gated_mul(Tensor gate, Tensor? up, {_ACTIVATION}) -> Tensor")
define(
    f"gated_mul_backward(Tensor dy, Tensor gate, Tensor? up, {_ACTIVATION}, bool return_d_gate, bool return_d_up) "
    "-> (Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native


def _forward_kernel(gate: Tensor, up: Any, activation: int, round_before_mul: bool) -> Tensor:
    prepare(gate)
    return _C.gated_mul(memory(gate), memory(up), activation, round_before_mul, None, 0)


def _backward_kernel(dy: Tensor, gate: Tensor, up: Any, *how: Any) -> tuple[Tensor, Tensor]:
    prepare(gate)
    found = _C.gated_mul_backward(memory(dy), memory(gate), memory(up), *how, None, 0)
    d_gate, d_up = found if up is not None else (found, None)
    return gate.new_empty(0) if d_gate is None else d_gate, gate.new_empty(0) if d_up is None else d_up


implement("gated_mul", _forward_kernel, functools.partial(apply, "GatedMul"))
implement("gated_mul_backward", _backward_kernel, functools.partial(apply, "GatedMulBackward"))


def _check(gate: Tensor, up: Any) -> list[int]:
    """The shape of the result."""
    name, bits = ("gate_up", 31) if up is None else ("gate", 30)
    check_rows(gate, name)
    check_columns_below(gate, name, bits)
    check_like(up, "up", gate, "gate")
    if up is None and gate.shape[-1] % 2:
        raise ValueError(
            f"gate_up: expected an even last dimension, whose halves are gate and up, got shape {list(gate.shape)}"
        )
    return [*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)]


@fake("gated_mul")
def _forward_fake(gate: Tensor, up: Any, _activation: int, _round: bool) -> Tensor:
    return gate.new_empty(_check(gate, up))


@fake("gated_mul_backward")
def _backward_fake(
    dy: Tensor, gate: Tensor, up: Any, _activation: int, _round: bool, return_d_gate: bool, return_d_up: bool
) -> tuple[Tensor, Tensor]:
    shape = _check(gate, up)
    check_rows(dy, "dy")
    check_dtype_like(dy, "dy", gate, "gate_up" if up is None else "gate")
    if list(dy.shape) != shape:
        raise ValueError(f"dy: expected shape {shape} (that of the result), got {list(dy.shape)}")
    if up is None:
        return gate.new_empty(gate.shape), gate.new_empty(0)
    return gate.new_empty(shape if return_d_gate else 0), gate.new_empty(shape if return_d_up else 0)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def gated_mul(gate: Tensor, up: Any, activation: int, round_before_mul: bool) -> Tensor:
    return apply_function(_ops.gated_mul, "GatedMul", gate, up, activation, round_before_mul)


def backward(
    dy: Tensor, gate: Tensor, up: Any, activation: int, round_before_mul: bool, return_d_gate: bool, return_d_up: bool
) -> tuple[Any, Any]:
    """d_gate (d_gate_up without ``up``) and d_up, None for what is not wanted."""
    how = (activation, round_before_mul, return_d_gate, return_d_up)
    d_gate, d_up = apply_function(_ops.gated_mul_backward, "GatedMulBackward", dy, gate, up, *how)
    wants_gate, wants_up = _wanted(up, return_d_gate, return_d_up)
    return d_gate if wants_gate else None, d_up if wants_up else None


def _wanted(up: Any, return_d_gate: bool, return_d_up: bool) -> tuple[bool, bool]:
    return (True, False) if up is None else (return_d_gate, return_d_up)


def _composed(gate: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    """The activation and its derivative by torch's operators; roundings are left out."""
    if activation == 0:
        s = torch.sigmoid(gate)
        return gate * s, s * (1 + gate * (1 - s))
    if activation == 1:
        half = (1 + torch.erf(gate * math.sqrt(0.5))) / 2
        return gate * half, half + gate * torch.exp(-gate * gate / 2) / math.sqrt(2 * math.pi)
    root = math.sqrt(2 / math.pi)
    t = torch.tanh(root * (gate + 0.044715 * gate * gate * gate))
    half = (1 + t) / 2
    return gate * half, half + gate / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * gate * gate)


def _halves(gate: Tensor, up: Any) -> tuple[Tensor, ...]:
    return (gate.double(), up.double()) if up is not None else gate.double().chunk(2, -1)


def _composed_forward(gate: Tensor, up: Any, activation: int) -> Tensor:
    g, u = _halves(gate, up)
    return (_composed(g, activation)[0] * u).to(gate.dtype)


def _composed_backward(dy: Tensor, gate: Tensor, up: Any, activation: int) -> tuple[Tensor, Tensor]:
    """d_gate (or d_gate_up, and an empty tensor) and d_up as differentiable functions of all of these."""
    g, u = _halves(gate, up)
    value, slope = _composed(g, activation)
    wide = dy.double()
    d_gate, d_up = wide * u * slope, wide * value
    if up is None:
        return torch.cat((d_gate, d_up), -1).to(gate.dtype), gate.new_empty(0)
    return d_gate.to(gate.dtype), d_up.to(gate.dtype)


@callable_in_graph
class GatedMul(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.gated_mul(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gate, up, ctx.activation, ctx.round_before_mul = inputs
        ctx.save_for_backward(gate, up)
        ctx.save_for_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        gate, up = rows_of(gate), None if up is None else rows_of(up)
        how = (ctx.activation, ctx.round_before_mul, *ctx.needs_input_grad[:2])
        d_gate, d_up = backward(gradient(dy, gate.dtype), gate, up, *how)
        return d_gate, d_up, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], gate: Tensor, up: Any, *rest: Any) -> Any:
        return GatedMul.apply(*batched(info, in_dims[:2], (gate, up)), *rest), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        def composed(gate: Tensor, up: Any) -> tuple[Tensor]:
            return (_composed_forward(gate, up, ctx.activation),)

        return pushed(composed, ctx.saved_tensors, tangents[:2])[0]


@callable_in_graph
class GatedMulBackward(torch.autograd.Function):
    """The native backward, itself differentiable through a composition of torch's operators (create_graph)."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.gated_mul_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        dy, gate, up, ctx.activation, _round, return_d_gate, return_d_up = inputs
        ctx.wanted = _wanted(up, return_d_gate, return_d_up)
        ctx.save_for_backward(dy, gate, up)
        ctx.save_for_forward(dy, gate, up)
        ctx.mark_non_differentiable(*(o for o, wanted in zip(output, ctx.wanted, strict=True) if not wanted))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cotangents = tuple(g for g, w in zip(gradients, ctx.wanted, strict=True) if w)
        ddy, d_gate, d_up = pulled(_composed_call(ctx), ctx.saved_tensors, cotangents)
        return ddy, d_gate, d_up, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], dy: Tensor, gate: Tensor, up: Any, *rest: Any) -> Any:
        outputs = GatedMulBackward.apply(*batched(info, in_dims[:3], (dy, gate, up)), *rest)
        wanted = _wanted(up, *rest[-2:])
        return outputs, tuple(0 if w else None for w in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        found = iter(pushed(_composed_call(ctx), ctx.saved_tensors, tangents[:3]))
        return tuple(next(found) if w else None for w in ctx.wanted)


def _composed_call(ctx: Any) -> Any:
    """What is wanted of the composed backward as a function of dy, gate and up."""

    def composed(dy: Tensor, gate: Tensor, up: Any) -> tuple[Tensor, ...]:
        outputs = _composed_backward(dy, gate, up, ctx.activation)
        return tuple(o for o, w in zip(outputs, ctx.wanted, strict=True) if w)

    return composed
