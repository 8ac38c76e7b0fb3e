"""Draws tokens with rk.sample in vLLM's second model runner, the default on GPUs.

A step of a small model waits for the host, so few launches matter. Parameters of requests are copied to the device only
when the requests of the batch change. Usually one call of rk.sample gives a step's tokens and all their
log-probabilities. If a request masks or cuts tokens, its log-probabilities may need a second call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import rl_kernel_native as rk

from . import logprobs
from .requests import sample_id_of
from .sampler import PROCESSED, draw, require_drawn


class Rows(NamedTuple):
    """The parameters of a draw for the requests of a batch.

    Attributes:
        before: int64 ``[rows]``: the position of a request's last prompt token.
        temperature, greedy, top_k, top_p, min_p: as for rk.sample; a number if all requests have the same value.
    """

    seed: Tensor
    sample_id: Tensor
    before: Tensor
    temperature: Any
    greedy: Any
    top_k: Any
    top_p: Any
    min_p: Any

    @property
    def cuts(self) -> bool:
        return any(isinstance(x, Tensor) for x in (self.top_k, self.top_p, self.min_p))


def made(own: Any, self: Any, max_num_reqs: int, *args: Any, **more: Any) -> None:
    """Wraps Sampler.__init__."""
    own(self, max_num_reqs, *args, **more)
    self.rlk_sample_ids = np.zeros(max_num_reqs, np.int64)
    self.rlk_rows = None


def added(own: Any, self: Any, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
    """Wraps Sampler.add_request."""
    own(self, req_idx, prompt_len, sampling_params)
    self.rlk_sample_ids[req_idx] = sample_id_of(sampling_params)
    self.rlk_rows = None  # another request may have had this slot


def rows_of(sampler: Any, slots: Any, columns: int, device: torch.device) -> Rows:
    """The Rows of the requests in ``slots``. vLLM's state on the host has all parameters, so one copy moves them to the
    device."""
    known, last = sampler.sampling_states, sampler.rlk_rows
    if last is not None and np.array_equal(last[0], slots):
        kept: Rows = last[1]
        return kept
    given, top_k = known.temperature.np[slots], known.top_k.np[slots]
    greedy = given == 0
    whole = np.stack(
        (
            known.seeds.np[slots],
            sampler.rlk_sample_ids[slots],
            sampler.req_states.prompt_len.np[slots].astype(np.int64) - 1,
            np.where(top_k < columns, top_k, 0),
            greedy,
        )
    )
    part = np.stack((np.where(greedy, 1, given), known.top_p.np[slots], known.min_p.np[slots])).astype(np.float32)
    count = len(slots)
    packed = np.zeros((len(whole) + len(part), count), np.int64)
    packed[: len(whole)] = whole
    packed[len(whole) :].view(np.float32)[:, :count] = part
    copied = torch.from_numpy(packed)
    if device.type != "cpu":
        copied = copied.pin_memory().to(device, non_blocking=True)
    seed, sample_id, before, k, is_greedy, *_ = copied
    temperature, top_p, min_p = copied[len(whole) :].view(torch.float32)[:, :count]
    rows = Rows(
        seed,
        sample_id,
        before,
        1.0 if (part[0] == 1).all() else temperature,
        bool(greedy[0]) if (greedy == greedy[0]).all() else is_greedy.bool(),
        k if whole[3].any() else 0,
        top_p if (part[1] != 1).any() else 1.0,
        min_p if part[2].any() else 0.0,
    )
    sampler.rlk_rows = slots, rows
    return rows


def sample(
    self: Any,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    idx_mapping_np: Any,
    pos: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    return_logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Replaces Sampler.sample. Requests with penalties or biases were already refused on arrival."""
    masked = self.logit_bias_state.use_logit_bias[idx_mapping_np].any()
    masked = bool(masked or self.bad_words_state.num_bad_words.np[idx_mapping_np].any())
    if masked:
        logits = logits.clone()  # raw log-probabilities need the unchanged logits
        self.logit_bias_state.apply_logit_bias(logits, expanded_idx_mapping, idx_mapping_np, pos)
        self.bad_words_state.apply_bad_words(
            logits, expanded_idx_mapping, idx_mapping_np, input_ids, expanded_local_pos
        )
    rows = rows_of(self, idx_mapping_np, logits.shape[-1], logits.device)
    position = pos - rows.before  # negative within a prompt, where vLLM drops the drawn token
    processed = self.logprobs_mode == PROCESSED
    if not return_logprobs or (rows.cuts if processed else masked):
        keys = rows.seed, rows.sample_id, position
        cut = rows.top_k, rows.top_p, rows.min_p
        ids, left = draw(logits, keys, rows.temperature, *cut, rows.greedy, return_logprobs and processed)
        return ids, logits if left is None else left
    return scored(logits, rows, position, self.sampling_states.max_num_logprobs(idx_mapping_np), processed), logits


def scored(logits: Tensor, rows: Rows, position: Tensor, count: int, processed: bool) -> Tensor:
    """Ids, with an attribute that holds the log-probabilities of the token and of the ``count`` most probable
    tokens."""
    # At temperature 1 without cuts, processed and raw log-probabilities are equal. The processed log-probabilities are
    # then used, because they need no second pass over the logits.
    is_plain = rows.greedy is False and not rows.cuts and not isinstance(rows.temperature, Tensor)
    kind: Any = "processed" if processed or is_plain else "raw"
    found = rk.sample(
        logits, seed=rows.seed, sample_id=rows.sample_id, position=position, temperature=rows.temperature,
        top_k=rows.top_k, top_p=rows.top_p, min_p=rows.min_p, greedy=rows.greedy, return_logprob=kind,
        n_logprobs=count,
    )  # fmt: skip
    require_drawn(logits, found.status)
    ids: Tensor = found.ids.clamp_min(0)
    if kind == "raw":
        own, best, of_best = found.raw_logprob, found.raw_top_ids, found.raw_top_logprobs
    else:
        own, best, of_best = found.logprob, found.top_ids, found.top_logprobs
    every, values = ids.unsqueeze(-1), own.unsqueeze(-1)
    if count > 0:
        every = torch.cat((every, best), 1).clamp_min_(0)  # a row with an error has negative ids
        values = torch.cat((values, of_best), 1)
    ids.rlk_scores = every, values  # type: ignore[attr-defined]  # read by compute_topk_scores
    return ids


def compute_topk_scores(
    own: Any, logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, *args: Any, **more: Any
) -> Any:
    """Wraps vLLM's function of this name. vLLM's own code still computes the rank."""
    found = getattr(sampled_token_ids, "rlk_scores", None)
    if found is None:
        found = logprobs.best_of(logits, num_logprobs, sampled_token_ids.unsqueeze(-1))
    every, values = found
    with logprobs.known(values[:, :1]):
        ranked = own(logits, 0, sampled_token_ids, *args, **more)
    return ranked._replace(logprob_token_ids=every, logprobs=values)
