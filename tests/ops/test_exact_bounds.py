"""Values on either side of bounds and exactly on them, and values at the edges of formats: -0, NaN, ties of
bfloat16."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

INDICES = [torch.int32, torch.int64]
F32 = np.float32


def neighbours(x: float) -> tuple[float, float, float]:
    """The float32 below x, x itself, and the float32 above x."""
    at = F32(x)
    return float(np.nextafter(at, F32(-math.inf))), float(at), float(np.nextafter(at, F32(math.inf)))


def lone(x: float) -> Any:
    return torch.full((1, 1), x)


def kept(d: float, **criterion: Any) -> float:
    return float(rk.importance_weights(lone(d), lone(0.0), upper=2.0, **criterion).mask)


# Maps a name to (whether d is kept, the bound of d, whether d is kept below, at and above this bound).
KEPT = {
    "veto": (lambda d: kept(d, veto=0.5), math.log(0.5), (0, 1, 1)),
    "token_k1's upper bound": (lambda d: kept(-d, rejection={"token_k1": (0.25, 0.5)}), math.log(0.5), (1, 1, 0)),
    "token_k1's lower bound": (lambda d: kept(-d, rejection={"token_k1": (0.25, 0.5)}), math.log(0.25), (0, 1, 1)),
    "token_k2": (lambda d: kept(d, rejection={"token_k2": 2.0}), 2.0, (1, 1, 0)),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_criterion_exactly_on_its_bound(name: str) -> None:
    is_kept, bound, want = KEPT[name]
    assert tuple(is_kept(d) for d in neighbours(bound)) == want


def singled_out(advantage: float, lower: float, upper: float) -> bool:
    """Two tokens with l = -1 and 1, whose mean is 0, and A = ``advantage`` l. The covariance c of both tokens is
    therefore ``advantage``."""
    logprob = torch.tensor([[-1.0, 1.0]])
    found = rk.covariance_mask(
        logprob, logprob.clone(), logprob * advantage, kind="clip", ratio=1.0, seed=0, lower=lower, upper=upper
    )
    assert found.sum() in (0, 2)
    return bool(found.any())


@pytest.mark.parametrize("bound", [1.0, 5.0])
def test_the_bounds_of_clip_cov_are_open(bound: float) -> None:
    below, on, above = neighbours(bound)
    assert [singled_out(x, bound, 9.0) for x in (below, on, above)] == [False, False, True]
    assert [singled_out(x, 0.5, bound) for x in (below, on, above)] == [True, False, False]


@pytest.mark.parametrize("dtype", INDICES, ids=str)
@pytest.mark.parametrize("offset", [3, 5, 7])
@pytest.mark.parametrize("size", [2, 3])
def test_a_zigzag_shift_refuses_offsets_between_chunks(size: int, offset: int, dtype: Any) -> None:
    ids = torch.arange(24)
    words = f"cu_seqlens: expected multiples of {2 * size} (2 * cp_size, for zigzag), got {offset} at 1"
    with pytest.raises(ValueError, match=re.escape(words)):
        rk.shift_labels_packed(ids, torch.tensor([0, offset, 24], dtype=dtype), cp_size=size)
    found = rk.shift_labels_packed(ids, torch.tensor([0, 12, 24], dtype=dtype), cp_size=size)
    assert found.shape == (24 // size,)


X, CUTS = torch.zeros(2, 3), torch.tensor([0, 2, 3])
# Calls with a size of rows or tokens, that size's name, and the least refused size.
SIZES: dict[str, tuple[Any, str, int]] = {
    "pack": (lambda n: rk.pack(X, torch.tensor([3, 2]), max_tokens=n), "max_tokens", 1 << 31),
    "unpack": (lambda n: rk.unpack(X[0], CUTS, max_seqlen=n), "max_seqlen", 1 << 31),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_refused_from_its_bound_on(name: str) -> None:
    """The calls take no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call, argument, bound = SIZES[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(bound - 1)
        with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got {bound}"):
            call(bound)


def empty_rows(columns: int) -> Any:
    return torch.empty(1, 0, columns)


IDS = torch.empty(1, 0, dtype=torch.int64)
# Calls of rows with a number of columns, the argument that has them, and the binary logarithm of the least refused
# number.
COLUMNS: dict[str, tuple[Any, str, int]] = {
    "rms_norm": (lambda n: rk.rms_norm(empty_rows(n), None, 1e-6), "x", 31),
    "rms_norm_backward": (lambda n: rk.rms_norm_backward(empty_rows(n), empty_rows(n), None, 1e-6), "dy", 31),
    "embedding": (lambda n: rk.embedding(IDS, empty_rows(n)[0]), "weight", 31),
    "embedding_backward": (lambda n: rk.embedding_backward(empty_rows(n), IDS, 0), "dy", 31),
    "silu_mul": (lambda n: rk.silu_mul(empty_rows(n), empty_rows(n)), "gate", 30),
    "silu_mul_backward": (lambda n: rk.silu_mul_backward(*[empty_rows(n)] * 3), "gate", 30),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_refused_from_their_bound_on(name: str) -> None:
    call, argument, bits = COLUMNS[name]
    call((1 << bits) - 1)
    words = rf"^{argument}: expected fewer than 2\^{bits} columns, got {1 << bits}$"
    with pytest.raises(ValueError, match=words):
        call(1 << bits)


SPANS = {
    "one too many": ([0, 1, 2, 3], "span_offsets: expected a contiguous array of shape [3], got [4]"),
    "one too few": ([0, 3], "span_offsets: expected a contiguous array of shape [3], got [2]"),
    "ends before the last span": ([0, 1, 2], "span_offsets: expected 3 (the number of spans) last, got 2 at index 2"),
    "ends behind the last span": (
        [0, 1, 4],
        "span_offsets: expected at most 3 (the number of spans), got 4 at index 2",
    ),
    "begins late": ([1, 2, 3], "span_offsets: expected 0 first, got 1 at index 0"),
}


@pytest.mark.parametrize("dtype", INDICES, ids=str)
@pytest.mark.parametrize("name", SPANS)
def test_span_offsets_are_those_of_the_spans(name: str, dtype: Any) -> None:
    spans, cu_seqlens = torch.tensor([[0, 1], [2, 3], [1, 2]], dtype=dtype), torch.tensor([0, 4, 8], dtype=dtype)
    values, words = SPANS[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        rk.loss_mask_from_spans(spans, torch.tensor(values, dtype=dtype), cu_seqlens, num_tokens=8)
    found = rk.loss_mask_from_spans(spans, torch.tensor([0, 1, 3], dtype=dtype), cu_seqlens, num_tokens=8)
    assert found.tolist() == [True, False, False, False, False, True, True, False]


def test_the_last_position_of_a_span_is_its_sequences() -> None:
    offsets = torch.tensor([0, 1])
    assert rk.loss_mask_from_spans(torch.tensor([[0, 4]]), offsets, num_tokens=4).all()
    for spans in ([[0, 5]], [[-1, 4]]):
        with pytest.raises(ValueError, match="spans"):
            rk.loss_mask_from_spans(torch.tensor(spans), offsets, num_tokens=4)


def test_a_reward_that_is_nan_makes_its_group_nan() -> None:
    rewards = torch.tensor([1.0, math.nan, 3.0, 1.0, 2.0, 3.0])
    found = rk.group_advantage(rewards, group_size=3)
    assert found[:3].isnan().all()
    assert torch.equal(found[3:], rk.group_advantage(rewards[3:], group_size=3))


@pytest.mark.parametrize("place", ["sequence", "token"])
def test_a_reward_that_is_nan_stays_nan(place: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards, tokens = torch.tensor([1.0, 2.0]), torch.zeros(2, 3)
    (rewards if place == "sequence" else tokens).view(-1)[0] = math.nan
    found = rk.scatter_rewards(rewards, mask, token_rewards=tokens)
    of_tokens = found if isinstance(found, torch.Tensor) else found[0]
    assert of_tokens[0].isnan().any()
    assert not of_tokens[1].isnan().any()


# Two neighbours of bfloat16 and the value halfway between them; the tie goes to the even neighbour.
TIES = [
    (1.0 + 2.0**-8, 1.0),
    (1.0 + 3 * 2.0**-8, 1.0 + 2.0**-6),
    (float(np.nextafter(F32(1.0 + 2.0**-8), F32(2.0))), 1.0 + 2.0**-7),
    (float(np.nextafter(F32(1.0 + 3 * 2.0**-8), F32(0.0))), 1.0 + 2.0**-7),
    (-1.0 - 2.0**-8, -1.0),
    (-0.0, -0.0),
]


@pytest.mark.parametrize(("value", "want"), TIES)
def test_what_pack_fills_with_is_rounded_to_nearest_even(value: float, want: float) -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    packed = rk.pack(x, torch.tensor([1, 2]), fill_value=value)
    filled = packed.tensors[3:]
    assert len(filled) == 3
    assert filled.view(torch.int16).unique().tolist() == torch.tensor([want]).bfloat16().view(torch.int16).tolist()


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF])
def test_a_nan_is_copied_with_its_payload_and_computed_without(payload: int) -> None:
    x = torch.from_numpy(np.array([[payload, 0x3F800000]], np.uint32).view(F32))
    bits = rk.pack(x, torch.tensor([2])).tensors.view(torch.int32)
    assert bits.tolist() == x.view(torch.int32)[0].tolist()
    table = rk.embedding(torch.tensor([0]), x)
    assert table.view(torch.int32).tolist() == x.view(torch.int32).tolist()
    computed = {
        "masked_whiten": rk.masked_whiten(x),
        "kl": rk.kl(x, torch.zeros(1, 2), estimator="k1"),
        "sequence_logprob": rk.sequence_logprob(x).sum,
        "group_advantage": rk.group_advantage(x[0], group_size=2),
        "discounted_returns": rk.discounted_returns(x, gamma=1.0),
    }
    for name, found in computed.items():
        of_nan = found[found.isnan()].view(torch.int32)
        assert len(of_nan), name
        assert of_nan.unique().tolist() == [0x7FC00000], name


def test_a_mean_of_minus_zeros_is_plus_zero() -> None:
    minus = torch.full((2, 3), -0.0)
    whitened = rk.masked_whiten(minus, return_stats=True)
    value = rk.value_loss(minus, None, minus, torch.ones(2, 3))
    results = {
        "masked_whiten": [whitened.y, whitened.mean, whitened.var],
        "group_advantage": [rk.group_advantage(minus[0], group_size=3)],
        "sequence_logprob": [rk.sequence_logprob(minus).sum],
        "kl": [rk.kl(minus, minus, estimator="k1")],
        "value_loss": [value.loss, value.metrics.vector],
    }
    for name, found in results.items():
        for x in found:
            assert not torch.signbit(x).any(), name
