"""The partials of attention: its results for ranges of the keys (splits) before they are merged. Arguments, dispatch.
The contract is cpp/include/rlk/ops/attention.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _check, _dispatch
from .._arithmetic import IEEE
from .._call import call
from .._lost import refuse_gradients
from .._native import functions
from .._operator import Operator
from .._types import ArrayT, Generic, NamedTuple
from ..reference.attention_partials import (
    attention_merge_reference,
    attention_partials_reference,
    split_begin,
    split_count,
)
from .attention_lists import PAGES, PLACES

__all__ = ["AttentionPartials", "attention_merge_reference", "attention_partials_reference", "attention_splits"]

_C = functions(attention_partials="object*4, int, object, int")

LISTS = (*PLACES[:5], *PAGES)  # arrays of a call without a tree that say which tokens it reads
MOST_SPLITS = split_count((1 << 31) - 1)


class AttentionPartials(NamedTuple, Generic[ArrayT]):
    """The result of ``attention(..., return_partials=True)``, and the operand of :func:`attention_merge`. Join the
    partials of several ranks on the first dimension, in any order.

    Attributes:
        stats: float32 ``[splits, *q.shape[:-1], 2]``: two numbers, m and l, for each row (query and head) in each
            split: the sum of the row's exponentials is ``l * 2**m``. If no key contributed, m is -Inf; l is then 0 if
            the row sees no key of the split, else 1. A bad row has m NaN and l 0. Any other m is an integer below 2^21.
        sums: float32 ``[splits, *out.shape]``: O, the row's weighted sum of value vectors. The weights are the terms of
            the sum l. If ``q`` is bfloat16 or float16, each weight is rounded to this dtype before it multiplies a
            value; the terms of l are not rounded.
        splits: the number of each split.
    """

    stats: ArrayT
    sums: ArrayT
    splits: tuple[int, ...]


def attention_splits(num_keys: int) -> list[range]:
    """The splits of a sequence, as ranges of its keys. The number of keys alone decides the splits. A rank that holds a
    part of a sequence must hold whole splits.

    Args:
        num_keys: number of keys of the sequence, below 2^31.
    Returns: a range for each split that has keys. A split has 1024 keys below key 8192, 2048 keys below key 65536, and
        4096 keys from there on. The last split ends at the last key.
    Raises: TypeError for a wrong type; ValueError for a number out of range.
    Source: docs/numerics.md, rule 6.
    Example:
        >>> rk.attention_splits(2500)
        [range(0, 1024), range(1024, 2048), range(2048, 2500)]
    """
    keys = _check.integer("num_keys", num_keys)
    if not 0 <= keys < 1 << 31:
        raise ValueError(f"num_keys: expected an integer in [0, 2^31), got {keys}")
    return [range(split_begin(s), min(split_begin(s + 1), keys)) for s in range(split_count(keys))]


def numbers_of(splits: Any) -> tuple[int, ...]:
    """Returns the split numbers as integers. A set is refused, because it has no order, and number i must name entry i
    of the arrays."""
    if isinstance(splits, (str, bytes)) or not isinstance(splits, Sequence):
        raise TypeError(f"splits: expected a sequence of integers, got {type(splits).__name__}")
    return tuple(_check.integer64("splits", s) for s in splits)


def _own(splits: Any) -> tuple[int, ...] | None:
    if splits is None:
        return None
    found = numbers_of(splits)
    least = 0
    for i, number in enumerate(found):
        if not least <= number < MOST_SPLITS:
            raise ValueError(f"splits: expected ascending numbers in [0, {MOST_SPLITS}), got {number} at [{i}]")
        least = number + 1
    return found


def _keys(arrays: Any) -> Any:
    """Returns the largest number of keys that one sequence of the call can have."""
    k, cu_seqlens_k, block_table, prefix_table = arrays[1], arrays[4], arrays[8], arrays[9]
    if block_table is None:
        return k.shape[0 if cu_seqlens_k is not None else 1]
    pages = block_table.shape[1] + (0 if prefix_table is None else prefix_table.shape[1])
    return k.shape[1] * pages


def _shapes(arrays: Any, how: tuple[Any, ...]) -> tuple[Any, Any]:
    q, count = arrays[0], split_count(_keys(arrays)) if how[0] is None else len(how[0])
    return (count, *q.shape[:-1], 2), (count, *q.shape[:-1], arrays[2].shape[-1])


def _native(arrays: Any, how: tuple[Any, ...], *tail: Any) -> Any:
    splits, *options, exp, unit = how
    arrays = (*arrays[:3], None, *arrays[3:8], None, *arrays[8:])
    return _C.attention_partials(arrays, tuple(options), splits, exp, unit, *tail)


_PARTIALS = Operator(
    "attention_partials",
    (*"qkv", *(f"{name}?" for name in LISTS)),
    "int[]? splits, bool causal, SymInt? window_size, float? softmax_scale, float? softcap, int exp, int unit",
    outputs=_shapes,
    dtypes=("float32", "float32"),
    native=_native,
    casts=(0, 1, 2),
)


def unit_of(q: Any) -> int | None:
    """Returns the number of the unit that computes the matrix products, or None for the unit that ``rk.arithmetic``
    selects. Products of float32 always use ieee arithmetic."""
    return IEEE if getattr(getattr(q, "dtype", None), "itemsize", 0) == 4 else None


def partials(q: Any, k: Any, v: Any, lists: Any, splits: Any, options: Any, exp: Any) -> AttentionPartials[Any]:
    """Computes the partials of a call. ``options`` are causal, window_size, softmax_scale and softcap."""
    own = _own(splits)
    if _dispatch.is_tensor(q):
        refuse_gradients(
            "partials have none; call under torch.no_grad(), or let a training pass merge attention(..., "
            "return_lse=True) of its parts, whose out and lse have gradients",
            q=q,
            k=k,
            v=v,
        )
    stats, sums = call(_PARTIALS, (q, k, v, *lists), (own, *options, exp, unit_of(q)))
    return AttentionPartials(stats, sums, tuple(range(stats.shape[0])) if own is None else own)
