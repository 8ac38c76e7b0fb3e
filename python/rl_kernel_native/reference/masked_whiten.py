"""float64 reference of masked_whiten in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def masked_whiten_reference(
    x: Any, mask: Any = None, cu_seqlens: Any = None, *, eps: float = 1e-8, shift_mean: bool = True,
    unbiased: bool = True,
) -> dict[str, np.ndarray]:  # fmt: skip
    """``y`` float64 of the shape of ``x``, ``mean`` and ``var``.

    Args: as :func:`rl_kernel_native.masked_whiten`, NumPy arrays or what ``numpy.asarray`` takes. The result does not
        depend on ``cu_seqlens``.
    """
    values = np.asarray(x).astype(np.float64)
    counted = np.ones(values.shape, bool) if mask is None else np.asarray(mask) != 0
    of = values[counted]
    mean = of.mean() if of.size else np.float64(0.0)
    var = ((of - mean) ** 2).sum() / (of.size - 1 if unbiased else of.size) if of.size > 1 else np.float64(0.0)
    y = np.zeros(values.shape)
    y[counted] = (of - mean) / np.sqrt(var + eps) + (0.0 if shift_mean else mean)
    return {"y": y, "mean": np.asarray(mean), "var": np.asarray(var)}
