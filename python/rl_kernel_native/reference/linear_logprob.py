"""float64 reference of linear_logprob in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from .linear import linear_reference
from .logprob import logprob_reference


def linear_logprob_reference(
    hidden: Any,
    weight: Any,
    target: Any,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    loss_mask: Any = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """:func:`logprob_reference` of the logits of :func:`linear_reference`, which nothing rounds.

    Args: hidden: ``[..., in_features]``; weight: ``[vocab_size, in_features]``; loss_mask: bool ``[...]``, False where
        a row is ignored; target, ``options``: as for :func:`logprob_reference`; NumPy arrays in any float dtype.
        Ignored rows of ``hidden`` are not read.
    Returns: as :func:`logprob_reference`.
    """
    if loss_mask is not None:
        target = np.where(loss_mask, target, ignore_index)
    rows = np.where((np.asarray(target) == ignore_index)[..., None], 0.0, np.asarray(hidden).astype(np.float64))
    logits = linear_reference(rows, weight, bias)["y"]
    return logprob_reference(logits, target, ignore_index=ignore_index, **options)
