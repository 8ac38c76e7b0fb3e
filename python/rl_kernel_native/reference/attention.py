"""float64 reference of attention and its gradients in NumPy, written only from the formulas."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..contract import ROUNDING


def attention_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window_size: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    block_table: Any = None,
    shared_prefix: Any = None,
    tree: Any = None,
    dout: Any = None,
    dlse: Any = None,
) -> dict[str, np.ndarray]:
    """``softmax(softmax_scale * q k^T) v`` over the keys that each query sees, in float64. Nothing is rounded.

    Args: as :func:`rl_kernel_native.attention`, NumPy arrays (or what ``numpy.asarray`` takes) in any float dtype;
        ``dout`` and ``dlse`` as :func:`rl_kernel_native.attention_backward`; they are not supported with pages.
    Returns: ``out`` and ``lse`` in the shapes of attention's results; with ``dout`` also ``dq``, ``dk`` and ``dv``,
        and with ``dout`` and ``sinks`` also ``dsinks``.
    """
    q, k, v = (_wide(a) for a in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    tokens_q = _places(q, cu_seqlens_q if tree is None else tree[0], None, seqused_q)
    if tree is not None:
        tokens_k = _paths(tokens_q, tree[1])
    elif block_table is not None:
        tokens_k = _paged(k, block_table, seqused_k, shared_prefix)
    else:
        tokens_k = _places(k, cu_seqlens_k, leftpad_k, seqused_k)
    flat_q = q.reshape(-1, *q.shape[-2:])
    flat_k, flat_v = (a.reshape(-1, *a.shape[-2:]) for a in (k, v))
    out, lse = np.zeros((*flat_q.shape[:2], v.shape[-1])), np.full(flat_q.shape[:2], -np.inf)
    grads = {name: np.zeros(a.shape) for name, a in (("dq", flat_q), ("dk", flat_k), ("dv", flat_v))}
    flat_dout = None if dout is None else _wide(dout).reshape(out.shape)
    flat_dlse = None if dlse is None else _heads_last(_wide(dlse), q).reshape(lse.shape)
    group = flat_q.shape[1] // flat_k.shape[1]
    dsinks = np.zeros(flat_q.shape[1])
    for rows, columns in zip(tokens_q, tokens_k, strict=True):
        sees = _sees(len(rows), len(columns), causal, window_size)
        used = np.asarray(sees.any(1))
        for head in range(flat_q.shape[1]):
            x, y, z = flat_q[rows, head], flat_k[columns, head // group], flat_v[columns, head // group]
            scores, slope = _capped(x @ y.T * scale, softcap)
            sink = -np.inf if sinks is None else _wide(sinks)[head]
            p, row_lse = _softmax(scores, sees, sink)
            values = p @ z
            out[rows, head], lse[rows, head] = values, row_lse
            if flat_dout is None:
                continue
            g = np.where(used[:, None], flat_dout[rows, head], 0)
            delta = (g * values).sum(1)
            if flat_dlse is not None:
                delta = delta - np.where(used, flat_dlse[rows, head], 0)
            dsinks[head] -= (np.exp(np.where(used, sink - np.where(used, row_lse, 0), -np.inf)) * delta).sum()
            ds = p * (g @ z.T - delta[:, None]) * slope * scale
            grads["dq"][rows, head] = ds @ y
            np.add.at(grads["dk"], (columns, head // group), ds.T @ np.where(used[:, None], x, 0))
            np.add.at(grads["dv"], (columns, head // group), p.T @ g)
    shaped = np.moveaxis(lse.reshape(q.shape[:-1]), -1, -2)
    found = {"out": out.reshape(*q.shape[:-1], v.shape[-1]), "lse": shaped}
    if flat_dout is not None:
        found |= {name: a.reshape(like.shape) for (name, a), like in zip(grads.items(), (q, k, v), strict=True)}
        found |= {} if sinks is None else {"dsinks": dsinks}
    return found


def attention_facts(
    q: Any, k: Any, v: Any, dout: Any, dtype: str, *, causal: bool = True, window_size: int | None = None,
    softmax_scale: float | None = None, softcap: float | None = None, sinks: Any = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Returns the facts: numbers from which the rows of ``attention`` in contract.py compute error bounds. Each fact
    has the name that the rows use.

    Args: as :func:`attention_reference`, padded, with all tokens in use; ``dtype`` is the dtype of the operands.
    Returns: for each output its facts: numbers, or float64 arrays that broadcast to the output.
    """
    wide = [_wide(a) for a in (q, k, v, dout)]
    options: dict[str, Any] = {"causal": causal, "window_size": window_size}
    want = attention_reference(*wide[:3], **options, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks)
    batch, queries, heads, dim = wide[0].shape
    keys, kv_heads = wide[1].shape[1:3]
    group = heads // kv_heads
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    sees = _sees(queries, keys, causal, window_size)
    k_of, v_of = (np.repeat(a, group, 2) for a in wide[1:3])
    x, y, z, g = (np.abs(a) for a in (wide[0], k_of, v_of, wide[3]))
    scores, slope = _capped(np.einsum("bqhd,bkhd->bhqk", wide[0], k_of) * scale, softcap)
    with np.errstate(invalid="ignore"):
        p = np.where(sees, np.exp(np.where(sees, scores, 0) - want["lse"][..., None]), 0)
    dp = np.einsum("bqhd,bkhd->bhqk", wide[3], v_of)
    delta = np.einsum("bqhd,bqhd->bhq", wide[3], want["out"])[..., None]
    both = np.where(sees, np.einsum("bqhd,bkhd->bhqk", g, z), 0).max(-1)
    both = both + np.einsum("bqhd,bqhd->bhq", g, np.abs(want["out"]))
    ds = p * np.abs(dp - delta) * slope
    largest = np.where(sees, np.abs(scores), 0).max(-1)
    if sinks is not None:
        largest = np.maximum(largest, np.abs(_wide(sinks))[:, None])
    sizes = np.where(sees, np.einsum("bqhd,bkhd->bhqk", x, y) * scale, 0).max(-1)

    def of_keys(a: np.ndarray) -> np.ndarray:
        """Sums [batch, keys, heads, head_dim] over the query heads of each key head."""
        return a.reshape(batch, keys, kv_heads, group, a.shape[-1]).sum(3)

    def by_query(a: np.ndarray) -> np.ndarray:
        return np.moveaxis(a, 1, 2)[..., None]

    def by_sequence(a: np.ndarray) -> np.ndarray:
        return a.max((1, 2))[:, None, None, None]

    rounding = ROUNDING[dtype]
    common: dict[str, Any] = {"head_dim": dim}
    rounded = common
    least = 2.0**-126  # rule 3 of docs/numerics.md: smaller exponentials are +0
    least_ds = least * both.max(initial=0.0)
    if dtype != "float32":  # probabilities and score gradients are rounded before the products
        rounded = common | {"inner": rounding.inner}
        least, least_ds = least + rounding.least, least_ds + rounding.least
    of_query = rounded | {
        "keys": sees.sum(1)[:, None, None], "max_abs_s": by_query(largest), "score_scale": by_query(sizes),
    }  # fmt: skip
    of_key = rounded | {
        "keys": sees.sum(0)[:, None, None] * group, "max_abs_s": by_sequence(largest),
        "score_scale": by_sequence(sizes),
    }  # fmt: skip
    seen = sees.astype(np.float64)
    of_sinks = {}
    if sinks is not None:
        used = sees.any(1)
        gap = _wide(sinks)[:, None] - np.where(used, want["lse"], 0)
        weights = np.where(used, np.exp(np.where(used, gap, 0)), 0)
        own = np.einsum("bqhd,bqhd->bhq", g, np.abs(want["out"]))
        of_sinks["dsinks"] = rounded | {
            "rows": batch * queries, "max_abs_s": largest.max((0, 2)), "score_scale": sizes.max((0, 2)),
            "scale": (weights * np.abs(delta[..., 0])).sum((0, 2)), "gradient_scale": (weights * own).sum((0, 2)),
            "inner_least": least, "other_scale": (weights * g.sum(-1).swapaxes(1, 2)).sum((0, 2)),
        }  # fmt: skip
    return of_sinks | {
        "out": of_query
        | {
            "scale": np.einsum("bhqk,bkhd->bqhd", p, z),
            "inner_least": least,
            "other_scale": np.einsum("qk,bkhd->bqhd", seen, z),
        },
        "lse": common | {"max_abs_s": largest, "score_scale": sizes},
        "dq": of_query
        | {
            "scale": np.einsum("bhqk,bkhd->bqhd", ds, y) * scale,
            "gradient_scale": np.einsum("bhqk,bhq,bkhd->bqhd", p, both, y) * scale,
            "inner_least": least_ds,
            "other_scale": np.einsum("qk,bkhd->bqhd", seen, y) * scale,
        },
        "dk": of_key
        | {
            "scale": of_keys(np.einsum("bhqk,bqhd->bkhd", ds, x)) * scale,
            "gradient_scale": of_keys(np.einsum("bhqk,bhq,bqhd->bkhd", p, both, x)) * scale,
            "inner_least": least_ds,
            "other_scale": of_keys(np.einsum("qk,bqhd->bkhd", seen, x)) * scale,
        },
        "dv": of_key
        | {
            "scale": of_keys(np.einsum("bhqk,bqhd->bkhd", p, g)),
            "inner_least": least,
            "other_scale": of_keys(np.einsum("qk,bqhd->bkhd", seen, g)),
        },
    }


def _places(x: np.ndarray, cu_seqlens: Any, leftpad: Any, used: Any) -> list[np.ndarray]:
    """Returns, for each sequence, the indices of its tokens in use among all tokens."""
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


def _paths(segments: list[np.ndarray], parents: Any) -> list[np.ndarray]:
    """Returns, for each segment, the indices of the tokens on its path, from the root to the segment's end."""
    found: list[np.ndarray] = []
    for own, parent in zip(segments, np.asarray(parents), strict=True):
        found.append(own if parent < 0 else np.concatenate([found[parent], own]))
    return found


def _paged(k: np.ndarray, block_table: Any, used: Any, shared_prefix: Any = None) -> list[np.ndarray]:
    page_size = k.shape[1]
    prefixes = [(np.zeros(0, np.int64), 0)] * len(block_table)  # (pages, keys) of each sequence
    if shared_prefix is not None:
        table, lens, offsets = map(np.asarray, shared_prefix)
        for g, (begin, end) in enumerate(itertools.pairwise(offsets)):
            prefixes[begin:end] = [(table[g], int(lens[g]))] * (end - begin)
    found = []
    for pages, count, (shared, prefix) in zip(np.asarray(block_table), np.asarray(used), prefixes, strict=True):
        parts = []
        for of, keys in ((shared, min(count, prefix)), (pages, max(count - prefix, 0))):
            j = np.arange(keys)
            parts.append(of[j // page_size].astype(np.int64) * page_size + j % page_size)
        found.append(np.concatenate(parts))
    return found


def _sees(queries: int, keys: int, causal: bool, window_size: int | None) -> np.ndarray:
    if not causal:
        return np.ones((queries, keys), bool)
    behind = keys - queries + np.arange(queries)[:, None] - np.arange(keys)
    return (behind >= 0) & (behind < (np.inf if window_size is None else window_size))


def _capped(scores: np.ndarray, softcap: float | None) -> tuple[np.ndarray, Any]:
    """Returns the scores after a softcap, and the derivative of the softcap."""
    if softcap is None:
        return scores, 1.0
    h = np.tanh(scores / softcap)
    return softcap * h, 1 - h * h


def _softmax(scores: np.ndarray, sees: np.ndarray, sink: Any = -np.inf) -> tuple[np.ndarray, np.ndarray]:
    masked = np.where(sees, scores, -np.inf)
    top = np.maximum(masked.max(1, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(masked - top[:, None])
    total = e.sum(1) + np.where(sees.any(1), np.exp(sink - top), 0)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)
    return e / np.where(total > 0, total, 1)[:, None], lse


def _heads_last(rows: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Turns ``[batch, heads, tokens]`` or ``[heads, tokens]`` into ``[..., tokens, heads]``."""
    assert rows.ndim == q.ndim - 1
    return np.moveaxis(rows, -2, -1)


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
