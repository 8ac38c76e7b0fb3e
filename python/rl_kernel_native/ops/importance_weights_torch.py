"""importance_weights for torch tensors, and as a torch operator: what torch.compile, export and FakeTensor see. It has
no derivative: inputs are detached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._constants import call_constant
from .._shapes import check_first, check_mask, check_tokens
from .._torch import implement, memory, prepare
from .importance_weights import ImportanceMetrics, call_native

_library = torch.library.Library("rl_kernel_native", "FRAGMENT")
_library.define(
    "importance_weights(Tensor logprob, Tensor rollout_logprob, Tensor? mask, Tensor? cu_seqlens, float[] spec, "
    "bool metrics) -> (Tensor, Tensor, Tensor)"
)


def call(tensors: dict[str, Any], spec: tuple[float, ...], metrics: bool) -> tuple[Tensor, Tensor, Any]:
    """The metrics are None, or of a traced call empty, where they are not wanted."""
    found: tuple[Tensor, Tensor, Any] = call_constant(call_native, "importance_weights", tensors, (list(spec), metrics))
    return found


def _kernel(
    logprob: Tensor, rollout_logprob: Tensor, mask: Any, cu_seqlens: Any, spec: Any, metrics: bool
) -> tuple[Tensor, Tensor, Tensor]:
    prepare(logprob)
    operands = map(memory, (logprob, rollout_logprob, mask, cu_seqlens))
    weights, kept, vector = call_native(*operands, spec, metrics, None, 0)
    return weights, kept, logprob.new_empty(0) if vector is None else vector


implement(_library, "importance_weights", _kernel)


@torch.library.register_fake("rl_kernel_native::importance_weights", lib=_library)
def _fake(
    logprob: Tensor, rollout_logprob: Tensor, mask: Any, cu_seqlens: Any, _spec: Any, metrics: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_first(logprob, "logprob", cu_seqlens)
    check_tokens(rollout_logprob, "rollout_logprob", logprob, "logprob")
    check_mask(mask, logprob.shape, "logprob")
    vector = logprob.new_empty(len(ImportanceMetrics.names) if metrics else 0)
    return logprob.new_empty(logprob.shape), logprob.new_empty(logprob.shape), vector
