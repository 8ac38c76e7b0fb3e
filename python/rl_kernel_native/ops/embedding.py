"""Token embedding: arguments, dispatch, results. The contract is cpp/include/rlk/ops/embedding.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _call, _check, _dispatch
from .._dispatch import SAME, code_or_same, option_code
from .._native import functions
from .._operator import Operator, linear
from .._transforms import rows
from .._types import AnyArray, ArrayT, DType, OnBadId
from ..contract import EVERY_BACKEND, GROUPS, TOKEN_SUMS, Bound, Row, add_rows
from ..reference.embedding import embedding_reference

__all__ = ["embedding", "embedding_backward", "embedding_reference"]

_C = functions(embedding="object*6, int", embedding_backward="object*7, int, object, int", embedding_eager="object*5")


def _along(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    """The derivative rule of ``embedding``. If ``wanted`` is None, returns the rows of the table's tangent, else the
    gradient of the table. If main_grad is given, the rule adds the gradient to main_grad instead."""
    weight, ids = arrays
    dtype, main_grad = how[3:] or (SAME, None)
    if wanted is None:
        return call(_FORWARD, (ids, given[0]), (*how[:3], dtype, None))
    of = (weight.shape[0], *how[:3])
    if main_grad is None:
        return call(_BACKWARD, (given[0], ids), (*of, dtype))
    if wanted[0]:
        call(_INTO, (main_grad, given[0], ids), of)
    return (None,)


def _along_backward(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    """The derivative rule of ``embedding_backward``. If ``wanted`` is None, returns the tangent's sums per table row.
    Otherwise each token gets the incoming gradient of its table row, or zeros if the table has no row for it."""
    dy, ids = arrays
    if wanted is None:
        return call(_BACKWARD, (given[0], ids), how)
    num_rows, vocab_start, vocab_size, padding_idx, _ = how
    # Ids are shifted so that the table begins at id 1. Id 0 then stands for ids of other ranks and bad ids, whose
    # tokens get zeros.
    of_rows = ids - vocab_start + 1
    owned = (ids >= vocab_start) & (of_rows <= num_rows)
    if vocab_size is not None:
        owned = owned & (ids < vocab_size)
    if padding_idx is not None:
        owned = owned & (ids != padding_idx)
    (found,) = call(_FORWARD, (of_rows.where(owned, 0), given[0]), (1, num_rows + 1, None))
    return (found.to(dy.dtype),)


def _eager() -> Any:
    from .eager_autograd import Embedding

    return Embedding


_WHERE = "SymInt vocab_start, SymInt? vocab_size, SymInt? padding_idx"
# An eager call has two more options than the schema: the dtype of the weight's gradient, and main_grad.
_FORWARD = Operator(
    "embedding",
    "ids, weight",
    _WHERE,
    outputs=lambda arrays, how: ((*arrays[0].shape, arrays[1].shape[1]),),
    dtypes=(None,),
    native=lambda arrays, how, *tail: (_C.embedding(*arrays, *how[:3], *tail),),
    gradient=linear(of=(1,), reads=(0,), incoming=("dy",), along=_along, accumulates=1, batch=rows(0), eager=_eager),
    leads=1,
    main_grad_call="embedding_backward",
)
_BACKWARD = Operator(
    "embedding_backward",
    "dy, ids",
    f"SymInt num_rows, {_WHERE}, ScalarType? dtype",
    outputs=lambda arrays, how: ((how[0], arrays[0].shape[-1]),),
    dtypes=(lambda how: how[4],),
    native=lambda arrays, how, *tail, main_grad=None: (
        _C.embedding_backward(*arrays, *how[:4], main_grad, option_code(how[4], "dweight_dtype"), *tail),
    ),
    gradient=linear(of=(0,), reads=(1,), incoming=("dweight",), along=_along_backward),
)
_INTO = _BACKWARD.into(0)


def embedding(
    ids: AnyArray,
    weight: ArrayT,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
    check: bool = False,
    on_bad_id: OnBadId = "nan",
    main_grad: AnyArray | None = None,
    weight_grad_dtype: DType = None,
) -> ArrayT:
    """Rows of a table by token ids: ``y[t] = weight[ids[t] - vocab_start]``, bit for bit.

    A table may be one rank's shard of a vocabulary: it holds the ids from ``vocab_start`` on, and ids of other ranks
    give rows of zeros. The sum of all ranks' ``y`` (an all-reduce, in any order) is therefore exact, except that a -0
    of the table becomes +0. Differentiable (torch) in ``weight``, any number of times. The gradient is summed in a
    fixed order, so it has the same bits on every backend and for any split of the vocabulary.

    Args:
        ids: ``[...]``, int32 or int64, in ``[0, vocab_size)``. Dimensions that are contiguous to each other
            count as one; at most two may then remain, with any strides.
        weight: ``[rows, columns]``, float32, bfloat16 or float16; last dimension contiguous.
        vocab_start: the id of the table's first row.
        vocab_size: number of ids in the whole vocabulary. The default, ``vocab_start + rows``, is right if one rank has
            the whole table. Rows past this size are padding.
        padding_idx: an id whose row is returned but gets no gradient. Forward mode keeps the row's tangent. torch's own
            embedding does both.
        check: raise a ValueError that names the first bad id. The check synchronises, and breaks the graph of
            torch.compile.
        on_bad_id: ``"nan"``: an id outside ``[0, vocab_size)`` makes its row NaN and has no gradient. Such an id reads
            no memory and affects no other row. ``"raise"``: as ``check``.
        main_grad: float32 ``[rows, columns]``, contiguous rows. Backward adds the gradient of ``weight`` to this array
            in place, and ``weight`` itself gets none; rows without a token are not touched. The conditions for
            ``main_grad`` are those of :func:`linear`.
        weight_grad_dtype: the dtype of the gradient of ``weight``, as for :func:`linear`; default: the dtype of
            ``weight``.
    Returns: ``y``, ``[..., columns]``, of the dtype of ``weight``.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device.
    Source:
        docs/numerics.md, rule 9; shards: Shoeybi et al. 2019, arXiv:1909.08053.

    Example:
        >>> rk.embedding(torch.tensor([2, 0]), torch.arange(6.0).view(3, 2))
        tensor([[4., 5.],
                [0., 1.]])
    """
    if type(on_bad_id) is not str or on_bad_id != "nan":
        _check.one_of("on_bad_id", on_bad_id, ("nan", "raise"))
    if type(vocab_start) is not int:
        vocab_start = _check.integer("vocab_start", vocab_start)
    check = check is not False and _check.flag("check", check)
    y: Any = NotImplemented
    if main_grad is None and weight_grad_dtype is None and not _call.is_read_by_dynamo():
        y = _C.embedding_eager(ids, weight, vocab_start, vocab_size, padding_idx)
    if y is NotImplemented:
        code = code_or_same(weight_grad_dtype, "weight_grad_dtype")
        where: tuple[Any, ...] = (vocab_start, vocab_size, padding_idx)
        if main_grad is None and code < 0:
            (y,) = _call.call(_FORWARD, (ids, weight), (*where, None, None))
        else:
            (y,) = _call.call_with_main_grad(_FORWARD, (ids, weight), where, main_grad, code)
    if check or on_bad_id == "raise":
        size = vocab_start + weight.shape[0] if vocab_size is None else vocab_size
        _raise_for_bad_id(ids, size, "check" if check else "on_bad_id")
    return y


def _raise_for_bad_id(ids: Any, vocab_size: int, option: str) -> None:
    flat = (ids if hasattr(ids, "reshape") else np.from_dlpack(ids)).reshape(-1)
    # No int32 id reaches a vocab_size of 2^31 or more, so the comparison is left out: frameworks disagree about its
    # result.
    comparable = vocab_size < 1 << 31 or "64" in str(flat.dtype)
    bad = (flat < 0) | (flat >= vocab_size) if comparable else flat < 0
    tokens = _dispatch.true_places(bad, option)
    if len(tokens) > 0:
        token = int(tokens[0])
        raise ValueError(
            f"ids: expected ids in [0, {vocab_size}), got {int(flat[token])} at index {token} (the first of "
            f"{len(tokens)} bad ids)"
        )


def embedding_backward(
    dy: ArrayT,
    ids: AnyArray,
    num_rows: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
    main_grad: AnyArray | None = None,
    dweight_dtype: DType = None,
) -> ArrayT:
    """Gradient of :func:`embedding` in ``weight``, for callers that run backward themselves; torch's autograd also
    calls this function.

    ``dweight[v]`` is the sum of ``dy`` over the tokens of row v. The sum is taken in float32, in groups of 64 tokens
    and blocks of 8192 by token index, and rounded once.

    Args:
        dy: ``[..., columns]``, float32, bfloat16 or float16; last dimension contiguous.
        ids: ``[...]``, int32 or int64, the leading dimensions of ``dy``.
        num_rows: number of rows of the table.
        vocab_start, vocab_size, padding_idx: as given to :func:`embedding`. Bad ids, ids of other ranks and
            ``padding_idx`` have no gradient, and their rows of ``dy`` are not read.
        main_grad: float32 ``[num_rows, columns]``, to which the gradient is added in place; rows without a token are
            unchanged.
        dweight_dtype: the dtype of ``dy`` (default) or float32.
    Returns: ``dweight``, ``[num_rows, columns]``, zeros where a row has no token; or ``main_grad`` itself.
    Raises: as :func:`embedding`; BufferError where ``main_grad`` is read-only.
    Source: docs/numerics.md, rule 9.
    Example:
        >>> rk.embedding_backward(torch.ones(3, 2), torch.tensor([1, 1, 0]), num_rows=3)
        tensor([[1., 1.],
                [2., 2.],
                [0., 0.]])
    """
    code = code_or_same(dweight_dtype, "dweight_dtype")
    if main_grad is not None and code > 0:
        raise TypeError(f"dweight_dtype: expected float32, that of main_grad, got {_check.shown(dweight_dtype)}")
    _check.writable("main_grad", main_grad)
    how: tuple[Any, ...] = (num_rows, _check.integer("vocab_start", vocab_start), vocab_size, padding_idx)
    if main_grad is not None:
        _call.accumulate(_INTO, main_grad, (dy, ids), how)
        given: Any = main_grad
        return given
    dweight: ArrayT
    (dweight,) = _call.call(_BACKWARD, (dy, ids), (*how, code))
    return dweight


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    table: dict[str, Any] = {"stem": "embedding"}
    copied = Bound(lambda: 0.0, "0", "bitwise: the row of the table, or +0 on a rank that has another part of it")
    yield Row("embedding", "y", "forward", "copy", EVERY_BACKEND, copied, rounded=False, **table)
    yield Row("embedding", "dweight", "backward", bound=GROUPS, **table, **TOKEN_SUMS)


add_rows(_contract_rows())
