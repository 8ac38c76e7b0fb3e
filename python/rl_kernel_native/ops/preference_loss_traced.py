"""preference_loss as torch operators: what torch.compile, export, FakeTensor and torch.func see, with its derivative.

The forward gives the derivative of each loss in its pair; the backward multiplies. There is no second derivative.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import dtype_name, is_static
from .._torch import apply_function, gradient, memory, prepare
from .._transforms import looped, refuse_tangents
from .preference_kinds import AOT_UNPAIRED, KTO, NAMES, UNSORTED

_HOW = "int kind, int sort, int score, int average, float[] numbers"
# ranks is an empty tensor where nothing is sorted.
define(
    "preference_loss(Tensor policy_chosen, Tensor policy_rejected, Tensor? ref_chosen, Tensor? ref_rejected, "
    "Tensor? chosen_count, Tensor? rejected_count, Tensor? chosen_aligned, Tensor? rejected_aligned, Tensor? kl, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
define(
    "preference_loss_backward(Tensor dlosses, Tensor d_chosen, Tensor d_rejected, Tensor? ranks, int sort) "
    "-> (Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native


def _kernel(*arguments: Any) -> tuple[Tensor, ...]:
    prepare(arguments[0])
    found = _C.preference_loss(*(memory(a) for a in arguments[:9]), *arguments[9:], None, 0)
    ranks = found[6]
    return *found[:6], found[0].new_empty(0, dtype=torch.int32) if ranks is None else ranks


def _backward_kernel(dlosses: Tensor, d_chosen: Tensor, d_rejected: Tensor, ranks: Any, sort: int) -> Any:
    prepare(dlosses)
    found = (memory(t) for t in (dlosses, d_chosen, d_rejected, ranks))
    return _C.preference_loss_backward(*found, sort, None, 0)


implement("preference_loss", _kernel, functools.partial(apply, "PreferenceLoss"))
implement("preference_loss_backward", _backward_kernel)


def require_constants(*wanted: bool) -> None:
    for name, wants in zip(NAMES[2:], wanted, strict=True):
        if wants:
            raise ValueError(f"{name}: is a constant of the loss and gets no gradient; pass {name}.detach()")


@fake("preference_loss")
def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    arrays, (kind, sort, *_) = arguments[:9], arguments[9:]
    chosen, rejected = arrays[:2]
    for i, (name, t) in enumerate(zip(NAMES, arrays, strict=True)):
        if t is None:
            continue
        dtype = torch.int64 if name.endswith("_count") else torch.float32
        if t.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype_name(dtype)}, got {dtype_name(t.dtype)}")
        like = chosen if name.endswith("chosen") or i % 2 == 0 or kind != KTO else rejected
        whose = "policy_chosen" if like is chosen else "policy_rejected"
        if t.dim() != 1:
            wanted = "[1] (that of one number)" if name == "kl" else "[num_pairs]"
            raise ValueError(f"{name}: expected shape {wanted}, got {list(t.shape)}")
        if name == "kl" and is_static(t) and t.shape[0] != 1:
            raise ValueError(f"kl: expected shape [1] (that of one number), got {list(t.shape)}")
        free = name == "kl" or (kind == KTO and i == 1)
        if not free and is_static(t) and is_static(like) and t.shape != like.shape:
            raise ValueError(f"{name}: expected shape {list(like.shape)} (that of {whose}), got {list(t.shape)}")
    losses = chosen.new_empty(chosen.shape[0] + rejected.shape[0] if kind == KTO else chosen.shape[0])
    w, l = (t.new_empty(t.shape[0]) for t in (chosen, rejected))  # noqa: E741
    ranks = chosen.new_empty((2, chosen.shape[0]) if sort != UNSORTED else 0, dtype=torch.int32)
    metrics = chosen.new_empty(5)
    return losses, w, l, metrics, torch.empty_like(w), torch.empty_like(l), ranks


@fake("preference_loss_backward")
def _backward_fake(dlosses: Tensor, d_chosen: Tensor, d_rejected: Tensor, ranks: Any, sort: int) -> Any:
    return d_chosen.new_empty(d_chosen.shape), d_rejected.new_empty(d_rejected.shape)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def preference_loss(*arguments: Any) -> Any:
    return apply_function(_ops.preference_loss, "PreferenceLoss", *arguments)


def gradients(dlosses: Tensor, d_chosen: Tensor, d_rejected: Tensor, ranks: Any, sort: int, *policies: Tensor) -> Any:
    """The backward. The policies are among its operands so that a derivative of the derivative meets an error."""
    operands = (gradient(dlosses, torch.float32, "dlosses"), d_chosen, d_rejected, ranks, sort, *policies)
    return apply_function(None, "PreferenceLossBackward", *operands)


def _gradients(ctx: Any, dlosses: Tensor) -> Any:
    policy_chosen, policy_rejected, d_chosen, d_rejected, ranks = ctx.saved_tensors
    of_sorted = None if ctx.sort == UNSORTED else ranks
    return gradients(dlosses, d_chosen, d_rejected, of_sorted, ctx.sort, policy_chosen, policy_rejected)


@callable_in_graph
class PreferenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.preference_loss(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.sort, ctx.unpaired = inputs[10], inputs[9] == KTO
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # what has no tangent is told from what has one of zeros
        ctx.num_losses = output[0].shape[0]
        ctx.save_for_backward(*inputs[:2], *output[4:])
        ctx.save_for_forward(*inputs[:2], *output[4:])

    @staticmethod
    def backward(ctx: Any, dlosses: Any, *_: Any) -> Any:
        found = (None, None) if dlosses is None else _gradients(ctx, dlosses)
        return *found, *(None,) * 12

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        dims = [None if isinstance(d, (list, tuple)) else d for d in in_dims]
        return looped(PreferenceLoss.apply, info, dims, inputs), (0,) * 7

    @staticmethod
    def jvp(ctx: Any, t_chosen: Any, t_rejected: Any, *others: Any) -> Any:
        refuse_tangents("preference_loss", NAMES[2:], others[: len(NAMES) - 2])
        ranks = ctx.saved_tensors[4]
        ones = torch.ones(ctx.num_losses, dtype=torch.float32, device=ranks.device)
        d_chosen, d_rejected = _gradients(ctx, ones)
        parts = [d if t is None else d * t for d, t in ((d_chosen, t_chosen), (d_rejected, t_rejected))]
        parts = [torch.zeros_like(x) if t is None else x for x, t in zip(parts, (t_chosen, t_rejected), strict=True)]
        if ctx.sort != UNSORTED:
            places = (ranks[0], ranks[1 if ctx.sort == AOT_UNPAIRED else 0])
            parts = [torch.zeros_like(x).scatter(0, at.long(), x) for x, at in zip(parts, places, strict=True)]
        paired = ctx.sort != UNSORTED or not ctx.unpaired
        tangent = parts[0] + parts[1] if paired else torch.cat(parts)
        return tangent, *(None,) * 6


def _no_second_derivative() -> Any:
    raise RuntimeError("preference_loss: has no second derivative")


@callable_in_graph
class PreferenceLossBackward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.preference_loss_backward(*arguments[:5])  # without the policies

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return _no_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(PreferenceLossBackward.apply, info, in_dims, inputs), (0, 0)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        return _no_second_derivative()
