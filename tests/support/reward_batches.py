"""Batches of rewards of sequences, spans and tokens, for the tests of scatter_rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

import rl_kernel_native as rk

LENGTHS = [300, 0, 17, 256, 131]

# Every source of a reward, alone and combined: names of arrays, and numbers.
HOW: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "sequences": ((), {}),
    "tokens": (("token_rewards",), {}),
    "last of spans": (("spans",), {}),
    "first of spans": (("spans",), {"place": "first"}),
    "spread": (("spans",), {"place": "spread"}),
    "k1": (("kl",), {"kl_coef": 0.05}),
    "k2": (("kl",), {"kl_coef": 0.2, "kl_estimator": "k2"}),
    "k3": (("kl",), {"kl_coef": 0.1, "kl_estimator": "k3", "kl_input_clamp": 0.3, "kl_clamp": 0.02}),
    "abs": (("kl",), {"kl_coef": 0.1, "kl_estimator": "abs"}),
    "lengths": ((), {"length_penalty": 1e-3, "overlong": (40, 25, 1.5)}),
    "cost": (("cost",), {}),
    "lagrange": (("cost",), {"lagrange": 0.7}),
    "normalized": (("cost", "lagrange"), {"normalize_lagrange": True}),
    "all": (
        ("token_rewards", "spans", "kl", "cost", "lagrange"),
        {"kl_coef": 0.05, "length_penalty": 1e-3, "overlong": (60, 50, 1.0), "place": "spread"},
    ),
}
_OF = {
    "spans": ("spans", "span_offsets", "span_rewards"),
    "kl": ("logprob", "ref_logprob"),
}
TOKENS = ("mask", "token_rewards", "logprob", "ref_logprob")
SEQUENCES = ("rewards", "cost")


def batch(rows: int, columns: int, seed: int = 0, masked: float = 0.3, longest: Any = None) -> dict[str, np.ndarray]:
    """float32 arrays; with three sequences, the second sequence has no token that counts. ``longest``: largest end of
    the spans, for each sequence."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, 1, shape).astype(np.float32)

    longest = [columns] * rows if longest is None else longest
    counts = random.integers(0, 5, rows)
    spans = [np.sort(random.integers(0, n + 1, 2)) for n, c in zip(longest, counts, strict=True) for _ in range(c)]
    logprob = -np.abs(normal(rows, columns))
    mask = random.random((rows, columns)) >= masked
    if rows > 2:
        mask[1] = False
    return {
        "rewards": normal(rows),
        "mask": mask,
        "token_rewards": normal(rows, columns),
        "logprob": logprob,
        "ref_logprob": logprob + np.float32(0.2) * normal(rows, columns),
        "spans": np.array(spans, np.int64).reshape(-1, 2),
        "span_offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "span_rewards": normal(int(counts.sum())),
        "cost": np.abs(normal(rows)),
        "lagrange": np.array(0.3, np.float32),
    }


def arguments(a: dict[str, Any], name: str) -> dict[str, Any]:
    arrays, numbers = HOW[name]
    names = [x for array in arrays for x in _OF.get(array, (array,))]
    return {"rewards": a["rewards"], "mask": a["mask"], **{x: a[x] for x in names}, **numbers}


def run(a: dict[str, Any], name: str, **more: Any) -> rk.ScatteredRewards:
    return rk.scatter_rewards(**arguments(a, name), **more)


def reference(a: dict[str, Any], name: str, **more: Any) -> dict[str, np.ndarray]:
    return rk.scatter_rewards_reference(**arguments(a, name), **more)


def ragged() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Sequences of LENGTHS padded and packed, and the offsets of the packed sequences."""
    a = batch(len(LENGTHS), max(LENGTHS), seed=1, longest=LENGTHS)
    a["mask"] &= np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    packed = {k: np.concatenate([x[:n] for x, n in zip(a[k], LENGTHS, strict=True)]) for k in TOKENS}
    return a, a | packed, np.concatenate([[0], np.cumsum(LENGTHS)])


def wild(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tokens, with values in masked slots that must not reach a result."""
    random = np.random.default_rng(3)
    values = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)
    of = [k for k in TOKENS if k != "mask"]
    return a | {k: np.where(a["mask"], a[k], random.choice(values, a[k].shape)) for k in of}


def select(a: dict[str, np.ndarray], order: list[int]) -> dict[str, np.ndarray]:
    """Some of the sequences, in the given order."""
    offsets = a["span_offsets"]
    spans = [i for s in order for i in range(offsets[s], offsets[s + 1])]
    counts = [0, *(offsets[s + 1] - offsets[s] for s in order)]
    found = {k: a[k][order] for k in (*TOKENS, *SEQUENCES)}
    chosen = {"spans": a["spans"][spans], "span_rewards": a["span_rewards"][spans]}
    return a | found | chosen | {"span_offsets": np.cumsum(counts).astype(np.int32)}
