"""Importance weights, which correct a batch for the difference between trainer and sampling engine: arguments,
dispatch, results. The contract is cpp/include/rlk/ops/importance_weights.h."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, Literal, overload

from .. import _check
from .._call import call
from .._metrics import MetricVector
from .._native import functions
from .._operator import Operator
from .._semantics import LogprobSemantics, require_same_semantics
from .._types import AnyArray, ArrayT, Generic, NamedTuple, RolloutNan
from ..contract import BATCH_OF_TOKENS, BITWISE, OF_TOKENS, Bound, Row, U, add_rows
from ..reference.importance_weights import importance_weights_reference
from .mismatch_metrics import limit_of

__all__ = [
    "ImportanceMetrics",
    "ImportanceWeights",
    "ImportanceWeightsAndMetrics",
    "importance_weights",
    "importance_weights_reference",
]

_C = functions(importance_weights="object*5, bool, object, int")

_LEVELS = {"token": 1, "sequence": 2, "geometric": 3}  # ImportanceLevel of the contract
_MODES = ("truncate", "clip", "mask")
# Names of verl's criteria (`rollout_rs`), grouped by statistic, in the order of the contract's bounds.
_STATISTICS = ("token", "seq_sum", "seq_mean", "seq_max")
CRITERIA = tuple(f"{s}_{k}" for s in _STATISTICS for k in ("k1", "k2", "k3") if (s, k) != ("seq_max", "k1"))
RATIOS = tuple(f"{s}_ratio" for s in _STATISTICS[:3])  # these bound the ratio, which is exp(-k1)
_LARGEST = 3.4028234663852886e38  # largest float32


class ImportanceWeights(NamedTuple, Generic[ArrayT]):
    """``weights`` float32, 0 where the mask is 0; ``mask`` float32, 1 for a kept token, else 0. Both have the shape of
    ``logprob``."""

    weights: ArrayT
    mask: ArrayT


class ImportanceMetrics(MetricVector):
    """Scalars of one call in one float32 vector on the call's device. ``metrics.ess`` is one element, which stays on
    the device; ``metrics.asdict()`` copies all elements to the host once. The contract and docs/objectives.md define
    the scalars."""

    names: tuple[str, ...] = (
        "num_tokens", "num_sequences", "weight_mean", "weight_std", "weight_min", "weight_max", "ratio_min",
        "ratio_max", "fraction_low", "fraction_high", "ess", "seq_mean", "seq_std", "seq_min", "seq_max",
        "seq_deviation_max", "seq_fraction_low", "seq_fraction_high", "rejected_fraction", "seq_rejected_fraction",
        "divisor",
    )  # fmt: skip


class ImportanceWeightsAndMetrics(NamedTuple, Generic[ArrayT]):
    """:class:`ImportanceWeights` with their :class:`ImportanceMetrics`."""

    weights: ArrayT
    mask: ArrayT
    metrics: ImportanceMetrics


def _positive(name: str, value: Any, or_infinite: bool = False) -> float:
    most, finite = (math.inf, "") if or_infinite else (_LARGEST, "finite ")
    return _check.single(name, value, lambda x: 0 < x <= most, f"a {finite}number > 0 in float32")


def _range(lower: Any, upper: Any, mode: str) -> tuple[float, float]:
    """Returns the lower and the upper bound of a weight."""
    high = _positive("upper", upper, or_infinite=True)
    if mode == "truncate":
        if lower is not None:
            raise ValueError(
                'lower: expected None with mode="truncate", which bounds weights above alone, got '
                f"{_check.shown(lower)}"
            )
        return -math.inf, high
    low = 1.0 / high if lower is None else lower
    most = _check.in_float32(high)
    return _check.single("lower", low, lambda x: 0 <= x <= most, lambda: f"a number in [0, upper = {high:g}]"), high


def _rejection(rejection: Any) -> list[float]:
    """Returns four bounds for each statistic: the lowest and the highest k1, the highest k2, and the highest k3."""
    bounds = {s: [-math.inf, math.inf, math.inf, math.inf] for s in _STATISTICS}
    if rejection is not None and not isinstance(rejection, dict):
        raise TypeError(f"rejection: expected a dict of thresholds or None, got {type(rejection).__name__}")
    for name, threshold in (rejection or {}).items():
        if name not in CRITERIA + RATIOS:
            raise ValueError(f"rejection: expected of {', '.join(CRITERIA + RATIOS)}, got {_check.shown(name)}")
        where, of = f'rejection["{name}"]', bounds[name.rpartition("_")[0]]
        if not name.endswith(("k1", "ratio")):
            if isinstance(threshold, (tuple, list)):
                got = _check.shown(threshold)
                raise TypeError(f"{where}: expected a number, got {got}: k2 and k3 have no lower bound")
            of[int(name[-1])] = _positive(where, threshold)
            continue
        if isinstance(threshold, (tuple, list)):
            if len(threshold) != 2:
                raise ValueError(f"{where}: expected a number or (lower, upper), got {_check.shown(threshold)}")
            low, high = (_positive(where, x) for x in threshold)
        else:
            high = _positive(where, threshold)
            low = 1.0 / high
        if not low <= high:
            raise ValueError(f"{where}: expected lower <= upper, got {low:g} and {high:g}")
        least, most = math.log(low), math.log(high)
        if name in RATIOS:
            least, most = -most, -least
        of[:2] = max(of[0], least), min(of[1], most)
    return [x for s in _STATISTICS for x in bounds[s]]


def spec_of(
    level: str,
    mode: str,
    upper: Any,
    lower: Any,
    log_ratio_clamp: Any,
    rejection: Any,
    veto: Any,
    normalize: Any,
    rollout_nan: Any,
) -> tuple[float, ...]:
    """Returns the fields of the contract's ImportanceSpec in their order. The veto is still a ratio, not yet its
    logarithm, because a trace cannot compute the logarithm of a symbolic number."""
    _check.one_of("level", level, tuple(_LEVELS))
    _check.one_of("mode", mode, _MODES)
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize: expected a bool, got {type(normalize).__name__}")
    low, high = _range(lower, upper, mode)
    below = 0.0 if veto is None else _positive("veto", veto)
    limit = limit_of(log_ratio_clamp)
    return (
        float(_LEVELS[level]), float(mode == "mask"), float(normalize), low, high, limit, *_rejection(rejection), below,
        float(_check.neutral_rollout(rollout_nan)),
    )  # fmt: skip


def _native(arrays: Any, how: tuple[Any, ...], *tail: Any) -> Any:
    (*fields, veto, neutral), metrics = how
    packed = struct.pack(f"{len(fields) + 2}d", *fields, math.log(veto) if veto > 0 else -math.inf, neutral)
    return _C.importance_weights(*arrays, packed, metrics, *tail)


_IMPORTANCE_WEIGHTS = Operator(
    "importance_weights",
    "logprob, rollout_logprob, mask?, cu_seqlens?",
    "float[] spec, bool metrics",
    outputs=lambda arrays, how: (
        arrays[0].shape, arrays[0].shape, (len(ImportanceMetrics.names),) if how[1] else None
    ),
    dtypes=("float32",) * 3,
    native=_native,
)  # fmt: skip


@overload
def importance_weights(
    logprob: ArrayT, rollout_logprob: AnyArray, mask: AnyArray | None = None, *, cu_seqlens: AnyArray | None = None,
    level: Literal["token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "clip", "mask"] = "truncate", upper: float, lower: float | None = None,
    log_ratio_clamp: float | None = 20.0, rejection: dict[str, Any] | None = None, veto: float | None = None,
    normalize: bool = False, return_metrics: Literal[False] = False, rollout_nan: RolloutNan = "nan",
    semantics: tuple[LogprobSemantics, LogprobSemantics] | None = None,
) -> ImportanceWeights[ArrayT]: ...  # fmt: skip


@overload
def importance_weights(
    logprob: ArrayT, rollout_logprob: AnyArray, mask: AnyArray | None = None, *, cu_seqlens: AnyArray | None = None,
    level: Literal["token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "clip", "mask"] = "truncate", upper: float, lower: float | None = None,
    log_ratio_clamp: float | None = 20.0, rejection: dict[str, Any] | None = None, veto: float | None = None,
    normalize: bool = False, return_metrics: bool = False, rollout_nan: RolloutNan = "nan",
    semantics: tuple[LogprobSemantics, LogprobSemantics] | None = None,
) -> ImportanceWeightsAndMetrics[ArrayT]: ...  # fmt: skip
def importance_weights(
    logprob: Any,
    rollout_logprob: Any,
    mask: Any = None,
    *,
    cu_seqlens: Any = None,
    level: str = "token",
    mode: str = "truncate",
    upper: float,
    lower: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    rejection: dict[str, Any] | None = None,
    veto: float | None = None,
    normalize: bool = False,
    return_metrics: bool = False,
    rollout_nan: RolloutNan = "nan",
    semantics: tuple[LogprobSemantics, LogprobSemantics] | None = None,
) -> ImportanceWeights | ImportanceWeightsAndMetrics:
    """Bounded weights pi / mu of the policy relative to the sampling engine (TIS, MIS, IcePop), and the mask of the
    tokens that are not rejected. The weights have the same bits as the weights that a :class:`PolicySpec` applies.

    There is no gradient: a weight corrects the sampling distribution and is not part of the objective. Inputs that
    require a gradient are treated as detached, as in the frameworks. The weight of a rejected token is not 0: pass
    ``mask`` on, or multiply the loss mask by it.

    Args:
        logprob: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows with any stride. These are the trainer's log-probabilities, under its old or current
            policy.
        rollout_logprob: as ``logprob``, from the engine.
        mask: of the shape of ``logprob``; any mask (docs/tokens.md). A token counts if its mask is not 0; other tokens
            may hold any value. None: all tokens count.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
        level: level of the ratio: ``"token"``; ``"sequence"``, the product over the sequence's tokens; ``"geometric"``,
            the geometric mean over these tokens.
        mode: ``"truncate"`` limits the weight to at most ``upper``. ``"clip"`` limits it to ``[lower, upper]``.
            ``"mask"`` sets it to 0 outside that range; such a token still counts (use ``rejection`` to reject it).
        upper: > 0; inf: no bound.
        lower: in ``[0, upper]``. With ``"clip"`` and ``"mask"``, None means ``1 / upper``. With ``"truncate"`` it must
            be None.
        log_ratio_clamp: a limit of ``|log ratio|`` of a token or of a sequence; None: no limit. The veto, and the sum
            of a sequence's log-ratios, use the tokens' ratios before this limit.
        rejection: a dict from criteria to thresholds. ``token_ratio`` takes ``(lower, upper)`` for the ratio ``pi /
            mu`` of a token, ``seq_sum_ratio`` for the product over a sequence, and ``seq_mean_ratio`` for the geometric
            mean over a sequence. ``upper`` alone means ``(1 / upper, upper)``. The other criteria are verl's. Their
            names combine ``token_``, ``seq_sum_``, ``seq_mean_`` or ``seq_max_`` with ``k1``, ``k2`` or ``k3``, except
            ``seq_max_k1``. For k2 and k3 the threshold is the largest allowed value. k1 is MINUS the log ratio; its
            threshold is ``(lower, upper)``, the bounds of exp(k1). Warning: exp(k1) is the INVERSE ratio, so a
            ``token_k1`` of ``(0.6, 1.4)`` keeps ratios in [1 / 1.4, 1 / 0.6]. A token is kept if all criteria allow it.
            A NaN is not kept.
        veto: a sequence is not kept if one token's ratio is below this value.
        normalize: divide weights by their mean over this call. The mean is over tokens with level ``"token"``, else
            over sequences that have a token. If the mean is at most 1e-8, the weights are not divided. Rejected tokens
            count in the mean.
        return_metrics: also return one vector on the device with statistics of three things: the weights before
            ``normalize``, the ratios before their bounds, and the rejections.
        rollout_nan: ``"nan"``: a NaN of ``rollout_logprob`` makes the weight NaN, and rejects the token if there is a
            criterion. ``"neutral"``: the token's log ratio is 0, so its weight is 1, limited by the bounds.
            ``nonfinite_fraction`` of :func:`mismatch_metrics` counts such tokens.
        semantics: None, or a pair: the :class:`LogprobSemantics` of ``logprob`` and that of ``rollout_logprob``. It is
            an error if the two differ.
    Returns: :class:`ImportanceWeights`, or :class:`ImportanceWeightsAndMetrics`.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, or for an option
        without effect; RuntimeError if this build has no kernel for the device. On a CPU, bad cu_seqlens are a
        ValueError (docs/tokens.md); on a GPU, the weights of the neighbouring sequences and all metrics are NaN.
    Source: docs/numerics.md, rules 3 and 10; docs/objectives.md; verl's rollout_corr_helper; slime's mis.py;
        fengyao.notion.site/off-policy-rl; IcePop, arXiv:2510.18855.

    Example:
        >>> trainer, engine = torch.tensor([[-1.0, -0.5]]), torch.tensor([[-1.1, -2.0]])
        >>> rk.importance_weights(trainer, engine, torch.ones(1, 2), upper=2.0)
        ImportanceWeights(weights=tensor([[1.1052, 2.0000]]), mask=tensor([[1., 1.]]))
    """
    require_same_semantics(semantics)
    spec = spec_of(level, mode, upper, lower, log_ratio_clamp, rejection, veto, normalize, rollout_nan)
    if not isinstance(return_metrics, bool):
        raise TypeError(f"return_metrics: expected a bool, got {type(return_metrics).__name__}")
    arrays = (logprob, rollout_logprob, mask, cu_seqlens)
    weights, kept, vector = call(_IMPORTANCE_WEIGHTS, arrays, (list(spec), return_metrics))
    if return_metrics:
        return ImportanceWeightsAndMetrics(weights, kept, ImportanceMetrics(vector))
    return ImportanceWeights(weights, kept)


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_IMPORTANCE = Bound(
    lambda expected, terms: (16 + terms) * U * (expected + 1e-6),
    "(16 + terms) * u * (expected + 1e-6)",
    "an exponential, and of a sequence's weight the sum of the log-ratios of `terms` tokens, each below 1",
)
_OFF_IMPORTANCE_METRICS = Bound(
    lambda expected, terms, spread: (64 + terms) * U * (expected + 1.0) + 1e-3 * spread,
    "(64 + terms) * u * (expected + 1) + 1e-3 * spread",
    "weights; `spread` of a standard deviation is the smaller root mean square, theirs or that of their distance to 1",
)


def _contract_rows() -> Iterator[Row]:
    weights = OF_TOKENS | {"kind": "scan", "stem": "importance_weights"}
    yield Row("importance_weights", "weights", "forward", bound=_OFF_IMPORTANCE, **weights)
    means = weights | {"keeps": BATCH_OF_TOKENS}
    yield Row("importance_weights", "metrics", "forward", bound=_OFF_IMPORTANCE_METRICS, **means)
    yield Row("importance_weights", "mask", "forward", bound=BITWISE, **(weights | {"kind": "integers"}))


add_rows(_contract_rows())
