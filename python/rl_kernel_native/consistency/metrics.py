"""The metrics that a trainer would see: the log-ratio of training to rollout, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# The usual clip range of PPO and GRPO: a ratio is clipped if |ratio - 1| exceeds this number.
CLIP_RANGE = 0.2
# A histogram of |log-ratio| by half decade shows tiny and huge drift in one picture. Negative and positive log-ratios
# are counted separately.
HISTOGRAM_EDGES = [0.0] + [10.0**exponent for exponent in np.arange(-8.0, 1.5, 0.5)]


@dataclass(frozen=True)
class Worst:
    """The token with the largest |dlogp|: `position` is the scored token's position in its sequence."""

    prompt: int
    position: int
    token: int
    rollout: float
    training: float


@dataclass(frozen=True)
class Metrics:
    """Differences of float32 log-probabilities (nats), over `tokens` response tokens.

    Attributes:
        differing_tokens: tokens whose float32 bytes differ.
        kl_k1, kl_k3: estimates of KL(rollout || training) from rollout samples: mean(-r) and mean(exp(r) - 1 - r),
            r = training - rollout.
        max_abs_ratio, mean_abs_ratio: maximum and mean of |exp(r) - 1|, the distance of the importance ratio from 1.
        clip_fraction: share of tokens with |exp(r) - 1| > 0.2.
        non_finite: tokens whose difference is NaN or infinite; they count as differing and are excluded from the means.
        histogram_edges, histogram_negative, histogram_positive: counts of |r| by half decade, for r < 0 and r > 0;
            the last bin counts everything beyond the last edge.
        logits_equal_tokens: number of tokens whose rows of logits have the same bytes on both sides.
        logprob_differs_on_equal_logits: number of `logits_equal_tokens` whose log-probability still differs.
    """

    tokens: int
    differing_tokens: int
    max_abs_dlogp: float
    mean_abs_dlogp: float
    max_abs_ratio: float
    mean_abs_ratio: float
    kl_k1: float
    kl_k3: float
    clip_fraction: float
    non_finite: int
    zero_tokens: int
    histogram_edges: list[float]
    histogram_negative: list[int]
    histogram_positive: list[int]
    logits_equal_tokens: int
    logprob_differs_on_equal_logits: int
    worst: Worst | None


def bytes_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool, elementwise: whether the raw bytes differ (-0 differs from +0, and a NaN equals itself)."""
    int_type = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(int_type) != b.contiguous().view(int_type)


def compare_logprobs(
    rollout: Sequence[torch.Tensor],
    training: Sequence[torch.Tensor],
    responses: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    logits_equal: Sequence[Sequence[bool]],
) -> Metrics:
    """Metrics over all sequences.

    Args:
        rollout, training: float32 [response length] of each sequence.
        responses: sampled ids, in the same shape.
        logits_equal: whether the rows of logits that score a token have the same bytes; same shape.
    """
    old, new = torch.cat(list(rollout)), torch.cat(list(training))
    differs = bytes_differ(old, new).numpy()
    equal_logits = np.array([flag for flags in logits_equal for flag in flags], dtype=bool)
    ratio = (new.double() - old.double()).numpy()
    # -inf on both sides counts as equal: its difference is set to 0 instead of NaN.
    ratio[~differs] = 0.0
    finite = np.isfinite(ratio)
    kept = ratio[finite]
    magnitude = np.where(finite, np.abs(ratio), np.inf)
    worst = None
    if differs.any():
        at = int(np.argmax(magnitude))
        worst = _worst(at, old, new, responses, prompt_lengths)
    with np.errstate(over="ignore"):
        excess = np.expm1(kept)
    edges = [*HISTOGRAM_EDGES[1:], np.inf]
    below, above = kept[kept < 0], kept[kept > 0]
    bins = np.array([0.0, *edges])
    return Metrics(
        tokens=len(ratio),
        differing_tokens=int(differs.sum()),
        max_abs_dlogp=float(magnitude.max()),
        mean_abs_dlogp=float(np.abs(kept).mean()) if len(kept) else float("nan"),
        max_abs_ratio=float(np.abs(excess).max(initial=0.0)) if finite.all() else float("inf"),
        mean_abs_ratio=float(np.abs(excess).mean()) if len(kept) else float("nan"),
        kl_k1=float(-kept.mean()) if len(kept) else float("nan"),
        kl_k3=float((excess - kept).mean()) if len(kept) else float("nan"),
        clip_fraction=float((np.abs(excess) > CLIP_RANGE).sum() + (~finite).sum()) / len(ratio),
        non_finite=int((~finite).sum()),
        zero_tokens=int((ratio == 0).sum()),
        histogram_edges=HISTOGRAM_EDGES,
        histogram_negative=np.histogram(-below, bins)[0].tolist(),
        histogram_positive=np.histogram(above, bins)[0].tolist(),
        logits_equal_tokens=int(equal_logits.sum()),
        logprob_differs_on_equal_logits=int((equal_logits & differs).sum()),
        worst=worst,
    )


def _worst(
    at: int,
    old: torch.Tensor,
    new: torch.Tensor,
    responses: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
) -> Worst:
    prompt, offset = 0, at
    while offset >= len(responses[prompt]):
        offset -= len(responses[prompt])
        prompt += 1
    return Worst(
        prompt=prompt,
        position=prompt_lengths[prompt] + offset,
        token=responses[prompt][offset],
        rollout=float(old[at]),
        training=float(new[at]),
    )
