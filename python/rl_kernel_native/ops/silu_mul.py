"""Gated activations: arguments, dispatch, results. The contract is cpp/include/rlk/ops/silu_mul.h."""

from __future__ import annotations

from typing import Any, Literal, overload

from .. import _check, _dispatch
from .._native import module as _C
from .._types import AnyArray, ArrayT
from ..reference.silu_mul import gelu_mul_reference, silu_mul_reference

__all__ = [
    "gelu_mul",
    "gelu_mul_backward",
    "gelu_mul_reference",
    "silu_mul",
    "silu_mul_backward",
    "silu_mul_reference",
]

# The contract's Activation.
SILU, GELU, GELU_TANH = range(3)

_torch_path: Any = None
_plain: tuple[Any, ...] = ()  # torch.Tensor and its Parameter, once a tensor was seen
_plain_or_none: tuple[Any, ...] = ()


def _torch() -> Any:
    """ops/silu_mul_torch.py, imported with the first torch tensor."""
    global _torch_path, _plain, _plain_or_none
    if _torch_path is None:
        from . import silu_mul_torch

        _torch_path = silu_mul_torch
        _plain = silu_mul_torch.PLAIN
        _plain_or_none = (*_plain, type(None))
    return _torch_path


def _is_tensor(array: Any) -> bool:
    torch = _dispatch.torch_module()
    return torch is not None and isinstance(array, torch.Tensor)


def silu_mul(gate: ArrayT, up: AnyArray | None = None, *, round_before_mul: bool = False) -> ArrayT:
    """``silu(gate) * up``, the gated activation of SwiGLU; ``silu(x) = x * sigmoid(x)``.

    An element has the same bits in any batch, at any position and stride, and on every backend. Arithmetic is float32
    with this library's own exponential; the result is rounded once. Differentiable (torch) in ``gate`` and ``up``, any
    number of times; the backward computes the activation again and saves only what it was given. Forward mode and
    second derivatives are composed in float64.

    Frameworks differ in what they multiply by ``up``:

    - ``round_before_mul=True``, the activation rounded to the dtype: transformers 5.23 (Llama, Qwen3 and others), as
      torch's ``silu(gate) * up``; vLLM's ``silu_and_mul`` kernel; the forward of Liger 0.8.5.
    - ``round_before_mul=False``, the activation in float32: FlashInfer's ``silu_and_mul``.

    Which rounding is the same is no promise of the same bits: their exponentials are others.

    Args:
        gate: ``[..., I]``, float32, bfloat16 or float16, last dimension contiguous; any row stride. Without ``up``
            this is ``gate_up``, ``[..., 2 * I]``, as a fused projection gives it: the first half of the last dimension
            is the gate.
        up: ``[..., I]``, of the shape and dtype of ``gate``, with strides of its own; or None.
        round_before_mul: round the activation to the dtype before it is multiplied. Its gradient is that of no
            rounding, but ``d_up`` sees the rounded activation.
    Returns:
        ``[..., I]``, of the dtype of ``gate``. ``silu(-Inf)`` is -0; an infinity times a zero of ``up`` is NaN.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a layout or a device; RuntimeError where no kernel of
        this build serves the device.
    Source:
        docs/numerics.md, rules 3 and 8; Shazeer 2020, arXiv:2002.05202.

    Example:
        >>> rk.silu_mul(torch.tensor([[0.0, 2.0, 3.0, 4.0]]))  # gate 0, 2 and up 3, 4
        tensor([[0.0000, 7.0464]])
    """
    return _forward(gate, up, SILU, round_before_mul)


def gelu_mul(
    gate: ArrayT,
    up: AnyArray | None = None,
    *,
    approximate: Literal["tanh", "none"] = "tanh",
    round_before_mul: bool = False,
) -> ArrayT:
    """``gelu(gate) * up``, the gated activation of GeGLU. All else is as for :func:`silu_mul`.

    transformers 5.23 rounds the activation (``round_before_mul=True``; Gemma's models use ``"tanh"``), and so do vLLM's
    ``gelu_and_mul`` and ``gelu_tanh_and_mul`` kernels and Liger 0.8.5; FlashInfer's kernels do not.

    Args:
        gate, up, round_before_mul: as for :func:`silu_mul`.
        approximate: ``"tanh"``: ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))``; ``"none"``:
            ``x / 2 * (1 + erf(x / sqrt(2)))``.
    Returns: ``[..., I]``, of the dtype of ``gate``. ``gelu(-Inf)`` is -0.
    Raises: as :func:`silu_mul`; ValueError for another ``approximate``.
    Source: docs/numerics.md, rules 3 and 8; Hendrycks and Gimpel 2016, arXiv:1606.08415.

    Example:
        >>> rk.gelu_mul(torch.tensor([[0.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[0.0000, 7.8184]])
    """
    return _forward(gate, up, _gelu(approximate), round_before_mul)


@overload
def silu_mul_backward(
    dy: ArrayT, gate: AnyArray, up: None = None, *, round_before_mul: bool = False, return_d_gate: bool = True,
    return_d_up: bool = True
) -> ArrayT: ...  # fmt: skip


@overload
def silu_mul_backward(
    dy: ArrayT, gate: AnyArray, up: AnyArray, *, round_before_mul: bool = False, return_d_gate: bool = True,
    return_d_up: bool = True
) -> tuple[ArrayT | Any, ArrayT | Any]: ...  # fmt: skip
def silu_mul_backward(
    dy: Any,
    gate: Any,
    up: Any = None,
    *,
    round_before_mul: bool = False,
    return_d_gate: bool = True,
    return_d_up: bool = True,
) -> Any:
    """Gradients of :func:`silu_mul`, for callers that run backward themselves; torch's autograd calls it.

    Args:
        dy: ``[..., I]``, of the dtype of ``gate``, last dimension contiguous.
        gate, up, round_before_mul: as given to :func:`silu_mul`.
        return_d_gate, return_d_up: what is computed, where ``up`` is an array of its own.
    Returns:
        ``d_gate_up``, ``[..., 2 * I]``, without ``up``; else ``(d_gate, d_up)``, None for what was not asked for.
    Raises: as :func:`silu_mul`.
    Source: docs/numerics.md, rules 3 and 8.
    """
    return _backward(dy, gate, up, SILU, round_before_mul, return_d_gate, return_d_up)


@overload
def gelu_mul_backward(
    dy: ArrayT, gate: AnyArray, up: None = None, *, approximate: Literal["tanh", "none"] = "tanh",
    round_before_mul: bool = False, return_d_gate: bool = True, return_d_up: bool = True
) -> ArrayT: ...  # fmt: skip


@overload
def gelu_mul_backward(
    dy: ArrayT, gate: AnyArray, up: AnyArray, *, approximate: Literal["tanh", "none"] = "tanh",
    round_before_mul: bool = False, return_d_gate: bool = True, return_d_up: bool = True
) -> tuple[ArrayT | Any, ArrayT | Any]: ...  # fmt: skip
def gelu_mul_backward(
    dy: Any,
    gate: Any,
    up: Any = None,
    *,
    approximate: str = "tanh",
    round_before_mul: bool = False,
    return_d_gate: bool = True,
    return_d_up: bool = True,
) -> Any:
    """Gradients of :func:`gelu_mul`; all else is as for :func:`silu_mul_backward`."""
    return _backward(dy, gate, up, _gelu(approximate), round_before_mul, return_d_gate, return_d_up)


def _gelu(approximate: str) -> int:
    _check.one_of("approximate", approximate, ("tanh", "none"))
    return GELU_TANH if approximate == "tanh" else GELU


def _forward(gate: Any, up: Any, activation: int, round_before_mul: bool) -> Any:
    rounds = _check.flag("round_before_mul", round_before_mul)
    if type(gate) in _plain and type(up) in _plain_or_none and not _torch_path.is_compiling():
        result = _C.gated_mul_eager(gate, up, activation, rounds)
        if result is not NotImplemented:
            return result
    if _is_tensor(gate):
        return _torch().gated_mul(gate, up, activation, rounds)
    name = "gate_up" if up is None else "gate"
    frame = _dispatch.Frame(gate, name)
    _dispatch.match_torch_threads()
    return frame.result(
        _C.gated_mul(frame.export(gate, name), frame.export(up, "up"), activation, rounds, frame.allocate, frame.stream)
    )


def _backward(
    dy: Any, gate: Any, up: Any, activation: int, round_before_mul: bool, return_d_gate: bool, return_d_up: bool
) -> Any:
    arguments = (
        activation,
        _check.flag("round_before_mul", round_before_mul),
        _check.flag("return_d_gate", return_d_gate),
        _check.flag("return_d_up", return_d_up),
    )
    if _is_tensor(gate):
        return _torch().backward(dy, gate, up, *arguments)
    name = "gate_up" if up is None else "gate"
    frame = _dispatch.Frame(gate, name)
    _dispatch.match_torch_threads()
    result = _C.gated_mul_backward(
        frame.export(dy, "dy"), frame.export(gate, name), frame.export(up, "up"), *arguments, frame.allocate,
        frame.stream,
    )  # fmt: skip
    return tuple(map(frame.result, result)) if isinstance(result, tuple) else frame.result(result)
