"""Refusals of policy_loss and PolicySpec, and their messages."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from policy_loss_cases import arrays
from rl_kernel_native import PolicySpec
from rl_kernel_native._check import in_float32

GMPO = {"clip": "gmpo", "level": "geometric", "aggregation": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "batch"}, 'level: expected "token", "sequence", "geometric"'),
        ({"clip": "trpo"}, "clip: expected"),
        ({"aggregation": "mean"}, "aggregation: expected"),
        ({"epsilon_low": -0.1}, "epsilon_low: expected a finite number >= 0 or None"),
        ({"epsilon_low": 1.5}, "epsilon_low: expected at most 1"),
        ({"epsilon_high": math.nan}, "epsilon_high: expected a finite number"),
        ({"dual_clip": 1.0}, "dual_clip: expected a finite number > 1"),
        ({"delta": 0.0}, "delta: expected a finite number > 0"),
        ({"tau_positive": 0.0}, "tau_positive: expected a finite number > 0"),
        ({"log_ratio_clamp": (2.0, 1.0)}, "log_ratio_clamp: expected two numbers in ascending order"),
        ({"dp_size": 0}, "dp_size: expected a positive integer"),
        ({"dp_size": 10**5000}, "dp_size: expected an integer of 64 bits, got one of 16610 bits"),
        ({"kl": ["k1"]}, 'kl: expected None, "k1", "k2", "k3", "abs", got'),
        ({"level": np.array(["token", "x"])}, 'level: expected "token", "sequence", "geometric", got'),
        ({"scale": 1e39}, "scale: expected a finite number, got 1e+39, which is inf in float32"),
        ({"scale": 1e38, "dp_size": 100}, "scale * dp_size: expected a finite number, got 1e+40"),
        (
            {"dual_clip": 1 + 1e-12},
            "dual_clip: expected a finite number > 1 or None, got 1.000000000001, which is 1 in",
        ),
        ({"gate": (0.5, 1e39)}, "gate: expected two numbers in ascending order, got 1e+39, which is inf in float32"),
        (
            {"aggregation": "seq-mean-token-sum-norm", "horizon": 1e-46},
            "horizon: expected a finite number > 0 or None, got 1e-46, which is below the normal numbers of float32",
        ),
        ({"clip": "cispo", "dual_clip": 3.0}, 'dual_clip: expected None with clip="cispo"'),
        ({"clip": "sapo", "delta": 2.0}, 'delta: expected None with clip="sapo"'),
        ({"clip": "none", "level": "geometric"}, "no ratio enters its loss"),
        ({"clip": "dro"}, "dro_beta: expected a number"),
        ({"dro_beta": 1.0}, 'only "dro" has a squared log-ratio'),
        ({"clip": "gmpo"}, "its loss has one term per sequence"),
        ({"clip": "vespo"}, "its weight is one per sequence"),
        ({"clip": "vespo", "level": "sequence", "importance": "sequence"}, "go into the sequence's own"),
        ({"clip": "kl_cov", "level": "sequence"}, "tokens are selected, not sequences"),
        ({"clip": "dppo", "level": "geometric"}, "tokens are selected, not sequences"),
        ({"clip": "kl_cov", "drop_selected": True}, "it takes selected tokens itself"),
        ({**GMPO, "drop_selected": True}, "its loss has one term per sequence"),
        ({**GMPO, "drop_above": 0.1}, "its loss has one term per sequence"),
        ({**GMPO, "log_ratio_clamp": 20.0}, "it limits the log-ratios itself"),
        ({"straight_through": True}, "a token's ratio is its own already"),
        ({"kl_coef": 0.1}, "kl: expected an estimator"),
        ({"kl": "k3", "kl_times_ratio": True, "kl_straight_through": True}, "two different corrections"),
        ({"kl_ratio_of_token": True}, "kl_ratio_of_token: expected False without kl_times_ratio"),
        (
            {"kl": "k3", "kl_times_ratio": True, "kl_ratio_of_token": True},
            "a token's ratio is what the estimator is multiplied by already",
        ),
        (
            {"clip": "none", "level": "sequence", "kl": "k3", "kl_times_ratio": True, "kl_ratio_of_token": True},
            "no ratio enters its loss",
        ),
        ({"importance_low": 0.5}, "there is no weight to bound"),
        (
            {"kl": "k3", "kl_gradient_ratio_max": 2.0},
            "kl_gradient_ratio_max: expected None without kl_straight_through",
        ),
        ({"importance": "token", "importance_low": 3.0}, "the range would be empty"),
        ({"importance": "given", "gate": (0.5, 2.0)}, "a given weight says nothing"),
        ({"horizon": 8.0}, "nothing else divides by it"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "horizon: expected a number"),
        ({"count_empty": True}, "it counts no sequences"),
        ({"epsilon_absolute": True, "epsilon_low": 2.0, "epsilon_high": 1.0}, "a range that is not empty"),
    ],
)
def test_a_spec_says_why_it_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PolicySpec(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"kl_coef": "0.1"}, {"gate": 3}, {"scale": None}, {"dp_size": 1.5}, {"gate": [[1], 2]}, {"gate": "ab"},
     {"log_ratio_clamp": [1, 2, 3]}, {"straight_through": "False"}, {"count_empty": 1}, {"lenient": None}],
)  # fmt: skip
def test_a_spec_of_other_types_is_a_type_error(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(fields))}: expected"):
        PolicySpec(**fields)


def test_numbers_are_rounded_as_float32_has_them(rng: np.random.Generator) -> None:
    x = rng.normal(0, 1, 10000) * 2.0 ** rng.integers(-100, 100, 10000)
    assert [in_float32(v) for v in x.tolist()] == np.float32(x).astype(np.float64).tolist()
    largest = float(np.finfo(np.float32).max)
    half = 2.0**103  # half of the last place of the largest number; from there on rounding gives inf
    for v, want in {
        largest: largest, largest + half * 0.999: largest, largest + half: math.inf, -1e39: -math.inf, 0.0: 0.0,
        2.0**-126: 2.0**-126, 2.0**-127: 0.0, math.inf: math.inf,
    }.items():  # fmt: skip
        assert in_float32(v) == want
    assert math.isnan(in_float32(math.nan))


def test_a_spec_is_a_value() -> None:
    a = PolicySpec(kl="k3")
    assert dataclasses.replace(a, kl=None) == PolicySpec()
    assert hash(a) == hash(PolicySpec(kl="k3"))
    of_lists = PolicySpec(gate=[0.5, 2], log_ratio_clamp=[-1, 1])  # type: ignore[arg-type]
    assert hash(of_lists) == hash(PolicySpec(gate=(0.5, 2), log_ratio_clamp=(-1, 1)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.kl = None  # type: ignore[misc]


def call(**changed: Any) -> Any:
    a: dict[str, Any] = dict(arrays(3, 8))
    arguments = {k: a[k] for k in ("logprob", "old_logprob", "advantage", "mask")} | {"spec": PolicySpec()} | changed
    return rk.policy_loss(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"spec": {}}, TypeError, "spec: expected a PolicySpec, got dict"),
        ({"logprob": np.zeros((3, 8))}, TypeError, "logprob: expected dtype float32, got float64"),
        ({"logprob": np.zeros((1, 3, 8), np.float32)}, ValueError, "logprob: expected shape"),
        ({"old_logprob": np.zeros((3, 7), np.float32)}, ValueError, r"old_logprob: expected shape \[3, 8\]"),
        ({"advantage": np.zeros(4, np.float32)}, ValueError, r"advantage: expected shape \[3, 8\] or \[3\]"),
        ({"advantage": np.zeros((3, 8), np.float16)}, TypeError, "advantage: expected dtype float32, got float16"),
        ({"mask": np.zeros((3, 9), bool)}, ValueError, r"mask: expected shape \[3, 8\]"),
        ({"mask": np.zeros((3, 8), np.complex64)}, TypeError, "mask: expected dtype bool"),
        ({"mask": None}, TypeError, "mask: expected an array"),
        ({"logprob": np.zeros((8, 3), np.float32).T}, ValueError, "logprob: expected a contiguous last dimension"),
        ({"ref_logprob": np.zeros((3, 8), np.float32)}, ValueError, "ref_logprob: expected None"),
        ({"rollout_logprob": np.zeros((3, 8), np.float32)}, ValueError, "rollout_logprob: expected None"),
        ({"importance_weight": np.zeros((3, 8), np.float32)}, ValueError, "importance_weight: expected None"),
        ({"selected": np.zeros((3, 8), np.float32)}, ValueError, "selected: expected None"),
        ({"spec": PolicySpec(kl="k1")}, ValueError, "ref_logprob: expected an array"),
        ({"spec": PolicySpec(importance="token")}, ValueError, "rollout_logprob: expected an array"),
        ({"spec": PolicySpec(entropy_coef=1.0)}, ValueError, "entropy: expected an array"),
        ({"spec": PolicySpec(aggregation="constant")}, ValueError, "denominator: expected a number"),
        ({"spec": PolicySpec(aggregation="token-sum"), "denominator": 3}, ValueError, "denominator: expected None"),
        ({"denominator": 0}, ValueError, "denominator: expected a finite number > 0"),
        ({"denominator": 1e-46}, ValueError, "denominator: expected a finite number > 0, got 1e-46, which is below"),
        ({"denominator": np.float32(0)}, ValueError, "denominator: expected a finite number > 0, got"),
        ({"denominator": 1e39}, ValueError, r"denominator: expected a finite number > 0, got 1e\+39, which is inf in"),
        ({"denominator": np.zeros(2, np.float32)}, ValueError, "denominator: expected one element"),
        ({"cu_seqlens": np.array([0, 24], np.int32)}, ValueError, r"logprob: expected shape \[num_tokens\]"),
    ],
)
def test_a_call_says_what_is_wrong(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changed)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([1, 8, 24], "expected 0 first, got 1 at index 0"),
        ([0, 9, 8, 24], "expected ascending offsets, got 8 after 9 at index 2"),
        ([0, 8, 25], r"expected at most 24 \(the number of tokens\), got 25 at index 2"),
        ([0, -1, 24], "ascending offsets, got -1"),
    ],
)
def test_cuts_are_checked_on_the_cpu(cuts: list[int], message: str) -> None:
    flat = {k: arrays(3, 8)[k].reshape(-1) for k in ("logprob", "old_logprob", "advantage", "mask")}
    for dtype in (np.int32, np.int64):
        with pytest.raises(ValueError, match=message):
            call(**flat, cu_seqlens=np.array(cuts, dtype))
    with pytest.raises(TypeError, match="cu_seqlens: expected dtype int32 or int64"):
        call(**flat, cu_seqlens=np.array(cuts, np.float32))


def test_arrays_of_two_devices_are_refused() -> None:
    a = {k: torch.from_numpy(arrays(3, 8)[k]) for k in ("logprob", "old_logprob", "advantage", "mask")}
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        call(**{**a, "old_logprob": a["old_logprob"].to("meta")})
