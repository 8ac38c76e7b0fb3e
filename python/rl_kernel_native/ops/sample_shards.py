"""Sampling from a vocabulary that is split over ranks: one payload per shard, one merge. The contract is a part of
cpp/include/rlk/ops/sample.h."""

from __future__ import annotations

from typing import Any, Literal

from .. import _check
from .._call import call
from .._native import functions
from .._operator import Array, Operator
from .._penalties import ORDERS, number_or_rows, penalties_of
from .._types import AnyArray, ArrayT, Exp
from .process_logits import processed
from .random_bits import position_of, seed_of, stream_of
from .sample import LOGPROB, LOGPROBS, RAW, ROWS, SampleResult, draw_numbers, kept_capacity_of, sample_id_of

__all__ = ["sample_merge", "sample_partial"]

_C = functions(sample_merge="object*4, int*5, object, int", sample_partial="object*7, int*4, bool, object, int")

MOST_TOP_K, USUAL_TOP_K = 256, 64
HEAD_WORDS, CANDIDATE_WORDS = 16, 3


def _results(arrays: Any, how: tuple[Any, ...]) -> Any:
    """Ids, log-probability, raw log-probability, kept ids, kept offsets, status."""
    rows, capacity, wants = arrays[0].shape[1], how[4], how[6]
    kept = ((capacity,), (rows + 1,)) if capacity >= 0 else (None, None)
    return (rows,), (rows,) if wants & LOGPROB else None, (rows,) if wants & RAW else None, *kept, (rows,)


_PARTIAL = Operator(
    "sample_partial",
    (
        Array("logits", called=lambda how, _: "logits_shard"),
        *ROWS,
        Array("raw_logits", optional=True, called=lambda how, _: "logits_shard"),
        "row_status?",
    ),
    "SymInt vocab_start, SymInt vocab_size, SymInt? valid_vocab, int exp, int order, SymInt max_top_k, int stream, "
    "bool takes_raw",
    outputs=lambda arrays, how: ((arrays[0].shape[0], HEAD_WORDS + CANDIDATE_WORDS * how[5]),),
    dtypes=("int32",),
    native=lambda arrays, how, *tail: (_C.sample_partial(arrays[0], tuple(arrays[1:10]), *arrays[10:], *how, *tail),),
    exp=3,
)
_MERGE = Operator(
    "sample_merge",
    ("payloads", *ROWS),
    "SymInt vocab_size, SymInt? valid_vocab, int exp, int order, SymInt kept_capacity, int stream, int wants",
    outputs=_results,
    dtypes=("int64", "float32", "float32", "int32", "int64", "int32"),
    native=lambda arrays, how, *tail: _C.sample_merge(arrays[0], tuple(arrays[1:]), *how, *tail),
    exp=2,
)


def _served(temperature: Any, top_k: Any, top_p: Any, min_p: Any, greedy: Any, order: Any) -> tuple[Any, ...]:
    """Checked parameters of rows that one exchange can serve; entries of arrays are checked row by row."""
    _check.one_of("order", order, ORDERS)
    t, k, m, flags = draw_numbers(temperature, top_k, min_p, greedy)
    p = number_or_rows("top_p", top_p, lambda x: 0 < x <= 1, "a number in (0, 1]")
    if _check.is_number(k) and k > MOST_TOP_K:
        raise ValueError(f"top_k: expected an integer in [0, {MOST_TOP_K}] with shards (0 cuts nothing), got {k}")
    if flags is True:
        return t, k, p, m, flags
    for name, x, nothing in (("top_p", p, 1), ("min_p", m, 0)):
        if _check.is_number(x) and x != nothing and _check.is_number(k) and k == 0:
            raise ValueError(
                f"{name}: expected {nothing} without top_k, got {x}: shards exchange their first top_k tokens alone; "
                f"pass top_k, at most {MOST_TOP_K}"
            )
    if order == "sglang" and _check.is_number(p) and p != 1:
        raise ValueError(
            f'top_p: expected 1 with order="sglang", whose share is of the whole row, got {p}; pass "vllm" or "hf"'
        )
    return t, k, p, m, flags


def sample_partial(
    logits_shard: ArrayT,
    *,
    vocab_start: int,
    vocab_size: int,
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
    max_top_k: int | None = None,
    stream: int = 0,
    exp: Exp = None,
) -> ArrayT:
    """A shard's part of :func:`sample`, for a vocabulary that is split over ranks. Ranks exchange their payloads once,
    and :func:`sample_merge` then draws the tokens.

    Args:
        logits_shard: ``[num_rows, shard]`` float32, float16 or bfloat16: columns ``vocab_start`` to
            ``vocab_start + shard`` of the rows; columns contiguous. Not modified.
        vocab_start, vocab_size: as for :func:`logprob_partial`: a shard consists of whole parts of docs/numerics.md,
            rule 5. Shards need not be equal, and a shard without valid columns may be at any place.
        top_k: as for :func:`sample`, at most 256. A row with ``top_p`` or ``min_p`` must also have ``top_k``.
        top_p: as for :func:`sample`; with ``order="sglang"`` it must be 1.
        max_top_k: the largest ``top_k`` of any row, in [0, 256]: the payload has 64 + 12 * max_top_k bytes per row.
            None: ``top_k`` if that is a number, else 64.
        history, logit_bias, allowed: those of the whole vocabulary, with global ids and columns.
    The other arguments are those of :func:`sample`, the same on every rank.
    Returns: int32 ``[num_rows, 16 + 3 * max_top_k]``; the contract defines its words.
    Raises: as :func:`sample`; ValueError for a shard that is not whole parts, or for parameters that one exchange
        cannot serve. In per-row arrays, such parameters give their row ``SampleStatus.BAD_PARAMETER``.
    Source: the contract; docs/sampling.md.

    Example:
        >>> logits, how = torch.arange(128.0).view(1, 128) / 16, {"seed": 7, "sample_id": 0, "position": 0, "top_k": 5}
        >>> cut = {"vocab_size": 128, **how}
        >>> parts = [rk.sample_partial(logits[:, i : i + 64], vocab_start=i, **cut) for i in (0, 64)]
        >>> bool(rk.sample_merge(torch.stack(parts), **cut).ids == rk.sample(logits, **how).ids)
        True
    """
    _check.one_of("return_logprob", return_logprob, tuple(LOGPROBS))
    keys: tuple[Any, ...] = (seed_of(seed), sample_id_of(sample_id), position_of(position))
    t, k, p, m, flags = _served(temperature, top_k, top_p, min_p, greedy, order)
    start, size = (_check.integer64(*x) for x in (("vocab_start", vocab_start), ("vocab_size", vocab_size)))
    how = (
        start,
        size,
        valid_vocab,
        exp,
        ORDERS.index(order),
        _most_top_k(max_top_k, k),
        stream_of(stream),
        LOGPROBS[return_logprob] & RAW != 0,
    )
    penalties = penalties_of(repetition_penalty, presence_penalty, frequency_penalty, history, logit_bias)
    raw, status, z = None, None, logits_shard
    if penalties is not None:
        raw = logits_shard
        z, status = processed(logits_shard, penalties, order, start, size)
    payload: ArrayT = call(_PARTIAL, (z, *keys, t, k, p, m, flags, allowed, raw, status), how)[0]
    return payload


def _most_top_k(given: Any, top_k: Any) -> Any:
    if given is None:
        return top_k if _check.is_number(top_k) else USUAL_TOP_K
    most = _check.integer64("max_top_k", given)
    if not 0 <= most <= MOST_TOP_K:
        raise ValueError(f"max_top_k: expected an integer in [0, {MOST_TOP_K}], got {most}")
    if _check.is_number(top_k) and top_k > most:
        raise ValueError(f"max_top_k: expected at least top_k, which is {top_k}, got {most}")
    return most


def sample_merge(
    payloads: ArrayT,
    *,
    vocab_size: int,
    seed: int | AnyArray,
    sample_id: int | AnyArray,
    position: int | AnyArray,
    temperature: float | AnyArray = 1.0,
    top_k: int | AnyArray = 0,
    top_p: float | AnyArray = 1.0,
    min_p: float | AnyArray = 0.0,
    greedy: bool | AnyArray = False,
    allowed: AnyArray | None = None,
    valid_vocab: int | None = None,
    order: Literal["vllm", "hf", "sglang"] = "vllm",
    return_logprob: Literal["processed", "raw", "both", "none"] = "processed",
    return_kept: bool = False,
    kept_capacity: int | None = None,
    stream: int = 0,
    exp: Exp = None,
) -> SampleResult[ArrayT]:
    """Draws tokens from the payloads of all shards of a vocabulary: the result has the bytes of :func:`sample` on the
    whole rows. Every rank with all payloads gets every result, including kept sets.

    Args:
        payloads: int32 ``[shards, num_rows, 16 + 3 * max_top_k]`` from :func:`sample_partial`, of each shard once, in
            any order; 1 to 8 shards. A row gets ``SampleStatus.BAD_SHARDS`` if its payloads do not cover every shard
            once, or if another argument of their call differed from this one's. Different penalties, masks and logits
            are not detected.
        allowed: as for :func:`sample`; read only if ``return_kept`` asks for the sets of rows that nothing else cuts.
        return_logprob: as for the partials. ``"raw"`` and ``"both"`` make equal payloads, and so do ``"processed"`` and
            ``"none"``.
        return_kept, kept_capacity: as for :func:`sample`.
    The other arguments are those of the partials.
    Returns:
        :class:`SampleResult`; the fields of the most probable tokens are None.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a device or a value; RuntimeError if this build has no
        kernel for the device.
    Source: the contract; docs/sampling.md.

    Example:
        >>> logits, how = torch.tensor([[0.0, 9.0, 1.0]]), {"seed": 7, "sample_id": 0, "position": 0, "vocab_size": 3}
        >>> rk.sample_merge(rk.sample_partial(logits, vocab_start=0, **how)[None], **how).ids
        tensor([1])
    """
    _check.one_of("return_logprob", return_logprob, tuple(LOGPROBS))
    keys: tuple[Any, ...] = (seed_of(seed), sample_id_of(sample_id), position_of(position))
    t, k, p, m, flags = _served(temperature, top_k, top_p, min_p, greedy, order)
    size = _check.integer64("vocab_size", vocab_size)
    shape = _check.shape_of(payloads)
    rows = shape[1] if len(shape) == 3 else 0  # the check of the payloads refuses other shapes
    how = (
        size,
        valid_vocab,
        exp,
        ORDERS.index(order),
        kept_capacity_of(return_kept, kept_capacity, rows, size, k, flags),
        stream_of(stream),
        LOGPROBS[return_logprob],
    )
    ids, logprob, raw, kept_ids, offsets, status = call(_MERGE, (payloads, *keys, t, k, p, m, flags, allowed), how)
    return SampleResult(ids, logprob, raw, None, None, None, None, kept_ids, offsets, status)
