"""group_advantage for torch tensors, and as a torch operator: what torch.compile, export and FakeTensor see. It has no
derivative: inputs are detached."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._constants import call_constant, check_positive, check_vector
from .._native import module as _C
from .._shapes import check_end, check_offsets
from .._torch import implement, memory, prepare

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
# baseline_kind, scale and alone are the contract's numbers. What is not asked for is an empty tensor.
_library.define(
    "group_advantage(Tensor rewards, Tensor? group_offsets, Tensor? group_ids, Tensor? lengths, Tensor? baseline, "
    "int group_size, int baseline_kind, int scale, int alone, bool leave_one_out, bool best_only, bool by_nonzero, "
    "bool exclude_nan, float eps, float f_norm, bool return_stats, bool return_status) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _native(
    rewards: Any, offsets: Any, ids: Any, lengths: Any, baseline: Any, size: int, *options: Any
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _C.group_advantage(rewards, offsets, ids, size, lengths, baseline, *options)
    return found


def call(tensors: dict[str, Any], size: int, more: dict[str, Any], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    outputs = call_constant(_native, "group_advantage", {**tensors, **more}, (size, *numbers))
    wanted = (True, numbers[-2], numbers[-2], numbers[-1])
    return tuple(output if want else None for output, want in zip(outputs, wanted, strict=True))


def _kernel(rewards: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    prepare(rewards)
    given = (memory(a) if isinstance(a, Tensor) else a for a in arguments)
    outputs = _native(memory(rewards), *given, None, 0)
    dtypes = (torch.float32, torch.float32, torch.float32, torch.int32)
    return tuple(
        rewards.new_empty(0, dtype=dtype) if output is None else output
        for output, dtype in zip(outputs, dtypes, strict=True)
    )


implement(_library, "group_advantage", _kernel)


@torch.library.register_fake("rl_kernel_native::group_advantage", lib=_library)
def _fake(
    rewards: Tensor, group_offsets: Any, group_ids: Any, lengths: Any, baseline: Any, group_size: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if rewards.dim() != 1:
        raise ValueError(f"rewards: expected shape [num_sequences], got {list(rewards.shape)}")
    num = rewards.shape[0]
    check_vector(rewards, "rewards", (torch.float32,), num, "num_sequences")
    indices = (torch.int32, torch.int64)
    if group_offsets is not None:
        check_offsets(group_offsets, "group_offsets", "num_groups")
        check_end(group_offsets, "group_offsets", num, "the number of sequences")
    elif group_ids is not None:
        check_vector(group_ids, "group_ids", indices, num, "num_sequences")
    elif type(num) is int and (group_size < 1 or num % group_size):
        raise ValueError(f"group_size: expected a divisor of {num} (the number of sequences), got {group_size}")
    if lengths is not None:
        check_vector(lengths, "lengths", (*indices, torch.float32), num, "num_sequences")
    if baseline is not None:
        check_vector(baseline, "baseline", (torch.float32,), num, "num_sequences")
    eps, f_norm, stats, status = options[-4:]
    _check.single("eps", eps, lambda x: 0 <= x < math.inf, "a finite number >= 0 in float32")
    check_positive("f_norm", f_norm)
    mean, std = (rewards.new_empty(num if stats else 0) for _ in range(2))
    return rewards.new_empty(num), mean, std, rewards.new_empty(num if status else 0, dtype=torch.int32)
