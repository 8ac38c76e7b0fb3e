"""masked_whiten for torch tensors, and as a torch operator: what torch.compile, export and FakeTensor see. It has no
derivative: inputs are detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._constants import call_constant, check_positive
from .._native import module as _C
from .._shapes import check_first, check_mask
from .._torch import implement, memory, prepare

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
# Statistics that are not asked for are empty tensors.
_library.define(
    "masked_whiten(Tensor x, Tensor? mask, Tensor? cu_seqlens, float eps, bool shift_mean, bool unbiased, "
    "bool return_stats) -> (Tensor, Tensor, Tensor)"
)


def call(tensors: dict[str, Any], options: tuple[Any, ...]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = call_constant(_C.masked_whiten, "masked_whiten", tensors, options)
    return found


def _kernel(x: Tensor, mask: Any, cu_seqlens: Any, *options: Any) -> tuple[Tensor, ...]:
    prepare(x)
    outputs = _C.masked_whiten(memory(x), memory(mask), memory(cu_seqlens), *options, None, 0)
    return tuple(x.new_empty(0) if output is None else output for output in outputs)


implement(_library, "masked_whiten", _kernel)


@torch.library.register_fake("rl_kernel_native::masked_whiten", lib=_library)
def _fake(
    x: Tensor, mask: Any, cu_seqlens: Any, eps: float, _shift_mean: bool, _unbiased: bool, return_stats: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_first(x, "x", cu_seqlens)
    check_positive("eps", eps)
    check_mask(mask, x.shape, "x")
    shape = () if return_stats else (0,)
    return x.new_empty(x.shape), x.new_empty(shape), x.new_empty(shape)
