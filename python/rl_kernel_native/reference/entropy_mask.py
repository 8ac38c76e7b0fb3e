"""Reference of entropy_mask in NumPy, written from the definition of a quantile alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["entropy_mask_reference"]


def entropy_mask_reference(
    entropy: Any, mask: Any = None, *, top_quantile: float, cu_seqlens: Any = None
) -> np.ndarray:
    """The mask of :func:`entropy_mask`.

    Args: as :func:`entropy_mask`, NumPy arrays or what ``numpy.asarray`` takes.
    Source: docs/objectives/entropy.md.
    """
    del cu_seqlens  # the result does not depend on cu_seqlens
    h = np.asarray(entropy, np.float32)
    counts = np.ones(h.shape, bool) if mask is None else np.asarray(mask) != 0
    selected = np.zeros(h.shape, np.float32)
    of = np.sort(h[counts])  # NaN sorts last
    if of.size == 0:
        return selected
    # If the quantile lies between two different entropies, the upper entropy is the smallest that is selected.
    rank = math.ceil(np.float32(1.0 - top_quantile) * np.float32(of.size - 1))
    least = of[min(rank, of.size - 1)]
    selected[counts & (np.isnan(h) | (h >= least))] = 1
    return selected
