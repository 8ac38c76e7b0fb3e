"""float64 reference of logprob in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def logprob_reference(
    logits: Any,
    target: Any,
    *,
    temperature: Any = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    kept: tuple[Any, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Log-probability, lse, entropy and sum of squared probabilities in float64.

    Args: as :func:`rl_kernel_native.logprob`, as NumPy arrays (or what ``numpy.asarray`` takes), logits in any float
        dtype.
    Returns: ``logprob``, ``lse``, ``entropy``, ``sum_p_sq``, each ``[...]`` float64, and ``max_abs_z`` ``[...]``, the
        largest finite logit magnitude after temperature. Error bounds grow with this scale.
    """
    x = np.asarray(logits).astype(np.float64)
    ids = np.asarray(target).astype(np.int64)
    rows = x.reshape(-1, x.shape[-1])
    y = ids.reshape(-1)
    t = np.broadcast_to(np.asarray(temperature, dtype=np.float64).reshape(-1), y.shape)
    names = ("logprob", "lse", "entropy", "sum_p_sq", "max_abs_z")
    out = {name: np.zeros(y.shape) for name in names}
    width = rows.shape[-1] if valid_vocab is None else valid_vocab
    for i in range(len(y)):
        if y[i] == ignore_index:
            continue
        values = _row(rows[i, :width], int(y[i]), float(t[i]), logit_scale, softcap, _kept_ids(kept, i))
        for name, value in zip(names, values, strict=True):
            out[name][i] = value
    return {name: value.reshape(ids.shape) for name, value in out.items()}


def _kept_ids(kept: tuple[Any, Any] | None, row: int) -> np.ndarray | None:
    if kept is None:
        return None
    ids, offsets = np.asarray(kept[0]), np.asarray(kept[1])
    chosen = ids[offsets[row] : offsets[row + 1]]
    return chosen if len(chosen) else None


def scaled_logits(x: np.ndarray, scale: float, softcap: float | None, temperature: Any) -> np.ndarray:
    """Returns z, the logits after scale, softcap and temperature. ``temperature`` is a number, or an array that
    broadcasts to ``x``."""
    z = x * scale
    if softcap is not None:
        z = np.where(np.isinf(z), z, softcap * np.tanh(z / softcap))
    scaled: np.ndarray = z / temperature
    return scaled


def _row(
    x: np.ndarray, y: int, temperature: float, scale: float, softcap: float | None, kept: np.ndarray | None
) -> tuple[float, float, float, float, float]:
    z = scaled_logits(x, scale, softcap, temperature)
    if kept is not None:
        mask = np.ones(z.shape, dtype=bool)
        mask[kept] = False
        if 0 <= y < len(z):
            mask[y] = False
        z = np.where(mask, -np.inf, z)
    finite = z[np.isfinite(z)]
    largest = float(np.max(np.abs(finite))) if len(finite) else 0.0
    if np.isnan(z).any() or np.isposinf(z).any() or not len(finite) or not temperature > 0:
        return (np.nan, np.nan, np.nan, np.nan, largest)
    top = z.max()
    e = np.exp(z - top)
    total = e.sum()
    lse = top + np.log(total)
    p = e / total
    with np.errstate(invalid="ignore"):
        entropy = lse - np.sum(np.where(p > 0, p * np.where(np.isinf(z), 0.0, z), 0.0))
    logp = z[y] - lse if 0 <= y < len(z) else np.nan
    return (logp, lse, entropy, float(np.sum(p * p)), largest)
