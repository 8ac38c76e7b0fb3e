"""float64 reference of importance_weights in NumPy, written from the formulas alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .sequences import sequences_of

__all__ = ["importance_weights_reference"]


def importance_weights_reference(
    logprob: Any,
    rollout_logprob: Any,
    mask: Any = None,
    *,
    cu_seqlens: Any = None,
    level: str = "token",
    mode: str = "truncate",
    upper: float,
    lower: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    rejection: dict[str, Any] | None = None,
    veto: float | None = None,
    normalize: bool = False,
    rollout_nan: str = "nan",
) -> dict[str, Any]:
    """``weights`` and ``mask`` of :func:`importance_weights` in float64, in the shape of ``logprob``, and
    ``metrics`` by name.

    Args: as :func:`importance_weights`, NumPy arrays or what ``numpy.asarray`` takes.
    Source: docs/objectives.md.
    """
    shape = np.asarray(logprob).shape
    limit = math.inf if log_ratio_clamp is None else log_ratio_clamp
    low_ratio = 1.0 / upper if lower is None else lower
    lower = 0.0 if mode == "truncate" else low_ratio
    weights, kept = np.zeros(shape).reshape(-1), np.zeros(shape).reshape(-1)
    mean_of: list[float] = []
    of_sequences: list[Any] = []
    indices = np.arange(weights.size).reshape(shape)
    for x, y, at in sequences_of((logprob, rollout_logprob, indices), mask, cu_seqlens):
        if not x.size:
            continue
        d = x.astype(np.float64) - y
        if rollout_nan == "neutral":
            d = np.where(np.isnan(y), 0.0, d)
        z = d if level == "token" else np.full(d.size, d.sum() if level == "sequence" else d.mean())
        e = np.exp(np.clip(z, -limit, limit))
        w = np.where((e >= lower) & (e <= upper), e, 0.0) if mode == "mask" else np.clip(e, lower, upper)
        weights[at] = w
        mean_of.extend(w if level == "token" else w[:1])
        keep = np.ones(d.size, bool)
        if veto is not None:
            keep &= (d >= math.log(veto)).all()
        for name, threshold in (rejection or {}).items():
            keep &= _allowed(name, threshold, np.clip(d, -limit, limit))
        kept[at] = keep
        of_sequences.append((w, e, keep))
    divisor = 1.0
    if normalize and mean_of and np.mean(mean_of) > 1e-8:
        divisor = float(np.mean(mean_of))
        weights /= divisor
    metrics = _metrics(of_sequences, level, low_ratio, upper)
    return {"weights": weights.reshape(shape), "mask": kept.reshape(shape), "metrics": metrics | {"divisor": divisor}}


def _metrics(of_sequences: list[Any], level: str, low: float, high: float) -> dict[str, float]:
    """Returns the metrics. ``of_sequences`` holds a triple for each sequence that has a token: its weights, its ratios
    before their bounds, and the flags of kept tokens."""
    none = [(np.zeros(1), np.zeros(1), np.ones(1, bool))]
    w, e, keep = (np.concatenate(x) for x in zip(*(of_sequences or none), strict=True))
    means, ratios, rejects = (
        np.array(x) for x in zip(*((a.mean(), b.mean(), not c.all()) for a, b, c in of_sequences or none), strict=True)
    )
    units = e if level == "token" else ratios
    found = {
        "num_tokens": w.size, "num_sequences": means.size, "weight_mean": w.mean(), "weight_std": w.std(),
        "weight_min": w.min(), "weight_max": w.max(), "ratio_min": e.min(), "ratio_max": e.max(),
        "fraction_low": (units < low).mean(), "fraction_high": (units > high).mean(),
        "ess": w.mean() ** 2 / (w * w).mean() if w.any() else 0.0, "seq_mean": means.mean(),
        "seq_std": means.std(ddof=1) if means.size > 1 else 0.0, "seq_min": means.min(), "seq_max": means.max(),
        "seq_deviation_max": np.abs(means - 1).max(), "seq_fraction_low": (ratios < low).mean(),
        "seq_fraction_high": (ratios > high).mean(), "rejected_fraction": (~keep).mean(),
        "seq_rejected_fraction": rejects.mean(),
    }  # fmt: skip
    return {name: float(x) if of_sequences else 0.0 for name, x in found.items()}


def _allowed(name: str, threshold: Any, c: Any) -> Any:
    statistic, _, of = name.rpartition("_")
    values = {"k1": -c, "k2": c * c / 2, "k3": np.expm1(c) - c, "ratio": c}[of]
    found = {"token": values, "seq_sum": values.sum(), "seq_mean": values.mean(), "seq_max": values.max()}[statistic]
    if of not in ("k1", "ratio"):
        return found <= threshold
    low, high = threshold if isinstance(threshold, (tuple, list)) else (1.0 / threshold, threshold)
    return (found >= math.log(low)) & (found <= math.log(high))
