"""Reference of pack and unpack in NumPy, token by token. The reference only moves values and rounds nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def pack_reference(
    tensors: Any, lengths: Any = None, mask: Any = None, *, max_tokens: int | None = None, fill_value: float = 0
) -> dict[str, Any]:
    """The tokens that are kept, one sequence after another.

    Args: as :func:`rl_kernel_native.pack`, one array ``[num_sequences, num_tokens, ...]``.
    Returns: ``packed`` ``[max_tokens, ...]``, ``cu_seqlens``, and with a mask ``positions``.
    """
    x = np.asarray(tensors)
    rows, columns = x.shape[:2]
    kept = np.arange(columns) < np.asarray(lengths)[:, None] if mask is None else np.asarray(mask) != 0
    capacity = rows * columns if max_tokens is None else max_tokens
    packed = np.full((capacity, *x.shape[2:]), fill_value, x.dtype)
    at = 0
    cu_seqlens = [0]
    for i in range(rows):
        for t in np.flatnonzero(kept[i]):
            packed[at] = x[i, t]
            at += 1
        cu_seqlens.append(at)
    positions = np.where(kept, np.cumsum(kept, 1) - 1, -1).astype(np.int32)
    return {"packed": packed, "cu_seqlens": np.array(cu_seqlens, np.int32), "positions": positions}


def unpack_reference(
    tensors: Any, cu_seqlens: Any, max_seqlen: int, *, positions: Any = None, fill_value: float = 0
) -> np.ndarray:
    """One packed array as padded rows.

    Args: as :func:`rl_kernel_native.unpack`.
    """
    x = np.asarray(tensors)
    edges = np.asarray(cu_seqlens).tolist()
    padded = np.full((len(edges) - 1, max_seqlen, *x.shape[1:]), fill_value, x.dtype)
    for i, (begin, end) in enumerate(itertools.pairwise(edges)):
        for t in range(max_seqlen):
            at = t if positions is None else int(positions[i][t])
            if 0 <= at < end - begin:
                padded[i, t] = x[begin + at]
    return padded
