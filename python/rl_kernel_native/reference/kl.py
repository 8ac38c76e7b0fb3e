"""float64 reference of the KL estimators, from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from .policy_loss import _limited, _Numpy, _symmetric, _times_ratio

__all__ = ["kl_reference"]


def kl_reference(
    logprob: Any,
    ref_logprob: Any,
    mask: Any = None,
    *,
    estimator: str,
    straight_through: bool = False,
    input_clamp: float | None = None,
    clamp: float | None = None,
    old_logprob: Any = None,
    importance_weight: Any = None,
    xp: Any = None,
) -> Any:
    """The values of :func:`kl` in float64.

    Args:
        logprob, ..., importance_weight: as :func:`kl`, anything that becomes an array.
        xp: a namespace with NumPy's functions and ``stop``, which stops a gradient; None: NumPy.
    Returns: float64, of the shape of ``logprob``; 0 where masked.
    Raises: no errors of its own.
    Source: docs/objectives.md.
    """
    xp = _Numpy if xp is None else xp
    keep = np.ones(tuple(logprob.shape), bool) if mask is None else np.asarray(mask) != 0

    def tokens(array: Any) -> Any:
        """Returns the array with 0 in masked slots, because those may hold any value."""
        a = xp.asarray(array)
        kept = keep if isinstance(a, np.ndarray) else a.new_tensor(keep, dtype=bool)
        return xp.where(kept, a, 0.0 * xp.asarray(np.zeros(keep.shape)))

    ell, f = tokens(logprob), tokens(ref_logprob)
    e = _limited(xp, f - ell, *_symmetric(input_clamp))
    k = {"k1": lambda: -e, "k2": lambda: 0.5 * e * e, "k3": lambda: xp.expm1(e) - e, "abs": lambda: xp.abs(e)}[
        estimator
    ]()
    if straight_through:
        k2 = 0.5 * (ell - f) ** 2
        k = k2 - xp.stop(k2) + xp.stop(k)
    if old_logprob is not None:
        k = _times_ratio(xp, estimator, k, e, xp.exp(ell - tokens(old_logprob)))
    if importance_weight is not None:
        k = k * tokens(importance_weight)
    limited = _limited(xp, k, *_symmetric(clamp))
    return tokens(k - xp.stop(k) + xp.stop(limited) if straight_through else limited)
