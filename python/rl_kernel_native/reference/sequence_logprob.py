"""float64 reference of sequence_logprob in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from .sequences import spans


def sequence_logprob_reference(
    logprob: Any, mask: Any = None, cu_seqlens: Any = None, *, dsum: Any = None
) -> dict[str, np.ndarray]:
    """The sum over the tokens that count, in float64. Nothing is rounded.

    Args: as :func:`rl_kernel_native.sequence_logprob`, NumPy arrays (or what ``numpy.asarray`` takes); with ``dsum``
        the result also has the gradient ``d_logprob``.
    Returns: ``sum`` and ``count`` of each sequence, and ``scale``, the sum over absolute values. The error bound grows
        with this scale.
    """
    x = np.asarray(logprob).astype(np.float64)
    kept = np.ones(x.shape, bool) if mask is None else np.asarray(mask) != 0
    x = np.where(kept, x, 0.0)
    rows = spans(x.shape, cu_seqlens)
    out = {
        "sum": np.array([x[row].sum() for row in rows]),
        "scale": np.array([np.abs(x[row]).sum() for row in rows]),
        "count": np.array([int(kept[row].sum()) for row in rows], np.int64),
    }
    if dsum is not None:
        out["d_logprob"] = np.zeros(x.shape)
        for row, value in zip(rows, np.asarray(dsum).astype(np.float64), strict=True):
            out["d_logprob"][row] = np.where(kept[row], value, 0.0)
    return out
