"""float64 reference of optimal_token_baseline in NumPy, written from the formulas alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from .sequences import spans

__all__ = ["optimal_token_baseline_reference"]


def optimal_token_baseline_reference(
    rewards: Any,
    logprob: Any,
    sum_p_sq: Any,
    mask: Any = None,
    group_offsets: Any = None,
    *,
    group_size: int | None = None,
    importance_weight: Any = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
    cu_seqlens: Any = None,
) -> dict[str, np.ndarray]:
    """``advantages`` and ``returns`` of :func:`optimal_token_baseline` in float64, and ``scale``, a factor of the error
    bounds. The scale of a position is the group's largest sum of ``|rewards|`` from the position on, times ``1 + n /
    w``. Here n is the number of the group's tokens up to the position, and w is the sum of W over the group at the
    position, as in the operator's docstring.

    Args: as :func:`optimal_token_baseline`, NumPy arrays or what ``numpy.asarray`` takes.
    Source: docs/objectives.md.
    """
    shape = np.asarray(logprob).shape
    all_counts = np.ones(shape, bool) if mask is None else np.asarray(mask) != 0
    found = {name: np.zeros(shape) for name in ("advantages", "returns", "scale")}
    of = spans(shape, cu_seqlens)

    def values(x: Any, s: int) -> Any:
        x, counts = np.asarray(x, np.float64), all_counts[of[s]]
        return np.where(counts, x[of[s]] if x.shape == shape else x.reshape(-1)[s], 0.0)

    given = np.asarray(rewards).shape == shape
    edges = np.arange(0, len(of) + 1, group_size) if group_offsets is None else np.asarray(group_offsets)
    for first, last in itertools.pairwise(edges.tolist()):
        counts, to_go, weight, sizes = [], [], [], []
        for s in range(first, last):
            c, r = all_counts[of[s]], values(rewards, s)
            w = np.maximum(1 - 2 * np.exp(values(logprob, s)) + values(sum_p_sq, s), 0)
            if importance_weight is not None:
                w = w * values(importance_weight, s) ** 2
            counts.append(c)
            to_go.append(np.cumsum(r[::-1])[::-1] if given else r)
            sizes.append(np.cumsum(np.abs(r[::-1]))[::-1] if given else np.abs(r))
            weight.append(np.cumsum(w * c) * c)
        lengths = sorted((int(c.sum()) for c in counts), reverse=True)
        for s, c, g in zip(range(first, last), counts, to_go, strict=True):
            n = c.size
            num, den, largest, up_to = (np.zeros(n) for _ in range(4))
            for x, w, size, k in zip(to_go, weight, sizes, counts, strict=True):
                m = min(n, x.size)
                num[:m] += (x * w)[:m]
                den[:m] += w[:m]
                largest[:m] = np.maximum(largest[:m], size[:m])
                up_to[:m] += (np.cumsum(k) * k)[:m]
            baseline = num / (den + eps)
            if last - first == 1:
                baseline[:] = 0
            elif zero_tail and c.sum() == lengths[0] > lengths[1]:
                baseline[lengths[1] :] = 0
            found["advantages"][of[s]] = (g - baseline) * c
            found["returns"][of[s]] = g * c
            found["scale"][of[s]] = largest * (1 + up_to / (den + eps)) * c
    return found
