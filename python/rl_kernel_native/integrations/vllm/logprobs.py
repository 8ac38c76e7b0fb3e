"""Log-probabilities of sampled and prompt tokens with rk.logprob, in both of vLLM's model runners.

The first runner computes the log-probabilities of a whole vocabulary and then keeps a few. This module keeps a copy of
the logits, because the sampler changes them in place. rk.logprob scores the token, and rk.sample finds the most
probable tokens. The most probable tokens descend by logit; equal logits ascend by id. For processed log-probabilities,
`sampler.draw` provides the logits, together with the temperature.
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
    """Processed log-probabilities use the temperature of the draw."""
    return getattr(logits, "rlk_temperature", 1.0)


def of_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """``[rows, tokens]`` float32 of logits ``[rows, vocabulary]`` and ids ``[rows, tokens]``."""
    rows, tokens = token_ids.shape
    every = logits.unsqueeze(1).expand(rows, tokens, logits.shape[-1])
    temperature = temperature_of(logits)
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None].expand(rows, tokens).contiguous()
    found: Tensor = rk.logprob(every, token_ids.to(torch.int64).contiguous(), temperature=temperature)
    return found


def compute_logprobs(logits: Tensor) -> Tensor:
    """The logits as :func:`gather_logprobs` takes them."""
    return logits.clone()


def best_of(logits: Tensor, count: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids int64 and log-probabilities ``[rows, 1 + count]``: of the tokens ``[rows, 1]``, then of the ``count`` most
    probable tokens."""
    found = of_tokens(logits, ids)
    if count > 0:  # sample also draws a token, which belongs to no request
        best = rk.sample(logits, seed=0, sample_id=0, position=0, temperature=temperature_of(logits), n_logprobs=count)
        ids = torch.cat((ids, best.top_ids.clamp_min(0)), 1)  # a bad row has no ids
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
    """Inside the context, :func:`compute_token_logprobs` returns this result."""
    global _known
    _known = values
    try:
        yield
    finally:
        _known = None


def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The function of the second runner."""
    return of_tokens(logits, token_ids) if _known is None else _known
