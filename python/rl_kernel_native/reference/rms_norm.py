"""float64 reference of rms_norm in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def rms_norm_reference(
    x: Any,
    weight: Any,
    eps: float,
    *,
    residual: Any = None,
    weight_offset: float = 0.0,
    dy: Any = None,
    d_new_residual: Any = None,
) -> dict[str, np.ndarray]:
    """``y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset)`` with ``h = x + residual``, in float64.

    Nothing is rounded, not even the sum ``h``. To leave the rounding of ``h`` out of a comparison, pass the rounded
    ``h`` as ``x``.

    Args:
        x, residual: ``[..., K]``; weight: ``[K]`` or None; dy, d_new_residual: ``[..., K]``; NumPy arrays (or what
            ``numpy.asarray`` takes) in any float dtype.
    Returns: ``y``, ``new_residual`` and ``rstd``, and with ``dy`` also ``dx`` and ``dweight``, float64. Error bounds of
        ``dx`` and ``dweight`` also need ``<name>_scale``, their sums over absolute values. Bounds of ``y`` and
        ``dweight`` need ``<name>_other_scale``, the magnitudes that multiply normalised values.
    """
    h = _wide(x) if residual is None else _wide(x) + _wide(residual)
    columns = h.shape[-1]
    w = np.ones(columns) if weight is None else _wide(weight) + weight_offset
    rstd = 1 / np.sqrt((h * h).sum(-1, keepdims=True) / max(columns, 1) + eps)
    xhat = h * rstd
    out = {"y": xhat * w, "y_other_scale": np.abs(w), "new_residual": h, "rstd": rstd[..., 0]}
    if dy is not None:
        g = _wide(dy) * w
        c = (g * xhat).sum(-1, keepdims=True) / max(columns, 1)
        size = (np.abs(g) * np.abs(xhat)).sum(-1, keepdims=True) / max(columns, 1)
        e = np.zeros_like(h) if d_new_residual is None else _wide(d_new_residual)
        out["dx"] = rstd * (g - xhat * c) + e
        out["dx_scale"] = rstd * (np.abs(g) + np.abs(xhat) * size) + np.abs(e)
        products = (_wide(dy) * xhat).reshape(-1, columns)
        out["dweight"], out["dweight_scale"] = products.sum(0), np.abs(products).sum(0)
        out["dweight_other_scale"] = np.abs(_wide(dy)).reshape(-1, columns).sum(0)
    return out


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
