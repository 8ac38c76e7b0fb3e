"""RL post-training operators for LLMs that give the same bits in rollout and training.

Importing the package loads the native extension and NumPy, never torch. The torch operators, under
torch.ops.rl_kernel_native, are registered at once where torch is loaded already, else with the first torch tensor.
"""

from __future__ import annotations

from . import _dispatch, _native, _variants, presets
from ._arithmetic import arithmetic, checkpoint_contexts, current_arithmetic
from ._blas import canonical_blas
from .ops.linear import (
    linear,
    linear_bias_grad,
    linear_input_grad,
    linear_partial,
    linear_reference,
    linear_weight_grad,
    tree_sum,
)
from .ops.logprob import (
    LogprobResult,
    LogprobStatus,
    logprob,
    logprob_backward,
    logprob_merge,
    logprob_partial,
    logprob_reference,
)
from .ops.policy_loss import (
    PolicyGradients,
    PolicyLoss,
    PolicyMetrics,
    PolicySpec,
    policy_loss,
    policy_loss_and_grad,
    policy_loss_reference,
)
from .ops.rms_norm import rms_norm, rms_norm_backward, rms_norm_reference
from .ops.rope import rope, rope_backward, rope_reference
from .ops.silu_mul import (
    gelu_mul,
    gelu_mul_backward,
    gelu_mul_reference,
    silu_mul,
    silu_mul_backward,
    silu_mul_reference,
)

if _dispatch.torch_module() is not None:
    # torch is there already: register the operators that exports name.
    from .ops import linear_torch, logprob_torch, policy_loss_torch, rms_norm_torch, rope_torch, silu_mul_torch  # noqa: F401

__version__: str = _native.module.version
variant: str = _native.module.variant
_variants.warn_of_conflict(variant)
_dispatch.follow_omp_num_threads()

__all__ = [
    "LogprobResult",
    "LogprobStatus",
    "PolicyGradients",
    "PolicyLoss",
    "PolicyMetrics",
    "PolicySpec",
    "arithmetic",
    "canonical_blas",
    "checkpoint_contexts",
    "current_arithmetic",
    "gelu_mul",
    "gelu_mul_backward",
    "gelu_mul_reference",
    "linear",
    "linear_bias_grad",
    "linear_input_grad",
    "linear_partial",
    "linear_reference",
    "linear_weight_grad",
    "logprob",
    "logprob_backward",
    "logprob_merge",
    "logprob_partial",
    "logprob_reference",
    "policy_loss",
    "policy_loss_and_grad",
    "policy_loss_reference",
    "presets",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_reference",
    "rope",
    "rope_backward",
    "rope_reference",
    "silu_mul",
    "silu_mul_backward",
    "silu_mul_reference",
    "tree_sum",
    "variant",
]
