"""A Python number that changes at every step. torch.compile compiles once for the first value and once for any other,
as for torch's own arithmetic. Every result has the bytes of an eager call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from call_arrays import mapped
from call_cases import CALLS as DRAWN
from call_cases import OPERATORS as PUBLIC
from call_cases import Draw, Operand
from cases import differing
from fuzz_calls import _parts
from rl_kernel_native._operator import OPERATORS

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402 - needs torch

_generator = torch.Generator().manual_seed(0)
X = torch.randn(4, 16, generator=_generator)
A = -torch.rand(4, 6, generator=_generator)
B = A + 0.1 * torch.randn(4, 6, generator=_generator)
C = A - 0.2
MASK = torch.tensor([[1, 1, 1, 1, 0, 0]] * 4).bool()
REWARDS = torch.randn(4, generator=_generator)
W = torch.randn(9, 16, generator=_generator)
GAIN = torch.randn(16, generator=_generator)
TARGET = torch.tensor([1, 5, -100, 3])
LORA_A, LORA_B = torch.randn(2, 16, generator=_generator), torch.randn(9, 2, generator=_generator)
HEADS = torch.randn(1, 4, 2, 8, generator=_generator)
OFFSETS = torch.tensor([0, 2, 4])
KEYS: dict[str, Any] = {"seed": 3, "sample_id": 0, "position": 5}
WHOLE: dict[str, Any] = {"vocab_size": 16, **KEYS}
SHARD: dict[str, Any] = {"vocab_start": 0, **WHOLE}
TENTHS = tuple(0.1 + 0.05 * i for i in range(5))
COUNTS = tuple(10 + i for i in range(5))


def tensor_of(o: Operand) -> Any:
    return torch.from_numpy(np.array(o.values)).to(getattr(torch, o.dtype))


def policy(logprob: Any, **options: Any) -> Any:
    return rk.policy_loss(logprob, B, REWARDS, MASK, **options).loss


def drawn(logits: Any, temperature: Any) -> Any:
    part = rk.sample_partial(logits, temperature=temperature, **SHARD)
    return rk.sample_merge(part[None], temperature=temperature, **WHOLE)


def in_range(low: float, logprob: Any) -> Any:
    return rk.importance_weights(logprob, B, MASK, upper=2.0 + low, lower=low, mode="mask", return_metrics=True)[:2]


# name: (function of a tensor and a number, that tensor, the numbers)
CALLS: dict[str, tuple[Callable[[Any, Any], Any], Any, tuple[Any, ...]]] = {
    "logprob, temperature": (lambda x, n: rk.logprob(x, TARGET, temperature=n), X, TENTHS),
    "logprob, softcap": (lambda x, n: rk.logprob(x, TARGET, softcap=n), X, TENTHS),
    "logprob, logit_scale": (lambda x, n: rk.logprob(x, TARGET, logit_scale=n), X, TENTHS),
    "linear_logprob, temperature": (lambda x, n: rk.linear_logprob(x, W, TARGET, temperature=n), X, TENTHS),
    "linear_logprob, lora_scale": (
        lambda x, n: rk.linear_logprob(x, W, TARGET, lora_a=LORA_A, lora_b=LORA_B, lora_scale=n), X, TENTHS
    ),
    "linear_cross_entropy, denominator": (lambda x, n: rk.linear_cross_entropy(x, W, TARGET, denominator=n), X, COUNTS),
    "linear_cross_entropy, label_smoothing": (
        lambda x, n: rk.linear_cross_entropy(x, W, TARGET, label_smoothing=n),
        X,
        TENTHS,
    ),
    "linear_cross_entropy, z_loss": (lambda x, n: rk.linear_cross_entropy(x, W, TARGET, z_loss=n), X, TENTHS),
    "linear_sample, temperature": (lambda x, n: rk.linear_sample(x, W, temperature=n, **KEYS).logprob, X, TENTHS),
    "linear_sample, min_p": (lambda x, n: rk.linear_sample(x, W, min_p=n, **KEYS).logprob, X, TENTHS),
    "linear_sample, position": (
        lambda x, n: rk.linear_sample(x, W, seed=3, sample_id=0, position=n).ids, X, COUNTS
    ),
    "sample_partial, temperature": (lambda x, n: rk.sample_partial(x, temperature=n, **SHARD), X, TENTHS),
    "sample_merge, temperature": (lambda x, n: drawn(x, n).logprob, X, TENTHS),
    "kl, clamp": (lambda x, n: rk.kl(x, B, estimator="k3", clamp=n), A, TENTHS),
    "kl, input_clamp": (lambda x, n: rk.kl(x, B, MASK, estimator="k3", input_clamp=n), A, TENTHS),
    "policy_loss, denominator": (lambda x, n: policy(x, spec=rk.PolicySpec(), denominator=n), A, TENTHS),
    "policy_loss, count": (lambda x, n: policy(x, spec=rk.PolicySpec(), denominator=n), A, COUNTS),
    "policy_loss, kl_coef": (
        lambda x, n: policy(x, spec=rk.PolicySpec(kl="k3", kl_coef=n), ref_logprob=C), A, TENTHS
    ),
    "policy_loss, epsilon": (
        lambda x, n: policy(x, spec=rk.PolicySpec(epsilon_low=n, epsilon_high=n)), A, TENTHS
    ),
    "policy_loss, a preset": (
        lambda x, n: policy(x, spec=rk.presets.trl(loss_type="grpo", beta=n), ref_logprob=C), A, TENTHS
    ),
    "value_loss, clip": (lambda x, n: rk.value_loss(x, B, C, MASK, clip=n).loss, A, TENTHS),
    "value_loss, huber_delta": (
        lambda x, n: rk.value_loss(x, None, C, MASK, loss_type="huber", huber_delta=n).loss, A, TENTHS
    ),
    "value_loss, scale": (lambda x, n: rk.value_loss(x, None, C, MASK, scale=n).loss, A, TENTHS),
    "value_loss, denominator": (lambda x, n: rk.value_loss(x, None, C, MASK, denominator=n).loss, A, COUNTS),
    "gae, gamma": (lambda x, n: tuple(rk.gae(x, B, MASK, gamma=n)), A, TENTHS),
    "gae, lam": (lambda x, n: tuple(rk.gae(x, B, MASK, gamma=0.5, lam=n)), A, TENTHS),
    "discounted_returns, gamma": (lambda x, n: rk.discounted_returns(x, MASK, gamma=n), A, TENTHS),
    "vtrace, rho_bar": (lambda x, n: tuple(rk.vtrace(x, B, A, C, MASK, gamma=0.5, rho_bar=n)), A, TENTHS),
    "group_advantage, eps": (lambda x, n: rk.group_advantage(x, group_size=2, eps=n), REWARDS, TENTHS),
    "group_advantage, group_size": (
        lambda x, n: rk.group_advantage(x, group_size=n), torch.arange(12.0), (2, 3, 4, 6, 12)
    ),
    "group_advantage, f_norm": (
        lambda x, n: rk.group_advantage(x, OFFSETS, kind="gpg", f_norm=n), REWARDS, TENTHS
    ),
    "masked_whiten, eps": (lambda x, n: rk.masked_whiten(x, MASK, eps=n), A, TENTHS),
    "optimal_token_baseline, eps": (
        lambda x, n: tuple(rk.optimal_token_baseline(REWARDS, x, A.abs(), MASK, group_size=2, eps=n)), A, TENTHS
    ),
    "importance_weights, bounds": (lambda x, n: in_range(n, x), A, TENTHS),
    "importance_weights, veto": (
        lambda x, n: tuple(rk.importance_weights(x, B, MASK, upper=2.0, veto=n * 1e-3)), A, TENTHS
    ),
    "mismatch_metrics, log_ratio_clamp": (
        lambda x, n: rk.mismatch_metrics(x, B, MASK, log_ratio_clamp=n).vector, A, TENTHS
    ),
    "scatter_rewards, kl_coef": (
        lambda x, n: rk.scatter_rewards(REWARDS, MASK, logprob=x, ref_logprob=B, kl_coef=n)[0], A, TENTHS
    ),
    "scatter_rewards, lagrange": (
        lambda x, n: rk.scatter_rewards(x, MASK, cost=x.abs(), lagrange=n)[2], REWARDS, TENTHS
    ),
    "covariance_mask, ratio": (
        lambda x, n: rk.covariance_mask(x, B, REWARDS, MASK, kind="clip", ratio=n, seed=3, lower=-9.0, upper=9.0),
        A,
        TENTHS,
    ),
    "covariance_mask, seed": (
        lambda x, n: rk.covariance_mask(x, B, REWARDS, MASK, kind="clip", ratio=0.5, seed=n, lower=-9.0, upper=9.0),
        A,
        COUNTS,
    ),
    "entropy_mask, top_quantile": (lambda x, n: rk.entropy_mask(x.abs(), MASK, top_quantile=n), A, TENTHS),
    "preference_loss, beta": (lambda x, n: rk.preference_loss(x, x.flip(0), B[:, 0], C[:, 0], beta=n).losses, REWARDS,
                              TENTHS),
    "rms_norm, eps": (lambda x, n: rk.rms_norm(x, GAIN, n), X, TENTHS),
    "rms_norm, weight_offset": (lambda x, n: rk.rms_norm(x, GAIN, 0.5, weight_offset=n), X, TENTHS),
    "attention, softmax_scale": (lambda x, n: rk.attention(x, x, x, softmax_scale=n), HEADS, TENTHS),
    "attention, softcap": (lambda x, n: rk.attention(x, x, x, softcap=n), HEADS, TENTHS),
    "attention_partials, softmax_scale": (
        lambda x, n: rk.attention(x, x, x, softmax_scale=n, return_partials=True)[0], HEADS, TENTHS
    ),
    "attention, window_size": (lambda x, n: rk.attention(x, x, x, window_size=n), HEADS, (1, 2, 3, 4)),
    "pack, fill_value": (lambda x, n: rk.pack(x, torch.tensor([1, 2, 0, 4]), fill_value=n).tensors, A, TENTHS),
    "unpack, fill_value": (lambda x, n: rk.unpack(x, OFFSETS, 3, fill_value=n), X, TENTHS),
    "shift_labels_packed, ignore_index": (
        lambda x, n: rk.shift_labels_packed(x, OFFSETS, ignore_index=-n), torch.arange(4), COUNTS
    ),
    "logprob, ignore_index": (lambda x, n: rk.logprob(x, TARGET, ignore_index=-n), X, COUNTS),
    "logprob, valid_vocab": (lambda x, n: rk.logprob(x, TARGET, valid_vocab=n), X, COUNTS),
    "embedding, padding_idx": (lambda x, n: rk.embedding(TARGET.clamp(0), x, padding_idx=n), W, (1, 2, 3, 4)),
}  # fmt: skip


def test_every_operator_with_a_number_is_here() -> None:
    """Some operators check a number by a function that Dynamo cannot trace, such as math.isfinite. Only these tests
    notice this. A backward has the same numbers as its forward."""
    forwards = [o for o in OPERATORS if not re.search("_backward_?$", o.name)]
    with_numbers = {o.name for o in forwards if re.search(r"\bfloat\b", o.options)}
    assert {"kl", "masked_whiten"} <= with_numbers
    assert with_numbers <= {name.split(",")[0] for name in CALLS}


def compilations(function: Callable[[Any, Any], Any], tensor: Any, numbers: tuple[Any, ...], backend: str) -> int:
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for number in numbers:
        assert not differing(compiled(tensor, number), function(tensor, number)), f"differs at {number}"
    return int(counter.frame_count)


@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_changes_compiles_twice(name: str) -> None:
    assert compilations(*CALLS[name], "eager") <= 2


# AOTAutograd keeps numbers of a trace in tensors or fixes their value. One operator covers each way of passing them.
@pytest.mark.parametrize(
    "name",
    [
        "logprob, temperature", "policy_loss, kl_coef", "policy_loss, count", "kl, clamp", "gae, gamma",
        "masked_whiten, eps", "preference_loss, beta", "rms_norm, eps", "group_advantage, group_size",
    ],
)  # fmt: skip
def test_no_value_is_fixed_by_aotautograd(name: str) -> None:
    function, tensor, numbers = CALLS[name]

    def with_gradient(x: Any, number: Any) -> Any:
        found = function(x, number)
        found = found[0] if isinstance(found, tuple) else found
        return torch.autograd.grad(found.sum(), x)[0] if found.requires_grad else found

    leaf = tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for number in numbers:
        found = compiled(leaf, number)
        first = found[0] if isinstance(found, tuple) else found
        got = torch.autograd.grad(first.sum(), leaf)[0] if first.requires_grad else first
        assert not differing(got.detach(), with_gradient(leaf, number).detach()), f"differs at {number}"
    assert counter.frame_count <= 2


def test_a_number_that_is_out_of_range_is_refused_in_a_graph_that_serves_others() -> None:
    """A fake kernel does not see the number; the kernel does."""
    compiled = torch.compile(lambda x, n: rk.masked_whiten(x, MASK, eps=n), fullgraph=True, backend="aot_eager")
    compiled(A, 0.1), compiled(A, 0.2)
    with pytest.raises(Exception, match="eps: expected a finite number > 0 in float32"):
        compiled(A, -1.0)


# name: (call with a number, numbers that it refuses)
BEYOND = (1e39, 1e-46)  # infinite in float32, and below its normal numbers
BAD: dict[str, tuple[Callable[[Any, Any], Any], tuple[float, ...]]] = {
    "denominator": (lambda x, n: policy(x, spec=rk.PolicySpec(), denominator=n), (0.0, -3.0, *BEYOND)),
    "denominator of a head": (
        lambda x, n: rk.linear_cross_entropy(X, W, TARGET, denominator=n) + x.sum(),
        (0.0, -3.0, *BEYOND),
    ),
    "clip": (lambda x, n: rk.value_loss(x, B, C, MASK, clip=n).loss, (0.0, -3.0, *BEYOND)),
    "kl_coef": (lambda x, n: policy(x, spec=rk.PolicySpec(kl="k3", kl_coef=n), ref_logprob=C), (1e39, -1e39)),
    "epsilon_low": (lambda x, n: policy(x, spec=rk.PolicySpec(epsilon_low=n)), (-3.0, 1e39)),
    "beta": (lambda x, n: rk.preference_loss(x[0], x[1], beta=n).losses, (0.0, -3.0, *BEYOND)),
    "upper": (lambda x, n: rk.importance_weights(x, B, MASK, upper=n).weights, (0.0, -3.0, *BEYOND)),
    "lower": (lambda x, n: rk.importance_weights(x, B, upper=2.0, lower=n, mode="clip").weights, (-3.0, 2.5, 1e39)),
    "veto": (lambda x, n: rk.importance_weights(x, B, upper=2.0, veto=n).mask, (0.0, -3.0, *BEYOND)),
    "gamma": (lambda x, n: rk.discounted_returns(x, MASK, gamma=n), (-3.0, 1.5, 1e39)),
    "top_quantile": (lambda x, n: rk.entropy_mask(-x, MASK, top_quantile=n), (-3.0, 1.5, 1e39)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_number_is_named_in_a_graph_that_serves_others(name: str) -> None:
    """A trace knows only a symbol for a number that changed before, so the error shows no digits. Dynamo wraps it."""
    function, wrong = BAD[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    compiled(A, 0.5), compiled(A, 0.25)
    expected = rf"{name.split()[0]}: expected"
    for number in (*wrong, float("nan")):
        with pytest.raises(ValueError, match=expected):
            function(A, number)
        with pytest.raises(Exception, match=expected):  # Dynamo's own classes
            compiled(A, number)


def test_a_nan_beside_a_number_that_changes_is_named_itself() -> None:
    compiled = torch.compile(
        lambda x, n: rk.logprob(x, TARGET, temperature=float("nan"), softcap=n), fullgraph=True, backend="aot_eager"
    )
    for number in TENTHS[:3]:
        with pytest.raises(Exception, match="temperature: expected a finite number > 0"):
            compiled(X, number)


# These operators are eager: a graph calls them through process_group, or not at all.
EAGER = {"linear_logprob_partial", "logprob_backward", "logprob_merge", "logprob_partial"}


@pytest.mark.parametrize("operator", sorted(set(PUBLIC) & set(DRAWN) - EAGER))
def test_a_graph_whose_every_number_is_a_symbol_has_the_bytes_of_eager(operator: str) -> None:
    """dynamic=True makes symbols of defaults, too, so a check may not need the value of one."""
    call = getattr(rk, operator)
    parameters = inspect.signature(call).parameters
    for seed in range(2):
        draw = Draw(np.random.default_rng(seed))
        draw.dtype = "float32"
        drawn = DRAWN[operator](draw)
        written = {k for k, v in drawn.items() if isinstance(v, Operand) and v.written}
        drawn = {k: v for k, v in drawn.items() if k not in written or parameters[k].default is inspect.Parameter.empty}
        if drawn.pop("check", False):  # this option waits for the result
            continue

        def results(function: Any, drawn: Any = drawn) -> tuple[Any, ...]:
            found = function({k: mapped(v, tensor_of) for k, v in drawn.items()})
            return tuple(p for p in _parts(found) if isinstance(p, torch.Tensor))

        torch._dynamo.reset()
        compiled = torch.compile(lambda given: call(**given), dynamic=True, fullgraph=True, backend="eager")
        assert not differing(results(compiled), results(lambda given: call(**given))), seed
