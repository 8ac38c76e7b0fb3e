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
) -> dict[str, np.ndarray]:
    """``weights`` and ``mask`` of :func:`importance_weights` in float64, in the shape of ``logprob``.

    Args: as :func:`importance_weights`, NumPy arrays or what ``numpy.asarray`` takes.
    Source: docs/objectives.md.
    """
    shape = np.asarray(logprob).shape
    limit = math.inf if log_ratio_clamp is None else log_ratio_clamp
    if mode == "truncate":
        lower = 0.0
    elif lower is None:
        lower = 1.0 / upper
    weights, kept = np.zeros(shape).reshape(-1), np.zeros(shape).reshape(-1)
    mean_of: list[float] = []
    indices = np.arange(weights.size).reshape(shape)
    for x, y, at in sequences_of((logprob, rollout_logprob, indices), mask, cu_seqlens):
        if not x.size:
            continue
        d = x.astype(np.float64) - y
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
    if normalize and mean_of and np.mean(mean_of) > 1e-8:
        weights /= np.mean(mean_of)
    return {"weights": weights.reshape(shape), "mask": kept.reshape(shape)}


def _allowed(name: str, threshold: Any, c: Any) -> Any:
    values = {"k1": -c, "k2": c * c / 2, "k3": np.expm1(c) - c}[name[-2:]]
    found = {"token": values, "seq_sum": values.sum(), "seq_mean": values.mean(), "seq_max": values.max()}[name[:-3]]
    if not name.endswith("k1"):
        return found <= threshold
    low, high = threshold if isinstance(threshold, (tuple, list)) else (1.0 / threshold, threshold)
    return (found >= math.log(low)) & (found <= math.log(high))
