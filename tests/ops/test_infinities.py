"""Infinite and NaN values of every operand of every objective. docs/objectives/infinities.md gives the answers, row by
row.

`python tests/ops/test_infinities.py` prints these rows.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native import PolicySpec

PAGE = Path(__file__).parents[2] / "docs" / "objectives" / "infinities.md"
VALUES = (-math.inf, math.inf, math.nan)
# One token, or one pair: the finite values of its operands.
TOKEN = {
    "logprob": -1.0, "old_logprob": -1.2, "ref_logprob": -1.1, "rollout_logprob": -1.3, "advantage": 1.0,
    "entropy": 0.5, "selected": 1.0, "importance_weight": 0.5,
}  # fmt: skip
ONE = torch.ones(1, 1)


def row(x: float) -> torch.Tensor:
    return torch.tensor([[x]])


def policy(spec: PolicySpec, **of: float) -> tuple[float, ...]:
    a = {k: row(x) for k, x in of.items()}
    more = {"ref_logprob": spec.needs_ref, "rollout_logprob": spec.needs_rollout, "selected": spec.needs_selected}
    given: dict[str, Any] = {k: a[k] for k, wanted in more.items() if wanted}
    if spec.importance == "given":
        given["importance_weight"] = a["importance_weight"]
    x = a["logprob"].requires_grad_()
    found = rk.policy_loss(x, a["old_logprob"], a["advantage"], ONE, spec=spec, entropy=a["entropy"], **given)
    found.loss.backward()
    assert x.grad is not None
    return found.loss.item(), x.grad.item()


def operands_of(spec: PolicySpec) -> list[str]:
    found = ["logprob", "old_logprob", "advantage", "entropy"]
    found += ["ref_logprob"] * spec.needs_ref + ["rollout_logprob"] * spec.needs_rollout
    return found + ["importance_weight"] * (spec.importance == "given")


def kl(**of: Any) -> tuple[float, ...]:
    how: dict[str, Any] = {k: x for k, x in of.items() if k not in TOKEN}
    x = row(of["logprob"]).requires_grad_()
    how |= {k: row(of[k]) for k in ("old_logprob", "importance_weight") if k in of}
    found = rk.kl(x, row(of["ref_logprob"]), **how)
    found.sum().backward()
    assert x.grad is not None
    return found.item(), x.grad.item()


def value(clip: float | None, **of: float) -> tuple[float, ...]:
    x = row(of["value"]).requires_grad_()
    found = rk.value_loss(x, None if clip is None else row(of["old_value"]), row(of["returns"]), ONE, clip=clip)
    found.loss.backward()
    assert x.grad is not None
    return found.loss.item(), x.grad.item()


def explained(**of: float) -> tuple[float, ...]:
    """The metric of three tokens, since one token has no variance."""
    value, returns = (torch.tensor([[of[k], 0.5, -1.0]]) for k in ("value", "returns"))
    return (float(rk.value_loss(value, None, returns, clip=None).metrics.explained_variance),)


def weight(level: str, mode: str, rollout_nan: str = "nan", **of: float) -> tuple[float, ...]:
    found = rk.importance_weights(
        row(of["logprob"]), row(of["rollout_logprob"]), ONE, level=level, mode=mode, upper=2.0,
        rejection={"token_k3": 1.0}, rollout_nan=rollout_nan,
    )  # fmt: skip
    return found.weights.item(), found.mask.item()


def mismatch(rollout_nan: str = "nan", **of: float) -> tuple[float, ...]:
    a, b = row(of["logprob"]), row(of["rollout_logprob"])
    found = rk.mismatch_metrics(a, b, ONE, rollout_nan=rollout_nan).asdict()
    return found["kl"], found["k3"], found["ratio_mean"]


def reward(estimator: str, limit: float | None, **of: float) -> tuple[float, ...]:
    found = rk.scatter_rewards(
        torch.tensor([of["reward"]]), ONE, logprob=row(of["logprob"]), ref_logprob=row(of["ref_logprob"]), kl_coef=0.1,
        kl_estimator=estimator, kl_clamp=limit,
    )  # fmt: skip
    return (found.rewards.item(),)


def pair(kind: str, **of: float) -> tuple[float, ...]:
    a, b, c, d = (torch.tensor([of[k]]) for k in ("chosen", "rejected", "ref_chosen", "ref_rejected"))
    free = kind in ("simpo", "alphapo", "orpo", "cpo")
    more: dict[str, Any] = (
        {"alpha": 0.25} if kind == "alphapo" else {"label_smoothing": 0.1} if kind == "exo_pair" else {}
    )
    if kind == "sigmoid_norm":
        more = {"chosen_count": torch.tensor([2]), "rejected_count": torch.tensor([3])}
    a.requires_grad_()
    found = rk.preference_loss(a, b, None if free else c, None if free else d, kind=kind, **more)
    found.losses.sum().backward()
    assert a.grad is not None
    return found.losses.sum().item(), a.grad.item()


def calls() -> dict[tuple[str, str], Any]:
    """(call, operand) -> a function of that operand; the other operands are finite."""
    found: dict[tuple[str, str], Any] = {}

    def add(name: str, call: Any, numbers: dict[str, Any], operands: Any) -> None:
        for operand in operands:
            found[name, operand] = lambda x, call=call, numbers=numbers, operand=operand: call(
                **{**numbers, operand: x}
            )

    s = PolicySpec
    specs = {
        "ppo": s(), "ppo, dual_clip": s(dual_clip=3.0), "ppo, log_ratio_clamp": s(log_ratio_clamp=20.0),
        "ppo, sequence": s(level="sequence"), "ppo, geometric": s(level="geometric"), "cispo": s(clip="cispo"),
        "none": s(clip="none"), "sapo": s(clip="sapo"),
        "gmpo": s(clip="gmpo", level="geometric", aggregation="seq-mean-token-mean"),
        "vespo": s(clip="vespo", level="sequence"), "dro": s(clip="dro", dro_beta=0.5), "kl_cov": s(clip="kl_cov"),
        "importance token": s(importance="token"), "importance mask": s(importance="token", importance_mode="mask"),
        "importance sequence": s(importance="sequence"), "importance given": s(importance="given"),
        "importance token, neutral": s(importance="token", rollout_nan="neutral"),
        "importance sequence, neutral": s(importance="sequence", rollout_nan="neutral"),
        "gate, neutral": s(gate=(0.5, 2.0), rollout_nan="neutral"),
        "gate": s(gate=(0.5, 2.0)), "drop_above": s(drop_above=0.1), "entropy_coef": s(entropy_coef=0.1),
    }  # fmt: skip
    for k in ("k1", "k2", "k3", "abs"):
        specs[f"kl {k}"] = s(kl=k, kl_coef=0.1)
        specs[f"kl {k}, kl_times_ratio, sequence"] = s(kl=k, kl_coef=0.1, kl_times_ratio=True, level="sequence")
    specs["kl k3, kl_coef 0"] = s(kl="k3")
    specs["kl k3, kl_clamp"] = s(kl="k3", kl_coef=0.1, kl_clamp=10.0)
    specs["kl k3, kl_times_ratio"] = s(kl="k3", kl_coef=0.1, kl_times_ratio=True)
    specs["kl k3, kl_ratio_of_token"] = s(
        kl="k3", kl_coef=0.1, kl_times_ratio=True, kl_ratio_of_token=True, level="sequence"
    )
    specs["kl k3, kl_straight_through"] = s(kl="k3", kl_coef=0.1, kl_straight_through=True, kl_gradient_ratio_max=5.0)
    for name, spec in specs.items():
        named = operands_of(spec)
        for sign, advantage in (("A > 0", 1.0), ("A < 0", -1.0)):
            numbers = {**TOKEN, "advantage": advantage}
            own = [x for x in named if x != "advantage" or advantage > 0]
            if spec.rollout_nan == "neutral":
                own = ["rollout_logprob"]
            if name.startswith("kl k") and advantage > 0:
                own = ["logprob", "old_logprob", "ref_logprob"]
            elif name.startswith("kl k"):
                continue
            add(f"policy_loss {name}, {sign}", lambda spec=spec, **of: policy(spec, **of), numbers, own)
    # Another operand makes a factor of the advantage 0: the ratio, its slope, a weight, or logprob itself.
    zeros = {
        "ppo, r = 0": (s(), {"logprob": -math.inf}),
        "ppo, dual_clip, r = 0": (s(dual_clip=3.0), {"logprob": -math.inf}),
        "ppo, log_ratio_clamp, cut": (s(log_ratio_clamp=20.0), {"old_logprob": -100.0}),
        "ppo, delta, cut": (s(delta=2.0), {"old_logprob": -3.0}),
        "ppo, sequence, r = 0": (s(level="sequence"), {"logprob": -math.inf}),
        "ppo, sequence, weight 0": (
            s(level="sequence", importance="token", importance_mode="mask"), {"rollout_logprob": -9.0},
        ),
        "cispo, r = 0": (s(clip="cispo", epsilon_low=None), {"logprob": -math.inf}),
        "sapo, r = inf": (s(clip="sapo"), {"old_logprob": -math.inf}),
        "gmpo, r = 0": (specs["gmpo"], {"logprob": -math.inf}),
        "vespo, weight 0": (specs["vespo"], {"logprob": math.inf}),
        "dro, logprob 0": (specs["dro"], {"logprob": 0.0}),
    }  # fmt: skip
    for name, (spec, numbers) in zeros.items():
        add(f"policy_loss {name}", functools.partial(policy, spec), {**TOKEN, **numbers}, ["advantage"])
    two = {k: TOKEN[k] for k in ("logprob", "ref_logprob")}
    for k in ("k1", "k2", "k3", "abs"):
        for text, how in {
            "": {}, ", clamp": {"clamp": 10.0}, ", input_clamp": {"input_clamp": 20.0},
            ", straight_through": {"straight_through": True, "clamp": 10.0},
        }.items():  # fmt: skip
            add(f"kl {k}{text}", kl, {**two, "estimator": k, **how}, two)
        for other in ("old_logprob", "importance_weight"):
            three = {**two, other: TOKEN[other]}
            add(f"kl {k}, {other}", kl, {**three, "estimator": k}, three)
    for clip in (None, 0.2):
        numbers = {"value": 1.0, "returns": 2.0, **({} if clip is None else {"old_value": 0.5})}
        add(f"value_loss clip {clip}", lambda clip=clip, **of: value(clip, **of), numbers, numbers)
    numbers = {"value": 1.0, "returns": 2.0}
    add("value_loss explained_variance", explained, numbers, numbers)
    rollout = {k: TOKEN[k] for k in ("logprob", "rollout_logprob")}
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "mask"):
            add(
                f"importance_weights {level} {mode}", lambda level=level, mode=mode, **of: weight(level, mode, **of),
                rollout, rollout,
            )  # fmt: skip
        neutral = functools.partial(weight, level, "truncate", "neutral")
        add(f"importance_weights {level}, neutral", neutral, rollout, ["rollout_logprob"])
    add("mismatch_metrics", mismatch, rollout, rollout)
    add("mismatch_metrics, neutral", functools.partial(mismatch, "neutral"), rollout, ["rollout_logprob"])
    for k in ("k1", "k2", "k3", "abs"):
        for limit in (None, 10.0):
            numbers = {**two, "reward": 1.0}
            operands = numbers if k == "k1" else two
            text = f"scatter_rewards {k}{'' if limit is None else ', kl_clamp'}"
            add(text, lambda k=k, limit=limit, **of: reward(k, limit, **of), numbers, operands)
    sides = {"chosen": -1.0, "rejected": -2.0, "ref_chosen": -1.1, "ref_rejected": -1.9}
    for kind in (
        "dpo", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
        "discopop", "sigmoid_norm", "cpo", "simpo", "alphapo", "orpo", "kto",
    ):  # fmt: skip
        free = kind in ("simpo", "alphapo", "orpo", "cpo")
        kept = [x for x in sides if not (free and x.startswith("ref"))]
        add(f"preference_loss {kind}", lambda kind=kind, **of: pair(kind, **of), sides, kept)
    return found


CALLS = calls()


def said(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{x + 0.0:.3g}" for x in numbers)


def rows() -> dict[tuple[str, str], list[str]]:
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("`"):
            found[cells[0], cells[1].strip("`")] = cells[2:]
    return found


def test_the_page_has_every_call_and_operand() -> None:
    assert sorted(rows()) == sorted(CALLS)


@pytest.mark.parametrize("call", CALLS, ids=" of ".join)
def test_it_is_what_the_page_says(call: tuple[str, str]) -> None:
    assert [said(CALLS[call](x)) for x in VALUES] == rows()[call]


LIMITED = [c for c in CALLS if "clamp" in c[0] and c[1] == "ref_logprob" and "straight" not in c[0]]


@pytest.mark.parametrize("call", LIMITED, ids=" of ".join)
def test_a_limit_holds_for_infinities_as_for_large_numbers(call: tuple[str, str]) -> None:
    """A limit is applied before anything infinite is formed, so -Inf gives the result of -1e30, without a NaN."""
    for far, large in ((-math.inf, -1e30), (math.inf, 1e30)):
        assert CALLS[call](far) == CALLS[call](large)


RNG = torch.Generator().manual_seed(3)
X, Y = (-torch.rand(4, 37, generator=RNG) for _ in range(2))
LOST = torch.rand(4, 37, generator=RNG) < 0.3
WITH_NAN, AS_TRAINER = Y.masked_fill(LOST, math.nan), torch.where(LOST, X, Y)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_neutral_token_has_the_bits_of_one_that_the_trainer_agrees_with(level: str) -> None:
    how: dict[str, Any] = {"level": level, "upper": 2.0, "rejection": {"seq_mean_k3": 0.5}, "veto": 0.1}
    neutral = rk.importance_weights(X, WITH_NAN, **how, rollout_nan="neutral", return_metrics=True)
    want = rk.importance_weights(X, AS_TRAINER, **how, return_metrics=True)
    assert torch.equal(neutral.weights, want.weights)
    assert torch.equal(neutral.mask, want.mask)
    assert torch.equal(neutral.metrics.vector, want.metrics.vector)
    assert rk.importance_weights(X, WITH_NAN, **how).weights.isnan().any()
    reference = rk.importance_weights_reference(X.numpy(), WITH_NAN.numpy(), **how, rollout_nan="neutral")
    torch.testing.assert_close(neutral.weights.double(), torch.from_numpy(reference["weights"]), rtol=1e-5, atol=1e-6)


def test_metrics_of_neutral_tokens_count_them() -> None:
    neutral = rk.mismatch_metrics(X, WITH_NAN, rollout_nan="neutral").asdict()
    want = rk.mismatch_metrics(X, AS_TRAINER).asdict()
    share = float(LOST.float().mean())
    assert neutral.pop("nonfinite_fraction") == pytest.approx(share)
    assert neutral.pop("differing_fraction") == 1.0
    assert neutral == {name: want[name] for name in neutral}
    reference = rk.mismatch_metrics_reference(X.numpy(), WITH_NAN.numpy(), rollout_nan="neutral")
    assert reference["nonfinite_fraction"] == pytest.approx(share)
    assert neutral["k3"] == pytest.approx(reference["k3"], rel=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        {"importance": "token"},
        {"importance": "token", "importance_of": "current"},
        {"importance": "geometric", "importance_mode": "mask"},
        {"gate": (0.9, 1.2)},
        {"clip": "vespo", "level": "sequence", "importance": "token"},
    ],
)
def test_policy_loss_of_neutral_tokens(how: dict[str, Any]) -> None:
    """The rollout's log-probability of a neutral token is taken from the policy that its weight refers to."""
    own, old = X, X + 0.1
    as_own = torch.where(LOST, own if how.get("importance_of") == "current" else old, Y)
    found = []
    for rollout, more in ((WITH_NAN, {"rollout_nan": "neutral"}), (as_own, {})):
        x = own.clone().requires_grad_()
        spec = PolicySpec(**how, **more)
        loss = rk.policy_loss(x, old, Y, torch.ones(4, 37), spec=spec, rollout_logprob=rollout).loss
        loss.backward()
        found.append((loss.item(), x.grad))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    arrays = [a.numpy() for a in (own, old, Y)]
    spec = PolicySpec(**how, rollout_nan="neutral")
    want = rk.policy_loss_reference(*arrays, LOST.numpy() * 0 + 1, spec=spec, rollout_logprob=WITH_NAN.numpy())
    assert found[0][0] == pytest.approx(float(want["loss"]), rel=1e-5)


def test_weights_that_are_given_have_no_neutral_form() -> None:
    with pytest.raises(ValueError, match=r'^rollout_nan: expected "nan" with importance="given", got .neutral.'):
        PolicySpec(importance="given", rollout_nan="neutral")
    with pytest.raises(ValueError, match=r'^rollout_nan: expected "nan", "neutral", got 1'):
        rk.importance_weights(X, Y, upper=2.0, rollout_nan=1)  # type: ignore[arg-type]


def test_logits_behind_a_filtered_token_keep_finite_gradients() -> None:
    """A target at -Inf, as top-k leaves it, has a limited KL without slope, and the row's logits have finite
    gradients."""
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = -math.inf
    logits.requires_grad_()
    logprob = rk.logprob(logits, torch.tensor([2, 4]))[None]
    ref = torch.full((1, 2), -2.0)
    for k in ("k1", "k2", "k3", "abs"):
        spec = PolicySpec(kl=k, kl_coef=0.01, kl_clamp=10.0, log_ratio_clamp=20.0)
        found = rk.policy_loss(logprob, ref, torch.tensor([1.0]), torch.ones(1, 2), spec=spec, ref_logprob=ref)
        (gradient,) = torch.autograd.grad(found.loss, logits, retain_graph=True)
        assert found.loss.isfinite()
        assert gradient.isfinite().all()


if __name__ == "__main__":
    for (name, operand), call in CALLS.items():
        print(f"| {name} | `{operand}` | " + " | ".join(said(call(x)) for x in VALUES) + " |")
