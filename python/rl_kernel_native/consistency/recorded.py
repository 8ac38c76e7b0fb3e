"""Compares log-probabilities that an engine recorded with a trainer's forward on the same ids.

The recording is a file of JSON lines. Each line has the ids of a prompt, the ids of a response and the response's
log-probabilities. The fields have the names of one of the DIALECTS below. The optional object `logprob_semantics`, with
the fields of rk.LogprobSemantics, says to which distribution the log-probabilities refer. Other fields are ignored.
A line of vLLM may have several responses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _check
from .._semantics import LogprobSemantics, require_same_semantics
from .batches import batch_inputs, make_batches
from .checks import check_token_ids
from .errors import BadInput, spelled
from .metrics import Metrics, compare_logprobs
from .model import LoadedModel
from .operators import make_operators
from .probes import ProbePlan, Recorder
from .progress import Progress
from .training import run_training

# Names of prompt, response and log-probabilities: this library's, vLLM's, SGLang's and verl's.
DIALECTS = (
    ("prompt_ids", "response_ids", "logprobs"),
    ("prompt_token_ids", "token_ids", "logprobs"),
    ("input_ids", "output_ids", "output_token_logprobs"),
    ("prompts", "responses", "rollout_log_probs"),
)
# A log-probability above this limit is an error, not a rounding of 0. An engine with exponentials in base 2, or with
# logit and lse from two kernels, subtracts float32 numbers whose last bit is 6e-5 for logits of 1000. torch and vLLM
# never exceed 0.
_ABOVE_ZERO = 1e-4
# Temperatures to try if the recorded log-probabilities do not fit the given temperature.
_TEMPERATURES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.25, 1.5, 1.75, 2.0)
# The mean |dlogp| of a whole model that rounding explains, by dtype.
_ROUNDING = {"bfloat16": 0.1, "float16": 0.02, "float32": 1e-3, "float64": 1e-3}
# Another temperature, or a shift by one token, is reported if it reduces the differences of the first records to this
# share.
_FIT = 0.2
_RECORDS_TO_FIT = 4


@dataclass(frozen=True)
class Record:
    """One response of an engine.

    Attributes:
        semantics: the engine's statement about its log-probabilities.
        where: the record's place in a file, for errors.
    """

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    semantics: LogprobSemantics | None = None
    where: str = ""


@dataclass(frozen=True)
class RecordedComparison:
    """The comparison of an engine's recording with a trainer's forward.

    Attributes:
        better_temperature: another temperature that fits the recorded log-probabilities far better, if such a
            temperature exists.
        better_mean_abs: mean |dlogp| at the better temperature, or with the shift.
        shift: 1 if each recorded log-probability fits the token after the token that it stands beside, -1 if it fits
            the token before, else 0.
    """

    model: str
    dtype: str
    device: str
    temperature: float
    metrics: Metrics
    aligned: bool
    better_temperature: float | None
    better_mean_abs: float
    shift: int = 0

    @property
    def faulty(self) -> bool:
        """Whether the differences are larger than rounding explains."""
        return self.better_temperature is not None or not self.metrics.mean_abs_dlogp <= _ROUNDING[self.dtype]

    def __str__(self) -> str:
        """The verdict in one sentence."""
        m = self.metrics
        figures = f"{m.differing_tokens} of {m.tokens} tokens differ, mean |dlogp| {m.mean_abs_dlogp:.3g}"
        if self.better_temperature is not None:
            return (
                f"fault: temperature: the recorded log-probabilities fit {self.better_temperature:g} (mean |dlogp| "
                f"{self.better_mean_abs:.3g}), not {self.temperature:g} ({figures})."
            )
        if self.shift:
            which = "after" if self.shift > 0 else "before"
            return (
                f"fault: positions: each recorded log-probability fits the token {which} its own (mean |dlogp| "
                f"{self.better_mean_abs:.3g}); write each beside its own token ({figures})."
            )
        if self.faulty:
            where = f", most at record {m.worst.prompt}, position {m.worst.position}" if m.worst else ""
            return (
                f"fault: larger than rounding to {self.dtype} explains: {figures}{where}. Other weights, or another "
                f"prompt than the engine's. To name the operator, give prompts, the engine's model as "
                f"{spelled('model_a')} and this one as {spelled('model_b')}."
            )
        if self.aligned:
            return f"aligned: {figures}."
        return f"rounding, no fault: {figures}, max |ratio - 1| {m.max_abs_ratio:.3g}."


def load_records(path: Path, vocab_size: int) -> list[Record]:
    """The responses of a JSON lines file. Raises BadInput with FILE:LINE and the expected content."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot read the records: {error}") from error
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{where}: not JSON: {error}") from error
            for record in _records(fields, where):
                ids = [*record.prompt, *record.response]
                check_token_ids(ids, vocab_size, where=record.where, prompt=len(records))
                records.append(record)
    if not records:
        raise BadInput(f"{path} holds no response")
    return records


def _records(fields: Any, where: str) -> list[Record]:
    """The responses of one line. vLLM's RequestOutput has one for each of `outputs`."""
    if not isinstance(fields, dict):
        raise BadInput(f"{where}: want a JSON object")
    outputs = fields.get("outputs")
    if not isinstance(outputs, list) or not outputs:
        return [_record(fields, where)]
    found = []
    for i, output in enumerate(outputs):
        at = f"{where}: outputs[{i}]" if len(outputs) > 1 else where
        if not isinstance(output, dict):
            raise BadInput(f"{at}: expected a response, an object in 'outputs', got {_check.shown(output)}")
        found.append(_record({**fields, **output}, at))
    return found


def _record(fields: dict[str, Any], where: str) -> Record:
    if isinstance(fields.get("meta_info"), dict):  # SGLang's field for log-probabilities
        fields = {**fields["meta_info"], **fields}
    stamp = fields.get("logprob_semantics")
    try:
        semantics = None if stamp is None else LogprobSemantics.from_json(stamp)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: logprob_semantics: {error}") from error
    for prompt, response, logprobs in DIALECTS:
        if prompt in fields and logprobs in fields:
            values = fields[logprobs]
            if not isinstance(values, list):
                raise BadInput(f"{where}: {logprobs!r} must be a list of log-probabilities")
            ids = fields.get(response)
            if ids is None and values and isinstance(values[0], list):  # SGLang: [logprob, id, text]
                ids = [item[1] if isinstance(item, list) and len(item) > 1 else None for item in values]
            if ids is None:
                continue
            before = len(_ids(fields[prompt], prompt, where))
            ids = _checked_ids(fields[prompt], _ids(ids, response, where), values, where)
            scores = [
                _number(value, token, f"{where}: {logprobs}[{i}]", before + i)
                for i, (value, token) in enumerate(zip(values, ids, strict=True))
            ]
            return Record(fields[prompt], ids, scores, semantics, where)
    names = "; ".join(", ".join(names) for names in DIALECTS)
    raise BadInput(
        f"{where}: expected ids of prompt and response, and log-probabilities by the names of one of: {names}; "
        f"got {', '.join(map(str, fields)) or 'nothing'}"
    )


def _checked_ids(prompt: list[int], response: list[int], values: list[Any], where: str) -> list[int]:
    """The response, after a check that it has as many ids as log-probabilities."""
    if not prompt or not response:
        raise BadInput(f"{where}: expected at least one id in prompt and response")
    if len(values) != len(response):
        raise BadInput(
            f"{where}: expected a log-probability for each of {len(response)} ids of the response, got {len(values)}"
        )
    return response


def _ids(value: Any, field: str, where: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise BadInput(f"{where}: {field!r} must be a list of integers")
    return value


def _number(item: Any, token: int, where: str, position: int) -> float:
    """A log-probability: a number, SGLang's [logprob, id, text], or vLLM's {id: {"logprob": ...}}. A token that cannot
    be drawn has -Inf. A finite number below the range of float32 is refused."""
    value = item
    if isinstance(item, dict):
        value = item.get(str(token), item)
        value = value.get("logprob") if isinstance(value, dict) else value
    elif isinstance(item, list) and item:
        value = item[0] if len(item) == 1 or item[1] == token else None
    is_logprob = type(value) in (int, float) and value <= _ABOVE_ZERO
    if not is_logprob or (-math.inf < value and _check.in_float32(value) == -math.inf):
        raise BadInput(
            f"{where}: expected a log-probability of token {token} at position {position}, a number <= 0 (or up to "
            f"{_ABOVE_ZERO:g}, by rounding), got {_check.shown(item)}"
        )
    return float(value)


def compare_recorded(
    loaded: LoadedModel,
    records: Sequence[Record],
    *,
    temperature: float = 1.0,
    ops: str = "stock",
    packing: str = "packed",
    micro_batch_tokens: int = 4096,
    atol: float = 0.0,
    progress: Progress | None = None,
) -> RecordedComparison:
    """Scores the ids of the records with a training forward, and compares the log-probabilities.

    Args:
        temperature: the temperature of the recorded log-probabilities. If the log-probabilities differ much, other
            temperatures are tried.

    Raises: BadInput for an option, a record longer than the model's context, or a record whose semantics differ from
        the trainer's.
    """
    own = LogprobSemantics(logits_dtype=str(loaded.dtype).removeprefix("torch."), temperature=temperature)
    for index, record in enumerate(records):
        where = record.where or f"record {index}"
        try:
            require_same_semantics(None if record.semantics is None else (own, record.semantics))
        except ValueError as error:
            raise BadInput(f"{where}: {error}") from error
        length = len(record.prompt) + len(record.response)
        if length > loaded.max_length:
            raise BadInput(f"{where}: {length} tokens exceed the model's {loaded.max_length}")
    progress = progress or Progress(silent=True)

    def score(chosen: Sequence[Record], at: float, label: str) -> list[torch.Tensor]:
        return _score(loaded, chosen, at, ops, packing, micro_batch_tokens, progress, label)

    def against(chosen: Sequence[Record], at: float, label: str) -> Metrics:
        scored = score(chosen, at, label)
        recorded = [torch.tensor(record.logprobs, dtype=torch.float32) for record in chosen]
        lengths = [len(record.prompt) for record in chosen]
        unknown = [[False] * len(record.response) for record in chosen]
        return compare_logprobs(recorded, scored, [record.response for record in chosen], lengths, unknown)

    metrics = against(records, temperature, "training forward")
    dtype = str(loaded.dtype).removeprefix("torch.")
    better, best, shift = None, metrics.mean_abs_dlogp, 0
    if not metrics.mean_abs_dlogp <= 0.1 * _ROUNDING[dtype]:
        some = [record for record, _ in zip(records, range(_RECORDS_TO_FIT), strict=False)]
        given = best = against(some, temperature, f"temperature {temperature:g}").mean_abs_dlogp
        for other in _TEMPERATURES:
            mean = against(some, other, f"temperature {other:g}").mean_abs_dlogp
            if mean < _FIT * given and mean < best:
                better, best = other, mean
        if better is None:
            shift, best = _shift(some, score(some, temperature, "shift by a token"), given)
    return RecordedComparison(
        model=loaded.name,
        dtype=dtype,
        device=str(loaded.device),
        temperature=temperature,
        metrics=metrics,
        aligned=metrics.differing_tokens == 0 or (atol > 0 and metrics.max_abs_dlogp <= atol),
        better_temperature=better if better != temperature else None,
        better_mean_abs=best,
        shift=shift,
    )


def _shift(records: Sequence[Record], scored: Sequence[torch.Tensor], given: float) -> tuple[int, float]:
    """The shift of :class:`RecordedComparison`, and the mean |dlogp| with this shift; without a shift, 0 and
    `given`."""
    for shift in (1, -1):
        parts = []
        for record, own in zip(records, scored, strict=True):
            recorded = torch.tensor(record.logprobs, dtype=torch.float32)
            pair = (recorded[:-1], own[1:]) if shift > 0 else (recorded[1:], own[:-1])
            parts.append((pair[0] - pair[1].float().cpu()).abs())
        apart = torch.cat(parts)
        if len(apart) and float(apart.mean()) < _FIT * given:
            return shift, float(apart.mean())
    return 0, given


def _score(
    loaded: LoadedModel,
    records: Sequence[Record],
    temperature: float,
    ops: str,
    packing: str,
    micro_batch_tokens: int,
    progress: Progress,
    label: str,
) -> list[torch.Tensor]:
    operators = make_operators(ops, "training_ops")
    operators.check(loaded.model)
    sequences = [[*record.prompt, *record.response] for record in records]
    pad_id = loaded.pad_id if loaded.pad_id is not None else 0
    batches = make_batches(sequences, packing, micro_batch_tokens, pad_id, "right", loaded.device)
    with progress.task(label, len(batches)) as advance:
        result = run_training(
            loaded,
            batches,
            batch_inputs(batches, packing, "right", loaded),
            [len(record.prompt) for record in records],
            operators,
            Recorder(ProbePlan({})),
            temperature=temperature,
            advance=advance,
        )
    return result.logprobs
