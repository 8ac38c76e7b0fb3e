"""Log-probabilities far apart: products of exponentials that stay in float32 although their factors do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native import PolicySpec, presets

FAR = (1.0, 10.0, 15.0, 17.0, 18.0, 20.0, 30.0, 60.0, 79.0, 81.0, 89.0, 150.0, 1000.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def near(got: float, want: float) -> bool:
    """Equal up to float32 rounding of arguments of up to 1000; an exponential multiplies their error."""
    return got == want or abs(got - want) <= 1e-4 * abs(want) + 1e-30


def policy(spec: PolicySpec, ell: float, o: float, f: float) -> tuple[float, float]:
    x = tensor(ell).requires_grad_()
    found = rk.policy_loss(x, tensor(o), tensor(0.0), torch.ones(1, 1), spec=spec, ref_logprob=tensor(f))
    found.loss.backward()
    assert x.grad is not None
    return found.loss.item(), x.grad.item()


def alone(ell: float, o: float, f: float) -> tuple[float, float]:
    x = tensor(ell).requires_grad_()
    found = rk.kl(x, tensor(f), estimator="k3", old_logprob=tensor(o))
    found.sum().backward()
    assert x.grad is not None
    return found.item(), x.grad.item()


SUM: dict[str, Any] = {"aggregation": "token-sum", "kl": "k3", "kl_coef": 1.0, "kl_times_ratio": True}
# Options that multiply k3 by a ratio. For a sequence of one token, the sequence's ratio and its mean are the token's.
TIMES_RATIO: dict[str, Any] = {
    "kl": alone,
    "policy_loss": lambda *x: policy(PolicySpec(**SUM), *x),
    "of a sequence": lambda *x: policy(PolicySpec(level="sequence", **SUM), *x),
    "of a mean": lambda *x: policy(PolicySpec(level="geometric", **SUM), *x),
    "straight through": lambda *x: policy(PolicySpec(level="geometric", straight_through=True, **SUM), *x),
    "sapo": lambda *x: policy(PolicySpec(clip="sapo", **SUM), *x),
    "trl": lambda *x: policy(presets.trl(beta=1.0, loss_type="grpo"), *x),
    "trl, of sequences": lambda *x: policy(
        presets.trl(beta=1.0, loss_type="grpo", importance_sampling_level="sequence"), *x
    ),
    "slime": lambda *x: policy(
        presets.slime(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k3", use_unbiased_kl=True), *x
    ),
}


@pytest.mark.parametrize("name", TIMES_RATIO)
@pytest.mark.parametrize("e", FAR)
def test_k3_times_a_ratio_has_its_gradient_in_closed_form(name: str, e: float) -> None:
    """On policy the gradient is -e for any e: the derivative of r (exp(e) - e - 1) is -e r."""
    value, gradient = TIMES_RATIO[name](-1.0 - e, -1.0 - e, -1.0)
    want = math.expm1(e) - e if e < 88 else math.inf
    assert near(value, want)
    assert near(gradient, -e)


@pytest.mark.parametrize("name", TIMES_RATIO)
@pytest.mark.parametrize(
    ("ell", "o", "f"),
    [
        (-200, -1, -1),
        (-120, -20, -10),
        (-150, -30, -50),
        (-1000, -1, -40),
        (-90, -2, -1),
        (-30, -10, -29),
        (-5, -1, -2),
    ],
)
def test_k3_times_a_ratio_is_one_exponential_off_policy(name: str, ell: float, o: float, f: float) -> None:
    e, r = f - ell, math.exp(ell - o)
    value, gradient = TIMES_RATIO[name](ell, o, f)
    assert near(value, math.exp(f - o) - (1 + e) * r)
    assert near(gradient, -e * r)


def of_weights(spec: PolicySpec, weight: Any = None) -> Any:
    """Gradient and weight of a token whose clip has no slope there; the weight is e^90 before its bounds."""
    x = tensor(-0.5, -1.0).requires_grad_()
    old, rollout = tensor(-1.0, -1.0), tensor(-91.0, -1.0)
    given = {"importance_weight": weight} if weight is not None else {"rollout_logprob": rollout}
    found = rk.policy_loss(x, old, torch.tensor([1.0]), torch.ones(1, 2), spec=spec, **given)
    found.loss.backward()
    assert x.grad is not None
    return x.grad[0]


WEIGHTS: dict[str, PolicySpec] = {
    f"{importance}, {mode}, {high}, {level}": PolicySpec(
        importance=importance, importance_mode=mode, importance_high=high, level=level
    )
    for importance in ("token", "sequence", "geometric") for mode in ("truncate", "mask")
    for high in (None, 2.0) for level in ("token", "sequence", "geometric")
}  # fmt: skip
WEIGHTS["openrlhf"] = presets.openrlhf(is_correction_level="seq")
WEIGHTS["sapo"] = PolicySpec(clip="sapo", importance="token", importance_high=None)


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_slope_times_an_infinite_weight_is_no_slope(name: str) -> None:
    gradient = of_weights(WEIGHTS[name])
    assert not gradient.isnan().any()
    if WEIGHTS[name].level == "token" and WEIGHTS[name].clip == "ppo":
        assert gradient[0] == 0


def test_a_given_weight_that_is_infinite_has_no_slope_to_multiply() -> None:
    assert of_weights(PolicySpec(importance="given"), tensor(math.inf, 1.0))[0] == 0


@pytest.mark.parametrize("ratio", [-5.0, -1.0, 0.0, 1.0, 2.0, 3.0, 3.5])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_sapos_slope_keeps_its_digits_on_both_sides(ratio: float, level: str) -> None:
    """1 - sigmoid(t) has no digits from t = 17 on, so the slope is 4 s(t) s(-t) r."""
    x = tensor(ratio - 1.0).requires_grad_()
    spec = PolicySpec(clip="sapo", level=level, aggregation="token-sum")
    rk.policy_loss(x, tensor(-1.0), torch.tensor([1.0]), torch.ones(1, 1), spec=spec).loss.backward()
    r = math.exp(ratio)
    s = 1 / (1 + math.exp(r - 1))
    assert x.grad is not None
    assert near(x.grad.item(), -4 * s * (1 - s) * r)


def test_gmpos_ratio_and_weights_are_one_exponential() -> None:
    """A mean log-ratio of 95, whose ratio is infinite, and weights of at least 1e-10: their product is finite."""
    x = tensor(-1.0, -1.0).requires_grad_()
    old, rollout = tensor(-96.0, -96.0), tensor(-1.0, -1.0)
    spec = PolicySpec(
        clip="gmpo", level="geometric", epsilon_low=None, epsilon_high=None, importance="token",
        aggregation="seq-mean-token-mean",
    )  # fmt: skip
    found = rk.policy_loss(x, old, torch.tensor([1.0]), torch.ones(1, 2), spec=spec, rollout_logprob=rollout)
    found.loss.backward()
    want = -math.exp(95) * 1e-10
    assert near(found.loss.item(), want)
    assert x.grad is not None
    assert near(x.grad[0, 0].item(), want / 2)


# ---- pairs ----------------------------------------------------------------------------------------------------------


def pair(w: float, ell: float, **how: Any) -> tuple[float, float, float]:
    a, b = (torch.tensor([x], dtype=torch.float32, requires_grad=True) for x in (w, ell))
    found = rk.preference_loss(a, b, **how)
    found.losses.sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    return found.losses.item(), a.grad.item(), b.grad.item()


def orpo(w: float, ell: float) -> tuple[float, float, float]:
    """Computed with 50 digits: -log sigmoid(log odds of w minus log odds of ell), and its slopes."""
    decimal = pytest.importorskip("decimal")
    with decimal.localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -999999, 999999
        a, b = (decimal.Decimal(float(np.float32(x))).exp() for x in (w, ell))
        odds = (a / (1 - a)) / (b / (1 - b))
        slope = 1 / (1 + odds)
        return float((1 + 1 / odds).ln()), float(-slope / (1 - a)), float(slope / (1 - b))


@pytest.mark.parametrize(
    ("w", "ell"),
    [(-1e-3, -2), (-1e-8, -1e-7), (-1e-20, -0.5), (-1e-30, -90), (-2, -1e-8), (-1e-6, -1e-6), (-0.7, -0.69),
     (-100, -90), (-90, -3), (-3, -90), (-1e-38, -1e-38), (-1e-35, -1e-30)],
)  # fmt: skip
def test_orpo_of_nearly_certain_and_of_impossible_answers(w: float, ell: float) -> None:
    got, want = pair(w, ell, kind="orpo", beta=1.0), orpo(w, ell)
    assert got[0] == pytest.approx(want[0], rel=2e-5, abs=1e-37)
    for x, y in zip(got[1:], want[1:], strict=True):
        assert x == pytest.approx(y, rel=2e-5, abs=1e-37)


EMPTY = torch.tensor([0])


@pytest.mark.parametrize(
    ("w", "ell", "counts"), [(0.0, 0.0, True), (0.0, 0.0, False), (-1.5, 0.0, True), (0.0, -1.5, True)]
)
def test_orpo_of_pairs_without_tokens_is_finite_and_has_no_slope(w: float, ell: float, counts: bool) -> None:
    """A side without tokens has no odds: the loss is 0 if counts say so. For two certain answers it is log 2, as for
    every kind."""
    how: dict[str, Any] = {}
    if counts:
        one = torch.tensor([3])
        how = {"chosen_count": one if w else EMPTY, "rejected_count": one if ell else EMPTY}
    want = 0.0 if counts else math.log(2)
    assert pair(w, ell, kind="orpo", beta=1.0, **how) == pytest.approx((want, 0.0, 0.0), rel=1e-6)


@pytest.mark.parametrize(
    ("w", "ell", "want"), [(-0.5, -20.0, 0.0), (-20.0, -25.0, 0.0), (-25.0, -20.0, math.inf), (-20.0, -20.0, None)]
)
def test_alphapo_of_scores_that_overflow(w: float, ell: float, want: float | None) -> None:
    """Rewards of -e^100 / 5 keep the order of the answers, and a pair in the right order has no slope."""
    loss, of_w, of_l = pair(w, ell, kind="alphapo", alpha=5.0, beta=2.0, gamma=0.0)
    assert loss == (math.log(2) if want is None else want) or loss == pytest.approx(math.log(2))
    assert not math.isnan(of_w)
    assert not math.isnan(of_l)
    if want == 0.0:
        assert of_w == of_l == 0


@pytest.mark.parametrize("divergence", ["forward_kl", "alpha_divergence"])
def test_divergences_of_scores_that_overflow(divergence: str) -> None:
    reference = torch.zeros(1)
    how: dict[str, Any] = {"f_alpha": 0.5} if divergence == "alpha_divergence" else {}
    found = pair(-1.0, -200.0, ref_chosen=reference, ref_rejected=reference, f_divergence=divergence, **how)
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert not math.isnan(found[1])
    assert found[2] == 0


@pytest.mark.parametrize("z", [-300.0, -100.0, -88.0, -60.0, -10.0, 0.0, 10.0, 100.0])
@pytest.mark.parametrize("tau", [0.05, 0.5, 1.0, 2.0])
def test_discopop_keeps_its_term_far_below(z: float, tau: float) -> None:
    """exp(-z) sigmoid(z / tau) is 1 at z = -100 and tau 1, although the first factor overflows and the second is 0."""

    def sigmoid(x: float) -> float:
        return math.exp(min(x, 0)) / (1 + math.exp(-abs(x)))

    log_p, q = min(z, 0) - math.log1p(math.exp(-abs(z))), z / tau
    grown = math.exp(min(q, 0) - math.log1p(math.exp(-abs(q))) - z)
    want = -log_p * sigmoid(-q) + grown
    slope = -sigmoid(-z) * sigmoid(-q) - grown + (log_p * sigmoid(q) + grown) * sigmoid(-q) / tau
    zero = torch.zeros(1)
    loss, of_w, of_l = pair(z, 0.0, ref_chosen=zero, ref_rejected=zero, kind="discopop", beta=1.0, tau=tau)
    if want > 3e38:
        assert loss == math.inf
        return
    assert loss == pytest.approx(want, rel=2e-5, abs=1e-12)
    assert of_w == pytest.approx(slope, rel=2e-5, abs=1e-6)
    assert of_l == -of_w


def test_aligned_weights_are_one_exponential() -> None:
    zero = torch.zeros(1)
    loss, of_w, _ = pair(
        0.0, 0.0, ref_chosen=zero, ref_rejected=zero, chosen_aligned=torch.tensor([95.0]),
        rejected_aligned=torch.tensor([-95.0]),
    )  # fmt: skip
    assert loss == pytest.approx(math.log(2))
    assert of_w == pytest.approx(-0.05)
