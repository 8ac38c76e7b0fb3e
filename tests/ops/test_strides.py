"""Masks, positions and other arrays of integers are read by their strides or refused. Such arrays are never read as if
contiguous.

The arrays are every second element of memory; the elements between them would change the result. test_token_model.py
has the masks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from test_token_model import CASES, SEQUENCES, TOKENS, Batch, bits, canonical, counted, offsets, results

torch = pytest.importorskip("torch")


def strided(x: Any, other: Any) -> Any:
    """``x`` as every second element of the last dimension, and ``other`` between them."""
    pairs = torch.stack((x, torch.as_tensor(other, dtype=x.dtype).expand_as(x)), -1)
    return pairs.flatten(-2)[..., ::2]


def answer(call: Callable[[], Any]) -> Any:
    """The bytes of all results, or the message of the refusal."""
    try:
        return [bits(x) for x in results(call())]
    except (ValueError, TypeError) as error:
        return str(error)


def expect_read_or_refused(name: str, want: Any, found: Any) -> None:
    assert isinstance(want, list)
    if isinstance(found, str):
        assert re.match(rf"{name}: .*(contiguous|stride)", found), found
    else:
        assert found == want


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.masked], ids=lambda c: c.name)
def test_a_strided_mask(case: Any, dtype: Any) -> None:
    mask = counted().to(dtype)
    want = answer(lambda: case.call(canonical(case, mask)))
    found = answer(lambda: case.call(canonical(case, strided(mask, 1))))
    expect_read_or_refused("(loss_|response_)?mask", want, found)


@pytest.mark.parametrize("case", [c for c in CASES if c.packed], ids=lambda c: c.name)
def test_strided_offsets(case: Any) -> None:
    def batch(cu_seqlens: Any) -> Batch:
        return Batch((TOKENS,), counted(), cu_seqlens, SEQUENCES)

    want = answer(lambda: case.call(batch(offsets())))
    found = answer(lambda: case.call(batch(strided(offsets(), TOKENS))))
    expect_read_or_refused("cu_seqlens", want, found)


RNG = np.random.default_rng(0)
TABLE = torch.from_numpy(RNG.standard_normal((16, 4)).astype(np.float32))
Q = torch.from_numpy(RNG.standard_normal((1, 6, 2, 8)).astype(np.float32))
WEIGHT = torch.from_numpy(RNG.standard_normal((16, 8)).astype(np.float32))
ROWS = torch.from_numpy(RNG.standard_normal((6, 16)).astype(np.float32))
PADDED = torch.from_numpy(RNG.standard_normal((2, 6)).astype(np.float32))
REWARDS = torch.from_numpy(RNG.standard_normal(6).astype(np.float32))
IDS, KEPT = torch.tensor([3, 0, 7, 2, 15, 9]), torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 1]], dtype=torch.bool)


def _unpack(positions: Any) -> Any:
    packed = rk.pack(PADDED, mask=KEPT)
    return rk.unpack(packed.tensors, packed.cu_seqlens, 6, positions=positions)


# Maps a name to (the array, the elements between the array's own, the argument's name, the call).
ARRAYS: dict[str, tuple[Any, Any, str, Callable[[Any], Any]]] = {
    "rope": (IDS[None], 1, "position_ids", lambda x: rk.rope(Q, None, TABLE, TABLE, position_ids=x)),
    "embedding": (IDS, 1, "ids", lambda x: rk.embedding(x, WEIGHT)),
    "embedding_backward": (IDS, 1, "ids", lambda x: rk.embedding_backward(ROWS, x, 16)),
    "logprob": (IDS, 1, "target", lambda x: rk.logprob(ROWS, x, return_lse=True)),
    "pack's mask": (KEPT, 1, "mask", lambda x: tuple(rk.pack(PADDED, mask=x))),
    "pack's lengths": (torch.tensor([2, 5]), 1, "lengths", lambda x: tuple(rk.pack(PADDED, x))),
    "unpack": (rk.pack(PADDED, mask=KEPT).positions, 0, "positions", _unpack),
    "group_advantage": (IDS % 2, 0, "group_ids", lambda x: rk.group_advantage(REWARDS, group_ids=x)),
    "shift_labels_packed": (IDS, 1, "ids", lambda x: rk.shift_labels_packed(x, torch.tensor([0, 2, 6]))),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_strided_array_of_integers(name: str) -> None:
    array, between, argument, call = ARRAYS[name]
    want = answer(lambda: call(array.contiguous()))
    expect_read_or_refused(argument, want, answer(lambda: call(strided(array, between))))
