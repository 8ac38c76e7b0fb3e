"""The rollout side: continuous batching, one token per step with a KV cache, seeded sampling.

The scheduler works like a serving engine's scheduler, reduced to the parts that can change numbers. The scheduler
admits a waiting request as soon as a slot is free, at most one request per step. The request's prompt runs as a
separate forward; then the request is a row of the decode batch until it ends. The batch therefore grows, shrinks and
changes its members while requests are in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from ..integrations.decoder import cache_name
from ..ops.sample import SampleStatus, sample
from .cache import SlotCache
from .checks import SideInputs
from .errors import BadInput
from .model import ForwardCounter, LoadedModel
from .operators import Operators
from .probes import Recorder, attached, logits_digests
from .progress import Advance


@dataclass
class Request:
    """The state of one prompt during the rollout.

    Attributes:
        fed_ids, fed_positions: the ids and positions that the model got, read back from its input tensors.
        response, logprobs: sampled ids and their float32 log-probabilities, one per step.
        logits_digests: for each token, a 16-byte hash of the row of raw logits from which it was sampled.
    """

    index: int
    prompt: tuple[int, ...]
    slot: int = -1
    fed_ids: list[int] = field(default_factory=list)
    fed_positions: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    logits_digests: list[bytes] = field(default_factory=list)
    finish: str = ""

    @property
    def ids(self) -> list[int]:
        """The ids of prompt and response. The last token was sampled but never passed to the model."""
        return [*self.prompt, *self.response]


@dataclass(frozen=True)
class RolloutResult:
    """A finished rollout.

    Attributes:
        requests: in prompt order.
        membership: for each decode step, the prompts in the batch, by row.
        forward_calls: number of calls of the model's forward: one per prompt plus one per decode step.
    """

    requests: list[Request]
    membership: list[tuple[int, ...]]
    prefills: int
    forward_calls: int
    inputs: SideInputs
    recorder: Recorder

    def logprob(self, prompt: int) -> torch.Tensor:
        """float32 [response length] of one sequence."""
        return torch.stack(self.requests[prompt].logprobs)


class _Rollout:
    def __init__(
        self,
        loaded: LoadedModel,
        operators: Operators,
        recorder: Recorder,
        seed: int,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        self.loaded, self.operators, self.recorder = loaded, operators, recorder
        self.seed, self.temperature, self.max_new_tokens = seed, temperature, max_new_tokens
        self.cache_name = cache_name(type(loaded.model))

    def prefill(self, request: Request, cache: SlotCache) -> None:
        """Runs the prompt and samples the first token."""
        length = len(request.prompt)
        device = self.loaded.device
        ids = torch.tensor([request.prompt], dtype=torch.long, device=device)
        positions = torch.arange(length, device=device)[None]
        cache.begin_prefill(request.slot, length)
        self.recorder.begin([(0, p, p, request.index, p) for p in range(length)], device)
        out = self.loaded.model(
            input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{self.cache_name: cache}
        )
        request.fed_ids += ids[0].tolist()
        request.fed_positions += positions[0].tolist()
        self.take_tokens([request], out.logits[:, -1])

    def decode(self, active: Sequence[Request], cache: SlotCache) -> None:
        """Passes the last token of each active request to the model, and samples the next token."""
        device = self.loaded.device
        places = [len(request.ids) - 1 for request in active]
        ids = torch.tensor([[request.response[-1]] for request in active], dtype=torch.long, device=device)
        positions = torch.tensor(places, dtype=torch.long, device=device)[:, None]
        mask = self.operators.decode_mask(cache.begin_decode([request.slot for request in active], places))
        self.recorder.begin([(row, 0, p, active[row].index, p) for row, p in enumerate(places)], device)
        out = self.loaded.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **{self.cache_name: cache}
        )
        for row, request in enumerate(active):
            request.fed_ids.append(int(ids[row, 0]))
            request.fed_positions.append(int(positions[row, 0]))
        self.take_tokens(active, out.logits[:, -1])

    def draw(self, active: Sequence[Request], logits: torch.Tensor) -> list[int]:
        """One token per row of logits [B, vocab_size] by ``rk.sample``, keyed by seed, prompt and output position.

        Tokens are always drawn on the host with the portable exponential. A token therefore depends only on its row's
        logits, and not on the device or operators that computed them.

        Raises:
            BadInput: a row that ``rk.sample`` refuses, with the name of its status.
        """
        drawn = sample(
            logits.detach().to("cpu", torch.float32),
            seed=self.seed,
            sample_id=torch.tensor([request.index for request in active]),
            position=torch.tensor([len(request.response) for request in active]),
            temperature=self.temperature,
            return_logprob="none",
            exp="portable",
        )
        for request, status in zip(active, drawn.status.tolist(), strict=True):
            if status:
                reason = "|".join(str(bit.name).lower() for bit in SampleStatus if bit & status)
                raise BadInput(
                    f"prompt {request.index}, output token {len(request.response)}: no token drawn, {reason}"
                )
        return [int(token) for token in drawn.ids]

    def take_tokens(self, active: Sequence[Request], logits: torch.Tensor) -> None:
        """Samples one token per row of logits [B, vocab_size] and scores it."""
        prompts = [request.index for request in active]
        fed = [len(request.ids) - 1 for request in active]
        self.recorder.add_tokens("lm_head", "lm_head", prompts, fed, logits)
        tokens = self.draw(active, logits)
        target = torch.tensor(tokens, dtype=torch.long, device=logits.device)
        logprob = self.operators.rollout_logprob(logits, target, self.temperature).cpu()
        self.recorder.add_tokens("logprob", "logprob", prompts, fed, logprob)
        digests = logits_digests(logits)
        for row, request in enumerate(active):
            request.response.append(tokens[row])
            request.logprobs.append(logprob[row])
            request.logits_digests.append(digests[row])
            if tokens[row] in self.loaded.eos_ids:
                request.finish = "eos"
            elif len(request.response) == self.max_new_tokens:
                request.finish = "length"


@torch.no_grad()
def run_rollout(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    operators: Operators,
    recorder: Recorder,
    *,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    advance: Advance = lambda n: None,
) -> RolloutResult:
    """Samples one response for each prompt.

    Args:
        prompts: ids of each prompt, already checked.
        recorder: receives the hidden states of the tokens of its plan.
        batch_size: the largest number of requests in flight.
        advance: called with the number of tokens done; a request that ends early counts in full.

    Raises:
        BadInput: the model produced NaN or Inf logits, or a temperature left no finite weight.
    """
    run = _Rollout(loaded, operators, recorder, seed, temperature, max_new_tokens)
    requests = [Request(index=index, prompt=tuple(ids)) for index, ids in enumerate(prompts)]
    capacity = max(len(ids) for ids in prompts) + max_new_tokens
    slots = min(batch_size, len(requests))
    cache = SlotCache(loaded.model.config, slots, capacity, loaded.dtype, loaded.device)
    waiting = deque(requests)
    active: list[Request] = []
    membership: list[tuple[int, ...]] = []
    with ExitStack() as stack:
        stack.enter_context(operators.applied(loaded.model))
        counter = stack.enter_context(ForwardCounter(loaded.model))
        stack.enter_context(attached(loaded.model, recorder))
        while waiting or active:
            if waiting and len(active) < slots:
                request = waiting.popleft()
                request.slot = cache.acquire()
                run.prefill(request, cache)
                advance(1)
                active.append(request)
                active = _retire(active, cache, max_new_tokens, advance)
            if active:
                membership.append(tuple(request.index for request in active))
                run.decode(active, cache)
                advance(len(active))
                active = _retire(active, cache, max_new_tokens, advance)
    inputs = SideInputs(
        name="rollout",
        # The last sampled token was never an input, but the trainer must score it.
        ids=[[*request.fed_ids, request.response[-1]] for request in requests],
        positions=[[*request.fed_positions, len(request.fed_positions)] for request in requests],
        special_ids=loaded.special_ids,
    )
    return RolloutResult(requests, membership, len(requests), counter.calls, inputs, recorder)


def _retire(active: list[Request], cache: SlotCache, max_new_tokens: int, advance: Advance) -> list[Request]:
    staying = []
    for request in active:
        if not request.finish:
            staying.append(request)
            continue
        cache.release(request.slot)
        advance(max_new_tokens - len(request.response))
    return staying
