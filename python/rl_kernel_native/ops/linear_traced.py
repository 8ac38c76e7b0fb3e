"""linear's functions as torch operators: what torch.compile, export, FakeTensor and torch.func see.

linear_autograd.py composes their derivatives from these same operators.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._arithmetic import resolve_traced_unit
from .._dispatch import count_write
from .._in_graph import apply
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import (
    COPY,
    check_columns,
    check_dtype_like,
    check_float32_or,
    check_narrowing,
    check_rows,
    dtype_name,
)
from .._torch import CODES, device_type, memory, prepare

_ops = torch.ops.rl_kernel_native
_ENGINE = "bool allow_vendor, int unit"
define(f"linear(Tensor x, Tensor weight, Tensor? bias, int k_segments, ScalarType out_dtype, {_ENGINE}) -> Tensor")
define(f"linear_input_grad(Tensor dy, Tensor weight, {_ENGINE}) -> Tensor")
define(f"linear_weight_grad(Tensor dy, Tensor x, ScalarType out_dtype, {_ENGINE}) -> Tensor")
define(f"linear_weight_grad_(Tensor(a!) main_grad, Tensor dy, Tensor x, {_ENGINE}) -> ()")
define("linear_bias_grad(Tensor dy, ScalarType out_dtype) -> Tensor")
define("tree_sum(Tensor[] parts, Tensor? bias, ScalarType out_dtype) -> Tensor")


def _unit(unit: int, tensor: Tensor, name: str) -> int:
    prepare(tensor)
    return resolve_traced_unit(unit, device_type(tensor, name))


def _linear(
    x: Tensor, weight: Tensor, bias: Any, k_segments: int, out_dtype: torch.dtype, allow_vendor: bool, unit: int
) -> Tensor:
    unit = _unit(unit, x, "x")
    code = _code(out_dtype)
    return _C.linear(memory(x), memory(weight), memory(bias), k_segments, code, allow_vendor, unit, None, 0)


def _input_grad(dy: Tensor, weight: Tensor, allow_vendor: bool, unit: int) -> Tensor:
    unit = _unit(unit, dy, "dy")
    return _C.linear_input_grad(memory(dy), memory(weight), allow_vendor, unit, None, 0)


def _weight_grad(dy: Tensor, x: Tensor, out_dtype: torch.dtype, allow_vendor: bool, unit: int) -> Tensor:
    unit = _unit(unit, dy, "dy")
    code = _code(out_dtype)
    return _C.linear_weight_grad(memory(dy), memory(x), None, None, code, allow_vendor, unit, None, 0)


def _weight_grad_into(main_grad: Tensor, dy: Tensor, x: Tensor, allow_vendor: bool, unit: int) -> None:
    unit = _unit(unit, dy, "dy")
    _C.linear_weight_grad(memory(dy), memory(x), main_grad.detach(), None, -1, allow_vendor, unit, None, 0)
    count_write(main_grad)


def _bias_grad(dy: Tensor, out_dtype: torch.dtype) -> Tensor:
    prepare(dy)
    return _C.linear_bias_grad(memory(dy), _code(out_dtype), None, 0)


def _tree_sum(parts: list[Tensor], bias: Any, out_dtype: torch.dtype) -> Tensor:
    prepare(parts[0])
    return _C.tree_sum([memory(part) for part in parts], memory(bias), _code(out_dtype), None, 0)


def _differentiable_linear(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return apply("Linear", x, weight, *rest, weight.dtype, None)


def _differentiable_tree_sum(parts: list[Any], bias: Any, out_dtype: torch.dtype) -> Tensor:
    return apply("TreeSum", bias, out_dtype, *parts)


implement("linear", _linear, _differentiable_linear)
implement("linear_input_grad", _input_grad, functools.partial(apply, "InputGrad"))
implement("linear_weight_grad", _weight_grad, functools.partial(apply, "WeightGrad"))
implement("linear_weight_grad_", _weight_grad_into)
implement("linear_bias_grad", _bias_grad, functools.partial(apply, "BiasGrad"))
implement("tree_sum", _tree_sum, _differentiable_tree_sum)


# For FlopCounterMode: two flops a product.
register_flop_formula(_ops.linear)(lambda x, weight, *_, **__: 2 * math.prod(x) * weight[0])
register_flop_formula(_ops.linear_input_grad)(lambda dy, weight, *_, **__: 2 * math.prod(dy) * weight[1])
register_flop_formula(_ops.linear_weight_grad)(lambda dy, x, *_, **__: 2 * math.prod(dy) * x[-1])
register_flop_formula(_ops.linear_weight_grad_)(lambda main_grad, dy, x, *_, **__: 2 * math.prod(dy) * x[-1])


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def _code(dtype: torch.dtype) -> int:
    if dtype not in CODES:
        raise TypeError(f"out_dtype: expected float32, bfloat16 or float16, got {dtype_name(dtype)}")
    return CODES[dtype]


def _check_operand(tensor: Tensor, name: str) -> None:
    check_rows(tensor, name)
    if tensor.dtype == torch.float32 and tensor.is_cuda:
        raise TypeError(f"{name}: expected dtype bfloat16 or float16 on {tensor.device}, got float32")


def _check_weight(weight: Tensor, like: Tensor, dimension: int, names: tuple[str, str]) -> None:
    check_dtype_like(weight, names[0], like, names[1])
    if weight.dim() != 2 or weight.shape[dimension] != like.shape[-1]:
        columns = like.shape[-1]
        shape = f"[out_features, {columns}]" if dimension else f"[{columns}, in_features]"
        raise ValueError(
            f"{names[0]}: expected shape {shape} ({columns} is the last dimension of {names[1]}), got "
            f"{list(weight.shape)}"
        )
    check_columns(weight, names[0])


def _check_bias(bias: Any, columns: Any, dtype: torch.dtype, like: str) -> None:
    if bias is None:
        return
    check_float32_or(bias, "bias", dtype, like)
    if bias.dim() != 1 or bias.shape[0] != columns:
        raise ValueError(f"bias: expected shape [{columns}] (out_features), got {list(bias.shape)}")
    check_columns(bias, "bias")


@fake("linear")
def _linear_fake(x: Tensor, weight: Tensor, bias: Any, k_segments: int, out_dtype: torch.dtype, *_: Any) -> Tensor:
    _check_operand(x, "x")
    _check_weight(weight, x, 1, ("weight", "x"))
    _check_bias(bias, weight.shape[0], x.dtype, " (that of x)")
    _code(out_dtype)
    if x.dtype == torch.float32 and out_dtype != torch.float32:
        raise TypeError(f"out_dtype: expected float32 (that of x), got {dtype_name(out_dtype)}")
    if k_segments not in (1, 2, 4, 8):
        raise ValueError(f"k_segments: expected 1, 2, 4 or 8, got {k_segments}")
    if k_segments > 1 and x.shape[-1] % (16 * k_segments):
        step = 16 * k_segments
        raise ValueError(
            f"k_segments: expected in_features to be a multiple of {step} (16 * k_segments), got {x.shape[-1]}; pad x "
            f"and weight with zero columns to {(x.shape[-1] + step - 1) // step * step}"
        )
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


@fake("linear_input_grad")
def _input_grad_fake(dy: Tensor, weight: Tensor, *_: Any) -> Tensor:
    _check_operand(dy, "dy")
    _check_weight(weight, dy, 0, ("weight", "dy"))
    return dy.new_empty((*dy.shape[:-1], weight.shape[1]))


def _check_operands(dy: Tensor, x: Tensor) -> None:
    _check_operand(dy, "dy")
    _check_operand(x, "x")
    check_dtype_like(x, "x", dy, "dy")
    if tuple(x.shape[:-1]) != tuple(dy.shape[:-1]):
        shape = ", ".join([*map(str, dy.shape[:-1]), "features"])
        raise ValueError(f"x: expected shape [{shape}] (the leading dimensions of dy), got {list(x.shape)}")


@fake("linear_weight_grad")
def _weight_grad_fake(dy: Tensor, x: Tensor, out_dtype: torch.dtype, *_: Any) -> Tensor:
    _check_operands(dy, x)
    check_narrowing("out_dtype", out_dtype, dy.dtype)
    return dy.new_empty((dy.shape[-1], x.shape[-1]), dtype=out_dtype)


@fake("linear_weight_grad_")
def _weight_grad_into_fake(main_grad: Tensor, dy: Tensor, x: Tensor, *_: Any) -> None:
    _check_operands(dy, x)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad: expected dtype float32, got {dtype_name(main_grad.dtype)}")
    if tuple(main_grad.shape) != (dy.shape[-1], x.shape[-1]):
        raise ValueError(
            f"main_grad: expected shape [{dy.shape[-1]}, {x.shape[-1]}] (out_features, in_features), got "
            f"{list(main_grad.shape)}"
        )


@fake("linear_bias_grad")
def _bias_grad_fake(dy: Tensor, out_dtype: torch.dtype) -> Tensor:
    check_rows(dy, "dy")
    check_narrowing("out_dtype", out_dtype, dy.dtype)
    return dy.new_empty((dy.shape[-1],), dtype=out_dtype)


@fake("tree_sum")
def _tree_sum_fake(parts: list[Tensor], bias: Any, out_dtype: torch.dtype) -> Tensor:
    for i, part in enumerate(parts):
        if part.dtype != torch.float32:
            raise TypeError(f"parts[{i}]: expected dtype float32, got {dtype_name(part.dtype)}")
        if tuple(part.shape) != tuple(parts[0].shape):
            raise ValueError(
                f"parts[{i}]: expected shape {list(parts[0].shape)} (that of parts[0]), got {list(part.shape)}"
            )
        if not part.is_contiguous():
            raise ValueError(
                f"parts[{i}]: expected a contiguous array, got shape {list(part.shape)} with strides "
                f"{list(part.stride())}{COPY}"
            )
    if bias is not None:
        if parts[0].dim() < 1:
            raise ValueError("parts[0]: expected shape [..., features] with a bias, got []")
        half = torch.float16 if bias.dtype == torch.float16 else torch.bfloat16
        _check_bias(bias, parts[0].shape[-1], half, " or float16")
    _code(out_dtype)
    return parts[0].new_empty(parts[0].shape, dtype=out_dtype)
