"""Token embedding: arguments, dispatch, results. The contract is cpp/include/rlk/ops/embedding.h."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _check, _dispatch
from .._native import module as _C
from .._types import AnyArray, ArrayT, DType, OnBadId
from ..reference.embedding import embedding_reference

__all__ = ["embedding", "embedding_backward", "embedding_reference"]

SAME = -1  # a dtype's code: that of the weight, or of dy

_torch_path: Any = None
_plain: tuple[Any, ...] = ()  # torch.Tensor and its Parameter, once a tensor was seen


def _torch() -> Any:
    """ops/embedding_torch.py, imported with the first torch tensor."""
    global _torch_path, _plain
    if _torch_path is None:
        _dispatch.require_torch()
        from . import embedding_torch

        _torch_path = embedding_torch
        _plain = embedding_torch.PLAIN
    return _torch_path


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

    A table may be one rank's share of a vocabulary: it holds the ids from ``vocab_start`` on, and ids of other ranks
    give rows of zeros. So the sum of all ranks' ``y`` (an all-reduce, in any order) is exact; it turns a -0 of the
    table into +0. Differentiable (torch) in ``weight``, any number of times; the gradient is summed in a fixed order,
    the same bits on every backend and for any split of the vocabulary.

    Args:
        ids: ``[...]``, int32 or int64, in ``[0, vocab_size)``; dimensions of at most two strides.
        weight: ``[rows, columns]``, float32, bfloat16 or float16; last dimension contiguous.
        vocab_start: the id of the table's first row.
        vocab_size: ids of the whole vocabulary. Default: ``vocab_start + rows``, the end of this table, which is right
            where one rank has the whole. Rows past it are padding that no id has.
        padding_idx: an id that gives its row and, as torch's, no gradient.
        check: raise a ValueError that names the first bad id. Synchronises, and breaks the graph of torch.compile.
        on_bad_id: ``"nan"``: an id outside of ``[0, vocab_size)`` makes its row NaN and has no gradient; nothing is
            read for it, and no other row is touched. ``"raise"``: as ``check``.
        main_grad: float32 ``[rows, columns]``, contiguous rows. Backward adds the gradient of ``weight`` to it in place
            and gives ``weight`` itself none; rows without a token are not touched. When it does and when it may not be
            given: as for :func:`linear`.
        weight_grad_dtype: of the gradient of ``weight``, as for :func:`linear`; default that of ``weight``.
    Returns: ``y``, ``[..., columns]``, of the dtype of ``weight``.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a layout, a device or a value; RuntimeError where no
        kernel of this build serves the device.
    Source:
        docs/numerics.md, rule 9; shards: Shoeybi et al. 2019, arXiv:1909.08053.

    Example:
        >>> rk.embedding(torch.tensor([2, 0]), torch.arange(6.0).view(3, 2))
        tensor([[4., 5.],
                [0., 1.]])
    """
    if on_bad_id != "nan":
        _check.one_of("on_bad_id", on_bad_id, ("nan", "raise"))
    if type(vocab_start) is not int:
        vocab_start = _check.integer("vocab_start", vocab_start)
    check = check is not False and _check.flag("check", check)
    where = (vocab_start, vocab_size, padding_idx)
    y: Any = NotImplemented
    if (
        type(weight) in _plain
        and type(ids) in _plain
        and main_grad is None
        and weight_grad_dtype is None
        and not _torch_path.is_compiling()
    ):
        y = _C.embedding_eager(ids, weight, *where)
    if y is NotImplemented:
        y = _call(ids, weight, where, main_grad, weight_grad_dtype)
    if check or on_bad_id == "raise":
        _raise_for_bad_id(ids, vocab_start + weight.shape[0] if vocab_size is None else vocab_size)
    return y


def _call(ids: Any, weight: Any, where: tuple[Any, Any, Any], main_grad: Any, weight_grad_dtype: Any) -> Any:
    code = SAME if weight_grad_dtype is None else _dispatch.dtype_code(weight_grad_dtype, "weight_grad_dtype")
    if _dispatch.is_tensor(weight):
        return _torch().embedding(ids, weight, *where, main_grad, code)
    if main_grad is not None or code != SAME:
        name = "main_grad" if main_grad is not None else "weight_grad_dtype"
        raise ValueError(f"{name}: only torch has an autograd that could use it; call embedding_backward instead")
    frame = _dispatch.Frame(weight, "weight")
    _dispatch.match_torch_threads()
    y = _C.embedding(frame.export(ids, "ids"), frame.export(weight, "weight"), *where, frame.allocate, frame.stream)
    return frame.result(y)


def _raise_for_bad_id(ids: Any, vocab_size: int) -> None:
    flat = (ids if hasattr(ids, "reshape") else np.from_dlpack(ids)).reshape(-1)
    # No int32 reaches a larger vocabulary, and frameworks part over what a comparison with its size would mean.
    comparable = vocab_size < 1 << 31 or "64" in str(flat.dtype)
    bad = ((flat < 0) | (flat >= vocab_size) if comparable else flat < 0).nonzero()
    tokens = bad[0] if isinstance(bad, tuple) else bad.reshape(-1)
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
    """Gradient of :func:`embedding` in ``weight``, for callers that run backward themselves; torch's autograd calls it.

    ``dweight[v]`` is the sum of ``dy`` over the tokens of row v: float32, in groups of 64 tokens and blocks of 8192 by
    their index, rounded once.

    Args:
        dy: ``[..., columns]``, float32, bfloat16 or float16; last dimension contiguous.
        ids: ``[...]``, int32 or int64, the leading dimensions of ``dy``.
        num_rows: of the table.
        vocab_start, vocab_size, padding_idx: as given to :func:`embedding`. Ids that are bad, another rank's or
            ``padding_idx`` have no gradient, and their rows of ``dy`` are not read.
        main_grad: float32 ``[num_rows, columns]`` that the gradient is added to in place; rows without a token are not
            touched.
        dweight_dtype: that of ``dy`` (default) or float32.
    Returns: ``dweight``, ``[num_rows, columns]``, zeros where a row has no token; or ``main_grad`` itself.
    Raises: as :func:`embedding`; BufferError where ``main_grad`` is read-only.
    Source: docs/numerics.md, rule 9.
    """
    code = SAME if dweight_dtype is None else _dispatch.dtype_code(dweight_dtype, "dweight_dtype")
    if main_grad is not None and code > 0:
        raise TypeError(f"dweight_dtype: expected float32, that of main_grad, got {dweight_dtype!r}")
    _check.writable("main_grad", main_grad)
    vocab_start = _check.integer("vocab_start", vocab_start)
    where = (vocab_start, vocab_size, padding_idx)
    if _dispatch.is_tensor(dy):
        return _torch().backward(dy, ids, num_rows, *where, main_grad, code)
    frame = _dispatch.Frame(dy, "dy")
    _dispatch.match_torch_threads()
    dweight = _C.embedding_backward(
        frame.export(dy, "dy"),
        frame.export(ids, "ids"),
        num_rows,
        *where,
        frame.export_output(main_grad, "main_grad"),
        code,
        frame.allocate,
        frame.stream,
    )
    if main_grad is None:
        return frame.result(dweight)
    given: Any = main_grad
    _dispatch.count_write(given)
    return given
