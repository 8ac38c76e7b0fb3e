"""Draws tokens with rk.sample in both of vLLM's model runners.

A row's token depends only on its logits, its parameters and (seed, sample_id, position); the position is the token's
index in its output.

vLLM first masks the tokens that a request forbids (allowed_token_ids, bad_words, min_tokens). A processed
log-probability refers to the tokens that min_p, top_k and top_p kept, at the request's temperature. A row from which
nothing can be drawn raises an error on a CPU. On a GPU nothing waits for the device: there the row gives token 0 with
log-probability NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import rl_kernel_native as rk
from rl_kernel_native.ops.sample import SampleStatus

from .requests import sample_id_of

GREEDY_BELOW = 1e-5  # vLLM's own threshold for greedy temperatures
PROCESSED = "processed_logprobs"

_rehearsing = False


def draw(
    logits: Tensor, keys: Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any, greedy: Any, processed: bool
) -> tuple[Tensor, Tensor | None]:
    """Ids int64, and logits whose log-probabilities are the processed ones.

    Args:
        keys: int64 [3, rows]: seed, sample_id, position.
        temperature, top_k, top_p, min_p, greedy: as for rk.sample.
    """
    if isinstance(top_k, Tensor):
        top_k = top_k.masked_fill(top_k >= logits.shape[-1], 0)
    cuts = any(isinstance(x, Tensor) for x in (top_k, top_p, min_p))
    found = rk.sample(
        logits, seed=keys[0], sample_id=keys[1], position=keys[2], temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, greedy=greedy, return_logprob="none", return_kept=processed and cuts,
    )  # fmt: skip
    if logits.device.type == "cpu" and bool(found.status.any()):
        bad = {i: repr(SampleStatus(s)) for i, s in enumerate(found.status.tolist()) if s}
        raise ValueError(f"logits: expected rows of which a token can be drawn, got {bad}")
    ids = found.ids.clamp_min(0)
    if not processed:
        return ids, None
    left = only_kept(logits, found.kept_ids, found.kept_offsets) if cuts else logits.clone()
    left.rlk_temperature = temperature  # type: ignore[attr-defined]  # read by logprobs.of_tokens
    return ids, left


def only_kept(logits: Tensor, kept_ids: Tensor, offsets: Tensor) -> Tensor:
    """Logits with -Inf outside the kept sets; a row with an empty set kept every column. Nothing is copied back to the
    host."""
    rows, columns = logits.shape
    place = torch.arange(kept_ids.shape[0], device=logits.device)
    row = torch.searchsorted(offsets[1:], place, right=True)
    inside = place < offsets[-1]
    flat = torch.where(inside, row * columns + kept_ids, rows * columns)  # unwritten entries go past the end
    kept = torch.zeros(rows * columns + 1, dtype=torch.bool, device=logits.device).index_fill_(0, flat, True)
    kept = kept[:-1].view(rows, columns) | (offsets.diff() == 0)[:, None]
    return logits.masked_fill(~kept, float("-inf"))


# ---- the first model runner ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _rehearsal() -> Iterator[None]:
    global _rehearsing
    _rehearsing = True
    try:
        yield
    finally:
        _rehearsing = False


def rehearsed(own: Any, self: Any, *args: Any, **more: Any) -> Any:
    """GPUModelRunner._dummy_sampler_run: the one draw that belongs to no request."""
    with _rehearsal():
        return own(self, *args, **more)


def keyed(own: Any, self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """GPUModelRunner._sample: the keys of its rows travel with the metadata."""
    batch = self.input_batch
    for processor in (*batch.logitsprocs.argmax_invariant, *batch.logitsprocs.non_argmax_invariant):
        kind = type(processor)
        if kind.__module__ != "vllm.v1.sample.logits_processor.builtin":
            raise ValueError(f"RLK_VLLM does not serve the logits processor {kind.__module__}.{kind.__qualname__}")
    every = [self.requests[name].sampling_params for name in batch.req_ids]
    lengths = self.optimistic_seq_lens_cpu[: len(every)].tolist()
    prompts = batch.num_prompt_tokens[: len(every)].tolist()
    keys = torch.tensor(
        [
            [params.seed for params in every],
            [sample_id_of(params) for params in every],
            [max(0, length - prompt) for length, prompt in zip(lengths, prompts, strict=True)],  # a chunk draws nothing
        ],
        dtype=torch.int64,
    )
    on_host = self.device.type == "cpu"
    batch.sampling_metadata.rlk_keys = keys if on_host else keys.pin_memory().to(self.device, non_blocking=True)
    batch.generators.clear()  # torch's generators draw nothing; vLLM would reset those of unfinished prompts
    return own(self, logits, spec_decode_metadata)


def sample(
    self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Sampler.sample of the first runner."""
    m = sampling_metadata
    keys = getattr(m, "rlk_keys", None)
    if keys is None:
        if not _rehearsing:
            raise RuntimeError("sampling_metadata: expected keys of its requests, got none: a path that is not served")
        keys = torch.zeros(3, logits.shape[0], dtype=torch.int64, device=logits.device)
    greedy: Any = m.all_greedy
    temperature: Any = 1.0 if m.temperature is None else m.temperature
    if not m.all_greedy and not m.all_random:
        greedy = temperature < GREEDY_BELOW
        temperature = temperature.masked_fill(greedy, 1.0)
    min_p: Any = 0.0
    for processor in m.logitsprocs.argmax_invariant:  # all of one kind, which `keyed` checked
        if processor.min_p_count:
            min_p = processor.min_p.flatten()
    mode = logprobs_mode_override or self.logprobs_mode
    return draw(
        logits, keys, temperature, 0 if m.top_k is None else m.top_k, 1.0 if m.top_p is None else m.top_p, min_p,
        greedy, mode == PROCESSED and m.max_num_logprobs is not None,
    )  # fmt: skip


# ---- the second ------------------------------------------------------------------------------------------------------


def made(own: Any, self: Any, max_num_reqs: int, *args: Any, **more: Any) -> None:
    """Sampler.__init__ of the second runner."""
    from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

    own(self, max_num_reqs, *args, **more)
    self.rlk_sample_ids = UvaBackedTensor(max_num_reqs, dtype=torch.int64)


def added(own: Any, self: Any, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
    """Sampler.add_request."""
    own(self, req_idx, prompt_len, sampling_params)
    self.rlk_sample_ids.np[req_idx] = sample_id_of(sampling_params)


def written(own: Any, self: Any) -> None:
    """Sampler.apply_staged_writes."""
    own(self)
    self.rlk_sample_ids.copy_to_uva()


def sample_of_second(
    self: Any,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    idx_mapping_np: Any,
    pos: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    return_logprobs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sampler.sample of the second runner; penalties and biases were already refused on arrival."""
    states = self.sampling_states
    masked = self.logit_bias_state.use_logit_bias[idx_mapping_np].any()
    masked = masked or self.bad_words_state.num_bad_words.np[idx_mapping_np].any()
    if masked:
        logits = logits.clone()  # raw log-probabilities use the unprocessed logits
        self.logit_bias_state.apply_logit_bias(logits, expanded_idx_mapping, idx_mapping_np, pos)
        self.bad_words_state.apply_bad_words(
            logits, expanded_idx_mapping, idx_mapping_np, input_ids, expanded_local_pos
        )
    index = expanded_idx_mapping.clamp_min(0)
    position = pos.to(torch.int64) + 1 - self.req_states.prompt_len.gpu[index]
    keys = torch.stack((states.seeds.gpu[index], self.rlk_sample_ids.gpu[index], position.clamp_min(0)))
    temperature: Any = states.temperature.gpu[index]
    greedy: Any = False
    if states.any_greedy(idx_mapping_np):
        greedy = temperature == 0
        temperature = temperature.masked_fill(greedy, 1.0)
    top_k, top_p = states.get_top_k_top_p(index, idx_mapping_np)
    has_min_p = (states.min_p.np[idx_mapping_np] != 0).any()
    ids, processed = draw(
        logits, keys, temperature, 0 if top_k is None else top_k, 1.0 if top_p is None else top_p,
        states.min_p.gpu[index] if has_min_p else 0.0, greedy, return_logprobs and self.logprobs_mode == PROCESSED,
    )  # fmt: skip
    return ids, logits if processed is None else processed
