"""linear for torch tensors.

An eager call goes directly to the extension, or through one autograd.Function if a gradient is wanted. Whatever traces
or transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through linear_traced.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _check, _engine, _main_grad, _torch
from .._arithmetic import AS_CALLED, product_unit
from .._described import check
from .._dispatch import count_write, dtype_code
from .._in_graph import apply, callable_in_graph
from .._main_grad import is_asked_for
from .._native import module as _C
from .._register import define, fake, implement
from .._run import applied, traced
from .._torch import (
    CODES,
    DTYPES,
    PLAIN,  # noqa: F401 - for linear's own short way
    Eager,
    apply_function,
    autocast,
    functorch_active,
    gradient,
    is_autocasting,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    is_read_by_dynamo,  # noqa: F401 - likewise
    memory,
    prepare,
    require_tensors,
    rows_of,
    wants_grad,
)
from .linear_traced import (
    BIAS_GRAD,
    INPUT_GRAD,
    LINEAR,
    SHARDED,
    WEIGHT_GRAD,
    WEIGHT_GRAD_INTO,
    bias_gradient,
    sum_of,
)

_require_tensors = functools.partial(require_tensors, sharded=SHARDED)


def _unit() -> int:
    """The unit of the call. A compiled call cannot read rk.arithmetic's context, so linear_traced.py resolves it at run
    time."""
    return AS_CALLED if is_compiling() else product_unit()


def linear(
    x: Tensor,
    weight: Any,
    bias: Any,
    k_segments: int,
    out: int,
    allow_vendor: bool,
    main_grad: Any,
    weight_grad: int,
) -> Tensor:
    if is_autocasting():
        x, weight, bias = autocast(x, weight, bias)
    direct = is_direct(x, weight, bias)
    unit = _unit()
    weight_dtype = _main_grad.check_weight_grad(weight, weight_grad, main_grad)
    if main_grad is not None:
        _main_grad.check(main_grad, weight, x=x, bias=bias)
    if direct and not wants_grad(x, weight, bias):
        _torch.device_type(x, "x")
        prepare(x)
        return _C.linear(x, weight, bias, k_segments, out, allow_vendor, unit, None, 0)
    if not direct:
        _require_tensors(x=x, weight=weight, optional={"bias": bias})
        k_segments = _check.segment_count("k_segments", k_segments)
        how = (k_segments, x.dtype if out < 0 else DTYPES[out], allow_vendor, unit, weight_dtype, main_grad)
        return applied(LINEAR, (x, weight, bias), how)[0]
    return _Linear.run(x, weight, bias, k_segments, out, allow_vendor, unit, weight_dtype, main_grad)


class _Linear(Eager):
    """Eager autograd. A forward that takes ctx costs a third of the time of one with setup_context."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, k_segments: int, out: int, allow_vendor: bool, unit: int,
        weight_dtype: torch.dtype, main_grad: Any,
    ) -> Tensor:  # fmt: skip
        prepare(x)
        y = _C.linear(x, weight, bias, k_segments, out, allow_vendor, unit, None, 0)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.how = (allow_vendor, unit)
        ctx.dtype, ctx.weight_dtype = x.dtype, weight_dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.main_grad = main_grad  # not saved, because other backwards may add to it in between
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if dy is None:
            return (None,) * 9
        x, weight = ctx.saved_tensors
        main_grad = ctx.main_grad
        _main_grad.refuse_create_graph(main_grad)
        needs_x, needs_weight, needs_bias = wanted(ctx)
        # With create_graph, backward itself is differentiated, so the call also goes through the dispatcher.
        direct = not is_grad_enabled() and is_direct_gradient(dy)
        if not direct:
            _require_tensors(dy=dy)
        dy = gradient(dy, ctx.dtype)
        dx = dweight = dbias = None
        if direct:
            prepare(dy)
            if needs_x:
                dx = _C.linear_input_grad(dy, weight, *ctx.how, None, 0)
            if needs_weight:
                code = -1 if main_grad is not None else CODES[ctx.weight_dtype]
                dweight = _C.linear_weight_grad(dy, x, main_grad, None, code, *ctx.how, None, 0)
                if main_grad is not None:
                    count_write(main_grad)
                    dweight = None
            if needs_bias:
                dbias = _C.linear_bias_grad(dy, CODES[ctx.bias_dtype], None, 0)
        else:
            if needs_x:
                (dx,) = applied(INPUT_GRAD, (dy, weight), ctx.how)
            if needs_weight and main_grad is not None:
                _main_grad.require_addable(dy, main_grad)
                applied(WEIGHT_GRAD_INTO, (main_grad, dy, x), ctx.how)
            elif needs_weight:
                (dweight,) = applied(WEIGHT_GRAD, (dy, x), (ctx.weight_dtype, *ctx.how))
            if needs_bias:
                dbias = bias_gradient(applied, dy)
        return dx, dweight, dbias, None, None, None, None, None, None


def wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether the running backward asks for the gradients of x, weight and bias. A call that asks for the gradient of
    weight also gets that of bias, which is cheap."""
    edges, (x, weight, bias) = ctx.next_functions, ctx.needs_input_grad[:3]
    weight = weight and is_asked_for(edges[1][0], ctx.main_grad)
    return x and is_asked_for(edges[0][0]), weight, bias and (weight or is_asked_for(edges[2][0]))


def input_grad(dy: Tensor, weight: Any, allow_vendor: bool) -> Tensor:
    unit = _unit()
    if is_direct(dy, weight) and not wants_grad(dy, weight):
        prepare(dy)
        return _C.linear_input_grad(dy, weight, allow_vendor, unit, None, 0)
    return _engine.call(INPUT_GRAD, (dy, weight), (allow_vendor, unit))[0]


def weight_grad(dy: Tensor, x: Any, main_grad: Any, out: Any, code: int, allow_vendor: bool) -> Tensor:
    unit = _unit()
    direct = is_direct(dy, x, main_grad, out)
    differentiable = wants_grad(dy, x)
    given = main_grad if main_grad is not None else out
    if given is not None:
        name = "out" if main_grad is None else "main_grad"
        if differentiable or (isinstance(given, Tensor) and given.requires_grad):
            raise ValueError(f"{name}: cannot be given where a gradient is wanted; call under torch.no_grad()")
        _torch.refuse_jit_trace()
        if not direct and (out is not None or functorch_active()):
            _require_tensors(dy=dy, x=x)  # the error names a meta tensor itself if it is beside others
            raise ValueError(f"{name}: cannot be given under torch.compile, torch.func or a dispatch mode")
    if direct and not differentiable:
        prepare(dy)
        detached = [t.detach() if isinstance(t, Tensor) else t for t in (main_grad, out)]
        dweight = _C.linear_weight_grad(dy, x, *detached, code, allow_vendor, unit, None, 0)
        if given is None:
            return dweight
        count_write(given)
        return given
    if main_grad is not None:
        traced(WEIGHT_GRAD_INTO, (main_grad, dy, x), (allow_vendor, unit))
        return main_grad
    return _engine.call(WEIGHT_GRAD, (dy, x), (dy.dtype if code < 0 else DTYPES[code], allow_vendor, unit))[0]


def bias_grad(dy: Tensor, code: int) -> Tensor:
    if is_direct(dy) and not wants_grad(dy):
        prepare(dy)
        return _C.linear_bias_grad(dy, code, None, 0)
    return _engine.call(BIAS_GRAD, (dy,), (dy.dtype if code < 0 else DTYPES[code],))[0]


def tree_sum(parts: list[Any], bias: Any, code: int) -> Tensor:
    if is_direct(*parts, bias) and not wants_grad(*parts, bias):
        prepare(parts[0])
        return _C.tree_sum(parts, bias, code, None, 0)
    _require_tensors(**{f"parts[{i}]": part for i, part in enumerate(parts)}, optional={"bias": bias})
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


@fake("tree_sum")
def _tree_sum_fake(parts: list[Tensor], bias: Any, out_dtype: torch.dtype) -> Tensor:
    check(_tree_sum_kernel, parts, bias, out_dtype)
    return parts[0].new_empty(parts[0].shape, dtype=out_dtype)


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
