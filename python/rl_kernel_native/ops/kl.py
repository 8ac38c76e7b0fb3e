"""KL estimators: arguments, dispatch, results. The contract is cpp/include/rlk/ops/kl.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import _check, _dispatch
from .._call import call
from .._native import functions
from .._operator import Array, Composed, Operator
from .._types import AnyArray, ArrayT, Estimator, Generic, NamedTuple
from ..contract import OF_TOKENS, SLOPE_OF_TOKEN, Row, add_rows
from ..reference.kl import kl_reference
from .policy_spec import ESTIMATORS, number, or_inf

__all__ = ["KlGradients", "kl", "kl_backward", "kl_reference"]

_C = functions(kl="object*5, int, bool, int, float*2, bool*2, object, int")

_NONE, _OLD_LOGPROB, _IMPORTANCE = range(3)  # KlWeight of the contract


class KlGradients(NamedTuple, Generic[ArrayT]):
    """The result of :func:`kl_backward`; ``d_importance_weight`` is None if the call has no importance_weight."""

    d_logprob: ArrayT
    d_importance_weight: ArrayT | Any


def _weight_name(how: tuple[Any, ...], _: Any) -> str:
    return "old_logprob" if how[2] == _OLD_LOGPROB else "importance_weight"


def _gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    return call(_BACKWARD, (*given, *kept), (*how, *wanted))


def _tangents(call: Any, along: Any, operands: Any, how: Any) -> Any:
    logprob, weight, ref_logprob, mask = operands
    return (_sum_of_products(call, along, (logprob, ref_logprob, weight, mask), how),)


def _sum_of_products(call: Any, given: Any, operands: Any, how: Any) -> Any:
    """Returns the tangent of logprob times its derivative plus the tangent of the weight times its derivative. A
    tangent may be None; the result is None if both are."""
    found = None
    for i, d in enumerate(given):
        if d is not None:
            product = call(_BACKWARD, (d, *operands), (*how, i == 0, i == 1))[i]
            found = product if found is None else found + product
    return found


def _second_gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    """Returns the gradient of the backward's results with respect to d_kl, in which they are linear. A gradient with
    respect to another array is an error."""
    if any(wanted[1:]):
        raise RuntimeError(_NO_SECOND)
    return _sum_of_products(call, given, kept[1:], how[:-2]), None, None, None


def _second_tangents(call: Any, along: Any, operands: Any, how: Any) -> Any:
    if any(t is not None for t in along[1:]):
        raise RuntimeError(_NO_SECOND)
    return call(_BACKWARD, (along[0], *operands[1:]), how)


_NO_SECOND = "kl: a second derivative is wanted, and there is none"
# A limit of infinity means no limit. The array `weight` has a gradient only if it is an importance weight.
_NUMBERS = "int estimator, bool straight_through, int weight_kind, float input_limit, float limit"
_TOKENS = ("logprob, ref_logprob", Array("weight", optional=True, called=_weight_name), "mask?")
_KL: Operator = Operator(
    "kl",
    _TOKENS,
    _NUMBERS,
    native=lambda arrays, how, *tail: _C.kl(*arrays, None, *how, False, False, *tail)[:1],
    gradient=Composed(
        of=(0, 2),
        allows=lambda i, how: i == 0 or how[2] == _IMPORTANCE,
        reads=(1, 3),
        incoming=("d_kl",),
        backward=_gradients,
        tangents=_tangents,
        constants="",
    ),
)
_BACKWARD: Operator = Operator(
    "kl_backward",
    ("d_kl", *_TOKENS),
    f"{_NUMBERS}, bool return_d_logprob, bool return_d_weight",
    outputs=lambda arrays, how: tuple(arrays[1].shape if wanted else None for wanted in how[-2:]),
    dtypes=("float32", "float32"),
    native=lambda arrays, how, *tail: _C.kl(*arrays[1:], arrays[0], *how, *tail)[1:],
    gradient=Composed(
        of=(0, 1, 2, 3),
        reads=(4,),
        incoming=("dd_logprob", "dd_weight"),
        backward=_second_gradients,
        tangents=_second_tangents,
        asked=lambda arrays, how: True,
        constants="",
    ),
    leads=1,
)


def kl(
    logprob: ArrayT,
    ref_logprob: AnyArray,
    mask: AnyArray | None = None,
    *,
    estimator: Estimator,
    straight_through: bool = False,
    input_clamp: float | None = None,
    clamp: float | None = None,
    old_logprob: AnyArray | None = None,
    importance_weight: AnyArray | None = None,
) -> ArrayT:
    """An estimate of KL(policy, reference) for every token. Use the estimate for a KL term in the reward, or in your
    own loss.

    With ``e = ref_logprob - logprob`` the estimators are ``-e``, ``e**2 / 2``, ``expm1(e) - e`` and ``abs(e)``. They
    equal the KL term of :func:`policy_loss`, bit for bit. Nothing is summed, so packed tokens, ``[num_tokens]``, need
    no ``cu_seqlens``; a token has the same bits in any batch, at any position and stride, and on every backend.
    Differentiable (torch) in ``logprob`` and ``importance_weight``, once. The other arrays are constants; such an array
    that requires a gradient is an error.

    Args:
        logprob: float32 ``[num_sequences, num_tokens]`` or ``[num_tokens]``; tokens contiguous, rows with any stride.
        ref_logprob: as ``logprob``.
        mask: of the shape of ``logprob``; any mask (docs/tokens.md). A token counts if its mask is not 0; masked slots
            may hold any value. None: all tokens count.
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        straight_through: the estimator's value with the gradient of k2 (verl's ``k1+``, ``k3+``).
        input_clamp, clamp: limits of ``abs(e)`` and of the result, > 0, or None; beyond a limit the gradient is 0.
            verl's ``low_var_kl`` uses 20 and 10, and OpenRLHF uses a ``clamp`` of 10. PolicySpec calls these limits
            ``kl_input_clamp`` and ``kl_clamp``.
        old_logprob: as ``logprob``; the estimator is multiplied by ``exp(logprob - old_logprob)``, and the gradient
            passes through both factors. With k3 this product is the unbiased form of DeepSeek-V3.2. PolicySpec's
            ``kl_times_ratio`` at token level computes the same product.
        importance_weight: as ``logprob``; multiplies the estimator before the clamp. If this array requires a gradient,
            backward computes its gradient. The gradient of ``logprob`` treats this array as a constant.
    Returns: float32, of the shape of ``logprob``, in nats; +0 where masked.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, or for a meaningless
        combination; RuntimeError if this build has no kernel for the device.
    Source: docs/numerics.md, rule 3; docs/objectives.md; Schulman 2020, "Approximating KL divergence".

    Example:
        >>> rk.kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), estimator="k3")
        tensor([[0.1065, 0.0000]])
    """
    operands, how = _operands(
        logprob, ref_logprob, mask, estimator, straight_through, input_clamp, clamp, old_logprob, importance_weight
    )
    return call(_KL, operands, how)[0]


def kl_backward(
    d_kl: ArrayT,
    logprob: AnyArray,
    ref_logprob: AnyArray,
    mask: AnyArray | None = None,
    *,
    estimator: Estimator,
    straight_through: bool = False,
    input_clamp: float | None = None,
    clamp: float | None = None,
    old_logprob: AnyArray | None = None,
    importance_weight: AnyArray | None = None,
) -> KlGradients[ArrayT]:
    """Gradients of :func:`kl`, for callers that run backward themselves; torch's autograd also calls this function.

    Args:
        d_kl: float32, of the shape of ``logprob``; masked slots may hold any value.
        logprob, ..., importance_weight: as given to :func:`kl`.
    Returns: :class:`KlGradients`, of the shape of ``logprob``, float32; +0 where masked.
    Raises: as :func:`kl`.
    Source: docs/numerics.md, rule 3.
    Example:
        >>> d_kl = torch.ones(1, 2)
        >>> rk.kl_backward(d_kl, torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), estimator="k1")
        KlGradients(d_logprob=tensor([[1., 1.]]), d_importance_weight=None)
    """
    if d_kl is None:
        raise TypeError("d_kl: expected an array, got NoneType")
    operands, how = _operands(
        logprob,
        ref_logprob,
        mask,
        estimator,
        straight_through,
        input_clamp,
        clamp,
        old_logprob,
        importance_weight,
        d_kl,
    )
    wanted = (True, how[2] == _IMPORTANCE)
    return KlGradients(*call(_BACKWARD, operands, how + wanted))


def _operands(
    logprob: Any, ref_logprob: Any, mask: Any, estimator: str, straight_through: bool, input_clamp: Any, clamp: Any,
    old_logprob: Any, importance_weight: Any, *first: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Returns the operator's arrays, the arrays of ``first`` before all others, and the operator's numbers. Both are in
    the order of the operator's description."""
    if old_logprob is not None and importance_weight is not None:
        raise ValueError(
            "importance_weight: expected None beside old_logprob, which is where the ratio comes from, got "
            f"{type(importance_weight).__name__}"
        )
    if straight_through is not False:
        straight_through = _check.flag("straight_through", straight_through)
    if straight_through and old_logprob is not None:
        raise ValueError(
            "straight_through: expected False beside old_logprob, got True: two different corrections of a gradient"
        )
    kind = _OLD_LOGPROB if old_logprob is not None else _NONE if importance_weight is None else _IMPORTANCE
    weight = importance_weight if old_logprob is None else old_logprob
    numbers = _numbers if _dispatch.is_compiling() else _known_numbers
    return (*first, logprob, ref_logprob, weight, mask), numbers(estimator, straight_through, kind, input_clamp, clamp)


def _numbers(estimator: str, straight_through: bool, kind: int, input_clamp: Any, clamp: Any) -> tuple[Any, ...]:
    _check.one_of("estimator", estimator, ESTIMATORS[1:])
    number("input_clamp", input_clamp, 0.0, open_end=True, optional=True)
    number("clamp", clamp, 0.0, open_end=True, optional=True)
    return ESTIMATORS.index(estimator), straight_through, kind, float(or_inf(input_clamp)), float(or_inf(clamp))


_known_numbers = _check.remembered(_numbers)


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    tokens = OF_TOKENS | {"kind": "elementwise", "stem": "kl", "bound": SLOPE_OF_TOKEN}
    yield Row("kl", "kl", "forward", **tokens)
    yield Row("kl", "d_logprob", "backward", **tokens)
    yield Row("kl", "d_importance_weight", "backward", **tokens)


add_rows(_contract_rows())
