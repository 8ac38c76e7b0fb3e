"""Gated activations: arguments, dispatch, results. The contract is cpp/include/rlk/ops/silu_mul.h."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, overload

from .. import _call, _check
from .._native import functions
from .._operator import Array, Composed, Operator
from .._transforms import pulled, rows
from .._types import AnyArray, ArrayT
from ..contract import COMPOSED, EVERY_BACKEND, Bound, Row, U, add_rows, derivatives, roundings
from ..reference.silu_mul import gelu_mul_reference, silu_mul_reference

__all__ = ["gelu_mul", "gelu_mul_backward", "gelu_mul_reference", "silu_mul", "silu_mul_backward", "silu_mul_reference"]

_C = functions(
    gated_mul="object*2, int, bool, object, int",
    gated_mul_backward="object*3, int, bool*3, object, int",
    gated_mul_eager="object*2, int, bool",
)

# Activation of the contract.
SILU, GELU, GELU_TANH = range(3)


def _first_name(_: Any, arrays: Any) -> str:
    """Returns the name of the first array in errors. Without ``up``, that array holds both gate and up."""
    return "gate_up" if arrays and arrays[-1] is None else "gate"


def _shape(gate: Any, up: Any) -> list[int]:
    """Returns the shape of the result."""
    return [*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)]


def _activation(gate: Any, activation: int) -> Any:
    """Computes the activation by torch's operators, without intermediate roundings."""
    if activation == SILU:
        return gate * gate.sigmoid()
    if activation == GELU:
        return gate * ((1 + (gate * math.sqrt(0.5)).erf()) / 2)
    t = (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)).tanh()
    return gate * ((1 + t) / 2)


def _composed_forward(operands: Any, how: Any) -> tuple[Any]:
    gate, up = operands
    g, u = (gate.double(), up.double()) if up is not None else gate.double().chunk(2, -1)
    return ((_activation(g, how[0]) * u).to(gate.dtype),)


def _composed_backward(operands: Any, how: Any) -> list[Any]:
    """Returns those of d_gate (or d_gate_up) and d_up that are wanted."""
    dy, *inputs = operands
    found = pulled(lambda *given: _composed_forward(given, how), inputs, (dy,))
    return [d for d, wanted in zip(found, how[2:], strict=True) if d is not None and (wanted or inputs[1] is None)]


def _gradient_shapes(arrays: Any, how: Any) -> Any:
    dy, gate, up = arrays
    if up is None:
        return gate.shape, None
    return tuple(dy.shape if wanted else None for wanted in how[2:])


def _native_backward(arrays: Any, how: Any, *tail: Any) -> Any:
    found = _C.gated_mul_backward(*arrays, *how, *tail)
    return found if arrays[2] is not None else (found, None)


_BACKWARD = Operator(
    "gated_mul_backward",
    ("dy", Array("gate", called=_first_name), "up?"),
    "int activation, bool round_before_mul, bool return_d_gate, bool return_d_up",
    outputs=_gradient_shapes,
    dtypes=(None, None),
    native=_native_backward,
    gradient=Composed(of=(0, 1, 2), composed=_composed_backward, batch=rows(0, 1, 2)),
    leads=1,
)
_FORWARD = Operator(
    "gated_mul",
    (Array("gate", called=_first_name), "up?"),
    "int activation, bool round_before_mul",
    outputs=lambda arrays, how: (_shape(*arrays),),
    dtypes=(None,),
    gradient=Composed(
        of=(0, 1),
        composed=_composed_forward,
        incoming=("dy",),
        backward=lambda call, given, kept, how, wanted: (
            (None, None) if given[0] is None else call(_BACKWARD, (*given, *kept), (*how, *wanted))
        ),
        batch=rows(0, 1),
    ),
)


def silu_mul(gate: ArrayT, up: AnyArray | None = None, *, round_before_mul: bool = False) -> ArrayT:
    """``silu(gate) * up``, the gated activation of SwiGLU; ``silu(x) = x * sigmoid(x)``.

    An element has the same bits in any batch, at any position and stride, and on every backend. Arithmetic is float32
    with this library's own exponential; the result is rounded once. Differentiable (torch) in ``gate`` and ``up``, any
    number of times. Only the inputs are saved, and the backward recomputes the activation. Forward mode and second
    derivatives are composed in float64.

    Frameworks differ in whether they round the activation before it is multiplied by ``up``:

    - ``round_before_mul=True``, the activation rounded to the dtype: transformers 5.23 (Llama, Qwen3 and others), as
      torch's ``silu(gate) * up``; vLLM's ``silu_and_mul`` kernel; the forward of Liger 0.8.5.
    - ``round_before_mul=False``, the activation in float32: FlashInfer's ``silu_and_mul``.

    Equal rounding points do not mean equal bits, because the libraries' exponentials differ.

    Args:
        gate: ``[..., I]``, float32, bfloat16 or float16, last dimension contiguous; any row stride. Without ``up``,
            this array is ``gate_up``, ``[..., 2 * I]``, the output of a fused projection. The first half of its last
            dimension is the gate, the second half is ``up``.
        up: ``[..., I]``, of the shape and dtype of ``gate``, with its own strides; or None.
        round_before_mul: round the activation to the dtype before it is multiplied. The gradient passes through the
            rounding unchanged, but ``d_up`` uses the rounded activation.
    Returns:
        ``[..., I]``, of the dtype of ``gate``. ``silu(-Inf)`` is -0; an infinity times a zero of ``up`` is NaN.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout or device; RuntimeError if this build
        has no kernel for the device.
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
    """``gelu(gate) * up``, the gated activation of GeGLU. Except for the activation, it works like :func:`silu_mul`.

    transformers 5.23, vLLM's ``gelu_and_mul`` and ``gelu_tanh_and_mul`` kernels and Liger 0.8.5 round the activation
    (``round_before_mul=True``). FlashInfer's kernels do not round the activation. Gemma's models use ``"tanh"``.

    Args:
        gate, up, round_before_mul: as for :func:`silu_mul`.
        approximate: ``"tanh"``: ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))``; ``"none"``: ``x / 2 * (1 +
            erf(x / sqrt(2)))``.
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
    """Gradients of :func:`silu_mul`, for callers that run backward themselves; torch's autograd also calls this
    function.

    Args:
        dy: ``[..., I]``, of the dtype of ``gate``, last dimension contiguous.
        gate, up, round_before_mul: as given to :func:`silu_mul`.
        return_d_gate, return_d_up: whether ``d_gate`` and ``d_up`` are computed; only if ``up`` is a separate array.
    Returns:
        ``d_gate_up``, ``[..., 2 * I]``, without ``up``; else ``(d_gate, d_up)``, None for a gradient that was not asked
        for.
    Raises: as :func:`silu_mul`.
    Source: docs/numerics.md, rules 3 and 8.
    Example:
        >>> gate, up = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 2.0]])
        >>> d_gate, d_up = rk.silu_mul_backward(torch.ones(1, 2), gate, up)
        >>> d_up  # the activation of gate
        tensor([[0.0000, 0.7311]])
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
    """Gradients of :func:`gelu_mul`. The other arguments are as for :func:`silu_mul_backward`.

    Example:
        >>> gate, up = torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 2.0]])
        >>> d_gate, d_up = rk.gelu_mul_backward(torch.ones(1, 2), gate, up)
        >>> d_up  # the activation of gate
        tensor([[0.0000, 0.8412]])
    """
    return _backward(dy, gate, up, _gelu(approximate), round_before_mul, return_d_gate, return_d_up)


def _gelu(approximate: str) -> int:
    _check.one_of("approximate", approximate, ("tanh", "none"))
    return GELU_TANH if approximate == "tanh" else GELU


def _forward(gate: Any, up: Any, activation: int, round_before_mul: bool) -> Any:
    rounds = round_before_mul if type(round_before_mul) is bool else _check.flag("round_before_mul", round_before_mul)
    if not _call.is_read_by_dynamo():
        result = _C.gated_mul_eager(gate, up, activation, rounds)
        if result is not NotImplemented:
            return result
    return _call.call(_FORWARD, (gate, up), (activation, rounds))[0]


def _backward(
    dy: Any, gate: Any, up: Any, activation: int, round_before_mul: bool, return_d_gate: bool, return_d_up: bool
) -> Any:
    how = (
        activation,
        _check.flag("round_before_mul", round_before_mul),
        _check.flag("return_d_gate", return_d_gate),
        _check.flag("return_d_up", return_d_up),
    )
    found = _call.call(_BACKWARD, (dy, gate, up), how)
    return found[0] if up is None else found


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _value(added: float, cut: float, more: str, why: str) -> Bound:
    """Returns the error bound of the activation times another factor."""

    def of(act: Any, gate: Any, other: Any, expected: Any, inner: Any = 0.0, inner_least: Any = 0.0) -> Any:
        return ((6 * U + inner) * act + (added * U + cut) * gate + inner_least) * other + U * expected

    text = f"((6 * u + inner) * act + {more} * gate + inner_least) * other + u * expected"
    return Bound(of, text, f"{why}; a product")


_OFF_SILU = _value(0.0, 2.0**-126, "2**-126", "sigmoid to 3 ulp, its exponential 0 below 2^-126")
_OFF_GELU = _value(4.0, 0.0, "4 * u", "tanh and erf to 3 ulp, to 4 u where they are added to 1")
_OFF_SLOPE = Bound(
    lambda gate, other, expected: 16 * U * (1 + gate) * other + U * expected,
    "16 * u * (1 + gate) * other + u * expected",
    "a derivative's sums have terms of at most 1.2, which roundings of at most 8 u each meet; two products",
)


def _contract_rows() -> Iterator[Row]:
    for operator, bound in (("silu_mul", _OFF_SILU), ("gelu_mul", _OFF_GELU)):
        gated: dict[str, Any] = {"stem": "silu_mul", "backends": EVERY_BACKEND}
        each = gated | {"kind": "elementwise"}
        yield Row(operator, "y", "forward", bound=bound, **each)
        yield Row(operator, "d_gate", "backward", bound=_OFF_SLOPE, **each)
        yield Row(operator, "d_up", "backward", bound=bound, **each)
        yield Row(operator, "derivatives", "backward", bound=derivatives(4e-6), **gated, **COMPOSED)
        two_layers = roundings(60, "two layers of gated activations")
        yield Row(operator, "gradients of two layers", "backward", bound=two_layers, **gated, **COMPOSED)


add_rows(_contract_rows())
