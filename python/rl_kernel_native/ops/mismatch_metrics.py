"""Metrics of the difference between a trainer and the sampling engine: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/mismatch_metrics.h."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from .. import _check
from .._call import call
from .._metrics import MetricVector
from .._native import functions
from .._operator import Operator
from .._semantics import LogprobSemantics, require_same_semantics
from .._types import AnyArray, ArrayT, RolloutNan
from ..contract import BATCH_OF_TOKENS, OF_TOKENS, Bound, Row, add_rows
from ..reference.mismatch_metrics import mismatch_metrics_reference

__all__ = ["MismatchMetrics", "mismatch_metrics", "mismatch_metrics_reference"]

functions(mismatch_metrics="object*4, float, bool, object, int")

HISTOGRAM_EDGES = (-1.0, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1.0)
_SCALARS = (
    "num_tokens",
    "num_sequences",
    "dlogp_mean",
    "dlogp_max",
    "kl",
    "k3",
    "ratio_mean",
    "ess",
    "chi2_token",
    "chi2_seq",
    "ppl_train",
    "ppl_rollout",
    "log_ppl_train",
    "log_ppl_rollout",
    "ppl_ratio",
    "log_ppl_diff_mean",
    "log_ppl_diff_abs_mean",
    "log_ppl_diff_min",
    "log_ppl_diff_max",
    "correlation",
    "differing_fraction",
    "nonfinite_fraction",
)


class MismatchMetrics(MetricVector):
    """The metrics of one call in one float32 vector on the call's device. ``metrics.k3`` is one element, which stays on
    the device. ``metrics.histogram`` holds the fraction of tokens in each interval of the log-ratio, with the edges
    ``histogram_edges``. ``metrics.asdict()`` copies all elements to the host once. The contract and docs/objectives.md
    define the metrics."""

    names: tuple[str, ...] = (*_SCALARS, *(f"histogram_{i}" for i in range(len(HISTOGRAM_EDGES) + 1)))
    histogram_edges = HISTOGRAM_EDGES

    @property
    def histogram(self) -> Any:
        return self.vector[len(_SCALARS) :]

    def _shown(self) -> dict[str, str]:
        values = self.asdict()
        edges = [f"{edge:g}" for edge in HISTOGRAM_EDGES]
        bins = [f"<{edges[0]}", *(f"{a}..{b}" for a, b in itertools.pairwise(edges)), f">{edges[-1]}"]
        counted = {name: values[f"histogram_{i}"] for i, name in enumerate(bins)}
        histogram = ", ".join(f"{name}: {value:.3g}" for name, value in counted.items() if value)
        return {**{name: f"{values[name]:.6g}" for name in _SCALARS}, "histogram": f"{{{histogram}}}"}


_MISMATCH_METRICS = Operator(
    "mismatch_metrics",
    "logprob_train, logprob_rollout, mask?, cu_seqlens?",
    "float limit, bool rollout_neutral",
    outputs=lambda arrays, how: ((len(MismatchMetrics.names),),),
)


def limit_of(log_ratio_clamp: Any) -> float:
    """Checks the limit of ``|log ratio|``, and returns it for the contract: infinity for None."""
    if log_ratio_clamp is None:
        return math.inf
    return _check.single("log_ratio_clamp", log_ratio_clamp, lambda x: 0 < x < math.inf, "a finite number > 0 or None")


def mismatch_metrics(
    logprob_train: ArrayT,
    logprob_rollout: AnyArray,
    mask: AnyArray | None = None,
    *,
    cu_seqlens: AnyArray | None = None,
    log_ratio_clamp: float | None = 20.0,
    rollout_nan: RolloutNan = "nan",
    semantics: tuple[LogprobSemantics, LogprobSemantics] | None = None,
) -> MismatchMetrics:
    """Measures how far the log-probabilities of a trainer and of the sampling engine differ. The result is one vector
    on the device; nothing waits for the host. The bits do not depend on padding, packing, strides or the backend.

    The result has no gradient; inputs that require a gradient are treated as detached.

    Args:
        logprob_train: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows with any stride.
        logprob_rollout: as ``logprob_train``, from the engine.
        mask: of the shape of ``logprob_train``; any mask (docs/tokens.md). A token counts if its mask is not 0; other
            tokens may hold any value. None: all tokens count.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
        log_ratio_clamp: a limit of ``|log ratio|`` in the metrics ``ratio_mean``, ``ess`` and both ``chi2``; None: no
            limit.
        rollout_nan: ``"nan"``, or ``"neutral"``, which replaces a NaN of ``logprob_rollout`` by the trainer's
            log-probability. ``nonfinite_fraction`` and ``differing_fraction`` still count such tokens.
        semantics: None, or the :class:`LogprobSemantics` of ``logprob_train`` and of ``logprob_rollout``; a ValueError
            if they differ.
    Returns: :class:`MismatchMetrics`. Means are over tokens that count, or over sequences that have such a token. If no
        token counts, all metrics are 0.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device. On a CPU, bad cu_seqlens are a ValueError (docs/tokens.md); on a GPU all
        metrics are NaN.
    Source: docs/numerics.md, rules 3 and 10; docs/objectives.md; verl's rollout_corr_helper.

    Example:
        >>> trainer, engine = torch.tensor([[-1.0, -0.5]]), torch.tensor([[-1.0, -0.75]])
        >>> found = rk.mismatch_metrics(trainer, engine)
        >>> float(found.differing_fraction), float(found.dlogp_max)
        (0.5, 0.25)
    """
    arrays = (logprob_train, logprob_rollout, mask, cu_seqlens)
    require_same_semantics(semantics)
    how = (limit_of(log_ratio_clamp), _check.neutral_rollout(rollout_nan))
    return MismatchMetrics(call(_MISMATCH_METRICS, arrays, how)[0])


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_MISMATCH = Bound(
    lambda expected: 1e-5 * expected + 2e-6,
    "1e-5 * expected + 2e-6",
    "means of terms of either sign over all tokens, and exponentials of means",
)


def _contract_rows() -> Iterator[Row]:
    measured = OF_TOKENS | {"kind": "scan", "stem": "mismatch_metrics", "keeps": BATCH_OF_TOKENS}
    yield Row("mismatch_metrics", "metrics", "forward", bound=_OFF_MISMATCH, **measured)


add_rows(_contract_rows())
