"""Quick self-tests of the operators for the doctor: seconds, not coverage. The tests proper are in tests/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import (
    advantages,
    attention,
    embedding,
    linear,
    linear_logprob,
    logprob,
    rms_norm,
    rope,
    sampling,
    sequences,
    silu_mul,
    tokens,
)
from .tools import Check

__all__ = ["OPERATORS", "Check"]

# Name of each operator and its self-test, of torch, a device and its compute capability.
OPERATORS: dict[str, Callable[[Any, str, tuple[int, int] | None], Iterator[Check]]] = {
    "logprob": logprob.checks,
    "linear": linear.checks,
    "linear_logprob": linear_logprob.checks,
    "linear_sample": sampling.linear_sample,
    "rms_norm": rms_norm.checks,
    "attention": attention.checks,
    "embedding": embedding.checks,
    "kv_cache_append": attention.kv_cache_append,
    "pack": sequences.pack,
    "preference_loss": sequences.preference_loss,
    "policy_loss": partial(tokens.checks, "policy_loss"),
    "kl": partial(tokens.checks, "kl"),
    "value_loss": partial(tokens.checks, "value_loss"),
    "importance_weights": partial(tokens.checks, "importance_weights"),
    "mismatch_metrics": partial(tokens.checks, "mismatch_metrics"),
    "scatter_rewards": partial(tokens.checks, "scatter_rewards"),
    "covariance_mask": partial(tokens.checks, "covariance_mask"),
    "random_bits": sampling.random_bits,
    "sample": sampling.sample,
    "rope": rope.checks,
    "gae": partial(advantages.checks, "gae"),
    "group_advantage": partial(advantages.checks, "group_advantage"),
    "masked_whiten": partial(advantages.checks, "masked_whiten"),
    "optimal_token_baseline": partial(advantages.checks, "optimal_token_baseline"),
    "sequence_logprob": sequences.sequence_logprob,
    "shift_labels_packed": sequences.shift_labels_packed,
    "silu_mul": silu_mul.checks,
}
