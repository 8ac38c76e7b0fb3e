"""float64 reference of silu_mul and gelu_mul in NumPy, written from the formulas alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def silu_mul_reference(gate: Any, up: Any = None, *, dy: Any = None) -> dict[str, np.ndarray]:
    """``y = gate * sigmoid(gate) * up`` in float64, and with ``dy`` its gradients. Nothing is rounded.

    Args:
        gate, up, dy: ``[..., I]``; without ``up``, ``gate`` is ``[..., 2 * I]``: first the gate, then up. NumPy arrays
            (or what ``numpy.asarray`` takes) in any float dtype.
    Returns: ``y``, ``act`` (the activation) and ``slope`` (its derivative), and with ``dy`` also ``d_gate`` and
        ``d_up``; each ``[..., I]`` float64.
    """
    gate, up = _halves(gate, up)
    s = np.where(gate < 0, np.exp(-np.abs(gate)), 1) / (1 + np.exp(-np.abs(gate)))
    return _results(gate * s, s * (1 + gate * (1 - s)), up, dy)


def gelu_mul_reference(
    gate: Any, up: Any = None, *, approximate: str = "tanh", dy: Any = None
) -> dict[str, np.ndarray]:
    """:func:`silu_mul_reference` with ``gelu(gate)`` as the activation, computed by erf for ``"none"`` and by tanh for
    ``"tanh"``."""
    gate, up = _halves(gate, up)
    if approximate == "none":
        half = np.vectorize(math.erfc, otypes=[np.float64])(-gate / math.sqrt(2)) / 2 if gate.size else gate
        slope = half + gate * np.exp(-gate * gate / 2) / math.sqrt(2 * math.pi)
        return _results(gate * half, slope, up, dy)
    root = math.sqrt(2 / math.pi)
    t = np.tanh(root * (gate + 0.044715 * gate**3))
    slope = (1 + t) / 2 + gate / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * gate * gate)
    return _results(gate / 2 * (1 + t), slope, up, dy)


def _halves(gate: Any, up: Any) -> tuple[np.ndarray, np.ndarray]:
    gate = np.asarray(gate).astype(np.float64)
    if up is not None:
        return gate, np.asarray(up).astype(np.float64)
    columns = gate.shape[-1] // 2
    return gate[..., :columns], gate[..., columns:]


def _results(act: np.ndarray, slope: np.ndarray, up: np.ndarray, dy: Any) -> dict[str, np.ndarray]:
    out = {"y": act * up, "act": act, "slope": slope}
    if dy is not None:
        wide = np.asarray(dy).astype(np.float64)
        out["d_gate"], out["d_up"] = wide * up * slope, wide * act
    return out
