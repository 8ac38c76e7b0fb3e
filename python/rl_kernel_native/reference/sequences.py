"""Sequences of padded or packed arrays, for references."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np


def sequences_of(arrays: tuple[Any, ...], mask: Any, cu_seqlens: Any) -> Iterator[tuple[np.ndarray, ...]]:
    """The tokens that count of each sequence, of ``arrays`` in the order given: ``[num_sequences, num_tokens]``, or
    ``[num_tokens]`` with ``cu_seqlens`` or of one sequence."""
    arrays = tuple(map(np.asarray, arrays))
    counts = np.ones(arrays[0].shape, bool) if mask is None else np.asarray(mask) != 0
    if cu_seqlens is not None:
        cuts = np.asarray(cu_seqlens)
        for begin, end in itertools.pairwise(cuts):
            yield tuple(a[begin:end][counts[begin:end]] for a in arrays)
        return
    for row in range(len(np.atleast_2d(arrays[0]))):
        yield tuple(np.atleast_2d(a)[row][np.atleast_2d(counts)[row]] for a in arrays)
