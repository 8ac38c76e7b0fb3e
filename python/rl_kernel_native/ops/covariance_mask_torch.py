"""covariance_mask and entropy_mask for torch tensors, and as a torch operator: what torch.compile, export and
FakeTensor see. It has no derivative: inputs are detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._constants import call_constant
from .._native import module as _C
from .._shapes import check_first, check_mask, check_tokens
from .._torch import implement, memory, prepare
from .covariance_mask import ENTROPY

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_library.define(  # a SymInt: a compiled step is not compiled again for its seed
    "covariance_mask(Tensor logprob, Tensor? old_logprob, Tensor? advantage, Tensor? mask, Tensor? cu_seqlens, "
    "int kind, float ratio, float lower, float upper, float clip_low, float clip_high, SymInt seed) -> Tensor"
)


def call(tensors: dict[str, Any], options: tuple[Any, ...]) -> Tensor:
    found: Tensor = call_constant(_C.covariance_mask, "covariance_mask", tensors, options)
    return found


def _kernel(
    logprob: Tensor, old_logprob: Any, advantage: Any, mask: Any, cu_seqlens: Any, kind: int, ratio: float,
    lower: float, upper: float, clip_low: float, clip_high: float, seed: int,
) -> Tensor:  # fmt: skip
    prepare(logprob)
    operands = map(memory, (logprob, old_logprob, advantage, mask, cu_seqlens))
    found: Tensor = _C.covariance_mask(
        *operands, kind, ratio, lower, upper, clip_low, clip_high, int(seed), None, 0
    )  # fmt: skip
    return found


implement(_library, "covariance_mask", _kernel)


@torch.library.register_fake("rl_kernel_native::covariance_mask", lib=_library)
def _fake(
    logprob: Tensor, old_logprob: Any, advantage: Any, mask: Any, cu_seqlens: Any, kind: int, _ratio: float,
    _lower: float, _upper: float, _clip_low: float, _clip_high: float, _seed: Any,
) -> Tensor:  # fmt: skip
    name = "entropy" if kind == ENTROPY else "logprob"
    sequences = check_first(logprob, name, cu_seqlens)
    check_tokens(old_logprob, "old_logprob", logprob, name)
    if kind != ENTROPY and advantage is None:
        raise TypeError("advantage: expected an array that speaks DLPack, got NoneType")
    check_tokens(advantage, "advantage", logprob, name, sequences)
    check_mask(mask, logprob.shape, name)
    return logprob.new_empty(logprob.shape)
