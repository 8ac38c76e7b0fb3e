"""Bias and penalties on logits: arguments, dispatch. The contract is a part of cpp/include/rlk/ops/sample.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from .. import _check, _dispatch
from .._call import call
from .._lost import refuse_gradients
from .._native import functions
from .._operator import Array, Operator
from .._penalties import NAMES, ORDERS, penalties_of
from .._types import AnyArray, ArrayT
from ..contract import EVERY_BACKEND, NO_SHARDS, Bound, Row, add_rows
from ..reference.process_logits import process_logits_reference

__all__ = ["process_logits", "process_logits_reference"]

_C = functions(process_logits="object*2, int, object*3, int")

MOST_COLUMNS = 1 << 19


def _called(name: str) -> Any:
    return lambda how, _: name


EDITS: tuple[Array, ...] = (
    *(Array(name, number="float") for name in NAMES[:3]),
    *(Array(name.replace(" ", "_"), optional=True, called=_called(name)) for name in NAMES[3:]),
)
NO_EDITS: tuple[Any, ...] = (1.0, 0.0, 0.0, *(None,) * 6)
_PROCESS_LOGITS = Operator(
    "process_logits",
    ("logits", *EDITS),
    "int order, SymInt vocab_start, SymInt? vocab_size",
    outputs=lambda arrays, how: (arrays[0].shape, arrays[0].shape[:1]),
    dtypes=("float32", "int32"),
    native=lambda arrays, how, *tail: _C.process_logits(arrays[0], tuple(arrays[1:]), *how, *tail),
)


def processed(
    logits: Any, penalties: tuple[Any, ...], order: str, vocab_start: Any = 0, vocab_size: Any = None
) -> tuple[Any, Any]:
    """The processed logits, and the status of each row."""
    z, row_status = call(_PROCESS_LOGITS, (logits, *penalties), (ORDERS.index(order), vocab_start, vocab_size))
    return z, row_status


def process_logits(
    logits: ArrayT,
    *,
    repetition_penalty: float | AnyArray = 1.0,
    presence_penalty: float | AnyArray = 0.0,
    frequency_penalty: float | AnyArray = 0.0,
    history: tuple[Any, ...] | None = None,
    logit_bias: tuple[Any, Any, Any] | None = None,
    order: Literal["vllm", "hf", "sglang"] = "vllm",
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> ArrayT:
    """Applies bias and penalties to logits. :func:`sample` draws from these float32 logits, after dividing them by the
    temperature.

    ``logprob(process_logits(logits, ...), ids, temperature=..., kept=result.kept)`` gives the log-probability of
    ``sample(logits, ...)`` with the same arguments, bit for bit.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; columns contiguous, rows of any stride; at most
            2^19 columns. Not modified, and without a gradient.
        repetition_penalty: finite number > 0, or float32 ``[num_rows]``. For tokens in the history, the penalty divides
            positive logits and multiplies the other logits.
        presence_penalty: finite number, or float32 ``[num_rows]``: subtracted from the logit of each token that the
            history has as output.
        frequency_penalty: as ``presence_penalty``, times the token's number of occurrences in the output.
        history: ``(ids, offsets)`` or ``(ids, offsets, is_prompt)``: int32 or int64 ``[num_entries]``, int64
            ``[num_rows + 1]``, bool ``[num_entries]``. Prompt entries count only for the repetition penalty; without
            ``is_prompt``, all entries are output. The order of entries does not matter.
        logit_bias: ``(ids, values, offsets)``: int32 or int64 ``[num_entries]``, strictly ascending in each row,
            float32 ``[num_entries]``, int64 ``[num_rows + 1]``. -inf forbids a token.
        order: ``"vllm"`` and ``"hf"``: bias, repetition, frequency, presence. ``"sglang"``: frequency and presence,
            then repetition (for tokens of the output only), then bias (docs/sampling.md).
        vocab_start, vocab_size: for a shard: its logits are columns ``vocab_start`` to ``vocab_start + columns`` of a
            vocabulary of ``vocab_size``; ids are global. Default: the logits are whole rows.
    Returns:
        float32, of the shape of the logits. A row with a bad entry is entirely NaN; :func:`sample` gives it a status.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, device or value, or for an array that needs a
        gradient; RuntimeError if this build has no kernel for the device.
    Source: the contract; the repetition penalty after Keskar et al. 2019, arXiv:1909.05858.
    Example:
        >>> seen = (torch.tensor([1, 1]), torch.tensor([0, 2]))
        >>> rk.process_logits(torch.tensor([[0.5, 3.0]]), history=seen, frequency_penalty=0.5)
        tensor([[0.5000, 2.0000]])
    """
    _check.one_of("order", order, ORDERS)
    found = penalties_of(repetition_penalty, presence_penalty, frequency_penalty, history, logit_bias)
    penalties = NO_EDITS if found is None else found
    given: Any = logits
    if _dispatch.is_tensor(given):
        from .._torch import lost_derivative

        if given.requires_grad or lost_derivative(given) is not None:
            raise ValueError("logits: expected a tensor without gradient, which process_logits has not; call .detach()")
    if found is not None:
        refuse_gradients("process_logits gives none; call .detach()", **dict(zip(NAMES, found, strict=True)))
    start = _check.integer64("vocab_start", vocab_start)
    size = None if vocab_size is None else _check.integer64("vocab_size", vocab_size)
    z: ArrayT = processed(logits, penalties, order, start, size)[0]
    return z


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_PENALISED = Bound(
    lambda max_abs_z: 4e-7 * max_abs_z,
    "4e-7 * max_abs_z",
    "six float32 roundings of numbers up to z with bias and penalties",
)


def _contract_rows() -> Iterator[Row]:
    edited: dict[str, Any] = {"kind": "elementwise", "backends": EVERY_BACKEND, "stem": "sample", "keeps": NO_SHARDS}
    yield Row("process_logits", "logits", "forward", bound=_OFF_PENALISED, rounded=False, **edited)


add_rows(_contract_rows())
