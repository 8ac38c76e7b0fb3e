"""The sampler of vLLM's second model runner, which runs only on GPUs, with stand-ins for vLLM's state on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vllm is not on PYTHONPATH: tools/fetch_vllm.sh")

import rl_kernel_native as rk  # noqa: E402

COLUMNS = 300  # more than two leaves of 128
SLOTS = 6  # more than a batch has rows
PROMPTS = np.array([4, 1, 9, 2, 7, 3], np.int32)
PLAIN = {"temperature": [1.0] * SLOTS, "top_k": [COLUMNS] * SLOTS, "top_p": [1.0] * SLOTS, "min_p": [0.0] * SLOTS}
REQUESTS: dict[str, dict[str, list[float]]] = {
    "plain": {},
    "temperatures": {"temperature": [1.0, 0.5, 2.0, 1.5, 0.7, 1.0]},
    "greedy": {"temperature": [0.0] * SLOTS},
    "some greedy": {"temperature": [0.0, 0.5, 0.0, 1.0, 1.0, 2.0]},
    "cut": {
        "temperature": [0.8] * SLOTS, "top_k": [3, COLUMNS, 50, 7, 1, 299], "top_p": [0.9, 1.0, 0.5, 0.3, 1.0, 0.8],
        "min_p": [0.0, 0.1, 0.0, 0.0, 0.2, 0.0],
    },
}  # fmt: skip


def sampler(mode: str, count: int, **asked: Any) -> Any:
    """vLLM's sampler after its requests were added; `asked` changes what PLAIN requests."""
    from rl_kernel_native.integrations.vllm import second_sampler

    dtypes = {"top_k": np.int32}
    states = {k: SimpleNamespace(np=np.array(v, dtypes.get(k, np.float32))) for k, v in {**PLAIN, **asked}.items()}
    made = SimpleNamespace(
        logprobs_mode=mode,
        sampling_states=SimpleNamespace(
            **states, seeds=SimpleNamespace(np=np.arange(SLOTS) * 7919 - 5), max_num_logprobs=lambda _: count
        ),
        req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=PROMPTS)),
        logit_bias_state=SimpleNamespace(use_logit_bias=np.zeros(SLOTS, bool), apply_logit_bias=mask),
        bad_words_state=SimpleNamespace(
            num_bad_words=SimpleNamespace(np=np.zeros(SLOTS, np.int32)), apply_bad_words=lambda *_: None
        ),
    )
    second_sampler.made(lambda *_: None, made, SLOTS)
    for slot in range(SLOTS):
        parameters = SimpleNamespace(extra_args={"sample_id": slot * slot})
        second_sampler.added(lambda *_: None, made, slot, PROMPTS[slot], parameters)
    return made


def mask(logits: Any, *_: Any) -> None:
    logits[:, ::2] = float("-inf")


def step(made: Any, logits: Any, slots: Any, pos: Any, scored: bool) -> tuple[Any, Any]:
    """A step as vLLM's Sampler.__call__ takes it: ids and log-probabilities."""
    from rl_kernel_native.integrations.vllm import logprobs, second_sampler

    given = logits.clone()
    on_device = torch.from_numpy(slots)
    ids, left = second_sampler.sample(made, given, on_device, slots, pos, pos, pos, scored)
    assert torch.equal(given, logits)  # raw log-probabilities are of unchanged logits
    if not scored:
        return ids, None
    of = left if made.logprobs_mode == "processed_logprobs" else given

    def own(logits: Any, count: int, sampled: Any) -> Any:
        from vllm.v1.outputs import LogprobsTensors

        own_ids = sampled.unsqueeze(-1)
        rank = (logits >= logits.gather(-1, own_ids)).sum(-1)
        return LogprobsTensors(own_ids, logprobs.compute_token_logprobs(logits, own_ids), rank)

    count = made.sampling_states.max_num_logprobs(slots)
    return ids, second_sampler.compute_topk_scores(own, of, count, ids)


def drawn(made: Any, logits: Any, slots: Any, pos: Any, **more: Any) -> Any:
    """The rows as calls of rk.sample, one row each."""
    states, found = made.sampling_states, []
    for row, slot in enumerate(slots):
        temperature, top_k = float(states.temperature.np[slot]), int(states.top_k.np[slot])
        found.append(
            rk.sample(
                logits[row : row + 1], seed=int(states.seeds.np[slot]), sample_id=int(slot * slot),
                position=int(pos[row]) + 1 - int(PROMPTS[slot]), temperature=temperature or 1.0,
                greedy=temperature == 0, top_k=top_k if top_k < COLUMNS else 0, top_p=float(states.top_p.np[slot]),
                min_p=float(states.min_p.np[slot]), **more,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("named", REQUESTS)
def test_a_step_is_a_call_of_sample_for_each_row(named: str, mode: str, count: int, masked: bool) -> None:
    made = sampler(mode, count, **REQUESTS[named])
    made.logit_bias_state.use_logit_bias[:] = masked
    torch.manual_seed(0)
    kind = mode.removesuffix("_logprobs")
    for batch in ([3, 0, 5], [3, 0, 5], [1, 3]):  # the second batch has the first one's requests
        slots = np.array(batch, np.int32)
        pos = torch.from_numpy(PROMPTS[slots].astype(np.int64)) + 3
        logits = torch.randn(len(slots), COLUMNS).bfloat16() * 3
        of_draw = logits.clone()
        if masked:
            mask(of_draw)
        ids, scores = step(made, logits, slots, pos, scored=True)
        alone, unscored = step(made, logits, slots, pos, scored=False)
        every = drawn(made, of_draw, slots, pos, return_logprob=kind, n_logprobs=count)
        assert ids.tolist() == alone.tolist() == [int(x.ids) for x in every]
        assert unscored is None
        of_kind = of_draw if kind == "processed" else logits
        for row, one in enumerate(every):
            if kind == "raw":  # the mask has no effect on it
                one = rk.sample(
                    logits[row : row + 1], seed=0, sample_id=0, position=0, return_logprob="raw", n_logprobs=count
                )
                own, best, values = rk.logprob(logits[row], ids[row]), one.raw_top_ids, one.raw_top_logprobs
            else:
                own, best, values = one.logprob, one.top_ids, one.top_logprobs
            assert scores.logprobs[row, 0].item() == own.item()
            assert scores.logprob_token_ids[row].tolist() == [int(ids[row]), *(best[0].tolist() if count else [])]
            if count:
                assert scores.logprobs[row, 1:].tolist() == values[0].tolist()
            ranked = int((of_kind[row] >= of_kind[row, ids[row]]).sum())
            if kind == "raw" or named in ("plain", "temperatures", "greedy", "some greedy"):
                assert int(scores.selected_token_ranks[row]) == ranked
            else:  # among the tokens that were kept
                assert int(scores.selected_token_ranks[row]) <= ranked


def test_a_request_that_takes_a_slot_over_is_drawn_by_its_own_seed() -> None:
    from rl_kernel_native.integrations.vllm import second_sampler

    made = sampler("raw_logprobs", 0)
    slots, pos = np.array([2, 4], np.int32), torch.tensor([12, 12])
    logits = torch.zeros(2, COLUMNS)  # all columns are equally probable, so another seed draws another token
    first, _ = step(made, logits, slots, pos, scored=True)
    made.sampling_states.seeds.np[2] += 1
    second_sampler.added(lambda *_: None, made, 2, 9, SimpleNamespace(extra_args={"sample_id": 4}))
    second, _ = step(made, logits, slots, pos, scored=True)
    assert first[1] == second[1]
    assert first[0] != second[0]
