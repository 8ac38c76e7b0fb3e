"""The n best of sample: logprob's bytes, ties, cut columns, bad rows, equal bytes of a row in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native.ops.sample import SampleStatus
from test_sample import draw, logits_of, mixed, same

BEST = ("top_ids", "top_logprobs", "raw_top_ids", "raw_top_logprobs")


def scored(x: torch.Tensor, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    """logprob of each id, column by column of the ids."""
    return torch.stack([rk.logprob(x, ids[:, k].contiguous(), **given) for k in range(ids.shape[1])], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab", "n"), [(24, 1, 1), (24, 9, 9), (24, 300, 20), (8, 5000, 256)])
def test_they_are_logprobs_and_the_first_by_rank(
    rows: int, vocab: int, n: int, dtype: torch.dtype, device: str, rng: np.random.Generator
) -> None:
    """The 8 significand bits of bf16 give ties."""
    x, given = logits_of(rng, rows, vocab).to(dtype).to(device), mixed(rng, rows, device)
    for exp in ("portable", "hardware") if device != "cpu" else ("portable",):
        found = draw(x, **given, n_logprobs=n, exp=exp)
        plain = draw(x, **given, exp=exp)
        assert all(same(getattr(found, name), getattr(plain, name)) for name in ("ids", "logprob", "raw_logprob"))
        temperature = torch.where(given["greedy"], torch.ones_like(given["temperature"]), given["temperature"])
        sets = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
        for i, count in enumerate(found.kept_offsets.diff().tolist()):
            begin = int(found.kept_offsets[i])
            sets[i, found.kept_ids[begin : begin + count].long() if count else slice(None)] = True
        cut = x.float().masked_fill(~sets, -torch.inf)
        for z, ids, logprobs, of in (
            (cut, found.top_ids, found.top_logprobs, {"temperature": temperature, "kept": found.kept}),
            (x.float(), found.raw_top_ids, found.raw_top_logprobs, {}),
        ):
            want = torch.sort(z, dim=1, descending=True, stable=True).indices[:, :n]
            assert torch.equal(ids, want)
            bits = scored(x, ids, exp=exp, **of)
            # logprob also scores columns that are cut
            bits = bits.masked_fill(z.gather(1, ids) == -torch.inf, -torch.inf)
            assert same(logprobs, bits)


def test_many_of_the_best_in_the_columns_of_one_thread(device: str, rng: np.random.Generator) -> None:
    """More columns than the list holds rank before the bound of the threads' first ranks, so digits decide."""
    x = logits_of(rng, 2, 1 << 19, 1.0).to(device)
    x[0, ::256] += 50.0
    x[1, ::256] = 60.0  # equal logits, ordered by id
    found = draw(x, n_logprobs=256, return_logprob="processed", return_kept=False)
    want = torch.sort(x, dim=1, descending=True, stable=True).indices[:, :256]
    assert torch.equal(found.top_ids, want)
    assert found.top_ids[1].tolist() == list(range(0, 1 << 16, 256))


def test_what_is_cut_comes_last_by_id(device: str) -> None:
    x = torch.tensor([[1.0, 5.0, -torch.inf, 4.0, 3.0, 9.0]] * 2, device=device)
    allowed = torch.tensor([[0b011111], [0b111110]], dtype=torch.int32, device=device)
    found = draw(x, n_logprobs=6, top_k=2, allowed=allowed)
    assert found.top_ids.tolist() == [[1, 3, 0, 2, 4, 5], [5, 1, 0, 2, 3, 4]]
    assert (found.top_logprobs[:, 2:] == -torch.inf).all()
    assert found.raw_top_ids.tolist() == [[5, 1, 3, 4, 0, 2]] * 2
    assert (found.raw_top_logprobs == -torch.inf).tolist() == [[False] * 5 + [True]] * 2
    assert draw(x, n_logprobs=2, greedy=True).top_ids.tolist() == [[5, 1]] * 2


def test_raw_ones_are_of_the_logits_as_they_came(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 5, 700).to(torch.float16).to(device)
    ids, offsets = torch.arange(0, 250, device=device), torch.arange(6, device=device) * 50
    given: dict[str, Any] = {"history": (ids, offsets), "presence_penalty": 3.0}
    found = draw(x, n_logprobs=12, temperature=0.5, **given)
    z = rk.process_logits(x, **given)
    assert torch.equal(found.top_ids, torch.sort(z, dim=1, descending=True, stable=True).indices[:, :12])
    assert same(found.top_logprobs, scored(z, found.top_ids, temperature=0.5, exp="portable"))
    assert torch.equal(found.raw_top_ids, torch.sort(x, dim=1, descending=True, stable=True).indices[:, :12])
    assert same(found.raw_top_logprobs, scored(x, found.raw_top_ids, exp="portable"))


def test_bad_rows_have_no_best(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 6, 400).to(device)
    good = draw(x, n_logprobs=5, top_k=10)
    bad = x.clone()
    bad[1, 3], bad[2, 3], bad[3] = float("nan"), float("inf"), float("-inf")
    allowed = torch.full((6, 13), -1, dtype=torch.int32, device=device)
    allowed[2, 0] = ~(1 << 3)  # only the raw distribution contains that column
    found = draw(bad, n_logprobs=5, top_k=10, allowed=allowed)
    assert found.status.tolist() == [0, SampleStatus.NAN_LOGIT, 0, SampleStatus.EMPTY_ROW, 0, 0]
    for name, rows in (("top", (1, 3)), ("raw_top", (1, 2, 3))):
        ids, logprobs = getattr(found, name + "_ids"), getattr(found, name + "_logprobs")
        for i in range(6):
            assert (ids[i] == -1).all() == (i in rows)
            assert logprobs[i].isnan().all() == (i in rows)
            if bad[i].isfinite().all():
                assert same(logprobs[i], getattr(good, name + "_logprobs")[i])
    full = draw(x, n_logprobs=5, top_k=10, kept_capacity=25)
    assert (full.top_ids[2:] == -1).all()
    assert full.top_logprobs[2:].isnan().all()
    assert same(full.top_ids[:2], good.top_ids[:2])
    assert same(full.raw_top_logprobs, good.raw_top_logprobs)


def test_a_row_has_the_same_best_in_any_batch(device: str, rng: np.random.Generator) -> None:
    x, given = logits_of(rng, 24, 2100).to(device), mixed(rng, 24, device)
    want = draw(x, n_logprobs=9, **given)
    order = torch.from_numpy(rng.permutation(24)).to(device)
    got = draw(x[order], n_logprobs=9, **{name: v[order] for name, v in given.items()})
    assert all(same(getattr(got, name), getattr(want, name)[order]) for name in BEST)


def test_only_what_is_asked_for(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 3, 40).to(device)
    for kind, wants in {"processed": (True, False), "raw": (False, True), "both": (True, True)}.items():
        r = draw(x, return_logprob=kind, n_logprobs=3)
        assert tuple(getattr(r, name) is not None for name in BEST) == (*wants[:1] * 2, *wants[1:] * 2)
        assert all(getattr(draw(x, return_logprob=kind), name) is None for name in BEST)
    array = rk.sample(x.cpu().numpy(), seed=11, position=3, sample_id=np.arange(3), exp="portable", n_logprobs=3)
    assert array.top_ids.tolist() == draw(x, n_logprobs=3).top_ids.tolist()
    assert draw(x[:0], n_logprobs=3).top_ids.shape == (0, 3)


@pytest.mark.gpu
def test_a_gpu_has_the_best_of_the_cpu(rng: np.random.Generator) -> None:
    for vocab in (256, 4099, 128_256):
        x, given = logits_of(rng, 33, vocab), mixed(rng, 33, "cpu")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for n in (1, 20, 256):
                want = draw(x.to(dtype), n_logprobs=n, **given)
                got = draw(x.to(dtype).cuda(), n_logprobs=n, **{k: v.cuda() for k, v in given.items()})
                assert all(same(getattr(got, name), getattr(want, name)) for name in BEST)
