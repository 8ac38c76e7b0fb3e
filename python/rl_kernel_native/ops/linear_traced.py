"""linear's functions as descriptions. Each is linear in either operand, so they are each other's derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import _shapes
from .._arithmetic import AS_CALLED, IEEE, resolve_traced_unit
from .._dispatch import dtype_code
from .._native import module as _C
from .._operator import Array, Composed, Operator, linear
from .._transforms import batched

SHARDED = ", or for a sharded in_features linear_partial and tree_sum"


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def _code(dtype: Any) -> int:
    return dtype_code(dtype, "out_dtype")


def check_operand(tensor: Any, name: str) -> None:
    _shapes.check_rows(tensor, name)
    if tensor.is_cuda and _code(tensor.dtype) == 0:
        raise TypeError(f"{name}: expected dtype bfloat16 or float16 on {tensor.device}, got float32")


def check_weight(weight: Any, like: Any, dimension: int, like_name: str) -> None:
    _shapes.check_dtype_like(weight, "weight", like, like_name)
    if weight.dim() != 2 or weight.shape[dimension] != like.shape[-1]:
        columns = like.shape[-1]
        shape = f"[out_features, {columns}]" if dimension else f"[{columns}, in_features]"
        raise _shapes.shape_error(weight, "weight", f"{shape} ({columns} is the last dimension of {like_name})")
    _shapes.check_columns(weight, "weight")


def check_bias(bias: Any, columns: Any, dtype: Any, like: str) -> None:
    """Checks the dtype and the shape of a bias, which may be None."""
    if bias is None:
        return
    _shapes.check_float32_or(bias, "bias", dtype, like)
    if bias.dim() != 1 or bias.shape[0] != columns:
        raise ValueError(f"bias: expected shape [{columns}] (out_features), got {list(bias.shape)}")
    _shapes.check_columns(bias, "bias")


def _check_linear(arrays: Any, how: Any, _: Any) -> None:
    (x, weight, bias), (k_segments, out_dtype) = arrays, how[:2]
    check_operand(x, "x")
    check_weight(weight, x, 1, "x")
    check_bias(bias, weight.shape[0], x.dtype, " (that of x)")
    if _code(x.dtype) == 0 != _code(out_dtype):
        raise TypeError(f"out_dtype: expected float32 (that of x), got {out_dtype}")
    if k_segments not in (1, 2, 4, 8):
        raise ValueError(f"k_segments: expected 1, 2, 4 or 8, got {k_segments}")
    step = 16 * k_segments
    if k_segments > 1 and x.shape[-1] % step:
        raise ValueError(
            f"k_segments: expected in_features to be a multiple of {step} (16 * k_segments), got {x.shape[-1]}; pad x "
            f"and weight with zero columns to {(x.shape[-1] + step - 1) // step * step}"
        )


def _check_input_grad(arrays: Any, how: Any, _: Any) -> None:
    check_operand(arrays[0], "dy")
    check_weight(arrays[1], arrays[0], 0, "dy")


def _check_operands(dy: Any, x: Any) -> None:
    check_operand(dy, "dy")
    check_operand(x, "x")
    _shapes.check_dtype_like(x, "x", dy, "dy")
    if tuple(x.shape[:-1]) != tuple(dy.shape[:-1]):
        shape = ", ".join([*map(str, dy.shape[:-1]), "features"])
        raise ValueError(f"x: expected shape [{shape}] (the leading dimensions of dy), got {list(x.shape)}")


def _check_weight_grad(arrays: Any, how: Any, _: Any) -> None:
    _check_operands(*arrays)
    _shapes.check_narrowing("out_dtype", how[0], arrays[0].dtype)


def _check_into(arrays: Any, how: Any, _: Any) -> None:
    main_grad, dy, x = arrays
    _check_operands(dy, x)
    _shapes.check_dtype(main_grad, "main_grad", _shapes.FLOAT32)
    wanted = (dy.shape[-1], x.shape[-1])
    if tuple(main_grad.shape) != wanted:
        raise _shapes.shape_error(main_grad, "main_grad", f"{list(wanted)} (out_features, in_features)")


def _check_bias_grad(arrays: Any, how: Any, _: Any) -> None:
    _shapes.check_rows(arrays[0], "dy")
    _shapes.check_narrowing("out_dtype", how[0], arrays[0].dtype)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def _backwards(engine: tuple[bool, int]) -> tuple[bool, int]:
    """The engine and the unit of a backward. It uses its forward's unit in any context; a compiled one used ieee."""
    allow_vendor, unit = engine
    return allow_vendor, IEEE if unit == AS_CALLED else unit


def sum_of(terms: Any) -> Any:
    """The sum of the given tangents; None if there is none."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


def _float32() -> Any:
    import torch

    return torch.float32


def _gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    """Gradients of x, weight and bias. If main_grad is given, the weight's gradient is added to it."""
    (dy,), (x, weight), engine = given, kept, _backwards(how[2:4])
    weight_dtype, main_grad = how[4:] or (weight.dtype, None)
    dx = call(INPUT_GRAD, (dy, weight), engine)[0] if wanted[0] else None
    dweight = None
    if wanted[1] and main_grad is not None:
        call(WEIGHT_GRAD_INTO, (main_grad, dy, x), engine)
    elif wanted[1]:
        (dweight,) = call(WEIGHT_GRAD, (dy, x), (weight_dtype, *engine))
    return dx, dweight, bias_gradient(call, dy) if wanted[2] else None


def bias_gradient(call: Any, dy: Any) -> Any:
    """dbias in float32, which autograd rounds to the dtype of the bias."""
    return call(BIAS_GRAD, (dy,), (_float32(),))[0]


def _tangents(call: Any, along: Any, operands: Any, how: Any) -> Any:
    """The output's tangent. It sums the tangents of the products in float32 and rounds once."""
    (dx, dweight, dbias), (x, weight, _) = along, operands
    rows = (how[0], _float32(), *_backwards(how[2:4]))
    total = sum_of(
        None if a is None or b is None else call(LINEAR, (a, b, None), rows)[0] for a, b in ((dx, weight), (x, dweight))
    )
    if dbias is not None:
        total = sum_of((total, dbias.float().expand(*x.shape[:-1], weight.shape[0])))
    return (None if total is None else total.to(how[1]),)


def _input_grad_gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    (ddx,), (dy, weight), engine = given, kept, _backwards(how)
    ddy = call(LINEAR, (ddx, weight, None), (1, dy.dtype, *engine))[0] if wanted[0] else None
    return ddy, call(WEIGHT_GRAD, (dy, ddx), (weight.dtype, *engine))[0] if wanted[1] else None


def _weight_grad_gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    (ddweight,), (dy, x), engine = given, kept, _backwards(how[1:])
    ddy = call(LINEAR, (x, ddweight, None), (1, dy.dtype, *engine))[0] if wanted[0] else None
    return ddy, call(INPUT_GRAD, (dy, ddweight), engine)[0] if wanted[1] else None


def _of_product(op: Callable[[], Operator]) -> Any:
    """The tangents of a function of two arrays that is linear in each."""

    def tangents(call: Any, along: Any, operands: Any, how: Any) -> Any:
        (da, db), (a, b), how = along, operands, (*how[:-2], *_backwards(how[-2:]))
        pairs = ((da, b), (a, db))
        return (sum_of(None if x is None or y is None else call(op(), (x, y), how)[0] for x, y in pairs),)

    return tangents


def _bias_grad_along(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    (dy,) = arrays
    return call(BIAS_GRAD, given, how) if wanted is None else (given[0].to(dy.dtype).expand(dy.shape),)


def _batch(info: Any, dims: Any, inputs: Any, apply: Any) -> Any:
    """A batch adds one dimension of rows, unless another operand is batched too."""
    first, *rest = inputs
    return None if any(d is not None for d in dims[1:]) else (apply(*batched(info, dims[:1], (first,)), *rest), 0)


# ---- the operators --------------------------------------------------------------------------------------------------


def _product(name: str, arrays: tuple[Array, ...], options: str, **description: Any) -> Operator:
    """An operator whose last options are the engine and the unit; a traced call resolves its unit when it runs."""
    native = description.pop("native")

    def resolved(arrays: Any, how: Any, *tail: Any) -> Any:
        if how[-1] == AS_CALLED:
            how = (*how[:-1], resolve_traced_unit(AS_CALLED, "cuda" if arrays[0].is_cuda else "cpu"))
        return native(arrays, how, *tail)

    options = f"{options}bool allow_vendor, int unit"
    return Operator(name, arrays, options, native=resolved, sharded=SHARDED, **description)


_X, _DY, _WEIGHT = Array("x", "by hand"), Array("dy", "by hand"), Array("weight", "by hand")
# In addition to the schema's options: the dtype of the weight's gradient, and main_grad.
LINEAR: Operator = _product(
    "linear",
    (_X, _WEIGHT, Array("bias", "by hand", optional=True)),
    "int k_segments, ScalarType out_dtype, ",
    outputs=lambda arrays, how: ((*arrays[0].shape[:-1], arrays[1].shape[0]),),
    dtypes=(lambda how: _code(how[1]),),
    native=lambda arrays, how, *tail: (_C.linear(*arrays, how[0], _code(how[1]), *how[2:], *tail),),
    check=_check_linear,
    gradient=Composed(
        of=(0, 1, 2),
        incoming=("dy",),
        kept=lambda arrays, outputs: arrays[:2],
        backward=_gradients,
        tangents=_tangents,
        accumulates=1,
        batch=_batch,
    ),
    flops=lambda x, weight, *_: 2 * math.prod(x) * weight[0],
)
INPUT_GRAD: Operator = _product(
    "linear_input_grad",
    (_DY, _WEIGHT),
    "",
    outputs=lambda arrays, how: ((*arrays[0].shape[:-1], arrays[1].shape[1]),),
    dtypes=(None,),
    native=lambda arrays, how, *tail: (_C.linear_input_grad(*arrays, *how, *tail),),
    check=_check_input_grad,
    gradient=Composed(
        of=(0, 1),
        incoming=("ddx",),
        backward=_input_grad_gradients,
        tangents=_of_product(lambda: INPUT_GRAD),
        batch=_batch,
    ),
    flops=lambda dy, weight, *_: 2 * math.prod(dy) * weight[1],
)
WEIGHT_GRAD: Operator = _product(
    "linear_weight_grad",
    (_DY, _X),
    "ScalarType out_dtype, ",
    outputs=lambda arrays, how: ((arrays[0].shape[-1], arrays[1].shape[-1]),),
    dtypes=(lambda how: _code(how[0]),),
    native=lambda arrays, how, *tail: (_C.linear_weight_grad(*arrays, None, None, _code(how[0]), *how[1:], *tail),),
    check=_check_weight_grad,
    gradient=Composed(
        of=(0, 1),
        incoming=("ddweight",),
        backward=_weight_grad_gradients,
        tangents=_of_product(lambda: WEIGHT_GRAD),
    ),
    flops=lambda dy, x, *_: 2 * math.prod(dy) * x[-1],
)
WEIGHT_GRAD_INTO = _product(
    "linear_weight_grad_",
    (Array("main_grad", "by hand", written=True), _DY, _X),
    "",
    outputs=lambda arrays, how: (),
    dtypes=(),
    native=lambda arrays, how, *tail: (_C.linear_weight_grad(*arrays[1:], arrays[0], None, -1, *how, *tail),)[1:],
    check=_check_into,
    leads=1,
    flops=lambda main_grad, dy, x, *_: 2 * math.prod(dy) * x[-1],
)
BIAS_GRAD = Operator(
    "linear_bias_grad",
    (_DY,),
    "ScalarType out_dtype",
    outputs=lambda arrays, how: (arrays[0].shape[-1:],),
    dtypes=(lambda how: _code(how[0]),),
    native=lambda arrays, how, *tail: (_C.linear_bias_grad(*arrays, _code(how[0]), *tail),),
    check=_check_bias_grad,
    gradient=linear(of=(0,), incoming=("ddbias",), along=_bias_grad_along),
    sharded=SHARDED,
)
