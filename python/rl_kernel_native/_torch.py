"""What every torch path asks of torch: whether a call may skip the dispatcher, and where a tensor lives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _dispatch
from ._native import module as _C

PLAIN = (Tensor, torch.nn.Parameter)
functorch_active = torch._C._are_functorch_transforms_active
_modes_active = torch._C._len_torch_dispatch_stack
is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled
_C.set_torch(functorch_active, _modes_active, is_grad_enabled, forward_ad)

_GPU = "rocm" if torch.version.hip else "cuda"


def is_untraced() -> bool:
    """Whether nothing traces or transforms what runs now, and no tensor can carry a tangent."""
    return not is_compiling() and not functorch_active() and _modes_active() == 0 and forward_ad._current_level < 0


def is_plain(tensor: Any) -> bool:
    """A tensor whose memory holds its numbers."""
    return type(tensor) in PLAIN and not tensor.is_neg() and not tensor.is_meta


def device_type(tensor: Tensor, name: str) -> str:
    """The backend's name for a tensor's device; a meta tensor counts as a CPU's."""
    if tensor.is_cuda:
        return _GPU
    if not tensor.is_cpu and not tensor.is_meta:
        raise TypeError(f"{name}: expected a tensor on a CPU, CUDA or ROCm device, got {tensor.device}")
    return "cpu"


def prepare(tensor: Tensor) -> None:
    """What a native call needs first: on the CPU, as many threads as torch uses."""
    if not tensor.is_cuda:
        _dispatch.match_torch_threads()


def is_direct(*tensors: Any) -> bool:
    """Whether the call may skip torch's dispatcher. What is no tensor is for the extension to refuse."""
    return is_untraced() and all(is_plain(t) for t in tensors if isinstance(t, Tensor))


def wants_grad(*tensors: Any) -> bool:
    return is_grad_enabled() and any(t.requires_grad for t in tensors if isinstance(t, Tensor))


def require_tensors(**tensors: Any) -> None:
    """For a call through the dispatcher, whose own words for a wrong argument are about schemas. The first decides on
    the device; None is an argument that may be left out."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if type(tensor).__name__ == "DTensor":
            raise TypeError(f"{name}: expected a local tensor, got a DTensor; pass tensor.to_local()")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name}: expected device {first.device}, got {tensor.device}")
