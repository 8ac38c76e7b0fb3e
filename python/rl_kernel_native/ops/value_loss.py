"""The value loss of PPO: arguments, dispatch, results. The contract is cpp/include/rlk/ops/value_loss.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from .. import _check, _dispatch
from .._call import call, call_with_gradients
from .._metrics import MetricVector
from .._native import functions
from .._operator import Array, Loss, Operator, kept
from .._token_weight import weighed
from .._types import Aggregation, AnyArray, ArrayT, Generic, NamedTuple
from ..contract import LOSS, OF_TOKENS, SLOPE_OF_TOKEN, SUMMED_METRICS, Row, add_rows
from ..reference.value_loss import value_loss_reference
from .policy_spec import (
    AGGREGATIONS,
    INF,
    check_aggregation,
    check_scale,
    checked_denominator,
    denominator_kind,
    number,
    one_of,
    or_inf,
)

__all__ = ["ValueGradients", "ValueLoss", "ValueMetrics", "value_loss", "value_loss_and_grad", "value_loss_reference"]

_C = functions(value_loss="object*6, float*2, int, bool, float*2, object, bool, object, int")

METRICS = (
    "loss",
    "num_tokens",
    "num_sequences",
    "denominator",
    "loss_sum",
    "value_sum",
    "return_sum",
    "error_sum",
    "error_squared_sum",
    "return_squared_sum",
    "clip_fraction",
    "outside_fraction",
    "value_mean",
    "return_mean",
    "explained_variance",
)


class ValueMetrics(MetricVector):
    """Scalars of one call in one float32 vector on the call's device. ``metrics.clip_fraction`` is one element, which
    stays on the device; ``metrics.asdict()`` copies all elements to the host once. ValueMetric in the contract defines
    the scalars. To get the metrics of the whole batch, add the sums and ``num_tokens`` of all micro-batches and
    ranks."""

    names: tuple[str, ...] = METRICS


class ValueLoss(NamedTuple, Generic[ArrayT]):
    """``loss``, float32 and differentiable in torch, and its :class:`ValueMetrics`."""

    loss: ArrayT
    metrics: ValueMetrics


class ValueGradients(NamedTuple, Generic[ArrayT]):
    """The result of :func:`value_loss_and_grad`."""

    loss: ArrayT
    metrics: ValueMetrics
    d_value: ArrayT


_NO_GRADIENT = (False,)


def _native(arrays: Any, how: tuple[Any, ...], *tail: Any) -> Any:
    *numbers, number_given = how[:7]
    return _C.value_loss(*arrays[:6], *numbers, number_given or arrays[6], *(how[7:] or (True,)), *tail)


# For `clip` and `huber`, infinity means none; for `denominator_value`, 0 means none. `denominator_kind` is the
# contract's enum.
_VALUE_LOSS = Operator(
    "value_loss",
    (
        "value, old_value?, returns, mask?, cu_seqlens?, token_weight?",
        Array("denominator", optional=True, is_float32=True),
    ),
    "float clip, float huber, int denominator_kind, bool sequence_mean, float horizon, float scale, "
    "float denominator_value",
    outputs=lambda arrays, how: ((), (len(METRICS),), arrays[0].shape),
    dtypes=("float32",) * 3,
    native=_native,
    gradient=kept((0,), Loss(outputs=2)),
)


def value_loss(
    value: ArrayT,
    old_value: AnyArray | None,
    returns: AnyArray,
    mask: AnyArray | None = None,
    *,
    cu_seqlens: AnyArray | None = None,
    clip: float | None = None,
    loss_type: Literal["mse", "huber"] = "mse",
    huber_delta: float = 1.0,
    aggregation: Aggregation = "token-mean",
    count_empty: bool = False,
    horizon: float | None = None,
    scale: float = 1.0,
    dp_size: int = 1,
    token_weight: AnyArray | None = None,
    denominator: float | AnyArray | None = None,
) -> ValueLoss[ArrayT]:
    """The value loss of PPO over tokens, ``max(h(v - R), h(clip(v, v_old - c, v_old + c) - R))`` with
    ``h(x) = x**2 / 2``, and its metrics. The same pass computes the gradient, so ``backward()`` only multiplies it by
    an incoming gradient that is not 1.

    Results have the same bits on all backends, padded and packed. Given a ``denominator``, gradients have the same bits
    for any split of the batch into micro-batches and ranks. Masked slots may hold any value. Differentiable (torch) in
    ``value``, once; the other arrays are constants. If the clipped and the unclipped error are equal, each gets half of
    the gradient, as in ``torch.maximum``. A value that equals a bound of the clip counts as inside, as in
    ``torch.clamp``.

    Args:
        value: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows with any stride. The trained critic's values.
        old_value: as ``value``, from the critic at rollout. Required if ``clip`` is given, else None.
        returns: as ``value``; the critic's targets, such as those from :func:`gae`.
        mask: of the shape of ``value``; any mask (docs/tokens.md). A token counts if its mask is not 0. None:
            all tokens count.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
        clip: the distance from ``old_value`` beyond which moving ``value`` further no longer lowers its loss; > 0, or
            None for no clip. verl and OpenRLHF use 0.5, TRL and slime 0.2.
        loss_type: ``"mse"``, half of the squared error, or ``"huber"``, which is linear for errors above
            ``huber_delta``, as in ``torch.nn.functional.huber_loss``. slime uses the whole squared error: pass
            ``scale=2``.
        huber_delta: > 0; for ``"huber"``.
        aggregation, count_empty, horizon, scale, dp_size: as in :class:`PolicySpec`.
        token_weight: as in :func:`policy_loss`, with the shape of ``value``. The explained variance and all metrics
            except ``loss_sum`` count each token as 1.
        denominator: as in :func:`policy_loss`: a number > 0, or an array of one float32 element on the device. None:
            the number of tokens or sequences in this call. ``aggregation="constant"`` requires a denominator.
    Returns: :class:`ValueLoss`. If no token counts, the loss and its gradient are 0.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, or for an array that
        is not used; RuntimeError if this build has no kernel for the device. On a CPU, bad cu_seqlens are a ValueError
        (docs/tokens.md); on a GPU the loss is NaN.
    Source: docs/numerics.md, rules 3 and 10; docs/objectives.md; Schulman et al. 2017, arXiv:1707.06347.

    Example:
        >>> value, returns, mask = torch.tensor([[0.5, 1.0]]), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2)
        >>> rk.value_loss(value, None, returns, mask).loss
        tensor(0.0625)
    """
    operands, how = _operands(
        value, old_value, returns, mask, cu_seqlens, clip, loss_type, huber_delta, aggregation, count_empty, horizon,
        scale, dp_size, token_weight, denominator,
    )  # fmt: skip
    loss, vector, *_ = call(_VALUE_LOSS, operands, how + _NO_GRADIENT)
    return ValueLoss(loss, ValueMetrics(vector))


def value_loss_and_grad(
    value: ArrayT,
    old_value: AnyArray | None,
    returns: AnyArray,
    mask: AnyArray | None = None,
    *,
    cu_seqlens: AnyArray | None = None,
    clip: float | None = None,
    loss_type: Literal["mse", "huber"] = "mse",
    huber_delta: float = 1.0,
    aggregation: Aggregation = "token-mean",
    count_empty: bool = False,
    horizon: float | None = None,
    scale: float = 1.0,
    dp_size: int = 1,
    token_weight: AnyArray | None = None,
    denominator: float | AnyArray | None = None,
) -> ValueGradients[ArrayT]:
    """:func:`value_loss` and its gradient without autograd, for callers that run backward themselves.

    Args: as :func:`value_loss`; torch tensors that require a gradient are an error while gradients are enabled.
    Returns: :class:`ValueGradients`: the gradient has the shape of ``value``, float32; masked slots are 0.
    Raises: as :func:`value_loss`.
    Source: docs/numerics.md, rules 3 and 10.
    Example:
        >>> value, returns = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 2.0]])
        >>> rk.value_loss_and_grad(value, None, returns).d_value
        tensor([[0.5000, 0.0000]])
    """
    operands, how = _operands(
        value, old_value, returns, mask, cu_seqlens, clip, loss_type, huber_delta, aggregation, count_empty, horizon,
        scale, dp_size, token_weight, denominator,
    )  # fmt: skip
    loss, vector, d_value = call_with_gradients(_VALUE_LOSS, operands, how)
    return ValueGradients(loss, ValueMetrics(vector), d_value)


def _operands(
    value: Any, old_value: Any, returns: Any, mask: Any, cu_seqlens: Any, clip: Any, loss_type: Any, huber_delta: Any,
    aggregation: Any, count_empty: Any, horizon: Any, scale: Any, dp_size: Any, token_weight: Any,
    denominator: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Checks the arguments, and returns the arrays and the options of the operator."""
    numbers = _numbers if _dispatch.is_compiling() else _known_numbers
    how = numbers(clip, loss_type, huber_delta, aggregation, count_empty, horizon, scale, dp_size)
    if clip is None and old_value is not None:
        raise ValueError(f"old_value: expected None where clip is None, got {type(old_value).__name__}")
    if clip is not None and old_value is None:
        raise ValueError("old_value: expected an array, which clip needs, got None")
    denominator, number_given = checked_denominator(denominator, aggregation, "aggregation")
    if token_weight is not None:
        counts = denominator is None and not number_given
        over_tokens, mean = counts and aggregation == "token-mean", aggregation == "seq-mean-token-mean"
        token_weight, total = weighed(token_weight, value, "value", mask, cu_seqlens, over_tokens, mean)
        denominator = total if counts else denominator
    return (value, old_value, returns, mask, cu_seqlens, token_weight, denominator), (*how, number_given)


def _numbers(
    clip: Any, loss_type: Any, huber_delta: Any, aggregation: Any, count_empty: Any, horizon: Any, scale: Any,
    dp_size: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns the fields of the contract's ValueSpec."""
    count_empty = _check.flag("count_empty", count_empty)
    number("clip", clip, 0.0, open_end=True, optional=True)
    one_of("loss_type", loss_type, ("mse", "huber"))
    number("huber_delta", huber_delta, 0.0, open_end=True)
    if loss_type == "mse" and huber_delta != 1.0:
        got = _check.shown(huber_delta)
        raise ValueError(f'huber_delta: expected 1 with loss_type="mse", which has no use for it, got {got}')
    one_of("aggregation", aggregation, tuple(AGGREGATIONS))
    number("horizon", horizon, 0.0, open_end=True, optional=True)
    check_scale(scale, dp_size)
    check_aggregation(aggregation, horizon, count_empty)
    return (
        float(or_inf(clip)),
        float(huber_delta) if loss_type == "huber" else INF,
        denominator_kind(aggregation, count_empty),
        AGGREGATIONS[aggregation][1],
        float(horizon or 0.0),
        float(scale * dp_size),
    )


_known_numbers = _check.remembered(_numbers)


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    value = OF_TOKENS | {"kind": "scan", "stem": "value_loss"}
    yield Row("value_loss", "loss", "forward", bound=LOSS, **(value | {"keeps": ("layout", "runs")}))
    yield Row("value_loss", "metrics", "forward", bound=SUMMED_METRICS, **(value | {"keeps": ("layout", "runs")}))
    yield Row("value_loss", "d_value", "backward", bound=SLOPE_OF_TOKEN, **value)


add_rows(_contract_rows())
