"""Ground truth of a chain: a Qwen3 decoder in NumPy, float64 throughout, from the same low-precision weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def wide(t: Any) -> np.ndarray:
    return t.detach().double().cpu().numpy()


def chain_logprobs(
    weights: Mapping[str, Any], shape: Mapping[str, Any], ids: list[int], cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:
    """Log-probabilities, float64 [len(ids) - 1], of all tokens of a sequence except the first.

    Args:
        weights: torch tensors by transformers' names; the head is tied to the embedding if "lm_head.weight" is missing.
        shape: num_layers, num_q_heads, num_kv_heads, head_dim, eps.
        cos, sin: float64 [positions, head_dim / 2].
    """
    w = {name: wide(t) for name, t in weights.items()}
    heads, kv_heads, dim = shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"]
    n = len(ids)
    c, s = (t[:n, None, :] for t in (cos, sin))
    hidden_mask = np.triu(np.ones((n, n), bool), 1)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + shape["eps"]) * w[f"{name}.weight"]

    def turn(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, -1)
        return np.concatenate((a * c - b * s, b * c + a * s), -1)

    hidden = w["model.embed_tokens.weight"][ids]
    for index in range(shape["num_layers"]):
        layer = f"model.layers.{index}"
        x = norm(hidden, f"{layer}.input_layernorm")
        q, k, v = (
            (x @ w[f"{layer}.self_attn.{name}_proj.weight"].T).reshape(n, count, dim)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = (turn(norm(t, f"{layer}.self_attn.{name}_norm")) for t, name in ((q, "q"), (k, "k")))
        k, v = (np.repeat(t, heads // kv_heads, 1) for t in (k, v))
        scores = np.where(hidden_mask, -np.inf, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim))
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", p, v).reshape(n, heads * dim)
        hidden = hidden + attended @ w[f"{layer}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate, up = (x @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    z = norm(hidden, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    top = z.max(-1, keepdims=True)
    log_p = z - top - np.log(np.exp(z - top).sum(-1, keepdims=True))
    return log_p[np.arange(n - 1), ids[1:]]
