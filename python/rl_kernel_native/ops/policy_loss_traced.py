"""policy_loss as a torch operator: what torch.compile, export, FakeTensor and torch.func see, with its derivative.

Loss and gradients come from one call. There is no second derivative: asking for one is an error.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_element, check_first, check_mask, check_tokens
from .._torch import apply_function, memory, prepare
from .._transforms import looped, refuse_tangents
from .policy_spec import PolicySpec

# What is not there is an empty tensor.
define(
    "policy_loss(Tensor logprob, Tensor? entropy, Tensor? old_logprob, Tensor advantage, Tensor mask, "
    "Tensor? cu_seqlens, Tensor? ref_logprob, Tensor? importance, Tensor? selected, Tensor? denominator, float[] spec, "
    "float denominator_value, bool ratio_metrics) -> (Tensor, Tensor, Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native
_METRICS, _RATIO_METRICS = 25, 31
_GIVEN = 4.0  # the importance level whose weights may be one a sequence
_IMPORTANCE_FIELD = 27


def _kernel(
    logprob: Tensor, entropy: Any, old_logprob: Any, advantage: Tensor, mask: Tensor, cu_seqlens: Any, ref_logprob: Any,
    importance: Any, selected: Any, denominator: Any, spec: Any, denominator_value: float,
    ratio_metrics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    prepare(logprob)
    operands = (logprob, old_logprob, advantage, mask, cu_seqlens, ref_logprob, importance, entropy, selected)
    packed = struct.pack(f"{len(spec)}d", *spec)
    given = denominator_value if denominator_value else memory(denominator)
    loss, vector, d_logprob, d_entropy = _C.policy_loss(
        *map(memory, operands), packed, given, ratio_metrics, True, entropy is not None, None, 0
    )
    return loss, vector, d_logprob, logprob.new_empty(0) if d_entropy is None else d_entropy


def _differentiable(*arguments: Any) -> tuple[Tensor, ...]:
    return apply("PolicyLoss", *arguments)


implement("policy_loss", _kernel, _differentiable)


@fake("policy_loss")
def _fake(
    logprob: Tensor, entropy: Any, old_logprob: Any, advantage: Tensor, mask: Tensor, cu_seqlens: Any, ref_logprob: Any,
    importance: Any, selected: Any, denominator: Any, spec: Any, denominator_value: float,
    ratio_metrics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sequences = check_first(logprob, "logprob", cu_seqlens)
    check_mask(mask, logprob.shape, "logprob")
    check_tokens(old_logprob, "old_logprob", logprob, "logprob")
    check_tokens(advantage, "advantage", logprob, "logprob", sequences)
    check_tokens(ref_logprob, "ref_logprob", logprob, "logprob")
    if spec[_IMPORTANCE_FIELD] == _GIVEN:
        check_tokens(importance, "importance_weight", logprob, "logprob", sequences)
    else:
        check_tokens(importance, "rollout_logprob", logprob, "logprob")
    check_tokens(entropy, "entropy", logprob, "logprob")
    check_tokens(selected, "selected", logprob, "logprob")
    check_element(denominator, "denominator")
    return (
        logprob.new_empty(()),
        logprob.new_empty(_METRICS + (_RATIO_METRICS if ratio_metrics else 0)),
        logprob.new_empty(logprob.shape),
        logprob.new_empty(0 if entropy is None else logprob.shape),
    )


def policy_loss(operands: tuple[Any, ...], spec: PolicySpec, value: float, ratio: bool) -> tuple[Tensor, ...]:
    """loss, metrics, d_logprob, d_entropy (empty without an entropy)."""
    logprob, old_logprob, advantage, mask, cu_seqlens, ref_logprob, importance, entropy, selected, denominator = (
        operands
    )
    arguments = (
        logprob, entropy, old_logprob, advantage, mask, cu_seqlens, ref_logprob, importance, selected, denominator,
        list(spec.numbers), value, ratio,
    )  # fmt: skip
    result: tuple[Tensor, ...] = apply_function(_ops.policy_loss, "PolicyLoss", *arguments)
    return result


def scaled(d_loss: Tensor, d_logprob: Tensor, d_entropy: Any, logprob: Tensor, entropy: Any) -> tuple[Any, Any]:
    """The gradients times that of the loss."""
    found = apply_function(None, "Scaled", d_loss, d_logprob, d_entropy, logprob, None if entropy is None else entropy)
    return found[0], None if d_entropy is None else found[1]


@callable_in_graph
class PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.policy_loss(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logprob, entropy = inputs[:2]
        _, vector, d_logprob, d_entropy = output
        ctx.has_entropy = entropy is not None
        ctx.weights = "importance_weight" if inputs[10][_IMPORTANCE_FIELD] == _GIVEN else "rollout_logprob"
        ctx.mark_non_differentiable(vector, d_logprob, d_entropy)
        ctx.save_for_backward(d_logprob, d_entropy, logprob, entropy)
        ctx.save_for_forward(d_logprob, d_entropy, logprob, entropy)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_loss: Any, *_: Any) -> Any:
        nothing = (None,) * 11
        if d_loss is None:
            return None, None, *nothing
        d_logprob, d_entropy, logprob, entropy = ctx.saved_tensors
        found = scaled(d_loss, d_logprob, d_entropy if ctx.has_entropy else None, logprob, entropy)
        return found[0], found[1], *nothing

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        dims = (*in_dims[:10], None, None, None)
        return looped(PolicyLoss.apply, info, dims, inputs), (0, 0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, logprob: Any, entropy: Any, *others: Any) -> Any:
        names = ("old_logprob", "advantage", "mask", "cu_seqlens", "ref_logprob", ctx.weights, "selected")
        refuse_tangents("policy_loss", (*names, "denominator"), others[:8])
        d_logprob, d_entropy = ctx.saved_tensors[:2]
        total = torch.zeros((), dtype=d_logprob.dtype, device=d_logprob.device)
        for gradient, tangent in ((d_logprob, logprob), (d_entropy, entropy)):
            if tangent is not None:
                total = total + (gradient * tangent).sum()
        return total, None, None, None


@callable_in_graph
class Scaled(torch.autograd.Function):
    """d_loss times the gradients: linear in d_loss, without a derivative along logprob and entropy."""

    @staticmethod
    def forward(d_loss: Tensor, d_logprob: Tensor, d_entropy: Any, logprob: Tensor, entropy: Any) -> Any:
        return d_logprob * d_loss, d_logprob.new_empty(0) if d_entropy is None else d_entropy * d_loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, d_logprob, d_entropy, _, _ = inputs
        ctx.has_entropy = d_entropy is not None
        if not ctx.has_entropy:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(d_logprob, d_entropy)
        ctx.save_for_forward(d_logprob, d_entropy)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_logprob: Any, of_entropy: Any) -> Any:
        if any(ctx.needs_input_grad[3:]):
            raise RuntimeError("a second derivative of a loss is wanted, and there is none")
        d_logprob, d_entropy = ctx.saved_tensors
        total = None
        for incoming, gradient in ((of_logprob, d_logprob), (of_entropy if ctx.has_entropy else None, d_entropy)):
            if incoming is not None:
                product = (incoming * gradient).sum()
                total = product if total is None else total + product
        return total, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(Scaled.apply, info, in_dims, inputs), (0, 0)

    @staticmethod
    def jvp(ctx: Any, d_loss: Any, d_logprob: Any, d_entropy: Any, logprob: Any, entropy: Any) -> Any:
        if logprob is not None or entropy is not None:
            raise RuntimeError("a second derivative of a loss is wanted, and there is none")
        gradient, of_entropy = ctx.saved_tensors
        first = torch.zeros_like(gradient) if d_loss is None else gradient * d_loss
        if not ctx.has_entropy:
            return first, None
        return first, torch.zeros_like(of_entropy) if d_loss is None else of_entropy * d_loss
