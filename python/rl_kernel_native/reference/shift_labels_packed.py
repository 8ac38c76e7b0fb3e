"""References of labels and masks in plain Python, token by token."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from .sequences import spans as _rows


def shift_labels_packed_reference(
    ids: Any,
    cu_seqlens: Any,
    *,
    mask: Any = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_layout: str = "zigzag",
    ignore_index: int = -100,
) -> np.ndarray:
    """Computes all labels, then selects a rank's labels, chunk by chunk.

    Args: as :func:`rl_kernel_native.shift_labels_packed`.
    """
    tokens = np.asarray(ids)
    labels = np.full(tokens.shape, ignore_index, tokens.dtype)
    edges = np.asarray(cu_seqlens).tolist()
    for begin, end in itertools.pairwise(edges):
        for t in range(begin, end - 1):
            if mask is None or np.asarray(mask)[t + 1] != 0:
                labels[t] = tokens[t + 1]
    if cp_size == 1:
        return labels
    if cp_layout == "contiguous":
        return np.split(labels, cp_size)[cp_rank]
    parts = []
    for begin, end in itertools.pairwise(edges):
        chunks = np.split(labels[begin:end], 2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    rest = (len(tokens) - edges[-1]) // cp_size  # tokens after the last sequence
    return np.concatenate([*parts, np.full(rest, ignore_index, tokens.dtype)])


def loss_mask_from_spans_reference(
    spans: Any, span_offsets: Any, cu_seqlens: Any = None, *, num_tokens: int
) -> np.ndarray:
    """Args: as :func:`rl_kernel_native.loss_mask_from_spans`."""
    offsets = np.asarray(span_offsets).tolist()
    shape = (num_tokens,) if cu_seqlens is not None else (len(offsets) - 1, num_tokens)
    mask = np.zeros(shape, bool)
    for row, a, b in zip(_rows(shape, cu_seqlens), offsets[:-1], offsets[1:], strict=True):
        for begin, end in np.asarray(spans)[a:b].tolist():
            mask[row][begin:end] = True
    return mask


def tool_mask_reference(
    ids: Any, begin: Any, end: Any, cu_seqlens: Any = None, *, include_end: bool = True
) -> np.ndarray:
    """Args: as :func:`rl_kernel_native.tool_mask`."""
    tokens = np.asarray(ids)
    mask = np.zeros(tokens.shape, bool)
    first, last = list(begin), list(end)
    for row in _rows(tokens.shape, cu_seqlens):
        sequence = tokens[row].tolist()
        inside = False
        closing: set[int] = set()  # positions of the ids of `end`
        for p in range(len(sequence)):
            mask[row][p] = inside
            so_far = sequence[: p + 1]
            if so_far[-len(last) :] == last:
                closing.update(range(p + 1 - len(last), p + 1))
            if so_far[-len(first) :] == first:
                inside = True
            elif so_far[-len(last) :] == last:
                inside = False
        if not include_end:
            for p in closing:
                mask[row][p] = False
    return mask
