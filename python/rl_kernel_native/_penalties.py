"""The arguments for bias and penalties of process_logits and sample."""

from __future__ import annotations

import math
from typing import Any

from . import _check

ORDERS = ("vllm", "hf", "sglang")  # as `SampleOrder` in C++


def number_or_rows(name: str, value: Any, allows: Any, expected: str) -> Any:
    if value is None:
        raise TypeError(f"{name}: expected a number or an array of them, got NoneType")
    return _check.single(name, value, allows, expected) if _check.is_number(value) else value


def _is_finite(x: float) -> bool:
    return -math.inf < x < math.inf  # math.isfinite does not accept a number in a trace


def _arrays(name: str, given: Any, names: tuple[str, ...], at_least: int) -> tuple[Any, ...]:
    """The arrays of a CSR structure; an omitted optional array is None."""
    if given is None:
        return (None,) * len(names)
    if not isinstance(given, (tuple, list)) or not at_least <= len(given) <= len(names):
        raise TypeError(f"{name}: expected None or ({', '.join(names)}), got {type(given).__name__}")
    for array, what in zip(given[:at_least], names, strict=False):
        if array is None:
            raise TypeError(f"{name} {what}: expected an array that speaks DLPack, got NoneType")
    return (*given, *(None,) * (len(names) - len(given)))


NAMES = (
    "repetition_penalty", "presence_penalty", "frequency_penalty",
    "history ids", "history offsets", "history is_prompt",
    "logit_bias ids", "logit_bias values", "logit_bias offsets",
)  # fmt: skip


def penalties_of(
    repetition_penalty: Any, presence_penalty: Any, frequency_penalty: Any, history: Any, logit_bias: Any
) -> tuple[Any, ...] | None:
    """The extension's arguments in the order of NAMES, or None if no history and no bias is given."""
    given = (
        number_or_rows(
            "repetition_penalty",
            repetition_penalty,
            lambda x: 0 < x < math.inf,
            "a finite number > 0 (1 changes nothing)",
        ),
        number_or_rows("presence_penalty", presence_penalty, _is_finite, "a finite number"),
        number_or_rows("frequency_penalty", frequency_penalty, _is_finite, "a finite number"),
    )
    past = _arrays("history", history, ("ids", "offsets", "is_prompt"), 2)
    bias = _arrays("logit_bias", logit_bias, ("ids", "values", "offsets"), 3)
    if history is None:
        for name, x, nothing in zip(NAMES, given, (1.0, 0.0, 0.0), strict=False):
            if not _check.is_number(x) or x != nothing:
                raise TypeError(f"history: expected (ids, offsets, is_prompt) beside {name}, got NoneType")
    return None if history is None and logit_bias is None else (*given, *past, *bias)
