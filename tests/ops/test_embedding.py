"""embedding: the contract's bytes, values against float64, torch's bytes, shards, and the same bytes in any batch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from embedding_cases import DTYPES, Operands, contract, failures, operands, results, wide
from rl_kernel_native._native import module as native

torch = pytest.importorskip("torch", reason="layouts are made with torch; test_embedding_frameworks.py has the others")

# One column; widths that whole vectors do not fill; more columns than the 1024 of a block in CUDA's backward.
COLUMNS = [1, 7, 8, 64, 100, 520, 1032]


def assert_contract(o: Operands, **options: Any) -> None:
    got = results(o, **options)
    for name, ours, theirs in zip(("y", "dweight"), got, contract(o, **options), strict=True):
        assert np.array_equal(wide(ours), theirs, equal_nan=True), (name, options)
        signs = np.signbit(wide(ours)) == np.signbit(theirs)
        assert (signs | np.isnan(theirs)).all(), (name, "signs of zeros", options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_output_has_the_bytes_of_the_contract(
    columns: int, dtype: str, device: str, rng: np.random.Generator
) -> None:
    for id_dtype, padding_idx in itertools.product(("int32", "int64"), (None, 1)):
        o = operands(rng, (3, 70), 40, columns, dtype, device, id_dtype=id_dtype)
        assert_contract(o, padding_idx=padding_idx)


def test_blocks_and_groups_have_the_bytes_of_the_contract(device: str, rng: np.random.Generator) -> None:
    """One id owns a tenth of the tokens, other ids a few. Some ids occur once, or 16 times, in each 512 tokens."""
    for tokens, rows in ((8191, 3000), (8193, 2), (20_000, 31), (20_000, 33), (30_000, 20_000)):
        o = operands(rng, (tokens,), rows, 8, "float32", device)
        assert_contract(o)
    assert_contract(o._replace(ids=torch.arange(30_000, device=device) % 32))
    assert_contract(o._replace(ids=torch.zeros(30_000, device=device, dtype=torch.int32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_lie_within_the_bounds_of_float64(dtype: str, device: str, rng: np.random.Generator) -> None:
    for tokens, rows in ((5, 3), (400, 30), (17_000, 100)):
        o = operands(rng, (tokens,), rows, 33, dtype, device)
        assert not failures(o, results(o, padding_idx=2), padding_idx=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_torchs_and_the_gradient_is_as_close_as_its(dtype: str, device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4, 300), 50, 96, dtype, device)
    for padding_idx in (None, 0, 7):
        leaves = [o.weight.clone().requires_grad_() for _ in range(2)]
        y = rk.embedding(o.ids, leaves[0], padding_idx=padding_idx)
        want = torch.nn.functional.embedding(o.ids, leaves[1], padding_idx=padding_idx)
        assert not differing(y.detach(), want.detach())
        for out in (y, want):
            out.backward(o.dy)
        true = rk.embedding_reference(o.ids.cpu().numpy(), wide(o.weight), dy=wide(o.dy), padding_idx=padding_idx)
        ours, theirs = (np.abs(wide(leaf.grad) - true["dweight"]).max() for leaf in leaves)
        ulp = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        assert ours <= 2 * theirs + ulp * np.abs(true["dweight"]).max()


# ---- invariance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bytes_in_any_batch_shape_and_stride(
    dtype: str, device: str, rng: np.random.Generator
) -> None:
    o = operands(rng, (6, 50), 40, 72, dtype, device)
    want = rk.embedding(o.ids, o.weight)
    for ids, view in (
        (o.ids.flatten(), lambda y: y.view(6, 50, 72)),
        (o.ids.t(), lambda y: y.transpose(0, 1).contiguous()),
        (o.ids.int(), lambda y: y),
    ):
        assert not differing(view(rk.embedding(ids, o.weight)), want)
    for i in (0, 5):
        assert not differing(rk.embedding(o.ids[i, 7], o.weight), want[i, 7].clone())
        assert not differing(rk.embedding(o.ids[i, 3:9], o.weight), want[i, 3:9].clone())
    padded = torch.full((40, 75), float("nan"), device=device, dtype=o.weight.dtype)
    padded[:, 2:74] = o.weight
    assert not differing(rk.embedding(o.ids, padded[:, 2:74]), want)
    every_other = torch.stack((o.weight, o.weight + 1), 1).flatten(0, 1)[::2]
    assert not differing(rk.embedding(o.ids, every_other), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_gradient_sees_no_other_id_and_no_stride(dtype: str, device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (9000,), 60, 24, dtype, device)
    want = rk.embedding_backward(o.dy, o.ids, 60)
    others = torch.where(o.ids == 3, 3, torch.full_like(o.ids, 59))
    assert not differing(rk.embedding_backward(o.dy, others, 60)[3].clone(), want[3].clone())
    garbage = torch.where((o.ids == 3)[:, None], o.dy, torch.full_like(o.dy, float("nan")))
    assert not differing(rk.embedding_backward(garbage, o.ids, 60)[3].clone(), want[3].clone())
    memory = torch.full((9000, 27), float("nan"), device=device, dtype=o.dy.dtype)
    memory[:, 1:25] = o.dy
    assert not differing(rk.embedding_backward(memory[:, 1:25], o.ids, 60), want)
    expanded = o.dy[:1].expand(9000, 24)
    assert not differing(
        rk.embedding_backward(expanded, o.ids, 60), rk.embedding_backward(expanded.contiguous(), o.ids, 60)
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shards_of_a_vocabulary_add_up_to_the_whole(ranks: int, device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (3, 400), 96, 40, "bfloat16", device)
    padding = 5
    want, gradient = results(o, padding_idx=padding)
    ids = o.ids.clone()
    ids[0, :2] = torch.tensor([-3, 96], device=device)
    share = 96 // ranks
    total, parts = torch.zeros_like(want), []
    for rank in range(ranks):
        options = {"vocab_start": rank * share, "vocab_size": 96, "padding_idx": padding}
        shard = o._replace(weight=o.weight[rank * share : (rank + 1) * share])
        y, part = results(shard, **options)
        total += y
        parts.append(part)
        bad = rk.embedding(ids, shard.weight, **options)
        assert bool(bad[0, :2].isnan().all()), "a bad id is every rank's"
        assert not differing(bad[1:].clone(), y[1:].clone())
    assert not differing(total, want + 0)  # the sum turns -0 into +0
    assert not differing(torch.cat(parts), gradient)


def test_rows_past_the_vocabulary_are_padding(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (40,), 20, 16, "float32", device)
    y, dweight = results(o._replace(ids=torch.arange(40, device=device) % 20), vocab_size=17)
    of_rows = torch.arange(40, device=device) % 20 >= 17
    assert bool(y[of_rows].isnan().all())
    assert not bool(y[~of_rows].isnan().any())
    assert not bool(dweight[17:].any())
    assert bool(dweight[:17].any(1).all())


# ---- bad ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_id_is_nan_alone_and_has_no_gradient(dtype: str, device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (50,), 30, 40, dtype, device)
    want, gradient = results(o)
    bad = [-1, -(2**63), 30, 2**31, 2**63 - 1, 31]
    ids = torch.cat((o.ids, torch.tensor(bad, device=device)))
    garbage = torch.full((len(bad), 40), float("nan"), device=device, dtype=o.dy.dtype)
    y, dweight = results(Operands(ids, o.weight, torch.cat((o.dy, garbage))))
    assert not differing(y[:50].clone(), want)
    pattern = y[50:].contiguous().view(torch.int32 if dtype == "float32" else torch.int16)
    assert bool((pattern == (0x7FC00000 if dtype == "float32" else 0x7FFF)).all()), "one canonical NaN"
    assert not differing(dweight, gradient)


def test_check_names_the_first_bad_id(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (2, 5), 30, 8, "float32", device)
    for options in ({"check": True}, {"on_bad_id": "raise"}):
        assert not differing(rk.embedding(o.ids, o.weight, **options), rk.embedding(o.ids, o.weight))
        ids = o.ids.clone()
        ids[1, 2:4] = torch.tensor([30, -5], device=device)
        with pytest.raises(
            ValueError, match=r"ids: expected ids in \[0, 30\), got 30 at index 7 \(the first of 2 bad ids\)"
        ):
            rk.embedding(ids, o.weight, **options)
        with pytest.raises(ValueError, match="got -5 at index 8"):
            rk.embedding(ids.int(), o.weight, vocab_size=2**40, **options)
    # the context still works
    assert not differing(rk.embedding(o.ids, o.weight), rk.embedding(o.ids, o.weight, check=True))


# ---- main_grad ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad_is_added_to_and_rows_without_a_token_are_left(
    dtype: str, device: str, rng: np.random.Generator
) -> None:
    o = operands(rng, (9000,), 200, 24, dtype, device)
    o = o._replace(ids=o.ids // 2 * 2)  # odd rows get no token
    before = torch.from_numpy(rng.standard_normal((200, 24), dtype=np.float32)).to(device)
    before[1] = float("nan")
    before[3] = -0.0
    got = before.clone()
    assert rk.embedding_backward(o.dy, o.ids, 200, main_grad=got) is got
    want = contract(o, before.cpu().numpy())[1]
    assert not differing(got, torch.from_numpy(want).to(device))
    strided = torch.full((200, 30), 7.0, device=device)
    strided[:, 3:27] = before
    rk.embedding_backward(o.dy, o.ids, 200, main_grad=strided[:, 3:27])
    assert not differing(strided[:, 3:27].contiguous(), got)
    assert bool((strided[:, :3] == 7).all())
    assert bool((strided[:, 27:] == 7).all())


def test_micro_batches_of_whole_blocks_leave_the_bytes_of_the_batch(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (3 * 8192,), 300, 16, "bfloat16", device)
    whole, parts = (torch.zeros(300, 16, device=device) for _ in range(2))
    rk.embedding_backward(o.dy, o.ids, 300, main_grad=whole)
    for chunk in (slice(0, 8192), slice(8192, None)):
        rk.embedding_backward(o.dy[chunk], o.ids[chunk], 300, main_grad=parts)
    assert not differing(whole, parts)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_empty_inputs(device: str) -> None:
    weight = torch.ones(3, 4, device=device)
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    assert rk.embedding(none, weight).shape == (2, 0, 4)
    assert not differing(rk.embedding_backward(weight[:0].view(2, 0, 4), none, 3), torch.zeros_like(weight))
    ids = torch.tensor([0, 5], device=device)
    assert rk.embedding(ids, weight[:, :0]).shape == (2, 0)
    assert rk.embedding_backward(weight[:2, :0], ids, 3).shape == (3, 0)
    assert bool(rk.embedding(ids, weight[:0]).isnan().all()), "no id has a row of an empty table"
    assert rk.embedding_backward(weight[:2], ids, 0).shape == (0, 4)
    assert rk.embedding(ids[0], weight).shape == (4,)


def test_threads_and_instruction_sets_have_the_same_bytes(rng: np.random.Generator) -> None:
    o = operands(rng, (10_000,), 100, 530)
    before = native.cpu_isa(), torch.get_num_threads()
    try:
        found = []
        for threads, isa in itertools.product((1, 3), ("baseline", "avx2", "avx512")):
            try:
                native.set_cpu_isa(isa)
            except ValueError:
                continue
            torch.set_num_threads(threads)
            found.append(results(o))
    finally:
        native.set_cpu_isa(before[0])
        torch.set_num_threads(before[1])
    assert not any(differing(f, found[0]) for f in found[1:])


@pytest.mark.gpu
def test_tables_and_batches_of_more_than_2_to_the_31_elements() -> None:
    rows, columns = (1 << 31) // 4096 + 9, 4096
    weight = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    weight[-20:] = torch.arange(20, device="cuda")[:, None]
    ids = torch.arange(rows - 20, rows, device="cuda")
    assert not differing(rk.embedding(ids, weight), weight[-20:].clone())
    del weight
    dy = torch.ones(20, columns, device="cuda", dtype=torch.bfloat16)
    dweight = rk.embedding_backward(dy, ids, rows)
    assert bool((dweight[-20:] == 1).all())
    assert not bool(dweight[:-20].any())
    del dweight
    many = torch.full((rows,), 2, device="cuda")
    y = rk.embedding(many, torch.ones(3, columns, device="cuda", dtype=torch.bfloat16))
    assert bool((y[-1] == 1).all())
    dweight = rk.embedding_backward(y, many, 3, dweight_dtype="float32")
    assert bool((dweight[2] == rows).all())
    assert not bool(dweight[:2].any())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 8192, 32768])
def test_a_gpu_has_the_bytes_of_the_cpu_at_the_size_of_llama(tokens: int, rng: np.random.Generator) -> None:
    o = operands(rng, (tokens,), 128_256, 512)
    want = results(o)
    got = results(Operands(*(t.cuda() for t in o)))
    assert not differing(tuple(g.cpu() for g in got), want)
