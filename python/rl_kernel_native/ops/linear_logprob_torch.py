"""linear_logprob for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms goes through linear_logprob_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _check, _main_grad, _shapes, _torch
from .._arithmetic import AS_CALLED, product_unit, resolve_exp, unresolved_exp
from .._dispatch import count_write
from .._native import module as _C
from .._torch import (
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import linear_logprob_traced as traced
from .linear_autograd import wanted
from .logprob_torch import _selected

__all__ = ["linear_logprob", "scored_target"]

_SAME = -1  # a dtype's code: that of the operands


def linear_logprob(
    head: tuple[Any, Any, Any], target: Any, arguments: tuple[Any, ...], exp: str | None, logits: int, returns: int,
    weight_grad: bool, main_grad: Any, workspace_bytes: int,
) -> Any:  # fmt: skip
    hidden, weight, bias = head
    temperature, *_, kept_ids, kept_offsets = arguments
    direct = is_direct(hidden, weight, bias, target, temperature, kept_ids, kept_offsets)
    if isinstance(temperature, Tensor) and temperature.requires_grad and is_grad_enabled():
        raise ValueError("temperature: has no gradient here; pass temperature.detach()")
    compiling = not direct and is_compiling()
    mode = unresolved_exp(exp) if compiling else resolve_exp(exp, _torch.device_type(hidden, "hidden"))
    unit = AS_CALLED if compiling else product_unit()
    if main_grad is not None:
        if not weight_grad:
            raise ValueError("main_grad: weight_grad is False, so nothing would be added to it")
        _main_grad.check_weight_grad(weight, _SAME, main_grad)
        _main_grad.check(main_grad, weight)
    if isinstance(target, Tensor):
        target = target.contiguous()
    if not weight_grad and isinstance(weight, Tensor):
        weight = weight.detach()
    if not direct:
        require_tensors(hidden=hidden, weight=weight, target=target, optional={"bias": bias})
        if main_grad is not None:
            raise ValueError("main_grad: not under torch.compile, torch.func or a dispatch mode")
        outputs = traced.linear_logprob(
            hidden, weight, bias, target, arguments, mode, logits, workspace_bytes, unit, returns
        )
        return _selected(outputs, returns)
    how = (mode, logits, workspace_bytes, unit)
    if wants_grad(hidden, weight, bias):
        outputs = _LinearLogprob.apply(hidden, weight, bias, target, arguments, how, returns, main_grad)
        return _selected(outputs, returns)
    prepare(hidden)
    return _forward(hidden, weight, bias, target, arguments, how, returns)


def scored_target(target: Tensor, loss_mask: Any, ignored: int) -> Tensor:
    if not is_direct(target, loss_mask):
        require_tensors(target=target, loss_mask=loss_mask)
    if not isinstance(loss_mask, Tensor):
        raise TypeError(f"loss_mask: expected a torch.Tensor, got {type(loss_mask).__name__}")
    if loss_mask.dtype is not torch.bool:
        raise TypeError(f"loss_mask: expected dtype bool, got {_shapes.dtype_name(loss_mask.dtype)}")
    if loss_mask.shape != target.shape:
        wanted = list(target.shape)
        raise ValueError(f"loss_mask: expected shape {wanted} (that of target), got {list(loss_mask.shape)}")
    if loss_mask.device != target.device:
        raise ValueError(f"loss_mask: expected device {target.device} (that of target), got {loss_mask.device}")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected dtype int32 or int64, got {_shapes.dtype_name(target.dtype)}")
    _check.held_by("target", ignored, "ignore_index", str(target.dtype))
    return torch.where(loss_mask, target, ignored)


def _forward(
    hidden: Any, weight: Any, bias: Any, target: Any, arguments: tuple[Any, ...], how: tuple[int, ...], returns: int
) -> Any:
    mode, logits, workspace_bytes, unit = how
    return _C.linear_logprob(
        hidden, weight, bias, target, *arguments, mode, logits, returns, workspace_bytes, unit, None, 0
    )


class _LinearLogprob(torch.autograd.Function):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, arguments: tuple[Any, ...],
        how: tuple[int, ...], returns: int, main_grad: Any,
    ) -> Any:  # fmt: skip
        prepare(hidden)
        outputs = _forward(hidden, weight, bias, target, arguments, how, returns | 2)
        temperature, *numbers, kept_ids, kept_offsets = arguments
        is_tensor = isinstance(temperature, Tensor)
        ctx.save_for_backward(
            hidden, weight, bias, target, outputs[1], outputs[2], temperature if is_tensor else None, kept_ids,
            kept_offsets,
        )  # fmt: skip
        ctx.numbers = (None if is_tensor else temperature, *numbers)
        ctx.how = how
        ctx.main_grad = main_grad  # not saved: other backwards add to it in between, as they should
        ctx.mark_non_differentiable(*(o for o in outputs[3:] if o is not None))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, target, lse, entropy, temperature, kept_ids, kept_offsets = ctx.saved_tensors
        rows = gradients[:3]
        if all(g is None for g in rows):
            return (None,) * 8
        if is_grad_enabled() or not all(g is None or is_direct_gradient(g) for g in rows):
            raise RuntimeError("linear_logprob: its backward has no backward; call logprob of linear for create_graph")
        value, *numbers = ctx.numbers
        mode, logits, workspace_bytes, unit = ctx.how
        needs_hidden, needs_weight, needs_bias = wanted(ctx)
        prepare(hidden)
        dhidden, dweight, dbias = _C.linear_logprob_backward(
            hidden, weight, bias, target, value if temperature is None else temperature, *numbers, kept_ids,
            kept_offsets, mode, logits, lse, entropy, *(None if g is None else g.float().contiguous() for g in rows),
            needs_hidden, needs_weight, needs_bias, ctx.main_grad, _SAME, workspace_bytes, unit, None, 0,
        )  # fmt: skip
        if needs_weight and ctx.main_grad is not None:
            count_write(ctx.main_grad)
            dweight = None
        return dhidden, dweight, dbias, *(None,) * 5
