"""Matrix product with a weight: arguments, dispatch, results. The contract is cpp/include/rlk/ops/linear.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .. import _call, _check, _dispatch
from .._arithmetic import product_unit
from .._dispatch import code_or_same, dtype_code
from .._native import functions
from .._types import AnyArray, ArrayT, DType, Engine
from ..contract import (
    COMPOSED,
    FMA,
    GROUPS,
    NO_SHARDS,
    ONE_ARCHITECTURE,
    TOKEN_SUM,
    TOKEN_SUMS,
    UNIT,
    Row,
    add_rows,
    derivatives,
)
from ..reference.linear import linear_reference
from .linear_traced import BIAS_GRAD, INPUT_GRAD, LINEAR, SHARDED, TREE_SUM, WEIGHT_GRAD, WEIGHT_GRAD_INTO

__all__ = [
    "linear",
    "linear_bias_grad",
    "linear_input_grad",
    "linear_partial",
    "linear_reference",
    "linear_weight_grad",
    "tree_sum",
]

_C = functions(
    linear="object*4, int, bool, int, object, int",
    linear_bias_grad="object, int, object, int",
    linear_eager="object*4, int, bool, int",
    linear_input_grad="object*2, bool, int, object, int",
    linear_vendor_products="int",
    linear_weight_grad="object*4, int, bool, int, object, int",
    tree_sum="object*2, int, object, int",
)


_MISSING = (None,) * 8  # fills up the 8 arrays that the operator `tree_sum` declares


def _allows_vendor(engine: str) -> bool:
    if type(engine) is str and engine == "auto":
        return True
    _check.one_of("engine", engine, ("auto", "native"))
    return False


def linear(
    x: ArrayT,
    weight: AnyArray,
    bias: AnyArray | None = None,
    *,
    k_segments: int = 1,
    out_dtype: DType = None,
    engine: Engine = "auto",
    main_grad: AnyArray | None = None,
    weight_grad_dtype: DType = None,
) -> ArrayT:
    """``y = x @ weight.T + bias``. The bits of ``y`` do not depend on batch size, tile sizes or splits of the work.

    A row has the same bits for any number of rows, position and stride. Products are summed in float32 in ascending
    order of ``in_features``; on a CPU, ``rk.arithmetic`` selects the arithmetic. The bias is added to the sum, which is
    then rounded once. In torch, ``x``, ``weight`` and ``bias`` have derivatives of any order. An incoming gradient is
    first rounded to the dtype of ``x``. The gradient is copied if autograd passes it expanded or transposed, as in
    ``y.sum().backward()``. Under ``torch.autocast``, operands are cast as for ``torch.nn.functional.linear``. In a
    column-parallel layer (docs/linear.md), ``y`` has the same bits for any number of ranks, but the gradient of ``x``
    does not. On sm_90, products are fastest if rows of operands begin at multiples of 16 bytes. Other operands are
    copied, about 256 MiB at a time, if the result has at least 256 rows and 256 columns. For a ``y`` of up to 512 rows
    (256, if rows of ``weight`` begin at odd elements), only ``x`` is copied.

    Args:
        x: ``[..., in_features]``, bfloat16 or float16, on the CPU also float32; last dimension contiguous.
        weight: ``[out_features, in_features]``, with the dtype of ``x``; each row is contiguous, with any stride
            between rows.
        bias: ``[out_features]``, with the dtype of ``x`` or float32; contiguous.
        k_segments: 1, 2, 4 or 8: the number of equal segments of ``in_features``. Each segment is summed separately,
            and a tree adds the segments. A layer split over up to ``k_segments`` ranks then has the same bits.
            ``in_features`` must be a multiple of ``16 * k_segments``.
        out_dtype: the dtype of ``y``: float32, bfloat16 or float16, as a framework's dtype or a name. Default: the
            dtype of ``x``.
        engine: ``"native"`` uses this library's own kernels only. ``"auto"`` may also use cuBLASLt, but only for
            products with a record. A record says that, on this GPU, the installed cuBLASLt computes the same bits of a
            product in less time.
        main_grad: float32 ``[out_features, in_features]``, with contiguous rows. Backward adds the gradient of
            ``weight`` to this array in place, block by block. ``weight`` itself gets no gradient, so hooks on
            ``weight`` see none. Each backward that asks for the gradient of ``weight`` adds this gradient once.
            ``backward(inputs=[x])`` and ``torch.autograd.grad(y, x)`` write nothing to ``main_grad``, and
            ``torch.autograd.grad(y, weight)`` is an error. Not supported with a frozen ``weight``, ``create_graph``,
            ``torch.compile`` or ``torch.func``. If every micro-batch has a multiple of 8192 rows, ``main_grad`` has the
            bytes of one call on the whole batch.
        weight_grad_dtype: the dtype of the gradient of ``weight``; default: the dtype of ``weight``. float32 needs a
            torch version with ``Tensor.grad_dtype``, and ``weight.grad_dtype`` set to float32 or None.
    Returns: ``y``, ``[..., out_features]``.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device.
    Source:
        docs/numerics.md, rules 1, 2 and 9.

    Example:
        >>> x, weight, bias = torch.ones(2, 3), torch.arange(6.0).view(2, 3), torch.tensor([0.5, -0.5])
        >>> rk.linear(x, weight, bias)
        tensor([[ 3.5000, 11.5000],
                [ 3.5000, 11.5000]])
    """
    allow_vendor = _allows_vendor(engine)
    out = code_or_same(out_dtype, "out_dtype")
    if type(k_segments) is not int:
        k_segments = _check.integer("k_segments", k_segments)
    if main_grad is None and weight_grad_dtype is None and not _call.is_read_by_dynamo():
        result = _C.linear_eager(x, weight, bias, k_segments, out, allow_vendor, 0)
        if result is not NotImplemented:
            return result
    weight_grad = code_or_same(weight_grad_dtype, "weight_grad_dtype")
    arrays: tuple[Any, ...] = (x, weight, bias)
    if main_grad is None and weight_grad < 0:
        return _call.call(LINEAR, arrays, (k_segments, out, allow_vendor, None, None, None))[0]
    how: tuple[Any, ...] = (k_segments, out, allow_vendor, None)
    return _call.call_with_main_grad(LINEAR, arrays, how, main_grad, weight_grad)[0]


def linear_input_grad(dy: ArrayT, weight: AnyArray, *, engine: Engine = "auto") -> ArrayT:
    """Gradient of :func:`linear` in ``x``, ``dx = dy @ weight``, for callers that run backward themselves.

    Args:
        dy: ``[..., out_features]``, bfloat16 or float16, on the CPU also float32; last dimension contiguous.
        weight: ``[out_features, in_features]``, with the dtype of ``dy``.
        engine: as for :func:`linear`.
    Returns: ``dx``, ``[..., in_features]``, with the dtype of ``dy``, summed in ascending order of ``out_features``.
    Raises: as :func:`linear`.
    Source: docs/numerics.md, rule 1.

    Example:
        >>> rk.linear_input_grad(torch.ones(1, 2), torch.arange(6.0).view(2, 3))
        tensor([[3., 5., 7.]])
    """
    return _call.call(INPUT_GRAD, (dy, weight), (_allows_vendor(engine), None))[0]


def linear_weight_grad(
    dy: ArrayT,
    x: AnyArray,
    *,
    main_grad: AnyArray | None = None,
    out_dtype: DType = None,
    engine: Engine = "auto",
    out: AnyArray | None = None,
) -> ArrayT:
    """Gradient of :func:`linear` in ``weight``, ``dweight = dy.T @ x`` over all rows.

    Rows are summed in ascending order in blocks of 8192, and each block is added to the result in float32.

    Args:
        dy: ``[..., out_features]``, bfloat16 or float16, on the CPU also float32; last dimension contiguous.
        x: ``[..., in_features]``, with the dtype and the leading dimensions of ``dy``.
        main_grad: float32 ``[out_features, in_features]``, to which the blocks are added in place.
        out_dtype: the dtype of ``dy`` (default) or float32; the dtype of ``main_grad`` or ``out`` if one is given.
        engine: as for :func:`linear`.
        out: array for the result, or None; not together with ``main_grad``.
    Returns: ``dweight``, ``[out_features, in_features]``; ``main_grad`` or ``out`` itself if given.
    Raises: as :func:`linear`; BufferError if the array to write is read-only.
    Source: docs/numerics.md, rules 1 and 9.

    Example:
        >>> rk.linear_weight_grad(torch.ones(4, 2), torch.ones(4, 3))
        tensor([[4., 4., 4.],
                [4., 4., 4.]])
    """
    allow_vendor = _allows_vendor(engine)
    code = code_or_same(out_dtype, "out_dtype")
    if main_grad is not None and out is not None:
        raise ValueError("out: cannot be given together with main_grad, which is accumulated in place")
    if main_grad is not None and code > 0:
        raise TypeError(f"out_dtype: expected float32, that of main_grad, got {_check.shown(out_dtype)}")
    _check.writable("main_grad", main_grad)
    _check.writable("out", out)
    if main_grad is not None:
        _call.accumulate(WEIGHT_GRAD_INTO, main_grad, (dy, x), (allow_vendor, None))
        return main_grad  # type: ignore[return-value]
    if out is None:
        return _call.call(WEIGHT_GRAD, (dy, x), (code, allow_vendor, None))[0]
    frame = _call.frame_of(("dy", "x"), (dy, x), (out,), SHARDED)
    arrays = (frame.export(dy, "dy"), frame.export(x, "x"), None, frame.export_output(out, "out"))
    _C.linear_weight_grad(*arrays, code, allow_vendor, product_unit(), frame.allocate, frame.stream)
    _dispatch.count_write(out)
    return out  # type: ignore[return-value]


def linear_bias_grad(dy: ArrayT, *, out_dtype: DType = None) -> ArrayT:
    """Gradient of :func:`linear` in ``bias``: ``dy`` summed over all rows.

    Args:
        dy: ``[..., out_features]``, float32, bfloat16 or float16; last dimension contiguous.
        out_dtype: the dtype of ``dy`` (default) or float32.
    Returns: ``dbias``, ``[out_features]``: sums over groups of 64 rows, added by trees over 128 groups, then over
        blocks of 8192 rows.
    Raises: as :func:`linear`.
    Source: docs/numerics.md, rule 9.

    Example:
        >>> rk.linear_bias_grad(torch.ones(4, 2))
        tensor([4., 4.])
    """
    return _call.call(BIAS_GRAD, (dy,), (code_or_same(out_dtype, "out_dtype"),))[0]


def linear_partial(
    x_shard: ArrayT,
    weight_shard: AnyArray,
    *,
    k_segments: int,
    first_segment: int,
    num_segments: int,
    engine: Engine = "auto",
    main_grad: AnyArray | None = None,
    weight_grad_dtype: DType = None,
) -> ArrayT:
    """A rank's share of the sums of :func:`linear` if ``in_features`` is split over ranks. :func:`tree_sum` adds all
    shares.

    Args:
        x_shard: ``[..., shard]``, the columns of ``x`` in ``num_segments`` segments, from segment ``first_segment`` on.
        weight_shard: ``[out_features, shard]``, the same columns of the weight.
        k_segments: number of segments of the whole layer: 1, 2, 4 or 8, at least the number of ranks. The bits depend
            on this number, so every engine that runs the layer must use the same number.
        first_segment, num_segments: the shard's segments, which form a whole subtree: ``num_segments`` is a power of
            two and divides ``first_segment``. If ``k_segments`` is above 1, the shard's number of columns is a multiple
            of ``16 * num_segments``.
        engine, main_grad, weight_grad_dtype: as for :func:`linear`; they apply to the shard.
    Returns: the subtree's sum before bias and rounding, ``[..., out_features]`` float32. Differentiable (torch).
    Raises: as :func:`linear`.
    Source: docs/numerics.md, rule 2.

    Example:
        >>> x, weight = torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(2, 64, dtype=torch.bfloat16)
        >>> halves = zip(x.split(32, 1), weight.split(32, 1))
        >>> shares = [
        ...     rk.linear_partial(a, w, k_segments=2, first_segment=i, num_segments=1)
        ...     for i, (a, w) in enumerate(halves)
        ... ]
        >>> rk.tree_sum(shares, out_dtype=x.dtype)
        tensor([[64., 64.]], dtype=torch.bfloat16)
    """
    num_segments = _check.segments(k_segments, first_segment, num_segments, x_shard)
    options: dict[str, Any] = {"engine": engine, "main_grad": main_grad, "weight_grad_dtype": weight_grad_dtype}
    try:
        return linear(x_shard, weight_shard, k_segments=num_segments, out_dtype="float32", **options)
    except (TypeError, ValueError) as error:
        raise _check.of_shard(error) from None


def tree_sum(parts: Sequence[ArrayT], *, bias: AnyArray | None = None, out_dtype: DType = None) -> ArrayT:
    """Adds the shares of :func:`linear_partial`. The result has the bits of :func:`linear` with the same ``k_segments``
    on one rank.

    Args:
        parts: 1, 2, 4 or 8 arrays in rank order, equal in shape, float32, contiguous. Pass every share once: a missing,
            repeated or misplaced share is not detected.
        bias: ``[last dimension]``, float32, bfloat16 or float16, added to the sum before it is rounded.
        out_dtype: float32 (default), bfloat16 or float16.
    Returns: ``((parts[0] + parts[1]) + (parts[2] + parts[3])) + ...`` in float32, plus the bias, rounded once.
        Differentiable (torch).
    Raises: as :func:`linear`.
    Source: docs/numerics.md, rule 2.

    Example:
        >>> rk.tree_sum([torch.ones(2), torch.full((2,), 2.0)])
        tensor([3., 3.])
    """
    code = 0 if out_dtype is None else dtype_code(out_dtype, "out_dtype")
    found: list[Any] = _check.parts(parts)
    arrays = (*found, *_MISSING[len(found) :], bias)
    return _call.call(TREE_SUM, arrays, (code, len(found)))[0]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    product: dict[str, Any] = {
        "kind": "matrix product", "backends": ONE_ARCHITECTURE, "stem": "linear", "bound": FMA, "unit_bound": UNIT,
    }  # fmt: skip
    yield Row("linear", "y", "forward", **product)
    yield Row("linear", "dx", "backward", keeps=NO_SHARDS, **product)
    yield Row("linear", "dweight", "backward", **(product | {"kind": "token sum", "keeps": TOKEN_SUM}))
    yield Row("linear", "dbias", "backward", stem="linear", bound=GROUPS, **TOKEN_SUMS)
    yield Row(
        "linear", "derivatives", "backward", stem="linear", bound=derivatives(2e-6), backends=ONE_ARCHITECTURE,
        **COMPOSED,
    )  # fmt: skip


add_rows(_contract_rows())
