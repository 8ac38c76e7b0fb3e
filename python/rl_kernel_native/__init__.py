"""RL post-training operators for LLMs that give the same bits in rollout and training.

Importing the package loads the native extension and NumPy, never torch: whichever framework the arguments come from is
loaded already.
"""

from __future__ import annotations

from . import _native
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

__version__: str = _native.module.version
variant: str = _native.module.variant

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
