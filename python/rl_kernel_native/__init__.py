"""RL post-training operators for LLMs that give the same bits in rollout and training.

Importing the package loads the native extension and NumPy, never torch. The torch operators, under
torch.ops.rl_kernel_native, are registered at once where torch is loaded already, else with the first torch tensor.
"""

from __future__ import annotations

from . import _dispatch, _native, _variants
from ._arithmetic import arithmetic, current_arithmetic
from .ops.logprob import (
    LogprobResult,
    LogprobStatus,
    logprob,
    logprob_backward,
    logprob_merge,
    logprob_partial,
    logprob_reference,
)

if _dispatch.torch_module() is not None:
    from .ops import logprob_torch  # noqa: F401 - torch is there already: register the operators that exports name

__version__: str = _native.module.version
variant: str = _native.module.variant
_variants.warn_of_conflict(variant)

__all__ = [
    "LogprobResult",
    "LogprobStatus",
    "arithmetic",
    "current_arithmetic",
    "logprob",
    "logprob_backward",
    "logprob_merge",
    "logprob_partial",
    "logprob_reference",
    "variant",
]
