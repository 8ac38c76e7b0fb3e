"""float64 reference of group_advantage in NumPy: each kind as its framework writes it."""

from __future__ import annotations

from typing import Any

import numpy as np


def group_advantage_reference(
    rewards: Any, group_offsets: Any = None, *, group_ids: Any = None, group_size: int | None = None,
    kind: str = "grpo", eps: float | None = None, scale: str | None = None, lengths: Any = None, baseline: Any = None,
    f_norm: float = 1.0, exclude_nan: bool | None = None, alone: str | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """``advantage``, float64 ``[num_sequences]``, and ``scale``, a factor of the error bounds.

    Args: as :func:`rl_kernel_native.group_advantage`, NumPy arrays or what ``numpy.asarray`` takes.
    """
    s = np.asarray(rewards).astype(np.float64)
    trl = kind == "grpo_trl"
    eps = {"grpo_trl": 1e-4, "areal": 1e-5}.get(kind, 1e-6) if eps is None else eps
    alone = ("zero" if trl else "score") if alone is None else alone
    scale = (
        {"grpo": "group", "grpo_trl": "group", "passk": "group", "areal": "group"}.get(kind, "none")
        if scale is None
        else scale
    )
    counted = ~np.isnan(s) if (trl if exclude_nan is None else exclude_nan) else np.ones(s.shape, bool)
    advantage, size = np.zeros(s.shape), np.zeros(s.shape)
    of_batch = _std(s[counted], "zero" if kind == "areal" else alone)
    of_all = s[counted].mean() if counted.any() else 0.0
    for members in _groups(len(s), group_offsets, group_ids, group_size, kind):
        those = members[counted[members]]
        x = s[those]
        if not len(x):
            continue
        single = len(x) == 1
        mean = (0.0 if alone == "score" else x[0]) if single else x.mean()
        std = {"group": _std(x, alone), "batch": of_batch, "none": 1.0 - eps}[scale]
        if kind == "passk":
            if single:
                continue
            best = int(np.argmax(x))
            second = np.delete(x, best).max()
            advantage[those[best]] = (x[best] - second) / (std + eps)
            size[those] = (abs(x[best]) + abs(second)) / (std + eps)
            continue
        if kind == "opo" and not single:
            weights = np.asarray(lengths).astype(np.float64)[those]
            mean = (weights * x).sum() / weights.sum() if weights.sum() else 0.0
        if kind == "remax":
            mean = np.asarray(baseline).astype(np.float64)[those]
        if kind == "reinforce_pp":
            mean = 0.0
        if kind == "areal":
            mean = of_all
            if scale == "group" and not single:
                std = float(np.sqrt(((x - mean) ** 2).sum() / (len(x) - 1)))
            if scale == "group" and single and alone == "zero":
                continue
            if (x == mean).all():  # all rewards are equal, so the advantage is 0
                continue
        factor = 1.0 / (std + eps)
        if kind == "rloo" and not single:
            factor *= len(x) / (len(x) - 1)
        if kind == "gpg":
            factor *= counted.sum() / max(np.count_nonzero(s[counted]), 1) / f_norm
        advantage[those] = (x - mean) * factor
        size[those] = (np.abs(x) + np.abs(x).max() + np.abs(mean)) * factor
        if len(x) > 1 and (x == x[0]).all() and kind not in ("remax", "reinforce_pp", "areal"):
            advantage[those] = 0.0
    return {"advantage": advantage, "scale": size}


def _std(x: np.ndarray, alone: str) -> float:
    """Returns the standard deviation with Bessel's correction, or for a single reward the value that ``alone``
    selects."""
    if len(x) < 2:
        return 1.0 if len(x) == 1 and alone == "score" else 0.0
    return 0.0 if (x == x[0]).all() else float(x.std(ddof=1))


def _groups(num: int, offsets: Any, ids: Any, size: int | None, kind: str) -> list[np.ndarray]:
    every = np.arange(num)
    if offsets is not None:
        return np.split(every, np.asarray(offsets)[1:-1])
    if ids is not None:
        given = np.asarray(ids)
        return [np.flatnonzero(given == g) for g in np.unique(given)]
    return list(every.reshape(-1, 1 if size is None else size))
