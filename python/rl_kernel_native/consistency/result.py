"""The results of a comparison and the verdict on them. The report writes these classes field by field."""

from __future__ import annotations

from dataclasses import dataclass, field

from .divergence import OperatorDrift
from .errors import spelled
from .faults import Judgement
from .metrics import Metrics
from .operators import OperatorRow
from .settings import CompareSettings

# The verdict names at most this many further faults. A wrong epsilon, for example, is a fault in every layer.
NAMED_FAULTS = 3
ROUNDING = "rounding, no fault"


@dataclass(frozen=True)
class BatchRun:
    """The comparison of one batch size's rollout with its training forward.

    Attributes:
        prefills, decode_steps: numbers of rollout forwards; rollout_forwards is the number that the model itself
            counted.
        membership: for each decode step, the prompts in the batch, by row.
        probed_tokens: response and prompt tokens whose hidden states were recorded on both sides.
        judgements: one judgement per operator on equal input, in execution order; faults: those that rounding does not
            explain.
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
    faults: list[Judgement]
    judgements: list[Judgement]
    operators: list[OperatorDrift]
    membership: list[tuple[int, ...]]


@dataclass(frozen=True)
class CrossBatch:
    """Two rollouts of the same prompts and seed at different batch sizes, compared up to the first differing id.

    Attributes:
        sequences_differing: number of sequences with a different sampled id.
        first_prompt, first_position: first differing id, -1 if none differs.
        common_tokens: number of response tokens before the first differing id; the figures below refer to these tokens.
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


@dataclass(frozen=True, repr=False)
class Comparison:
    """All results of one setting of the operators. `aligned` decides the exit status.

    Attributes:
        rounding: relative error that one rounding of the model's dtype explains.
    """

    settings: CompareSettings
    rounding: float
    model: dict[str, str | int]
    prompts: int
    aligned: bool
    operator_table: list[OperatorRow]
    runs: list[BatchRun]
    across_batches: list[CrossBatch] = field(default_factory=list)

    @property
    def faults(self) -> list[Judgement]:
        """Each faulty operator once, in execution order, with the judgement of the run in which its error is
        largest."""
        worst: dict[str, Judgement] = {}
        order: dict[str, int] = {}
        for run in self.runs:
            for index, judgement in enumerate(run.judgements):
                if judgement.fault:
                    order.setdefault(judgement.name, index)
                    before = worst.get(judgement.name)
                    if before is None or judgement.roundings > before.roundings:
                        worst[judgement.name] = judgement
        return [worst[name] for name in sorted(worst, key=order.__getitem__)]

    @property
    def totals(self) -> tuple[int, int, float]:
        """Numbers of tokens and of differing tokens in all runs, and the largest ``|ratio - 1|``."""
        metrics = [run.metrics for run in self.runs]
        return (
            sum(m.tokens for m in metrics),
            sum(m.differing_tokens for m in metrics),
            max(m.max_abs_ratio for m in metrics),
        )

    def __str__(self) -> str:
        """The verdict in one sentence: a fault and its operator, rounding and where it begins, or aligned.

        With this library's operators on both sides, equal weights give equal bytes, so a difference is then never
        called rounding.
        """
        tokens, differing, ratio = self.totals
        figures = f"{differing} of {tokens} tokens differ, max |ratio - 1| {ratio:.3g}"
        if found := self.faults:
            first, others = found[0], [fault.name for fault in found[1:]]
            also = f"; also {', '.join(others[:NAMED_FAULTS])}" if others else ""
            also += f" and {len(others) - NAMED_FAULTS} more" if len(others) > NAMED_FAULTS else ""
            return f"fault: {first.name}, {self.how_far(first)}{also} ({figures})."
        if self.aligned and not differing:
            return f"aligned: all {tokens} log-probabilities have the same bytes on both sides."
        if self.aligned:
            return f"aligned within {spelled('atol')}: {figures}."
        if not differing:
            return (
                "drift across batch sizes alone: rollouts of other batch sizes differ, each agrees with its training "
                "side."
            )
        first_drift = next((run.first_divergent for run in self.runs if run.first_divergent), None)
        begins = f"it begins in {first_drift.name}" if first_drift else "no recorded operator differs"
        if first_drift and self.settings.rollout_ops == self.settings.training_ops == "rk":
            return f"weights or settings differ, by less than rounding: {figures}; {begins}."
        return f"{ROUNDING}: {figures}; {begins}."

    def how_far(self, fault: Judgement) -> str:
        """The size of a fault's error, in words."""
        digits = 0 if fault.roundings >= 10 else 1
        times = f"{fault.roundings:,.{digits}f} times its rounding"
        if fault.kind == "logprob":
            training = self.settings.training_temperature or self.settings.temperature
            if training != self.settings.temperature:
                return f"temperature {self.settings.temperature:g} in the rollout and {training:g} in training"
            return f"{times} on equal logits"
        scale = f" (training's outputs are {fault.factor:.4g} times the rollout's)" if fault.scaled else ""
        return f"error {fault.error:.2%} on equal input, {times}{scale}"

    def __repr__(self) -> str:
        return f"<Comparison of {self.model['model']}: {self}>"
