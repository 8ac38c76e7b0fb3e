"""The results of a comparison, as plain data that the report writes field by field."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import explain
from .divergence import OperatorDrift
from .faults import Judgement
from .metrics import Metrics
from .operators import OperatorRow
from .settings import CompareSettings


@dataclass(frozen=True)
class BatchRun:
    """Rollout at one batch size against its training forward.

    Attributes:
        prefills, decode_steps: numbers of rollout forwards; rollout_forwards is the model's own count.
        membership: prompts in the batch at each decode step, by row.
        probed_tokens: response and prompt tokens whose hidden states were recorded on both sides.
        judgements: one per operator on equal input, in execution order; faults: judgements that rounding does not
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
        """Each operator that differs on equal input beyond rounding, once, in execution order."""
        return explain.faults(self)

    def __str__(self) -> str:
        """The verdict in one sentence."""
        return explain.verdict(self)

    def __repr__(self) -> str:
        return f"<Comparison of {self.model['model']}: {self}>"
