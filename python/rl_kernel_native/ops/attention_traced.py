"""Describes the forward and the backward of ``attention`` to the engine that registers operators with torch.

Forward-mode and second derivatives are composed from torch's own operators in attention_composed.py.
"""

from __future__ import annotations

from typing import Any

from .._native import module as _C
from .._operator import Array, Composed, Operator
from .._transforms import batched, pulled
from .attention_lists import NO_PAGES, PAGES, PLACES, lse_shape, out_shape

MOST_HEAD_DIM = 256
_HOW = "bool causal, SymInt? window_size, float? softmax_scale, float? softcap, int exp, int unit"


# ---- calls of the extension -----------------------------------------------------------------------------------------


def _native_backward(arrays: Any, how: Any, *tail: Any) -> Any:
    dout, dlse, q, k, v, out, lse, *rest = arrays
    return _C.attention_backward(dout, dlse, out, lse, (q, k, v, *rest, *NO_PAGES), tuple(how[:4]), *how[4:], *tail)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def refuse_pages(block_table: Any) -> None:
    if block_table is not None:
        raise ValueError("block_table: pages have no gradient; call under torch.no_grad(), or without block_table")


def _gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    (dout, dlse), (out, lse, q, k, v, sinks, *lists) = given, kept
    refuse_pages(lists[6])  # needed for direct calls of the registered operator; `attention` has already checked
    if dout is None:
        dout = out.new_zeros(out.shape)
    arrays = (dout, None if dlse is None else dlse.contiguous(), q, k, v, out, lse, sinks, *lists[:6])
    found = call(BACKWARD, arrays, (*how[:6], wanted[0], wanted[1] or wanted[2], wanted[3]))
    return tuple(g if is_wanted else None for g, is_wanted in zip(found, wanted, strict=True))


def _composed_forward(operands: Any, how: Any) -> Any:
    from .attention_composed import forward

    q, k, v, sinks, *lists = operands
    return forward(q, k, v, sinks, tuple(lists), how)


def _composed_backward(operands: Any, how: Any) -> Any:
    from .attention_composed import forward

    dout, dlse, q, k, v, sinks, *lists = operands
    given = (dout,) if dlse is None else (dout, dlse)

    def outputs(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return forward(q, k, v, sinks, (*lists, *NO_PAGES), how)[: len(given)]

    found = pulled(outputs, (q, k, v, sinks), given)
    return tuple(g for g, is_wanted in zip(found, _wanted(how), strict=True) if is_wanted)


def _wanted(how: Any) -> tuple[bool, ...]:
    """Tells for each of dq, dk, dv and dsinks whether it is wanted."""
    wants_q, wants_kv, wants_sinks = how[6:]
    return wants_q, wants_kv, wants_kv, wants_sinks


def _gradient_shapes(arrays: Any, how: Any) -> list[Any]:
    q, k, v = arrays[2:5]
    shapes = q.shape, k.shape, v.shape, q.shape[-2:-1]
    return [shape if is_wanted else None for shape, is_wanted in zip(shapes, _wanted(how), strict=True)]


def _batch(folded: tuple[int, ...], sinks: int, alone: tuple[int, ...], wanted: Any) -> Any:
    """Returns the vmap rule. In the arrays at the positions ``folded``, the rule merges vmap's dimension into the batch
    of sequences.

    If each element has its own sinks, or an array at one of the positions ``alone`` is given, vmap calls the operator
    once per element."""

    def batch(info: Any, dims: Any, inputs: Any, apply: Any) -> Any:
        if any(inputs[i] is not None for i in alone) or dims[sinks] is not None or info.batch_size == 0:
            return None
        given = list(inputs)
        for i, x in zip(folded, batched(info, [dims[i] for i in folded], [inputs[i] for i in folded]), strict=True):
            given[i] = None if x is None else x.flatten(0, 1)
        places = tuple(0 if is_wanted else None for is_wanted in wanted(inputs))
        outputs = zip(apply(*given), places, strict=True)
        size = info.batch_size
        return tuple(o if p is None else o.unflatten(0, (size, o.shape[0] // size)) for o, p in outputs), places

    return batch


# ---- the operators --------------------------------------------------------------------------------------------------


def _lists(names: tuple[str, ...], parents: int) -> list[Array]:
    """Returns the arrays that say which tokens a call reads. The argument ``parents`` is the position of the array with
    this name. If a call has that array, error messages name both arrays of offsets ``cu_segments``."""

    def called(name: str) -> Any:
        is_offsets = name in PLACES[:2]
        return lambda _, arrays: "cu_segments" if is_offsets and arrays and arrays[parents] is not None else name

    return [Array(name, optional=True, called=called(name)) for name in names]


def _native(arrays: Any, how: Any, *tail: Any) -> Any:
    """Calls the extension. An eager call may have one more option than the schema: whether lse is wanted."""
    return _C.attention(arrays, how[:4], how[4], how[5], len(how) == 6 or how[6], None, *tail)


FORWARD = Operator(
    "attention",
    (*"qkv", "sinks?", *_lists(PLACES + PAGES, 9)),
    _HOW,
    outputs=lambda arrays, how: (out_shape(arrays[0], arrays[2]), lse_shape(arrays[0])),
    dtypes=(None, "float32"),
    native=_native,
    casts=(0, 1, 2),
    gradient=Composed(
        of=(0, 1, 2, 3),
        composed=_composed_forward,
        reads=tuple(range(4, 14)),
        incoming=("dout", "dlse"),
        kept=lambda arrays, outputs: (*outputs, *arrays[:11]),
        backward=_gradients,
        asked=lambda arrays, how: True,
        batch=_batch((0, 1, 2, *range(4, 14)), 3, (4, 5, 10), lambda inputs: (True, True)),
        dims=4,
        as_kept=True,
    ),
)
BACKWARD: Operator = Operator(
    "attention_backward",
    ("dout", "dlse?", *"qkv", "out", "lse", "sinks?", *_lists(PLACES, 13)),
    f"{_HOW}, bool wants_q, bool wants_kv, bool wants_sinks",
    outputs=_gradient_shapes,
    dtypes=(2, 3, 4, "float32"),
    native=_native_backward,
    follows=True,
    gradient=Composed(
        of=(0, 1, 2, 3, 4, 7),
        composed=_composed_backward,
        reads=tuple(range(8, 14)),
        batch=_batch((*range(7), *range(8, 14)), 7, (7, 8, 9), lambda inputs: _wanted(inputs[14:])),
    ),
    leads=2,
)
