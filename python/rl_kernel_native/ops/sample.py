"""Sampling of tokens: arguments, dispatch, results. The contract is cpp/include/rlk/ops/sample.h."""

from __future__ import annotations

import math
from enum import IntFlag
from typing import Any, NamedTuple

from .. import _check, _dispatch
from .._arithmetic import resolve_exp
from .._native import module as _C
from ..reference.sample import sample_reference
from .random_bits import position_of, seed_of

__all__ = ["SampleResult", "SampleStatus", "sample", "sample_reference"]

ORDERS = ("vllm", "hf", "sglang")  # SampleOrder
LOGPROBS = {"processed": 1, "raw": 2, "both": 3, "none": 0}  # bits: processed, raw
LOGPROB, RAW = 1, 2

_torch_path: Any = None


def _torch() -> Any:
    """ops/sample_torch.py, imported with the first torch tensor."""
    global _torch_path
    if _torch_path is None:
        _dispatch.require_torch()
        from . import sample_torch

        _torch_path = sample_torch
    return _torch_path


class SampleStatus(IntFlag):
    """Bits of a row's status. A row with any bit but ``KEPT_OVERFLOW`` has id -1 and log-probability NaN.

    Attributes:
        NAN_LOGIT: a column that may be drawn holds a NaN.
        INF_LOGIT: the largest logit / temperature * log2(e), rounded up, reached 2^21: by an infinity or a tiny
            temperature.
        EMPTY_ROW: nothing is allowed, or every allowed logit / temperature * log2(e) is -2^21 or less.
        BAD_TEMPERATURE: the row's temperature is not a finite normal number > 0.
        BAD_PARAMETER: the row's top_k is negative, its top_p outside (0, 1] or its min_p outside [0, 1].
        BAD_POSITION: the row's position lies outside [0, 2^32).
        KEPT_OVERFLOW: the row's kept set did not fit ``kept_capacity``: it has count 0 and a log-probability of NaN.
    """

    OK = 0
    NAN_LOGIT = 2
    INF_LOGIT = 4
    EMPTY_ROW = 8
    BAD_TEMPERATURE = 16
    BAD_PARAMETER = 128
    BAD_POSITION = 256
    KEPT_OVERFLOW = 512


class SampleResult(NamedTuple):
    """What :func:`sample` returns; None where it was not asked for.

    Attributes:
        ids: int64 ``[num_rows]``, in ``[0, valid_vocab)``, or -1 in a bad row.
        logprob: float32 ``[num_rows]``: of the distribution that the token was drawn from.
        raw_logprob: float32 ``[num_rows]``: of the logits as they came, at temperature 1, nothing cut or forbidden.
        kept_ids: int32 ``[kept_capacity]``, ascending in each row; what ``kept_offsets`` does not name is not written.
        kept_offsets: int64 ``[num_rows + 1]``; a row of count 0 kept every column.
        status: int32 ``[num_rows]``, :class:`SampleStatus`.
    """

    ids: Any
    logprob: Any
    raw_logprob: Any
    kept_ids: Any
    kept_offsets: Any
    status: Any

    @property
    def kept(self) -> tuple[Any, Any] | None:
        """What ``logprob(kept=...)`` takes."""
        return None if self.kept_offsets is None else (self.kept_ids, self.kept_offsets)


def _number_or_rows(name: str, value: Any, allows: Any, expected: str) -> Any:
    if value is None:
        raise TypeError(f"{name}: expected a number or an array of them, got NoneType")
    return _check.single(name, value, allows, expected) if _check.is_number(value) else value


def _temperature(value: Any) -> Any:
    if _check.is_number(value) and value == 0:
        raise ValueError(f"temperature: expected a finite number > 0, got {value!r}; for greedy rows pass greedy=True")
    return _number_or_rows("temperature", value, lambda t: 0 < t < math.inf, "a finite number > 0")


def _top_k(value: Any) -> Any:
    if value is None:
        raise TypeError("top_k: expected an integer or an array of them, got NoneType")
    if not _check.is_number(value):
        return value
    count = _check.integer64("top_k", value)
    if count < 0:
        raise ValueError(f"top_k: expected an integer >= 0 (0 cuts nothing), got {count}")
    return count


def _sample_id(value: Any) -> Any:
    if value is None:
        raise TypeError("sample_id: expected an integer or an array of them, got NoneType")
    return _check.integer64("sample_id", value) if _check.is_number(value) else value


def sample(
    logits: Any,
    *,
    seed: Any,
    sample_id: Any,
    position: Any,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    greedy: Any = False,
    allowed: Any = None,
    valid_vocab: int | None = None,
    order: str = "vllm",
    return_logprob: str = "processed",
    return_kept: bool = False,
    kept_capacity: int | None = None,
    exp: str | None = None,
) -> SampleResult:
    """One token of each row, its log-probability, and the set of tokens that truncation kept.

    A row's token depends on its logits, its parameters and ``(seed, sample_id, position)`` alone: it is the same in any
    batch and at any row, and can be drawn again. ``logprob(logits, ids, temperature=..., kept=result.kept)`` gives the
    log-probability of this call, bit for bit, so a trainer scores the distribution that the rollout drew from.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; columns contiguous, rows of any stride; at most
            2^19 columns. Not modified.
        seed, sample_id, position: of the random words; see :func:`random_bits`. Each a number, or ``[num_rows]``.
        temperature: finite number > 0, or float32 ``[num_rows]``.
        top_k: integer, or ``[num_rows]`` int32 or int64: the first k of logits descending, ties by id. 0 cuts nothing.
        top_p: number in (0, 1], or float32 ``[num_rows]``: tokens before which less than ``top_p`` of the mass ranks.
        min_p: number in [0, 1], or float32 ``[num_rows]``: tokens of at least ``min_p`` times the largest probability.
        greedy: bool, or bool ``[num_rows]``: the largest logit, of several the lowest id, at temperature 1.
        allowed: int32 ``[num_rows, ceil(vocab_size / 32)]``, or None: bit j % 32 of word j / 32 allows token j, as
            xgrammar has it.
        valid_vocab: real tokens of a padded vocabulary; None: all columns.
        order: ``"vllm"``: min_p, top_k, top_p; ``"hf"``: top_k, top_p, min_p; ``"sglang"``: each on the whole row
            (docs/sampling.md).
        return_logprob: ``"processed"``, ``"raw"``, ``"both"`` or ``"none"``.
        return_kept: whether the kept sets are wanted.
        kept_capacity: entries of ``kept_ids`` in all; None: enough for any row, ``num_rows * top_k`` where that is a
            number > 0 and nothing else decides, else ``num_rows * vocab_size``. A row that does not fit has a status.
        exp: ``"portable"`` or ``"hardware"``, as for :func:`logprob`.
    Returns:
        :class:`SampleResult`.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a device or a value; RuntimeError where no kernel of
        this build serves the device. Bad entries of per-row arrays are a status of their row.
    Source:
        the contract; docs/numerics.md, rules 4 and 5; min-p after Nguyen et al. 2024, arXiv:2407.01082.
    Example:
        >>> rk.sample(torch.tensor([[0.0, 9.0, 1.0]]), seed=7, sample_id=0, position=0, top_k=1).ids
        tensor([1])
    """
    _check.one_of("order", order, ORDERS)
    _check.one_of("return_logprob", return_logprob, tuple(LOGPROBS))
    keys = (seed_of(seed), _sample_id(sample_id), position_of(position))
    numbers = (
        _temperature(temperature),
        _top_k(top_k),
        _number_or_rows("top_p", top_p, lambda x: 0 < x <= 1, "a number in (0, 1]"),
        _number_or_rows("min_p", min_p, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
    )
    if not _dispatch.is_array(greedy):
        greedy = _check.flag("greedy", greedy)
    capacity = _capacity(logits, numbers[1], greedy, kept_capacity) if _check.flag("return_kept", return_kept) else -1
    if capacity < 0 and kept_capacity is not None:
        raise ValueError(f"kept_capacity: expected None without return_kept, got {kept_capacity!r}")
    options = (ORDERS.index(order), capacity, LOGPROBS[return_logprob])
    if _dispatch.is_tensor(logits):
        return SampleResult(*_torch().sample(logits, keys, numbers, greedy, allowed, valid_vocab, exp, options))
    frame = _dispatch.Frame(logits, "logits")
    _dispatch.match_torch_threads()
    rows = [
        *(frame.export(x, name) for x, name in zip(keys, ("seed", "sample_id", "position"), strict=True)),
        *(frame.export(x, name) for x, name in zip(numbers, ("temperature", "top_k", "top_p", "min_p"), strict=True)),
    ]
    flags = greedy if isinstance(greedy, bool) else frame.export(greedy, "greedy")
    found = _C.sample(
        frame.export(logits, "logits"), *rows, flags, frame.export(allowed, "allowed"), valid_vocab,
        resolve_exp(exp, frame.device), *options, frame.allocate, frame.stream,
    )  # fmt: skip
    return SampleResult(*(frame.result(array) for array in found))


def _capacity(logits: Any, top_k: Any, greedy: Any, kept_capacity: Any) -> Any:
    if kept_capacity is not None:
        given = _check.integer64("kept_capacity", kept_capacity)
        if given < 0:
            raise ValueError(f"kept_capacity: expected an integer >= 0, got {given}")
        return given
    shape: Any = getattr(logits, "shape", ())
    if len(shape) != 2:
        return 0  # refused where logits are read
    each = shape[1]
    if _check.is_number(top_k) and top_k > 0 and greedy is False:
        each = min(each, top_k)
    return shape[0] * each
