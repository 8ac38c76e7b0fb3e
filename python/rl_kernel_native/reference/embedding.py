"""float64 reference of embedding in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def embedding_reference(
    ids: Any,
    weight: Any,
    *,
    dy: Any = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
) -> dict[str, np.ndarray]:
    """The rows of ``weight`` at ``ids``, and with ``dy`` the gradient of ``weight``, in float64. Nothing is rounded.

    Args: as :func:`rl_kernel_native.embedding`, NumPy arrays (or what ``numpy.asarray`` takes) in any float dtype.
    Returns: ``y``; with ``dy`` also ``dweight`` and ``dweight_scale``. The scale is ``dweight`` summed over absolute
        values; error bounds grow with the scale.
    """
    tokens, table = np.asarray(ids).astype(np.int64), np.asarray(weight).astype(np.float64)
    size = vocab_start + len(table) if vocab_size is None else vocab_size
    bad = (tokens < 0) | (tokens >= size)
    owned = ~bad & (tokens >= vocab_start) & (tokens < vocab_start + len(table))
    y = np.zeros((*tokens.shape, table.shape[1]))
    y[bad] = np.nan
    y[owned] = table[tokens[owned] - vocab_start]
    if dy is None:
        return {"y": y}
    learns = owned if padding_idx is None else owned & (tokens != padding_idx)
    of_tokens = np.asarray(dy).astype(np.float64)[learns]
    rows = tokens[learns] - vocab_start
    found = {"y": y, "dweight": np.zeros(table.shape), "dweight_scale": np.zeros(table.shape)}
    np.add.at(found["dweight"], rows, of_tokens)
    np.add.at(found["dweight_scale"], rows, np.abs(of_tokens))
    return found
