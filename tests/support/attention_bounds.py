"""Compares attention with float64 by the bounds of contract.py and the facts of its rows, for one sequence and all
heads."""

from __future__ import annotations

from typing import Any

import rl_kernel_native as rk
from cases import beyond, float64
from rl_kernel_native.reference.attention import attention_facts


def attention_failures(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> str:
    """Results of attention and its gradients that are further from float64 than the contract allows.

    q, dout: torch [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim].
    """
    result = rk.attention(q[None], k[None], v[None], return_lse=True, **options)
    gradients = rk.attention_backward(dout[None], q[None], k[None], v[None], result[0], result[1], **options)
    has_sinks = options.get("sinks") is not None
    names = ("out", "lse", "dq", "dk", "dv", *["dsinks"] * has_sinks)
    got = dict(zip(names, (*result, *gradients), strict=True))
    if has_sinks:
        options["sinks"] = float64(options["sinks"])
    of_numpy = [float64(t)[None] for t in (q, k, v, dout)]
    options = {name: value for name, value in options.items() if name != "exp"}
    want = rk.attention_reference(*of_numpy[:3], dout=of_numpy[3], **options)
    dtype = str(q.dtype).removeprefix("torch.")
    facts = attention_facts(*of_numpy, dtype, **options)
    wrong = [beyond("attention", name, got[name], want[name], dtype, **facts[name]) for name in got]
    return "; ".join(filter(None, wrong))
