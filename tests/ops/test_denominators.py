"""Denominators of losses, for every operator that takes a denominator. A number must be finite and above 0, otherwise
it is an error. A 0 in an array gives a loss and gradients of 0, whatever the terms hold. A negative, subnormal,
infinite or NaN element gives NaN. Neither waits. DenominatorStatus reports which case it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from rl_kernel_native import PolicySpec

torch = pytest.importorskip("torch")

Call = Callable[[Any, str, float], tuple[Any, Any]]


def policy(spec: PolicySpec, **more: float) -> Call:
    def call(denominator: Any, device: str, bad: float) -> tuple[Any, Any]:
        x = torch.tensor([[-1.0, bad, -0.5], [-0.25, -2.0, -1.0]], device=device, requires_grad=True)
        old = torch.full_like(x, -1.1)
        needed = {"ref_logprob": spec.needs_ref, "rollout_logprob": spec.needs_rollout}
        given: dict[str, Any] = {name: old - 0.1 for name, wanted in needed.items() if wanted}
        given |= {name: torch.full_like(x, value) for name, value in more.items()}
        advantage = torch.tensor([1.0, -1.0], device=device)
        loss = rk.policy_loss(x, old, advantage, torch.ones_like(x), spec=spec, denominator=denominator, **given).loss
        return loss, x

    return call


def value(**how: Any) -> Call:
    def call(denominator: Any, device: str, bad: float) -> tuple[Any, Any]:
        x = torch.tensor([[1.0, bad, -0.5]], device=device, requires_grad=True)
        old = None if how["clip"] is None else x.detach() * 0.9
        return rk.value_loss(x, old, torch.ones_like(x), denominator=denominator, **how).loss, x

    return call


def cross_entropy(denominator: Any, device: str, bad: float) -> tuple[Any, Any]:
    # A GPU multiplies bfloat16 only, the CPU also float32.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.linspace(-1.0, 1.0, 24, device=device).reshape(3, 8).to(dtype, copy=True)
    hidden[1, 2] = bad
    hidden.requires_grad_()
    weight = torch.linspace(-1.0, 1.0, 40, device=device).reshape(5, 8).to(hidden.dtype)
    target = torch.tensor([0, 4, 2], device=device)
    return rk.linear_cross_entropy(hidden, weight, target, denominator=denominator), hidden


CALLS: dict[str, Call] = {
    "policy_loss": policy(PolicySpec()),
    "policy_loss, KL": policy(PolicySpec(kl="k3", kl_coef=0.1)),
    "policy_loss, entropy": policy(PolicySpec(entropy_coef=0.01), entropy=0.5),
    "policy_loss, sequence": policy(PolicySpec(level="sequence", aggregation="seq-mean-token-mean")),
    "policy_loss, dro": policy(PolicySpec(clip="dro", dro_beta=0.1)),
    "value_loss": value(clip=None),
    "value_loss, clip": value(clip=0.2),
    "value_loss, huber": value(clip=0.2, loss_type="huber"),
    "linear_cross_entropy": cross_entropy,
}
NORMAL = float(np.finfo(np.float32).tiny)  # the smallest number whose inverse is finite in any case
BELOW_NORMAL = float(np.nextafter(np.float32(NORMAL), np.float32(0)))
BAD_TERMS = (-1.0, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("bad", BAD_TERMS, ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_an_element_of_0_gives_0_whatever_the_terms_hold(dtype: Any, name: str, bad: float, device: str) -> None:
    loss, x = CALLS[name](torch.zeros((), dtype=dtype, device=device), device, bad)
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any(), x.grad


@pytest.mark.parametrize("wrong", [-3.0, 1e-45, 1e-40, BELOW_NORMAL, -1e-45, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", CALLS)
def test_an_element_that_is_no_divisor_gives_nan(name: str, wrong: float, device: str) -> None:
    loss, x = CALLS[name](torch.tensor([wrong], device=device), device, -1.0)
    assert math.isnan(loss.item())
    loss.backward()
    assert x.grad.isnan().any()


@pytest.mark.parametrize("wrong", [0, 0.0, -0.0, -3, math.inf, math.nan, 1e-50, 1e39, np.float64(-1), np.int64(0)])
@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_is_no_divisor_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match="denominator: expected a finite number > 0, got"):
        CALLS[name](wrong, "cpu", -1.0)


STATUS = {
    7.0: 0, NORMAL: 0, BELOW_NORMAL: 2, 1e-45: 2, -1e-45: 2, 3e38: 0, 0.0: 1, -3.0: 2, math.inf: 2, -math.inf: 2,
    math.nan: 2,
}  # fmt: skip


@pytest.mark.parametrize("value", STATUS, ids=str)
def test_a_status_says_what_a_loss_is_by_its_denominator(value: float, device: str) -> None:
    """Tested for an element on its device, and for the metrics of losses, which hold the denominator that was used."""
    of = torch.tensor(value, device=device)
    x = torch.full((1, 2), -1.0, device=device)
    found = [rk.DenominatorStatus.of(of)]
    found += [
        rk.policy_loss(x, x, x, x, spec=PolicySpec(), denominator=of).metrics.denominator_status,
        rk.value_loss(x, None, x, denominator=of).metrics.denominator_status,
    ]
    for status in found:
        assert status.dtype == torch.int32
        assert status.device == x.device
        assert status.item() == STATUS[value]
    for array in (np.float32(value), np.float32([value])):
        status = rk.DenominatorStatus.of(array)
        assert status.dtype == np.int32
        assert status.item() == STATUS[value]
    loss = rk.policy_loss(x, x, x, x, spec=PolicySpec(), denominator=of).loss
    assert bool(loss.isnan()) == (STATUS[value] == rk.DenominatorStatus.NOT_A_DIVISOR)
    assert STATUS[value] != rk.DenominatorStatus.ZERO or not loss.any()


def test_metrics_without_a_denominator_have_no_status_of_it() -> None:
    with pytest.raises(AttributeError, match="has no 'denominator_status'"):
        _ = rk.mismatch_metrics(np.zeros(3, np.float32), np.zeros(3, np.float32)).denominator_status


@pytest.mark.parametrize("name", CALLS)
def test_a_number_and_an_element_have_the_same_bits(name: str, device: str) -> None:
    (loss, x), (other, y) = (CALLS[name](d, device, -1.0) for d in (7, torch.tensor(7.0, device=device)))
    (loss + other).backward()
    assert loss.item() == other.item()
    assert torch.equal(x.grad, y.grad)
