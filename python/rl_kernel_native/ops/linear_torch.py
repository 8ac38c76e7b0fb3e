"""What the engine does not know of linear: an array for a result, and a sum of a list of arrays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arithmetic import product_unit
from .._described import check
from .._dispatch import count_write, dtype_code
from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._run import applied
from .._torch import (
    DTYPES,
    apply_function,
    is_direct,
    memory,
    prepare,
    refuse_jit_trace,
    require_tensors,
    rows_of,
    wants_grad,
)
from .linear_traced import SHARDED, bias_gradient, sum_of


def into(dy: Tensor, x: Any, out: Any, code: int, allow_vendor: bool) -> Tensor:
    """Writes the gradient of a weight to ``out``."""
    if wants_grad(dy, x) or (isinstance(out, Tensor) and out.requires_grad):
        raise ValueError("out: cannot be given where a gradient is wanted; call under torch.no_grad()")
    refuse_jit_trace()
    if not is_direct(dy, x, out):
        require_tensors(dy=dy, x=x, sharded=SHARDED)  # the error names a meta tensor itself if it is beside others
        raise ValueError("out: cannot be given under torch.compile, torch.func or a dispatch mode")
    prepare(dy)
    given = out.detach() if isinstance(out, Tensor) else out
    _C.linear_weight_grad(dy, x, None, given, code, allow_vendor, product_unit(), None, 0)
    count_write(out)
    return out


def tree_sum(parts: list[Any], bias: Any, code: int) -> Tensor:
    if is_direct(*parts, bias) and not wants_grad(*parts, bias):
        prepare(parts[0])
        return _C.tree_sum(parts, bias, code, None, 0)
    named = {f"parts[{i}]": part for i, part in enumerate(parts)}
    require_tensors(**named, optional={"bias": bias}, sharded=SHARDED)
    return apply_function(_tree_sum, "TreeSum", bias, torch.float32 if code < 0 else DTYPES[code], *parts)


# ---- a tree of parts, a list of any length, as a torch operator -----------------------------------------------------


define("tree_sum(Tensor[] parts, Tensor? bias, ScalarType out_dtype) -> Tensor")


def _tree_sum(bias: Any, out_dtype: torch.dtype, *parts: Tensor) -> Tensor:
    found: Tensor = torch.ops.rl_kernel_native.tree_sum(list(parts), bias, out_dtype)
    return found


def _tree_sum_kernel(parts: list[Tensor], bias: Any, out_dtype: torch.dtype) -> Tensor:
    prepare(parts[0])
    return _C.tree_sum([memory(part) for part in parts], memory(bias), dtype_code(out_dtype, "out_dtype"), None, 0)


implement("tree_sum", _tree_sum_kernel, lambda parts, bias, out_dtype: apply("TreeSum", bias, out_dtype, *parts))


def _tree_sum_fake(parts: list[Tensor], bias: Any, out_dtype: torch.dtype) -> Tensor:
    check(_tree_sum_kernel, parts, bias, out_dtype)
    return parts[0].new_empty(parts[0].shape, dtype=out_dtype)


fake("tree_sum", _tree_sum_fake)


@callable_in_graph
class TreeSum(torch.autograd.Function):
    @staticmethod
    def forward(bias: Any, out_dtype: Any, *parts: Tensor) -> Tensor:
        return _tree_sum(bias, out_dtype, *parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.out_dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dbias = bias_gradient(applied, rows_of(dy)) if ctx.needs_input_grad[0] else None
        return dbias, None, *(dy.float() if needed else None for needed in ctx.needs_input_grad[2:])

    @staticmethod
    def jvp(ctx: Any, dbias: Any, _: Any, *dparts: Any) -> Any:
        total = sum_of((*dparts, None if dbias is None else dbias.float()))
        return None if total is None else total.to(ctx.out_dtype)
