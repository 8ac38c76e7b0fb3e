"""RL post-training operators for LLMs that give the same bits in rollout and training.

Importing the package loads the native extension and NumPy, but never torch. The torch operators are under
torch.ops.rl_kernel_native. If torch is already loaded, the import registers these operators; else the first call with
a torch tensor registers them.

Docstrings name pages such as docs/numerics.md. An installed package has these pages in its own folder docs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _check, _cures, _dispatch, _native, _variants, ops, presets
from ._arithmetic import arithmetic, checkpoint_contexts, current_arithmetic
from ._blas import canonical_blas
from ._metrics import DenominatorStatus
from ._semantics import LogprobSemantics
from ._trace import trace
from ._workspace import WorkspaceStats, workspace_stats
from .consistency.api import compare
from .integrations import enable, patch_model, status, unpatch_model
from .ops.attention import AttentionResult, attention, attention_backward, attention_reference
from .ops.attention_merge import attention_merge, attention_merge_approximate
from .ops.attention_partials import (
    AttentionPartials,
    attention_merge_reference,
    attention_partials_reference,
    attention_splits,
)
from .ops.covariance_mask import covariance_mask, covariance_mask_reference
from .ops.embedding import embedding, embedding_backward, embedding_reference
from .ops.entropy_mask import entropy_mask, entropy_mask_reference
from .ops.gae import (
    GaeResult,
    discounted_returns,
    discounted_returns_reference,
    gae,
    gae_reference,
    vtrace,
    vtrace_reference,
)
from .ops.group_advantage import (
    GroupAdvantageResult,
    GroupAdvantageStatus,
    group_advantage,
    group_advantage_reference,
)
from .ops.importance_weights import (
    ImportanceMetrics,
    ImportanceWeights,
    ImportanceWeightsAndMetrics,
    importance_weights,
    importance_weights_reference,
)
from .ops.kl import KlGradients, kl, kl_backward, kl_reference
from .ops.kv_cache_append import kv_cache_append, kv_cache_append_reference
from .ops.linear import (
    linear,
    linear_bias_grad,
    linear_input_grad,
    linear_partial,
    linear_reference,
    linear_weight_grad,
    tree_sum,
)
from .ops.linear_cross_entropy import (
    CrossEntropy,
    CrossEntropyAccuracy,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from .ops.linear_logprob import (
    LinearLogprobPair,
    linear_logprob,
    linear_logprob_pair,
    linear_logprob_partial,
    linear_logprob_reference,
)
from .ops.linear_sample import linear_sample, linear_sample_reference
from .ops.logprob import (
    LogprobResult,
    LogprobStatus,
    logprob,
    logprob_backward,
    logprob_merge,
    logprob_partial,
    logprob_reference,
)
from .ops.masked_whiten import MaskedWhitenResult, masked_whiten, masked_whiten_reference
from .ops.mismatch_metrics import MismatchMetrics, mismatch_metrics, mismatch_metrics_reference
from .ops.optimal_token_baseline import (
    OptimalTokenBaseline,
    optimal_token_baseline,
    optimal_token_baseline_reference,
)
from .ops.pack import Packed, pack, pack_reference, unpack, unpack_reference
from .ops.policy_loss import (
    PolicyGradients,
    PolicyLoss,
    PolicyMetrics,
    PolicySpec,
    policy_loss,
    policy_loss_and_grad,
    policy_loss_reference,
)
from .ops.preference_loss import PreferenceLoss, PreferenceMetrics, preference_loss, preference_loss_reference
from .ops.process_logits import process_logits, process_logits_reference
from .ops.random_bits import random_bits, random_bits_reference
from .ops.rms_norm import rms_norm, rms_norm_backward, rms_norm_reference
from .ops.rope import rope, rope_backward, rope_reference
from .ops.sample import SampleResult, SampleStatus, sample, sample_reference
from .ops.sample_shards import sample_merge, sample_partial
from .ops.scatter_rewards import ScatteredRewards, scatter_rewards, scatter_rewards_reference
from .ops.sequence_logprob import (
    SequenceLogprob,
    SequenceLogprobAndStatus,
    sequence_logprob,
    sequence_logprob_backward,
    sequence_logprob_reference,
)
from .ops.shift_labels_packed import (
    loss_mask_from_spans,
    loss_mask_from_spans_reference,
    shift_labels_packed,
    shift_labels_packed_reference,
    tool_mask,
    tool_mask_reference,
)
from .ops.silu_mul import (
    gelu_mul,
    gelu_mul_backward,
    gelu_mul_reference,
    silu_mul,
    silu_mul_backward,
    silu_mul_reference,
)
from .ops.value_loss import (
    ValueGradients,
    ValueLoss,
    ValueMetrics,
    value_loss,
    value_loss_and_grad,
    value_loss_reference,
)
from .ops.verify_draft import DraftVerification, verify_draft

_native.require_no_others()
_native.module.set_python(_cures.of, _check.number, _check.integer64)
_cures.name_fields(
    PolicyLoss, PolicyGradients, PreferenceLoss, ValueLoss, ValueGradients, CrossEntropy, CrossEntropyAccuracy,
    SequenceLogprob, SequenceLogprobAndStatus,
)  # fmt: skip
if _dispatch.torch_module() is not None:
    # torch is already loaded: register its operators now, because exported programs refer to them by name.
    ops.register_torch_operators()


if TYPE_CHECKING:
    from . import jax as jax
    from . import nn as nn
else:

    def __getattr__(name: str) -> Any:
        """Imports ``rk.nn`` and ``rk.jax`` when they are first used, because they need torch and JAX."""
        if name == "nn":
            return importlib.import_module(f"{__name__}.nn")
        if name == "jax":
            with _variants.needed("rk.jax: expected jax", "pip install jax", "jax"):
                return importlib.import_module(f"{__name__}.jax")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__: str = _native.module.version
variant: str = _native.module.variant
_variants.warn_of_conflict(variant)
_dispatch.follow_omp_num_threads()

__all__ = [
    "AttentionPartials",
    "AttentionResult",
    "CrossEntropy",
    "CrossEntropyAccuracy",
    "DenominatorStatus",
    "DraftVerification",
    "GaeResult",
    "GroupAdvantageResult",
    "GroupAdvantageStatus",
    "ImportanceMetrics",
    "ImportanceWeights",
    "ImportanceWeightsAndMetrics",
    "KlGradients",
    "LinearLogprobPair",
    "LogprobResult",
    "LogprobSemantics",
    "LogprobStatus",
    "MaskedWhitenResult",
    "MismatchMetrics",
    "OptimalTokenBaseline",
    "Packed",
    "PolicyGradients",
    "PolicyLoss",
    "PolicyMetrics",
    "PolicySpec",
    "PreferenceLoss",
    "PreferenceMetrics",
    "SampleResult",
    "SampleStatus",
    "ScatteredRewards",
    "SequenceLogprob",
    "SequenceLogprobAndStatus",
    "ValueGradients",
    "ValueLoss",
    "ValueMetrics",
    "WorkspaceStats",
    "arithmetic",
    "attention",
    "attention_backward",
    "attention_merge",
    "attention_merge_approximate",
    "attention_merge_reference",
    "attention_partials_reference",
    "attention_reference",
    "attention_splits",
    "canonical_blas",
    "checkpoint_contexts",
    "compare",
    "covariance_mask",
    "covariance_mask_reference",
    "current_arithmetic",
    "discounted_returns",
    "discounted_returns_reference",
    "embedding",
    "embedding_backward",
    "embedding_reference",
    "enable",
    "entropy_mask",
    "entropy_mask_reference",
    "gae",
    "gae_reference",
    "gelu_mul",
    "gelu_mul_backward",
    "gelu_mul_reference",
    "group_advantage",
    "group_advantage_reference",
    "importance_weights",
    "importance_weights_reference",
    "kl",
    "kl_backward",
    "kl_reference",
    "kv_cache_append",
    "kv_cache_append_reference",
    "linear",
    "linear_bias_grad",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_input_grad",
    "linear_logprob",
    "linear_logprob_pair",
    "linear_logprob_partial",
    "linear_logprob_reference",
    "linear_partial",
    "linear_reference",
    "linear_sample",
    "linear_sample_reference",
    "linear_weight_grad",
    "logprob",
    "logprob_backward",
    "logprob_merge",
    "logprob_partial",
    "logprob_reference",
    "loss_mask_from_spans",
    "loss_mask_from_spans_reference",
    "masked_whiten",
    "masked_whiten_reference",
    "mismatch_metrics",
    "mismatch_metrics_reference",
    "optimal_token_baseline",
    "optimal_token_baseline_reference",
    "pack",
    "pack_reference",
    "patch_model",
    "policy_loss",
    "policy_loss_and_grad",
    "policy_loss_reference",
    "preference_loss",
    "preference_loss_reference",
    "presets",
    "process_logits",
    "process_logits_reference",
    "random_bits",
    "random_bits_reference",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_reference",
    "rope",
    "rope_backward",
    "rope_reference",
    "sample",
    "sample_merge",
    "sample_partial",
    "sample_reference",
    "scatter_rewards",
    "scatter_rewards_reference",
    "sequence_logprob",
    "sequence_logprob_backward",
    "sequence_logprob_reference",
    "shift_labels_packed",
    "shift_labels_packed_reference",
    "silu_mul",
    "silu_mul_backward",
    "silu_mul_reference",
    "status",
    "tool_mask",
    "tool_mask_reference",
    "trace",
    "tree_sum",
    "unpack",
    "unpack_reference",
    "unpatch_model",
    "value_loss",
    "value_loss_and_grad",
    "value_loss_reference",
    "variant",
    "verify_draft",
    "vtrace",
    "vtrace_reference",
    "workspace_stats",
]
