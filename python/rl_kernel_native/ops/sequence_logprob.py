"""Log-probabilities summed over sequences: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/sequence_logprob.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

from .. import _call, _check, _dispatch
from .._native import functions
from .._operator import Operator, linear
from .._types import AnyArray, ArrayT, DType, Generic, NamedTuple
from ..contract import BITWISE, DTYPES, OF_TOKENS, Bound, Row, U, add_rows
from ..reference.sequence_logprob import sequence_logprob_reference

__all__ = [
    "SequenceLogprob",
    "SequenceLogprobAndStatus",
    "sequence_logprob",
    "sequence_logprob_backward",
    "sequence_logprob_reference",
]

_C = functions(
    sequence_logprob="object*3, bool, object, int",
    sequence_logprob_backward="object*3, int*2, bool, object, int",
    sequence_logprob_eager="object*3, bool",
)


class SequenceLogprob(NamedTuple, Generic[ArrayT]):
    """One entry per sequence."""

    sum: ArrayT  # [num_sequences] float32, in nats
    count: ArrayT  # type: ignore[assignment]  # hides tuple.count


class SequenceLogprobAndStatus(NamedTuple, Generic[ArrayT]):
    """:class:`SequenceLogprob` with the status."""

    sum: ArrayT
    count: ArrayT  # type: ignore[assignment]  # hides tuple.count
    status: ArrayT  # [num_sequences] int32, 1 for invalid offsets, else 0


def _along(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    """The derivative rule. If ``wanted`` is None, returns the tangent summed over sequences. Otherwise returns the
    gradient: each token gets the gradient of its sequence's sum."""
    tokens, mask, cu_seqlens = arrays
    if wanted is None:
        return call(_SEQUENCE_LOGPROB, (given[0], mask, cu_seqlens), (False,))[:1]
    is_flat = cu_seqlens is None and len(tokens.shape) == 1
    how = (tokens.shape[-1], _dispatch.dtype_code(tokens.dtype, "dtype"), is_flat)
    return call(_BACKWARD, (given[0], mask, cu_seqlens), how)


def _along_backward(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    if wanted is None:
        return call(_BACKWARD, (given[0], *arrays[1:]), how)
    return call(_SEQUENCE_LOGPROB, (given[0], *arrays[1:]), (False,))[:1]


def _outputs(arrays: Any, how: tuple[Any, ...]) -> Any:
    """Returns the shapes of sum, count and status."""
    logprob, _, cu_seqlens = arrays
    rows = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else logprob.shape[0] if len(logprob.shape) == 2 else 1
    return (rows,), (rows,), (rows,) if how[0] else None


def _gradient_shape(arrays: Any, how: tuple[Any, ...]) -> Any:
    dsum, _, cu_seqlens = arrays
    return ((how[0],) if cu_seqlens is not None or how[2] else (dsum.shape[0], how[0]),)


# `sequence_logprob_backward` takes the mask as an array, and the shape of the gradient as options.
_SEQUENCE_LOGPROB = Operator(
    "sequence_logprob",
    "logprob, mask?, cu_seqlens?",
    "bool return_status",
    outputs=_outputs,
    dtypes=("float32", "int64", "int32"),
    gradient=linear(of=(0,), reads=(1, 2), incoming=("dsum",), along=_along),
)
_BACKWARD = Operator(
    "sequence_logprob_backward",
    "dsum, mask?, cu_seqlens?",
    "SymInt num_tokens, int dtype, bool is_flat",
    outputs=_gradient_shape,
    dtypes=(lambda how: how[1],),
    gradient=linear(of=(0,), reads=(1, 2), incoming=("d_logprob",), along=_along_backward),
)


@overload
def sequence_logprob(
    logprob: ArrayT, mask: AnyArray | None = None, cu_seqlens: AnyArray | None = None, *,
    return_status: Literal[False] = False
) -> SequenceLogprob[ArrayT]: ...  # fmt: skip


@overload
def sequence_logprob(
    logprob: ArrayT, mask: AnyArray | None = None, cu_seqlens: AnyArray | None = None, *, return_status: bool = False
) -> SequenceLogprobAndStatus[ArrayT]: ...  # fmt: skip
def sequence_logprob(logprob: Any, mask: Any = None, cu_seqlens: Any = None, *, return_status: bool = False) -> Any:
    """The sum of each sequence's log-probabilities over the tokens that count, and the number of these tokens.

    A sequence has the same bits padded and packed, among any number of sequences, at any position and stride, with any
    padding to its right, and on every backend. The sum is a perfect binary tree over positions from the sequence's
    first token on, as in every operator. The sum is differentiable (torch) in ``logprob``, any number of times.

    A sequence may be cut into parts of 2^k tokens (the last part may be shorter) and summed part by part. If ``parts``
    holds the float32 sums of all parts in order, ``[num_sequences, num_parts]``, then ``sequence_logprob(parts)`` has
    the bits of the sum over the whole sequence.

    Args:
        logprob: ``[num_sequences, num_tokens]``, or ``[num_tokens]`` for one sequence or with ``cu_seqlens``; float32,
            bfloat16 or float16, last dimension contiguous.
        mask: any mask (docs/tokens.md) of the shape of ``logprob``; a token counts if its mask is not zero. Other
            tokens may hold any value, including NaN and Inf. None: all tokens count.
        cu_seqlens: ``[num_sequences + 1]``, int32 or int64: sequence ``i`` is tokens ``[cu_seqlens[i],
            cu_seqlens[i + 1])``. The first offset is 0. Tokens from the last offset on belong to no sequence and are
            not read, so a packed array may be larger than its content (:func:`pack`). Offsets on a GPU are not copied
            to the host; on a GPU, a sequence with invalid offsets has sum NaN, count 0 and status 1.
        return_status: also return an int32 array ``[num_sequences]``, 1 for invalid offsets, else 0.
    Returns:
        :class:`SequenceLogprob`, ``(sum, count)``, float32 in nats and int64, each ``[num_sequences]``; with
        ``return_status``, :class:`SequenceLogprobAndStatus`, whose third field is the status. An empty or wholly masked
        sequence has sum 0 and count 0. The average is ``sum / count.clamp(min=1)``.
    Raises:
        TypeError for a wrong dtype; ValueError for a wrong shape, layout or device, or on the CPU for invalid offsets;
        RuntimeError if this build has no kernel for the device.
    Source:
        docs/numerics.md, rules 3 and 10.

    Example:
        >>> logprob, mask = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[0, 1, 1]])
        >>> rk.sequence_logprob(logprob, mask)
        SequenceLogprob(sum=tensor([-6.]), count=tensor([2]))
    """
    if type(return_status) is not bool:
        return_status = _check.flag("return_status", return_status)
    arrays = (logprob, mask, cu_seqlens)
    result: Any = NotImplemented
    if not _call.is_read_by_dynamo():
        result = _C.sequence_logprob_eager(*arrays, return_status)
    if result is NotImplemented:
        result = _call.call(_SEQUENCE_LOGPROB, arrays, (return_status,))
    return SequenceLogprobAndStatus(*result) if return_status else SequenceLogprob(*result[:2])


def sequence_logprob_backward(
    dsum: ArrayT,
    mask: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    *,
    num_tokens: int,
    dtype: DType = "float32",
) -> ArrayT:
    """The gradient of :func:`sequence_logprob`, for callers that run backward themselves; torch's autograd also calls
    this function.

    Args:
        dsum: ``[num_sequences]`` float32.
        mask, cu_seqlens: as given to :func:`sequence_logprob`.
        num_tokens: number of tokens in a padded row, or in the packed array.
        dtype: the dtype of ``logprob``: float32, bfloat16 or float16.
    Returns:
        ``[num_sequences, num_tokens]``, or ``[num_tokens]`` with ``cu_seqlens`` or a mask of one dimension: ``dsum`` of
        the token's sequence if the token counts, else 0.
    Raises: as :func:`sequence_logprob`.
    Source: docs/numerics.md, rule 10.
    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> rk.sequence_logprob_backward(torch.tensor([2.0, 3.0]), mask, num_tokens=3)
        tensor([[2., 2., 0.],
                [3., 0., 0.]])
    """
    code = _dispatch.dtype_code(dtype, "dtype")
    num_tokens = _check.integer64("num_tokens", num_tokens)
    if num_tokens < 0:
        raise ValueError(f"num_tokens: expected a number >= 0, got {num_tokens}")
    is_flat = cu_seqlens is None and getattr(mask, "ndim", 2) == 1
    return _call.call(_BACKWARD, (dsum, mask, cu_seqlens), (num_tokens, code, is_flat))[0]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_SEQUENCE_SUM = Bound(
    lambda terms, scale: (12 + terms / 2048) * U * scale + 1e-30,
    "(12 + terms / 2048) * u * scale + 1e-30",
    "one addition for each level of a tree: eleven over 2048 tokens, one more for each doubling",
)


def _contract_rows() -> Iterator[Row]:
    summed = OF_TOKENS | {"kind": "scan", "stem": "sequence_logprob", "dtypes": DTYPES}
    yield Row("sequence_logprob", "sum", "forward", bound=_OFF_SEQUENCE_SUM, **summed)
    yield Row("sequence_logprob", "count", "forward", bound=BITWISE, **(summed | {"kind": "integers"}))
    spread = summed | {"kind": "copy", "rounded": True}
    yield Row("sequence_logprob", "d_logprob", "backward", bound=BITWISE, **spread)


add_rows(_contract_rows())
