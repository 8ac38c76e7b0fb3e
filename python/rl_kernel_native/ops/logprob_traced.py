"""Describes the forward and the backward of ``logprob`` to the engine that registers operators with torch.

Forward-mode and second derivatives are composed from torch's own operators in float64. They are built for correctness,
not for speed, and need memory for arrays of shape [rows, vocab_size].
"""

from __future__ import annotations

from typing import Any

from .. import _dispatch
from .._native import module as _C
from .._operator import Array, Composed, Operator
from .._transforms import pulled, rows

# Arrays that `logprob` and `linear_logprob` take as options of each row: temperature and kept sets.
ROWS = (
    "temperature?",
    Array("kept_ids", optional=True, called=lambda *_: "kept ids"),
    Array("kept_offsets", optional=True, called=lambda *_: "kept offsets"),
)
ONE_ROW = {"target": "; for one row, torch.tensor(3)"}
NUMBERS = (
    "float temperature_value, float logit_scale, float? softcap, SymInt ignore_index, SymInt? valid_vocab, "
    "SymInt? canonical_vocab, int exp"
)
SAVED = "lse, entropy?"
INCOMING = ("dlogprob", "dlse", "dentropy")
GRADIENTS = "dlogprob?, dlse?, dentropy?"


def array_or_number(temperature: Any) -> tuple[Any, Any]:
    """Returns the temperature as an array or None (for :data:`ROWS`), and as a number (for :data:`NUMBERS`)."""
    if type(temperature) is float or not _dispatch.is_array(temperature):
        return None, temperature
    return temperature, 1.0


def joined(rows: Any, how: Any) -> tuple[Any, ...]:
    """Joins the options of the logits, except exp, into one tuple for the extension."""
    temperature, kept_ids, kept_offsets = rows
    return (how[0] if temperature is None else temperature, *how[1:6], kept_ids, kept_offsets)


def _native_forward(arrays: Any, how: Any, allocate: Any, stream: int) -> Any:
    """Calls the extension's forward. A call without a backward has one more option than the schema: the tuple that
    :func:`joined` would return."""
    if len(how) == 8:
        return _C.logprob(*arrays[:2], joined(arrays[2:], how), how[6], how[7] | 2, None, allocate, stream)
    numbers = how[8] if allocate is None else joined(arrays[2:], how)  # with exported arrays
    found = _C.logprob(arrays[0], arrays[1], numbers, how[6], how[7], None, allocate, stream)
    return found if type(found) is tuple else (found,)


def _native_backward(arrays: Any, how: Any, *tail: Any) -> Any:
    rows, numbers = tuple(arrays[2:7]), joined(arrays[7:], how)
    return (_C.logprob_backward(*arrays[:2], numbers, how[-1], 0, None, rows, None, *tail),)


def _gradients(call: Any, given: Any, kept: Any, how: Any, wanted: Any) -> Any:
    lse, logits, target, entropy, *rows = kept
    return call(BACKWARD, (logits, target, lse, entropy, *given, *rows), how[:7])


def outputs_of(returns: int, rows: Any, count: int) -> list[Any]:
    """Returns the shapes of the outputs, and None for an output that is not asked for. Bit i of ``returns`` asks for
    output i. lse is always an output, because a backward needs it."""
    return [rows if (returns | 2) >> i & 1 else None for i in range(count)]


# ---- by torch's own operators ---------------------------------------------------------------------------------------


def _composed(logits: Any, constants: Any, how: Any, of: str) -> tuple[Any, ...]:
    """Returns logprob, lse and entropy in float64, and flags that tell whether the target is a valid id. The target's
    column is found by comparison instead of an index, so a bad id cannot read a bad address."""
    import torch

    (target, temperature, kept_ids), (value, scale, softcap, ignore_index, valid_vocab) = constants, how[:5]
    if kept_ids is not None:
        raise NotImplementedError(f"logprob: {of} with kept sets")
    counts = target != ignore_index
    z = logits.double().where(counts.unsqueeze(-1), 0.0) * scale  # an ignored row may hold any value
    if softcap is not None:
        capped = z.isfinite()  # -Inf marks a masked column, so infinities stay
        z = (softcap * (z.where(capped, 0.0) / softcap).tanh()).where(capped, z)
    z = z / (value if temperature is None else temperature.double().unsqueeze(-1))
    columns = torch.arange(z.shape[-1], device=z.device)
    width = z.shape[-1] if valid_vocab is None else valid_vocab
    z = z.masked_fill(columns >= width, float("-inf"))
    log_p = z.log_softmax(-1)
    at_target = log_p.where(columns == target.unsqueeze(-1), 0.0).sum(-1)
    entropy = -(log_p.exp() * log_p.where(log_p > float("-inf"), 0.0)).sum(-1)
    found = (o.where(counts, 0.0) for o in (at_target, z.logsumexp(-1), entropy))
    return *found, (target >= 0) & (target < width) | ~counts


def _composed_forward(operands: Any, how: Any) -> Any:
    logits, *constants = operands
    logprob, lse, entropy, is_id = _composed(logits, constants, how, "forward-mode differentiation")
    found = (logprob * is_id.double().where(is_id, float("nan")), lse, entropy)
    shapes = outputs_of(how[7], logits.shape[:-1], 3)
    return tuple(o.float() for o, shape in zip(found, shapes, strict=True) if shape is not None)


def _composed_backward(operands: Any, how: Any) -> Any:
    logits, dlogprob, dlse, dentropy, *constants = operands

    def outputs(x: Any) -> tuple[Any, ...]:
        return _composed(x, constants, how, "second derivatives")[:3]

    is_id = _composed(logits.detach(), constants, how, "second derivatives")[3]
    if dlogprob is not None:
        dlogprob = dlogprob.where(is_id | (dlogprob == 0), float("nan"))
    wide = [
        logits.new_zeros(()).double().expand(is_id.shape) if d is None else d.double()
        for d in (dlogprob, dlse, dentropy)
    ]
    return tuple(pulled(outputs, (logits,), tuple(wide)))


def _refuse_kept(kept_ids: Any) -> bool:
    if kept_ids is not None:
        raise NotImplementedError("logprob: vmap with kept sets")
    return False


FORWARD = Operator(
    "logprob",
    ("logits, target", *ROWS),
    f"{NUMBERS}, int returns",
    outputs=lambda arrays, how: outputs_of(how[-1], arrays[0].shape[:-1], 5),
    dtypes=("float32",) * 4 + ("int32",),
    native=_native_forward,
    gradient=Composed(
        of=(0,),
        composed=_composed_forward,
        reads=(1, 2, 3),
        incoming=INCOMING,
        kept=lambda arrays, outputs: (outputs[1], *arrays[:2], outputs[2], *arrays[2:]),
        backward=_gradients,
        asked=lambda arrays, how: how[7] > 1,
        constants="has no gradient here",
        batch=rows(0, 1, 2, alone=lambda inputs: _refuse_kept(inputs[3])),
        dims=None,
    ),
    cures=ONE_ROW | {"DTensor": ", or for a sharded vocabulary logprob_partial and logprob_merge"},
)
BACKWARD: Operator = Operator(
    "logprob_backward",
    ("logits, target", SAVED, GRADIENTS, *ROWS),
    NUMBERS,
    dtypes=(None,),
    native=_native_backward,
    follows=True,
    gradient=Composed(
        of=(0, 4, 5, 6),
        composed=_composed_backward,
        reads=(1, 7, 8),
        batch=rows(*range(8), alone=lambda inputs: _refuse_kept(inputs[8])),
    ),
)
