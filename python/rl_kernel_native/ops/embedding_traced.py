"""embedding as torch operators: what torch.compile, export, FakeTensor and torch.func see, with its derivatives.

The table's rows depend on it linearly, and so does its gradient on dy: derivatives of any order are the two operators
themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _main_grad
from .._dispatch import count_write
from .._in_graph import apply, callable_in_graph
from .._main_grad import is_asked_for
from .._native import module as _C
from .._register import define, fake, implement
from .._shapes import check_columns_below, check_ids, check_narrowing, check_rows, dtype_name, is_static
from .._torch import CODES, apply_function, gradient, memory, prepare, rows_of
from .._transforms import batched, looped

_WHERE = "SymInt vocab_start, SymInt? vocab_size, SymInt? padding_idx"
define(f"embedding(Tensor ids, Tensor weight, {_WHERE}) -> Tensor")
define(f"embedding_backward(Tensor dy, Tensor ids, SymInt num_rows, {_WHERE}, ScalarType dtype) -> Tensor")
define(f"embedding_backward_(Tensor(a!) main_grad, Tensor dy, Tensor ids, SymInt num_rows, {_WHERE}) -> ()")
_ops = torch.ops.rl_kernel_native

Where = tuple[int, int | None, int | None]  # vocab_start, vocab_size, padding_idx


def _forward_kernel(ids: Tensor, weight: Tensor, *where: Any) -> Tensor:
    prepare(weight)
    y: Tensor = _C.embedding(memory(ids), memory(weight), *where, None, 0)
    return y


def _backward_kernel(dy: Tensor, ids: Tensor, num_rows: int, *rest: Any) -> Tensor:
    *where, dtype = rest
    prepare(dy)
    dweight: Tensor = _C.embedding_backward(
        memory(dy), memory(ids), num_rows, *where, None, CODES.get(dtype, -1), None, 0
    )
    return dweight


def _backward_into(main_grad: Tensor, dy: Tensor, ids: Tensor, num_rows: int, *where: Any) -> None:
    prepare(dy)
    _C.embedding_backward(memory(dy), memory(ids), num_rows, *where, main_grad.detach(), -1, None, 0)
    count_write(main_grad)


def _differentiable_forward(ids: Tensor, weight: Tensor, *where: Any) -> Any:
    return apply("Embedding", ids, weight, *where, weight.dtype, None)


implement("embedding", _forward_kernel, _differentiable_forward)
implement("embedding_backward", _backward_kernel, functools.partial(apply, "EmbeddingBackward"))
implement("embedding_backward_", _backward_into)


# ---- shapes and dtypes, in the words of the extension ---------------------------------------------------------------


def _check_vocabulary(num_rows: Any, vocab_start: Any, vocab_size: Any, padding_idx: Any) -> None:
    if not all(n is None or type(n) is int for n in (num_rows, vocab_start, vocab_size, padding_idx)):
        return
    for name, value in (("vocab_start", vocab_start), ("vocab_size", vocab_size)):
        if value is not None and value < 0:
            raise ValueError(f"{name}: expected an integer >= 0, got {value}")
    if vocab_start + num_rows >= 1 << 63:
        raise ValueError(f"vocab_start: expected vocab_start + rows in 64 bits, got {vocab_start}")
    size = vocab_start + num_rows if vocab_size is None else vocab_size
    if vocab_start > size:
        raise ValueError(f"vocab_start: expected an id in [0, {size}] (vocab_size), got {vocab_start}")
    if padding_idx is not None and not 0 <= padding_idx < size:
        raise ValueError(f"padding_idx: expected None or an id in [0, {size}) (vocab_size), got {padding_idx}")


@fake("embedding")
def _forward_fake(ids: Tensor, weight: Tensor, *where: Any) -> Tensor:
    check_rows(weight, "weight")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected shape [rows, columns], got {list(weight.shape)}")
    check_columns_below(weight, "weight", 31)
    check_ids(ids, "ids")
    _check_vocabulary(weight.shape[0], *where)
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _check_backward(dy: Tensor, ids: Tensor, num_rows: Any, *where: Any) -> None:
    check_rows(dy, "dy")
    check_columns_below(dy, "dy", 31)
    check_ids(ids, "ids")
    if tuple(ids.shape) != tuple(dy.shape[:-1]):
        raise ValueError(
            f"ids: expected shape {list(dy.shape[:-1])} (the leading dimensions of dy), got {list(ids.shape)}"
        )
    if type(num_rows) is int and num_rows < 0:
        raise ValueError(f"num_rows: expected an integer >= 0, got {num_rows}")
    _check_vocabulary(num_rows, *where)


@fake("embedding_backward")
def _backward_fake(dy: Tensor, ids: Tensor, num_rows: Any, *rest: Any) -> Tensor:
    *where, dtype = rest
    _check_backward(dy, ids, num_rows, *where)
    check_narrowing("dweight_dtype", dtype, dy.dtype)
    return dy.new_empty((num_rows, dy.shape[-1]), dtype=dtype)


@fake("embedding_backward_")
def _backward_into_fake(main_grad: Tensor, dy: Tensor, ids: Tensor, num_rows: Any, *where: Any) -> None:
    _check_backward(dy, ids, num_rows, *where)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad: expected dtype float32, got {dtype_name(main_grad.dtype)}")
    if is_static(main_grad) and type(num_rows) is int and tuple(main_grad.shape) != (num_rows, dy.shape[-1]):
        raise ValueError(
            f"main_grad: expected shape [{num_rows}, {dy.shape[-1]}] (num_rows, columns of dy), got "
            f"{list(main_grad.shape)}"
        )


# ---- derivatives ----------------------------------------------------------------------------------------------------


def embedding(
    ids: Tensor, weight: Tensor, vocab_start: int, vocab_size: Any, padding_idx: Any, weight_dtype: torch.dtype,
    main_grad: Any,
) -> Any:  # fmt: skip
    arguments = (ids, weight, vocab_start, vocab_size, padding_idx)
    return apply_function(_ops.embedding, "Embedding", *arguments, more=(weight_dtype, main_grad))


def backward(dy: Tensor, ids: Tensor, num_rows: int, where: Where, dtype: torch.dtype) -> Any:
    arguments = (dy, ids, num_rows, *where, dtype)
    return apply_function(_ops.embedding_backward, "EmbeddingBackward", *arguments)


def wanted(ctx: Any) -> bool:
    """Whether the running backward asks for the gradient of weight."""
    return bool(ctx.needs_input_grad[1]) and (
        ctx.main_grad is None or is_asked_for(ctx.next_functions[1][0], ctx.main_grad)
    )


def gradients(dy: Tensor, ids: Tensor, num_rows: int, where: Where, weight_dtype: torch.dtype, main_grad: Any) -> Any:
    """dweight, where main_grad does not take it, through the dispatcher."""
    if main_grad is None:
        return backward(dy, ids, num_rows, where, weight_dtype)
    _main_grad.require_addable(dy, main_grad)
    _ops.embedding_backward_(main_grad, dy, ids, num_rows, *where)
    return None


def _gathered(rows: Tensor, ids: Tensor, num_rows: Any, where: Any) -> Tensor:
    """Rows of what has the shape of dweight by the tokens that it is a sum of; zeros for the others."""
    vocab_start, vocab_size, padding_idx = where
    # As ids of a table that begins at id 1: id 0 is another rank's.
    of_rows = ids - vocab_start + 1
    owned = (ids >= vocab_start) & (of_rows <= num_rows)
    if vocab_size is not None:
        owned = owned & (ids < vocab_size)
    if padding_idx is not None:
        owned = owned & (ids != padding_idx)
    found: Tensor = embedding(of_rows.where(owned, 0), rows_of(rows), 1, num_rows + 1, None, rows.dtype, None)
    return found


@callable_in_graph
class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ids: Tensor, weight: Tensor, vocab_start: int, vocab_size: Any, padding_idx: Any, weight_dtype: torch.dtype,
        main_grad: Any,
    ) -> Any:  # fmt: skip
        return _ops.embedding(ids, weight, vocab_start, vocab_size, padding_idx)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ids, weight = inputs[:2]
        ctx.where = tuple(inputs[2:5])
        ctx.weight_dtype, ctx.main_grad = inputs[5:]
        ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        dweight = None
        if wanted(ctx):
            dy = gradient(dy, ctx.dtype)
            dweight = gradients(dy, ids, ctx.num_rows, ctx.where, ctx.weight_dtype, ctx.main_grad)
        return None, dweight, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        if in_dims[1] is not None:
            return looped(Embedding.apply, info, in_dims, inputs), 0
        ids, weight, *rest = inputs
        (ids,) = batched(info, in_dims[:1], (ids,))
        return Embedding.apply(ids, weight, *rest), 0

    @staticmethod
    def jvp(ctx: Any, _: Any, dweight: Any, *__: Any) -> Any:
        (ids,) = ctx.saved_tensors
        return apply("Embedding", ids, rows_of(dweight), *ctx.where, ctx.weight_dtype, None)


@callable_in_graph
class EmbeddingBackward(torch.autograd.Function):
    """The native backward, itself differentiable in dy (create_graph)."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.embedding_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, ids, ctx.num_rows = inputs[:3]
        ctx.where = tuple(inputs[3:6])
        ctx.dtype, ctx.of_dy = inputs[6], dy.dtype
        ctx.save_for_backward(ids)
        ctx.save_for_forward(ids)

    @staticmethod
    def backward(ctx: Any, ddweight: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return _gathered(ddweight, ids, ctx.num_rows, ctx.where).to(ctx.of_dy), None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return looped(EmbeddingBackward.apply, info, in_dims, inputs), 0

    @staticmethod
    def jvp(ctx: Any, ddy: Any, *_: Any) -> Any:
        (ids,) = ctx.saved_tensors
        return apply("EmbeddingBackward", rows_of(ddy), ids, ctx.num_rows, *ctx.where, ctx.dtype)
