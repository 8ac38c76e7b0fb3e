"""Variances, covariances and correlations in metrics keep their digits: they take two passes with scaled values, and a
constant gives exactly 0. One table covers the operators that report such a moment, compared with float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")


def explained(x: np.ndarray, y: np.ndarray, device: str) -> tuple[float, float]:
    """explained_variance of returns x and errors y, by the operator and in float64."""
    value = (x - y).astype(np.float32)
    of = torch.from_numpy(np.stack((value, x))).to(device)
    metrics = rk.value_loss(of[:1], None, of[1:], clip=None).metrics.asdict()
    error = (x - value).astype(np.float32).astype(np.float64)
    var = x.astype(np.float64).var()
    return metrics["explained_variance"], 1 - error.var() / var if var > 0 else 0.0


def correlation(x: np.ndarray, y: np.ndarray, device: str) -> tuple[float, float]:
    """The correlation of two log-probabilities, by the operator and in float64."""
    of = torch.from_numpy(np.stack((x, y))).to(device)
    got = rk.mismatch_metrics(of[:1], of[1:]).asdict()["correlation"]
    # 1 minus the probabilities near 1, which are correlated in the same way
    p, q = (np.expm1(a.astype(np.float64)) if a.mean() > -0.5 else np.exp(a.astype(np.float64)) for a in (x, y))
    p, q = p / (np.abs(p).max() or 1.0), q / (np.abs(q).max() or 1.0)
    p, q = p - p.mean(), q - q.mean()
    spread = math.sqrt((p * p).sum() * (q * q).sum())
    return got, (p * q).sum() / spread if spread > 0 else 0.0


def spread(x: np.ndarray, y: np.ndarray, device: str) -> tuple[float, float]:
    """The standard deviation of weights, by the operator and in float64."""
    d = torch.from_numpy(np.stack((x, y))).to(device)
    of = {"upper": 3e38, "log_ratio_clamp": None, "return_metrics": True}
    metrics = rk.importance_weights(d, torch.zeros_like(d), **of).metrics.asdict()
    w = np.exp(np.stack((x, y)).astype(np.float64))
    return metrics["weight_std"], w.std()


rng = np.random.default_rng(3)
NOISE = rng.standard_normal((2, 700)).astype(np.float32)


def normal(mean: float, std: float) -> tuple[np.ndarray, np.ndarray]:
    return (mean + std * NOISE[0]).astype(np.float32), (std * NOISE[1] / 2).astype(np.float32)


RETURNS = {
    f"{mean} +- {std}": normal(mean, std)
    for mean, std in ((0.0, 1.0), (1e3, 1.0), (1e6, 1.0), (-1e4, 0.1), (0.0, 1e20), (1e30, 1e29), (0.0, 1e-25))
} | {
    "errors of another size": (1e10 * NOISE[0], 1e-10 * NOISE[1]),
    "one outlier": (np.where(np.arange(700) == 3, np.float32(1e6), NOISE[0]), NOISE[1]),
    "a constant error": (NOISE[0], np.full(700, np.float32(0.1))),
}
LOGPROBS = {
    "ordinary": (-np.abs(NOISE[0]), -np.abs(NOISE[0]) - 0.05 * np.abs(NOISE[1])),
    "nearly certain": (-1e-6 * np.abs(NOISE[0]), -1e-6 * np.abs(NOISE[0] + 0.1 * NOISE[1])),
    "nearly impossible": (-30 - np.abs(NOISE[0]), -30 - np.abs(NOISE[0] + 0.1 * NOISE[1])),
    "one of each": (-30 - np.abs(NOISE[0]), -1e-6 * np.exp(-np.abs(NOISE[0]))),
    "close to one another": (-1 + 1e-4 * NOISE[0], -1 + 1e-4 * (NOISE[0] + 0.1 * NOISE[1])),
    "squares underflow": (-1e-30 * np.abs(NOISE[0]), -1e-30 * np.abs(NOISE[0] + 0.1 * NOISE[1])),
}
LOG_RATIOS = {
    "ordinary": (NOISE[0], NOISE[1]),
    "about 5": (1.609 + 1e-4 * NOISE[0], 1.609 + 1e-4 * NOISE[1]),
    "squares overflow": (60 + NOISE[0], 60 + NOISE[1]),
    "squares underflow": (-60 + NOISE[0], -60 + NOISE[1]),
}
# The bounds follow from float32 sums, from exponentials of log-probabilities near -30, and from log-ratios, whose ulp
# near 1.6 is 1e-3 of 1e-4.
TABLE: dict[str, tuple[Callable[..., tuple[float, float]], dict[str, Any], float]] = {
    "explained_variance": (explained, RETURNS, 3e-6),
    "correlation": (correlation, LOGPROBS, 3e-4),
    "weight_std": (spread, LOG_RATIOS, 3e-3),
}
CASES = [(name, case) for name, (_, cases, _) in TABLE.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda x: str(x))
def test_digits_are_kept(name: str, case: str, device: str) -> None:
    function, cases, allowed = TABLE[name]
    got, want = function(*(np.asarray(a, np.float32) for a in cases[case]), device)
    least = 0.0 if name == "weight_std" else 1.0
    assert abs(got - want) <= allowed * max(least, abs(want)), (got, want)


@pytest.mark.parametrize("count", [1, 2, 7, 700, 3000])
@pytest.mark.parametrize("value", [0.0, 0.1, -1000.3, 1e-40, 3e19, -1e30])
def test_a_constant_has_no_variance(value: float, count: int, device: str) -> None:
    x = torch.full((1, count), value, device=device)
    y = torch.linspace(-1.0, 1.0, count, device=device)[None]
    for value_of in (y, x):
        assert rk.value_loss(value_of, None, x, clip=None).metrics.asdict()["explained_variance"] == 0.0
    if count > 1:
        exact = rk.value_loss(y - 0.25, None, y, clip=None).metrics.asdict()["explained_variance"]
        assert exact == 1.0, "the errors are constant"
    logprob = -x.abs().clamp(max=50.0)
    for pair in ((logprob, y), (y, logprob), (logprob, logprob)):
        assert rk.mismatch_metrics(*pair).asdict()["correlation"] == 0.0
    zero = torch.zeros(count, 1, device=device)
    of = rk.importance_weights(logprob.reshape(-1, 1), zero, upper=2.0, return_metrics=True)
    metrics = of.metrics.asdict()
    assert metrics["weight_std"] == metrics["seq_std"] == 0.0
    assert metrics["ess"] == (1.0 if metrics["weight_mean"] > 0 else 0.0)


@pytest.mark.parametrize("count", [2, 40])
def test_what_lies_in_masked_slots_decides_nothing(count: int, device: str) -> None:
    x, y = torch.from_numpy(NOISE[:, :count].copy()).to(device)[:, None]
    garbage = torch.full((1, 5), math.nan, device=device)
    keep = torch.arange(count + 5, device=device)[None] < count
    a, b = (torch.cat((t, garbage), -1) for t in (x, y))
    calls: dict[str, Callable[..., Any]] = {
        "value_loss": lambda a, b, mask: rk.value_loss(a, None, b, mask, clip=None).metrics.vector,
        "mismatch_metrics": lambda a, b, mask: rk.mismatch_metrics(a, b, mask).vector,
        "importance_weights": lambda a, b, mask: (
            rk.importance_weights(a, b, mask, upper=2.0, return_metrics=True).metrics.vector
        ),
    }
    for name, call in calls.items():
        want, got = call(x, y, None), call(a, b, keep)
        assert want.cpu().numpy().tobytes() == got.cpu().numpy().tobytes(), name
