"""float64 reference of gae, discounted_returns and vtrace in NumPy, written from the formulas: loops over time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def gae_reference(
    rewards: Any, values: Any, mask: Any = None, cu_seqlens: Any = None, *, gamma: float = 1.0, lam: float = 1.0,
    bootstrap: Any = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Advantages and returns, computed token by token from the last token on.

    Args: as :func:`rl_kernel_native.gae`, NumPy arrays or what ``numpy.asarray`` takes.
    Returns: ``advantages`` and ``returns``, float64 of the shape of ``rewards``, and ``scale``, the recursion over
        absolute values. Error bounds grow with this scale.
    """
    out = _empty(rewards, ("advantages", "returns", "scale"))
    for row, s in _sequences(rewards, cu_seqlens):
        r, v, m = _of(rewards, row), _of(values, row), _counts(mask, rewards, row)
        following = 0.0 if bootstrap is None else float(np.asarray(bootstrap)[s])
        x = size = 0.0
        for t in reversed(range(len(m))):
            if m[t]:
                x = r[t] + gamma * following - v[t] + gamma * lam * x
                size = abs(r[t]) + gamma * abs(following) + abs(v[t]) + gamma * lam * size
                following = v[t]
            _put(out, row, t, advantages=x, returns=x + following, scale=size + abs(following))
    return out


def discounted_returns_reference(
    rewards: Any, mask: Any = None, cu_seqlens: Any = None, *, gamma: float = 1.0, masked: str = "carry"
) -> dict[str, np.ndarray]:
    """``returns`` and ``scale``, float64.

    Args: as :func:`rl_kernel_native.discounted_returns`.
    """
    out = _empty(rewards, ("returns", "scale"))
    for row, _ in _sequences(rewards, cu_seqlens):
        r, m = _of(rewards, row), _counts(mask, rewards, row)
        x = size = 0.0
        for t in reversed(range(len(m))):
            if m[t]:
                x, size = r[t] + gamma * x, abs(r[t]) + gamma * size
            elif masked == "reset":
                x = size = 0.0
            _put(out, row, t, returns=x, scale=size)
    return out


def vtrace_reference(
    rewards: Any, values: Any, logprob: Any, rollout_logprob: Any, mask: Any = None, cu_seqlens: Any = None, *,
    gamma: float = 1.0, lam: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, bootstrap: Any = None,
    rollout_nan: str = "nan",
) -> dict[str, np.ndarray]:  # fmt: skip
    """``advantages`` (of the policy gradient), ``returns`` (the targets v) and ``scale``, all float64. ``scale`` is 0
    at tokens that do not count.

    Args: as :func:`rl_kernel_native.vtrace`.
    """
    out = _empty(rewards, ("advantages", "returns", "scale"))
    for row, s in _sequences(rewards, cu_seqlens):
        r, v, m = _of(rewards, row), _of(values, row), _counts(mask, rewards, row)
        with np.errstate(invalid="ignore"):
            rollout = _of(rollout_logprob, row)
            known = m & ~(np.isnan(rollout) & (rollout_nan == "neutral"))
            ratio = np.exp(np.where(known, _of(logprob, row) - rollout, 0.0))
        following = 0.0 if bootstrap is None else float(np.asarray(bootstrap)[s])
        x = size = 0.0
        for t in reversed(range(len(m))):
            advantage = 0.0
            if m[t]:
                rho, c = min(ratio[t], rho_bar), gamma * lam * min(ratio[t], c_bar)
                advantage = rho * (r[t] + gamma * (following + x) - v[t])
                x = rho * (r[t] + gamma * following - v[t]) + c * x
                own = rho * (abs(r[t]) + gamma * abs(following) + abs(v[t]))
                behind, size = rho * gamma * size, own + c * size
                following = v[t]
                _put(out, row, t, scale=own + behind + size + abs(following))
            _put(out, row, t, advantages=advantage, returns=x + following)
    return out


def _empty(like: Any, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {name: np.zeros(np.shape(like)) for name in names}


def _sequences(rewards: Any, cu_seqlens: Any) -> list[tuple[Any, int]]:
    """Returns, for each sequence, the place of its tokens in the arrays and its index."""
    if cu_seqlens is None:
        return [(s, s) for s in range(np.shape(rewards)[0])]
    ends = np.asarray(cu_seqlens)
    return [(slice(int(a), int(b)), s) for s, (a, b) in enumerate(itertools.pairwise(ends))]


def _of(array: Any, row: Any) -> np.ndarray:
    return np.asarray(array)[row].astype(np.float64)


def _counts(mask: Any, rewards: Any, row: Any) -> np.ndarray:
    return np.ones(np.asarray(rewards)[row].shape, bool) if mask is None else np.asarray(mask)[row] != 0


def _put(out: dict[str, np.ndarray], row: Any, t: int, **values: float) -> None:
    for name, value in values.items():
        out[name][row][t] = value
