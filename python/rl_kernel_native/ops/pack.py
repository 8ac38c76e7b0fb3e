"""Conversion of padded arrays to packed ones and back: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/pack.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from .. import _call, _check, _dispatch
from .._native import functions
from .._operator import Array, Operator, linear
from .._types import AnyArray, ArrayT, Generic, NamedTuple
from ..contract import BITWISE, DTYPES, OF_TOKENS, Row, add_rows
from ..reference.pack import pack_reference, unpack_reference
from .pack_fill import fill_bits, is_zero

__all__ = ["Packed", "pack", "pack_reference", "unpack", "unpack_reference"]

_C = functions(pack="object*3, bool*2, int*2, object*2, int", pack_layout="object, int*2, bool, object, int")


class Packed(NamedTuple, Generic[ArrayT]):
    """The result of :func:`pack`."""

    tensors: Any  # [max_tokens, ...], one array or a list, as given
    cu_seqlens: ArrayT  # [num_sequences + 1] int32
    positions: ArrayT  # [num_sequences, num_tokens] int32: index of a token among the kept tokens of its row, or -1;
    # None if `lengths` were given
    status: ArrayT  # [1] int32: 1 if a length was out of range, 2 if more than max_tokens are kept, else 0


MOST = 8  # most torch tensors in one call under autograd or in a trace


def _name(i: int) -> Any:
    """Returns a function that names array i in errors. ``how[1]`` has one fill value per array, so its length is the
    number of arrays."""
    return lambda how, _: "tensors" if len(how[1]) == 1 else f"tensors[{i}]"


def _native(arrays: Any, how: tuple[Any, ...], *tail: Any) -> list[Any]:
    (cu_seqlens, positions, *slots), (num_tokens, fills, *packs) = arrays, how
    capacity, covered = packs or (0, True)
    tensors = [t for t in slots if t is not None]
    found = _moved(tensors, cu_seqlens, positions, not packs, covered, num_tokens, capacity, fills)
    return [*found, *[None] * (MOST - len(found))]


def _moved(
    tensors: list[Any], cu_seqlens: Any, positions: Any, unpacks: bool, covered: bool, num_tokens: int, capacity: int,
    fills: Sequence[int | float],
) -> list[Any]:  # fmt: skip
    """Calls the extension with torch tensors, and returns the moved arrays. A conjugated view is copied first, because
    its memory does not hold the conjugated numbers."""
    tensors = [t.resolve_conj() if hasattr(t, "resolve_conj") else t for t in tensors]
    bits = [0 if is_zero(f) else _bits_of(t, f) for f, t in zip(fills, tensors, strict=True)]
    found: list[Any] = _C.pack(tensors, cu_seqlens, positions, unpacks, covered, num_tokens, capacity, bits, None, 0)
    return found


def _bits_of(tensor: Any, fill: int | float) -> int:
    return fill_bits(fill, str(tensor.dtype).removeprefix("torch."))


def _outputs(arrays: Any, how: tuple[Any, ...]) -> list[Any]:
    leads, first = ((how[2],), 2) if len(how) > 2 else ((arrays[0].shape[0] - 1, how[0]), 1)
    return [None if t is None else (*leads, *t.shape[first:]) for t in arrays[2:]]


def _along(call: Any, given: Any, arrays: Any, how: tuple[Any, ...], wanted: Any) -> list[Any]:
    """The derivative rule of ``pack`` and ``unpack``: both are linear, and each is the transpose of the other. Slots
    without a token get zero. torch accepts None as a tangent only for outputs that cannot have a tangent, such as
    integers."""
    (*likes, cu_seqlens, positions), (num_tokens, _, *packs) = arrays, how
    present = [t for t in given if t is not None]
    slots = (cu_seqlens, positions, *present, *[None] * (MOST - len(present)))
    zeros = [0.0] * len(present)
    if wanted is None:
        moved = call(_PACK if packs else _UNPACK, slots, (num_tokens, zeros, *packs))
    elif packs:
        moved = call(_UNPACK, slots, (num_tokens, zeros))
    else:
        moved = call(_PACK, slots, (num_tokens, zeros, likes[0].shape[0], False))
    left = iter(moved)
    found = [None if t is None else next(left) for t in given]
    shapes = _outputs((cu_seqlens, positions, *likes), how) if wanted is None else ()
    for i, (like, shape) in enumerate(zip(likes, shapes, strict=False)):
        if found[i] is None and like is not None and (like.dtype.is_floating_point or like.dtype.is_complex):
            found[i] = cu_seqlens.new_zeros(shape, dtype=like.dtype)
    return found


_ARRAYS: tuple[Array | str, ...] = (
    "cu_seqlens",
    "positions?",
    *(Array(f"tensors_{i}", optional=i > 0, called=_name(i)) for i in range(MOST)),
)
_SLOTS = tuple(range(2, 2 + MOST))
_LAYOUT = Operator(
    "pack_layout",
    (Array("kept", called=lambda how, _: "mask" if how[2] else "lengths"),),
    "SymInt num_tokens, SymInt capacity, bool by_mask",
    outputs=lambda arrays, how: ((arrays[0].shape[0] + 1,), tuple(arrays[0].shape) if how[2] else None, (1,)),
    dtypes=("int32",) * 3,
)
_INCOMING = ("dy", *(f"dy[{i}]" for i in range(1, MOST)))
_LINEAR = linear(of=_SLOTS, reads=(0, 1), incoming=_INCOMING, along=_along, dims=2)
_OPTIONS = "SymInt num_tokens, Scalar[] fill"
_UNPACK = Operator(
    "unpack", _ARRAYS, _OPTIONS, outputs=_outputs, dtypes=_SLOTS, native=_native,
    gradient=_LINEAR, leads=2,
)  # fmt: skip
# `covered` tells whether every packed token before the last offset has a source, as is true for offsets of
# `pack_layout`.
_PACK = Operator(
    "pack", _ARRAYS, f"{_OPTIONS}, SymInt capacity, bool covered", outputs=_outputs, dtypes=_SLOTS, native=_native,
    gradient=_LINEAR, leads=2,
)  # fmt: skip


@overload
def pack(
    tensors: ArrayT, lengths: AnyArray | None = None, mask: AnyArray | None = None, *, max_tokens: int | None = None,
    fill_value: float | Sequence[float] = 0
) -> Packed[ArrayT]: ...  # fmt: skip


@overload
def pack(
    tensors: Sequence[ArrayT], lengths: AnyArray | None = None, mask: AnyArray | None = None, *,
    max_tokens: int | None = None, fill_value: float | Sequence[float] = 0
) -> Packed[ArrayT]: ...  # fmt: skip
def pack(
    tensors: Any, lengths: Any = None, mask: Any = None, *, max_tokens: int | None = None, fill_value: Any = 0
) -> Packed:
    """Packs the kept tokens of padded arrays, one sequence after another, and returns the offset of each sequence.

    One launch packs any number of arrays with the same layout. Bytes are copied unchanged. The host does not
    synchronise: the number of kept tokens stays on the device as ``cu_seqlens[-1]``, and the results have
    ``max_tokens`` rows. Pass ``max_tokens`` if you know the number of kept tokens, for example from lengths on the
    host. By default the results have ``num_sequences * num_tokens`` rows. Rows after the last token hold
    ``fill_value``. Operators on tokens accept offsets that end before the array does: they read no token from
    ``cu_seqlens[-1]`` on, and give +0 for these tokens (docs/tokens.md). Differentiable (torch) in every array of
    floats, any number of times.

    Args:
        tensors: ``[num_sequences, num_tokens, ...]``, one array, or a list or tuple of arrays on one device. Elements
            have 1, 2, 4, 8 or 16 bytes. The dimensions after the tokens are contiguous; other strides are free.
        lengths: ``[num_sequences]`` int32 or int64, in ``[0, num_tokens]``: the number of tokens that are kept from the
            beginning of each row.
        mask: ``[num_sequences, num_tokens]`` bool, integers, or floats of at least 16 bits: tokens with a nonzero mask
            are kept, in order, at any positions; a mask can drop left padding or prompts. Pass either ``mask`` or
            ``lengths``.
        max_tokens: number of rows of the results, below 2^31. If more tokens are kept, the CPU raises a ValueError; a
            GPU drops the last tokens and sets the status to 2.
        fill_value: one number, or one number for each array. An integer must be exact in the dtype. A float is rounded
            to nearest; a finite float must be finite in the dtype. Elements of 16 bytes and floats of 8 bits accept
            only 0.
    Returns:
        ``Packed(tensors, cu_seqlens, positions, status)``; :func:`unpack` needs ``positions`` if a mask was given.
    Raises:
        TypeError for a wrong dtype; ValueError for a wrong shape, layout or device, and on the CPU also for a wrong
        length; RuntimeError if this build has no kernel for the device.
    Source:
        docs/numerics.md, rule 10 (padded and packed arrays have the same sums).

    Example:
        >>> packed = rk.pack(torch.tensor([[1, 2, 0], [3, 4, 5]]), lengths=torch.tensor([2, 3]), max_tokens=5)
        >>> packed.tensors, packed.cu_seqlens
        (tensor([1, 2, 3, 4, 5]), tensor([0, 2, 5], dtype=torch.int32))
    """
    arrays, fills = _arrays(tensors, fill_value)
    if (lengths is None) == (mask is None):
        raise ValueError(f"pack: expected lengths or mask, got {'neither' if lengths is None else 'both'}")
    is_torch = _dispatch.is_tensor(arrays[0])
    frame = None if is_torch else _dispatch.Frame(arrays[0], "tensors")
    shape = (
        _check.shape_of(arrays[0])
        if frame is None
        else _C.shape_and_dtype(frame.export(arrays[0], "tensors"), "tensors")[0]
    )
    if len(shape) < 2:
        raise ValueError(f"tensors: expected shape [num_sequences, num_tokens, ...], got {list(shape)}")
    num_tokens, capacity = shape[1], shape[0] * shape[1]
    kept, name = (lengths, "lengths") if mask is None else (mask, "mask")
    _check_rows(frame, name, kept, shape)
    if max_tokens is not None:
        capacity = _check.integer64("max_tokens", max_tokens)
        if capacity < 0:
            raise ValueError(f"max_tokens: expected a number >= 0, got {capacity}")
    if frame is None:
        if _is_direct(arrays, lengths, mask):
            cu_seqlens, positions, status = _C.pack_layout(kept, num_tokens, capacity, mask is not None, None, 0)
            found = _moved(arrays, cu_seqlens, positions, False, True, num_tokens, capacity, fills)
        else:
            _call.engine().require_tensors(**{"tensors": arrays[0], name: kept})
            cu_seqlens, positions, status = _call.call(_LAYOUT, (kept,), (num_tokens, capacity, mask is not None))
            found = _traced(_PACK, arrays, cu_seqlens, positions, (num_tokens, fills, capacity, True))
        return Packed(_as_given(tensors, found), cu_seqlens, positions, status)
    _dispatch.match_torch_threads()
    cu_seqlens, positions, status = _C.pack_layout(
        frame.export(kept, name), num_tokens, capacity, mask is not None, frame.allocate, frame.stream
    )
    packed = _move(frame, arrays, cu_seqlens, positions, False, num_tokens, capacity, fills)
    return Packed(_as_given(tensors, packed), frame.result(cu_seqlens), frame.result(positions), frame.result(status))


@overload
def unpack(
    tensors: ArrayT, cu_seqlens: AnyArray, max_seqlen: int, *, positions: AnyArray | None = None,
    fill_value: float | Sequence[float] = 0
) -> ArrayT: ...  # fmt: skip


@overload
def unpack(
    tensors: Sequence[ArrayT], cu_seqlens: AnyArray, max_seqlen: int, *, positions: AnyArray | None = None,
    fill_value: float | Sequence[float] = 0
) -> list[ArrayT]: ...  # fmt: skip
def unpack(tensors: Any, cu_seqlens: Any, max_seqlen: int, *, positions: Any = None, fill_value: Any = 0) -> Any:
    """Turns packed arrays into padded arrays: the inverse of :func:`pack`.

    Differentiable (torch) in every array of floats, any number of times.

    Args:
        tensors: ``[num_tokens, ...]``, one array, or a list or tuple of arrays; see :func:`pack`. Tokens from
            ``cu_seqlens[-1]`` on are not read.
        cu_seqlens: ``[num_sequences + 1]``, int32 or int64. Invalid offsets, or a length above ``max_seqlen``, are a
            ValueError on the CPU. On a GPU, a row with invalid offsets is ``fill_value``, and a longer row has only its
            first tokens.
        max_seqlen: number of columns of the results.
        positions: the ``positions`` that :func:`pack` returned for a mask: tokens return to their original columns.
            None: each row's tokens begin at column 0.
        fill_value: one number, or one number for each array, for slots without a token.
    Returns:
        ``[num_sequences, max_seqlen, ...]``, one array or a list, as given.
    Raises:
        As :func:`pack`.
    Source:
        docs/numerics.md, rule 10.

    Example:
        >>> rk.unpack(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]), max_seqlen=3)
        tensor([[1, 2, 0],
                [3, 4, 5]])
    """
    arrays, fills = _arrays(tensors, fill_value)
    columns = _check.integer64("max_seqlen", max_seqlen)
    if columns < 0:
        raise ValueError(f"max_seqlen: expected a number >= 0, got {columns}")
    if _dispatch.is_tensor(arrays[0]):
        if _is_direct(arrays, cu_seqlens, positions):
            return _as_given(tensors, _moved(arrays, cu_seqlens, positions, True, True, columns, 0, fills))
        return _as_given(tensors, _traced(_UNPACK, arrays, cu_seqlens, positions, (columns, fills)))
    frame = _dispatch.Frame(arrays[0], "tensors")
    _dispatch.match_torch_threads()
    if cu_seqlens is None:
        raise TypeError("cu_seqlens: expected an array that speaks DLPack, got NoneType")
    return _as_given(tensors, _move(frame, arrays, cu_seqlens, positions, True, columns, 0, fills))


def _is_direct(tensors: list[Any], *others: Any) -> bool:
    """Tells whether a call with torch tensors goes directly to the extension, which takes any number of tensors at
    once."""
    _call.engine()
    from .. import _torch

    if _torch.wants_grad(*tensors) or not _torch.is_direct(*tensors, *others):
        return False
    _torch.device_type(tensors[0], "tensors")
    _torch.prepare(tensors[0])
    return True


def _traced(op: Operator, tensors: list[Any], cu_seqlens: Any, positions: Any, how: tuple[Any, ...]) -> list[Any]:
    """Splits a list of torch tensors over several calls of an operator. Tensors that require a gradient get separate
    calls, because otherwise all results of a call would require a gradient."""
    found: dict[int, Any] = {}
    apart = _call.engine().wants_grad(*tensors)
    for wanted in (True, False):
        group = [i for i, t in enumerate(tensors) if (apart and getattr(t, "requires_grad", False)) == wanted]
        for first in range(0, len(group), MOST):
            some = group[first : first + MOST]
            arrays = (cu_seqlens, positions, *(tensors[i] for i in some), *[None] * (MOST - len(some)))
            outputs = _call.call(op, arrays, (how[0], [how[1][i] for i in some], *how[2:]))
            found |= zip(some, outputs, strict=False)
    return [found[i] for i in range(len(tensors))]


def _move(
    frame: Any, arrays: list[Any], cu_seqlens: Any, positions: Any, unpacks: bool, num_tokens: int, capacity: int,
    fills: list[int | float],
) -> list[Any]:  # fmt: skip
    names = ["tensors"] if len(arrays) == 1 else [f"tensors[{i}]" for i in range(len(arrays))]
    named = list(zip(arrays, names, strict=True))
    dtypes = [_C.shape_and_dtype(frame.export(a, name), name)[1] for a, name in named]
    found = _C.pack(
        [frame.export(a, name) for a, name in named], frame.export(cu_seqlens, "cu_seqlens"),
        frame.export(positions, "positions"), unpacks, True, num_tokens, capacity,
        [fill_bits(f, dtype) for f, dtype in zip(fills, dtypes, strict=True)], frame.allocate, frame.stream,
    )  # fmt: skip
    return [frame.result(a) for a in found]


def _arrays(tensors: Any, fill_value: Any) -> tuple[list[Any], list[int | float]]:
    arrays = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    if not arrays:
        raise ValueError("tensors: expected at least one array, got none")
    given = list(fill_value) if isinstance(fill_value, (list, tuple)) else [fill_value] * len(arrays)
    if len(given) != len(arrays):
        raise ValueError(f"fill_value: expected one number or {len(arrays)} (one for each array), got {len(given)}")
    return arrays, [_fill(value) for value in given]


def _fill(value: Any) -> int | float:
    """Checks a fill value. An integer stays an integer, because float64 cannot hold all 64 bits."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(
                f"fill_value: expected an integer of 64 bits, or a float, got {_check.shown(value, 'one')}"
            )
        return int(value)
    return _check.number("fill_value", value)


def _check_rows(frame: Any, name: str, array: Any, shape: Any) -> None:
    """Checks that each sequence has one length, or one row of the mask. Values that are no arrays pass here, because
    later checks refuse them."""
    if frame is None and not _dispatch.is_tensor(array):
        return
    found = _check.shape_of(array) if frame is None else _C.shape_and_dtype(frame.export(array, name), name)[0]
    wanted = tuple(shape[: 1 if name == "lengths" else 2])
    if len(found) == len(wanted) and tuple(found) != wanted:
        raise ValueError(f"{name}: expected shape {list(wanted)} (that of tensors), got {list(found)}")


def _as_given(tensors: Any, found: list[Any]) -> Any:
    return found if isinstance(tensors, (list, tuple)) else found[0]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    moved = OF_TOKENS | {"kind": "copy", "bound": BITWISE, "stem": "pack", "dtypes": DTYPES}
    yield Row("pack", "packed", "forward", **moved)
    yield Row("pack", "d_padded", "backward", **moved)
    yield Row("unpack", "padded", "forward", **moved)
    yield Row("unpack", "d_packed", "backward", **moved)


add_rows(_contract_rows())
