"""Turns rewards of sequences, spans and tokens into one reward per token: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/scatter_rewards.h."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

from .. import _check
from .._call import call
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT, Estimator, Generic, NamedTuple
from ..contract import BITWISE, OF_TOKENS, Bound, Row, U, add_rows
from ..reference.scatter_rewards import scatter_rewards_reference
from .policy_spec import ESTIMATORS, number, or_inf

__all__ = ["ScatteredRewards", "scatter_rewards", "scatter_rewards_reference"]

_C = functions(scatter_rewards="object*13, int")

_PLACES = ("last", "first", "spread")  # SpanPlace of the contract


class ScatteredRewards(NamedTuple, Generic[ArrayT]):
    """``rewards``, ``costs`` (None without ``cost``) and ``combined`` (None without ``lagrange``) are float32 with the
    mask's shape, and 0 where the mask is 0. ``lengths`` is int64 ``[num_sequences]``, the number of tokens that
    count."""

    rewards: ArrayT
    costs: ArrayT | Any
    combined: ArrayT | Any
    lengths: ArrayT


def _overlong(overlong: Any) -> tuple[float, int, int]:
    """Returns the penalty, the length at which it begins, and the number of tokens over which it grows to its full
    value."""
    if overlong is None:
        return 0.0, 0, 1
    if not isinstance(overlong, (tuple, list)) or len(overlong) != 3:
        raise TypeError(f"overlong: expected None or (max_length, buffer, penalty), got {_check.shown(overlong)}")
    longest, buffer = (_check.integer64("overlong", x) for x in overlong[:2])
    if not 0 < buffer <= longest < 1 << 33:
        raise ValueError(f"overlong: expected 0 < buffer <= max_length < 2^33, got {longest} and {buffer}")
    number("overlong", overlong[2], 0.0)
    return float(overlong[2]), longest - buffer, buffer


def _together(arrays: dict[str, Any]) -> None:
    """Raises an error if some of the arrays are given and others are not."""
    missing = [name for name, array in arrays.items() if array is None]
    if missing and len(missing) < len(arrays):
        given = next(name for name in arrays if name not in missing)
        raise ValueError(f"{missing[0]}: expected an array with {given}, got None")


def _native(arrays: Any, how: tuple[Any, ...], *tail: Any) -> Any:
    *given, lagrange = arrays
    spec, has_value, value = how
    packed = struct.pack(f"{len(spec)}d", *spec)
    return _C.scatter_rewards(*given, value if has_value else lagrange, packed, *tail)


def _outputs(arrays: Any, how: tuple[Any, ...]) -> Any:
    """Returns the shapes of rewards, costs, combined and lengths."""
    mask, cost, cu_seqlens, lagrange = (arrays[i] for i in (0, 8, 9, 10))
    num = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else mask.shape[0] if len(mask.shape) == 2 else 1
    combines = how[1] or lagrange is not None
    return mask.shape, mask.shape if cost is not None else None, mask.shape if combines else None, (num,)


# `spec` holds the fields of the contract's spec. `has_value` tells whether the number `value` replaces the array
# lagrange.
_SCATTER_REWARDS = Operator(
    "scatter_rewards",
    "mask, rewards?, token_rewards?, spans?, span_offsets?, span_rewards?, logprob?, ref_logprob?, cost?, cu_seqlens?, "
    "lagrange?",
    "float[] spec, bool has_value, float value",
    outputs=_outputs,
    dtypes=("float32", "float32", "float32", "int64"),
    native=_native,
)


def scatter_rewards(
    rewards: ArrayT,
    mask: AnyArray,
    *,
    cu_seqlens: AnyArray | None = None,
    token_rewards: AnyArray | None = None,
    spans: AnyArray | None = None,
    span_offsets: AnyArray | None = None,
    span_rewards: AnyArray | None = None,
    place: Literal["last", "first", "spread"] = "last",
    logprob: AnyArray | None = None,
    ref_logprob: AnyArray | None = None,
    kl_coef: float = 0.0,
    kl_estimator: Estimator = "k1",
    kl_input_clamp: float | None = None,
    kl_clamp: float | None = None,
    length_penalty: float = 0.0,
    overlong: tuple[int, int, float] | None = None,
    cost: AnyArray | None = None,
    lagrange: float | AnyArray | None = None,
    normalize_lagrange: bool = False,
) -> ScatteredRewards[ArrayT]:
    """One reward per token, from rewards of sequences, spans and tokens, for :func:`gae` and
    :func:`discounted_returns`.

    A token's reward is ``token_rewards - kl_coef * kl``, plus the rewards of its spans in ascending order of their
    index. The last token that counts in a sequence also gets the sequence's reward minus its penalties. A sequence or a
    span without a token that counts loses its reward. A NaN reward stays at its own token, but :func:`gae` passes it on
    to earlier tokens. To exclude a sequence, set its mask to 0. The result has no gradient; inputs that require a
    gradient are treated as detached. Nothing waits for a device.

    Args:
        rewards: float32 ``[num_sequences]``, any stride, or None for no sequence rewards.
        mask: ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); any mask
            (docs/tokens.md); tokens contiguous, rows with any stride. A token counts if its mask is not 0. For a token
            that does not count, the other arrays may hold any value.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
        token_rewards: float32, of the shape of ``mask``, or None.
        spans: int32 or int64 ``[num_spans, 2]``, contiguous: each span's first position and the position after its
            last, counted from the sequence's first token. Spans are turns, steps or regions. Spans may overlap and have
            any order.
        span_offsets: int32 or int64 ``[num_sequences + 1]``: sequence s has spans ``[span_offsets[s], span_offsets[s +
            1])``, as in :func:`loss_mask_from_spans`.
        span_rewards: float32 ``[num_spans]``, contiguous.
        place: a span's reward goes to its ``"last"`` token that counts, to its ``"first"`` token that counts, or is
            ``"spread"`` in equal shares over all its tokens that count.
        logprob, ref_logprob: float32, of the shape of ``mask``; required if ``kl_coef`` is not 0, else never read.
        kl_coef: >= 0; factor of the KL that is subtracted from every token's reward.
        kl_estimator, kl_input_clamp, kl_clamp: as ``estimator``, ``input_clamp``, ``clamp`` of :func:`kl`; pass any
            other KL through ``token_rewards``.
        length_penalty: >= 0; this factor times the sequence's length is subtracted from its reward. The length is the
            number of the sequence's tokens that count.
        overlong: ``(max_length, buffer, penalty)`` or None: DAPO's soft penalty, ``min(-(length - (max_length -
            buffer)) / buffer * penalty, 0)`` in the sequence's reward; beyond ``max_length`` it grows further.
        cost: float32 ``[num_sequences]`` or None: cost of a constraint. The cost goes to the last token that counts, in
            the separate array ``costs``.
        lagrange: weight of the cost: ``combined = rewards - lagrange * costs``. The weight is a finite number >= 0, or
            an array of one float32 element on the device; a negative, infinite or NaN element makes ``combined`` NaN.
            None: no ``combined``.
        normalize_lagrange: ``combined`` is divided by ``1 + lagrange``.
    Returns: :class:`ScatteredRewards`.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, or for a meaningless
        combination; RuntimeError if this build has no kernel for the device. On a CPU, ValueError for spans outside
        their sequence and for bad span_offsets or cu_seqlens (docs/tokens.md). On a GPU, the sequence of a bad span has
        NaN at its last token that counts, and sequences next to bad offsets have NaN at all tokens.
    Source: docs/numerics.md, rules 3 and 10; docs/objectives.md; DAPO, arXiv:2503.14476; Safe RLHF, arXiv:2310.12773.

    Example:
        >>> mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]])  # answers
        >>> rk.scatter_rewards(torch.tensor([1.0, -1.0]), mask)
        ScatteredRewards(rewards=tensor([[ 0.,  0.,  0.,  1.],
                [ 0.,  0., -1.,  0.]]), costs=None, combined=None, lengths=tensor([3, 2]))
    """
    _check.one_of("place", place, _PLACES)
    _check.one_of("kl_estimator", kl_estimator, ESTIMATORS[1:])
    number("kl_coef", kl_coef, 0.0)
    number("kl_input_clamp", kl_input_clamp, 0.0, open_end=True, optional=True)
    number("kl_clamp", kl_clamp, 0.0, open_end=True, optional=True)
    number("length_penalty", length_penalty, 0.0)
    penalty, begin, buffer = _overlong(overlong)
    _together({"spans": spans, "span_offsets": span_offsets, "span_rewards": span_rewards})
    _together({"logprob": logprob, "ref_logprob": ref_logprob})
    if kl_coef and logprob is None:
        raise ValueError(f"logprob: expected an array with kl_coef = {float(kl_coef):g}, got None")
    if lagrange is not None and cost is None:
        raise ValueError("cost: expected an array with lagrange, got None")
    if not isinstance(normalize_lagrange, bool):
        raise TypeError(f"normalize_lagrange: expected a bool, got {type(normalize_lagrange).__name__}")
    if normalize_lagrange and lagrange is None:
        raise ValueError("normalize_lagrange: expected False without lagrange, got True")
    has_value = lagrange is not None and _check.is_number(lagrange)
    if has_value:
        number("lagrange", lagrange, 0.0)
    if not kl_coef:
        logprob = ref_logprob = None
    spec = (
        float(ESTIMATORS.index(kl_estimator) if kl_coef else 0), float(kl_coef), float(or_inf(kl_input_clamp)),
        float(or_inf(kl_clamp)), float(length_penalty), penalty, float(begin), float(buffer),
        float(_PLACES.index(place)), float(normalize_lagrange),
    )  # fmt: skip
    arrays = (
        mask, rewards, token_rewards, spans, span_offsets, span_rewards, logprob, ref_logprob, cost, cu_seqlens,
        None if has_value else lagrange,
    )  # fmt: skip
    value = float(lagrange) if has_value else 0.0  # type: ignore[arg-type]  # has_value: a number
    return ScatteredRewards(*call(_SCATTER_REWARDS, arrays, (list(spec), has_value, value)))


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_REWARD = Bound(
    lambda expected, largest: 8 * U * (expected + largest) + 1e-6 * largest,
    "8 * u * (expected + largest) + 1e-6 * largest",
    "a token's KL, whose exponential and products are off by 1e-6 of it, rewards of spans, and one of its sequence "
    "with two penalties; none larger",
)


def _contract_rows() -> Iterator[Row]:
    scattered = OF_TOKENS | {"kind": "scan", "stem": "scatter_rewards"}
    yield Row("scatter_rewards", "rewards", "forward", bound=_OFF_REWARD, **scattered)
    yield Row("scatter_rewards", "costs", "forward", bound=BITWISE, **(scattered | {"kind": "copy"}))
    yield Row("scatter_rewards", "combined", "forward", bound=_OFF_REWARD, **scattered)
    yield Row("scatter_rewards", "lengths", "forward", bound=BITWISE, **(scattered | {"kind": "integers"}))


add_rows(_contract_rows())
