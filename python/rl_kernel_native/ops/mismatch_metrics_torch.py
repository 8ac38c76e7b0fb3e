"""mismatch_metrics for torch tensors, and as a torch operator: what torch.compile, export and FakeTensor see. It has no
derivative: inputs are detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._constants import call_constant
from .._native import module as _C
from .._shapes import check_first, check_mask, check_tokens
from .._torch import implement, memory, prepare
from .mismatch_metrics import MismatchMetrics

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_library.define(
    "mismatch_metrics(Tensor logprob_train, Tensor logprob_rollout, Tensor? mask, Tensor? cu_seqlens, float limit) "
    "-> Tensor"
)


def call(tensors: dict[str, Any], options: tuple[Any, ...]) -> Tensor:
    found: Tensor = call_constant(_C.mismatch_metrics, "mismatch_metrics", tensors, options)
    return found


def _kernel(logprob_train: Tensor, logprob_rollout: Tensor, mask: Any, cu_seqlens: Any, limit: float) -> Tensor:
    prepare(logprob_train)
    operands = map(memory, (logprob_train, logprob_rollout, mask, cu_seqlens))
    found: Tensor = _C.mismatch_metrics(*operands, limit, None, 0)
    return found


implement(_library, "mismatch_metrics", _kernel)


@torch.library.register_fake("rl_kernel_native::mismatch_metrics", lib=_library)
def _fake(logprob_train: Tensor, logprob_rollout: Tensor, mask: Any, cu_seqlens: Any, _limit: float) -> Tensor:
    check_first(logprob_train, "logprob_train", cu_seqlens)
    check_tokens(logprob_rollout, "logprob_rollout", logprob_train, "logprob_train")
    check_mask(mask, logprob_train.shape, "logprob_train")
    return logprob_train.new_empty(len(MismatchMetrics.names))
