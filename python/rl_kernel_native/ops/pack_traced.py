"""pack and unpack as torch operators: what torch.compile, export, FakeTensor and torch.func see, with derivatives.

Both are linear; the gradient of each is the other, of zeros where there is no token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import LIBRARY, define, fake, implement
from .._shapes import check_mask, check_offsets, dtype_name, is_static
from .._torch import apply_function, memory, prepare
from .._transforms import looped
from .pack_fill import fill_bits, is_zero

MOST = 8  # tensors of one call

# positions is an empty tensor where there are lengths.
define("pack_layout(Tensor? lengths, Tensor? mask, SymInt num_tokens, SymInt capacity) -> (Tensor, Tensor, Tensor)")
define(
    "pack(Tensor[] tensors, Tensor cu_seqlens, Tensor? positions, SymInt num_tokens, SymInt capacity, Scalar[] fill, "
    "bool covered) -> Tensor[]"
)
define("unpack(Tensor[] tensors, Tensor cu_seqlens, Tensor? positions, SymInt num_tokens, Scalar[] fill) -> Tensor[]")
_ops = torch.ops.rl_kernel_native


def move(
    tensors: list[Any], cu_seqlens: Tensor, positions: Any, unpacks: bool, covered: bool, num_tokens: int,
    capacity: int, fills: list[int | float],
) -> list[Any]:  # fmt: skip
    """The extension's call on plain tensors."""
    bits = [0 if is_zero(f) else fill_bits(f, dtype_name(t.dtype)) for f, t in zip(fills, tensors, strict=True)]
    found: list[Any] = _C.pack(tensors, cu_seqlens, positions, unpacks, covered, num_tokens, capacity, bits, None, 0)
    return found


def _layout_kernel(lengths: Any, mask: Any, num_tokens: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    prepare(mask if lengths is None else lengths)
    found = _C.pack_layout(memory(lengths), memory(mask), num_tokens, capacity, None, 0)
    return found[0], found[0].new_empty(0) if found[1] is None else found[1], found[2]


def _pack_kernel(
    tensors: list[Tensor], cu_seqlens: Tensor, positions: Any, num_tokens: int, capacity: int, fill: list[int | float],
    covered: bool,
) -> list[Tensor]:  # fmt: skip
    prepare(cu_seqlens)
    operands = [memory(t) for t in tensors]
    return move(operands, memory(cu_seqlens), memory(positions), False, covered, num_tokens, capacity, fill)


def _unpack_kernel(
    tensors: list[Tensor], cu_seqlens: Tensor, positions: Any, num_tokens: int, fill: list[int | float]
) -> list[Tensor]:
    prepare(cu_seqlens)
    operands = [memory(t) for t in tensors]
    return move(operands, memory(cu_seqlens), memory(positions), True, True, num_tokens, 0, fill)


def _filled(tensors: list[Any]) -> list[Any]:
    return tensors + [None] * (MOST - len(tensors))


def _differentiable_pack(tensors: list[Any], *how: Any) -> list[Any]:
    return list(apply("Pack", *how, *_filled(tensors)))


def _differentiable_unpack(tensors: list[Any], *how: Any) -> list[Any]:
    return list(apply("Unpack", *how, *_filled(tensors)))


implement("pack_layout", _layout_kernel)
implement("pack", _pack_kernel, _differentiable_pack)
implement("unpack", _unpack_kernel, _differentiable_unpack)

# is_grads_batched: torch loops over batches of an operator without lists; tensors of a list go one at a time.
define(
    "pack_one(Tensor tensor, Tensor cu_seqlens, Tensor? positions, SymInt num_tokens, SymInt capacity, Scalar fill, "
    "bool covered) -> Tensor"
)
define("unpack_one(Tensor tensor, Tensor cu_seqlens, Tensor? positions, SymInt num_tokens, Scalar fill) -> Tensor")


def _pack_one_kernel(tensor: Tensor, cu_seqlens: Tensor, positions: Any, num_tokens: int, capacity: int,
                     fill: int | float, covered: bool) -> Tensor:  # fmt: skip
    return _pack_kernel([tensor], cu_seqlens, positions, num_tokens, capacity, [fill], covered)[0]


def _unpack_one_kernel(
    tensor: Tensor, cu_seqlens: Tensor, positions: Any, num_tokens: int, fill: int | float
) -> Tensor:
    return _unpack_kernel([tensor], cu_seqlens, positions, num_tokens, [fill])[0]


def _pack_batched(tensors: list[Tensor], cu_seqlens: Tensor, positions: Any, num_tokens: int, capacity: int,
                  fill: list[int | float], covered: bool) -> list[Tensor]:  # fmt: skip
    how = (cu_seqlens, positions, num_tokens, capacity)
    return [_ops.pack_one(t, *how, f, covered) for t, f in zip(tensors, fill, strict=True)]


def _unpack_batched(
    tensors: list[Tensor], cu_seqlens: Tensor, positions: Any, num_tokens: int, fill: list[int | float]
) -> list[Tensor]:
    return [_ops.unpack_one(t, cu_seqlens, positions, num_tokens, f) for t, f in zip(tensors, fill, strict=True)]


implement("pack_one", _pack_one_kernel)
implement("unpack_one", _unpack_one_kernel)
LIBRARY.impl("pack", _pack_batched, "Batched")
LIBRARY.impl("unpack", _unpack_batched, "Batched")


def _layout_vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    return looped(_ops.pack_layout, info, in_dims, inputs), (0, 0, 0)


torch.library.register_vmap("rl_kernel_native::pack_layout", _layout_vmap, lib=LIBRARY)


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


@fake("pack_layout")
def _layout_fake(lengths: Any, mask: Any, num_tokens: Any, capacity: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = mask if lengths is None else lengths
    _check_counts(num_tokens, capacity)
    if lengths is not None:
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths: expected dtype int32 or int64, got {dtype_name(lengths.dtype)}")
        if lengths.dim() != 1 or (is_static(lengths) and not lengths.is_contiguous()):
            raise ValueError(
                f"lengths: expected a contiguous array of shape [num_sequences], got {list(lengths.shape)}"
            )
    else:
        if mask.dim() != 2:
            raise ValueError(f"mask: expected shape [num_sequences, {num_tokens}], got {list(mask.shape)}")
        check_mask(mask, (mask.shape[0], num_tokens), "tensors")
    cu_seqlens = given.new_empty(given.shape[0] + 1, dtype=torch.int32)
    positions = given.new_empty(0 if mask is None else mask.shape, dtype=torch.int32)
    return cu_seqlens, positions, given.new_empty(1, dtype=torch.int32)


def _check_tokens(tensor: Tensor, name: str, first: int) -> None:
    """Dimensions after those of tokens follow one another."""
    if not is_static(tensor) or tensor.numel() == 0:
        return
    elements = 1
    for i in range(tensor.dim() - 1, first - 1, -1):
        if tensor.shape[i] > 1 and tensor.stride(i) != elements:
            raise ValueError(
                f"{name}: expected contiguous dimensions after those of tokens, got stride {tensor.stride(i)} of "
                f"dimension {i}; make it contiguous: np.ascontiguousarray, or .contiguous() for torch"
            )
        elements *= tensor.shape[i]


def _check_counts(num_tokens: Any, capacity: Any, unpacks: bool = False) -> None:
    if type(num_tokens) is int and num_tokens >= 1 << 31:
        name, of_row = ("max_seqlen", "") if unpacks else ("tensors", " tokens a row")
        raise ValueError(f"{name}: expected fewer than 2^31{of_row}, got {num_tokens}")
    if type(capacity) is int and capacity >= 1 << 31:
        raise ValueError(f"max_tokens: expected fewer than 2^31 (cu_seqlens are int32), got {capacity}")


def _check_positions(positions: Any, cu_seqlens: Tensor, num_tokens: Any) -> None:
    if positions is None:
        return
    if positions.dtype != torch.int32:
        raise TypeError(f"positions: expected dtype int32, got {dtype_name(positions.dtype)}")
    if not is_static(positions) or not is_static(cu_seqlens) or type(num_tokens) is not int:
        return
    wanted = (cu_seqlens.shape[0] - 1, num_tokens)
    if tuple(positions.shape) != wanted or not positions.is_contiguous():
        raise ValueError(f"positions: expected a contiguous array of shape {list(wanted)}, got {list(positions.shape)}")


def _check_fills(tensors: list[Tensor], fill: list[int | float]) -> None:
    for t, f in zip(tensors, fill, strict=True):
        if type(f) in (int, float):  # which a trace knows
            fill_bits(f, dtype_name(t.dtype))


def _names(tensors: list[Tensor]) -> list[str]:
    return ["tensors"] if len(tensors) == 1 else [f"tensors[{i}]" for i in range(len(tensors))]


@fake("pack")
def _pack_fake(
    tensors: list[Tensor], cu_seqlens: Tensor, positions: Any, num_tokens: Any, capacity: Any, fill: list[int | float],
    covered: bool,
) -> list[Tensor]:  # fmt: skip
    check_offsets(cu_seqlens)
    _check_counts(num_tokens, 0)
    _check_positions(positions, cu_seqlens, num_tokens)
    for t, name in zip(tensors, _names(tensors), strict=True):
        rows = cu_seqlens.shape[0] - 1
        if t.dim() < 2 or (is_static(t) and is_static(cu_seqlens) and tuple(t.shape[:2]) != (rows, num_tokens)):
            raise ValueError(f"{name}: expected shape [{rows}, {num_tokens}, ...], got {list(t.shape)}")
        _check_tokens(t, name, 2)
    _check_fills(tensors, fill)
    return [t.new_empty((capacity, *t.shape[2:])) for t in tensors]


@fake("unpack")
def _unpack_fake(
    tensors: list[Tensor], cu_seqlens: Tensor, positions: Any, num_tokens: Any, fill: list[int | float]
) -> list[Tensor]:
    check_offsets(cu_seqlens)
    _check_counts(num_tokens, 0, unpacks=True)
    _check_positions(positions, cu_seqlens, num_tokens)
    for t, name in zip(tensors, _names(tensors), strict=True):
        if t.dim() < 1 or (is_static(t) and is_static(tensors[0]) and t.shape[0] != tensors[0].shape[0]):
            wanted = "num_tokens" if t is tensors[0] else tensors[0].shape[0]
            raise ValueError(f"{name}: expected shape [{wanted}, ...], got {list(t.shape)}")
        _check_tokens(t, name, 1)
    _check_fills(tensors, fill)
    return [t.new_empty((cu_seqlens.shape[0] - 1, num_tokens, *t.shape[1:])) for t in tensors]


@fake("pack_one")
def _pack_one_fake(tensor: Tensor, *how: Any) -> Tensor:
    *layout, fill, covered = how
    return _pack_fake([tensor], *layout, [fill], covered)[0]


@fake("unpack_one")
def _unpack_one_fake(tensor: Tensor, *how: Any) -> Tensor:
    *layout, fill = how
    return _unpack_fake([tensor], *layout, [fill])[0]


# ---- derivatives ----------------------------------------------------------------------------------------------------


def layout(lengths: Any, mask: Any, num_tokens: Any, capacity: Any) -> tuple[Any, Any, Any]:
    given = (None if x is None else x.detach() for x in (lengths, mask))  # a mask of floats may want a gradient
    cu_seqlens, positions, status = _ops.pack_layout(*given, num_tokens, capacity)
    return cu_seqlens, None if mask is None else positions, status


def pack(
    tensors: list[Any], cu_seqlens: Tensor, positions: Any, num_tokens: Any, capacity: Any, fill: list[int | float],
    covered: bool,
) -> list[Any]:  # fmt: skip
    how = (cu_seqlens, positions, num_tokens, capacity, fill, covered)
    return list(apply_function(_pack, "Pack", *how, *_filled(tensors)))


def _pack(*arguments: Any) -> Any:
    *how, fill, covered = arguments[:6]
    return _ops.pack([t for t in arguments[6:] if t is not None], *how, fill, covered)


def unpack(
    tensors: list[Any], cu_seqlens: Tensor, positions: Any, num_tokens: Any, fill: list[int | float]
) -> list[Any]:
    how = (cu_seqlens, positions, num_tokens, fill)
    return list(apply_function(_unpack, "Unpack", *how, *_filled(tensors)))


def _unpack(*arguments: Any) -> Any:
    return _ops.unpack([t for t in arguments[4:] if t is not None], *arguments[:4])


def _each(given: Any, function: Any) -> list[Any]:
    """``function`` of the tensors that are there, and None for the others."""
    present = [t.contiguous() for t in given if t is not None]
    found = iter(function(present) if present else ())
    return [None if t is None else next(found) for t in given]


def _say_outputs(ctx: Any, outputs: Any) -> None:
    """What jvp must know: torch takes None for the tangent of an output only where that has none, as of integers."""
    ctx.mark_non_differentiable(*(o for o in outputs if not _is_differentiable(o.dtype)))
    ctx.outputs = [(o.shape, o.dtype) for o in outputs]


def _is_differentiable(dtype: Any) -> bool:
    return bool(dtype.is_floating_point or dtype.is_complex)


def _tangents(ctx: Any, found: list[Any]) -> tuple[Any, ...]:
    device = ctx.saved_tensors[0].device
    return tuple(
        torch.zeros(shape, dtype=dtype, device=device) if t is None and _is_differentiable(dtype) else t
        for t, (shape, dtype) in zip(found, ctx.outputs, strict=False)
    )


@callable_in_graph
class Pack(torch.autograd.Function):
    @staticmethod
    def forward(
        cu_seqlens: Tensor, positions: Any, num_tokens: Any, capacity: Any, fill: Any, covered: bool, a: Any, b: Any,
        c: Any, d: Any, e: Any, f: Any, g: Any, h: Any,
    ) -> Any:  # fmt: skip
        tensors = [t for t in (a, b, c, d, e, f, g, h) if t is not None]
        return tuple(_ops.pack(tensors, cu_seqlens, positions, num_tokens, capacity, fill, covered))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        cu_seqlens, positions, *ctx.how = inputs[:6]
        _say_outputs(ctx, output)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cu_seqlens, positions)
        ctx.save_for_forward(cu_seqlens, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cu_seqlens, positions = ctx.saved_tensors

        def unpacked(given: list[Any]) -> list[Any]:
            return unpack(given, cu_seqlens, positions, ctx.how[0], [0.0] * len(given))

        found = _each(gradients, unpacked)
        return *(None,) * 6, *_filled(found)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        outputs = looped(Pack.apply, info, _flat_dims(in_dims), inputs)
        return outputs, (0,) * len(outputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        cu_seqlens, positions = ctx.saved_tensors
        num_tokens, capacity, _fill, covered = ctx.how

        def packed(given: list[Any]) -> list[Any]:
            return pack(given, cu_seqlens, positions, num_tokens, capacity, [0.0] * len(given), covered)

        return _tangents(ctx, _each(tangents[6:], packed))


@callable_in_graph
class Unpack(torch.autograd.Function):
    @staticmethod
    def forward(
        cu_seqlens: Tensor, positions: Any, num_tokens: Any, fill: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any,
        g: Any, h: Any,
    ) -> Any:  # fmt: skip
        tensors = [t for t in (a, b, c, d, e, f, g, h) if t is not None]
        return tuple(_ops.unpack(tensors, cu_seqlens, positions, num_tokens, fill))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        cu_seqlens, positions, ctx.num_tokens = inputs[:3]
        ctx.capacity = inputs[4].shape[0]
        _say_outputs(ctx, output)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cu_seqlens, positions)
        ctx.save_for_forward(cu_seqlens, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cu_seqlens, positions = ctx.saved_tensors

        def packed(given: list[Any]) -> list[Any]:
            return pack(given, cu_seqlens, positions, ctx.num_tokens, ctx.capacity, [0.0] * len(given), False)

        found = _each(gradients, packed)
        return *(None,) * 4, *_filled(found)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        outputs = looped(Unpack.apply, info, _flat_dims(in_dims), inputs)
        return outputs, (0,) * len(outputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        cu_seqlens, positions = ctx.saved_tensors

        def unpacked(given: list[Any]) -> list[Any]:
            return unpack(given, cu_seqlens, positions, ctx.num_tokens, [0.0] * len(given))

        return _tangents(ctx, _each(tangents[4:], unpacked))


def _flat_dims(in_dims: tuple[Any, ...]) -> list[Any]:
    """A list of numbers among the inputs has a list of dimensions: none."""
    return [None if isinstance(d, (list, tuple)) else d for d in in_dims]
