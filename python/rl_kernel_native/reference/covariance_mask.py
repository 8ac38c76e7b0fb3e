"""float64 reference of covariance_mask in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from .sequences import spans

__all__ = ["covariance_mask_reference"]


def covariance_mask_reference(
    logprob: Any,
    old_logprob: Any,
    advantage: Any,
    mask: Any = None,
    *,
    kind: str,
    ratio: float,
    seed: int | None = None,
    lower: float | None = None,
    upper: float | None = None,
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    cu_seqlens: Any = None,
) -> dict[str, np.ndarray]:
    """``selected`` of :func:`covariance_mask`, and each token's ``covariance`` in float64, NaN where the mask is 0.

    Args: as :func:`covariance_mask`, NumPy arrays or what ``numpy.asarray`` takes.
    Source: docs/objectives.md.
    """
    ell = np.asarray(logprob, np.float64)
    counts = np.ones(ell.shape, bool) if mask is None else np.asarray(mask) != 0
    sequence, position, a = (np.zeros(ell.shape) for _ in range(3))
    given = np.asarray(advantage, np.float64)
    for s, span in enumerate(spans(ell.shape, cu_seqlens)):
        sequence[span], position[span] = s, np.arange(ell[span].size)
        a[span] = given[span] if given.shape == ell.shape else given.reshape(-1)[s]
    covariance, selected = np.full(ell.shape, np.nan), np.zeros(ell.shape)
    n = int(counts.sum())
    if n == 0:
        return {"selected": selected, "covariance": covariance}
    covariance[counts] = (a - a[counts].mean())[counts] * (ell - ell[counts].mean())[counts]
    of = covariance[counts]
    if kind == "kl":
        candidates, order = np.ones(n, bool), np.argsort(-of, kind="stable")
    else:
        r = np.exp(ell[counts] - np.asarray(old_logprob, np.float64)[counts])
        low, high = (
            1 - (0.2 if epsilon_low is None else epsilon_low),
            1 + (0.2 if epsilon_high is None else epsilon_high),
        )
        clipped = -a[counts] * np.clip(r, low, high) > -a[counts] * r
        candidates = (of > (1.0 if lower is None else lower)) & (of < (5.0 if upper is None else upper)) & ~clipped
        drawn = np.minimum(_philox(seed or 0, sequence[counts], position[counts]), 2**32 - 2)
        order = np.argsort(drawn, kind="stable")
    chosen = order[candidates[order]][: max(int(ratio * n), 1)]
    selected[tuple(i[chosen] for i in np.nonzero(counts))] = 1
    return {"selected": selected, "covariance": covariance}


def _philox(seed: int, sequence: Any, position: Any) -> Any:
    """Returns word 0 of philox4x32-10 for the counter [sequence low, sequence high, position, 0]."""
    low = np.uint64(0xFFFFFFFF)
    sequence, position = sequence.astype(np.uint64), position.astype(np.uint64)
    x, y, z, w = sequence & low, sequence >> np.uint64(32), position, np.zeros_like(position)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * x, np.uint64(0xCD9E8D57) * z
        x, y, z, w = (
            (p1 >> np.uint64(32)) ^ y ^ np.uint64(k0), p1 & low, (p0 >> np.uint64(32)) ^ w ^ np.uint64(k1), p0 & low,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x
