"""sample_partial in four rounds: sample's bytes on whole rows for every cut, and payloads that do not fit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native.ops.sample import SampleStatus
from test_sample import logits_of, rows_of, same
from test_sample_shards import OF_MERGE, OF_PARTIAL, SPLITS, asked, edges_of, more_of

ROUNDS = 4
# What cuts the rows; every table is tried with each order.
CUTS: dict[str, dict[str, Any]] = {
    "nothing": {}, "greedy": {"greedy": True}, "top_k 1": {"top_k": 1}, "top_k 257": {"top_k": 257},
    "top_k of half": {"top_k": 1000}, "top_k of all": {"top_k": 1 << 40}, "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 1e-6}, "large top_p": {"top_p": 1 - 2.0**-24}, "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0}, "top_p, min_p": {"top_p": 0.95, "min_p": 0.01},
    "top_k, top_p": {"top_k": 300, "top_p": 0.8}, "top_k, min_p": {"top_k": 300, "min_p": 0.02},
    "all": {"top_k": 500, "top_p": 0.99, "min_p": 0.001}, "few": {"top_k": 5, "top_p": 0.5, "min_p": 0.2},
}  # fmt: skip


def same_array(x: Any) -> Any:
    return x


def rounds_of(
    x: torch.Tensor, split: list[int], put: Any = same_array, back: Any = same_array, **given: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """Gathered payloads of each round, and every shard's kept ids. `put` and `back` move arrays to the device and
    back."""
    vocab = x.shape[1]
    edges = list(itertools.pairwise(edges_of(split, vocab)))
    how = {name: put(v) for name, v in given.items() if name not in OF_MERGE}
    how |= {"vocab_size": vocab, "max_shard": max(b - a for a, b in edges)}
    gathered: list[torch.Tensor] = []
    kept: list[Any] = []
    for k in range(1, ROUNDS + 1):
        how |= {"earlier": [put(g) for g in gathered], "return_kept": k == ROUNDS}
        parts = [rk.sample_partial(put(x[:, a:b]), vocab_start=a, **how) for a, b in edges]
        if k == ROUNDS:
            kept = [tuple(back(of_kept) for of_kept in of_shard) for _, of_shard in parts]
            parts = [payload for payload, _ in parts]
        gathered.append(torch.stack([back(part) for part in parts]))
    return gathered, kept


def drawn(payloads: torch.Tensor, vocab: int, **given: Any) -> Any:
    how = {name: v for name, v in given.items() if name not in (*OF_PARTIAL, *OF_MERGE)}
    return rk.sample_merge(payloads, vocab_size=vocab, in_rounds=True, **how)


def owned(kept: list[Any], row: int) -> list[int]:
    return [
        int(i) for ids, offsets in kept for i in ids[int(offsets[row]) : int(offsets[row + 1])].tolist()
    ]  # fmt: skip


def assert_rounds_are_sample(x: torch.Tensor, split: list[int], **how: Any) -> None:
    want = rk.sample(x, **how)
    gathered, kept = rounds_of(x, split, **how)
    got = drawn(gathered[-1], x.shape[1], **how)
    for name in ("ids", "logprob", "raw_logprob", "status"):
        assert same(getattr(got, name), getattr(want, name)), (name, getattr(got, name), getattr(want, name))
    valid, allowed = how.get("valid_vocab", x.shape[1]), how.get("allowed")
    for i, ids in enumerate(rows_of(want)):
        mine = owned(kept, i)
        if int(want.status[i]) != 0:
            assert not set(mine) & {-1}
        elif ids:
            assert mine == ids, i
        else:
            assert allowed is None or valid < 32 or len(mine) == valid
            assert mine == list(range(valid)), i


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("named", CUTS)
def test_every_cut_has_the_bytes_of_the_whole_row(
    named: str, split: str, device: str, rng: np.random.Generator
) -> None:
    """bf16 gives ties at the borders of shards; the widest row has more columns than splitters."""
    for order in ("vllm", "hf", "sglang"):
        for rows, vocab, dtype in ((4, 20, torch.float32), (5, 2100, torch.bfloat16), (3, 5000, torch.float32)):
            x = logits_of(rng, rows, vocab).to(dtype).to(device)
            assert_rounds_are_sample(x, SPLITS[split], **asked(x, **CUTS[named], order=order))


@pytest.mark.parametrize("split", SPLITS)
def test_mixed_rows_under_masks_padding_penalties(split: str, device: str, rng: np.random.Generator) -> None:
    for rows, vocab in ((9, 1), (12, 130), (24, 2100)):
        x = logits_of(rng, rows, vocab).to(device)
        put = lambda a: torch.from_numpy(np.asarray(a)).to(device)  # noqa: E731
        for more in more_of(rng, rows, vocab, device):
            given = {
                "temperature": put(rng.choice([0.6, 1.0, 1.7], rows).astype(np.float32)),
                "top_k": put(rng.choice([0, 1, 7, 300, 5000], rows)),
                "top_p": put(rng.choice([0.5, 0.9, 1.0], rows).astype(np.float32)),
                "min_p": put(rng.choice([0.0, 0.05, 0.3], rows).astype(np.float32)),
                "greedy": put(rng.random(rows) < 0.2), "sample_id": put(rng.integers(0, 1 << 40, rows)),
                "position": put(rng.integers(0, 1 << 20, rows)),
            }  # fmt: skip
            for order in ("vllm", "hf", "sglang"):
                assert_rounds_are_sample(x, SPLITS[split], **asked(x, **given, **more, order=order))


@pytest.mark.parametrize("split", SPLITS)
def test_rows_whose_columns_are_unevenly_placed(split: str, device: str) -> None:
    """Brackets are widest if one shard has all large logits, if columns are equal, or if few masses are far apart."""
    vocab = 8000
    ramp = torch.linspace(0, 12, vocab)
    x = torch.stack((
        ramp, ramp.flip(0), torch.zeros(vocab), torch.where(torch.arange(vocab) < 3, 9.0, ramp / 100),
        torch.where(torch.arange(vocab) % 1000 == 5, 8.0, -ramp / 1000), ramp.round(), -ramp * 8,
        torch.where(torch.arange(vocab) < 1100, ramp, float("-inf")),
    )).to(device)  # fmt: skip
    for name in ("top_p", "large top_p", "top_k, top_p", "all", "top_k of half", "min_p"):
        for order in ("vllm", "sglang"):
            assert_rounds_are_sample(x, SPLITS[split], **asked(x, **CUTS[name], order=order))
    cut = {"top_k": 4000, "top_p": 0.97}
    assert_rounds_are_sample(x, SPLITS[split], **asked(x, **cut))


def test_bad_rows_have_the_status_of_sample(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 12, 700).to(device)
    x[1, 650], x[2, 3], x[3, 3], x[3, 650] = float("nan"), float("inf"), float("inf"), float("nan")
    x[4] = float("-inf")
    x[5, 20:] = float("-inf")
    x[8] = -3e38
    temperature = torch.ones(12, device=device)
    temperature[8], temperature[9], temperature[10] = 1e-30, 1e-36, float("nan")
    top_p, position = torch.full((12,), 0.9, device=device), torch.zeros(12, dtype=torch.int64, device=device)
    top_p[7], position[6] = 2.0, -1
    for given in ({"top_p": top_p}, {"top_k": 400}, {"min_p": 0.01}, {"greedy": True}, {}):
        for split in SPLITS.values():
            how = asked(x, temperature=temperature, position=position, **given)
            assert_rounds_are_sample(x, split, **how)


def test_payloads_that_do_not_fit(device: str, rng: np.random.Generator) -> None:
    """A round of another call, a missing shard, or noise: BAD_SHARDS or a good row, and an id of the vocabulary."""
    x = logits_of(rng, 3, 700).to(device)
    how = asked(x, top_p=0.9, top_k=400)
    gathered, _ = rounds_of(x, SPLITS["3"], **how)
    for other in ({"top_p": 0.8}, {"top_k": 399}, {"seed": 8}, {"order": "hf"}, {"greedy": True}):
        got = drawn(gathered[-1], 700, **(how | other))
        assert got.status.tolist() == [SampleStatus.BAD_SHARDS] * 3, other
    assert drawn(gathered[-1][:2].contiguous(), 700, **how).status.tolist() == [SampleStatus.BAD_SHARDS] * 3
    edges = list(itertools.pairwise(edges_of(SPLITS["3"], 700)))
    own = {name: v for name, v in how.items() if name not in OF_MERGE}
    widest = max(b - a for a, b in edges)
    seen = set()
    for trial in range(150):
        k = 1 + trial % 3
        noise = [g.clone() for g in gathered[:3]]
        at = tuple(int(rng.integers(n)) for n in noise[k - 1].shape)
        if trial % 2:
            at = (*at[:2], int(rng.integers(0, 40)) % noise[k - 1].shape[2])
        noise[k - 1][at] = int(rng.choice([-1, 0, 1, 255, 700, 1 << 19, -(1 << 31), 0x7F800000, 0x7FC00000]))
        for rounds in range(k, ROUNDS):
            parts = torch.stack([
                rk.sample_partial(
                    x[:, a:b], vocab_start=a, vocab_size=700, earlier=noise[:rounds], max_shard=widest, **own
                )
                for a, b in edges
            ])  # fmt: skip
            if rounds < 3:
                noise[rounds] = parts
        got = drawn(parts, 700, **how)
        ids, status = got.ids.cpu().numpy(), got.status.cpu().numpy()
        assert ((ids >= -1) & (ids < 700)).all()
        assert ((ids == -1) == (status != 0)).all()
        seen |= set(status.tolist())
    assert seen >= {0, int(SampleStatus.BAD_SHARDS)}


def test_what_is_refused() -> None:
    x = torch.randn(3, 64)
    how: dict[str, Any] = {"seed": 7, "sample_id": 0, "position": 0, "vocab_size": 128}
    first = rk.sample_partial(x, vocab_start=0, earlier=[], **how)[None]
    for message, given in {
        "earlier: expected a list of arrays or None, got int": {"earlier": 3},
        "earlier: expected a list of arrays or None, got an entry int": {"earlier": [3]},
        "earlier: expected at most 3 arrays, got 4": {"earlier": [first] * 4},
        "earlier: expected dtype int32, got int64": {"earlier": [first.long()]},
        r"earlier: expected a contiguous array of shape .* for round 1, got shape": {"earlier": [first[:, :2]]},
        r"earlier: expected a contiguous array of shape .* for round 2, got shape": {"earlier": [first, first]},
        r"max_shard: expected an integer in \[64, 128\], got 63": {"earlier": [], "max_shard": 63},
        "max_shard: expected None without earlier, got 64": {"max_shard": 64},
        "max_top_k: expected None with earlier, got 5": {"earlier": [], "max_top_k": 5},
        "return_kept: expected False before round 4, got True in round 1": {"earlier": [], "return_kept": True},
        "return_kept: expected False without earlier, got True": {"return_kept": True},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            rk.sample_partial(**({"logits_shard": x, "vocab_start": 0} | how | given))
    for message, given in {
        r"payloads: expected shape \[shards, num_rows, 16\], as round 4 gives": {
            "payloads": torch.zeros(2, 3, 19, dtype=torch.int32)
        },
        "return_kept: expected False with in_rounds, got True": {"return_kept": True},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            rk.sample_merge(**({"payloads": torch.zeros(2, 3, 16, dtype=torch.int32), "in_rounds": True} | how | given))
