"""Torch operators that have no derivative, since what they compute are constants of a loss: their eager call, and what
their fake kernels ask of vectors and numbers, in the extension's words."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _check, _torch
from ._shapes import COPY, check_dtype, is_static
from ._torch import is_direct, is_plain, is_untraced, prepare, require_tensors


def call_constant(native: Any, name: str, tensors: dict[str, Any], options: tuple[Any, ...]) -> Any:
    """``tensors`` by name, in the order of the operator and of the extension's function; the first decides on the
    device. What requires a gradient is detached."""
    first = next(iter(tensors))
    values = tuple(tensors.values())
    if is_direct(*values):
        _torch.device_type(tensors[first], first)
        prepare(tensors[first])
        return native(*values, *options, None, 0)
    required = {first: tensors[first]}
    require_tensors(**required, optional={key: tensor for key, tensor in tensors.items() if key != first})
    if is_untraced() and not all(is_plain(t) for t in values if isinstance(t, Tensor)):
        _torch.device_type(tensors[first], first)
    detached = (t.detach() if isinstance(t, Tensor) else t for t in values)
    return getattr(torch.ops.rl_kernel_native, name)(*detached, *options)


def check_vector(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], count: Any, of: str) -> None:
    check_dtype(tensor, name, dtypes)
    if tensor.dim() != 1 or tensor.shape[0] != count:
        raise ValueError(f"{name}: expected shape [{count}] ({of}), got {list(tensor.shape)}")


def check_contiguous(tensor: Tensor, name: str) -> None:
    if is_static(tensor) and tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name}: expected contiguous elements (stride 1), got stride {tensor.stride(0)}{COPY}")


def check_positive(name: str, value: Any) -> None:
    """A number that the extension reads as float32."""
    _check.single(name, value, lambda x: 0 < x < math.inf, "a finite number > 0 in float32")


def check_share(name: str, value: Any) -> None:
    _check.single(name, value, lambda x: 0 <= x <= 1, "a number in [0, 1]")
