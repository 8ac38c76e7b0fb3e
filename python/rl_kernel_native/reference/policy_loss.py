"""float64 reference of the policy objectives, one sequence at a time, from the formulas alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .sequences import spans

__all__ = ["policy_loss_reference"]


class _Numpy:
    """The NumPy functions that the formulas need. torch has functions of the same names, so its autograd can
    differentiate the formulas of this file."""

    exp, expm1, log, where, abs, minimum, maximum = (
        np.exp, np.expm1, np.log, np.where, np.abs, np.minimum, np.maximum,
    )  # fmt: skip

    @staticmethod
    def asarray(x: Any) -> Any:
        return np.asarray(x, np.float64)

    @staticmethod
    def stop(x: Any) -> Any:
        return x


def _limited(xp: Any, x: Any, low: float | None, high: float | None) -> Any:
    if high is not None:
        x = xp.where(x > high, high, x)
    if low is not None:
        x = xp.where(x < low, low, x)
    return x


def _symmetric(limit: Any) -> tuple[float | None, float | None]:
    if isinstance(limit, (tuple, list)):
        return limit[0], limit[1]
    return (None, None) if limit is None else (-limit, limit)


def _range(spec: Any) -> tuple[float | None, float | None]:
    low, high = spec.epsilon_low, spec.epsilon_high
    if spec.clip == "kl_cov":
        return None, None
    if spec.epsilon_absolute:
        return low, high
    center = 0.0 if spec.clip == "gmpo" else 1.0
    return None if low is None else center - low, None if high is None else center + high


def _weight(xp: Any, spec: Any, d: Any) -> Any:
    e = xp.exp(_limited(xp, d, *_symmetric(spec.importance_clamp)))
    low, high = spec.importance_low, spec.importance_high
    if spec.importance_mode == "truncate":
        return _limited(xp, e, low, high)
    inside = (e >= (-math.inf if low is None else low)) & (e <= (math.inf if high is None else high))
    return xp.where(inside, e, 0 * e)


def _times_ratio(xp: Any, estimator: str, k: Any, e: Any, ratio: Any) -> Any:
    """Returns the KL times the ratio. For k3 and a large e, the product is written as two terms, because the
    derivatives of exp(e) and of the ratio cancel."""
    if estimator != "k3":
        return k * ratio
    return xp.where(e > 1, ratio * xp.exp(e) - (1 + e) * ratio, k * ratio)


def _rollout_difference(xp: Any, spec: Any, d: Any, m: Any) -> Any:
    """Returns d, the difference between another log-probability and the rollout's log-probability m. Returns 0 instead
    if m is NaN and the spec treats NaN as neutral."""
    return d if spec.rollout_nan == "nan" else xp.where(m != m, 0.0, d)


def _kl(xp: Any, spec: Any, ell: Any, f: Any, ratio: Any, own_ratio: Any) -> Any:
    e = _limited(xp, f - ell, *_symmetric(spec.kl_input_clamp))
    if spec.kl == "k1":
        k = -e
    elif spec.kl == "k2":
        k = 0.5 * e * e
    elif spec.kl == "k3":
        k = xp.expm1(e) - e
    else:
        k = xp.abs(e)
    if spec.kl_straight_through:
        k2 = 0.5 * (ell - f) ** 2
        if spec.kl_gradient_ratio_max is not None:
            k2 = k2 * xp.stop(_limited(xp, ratio, None, spec.kl_gradient_ratio_max))
        return k2 - xp.stop(k2) + xp.stop(_limited(xp, k, *_symmetric(spec.kl_clamp)))
    if spec.kl_times_ratio:
        k = _times_ratio(xp, spec.kl, k, e, own_ratio if spec.kl_ratio_of_token else ratio)
    return _limited(xp, k, *_symmetric(spec.kl_clamp))


def _policy(xp: Any, spec: Any, ell: Any, old: Any, advantage: Any, weight: Any) -> tuple[Any, Any]:
    """Returns the policy terms of a sequence before importance weights, and its ratios."""
    d = ell - old
    low, high = _range(spec)
    n = d.shape[0]
    if spec.clip == "gmpo":
        x = xp.where(advantage > 0, _limited(xp, d, None, high), _limited(xp, d, low, None))
        ratio = xp.exp(xp.where(advantage == 0, 0 * xp.stop(d), x).sum() / n)
        loss = -(advantage.sum() / n) * ratio
        if weight is not None:
            loss = loss * xp.exp(xp.log(weight + 1e-10).sum() / n)
        return loss + 0 * xp.stop(d), ratio + 0 * xp.stop(d)
    if spec.clip == "vespo":
        least = math.log(1e-8)
        x = _limited(xp, d, -20, 20).sum()
        if weight is not None:
            x = x + _limited(xp, xp.log(weight), least, 20).sum()
        x = _limited(xp, xp.stop(x), least, 20)
        r = xp.exp(x)
        k = xp.where(advantage >= 0, spec.k_positive, spec.k_negative)
        lam = xp.where(advantage >= 0, spec.lambda_positive, spec.lambda_negative)
        return -xp.exp(lam + k * x - lam * r) * advantage * ell, r + 0 * xp.stop(d)
    limits = _symmetric(spec.log_ratio_clamp)
    if spec.level == "token":
        x = _limited(xp, d, *limits)
    else:
        total = d.sum() if spec.level == "sequence" else d.sum() / n
        x = xp.stop(total) + ell - xp.stop(ell) if spec.straight_through else total + 0 * xp.stop(d)
        x = _limited(xp, x, *limits)
    r = xp.exp(x)
    if spec.clip == "none":
        return -advantage * ell, r
    if spec.clip in ("cispo", "dppo"):
        return -xp.stop(_limited(xp, r, low, high)) * advantage * ell, r
    if spec.clip == "sapo":
        tau = xp.where(advantage > 0, spec.tau_positive, spec.tau_negative)
        return -(4 / tau) / (1 + xp.exp(-tau * (r - 1))) * advantage, r
    if spec.clip == "dro":
        return -(ell * advantage - 0.5 * spec.dro_beta * d * d), r
    capped = _limited(xp, r, None, spec.delta)
    loss = xp.maximum(-advantage * capped, -advantage * _limited(xp, r, low, high))
    if spec.dual_clip is not None:
        loss = xp.where(advantage < 0, xp.minimum(loss, -advantage * spec.dual_clip), loss)
    return loss, r


def _of_sequences(shape: Any, rows: Any) -> np.ndarray:
    found = np.zeros(shape, bool)
    for span in rows:
        found[span] = True
    return found


def policy_loss_reference(
    logprob: Any,
    old_logprob: Any,
    advantage: Any,
    mask: Any,
    *,
    spec: Any,
    cu_seqlens: Any = None,
    ref_logprob: Any = None,
    rollout_logprob: Any = None,
    importance_weight: Any = None,
    entropy: Any = None,
    selected: Any = None,
    token_weight: Any = None,
    denominator: Any = None,
    xp: Any = None,
) -> dict[str, Any]:
    """The loss of :func:`policy_loss` and its sums in float64.

    Args:
        logprob, ..., denominator: as :func:`policy_loss`, anything that becomes an array; ``denominator`` is a number.
        xp: a namespace with NumPy's functions and ``stop``, which stops a gradient; None: NumPy.
    Returns: ``loss``, ``policy_loss``, ``kl_loss``, ``entropy_loss``, ``policy_sum``, ``kl_sum``, ``entropy_sum``,
        ``ratio_sum``, ``num_tokens``, ``num_sequences``, ``denominator``.
    Raises: no errors of its own.
    Source: docs/objectives.md.
    """
    xp = _Numpy if xp is None else xp
    keep = np.asarray(mask) != 0
    shape = keep.shape
    rows = spans(shape, cu_seqlens)
    old = logprob if old_logprob is None else old_logprob

    def tokens(array: Any, s: int) -> Any:
        """Returns the tokens of sequence s that count."""
        if array is None:
            return None
        a, kept = xp.asarray(array), keep[rows[s]]
        if tuple(a.shape) == shape:
            return a[rows[s]][kept]
        return a.reshape(-1)[s : s + 1][[0] * int(kept.sum())]

    counts = [int(keep[span].sum()) for span in rows]
    of_tokens: Any = sum(counts)
    if token_weight is not None:
        of_tokens = float(np.asarray(token_weight, np.float64)[keep & _of_sequences(shape, rows)].sum())
    by_aggregation = {"token-mean": of_tokens, "token-sum": 1, "constant": 1}
    sequences = len(rows) if spec.count_empty else sum(n > 0 for n in counts)
    size = float(denominator) if denominator is not None else float(by_aggregation.get(spec.aggregation, sequences))
    q = 0.0 if size == 0 else spec.scale * spec.dp_size / size / (spec.horizon or 1.0)
    found: dict[str, Any] = dict.fromkeys(
        ("policy_loss", "kl_loss", "entropy_loss", "policy_sum", "kl_sum", "entropy_sum", "ratio_sum"), 0.0
    )
    for s, n in enumerate(counts):
        if n == 0:
            continue
        ell, o, a = tokens(logprob, s), tokens(old, s), tokens(advantage, s)
        if old_logprob is None:
            o = xp.stop(o)
        f, m, h, chosen = (tokens(x, s) for x in (ref_logprob, rollout_logprob, entropy, selected))
        weight = tokens(importance_weight, s)
        above = xp.stop(ell if spec.importance_of == "current" else o)
        drift: Any = None if m is None else _rollout_difference(xp, spec, above - m, m)
        if spec.importance == "token":
            weight = _weight(xp, spec, drift)
        elif spec.importance in ("sequence", "geometric"):
            total = drift.sum() / (n if spec.importance == "geometric" else 1)
            weight = _weight(xp, spec, total + 0 * drift)
        loss, ratio = _policy(xp, spec, ell, o, a, weight)
        if weight is not None and spec.clip not in ("gmpo", "vespo"):
            loss = loss * weight
        off = a * 0 != 0 if spec.clip == "gmpo" else a == 0
        if spec.gate is not None and not spec.gate[0] <= float(xp.exp(drift.sum() / n)) <= spec.gate[1]:
            off = off | (a == a)
        if spec.drop_above is not None:
            x = m if spec.drop_of == "rollout" else o
            lag = x - xp.stop(ell)
            behind = (_rollout_difference(xp, spec, lag, m) if x is m else lag).sum() / n
            off = off | (a < 0) if float(behind) > spec.drop_above else off
        if spec.clip in ("clip_cov", "dppo") or spec.drop_selected:
            off = off | (chosen != 0)
        loss = xp.where(off, 0 * xp.stop(loss), loss)
        u = tokens(token_weight, s) if token_weight is not None else 1.0 + 0 * xp.stop(ell)
        if spec.clip == "kl_cov":
            more = spec.selected_kl_coef * xp.abs(ell - o) * (1 if weight is None else weight)
            loss = loss + xp.where(chosen != 0, more, 0 * xp.stop(more))
        loss = loss * u
        kl = 0.0 if spec.kl is None else (u * _kl(xp, spec, ell, f, ratio, xp.exp(ell - o))).sum()
        entropies = 0.0 if h is None else (u * h).sum()
        w = q / float(u.sum()) if spec.aggregation == "seq-mean-token-mean" else q
        w_entropy = spec.entropy_scale / sum(counts) if spec.entropy_aggregation == "token-mean" else w
        shares = {
            "policy_loss": w * loss.sum(), "kl_loss": w * kl, "entropy_loss": w_entropy * entropies,
            "policy_sum": loss.sum(), "kl_sum": kl, "entropy_sum": entropies, "ratio_sum": ratio.sum(),
        }  # fmt: skip
        for name, share in shares.items():
            found[name] = found[name] + share
    total = found["policy_loss"] + spec.kl_coef * found["kl_loss"] - spec.entropy_coef * found["entropy_loss"]
    return {
        "loss": total, **found, "num_tokens": sum(counts), "num_sequences": sum(n > 0 for n in counts),
        "denominator": size,
    }  # fmt: skip
