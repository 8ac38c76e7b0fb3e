"""Draws tokens with rk.sample in vLLM's first model runner; second_sampler.py draws tokens in the second runner.

A row's token depends only on its logits, its parameters and (seed, sample_id, position); the position is the token's
index in the request's output.

vLLM first masks the tokens that a request forbids (allowed_token_ids, bad_words, min_tokens). A processed
log-probability refers to the tokens that min_p, top_k and top_p kept, at the request's temperature. A row from which
nothing can be drawn raises an error on a CPU. On a GPU nothing waits for the device, so such a row gives token 0 with
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
    logits: Tensor, keys: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, greedy: Any, processed: bool
) -> tuple[Tensor, Tensor | None]:
    """Ids int64, and logits that give the processed log-probabilities, or None if they are not needed.

    Args:
        keys: seed, sample_id and position, each int64 [rows].
        temperature, top_k, top_p, min_p, greedy: as for rk.sample.
    """
    cuts = any(isinstance(x, Tensor) for x in (top_k, top_p, min_p))
    found = rk.sample(
        logits, seed=keys[0], sample_id=keys[1], position=keys[2], temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, greedy=greedy, return_logprob="none", return_kept=processed and cuts,
    )  # fmt: skip
    require_drawn(logits, found.status)
    ids = found.ids.clamp_min(0)
    if not processed:
        return ids, None
    left = only_kept(logits, found.kept_ids, found.kept_offsets) if cuts else logits.clone()
    left.rlk_temperature = temperature  # type: ignore[attr-defined]  # read by logprobs.of_tokens
    return ids, left


def require_drawn(logits: Tensor, status: Tensor) -> None:
    if logits.device.type == "cpu" and bool(status.any()):
        bad = {i: repr(SampleStatus(s)) for i, s in enumerate(status.tolist()) if s}
        raise ValueError(f"logits: expected rows of which a token can be drawn, got {bad}")


def only_kept(logits: Tensor, kept_ids: Tensor, offsets: Tensor) -> Tensor:
    """Logits with -Inf outside the kept sets. An empty set means that the row kept every column. Nothing is copied back
    to the host."""
    rows, columns = logits.shape
    place = torch.arange(kept_ids.shape[0], device=logits.device)
    row = torch.searchsorted(offsets[1:], place, right=True)
    inside = place < offsets[-1]
    flat = torch.where(inside, row * columns + kept_ids, rows * columns)  # unwritten entries mark the extra last place
    kept = torch.zeros(rows * columns + 1, dtype=torch.bool, device=logits.device).index_fill_(0, flat, True)
    kept = kept[:-1].view(rows, columns) | (offsets.diff() == 0)[:, None]
    return logits.masked_fill(~kept, float("-inf"))


@contextlib.contextmanager
def _rehearsal() -> Iterator[None]:
    global _rehearsing
    _rehearsing = True
    try:
        yield
    finally:
        _rehearsing = False


def rehearsed(own: Any, self: Any, *args: Any, **more: Any) -> Any:
    """Wraps GPUModelRunner._dummy_sampler_run, the only draw without requests."""
    with _rehearsal():
        return own(self, *args, **more)


def keyed(own: Any, self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """Wraps GPUModelRunner._sample: adds the rows' seeds, sample_ids and positions to the metadata."""
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
            [max(0, length - prompt) for length, prompt in zip(lengths, prompts, strict=True)],  # 0 within a prompt
        ],
        dtype=torch.int64,
    )
    on_host = self.device.type == "cpu"
    batch.sampling_metadata.rlk_keys = keys if on_host else keys.pin_memory().to(self.device, non_blocking=True)
    batch.generators.clear()  # not used; vLLM would otherwise reset the generators of unfinished prompts
    return own(self, logits, spec_decode_metadata)


def sample(
    self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Replaces Sampler.sample of the first runner."""
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
    for processor in m.logitsprocs.argmax_invariant:  # keyed() has checked that they are vLLM's own, so min_p
        if processor.min_p_count:
            min_p = processor.min_p.flatten()
    top_k: Any = 0 if m.top_k is None else m.top_k.masked_fill(m.top_k >= logits.shape[-1], 0)
    mode = logprobs_mode_override or self.logprobs_mode
    return draw(
        logits, keys, temperature, top_k, 1.0 if m.top_p is None else m.top_p, min_p,
        greedy, mode == PROCESSED and m.max_num_logprobs is not None,
    )  # fmt: skip
