"""Judges every operator by itself: the training side runs again, and each operator gets the input that the rollout's
operator had.

After an operator has run, its output is compared with the rollout's output and then replaced by the rollout's output.
The errors of an earlier operator therefore never reach a later one. An error must come from the operator itself: a
weight, an epsilon, a bias, a rotation or a temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .probes import ProbePlan, Recorder, Trace, gathered, split_key

# Unit roundoff of a dtype; for float32, the effect of a matrix product's order of summation instead.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-15, "float64": 2.0**-15}
_TF32 = 2.0**-10
# A token's vector may be off by this many roundings; attention also rounds its scores and probabilities.
_ROUNDINGS, _ROUNDINGS_OF_ATTENTION = 3.0, 12.0
# A factor common to all tokens is visible even if it is smaller than one rounding, because roundings have no common
# direction.
_ROUNDINGS_OF_FACTOR = 0.5
# Bounds of log-probabilities. Both sides compute them in float32, for any dtype of the model.
_LOGPROB_TOLERANCE, _LEAST_LOGPROB = 1e-3, 1.0
# The error of a token with a very small output is divided by this share of the median norm of all outputs.
_LEAST_SHARE = 0.1
# One factor explains the errors if the errors are mostly parallel to the rollout's vectors. The perpendicular part of
# an error, minus one rounding, must then be at most this share of the parallel part.
_LARGEST_ACROSS = 0.5


@dataclass(frozen=True)
class Judgement:
    """The difference between an operator of the training side and the same operator of the rollout, on equal input.

    Attributes:
        error: largest relative error of a token's vector.
        factor: the median over tokens of t * r / |r|^2, for the training vector t and the rollout's vector r; 1.0 means
            equal sizes.
        scaled: whether the factor explains the errors: training vectors have the same direction as the rollout's
            vectors.
        roundings: the larger of `error` and the deviation of `factor` from 1, in units of one rounding.
        prompt, position: token of the largest error.
    """

    name: str
    kind: str
    tokens: int
    error: float
    factor: float
    scaled: bool
    roundings: float
    fault: bool
    prompt: int
    position: int


def rounding_of(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error that one rounding of a model's dtype explains."""
    if dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return _TF32
    return ROUNDING[str(dtype).removeprefix("torch.")]


class Judge(Recorder):
    """A recorder of the training side that keeps no values. It compares each value with the rollout's value, and then
    substitutes the rollout's value.

    Args:
        plan: tokens to judge.
        rollout: the rollout's recording.
        rounding: the result of rounding_of.
        tolerance: relative error beyond which an operator is at fault; None: the limit that roundings explain.
    """

    replaces = True

    def __init__(self, plan: ProbePlan, rollout: Trace, rounding: float, tolerance: float | None = None) -> None:
        super().__init__(plan)
        self._rollout, self._rounding, self._tolerance = rollout, rounding, tolerance
        self._found: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]] = {}

    def _take(
        self, name: str, kind: str, values: tuple[torch.Tensor, ...], keys: torch.Tensor, *index: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if not len(keys) or name not in self._rollout.kinds:
            return values
        known, wanted = self._rollout.lookup(name, keys)
        if not len(wanted):
            return values
        self.trace.kinds.setdefault(name, kind)
        index = tuple(part[known.to(part.device)] for part in index)
        own, other = gathered(values, index).cpu().double(), wanted.double()
        difference = torch.where(own == other, 0.0, own - other)
        self._found.setdefault(name, []).append(
            (keys[known], difference.norm(dim=1), (own * other).sum(1), other.norm(dim=1))
        )
        return _replaced(values, index, wanted, in_place=kind == "add")

    def judgements(self) -> list[Judgement]:
        """Gives one judgement for each operator of both sides, in execution order."""
        return [self._judge(name, kind) for name, kind in self.trace.kinds.items()]

    def _judge(self, name: str, kind: str) -> Judgement:
        keys, differences, products, norms = (torch.cat(part) for part in zip(*self._found[name], strict=True))
        least = _LEAST_SHARE * float(norms.median())
        if kind == "logprob":
            limit, factor_limit, least = _LOGPROB_TOLERANCE, float("inf"), _LEAST_LOGPROB
        else:
            roundings = _ROUNDINGS_OF_ATTENTION if kind == "attention" else _ROUNDINGS
            limit, factor_limit = roundings * self._rounding, _ROUNDINGS_OF_FACTOR * self._rounding
        if self._tolerance is not None:
            limit = self._tolerance
            factor_limit = max(factor_limit, limit)
        tiny = torch.finfo(torch.float64).tiny
        errors = (differences / norms.clamp_min(max(least, tiny))).nan_to_num(nan=float("inf"))
        at = int(errors.argmax())
        some = norms > least
        factor, scaled = 1.0, False
        if bool(some.any()):
            along = (products[some] / norms[some] ** 2 - 1) * norms[some]
            across = (differences[some] ** 2 - along**2).clamp_min(0).sqrt() - self._rounding * norms[some]
            factor = float((products[some] / norms[some] ** 2).median())
            scaled = bool(across.median() <= _LARGEST_ACROSS * along.abs().median())
        error, off = float(errors[at]), abs(factor - 1)
        prompt, position = split_key(int(keys[at]))
        return Judgement(
            name=name,
            kind=kind,
            tokens=len(keys),
            error=error,
            factor=factor,
            scaled=scaled and off > _LARGEST_ACROSS * error,
            roundings=max(error, off) / (_LOGPROB_TOLERANCE if kind == "logprob" else self._rounding),
            fault=not (error <= limit and off <= factor_limit),
            prompt=prompt,
            position=position,
        )


def _replaced(
    values: tuple[torch.Tensor, ...], index: tuple[torch.Tensor, ...], wanted: torch.Tensor, in_place: bool
) -> tuple[torch.Tensor, ...]:
    """`values` with the rows of `wanted` at `index`. With `in_place`, `values` are overwritten: the sum before a norm
    is also the residual, which later layers read."""
    made = []
    start = 0
    for value in values:
        new = value if in_place else value.clone()
        rows = new[index]
        width = rows[0].numel()
        new[index] = wanted[:, start : start + width].to(value.device).reshape(rows.shape)
        start += width
        made.append(new)
    return tuple(made)
