"""Root-mean-square norm: arguments, dispatch, results. The contract is cpp/include/rlk/ops/rms_norm.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

from .. import _call, _check, _dispatch
from .._dispatch import SAME, code_or_same, option_code
from .._native import functions
from .._operator import Composed, Operator
from .._transforms import pulled, rows
from .._types import AnyArray, ArrayT, DType
from ..contract import (
    COMPOSED,
    EVERY_BACKEND,
    LEAST,
    NO_SHARDS,
    TOKEN_SUMS,
    Bound,
    Row,
    U,
    add_rows,
    derivatives,
    roundings,
)
from ..reference.rms_norm import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_backward", "rms_norm_reference"]

_C = functions(
    rms_norm="object*5, bool*2, object, int",
    rms_norm_backward="object*7, bool, object, bool*2, int, object, int",
    rms_norm_eager="object*5, bool*2",
)


def _composed_forward(operands: Any, how: Any) -> tuple[Any, ...]:
    """Computes y and new_residual by torch's operators in float64, without intermediate roundings."""
    x, weight, residual = operands
    h = x.double() if residual is None else x.double() + residual.double()
    y = h * (h.square().mean(-1, keepdim=True) + how[0]).rsqrt()
    if weight is not None:
        y = y * (weight.double() + how[1])
    return (y.to(x.dtype),) if residual is None else (y.to(x.dtype), h.to(x.dtype))


def _composed_backward(operands: Any, how: Any) -> list[Any]:
    """Returns those of dx and dweight that are wanted, as differentiable functions of the operands."""
    dy, h, weight, d_new_residual = operands
    wide = [None if x is None else x.double() for x in (h, weight)]
    dx, dweight = pulled(lambda *given: _composed_forward((*given, None), how), wide, (dy.double(),))
    if d_new_residual is not None:
        dx = dx + d_new_residual.double()
    dtypes = (h.dtype if how[3] else None, how[4])
    return [d.to(dtype) for d, dtype in zip((dx, dweight), dtypes, strict=True) if dtype is not None]


def _native_forward(arrays: Any, how: Any, *tail: Any) -> Any:
    found = _C.rms_norm(*arrays, *how[:3], len(how) == 3 or how[3], *tail)
    return found if isinstance(found, tuple) else (found, None, None)


def _native_backward(arrays: Any, how: Any, *tail: Any, main_grad: Any = None) -> Any:
    dy, h, weight, rstd, third = arrays
    eps, weight_offset, rounds, return_dx, dtype = how
    wanted = (main_grad, return_dx, main_grad is not None or dtype is not None, option_code(dtype, "dweight_dtype"))
    return _C.rms_norm_backward(dy, h, weight, eps, rstd, third, weight_offset, rounds, *wanted, *tail)


def _gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    """Returns the gradients of x, weight and residual. If main_grad is given, the weight's gradient is added to
    main_grad instead."""
    dy, third = given
    if dy is None:  # y was not used; only new_residual has a gradient
        return third if wanted[0] else None, None, third if wanted[2] else None
    arrays, returns_dx = (dy, *kept, third), wanted[0] or wanted[2]
    if wanted[1] and len(how) > 4 and how[5] is not None:
        dx = call(_INTO, (how[5], *arrays), (*how[:3], returns_dx))[0]
        return dx if wanted[0] else None, None, dx if wanted[2] else None
    dtype = kept[1].dtype if wanted[1] else None
    dx, dweight = call(_BACKWARD, arrays, (*how[:3], returns_dx, dtype))
    return dx if wanted[0] else None, dweight, dx if wanted[2] else None


_NUMBERS = "float eps, float weight_offset, bool round_before_weight"
_BACKWARD = Operator(
    "rms_norm_backward",
    "dy, h, weight?, rstd?, d_new_residual?",
    f"{_NUMBERS}, bool return_dx, ScalarType? dweight_dtype",
    outputs=lambda arrays, how: (arrays[0].shape if how[3] else None, None if how[4] is None else arrays[0].shape[-1:]),
    dtypes=(None, lambda how: how[4]),
    native=_native_backward,
    gradient=Composed(
        of=(0, 1, 2, 4),
        composed=_composed_backward,
        batch=rows(0, 1, 3, 4, alone=lambda inputs: inputs[9] is not None),  # one dweight per element
    ),
)
_INTO = _BACKWARD.into(1)
# An eager call has more options than the schema: whether rstd is returned, and main_grad.
_FORWARD = Operator(
    "rms_norm",
    "x, weight?, residual?",
    _NUMBERS,
    outputs=lambda arrays, how: (arrays[0].shape, None if arrays[2] is None else arrays[0].shape, arrays[0].shape[:-1]),
    dtypes=(None, None, "float32"),
    native=_native_forward,
    main_grad_call="rms_norm_backward",
    gradient=Composed(
        of=(0, 1, 2),
        composed=_composed_forward,
        incoming=("dy", "d_new_residual"),
        kept=lambda arrays, outputs: (arrays[0] if arrays[2] is None else outputs[1], arrays[1], outputs[2]),
        backward=_gradients,
        asked=lambda arrays, how: arrays[2] is not None or how[3],
        accumulates=1,
        batch=rows(0, 2),
    ),
)


@overload
def rms_norm(
    x: ArrayT, weight: AnyArray | None, eps: float, *, residual: None = None, weight_offset: float = 0.0,
    round_before_weight: bool = False, return_rstd: Literal[False] = False, main_grad: AnyArray | None = None
) -> ArrayT: ...  # fmt: skip


@overload
def rms_norm(
    x: ArrayT, weight: AnyArray | None, eps: float, *, residual: AnyArray, weight_offset: float = 0.0,
    round_before_weight: bool = False, return_rstd: Literal[False] = False, main_grad: AnyArray | None = None
) -> tuple[ArrayT, ArrayT]: ...  # fmt: skip


@overload
def rms_norm(
    x: ArrayT, weight: AnyArray | None, eps: float, *, residual: AnyArray | None = None, weight_offset: float = 0.0,
    round_before_weight: bool = False, return_rstd: bool = False, main_grad: AnyArray | None = None
) -> tuple[ArrayT, ...]: ...  # fmt: skip
def rms_norm(
    x: Any,
    weight: Any,
    eps: float,
    *,
    residual: Any = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    return_rstd: bool = False,
    main_grad: Any = None,
) -> Any:
    """``y = h * rsqrt(mean(h^2) + eps) * weight`` over the last dimension, with ``h = x`` or ``h = x + residual``.

    A row has the same bits for any number of rows, position and stride, and on every backend. Arithmetic is float32,
    with correctly rounded square roots and divisions; ``y`` is rounded once. Differentiable (torch) in ``x``,
    ``weight`` and ``residual``, any number of times; forward mode and second derivatives are composed in float64.

    Model families round at different points. In transformers 5.23:

    - ``round_before_weight=True``: Llama, Llama 4, Mistral, Mixtral, Qwen2, Qwen3 (q_norm and k_norm too), DeepSeek-V3,
      GLM-4, Phi-3; and vLLM's kernels for these models.
    - ``weight_offset=1.0``: Gemma, Gemma 2 and 3, Qwen3-Next, Qwen3.5, whose weights are stored minus 1.
    - Neither option: Gemma 3n and 4, OLMo 2 and 3, gpt-oss; ``torch.nn.functional.rms_norm``, FlashInfer.
    - ``weight=None``: Llama 4's L2 norm of queries and keys, the values of Gemma 3n and 4.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16; last dimension contiguous. Leading dimensions that are
            contiguous to each other count as one; at most two may then remain, with any strides. A slice ``[tokens,
            heads, 128]`` of a fused projection is therefore valid.
        weight: ``[K]``, of the dtype of ``x`` or float32, contiguous; or None.
        eps: added to the mean of squares; finite and > 0 as float32.
        residual: ``[..., K]``, as ``x``. ``x + residual``, rounded to the dtype of ``x``, is normalised and also
            returned: the residual stream of a transformer.
        weight_offset: added to ``weight`` in float32; 0 means no offset.
        round_before_weight: round the normalised row to the dtype of ``x`` before it is multiplied by the weight. The
            gradient passes through the rounding unchanged; the weight's gradient is computed from the rounded row.
        return_rstd: also return ``1 / sqrt(mean(h^2) + eps)``, float32 ``[...]``, for :func:`rms_norm_backward`.
        main_grad: float32 ``[K]``, contiguous. Backward adds the gradient of ``weight`` to this array in place, in
            blocks of 8192 rows. ``weight`` itself gets no gradient. The conditions for ``main_grad`` are those of
            :func:`linear`.
    Returns:
        ``y``, shape and dtype of ``x``; ``(y, new_residual)`` with a residual; with ``return_rstd`` a tuple that ends
        with rstd.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device.
    Source:
        docs/numerics.md, rules 3, 8 and 9; Zhang and Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.ones(2)
        >>> rk.rms_norm(x, weight, 1e-6)
        tensor([[0.8485, 1.1314]])
        >>> y, residual = rk.rms_norm(x, weight, 1e-6, residual=torch.ones(1, 2))
    """
    if return_rstd is not False:
        return_rstd = _check.flag("return_rstd", return_rstd)
    rounds = round_before_weight
    if type(rounds) is not bool:
        rounds = _check.flag("round_before_weight", rounds)
    if main_grad is None and not _call.is_read_by_dynamo():
        result = _C.rms_norm_eager(x, weight, residual, eps, weight_offset, rounds, return_rstd)
        if result is not NotImplemented:
            return _selected(result, residual is not None, return_rstd)
    if weight is None:
        weight_offset = _no_offset(weight_offset)
    arrays, how = (x, weight, residual), (eps, weight_offset, rounds, return_rstd)
    if main_grad is None:
        result = _call.call(_FORWARD, arrays, (*how, None, None))
    elif weight is None:
        raise ValueError("main_grad: expected None where weight is None")
    else:
        result = _call.call_with_main_grad(_FORWARD, arrays, how, main_grad, SAME)
    return _selected(result, residual is not None, return_rstd)


def _no_offset(weight_offset: Any) -> Any:
    """Returns the offset of a call without a weight. Zero becomes a constant, because a trace may hold it as a symbol
    whose value the checks do not know. Later checks refuse every other value."""
    is_number = _check.is_number(weight_offset) and not isinstance(weight_offset, bool)
    return 0.0 if is_number and weight_offset == 0 else weight_offset


def _selected(result: Any, has_residual: bool, return_rstd: bool) -> Any:
    """Returns the outputs that the caller asked for. ``result`` is y, or the tuple (y, new_residual, rstd)."""
    if not (has_residual or return_rstd):
        return result[0] if isinstance(result, tuple) else result
    y, new_residual, rstd = result
    return (y, *((new_residual,) if has_residual else ()), *((rstd,) if return_rstd else ()))


def rms_norm_backward(
    dy: ArrayT,
    h: AnyArray,
    weight: AnyArray | None,
    eps: float,
    *,
    rstd: AnyArray | None = None,
    d_new_residual: AnyArray | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    main_grad: AnyArray | None = None,
    dweight_dtype: DType = None,
    return_dx: bool = True,
    return_dweight: bool = True,
) -> tuple[ArrayT | Any, ArrayT | Any]:
    """Gradients of :func:`rms_norm`, for callers that run backward themselves; torch's autograd also calls this
    function.

    Args:
        dy: ``[..., K]``, float32, bfloat16 or float16; last dimension contiguous.
        h: ``[..., K]``, of the dtype of ``dy``: the row that was normalised: ``new_residual`` if a residual was given,
            else ``x``.
        weight, eps, weight_offset, round_before_weight: as given to :func:`rms_norm`.
        rstd: float32 ``[...]``, contiguous, as :func:`rms_norm` returned it; None: rstd is computed again, with the
            same bits.
        d_new_residual: ``[..., K]``, of the dtype of ``dy``: the gradient of ``new_residual``, added before ``dx`` is
            rounded; None means 0.
        main_grad: float32 ``[K]``, to which the gradient of ``weight`` is added in place, in blocks of 8192 rows.
        dweight_dtype: the dtype of ``weight`` (default), the dtype of ``dy``, or float32.
        return_dx, return_dweight: whether dx and dweight are computed. Without a weight there is no dweight.
    Returns:
        ``(dx, dweight)``, with None for a gradient that was not asked for: ``dx`` has the shape and dtype of ``dy``; it
        is the gradient of ``x`` and of ``residual``. ``dweight`` is ``[K]``, or ``main_grad`` itself.
    Raises: as :func:`rms_norm`; BufferError where ``main_grad`` is read-only.
    Source: docs/numerics.md, rules 3 and 9.
    Example:
        >>> x, weight = torch.randn(2, 8), torch.ones(8)
        >>> dx, dweight = rk.rms_norm_backward(torch.ones(2, 8), x, weight, 1e-6)
        >>> tuple(dx.shape), tuple(dweight.shape)
        ((2, 8), (8,))
    """
    code = code_or_same(dweight_dtype, "dweight_dtype")
    if main_grad is not None and code > 0:
        raise TypeError(f"dweight_dtype: expected float32, that of main_grad, got {_check.shown(dweight_dtype)}")
    _check.writable("main_grad", main_grad)
    if weight is None and main_grad is not None:
        raise ValueError("main_grad: expected None where weight is None")
    how: tuple[Any, ...] = (
        eps,
        _no_offset(weight_offset) if weight is None else weight_offset,
        _check.flag("round_before_weight", round_before_weight),
        _check.flag("return_dx", return_dx),
    )
    asked = _check.flag("return_dweight", return_dweight) and weight is not None
    arrays: tuple[Any, ...] = (dy, h, weight, rstd, d_new_residual)
    if main_grad is not None:
        return _call.accumulate(_INTO, main_grad, arrays, how)[0], main_grad
    dtype: Any = code if asked else None
    if asked and code < 0 and _dispatch.is_tensor(weight):
        _dispatch.dtype_code(weight.dtype, "weight")  # type: ignore[union-attr]
        dtype = weight.dtype  # type: ignore[union-attr]
    elif asked and code >= 0 and _dispatch.is_tensor(dy):
        dtype = getattr(_dispatch.torch_module(), ("float32", "bfloat16", "float16")[code])
    return _call.call(_BACKWARD, arrays, (*how, dtype))


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_NORM_Y = Bound(
    lambda columns, expected, inner=0.0, inner_least=0.0, other_scale=0.0: (
        ((columns / 512 + 14) * U + inner) * expected + inner_least * other_scale
    ),
    f"((columns / 512 + 14) * u + inner) * expected + {LEAST}",
    "half the error of the mean, whose chains have columns / 256 terms and eight levels; five more roundings",
)
_OFF_RSTD = Bound(
    lambda columns, expected: (columns / 512 + 12) * U * expected,
    "(columns / 512 + 12) * u * expected",
    "as y, without its products",
)
_OFF_NORM_DX = Bound(
    lambda columns, scale: (columns / 128 + 44) * U * scale,
    "(columns / 128 + 44) * u * scale",
    "two sums over the row, relative to the same sums of absolute values, and the roundings between them",
)
_OFF_NORM_DWEIGHT = Bound(
    lambda rows, columns, scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        ((87 + rows / 8192 + columns / 256) * U + inner) * scale + inner_least * other_scale
    ),
    f"((87 + rows / 8192 + columns / 256) * u + inner) * scale + {LEAST}",
    "chains of 64 tokens, a tree of seven levels, one addition a block; the error of each normalised value",
)
_OFF_ONE_SUM = Bound(lambda expected: U * expected, "u * expected", "one addition in float32")


def _contract_rows() -> Iterator[Row]:
    norm: dict[str, Any] = {"stem": "rms_norm", "backends": EVERY_BACKEND}
    reduction = norm | {"kind": "row reduction", "keeps": NO_SHARDS}
    yield Row("rms_norm", "y", "forward", bound=_OFF_NORM_Y, **reduction)
    yield Row("rms_norm", "new_residual", "forward", bound=_OFF_ONE_SUM, **(reduction | {"kind": "elementwise"}))
    yield Row("rms_norm", "rstd", "forward", bound=_OFF_RSTD, **reduction)
    yield Row("rms_norm", "dx", "backward", bound=_OFF_NORM_DX, **reduction)
    yield Row("rms_norm", "dweight", "backward", stem="rms_norm", bound=_OFF_NORM_DWEIGHT, **TOKEN_SUMS)
    yield Row("rms_norm", "derivatives", "backward", bound=derivatives(4e-6), **norm, **COMPOSED)
    two_norms = roundings(40, "two norms on one residual stream")
    yield Row("rms_norm", "gradients of two layers", "backward", bound=two_norms, **norm, **COMPOSED)


add_rows(_contract_rows())
