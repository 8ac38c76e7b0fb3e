"""rope as a torch operator: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

A rotation is linear, and its transpose is the same operator with `transposed` turned: so are all of its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._native import module as _C
from .._torch import is_compiling, prepare
from .linear_traced import CODES

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
# k_out is an empty tensor where there is no k.
_library.define(
    "rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, bool interleaved, int? partial_dim, "
    "bool round_products, int[]? mrope_sections, int head_axis, bool transposed) -> (Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native


def _kernel(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    prepare(q)
    tensors = (None if t is None else t.resolve_neg().detach() for t in (q, *arguments[:4]))
    q_out, k_out = _C.rope(*tensors, *arguments[4:], None, 0)
    return q_out, q.new_empty(0) if k_out is None else k_out


for _key in ("CPU", "CUDA"):
    _library.impl("rope", _kernel, _key)


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


@torch.library.register_fake("rl_kernel_native::rope", lib=_library)
def _fake(
    q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, interleaved: bool, partial_dim: Any,
    round_products: bool, sections: Any, head_axis: int, transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    name, k_name = ("dq_out", "dk_out") if transposed else ("q", "k")
    if q.dtype not in CODES:
        raise TypeError(f"{name}: expected dtype float32, bfloat16 or float16, got {q.dtype}")
    if q.dim() < 2:
        raise ValueError(f"{name}: expected shape [..., num_heads, head_dim], got {list(q.shape)}")
    axis = head_axis + q.dim() if head_axis < 0 else head_axis
    if not 0 <= axis < q.dim() - 1:
        raise ValueError(
            f"head_axis: expected an axis of {name} before its last, in [0, {q.dim() - 1}) or negative, got {head_axis}"
        )
    tokens = [s for i, s in enumerate(q.shape[:-1]) if i != axis]
    if k is not None:
        if k.dtype != q.dtype:
            raise TypeError(f"{k_name}: expected dtype {q.dtype} (that of {name}), got {k.dtype}")
        others = [s for i, s in enumerate(k.shape[:-1]) if i != axis]
        if k.dim() != q.dim() or others != tokens or k.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"{k_name}: expected shape {list(q.shape)} (that of {name} but for the heads), got {list(k.shape)}"
            )
    rotary_dim = q.shape[-1] if partial_dim is None else partial_dim
    if partial_dim is None and rotary_dim % 2:
        raise ValueError(f"{name}: expected an even last dimension, or a partial_dim, got shape {list(q.shape)}")
    if partial_dim is not None and (rotary_dim < 2 or rotary_dim % 2 or rotary_dim > q.shape[-1]):
        raise ValueError(f"partial_dim: expected an even number in [2, {q.shape[-1]}], got {partial_dim}")
    if sections is not None and (len(sections) != 3 or min(sections) < 0 or sum(sections) != rotary_dim // 2):
        raise ValueError(
            f"mrope_sections: expected None or three sizes of sections, integers >= 0 that sum to {rotary_dim // 2}, "
            f"got {sections}"
        )
    leading = tokens if sections is None else [3, *tokens]
    _check_angles(cos, sin, position_ids, q, rotary_dim, leading)
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


def _check_angles(cos: Tensor, sin: Tensor, position_ids: Any, q: Tensor, rotary_dim: int, leading: list[int]) -> None:
    if cos.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"cos: expected dtype torch.float32 or {q.dtype}, got {cos.dtype}")
    if sin.dtype != cos.dtype:
        raise TypeError(f"sin: expected dtype {cos.dtype} (that of cos), got {sin.dtype}")
    if cos.dim() == 0 or (cos.shape[-1] != rotary_dim and cos.shape[-1] != rotary_dim // 2):
        raise ValueError(
            f"cos: expected a last dimension of {rotary_dim} or {rotary_dim // 2}, got shape {list(cos.shape)}"
        )
    if tuple(sin.shape) != tuple(cos.shape):
        raise ValueError(f"sin: expected shape {list(cos.shape)} (that of cos), got {list(sin.shape)}")
    indexed, name, shape = (
        (cos, "cos", cos.shape[:-1]) if position_ids is None else (position_ids, "position_ids", None)
    )
    if position_ids is not None:
        if position_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"position_ids: expected dtype int32 or int64, got {position_ids.dtype}")
        if cos.dim() != 2:
            raise ValueError(f"cos: expected a table [max_position, width] beside position_ids, got {list(cos.shape)}")
    shape = indexed.shape if shape is None else shape
    if len(shape) != len(leading) or any(s not in (n, 1) for s, n in zip(shape, leading, strict=True)):
        raise ValueError(
            f"{name}: expected {leading} before the width, each of which may be 1, got shape {list(indexed.shape)}"
        )


# ---- derivatives ----------------------------------------------------------------------------------------------------

Rotate = Callable[[Tensor, Any], tuple[Any, Any]]


def operand(gradient: Tensor) -> Tensor:
    """What autograd made, in a layout that kernels read."""
    if is_compiling():  # which may not ask for strides in a backward; nothing happens where it is contiguous
        return gradient.contiguous()
    if gradient.is_neg():
        gradient = gradient.resolve_neg()
    readable = gradient.dim() <= 4 and (gradient.stride(-1) == 1 or gradient.shape[-1] <= 1)
    return gradient if readable else gradient.contiguous()


def each(rotate: Rotate, q: Any, k: Any) -> tuple[Any, Any]:
    """``rotate`` of gradients or tangents, either of which may be None: a head minds no other."""
    q, k = (None if t is None else operand(t) for t in (q, k))
    if q is None and k is None:
        return None, None
    if q is None:
        return None, rotate(k, None)[0]
    return rotate(q, k)


def rope(
    q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, interleaved: bool, partial_dim: Any,
    round_products: bool, sections: Any, head_axis: Any, transposed: bool,
) -> tuple[Any, Any]:  # fmt: skip
    for name, value in (("head_axis", head_axis), ("partial_dim", partial_dim)):
        if isinstance(value, bool) or not (hasattr(value, "__index__") or (value is None and name == "partial_dim")):
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if sections is not None:
        if not isinstance(sections, (tuple, list)):
            raise TypeError(f"mrope_sections: expected None or three sizes of sections, got {type(sections).__name__}")
        if not all(hasattr(s, "__index__") and not isinstance(s, bool) for s in sections):
            raise TypeError(f"mrope_sections: expected integers, got {sections}")
        sections = list(sections)
    if head_axis >= 0 and head_axis < q.dim():
        head_axis -= q.dim()  # counted from the end, it stands wherever a batch is put in front
    function = _TracedRope if is_compiling() else _TransformedRope
    q_out, k_out = function.apply(
        q, k, cos, sin, position_ids, interleaved, partial_dim, round_products, sections, head_axis, transposed
    )
    return q_out, None if k is None else k_out


class _TracedRope(torch.autograd.Function):
    """For torch.compile, which takes no jvp of one's own and needs every parameter by name."""

    @staticmethod
    def forward(
        q: Tensor, k: Any, cos: Tensor, sin: Tensor, position_ids: Any, interleaved: bool, partial_dim: Any,
        round_products: bool, sections: Any, head_axis: int, transposed: bool,
    ) -> Any:  # fmt: skip
        return _ops.rope(
            q, k, cos, sin, position_ids, interleaved, partial_dim, round_products, sections, head_axis, transposed
        )

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
        needs_q, needs_k = ctx.needs_input_grad[:2]
        dq, dk = each(
            lambda q, k: rope(q, k, *arguments),
            dq_out if needs_q else None,
            dk_out if needs_k else None,
        )
        return dq, dk, None, None, None, None, None, None, None, None, None


class _TransformedRope(_TracedRope):
    """For torch.func: with vmap and jvp."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        q, k, cos, sin, position_ids, *options = inputs
        sections = options[3]
        out_dims = (0, None if k is None else 0)

        def batched(tensor: Any, dim: Any, at: int = 0) -> Any:
            """With the batch in front, or behind the dimension of sections."""
            if tensor is None:
                return None
            if dim is None:
                shape = (*tensor.shape[:at], info.batch_size, *tensor.shape[at:])
                return tensor.unsqueeze(at).expand(shape).contiguous()
            return tensor.movedim(dim, at).contiguous()

        behind = 0 if sections is None else 1
        q, k = batched(q, in_dims[0]), batched(k, in_dims[1])
        if position_ids is None:
            cos, sin = batched(cos, in_dims[2], behind), batched(sin, in_dims[3], behind)
        elif in_dims[2] is None and in_dims[3] is None:
            position_ids = batched(position_ids, in_dims[4], behind)
        else:  # tables for each element: one call for each
            dims = (0, 0, *in_dims[2:5])
            tensors = (q, k, cos, sin, position_ids)
            outputs = []
            for i in range(info.batch_size):
                chosen = (t if t is None or d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True))
                outputs.append(rope(*chosen, *options))
            q_out = torch.stack([of_one[0] for of_one in outputs])
            k_out = q_out.new_empty(0) if k is None else torch.stack([of_one[1] for of_one in outputs])
            return (q_out, k_out), out_dims
        return _TransformedRope.apply(q, k, cos, sin, position_ids, *options), out_dims

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        for name, tangent in (("cos", tangents[2]), ("sin", tangents[3])):
            if tangent is not None:
                raise ValueError(f"{name}: is a constant of the rotation and carries no tangent; pass {name}.detach()")
        constants = ctx.saved_tensors
        pushed = each(lambda q, k: rope(q, k, *constants, *ctx.options), tangents[0], tangents[1])
        return tuple(
            constants[0].new_zeros(shape, dtype=ctx.dtype) if t is None and shape is not None else t
            for t, shape in zip(pushed, ctx.shapes, strict=True)
        )


__all__ = ["each", "operand", "rope"]
