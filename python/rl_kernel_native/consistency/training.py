"""The training side: one teacher-forced forward over the rollout's own ids, packed or padded. Nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from .batches import MicroBatch
from .checks import SideInputs
from .model import ForwardCounter, HeadInput, LoadedModel
from .operators import Operators
from .probes import Recorder, attached, logits_digests
from .progress import Advance


@dataclass(frozen=True)
class TrainingResult:
    """Log-probabilities float32 [response length] of each sequence, and the inputs from which they were computed."""

    logprobs: list[torch.Tensor]
    logits_digests: list[list[bytes]]
    forward_calls: int
    micro_batches: int
    inputs: SideInputs
    recorder: Recorder


@torch.no_grad()
def run_training(
    loaded: LoadedModel,
    batches: Sequence[MicroBatch],
    inputs: SideInputs,
    prompt_lengths: Sequence[int],
    operators: Operators,
    recorder: Recorder,
    *,
    temperature: float,
    advance: Advance = lambda n: None,
) -> TrainingResult:
    """Scores the response tokens of every sequence.

    Args:
        batches: from make_batches; inputs: batch_inputs of the same batches, already checked against the rollout.
        prompt_lengths: length of each prompt; the tokens after the prompt are scored.
        advance: called with 1 after each forward.
    """
    logprobs: dict[int, torch.Tensor] = {}
    digests: dict[int, list[bytes]] = {}
    with ExitStack() as stack:
        stack.enter_context(operators.applied(loaded.model))
        counter = stack.enter_context(ForwardCounter(loaded.model))
        head = stack.enter_context(HeadInput(loaded.model.lm_head))
        stack.enter_context(attached(loaded.model, recorder))
        for batch in batches:
            tokens = [
                (row, start + p, start + p, prompt, p)
                for prompt, row, start, length in batch.places
                for p in range(length)
            ]
            recorder.begin(tokens, loaded.device)
            out = loaded.model(
                input_ids=batch.ids, position_ids=batch.positions, use_cache=False, **operators.training_mask(batch)
            )
            for prompt, row, start, length in batch.places:
                # The logits of position p score the token at p + 1.
                fed = range(prompt_lengths[prompt] - 1, length - 1)
                logits = out.logits[row, start + fed.start : start + fed.stop]
                target = batch.ids[row, start + fed.start + 1 : start + length]
                logits = recorder.add_tokens("lm_head", "lm_head", [prompt] * len(fed), list(fed), logits)
                if recorder.replaces:
                    logprob = operators.logprob_of_logits(logits, target, temperature)
                else:
                    hidden = head.input[row, start + fed.start : start + fed.stop]
                    logprob = operators.training_logprob(loaded.model.lm_head, hidden, logits, target, temperature)
                logprobs[prompt] = logprob.cpu()
                recorder.add_tokens("logprob", "logprob", [prompt] * len(fed), list(fed), logprobs[prompt])
                digests[prompt] = logits_digests(logits)
            advance(1)
    order = sorted(logprobs)
    return TrainingResult(
        logprobs=[logprobs[prompt] for prompt in order],
        logits_digests=[digests[prompt] for prompt in order],
        forward_calls=counter.calls,
        micro_batches=len(batches),
        inputs=inputs,
        recorder=recorder,
    )
