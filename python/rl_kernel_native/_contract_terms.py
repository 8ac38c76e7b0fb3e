"""The terms of contract.py: rounding, kinds of sums, facts (the named numbers in a bound), bounds, rows of its table.
This module imports only the standard library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from ._arithmetic import UNITS
from ._check import one_of

U = 2.0**-24  # relative error of rounding to float32
CLIP_RANGE = 0.2  # clip range of PPO and GRPO


@dataclass(frozen=True)
class Rounding:
    """Rounding to nearest in one dtype.

    Attributes:
        relative: half the spacing at 1. Rounding a normal value x changes it by at most relative * |x|.
        least: half the smallest subnormal.
        limit: magnitude from which a value rounds to an infinity.
    """

    relative: float
    least: float
    limit: float

    @property
    def inner(self) -> float:
        """The exact relative error of one rounding. The error of two roundings is then at most 2 * relative."""
        return self.relative / (1 + self.relative)


ROUNDING: Mapping[str, Rounding] = {
    "float32": Rounding(2.0**-24, 2.0**-150, 2.0**128 - 2.0**103),
    "bfloat16": Rounding(2.0**-8, 2.0**-134, 2.0**128 - 2.0**119),
    "float16": Rounding(2.0**-11, 2.0**-25, 65520.0),
}
DTYPES = tuple(ROUNDING)

KINDS: Mapping[str, str] = {
    "copy": "values as they lie in memory",
    "integers": "labels, masks and counts of integers",
    "elementwise": "a few roundings of each element",
    "row reduction": "sums over a row, in virtual lanes and a tree (rule 3)",
    "matrix product": "ascending sums of products (rules 1 and 2)",
    "softmax statistics": "sums of exponentials by leaves and trees (rules 4 and 5)",
    "attention": "softmax statistics and products over keys (rule 6)",
    "token sum": "sums over tokens in blocks of 8192 (rule 9)",
    "scan": "a sequence's tokens in trees and chunks, over groups or a whole batch in trees (rules 3 and 10)",
    "composed": "derivatives that torch composes of operators, or several operators one after the other",
    "chain": "a whole model",
}
VARIATIONS: Mapping[str, str] = {
    "batch": "how many rows or sequences there are",
    "position": "where in the batch a row stands, and among which",
    "layout": "strides and alignment of every operand",
    "padding": "padded tokens (of a token sum: behind the others, with zero gradients)",
    "packing": "sequences one after the other, or each for itself",
    "chunks": "rows in several calls (of a token sum: multiples of 8192, through main_grad)",
    "shards": "the vocabulary, or out_features, over ranks",
    "runs": "one run and the next",
}
ROW = tuple(VARIATIONS)  # the results of one row or sequence keep their bits under every variation
NO_SHARDS = tuple(name for name in VARIATIONS if name != "shards")
TOKEN_SUM = ("layout", "padding", "chunks", "shards", "runs")

EVERY_BACKEND = "CPU = CUDA = HIP"
ONE_ARCHITECTURE = "one architecture"  # includes the CPU under `rk.arithmetic` of this architecture
BY_EXPONENTIAL = "CPU = CUDA = HIP; exp=hardware: one architecture"
BY_PRODUCT = "CPU = CUDA = HIP in float32; bfloat16, float16 and exp=hardware: one architecture"
BACKENDS = (EVERY_BACKEND, BY_EXPONENTIAL, BY_PRODUCT, ONE_ARCHITECTURE)

FACTS: Mapping[str, str] = {
    "expected": "magnitude of the float64 value",
    "scale": "the same sum over absolute values",
    "terms": "products or terms of the sum",
    "columns": "width of the row that is reduced",
    "rows": "tokens that are summed",
    "max_abs_z": "largest |logit| after temperature of the row",
    "sum_p_sq": "the row's sum of squared probabilities",
    "p": "probability of the column",
    "log_p": "|ln p|",
    "spread": "|ln p + entropy|",
    "given": "|dlogprob| + |dlse|",
    "given_entropy": "|dentropy|",
    "given_target": "|dlogprob| in the target's column, else 0",
    "uncapped": "|gradient| before the softcap's slope where there is a softcap, else 0",
    "cap_slope": "derivative of the softcap, 1 without",
    "slope": "logit_scale / temperature",
    "inner": "Rounding.inner where an intermediate is rounded to the dtype, else 0",
    "inner_least": "Rounding.least there, else 0",
    "carried": "sum of what terms (logit gradients, log-probabilities) may be off by, times their factors",
    "act": "|activation of gate|",
    "gate": "|gate|",
    "other": "what the activation or its derivative is multiplied by",
    "keys": "keys that a query sees; of dk and dv queries times heads that see a key",
    "head_dim": "columns of a head",
    "max_abs_s": "largest |softmax_scale * score| of the row",
    "score_scale": "softmax_scale * the score's sum of absolute values, the largest of the row",
    "gradient_scale": "scale with dp and delta, each by its sum of absolute values, in place of their difference",
    "other_scale": "sum of magnitudes of what the rounded intermediates are multiplied by",
    "largest": "largest magnitude of the float64 result",
    "stock": "the same figure of stock torch in the dtype, on the same model and prompts",
}
# Names that formulas share.
SHORTHAND: Mapping[str, str] = {
    "u": "2**-24",
    "B": "1e-5 + 4e-7 * max_abs_z",
    "H": "2e-5 + 4e-7 * max_abs_z",
    "R": "1e-5 + 8e-7 * max_abs_z",
}


@dataclass(frozen=True)
class Bound:
    """The allowed error of a result before it is rounded to its dtype.

    Attributes:
        of: function of facts, given by keyword, that returns the bound. The function uses only arithmetic, so it
            accepts and returns arrays.
        text: the bound as a line of text, in Python's notation and with :data:`SHORTHAND`.
        why: where the bound comes from.
    """

    of: Callable[..., Any]
    text: str
    why: str

    @property
    def facts(self) -> tuple[str, ...]:
        """The names of :data:`FACTS` that the bound takes."""
        return tuple(signature(self.of).parameters)

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the facts that have no default."""
        return tuple(name for name, p in signature(self.of).parameters.items() if p.default is p.empty)


@dataclass(frozen=True)
class Row:
    """One output of an operator.

    Attributes:
        operator: name of the function, such as "gelu_mul", or "chain" for a whole model.
        stem: name of the operator's C++ header, cpp/include/rlk/ops/<stem>.h; "" for a whole model.
        direction: "forward" or "backward".
        kind: one of KINDS.
        keeps: the VARIATIONS under which every bit stays the same.
        backends: the entry of BACKENDS that names the backends with equal bits.
        bound: the bound of the error against float64; a matrix product is computed by fused multiply-adds.
        unit_bound: the bound if a matrix unit computes the product; None: ``bound``.
        rounded: whether the last step rounds the result to the dtype of the inputs. If False, the result is float32,
            and the bound includes its rounding.
        dtypes: dtypes of the inputs.
    """

    operator: str
    output: str
    direction: str
    kind: str
    backends: str
    bound: Bound
    stem: str = ""
    keeps: tuple[str, ...] = ROW
    unit_bound: Bound | None = None
    rounded: bool = True
    dtypes: tuple[str, ...] = DTYPES

    @property
    def name(self) -> str:
        return f"{self.operator} {self.output}"

    def allowed(self, dtype: str = "float32", *, expected: Any = 0.0, unit: str = "ieee", **facts: Any) -> Any:
        """The allowed distance of a result from float64.

        Args:
            dtype: dtype of the result; its rounding is added if the row is ``rounded``.
            expected: the float64 value, an array or a number.
            unit: "ieee", or the matrix unit that multiplied.
            facts: the facts of the bound, :data:`FACTS`.
        Raises: TypeError for a missing or unknown fact; ValueError for another unit; KeyError for another dtype.
        """
        one_of("unit", unit, UNITS)
        bound = self.unit_bound if unit != "ieee" and self.unit_bound is not None else self.bound
        if "expected" in bound.facts:
            facts["expected"] = abs(expected)
        off = bound.of(**facts)
        if not self.rounded:
            return off
        rounding = ROUNDING[dtype]
        return off * (1 + rounding.relative) + rounding.relative * abs(expected) + rounding.least


# ---- softmax statistics ---------------------------------------------------------------------------------------------
