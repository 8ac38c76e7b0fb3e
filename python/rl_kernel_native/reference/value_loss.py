"""float64 reference of the value loss, one sequence at a time, written only from the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np

from .policy_loss import _Numpy, _of_sequences
from .sequences import spans

__all__ = ["value_loss_reference"]


def value_loss_reference(
    value: Any,
    old_value: Any,
    returns: Any,
    mask: Any = None,
    *,
    cu_seqlens: Any = None,
    clip: float | None = None,
    loss_type: str = "mse",
    huber_delta: float = 1.0,
    aggregation: str = "token-mean",
    count_empty: bool = False,
    horizon: float | None = None,
    scale: float = 1.0,
    dp_size: int = 1,
    token_weight: Any = None,
    denominator: Any = None,
    xp: Any = None,
) -> dict[str, Any]:
    """The loss of :func:`value_loss` and its sums in float64.

    Args:
        value, ..., denominator: as :func:`value_loss`, anything that becomes an array; ``denominator`` is a number.
        xp: a namespace with NumPy's functions; None: NumPy.
    Returns: ``loss``, ``loss_sum``, ``value_sum``, ``return_sum``, ``error_sum``, ``error_squared_sum``,
        ``return_squared_sum``, ``num_tokens``, ``num_sequences``, ``denominator``, ``explained_variance``.
    Raises: no errors of its own.
    Source: docs/objectives.md.
    """
    xp = _Numpy if xp is None else xp
    shape = tuple(value.shape)
    keep = np.ones(shape, bool) if mask is None else np.asarray(mask) != 0
    rows = spans(shape, cu_seqlens)
    counts = [int(keep[span].sum()) for span in rows]

    def error(x: Any) -> Any:
        if loss_type == "mse":
            return 0.5 * x * x
        size = xp.abs(x)
        return xp.where(size <= huber_delta, 0.5 * x * x, huber_delta * (size - 0.5 * huber_delta))

    weight = np.ones(shape) if token_weight is None else np.asarray(token_weight, np.float64)
    of_tokens = float(weight[keep & _of_sequences(shape, rows)].sum())
    by_aggregation = {"token-mean": of_tokens, "token-sum": 1, "constant": 1}
    sequences = len(rows) if count_empty else sum(n > 0 for n in counts)
    size = float(denominator) if denominator is not None else float(by_aggregation.get(aggregation, sequences))
    q = 0.0 if size == 0 else scale * dp_size / size / (horizon or 1.0)
    found: dict[str, Any] = dict.fromkeys(
        ("loss", "loss_sum", "value_sum", "return_sum", "error_sum", "error_squared_sum", "return_squared_sum"), 0.0
    )
    for span, n in zip(rows, counts, strict=True):
        if n == 0:
            continue
        v, r = (xp.asarray(a)[span][keep[span]] for a in (value, returns))
        loss = error(v - r)
        if clip is not None:
            o = xp.asarray(old_value)[span][keep[span]]
            loss = xp.maximum(loss, error(xp.minimum(xp.maximum(v, o - clip), o + clip) - r))
        e, u = r - v, xp.asarray(weight)[span][keep[span]]
        loss = u * loss
        shares = {
            "loss": (q / float(u.sum()) if aggregation == "seq-mean-token-mean" else q) * loss.sum(),
            "loss_sum": loss.sum(), "value_sum": v.sum(), "return_sum": r.sum(), "error_sum": e.sum(),
            "error_squared_sum": (e * e).sum(), "return_squared_sum": (r * r).sum(),
        }  # fmt: skip
        for name, share in shares.items():
            found[name] = found[name] + share
    v, r = (xp.asarray(a)[keep] for a in (value, returns))
    explained = 0.0
    if sum(counts) > 0 and not bool((r == r[0]).all()):
        explained = 1 - ((r - v - (r - v).mean()) ** 2).sum() / ((r - r.mean()) ** 2).sum()
    return {
        **found, "num_tokens": sum(counts), "num_sequences": sum(n > 0 for n in counts), "denominator": size,
        "explained_variance": explained,
    }  # fmt: skip
