"""How far attention is from float64, by the facts of its rows in contract.py: one causal sequence, all heads."""

from __future__ import annotations

from typing import Any

import numpy as np

import rl_kernel_native as rk
from rl_kernel_native.contract import ROUNDING, row


def attention_failures(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> str:
    """What of attention and its gradients is further from float64 than the contract allows; empty if nothing is.

    q, dout: torch [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim].
    """
    result = rk.attention(q[None], k[None], v[None], return_lse=True, **options)
    gradients = rk.attention_backward(dout[None], q[None], k[None], v[None], result[0], result[1], **options)
    got = dict(zip(("out", "lse", "dq", "dk", "dv"), (*result, *gradients), strict=True))
    wide = [t.detach().double().cpu().numpy() for t in (q, k, v, dout)]
    want = rk.attention_reference(*(a[None] for a in wide[:3]), dout=wide[3][None])
    tokens, heads, dim = wide[0].shape
    kv_heads = wide[1].shape[1]
    group = heads // kv_heads
    dtype = str(q.dtype).removeprefix("torch.")
    x, g = (np.abs(a) for a in (wide[0], wide[3]))
    y, z = (np.repeat(np.abs(a), group, 1) for a in wide[1:3])
    scale = dim**-0.5
    sees = np.tril(np.ones((tokens, tokens), bool))
    scores = np.einsum("qhd,khd->hqk", wide[0], np.repeat(wide[1], group, 1)) * scale
    masked = np.where(sees, scores, -np.inf)
    p = np.exp(masked - masked.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("qhd,khd->hqk", wide[3], np.repeat(wide[2], group, 1))
    delta = np.einsum("qhd,qhd->hq", wide[3], want["out"][0])[..., None]
    both = np.where(sees, np.einsum("qhd,khd->hqk", g, z), 0).max(-1) + np.einsum("qhd,qhd->hq", g, abs(want["out"][0]))
    ds = p * np.abs(dp - delta)
    largest = np.where(sees, np.abs(scores), 0).max(-1)
    sizes = np.where(sees, np.einsum("qhd,khd->hqk", x, y) * scale, 0).max(-1)

    def of_keys(a: np.ndarray) -> np.ndarray:
        """Sums over the query heads of a key's."""
        return a.reshape(kv_heads, group, *a.shape[1:]).sum(1)

    lowered = dtype != "float32"
    common = {"inner": ROUNDING[dtype].inner, "inner_least": ROUNDING[dtype].least} if lowered else {}
    of_query = common | {
        "keys": np.arange(1, tokens + 1)[:, None], "max_abs_s": largest[..., None], "score_scale": sizes[..., None],
    }  # fmt: skip
    of_key = common | {
        "keys": (tokens - np.arange(tokens))[:, None] * group, "max_abs_s": largest.max(), "score_scale": sizes.max(),
    }  # fmt: skip
    facts: dict[str, dict[str, Any]] = {
        "out": of_query | {"scale": np.einsum("hqk,khd->hqd", p, z), "other_scale": np.einsum("qk,khd->hqd", sees, z)},
        "lse": {"max_abs_s": largest, "score_scale": sizes},
        "dq": of_query
        | {
            "scale": np.einsum("hqk,khd->hqd", ds, y) * scale,
            "gradient_scale": np.einsum("hqk,hq,khd->hqd", p, both, y) * scale,
            "other_scale": np.einsum("qk,khd->hqd", sees, y) * scale,
        },
        "dk": of_key
        | {
            "scale": of_keys(np.einsum("hqk,qhd->hkd", ds, x)) * scale,
            "gradient_scale": of_keys(np.einsum("hqk,hq,qhd->hkd", p, both, x)) * scale,
            "other_scale": of_keys(np.einsum("qk,qhd->hkd", sees, x)) * scale,
        },
        "dv": of_key
        | {
            "scale": of_keys(np.einsum("hqk,qhd->hkd", p, g)),
            "other_scale": of_keys(np.einsum("qk,qhd->hkd", sees, g)),
        },
    }
    wrong = []
    for name, of in facts.items():
        expected, found = want[name][0], got[name][0].detach().double().cpu().numpy()
        if name != "lse":
            expected, found = (np.moveaxis(a, 1, 0) for a in (expected, found))
        bound = row("attention", name).allowed(dtype, expected=expected, head_dim=dim, **of)
        off = np.abs(found - expected)
        if not (off <= bound).all():
            i = np.unravel_index(int(np.argmax(np.nan_to_num(off - bound, nan=np.inf))), off.shape)
            wrong.append(f"{name}{list(map(int, i))}: off by {off[i]:.3g}, allowed {bound[i]:.3g}")
    return "; ".join(wrong)
