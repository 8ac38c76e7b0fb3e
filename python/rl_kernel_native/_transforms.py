"""What operators share that torch traces and transforms: shapes in the words of the extension, batches, tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def memory(tensor: Any) -> Any:
    """The tensor with its numbers in memory; None passes."""
    return tensor if tensor is None else tensor.resolve_neg().detach()


def check_rows(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{name}: expected dtype float32, bfloat16 or float16, got {tensor.dtype}")
    if tensor.dim() < 1:
        raise ValueError(f"{name}: expected shape [..., features], got []")


def check_like(tensor: Any, name: str, like: Tensor, like_name: str) -> None:
    if tensor is None:
        return
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name}: expected dtype {like.dtype} (that of {like_name}), got {tensor.dtype}")
    if tuple(tensor.shape) != tuple(like.shape):
        raise ValueError(f"{name}: expected shape {list(like.shape)} (that of {like_name}), got {list(tensor.shape)}")


def batched(info: Any, in_dims: tuple[Any, ...], tensors: tuple[Any, ...]) -> list[Any]:
    """Tensors with the batch dimension first: the operators take any leading dimensions."""
    moved: list[Any] = []
    for x, dim in zip(tensors, in_dims, strict=True):
        if x is None:
            moved.append(None)
        elif dim is None:
            moved.append(x.unsqueeze(0).expand(info.batch_size, *x.shape).contiguous())
        else:
            moved.append(x.movedim(dim, 0).contiguous())
    return moved


def looped(apply: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """One call for each element of the batch."""
    outputs = []
    for i in range(info.batch_size):
        chosen = (x if d is None else x.select(d, i).contiguous() for x, d in zip(inputs, in_dims, strict=True))
        outputs.append(apply(*chosen))
    return tuple(torch.stack(o) for o in zip(*outputs, strict=True))


def present(tensors: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Those tensors that are there, and their tangents, zeros where there is none."""
    pairs = [(x, t) for x, t in zip(tensors, tangents, strict=True) if x is not None]
    return tuple(x for x, _ in pairs), tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)


def filled(tensors: tuple[Any, ...], present: tuple[Tensor, ...]) -> list[Any]:
    """``present`` in the places of the tensors that are there."""
    left = iter(present)
    return [None if t is None else next(left) for t in tensors]


def pushed(
    function: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Tangents of the outputs: the pullback, which is linear, pulled back. Forward mode does not nest in itself."""
    outputs, pullback, *_ = torch.func.vjp(function, *primals)
    zeros = tuple(torch.zeros_like(o) for o in outputs)
    _, push, *_ = torch.func.vjp(lambda *cotangents: pullback(cotangents), *zeros)
    found: tuple[Tensor, ...] = push(tangents)
    return found
