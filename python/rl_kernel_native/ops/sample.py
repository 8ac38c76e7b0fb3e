"""Sampling of tokens: arguments, dispatch, results. The contract is cpp/include/rlk/ops/sample.h."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntFlag
from typing import Any, Literal

from .. import _check, _dispatch
from .._call import call
from .._native import functions
from .._operator import Array, Operator
from .._penalties import ORDERS, number_or_rows, penalties_of
from .._types import AnyArray, ArrayT, Exp, Generic, NamedTuple
from ..contract import BITWISE, BY_EXPONENTIAL, OFF_LOGPROB, Row, add_rows
from ..reference.sample import sample_reference
from .process_logits import EDITS, NO_EDITS
from .random_bits import given, position_of, seed_of, stream_of

__all__ = ["SampleResult", "SampleStatus", "sample", "sample_reference"]

_C = functions(sample="object*4, int*6, object, int")

LOGPROBS = {"processed": 1, "raw": 2, "both": 3, "none": 0}  # bit 0: processed, bit 1: raw
LOGPROB, RAW = 1, 2
MOST_COLUMNS = 1 << 19
MOST_LOGPROBS = 256


class SampleStatus(IntFlag):
    """Bits of a row's status. A row with any bit except ``KEPT_OVERFLOW`` has id -1 and log-probability NaN.

    Attributes:
        NAN_LOGIT: a column that may be drawn holds a NaN.
        INF_LOGIT: the largest logit / temperature * log2(e), rounded up, is 2^21 or more. The cause is an infinite
            logit or a tiny temperature.
        EMPTY_ROW: no column is allowed, or every allowed logit / temperature * log2(e) is -2^21 or less.
        BAD_TEMPERATURE: the row's temperature is not a finite normal number > 0.
        BAD_PARAMETER: the row's top_k is negative, its top_p is outside (0, 1], or its min_p is outside [0, 1]. If the
            vocabulary is split over ranks, this bit also marks a row that :func:`sample_partial` does not support.
        BAD_POSITION: the row's position lies outside [0, 2^32).
        BAD_PENALTY: the row's repetition penalty is not a finite normal number > 0, or another penalty is not finite.
        BAD_HISTORY: the row's history has an id outside ``[0, vocab_size)`` or bad offsets.
        BAD_BIAS: the row's bias has an id outside ``[0, vocab_size)``, bad offsets, or ids that do not ascend.
        BAD_SHARDS: the row's payloads (results of :func:`sample_partial`) do not come from every shard exactly once, or
            belong to another call than this merge.
        KEPT_OVERFLOW: the row's kept set did not fit into ``kept_capacity``: its count is 0 and its log-probability is
            NaN.
    """

    OK = 0
    NAN_LOGIT = 2
    INF_LOGIT = 4
    EMPTY_ROW = 8
    BAD_TEMPERATURE = 16
    BAD_PARAMETER = 128
    BAD_POSITION = 256
    KEPT_OVERFLOW = 512
    BAD_PENALTY = 1024
    BAD_HISTORY = 2048
    BAD_BIAS = 4096
    BAD_SHARDS = 8192


class SampleResult(NamedTuple, Generic[ArrayT]):
    """The result of :func:`sample`. Fields that the caller did not ask for are None.

    Attributes:
        ids: int64 ``[num_rows]``, in ``[0, valid_vocab)``, or -1 in a bad row.
        logprob: float32 ``[num_rows]``, under the distribution that the token was drawn from.
        raw_logprob: float32 ``[num_rows]``, under the unprocessed logits at temperature 1, where no token is cut or
            forbidden.
        top_ids, raw_top_ids: int64 ``[num_rows, n_logprobs]``: the most probable tokens of the processed and of the raw
            distribution, by descending logit, equal logits by ascending id. The ids are -1 if the row's ``logprob`` or
            ``raw_logprob`` is NaN.
        top_logprobs, raw_top_logprobs: float32 ``[num_rows, n_logprobs]``: the log-probabilities of ``top_ids`` and
            ``raw_top_ids``. Tokens that were cut come last, by id, with -Inf.
        kept_ids: int32 ``[kept_capacity]``, ascending in each row; entries outside ``kept_offsets`` are not written.
        kept_offsets: int64 ``[num_rows + 1]``; an empty list means that the row kept every column.
        status: int32 ``[num_rows]``, :class:`SampleStatus`.
    """

    ids: ArrayT
    logprob: ArrayT | Any
    raw_logprob: ArrayT | Any
    top_ids: ArrayT | Any
    top_logprobs: ArrayT | Any
    raw_top_ids: ArrayT | Any
    raw_top_logprobs: ArrayT | Any
    kept_ids: ArrayT | Any
    kept_offsets: ArrayT | Any
    status: ArrayT | Any

    @property
    def kept(self) -> tuple[Any, Any] | None:
        """The kept sets in the form of the argument ``kept`` of :func:`logprob`."""
        return None if self.kept_offsets is None else (self.kept_ids, self.kept_offsets)


def _outputs(arrays: Any, how: tuple[Any, ...]) -> Any:
    """Returns the shapes of ids, log-probability, raw log-probability, the n most probable tokens of each kind, kept
    ids, kept offsets and status."""
    rows, (capacity, count, _, wants) = arrays[0].shape[0], how[-4:]
    best = (((rows, count) if count and wants & kind else None) for kind in (LOGPROB, LOGPROB, RAW, RAW))
    kept = ((capacity,), (rows + 1,)) if capacity >= 0 else (None, None)
    return (rows,), (rows,) if wants & LOGPROB else None, (rows,) if wants & RAW else None, *best, *kept, (rows,)


ROWS: tuple[Array | str, ...] = (
    "seed|SymInt, sample_id|SymInt, position|SymInt, temperature|float, top_k|SymInt, top_p|float, min_p|float",
    "greedy|bool",
    "allowed?",
)
_SAMPLE = Operator(
    "sample",
    ("logits", *ROWS, *EDITS),
    "SymInt? valid_vocab, int exp, int order, SymInt kept_capacity, int n_logprobs, int stream, int wants",
    outputs=_outputs,
    dtypes=("int64", "float32", "float32", *("int64", "float32") * 2, "int32", "int64", "int32"),
    native=lambda arrays, how, *tail: _C.sample(arrays[0], tuple(arrays[1:10]), tuple(arrays[10:]), *how, *tail),
)


def _temperature(value: Any) -> Any:
    if _check.is_number(value) and value == 0:
        got = _check.shown(value)
        raise ValueError(f"temperature: expected a finite number > 0, got {got}; for greedy rows pass greedy=True")
    return number_or_rows("temperature", value, lambda t: 0 < t < math.inf, "a finite number > 0")


def _top_k(value: Any) -> Any:
    if not _check.is_number(value):
        return given("top_k", value)
    count = _check.integer64("top_k", value)
    if count < 0:
        raise ValueError(f"top_k: expected an integer >= 0 (0 cuts nothing), got {count}")
    return count


def sample_id_of(value: Any) -> Any:
    return _check.integer64("sample_id", value) if _check.is_number(value) else given("sample_id", value)


def draw_numbers(temperature: Any, top_k: Any, min_p: Any, greedy: Any) -> tuple[Any, Any, Any, Any]:
    """Checks the four arguments, and returns each as a number or an array."""
    return (
        _temperature(temperature),
        _top_k(top_k),
        number_or_rows("min_p", min_p, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        greedy if _dispatch.is_array(greedy) else _check.flag("greedy", greedy),
    )


def sample(
    logits: ArrayT,
    *,
    seed: int | AnyArray,
    sample_id: int | AnyArray,
    position: int | AnyArray,
    temperature: float | AnyArray = 1.0,
    top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0,
    min_p: float | AnyArray = 0.0,
    repetition_penalty: float | AnyArray = 1.0,
    presence_penalty: float | AnyArray = 0.0,
    frequency_penalty: float | AnyArray = 0.0,
    history: tuple[Any, ...] | None = None,
    logit_bias: tuple[Any, Any, Any] | None = None,
    greedy: bool | AnyArray = False,
    allowed: AnyArray | None = None,
    valid_vocab: int | None = None,
    order: Literal["vllm", "hf", "sglang"] = "vllm",
    return_logprob: Literal["processed", "raw", "both", "none"] = "processed",
    n_logprobs: int = 0,
    return_kept: bool = False,
    kept_capacity: int | None = None,
    return_status: bool = True,
    stream: int = 0,
    exp: Exp = None,
) -> SampleResult[ArrayT]:
    """Draws one token per row, and returns its log-probability and the set of tokens that truncation kept.

    A row's token depends only on its logits, its parameters and ``(seed, sample_id, position)``. The same token is
    drawn in any batch and in any row, and it can be drawn again later. ``logprob(logits, ids, temperature=...,
    kept=result.kept)`` gives this call's log-probability, bit for bit. A trainer can therefore score the distribution
    that the rollout drew from. No result has a gradient; inputs that require a gradient are treated as detached.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; columns contiguous, rows of any stride; at most
            2^19 columns. Not modified.
        seed, sample_id, position: the key of the random words; see :func:`random_bits`. Each is a number or
            ``[num_rows]``.
        temperature: finite number > 0, or float32 ``[num_rows]``.
        top_k: integer, or ``[num_rows]`` int32 or int64: keeps the k columns with the largest logits; among equal
            logits, lower ids come first. 0 cuts nothing.
        top_p: number in (0, 1], or float32 ``[num_rows]``: keeps a token if the tokens ranked before it have less
            than ``top_p`` of the total probability. ``order`` decides which tokens the total includes.
        min_p: number in [0, 1], or float32 ``[num_rows]``: keeps tokens with at least ``min_p`` times the largest
            probability.
        repetition_penalty, presence_penalty, frequency_penalty, history, logit_bias: see :func:`process_logits`;
            ``logprob`` then refers to the logits that :func:`process_logits` returns.
        greedy: bool, or bool ``[num_rows]``: take the largest logit at temperature 1; among equal largest logits, the
            lowest id.
        allowed: int32 ``[num_rows, ceil(vocab_size / 32)]``, or None: bit j % 32 of word j / 32 allows token j, as in
            xgrammar.
        valid_vocab: number of real tokens in a padded vocabulary; None: all columns.
        order: ``"vllm"``: min_p, top_k, top_p; ``"hf"``: top_k, top_p, min_p; ``"sglang"``: each cut is computed on the
            whole row (docs/sampling.md).
        return_logprob: ``"processed"``, ``"raw"``, ``"both"`` or ``"none"``.
        n_logprobs: the number of most probable tokens to return with their log-probabilities, for each kind that
            ``return_logprob`` names; at most 256 and ``valid_vocab``. Values other than -Inf equal :func:`logprob` of
            their ids, bit for bit.
        return_kept: whether to return the kept sets.
        kept_capacity: number of entries of ``kept_ids``. None leaves room for any result: ``num_rows * top_k`` if
            ``top_k`` is one number > 0 and ``greedy`` is False, else ``num_rows * vocab_size``. A row that does not fit
            gets a status.
        return_status: whether to return ``status``; without it, a bad row shows only by its id -1.
        stream: number of a stream of random words; other streams give independent words, see :func:`random_bits`.
        exp: ``"portable"`` or ``"hardware"``, as for :func:`logprob`.
    Returns:
        :class:`SampleResult`.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, device or value; RuntimeError if this build
        has no kernel for the device. Bad entries of per-row arrays give their row a status instead.
    Source:
        the contract; docs/numerics.md, rules 4 and 5; min-p after Nguyen et al. 2024, arXiv:2407.01082.
    Example:
        >>> rk.sample(torch.tensor([[0.0, 9.0, 1.0]]), seed=7, sample_id=0, position=0, top_k=1).ids
        tensor([1])
    """
    _check.one_of("order", order, ORDERS)
    _check.one_of("return_logprob", return_logprob, tuple(LOGPROBS))
    wants_status = _check.flag("return_status", return_status)
    keys: tuple[Any, ...] = (seed_of(seed), sample_id_of(sample_id), position_of(position))
    t, k, m, greedy = draw_numbers(temperature, top_k, min_p, greedy)
    p = number_or_rows("top_p", top_p, lambda x: 0 < x <= 1, "a number in (0, 1]")
    shape = _check.shape_of(logits)
    sizes = shape if len(shape) == 2 else (0, 0)  # a later check of the logits refuses other shapes
    how = (
        valid_vocab,
        exp,
        ORDERS.index(order),
        kept_capacity_of(return_kept, kept_capacity, *sizes, k, greedy),
        _count(n_logprobs, return_logprob),
        stream_of(stream),
        LOGPROBS[return_logprob],
    )
    found = penalties_of(repetition_penalty, presence_penalty, frequency_penalty, history, logit_bias)
    edits: tuple[Any, ...] = NO_EDITS if found is None else found
    result: SampleResult[Any] = SampleResult(*call(_SAMPLE, (logits, *keys, t, k, p, m, greedy, allowed, *edits), how))
    return result if wants_status else result._replace(status=None)


def _count(n_logprobs: Any, return_logprob: str) -> int:
    count = _check.integer64("n_logprobs", n_logprobs)
    if not 0 <= count <= MOST_LOGPROBS:
        raise ValueError(f"n_logprobs: expected an integer in [0, {MOST_LOGPROBS}], got {count}")
    if count > 0 and return_logprob == "none":
        raise ValueError(f'n_logprobs: expected 0 with return_logprob="none", got {count}')
    return count


def kept_capacity_of(return_kept: Any, kept_capacity: Any, rows: Any, columns: Any, top_k: Any, greedy: Any) -> Any:
    """Returns the number of entries of kept_ids, or -1 if the caller does not want kept sets."""
    if not _check.flag("return_kept", return_kept):
        if kept_capacity is not None:
            raise ValueError(f"kept_capacity: expected None without return_kept, got {_check.shown(kept_capacity)}")
        return -1
    if kept_capacity is not None:
        given = _check.integer64("kept_capacity", kept_capacity)
        if given < 0:
            raise ValueError(f"kept_capacity: expected an integer >= 0, got {given}")
        return given
    if _check.is_number(top_k) and top_k > 0 and greedy is False:
        columns = min(columns, top_k)
    return rows * columns


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    drawn: dict[str, Any] = {"kind": "softmax statistics", "backends": BY_EXPONENTIAL, "stem": "sample"}
    for output in ("ids", "logprob", "raw_logprob", "top_ids", "top_logprobs"):
        bound = BITWISE if output.endswith("ids") else OFF_LOGPROB
        yield Row("sample", output, "forward", bound=bound, rounded=False, **drawn)


add_rows(_contract_rows())
