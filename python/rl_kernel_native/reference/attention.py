"""float64 reference of attention and its gradients in NumPy, written from the formulas alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def attention_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window_size: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    block_table: Any = None,
    dout: Any = None,
    dlse: Any = None,
) -> dict[str, np.ndarray]:
    """``softmax(softmax_scale * q k^T) v`` over what each query sees, in float64. Nothing is rounded.

    Args: as :func:`rl_kernel_native.attention`, NumPy arrays (or what ``numpy.asarray`` takes) in any float dtype;
        ``dout`` and ``dlse``: of :func:`rl_kernel_native.attention_backward`, not with pages.
    Returns: ``out`` and ``lse`` of the shapes that attention gives; with ``dout`` also ``dq``, ``dk`` and ``dv``.
    """
    q, k, v = (_wide(a) for a in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    tokens_q = _places(q, cu_seqlens_q, None, seqused_q)
    tokens_k = _paged(k, block_table, seqused_k) if block_table is not None else None
    if tokens_k is None:
        tokens_k = _places(k, cu_seqlens_k, leftpad_k, seqused_k)
    flat_q = q.reshape(-1, *q.shape[-2:])
    flat_k, flat_v = (a.reshape(-1, *a.shape[-2:]) for a in (k, v))
    out, lse = np.zeros(flat_q.shape), np.full(flat_q.shape[:2], -np.inf)
    grads = {name: np.zeros(a.shape) for name, a in (("dq", flat_q), ("dk", flat_k), ("dv", flat_v))}
    flat_dout = None if dout is None else _wide(dout).reshape(flat_q.shape)
    flat_dlse = None if dlse is None else _heads_last(_wide(dlse), q).reshape(lse.shape)
    group = flat_q.shape[1] // flat_k.shape[1]
    for rows, columns in zip(tokens_q, tokens_k, strict=True):
        sees = _sees(len(rows), len(columns), causal, window_size)
        used = np.asarray(sees.any(1))
        for head in range(flat_q.shape[1]):
            x, y, z = flat_q[rows, head], flat_k[columns, head // group], flat_v[columns, head // group]
            p, row_lse = _softmax(x @ y.T * scale, sees)
            values = p @ z
            out[rows, head], lse[rows, head] = values, row_lse
            if flat_dout is None:
                continue
            g = np.where(used[:, None], flat_dout[rows, head], 0)
            delta = (g * values).sum(1)
            if flat_dlse is not None:
                delta = delta - np.where(used, flat_dlse[rows, head], 0)
            ds = p * (g @ z.T - delta[:, None]) * scale
            grads["dq"][rows, head] = ds @ y
            np.add.at(grads["dk"], (columns, head // group), ds.T @ np.where(used[:, None], x, 0))
            np.add.at(grads["dv"], (columns, head // group), p.T @ g)
    shaped = np.moveaxis(lse.reshape(q.shape[:-1]), -1, -2)
    found = {"out": out.reshape(q.shape), "lse": shaped}
    if flat_dout is not None:
        found |= {name: a.reshape(like.shape) for (name, a), like in zip(grads.items(), (q, k, v), strict=True)}
    return found


def _places(x: np.ndarray, cu_seqlens: Any, leftpad: Any, used: Any) -> list[np.ndarray]:
    """Indices of each sequence's tokens in use, among all tokens."""
    if cu_seqlens is not None:
        offsets = np.asarray(cu_seqlens)
        found = [np.arange(a, b) for a, b in itertools.pairwise(offsets)]
    else:
        batch, tokens = x.shape[:2]
        found = [np.arange(b * tokens, (b + 1) * tokens) for b in range(batch)]
    if leftpad is not None:
        found = [place[pad:] for place, pad in zip(found, np.asarray(leftpad), strict=True)]
    if used is not None:
        found = [place[:count] for place, count in zip(found, np.asarray(used), strict=True)]
    return found


def _paged(k: np.ndarray, block_table: Any, used: Any) -> list[np.ndarray]:
    page_size = k.shape[1]
    found = []
    for pages, count in zip(np.asarray(block_table), np.asarray(used), strict=True):
        j = np.arange(count)
        found.append(pages[j // page_size].astype(np.int64) * page_size + j % page_size)
    return found


def _sees(queries: int, keys: int, causal: bool, window_size: int | None) -> np.ndarray:
    if not causal:
        return np.ones((queries, keys), bool)
    behind = keys - queries + np.arange(queries)[:, None] - np.arange(keys)
    return (behind >= 0) & (behind < (np.inf if window_size is None else window_size))


def _softmax(scores: np.ndarray, sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    masked = np.where(sees, scores, -np.inf)
    top = masked.max(1, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(masked - top[:, None])
    total = e.sum(1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)
    return e / np.where(total > 0, total, 1)[:, None], lse


def _heads_last(rows: np.ndarray, q: np.ndarray) -> np.ndarray:
    """``[batch, heads, tokens]`` or ``[heads, tokens]`` as ``[..., tokens, heads]``."""
    assert rows.ndim == q.ndim - 1
    return np.moveaxis(rows, -2, -1)


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
