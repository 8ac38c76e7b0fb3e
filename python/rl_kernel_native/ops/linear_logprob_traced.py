"""Describes the forward and the backward of ``linear_logprob`` to the engine that registers operators with torch.

The operator has no second derivative and no tangent. A call that asks for one of them raises an error.
"""

from __future__ import annotations

import math
from typing import Any

from .._native import module as _C
from .._operator import Composed, Operator
from .logprob_traced import GRADIENTS, INCOMING, NUMBERS, ONE_ROW, ROWS, SAVED, joined, outputs_of

_HEAD = "hidden, weight, bias?, lora_a?, lora_b?, target"
_OPTIONS = (
    f"{NUMBERS}, int logits_dtype, int? workspace_bytes, int unit, int dh_segments, float lora_scale, "
    "float label_smoothing"
)
_OPERANDS = 5  # arrays with gradients: hidden, weight, bias, lora_a and lora_b
_ONCE = "linear_logprob: its backward has no backward; call logprob of linear for create_graph"
LARGEST = 32  # bit of `returns` for the id of the largest logit; logprob's outputs have the lower bits


# ---- calls of the extension -----------------------------------------------------------------------------------------


def _called(head: Any, rows: Any, how: Any) -> tuple[Any, ...]:
    """Returns three arguments for the extension: the arrays of the LM head, the options of logprob, and the options of
    the head."""
    return head, joined(rows, how), how[6:13]


def _native_forward(arrays: Any, how: Any, *tail: Any) -> Any:
    """Calls the extension's forward. An eager call has a further option, which the schema lacks: a shard of the
    vocabulary or None. An eager call returns lse only if the caller asks for lse; all other calls return lse."""
    returns, shard, *_ = (how[13] | 2, None) if len(how) == 14 else how[13:]
    called = _called(arrays[:6], arrays[6:], how)
    found = _C.linear_logprob(*called, returns, *tail) if shard is None else shard.forward(*called, returns)
    found = found if isinstance(found, tuple) else (found,)
    return found if returns & LARGEST else (*found, None)


def _prepared(arrays: Any, how: Any, needs: Any) -> tuple[Any, ...]:
    """Returns the options of a forward that has a backward. If the workspace is too small for the backward, this
    function raises the error before the forward runs."""
    shard, _, main_grad = how[14:]
    if how[8] is not None:
        called, place = _called(arrays[:6], arrays[6:], how), None if shard is None else shard[1:]
        _C.linear_logprob_backward(*called, place, None, bits(needs), main_grad, None, 0)
    return (*how[:13], how[13] | 2, shard)


def native_backward(arrays: Any, how: Any, *tail: Any, main_grad: Any = None, place: Any = None) -> Any:
    """Calls the extension's backward. ``place`` holds vocab_start and vocab_size of a shard, or is None."""
    given = tuple(None if x is None else x.contiguous() for x in arrays[6:11])
    called = _called(arrays[:6], arrays[11:], how)
    return _C.linear_logprob_backward(*called, place, given, how[-1], main_grad, *tail)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def bits(needs: Any) -> int:
    """Returns a number; its bit i tells whether operand i gets a gradient. A list would not do, because vmap would look
    for batches in it."""
    return sum(bool(need) << i for i, need in enumerate(needs))


def bools(needs: int) -> list[bool]:
    return [bool(needs >> i & 1) for i in range(_OPERANDS)]


def _gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    """Returns the gradients of the operands. If main_grad is given, the weight's gradient is added to main_grad
    instead."""
    (lse, *head, entropy), (shard, _, main_grad) = kept[:8], how[14:] or (None,) * 3
    arrays, how = (*head, lse, entropy, *given, *kept[8:]), how[:13]
    if shard is not None:
        return shard.gradients(call, main_grad, arrays, how, wanted)
    if main_grad is None or not wanted[1]:
        return call(BACKWARD, arrays, (*how, bits(wanted)))
    dhidden, *others = call(BACKWARD_INTO, (main_grad, *arrays), (*how, bits(wanted)))
    return dhidden, None, *others


def _no_tangents(*_: Any) -> Any:
    raise RuntimeError("linear_logprob: it has no forward-mode derivative; call logprob of linear for that")


def _no_second(*_: Any) -> Any:
    raise RuntimeError(_ONCE)


# ---- the operators --------------------------------------------------------------------------------------------------


def _flops(hidden: Any, weight: Any, lora_a: Any, needs: Any) -> int:
    """Returns the number of operations, two per multiplication. It counts the products of the logits, which a backward
    computes again, and the products of the wanted gradients."""
    columns, features = weight
    rank = 0 if lora_a is None else lora_a[0]
    of_hidden, of_weight, _, of_a, of_b = needs
    head = columns * features * (1 + of_hidden + of_weight)
    factors = features * (1 + of_hidden + of_a) + columns * (1 + (of_hidden or of_a) + of_b)
    return 2 * math.prod(hidden[:-1]) * (head + rank * factors)


def _shapes_of_gradients(operands: Any, needs: int) -> list[Any]:
    return [x.shape if need else None for x, need in zip(operands, bools(needs), strict=True)]


# An eager call has more options than the schema: a shard of the vocabulary, the weight gradient's dtype, and main_grad.
FORWARD = Operator(
    "linear_logprob",
    (_HEAD, *ROWS),
    f"{_OPTIONS}, int returns",
    outputs=lambda arrays, how: outputs_of(how[-1], arrays[0].shape[:-1], 6),
    dtypes=("float32",) * 4 + ("int32", "int64"),
    native=_native_forward,
    casts=(0, 1, 2, 3, 4),
    gradient=Composed(
        of=(0, 1, 2, 3, 4),
        incoming=INCOMING,
        prepared=_prepared,
        kept=lambda arrays, outputs: (outputs[1], *arrays[:6], outputs[2], *arrays[6:]),
        backward=_gradients,
        tangents=_no_tangents,
        asked=lambda arrays, how: how[13] > 1,
        once=_ONCE,
        constants="has no gradient here",
        accumulates=1,
        beside=2,
    ),
    cures=ONE_ROW,
    flops=lambda hidden, weight, bias, lora_a, *_: _flops(hidden, weight, lora_a, [False] * _OPERANDS),
)
BACKWARD: Operator = Operator(
    "linear_logprob_backward",
    (_HEAD, SAVED, GRADIENTS, *ROWS),
    f"{_OPTIONS}, int needs",
    outputs=lambda arrays, how: _shapes_of_gradients(arrays[:_OPERANDS], how[-1]),
    dtypes=(0, 1, 2, 3, 4),
    native=native_backward,
    follows=True,
    gradient=Composed(of=(0, 1, 2, 3, 4, 8, 9, 10), composed=_no_second, tangents=_no_tangents),
    flops=lambda hidden, weight, bias, lora_a, *rest: _flops(hidden, weight, lora_a, bools(rest[-1])),
)
BACKWARD_INTO = BACKWARD.into(1)
