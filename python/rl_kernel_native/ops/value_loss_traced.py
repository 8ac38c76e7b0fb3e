"""value_loss as a torch operator: what torch.compile, export, FakeTensor and torch.func see, with its derivative.

Loss and gradient come from one call. There is no second derivative: asking for one is an error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_element, check_first, check_mask, check_tokens
from .._torch import apply_function, memory, prepare
from .._transforms import looped, refuse_tangents
from .policy_loss_traced import scaled
from .value_loss import METRICS, NAMES

# clip and huber: infinite for none. denominator_kind: the contract's. denominator_value: 0 for none.
define(
    "value_loss(Tensor value, Tensor? old_value, Tensor returns, Tensor? mask, Tensor? cu_seqlens, "
    "Tensor? denominator, float clip, float huber, int denominator_kind, bool sequence_mean, float horizon, "
    "float scale, float denominator_value) -> (Tensor, Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native
_OPERANDS = 6


def _kernel(value: Tensor, *arguments: Any) -> Any:
    prepare(value)
    *operands, denominator = (value, *arguments[: _OPERANDS - 1])
    *how, denominator_value = arguments[_OPERANDS - 1 :]
    given = denominator_value if denominator_value else memory(denominator)
    return tuple(_C.value_loss(*map(memory, operands), *how, given, True, None, 0))


implement("value_loss", _kernel, functools.partial(apply, "ValueLoss"))


@fake("value_loss")
def _fake(
    value: Tensor, old_value: Any, returns: Tensor, mask: Any, cu_seqlens: Any, denominator: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check_first(value, "value", cu_seqlens)
    check_tokens(old_value, "old_value", value, "value")
    check_tokens(returns, "returns", value, "value")
    check_mask(mask, value.shape, "value")
    check_element(denominator, "denominator")
    return value.new_empty(()), value.new_empty(len(METRICS)), value.new_empty(value.shape)


def value_loss(operands: tuple[Any, ...], how: tuple[Any, ...], number: float) -> tuple[Tensor, ...]:
    """loss, metrics, d_value."""
    found: tuple[Tensor, ...] = apply_function(_ops.value_loss, "ValueLoss", *operands, *how, number)
    return found


@callable_in_graph
class ValueLoss(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.value_loss(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, vector, d_value = output
        ctx.mark_non_differentiable(vector, d_value)
        ctx.save_for_backward(d_value, inputs[0])
        ctx.save_for_forward(d_value)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_loss: Any, *_: Any) -> Any:
        nothing = (None,) * 12
        if d_loss is None:
            return None, *nothing
        d_value, value = ctx.saved_tensors
        return scaled(d_loss, d_value, None, value, None)[0], *nothing

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(ValueLoss.apply, info, in_dims, inputs), (0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, along: Any, *others: Any) -> Any:
        refuse_tangents("value_loss", NAMES[1:], others[: _OPERANDS - 1])
        return (ctx.saved_tensors[0] * along).sum(), None, None
