"""policy_loss: compares random specs with the derivatives of float64 formulas. A draw that PolicySpec refuses is
repeated.

RLK_FUZZ_CASES (300) sets roughly how many cases there are, over all clips."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import TORCH, arrays, keywords, tensors

CASES = int(os.environ.get("RLK_FUZZ_CASES", "300")) // 10

# Values to draw from, for each field; the default of most fields is drawn more often.
CHOICES: dict[str, tuple[Any, ...]] = {
    "level": ("token", "sequence", "geometric"),
    "straight_through": (False, False, True),
    "clip": ("ppo", "ppo", "cispo", "none", "sapo", "gmpo", "vespo", "dro", "clip_cov", "kl_cov", "dppo"),
    "epsilon_low": (0.2, 0.1, None),
    "epsilon_high": (0.2, 0.3, None),
    "dual_clip": (None, 1.5),
    "delta": (None, 1.2),
    "dro_beta": (None, 0.5),
    "log_ratio_clamp": (None, 0.2, (-0.5, 0.1)),
    "kl": (None, "k1", "k2", "k3", "abs"),
    "kl_straight_through": (False, False, True),
    "kl_times_ratio": (False, False, True),
    "kl_ratio_of_token": (False, False, True),
    "kl_gradient_ratio_max": (None, None, 1.1),
    "kl_input_clamp": (None, 0.2),
    "kl_clamp": (None, 0.03),
    "drop_selected": (False, False, True),
    "entropy_coef": (0.0, 0.1),
    "entropy_aggregation": ("loss", "token-mean"),
    "importance": (None, "token", "sequence", "geometric", "given"),
    "importance_mode": ("truncate", "mask"),
    "importance_low": (None, 0.7),
    "importance_high": (1.3, None, 1.05),
    "importance_of": ("old", "current"),
    "gate": (None, None, (0.9, 1.02)),
    "drop_above": (None, None, 0.02),
    "drop_of": ("old", "rollout"),
    "aggregation": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"),
    "count_empty": (False, True),
}
# Options that each kind of ratio term needs.
NEEDS: dict[str, dict[str, Any]] = {
    "gmpo": {"level": "geometric", "straight_through": False, "aggregation": "seq-mean-token-mean"},
    "vespo": {"level": "sequence", "straight_through": False},
}


def draw(chance: random.Random, clip: str) -> rk.PolicySpec:
    while True:
        fields = {name: chance.choice(choices) for name, choices in CHOICES.items()} | {"clip": clip}
        fields |= NEEDS.get(clip, {})
        fields["kl_coef"] = 0.3 if fields["kl"] else 0.0
        try:
            return rk.PolicySpec(**fields)
        except ValueError:
            continue


@pytest.mark.parametrize("clip", dict.fromkeys(CHOICES["clip"]))
def test_loss_and_gradient_are_those_of_float64(clip: str) -> None:
    chance = random.Random(clip)
    for seed in range(CASES):
        spec, a = draw(chance, clip), tensors(arrays(5, 19, seed=seed))
        if spec.level == "sequence":  # far from 1, the sum's rounding is a large part of a ratio
            a["old_logprob"] = a["logprob"] + 0.1 * (a["old_logprob"] - a["logprob"])
        if chance.random() < 0.3:
            a["advantage"] = a["advantage"][:, 0].contiguous()
        more = keywords(spec, a)
        got = rk.policy_loss_and_grad(a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=spec, **more)
        x = a["logprob"].double().requires_grad_()
        reference = rk.policy_loss_reference(
            x, a["old_logprob"], a["advantage"], a["mask"], spec=spec, xp=TORCH, **more
        )
        loss = torch.as_tensor(reference["loss"], dtype=torch.float64)
        want = torch.autograd.grad(loss, x, allow_unused=True)[0] if loss.requires_grad else None
        want = torch.zeros_like(x) if want is None else want
        size = max(1e-3, float(want.abs().sum()), abs(loss.item()))
        assert not beyond("policy_loss", "loss", got.loss, loss.detach(), scale=size), spec
        largest = max(float(want.abs().max()), 1e-3)
        assert not beyond("policy_loss", "d_logprob", got.d_logprob, want, largest=largest), spec
