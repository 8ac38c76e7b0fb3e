"""Reference of linear_sample in float64: the reference of sample on the logits of linear."""

from __future__ import annotations

from typing import Any

from .linear import linear_reference
from .sample import SampleReference, sample_reference


def linear_sample_reference(hidden: Any, weight: Any, *, bias: Any = None, **options: Any) -> SampleReference:
    """:func:`sample_reference` applied to the unrounded logits of :func:`linear_reference`.

    Args: hidden: ``[num_rows, in_features]``; weight: ``[vocab_size, in_features]``; bias: ``[vocab_size]`` or None;
        NumPy arrays in any float dtype; ``options``: as for :func:`sample_reference`.
    """
    return sample_reference(linear_reference(hidden, weight, bias)["y"], **options)
