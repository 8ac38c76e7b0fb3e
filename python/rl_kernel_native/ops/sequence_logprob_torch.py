"""sequence_logprob for torch tensors.

An eager call goes straight to the extension; with a gradient wanted, through one autograd.Function. Whatever traces or
transforms (torch.compile, FakeTensor and other modes, torch.func, subclasses) goes through sequence_logprob_traced.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._native import module as _C
from .._torch import (
    CODES,
    PLAIN,
    Eager,
    gradient,
    is_compiling,
    is_direct,
    is_direct_gradient,
    is_grad_enabled,
    prepare,
    require_tensors,
    wants_grad,
)
from . import sequence_logprob_traced as traced

__all__ = ["PLAIN", "backward", "is_compiling", "sequence_logprob"]


def sequence_logprob(logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> tuple[Any, Any, Any]:
    direct = is_direct(logprob, mask, cu_seqlens)
    if direct and not wants_grad(logprob):
        _torch.device_type(logprob, "logprob")
        prepare(logprob)
        found: tuple[Any, Any, Any] = _C.sequence_logprob(logprob, mask, cu_seqlens, return_status, None, 0)
        return found
    if not direct:
        require_tensors(logprob=logprob, optional={"mask": mask, "cu_seqlens": cu_seqlens})
        return traced.sequence_logprob(logprob, mask, cu_seqlens, return_status)
    outputs: tuple[Any, Any, Any] = _SequenceLogprob.run(logprob, mask, cu_seqlens, return_status)
    return outputs


class _SequenceLogprob(Eager):
    """Eager autograd. The old form of forward costs a third of what setup_context does."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor, mask: Any, cu_seqlens: Any, return_status: bool) -> Any:
        prepare(logprob)
        outputs = _C.sequence_logprob(logprob, mask, cu_seqlens, return_status, None, 0)
        ctx.save_for_backward(mask, cu_seqlens)
        ctx.how = (logprob.shape[-1], CODES[logprob.dtype])
        ctx.is_flat = logprob.dim() == 1
        ctx.mark_non_differentiable(*(o for o in outputs[1:] if o is not None))
        return outputs

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, *_: Any) -> Any:
        mask, cu_seqlens = ctx.saved_tensors
        if is_grad_enabled() or not is_direct_gradient(dsum):  # create_graph: a backward that has a backward
            require_tensors(dsum=dsum)
            found = traced.backward(gradient(dsum, torch.float32, "dsum"), mask, cu_seqlens, *ctx.how)
        else:
            dsum = gradient(dsum, torch.float32, "dsum")
            prepare(dsum)
            is_flat = ctx.is_flat and cu_seqlens is None
            found = _C.sequence_logprob_backward(dsum, mask, cu_seqlens, *ctx.how, is_flat, None, 0)
        return found.view(-1) if ctx.is_flat else found, None, None, None


def backward(dsum: Tensor, mask: Any, cu_seqlens: Any, num_tokens: int, code: int) -> Any:
    if is_direct(dsum, mask, cu_seqlens) and not wants_grad(dsum):
        prepare(dsum)
        is_flat = traced.is_flat(mask, cu_seqlens)
        return _C.sequence_logprob_backward(dsum, mask, cu_seqlens, num_tokens, code, is_flat, None, 0)
    require_tensors(dsum=dsum, optional={"mask": mask, "cu_seqlens": cu_seqlens})
    return traced.backward(dsum, mask, cu_seqlens, num_tokens, code)
