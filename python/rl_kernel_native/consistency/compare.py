"""Generates a rollout, scores its ids with a training forward, and compares. These steps run for each batch size; then
rollouts of different batch sizes are compared."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from .batches import batch_inputs, make_batches
from .checks import PaddingSide, check_sides, first_difference
from .divergence import compare_traces, first_divergent
from .errors import BadInput, spelled
from .faults import Judge, rounding_of
from .metrics import bytes_differ, compare_logprobs
from .model import LoadedModel
from .operators import Operators, make_operators, operator_table
from .probes import ProbePlan, Recorder, plan_probes, probe_bytes_per_token
from .progress import Progress
from .prompts import Prompt
from .result import BatchRun, Comparison, CrossBatch
from .rollout import RolloutResult, run_rollout
from .settings import CompareSettings
from .training import TrainingResult, run_training


def run_compare(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    settings: CompareSettings,
    *,
    training_model: LoadedModel | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compares rollout and training log-probabilities of a model.

    Args:
        loaded: the model of the rollout; also the training side's model if training_model is None.
        prompts: prompts from load_prompts, called with the same max_new_tokens.
        training_model: another checkpoint of the same shape, for example the trainer's after a weight update.

    Raises:
        BadInput: bad settings, models that the operators do not support, NaN logits.
        InputMismatch: the two sides got different ids, special tokens, positions or padding.
    """
    settings.check()
    trainer = training_model or loaded
    if trainer.vocab_size != loaded.vocab_size or trainer.num_layers != loaded.num_layers:
        raise BadInput(
            f"{trainer.name}: expected the shape of {loaded.name} ({loaded.num_layers} layers, vocabulary of "
            f"{loaded.vocab_size}), got {trainer.num_layers} layers, vocabulary of {trainer.vocab_size}"
        )
    if trainer.dtype != loaded.dtype:
        common = spelled("dtype", str(loaded.dtype).removeprefix("torch."))
        raise BadInput(
            f"{trainer.name}: expected {loaded.name}'s {loaded.dtype}, got {trainer.dtype}; give {common} to compare "
            "both in that dtype"
        )
    if trainer.device != loaded.device:
        raise BadInput(
            f"{trainer.name}: expected {loaded.name}'s device {loaded.device}, got {trainer.device}; give "
            f"{spelled('device', str(loaded.device))} to compare both there"
        )
    sides = (
        make_operators(settings.rollout_ops, "rollout_ops"),
        make_operators(settings.training_ops, "training_ops"),
    )
    dtype = str(loaded.dtype).removeprefix("torch.")
    for operators, model in zip(sides, (loaded, trainer), strict=True):
        operators.check(model.model)
    progress = progress or Progress(silent=True)
    runs: list[BatchRun] = []
    rollouts: list[RolloutResult] = []
    for batch_size in settings.batch_sizes:
        run, rollout = _run_batch_size(loaded, trainer, prompts, settings, sides, batch_size, progress)
        runs.append(run)
        rollouts.append(rollout)
    across = [
        _across(settings.batch_sizes[0], size, rollouts[0], other, settings.atol)
        for size, other in zip(settings.batch_sizes[1:], rollouts[1:], strict=True)
    ]
    return Comparison(
        settings=settings,
        rounding=rounding_of(loaded.dtype, loaded.device),
        model=_describe(loaded, dtype, training_model),
        prompts=len(prompts),
        aligned=all(run.aligned for run in runs) and all(cross.aligned for cross in across),
        operator_table=operator_table(*sides),
        runs=runs,
        across_batches=across,
    )


def _describe(loaded: LoadedModel, dtype: str, training_model: LoadedModel | None) -> dict[str, str | int]:
    trainer = {} if training_model is None else {"training model": training_model.name}
    return {
        "model": loaded.name,
        **trainer,
        "family": loaded.family,
        "dtype": dtype,
        "device": str(loaded.device),
        "layers": loaded.num_layers,
        "vocab_size": loaded.vocab_size,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
    }


def _run_batch_size(
    loaded: LoadedModel,
    trainer: LoadedModel,
    prompts: Sequence[Prompt],
    settings: CompareSettings,
    sides: tuple[Operators, Operators],
    batch_size: int,
    progress: Progress,
) -> tuple[BatchRun, RolloutResult]:
    prompt_lengths = [len(prompt.ids) for prompt in prompts]
    plan = _plan(loaded, prompt_lengths, settings)
    label = f"{settings.label}, batch {batch_size}"
    started = time.perf_counter()
    with progress.task(f"rollout ({label})", len(prompts) * settings.max_new_tokens) as advance:
        rollout = run_rollout(
            loaded,
            [prompt.ids for prompt in prompts],
            sides[0],
            Recorder(plan),
            seed=settings.seed,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            batch_size=batch_size,
            advance=advance,
        )
    rolled_out = time.perf_counter()
    training = _train(trainer, rollout, prompt_lengths, settings, sides[1], Recorder(plan), label, progress)
    trained = time.perf_counter()
    rounding = rounding_of(trainer.dtype, trainer.device)
    judge = Judge(plan, rollout.recorder.trace, rounding, settings.fault_tolerance)
    _train(trainer, rollout, prompt_lengths, settings, sides[1], judge, f"each operator alone, {label}", progress)
    metrics = compare_logprobs(
        [rollout.logprob(index) for index in range(len(prompts))],
        training.logprobs,
        [request.response for request in rollout.requests],
        prompt_lengths,
        [
            [a == b for a, b in zip(request.logits_digests, digests, strict=True)]
            for request, digests in zip(rollout.requests, training.logits_digests, strict=True)
        ],
    )
    drifts = compare_traces(rollout.recorder.trace, training.recorder.trace, prompt_lengths)
    judgements = judge.judgements()
    run = BatchRun(
        batch_size=batch_size,
        prompt_tokens=sum(prompt_lengths),
        response_tokens=metrics.tokens,
        prefills=rollout.prefills,
        decode_steps=len(rollout.membership),
        rollout_forwards=rollout.forward_calls,
        training_forwards=training.forward_calls,
        seconds_rollout=round(rolled_out - started, 3),
        seconds_training=round(trained - rolled_out, 3),
        probed_tokens=max((drift.tokens for drift in drifts), default=0),
        aligned=_is_aligned(metrics.differing_tokens, metrics.max_abs_dlogp, settings.atol),
        metrics=metrics,
        first_divergent=first_divergent(drifts),
        faults=[judgement for judgement in judgements if judgement.fault],
        judgements=judgements,
        operators=drifts,
        membership=rollout.membership,
    )
    return run, rollout


def _plan(loaded: LoadedModel, prompt_lengths: list[int], settings: CompareSettings) -> ProbePlan:
    per_token = probe_bytes_per_token(loaded.model.config, loaded.dtype.itemsize)
    lengths = [length + settings.max_new_tokens for length in prompt_lengths]
    return plan_probes(lengths, per_token, settings.probe_mb << 20)


def _train(
    trainer: LoadedModel,
    rollout: RolloutResult,
    prompt_lengths: list[int],
    settings: CompareSettings,
    operators: Operators,
    recorder: Recorder,
    label: str,
    progress: Progress,
) -> TrainingResult:
    sequences = [request.ids for request in rollout.requests]
    side: PaddingSide = "left" if settings.padding_side == "left" else "right"
    # Padding is masked, so any id serves if the model has no padding id.
    pad_id = trainer.pad_id if trainer.pad_id is not None else 0
    batches = make_batches(sequences, settings.packing, settings.micro_batch_tokens, pad_id, side, trainer.device)
    inputs = batch_inputs(batches, settings.packing, side, trainer)
    check_sides(rollout.inputs, inputs)
    with progress.task(f"training forward ({label})", len(batches)) as advance:
        return run_training(
            trainer,
            batches,
            inputs,
            prompt_lengths,
            operators,
            recorder,
            temperature=settings.training_temperature or settings.temperature,
            advance=advance,
        )


def _is_aligned(differing: int, max_abs: float, atol: float) -> bool:
    return differing == 0 or (atol > 0 and max_abs <= atol)


def _across(batch_a: int, batch_b: int, a: RolloutResult, b: RolloutResult, atol: float) -> CrossBatch:
    differing_sequences, common, differing, largest = 0, 0, 0, 0.0
    first = (-1, -1)
    for request, other in zip(a.requests, b.requests, strict=True):
        at = first_difference(request.response, other.response)
        if at < max(len(request.response), len(other.response)):
            differing_sequences += 1
            if first[0] < 0:
                first = (request.index, len(request.prompt) + at)
        if at:
            old, new = a.logprob(request.index)[:at], b.logprob(request.index)[:at]
            differs = bytes_differ(old, new)
            common += at
            differing += int(differs.sum())
            if bool(differs.any()):
                largest = max(
                    largest, float((new.double() - old.double())[differs].abs().nan_to_num(nan=math.inf).max())
                )
    return CrossBatch(
        batch_a=batch_a,
        batch_b=batch_b,
        aligned=differing_sequences == 0 and _is_aligned(differing, largest, atol),
        sequences_differing=differing_sequences,
        first_prompt=first[0],
        first_position=first[1],
        common_tokens=common,
        differing_tokens=differing,
        max_abs_dlogp=largest,
    )
