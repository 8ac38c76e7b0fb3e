"""The meaning of "aligned", as data. For every output of every operator, it says which variations keep the bits, and
how far the output may otherwise be off a float64 evaluation of its inputs. `rlk contract` prints it. The doctor's
self-tests and the tests of every operator take their bounds from here alone. This module needs only the standard
library, and no operator.

A bound is a function of named facts (:data:`FACTS`), which are numbers or arrays, and a text that says the same. A
result that is rounded to its dtype at the end may also be off by that rounding: :meth:`Row.allowed` adds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from ._contract_terms import BACKENDS as BACKENDS
from ._contract_terms import (
    BY_EXPONENTIAL,
    BY_PRODUCT,
    CLIP_RANGE,
    DTYPES,
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

_LOGPROB = Bound(
    lambda max_abs_z: 1e-5 + 4e-7 * max_abs_z,
    "B",
    "the portable exponential is off by 2.9e-6 at most, a product of a logit and a constant by some roundings of it",
)
_PENALISED = Bound(
    lambda max_abs_z: 4e-7 * max_abs_z,
    "4e-7 * max_abs_z",
    "six float32 roundings of numbers up to z with bias and penalties",
)
_ENTROPY = Bound(
    lambda max_abs_z: 2e-5 + 4e-7 * max_abs_z, "H", "lse and the mean of z, each off like a log-probability"
)


def _smaller(a: Any, b: Any) -> Any:
    return (a + b - abs(a - b)) / 2


_SUM_P_SQ = Bound(
    lambda max_abs_z, sum_p_sq: (1e-5 + 4e-7 * max_abs_z) * _smaller(1.0, 2 * sum_p_sq) + 1e-37,
    "B * min(1, 2 * sum_p_sq) + 1e-37",
    "p inherits a log-probability's bound as a relative error, its square twice; near 1 they cancel",
)


def _off_dlogits(of_log_p: Any, of_entropy: Any, of_cap: Any, p: Any, log_p: Any, spread: Any, given: Any,
                 given_entropy: Any, given_target: Any, uncapped: Any, cap_slope: Any, slope: Any) -> Any:  # fmt: skip
    """Error of a logit's gradient, computed from the errors of ln p, of the entropy and of the softcap's slope (the
    first three arguments)."""
    off = p * (given * of_log_p + given_entropy * (spread * of_log_p + of_log_p + of_entropy))
    off = off + p * (given + given_entropy * (log_p + spread)) * 5e-7 + given_target * 3e-7
    return slope * (cap_slope * off + uncapped * of_cap + (given + given_entropy) * 1e-35)


def _dlogits(
    max_abs_z: Any,
    p: Any,
    log_p: Any,
    spread: Any,
    given: Any,
    given_entropy: Any,
    given_target: Any,
    uncapped: Any = 0.0,
    cap_slope: Any = 1.0,
    slope: Any = 1.0,
) -> Any:
    of_log_p, of_entropy = 1e-5 + 8e-7 * max_abs_z, 2e-5 + 4e-7 * max_abs_z
    return _off_dlogits(
        of_log_p, of_entropy, 6e-7, p, log_p, spread, given, given_entropy, given_target, uncapped, cap_slope, slope
    )


_DLOGITS = Bound(
    _dlogits,
    "slope * (cap_slope * (p * (given * R + given_entropy * (spread * R + R + H)) "
    "+ p * (given + given_entropy * (log_p + spread)) * 5e-7 + given_target * 3e-7) "
    "+ uncapped * 6e-7 + (given + given_entropy) * 1e-35)",
    "R: ln p from the saved lse, off by its bound and by roundings of z; H: the saved entropy; 5e-7: four roundings "
    "and the exponential's; 3e-7: expm1 and a product; 6e-7: tanh to 2 ulp; 1e-35: probabilities below 2^-126 are 0",
)

_CONFIDENT = Bound(
    lambda expected: 3 * 2 * U + 2e-5 * expected,
    "3 * 2 * u + 2e-5 * expected",
    "1 - p of a target with p near 1, float32, by expm1: the sum of exponentials is rounded to 2^-23",
)

# ---- matrix products and token sums ---------------------------------------------------------------------------------

_FMA = Bound(
    lambda terms, scale: (terms + 8) * U * scale + 2.0**-149,
    "(terms + 8) * u * scale + 2**-149",
    "each fused multiply-add and each addition (bias, segments, blocks) is off by u of its result",
)


def _unit(terms: Any, scale: Any) -> Any:
    return (11 * -(-terms // 16) + 6) * 2 * U * scale + (terms + 1) * 2.0**-126


_UNIT = Bound(
    _unit,
    "(11 * -(-terms // 16) + 6) * 2 * u * scale + (terms + 1) * 2**-126",
    "a step of 16 cuts its addends and results by at most 11 * 2^-23 of the largest: sm_80's two halves of nine "
    "addends at 24 bits and a result each (sm_90 5.3, gfx942 11, gfx90a 8); units that flush drop 2^-126 a term",
)
_GROUPS = Bound(
    lambda rows, scale: (72 + rows / 8192) * U * scale + 2.0**-149,
    "(72 + rows / 8192) * u * scale + 2**-149",
    "chains of 64 tokens, a tree of seven levels, one addition a block of 8192",
)

_LEAST = "inner_least * other_scale"  # error of an intermediate value that is rounded to a subnormal

# ---- a head: products, and softmax statistics of them ---------------------------------------------------------------


def _larger(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) / 2


def _of_head(max_abs_z: Any) -> Any:
    return 1e-4 * _larger(1.0, max_abs_z / 4)


_L = "1e-4 * max(1, max_abs_z / 4)"
_HEAD_LOGPROB = Bound(
    _of_head, _L, "logits by products of matrix units, whose truncation grows with them; float32 logits"
)
_HEAD_ENTROPY = Bound(
    lambda max_abs_z: 2 * _of_head(max_abs_z), f"2 * {_L}", "lse and the mean of z, each off like a log-probability"
)
_HEAD_SUM_P_SQ = Bound(
    lambda max_abs_z, sum_p_sq: _of_head(max_abs_z) * _smaller(1.0, 2 * sum_p_sq) + 1e-37,
    f"{_L} * min(1, 2 * sum_p_sq) + 1e-37",
    "as that of logprob, from a head's log-probabilities",
)


def _head_dlogits(
    max_abs_z: Any,
    p: Any,
    log_p: Any,
    spread: Any,
    given: Any,
    given_entropy: Any,
    given_target: Any,
    uncapped: Any = 0.0,
    cap_slope: Any = 1.0,
    slope: Any = 1.0,
) -> Any:
    of_logprob = _of_head(max_abs_z)
    of_log_p = of_logprob + 4e-7 * max_abs_z
    return _off_dlogits(
        of_log_p, 2 * of_logprob, 6e-7 + of_logprob, p, log_p, spread, given, given_entropy, given_target, uncapped,
        cap_slope, slope,
    )  # fmt: skip


_LN_P = f"({_L} + 4e-7 * max_abs_z)"
_HEAD_DLOGITS = Bound(
    _head_dlogits,
    f"slope * (cap_slope * (p * (given * {_LN_P} + given_entropy * (spread * {_LN_P} + {_LN_P} + 2 * {_L})) "
    "+ p * (given + given_entropy * (log_p + spread)) * 5e-7 + given_target * 3e-7) "
    f"+ uncapped * (6e-7 + {_L}) + (given + given_entropy) * 1e-35)",
    "as that of logprob, with a head's log-probability and entropy; a softcap of two temperatures or more, whose slope "
    "is off by no more than a log-probability; rounded to the operands' dtype (dbias of one row shows it)",
)


_CROSS_ENTROPY = Bound(
    lambda terms, scale, carried: carried + (34 + terms / 1024) * U * scale + 1e-30,
    "carried + (34 + terms / 1024) * u * scale + 1e-30",
    "the errors of log-probabilities, summed; sums of a sequence and of sequences, two products, a sum and a quotient",
)


def _carried(of: Bound) -> Bound:
    """The bound for sums of products with logit gradients, which have errors of their own. ``of`` is the bound of the
    sum."""
    first, *_ = of.facts
    if first == "rows":
        return Bound(
            lambda rows, scale, carried: of.of(rows=rows, scale=scale) + carried,
            f"{of.text} + carried",
            f"the errors of logit gradients, summed; {of.why}",
        )
    return Bound(
        lambda terms, scale, carried: of.of(terms=terms, scale=scale) + carried,
        f"{of.text} + carried",
        f"the errors of logit gradients, by the other operand; {of.why}",
    )


# ---- norms ----------------------------------------------------------------------------------------------------------

_NORM_Y = Bound(
    lambda columns, expected, inner=0.0, inner_least=0.0, other_scale=0.0: (
        ((columns / 512 + 14) * U + inner) * expected + inner_least * other_scale
    ),
    f"((columns / 512 + 14) * u + inner) * expected + {_LEAST}",
    "half the error of the mean, whose chains have columns / 256 terms and eight levels; five more roundings",
)
_RSTD = Bound(
    lambda columns, expected: (columns / 512 + 12) * U * expected,
    "(columns / 512 + 12) * u * expected",
    "as y, without its products",
)
_NORM_DX = Bound(
    lambda columns, scale: (columns / 128 + 44) * U * scale,
    "(columns / 128 + 44) * u * scale",
    "two sums over the row, relative to the same sums of absolute values, and the roundings between them",
)
_NORM_DWEIGHT = Bound(
    lambda rows, columns, scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        ((87 + rows / 8192 + columns / 256) * U + inner) * scale + inner_least * other_scale
    ),
    f"((87 + rows / 8192 + columns / 256) * u + inner) * scale + {_LEAST}",
    "chains of 64 tokens, a tree of seven levels, one addition a block; the error of each normalised value",
)
_ONE_SUM = Bound(lambda expected: U * expected, "u * expected", "one addition in float32")

# ---- elementwise ----------------------------------------------------------------------------------------------------

_ROPE = Bound(
    lambda scale, inner=0.0, inner_least=0.0: (2 * U + 3 * inner * (1 + 3 * inner)) * scale + 3 * inner_least,
    "(2 * u + 3 * inner * (1 + 3 * inner)) * scale + 3 * inner_least",
    "a product and a sum; with intermediate=input angles, products and sum are rounded to the dtype",
)


def _value(added: float, cut: float, more: str, why: str) -> Bound:
    """The bound of activation * other."""

    def of(act: Any, gate: Any, other: Any, expected: Any, inner: Any = 0.0, inner_least: Any = 0.0) -> Any:
        return ((6 * U + inner) * act + (added * U + cut) * gate + inner_least) * other + U * expected

    text = f"((6 * u + inner) * act + {more} * gate + inner_least) * other + u * expected"
    return Bound(of, text, f"{why}; a product")


_SILU = _value(0.0, 2.0**-126, "2**-126", "sigmoid to 3 ulp, its exponential 0 below 2^-126")
_GELU = _value(4.0, 0.0, "4 * u", "tanh and erf to 3 ulp, to 4 u where they are added to 1")
_SLOPE = Bound(
    lambda gate, other, expected: 16 * U * (1 + gate) * other + U * expected,
    "16 * u * (1 + gate) * other + u * expected",
    "a derivative's sums have terms of at most 1.2, which roundings of at most 8 u each meet; two products",
)

# ---- attention ------------------------------------------------------------------------------------------------------


def _probability(keys: Any, head_dim: Any, max_abs_s: Any, score_scale: Any) -> Any:
    """Relative error of a probability, from the errors of its score and of the softmax statistics."""
    return 2e-5 + 8e-7 * max_abs_s + 2 * (head_dim + 2) * U * score_scale + (keys / 128 + 40) * U


_P = "(2e-5 + 8e-7 * max_abs_s + 2 * (head_dim + 2) * u * score_scale + (keys / 128 + 40) * u)"
_ATTENTION_OUT = Bound(
    lambda keys, head_dim, max_abs_s, score_scale, scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        (_probability(keys, head_dim, max_abs_s, score_scale) + (keys + 8) * U + inner) * scale
        + inner_least * other_scale
    ),
    f"({_P} + (keys + 8) * u + inner) * scale + {_LEAST}",
    "probabilities by rule 4 from scores that are chains over head_dim, rounded to the dtype; a chain over keys",
)
_ATTENTION_LSE = Bound(
    lambda head_dim, max_abs_s, score_scale: 1e-5 + 4e-7 * max_abs_s + (head_dim + 2) * U * score_scale,
    "1e-5 + 4e-7 * max_abs_s + (head_dim + 2) * u * score_scale",
    "as a log-probability's, from scores that are chains over head_dim",
)
_ATTENTION_DV = Bound(
    lambda keys, head_dim, max_abs_s, score_scale, scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        (_probability(0, head_dim, max_abs_s, score_scale) + (keys + 8) * U + inner) * scale + inner_least * other_scale
    ),
    f"({_P.replace('keys', '0')} + (keys + 8) * u + inner) * scale + {_LEAST}",
    "as out, the chain over queries",
)


def _attention_ds(
    keys: Any,
    head_dim: Any,
    max_abs_s: Any,
    score_scale: Any,
    scale: Any,
    gradient_scale: Any,
    inner: Any = 0.0,
    inner_least: Any = 0.0,
    other_scale: Any = 0.0,
) -> Any:
    off = (_probability(0, head_dim, max_abs_s, score_scale) + (keys + head_dim + 16) * U + inner) * scale
    return off + ((head_dim + 16) * U + inner) * gradient_scale + inner_least * other_scale


_ATTENTION_DS = Bound(
    _attention_ds,
    f"({_P.replace('keys', '0')} + (keys + head_dim + 16) * u + inner) * scale "
    f"+ ((head_dim + 16) * u + inner) * gradient_scale + {_LEAST}",
    "ds = p (dp - delta), rounded to the dtype, as out is, of which delta is made; their difference cancels; a chain "
    "over keys or queries",
)

_ATTENTION_SINKS = Bound(
    lambda rows, head_dim, max_abs_s, score_scale, scale, gradient_scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        (_probability(0, head_dim, max_abs_s, score_scale) + (72 + rows / 8192) * U) * scale
        + ((head_dim + 16) * U + inner) * gradient_scale
        + inner_least * other_scale
    ),
    f"({_P.replace('keys', '0')} + (72 + rows / 8192) * u) * scale + ((head_dim + 16) * u + inner) * gradient_scale "
    f"+ {_LEAST}",
    "delta, of which out is rounded to the dtype, weighed by the sink's probability; summed as a token sum is",
)

# ---- sequences and advantages ---------------------------------------------------------------------------------------

_BITWISE = Bound(lambda: 0.0, "0", "bitwise: bytes that are moved, or integers")
_SEQUENCE_SUM = Bound(
    lambda terms, scale: (12 + terms / 2048) * U * scale + 1e-30,
    "(12 + terms / 2048) * u * scale + 1e-30",
    "one addition for each level of a tree: eleven over 2048 tokens, one more for each doubling",
)
_SCAN = Bound(
    lambda scale: 12 * U * (scale + 1e-3),
    "12 * u * (scale + 1e-3)",
    "roundings of a token, of a chunk's tree and of the coefficients, of the sequence's largest sum behind the token; "
    "one that grows with the tokens is below it by what gamma * lam leaves",
)
_ADVANTAGE = Bound(
    lambda scale, expected: 8 * U * (scale + expected + 1e-6),
    "8 * u * (scale + expected + 1e-6)",
    "trees over rewards, a difference, a standard deviation in two passes and a quotient",
)
_BASELINE = Bound(
    lambda scale, terms: (24 + terms) * U * (scale + 1e-6),
    "(24 + terms) * u * (scale + 1e-6)",
    "scans of chunks of 256 tokens, a weight's four roundings and exponential, a chain over the group; terms: chunks "
    "and members; scale: the largest sum of rewards, times what errors of small weights grow by",
)
_WHITENED = Bound(
    lambda largest: 8 * U * (10 + largest),
    "8 * u * (10 + largest)",
    "means by trees over tokens and sequences, in two passes, of values of size 1 to 10",
)


def _largest(each: float) -> Callable[..., Any]:
    return lambda expected, largest: each * (expected + (1 + largest + abs(largest - 1)) / 2)


_PREFERENCE = Bound(
    _largest(4e-6),
    "4e-6 * (expected + max(1, largest))",
    "differences of sums of log-probabilities, an exponential to 2.9e-6 where it counts, and some products",
)
_PREFERENCE_SLOPE = Bound(
    _largest(2e-5), "2e-5 * (expected + max(1, largest))", "products of as many sigmoids and exponentials as there are"
)

_POLICY_LOSS = Bound(
    lambda scale: 1e-6 * scale,
    "1e-6 * scale",
    "a few roundings of each token's term, and the trees' additions; scale: of gradient and loss together, as terms"
    " cancel",
)
_POLICY_SLOPE = Bound(
    lambda largest: 5e-6 * largest, "5e-6 * largest", "an exponential and a few products of each token"
)
_POLICY_ENTROPY = Bound(lambda largest: 1e-6 * largest, "1e-6 * largest", "a coefficient and a token's share")
_POLICY_METRICS = Bound(
    lambda expected: 1e-5 * expected + 1e-4, "1e-5 * expected + 1e-4", "sums of terms of either sign over all tokens"
)

_IMPORTANCE = Bound(
    lambda expected, terms: (16 + terms) * U * (expected + 1e-6),
    "(16 + terms) * u * (expected + 1e-6)",
    "an exponential, and of a sequence's weight the sum of the log-ratios of `terms` tokens, each below 1",
)
_IMPORTANCE_METRICS = Bound(
    lambda expected, terms, spread: (64 + terms) * U * (expected + 1.0) + 1e-3 * spread,
    "(64 + terms) * u * (expected + 1) + 1e-3 * spread",
    "weights; `spread` of a standard deviation is the smaller root mean square, theirs or that of their distance to 1",
)
_REWARD = Bound(
    lambda expected, largest: 8 * U * (expected + largest) + 1e-6 * largest,
    "8 * u * (expected + largest) + 1e-6 * largest",
    "a token's KL, whose exponential and products are off by 1e-6 of it, rewards of spans, and one of its sequence "
    "with two penalties; none larger",
)
_MISMATCH = Bound(
    lambda expected: 1e-5 * expected + 2e-6,
    "1e-5 * expected + 2e-6",
    "means of terms of either sign over all tokens, and exponentials of means",
)

# ---- composed and whole models --------------------------------------------------------------------------------------


def _derivatives(each: float) -> Bound:
    return Bound(
        lambda largest, terms=1: each * terms * (1 + largest + abs(largest - 1)) / 2,
        f"{each:g} * terms * max(1, largest)",
        "float32 operands of at most 32 columns, magnitudes below 10; terms: 8 where sums of sums are compared",
    )


def _roundings(count: int, why: str) -> Bound:
    return Bound(lambda largest: count * U * largest, f"{count} * u * largest", why)


def _twice_stock(output: str, measured: float) -> Bound:
    return Bound(
        lambda stock=measured: 2 * stock,
        "2 * stock",
        f"twice what stock torch in bfloat16 is off by on the same model and prompts; {output} of the digest model and"
        f" text: {2 * measured:.3g}",
    )


# Error of stock torch (transformers, bfloat16, default attention) on the model and text of consistency/digest.
# Against float64 from the same weights: torch 2.13.0 on an x86-64 CPU with AVX-512.
# tests/tools/test_contract_chain.py measures it again.
STOCK_MAX_DLOGP = 0.0731
STOCK_MEAN_DLOGP = 0.00582
STOCK_KL_K3 = 4.07e-5
STOCK_CLIP_FRACTION = 0.0
# Allowed error of a chain of this library's operators there.
MAX_DLOGP = 2 * STOCK_MAX_DLOGP
MEAN_DLOGP = 2 * STOCK_MEAN_DLOGP
KL_K3 = 2 * STOCK_KL_K3
CLIP_FRACTION = 2 * STOCK_CLIP_FRACTION


def _sequences() -> Iterable[Row]:
    """Rows of results for sequences and their tokens: log-probabilities, advantages, labels and masks."""
    of: dict[str, Any] = {"backends": EVERY_BACKEND, "rounded": False, "keeps": NO_SHARDS, "dtypes": ("float32",)}
    summed = of | {"kind": "scan", "stem": "sequence_logprob", "dtypes": DTYPES}
    yield Row("sequence_logprob", "sum", "forward", bound=_SEQUENCE_SUM, **summed)
    yield Row("sequence_logprob", "count", "forward", bound=_BITWISE, **(summed | {"kind": "integers"}))
    spread = summed | {"kind": "copy", "rounded": True}
    yield Row("sequence_logprob", "d_logprob", "backward", bound=_BITWISE, **spread)

    policy = of | {"kind": "scan", "stem": "policy_loss"}
    batch = policy | {"keeps": ("layout", "runs")}  # over all sequences
    yield Row("policy_loss", "loss", "forward", bound=_POLICY_LOSS, **batch)
    yield Row("policy_loss", "metrics", "forward", bound=_POLICY_METRICS, **batch)
    yield Row("policy_loss", "d_logprob", "backward", bound=_POLICY_SLOPE, **policy)
    yield Row("policy_loss", "d_entropy", "backward", bound=_POLICY_ENTROPY, **policy)

    value = policy | {"stem": "value_loss"}
    yield Row("value_loss", "loss", "forward", bound=_POLICY_LOSS, **(value | {"keeps": ("layout", "runs")}))
    yield Row("value_loss", "metrics", "forward", bound=_POLICY_METRICS, **(value | {"keeps": ("layout", "runs")}))
    yield Row("value_loss", "d_value", "backward", bound=_POLICY_SLOPE, **value)

    tokens = of | {"kind": "elementwise", "stem": "kl", "bound": _POLICY_SLOPE}
    yield Row("kl", "kl", "forward", **tokens)
    yield Row("kl", "d_logprob", "backward", **tokens)
    yield Row("kl", "d_importance_weight", "backward", **tokens)
    weights = of | {"kind": "scan", "stem": "importance_weights"}
    yield Row("importance_weights", "weights", "forward", bound=_IMPORTANCE, **weights)
    means = weights | {"keeps": ("layout", "padding", "packing", "runs")}
    yield Row("importance_weights", "metrics", "forward", bound=_IMPORTANCE_METRICS, **means)
    yield Row("importance_weights", "mask", "forward", bound=_BITWISE, **(weights | {"kind": "integers"}))
    scattered = of | {"kind": "scan", "stem": "scatter_rewards"}
    yield Row("scatter_rewards", "rewards", "forward", bound=_REWARD, **scattered)
    yield Row("scatter_rewards", "costs", "forward", bound=_BITWISE, **(scattered | {"kind": "copy"}))
    yield Row("scatter_rewards", "combined", "forward", bound=_REWARD, **scattered)
    yield Row("scatter_rewards", "lengths", "forward", bound=_BITWISE, **(scattered | {"kind": "integers"}))
    measured = of | {"kind": "scan", "stem": "mismatch_metrics", "keeps": ("layout", "padding", "packing", "runs")}
    yield Row("mismatch_metrics", "metrics", "forward", bound=_MISMATCH, **measured)
    drawn = measured | {"kind": "integers", "stem": "covariance_mask"}
    yield Row("covariance_mask", "selected", "forward", bound=_BITWISE, **drawn)
    yield Row("entropy_mask", "selected", "forward", bound=_BITWISE, **drawn)

    pairs = of | {"kind": "elementwise", "stem": "preference_loss"}
    for output in ("losses", "chosen_rewards", "rejected_rewards"):
        yield Row("preference_loss", output, "forward", bound=_PREFERENCE, **pairs)
    means = pairs | {"kind": "scan", "keeps": ("layout", "runs")}  # over all pairs
    yield Row("preference_loss", "metrics", "forward", bound=_PREFERENCE, **means)
    yield Row("preference_loss", "d_policy", "backward", bound=_PREFERENCE_SLOPE, **pairs)

    for operator, outputs in (
        ("gae", ("advantages", "returns")), ("discounted_returns", ("returns",)), ("vtrace", ("advantages", "returns"))
    ):  # fmt: skip
        for output in outputs:
            yield Row(operator, output, "forward", kind="scan", bound=_SCAN, stem="gae", **of)
    grouped = of | {"kind": "scan", "stem": "group_advantage"}  # a group is what it is of: its members stay together
    yield Row("group_advantage", "advantage", "forward", bound=_ADVANTAGE, **grouped)
    per_token = grouped | {"stem": "optimal_token_baseline", "bound": _BASELINE}
    for output in ("advantages", "returns"):
        yield Row("optimal_token_baseline", output, "forward", **per_token)
    whole = grouped | {"stem": "masked_whiten", "keeps": ("layout", "padding", "packing", "runs")}  # reads the batch
    for output in ("y", "mean", "var"):
        yield Row("masked_whiten", output, "forward", bound=_WHITENED, **whole)

    moved = of | {"kind": "copy", "bound": _BITWISE, "stem": "pack", "dtypes": DTYPES}
    yield Row("pack", "packed", "forward", **moved)
    yield Row("pack", "d_padded", "backward", **moved)
    yield Row("unpack", "padded", "forward", **moved)
    yield Row("unpack", "d_packed", "backward", **moved)
    for output in ("k_cache", "v_cache"):
        yield Row("kv_cache_append", output, "forward", **(moved | {"stem": "kv_cache_append"}))
    integers = of | {"kind": "integers", "bound": _BITWISE, "stem": "shift_labels_packed", "dtypes": ()}
    yield Row("shift_labels_packed", "labels", "forward", **integers)
    for operator in ("loss_mask_from_spans", "tool_mask"):
        yield Row(operator, "mask", "forward", **integers)
    yield Row("random_bits", "bits", "forward", **(integers | {"stem": "random_bits"}))


def _rows() -> Iterable[Row]:
    softmax: dict[str, Any] = {"kind": "softmax statistics", "backends": BY_EXPONENTIAL, "stem": "logprob"}
    for output, bound in (("logprob", _LOGPROB), ("lse", _LOGPROB), ("entropy", _ENTROPY), ("sum_p_sq", _SUM_P_SQ)):
        yield Row("logprob", output, "forward", bound=bound, rounded=False, **softmax)
    yield Row("logprob", "dlogits", "backward", bound=_DLOGITS, **softmax)
    yield Row("logprob", "dlogits of a confident target", "backward", bound=_CONFIDENT, rounded=False, **softmax)

    drawn = softmax | {"stem": "sample"}
    yield Row("sample", "ids", "forward", bound=_BITWISE, rounded=False, **drawn)
    yield Row("sample", "logprob", "forward", bound=_LOGPROB, rounded=False, **drawn)
    yield Row("sample", "raw_logprob", "forward", bound=_LOGPROB, rounded=False, **drawn)
    yield Row("sample", "top_ids", "forward", bound=_BITWISE, rounded=False, **drawn)
    yield Row("sample", "top_logprobs", "forward", bound=_LOGPROB, rounded=False, **drawn)

    edited: dict[str, Any] = {"kind": "elementwise", "backends": EVERY_BACKEND, "stem": "sample", "keeps": NO_SHARDS}
    yield Row("process_logits", "logits", "forward", bound=_PENALISED, rounded=False, **edited)

    product: dict[str, Any] = {
        "kind": "matrix product", "backends": ONE_ARCHITECTURE, "stem": "linear", "bound": _FMA, "unit_bound": _UNIT,
    }  # fmt: skip
    yield Row("linear", "y", "forward", **product)
    yield Row("linear", "dx", "backward", keeps=NO_SHARDS, **product)
    yield Row("linear", "dweight", "backward", **(product | {"kind": "token sum", "keeps": TOKEN_SUM}))
    sums: dict[str, Any] = {"kind": "token sum", "backends": EVERY_BACKEND, "keeps": TOKEN_SUM}
    yield Row("linear", "dbias", "backward", stem="linear", bound=_GROUPS, **sums)
    composed: dict[str, Any] = {"kind": "composed", "rounded": False, "keeps": ("runs",), "dtypes": ("float32",)}
    yield Row(
        "linear", "derivatives", "backward", stem="linear", bound=_derivatives(2e-6), backends=ONE_ARCHITECTURE,
        **composed,
    )  # fmt: skip

    head: dict[str, Any] = {"stem": "linear_logprob", "backends": ONE_ARCHITECTURE}
    statistics = head | {"kind": "softmax statistics", "rounded": False}
    yield Row("linear_logprob", "logprob", "forward", bound=_HEAD_LOGPROB, **statistics)
    yield Row("linear_logprob", "lse", "forward", bound=_HEAD_LOGPROB, **statistics)
    yield Row("linear_logprob", "entropy", "forward", bound=_HEAD_ENTROPY, **statistics)
    yield Row("linear_logprob", "sum_p_sq", "forward", bound=_HEAD_SUM_P_SQ, **statistics)
    yield Row("linear_logprob", "dlogits of one row", "backward", "softmax statistics", bound=_HEAD_DLOGITS, **head)
    by_units = head | {"bound": _carried(_FMA), "unit_bound": _carried(_UNIT)}
    yield Row("linear_logprob", "dhidden", "backward", "matrix product", keeps=NO_SHARDS, **by_units)
    yield Row("linear_logprob", "dweight", "backward", "token sum", keeps=TOKEN_SUM, **by_units)
    in_one_call = tuple(name for name in TOKEN_SUM if name != "chunks")
    yield Row("linear_logprob", "dlora_b", "backward", "token sum", keeps=in_one_call, **by_units)
    yield Row("linear_logprob", "dlora_a", "backward", "token sum", keeps=("layout", "padding", "runs"), **by_units)
    of_states = statistics | {"stem": "linear_sample", "keeps": NO_SHARDS}
    yield Row("linear_sample", "ids", "forward", bound=_BITWISE, **of_states)
    yield Row("linear_sample", "logprob", "forward", bound=_HEAD_LOGPROB, **of_states)
    yield Row("linear_sample", "raw_logprob", "forward", bound=_HEAD_LOGPROB, **of_states)
    loss = statistics | {"kind": "composed", "keeps": ("layout", "shards", "runs")}  # over all rows
    yield Row("linear_cross_entropy", "loss", "forward", bound=_CROSS_ENTROPY, **loss)
    yield Row("linear_logprob", "dbias", "backward", "token sum", bound=_carried(_GROUPS), keeps=TOKEN_SUM, **head)

    norm: dict[str, Any] = {"stem": "rms_norm", "backends": EVERY_BACKEND}
    reduction = norm | {"kind": "row reduction", "keeps": NO_SHARDS}
    yield Row("rms_norm", "y", "forward", bound=_NORM_Y, **reduction)
    yield Row("rms_norm", "new_residual", "forward", bound=_ONE_SUM, **(reduction | {"kind": "elementwise"}))
    yield Row("rms_norm", "rstd", "forward", bound=_RSTD, **reduction)
    yield Row("rms_norm", "dx", "backward", bound=_NORM_DX, **reduction)
    yield Row("rms_norm", "dweight", "backward", stem="rms_norm", bound=_NORM_DWEIGHT, **sums)
    yield Row("rms_norm", "derivatives", "backward", bound=_derivatives(4e-6), **norm, **composed)
    two_norms = _roundings(40, "two norms on one residual stream")
    yield Row("rms_norm", "gradients of two layers", "backward", bound=two_norms, **norm, **composed)

    turned: dict[str, Any] = {"kind": "elementwise", "backends": EVERY_BACKEND, "stem": "rope", "keeps": NO_SHARDS}
    for output, direction in (("q", "forward"), ("k", "forward"), ("dq", "backward"), ("dk", "backward")):
        yield Row("rope", output, direction, bound=_ROPE, **turned)
    yield Row(
        "rope", "derivatives", "backward", stem="rope", bound=_derivatives(1e-6), backends=EVERY_BACKEND, **composed
    )

    for operator, bound in (("silu_mul", _SILU), ("gelu_mul", _GELU)):
        gated: dict[str, Any] = {"stem": "silu_mul", "backends": EVERY_BACKEND}
        each = gated | {"kind": "elementwise"}
        yield Row(operator, "y", "forward", bound=bound, **each)
        yield Row(operator, "d_gate", "backward", bound=_SLOPE, **each)
        yield Row(operator, "d_up", "backward", bound=bound, **each)
        yield Row(operator, "derivatives", "backward", bound=_derivatives(4e-6), **gated, **composed)
        two_layers = _roundings(60, "two layers of gated activations")
        yield Row(operator, "gradients of two layers", "backward", bound=two_layers, **gated, **composed)

    table: dict[str, Any] = {"stem": "embedding"}
    copied = Bound(lambda: 0.0, "0", "bitwise: the row of the table, or +0 on a rank that has another part of it")
    yield Row("embedding", "y", "forward", "copy", EVERY_BACKEND, copied, rounded=False, **table)
    yield Row("embedding", "dweight", "backward", bound=_GROUPS, **table, **sums)

    attended: dict[str, Any] = {
        "kind": "attention",
        "backends": BY_PRODUCT,
        "stem": "attention",
        "keeps": NO_SHARDS,
    }
    yield Row("attention", "out", "forward", bound=_ATTENTION_OUT, **attended)
    yield Row("attention", "lse", "forward", bound=_ATTENTION_LSE, rounded=False, **attended)
    for output in ("dq", "dk"):
        yield Row("attention", output, "backward", bound=_ATTENTION_DS, **attended)
    yield Row("attention", "dv", "backward", bound=_ATTENTION_DV, **attended)
    summed: dict[str, Any] = attended | {"kind": "token sum", "keeps": TOKEN_SUM, "rounded": False}
    yield Row("attention", "dsinks", "backward", bound=_ATTENTION_SINKS, **summed)

    yield Row(
        "attention", "derivatives", "backward", stem="attention", bound=_derivatives(1e-4), backends=BY_EXPONENTIAL,
        **composed,
    )  # fmt: skip

    yield from _sequences()

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


ROWS: tuple[Row, ...] = tuple(_rows())
OPERATORS: tuple[str, ...] = tuple(dict.fromkeys(row.operator for row in ROWS))


def rows_of(operator: str) -> tuple[Row, ...]:
    """All rows of an operator, or of all operators with a contract's stem; empty for another name."""
    return tuple(row for row in ROWS if operator in (row.operator, row.stem))


def row(operator: str, output: str) -> Row:
    """The row of one output. Raises: KeyError."""
    for found in ROWS:
        if (found.operator, found.output) == (operator, output):
            return found
    raise KeyError(f"no row for {operator} {output}")


def as_json(operators: Iterable[str] = OPERATORS) -> dict[str, Any]:
    """The whole table as JSON values; `rlk contract --json` prints it."""
    chosen = [found for name in operators for found in rows_of(name) if found.operator == name]
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
    """The digest of the whole table. Two processes with different digests did not follow the same contract."""
    return hashlib.sha256(json.dumps(as_json(), sort_keys=True).encode()).hexdigest()
