"""float64 reference of scatter_rewards in NumPy, written from the formulas alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .sequences import spans as spans_of

__all__ = ["scatter_rewards_reference"]


def scatter_rewards_reference(
    rewards: Any,
    mask: Any,
    *,
    cu_seqlens: Any = None,
    token_rewards: Any = None,
    spans: Any = None,
    span_offsets: Any = None,
    span_rewards: Any = None,
    place: str = "last",
    logprob: Any = None,
    ref_logprob: Any = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
    kl_input_clamp: float | None = None,
    kl_clamp: float | None = None,
    length_penalty: float = 0.0,
    overlong: tuple[int, int, float] | None = None,
    cost: Any = None,
    lagrange: Any = None,
    normalize_lagrange: bool = False,
) -> dict[str, np.ndarray]:
    """``rewards``, ``costs`` and ``combined`` of :func:`scatter_rewards` in float64, in the shape of ``mask``, and
    ``lengths``.

    Args: as :func:`scatter_rewards`, NumPy arrays or what ``numpy.asarray`` takes.
    Source: docs/objectives.md.
    """
    keep = np.asarray(mask) != 0
    out, costs = np.zeros(keep.shape), np.zeros(keep.shape)
    if token_rewards is not None:
        out[keep] = np.asarray(token_rewards, np.float64)[keep]
    if kl_coef:
        e = np.asarray(ref_logprob, np.float64)[keep] - np.asarray(logprob, np.float64)[keep]
        e = np.clip(e, *_symmetric(kl_input_clamp))
        kl = {"k1": -e, "k2": e * e / 2, "k3": np.expm1(e) - e, "abs": np.abs(e)}[kl_estimator]
        out[keep] -= kl_coef * np.clip(kl, *_symmetric(kl_clamp))
    lengths = []
    for s, where in enumerate(spans_of(keep.shape, cu_seqlens)):
        of, tokens = out[where], np.flatnonzero(keep[where])
        lengths.append(tokens.size)
        if not tokens.size:
            continue
        if spans is not None:
            for i in range(int(np.asarray(span_offsets)[s]), int(np.asarray(span_offsets)[s + 1])):
                begin, end = np.asarray(spans)[i]
                inside = tokens[(tokens >= begin) & (tokens < end)]
                if inside.size:
                    share = float(np.asarray(span_rewards)[i]) / (inside.size if place == "spread" else 1)
                    of[{"last": inside[-1:], "first": inside[:1], "spread": inside}[place]] += share
        reward = 0.0 if rewards is None else float(np.asarray(rewards)[s])
        reward -= length_penalty * tokens.size
        if overlong is not None:
            longest, buffer, penalty = overlong
            reward += min(-(tokens.size - (longest - buffer)) / buffer * penalty, 0.0)
        of[tokens[-1]] += reward
        if cost is not None:
            costs[where][tokens[-1]] = np.asarray(cost)[s]
    found = {"rewards": out, "lengths": np.array(lengths, np.int64)}
    if cost is not None:
        found["costs"] = costs
    if lagrange is not None:
        found["combined"] = (out - float(lagrange) * costs) / (1.0 + float(lagrange) if normalize_lagrange else 1.0)
    return found


def _symmetric(limit: float | None) -> tuple[float, float]:
    return (-math.inf, math.inf) if limit is None else (-limit, limit)
