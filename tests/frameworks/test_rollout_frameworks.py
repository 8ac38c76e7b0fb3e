"""Compares importance_weights, mismatch_metrics and value_loss with verl's and OpenRLHF's own source, if it is
installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import framework_sources
import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import tensors
from rollout_cases import rollouts

COLUMNS = 60


@pytest.fixture(scope="module")
def helper() -> Any:
    return framework_sources.verl("verl.trainer.ppo.rollout_corr_helper")


def batch(seed: int = 5) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Arrays, and verl's log-ratio and mask in float64. Every sequence has a token, since verl's means without a token
    are NaN."""
    a = tensors(rollouts(2, COLUMNS, seed=seed))
    a = {k: torch.cat([x, x.flip(0, 1)]) for k, x in a.items()}
    a["rollout"][2:] += 0.3 * (a["rollout"][2:] - a["train"][2:])
    return a, a["train"].double() - a["rollout"].double(), a["mask"].double()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("level", "threshold"),
    # some values are within the bounds, but not all
    [("token", "1.2"), ("token", "0.8_1.25"), ("sequence", "1.2"), ("sequence", "0.3_20")],
)
def test_weights_are_verls_own(helper: Any, level: str, threshold: str, normalize: bool) -> None:
    a, d, mask = batch()
    want, _ = helper.compute_rollout_correction_weights(d, mask, level, threshold, normalize)
    low, _, high = threshold.rpartition("_")
    assert bool((want > 0).any())
    assert bool((want[mask > 0] == 0).any()) == bool(low)
    how: dict[str, Any] = {"mode": "mask", "lower": float(low)} if low else {}
    got = rk.importance_weights(
        a["train"], a["rollout"], a["mask"], level=level, upper=float(high), normalize=normalize, **how
    )
    assert not beyond("importance_weights", "weights", got.weights, want, terms=COLUMNS)


# verl's names for importance_weights' metrics. For tokens, verl takes extremes after the bounds are applied; for
# sequences, before.
IS_METRICS = {
    "rollout_is_mean": "weight_mean", "rollout_is_std": "weight_std", "rollout_is_eff_sample_size": "ess",
    "rollout_is_ratio_fraction_high": "fraction_high", "rollout_is_ratio_fraction_low": "fraction_low",
    "rollout_is_seq_mean": "seq_mean", "rollout_is_seq_std": "seq_std", "rollout_is_seq_min": "seq_min",
    "rollout_is_seq_max": "seq_max", "rollout_is_seq_max_deviation": "seq_deviation_max",
    "rollout_is_seq_fraction_high": "seq_fraction_high", "rollout_is_seq_fraction_low": "seq_fraction_low",
    "rollout_is_batch_norm_factor": "divisor",
}  # fmt: skip
EXTREMES = {
    "token": {"rollout_is_min": "weight_min", "rollout_is_max": "weight_max"},
    "sequence": {"rollout_is_min": "ratio_min", "rollout_is_max": "ratio_max"},
}


@pytest.mark.parametrize(
    ("level", "threshold"),
    [("token", "1.2"), ("token", "0.8_1.25"), ("sequence", "1.2"), ("sequence", "0.3_20")],
)
def test_metrics_of_weights_are_verls_own(helper: Any, level: str, threshold: str) -> None:
    a, d, mask = batch()
    _, want = helper.compute_rollout_correction_weights(d, mask, level, threshold, True)
    low, _, high = threshold.rpartition("_")
    how: dict[str, Any] = {"mode": "mask", "lower": float(low)} if low else {}
    got: Any = rk.importance_weights(
        a["train"], a["rollout"], a["mask"], level=level, upper=float(high), normalize=True, return_metrics=True, **how
    )
    names = IS_METRICS | EXTREMES[level]
    metrics = got.metrics.asdict()
    outside = want.pop("rollout_is_oob_ratio", None)  # a share of tokens, even if the weight is a sequence's
    if low and level == "token":
        assert metrics["fraction_low"] + metrics["fraction_high"] == pytest.approx(outside)
    assert set(want) == set(names)
    assert 0 < metrics["fraction_low"] + metrics["fraction_high"] <= 1, "thresholds that say nothing test nothing"
    for theirs, ours in names.items():
        assert metrics[ours] == pytest.approx(want[theirs], rel=2e-4, abs=1e-6), theirs


def test_metrics_of_what_is_rejected_are_verls_own(helper: Any) -> None:
    a, d, mask = batch()
    _, want = helper.compute_rollout_rejection_mask(d, mask, "token_k1,seq_mean_k3", "0.7_1.1,0.02")
    got: Any = rk.importance_weights(
        a["train"], a["rollout"], a["mask"], upper=2.0, rejection={"token_k1": (0.7, 1.1), "seq_mean_k3": 0.02},
        return_metrics=True,
    )  # fmt: skip
    assert 0 < float(got.metrics.rejected_fraction) < 1
    assert float(got.metrics.rejected_fraction) == pytest.approx(want["rollout_rs_masked_fraction"], rel=1e-6)
    assert float(got.metrics.seq_rejected_fraction) == pytest.approx(want["rollout_rs_seq_masked_fraction"], rel=1e-6)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.2},
    "IcePop": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25", "rollout_is_batch_normalize": True},
    "sequence and sums": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "geometric": {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"},
    "k1 of one number": {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.2},
    "k3": {"rollout_is": "sequence", "rollout_is_threshold": "0.1_3", "rollout_rs": "seq_mean_k3",
           "rollout_rs_threshold": 0.02},
    "two": {"rollout_is": "token", "rollout_rs": "token_k1, seq_max_k2", "rollout_rs_threshold": "0.7_1.1,0.15"},
    "two by one number": {"rollout_is": "token", "rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": "0.04"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_of_verl_is_verls_own(helper: Any, name: str) -> None:
    for seed in range(4):
        a, _, _ = batch(seed)
        train, rollout, mask = a["train"].double(), a["rollout"].double(), a["mask"].double()
        theirs = {"rollout_is": "sequence"} | CONFIGURATIONS[name]  # the default of verl's function is None
        proto, want, _ = helper.compute_rollout_correction_and_rejection_mask(train, rollout, mask, **theirs)
        how = rk.presets.verl_rollout_correction(**CONFIGURATIONS[name])
        got = rk.importance_weights(a["train"], a["rollout"], a["mask"], **how)
        assert torch.equal(got.mask.double(), want)
        if proto is not None:
            weights = proto.batch["rollout_is_weights"]
            assert not beyond("importance_weights", "weights", got.weights, weights, terms=COLUMNS)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"rollout_is": "geometric"}, "rollout_is: expected 'token', 'sequence' or None"),
        ({"rollout_is_threshold": "1_2_3"}, "rollout_is_threshold: expected a number or"),
        ({"rollout_is_threshold": True}, "rollout_is_threshold: expected a number or"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1}, "rollout_rs: expected one or more of token_k1"),
        ({"rollout_rs": ""}, "rollout_rs: expected one or more of token_k1"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold: expected a threshold beside rollout_rs"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "rollout_rs_threshold: expected a number, got"),
        ({"rollout_is_threshold": -1.0}, "rollout_is_threshold: expected finite numbers > 0"),
        ({"rollout_is_threshold": "5_0.5"}, "rollout_is_threshold: expected finite numbers > 0, ascending"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, "rollout_rs_threshold: expected one threshold"),
    ],
)
def test_a_mistake_in_a_configuration_of_verl_names_it(how: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^" + text):
        rk.presets.verl_rollout_correction(**how)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"rollout_rs": 5}, "rollout_rs: expected a str of criteria, got int"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": [0.5, 2.0]}, "rollout_rs_threshold: expected a number or"),
        ({"rollout_is_batch_normalize": "yes"}, "rollout_is_batch_normalize: expected a bool, got str"),
    ],
)
def test_a_wrong_type_in_a_configuration_of_verl_names_it(how: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match="^" + text):
        rk.presets.verl_rollout_correction(**how)


# Thresholds that some tokens or sequences meet and others do not.
CRITERIA: dict[str, Any] = {
    "token_k1": (0.7, 1.1), "token_k2": 0.05, "token_k3": 0.04, "seq_sum_k1": (0.3, 4.0), "seq_sum_k2": 0.9,
    "seq_sum_k3": 0.9, "seq_mean_k1": (0.99, 1.02), "seq_mean_k2": 0.02, "seq_mean_k3": 0.02, "seq_max_k2": 0.15,
    "seq_max_k3": 0.15,
}  # fmt: skip


@pytest.mark.parametrize("names", [*[(name,) for name in CRITERIA], ("token_k1", "seq_mean_k3", "seq_max_k2")], ids=str)
def test_what_is_rejected_is_verls_own(helper: Any, names: tuple[str, ...]) -> None:
    kept = tokens = 0
    for seed in range(8):
        a, d, mask = batch(seed)
        thresholds = ["_".join(map(str, np.atleast_1d(CRITERIA[name]))) for name in names]
        want, _ = helper.compute_rollout_rejection_mask(d, mask, ",".join(names), ",".join(thresholds))
        rejection = {name: CRITERIA[name] for name in names}
        got = rk.importance_weights(a["train"], a["rollout"], a["mask"], upper=2.0, rejection=rejection)
        assert torch.equal(got.mask.double(), want)
        kept, tokens = kept + int(want.sum()), tokens + int(mask.sum())
    assert 0 < kept < tokens, "a threshold that says nothing tests nothing"


# verl's names for the metrics of mismatch_metrics.
METRICS = {
    "kl": "kl", "k3_kl": "k3", "training_ppl": "ppl_train", "rollout_ppl": "ppl_rollout",
    "training_log_ppl": "log_ppl_train", "rollout_log_ppl": "log_ppl_rollout", "log_ppl_diff": "log_ppl_diff_mean",
    "log_ppl_abs_diff": "log_ppl_diff_abs_mean", "log_ppl_diff_max": "log_ppl_diff_max",
    "log_ppl_diff_min": "log_ppl_diff_min", "ppl_ratio": "ppl_ratio", "chi2_token": "chi2_token",
    "chi2_seq": "chi2_seq",
}  # fmt: skip


def test_metrics_are_verls_own(helper: Any) -> None:
    a, _, mask = batch()
    want = helper.compute_offpolicy_metrics(a["train"].double(), a["rollout"].double(), mask)
    assert set(want) == set(METRICS)
    got = rk.mismatch_metrics(a["train"], a["rollout"], a["mask"]).asdict()
    found = np.array([got[METRICS[name]] for name in want])
    assert not beyond("mismatch_metrics", "metrics", found, np.array(list(want.values())))


# ---- the value loss -------------------------------------------------------------------------------------------------


def values() -> tuple[torch.Tensor, ...]:
    """Value, old value, return and mask; no value is on a bound, no error equals another."""
    random = np.random.default_rng(7)
    value, moved, error = (torch.from_numpy(random.normal(0, 1, (6, 37)).astype(np.float32)) for _ in range(3))
    mask = torch.from_numpy(random.random((6, 37)) < 0.7)
    mask[1] = False
    return value, value + 0.5 * moved, value + error, mask


def assert_value_loss(theirs: Any, **how: Any) -> None:
    """Compares loss and gradient with the framework's, computed in float64."""
    value, old, returns, mask = values()
    leaf = value.double().requires_grad_()
    want = theirs(leaf, old.double(), returns.double(), mask.double())
    want.backward()
    assert leaf.grad is not None
    got = rk.value_loss_and_grad(value, old if "clip" in how else None, returns, mask, **how)
    assert abs(float(got.loss) - want.item()) <= 2e-6 * abs(want.item())
    assert float((got.d_value - leaf.grad).abs().max()) <= 3e-6 * float(leaf.grad.abs().max())


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_value_loss_is_verls_own(aggregation: str) -> None:
    verl = framework_sources.verl()
    assert_value_loss(
        lambda v, o, r, mask: verl.compute_value_loss(v, r, o, mask, 0.5, aggregation)[0],
        clip=0.5, aggregation=aggregation,
    )  # fmt: skip


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("tokens", [True, False])
def test_the_value_loss_is_openrlhfs_own(tokens: bool, clip: float | None) -> None:
    loss = framework_sources.openrlhf().ValueLoss(clip_eps=clip, token_level_loss=tokens)
    how: dict[str, Any] = {"aggregation": "token-mean" if tokens else "seq-mean-token-mean"}
    assert_value_loss(loss, **how, **({} if clip is None else {"clip": clip}))
