"""Sequences of padded or packed arrays, for references."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np


def spans(shape: tuple[int, ...], cu_seqlens: Any) -> list[Any]:
    """Returns, for each sequence, the index of its tokens in an array of ``shape``: ``[num_sequences, num_tokens]`` or
    ``[num_tokens]``. Without ``cu_seqlens``, a packed array is one sequence."""
    if cu_seqlens is not None:
        return [(slice(a, b),) for a, b in itertools.pairwise(np.asarray(cu_seqlens).tolist())]
    return [(i,) for i in range(shape[0])] if len(shape) == 2 else [slice(None)]


def sequences_of(arrays: tuple[Any, ...], mask: Any, cu_seqlens: Any) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields for each sequence a tuple: from each of ``arrays``, the elements of the sequence's tokens that count."""
    arrays = tuple(map(np.asarray, arrays))
    counts = np.ones(arrays[0].shape, bool) if mask is None else np.asarray(mask) != 0
    for span in spans(arrays[0].shape, cu_seqlens):
        yield tuple(a[span][counts[span]] for a in arrays)
