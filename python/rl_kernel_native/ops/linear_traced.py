"""linear's functions as torch operators: what torch.compile, export, FakeTensor and torch.func see.

They have no derivatives of their own; linear_autograd.py composes those from these same operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arithmetic import resolve_traced_unit
from .._native import module as _C
from .._torch import device_type, prepare

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by the extension's number
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

_ENGINE = "bool allow_vendor, int unit"
_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_library.define(
    f"linear(Tensor x, Tensor weight, Tensor? bias, int k_segments, ScalarType out_dtype, {_ENGINE}) -> Tensor"
)
_library.define(f"linear_input_grad(Tensor dy, Tensor weight, {_ENGINE}) -> Tensor")
_library.define(f"linear_weight_grad(Tensor dy, Tensor x, ScalarType out_dtype, {_ENGINE}) -> Tensor")
_library.define(f"linear_weight_grad_(Tensor(a!) main_grad, Tensor dy, Tensor x, {_ENGINE}) -> ()")
_library.define("linear_bias_grad(Tensor dy, ScalarType out_dtype) -> Tensor")
_library.define("tree_sum(Tensor[] parts, Tensor? bias, ScalarType out_dtype) -> Tensor")


def _memory(tensor: Any) -> Any:
    """The tensor with its numbers in memory; None passes."""
    return tensor if tensor is None else tensor.resolve_neg().detach()


def _unit(unit: int, tensor: Tensor, name: str) -> int:
    prepare(tensor)
    return resolve_traced_unit(unit, device_type(tensor, name))


def _linear(
    x: Tensor, weight: Tensor, bias: Any, k_segments: int, out_dtype: torch.dtype, allow_vendor: bool, unit: int
) -> Tensor:
    unit = _unit(unit, x, "x")
    code = _code(out_dtype)
    return _C.linear(_memory(x), _memory(weight), _memory(bias), k_segments, code, allow_vendor, unit, None, 0)


def _input_grad(dy: Tensor, weight: Tensor, allow_vendor: bool, unit: int) -> Tensor:
    unit = _unit(unit, dy, "dy")
    return _C.linear_input_grad(_memory(dy), _memory(weight), allow_vendor, unit, None, 0)


def _weight_grad(dy: Tensor, x: Tensor, out_dtype: torch.dtype, allow_vendor: bool, unit: int) -> Tensor:
    unit = _unit(unit, dy, "dy")
    code = _code(out_dtype)
    return _C.linear_weight_grad(_memory(dy), _memory(x), None, None, code, allow_vendor, unit, None, 0)


def _weight_grad_into(main_grad: Tensor, dy: Tensor, x: Tensor, allow_vendor: bool, unit: int) -> None:
    unit = _unit(unit, dy, "dy")
    main_grad = main_grad.detach()
    _C.linear_weight_grad(_memory(dy), _memory(x), main_grad, None, -1, allow_vendor, unit, None, 0)


def _bias_grad(dy: Tensor, out_dtype: torch.dtype) -> Tensor:
    prepare(dy)
    return _C.linear_bias_grad(_memory(dy), _code(out_dtype), None, 0)


def _tree_sum(parts: list[Tensor], bias: Any, out_dtype: torch.dtype) -> Tensor:
    prepare(parts[0])
    return _C.tree_sum([_memory(part) for part in parts], _memory(bias), _code(out_dtype), None, 0)


for _key in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _key)
    _library.impl("linear_input_grad", _input_grad, _key)
    _library.impl("linear_weight_grad", _weight_grad, _key)
    _library.impl("linear_weight_grad_", _weight_grad_into, _key)
    _library.impl("linear_bias_grad", _bias_grad, _key)
    _library.impl("tree_sum", _tree_sum, _key)


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def _code(dtype: torch.dtype) -> int:
    if dtype not in CODES:
        raise TypeError(f"out_dtype: expected float32, bfloat16 or float16, got {dtype}")
    return CODES[dtype]


def _check_rows(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in CODES:
        raise TypeError(f"{name}: expected dtype float32, bfloat16 or float16, got {tensor.dtype}")
    if tensor.dtype == torch.float32 and tensor.is_cuda:
        raise TypeError(f"{name}: expected dtype bfloat16 or float16 on {tensor.device}, got float32")
    if tensor.dim() < 1:
        raise ValueError(f"{name}: expected shape [..., features], got []")


def _check_weight(weight: Tensor, like: Tensor, dimension: int, names: tuple[str, str]) -> None:
    if weight.dtype != like.dtype:
        raise TypeError(f"{names[0]}: expected dtype {like.dtype} (that of {names[1]}), got {weight.dtype}")
    if weight.dim() != 2 or weight.shape[dimension] != like.shape[-1]:
        shape = f"[out_features, {like.shape[-1]}]" if dimension else f"[{like.shape[-1]}, in_features]"
        raise ValueError(f"{names[0]}: expected shape {shape}, got {list(weight.shape)}")


def _check_bias(bias: Any, columns: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    if bias is not None and bias.dtype not in (torch.float32, *dtypes):
        raise TypeError(f"bias: expected dtype float32 or {dtypes[0]}, got {bias.dtype}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != columns):
        raise ValueError(f"bias: expected shape [{columns}] (out_features), got {list(bias.shape)}")


def _check_narrowing(out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    if out_dtype not in (dtype, torch.float32):
        raise TypeError(f"out_dtype: expected float32 or {dtype} (that of dy), got {out_dtype}")


@torch.library.register_fake("rl_kernel_native::linear", lib=_library)
def _linear_fake(x: Tensor, weight: Tensor, bias: Any, k_segments: int, out_dtype: torch.dtype, *_: Any) -> Tensor:
    _check_rows(x, "x")
    _check_weight(weight, x, 1, ("weight", "x"))
    _check_bias(bias, weight.shape[0], (x.dtype,))
    _code(out_dtype)
    if x.dtype == torch.float32 and out_dtype != torch.float32:
        raise TypeError(f"out_dtype: expected float32 (that of x), got {out_dtype}")
    if k_segments not in (1, 2, 4, 8):
        raise ValueError(f"k_segments: expected 1, 2, 4 or 8, got {k_segments}")
    if k_segments > 1 and x.shape[-1] % (16 * k_segments):
        raise ValueError(f"k_segments: expected in_features to be a multiple of {16 * k_segments}, got {x.shape[-1]}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


@torch.library.register_fake("rl_kernel_native::linear_input_grad", lib=_library)
def _input_grad_fake(dy: Tensor, weight: Tensor, *_: Any) -> Tensor:
    _check_rows(dy, "dy")
    _check_weight(weight, dy, 0, ("weight", "dy"))
    return dy.new_empty((*dy.shape[:-1], weight.shape[1]))


def _check_operands(dy: Tensor, x: Tensor) -> None:
    _check_rows(dy, "dy")
    _check_rows(x, "x")
    if x.dtype != dy.dtype:
        raise TypeError(f"x: expected dtype {dy.dtype} (that of dy), got {x.dtype}")
    if tuple(x.shape[:-1]) != tuple(dy.shape[:-1]):
        raise ValueError(f"x: expected the leading dimensions of dy, {list(dy.shape[:-1])}, got {list(x.shape)}")


@torch.library.register_fake("rl_kernel_native::linear_weight_grad", lib=_library)
def _weight_grad_fake(dy: Tensor, x: Tensor, out_dtype: torch.dtype, *_: Any) -> Tensor:
    _check_operands(dy, x)
    _check_narrowing(out_dtype, dy.dtype)
    return dy.new_empty((dy.shape[-1], x.shape[-1]), dtype=out_dtype)


@torch.library.register_fake("rl_kernel_native::linear_weight_grad_", lib=_library)
def _weight_grad_into_fake(main_grad: Tensor, dy: Tensor, x: Tensor, *_: Any) -> None:
    _check_operands(dy, x)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad: expected dtype float32, got {main_grad.dtype}")
    if tuple(main_grad.shape) != (dy.shape[-1], x.shape[-1]):
        raise ValueError(
            f"main_grad: expected shape [{dy.shape[-1]}, {x.shape[-1]}] (out_features, in_features), got "
            f"{list(main_grad.shape)}"
        )


@torch.library.register_fake("rl_kernel_native::linear_bias_grad", lib=_library)
def _bias_grad_fake(dy: Tensor, out_dtype: torch.dtype) -> Tensor:
    if dy.dtype not in CODES:
        raise TypeError(f"dy: expected dtype float32, bfloat16 or float16, got {dy.dtype}")
    _check_narrowing(out_dtype, dy.dtype)
    return dy.new_empty((dy.shape[-1],), dtype=out_dtype)


@torch.library.register_fake("rl_kernel_native::tree_sum", lib=_library)
def _tree_sum_fake(parts: list[Tensor], bias: Any, out_dtype: torch.dtype) -> Tensor:
    for i, part in enumerate(parts):
        if part.dtype != torch.float32:
            raise TypeError(f"parts[{i}]: expected dtype float32, got {part.dtype}")
        if tuple(part.shape) != tuple(parts[0].shape):
            raise ValueError(f"parts[{i}]: expected shape {list(parts[0].shape)}, got {list(part.shape)}")
    if bias is not None:
        _check_bias(bias, parts[0].shape[-1], (torch.bfloat16, torch.float16))
    _code(out_dtype)
    return parts[0].new_empty(parts[0].shape, dtype=out_dtype)
