"""Selected log-probability from logits: arguments, dispatch, results. The contract is cpp/include/rlk/ops/logprob.h."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntFlag
from typing import Any, Literal, overload

from .. import _call, _check, _dispatch
from .._arithmetic import resolve_exp
from .._lost import refuse_gradients
from .._native import functions
from .._types import AnyArray, ArrayT, Exp, Generic, NamedTuple, OnBadId
from ..contract import BY_EXPONENTIAL, OFF_LOGPROB, Bound, Row, U, add_rows, off_dlogits, smaller
from ..reference.logprob import logprob_reference
from .logprob_traced import FORWARD, array_or_number

__all__ = [
    "LogprobResult",
    "LogprobStatus",
    "logprob",
    "logprob_backward",
    "logprob_merge",
    "logprob_partial",
    "logprob_reference",
]

_C = functions(
    logprob="object*4, int, object*2, int",
    logprob_backward="object*9, int",
    logprob_eager="object*4, int, object",
    logprob_merge="object*2, int, float, int, object, int",
    logprob_partial="object*7, int",
)


class LogprobResult(NamedTuple, Generic[ArrayT]):
    """The result of :func:`logprob` if the caller asks for more than the log-probability. Fields that the caller did
    not ask for are None."""

    logprob: ArrayT
    lse: ArrayT | Any = None
    entropy: ArrayT | Any = None
    sum_p_sq: ArrayT | Any = None
    status: ArrayT | Any = None


class LogprobStatus(IntFlag):
    """Bits of a row's status. Any bit except ``LABEL_MASKED`` makes the row's log-probability NaN.

    Attributes:
        BAD_TARGET: the target is neither in ``[0, valid_vocab)`` nor ``ignore_index``.
        NAN_LOGIT: a valid column holds a NaN.
        INF_LOGIT: the row's largest value of logit / temperature * log2(e), rounded up to an integer, is 2^21 or more.
            Here the logit is taken after ``logit_scale`` and ``softcap``. The cause is an infinite logit or a tiny
            temperature.
        EMPTY_ROW: no valid column has a logit / temperature * log2(e) above -2^21: either all logits are masked (-Inf),
            or all logits are negative and the temperature is tiny.
        BAD_TEMPERATURE: the row's temperature is not a finite number > 0, or is subnormal.
        BAD_KEPT: the row's kept set has an id outside ``[0, valid_vocab)`` or descending offsets.
        LABEL_MASKED: the target's own logit is -Inf, so its log-probability is -Inf; this is no error.
    """

    OK = 0
    BAD_TARGET = 1
    NAN_LOGIT = 2
    INF_LOGIT = 4
    EMPTY_ROW = 8
    BAD_TEMPERATURE = 16
    BAD_KEPT = 32
    LABEL_MASKED = 64


# Bit i asks for output i of LogprobResult.
LOGPROB, LSE, ENTROPY, SUM_P_SQ, STATUS = (1 << i for i in range(5))


def wanted_bits(return_lse: Any, return_entropy: Any, return_sum_p_sq: Any, return_status: Any) -> int:
    """Returns the bit of the log-probability together with the bits of the other outputs that the caller asks for."""
    wanted = LOGPROB
    if return_lse is not False and _check.flag("return_lse", return_lse):
        wanted |= LSE
    if return_entropy is not False and _check.flag("return_entropy", return_entropy):
        wanted |= ENTROPY
    if return_sum_p_sq is not False and _check.flag("return_sum_p_sq", return_sum_p_sq):
        wanted |= SUM_P_SQ
    if return_status is not False and _check.flag("return_status", return_status):
        wanted |= STATUS
    return wanted


@overload
def logprob(
    logits: ArrayT, target: AnyArray, *, temperature: float | AnyArray = 1.0, logit_scale: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100, valid_vocab: int | None = None,
    canonical_vocab: int | None = None, kept: tuple[AnyArray, AnyArray] | None = None,
    return_lse: Literal[False] = False, return_entropy: Literal[False] = False,
    return_sum_p_sq: Literal[False] = False, return_status: Literal[False] = False, check: bool = False,
    on_bad_id: OnBadId = "nan", exp: Exp = None, out: AnyArray | tuple[Any, ...] | None = None
) -> ArrayT: ...  # fmt: skip


@overload
def logprob(
    logits: ArrayT, target: AnyArray, *, temperature: float | AnyArray = 1.0, logit_scale: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100, valid_vocab: int | None = None,
    canonical_vocab: int | None = None, kept: tuple[AnyArray, AnyArray] | None = None, return_lse: bool = False,
    return_entropy: bool = False, return_sum_p_sq: bool = False, return_status: bool = False, check: bool = False,
    on_bad_id: OnBadId = "nan", exp: Exp = None, out: AnyArray | tuple[Any, ...] | None = None
) -> LogprobResult[ArrayT]: ...  # fmt: skip
def logprob(
    logits: Any,
    target: Any,
    *,
    temperature: Any = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    canonical_vocab: int | None = None,
    kept: tuple[Any, Any] | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_sum_p_sq: bool = False,
    return_status: bool = False,
    check: bool = False,
    on_bad_id: str = "nan",
    exp: str | None = None,
    out: Any = None,
) -> Any:
    """Log-probability of one token per row, and further results of the same pass over the row.

    A row has the same bits for any batch, position, stride and number of shards. In torch, gradients flow to ``logits``
    through ``logprob``, ``lse`` and ``entropy``.

    Args:
        logits: ``[..., vocab_size]``, float32, float16 or bfloat16, last dimension contiguous. Not modified.
        target: ``[...]``, int32 or int64, in ``[0, valid_vocab)`` or ``ignore_index``.
        temperature: a number > 0, or float32 ``[...]``, one per row. The logits are divided by the temperature after
            scale and softcap.
        logit_scale: multiplies the logits first; > 0.
        softcap: ``z = softcap * tanh(z / softcap)`` if given; > 0.
        ignore_index: rows with this target are never read, and all their outputs are 0.
        valid_vocab: number of real columns; the columns after them are padding. Default: all columns.
        canonical_vocab: vocabulary width that decides the order of summation; pass the same width to all engines if
            they pad differently. Default: the number of columns.
        kept: ``(ids int32 [num_ids], offsets int64 [rows + 1])`` restricts row i to ``ids[offsets[i]:offsets[i + 1]]``
            and its target; a row with an empty list is not restricted.
        check: raise a ValueError that names the first bad row. The check synchronises, and breaks the graph of
            torch.compile.
        on_bad_id: ``"nan"``, or ``"raise"``, which has the effect of ``check``.
        exp: ``"hardware"``, ``"portable"`` or None. None means hardware on CUDA and under ``rk.arithmetic("sm_90")``,
            else portable.
        out: float32 array for the log-probabilities, or a tuple in the order of the result (status int32).
    Returns:
        logprob, or a :class:`LogprobResult` if more outputs are asked for. Each output is ``[...]`` float32 in nats;
        the status is int32. A bad row (see :class:`LogprobStatus`) is NaN and does not affect other rows.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, device or value; RuntimeError if this build
        has no kernel for the device.
    Source:
        docs/numerics.md, rules 3 to 5; online softmax after Milakov and Gimelshein 2018, arXiv:1805.02867.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
        >>> rk.logprob(logits, torch.tensor([0, 1]))
        tensor([-0.1698, -0.5514])
        >>> rk.logprob(logits, torch.tensor([0, 1]), temperature=0.5, return_entropy=True).entropy
        tensor([0.1069, 0.6656])
    """
    if type(on_bad_id) is not str or on_bad_id != "nan":
        _check.one_of("on_bad_id", on_bad_id, ("nan", "raise"))
    kept_ids, kept_offsets = (None, None) if kept is None else _check.kept_arrays(kept)
    if type(ignore_index) is not int:
        ignore_index = _check.integer("ignore_index", ignore_index)
    is_alone = return_lse is return_entropy is return_sum_p_sq is return_status is False
    wanted = LOGPROB if is_alone else wanted_bits(return_lse, return_entropy, return_sum_p_sq, return_status)
    verify = (check is not False and _check.flag("check", check)) or on_bad_id == "raise"
    returns = wanted | STATUS if verify else wanted
    arguments = (temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept_ids, kept_offsets)
    if kept is None and out is None and not _call.is_read_by_dynamo():
        result = _C.logprob_eager(logits, target, arguments, exp, returns, None)
        if result is not NotImplemented:
            return result if returns == LOGPROB else _selected(result, wanted, verify, check, target)
    if out is None:
        given, value = array_or_number(temperature)
        how = (value, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, exp, returns, arguments)
        result = _call.call(FORWARD, (logits, target, given, kept_ids, kept_offsets), how)
        return result[0] if returns == LOGPROB else _selected(result, wanted, verify, check, target)
    out = _check.given_outputs(out, LogprobResult._fields, wanted)
    frame = _call.frame_of(("logits",), (logits,), out)
    refuse_gradients("logprob gives none; pass {name}.detach()", temperature=temperature)
    arrays = frame.exports((logits, target), ("logits", "target"))
    outputs = frame.exports(out, ("out",) * 5, True)
    options = (_exported(frame, arguments), resolve_exp(exp, frame.device), returns, outputs)
    result = _native_results(frame, _C.logprob(*arrays, *options, frame.allocate, frame.stream), out)
    return result if returns == LOGPROB else _selected(result, wanted, verify, check, target)


def _selected(result: tuple[Any, ...], wanted: int, verify: bool, check: bool, target: Any) -> Any:
    if verify:
        _raise_for_status(result[4], check, target)
    if wanted == LOGPROB:
        return result[0]
    return LogprobResult(*(r if wanted >> i & 1 else None for i, r in enumerate(result)))


def logprob_partial(
    logits_shard: ArrayT,
    target: AnyArray,
    *,
    vocab_start: int,
    vocab_size: int,
    temperature: float | AnyArray = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    canonical_vocab: int | None = None,
    kept: tuple[AnyArray, AnyArray] | None = None,
    exp: Exp = None,
) -> ArrayT:
    """Statistics of one shard of a vocabulary that is split over ranks; :func:`logprob_merge` computes results from all
    shards.

    Args:
        logits_shard: ``[..., shard]``: columns ``vocab_start`` to ``vocab_start + shard`` of the row.
        target: ``[...]``, global token ids, the same on every rank.
        vocab_start: global id of the first column. The vocabulary has eight parts (docs/numerics.md, rule 5), and a
            shard consists of whole parts, so the id must be the beginning of a part. If the vocabulary is a multiple of
            64 columns, 1, 2, 4 or 8 equal shards are valid.
        vocab_size: columns of the whole row.
    The other arguments are as for :func:`logprob`, the same on every rank.
    Returns: ``[..., 5]`` float32: m, S, E, Q and the target's logit. These five numbers are meant for
        :func:`logprob_merge` alone.
    Raises: as :func:`logprob`; ValueError if a shard does not consist of whole parts. The error names the padding that
        helps.

    Example:
        >>> logits, target = torch.arange(128.0).view(1, 128) / 16, torch.tensor([100])
        >>> shards = [rk.logprob_partial(logits[:, i : i + 64], target, vocab_start=i, vocab_size=128) for i in (0, 64)]
        >>> torch.equal(rk.logprob_merge(torch.stack(shards)), rk.logprob(logits, target))
        True
    """
    kept_ids, kept_offsets = _check.kept_arrays(kept)
    ignore_index = _check.integer("ignore_index", ignore_index)
    vocab_start, vocab_size = (_check.integer(*x) for x in (("vocab_start", vocab_start), ("vocab_size", vocab_size)))
    arguments = (temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept_ids, kept_offsets)
    frame = _call.frame_of(("logits",), (logits_shard,))
    if frame.wanted:
        raise ValueError(
            "logits: logprob_partial has no autograd, its ranks exchange statistics in between; detach the shard and "
            "call logprob_backward with the merged lse"
        )
    refuse_gradients("logprob_partial gives none; pass {name}.detach()", temperature=temperature)
    stats = _C.logprob_partial(
        frame.export(logits_shard, "logits"),
        frame.export(target, "target"),
        _exported(frame, arguments),
        resolve_exp(exp, frame.device),
        vocab_start,
        vocab_size,
        frame.allocate,
        frame.stream,
    )
    return frame.result(stats)


@overload
def logprob_merge(
    stats: ArrayT, *, temperature: float | AnyArray = 1.0, return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False, return_sum_p_sq: Literal[False] = False,
    return_status: Literal[False] = False
) -> ArrayT: ...  # fmt: skip


@overload
def logprob_merge(
    stats: ArrayT, *, temperature: float | AnyArray = 1.0, return_lse: bool = False, return_entropy: bool = False,
    return_sum_p_sq: bool = False, return_status: bool = False
) -> LogprobResult[ArrayT]: ...  # fmt: skip
def logprob_merge(
    stats: Any,
    *,
    temperature: Any = 1.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_sum_p_sq: bool = False,
    return_status: bool = False,
) -> Any:
    """Computes results from the statistics of all shards, with the bits of :func:`logprob` on the whole row.

    Args:
        stats: ``[shards, ..., 5]`` float32: the statistics of every shard once, in rank order; 1, 2, 4 or 8 shards. The
            call does not detect a missing or repeated shard, or a temperature that differs from the shards'.
        temperature: as given to :func:`logprob_partial`.
    Returns: as :func:`logprob`.
    Raises: TypeError for a wrong dtype; ValueError for a wrong shape.

    Example:
        >>> logits, target = torch.arange(128.0).view(1, 128) / 16, torch.tensor([100])
        >>> shards = [rk.logprob_partial(logits[:, i : i + 64], target, vocab_start=i, vocab_size=128) for i in (0, 64)]
        >>> rk.logprob_merge(torch.stack(shards))
        tensor([-4.4908])
    """
    returns = wanted_bits(return_lse, return_entropy, return_sum_p_sq, return_status)
    frame = _call.frame_of(("stats",), (stats,))
    refuse_gradients("logprob_merge gives none; pass {name}.detach()", stats=stats, temperature=temperature)
    given = (frame.export(stats, "stats"), frame.export(temperature, "temperature"))
    result = _native_results(frame, _C.logprob_merge(*given, returns, 0.0, 0, frame.allocate, frame.stream), None)
    return result if returns == LOGPROB else LogprobResult(*result)


def logprob_backward(
    logits: ArrayT,
    target: AnyArray,
    lse: AnyArray,
    *,
    dlogprob: AnyArray | None = None,
    dlse: AnyArray | None = None,
    dentropy: AnyArray | None = None,
    entropy: AnyArray | None = None,
    temperature: float | AnyArray = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    canonical_vocab: int | None = None,
    kept: tuple[AnyArray, AnyArray] | None = None,
    exp: Exp = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    out: AnyArray | None = None,
) -> ArrayT:
    """Gradient of the logits, for callers that run backward themselves; torch's autograd also calls this function.

    Args:
        logits, target and the options: as given to :func:`logprob`; for a shard also ``vocab_start`` and
            ``vocab_size``.
        lse, entropy: ``[...]`` float32 of the whole row, as forward returned them; entropy is needed only with
            ``dentropy``.
        dlogprob, dlse, dentropy: ``[...]`` float32 gradients, any strides; None means 0.
        out: array for the result; may be ``logits`` itself (in place).
    Returns: dlogits, shape and dtype of ``logits``. Ignored rows, padding, and columns outside the kept set are
        exactly 0.
    Raises: as :func:`logprob`.

    Example:
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
        >>> lse = rk.logprob(logits, target, return_lse=True).lse
        >>> rk.logprob_backward(logits, target, lse, dlogprob=torch.ones(1))
        tensor([[ 0.1562, -0.1142, -0.0420]])
    """
    kept_ids, kept_offsets = _check.kept_arrays(kept)
    ignore_index, vocab_start = _check.integer("ignore_index", ignore_index), _check.integer("vocab_start", vocab_start)
    arguments = (temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept_ids, kept_offsets)
    rows = {"lse": lse, "entropy": entropy, "dlogprob": dlogprob, "dlse": dlse, "dentropy": dentropy}
    frame = _call.frame_of(("logits",), (logits,))
    refuse_gradients(
        "logprob_backward gives none; call under torch.no_grad() or pass {name}.detach()",
        logits=logits,
        **rows,
        temperature=temperature,
    )
    if out is not None and _dispatch.is_tensor(logits) and not _dispatch.is_tensor(out):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    result = _C.logprob_backward(
        frame.export(logits, "logits"),
        frame.export(target, "target"),
        _exported(frame, arguments),
        resolve_exp(exp, frame.device),
        vocab_start,
        vocab_size,
        tuple(map(frame.export, rows.values(), rows)),
        None if out is None else frame.export_output(out, "out"),
        frame.allocate,
        frame.stream,
    )
    if out is None:
        return frame.result(result)
    given: Any = out
    _dispatch.count_write(given)
    return given


def _exported(frame: _dispatch.Frame, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments, with the arrays among them (temperature, kept ids, kept offsets) exported as DLPack
    capsules."""
    if frame.allocate is None:  # torch tensors need no export
        return arguments
    rows = (arguments[0], *arguments[6:])
    temperature, *kept = frame.exports(rows, ("temperature", "kept ids", "kept offsets"))
    return (temperature, *arguments[1:6], *kept)


def _native_results(frame: _dispatch.Frame, result: Any, out: tuple[Any, ...] | None) -> Any:
    """Returns the outputs as arrays of the caller's framework. If ``out`` holds an array for an output, that array is
    returned."""
    for array in out or ():
        _dispatch.count_write(array)
    if not isinstance(result, tuple):
        return out[0] if out is not None and out[0] is not None else frame.result(result)
    given = out or (None,) * len(result)
    return tuple(g if g is not None and r is not None else frame.result(r) for g, r in zip(given, result, strict=True))


_REASONS = {
    LogprobStatus.BAD_TARGET: "target: expected an id in [0, valid_vocab) or ignore_index, got {target}",
    LogprobStatus.NAN_LOGIT: "logits: a NaN",
    LogprobStatus.INF_LOGIT: (
        "logits: logit_scale * logit / temperature * log2(e) reached 2^21, by an infinity, a huge logit, a huge "
        "logit_scale or a tiny temperature"
    ),
    LogprobStatus.EMPTY_ROW: (
        "logits: every valid column is -Inf, or its logit_scale * logit / temperature * log2(e) is -2^21 or less"
    ),
    LogprobStatus.BAD_TEMPERATURE: "temperature: expected a finite number > 0",
    LogprobStatus.BAD_KEPT: "kept: an id outside [0, valid_vocab) or descending offsets",
}


def _raise_for_status(status: Any, check: bool, target: Any) -> None:
    wrong = ~int(LogprobStatus.LABEL_MASKED) if check else int(LogprobStatus.BAD_TARGET)
    flat = status.reshape(-1)
    rows = _dispatch.true_places((flat & wrong) != 0, "check" if check else "on_bad_id")
    if len(rows) == 0:
        return
    row = int(rows[0])
    bits = LogprobStatus(int(flat[row]))
    reasons = "; ".join(text for bit, text in _REASONS.items() if bits & bit)
    reasons = reasons.format(target=int(target.reshape(-1)[row]))
    raise ValueError(f"row {row} (the first of {len(rows)} bad rows): {reasons}")


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_ENTROPY = Bound(
    lambda max_abs_z: 2e-5 + 4e-7 * max_abs_z, "H", "lse and the mean of z, each off like a log-probability"
)
_OFF_SUM_P_SQ = Bound(
    lambda max_abs_z, sum_p_sq: (1e-5 + 4e-7 * max_abs_z) * smaller(1.0, 2 * sum_p_sq) + 1e-37,
    "B * min(1, 2 * sum_p_sq) + 1e-37",
    "p inherits a log-probability's bound as a relative error, its square twice; near 1 they cancel",
)


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
    return off_dlogits(
        of_log_p, of_entropy, 6e-7, p, log_p, spread, given, given_entropy, given_target, uncapped, cap_slope, slope
    )


_OFF_DLOGITS = Bound(
    _dlogits,
    "slope * (cap_slope * (p * (given * R + given_entropy * (spread * R + R + H)) "
    "+ p * (given + given_entropy * (log_p + spread)) * 5e-7 + given_target * 3e-7) "
    "+ uncapped * 6e-7 + (given + given_entropy) * 1e-35)",
    "R: ln p from the saved lse, off by its bound and by roundings of z; H: the saved entropy; 5e-7: four roundings "
    "and the exponential's; 3e-7: expm1 and a product; 6e-7: tanh to 2 ulp; 1e-35: probabilities below 2^-126 are 0",
)
_OFF_CONFIDENT = Bound(
    lambda expected: 3 * 2 * U + 2e-5 * expected,
    "3 * 2 * u + 2e-5 * expected",
    "1 - p of a target with p near 1, float32, by expm1: the sum of exponentials is rounded to 2^-23",
)


def _contract_rows() -> Iterator[Row]:
    softmax: dict[str, Any] = {"kind": "softmax statistics", "backends": BY_EXPONENTIAL, "stem": "logprob"}
    for output, bound in (
        ("logprob", OFF_LOGPROB),
        ("lse", OFF_LOGPROB),
        ("entropy", _OFF_ENTROPY),
        ("sum_p_sq", _OFF_SUM_P_SQ),
    ):
        yield Row("logprob", output, "forward", bound=bound, rounded=False, **softmax)
    yield Row("logprob", "dlogits", "backward", bound=_OFF_DLOGITS, **softmax)
    yield Row("logprob", "dlogits of a confident target", "backward", bound=_OFF_CONFIDENT, rounded=False, **softmax)


add_rows(_contract_rows())
