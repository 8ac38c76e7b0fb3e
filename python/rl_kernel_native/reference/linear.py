"""float64 reference of linear in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def linear_reference(x: Any, weight: Any, bias: Any = None, *, dy: Any = None) -> dict[str, np.ndarray]:
    """``y = x W^T + bias`` in float64 and, with ``dy``, its gradients.

    Args:
        x: ``[..., in_features]``; weight: ``[out_features, in_features]``; bias: ``[out_features]``;
        dy: ``[..., out_features]``; NumPy arrays (or what ``numpy.asarray`` takes) in any float dtype.
    Returns: ``y``, and with ``dy`` also ``dx``, ``dweight`` and ``dbias``, float64. For each result there is a
        ``<name>_scale``, its sum taken over absolute values; error bounds grow with the scale.
    """
    a, w = _rows(x), np.asarray(weight).astype(np.float64)
    leading = np.asarray(x).shape[:-1]
    b = np.zeros(len(w)) if bias is None else np.asarray(bias).astype(np.float64)
    out = {"y": a @ w.T + b, "y_scale": abs(a) @ abs(w).T + abs(b)}
    if dy is not None:
        g = _rows(dy)
        out |= {"dx": g @ w, "dx_scale": abs(g) @ abs(w)}
        out |= {"dweight": g.T @ a, "dweight_scale": abs(g).T @ abs(a)}
        out |= {"dbias": g.sum(0), "dbias_scale": abs(g).sum(0)}
    for name in ("y", "dx"):
        for key in (name, f"{name}_scale"):
            if key in out:
                out[key] = out[key].reshape(*leading, out[key].shape[-1])
    return out


def _rows(array: Any) -> np.ndarray:
    wide = np.asarray(array).astype(np.float64)
    return wide.reshape(int(np.prod(wide.shape[:-1])), wide.shape[-1])
