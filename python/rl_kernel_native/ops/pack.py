"""Padded arrays to packed ones and back: arguments, dispatch, results. The contract is cpp/include/rlk/ops/pack.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from .. import _check, _dispatch
from .._native import module as _C
from .._types import AnyArray, ArrayT, Generic, NamedTuple
from ..reference.pack import pack_reference, unpack_reference
from .pack_fill import fill_bits

__all__ = ["Packed", "pack", "pack_reference", "unpack", "unpack_reference"]

_torch_path: Any = None


class Packed(NamedTuple, Generic[ArrayT]):
    """What :func:`pack` gives."""

    tensors: Any  # [max_tokens, ...], one array or a list, as given
    cu_seqlens: ArrayT  # [num_sequences + 1] int32
    positions: (
        ArrayT  # [num_sequences, num_tokens] int32: a token's position among those of its row that are kept, or -1;
    )
    # None where `lengths` were given
    status: ArrayT  # [1] int32: 1 where a length was out of range, 2 where there are more than max_tokens


def _torch() -> Any:
    """ops/pack_torch.py, imported with the first torch tensor."""
    global _torch_path
    if _torch_path is None:
        from . import pack_torch

        _torch_path = pack_torch
    return _torch_path


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
    """The tokens that are kept of padded arrays, one sequence after another, and where each begins.

    Any number of arrays of one layout go in one launch. Bytes are copied as they are. No host synchronisation: how many
    tokens there are stays on the device, ``cu_seqlens[-1]``, and results have room for ``max_tokens``. A caller who
    knows their sum, such as that of lengths on the host, gives it. Without it there is room for all ``num_sequences *
    num_tokens``; unused room holds ``fill_value``. :func:`unpack`, :func:`sequence_logprob` and
    :func:`shift_labels_packed` read no further than ``cu_seqlens[-1]``. The operators of losses, advantages and rewards
    need it to be the length of their arrays: ``tensors[: int(cu_seqlens[-1])]`` is, and waits for the device.
    Differentiable (torch) in every array of floats, any number of times.

    Args:
        tensors: ``[num_sequences, num_tokens, ...]``, one array or a list or tuple of them, any dtypes of 1, 2, 4, 8 or
            16 bytes, on one device. What follows the tokens is contiguous; other strides are free.
        lengths: ``[num_sequences]`` int32 or int64, in ``[0, num_tokens]``: a row's first tokens are kept.
        mask: ``[num_sequences, num_tokens]`` bool, integers or floats of 16 bits and more: tokens where it is not zero
            are kept, in order, wherever they stand (left padding, prompts cut out). Either this or ``lengths``.
        max_tokens: rows of the results, below 2^31. More tokens than that are a ValueError on the CPU; on a GPU the
            last ones are left out and the status is 2.
        fill_value: a number, or one for each array: an integer that the dtype holds exactly, or a float that is finite
            in it where it is finite, rounded to nearest. Elements of 16 bytes and floats of 8 bits take only 0.
    Returns:
        ``Packed(tensors, cu_seqlens, positions, status)``; ``positions`` is for :func:`unpack`, which needs it where a
        mask was given.
    Raises:
        TypeError for a dtype; ValueError for a shape, a layout, a device, on the CPU also for a length;
        RuntimeError where no kernel of this build serves the device.
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
    _check_rows(frame, "lengths" if mask is None else "mask", lengths if mask is None else mask, shape)
    if max_tokens is not None:
        capacity = _check.integer64("max_tokens", max_tokens)
        if capacity < 0:
            raise ValueError(f"max_tokens: expected a number >= 0, got {capacity}")
    if frame is None:
        found, *layout = _torch().pack(arrays, lengths, mask, num_tokens, capacity, fills)
        return Packed(_as_given(tensors, found), *layout)
    _dispatch.match_torch_threads()
    cu_seqlens, positions, status = _C.pack_layout(
        frame.export(lengths, "lengths"), frame.export(mask, "mask"), num_tokens, capacity, frame.allocate, frame.stream
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
    """Packed arrays back to padded ones: the inverse of :func:`pack`.

    Differentiable (torch) in every array of floats, any number of times.

    Args:
        tensors: ``[num_tokens, ...]``, one array or a list or tuple of them; see :func:`pack`. Tokens from
            ``cu_seqlens[-1]`` on are not read.
        cu_seqlens: ``[num_sequences + 1]``, int32 or int64. Offsets that are none, or a length above
            ``max_seqlen``, are a ValueError on the CPU; on a GPU that row is ``fill_value``, or its first tokens.
        max_seqlen: columns of the results.
        positions: those that :func:`pack` gave for a mask: tokens go where they came from. None: to the left.
        fill_value: a number, or one for each array, where there is no token.
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
        return _as_given(tensors, _torch().unpack(arrays, cu_seqlens, positions, columns, fills))
    frame = _dispatch.Frame(arrays[0], "tensors")
    _dispatch.match_torch_threads()
    if cu_seqlens is None:
        raise TypeError("cu_seqlens: expected an array that speaks DLPack, got NoneType")
    return _as_given(tensors, _move(frame, arrays, cu_seqlens, positions, True, columns, 0, fills))


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
    """An integer as it is: float64 has not all of 64 bits."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if not -(1 << 63) <= value < 1 << 64:
            bits = int(value).bit_length()
            raise ValueError(f"fill_value: expected an integer of 64 bits, or a float, got one of {bits} bits")
        return int(value)
    return _check.number("fill_value", value)


def _check_rows(frame: Any, name: str, array: Any, shape: Any) -> None:
    """One length, or one row of the mask, for each sequence; what is no array is for others to refuse."""
    if frame is None and not _dispatch.is_tensor(array):
        return
    found = _check.shape_of(array) if frame is None else _C.shape_and_dtype(frame.export(array, name), name)[0]
    wanted = tuple(shape[: 1 if name == "lengths" else 2])
    if len(found) == len(wanted) and tuple(found) != wanted:
        raise ValueError(f"{name}: expected shape {list(wanted)} (that of tensors), got {list(found)}")


def _as_given(tensors: Any, found: list[Any]) -> Any:
    return found if isinstance(tensors, (list, tuple)) else found[0]
