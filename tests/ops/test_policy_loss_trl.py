"""Presets of TRL: compares loss and gradients with the trainers' own ``_compute_loss``."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import framework_sources
import rl_kernel_native as rk
from framework_losses import B, T, batch, compare
from rl_kernel_native import presets


@pytest.fixture(scope="module")
def trl() -> Any:
    return framework_sources.trl("trl.trainer.grpo_trainer")


TRL = {
    **{kind: {"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    "cispo, high": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sequence": {"importance_sampling_level": "sequence"},
    "sequence grpo": {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.02},
    "sequence luspo": {"importance_sampling_level": "sequence", "loss_type": "luspo", "epsilon": 0.02},
    "sequence sapo": {"importance_sampling_level": "sequence", "loss_type": "sapo"},
    "delta": {"delta": 1.4, "epsilon_high": 0.28},
    "beta": {"beta": 0.04},
    "beta, sequence": {"beta": 0.04, "importance_sampling_level": "sequence"},
    "biased kl": {"beta": 0.04, "use_bias_correction_kl": False},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "entropy": {"entropy_coef": 0.02, "gradient_accumulation_steps": 4},
    "entropy grpo": {"entropy_coef": 0.02, "gradient_accumulation_steps": 4, "loss_type": "grpo"},
}
MODES = [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def trl_trainer(x: torch.Tensor, h: torch.Tensor, **own: Any) -> Any:
    """A trainer with only the attributes that its ``_compute_loss`` reads."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda t: t, gather_for_metrics=lambda t: t, reduce=lambda t, reduction: t,
        pad_across_processes=lambda t, **_: t, sync_gradients=False,
    )  # fmt: skip
    common = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (x, h, None), "aux_loss_enabled": False,
        "model": SimpleNamespace(training=True), "accelerator": accelerator, "beta": 0.0, "top_entropy_quantile": 1.0,
        "_metrics": collections.defaultdict(lambda: collections.defaultdict(list)),
    }  # fmt: skip
    return SimpleNamespace(**common | own)


def trl_inputs(a: dict[str, Any]) -> dict[str, Any]:
    ids = torch.zeros(B, T, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
        "completion_mask": a["mask"].long(), "advantages": a["advantage"], "old_per_token_logps": a["old_logprob"],
        "ref_per_token_logps": a["ref_logprob"], "num_items_in_batch": torch.tensor(150.0),
    }  # fmt: skip


def trl_loss(
    trl: Any, a: dict[str, Any], fields: dict[str, Any], x: torch.Tensor, h: torch.Tensor, weights: Any
) -> Any:
    """TRL's own GRPOTrainer._compute_loss."""
    args = SimpleNamespace(
        use_bias_correction_kl=fields.get("use_bias_correction_kl", True), delta=fields.get("delta"),
        sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
        vespo_lambda_neg=2.0, steps_per_generation=1,
    )  # fmt: skip
    epsilon = fields.get("epsilon", 0.2)
    trainer = trl_trainer(
        x, h, args=args, top_entropy_quantile=fields.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=fields.get("off_policy_mask_threshold"),
        get_high_entropy_mask=lambda *a: trl.GRPOTrainer.get_high_entropy_mask(trainer, *a),
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask, get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        importance_sampling_level=fields.get("importance_sampling_level", "token"), beta=fields.get("beta", 0.0),
        loss_type=fields.get("loss_type", "dapo"), epsilon_low=epsilon,
        epsilon_high=fields.get("epsilon_high", epsilon), use_vllm=weights is not None,
        vllm_importance_sampling_correction=True, max_completion_length=512,
        current_gradient_accumulation_steps=fields.get("gradient_accumulation_steps", 1),
        _entropy_bonus_enabled=fields.get("entropy_coef", 0.0) != 0, entropy_coef=fields.get("entropy_coef", 0.0),
        use_adaptive_entropy=False,
    )  # fmt: skip
    inputs = trl_inputs(a)
    if weights is not None:
        inputs |= {"importance_sampling_ratio": weights, "sampling_per_token_logps": a["rollout_logprob"]}
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TRL)
def test_trl(trl: Any, name: str, mode: str | None, empty: bool) -> None:
    """``empty``: one sequence has no token."""
    fields = dict(TRL[name])
    a = batch(advantage_per_sequence=True)
    if empty:
        a["mask"][3] = False
    if "off_policy_mask_threshold" in fields:
        a["advantage"][0] = -1.5  # this sequence drifted farthest from the old policy and from the rollout's
        drift = (a["rollout_logprob" if mode else "old_logprob"] - a["logprob"]) * a["mask"]
        assert drift[0].sum() / a["mask"][0].sum() > fields["off_policy_mask_threshold"]
    if fields.get("importance_sampling_level") == "sequence" and "epsilon" in fields:
        mean = ((a["logprob"] - a["old_logprob"]) * a["mask"]).sum(1) / a["mask"].sum(1).clamp(min=1)
        epsilon = fields["epsilon"]
        assert torch.where(a["advantage"] > 0, mean.exp() > 1 + epsilon, mean.exp() < 1 - epsilon).any()
    weights, more = None, {}
    if mode is not None:
        if fields.get("loss_type") == "vespo" and mode.startswith("sequence"):
            pytest.skip("TRL refuses VESPO with weights of sequences")
        low, high = (0.85, 1.2) if mode.startswith("token") else (0.6, 1.9)
        difference = (a["old_logprob"] - a["rollout_logprob"]) * a["mask"]
        if mode.startswith("sequence"):
            difference = difference.sum(-1, keepdim=True)
        weights = torch.exp(difference)
        outside = (weights < low) | (weights > high)
        weights = weights.clamp(low, high) if mode.endswith("truncate") else weights.masked_fill(outside, 0.0)
        more = {"rollout_logprob": a["rollout_logprob"]}
        fields |= {
            "use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low,
            "vllm_importance_sampling_clip_max": high,
        }  # fmt: skip
    if fields.get("beta"):
        more["ref_logprob"] = a["ref_logprob"]
    spec = presets.trl(**fields)
    if spec.aggregation == "constant":
        more["denominator"] = 150.0 * fields.get("gradient_accumulation_steps", 1)
    compare(a, spec, lambda x, h: trl_loss(trl, a, fields, x, h, weights), **more)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("drift", [1.0, -1.0])
def test_trl_vespo_beyond_its_clamps(trl: Any, drift: float, advantage: float) -> None:
    """Sequence log-ratios above 20 have the weight at 20; log-ratios below ln(1e-8) have the weight at ln(1e-8)."""
    a = batch(advantage_per_sequence=True)
    a["old_logprob"][:3] = a["logprob"][:3] - drift
    a["advantage"][:3] = advantage
    sums = ((a["logprob"] - a["old_logprob"]) * a["mask"]).sum(1)
    assert (sums.abs() > 20).any()
    fields = {"loss_type": "vespo"}
    compare(a, presets.trl(**fields), lambda x, h: trl_loss(trl, a, fields, x, h, None), denominator=150.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "sapo", "cispo", "luspo"])
def test_trl_with_a_quantile_of_entropies(trl: Any, loss_type: str, level: str) -> None:
    """TRL's mask of uncertain tokens: the other tokens have no policy term, but count in lengths."""
    a = batch(advantage_per_sequence=True)
    fields: dict[str, Any] = {
        "loss_type": loss_type, "beta": 0.04, "top_entropy_quantile": 0.2, "importance_sampling_level": level,
    }  # fmt: skip
    uncertain = rk.entropy_mask(a["entropy"], a["mask"], top_quantile=0.2)
    assert 0 < int(uncertain.sum()) < int(a["mask"].sum()) / 4
    more: dict[str, Any] = {"selected": 1 - uncertain, "ref_logprob": a["ref_logprob"]}
    if loss_type in ("dapo", "cispo"):
        more["denominator"] = 150.0
    spec = presets.trl(**fields)
    compare(a, spec, lambda x, h: trl_loss(trl, a, fields, x, h, None), **more)
    with pytest.raises(ValueError, match=r"^entropy_coef: expected 0 with top_entropy_quantile=0\.2"):
        presets.trl(top_entropy_quantile=0.2, entropy_coef=0.1)


@pytest.mark.parametrize("epsilon_high", [None, 0.1])
def test_trl_rloo(epsilon_high: float | None) -> None:
    """RLOOTrainer._compute_loss in float64, since it takes the difference of large sums."""
    trainer = framework_sources.trl("trl.trainer.rloo_trainer").RLOOTrainer
    a = batch(advantage_per_sequence=True)
    a["old_logprob"] = a["logprob"] + 0.1 * (a["old_logprob"] - a["logprob"])  # keeps the ratio of a sum near 1
    epsilon = 0.05
    own = {"epsilon_low": epsilon, "epsilon_high": epsilon_high or epsilon}
    old = (a["old_logprob"].double() * a["mask"]).sum(1)
    ratio = torch.exp((a["logprob"].double() * a["mask"]).sum(1) - old)
    beyond = torch.where(a["advantage"] > 0, ratio > 1 + own["epsilon_high"], ratio < 1 - epsilon)
    assert 0 < int(beyond.sum()) < B

    def theirs(x: torch.Tensor, h: torch.Tensor) -> Any:
        return trainer._compute_loss(trl_trainer(x.double(), h, **own), None, trl_inputs(a) | {"old_logps": old})

    compare(a, presets.trl_rloo(epsilon=epsilon, epsilon_high=epsilon_high), theirs)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_trl_gmpo(beta: float) -> None:
    trainer = framework_sources.trl("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    a = batch(advantage_per_sequence=True)
    own = {"epsilon_low": 0.4, "epsilon_high": 0.3, "beta": beta, "current_gradient_accumulation_steps": 4}
    more = {"ref_logprob": a["ref_logprob"]} if beta else {}
    spec = presets.trl_gmpo(epsilon_high=0.3, beta=beta, gradient_accumulation_steps=4)
    compare(a, spec, lambda x, h: trainer._compute_loss(trl_trainer(x, h, **own), None, trl_inputs(a)), **more)
