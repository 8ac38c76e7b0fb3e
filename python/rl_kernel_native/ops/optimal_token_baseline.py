"""Advantages against the optimal token baseline: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/optimal_token_baseline.h."""

from __future__ import annotations

from typing import Any

from .. import _check, _shapes
from .._call import call
from .._native import functions
from .._operator import Array, Operator
from .._types import AnyArray, ArrayT, Generic, NamedTuple
from ..reference.optimal_token_baseline import optimal_token_baseline_reference

__all__ = ["OptimalTokenBaseline", "optimal_token_baseline", "optimal_token_baseline_reference"]

_C = functions(optimal_token_baseline="object*7, int, bool, object*2, int")


class OptimalTokenBaseline(NamedTuple, Generic[ArrayT]):
    """Each float32 of the shape of ``logprob``, 0 where the mask is."""

    advantages: ArrayT
    returns: ArrayT


def _check_groups(arrays: Any, how: tuple[Any, ...], sequences: Any) -> None:
    offsets, (size, _, eps) = arrays[6], how
    if offsets is not None:
        _shapes.check_offsets(offsets, "group_offsets", "num_groups")
        _shapes.check_end(offsets, "group_offsets", sequences, "the number of sequences")
    elif type(sequences) is int and (size < 1 or sequences % size):
        raise ValueError(f"group_size: expected a divisor of {sequences} (the number of sequences), got {size}")
    _check.positive("eps", eps)


_OPTIMAL_TOKEN_BASELINE = Operator(
    "optimal_token_baseline",
    (
        Array("logprob", "first tokens"),
        Array("rewards", "tokens or sequences"),
        Array("sum_p_sq", "tokens"),
        Array("mask", "mask", optional=True),
        Array("importance_weight", "tokens or sequences", optional=True),
        Array("cu_seqlens", "cu_seqlens", optional=True),
        Array("group_offsets", "by hand", optional=True),
    ),
    "SymInt group_size, bool zero_tail, float eps",
    outputs=lambda arrays, how: (arrays[0].shape,) * 2,
    dtypes=("float32",) * 2,
    native=lambda arrays, how, *tail: _C.optimal_token_baseline(*arrays, *how, *tail),
    check=_check_groups,
)


def _group_size(group_offsets: Any, group_size: Any) -> int:
    if (group_offsets is None) == (group_size is None):
        got = "neither" if group_size is None else "both"
        raise ValueError(f"group_offsets: expected one of group_offsets and group_size, got {got}")
    size = 0 if group_size is None else _check.integer64("group_size", group_size)
    if group_size is not None and size < 1:
        raise ValueError(f"group_size: expected a number >= 1, got {size}")
    return size


def optimal_token_baseline(
    rewards: ArrayT,
    logprob: AnyArray,
    sum_p_sq: AnyArray,
    mask: AnyArray | None = None,
    group_offsets: AnyArray | None = None,
    *,
    group_size: int | None = None,
    importance_weight: AnyArray | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
    cu_seqlens: AnyArray | None = None,
) -> OptimalTokenBaseline[ArrayT]:
    """Returns less a baseline of each position of a group, ``sum(G W) / sum(W)`` over the group's sequences. G is the
    reward to go. W is the variance of the gradients of the tokens so far, the sum of ``1 - 2 p + sum(p^2)``.

    A group has the same bits wherever it stands, padded and packed, and on every backend; nothing waits for the host.
    Nothing here is differentiated: advantages are constants, and inputs that require a gradient are taken as detached.
    Positions are indices into a sequence; verl's baseline of several turns (TIR) counts the model's tokens alone: pack
    these first, ``rk.pack([...], mask=mask)``.

    Args:
        rewards: as ``logprob``, or one a sequence, ``[num_sequences]`` or ``[num_sequences, 1]``: then of the last
            token that counts. Where there are as many packed tokens as sequences, ``[num_tokens]`` is one a token, and
            only ``[num_sequences, 1]`` one a sequence.
        logprob: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows of any stride. It is that of the policy that tokens train against
            (verl's old one).
        sum_p_sq: as ``logprob``; the sum of squared probabilities over the vocabulary, of
            ``rk.logprob(..., return_sum_p_sq=True)``.
        mask: of the shape of ``logprob``; any mask (docs/tokens.md). A token counts where it is not 0;
            others may hold anything. None: all count.
        group_offsets: ``[num_groups + 1]``, int32 or int64, from 0 to ``num_sequences`` and not decreasing: group g is
            sequences ``[group_offsets[g], group_offsets[g + 1])``. Others are a ValueError on the CPU; on a GPU groups
            are cut short and no memory outside is touched.
        group_size: a number: groups follow one another. Exactly one of these two is given.
        importance_weight: as ``rewards``; its square multiplies a token's term of W. None: 1.
        zero_tail: no baseline for tokens past the length of a group's second longest sequence, where a length is a
            number of tokens that count.
        eps: added to the sum of W; > 0.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
    Returns: :class:`OptimalTokenBaseline`: ``advantages`` and ``returns`` (G). A sequence alone in its group has no
        baseline.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a layout, a device or a value; RuntimeError where no
        kernel of this build serves the device. On a CPU ValueError for bad cu_seqlens
        (docs/tokens.md); on a GPU the sequences beside are NaN then.
    Source: docs/numerics.md, rules 3 and 10; verl's compute_optimal_token_baseline_advantage.
    """
    size = _group_size(group_offsets, group_size)
    arrays = (logprob, rewards, sum_p_sq, mask, importance_weight, cu_seqlens, group_offsets)
    how = (size, _check.flag("zero_tail", zero_tail), _check.number("eps", eps))
    return OptimalTokenBaseline(*call(_OPTIMAL_TOKEN_BASELINE, arrays, how))
