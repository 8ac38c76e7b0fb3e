"""kl as torch operators: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

A token's derivative is a number: gradients and tangents are both products with it, by the same call. There is no second
derivative in the log-probabilities: asking for one is an error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._shapes import check_first, check_mask, check_tokens
from .._torch import apply_function, gradient, implement, memory, prepare, rows_of
from .._transforms import looped, refuse_tangents

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
# What is not asked for is an empty tensor. weight_kind: 0 none, 1 old_logprob, 2 importance_weight.
_OPERANDS = "Tensor logprob, Tensor ref_logprob, Tensor? weight, Tensor? mask"
_HOW = "int estimator, bool straight_through, int weight_kind, float input_limit, float limit"
_library.define(f"kl({_OPERANDS}, {_HOW}) -> Tensor")
_library.define(
    f"kl_backward(Tensor d_kl, {_OPERANDS}, {_HOW}, bool return_d_logprob, bool return_d_importance_weight) "
    "-> (Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native


def _kernel(logprob: Tensor, *arguments: Any) -> Tensor:
    prepare(logprob)
    operands, how = (logprob, *arguments[:3]), arguments[3:]
    result: Tensor = _C.kl(*map(memory, operands), None, *how, False, False, None, 0)[0]
    return result


def _backward_kernel(d_kl: Tensor, logprob: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    prepare(logprob)
    operands, how = (logprob, *arguments[:3]), arguments[3:]
    _, *found = _C.kl(*map(memory, operands), memory(d_kl), *how, None, 0)
    d_logprob, d_weight = (logprob.new_empty(0) if x is None else x for x in found)
    return d_logprob, d_weight


implement(_library, "kl", _kernel, functools.partial(apply, "_TransformedKl"))
implement(_library, "kl_backward", _backward_kernel, functools.partial(apply, "_TransformedKlBackward"))


def _check(logprob: Tensor, ref_logprob: Tensor, weight: Any, mask: Any, weight_kind: int) -> None:
    check_first(logprob, "logprob", None)
    check_tokens(ref_logprob, "ref_logprob", logprob, "logprob")
    check_tokens(weight, "old_logprob" if weight_kind == 1 else "importance_weight", logprob, "logprob")
    check_mask(mask, logprob.shape, "logprob")


@torch.library.register_fake("rl_kernel_native::kl", lib=_library)
def _fake(
    logprob: Tensor, ref_logprob: Tensor, weight: Any, mask: Any, _estimator: int, _straight: bool, weight_kind: int,
    _input_limit: float, _limit: float,
) -> Tensor:  # fmt: skip
    _check(logprob, ref_logprob, weight, mask, weight_kind)
    return logprob.new_empty(logprob.shape)


@torch.library.register_fake("rl_kernel_native::kl_backward", lib=_library)
def _backward_fake(
    d_kl: Tensor, logprob: Tensor, ref_logprob: Tensor, weight: Any, mask: Any, _estimator: int, _straight: bool,
    weight_kind: int, _input_limit: float, _limit: float, return_d_logprob: bool, return_d_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(logprob, ref_logprob, weight, mask, weight_kind)
    check_tokens(d_kl, "d_kl", logprob, "logprob")
    return (
        logprob.new_empty(logprob.shape if return_d_logprob else 0),
        logprob.new_empty(logprob.shape if return_d_weight else 0),
    )


# ---- derivatives ----------------------------------------------------------------------------------------------------


def kl(*arguments: Any) -> Any:
    return apply_function(_TracedKl, "_TransformedKl", *arguments)


def backward(d_kl: Tensor, *arguments: Any) -> tuple[Any, Any]:
    """d_logprob and d_importance_weight, None for what is not wanted: the last two arguments say which."""
    found = apply_function(_TracedKlBackward, "_TransformedKlBackward", d_kl, *arguments)
    return found[0] if arguments[-2] else None, found[1] if arguments[-1] else None


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Operands as kernels read them: batches of torch.func are slices of any stride."""
    return tuple(None if x is None else rows_of(x) for x in ctx.saved_tensors)


class _TracedKl(torch.autograd.Function):
    @staticmethod
    def forward(
        logprob: Tensor, ref_logprob: Tensor, weight: Any, mask: Any, estimator: int, straight_through: bool,
        weight_kind: int, input_limit: float, limit: float,
    ) -> Tensor:  # fmt: skip
        return _ops.kl(logprob, ref_logprob, weight, mask, estimator, straight_through, weight_kind, input_limit, limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.how = inputs[4:]
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_kl: Any) -> Any:
        if d_kl is None:
            return (None,) * 9
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[2])
        d_logprob, d_weight = backward(gradient(d_kl, torch.float32, "d_kl"), *_saved(ctx), *ctx.how, *needs)
        return d_logprob, None, d_weight, None, None, None, None, None, None


@callable_in_graph
class _TransformedKl(_TracedKl):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(_TransformedKl.apply, info, in_dims, inputs), 0

    @staticmethod
    def jvp(ctx: Any, along_logprob: Any, along_ref: Any, along_weight: Any, along_mask: Any, *_: Any) -> Any:
        old = along_weight if ctx.how[2] == 1 else None
        refuse_tangents("kl", ("ref_logprob", "old_logprob", "mask"), (along_ref, old, along_mask))
        total = None
        for i, tangent in enumerate((along_logprob, along_weight)):
            if tangent is None:
                continue
            product = backward(tangent.contiguous(), *_saved(ctx), *ctx.how, i == 0, i == 1)[i]
            total = product if total is None else total + product
        return total


class _TracedKlBackward(torch.autograd.Function):
    """Linear in d_kl, without a derivative in the log-probabilities and the weight."""

    @staticmethod
    def forward(
        d_kl: Tensor, logprob: Tensor, ref_logprob: Tensor, weight: Any, mask: Any, estimator: int,
        straight_through: bool, weight_kind: int, input_limit: float, limit: float, return_d_logprob: bool,
        return_d_weight: bool,
    ) -> Any:  # fmt: skip
        return _ops.kl_backward(
            d_kl, logprob, ref_logprob, weight, mask, estimator, straight_through, weight_kind, input_limit, limit,
            return_d_logprob, return_d_weight,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how, ctx.wanted = inputs[5:10], inputs[10:]
        ctx.mark_non_differentiable(*(o for o, wanted in zip(output, ctx.wanted, strict=True) if not wanted))
        ctx.save_for_backward(*inputs[1:5])
        ctx.save_for_forward(*inputs[1:5])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        if any(ctx.needs_input_grad[1:4]):
            raise RuntimeError("kl: a second derivative is wanted, and there is none")
        total = None
        for i, (cotangent, wanted) in enumerate(zip(cotangents, ctx.wanted, strict=True)):
            if cotangent is None or not wanted:
                continue
            dense = gradient(cotangent, torch.float32, "d_kl")
            product = backward(dense, *_saved(ctx), *ctx.how, i == 0, i == 1)[i]
            total = product if total is None else total + product
        return total, None, None, None, None, None, None, None, None, None, None, None


@callable_in_graph
class _TransformedKlBackward(_TracedKlBackward):
    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(_TransformedKlBackward.apply, info, in_dims, inputs), (0, 0)

    @staticmethod
    def jvp(ctx: Any, along: Any, *others: Any) -> Any:
        if any(t is not None for t in others):
            raise RuntimeError("kl: a second derivative is wanted, and there is none")
        found = backward(along.contiguous(), *_saved(ctx), *ctx.how, *ctx.wanted)
        return tuple(found)
