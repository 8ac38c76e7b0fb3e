"""Whitening of tokens over a batch: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/masked_whiten.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

from .. import _check, _dispatch
from .._call import call
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT, Generic, Group, NamedTuple
from ..contract import BATCH_OF_TOKENS, OF_TOKENS, Bound, Row, U, add_rows
from ..reference.masked_whiten import masked_whiten_reference

__all__ = ["MaskedWhitenResult", "masked_whiten", "masked_whiten_reference"]

functions(masked_whiten="object*4, bool*3, object, int")


class MaskedWhitenResult(NamedTuple, Generic[ArrayT]):
    y: ArrayT  # float32, the shape of x
    mean: ArrayT  # [] float32
    var: ArrayT  # [] float32


_MASKED_WHITEN = Operator(
    "masked_whiten",
    "x, mask?, cu_seqlens?",
    "float eps, bool shift_mean, bool unbiased, bool return_stats",
    outputs=lambda arrays, how: (arrays[0].shape, *((() if how[3] else None,) * 2)),
    dtypes=("float32",) * 3,
)


@overload
def masked_whiten(
    x: ArrayT, mask: AnyArray | None = None, cu_seqlens: AnyArray | None = None, *, eps: float = 1e-08,
    shift_mean: bool = True, unbiased: bool = True, process_group: Group = None, return_stats: Literal[False] = False
) -> ArrayT: ...  # fmt: skip


@overload
def masked_whiten(
    x: ArrayT, mask: AnyArray | None = None, cu_seqlens: AnyArray | None = None, *, eps: float = 1e-08,
    shift_mean: bool = True, unbiased: bool = True, process_group: Group = None, return_stats: bool = False
) -> MaskedWhitenResult[ArrayT]: ...  # fmt: skip
def masked_whiten(
    x: Any,
    mask: Any = None,
    cu_seqlens: Any = None,
    *,
    eps: float = 1e-8,
    shift_mean: bool = True,
    unbiased: bool = True,
    process_group: Group = None,
    return_stats: bool = False,
) -> Any:
    """``(x - mean) / sqrt(var + eps)`` over all tokens of a batch that count, as verl and TRL do with advantages.

    Each of two passes sums the tokens of a sequence by position, then sums the sequences. The bits are the same padded
    or packed, at any stride and on every backend. Tokens whose mask is 0 are not read, may hold NaN, and get 0.
    Advantages are constants without a gradient; inputs that require a gradient are treated as detached.

    Args:
        x: ``[num_sequences, num_tokens]``, or ``[num_tokens]`` for one sequence or with ``cu_seqlens``; float32, last
            dimension contiguous.
        mask: with the shape of ``x``, any mask (docs/tokens.md): tokens with a nonzero mask count. None: all tokens
            count.
        cu_seqlens: as for :func:`gae`.
        eps: added to the variance, > 0.
        shift_mean: with False, the mean is added to the result again.
        unbiased: use Bessel's correction in the variance.
        process_group: a group of torch.distributed: the batch then consists of the sequences of all ranks, in rank
            order. Results have the same bits as on one rank with all sequences. A rank may have no sequence, or no
            token that counts, but all ranks must call. Each rank receives the tokens of all ranks, and the host waits
            for the device once.
        return_stats: also return ``mean`` and ``var``.
    Returns:
        float32 of the shape of ``x``, or a :class:`MaskedWhitenResult`. If all tokens that count are equal, or only one
        token counts, the result is exactly 0 (without ``shift_mean``, the mean). If no token counts, the result is 0.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device.
    Source: docs/numerics.md, rules 3 and 10; verl's masked_whiten.

    Example:
        >>> rk.masked_whiten(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([[-0.7071,  0.7071,  0.0000]])
    """
    flags = {"shift_mean": shift_mean, "unbiased": unbiased, "return_stats": return_stats}
    how = (_check.number("eps", eps), *(_check.flag(name, value) for name, value in flags.items()))
    outputs = call(_MASKED_WHITEN, (x, mask, cu_seqlens), how)  # with a process group, this call checks arguments
    if process_group is not None:
        outputs = _over_ranks(process_group, (x, mask, cu_seqlens), how)
    return MaskedWhitenResult(*outputs) if return_stats else outputs[0]


def _over_ranks(group: Any, arrays: tuple[Any, ...], how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Whitens the batch of all ranks, and returns this rank's tokens."""
    from .. import _ranks

    x, mask, cu_seqlens = arrays
    _ranks.require_shares(group, x=x, mask=mask, cu_seqlens=cu_seqlens)
    torch: Any = _dispatch.torch_module()
    share = x.detach()
    counted = torch.ones_like(share, dtype=torch.uint8) if mask is None else (mask != 0).to(torch.uint8)
    packed = share.dim() == 1
    if packed:
        tokens = share.shape[0]
        offsets = torch.tensor([0, tokens], device=x.device) if cu_seqlens is None else cu_seqlens.long()
        behind = offsets[-1].clamp(0, tokens)
        every = _ranks.sizes(group, packed, offsets.shape[0] - 1, behind, like=share)
    else:
        every = _ranks.sizes(group, packed, *share.shape, like=share)
    if len({of_rank[0] for of_rank in every}) > 1:
        raise ValueError("x: expected padded tokens of every rank of process_group, or packed ones of every rank")
    _, sequences, lengths = (list(column) for column in zip(*every, strict=True))
    if not packed:
        rows, width = _ranks.place(group, sequences), max(lengths)
        whole = tuple(_ranks.gathered(group, a, sequences, width) for a in (share, counted))
        y, *stats = call(_MASKED_WHITEN, (*whole, None), how)
        return (y[rows, : share.shape[1]].contiguous(), *stats)
    # Offsets that do not begin with 0 are invalid. They must stay invalid after the offsets of all ranks are joined, so
    # the ends of their sequences become negative.
    ends = torch.where(offsets[0] == 0, offsets[1:], -1 - tokens * len(lengths))
    slots = _ranks.place(group, lengths)
    ends = _ranks.gathered(group, ends + slots.start, sequences)
    own = slots.stop - slots.start
    whole = tuple(_ranks.gathered(group, a[:own], lengths) for a in (share, counted))
    y, *stats = call(_MASKED_WHITEN, (*whole, torch.cat([ends.new_zeros(1), ends])), how)
    result = torch.zeros_like(share)
    result[:own] = y[slots]
    return (result, *stats)


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_WHITENED = Bound(
    lambda largest: 8 * U * (10 + largest),
    "8 * u * (10 + largest)",
    "means by trees over tokens and sequences, in two passes, of values of size 1 to 10",
)


def _contract_rows() -> Iterator[Row]:
    whole = OF_TOKENS | {"kind": "scan", "stem": "masked_whiten", "keeps": BATCH_OF_TOKENS}  # needs the whole batch
    for output in ("y", "mean", "var"):
        yield Row("masked_whiten", output, "forward", bound=_OFF_WHITENED, **whole)


add_rows(_contract_rows())
