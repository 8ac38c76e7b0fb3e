"""float64 reference of mismatch_metrics in NumPy, written from the formulas alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .sequences import sequences_of

__all__ = ["mismatch_metrics_reference"]

_EDGES = np.array([-1.0, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1.0], np.float32)


def mismatch_metrics_reference(
    logprob_train: Any,
    logprob_rollout: Any,
    mask: Any = None,
    *,
    cu_seqlens: Any = None,
    log_ratio_clamp: float | None = 20.0,
    rollout_nan: str = "nan",
) -> dict[str, float]:
    """The metrics of :func:`mismatch_metrics` by name in float64.

    Args: as :func:`mismatch_metrics`, NumPy arrays or what ``numpy.asarray`` takes.
    Source: docs/objectives.md.
    """
    limit = math.inf if log_ratio_clamp is None else log_ratio_clamp
    rows = [r for r in sequences_of((logprob_train, logprob_rollout), mask, cu_seqlens) if r[0].size]
    if not rows:
        names = [f"histogram_{i}" for i in range(len(_EDGES) + 1)]
        return dict.fromkeys([*_metrics([np.zeros((2, 1))], limit), *names], 0.0)
    train, rollout = (np.concatenate([r[i] for r in rows]) for i in range(2))
    given = rollout
    if rollout_nan == "neutral":
        rows = [(x, np.where(np.isnan(y), x, y)) for x, y in rows]
        rollout = np.where(np.isnan(given), train, given)
    found = _metrics([np.array(r, np.float64) for r in rows], limit)
    d = train - rollout  # in float32, because the rounded difference decides a token's bin
    differ = (train.view(np.int32) != given.view(np.int32)) & ~(np.isnan(train) & np.isnan(given))
    found["differing_fraction"] = float(differ.mean())
    found["nonfinite_fraction"] = float((~np.isfinite(d) | np.isnan(given)).mean())
    counts = np.bincount(np.searchsorted(_EDGES, d[~np.isnan(d)], side="right"), minlength=len(_EDGES) + 1)
    return found | {f"histogram_{i}": float(n) / d.size for i, n in enumerate(counts)}


def _metrics(rows: list[Any], limit: float) -> dict[str, float]:
    """Returns all metrics except fractions of tokens, which the caller computes. ``rows`` holds the pair (train,
    rollout) of each sequence."""
    x, y = (np.concatenate([r[i] for r in rows]) for i in range(2))
    d = x - y
    c = np.clip(d, -limit, limit)
    ratio, chi2 = np.exp(c).mean(), np.expm1(2 * c).mean()
    log_ppl = np.array([-r.mean(axis=1) for r in rows])
    diff = np.array([-(r[0] - r[1]).mean() for r in rows])
    sums = np.array([(r[0] - r[1]).sum() for r in rows])
    p, q = np.exp(x) - np.exp(x).mean(), np.exp(y) - np.exp(y).mean()
    spread = math.sqrt((p * p).sum() * (q * q).sum())
    return {
        "num_tokens": float(d.size),
        "num_sequences": float(len(rows)),
        "dlogp_mean": np.abs(d).mean(),
        "dlogp_max": np.abs(d).max(),
        "kl": -d.mean(),
        "k3": (np.expm1(d) - d).mean(),
        "ratio_mean": ratio,
        "ess": ratio**2 / np.exp(2 * c).mean() if ratio else 0.0,
        "chi2_token": chi2,
        "chi2_seq": np.expm1(2 * np.clip(sums, -limit, limit)).mean(),
        "ppl_train": np.exp(log_ppl[:, 0]).mean(),
        "ppl_rollout": np.exp(log_ppl[:, 1]).mean(),
        "log_ppl_train": log_ppl[:, 0].mean(),
        "log_ppl_rollout": log_ppl[:, 1].mean(),
        "ppl_ratio": np.exp(diff).mean(),
        "log_ppl_diff_mean": diff.mean(),
        "log_ppl_diff_abs_mean": np.abs(diff).mean(),
        "log_ppl_diff_min": diff.min(),
        "log_ppl_diff_max": diff.max(),
        "correlation": (p * q).sum() / spread if spread > 0 else 0.0,
        "differing_fraction": 0.0,
        "nonfinite_fraction": 0.0,
    }
