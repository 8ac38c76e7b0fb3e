"""optimal_token_baseline for torch tensors, and as a torch operator: what torch.compile, export and FakeTensor see. It
has no derivative: inputs are detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._constants import call_constant, check_positive
from .._native import module as _C
from .._shapes import check_end, check_first, check_mask, check_offsets, check_tokens
from .._torch import implement, memory, prepare

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_library.define(
    "optimal_token_baseline(Tensor logprob, Tensor rewards, Tensor sum_p_sq, Tensor? mask, Tensor? importance_weight, "
    "Tensor? cu_seqlens, Tensor? group_offsets, int group_size, bool zero_tail, float eps) -> (Tensor, Tensor)"
)


def call(tensors: dict[str, Any], options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = call_constant(
        _C.optimal_token_baseline, "optimal_token_baseline", tensors, options
    )  # fmt: skip
    return found


def _kernel(
    logprob: Tensor, rewards: Tensor, sum_p_sq: Tensor, mask: Any, importance_weight: Any, cu_seqlens: Any,
    group_offsets: Any, group_size: int, zero_tail: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    prepare(logprob)
    operands = map(memory, (logprob, rewards, sum_p_sq, mask, importance_weight, cu_seqlens, group_offsets))
    advantages, returns = _C.optimal_token_baseline(*operands, group_size, zero_tail, eps, None, 0)
    return advantages, returns


implement(_library, "optimal_token_baseline", _kernel)


@torch.library.register_fake("rl_kernel_native::optimal_token_baseline", lib=_library)
def _fake(
    logprob: Tensor, rewards: Tensor, sum_p_sq: Tensor, mask: Any, importance_weight: Any, cu_seqlens: Any,
    group_offsets: Any, group_size: int, _zero_tail: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sequences = check_first(logprob, "logprob", cu_seqlens)
    for name, tensor in (("rewards", rewards), ("sum_p_sq", sum_p_sq)):
        if tensor is None:
            raise TypeError(f"{name}: expected an array that speaks DLPack, got NoneType")
    check_tokens(rewards, "rewards", logprob, "logprob", sequences)
    check_tokens(sum_p_sq, "sum_p_sq", logprob, "logprob")
    check_tokens(importance_weight, "importance_weight", logprob, "logprob", sequences)
    check_mask(mask, logprob.shape, "logprob")
    if group_offsets is not None:
        check_offsets(group_offsets, "group_offsets", "num_groups")
        check_end(group_offsets, "group_offsets", sequences, "the number of sequences")
    elif type(sequences) is int and (group_size < 1 or sequences % group_size):
        raise ValueError(f"group_size: expected a divisor of {sequences} (the number of sequences), got {group_size}")
    check_positive("eps", eps)
    return logprob.new_empty(logprob.shape), logprob.new_empty(logprob.shape)
