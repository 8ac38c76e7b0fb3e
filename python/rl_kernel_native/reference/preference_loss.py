"""float64 reference of preference_loss in NumPy, written from the papers' formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def _log_sigmoid(x: Any) -> Any:
    return np.where(x < 0, x, 0.0) - np.log1p(np.exp(-np.abs(x)))


def _sigmoid(x: Any) -> Any:
    return np.exp(_log_sigmoid(x))


def _log1mexp(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.where(x > -np.log(2), np.log(-np.expm1(x)), np.log1p(-np.exp(x)))


def _divergence(x: Any, name: str, f_alpha: float | None) -> Any:
    if name == "forward_kl":
        return 1 - np.exp(-x)
    if name == "js_divergence":
        return np.log(2) + _log_sigmoid(x)
    if name == "alpha_divergence":
        assert f_alpha is not None
        return np.expm1((f_alpha - 1) * x) / (f_alpha - 1)
    return x


def preference_loss_reference(
    policy_chosen: Any,
    policy_rejected: Any,
    ref_chosen: Any = None,
    ref_rejected: Any = None,
    *,
    kind: str = "dpo",
    beta: float = 0.1,
    chosen_count: Any = None,
    rejected_count: Any = None,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float | None = None,
    tau: float = 0.05,
    gamma: float = 0.5,
    alpha: float = 0.0,
    kl: Any = None,
    chosen_weight: float = 1.0,
    rejected_weight: float = 1.0,
    chosen_aligned: Any = None,
    rejected_aligned: Any = None,
    nll_weight: float = 0.0,
) -> dict[str, np.ndarray]:
    """Losses and rewards in float64. Nothing is rounded.

    Args: as :func:`rl_kernel_native.preference_loss`, NumPy arrays.
    Returns: ``losses``, ``chosen_rewards``, ``rejected_rewards``.
    """
    p_w, p_l = (np.asarray(a).astype(np.float64) for a in (policy_chosen, policy_rejected))
    f_w, f_l = (0.0 if a is None else np.asarray(a).astype(np.float64) for a in (ref_chosen, ref_rejected))
    n_w, n_l = (1.0 if a is None else np.maximum(np.asarray(a), 1.0) for a in (chosen_count, rejected_count))
    x_w, x_l = p_w - f_w, p_l - f_l
    if kind in ("simpo", "alphapo", "orpo"):
        x_w, x_l = x_w / n_w, x_l / n_l
    reward_w, reward_l = beta * x_w, beta * x_l
    s_w, s_l = _divergence(x_w, f_divergence, f_alpha), _divergence(x_l, f_divergence, f_alpha)
    if kind == "alphapo" and alpha != 0:
        s_w, s_l = -np.expm1(-alpha * x_w) / alpha, -np.expm1(-alpha * x_l) / alpha
        reward_w, reward_l = beta * s_w, beta * s_l
    if kind in ("ipo", "sigmoid_norm"):
        s_w, s_l = s_w / n_w, s_l / n_l
    rewards = {"chosen_rewards": reward_w, "rejected_rewards": reward_l}
    e = label_smoothing

    def smooth(z: Any) -> Any:
        return -(1 - e) * _log_sigmoid(z) - e * _log_sigmoid(-z)

    if kind in ("kto", "apo_zero_unpaired"):
        floor = 0.0 if kl is None else max(float(np.asarray(kl)[0]), 0.0)
        chosen = chosen_weight * (1 - _sigmoid(beta * (s_w - floor)))
        rejected = rejected_weight * (1 - _sigmoid(beta * (floor - s_l)))
        return {"losses": np.concatenate((chosen, rejected)), **rewards}
    if kind == "aot":
        return {"losses": smooth(beta * (np.sort(p_w - p_l) - np.sort(f_w - f_l))), **rewards}
    if kind == "aot_unpaired":
        return {"losses": smooth(beta * (np.sort(x_w) - np.sort(x_l))), **rewards}
    d = s_w - s_l
    z, c, r = beta * d, beta * s_w, beta * s_l
    if kind in ("dpo", "sigmoid_norm", "cpo"):
        losses = smooth(z)
    elif kind in ("simpo", "alphapo"):
        losses = smooth(z - gamma)
    elif kind == "hinge":
        losses = np.maximum(1 - z, 0)
    elif kind == "ipo":
        losses = (d - 1 / (2 * beta)) ** 2
    elif kind == "exo_pair":
        losses = _sigmoid(z) * (_log_sigmoid(z) - np.log1p(-e)) + _sigmoid(-z) * (_log_sigmoid(-z) - np.log(e))
    elif kind == "nca_pair":
        losses = -_log_sigmoid(c) - 0.5 * _log_sigmoid(-c) - 0.5 * _log_sigmoid(-r)
    elif kind == "robust":
        losses = (-(1 - e) * _log_sigmoid(z) + e * _log_sigmoid(-z)) / (1 - 2 * e)
    elif kind == "bco_pair":
        losses = -_log_sigmoid(c) - _log_sigmoid(-r)
    elif kind == "sppo_hard":
        losses = (s_w - 0.5 / beta) ** 2 + (s_l + 0.5 / beta) ** 2
    elif kind == "apo_zero":
        losses = _sigmoid(-c) + _sigmoid(r)
    elif kind == "apo_down":
        losses = _sigmoid(c) + _sigmoid(-z)
    elif kind == "discopop":
        m = _sigmoid(z / tau)
        losses = -_log_sigmoid(z) * (1 - m) + np.exp(_log_sigmoid(z / tau) - z)
    elif kind == "orpo":
        losses = -beta * _log_sigmoid(x_w - x_l - (_log1mexp(x_w) - _log1mexp(x_l)))
        for count in (chosen_count, rejected_count):
            losses = losses if count is None else np.where(np.asarray(count) < 1, 0.0, losses)  # no tokens: 0
    else:
        raise ValueError(f"kind: {kind!r} is unknown")
    if chosen_aligned is not None:
        a_w, a_l = (np.asarray(a).astype(np.float64) for a in (chosen_aligned, rejected_aligned))
        losses = losses * np.exp(a_w / n_w) * np.exp(a_l / n_l)
    return {"losses": losses - nll_weight * p_w / n_w if nll_weight else losses, **rewards}
