"""Counts of 0 and denominators: one rule for every operator that divides.

A Python number must be finite and above 0, otherwise it is a ValueError. An element on the device makes no call wait.
A denominator of 0 gives loss and gradients of 0; a negative, subnormal, infinite or NaN one gives NaN. Weights follow
the same rule, except that a 0 is valid.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native import PolicySpec

RANDOM = np.random.default_rng(4)
LOGPROB = RANDOM.normal(-1, 0.3, (3, 5)).astype(np.float32)
HIDDEN, WEIGHT = (RANDOM.normal(0, 1, shape).astype(np.float32) for shape in ((4, 8), (16, 8)))
TOKENS = {"some": np.ones((3, 5), bool), "none": np.zeros((3, 5), bool)}
# name -> the loss and its gradients by (denominator, mask), as torch tensors or NumPy arrays
Found = tuple[Any, list[Any]]


def policy(denominator: Any, mask: Any, **how: Any) -> Found:
    x = torch.from_numpy(LOGPROB.copy()).requires_grad_()
    spec = PolicySpec(kl="k3", kl_coef=0.1, **how)
    found = rk.policy_loss(
        x, torch.from_numpy(LOGPROB - 0.1), torch.tensor([1.0, -1.0, 2.0]), torch.from_numpy(mask), spec=spec,
        ref_logprob=torch.from_numpy(LOGPROB + 0.2), denominator=denominator,
    )  # fmt: skip
    found.loss.backward()
    return found.loss, [x.grad]


def policy_numpy(denominator: Any, mask: Any) -> Found:
    found = rk.policy_loss_and_grad(
        LOGPROB, LOGPROB - 0.1, np.array([1.0, -1.0, 2.0], np.float32), mask, spec=PolicySpec(), denominator=denominator
    )
    return found.loss, [found.d_logprob]


def value(denominator: Any, mask: Any) -> Found:
    x = torch.from_numpy(LOGPROB.copy()).requires_grad_()
    found = rk.value_loss(x, None, torch.zeros(3, 5), torch.from_numpy(mask), denominator=denominator)
    found.loss.backward()
    return found.loss, [x.grad]


def value_numpy(denominator: Any, mask: Any) -> Found:
    found = rk.value_loss_and_grad(LOGPROB, None, 0 * LOGPROB, mask, denominator=denominator)
    return found.loss, [found.d_value]


def target(mask: Any) -> Any:
    return np.where(mask.reshape(-1)[:4], np.arange(4), -100)


def cross_entropy(denominator: Any, mask: Any, **how: Any) -> Found:
    h, w = (torch.from_numpy(x.copy()).requires_grad_() for x in (HIDDEN, WEIGHT))
    loss = rk.linear_cross_entropy(h, w, torch.from_numpy(target(mask)), denominator=denominator, **how)
    loss.backward()
    return loss.detach(), [h.grad, w.grad]


def cross_entropy_numpy(denominator: Any, mask: Any) -> Found:
    return rk.linear_cross_entropy(HIDDEN, WEIGHT, target(mask), denominator=denominator), []


DIVIDES: dict[str, Any] = {
    "policy_loss": policy,
    "policy_loss, sequences": lambda d, m: policy(d, m, aggregation="seq-mean-token-mean"),
    "policy_loss, constant": lambda d, m: policy(d, m, aggregation="constant"),
    "policy_loss, a sequence's ratio": lambda d, m: policy(d, m, level="geometric"),
    "policy_loss, weights": lambda d, m: policy(d, m, clip="cispo"),
    "policy_loss, NumPy": policy_numpy,
    "value_loss": value,
    "value_loss, NumPy": value_numpy,
    "linear_cross_entropy": cross_entropy,
    "linear_cross_entropy, z-loss": lambda d, m: cross_entropy(d, m, z_loss=0.1),
    "linear_cross_entropy, NumPy": cross_entropy_numpy,
}


def element(name: str, x: float) -> Any:
    return np.array([x], np.float32) if name.endswith("NumPy") else torch.tensor([x])


def arrays_of(found: Found) -> list[Any]:
    return [np.asarray(a.detach() if isinstance(a, torch.Tensor) else a) for a in (found[0], *found[1])]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", DIVIDES)
def test_an_elements_zero_is_a_loss_of_zero(name: str, tokens: str) -> None:
    for array in arrays_of(DIVIDES[name](element(name, 0.0), TOKENS[tokens])):
        assert not array.any()


@pytest.mark.parametrize("x", [-3.0, 1e-40, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("name", DIVIDES)
def test_an_element_that_counts_nothing_is_nan(name: str, x: float) -> None:
    found = arrays_of(DIVIDES[name](element(name, x), TOKENS["some"]))
    assert np.isnan(found[0])
    assert all(np.isnan(gradient).any() for gradient in found[1:])


@pytest.mark.parametrize("name", DIVIDES)
def test_an_elements_number_has_the_bits_of_the_number(name: str) -> None:
    for array, number in zip(
        arrays_of(DIVIDES[name](element(name, 7.0), TOKENS["some"])),
        arrays_of(DIVIDES[name](7.0, TOKENS["some"])), strict=True,
    ):  # fmt: skip
        assert array.tobytes() == number.tobytes()


@pytest.mark.parametrize("x", [0, 0.0, -3, math.inf, -math.inf, math.nan, 1e-60])
@pytest.mark.parametrize("name", DIVIDES)
def test_a_number_is_finite_and_above_zero(name: str, x: float) -> None:
    with pytest.raises(ValueError, match="denominator: expected a finite number > 0"):
        DIVIDES[name](x, TOKENS["some"])


@pytest.mark.parametrize("name", DIVIDES)
def test_no_tokens_are_a_loss_of_zero(name: str) -> None:
    denominators = (5.0,) if "constant" in name else (None, 5.0)
    for denominator in denominators:
        for array in arrays_of(DIVIDES[name](denominator, TOKENS["none"])):
            assert not array.any()


KINDS = (
    "dpo", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm", "cpo", "simpo", "alphapo", "orpo", "kto",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(0, 0), (3, 0), (0, 3)])
def test_a_pair_without_tokens_is_finite(kind: str, counts: tuple[int, int]) -> None:
    """A rank's padding pairs: sums over no tokens."""
    n = [torch.tensor([2, count]) for count in counts]
    a, b = (torch.tensor([-1.5, -2.0 if count else 0.0]).requires_grad_() for count in counts)
    more: dict[str, Any] = (
        {"alpha": 0.25} if kind == "alphapo" else {"label_smoothing": 0.1} if kind == "exo_pair" else {}
    )
    if kind in ("ipo", "sigmoid_norm", "simpo", "alphapo", "orpo"):
        more |= {"chosen_count": n[0], "rejected_count": n[1]}
    zero = None if kind in ("cpo", "simpo", "alphapo", "orpo") else torch.zeros(2)
    found = rk.preference_loss(a, b, zero, zero, kind=kind, **more)
    found.losses.mean().backward()
    assert found.losses.isfinite().all()
    for x in (a, b):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def combined(lagrange: Any, **how: Any) -> Any:
    ones = torch.ones(1, 3)
    return rk.scatter_rewards(torch.tensor([2.0]), ones, cost=torch.tensor([1.0]), lagrange=lagrange, **how).combined


@pytest.mark.parametrize("x", [-1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_lagrange_multiplier_is_finite_and_not_negative(x: float, normalize: bool) -> None:
    how = {"normalize_lagrange": normalize}
    assert combined(torch.tensor([x]), **how).isnan().all()
    with pytest.raises(ValueError, match="lagrange: expected a finite number >= 0"):
        combined(x, **how)


@pytest.mark.parametrize("x", [0.0, 0.5])
def test_a_lagrange_multiplier_of_zero_is_one(x: float) -> None:
    assert combined(torch.tensor([x])).tolist() == combined(x).tolist() == [[0.0, 0.0, 2.0 - x]]


def test_a_lagrange_multiplier_of_zero_takes_an_infinite_cost_out() -> None:
    cost = torch.tensor([math.inf])
    found = rk.scatter_rewards(torch.tensor([2.0]), torch.ones(1, 3), cost=cost, lagrange=torch.tensor([0.0]))
    assert found.combined.tolist() == [[0.0, 0.0, 2.0]]
