"""Tests the sampler hooks of both vLLM runners on vLLM's own classes, without an engine. `run()` runs in a process with
vLLM enabled (tests/frameworks/test_vllm.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk

ROWS, COLUMNS = 6, 300
# For each row: temperature, top_k, top_p, min_p, seed, sample_id, position. The second row is greedy.
PARAMETERS = [
    (0.7, 5, 1.0, 0.0, 11, 0, 0), (0.0, 0, 1.0, 0.0, 12, 0, 1), (1.0, 0, 0.6, 0.0, 2**62, 3, 2),
    (1.3, 40, 0.9, 0.05, -4, 0, 7), (1.0, 0, 1.0, 0.0, 15, 9, 1000), (2.0, 2, 0.5, 0.0, 11, 1, 0),
]  # fmt: skip


def columns() -> dict[str, torch.Tensor]:
    t, k, p, m, *key = zip(*PARAMETERS, strict=True)
    return {
        "temperature": torch.tensor(t), "top_k": torch.tensor([x or COLUMNS for x in k], dtype=torch.int32),
        "top_p": torch.tensor(p), "min_p": torch.tensor(m), "keys": torch.tensor(key, dtype=torch.int64),
    }  # fmt: skip


def logits_of() -> torch.Tensor:
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)) * 3).bfloat16()


def alone(row: int, logits: torch.Tensor) -> Any:
    t, k, p, m, seed, sample_id, position = PARAMETERS[row]
    return rk.sample(
        logits[row : row + 1], seed=seed, sample_id=sample_id, position=position, temperature=t or 1.0, top_k=k,
        top_p=p, min_p=m, greedy=t == 0, return_kept=True,
    )  # fmt: skip


def metadata(num_logprobs: int | None, **changed: Any) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata

    c = columns()
    min_p: Any = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
    min_p.min_p_count, min_p.min_p = 1, c["min_p"][:, None]
    nothing = torch.zeros(ROWS)
    made: Any = SamplingMetadata(
        temperature=c["temperature"], all_greedy=False, all_random=False, top_p=c["top_p"], top_k=c["top_k"],
        generators={}, max_num_logprobs=num_logprobs, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=nothing, presence_penalties=nothing, repetition_penalties=nothing, output_token_ids=[],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors([min_p]),
    )  # fmt: skip
    made.rlk_keys = c["keys"]
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def first_runner() -> list[int]:
    from vllm.v1.sample.sampler import Sampler

    logits = logits_of()
    want = [alone(row, logits) for row in range(ROWS)]
    ids = [int(w.ids) for w in want]
    for mode in ("raw_logprobs", "processed_logprobs"):
        for count in (None, 0, 5):
            found = Sampler(logprobs_mode=mode)(logits.clone(), metadata(count))
            assert found.sampled_token_ids[:, 0].tolist() == ids, (mode, count)
            if count is None:
                assert found.logprobs_tensors is None
                continue
            tokens, logprobs, ranks, _ = found.logprobs_tensors
            assert tokens[:, 0].tolist() == ids
            for row in range(ROWS):
                kept, processed = want[row].kept_ids[: int(want[row].kept_offsets[1])], mode == "processed_logprobs"
                one = want[row].logprob if processed else rk.logprob(logits[row : row + 1], want[row].ids)
                assert torch.equal(logprobs[row, :1], one), (mode, count, row)
                seen = logits[row][kept.long()] if processed and kept.numel() else logits[row]
                best = torch.full((COLUMNS,), -math.inf).index_copy(0, kept.long(), logits[row][kept.long()].float())
                best = best if processed and kept.numel() else logits[row].float()
                order = torch.sort(best, descending=True, stable=True).indices[:count]
                assert tokens[row, 1:].tolist() == order.tolist(), (mode, count, row)  # bf16 logits have ties
                for k, token in enumerate(order.tolist()):
                    t = PARAMETERS[row][0] or 1.0 if processed else 1.0
                    one = rk.logprob(best[None], torch.tensor([token]), temperature=t)
                    assert torch.equal(logprobs[row, k + 1 : k + 2], one), (mode, count, row, k)
                assert int(ranks[row]) == int((seen >= logits[row, ids[row]]).sum()), (mode, count, row)
    total = logprobs[0, 1:].exp().sum()  # the five tokens that top_k kept
    assert math.isclose(float(total), 1.0, abs_tol=1e-5), total
    assert sorted(tokens[0, 1:].tolist()) == want[0].kept_ids[:5].tolist()
    assert (logprobs[5, 3:] == -math.inf).all(), logprobs[5]  # its top_k is 2
    assert logprobs[5, 1] > -math.inf

    everything = metadata(0, all_greedy=True, temperature=None, top_k=None, top_p=None)
    assert Sampler()(logits, everything).sampled_token_ids[:, 0].tolist() == logits.float().argmax(-1).tolist()
    forbidden = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    forbidden[:, 17] = False
    masked = Sampler()(logits, metadata(0, allowed_token_ids_mask=forbidden))
    assert masked.sampled_token_ids[:, 0].tolist() == [17] * ROWS
    assert torch.equal(masked.logprobs_tensors.logprobs[:, 0], rk.logprob(logits, torch.tensor([17] * ROWS)))

    for change, error, text in (
        ({"rlk_keys": None}, RuntimeError, "expected keys of its requests"),
        ({"allowed_token_ids_mask": forbidden | True}, ValueError, "EMPTY_ROW"),
    ):
        with pytest.raises(error, match=text):
            Sampler()(logits, metadata(0, **change))
    return ids


def second_runner(ids: list[int]) -> None:
    """vLLM's second runner has its own states, on a GPU; here they are tensors."""
    from vllm.v1.worker.gpu.sample import logprob
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    c, logits = columns(), logits_of()
    order = torch.tensor([4, 2, 0, 1, 5, 3])  # slot of each batch row among the slots of all requests
    back = order.argsort()

    def held(x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(gpu=x[back], np=x[back].numpy())

    states: Any = SamplingStates.__new__(SamplingStates)
    states.vocab_size = COLUMNS
    for name in ("temperature", "top_k", "top_p", "min_p"):
        setattr(states, name, held(c[name]))
    states.seeds, states.num_logprobs = held(c["keys"][0]), np.zeros(ROWS, dtype=np.int32)
    prompt = torch.tensor([5, 6, 7, 8, 9, 10], dtype=torch.int32)
    sampler: Any = Sampler.__new__(Sampler)
    sampler.logprobs_mode, sampler.sampling_states = "processed_logprobs", states
    sampler.rlk_sample_ids, sampler.rlk_rows = held(c["keys"][1]).np, None
    sampler.req_states = SimpleNamespace(prompt_len=held(prompt))
    sampler.logit_bias_state = SimpleNamespace(use_logit_bias=np.zeros(ROWS, dtype=bool))
    sampler.bad_words_state = SimpleNamespace(num_bad_words=SimpleNamespace(np=np.zeros(ROWS, dtype=np.int32)))
    last = c["keys"][2] + prompt - 1  # position in the sequence of the token before the drawn token
    found, processed = sampler.sample(logits, order, order.numpy(), last, None, None, return_logprobs=True)
    assert found.tolist() == ids
    one = logprob.compute_token_logprobs(processed, found[:, None])[:, 0]
    assert torch.equal(one, torch.cat([alone(row, logits).logprob for row in range(ROWS)]))
    sampler.logprobs_mode = "raw_logprobs"
    found, unchanged = sampler.sample(logits, order, order.numpy(), last, None, None, return_logprobs=True)
    assert found.tolist() == ids
    assert unchanged is logits
    every, values = found.rlk_scores
    assert every[:, 0].tolist() == ids
    assert torch.equal(values[:, 0], rk.logprob(logits, found))


def run() -> None:
    second_runner(first_runner())
