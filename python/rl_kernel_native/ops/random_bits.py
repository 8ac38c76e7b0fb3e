"""Random words of tokens: arguments, dispatch, result. The contract is cpp/include/rlk/ops/random_bits.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import _check
from .._call import call
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT
from ..contract import BITWISE, OF_TOKENS, Row, add_rows
from ..reference.random_bits import random_bits_reference

__all__ = ["random_bits", "random_bits_reference"]

functions(random_bits="object*3, int*2, object, int")

MOST_WORDS = 1024  # kStreamWords of the contract
STREAMS = 1 << 24  # kRandomStreams of the contract

_RANDOM_BITS = Operator(
    "random_bits",
    "sample_id, seed|SymInt, position|SymInt",
    "int n, int stream",
    outputs=lambda arrays, how: ((arrays[0].shape[0], how[0]),),
    dtypes=("int64",),
)


def given(name: str, value: Any) -> Any:
    """Returns an array or a number unchanged. None is a TypeError."""
    if value is None:
        raise TypeError(f"{name}: expected an integer or an array of them, got NoneType")
    return value


def seed_of(seed: Any) -> Any:
    """Returns the 64 bits of a number as a signed number, and an array unchanged."""
    if not _check.is_number(seed):
        return given("seed", seed)
    number = _check.integer("seed", seed)
    return number - (1 << 64) if number >= 1 << 63 else number


def position_of(position: Any) -> Any:
    """Returns a number after checking that it lies in [0, 2^32), and an array unchanged."""
    if not _check.is_number(position):
        return given("position", position)
    number = _check.integer64("position", position)
    if not 0 <= number < 1 << 32:
        raise ValueError(f"position: expected an integer in [0, 2^32), got {number}")
    return number


def stream_of(stream: Any) -> int:
    found = _check.integer64("stream", stream)
    if not 0 <= found < STREAMS:
        raise ValueError(f"stream: expected an integer in [0, 2^24), got {found}")
    return found


def random_bits(
    seed: int | AnyArray, sample_id: ArrayT, position: int | AnyArray, n: int, *, stream: int = 0
) -> ArrayT:
    """The random words from which :func:`sample` draws tokens: Philox4x32-10 keyed by ``(seed, sample_id, position)``.

    A row's words depend only on its own three integers. The row's place in the batch, other rows, the device and the
    engine's step do not matter. A rollout can therefore be repeated, and members of a group get different words by
    their ``sample_id``.

    Args:
        seed: integer of 64 bits, or ``[num_rows]`` int32 or int64. A negative seed means its 64 bits in two's
            complement.
        sample_id: ``[num_rows]`` int32 or int64: the number of the row's rollout, not its slot in the batch.
        position: integer in ``[0, 2^32)``, or ``[num_rows]`` int32 or int64: index of the token in its sample's output.
        n: number of words per row, 1 to 1024.
        stream: in ``[0, 2^24)``: words of different streams are independent. :func:`sample` uses stream 0 by default.
    Returns:
        int64 ``[num_rows, n]``, values in ``[0, 2^32)``; -1 in a row whose position lies outside of its range.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, device or value; RuntimeError if this build
        has no kernel for the device.
    Source: the contract; Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Example:
        >>> rk.random_bits(7, torch.tensor([41, 42]), torch.tensor([0, 3]), 2)
        tensor([[4248941369,   83688463],
                [2513807329, 2903623890]])
    """
    count = _check.integer64("n", n)
    if not 1 <= count <= MOST_WORDS:
        raise ValueError(f"n: expected 1 to {MOST_WORDS} words, got {count}")
    how = (count, stream_of(stream))
    return call(_RANDOM_BITS, (sample_id, seed_of(seed), position_of(position)), how)[0]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    integers = OF_TOKENS | {"kind": "integers", "bound": BITWISE, "stem": "random_bits", "dtypes": ()}
    yield Row("random_bits", "bits", "forward", **integers)


add_rows(_contract_rows())
