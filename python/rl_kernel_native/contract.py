"""The meaning of "aligned", as data. For every output of every operator, this module says which variations keep the
bits, and how far the output may differ from a float64 evaluation of its inputs. `rlk contract` prints the table. The
doctor's self-tests and the tests of every operator take all their bounds from this module. This module imports only the
standard library, and no operator.

Each module `ops/<op>.py` adds the rows of its operator with :func:`add_rows`. Bounds that several operators share are
in this module.

A bound is a function of named facts (:data:`FACTS`), which are numbers or arrays, and a text of the same formula. If a
result is rounded to its dtype at the end, :meth:`Row.allowed` adds the error of this rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from ._contract_terms import BACKENDS as BACKENDS
from ._contract_terms import BY_EXPONENTIAL as BY_EXPONENTIAL
from ._contract_terms import BY_PRODUCT as BY_PRODUCT
from ._contract_terms import (
    CLIP_RANGE,
    EVERY_BACKEND,
    FACTS,
    KINDS,
    NO_SHARDS,
    ONE_ARCHITECTURE,
    ROUNDING,
    SHORTHAND,
    TOKEN_SUM,
    VARIATIONS,
    Bound,
    Row,
    U,
)
from ._contract_terms import DTYPES as DTYPES

OFF_LOGPROB = Bound(
    lambda max_abs_z: 1e-5 + 4e-7 * max_abs_z,
    "B",
    "the portable exponential is off by 2.9e-6 at most, a product of a logit and a constant by some roundings of it",
)


def smaller(a: Any, b: Any) -> Any:
    return (a + b - abs(a - b)) / 2


def larger(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) / 2


def off_dlogits(of_log_p: Any, of_entropy: Any, of_cap: Any, p: Any, log_p: Any, spread: Any, given: Any,
                 given_entropy: Any, given_target: Any, uncapped: Any, cap_slope: Any, slope: Any) -> Any:  # fmt: skip
    """Error of a logit's gradient. The first three arguments are the errors of ln p, of the entropy and of the
    softcap's slope."""
    off = p * (given * of_log_p + given_entropy * (spread * of_log_p + of_log_p + of_entropy))
    off = off + p * (given + given_entropy * (log_p + spread)) * 5e-7 + given_target * 3e-7
    return slope * (cap_slope * off + uncapped * of_cap + (given + given_entropy) * 1e-35)


FMA = Bound(
    lambda terms, scale: (terms + 8) * U * scale + 2.0**-149,
    "(terms + 8) * u * scale + 2**-149",
    "each fused multiply-add and each addition (bias, segments, blocks) is off by u of its result",
)


def _unit(terms: Any, scale: Any) -> Any:
    return (11 * -(-terms // 16) + 6) * 2 * U * scale + (terms + 1) * 2.0**-126


UNIT = Bound(
    _unit,
    "(11 * -(-terms // 16) + 6) * 2 * u * scale + (terms + 1) * 2**-126",
    "a step of 16 cuts its addends and results by at most 11 * 2^-23 of the largest: sm_80's two halves of nine "
    "addends at 24 bits and a result each (sm_90 5.3, gfx942 11, gfx90a 8); units that flush drop 2^-126 a term",
)
GROUPS = Bound(
    lambda rows, scale: (72 + rows / 8192) * U * scale + 2.0**-149,
    "(72 + rows / 8192) * u * scale + 2**-149",
    "chains of 64 tokens, a tree of seven levels, one addition a block of 8192",
)

LEAST = "inner_least * other_scale"  # absolute error of an intermediate that is subnormal


def of_head(max_abs_z: Any) -> Any:
    return 1e-4 * larger(1.0, max_abs_z / 4)


OF_HEAD = "1e-4 * max(1, max_abs_z / 4)"
OFF_HEAD_LOGPROB = Bound(
    of_head, OF_HEAD, "logits by products of matrix units, whose truncation grows with them; float32 logits"
)
BITWISE = Bound(lambda: 0.0, "0", "bitwise: bytes that are moved, or integers")
LOSS = Bound(
    lambda scale: 1e-6 * scale,
    "1e-6 * scale",
    "a few roundings of each token's term, and the trees' additions; scale: of gradient and loss together, as terms"
    " cancel",
)
SLOPE_OF_TOKEN = Bound(
    lambda largest: 5e-6 * largest, "5e-6 * largest", "an exponential and a few products of each token"
)
SUMMED_METRICS = Bound(
    lambda expected: 1e-5 * expected + 1e-4, "1e-5 * expected + 1e-4", "sums of terms of either sign over all tokens"
)


def derivatives(each: float) -> Bound:
    return Bound(
        lambda largest, terms=1: each * terms * (1 + largest + abs(largest - 1)) / 2,
        f"{each:g} * terms * max(1, largest)",
        "float32 operands of at most 32 columns, magnitudes below 10; terms: 8 where sums of sums are compared",
    )


def roundings(count: int, why: str) -> Bound:
    return Bound(lambda largest: count * U * largest, f"{count} * u * largest", why)


# Words that rows of several operators share.
OF_TOKENS: dict[str, Any] = {
    "backends": EVERY_BACKEND, "rounded": False, "keeps": NO_SHARDS, "dtypes": ("float32",),
}  # fmt: skip
BATCH_OF_TOKENS = ("layout", "padding", "packing", "runs")  # a result of a whole batch keeps its bits under these
TOKEN_SUMS: dict[str, Any] = {"kind": "token sum", "backends": EVERY_BACKEND, "keeps": TOKEN_SUM}
COMPOSED: dict[str, Any] = {"kind": "composed", "rounded": False, "keeps": ("runs",), "dtypes": ("float32",)}

# ---- whole models ---------------------------------------------------------------------------------------------------


def _twice_stock(output: str, measured: float) -> Bound:
    return Bound(
        lambda stock=measured: 2 * stock,
        "2 * stock",
        f"twice what stock torch in bfloat16 is off by on the same model and prompts; {output} of the digest model and"
        f" text: {2 * measured:.3g}",
    )


# Error of stock torch (transformers, bfloat16, default attention) against float64, for the model and text of
# consistency/digest. Measured with torch 2.13.0 on an x86-64 CPU with AVX-512. tests/tools/test_contract_chain.py
# measures this error again.
STOCK_MAX_DLOGP = 0.0731
STOCK_MEAN_DLOGP = 0.00582
STOCK_KL_K3 = 4.07e-5
STOCK_CLIP_FRACTION = 0.0
# Allowed error of a chain of this library's operators for the same model and text.
MAX_DLOGP = 2 * STOCK_MAX_DLOGP
MEAN_DLOGP = 2 * STOCK_MEAN_DLOGP
KL_K3 = 2 * STOCK_KL_K3
CLIP_FRACTION = 2 * STOCK_CLIP_FRACTION


def _chain() -> Iterable[Row]:
    chain: dict[str, Any] = {"kind": "chain", "rounded": False, "dtypes": ("bfloat16",)}
    aligned = Bound(lambda: 0.0, "0", "every operator keeps a token's bits, so does their chain: no byte differs")
    yield Row("chain", "rollout against training", "forward", backends=ONE_ARCHITECTURE, bound=aligned, **chain)
    for output, stock in (
        ("max |dlogp|", STOCK_MAX_DLOGP),
        ("mean |dlogp|", STOCK_MEAN_DLOGP),
        ("KL k3", STOCK_KL_K3),
        (f"clip fraction at {CLIP_RANGE}", STOCK_CLIP_FRACTION),
    ):
        bound = _twice_stock(output, stock)
        yield Row("chain", output, "forward", backends=ONE_ARCHITECTURE, bound=bound, **chain)


# ---- the table ------------------------------------------------------------------------------------------------------

ROWS: list[Row] = []


def add_rows(rows: Iterable[Row]) -> None:
    """Adds an operator's rows to the table. Each module of ops calls this function once with the rows of its
    outputs."""
    ROWS.extend(rows)


add_rows(_chain())


def operators() -> tuple[str, ...]:
    """Names of operators, in alphabetical order."""
    return tuple(sorted({row.operator for row in ROWS}))


def rows_of(operator: str) -> tuple[Row, ...]:
    """All rows of an operator, or of all operators whose C++ header has this name; empty for an unknown name."""
    return tuple(row for row in ROWS if operator in (row.operator, row.stem))


def row(operator: str, output: str) -> Row:
    """The row of one output. Raises: KeyError."""
    for found in ROWS:
        if (found.operator, found.output) == (operator, output):
            return found
    raise KeyError(f"no row for {operator} {output}")


def as_json(names: Iterable[str] | None = None) -> dict[str, Any]:
    """The rows of operators, or the whole table, as JSON values; `rlk contract --json` prints it."""
    names = operators() if names is None else names
    chosen = [found for name in names for found in rows_of(name) if found.operator == name]
    return {
        "kinds": dict(KINDS),
        "variations": dict(VARIATIONS),
        "facts": dict(FACTS),
        "shorthand": dict(SHORTHAND),
        "rounding": {name: {"relative": r.relative, "least": r.least} for name, r in ROUNDING.items()},
        "rows": [
            {
                "operator": found.operator,
                "output": found.output,
                "direction": found.direction,
                "kind": found.kind,
                "keeps": list(found.keeps),
                "backends": found.backends,
                "bound": found.bound.text,
                "unit_bound": found.unit_bound.text if found.unit_bound else None,
                "facts": list(found.bound.facts),
                "rounded_to_dtype": found.rounded,
                "dtypes": list(found.dtypes),
                "why": found.bound.why,
            }
            for found in chosen
        ],
    }


def digest() -> str:
    """The digest of the whole table. Two processes with different digests follow different contracts."""
    return hashlib.sha256(json.dumps(as_json(), sort_keys=True).encode()).hexdigest()
