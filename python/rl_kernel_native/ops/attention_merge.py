"""Merges attention results of several ranks: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/attention.h."""

from __future__ import annotations

from typing import Any, Literal, overload

from .. import _check, _dispatch
from .._call import call
from .._lost import refuse_gradients
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT, DType, Exp
from .attention import AttentionResult
from .attention_partials import MOST_SPLITS, AttentionPartials, numbers_of

__all__ = ["attention_merge", "attention_merge_approximate"]

functions(
    attention_merge="object*4, int*2, bool, object, int", attention_merge_approximate="object*2, int, bool, object, int"
)

_CURE = "a merge has none; call under torch.no_grad() or pass {name}.detach()"


def _rows(parts: Any) -> tuple[Any, ...]:
    """Returns the shape of lse, in which heads come before tokens."""
    return (*parts.shape[1:-3], parts.shape[-2], parts.shape[-3])


_MERGE = Operator(
    "attention_merge",
    "sums, stats, sinks?",
    "int[] splits, int out_dtype, int exp, bool return_lse",
    outputs=lambda arrays, how: (arrays[0].shape[1:], _rows(arrays[0]) if how[3] else None),
    dtypes=(lambda how: how[1], "float32"),
)
_APPROXIMATE = Operator(
    "attention_merge_approximate",
    "outs, lses",
    "int exp, bool return_lse",
    outputs=lambda arrays, how: (arrays[0].shape[1:], _rows(arrays[0]) if how[1] else None),
    dtypes=(0, "float32"),
)


@overload
def attention_merge(
    partials: AttentionPartials[ArrayT], *, out_dtype: DType, sinks: AnyArray | None = None, exp: Exp = None,
    return_lse: Literal[False] = False
) -> ArrayT: ...  # fmt: skip


@overload
def attention_merge(
    partials: AttentionPartials[ArrayT], *, out_dtype: DType, sinks: AnyArray | None = None, exp: Exp = None,
    return_lse: bool = False
) -> AttentionResult[ArrayT]: ...  # fmt: skip
def attention_merge(
    partials: Any, *, out_dtype: Any, sinks: Any = None, exp: str | None = None, return_lse: bool = False
) -> Any:
    """``out`` from the partials of all splits (ranges of the keys): the bytes of one :func:`attention` call over all
    keys.

    Splits are merged in ascending order of their numbers, whatever the order of the arrays and the assignment of splits
    to ranks. A missing split is not detected.

    Args:
        partials: the result of ``attention(..., return_partials=True)``, or the :class:`AttentionPartials` of several
            ranks joined on the first dimension. ``stats`` is float32 ``[splits, *q.shape[:-1], 2]``, and ``sums`` is
            float32 ``[splits, *out.shape]``; both are contiguous. ``splits`` holds the number of each split: at most
            1024 numbers in any order, each once. A number past a sequence's last split changes nothing, so ranks may
            pad their lists to equal length. An m of 2^21 or more makes its row NaN.
        out_dtype: the dtype of ``q``: float32, bfloat16 or float16.
        sinks: float32 ``[q_heads]``, as for :func:`attention`, which takes no sinks with ``return_partials``.
        exp: as for :func:`attention`; used only for sinks.
        return_lse: also return the logarithm of each row's sum.
    Returns:
        ``out``, as :func:`attention` gives it; or :class:`AttentionResult`.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, for ``stats`` and
        ``sums`` of different rows, and for a gradient that would be lost; RuntimeError if this build has no kernel for
        the device.
    Source: docs/numerics.md, rule 6.

    Example:
        >>> q, k, v = torch.ones(1, 1, 1, 8), torch.ones(1, 1500, 1, 8), torch.arange(12000.0).view(1, 1500, 1, 8)
        >>> keys = torch.tensor([1500], dtype=torch.int32)
        >>> own = [(0, slice(0, 1024)), (1, slice(1024, 1500))]  # two ranks' splits and keys
        >>> parts = [
        ...     rk.attention(q, k[:, at], v[:, at], seqused_k=keys, splits=[s], return_partials=True) for s, at in own
        ... ]
        >>> joined = rk.AttentionPartials(*(torch.cat(x) for x in zip(*(p[:2] for p in parts))), splits=(0, 1))
        >>> torch.equal(rk.attention_merge(joined, out_dtype=q.dtype), rk.attention(q, k, v))
        True
    """
    if not isinstance(partials, tuple) or len(partials) != 3:
        raise TypeError(f"partials: expected AttentionPartials, got {type(partials).__name__}")
    stats, sums, splits = partials
    numbers = numbers_of(splits)
    seen: set[int] = set()
    for i, number in enumerate(numbers):
        if not 0 <= number < MOST_SPLITS:
            raise ValueError(f"splits: expected numbers in [0, {MOST_SPLITS}), got {number} at [{i}]")
        if number in seen:
            raise ValueError(f"splits: expected each number once, got {number} twice")
        seen.add(number)
    refuse_gradients(_CURE, sums=sums, stats=stats, sinks=sinks)
    how = (numbers, _dispatch.dtype_code(out_dtype, "out_dtype"), exp, _check.flag("return_lse", return_lse))
    out, lse = call(_MERGE, (sums, stats, sinks), how)
    return AttentionResult(out, lse) if return_lse else out


@overload
def attention_merge_approximate(
    outs: ArrayT, lses: AnyArray, *, exp: Exp = None, return_lse: Literal[False] = False
) -> ArrayT: ...


@overload
def attention_merge_approximate(
    outs: ArrayT, lses: AnyArray, *, exp: Exp = None, return_lse: bool = False
) -> AttentionResult[ArrayT]: ...
def attention_merge_approximate(outs: Any, lses: Any, *, exp: str | None = None, return_lse: bool = False) -> Any:
    """``out`` from normalised results over parts of the keys: approximately the ``out`` of one call over all keys.

    Each part was already rounded to its dtype. The bytes therefore differ from those of one call, and depend on how the
    keys were divided. :func:`attention_merge` gives the exact bytes. The bytes do not depend on the batch. With
    ``exp="portable"``, they do not depend on the backend either. Parts are merged in their order.

    Args:
        outs: ``[parts, batch, tokens, heads, head_dim]``, or packed ``[parts, tokens, heads, head_dim]``; float32,
            bfloat16 or float16; contiguous, at most 1024 parts. ``head_dim`` is a multiple of 8, at most 256.
        lses: float32 ``[parts, batch, heads, tokens]``, or packed ``[parts, heads, tokens]``: the natural logarithm of
            each part's sum, as attention and FlashAttention give it; -Inf where a row sees nothing of a part.
            FlashAttention 2 gives +Inf for such a row; replace this value, because +Inf makes the row NaN.
        exp: as for :func:`attention`.
        return_lse: also return the logarithm of each row's sum.
    Returns:
        ``out``, with the dtype of ``outs`` and without their first dimension; or :class:`AttentionResult`. A row that
        sees nothing has ``out`` +0 and lse -Inf.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout or device, or for a gradient that
        would be lost; RuntimeError if this build has no kernel for the device.
    Source: the contract, cpp/include/rlk/ops/attention.h.

    Example:
        >>> outs, lses = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 1, 8), torch.zeros(2, 1, 1)
        >>> rk.attention_merge_approximate(outs.contiguous(), lses)
        tensor([[[2., 2., 2., 2., 2., 2., 2., 2.]]])
    """
    refuse_gradients(_CURE, outs=outs, lses=lses)
    out, lse = call(_APPROXIMATE, (outs, lses), (exp, _check.flag("return_lse", return_lse)))
    return AttentionResult(out, lse) if return_lse else out
