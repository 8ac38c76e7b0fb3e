"""rope as a torch operator: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

A rotation is linear, and its transpose is the same operator with `transposed` turned: so are all of its derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_columns, check_dtype_like, check_float32_or, dtype_name
from .._torch import CODES, apply_function, gradient, memory, prepare
from .._transforms import batched, looped

# k_out is an empty tensor where there is no k.
define(
    "rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, bool interleaved, int? partial_dim, "
    "bool round_products, int[]? mrope_sections, int head_axis, bool transposed) -> (Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native


def _kernel(q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, *options: Any) -> tuple[Tensor, Tensor]:
    prepare(q)
    tensors = (memory(t) for t in (q, k, cos, sin, position_ids))
    q_out, k_out = _C.rope(*tensors, *options, None, 0)
    return q_out, q.new_empty(0) if k_out is None else k_out


implement("rope", _kernel, functools.partial(apply, "Rope"))


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def names(transposed: bool) -> tuple[str, str]:
    """Names of what is rotated."""
    return ("dq_out", "dk_out") if transposed else ("q", "k")


def _check_heads(tensor: Tensor, name: str, head_axis: int) -> int:
    """The axis of heads, counted from the front."""
    dims = tensor.dim()
    if tensor.dtype not in CODES:
        raise TypeError(f"{name}: expected dtype float32, bfloat16 or float16, got {dtype_name(tensor.dtype)}")
    if dims > 8:
        raise ValueError(f"{name}: expected at most 8 dimensions, got {dims}")
    if dims < 2:
        raise ValueError(f"{name}: expected shape [..., num_heads, head_dim], got {list(tensor.shape)}")
    axis = head_axis + dims if head_axis < 0 else head_axis
    if not 0 <= axis < dims - 1:
        raise ValueError(
            f"head_axis: expected an axis of {name} before its last, in [0, {dims - 1}) or negative, got {head_axis}"
        )
    check_columns(tensor, name)
    return axis


@fake("rope")
def _fake(
    q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, interleaved: bool, partial_dim: Any,
    round_products: bool, sections: Any, head_axis: int, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    name, k_name = names(transposed)
    axis = _check_heads(q, name, head_axis)
    tokens = [s for i, s in enumerate(q.shape[:-1]) if i != axis]
    if k is not None:
        k_axis = _check_heads(k, k_name, head_axis)
        check_dtype_like(k, k_name, q, name)
        others = [s for i, s in enumerate(k.shape[:-1]) if i != k_axis]
        if k_axis != axis or others != tokens or k.shape[-1] != q.shape[-1]:
            sizes = ", ".join("num_kv_heads" if i == axis else str(s) for i, s in enumerate(q.shape))
            raise ValueError(
                f"{k_name}: expected shape [{sizes}] (that of {name} but for the heads), got {list(k.shape)}"
            )
    rotary_dim = q.shape[-1] if partial_dim is None else partial_dim
    if partial_dim is None and rotary_dim % 2:
        raise ValueError(f"{name}: expected an even last dimension, or a partial_dim, got shape {list(q.shape)}")
    if partial_dim is not None and (rotary_dim < 2 or rotary_dim % 2 or rotary_dim > q.shape[-1]):
        raise ValueError(
            f"partial_dim: expected an even number in [2, {q.shape[-1]}] (the last dimension of {name}), got "
            f"{partial_dim}"
        )
    if sections is not None and (len(sections) != 3 or min(sections) < 0 or sum(sections) != rotary_dim // 2):
        raise ValueError(
            f"mrope_sections: expected None or three sizes of sections, integers >= 0 that sum to {rotary_dim // 2} "
            f"(half the rotated columns), got {sections}"
        )
    _check_angles(cos, sin, position_ids, q, name, rotary_dim, tokens, sections is not None)
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


def _check_angles(
    cos: Tensor, sin: Tensor, position_ids: Any, q: Tensor, q_name: str, rotary_dim: int, tokens: list[int],
    has_sections: bool,
) -> None:  # fmt: skip
    for angles, name in ((cos, "cos"), (sin, "sin")):
        check_float32_or(angles, name, q.dtype, f" (that of {q_name})")
        if angles.dim() == 0:
            raise ValueError(f"{name}: expected a last dimension of angles, got shape []")
        check_columns(angles, name)
    check_dtype_like(sin, "sin", cos, "cos")
    widths = f"{rotary_dim} or {rotary_dim // 2}"
    if cos.shape[-1] != rotary_dim and cos.shape[-1] != rotary_dim // 2:
        raise ValueError(
            f"cos: expected a last dimension of {widths} (the rotated columns or their pairs), got shape "
            f"{list(cos.shape)}"
        )
    if tuple(sin.shape) != tuple(cos.shape):
        raise ValueError(f"sin: expected shape {list(cos.shape)} (that of cos), got {list(sin.shape)}")
    leading = [3, *tokens] if has_sections else tokens
    if position_ids is None:
        indexed, name, last = cos, "cos", [cos.shape[-1]]
    else:
        indexed, name, last = position_ids, "position_ids", []
        if position_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"position_ids: expected dtype int32 or int64, got {dtype_name(position_ids.dtype)}")
        if cos.dim() != 2:
            raise ValueError(
                f"cos: expected a table [max_position, {widths}] beside position_ids, got shape {list(cos.shape)}"
            )
    shape, first = indexed.shape[: indexed.dim() - len(last)], len(leading) - len(tokens)
    right = len(shape) == len(leading) and (not has_sections or shape[0] == 3)
    if not right or any(s not in (n, 1) for s, n in zip(shape[first:], tokens, strict=True)):
        after = ", after one of the sections" if has_sections else ""
        raise ValueError(
            f"{name}: expected shape {[*leading, *last]} (the dimensions of {q_name} but for head_axis and the last, "
            f"each of which may be 1{after}), got {list(indexed.shape)}"
        )


# ---- derivatives ----------------------------------------------------------------------------------------------------

Rotate = Callable[[Tensor, Any], tuple[Any, Any]]


def each(rotate: Rotate, q: Any, k: Any, dtype: torch.dtype, transposed: bool = True) -> tuple[Any, Any]:
    """``rotate`` of gradients or tangents, either of which may be None: a head minds no other."""
    # Two dimensions of tokens have any strides; more are contiguous, as the outputs are, and merge as these do.
    q, k = (
        None if t is None else gradient(t, dtype, name, dims=4)
        for t, name in zip((q, k), names(transposed), strict=True)
    )
    if q is None and k is None:
        return None, None
    if q is None:
        return None, rotate(k, None)[0]
    return rotate(q, k)


def require_constants(cos: bool, sin: bool, what: str = "gets no gradient") -> None:
    """``cos``, ``sin``: whether a derivative in it is wanted."""
    for name, wanted in (("cos", cos), ("sin", sin)):
        if wanted:
            raise ValueError(f"{name}: is a constant of the rotation and {what}; pass {name}.detach()")


def rope(
    q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, interleaved: bool, partial_dim: Any,
    round_products: bool, sections: Any, head_axis: Any, transposed: bool,
) -> tuple[Any, Any]:  # fmt: skip
    head_axis = _check.integer("head_axis", head_axis)
    partial_dim = None if partial_dim is None else _check.integer("partial_dim", partial_dim)
    if sections is not None:
        if not isinstance(sections, (tuple, list)):
            raise TypeError(f"mrope_sections: expected None or three sizes of sections, got {type(sections).__name__}")
        sections = [_check.integer("mrope_sections", s) for s in sections]
    if head_axis >= 0 and head_axis < q.dim():
        head_axis -= q.dim()  # counted from the end, it stands wherever a batch is put in front
    q_out, k_out = apply_function(
        _ops.rope, "Rope", q, k, cos, sin, position_ids, interleaved, partial_dim, round_products,
        sections, head_axis, transposed,
    )  # fmt: skip
    return q_out, None if k is None else k_out


@callable_in_graph
class Rope(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.rope(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = tuple(inputs[5:])
        ctx.shapes = tuple(None if t is None else t.shape for t in inputs[:2])
        ctx.dtype = inputs[0].dtype
        ctx.save_for_backward(*inputs[2:5])
        ctx.save_for_forward(*inputs[2:5])
        if inputs[1] is None:
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dq_out: Any, dk_out: Any) -> Any:
        *options, transposed = ctx.options
        arguments: tuple[Any, ...] = (*ctx.saved_tensors, *options, not transposed)
        needs_q, needs_k, needs_cos, needs_sin = ctx.needs_input_grad[:4]
        require_constants(needs_cos, needs_sin)  # of the registered operator; rope has asked before
        dq, dk = each(
            lambda q, k: rope(q, k, *arguments),
            dq_out if needs_q else None,
            dk_out if needs_k else None,
            ctx.dtype,
        )
        return dq, dk, None, None, None, None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        q, k, cos, sin, position_ids, *options = inputs
        if position_ids is not None and tuple(in_dims[2:4]) != (None, None):  # tables for each element
            return looped(Rope.apply, info, in_dims, inputs), (0, 0)
        q, k = batched(info, in_dims[:2], (q, k))
        if position_ids is None:
            cos, sin = _batched_tokens(info, in_dims[2:4], (cos, sin), options)
        else:
            (position_ids,) = _batched_tokens(info, in_dims[4:5], (position_ids,), options)
        outputs = Rope.apply(q, k, cos, sin, position_ids, *options)
        return outputs, (0, None if k is None else 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        require_constants(tangents[2] is not None, tangents[3] is not None, "carries no tangent")
        constants = ctx.saved_tensors
        pushed = each(
            lambda q, k: rope(q, k, *constants, *ctx.options), tangents[0], tangents[1], ctx.dtype, ctx.options[-1]
        )
        return tuple(
            constants[0].new_zeros(shape, dtype=ctx.dtype) if t is None and shape is not None else t
            for t, shape in zip(pushed, ctx.shapes, strict=True)
        )


def _batched_tokens(info: Any, in_dims: Any, tensors: Any, options: Any) -> list[Tensor]:
    """With the batch in front of the tokens, which is behind the dimension of sections."""
    moved = batched(info, in_dims, tensors)
    return moved if options[3] is None else [t.movedim(0, 1).contiguous() for t in moved]
