"""Log-probabilities of sampled and prompt tokens with rk.logprob, in both of vLLM's model runners.

vLLM's first runner computes the log-probabilities of the whole vocabulary, and then selects a few. This module keeps a
copy of the logits instead, because the sampler changes them in place. rk.logprob scores the token, and rk.sample finds
the most probable tokens. These are in descending order of logit; equal logits are in ascending order of id. For
processed log-probabilities, `sampler.draw` provides the logits, together with the temperature.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

import rl_kernel_native as rk

_known: Tensor | None = None


def temperature_of(logits: Tensor) -> Any:
    """The temperature of log-probabilities from these logits: for processed log-probabilities that of the draw, else
    1."""
    return getattr(logits, "rlk_temperature", 1.0)


def of_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities ``[rows, tokens]`` float32, from logits ``[rows, vocabulary]`` and ids ``[rows, tokens]``."""
    rows, tokens = token_ids.shape
    every = logits.unsqueeze(1).expand(rows, tokens, logits.shape[-1])
    temperature = temperature_of(logits)
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None].expand(rows, tokens).contiguous()
    found: Tensor = rk.logprob(every, token_ids.to(torch.int64).contiguous(), temperature=temperature)
    return found


def compute_logprobs(logits: Tensor) -> Tensor:
    """A copy of the logits, which vLLM passes to :func:`gather_logprobs`."""
    return logits.clone()


def best_of(logits: Tensor, count: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids int64 and log-probabilities, both ``[rows, 1 + count]``: first those of the tokens ``ids``, then those of the
    ``count`` most probable tokens."""
    found = of_tokens(logits, ids)
    if count > 0:  # sample also draws a token, which is not used
        best = rk.sample(logits, seed=0, sample_id=0, position=0, temperature=temperature_of(logits), n_logprobs=count)
        ids = torch.cat((ids, best.top_ids.clamp_min(0)), 1)  # a row with an error has negative ids
        found = torch.cat((found, best.top_logprobs), 1)
    return ids, found


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """The token's own log-probability first, then the log-probabilities of the most probable tokens. ``logprobs`` comes
    from :func:`compute_logprobs`."""
    logits = logprobs
    ids = token_ids.to(torch.int64).unsqueeze(-1)
    rank = (logits >= logits.gather(-1, ids)).sum(-1)
    every, found = best_of(logits, num_logprobs, ids)
    return LogprobsTensors(every.to(torch.int32), found, rank)


def gather_specific_token_logprobs(self: Any, logprobs: Tensor, logprob_token_ids: Any, sampled: Tensor) -> Any:
    if not logprob_token_ids:
        return None
    raise ValueError(
        "logprob_token_ids: RLK_VLLM serves log-probabilities of sampled, prompt and the most probable tokens"
    )


@contextlib.contextmanager
def known(values: Tensor) -> Iterator[None]:
    """Inside the context, :func:`compute_token_logprobs` returns ``values``."""
    global _known
    _known = values
    try:
        yield
    finally:
        _known = None


def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Replaces the second runner's function of this name."""
    return of_tokens(logits, token_ids) if _known is None else _known
