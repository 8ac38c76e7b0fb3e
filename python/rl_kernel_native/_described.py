"""Calls of the extension with tensors that have no memory. Such a call checks all its arguments and runs no kernel."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._native import module as _C
from ._torch import dtype_name, memory

_DEVICES = {"cuda": 10 if torch.version.hip else 2}  # DLPack's numbers; every other device counts as the CPU
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}
# Kinds of float8, in the order of DLPack's codes 7, 8, ...
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")


class _Unknown(Exception):
    """Raised if a trace does not know the number behind a symbol."""


class Described:
    """A tensor described by its device, dtype, sizes and strides. Other attributes are read from the tensor itself."""

    __dlpack_c_exchange_api__ = _C.described_api()
    is_cuda = True  # the extension then accepts every `exp` and `unit`; the running call checks them

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        name, _, kind = dtype_name(tensor.dtype).partition("_")
        code = 7 + _FLOAT8.index(kind) if kind in _FLOAT8 else _CODES.get(name.rstrip("0123456789"), 3)
        place = (_DEVICES.get(tensor.device.type, 1), tensor.device.index or 0, code, 8 * tensor.dtype.itemsize)
        numbers = (*place, tensor.dim(), *_known(tuple(tensor.shape)), *_known(tensor.stride()))
        self.layout = struct.pack(f"{len(numbers)}q", *numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def contiguous(self) -> Described:
        return Described(self._tensor.contiguous())

    def detach(self) -> Described:
        return self

    resolve_neg = resolve_conj = detach


def _known(x: Any) -> Any:
    """An argument in a form that the extension can check: symbols become the numbers that the trace has seen."""
    if isinstance(x, Tensor):
        return Described(memory(x))
    if isinstance(x, (tuple, list)):
        return type(x)(map(_known, x))
    if not isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return x
    if x.node.hint is None:
        raise _Unknown
    return x.node.hint


def check(call: Callable[..., Any], *arguments: Any) -> None:
    """Raises the error that the extension would raise for these arguments of ``call``. If a size is unknown, nothing is
    checked."""
    try:
        known = _known(arguments)
    except _Unknown:
        return
    call(*known)
