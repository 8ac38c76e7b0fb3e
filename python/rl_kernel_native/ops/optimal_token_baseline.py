"""Advantages against the optimal token baseline: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/optimal_token_baseline.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import _check
from .._call import call
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT, Generic, NamedTuple
from ..contract import OF_TOKENS, Bound, Row, U, add_rows
from ..reference.optimal_token_baseline import optimal_token_baseline_reference

__all__ = ["OptimalTokenBaseline", "optimal_token_baseline", "optimal_token_baseline_reference"]

functions(optimal_token_baseline="object*7, int, bool, object*2, int")


class OptimalTokenBaseline(NamedTuple, Generic[ArrayT]):
    """The result of :func:`optimal_token_baseline`. Each field is float32 with the shape of ``logprob``, and 0 where
    the mask is 0."""

    advantages: ArrayT
    returns: ArrayT


_OPTIMAL_TOKEN_BASELINE = Operator(
    "optimal_token_baseline",
    "logprob, rewards, sum_p_sq, mask?, importance_weight?, cu_seqlens?, group_offsets?",
    "SymInt group_size, bool zero_tail, float eps",
    dtypes=("float32",) * 2,
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
    """Advantages: the reward to go G minus a baseline. The baseline of a position is ``sum(G W) / sum(W)`` over the
    group's sequences. W estimates the variance of the gradient of a sequence's tokens up to the position: it is the sum
    of ``1 - 2 p + sum(p^2)`` over these tokens.

    A group has the same bits at any place in the batch, padded and packed, and on every backend; nothing waits for the
    host. Advantages are constants without a gradient; inputs that require a gradient are treated as detached. Positions
    are indices into a sequence. verl's baseline for several turns (TIR) counts only the model's tokens. To get it,
    first pack the model's tokens with ``rk.pack([...], mask=mask)``.

    Args:
        rewards: as ``logprob``, or one per sequence, ``[num_sequences]`` or ``[num_sequences, 1]``; a sequence's reward
            then belongs to its last token that counts. If there are as many packed tokens as sequences, an array of one
            dimension has one number per token. In this case use ``[num_sequences, 1]`` for one number per sequence.
        logprob: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows with any stride. ``logprob`` belongs to the policy in the ratio's denominator (verl's old
            policy).
        sum_p_sq: as ``logprob``; the sum of squared probabilities over the vocabulary, from ``rk.logprob(...,
            return_sum_p_sq=True)``.
        mask: of the shape of ``logprob``; any mask (docs/tokens.md). A token counts if its mask is not 0; other tokens
            may hold any value. None: all tokens count.
        group_offsets: ``[num_groups + 1]``, int32 or int64, from 0 to ``num_sequences`` and not decreasing: group g is
            sequences ``[group_offsets[g], group_offsets[g + 1])``. Offsets that break this rule are a ValueError on the
            CPU; a GPU cuts the groups short and accesses no memory outside the arrays.
        group_size: the size of consecutive groups. Pass exactly one of ``group_offsets`` and ``group_size``.
        importance_weight: as ``rewards``; its square multiplies the token's term in the sum W. None: 1.
        zero_tail: use no baseline for tokens past the length of a group's second longest sequence. A length is the
            number of tokens that count.
        eps: added to the sum of W; > 0.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
    Returns: :class:`OptimalTokenBaseline`: ``advantages`` and ``returns`` (G). A sequence that is alone in its group
        has no baseline.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device. On a CPU, bad cu_seqlens are a ValueError (docs/tokens.md); on a GPU, the
        neighbouring sequences are NaN.
    Source: docs/numerics.md, rules 3 and 10; verl's compute_optimal_token_baseline_advantage.
    Example:
        >>> logprob, sum_p_sq = torch.full((2, 2), -1.0), torch.full((2, 2), 0.3)
        >>> rewards = torch.tensor([1.0, 0.0])  # of two answers to one prompt
        >>> rk.optimal_token_baseline(rewards, logprob, sum_p_sq, group_size=2).advantages
        tensor([[ 0.5000,  0.5000],
                [-0.5000, -0.5000]])
    """
    size = _group_size(group_offsets, group_size)
    arrays = (logprob, rewards, sum_p_sq, mask, importance_weight, cu_seqlens, group_offsets)
    how = (size, _check.flag("zero_tail", zero_tail), _check.number("eps", eps))
    return OptimalTokenBaseline(*call(_OPTIMAL_TOKEN_BASELINE, arrays, how))


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_BASELINE = Bound(
    lambda scale, terms: (24 + terms) * U * (scale + 1e-6),
    "(24 + terms) * u * (scale + 1e-6)",
    "scans of chunks of 256 tokens, a weight's four roundings and exponential, a chain over the group; terms: chunks "
    "and members; scale: the largest sum of rewards, times what errors of small weights grow by",
)


def _contract_rows() -> Iterator[Row]:
    per_token = OF_TOKENS | {"kind": "scan", "stem": "optimal_token_baseline", "bound": _OFF_BASELINE}
    for output in ("advantages", "returns"):
        yield Row("optimal_token_baseline", output, "forward", **per_token)


add_rows(_contract_rows())
