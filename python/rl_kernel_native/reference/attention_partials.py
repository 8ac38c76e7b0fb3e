"""float64 reference of attention's partials and their merge in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import _capped, _paged, _places, _sees, _wide


def split_begin(number: int) -> int:
    """Returns the first key of a split (a range of the keys)."""
    if number < 8:
        return 1024 * number
    return 8192 + 2048 * (number - 8) if number < 36 else 65536 + 4096 * (number - 36)


def split_count(keys: int) -> int:
    """Returns the number of splits that a sequence of ``keys`` keys has."""
    if keys <= 8192:
        return (keys + 1023) // 1024
    return 8 + (keys - 8192 + 2047) // 2048 if keys <= 65536 else 36 + (keys - 65536 + 4095) // 4096


def attention_partials_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    splits: Any = None,
    causal: bool = True,
    window_size: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    block_table: Any = None,
    shared_prefix: Any = None,
) -> dict[str, np.ndarray]:
    """Returns m, l and O of each split (see :class:`rl_kernel_native.AttentionPartials`) in float64. Only m is rounded,
    up to an integer.

    Args: as :func:`rl_kernel_native.attention`.
    Returns: ``stats`` and ``sums``, in the form of :class:`rl_kernel_native.AttentionPartials`.
    """
    q, k, v = (_wide(a) for a in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    tokens_q = _places(q, cu_seqlens_q, None, seqused_q)
    lengths, held = None, seqused_k
    if splits is None:
        if block_table is not None:
            width = len(block_table[0]) + (0 if shared_prefix is None else np.shape(shared_prefix[0])[1])
            own = list(range(split_count(k.shape[1] * width)))
        else:
            own = list(range(split_count(k.shape[0 if cu_seqlens_k is not None else 1])))
    else:
        own, lengths = list(splits), [int(n) for n in np.asarray(seqused_k)]
        held = [sum(len(r) for r in _own_keys(own, n)) for n in lengths]
    tokens_k = (
        _paged(k, block_table, held, shared_prefix)
        if block_table is not None
        else _places(k, cu_seqlens_k, leftpad_k, held)
    )
    flat_q = q.reshape(-1, *q.shape[-2:])
    flat_k, flat_v = (a.reshape(-1, *a.shape[-2:]) for a in (k, v))
    stats = np.zeros((len(own), *flat_q.shape[:2], 2))
    stats[..., 0] = -np.inf
    sums = np.zeros((len(own), *flat_q.shape[:2], v.shape[-1]))
    group = flat_q.shape[1] // flat_k.shape[1]
    for b, (rows, columns) in enumerate(zip(tokens_q, tokens_k, strict=True)):
        length = len(columns) if lengths is None else lengths[b]
        sees, begin = _sees(len(rows), length, causal, window_size), 0
        for s, keys in enumerate(_own_keys(own, length)):
            at, seen = columns[begin : begin + len(keys)], sees[:, keys.start : keys.stop]
            begin += len(keys)
            for head in range(flat_q.shape[1]):
                x, y, z = flat_q[rows, head], flat_k[at, head // group], flat_v[at, head // group]
                scores = np.where(seen, _capped(x @ y.T * scale, softcap)[0] * np.log2(np.e), -np.inf)
                top = np.ceil(scores.max(1, initial=-np.inf))
                weights = np.exp2(scores - np.where(np.isfinite(top), top, 0)[:, None])
                nothing = np.where(seen.any(1), 1.0, 0.0)
                stats[s, rows, head, 0] = top
                stats[s, rows, head, 1] = np.where(top > -np.inf, weights.sum(1), nothing)
                sums[s, rows, head] = weights @ z
    return {
        "stats": stats.reshape(len(own), *q.shape[:-1], 2),
        "sums": sums.reshape(len(own), *q.shape[:-1], v.shape[-1]),
    }


def _own_keys(splits: list[int], length: int) -> list[range]:
    """Returns the keys of each split, for a sequence of ``length`` keys."""
    return [range(min(split_begin(s), length), min(split_begin(s + 1), length)) for s in splits]


def attention_merge_reference(partials: Any, *, sinks: Any = None) -> dict[str, np.ndarray]:
    """Computes ``out`` and ``lse`` in float64 from m, l and O of splits in any order.

    Args: as :func:`rl_kernel_native.attention_merge`.
    """
    stats, sums = _wide(partials[0]), _wide(partials[1])
    m, weight = stats[..., 0], np.where(stats[..., 0] > -np.inf, stats[..., 1], 0)
    used = (stats[..., 0] != -np.inf).any(0) | (stats[..., 1] != 0).any(0)
    u = np.full(sums.shape[-2], -np.inf) if sinks is None else _wide(sinks) * np.log2(np.e)
    top = np.maximum(m.max(0, initial=-np.inf), u)
    fails = top >= 2**21
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp2(m - top)
    total = (weight * weights).sum(0) + np.where(used, np.exp2(u - top), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(used[..., None], (sums * weights[..., None]).sum(0) / total[..., None], 0)
        lse = np.where(used, (top + np.log2(total)) / np.log2(np.e), -np.inf)
    out, lse = np.where((used & fails)[..., None], np.nan, out), np.where(used & fails, np.nan, lse)
    return {"out": out, "lse": np.moveaxis(lse, -1, -2)}
