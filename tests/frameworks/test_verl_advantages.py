"""Compares advantages and KL terms with verl's own functions in float64, if verl is installed (docs/objectives.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import framework_sources
import rl_kernel_native as rk
from cases import beyond
from rl_kernel_native.contract import row

GROUPS, SIZE, T = 5, 4, 23
N = GROUPS * SIZE


@pytest.fixture(scope="module")
def verl() -> Any:
    return framework_sources.verl()


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Each answer has its reward at the last token; some are 0 or equal in a group. The mask has holes."""
    random = np.random.default_rng(4)
    scores = random.normal(0, 1, N).round(1).astype(np.float32)
    scores[:SIZE] = 0.3  # a group without variance
    scores[7] = 0.0
    lengths = random.integers(3, T + 1, N)
    mask = (np.arange(T) < lengths[:, None]) & (random.random((N, T)) < 0.8)
    mask[:, 0] = True
    rewards = np.zeros((N, T), np.float32)
    rewards[np.arange(N), [int(np.nonzero(m)[0][-1]) for m in mask]] = scores
    found = {"scores": scores, "rewards": rewards, "mask": mask, "index": np.arange(N) // SIZE}
    return {k: torch.from_numpy(x) if k != "index" else x for k, x in found.items()}


KINDS = {
    "grpo": ("grpo", "compute_grpo_outcome_advantage", {}),
    "grpo_vectorized": ("grpo", "compute_grpo_vectorized_outcome_advantage", {}),
    "dr_grpo": ("dr_grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", "compute_rloo_outcome_advantage", {}),
    "rloo_vectorized": ("rloo", "compute_rloo_vectorized_outcome_advantage", {}),
    "opo": ("opo", "compute_opo_outcome_advantage", {}),
    "passk": ("passk", "compute_grpo_passk_outcome_advantage", {"config": {}}),
    "gpg": ("gpg", "compute_gpg_outcome_advantage", {"f_norm": 2.0}),
}


@pytest.mark.parametrize("name", KINDS)
def test_advantages_of_groups_are_verls(verl: Any, answers: dict[str, Any], name: str) -> None:
    kind, function, options = KINDS[name]
    mask = answers["mask"].double()
    want = getattr(verl, function)(answers["rewards"].double(), mask, answers["index"], **options)[0]
    more: dict[str, Any] = {"lengths": answers["mask"].sum(1)} if kind == "opo" else {}
    more |= {"f_norm": 2.0} if kind == "gpg" else {}
    got = rk.group_advantage(answers["scores"], group_size=SIZE, kind=kind, **more)
    reference = rk.group_advantage_reference(answers["scores"], group_size=SIZE, kind=kind, **more)
    # A group without variance is exactly 0 here; in verl it is a float64 rounding over 1e-6.
    facts = {"scale": np.maximum(reference["scale"], 1.0)[:, None] * np.ones((1, T))}
    assert not beyond("group_advantage", "advantage", got[:, None] * answers["mask"], want, **facts)


def test_remax_is_verls(verl: Any, answers: dict[str, Any]) -> None:
    baseline = torch.linspace(-1, 1, N)
    want, _ = verl.compute_remax_outcome_advantage(
        answers["rewards"].double(), baseline.double(), answers["mask"].double()
    )
    got = rk.group_advantage(answers["scores"], kind="remax", baseline=baseline)[:, None] * answers["mask"]
    assert not beyond("group_advantage", "advantage", got, want * answers["mask"], scale=3.0)


def assert_whitened(x: Any, off: float, mask: Any, want: torch.Tensor) -> None:
    """Compares ``x`` after whitening; ``x`` has the error ``off``. The error of (x - mean) / std has two parts:
    the errors of x and of the mean, divided by std; and the result times the relative error of std."""
    got = rk.masked_whiten(x, mask, return_stats=True)
    largest = float(want.abs().max())
    allowed = row("masked_whiten", "y").allowed(expected=want.numpy(), largest=largest)
    allowed = allowed + 2 * off / float(got.var) ** 0.5 * (1 + largest)
    assert float(((got.y - want).abs() - torch.as_tensor(allowed)).max()) <= 0


def test_reinforce_plus_plus_with_a_baseline_is_verls(verl: Any, answers: dict[str, Any]) -> None:
    mask = answers["mask"].double()
    want, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        answers["rewards"].double(), mask, answers["index"]
    )
    x = rk.group_advantage(answers["scores"], group_size=SIZE, kind="reinforce_pp_baseline")
    off = float(np.max(row("group_advantage", "advantage").allowed(expected=np.abs(x.numpy()), scale=3.0)))
    assert_whitened(x[:, None].expand(N, T).contiguous(), off, answers["mask"], want * mask)


@pytest.mark.parametrize("weights", [None, [0.3, 2.0]])
def test_gdpo_is_verls(verl: Any, answers: dict[str, Any], weights: Any) -> None:
    """Advantages of each reward, weighted and whitened (docs/objectives.md)."""
    one = answers["scores"] + torch.linspace(0, 1, N)  # every group has variance
    other = one.flip(0).contiguous()
    mask = answers["mask"]
    config = {"gdpo_reward_keys": ["one", "two"], "gdpo_reward_weights": weights}
    full = torch.ones((N, T), dtype=torch.int64)
    want, _ = verl.compute_gdpo_outcome_advantage(
        answers["rewards"], mask.float(), answers["index"], config=config,
        non_tensor_batch={"one": one.numpy(), "two": other.numpy()},
        batch={"prompts": full[:, :1], "attention_mask": torch.cat((full[:, :1], mask.long()), 1)},
    )  # fmt: skip
    w = weights or [1.0, 1.0]
    x = sum(a * rk.group_advantage(s, group_size=SIZE) for a, s in zip(w, (one, other), strict=True))
    got = rk.masked_whiten(x[:, None].expand(N, T).contiguous(), mask)
    # verl computes in float32 here, so this bounds the error of both.
    std = float((x[:, None] * mask)[mask].std())
    off = 2 * float(np.max(row("group_advantage", "advantage").allowed(expected=2.0, scale=2.0))) * sum(w)
    largest = float(want.abs().max())
    allowed = 2 * float(row("masked_whiten", "y").allowed(expected=0.0, largest=largest)) + 2 * off / std * (
        1 + largest
    )
    assert float((got - want).abs().max()) <= allowed


def test_gae_is_verls(verl: Any, answers: dict[str, Any]) -> None:
    values = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (N, T)).astype(np.float32))
    mask = answers["mask"]
    want, returns = verl.compute_gae_advantage_return(
        answers["rewards"].double(), values.double(), mask.double(), 0.99, 0.95
    )
    got = rk.gae(answers["rewards"], values, mask, gamma=0.99, lam=0.95)
    reference = rk.gae_reference(answers["rewards"], values, mask, gamma=0.99, lam=0.95)
    scale = np.maximum.accumulate(reference["scale"][:, ::-1], 1)[:, ::-1]
    assert not beyond("gae", "returns", got.returns * mask, returns * mask, scale=scale)
    off = float(np.max(row("gae", "advantages").allowed(expected=0.0, scale=scale)))
    assert_whitened(got.advantages, off, mask, want * mask)


def test_reinforce_plus_plus_is_verls(verl: Any, answers: dict[str, Any]) -> None:
    mask = answers["mask"].double()
    want, returns = verl.compute_reinforce_plus_plus_outcome_advantage(answers["rewards"].double(), mask, Gamma(0.97))
    got = rk.discounted_returns(answers["rewards"], answers["mask"], gamma=0.97, masked="carry")
    reference = rk.discounted_returns_reference(answers["rewards"], answers["mask"], gamma=0.97, masked="carry")
    scale = np.maximum.accumulate(reference["scale"][:, ::-1], 1)[:, ::-1]
    assert not beyond("discounted_returns", "returns", got * mask, returns * mask, scale=scale)
    off = float(np.max(row("discounted_returns", "returns").allowed(expected=0.0, scale=scale)))
    assert_whitened(got, off, answers["mask"], want * mask)


class Gamma:
    """verl's algorithm configuration; only gamma is read."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma


KL: dict[str, dict[str, Any]] = {
    "kl": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "mse": {"estimator": "k2"},
    "low_var_kl": {"estimator": "k3", "input_clamp": 20.0, "clamp": 10.0},
    "k1+": {"estimator": "k1", "straight_through": True},
    "k3+": {"estimator": "k3", "input_clamp": 20.0, "clamp": 10.0, "straight_through": True},
}


@pytest.mark.parametrize("kind", KL)
def test_kl_terms_and_their_gradients_are_verls(verl: Any, kind: str) -> None:
    random = np.random.default_rng(6)
    x = -torch.from_numpy(np.abs(random.normal(0, 1.5, (N, T))).astype(np.float32))
    ref = x + torch.from_numpy(random.normal(0, 0.3, (N, T)).astype(np.float32))
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    got, want = rk.kl(ours, ref, **KL[kind]), verl.kl_penalty(theirs, ref.double(), kind)
    got.sum().backward()
    want.sum().backward()
    assert theirs.grad is not None
    want = want.detach()
    assert not beyond("kl", "kl", got.detach(), want, largest=float(want.abs().max()))
    assert not beyond("kl", "d_logprob", ours.grad, theirs.grad, largest=float(theirs.grad.abs().max()))
