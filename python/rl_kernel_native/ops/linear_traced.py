"""Describes the functions of linear.py to the engine that registers operators with torch. Each product is linear in
each of its operands, so the derivatives of a product are other products of this module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import _check
from .._arithmetic import AS_CALLED, IEEE
from .._dispatch import option_code
from .._native import module as _C
from .._operator import Array, Composed, Operator, declared, linear
from .._transforms import rows

_FLOAT32 = 0  # the dtype's number in the extension
SHARDED = {"DTensor": ", or for a sharded in_features linear_partial and tree_sum"}


# ---- derivatives ----------------------------------------------------------------------------------------------------


def _backwards(engine: tuple[bool, int]) -> tuple[bool, int]:
    """Returns the engine and the unit of a backward. A backward uses the unit of its forward, even if ``rk.arithmetic``
    selects another unit by then. A compiled forward used ieee arithmetic."""
    allow_vendor, unit = engine
    return allow_vendor, IEEE if unit == AS_CALLED else unit


def sum_of(terms: Any) -> Any:
    """Returns the sum of the terms that are not None, or None if all terms are None."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


def _gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    """Returns the gradients of x, weight and bias. If main_grad is given, the weight's gradient is added to main_grad
    instead."""
    (dy,), (bias, x, weight), engine = given, kept, _backwards(how[2:4])
    weight_dtype, main_grad = how[4:] or (None, None)
    dx = call(INPUT_GRAD, (dy, weight), engine)[0] if wanted[0] else None
    dweight = None
    if wanted[1] and main_grad is not None:
        call(WEIGHT_GRAD_INTO, (main_grad, dy, x), engine)
    elif wanted[1]:
        (dweight,) = call(WEIGHT_GRAD, (dy, x), (weight_dtype, *engine))
    return dx, dweight, bias_gradient(call, dy, bias.dtype) if wanted[2] else None


def bias_gradient(call: Any, dy: Any, dtype: Any = None) -> Any:
    """Returns dbias, by default in float32. In that case autograd rounds it to the dtype of the bias."""
    return call(BIAS_GRAD, (dy,), (dtype or _FLOAT32,))[0]


def _tangents(call: Any, along: Any, operands: Any, how: Any) -> Any:
    """Returns the output's tangent, summed over the tangents of the operands in float32 and rounded once."""
    (dx, dweight, dbias), (x, weight, _) = along, operands
    rows = (how[0], _FLOAT32, *_backwards(how[2:4]))
    total = sum_of(
        None if a is None or b is None else call(LINEAR, (a, b, None), rows)[0] for a, b in ((dx, weight), (x, dweight))
    )
    if dbias is not None:
        total = sum_of((total, dbias.float().expand(*x.shape[:-1], weight.shape[0])))
    return (None if total is None else total.to(how[1] or x.dtype),)


def _input_grad_gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    (ddx,), (dy, weight), engine = given, kept, _backwards(how)
    ddy = call(LINEAR, (ddx, weight, None), (1, dy.dtype, *engine))[0] if wanted[0] else None
    return ddy, call(WEIGHT_GRAD, (dy, ddx), (weight.dtype, *engine))[0] if wanted[1] else None


def _weight_grad_gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    (ddweight,), (dy, x), engine = given, kept, _backwards(how[1:])
    ddy = call(LINEAR, (x, ddweight, None), (1, dy.dtype, *engine))[0] if wanted[0] else None
    return ddy, call(INPUT_GRAD, (dy, ddweight), engine)[0] if wanted[1] else None


def _of_product(op: Callable[[], Operator]) -> Any:
    """Returns the tangent rule of an operator that is linear in each of its two arrays."""

    def tangents(call: Any, along: Any, operands: Any, how: Any) -> Any:
        (da, db), (a, b), how = along, operands, (*how[:-2], *_backwards(how[-2:]))
        pairs = ((da, b), (a, db))
        return (sum_of(None if x is None or y is None else call(op(), (x, y), how)[0] for x, y in pairs),)

    return tangents


def _bias_grad_along(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    (dy,) = arrays
    return call(BIAS_GRAD, given, how) if wanted is None else (given[0].to(dy.dtype).expand(dy.shape),)


def _tree_along(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    """The derivative rule of ``tree_sum``. If ``wanted`` is None, returns the sum of the tangents. Otherwise every part
    gets the gradient of the sum, and the bias gets that gradient summed over rows."""
    if wanted is not None:
        of_bias = bias_gradient(call, given[0]) if wanted[-1] else None
        return *(given[0].float() if w else None for w in wanted[:-1]), of_bias
    total = sum_of(None if t is None else t.float() for t in given)
    return (None if total is None else total.to(how[0]),)


def _eager() -> Any:
    from .eager_autograd import Linear

    return Linear


# ---- the operators --------------------------------------------------------------------------------------------------


_ENGINE = "bool allow_vendor, int unit"
_OPTIONS = f"int k_segments, ScalarType? out_dtype, {_ENGINE}"
_declared = declared(_OPTIONS)


def _native(arrays: Any, how: Any, *tail: Any) -> Any:
    """Calls the extension. ``how`` may hold two more options than the schema, which only a backward reads: the dtype of
    the weight's gradient, and main_grad."""
    k_segments, dtype, allow_vendor, unit = how[:4]
    code = dtype if type(dtype) is int else option_code(dtype, "out_dtype")
    return (_C.linear(*arrays, k_segments, code, allow_vendor, unit, *tail),)


LINEAR: Operator = Operator(
    "linear",
    "x, weight, bias?",
    _OPTIONS,
    cures=SHARDED,
    outputs=lambda arrays, how: ((*arrays[0].shape[:-1], arrays[1].shape[0]),),
    dtypes=(lambda how: how[1],),
    native=_native,
    schema_options=lambda how: (_check.segment_count("k_segments", how[0]), *_declared(how)[1:]),
    casts=(0, 1, 2),
    main_grad_call="linear_weight_grad",
    gradient=Composed(
        of=(0, 1, 2),
        incoming=("dy",),
        likes=(2,),
        kept=lambda arrays, outputs: arrays[:2],
        eager=_eager,
        backward=_gradients,
        tangents=_tangents,
        accumulates=1,
        beside=2,
        batch=rows(0),
    ),
    flops=lambda x, weight, *_: 2 * math.prod(x) * weight[0],
)
INPUT_GRAD: Operator = Operator(
    "linear_input_grad",
    "dy, weight",
    _ENGINE,
    cures=SHARDED,
    outputs=lambda arrays, how: ((*arrays[0].shape[:-1], arrays[1].shape[1]),),
    dtypes=(None,),
    gradient=Composed(
        of=(0, 1),
        incoming=("ddx",),
        backward=_input_grad_gradients,
        tangents=_of_product(lambda: INPUT_GRAD),
        batch=rows(0),
    ),
    flops=lambda dy, weight, *_: 2 * math.prod(dy) * weight[1],
)
WEIGHT_GRAD: Operator = Operator(
    "linear_weight_grad",
    "dy, x",
    f"ScalarType? out_dtype, {_ENGINE}",
    cures=SHARDED,
    outputs=lambda arrays, how: ((arrays[0].shape[-1], arrays[1].shape[-1]),),
    dtypes=(lambda how: how[0],),
    native=lambda arrays, how, *tail, main_grad=None: (
        _C.linear_weight_grad(*arrays, main_grad, None, option_code(how[0], "out_dtype"), *how[1:], *tail),
    ),
    gradient=Composed(
        of=(0, 1), incoming=("ddweight",), backward=_weight_grad_gradients, tangents=_of_product(lambda: WEIGHT_GRAD)
    ),
    flops=lambda dy, x, *_: 2 * math.prod(dy) * x[-1],
)
WEIGHT_GRAD_INTO = WEIGHT_GRAD.into(0)
BIAS_GRAD = Operator(
    "linear_bias_grad",
    "dy",
    "ScalarType? out_dtype",
    outputs=lambda arrays, how: (arrays[0].shape[-1:],),
    dtypes=(lambda how: how[0],),
    native=lambda arrays, how, *tail: (_C.linear_bias_grad(*arrays, option_code(how[0], "out_dtype"), *tail),),
    gradient=linear(of=(0,), incoming=("ddbias",), along=_bias_grad_along),
    cures=SHARDED,
)


def _native_tree_sum(arrays: Any, how: Any, *tail: Any) -> Any:
    """Calls the extension. An eager call has one more option than the schema: the number of parts."""
    if len(how) > 1:
        return (_C.tree_sum(list(arrays[: how[1]]), arrays[8], how[0], *tail),)
    parts = [x for x in arrays[:8] if x is not None]
    return (_C.tree_sum(parts, arrays[8], option_code(how[0], "out_dtype"), *tail),)


TREE_SUM = Operator(
    "tree_sum",
    (*Array.list_of("parts", 8), "bias?"),
    "ScalarType out_dtype",
    dtypes=(lambda how: how[0],),
    native=_native_tree_sum,
    gradient=linear(of=tuple(range(9)), incoming=("dy",), along=_tree_along),
    cures=SHARDED,
)
