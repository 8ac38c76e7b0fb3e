"""A small differentiable call of every operator, for test_engine.py, which tests torch's engine on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import attention_cases
import embedding_cases
import linear_cases
import linear_logprob_cases
import policy_loss_cases
import rl_kernel_native as rk
import rms_norm_cases
import rope_cases
import silu_mul_cases


class Case(NamedTuple):
    """``call(*leaves)`` gives the outputs that ``gradients`` belong to; errors use these names.

    Attributes:
        accumulated: the leaf whose gradient ``call(*leaves, main_grad=...)`` adds to main_grad, or None.
        adds: the registered operator that does so.
        tangents: the operator whose bound in contract.py applies to tangents of gradients, which torch composes. "":
            tangents have the bytes of gradients.
    """

    leaves: tuple[Any, ...]
    call: Callable[..., Any]
    gradients: dict[str, Any]
    accumulated: int | None = None
    adds: str = ""
    tangents: str = ""

    def fresh(self) -> list[Any]:
        return [t.clone().requires_grad_() for t in self.leaves]

    def outputs(self, leaves: Any, **options: Any) -> tuple[Any, ...]:
        found = self.call(*leaves, **options)
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)


class Subclass(torch.Tensor):
    """A subclass with memory that does not define dispatch, so it goes through the dispatcher."""


def zeros_for(weight: Any) -> Any:
    return torch.zeros(weight.shape, device=weight.device)


def _linear(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = linear_cases.operands(rng, (2, 3), 32, 10, dtype, device)
    return Case(o[:3], rk.linear, {"dy": o.dy}, 1, "linear_weight_grad_")


def _input_grad(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = linear_cases.operands(rng, (2, 3), 32, 10, dtype, device)
    return Case((o.dy, o.weight), rk.linear_input_grad, {"ddx": o.x})


def _weight_grad(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = linear_cases.operands(rng, (2, 3), 32, 10, dtype, device)
    return Case((o.dy, o.x), rk.linear_weight_grad, {"ddweight": o.weight})


def _bias_grad(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = linear_cases.operands(rng, (2, 3), 32, 10, dtype, device)
    return Case((o.dy,), rk.linear_bias_grad, {"ddbias": o.bias})


def _tree_sum(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = linear_cases.operands(rng, (2, 3), 32, 10, dtype, device)
    parts = o.dy.float(), o.dy.float() * 2
    return Case((*parts, o.bias), lambda a, b, c: rk.tree_sum([a, b], bias=c), {"dy": o.dy.float()})


def _linear_logprob(rng: np.random.Generator, device: str, dtype: str) -> Case:
    h = linear_logprob_cases.head(rng, 6, 32, 90, dtype, device)

    def call(hidden: Any, weight: Any, bias: Any, **options: Any) -> Any:
        found = rk.linear_logprob(
            hidden, weight, h.target, bias=bias, return_lse=True, return_entropy=True, exp="portable", **options
        )
        return found.logprob, found.lse, found.entropy

    slopes = (_normal(rng, device, dtype, 6).float() for _ in range(3))
    return Case(
        h[:3], call, dict(zip(("dlogprob", "dlse", "dentropy"), slopes, strict=True)), 1, "linear_logprob_backward_"
    )


def _rms_norm(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = rms_norm_cases.operands(rng, (2, 3), 32, dtype, device)
    return Case(o[:3], _norm, {"dy": o.dy, "d_new_residual": o.d_new_residual}, 1, "rms_norm_backward_", "rms_norm")


def _norm(x: Any, weight: Any, residual: Any, **options: Any) -> Any:
    return rk.rms_norm(x, weight, rms_norm_cases.EPS, residual=residual, **options)


def _embedding(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = embedding_cases.operands(rng, (3, 40), 40, 32, dtype, device)
    return Case(
        (o.weight,), lambda weight, **options: rk.embedding(o.ids, weight, **options), {"dy": o.dy}, 0,
        "embedding_backward_",
    )  # fmt: skip


def _attention(rng: np.random.Generator, device: str, dtype: str, form: str = "packed") -> Case:
    sequences = attention_cases.Sequences(rng, [(5, 5), (2, 2), (9, 9)], (4, 2), 16, dtype, device)
    arrays, lists = sequences.call(form)
    dout = torch.nan_to_num(arrays[3])  # the padding is NaN
    return Case(arrays[:3], lambda q, k, v: rk.attention(q, k, v, **lists), {"dout": dout}, tangents="attention")


def _attention_with_sinks(rng: np.random.Generator, device: str, dtype: str) -> Case:
    sequences = attention_cases.Sequences(rng, [(5, 5), (2, 2), (9, 9)], (4, 2), 16, dtype, device)
    arrays, lists = sequences.call("packed")
    sinks = torch.from_numpy(rng.standard_normal(4, dtype=np.float32)).to(device)

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return rk.attention(q, k, v, sinks=sinks, **lists)

    return Case((*arrays[:3], sinks), call, {"dout": arrays[3]}, tangents="attention")


def _rope(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = rope_cases.operands(rng, (2, 3), (2, 1), 32, dtype, device)
    return Case(
        o[:2], lambda q, k: rope_cases.results(o._replace(q=q, k=k)), {"dq_out": o.q, "dk_out": o.k}
    )  # fmt: skip


def _silu_mul(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = silu_mul_cases.operands(rng, (2, 3), 40, dtype, device)
    return Case((o.gate, o.up), rk.silu_mul, {"dy": o.dy}, tangents="silu_mul")


def _gelu_mul(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = silu_mul_cases.operands(rng, (2, 3), 40, dtype, device)
    return Case((o.gate, o.up), rk.gelu_mul, {"dy": o.dy}, tangents="gelu_mul")


def _packed_silu_mul(rng: np.random.Generator, device: str, dtype: str) -> Case:
    o = silu_mul_cases.operands(rng, (2, 3), 40, dtype, device)
    return Case((torch.cat([o.gate, o.up], -1),), rk.silu_mul, {"dy": o.dy}, tangents="silu_mul")


def _logprob(rng: np.random.Generator, device: str, dtype: str) -> Case:
    logits = _normal(rng, device, dtype, 6, 300)
    target = torch.from_numpy(rng.integers(0, 300, 6)).to(device)

    def call(logits: Any) -> Any:
        found = rk.logprob(logits, target, return_lse=True, return_entropy=True, exp="portable")
        return found.logprob, found.lse, found.entropy

    slopes = (_normal(rng, device, dtype, 6).float() for _ in range(3))
    return Case((logits,), call, dict(zip(("dlogprob", "dlse", "dentropy"), slopes, strict=True)))


def _sequence_logprob(rng: np.random.Generator, device: str, dtype: str) -> Case:
    mask = torch.from_numpy(rng.random((4, 9)) < 0.7).to(device)
    return Case(
        (_normal(rng, device, dtype, 4, 9),), lambda x: rk.sequence_logprob(x, mask).sum,
        {"dsum": _normal(rng, device, dtype, 4).float()},
    )  # fmt: skip


def _preference_loss(rng: np.random.Generator, device: str, dtype: str) -> Case:
    leaves = tuple(_normal(rng, device, dtype, 5).float() for _ in range(4))
    return Case(leaves[:2], lambda a, b: rk.preference_loss(a, b, *leaves[2:]).losses, {"dlosses": leaves[3].abs()})


def _policy_loss(rng: np.random.Generator, device: str, dtype: str) -> Case:
    """The case has only float32."""
    a = {k: torch.from_numpy(v).to(device) for k, v in policy_loss_cases.arrays(4, 21).items()}
    spec = rk.PolicySpec(kl="k3", kl_coef=0.1, entropy_coef=0.02)

    def call(logprob: Any, entropy: Any) -> Any:
        rest = {"ref_logprob": a["ref_logprob"], "entropy": entropy}
        return rk.policy_loss(logprob, a["old_logprob"], a["advantage"], a["mask"], spec=spec, **rest).loss

    return Case((a["logprob"], a["entropy"]), call, {"d_loss": torch.tensor(0.75, device=device)})


def _value_loss(rng: np.random.Generator, device: str, dtype: str) -> Case:
    """The case has only float32."""
    value, old, returns = (_normal(rng, device, "float32", 4, 21) for _ in range(3))
    return Case(
        (value,), lambda v: rk.value_loss(v, old, returns, clip=0.5).loss, {"d_loss": torch.tensor(0.75, device=device)}
    )


def _kl(rng: np.random.Generator, device: str, dtype: str) -> Case:
    """The case has only float32."""
    a = {k: torch.from_numpy(v).to(device) for k, v in policy_loss_cases.arrays(4, 21).items()}

    def call(logprob: Any, weight: Any) -> Any:
        return rk.kl(logprob, a["ref_logprob"], a["mask"], estimator="k3", importance_weight=weight)

    return Case((a["logprob"], a["weight"]), call, {"d_kl": a["advantage"]})


def _pack(rng: np.random.Generator, device: str, dtype: str) -> Case:
    lengths = torch.tensor([3, 0, 7, 5], device=device)
    return Case(
        (_normal(rng, device, dtype, 4, 7, 8),), lambda x: rk.pack(x, lengths=lengths, max_tokens=15).tensors,
        {"dy": _normal(rng, device, dtype, 15, 8)},
    )  # fmt: skip


def _unpack(rng: np.random.Generator, device: str, dtype: str) -> Case:
    offsets = torch.tensor([0, 3, 3, 10, 15], dtype=torch.int32, device=device)
    return Case(
        (_normal(rng, device, dtype, 15, 8),),
        lambda x: rk.unpack(x, offsets, 7),
        {"dy": _normal(rng, device, dtype, 4, 7, 8)},
    )


def _normal(rng: np.random.Generator, device: str, dtype: str, *shape: int) -> Any:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(getattr(torch, dtype)).to(device)


CASES: dict[str, Callable[[np.random.Generator, str, str], Case]] = {
    "linear": _linear,
    "linear_input_grad": _input_grad,
    "linear_weight_grad": _weight_grad,
    "linear_bias_grad": _bias_grad,
    "linear_logprob": _linear_logprob,
    "tree_sum": _tree_sum,
    "rms_norm": _rms_norm,
    "embedding": _embedding,
    "attention": _attention,
    "attention with sinks": _attention_with_sinks,
    "attention of padded sequences": functools.partial(_attention, form="right"),
    "rope": _rope,
    "silu_mul": _silu_mul,
    "silu_mul of one array": _packed_silu_mul,
    "gelu_mul": _gelu_mul,
    "logprob": _logprob,
    "sequence_logprob": _sequence_logprob,
    "preference_loss": _preference_loss,
    "policy_loss": _policy_loss,
    "value_loss": _value_loss,
    "kl": _kl,
    "pack": _pack,
    "unpack": _unpack,
}
