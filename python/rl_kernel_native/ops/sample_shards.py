"""Sampling from a vocabulary that is split over ranks. Each rank reduces its shard of the logits to a small array, a
payload. Ranks exchange payloads once, or in four rounds, and a merge draws the tokens. The contract is a part of
cpp/include/rlk/ops/sample.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .. import _check, _dispatch
from .._call import call
from .._native import functions
from .._operator import Array, Operator
from .._penalties import ORDERS, number_or_rows, penalties_of
from .._types import AnyArray, ArrayT, Exp
from .process_logits import processed
from .random_bits import position_of, seed_of, stream_of
from .sample import LOGPROB, LOGPROBS, RAW, ROWS, SampleResult, draw_numbers, kept_capacity_of, sample_id_of

__all__ = ["sample_merge", "sample_partial"]

_C = functions(
    sample_merge="object*4, int*5, bool, object, int",
    sample_partial="object*8, int*4, bool, int, object, bool, object, int",
)

MOST_TOP_K, USUAL_TOP_K = 256, 64
HEAD_WORDS, CANDIDATE_WORDS = 16, 3
ROUNDS, SPLITTERS, BINS = 4, 1024, 1033


def _words(round_: int, vocab_size: Any, widest: Any, shards: Any) -> Any:
    """Returns the number of 32-bit words per row in the payload of a round."""
    step = (vocab_size + SPLITTERS - 1) // SPLITTERS
    if round_ == 1:
        return HEAD_WORDS + 2 * ((widest + step - 1) // step)
    if round_ == 2:
        return HEAD_WORDS + 3 * BINS
    if round_ == ROUNDS:
        return HEAD_WORDS
    most = (3 + shards + (shards + 3) // 4) * step + 2
    return HEAD_WORDS + 2 * (most if most < widest else widest)


def _results(arrays: Any, how: tuple[Any, ...]) -> Any:
    """Returns the shapes of ids, log-probability, raw log-probability, kept ids, kept offsets and status."""
    rows, capacity, wants = arrays[0].shape[1], how[4], how[6]
    kept = ((capacity,), (rows + 1,)) if capacity >= 0 else (None, None)
    return (rows,), (rows,) if wants & LOGPROB else None, (rows,) if wants & RAW else None, *kept, (rows,)


def _payloads(arrays: Any, how: tuple[Any, ...]) -> Any:
    """Returns the shapes of payload, kept ids and kept offsets."""
    (rows, columns), vocab_size = arrays[0].shape, how[1]
    max_top_k, round_, widest, keeps = how[5], *how[8:]
    words = HEAD_WORDS + CANDIDATE_WORDS * max_top_k
    if round_:
        words = _words(
            round_, vocab_size, columns if widest is None else widest, 1 if round_ == 1 else arrays[12].shape[0]
        )
    return (rows, words), *(((rows * columns,), (rows + 1,)) if keeps else (None, None))


_PARTIAL = Operator(
    "sample_partial",
    (
        Array("logits", called=lambda how, _: "logits_shard"),
        *ROWS,
        Array("raw_logits", optional=True, called=lambda how, _: "logits_shard"),
        "row_status?",
        *(Array(f"round_{k}", optional=True, called=lambda how, _: "earlier") for k in (1, 2, 3)),
    ),
    "SymInt vocab_start, SymInt vocab_size, SymInt? valid_vocab, int exp, int order, SymInt max_top_k, int stream, "
    "bool takes_raw, int round, SymInt? max_shard, bool keeps",
    outputs=_payloads,
    dtypes=("int32", "int32", "int64"),
    native=lambda arrays, how, *tail: _C.sample_partial(
        arrays[0], tuple(arrays[1:10]), *arrays[10:12], tuple(arrays[12:]), *how, *tail
    ),
)
_MERGE = Operator(
    "sample_merge",
    ("payloads", *ROWS),
    "SymInt vocab_size, SymInt? valid_vocab, int exp, int order, SymInt kept_capacity, int stream, int wants, "
    "bool in_rounds",
    outputs=_results,
    dtypes=("int64", "float32", "float32", "int32", "int64", "int32"),
    native=lambda arrays, how, *tail: _C.sample_merge(arrays[0], tuple(arrays[1:]), *how, *tail),
)


def _numbers(temperature: Any, top_k: Any, top_p: Any, min_p: Any, greedy: Any, order: Any) -> tuple[Any, ...]:
    _check.one_of("order", order, ORDERS)
    t, k, m, flags = draw_numbers(temperature, top_k, min_p, greedy)
    return t, k, number_or_rows("top_p", top_p, lambda x: 0 < x <= 1, "a number in (0, 1]"), m, flags


def _served(temperature: Any, top_k: Any, top_p: Any, min_p: Any, greedy: Any, order: Any) -> tuple[Any, ...]:
    """Returns the parameters of a call with one exchange, and refuses numbers that one exchange cannot serve. Entries
    of arrays are checked later, row by row."""
    t, k, p, m, flags = _numbers(temperature, top_k, top_p, min_p, greedy, order)
    if _check.is_number(k) and k > MOST_TOP_K:
        raise ValueError(f"top_k: expected an integer in [0, {MOST_TOP_K}] with shards (0 cuts nothing), got {k}")
    if flags is True:
        return t, k, p, m, flags
    for name, x, nothing in (("top_p", p, 1), ("min_p", m, 0)):
        if _check.is_number(x) and x != nothing and _check.is_number(k) and k == 0:
            raise ValueError(
                f"{name}: expected {nothing} without top_k, got {x}: one exchange sends the first top_k tokens "
                f"alone; pass top_k, at most {MOST_TOP_K}, or exchange in rounds (docs/sampling.md)"
            )
    if order == "sglang" and _check.is_number(p) and p != 1:
        raise ValueError(
            f'top_p: expected 1 with order="sglang", whose share is of the whole row, got {p}; pass "vllm" or "hf", '
            "or exchange in rounds (docs/sampling.md)"
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
    earlier: Sequence[ArrayT] | None = None,
    max_shard: int | None = None,
    return_kept: bool = False,
    stream: int = 0,
    exp: Exp = None,
) -> Any:
    """A shard's part of :func:`sample`, for a vocabulary that is split over ranks. The result is a payload, a small
    array. Ranks exchange payloads once, or in four rounds, and :func:`sample_merge` then draws the tokens. One exchange
    serves greedy rows, rows without truncation, and a ``top_k`` of at most 256. Four rounds serve every row.
    Logits that require a gradient are treated as detached.

    Args:
        logits_shard: ``[num_rows, shard]`` float32, float16 or bfloat16: columns ``vocab_start`` to
            ``vocab_start + shard`` of the rows; columns contiguous. Not modified.
        vocab_start, vocab_size: as for :func:`logprob_partial`: a shard consists of whole parts of the vocabulary
            (docs/numerics.md, rule 5). Shards need not be equal, and a shard without valid columns may be at any place.
        top_k: as for :func:`sample`; in one exchange it is at most 256, and rows with ``top_p`` or ``min_p`` need a
            ``top_k``.
        top_p: as for :func:`sample`; in one exchange with ``order="sglang"`` it must be 1.
        max_top_k: the largest ``top_k`` of any row, in [0, 256]: the payload has 64 + 12 * max_top_k bytes per row.
            None: ``top_k`` if ``top_k`` is a number, else 64. ``max_top_k`` must be None in rounds.
        earlier: None for one exchange. In rounds, the payloads of the earlier rounds: zero to three int32 arrays
            ``[shards, num_rows, words]``. Round k takes k - 1 arrays, each with the shards in the same order.
        max_shard: in rounds, the number of columns of the widest shard; None: the width of this shard.
        return_kept: whether round 4 also returns the kept tokens of this shard.
        history, logit_bias, allowed: for the whole vocabulary, with global ids and columns.
    The other arguments are as for :func:`sample`, the same on every rank.
    Returns: int32 ``[num_rows, 16 + 3 * max_top_k]``; the contract defines its words. In rounds, int32
        ``[num_rows, words]``. With ``return_kept``, a pair of this array and ``(kept_ids, kept_offsets)``: int32
        ``[num_rows * shard]`` with global ids, ascending in each row, and int64 ``[num_rows + 1]``. A row without
        truncation lists every column of the shard.
    Raises: as :func:`sample`; ValueError for a shard that does not consist of whole parts, or for parameters that one
        exchange cannot serve. In per-row arrays, such parameters give their row ``SampleStatus.BAD_PARAMETER``.
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
    in_rounds = earlier is not None
    rounds: tuple[Any, ...] = _earlier(earlier, max_top_k, max_shard, return_kept)
    t, k, p, m, flags = (_numbers if in_rounds else _served)(temperature, top_k, top_p, min_p, greedy, order)
    start, size = (_check.integer64(*x) for x in (("vocab_start", vocab_start), ("vocab_size", vocab_size)))
    how = (
        start,
        size,
        valid_vocab,
        exp,
        ORDERS.index(order),
        0 if in_rounds else _most_top_k(max_top_k, k),
        stream_of(stream),
        LOGPROBS[return_logprob] & RAW != 0,
        len(rounds) + 1 if in_rounds else 0,
        None if max_shard is None else _check.integer64("max_shard", max_shard),
        return_kept,
    )
    penalties = penalties_of(repetition_penalty, presence_penalty, frequency_penalty, history, logit_bias)
    raw, status, z = None, None, logits_shard
    if penalties is not None:
        raw = logits_shard
        z, status = processed(logits_shard, penalties, order, start, size)
    arrays = (z, *keys, t, k, p, m, flags, allowed, raw, status, *rounds, *[None] * (3 - len(rounds)))
    payload, kept_ids, kept_offsets = call(_PARTIAL, arrays, how)
    return (payload, (kept_ids, kept_offsets)) if return_kept else payload


def _earlier(earlier: Any, max_top_k: Any, max_shard: Any, return_kept: Any) -> tuple[Any, ...]:
    """Checks the arguments of rounds, and returns the payloads of the earlier rounds."""
    _check.flag("return_kept", return_kept)
    if earlier is None:
        if max_shard is not None:
            raise ValueError(f"max_shard: expected None without earlier, got {_check.shown(max_shard)}")
        if return_kept:
            raise ValueError("return_kept: expected False without earlier, got True; sample_merge has the kept sets")
        return ()
    if not isinstance(earlier, list | tuple):
        raise TypeError(f"earlier: expected a list of arrays or None, got {type(earlier).__name__}")
    if len(earlier) >= ROUNDS:
        raise ValueError(f"earlier: expected at most {ROUNDS - 1} arrays, got {len(earlier)}")
    for x in earlier:
        if not _dispatch.is_array(x):
            raise TypeError(f"earlier: expected a list of arrays or None, got an entry {type(x).__name__}")
    if max_top_k is not None:
        raise ValueError(f"max_top_k: expected None with earlier, got {_check.shown(max_top_k)}")
    if return_kept and len(earlier) < ROUNDS - 1:
        raise ValueError(f"return_kept: expected False before round {ROUNDS}, got True in round {len(earlier) + 1}")
    return tuple(earlier)


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
    in_rounds: bool = False,
    stream: int = 0,
    exp: Exp = None,
) -> SampleResult[ArrayT]:
    """Draws tokens from the payloads of all shards of a vocabulary. The result has the bytes of :func:`sample` on the
    whole rows. Every rank that passes all payloads gets the whole result, including kept sets.

    Args:
        payloads: int32 ``[shards, num_rows, 16 + 3 * max_top_k]`` from :func:`sample_partial`, of each shard once, in
            any order; 1 to 8 shards. A row gets ``SampleStatus.BAD_SHARDS`` if its payloads do not cover every shard
            once, or if :func:`sample_partial` had other arguments than this call. Differences in penalties, masks and
            logits are not detected.
        allowed: as for :func:`sample`; read only with ``return_kept``, for rows that no other argument truncates.
        return_logprob: as for :func:`sample_partial`. Payloads for ``"raw"`` and ``"both"`` are equal, and so are
            payloads for ``"processed"`` and ``"none"``.
        return_kept, kept_capacity: as for :func:`sample`. With ``in_rounds`` they must be False and None, because
            :func:`sample_partial` returns each shard's kept ids.
        in_rounds: whether the payloads come from round 4.
    The other arguments are as for :func:`sample_partial`.
    Returns:
        :class:`SampleResult`; the fields of the most probable tokens are None.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, device or value; RuntimeError if this build
        has no kernel for the device.
    Source: the contract; docs/sampling.md.

    Example:
        >>> logits, how = torch.tensor([[0.0, 9.0, 1.0]]), {"seed": 7, "sample_id": 0, "position": 0, "vocab_size": 3}
        >>> rk.sample_merge(rk.sample_partial(logits, vocab_start=0, **how)[None], **how).ids
        tensor([1])
    """
    _check.one_of("return_logprob", return_logprob, tuple(LOGPROBS))
    keys: tuple[Any, ...] = (seed_of(seed), sample_id_of(sample_id), position_of(position))
    if _check.flag("in_rounds", in_rounds) and return_kept:
        raise ValueError(
            "return_kept: expected False with in_rounds, got True; sample_partial gives each shard its kept ids"
        )
    t, k, p, m, flags = (_numbers if in_rounds else _served)(temperature, top_k, top_p, min_p, greedy, order)
    size = _check.integer64("vocab_size", vocab_size)
    shape = _check.shape_of(payloads)
    rows = shape[1] if len(shape) == 3 else 0  # a later check of the payloads refuses other shapes
    how = (
        size,
        valid_vocab,
        exp,
        ORDERS.index(order),
        kept_capacity_of(return_kept, kept_capacity, rows, size, k, flags),
        stream_of(stream),
        LOGPROBS[return_logprob],
        in_rounds,
    )
    ids, logprob, raw, kept_ids, offsets, status = call(_MERGE, (payloads, *keys, t, k, p, m, flags, allowed), how)
    return SampleResult(ids, logprob, raw, None, None, None, None, kept_ids, offsets, status)
