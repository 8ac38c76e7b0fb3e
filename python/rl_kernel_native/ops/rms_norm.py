"""Root-mean-square norm: arguments, dispatch, results. The contract is cpp/include/rlk/ops/rms_norm.h."""

from __future__ import annotations

from typing import Any, Literal, overload

from .. import _check, _dispatch
from .._native import module as _C
from .._types import AnyArray, ArrayT, DType
from ..reference.rms_norm import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_backward", "rms_norm_reference"]

SAME = -1  # a dtype's code: that of the weight

_torch_path: Any = None
_plain: tuple[Any, ...] = ()  # torch.Tensor and its Parameter, once a tensor was seen
_plain_or_none: tuple[Any, ...] = ()


def _torch() -> Any:
    """ops/rms_norm_torch.py, imported with the first torch tensor."""
    global _torch_path, _plain, _plain_or_none
    if _torch_path is None:
        _dispatch.require_torch()
        from . import rms_norm_torch

        _torch_path = rms_norm_torch
        _plain = rms_norm_torch.PLAIN
        _plain_or_none = (*_plain, type(None))
    return _torch_path


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
    with correctly rounded square root and divisions; ``y`` is rounded once. Differentiable (torch) in ``x``, ``weight``
    and ``residual``, any number of times; forward mode and second derivatives are composed in float64.

    Families differ in where they round (as transformers 5.23 computes them):

    - ``round_before_weight=True``: Llama, Llama 4, Mistral, Mixtral, Qwen2, Qwen3 (q_norm and k_norm too), DeepSeek-V3,
      GLM-4, Phi-3; and vLLM's kernels for them.
    - ``weight_offset=1.0``: Gemma, Gemma 2 and 3, Qwen3-Next, Qwen3.5, whose weights are stored less 1.
    - Neither: Gemma 3n and 4, OLMo 2 and 3, gpt-oss; ``torch.nn.functional.rms_norm``, FlashInfer.
    - ``weight=None``: Llama 4's L2 norm of queries and keys, the values of Gemma 3n and 4.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16; last dimension contiguous. ``[tokens, heads, 128]`` of a slice of
            a fused projection is fine: leading dimensions may have two strides.
        weight: ``[K]``, of the dtype of ``x`` or float32, contiguous; or None.
        eps: added to the mean of squares; finite and > 0 as float32.
        residual: ``[..., K]``, as ``x``. ``x + residual`` is rounded to the dtype of ``x``, and that is what is
            normalised and given back: the residual stream of a transformer.
        weight_offset: added to ``weight`` in float32; 0 without one.
        round_before_weight: round the normalised row to the dtype of ``x`` before it is multiplied by the weight. Its
            gradient is that of no rounding, but the weight's gradient sees the rounded row.
        return_rstd: also give ``1 / sqrt(mean(h^2) + eps)``, float32 ``[...]``, which :func:`rms_norm_backward` takes.
        main_grad: float32 ``[K]``, contiguous. Backward adds the gradient of ``weight`` to it in place, block by block
            of 8192 rows, and gives ``weight`` itself none. When it does and when it may not be given: as for
            :func:`linear`.
    Returns:
        ``y``, shape and dtype of ``x``; ``(y, new_residual)`` with a residual; with ``return_rstd`` a tuple that ends
        with rstd.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a layout, a device or a value; RuntimeError where no
        kernel of this build serves the device.
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
    if (
        type(x) in _plain
        and type(weight) in _plain_or_none
        and type(residual) in _plain_or_none
        and main_grad is None
        and not _torch_path.is_compiling()
    ):
        result = _C.rms_norm_eager(
            x,
            weight,
            residual,
            eps,
            weight_offset,
            _check.flag("round_before_weight", round_before_weight),
            return_rstd,
        )
        if result is not NotImplemented:
            return _selected(result, residual is not None, return_rstd)
    if weight is None and main_grad is not None:
        raise ValueError("main_grad: expected None where weight is None")
    if _dispatch.is_tensor(x):
        result = _torch().rms_norm(
            x,
            weight,
            residual,
            eps,
            weight_offset,
            _check.flag("round_before_weight", round_before_weight),
            return_rstd,
            main_grad,
        )
        return _selected(result, residual is not None, return_rstd)
    if main_grad is not None:
        raise ValueError("main_grad: only torch has an autograd that could use it; call rms_norm_backward instead")
    frame = _dispatch.Frame(x, "x")
    _dispatch.match_torch_threads()
    result = _C.rms_norm(
        frame.export(x, "x"),
        frame.export(weight, "weight"),
        frame.export(residual, "residual"),
        eps,
        weight_offset,
        _check.flag("round_before_weight", round_before_weight),
        return_rstd,
        frame.allocate,
        frame.stream,
    )
    result = tuple(map(frame.result, result)) if isinstance(result, tuple) else frame.result(result)
    return _selected(result, residual is not None, return_rstd)


def _selected(result: Any, has_residual: bool, return_rstd: bool) -> Any:
    """What was asked for of y, or of (y, new_residual, rstd)."""
    if not isinstance(result, tuple):
        return result
    y, new_residual, rstd = result
    wanted = [y, *([new_residual] if has_residual else []), *([rstd] if return_rstd else [])]
    return tuple(wanted) if len(wanted) > 1 else y


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
    """Gradients of :func:`rms_norm`, for callers that run backward themselves; torch's autograd calls it.

    Args:
        dy: ``[..., K]``, float32, bfloat16 or float16; last dimension contiguous.
        h: ``[..., K]``, of the dtype of ``dy``: what was normalised, ``x`` or with a residual ``new_residual``.
        weight, eps, weight_offset, round_before_weight: as given to :func:`rms_norm`.
        rstd: float32 ``[...]``, contiguous, as :func:`rms_norm` gave it; None computes it again, with the same bits.
        d_new_residual: ``[..., K]``, of the dtype of ``dy``: the gradient of ``new_residual``, added before ``dx`` is
            rounded; None means 0.
        main_grad: float32 ``[K]`` that the gradient of ``weight`` is added to in place, block by block of 8192 rows.
        dweight_dtype: that of ``weight`` (default), that of ``dy`` or float32.
        return_dx, return_dweight: what is computed. Without a weight there is no dweight.
    Returns:
        ``(dx, dweight)``, None for what was not asked for: ``dx`` has the shape and dtype of ``dy`` and is the gradient
        of ``x`` and of ``residual``, ``dweight`` is ``[K]``, or ``main_grad`` itself.
    Raises: as :func:`rms_norm`; BufferError where ``main_grad`` is read-only.
    Source: docs/numerics.md, rules 3 and 9.
    """
    code = SAME if dweight_dtype is None else _dispatch.dtype_code(dweight_dtype, "dweight_dtype")
    if main_grad is not None and code > 0:
        raise TypeError(f"dweight_dtype: expected float32, that of main_grad, got {dweight_dtype!r}")
    _check.writable("main_grad", main_grad)
    if weight is None and main_grad is not None:
        raise ValueError("main_grad: expected None where weight is None")
    arguments = (weight_offset, _check.flag("round_before_weight", round_before_weight))
    dweight_is_asked = _check.flag("return_dweight", return_dweight) and weight is not None
    wanted = (_check.flag("return_dx", return_dx), dweight_is_asked, code)
    if _dispatch.is_tensor(dy):
        return _torch().backward(dy, h, weight, eps, rstd, d_new_residual, *arguments, main_grad, *wanted)
    frame = _dispatch.Frame(dy, "dy")
    _dispatch.match_torch_threads()
    dx, dweight = _C.rms_norm_backward(
        frame.export(dy, "dy"),
        frame.export(h, "h"),
        frame.export(weight, "weight"),
        eps,
        frame.export(rstd, "rstd"),
        frame.export(d_new_residual, "d_new_residual"),
        *arguments,
        frame.export_output(main_grad, "main_grad"),
        *wanted,
        frame.allocate,
        frame.stream,
    )
    if main_grad is None:
        return frame.result(dx), frame.result(dweight)
    _dispatch.count_write(main_grad)
    return frame.result(dx), main_grad
