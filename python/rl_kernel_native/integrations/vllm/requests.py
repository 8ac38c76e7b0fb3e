"""Seeds of requests. A request's parameters are checked on arrival, and its completions report the seed.

A request without a seed gets one, drawn from the engine's seed. Every completion reports the seed and the sample_id of
its draws (``rlk_seed``, ``rlk_sample_id``), so its tokens can be drawn again.
"""

from __future__ import annotations

import random
from typing import Any

from rl_kernel_native import _check
from rl_kernel_native.ops.sample import MOST_LOGPROBS

SAMPLE_ID = "sample_id"  # in SamplingParams.extra_args
INT64 = range(-(1 << 63), 1 << 63)


def refusals(params: Any) -> list[str]:
    """The parameters that rk.sample and rk.logprob do not support, each as "name = value"."""
    unused: dict[str, Any] = {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None,
        "structured_outputs": None, "thinking_token_budget": None, "logprob_token_ids": None,
    }  # fmt: skip
    found = [
        f"{name} = {_check.shown(getattr(params, name))}"
        for name, value in unused.items()
        if getattr(params, name) != value and getattr(params, name)
    ]
    counts = {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs")}
    return found + [
        f"{name} = {_check.shown(n)}" for name, n in counts.items() if n is not None and not 0 <= n <= MOST_LOGPROBS
    ]


def sample_id_of(params: Any) -> int:
    """The number of a request's rollout under its seed, from ``extra_args``. Default: 0."""
    given = (params.extra_args or {}).get(SAMPLE_ID, 0)
    if type(given) is not int:
        raise TypeError(f"extra_args['{SAMPLE_ID}']: expected an int, got {type(given).__name__}")
    if given not in INT64:
        raise ValueError(f"extra_args['{SAMPLE_ID}']: expected an integer of 64 bits, got {_check.shown(given)}")
    return given


def require_served(params: Any, resumable: bool) -> None:
    refused = refusals(params) + (["resumable = True"] if resumable else [])
    if refused:
        raise ValueError("RLK_VLLM does not serve requests with " + "; ".join(refused))
    sample_id_of(params)
    if params.seed is not None and (params.seed not in INT64 or params.seed + params.n - 1 not in INT64):
        raise ValueError(
            f"seed: expected one whose n seeds are signed integers of 64 bits, got {_check.shown(params.seed)}"
        )


def arrived(own: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **more: Any) -> Any:
    """Wraps InputProcessor.process_inputs: checks a request's parameters, and gives the request a seed."""
    from vllm import SamplingParams

    if isinstance(params, SamplingParams):
        require_served(params, bool(more.get("resumable")))
    request = own(self, request_id, prompt, params, *args, **more)
    given = request.sampling_params
    if given is not None and given.seed is None:
        given.seed = draw_seed(self)
    return request


def draw_seed(processor: Any) -> int:
    """The next seed of an engine. The seed depends only on the engine's own seed, the front end's rank, and the number
    of earlier draws."""
    source = getattr(processor, "rlk_seeds", None)
    if source is None:
        config = processor.vllm_config
        rank = config.parallel_config._api_process_rank
        source = processor.rlk_seeds = random.Random(f"{config.model_config.seed} {rank}")
    drawn: int = source.getrandbits(62)  # vLLM adds k for child k of n; the sum fits 64 bits
    return drawn


def followed(own: Any, self: Any, request: Any, *args: Any, **more: Any) -> None:
    """Wraps OutputProcessor.add_request: stores seed and sample_id in the request's state."""
    own(self, request, *args, **more)
    params = request.sampling_params
    if params is not None:
        self.request_states[request.request_id].rlk_key = params.seed, sample_id_of(params)


def completed(own: Any, self: Any, *args: Any, **more: Any) -> Any:
    """Wraps RequestState._new_completion_output: adds seed and sample_id to the completion."""
    output = own(self, *args, **more)
    output.rlk_seed, output.rlk_sample_id = self.rlk_key
    return output
