"""Roll out, score the same ids with a training forward, compare. Once per batch size, then across batch sizes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .checks import check_sides, first_difference
from .divergence import FAULT_TOLERANCE, OperatorDrift, compare_traces, first_beyond_tolerance, first_divergent
from .errors import BadInput
from .metrics import Metrics, bytes_differ, compare_logprobs
from .model import LoadedModel
from .operators import OperatorRow, Operators, make_operators
from .probes import ProbePlan, Recorder, plan_probes, probe_bytes_per_token
from .progress import Progress
from .prompts import Prompt
from .rollout import RolloutResult, run_rollout
from .training import Packing, TrainingResult, batch_inputs, make_batches, run_training


@dataclass(frozen=True)
class CompareSettings:
    """What to run.

    Attributes:
        batch_sizes: most requests in flight; each one is run and compared.
        atol: sides are aligned when every |dlogp| <= atol; 0 means equal bytes.
        padding_side: of the padded training batch.
        micro_batch_tokens: tokens of one training forward, padding included.
        probe_mb: memory for recorded hidden states, both sides together.
        fault_tolerance: relative error that counts as a fault; None takes FAULT_TOLERANCE of the model's dtype.
    """

    seed: int = 0
    batch_sizes: tuple[int, ...] = (1, 8)
    max_new_tokens: int = 64
    temperature: float = 1.0
    ops: str = "stock"
    packing: Packing = "packed"
    padding_side: str = "right"
    atol: float = 0.0
    micro_batch_tokens: int = 4096
    probe_mb: int = 512
    fault_tolerance: float | None = None

    def check(self) -> None:
        """Raises BadInput, naming the option, the value and what is wanted."""
        wanted = (
            (0 <= self.seed < 2**64, f"--seed {self.seed}: want 0 <= seed < 2**64"),
            (len(self.batch_sizes) > 0, "--batch: want at least one batch size"),
            (all(size > 0 for size in self.batch_sizes), f"--batch {self.batch_sizes}: want positive sizes"),
            (len(set(self.batch_sizes)) == len(self.batch_sizes), "--batch: a size is given twice"),
            (self.max_new_tokens > 0, f"--max-new-tokens {self.max_new_tokens}: want at least 1"),
            (0 < self.temperature < math.inf, f"--temperature {self.temperature}: want a number > 0"),
            (self.ops in ("stock", "rk"), f"--ops {self.ops}: want stock or rk"),
            (self.packing in ("packed", "padded"), f"--packing {self.packing}: want packed or padded"),
            (self.padding_side in ("left", "right"), f"--padding-side {self.padding_side}: want left or right"),
            (0 <= self.atol < math.inf, f"--atol {self.atol}: want a number >= 0"),
            (self.micro_batch_tokens > 0, "--micro-batch-tokens: want at least 1"),
            (self.probe_mb > 0, "--probe-mb: want at least 1"),
            (self.fault_tolerance is None or self.fault_tolerance > 0, "--fault-tolerance: want a number > 0"),
        )
        for good, message in wanted:
            if not good:
                raise BadInput(message)


@dataclass(frozen=True)
class BatchRun:
    """Rollout at one batch size against its training forward.

    Attributes:
        prefills, decode_steps: rollout forwards; rollout_forwards is what the model itself counted.
        membership: prompts in the batch at each decode step, by row.
        probed_tokens: response and prompt tokens whose hidden states were recorded on both sides.
    """

    batch_size: int
    prompt_tokens: int
    response_tokens: int
    prefills: int
    decode_steps: int
    rollout_forwards: int
    training_forwards: int
    seconds_rollout: float
    seconds_training: float
    probed_tokens: int
    aligned: bool
    metrics: Metrics
    first_divergent: OperatorDrift | None
    first_beyond_tolerance: OperatorDrift | None
    operators: list[OperatorDrift]
    membership: list[tuple[int, ...]]


@dataclass(frozen=True)
class CrossBatch:
    """Two rollouts of the same prompts and seed at different batch sizes, compared up to the first differing id.

    Attributes:
        sequences_differing: sequences that sampled a different id somewhere.
        first_prompt, first_position: first differing id, -1 when none.
        common_tokens: response tokens before any difference; the figures below are over these.
    """

    batch_a: int
    batch_b: int
    aligned: bool
    sequences_differing: int
    first_prompt: int
    first_position: int
    common_tokens: int
    differing_tokens: int
    max_abs_dlogp: float


@dataclass(frozen=True)
class Comparison:
    """Everything that one setting of --ops found. `aligned` decides the exit status."""

    settings: CompareSettings
    fault_tolerance: float
    model: dict[str, str | int]
    prompts: int
    aligned: bool
    operator_table: list[OperatorRow]
    runs: list[BatchRun]
    across_batches: list[CrossBatch] = field(default_factory=list)


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
        loaded: the model of the rollout, and of the training side unless training_model is given.
        prompts: from load_prompts with the same max_new_tokens.
        training_model: another checkpoint of the same shape, for example the trainer's after a weight update.

    Raises:
        BadInput: bad settings, --ops rk without the native library, NaN logits.
        InputMismatch: the two sides were fed different ids, special tokens, positions or padding.
    """
    settings.check()
    trainer = training_model or loaded
    if trainer.vocab_size != loaded.vocab_size or trainer.num_layers != loaded.num_layers:
        raise BadInput(f"{trainer.directory} and {loaded.directory} have different shapes")
    operators = make_operators(settings.ops)
    dtype = str(loaded.dtype).removeprefix("torch.")
    if settings.ops == "rk" and dtype == "float64":
        raise BadInput("--ops rk does not take float64 logits")
    tolerance = settings.fault_tolerance or FAULT_TOLERANCE[dtype]
    progress = progress or Progress(enabled=False)
    runs: list[BatchRun] = []
    rollouts: list[RolloutResult] = []
    for batch_size in settings.batch_sizes:
        run, rollout = _run_batch_size(loaded, trainer, prompts, settings, operators, batch_size, tolerance, progress)
        runs.append(run)
        rollouts.append(rollout)
    across = [
        _across(settings.batch_sizes[0], size, rollouts[0], other, settings.atol)
        for size, other in zip(settings.batch_sizes[1:], rollouts[1:])
    ]
    return Comparison(
        settings=settings,
        fault_tolerance=tolerance,
        model=_describe(loaded, dtype),
        prompts=len(prompts),
        aligned=all(run.aligned for run in runs) and all(cross.aligned for cross in across),
        operator_table=operators.table(),
        runs=runs,
        across_batches=across,
    )


def _describe(loaded: LoadedModel, dtype: str) -> dict[str, str | int]:
    return {
        "directory": str(loaded.directory),
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
    operators: Operators,
    batch_size: int,
    tolerance: float,
    progress: Progress,
) -> tuple[BatchRun, RolloutResult]:
    prompt_lengths = [len(prompt.ids) for prompt in prompts]
    plan = _plan(loaded, prompt_lengths, settings)
    label = f"{settings.ops}, batch {batch_size}"
    started = time.perf_counter()
    with progress.task(f"rollout ({label})", len(prompts) * settings.max_new_tokens) as advance:
        rollout = run_rollout(
            loaded,
            [prompt.ids for prompt in prompts],
            operators,
            Recorder(plan),
            seed=settings.seed,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            batch_size=batch_size,
            advance=advance,
        )
    rolled_out = time.perf_counter()
    training = _train(trainer, rollout, prompt_lengths, settings, operators, plan, label, progress)
    trained = time.perf_counter()
    metrics = compare_logprobs(
        [rollout.logprob(index) for index in range(len(prompts))],
        training.logprobs,
        [request.response for request in rollout.requests],
        prompt_lengths,
        [
            [a == b for a, b in zip(request.logits_digests, digests)]
            for request, digests in zip(rollout.requests, training.logits_digests)
        ],
    )
    drifts = compare_traces(rollout.recorder.trace, training.recorder.trace, prompt_lengths, tolerance)
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
        first_beyond_tolerance=first_beyond_tolerance(drifts),
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
    plan: ProbePlan,
    label: str,
    progress: Progress,
) -> TrainingResult:
    sequences = [request.ids for request in rollout.requests]
    side = "left" if settings.padding_side == "left" else "right"
    # Padding is masked, so any id will do when the model names none.
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
            Recorder(plan),
            temperature=settings.temperature,
            advance=advance,
        )


def _is_aligned(differing: int, max_abs: float, atol: float) -> bool:
    return differing == 0 or (atol > 0 and max_abs <= atol)


def _across(batch_a: int, batch_b: int, a: RolloutResult, b: RolloutResult, atol: float) -> CrossBatch:
    differing_sequences, common, differing, largest = 0, 0, 0, 0.0
    first = (-1, -1)
    for request, other in zip(a.requests, b.requests):
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
                largest = max(largest, float((new.double() - old.double())[differs].abs().nan_to_num(nan=math.inf).max()))
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
