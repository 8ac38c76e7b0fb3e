"""Partials of attention and their merge. Ranks that own whole splits of the keys give the bytes of one call."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing, mode

torch = pytest.importorskip("torch", reason="ranks are made with torch")

from attention_cases import FORMS, Sequences, moved  # noqa: E402

SINKS = torch.tensor([0.5, -2.0, 40.0, -torch.inf])
# Keys of ten splits and a part: eight of 1024 keys, then splits of 2048.
LONG = 8192 + 2048 + 300
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window over splits": {"window_size": 1500},
    "window in a split": {"window_size": 20},
    "all keys": {"causal": False},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
}


def owned(splits: int, ranks: int, zigzag: bool) -> list[list[int]]:
    """Splits of each rank in nearly equal chunks: one chunk per rank, or with zigzag the r-th from either end."""
    chunks = 2 * ranks if zigzag else ranks
    cuts = [splits * i // chunks for i in range(chunks + 1)]
    of_chunk = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
    return [of_chunk[r] + of_chunk[chunks - 1 - r] for r in range(ranks)] if zigzag else of_chunk


def joined(parts: list[Any]) -> Any:
    """Partials of all ranks, as an all-gather combines them."""
    stats, sums = (torch.cat([p[i] for p in parts]) for i in range(2))
    return rk.AttentionPartials(stats, sums, tuple(s for p in parts for s in p.splits))


def keys_of(k: Any, own: list[int], length: int) -> Any:
    """A rank's keys out of [tokens, heads, head_dim]: the keys of its splits, split by split."""
    every = rk.attention_splits(length)
    return torch.cat([k[:0], *(k[every[s].start : every[s].stop] for s in own if s < len(every))])


def held(s: Sequences, own: list[int]) -> Sequences:
    """The rank's part of the sequences."""
    found = Sequences(s.rng, [], (4, 2), s.q[0].shape[-1], "float32", s.device)
    found.q, found.dout = s.q, s.dout
    found.k, found.v = ([keys_of(x, own, len(x)) for x in of] for of in (s.k, s.v))
    found.lengths = [(len(q), len(k)) for q, k in zip(s.q, found.k, strict=True)]
    return found


def results_of_ranks(s: Sequences, form: str, owners: list[list[int]], **options: Any) -> Any:
    parts = []
    for own in owners:
        (q, k, v, _), lists = held(s, own).call(form)
        lists["seqused_k"] = torch.tensor([len(x) for x in s.k], dtype=torch.int32, device=s.device)
        parts.append(rk.attention(q, k, v, **lists, **options, splits=own, return_partials=True))
    return joined(parts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [1, 37], ids=["decode", "chunk"])
def test_ranks_that_own_splits_have_the_bytes_of_one(
    queries: int, options: dict[str, Any], device: str, exp: str, rng: np.random.Generator
) -> None:
    """Sequences have eleven splits, two splits, or a single key, which only one rank holds."""
    s = Sequences(rng, [(queries, LONG), (queries, 1500), (1, 1)], (4, 2), 16, "bfloat16", device)
    sinks = SINKS.to(device)
    (q, k, v, _), lists = s.call("cache")
    with mode(device, exp):
        want = [rk.attention(q, k, v, **lists, **options, sinks=x, exp=exp, return_lse=True) for x in (None, sinks)]
        for ranks, zigzag in ((1, False), (2, False), (2, True), (4, False), (4, True)):
            partials = results_of_ranks(s, "cache", owned(11, ranks, zigzag), **options, exp=exp)
            for given, one in zip((None, sinks), want, strict=True):
                got = rk.attention_merge(partials, out_dtype=q.dtype, sinks=given, exp=exp, return_lse=True)
                assert not differing(tuple(got), tuple(one)), (ranks, zigzag, given)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [72, 192])
def test_a_prefill_over_ranks_has_the_bytes_of_one(
    head_dim: int, dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    """Rows have every length from 1 to three splits; blocks have 128 and 64 keys."""
    s = Sequences(rng, [(2100, 2100)], (2, 1), head_dim, dtype, device)
    q, k, v = (x[0][None] for x in (s.q, s.k, s.v))
    with mode(device, exp):
        want = rk.attention(q, k, v, exp=exp, return_lse=True)
        for owners in ([[0, 1, 2]], [[0, 2], [1]], [[2], [1], [0]]):
            got = rk.attention_merge(
                results_of_ranks(s, "right", owners, exp=exp), out_dtype=q.dtype, exp=exp, return_lse=True
            )
            assert not differing(tuple(x[:, : len(q[0])] for x in got[:1]), (want.out,)), owners
            assert not differing(got.lse[..., :2100], want.lse), owners


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_partials(form: str, device: str, exp: str, rng: np.random.Generator) -> None:
    """A page has seven keys, so a split after the first begins inside a page."""
    lengths = [(1300, 1300), (5, 5), (2500, 2500)] if form == "left" else [(3, 1300), (2, 40), (40, 2500), (4, 2)]
    s = Sequences(rng, lengths, (4, 2), 8, "bfloat16", device)
    (q, k, v, _), lists = s.call(form)
    with mode(device, exp):
        want = rk.attention(q, k, v, **lists, exp=exp, return_lse=True)
        alone = rk.attention(q, k, v, **lists, exp=exp, return_partials=True)
        assert not differing(tuple(rk.attention_merge(alone, out_dtype=q.dtype, return_lse=True)), tuple(want))
        if form == "shared":  # every page of a rank is listed
            return
        for owners in ([[0, 2], [1]], [[1, 2], [0]]):
            partials = results_of_ranks(s, form, owners, exp=exp)
            got = rk.attention_merge(partials, out_dtype=q.dtype, return_lse=True)
            assert not differing(*(_in_use(form, r, s) for r in (got, want))), owners


def _in_use(form: str, result: Any, s: Sequences) -> Any:
    """The parts of every sequence that are in use. With left padding, a token has another index on a rank than on a
    single device."""
    out, lse = s.split(form, result.out), s.split(form, result.lse, 0, True)
    return tuple(x.contiguous() for x in (*out, *lse))


def test_a_rank_of_queries_asks_for_the_keys_up_to_its_own(device: str, exp: str, rng: np.random.Generator) -> None:
    """Queries of one chunk, with the keys of each rank in turn, as a rank of a context-parallel prefill computes
    them."""
    s = Sequences(rng, [(4096, 4096)], (2, 1), 16, "bfloat16", device)
    with mode(device, exp):
        whole = rk.attention(s.q[0][None], s.k[0][None], s.v[0][None], exp=exp)
        for chunk in (0, 3, 1):
            q, end = s.q[0][None, 1024 * chunk : 1024 * (chunk + 1)], 1024 * (chunk + 1)
            used = torch.tensor([end], dtype=torch.int32, device=device)
            parts = []
            for own in ([0, 3], [1, 2]):  # the owner of a later chunk also holds keys that these queries do not see
                k, v = (keys_of(x[0], own, 4096)[None] for x in (s.k, s.v))
                parts.append(rk.attention(q, k, v, seqused_k=used, splits=own, return_partials=True, exp=exp))
            got = rk.attention_merge(joined(parts), out_dtype=q.dtype, exp=exp)
            assert not differing(got, whole[:, end - 1024 : end].contiguous()), chunk


def test_splits_fold_by_their_numbers_and_empty_ones_change_nothing(device: str, rng: np.random.Generator) -> None:
    s = Sequences(rng, [(5, LONG)], (4, 2), 16, "float32", device)
    q, k, v = (x[0][None] for x in (s.q, s.k, s.v))
    partials = rk.attention(q, k, v, exp="portable", return_partials=True)
    assert partials.splits == tuple(range(10))
    assert partials.sums.shape == (10, *q.shape)
    want = rk.attention(q, k, v, exp="portable")
    order = torch.from_numpy(rng.permutation(10)).to(device)
    moved_ = rk.AttentionPartials(partials.stats[order], partials.sums[order], tuple(order.tolist()))
    assert not differing(rk.attention_merge(moved_, out_dtype=q.dtype), want)
    # If splits are merged in another order, the bytes differ. The numbers of the splits therefore decide the order.
    other = rk.AttentionPartials(moved_.stats, moved_.sums, tuple(range(10)))
    assert differing(rk.attention_merge(other, out_dtype=q.dtype), want)
    used = torch.tensor([LONG], dtype=torch.int32, device=device)
    beyond = rk.attention(q, k[:, :0], v[:, :0], seqused_k=used, splits=[40, 77, 90], return_partials=True)
    assert (beyond.stats[..., 0] == -torch.inf).all()
    assert (beyond.stats[..., 1] == 0).all()
    assert not differing(beyond.sums, torch.zeros_like(beyond.sums))
    assert not differing(rk.attention_merge(joined([beyond, moved_]), out_dtype=q.dtype), want)


def states(dtype: Any, device: str) -> tuple[Any, Any, Any]:
    """Five splits: finite scores, all -Inf, some -Inf, one NaN, and one score of at least 2^21."""
    q = torch.ones(1, 1, 1, 8, dtype=dtype)
    k, v = (torch.linspace(-1, 1, 5120 * 8).view(1, 5120, 1, 8).to(dtype) for _ in range(2))
    k[:, 1024:2048] = -torch.inf
    k[:, 2048:2100] = -torch.inf
    k[:, 3100, 0, 3] = torch.nan
    k[:, 4200] = 1e7
    return q.to(device), k.to(device), v.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_a_split(dtype: Any, device: str, exp: str) -> None:
    q, k, v = states(dtype, device)
    with mode(device, exp):
        stats, sums, _ = rk.attention(q, k, v, exp=exp, return_partials=True)
        m, l = (stats[:, 0, 0, 0, i].cpu() for i in range(2))  # noqa: E741
        assert m[[0, 2]].isfinite().all()
        assert m[1] == -torch.inf
        assert m[3:].isnan().all()
        assert l[[1, 3, 4]].tolist() == [1, 0, 0]
        assert (l[[0, 2]] > 0).all()
        nothing = sums[[1, 3, 4]].cpu()
        assert not differing(nothing, torch.zeros_like(nothing))
        assert not differing(stats[3, 0, 0, 0, 0].cpu().view(torch.int32), torch.tensor(0x7FC00000).int())
        for splits in ([0, 1, 2], [1], [0, 3], [4, 1], [1, 2]):
            length = 1024 * len(splits)
            at = torch.cat([torch.arange(1024 * s, 1024 * (s + 1)) for s in splits]).to(device)
            want = rk.attention(q, k[:, at], v[:, at], causal=False, exp=exp, return_lse=True)
            part = rk.attention(q, k[:, at], v[:, at], causal=False, exp=exp, return_partials=True)
            assert part.splits == tuple(range(len(splits))), length
            got = rk.attention_merge(part, out_dtype=dtype, return_lse=True)
            assert not differing(tuple(got), tuple(want)), splits
        for sink in (0.5, 1e9, float("nan"), -1e9):  # some rows become NaN, some have only a sink
            sinks = torch.tensor([sink], device=device)
            want = rk.attention(q, k[:, :2048], v[:, :2048], sinks=sinks, exp=exp, return_lse=True)
            for at in (slice(0, 2048), slice(1024, 2048)):
                want = rk.attention(q, k[:, at], v[:, at], sinks=sinks, exp=exp, return_lse=True)
                part = rk.attention(q, k[:, at], v[:, at], exp=exp, return_partials=True)
                got = rk.attention_merge(part, out_dtype=dtype, sinks=sinks, exp=exp, return_lse=True)
                assert not differing(tuple(got), tuple(want)), (sink, at)


@pytest.mark.parametrize(
    ("m", "fails"),
    [
        (2.0**21 - 1, False), (2.0**21, True), (2.0**21 + 2, True), (3e38, True), (torch.inf, True), (torch.nan, True),
        (-(2.0**21), False), (-3e38, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [None, 0.0, -7.0, 2.0**21 - 1])
def test_a_partial_that_a_caller_made_fails_from_2_to_the_21(
    m: float, fails: bool, beside: float | None, device: str
) -> None:
    """No split stores such an m. A forward call with such a reference is NaN."""
    of = [[m, 1.0]] if beside is None else [[m, 1.0], [beside, 1.5]]
    stats = torch.tensor(of, device=device).view(-1, 1, 1, 1, 2)
    sums = torch.ones(len(of), 1, 1, 1, 8, device=device)
    made = rk.AttentionPartials(stats, sums, tuple(range(len(of))))
    reference = rk.attention_merge_reference((stats.cpu().numpy(), sums.cpu().numpy(), made.splits))
    for dtype in (torch.float32, torch.bfloat16):
        for order in (made, made._replace(splits=made.splits[::-1])):
            out, lse = rk.attention_merge(order, out_dtype=dtype, return_lse=True)
            for name, got in (("out", out), ("lse", lse)):
                assert got.isnan().all() if fails else not got.isnan().any()
                assert np.isnan(reference[name]).all() == fails


def test_infinite_values_are_canonical_in_sums(device: str) -> None:
    q, k, v = (torch.ones(1, n, 1, 8, device=device) for n in (1, 1100, 1100))
    v[:, 3], v[:, 5] = torch.inf, -torch.inf
    partials = rk.attention(q, k, v, exp="portable", return_partials=True)
    assert not differing(partials.sums[0, 0, 0, 0].cpu().view(torch.int32), torch.full((8,), 0x7FC00000).int())
    want = rk.attention(q, k, v, exp="portable")
    assert not differing(rk.attention_merge(partials, out_dtype=q.dtype), want)


def test_values_are_those_of_float64(device: str, exp: str, rng: np.random.Generator) -> None:
    """The m of a row is a ceiling of its largest score, so the operator and float64 have the same m. The values of
    l and O are within the rounding of float32 sums of numbers of size 1."""
    s = Sequences(rng, [(7, 2500), (3, 900)], (4, 2), 32, "float32", device)
    (q, k, v, _), lists = s.call("cache")
    wide = [torch.nan_to_num(x).cpu().numpy() for x in (q, k, v)]
    numbers = {name: x.cpu().numpy() for name, x in lists.items()}
    for options in OPTIONS.values():
        want = rk.attention_partials_reference(*wide, **numbers, **options)
        with mode(device, exp):
            got = rk.attention(q, k, v, **lists, **options, exp=exp, return_partials=True)
        stats = got.stats.cpu().numpy()
        assert (stats[..., 0] == want["stats"][..., 0]).all()
        np.testing.assert_allclose(stats[..., 1], want["stats"][..., 1], rtol=2e-5)
        np.testing.assert_allclose(got.sums.cpu().numpy(), want["sums"], rtol=2e-5, atol=2e-3)
        whole = rk.attention_reference(*wide, **numbers, **options)
        of_reference = rk.attention_merge_reference((want["stats"], want["sums"], got.splits))
        for name in ("out", "lse"):
            np.testing.assert_allclose(of_reference[name], whole[name], rtol=1e-12, atol=1e-12)


def test_sinks_of_the_reference_are_those_of_attention(rng: np.random.Generator) -> None:
    s = Sequences(rng, [(7, 1500)], (4, 2), 8, "float32")
    q, k, v = (x[0][None].numpy() for x in (s.q, s.k, s.v))
    parts = rk.attention_partials_reference(q, k, v)
    got = rk.attention_merge_reference((parts["stats"], parts["sums"], (0, 1)), sinks=SINKS.numpy())
    want = rk.attention_reference(q, k, v, sinks=SINKS.numpy())
    for name in ("out", "lse"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12)


# ---- of normalised parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_approximate_merge_is_near_one_call(dtype: str, device: str, exp: str, rng: np.random.Generator) -> None:
    """A part is off by its rounding, half an ulp of values below 2. The mean of parts has the same error plus its own
    rounding."""
    s = Sequences(rng, [(9, 3000)], (4, 2), 16, dtype, device)
    q, k, v = (x[0][None] for x in (s.q, s.k, s.v))
    cuts = [(0, 700), (700, 701), (701, 3000)]
    with mode(device, exp):
        parts = [rk.attention(q, k[:, a:b], v[:, a:b], causal=False, exp=exp, return_lse=True) for a, b in cuts]
        outs, lses = (torch.stack([p[i] for p in parts]) for i in range(2))
        got = rk.attention_merge_approximate(outs, lses, exp=exp, return_lse=True)
        want = rk.attention(q, k, v, causal=False, exp=exp, return_lse=True)
        ulp = {"float32": 2.0**-17, "bfloat16": 2.0**-8}[dtype]
        torch.testing.assert_close(got.out.float(), want.out.float(), rtol=0, atol=2 * ulp)
        torch.testing.assert_close(got.lse, want.lse, rtol=0, atol=2e-5)
        # A row has the same bytes in any batch.
        few = rk.attention_merge_approximate(outs[:, :, 3:5].contiguous(), lses[..., 3:5].contiguous(), exp=exp)
        assert not differing(few, got.out[:, 3:5].contiguous())


def test_parts_without_keys_and_parts_that_fail(device: str, exp: str) -> None:
    outs = torch.full((2, 4, 1, 8), 3.0, device=device)
    lses = torch.tensor([[[0.0, -torch.inf, torch.nan, 1e9]], [[-torch.inf, -torch.inf, 0.0, 0.0]]], device=device)
    with mode(device, exp):
        out, lse = rk.attention_merge_approximate(outs, lses, exp=exp, return_lse=True)
    assert (out[0] == 3.0).all()
    assert not differing(out[1], torch.zeros_like(out[1]))
    assert out[2:].isnan().all()
    assert lse[0].tolist()[:2] == [0.0, -torch.inf]
    assert lse[0, 2:].isnan().all()


# ---- frameworks -----------------------------------------------------------------------------------------------------


def test_numpy_gives_the_same_bytes() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, n, 2, 16), dtype=np.float32) for n in (3, 1500, 1500))
    want = rk.attention(q, k, v, return_lse=True)
    partials = rk.attention(q, k, v, return_partials=True)
    assert isinstance(partials.sums, np.ndarray)
    got = rk.attention_merge(partials, out_dtype=np.float32, return_lse=True)
    assert not differing(tuple(got), tuple(want))
    one = rk.attention_merge_approximate(want.out[None], want.lse[None])
    np.testing.assert_allclose(one, want.out, rtol=1e-5)


def test_compiled_calls_have_the_bytes_of_eager_ones(rng: np.random.Generator) -> None:
    s = Sequences(rng, [(5, 2500)], (4, 2), 16, "bfloat16")
    q, k, v = (x[0][None] for x in (s.q, s.k, s.v))
    used = torch.tensor([2500], dtype=torch.int32)

    def both(q: Any, k: Any, v: Any) -> Any:
        p = rk.attention(q, k[:, :2048], v[:, :2048], seqused_k=used, splits=(0, 1), return_partials=True)
        r = rk.attention(q, k[:, 2048:], v[:, 2048:], seqused_k=used, splits=(2,), return_partials=True)
        merged = rk.attention_merge(joined([p, r]), out_dtype=torch.bfloat16, sinks=SINKS, return_lse=True)
        return merged.out, merged.lse, rk.attention_merge_approximate(merged.out[None], merged.lse[None])

    got = torch.compile(both, fullgraph=True, backend="aot_eager")(q, k, v)
    assert not differing(got, both(q, k, v))
    assert not differing(got[0], rk.attention(q, k, v, sinks=SINKS))


def test_vmap_has_the_bytes_of_a_loop(rng: np.random.Generator) -> None:
    s = Sequences(rng, [(5, 1100)], (4, 2), 16, "bfloat16")
    q, k, v = (x[0][None] for x in (s.q, s.k, s.v))
    stack = torch.stack([q, q * 2])
    got = torch.func.vmap(lambda q: rk.attention(q, k, v, return_partials=True)[:2])(stack)
    for i in range(2):
        want = rk.attention(stack[i], k, v, return_partials=True)
        assert not differing(tuple(x[i] for x in got), tuple(want[:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_a_gpu_has_the_bytes_of_the_cpu_as_an_sm_90(head_dim: int, dtype: str, rng: np.random.Generator) -> None:
    """Compares the partials of decode and of a chunk, padded and paged, with a gap in the splits; then the merges."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the CPU models sm_90's exponential alone")
    s = Sequences(rng, [(1, 5000), (90, 2600), (3, 1), (0, 9)], (8, 2), head_dim, dtype)
    for form, options in itertools.product(("cache", "paged", "right"), OPTIONS.values()):
        for own in ([0, 2], [1, 3, 4]):
            (q, k, v, _), lists = held(s, own).call(form)
            lists["seqused_k"] = torch.tensor([len(x) for x in s.k], dtype=torch.int32)
            how = {**options, "splits": own, "return_partials": True, "exp": "hardware"}
            with rk.arithmetic("sm_90"):
                want = rk.attention(q, k, v, **lists, **how)
            got = rk.attention(*(x.cuda() for x in (q, k, v)), **moved(lambda t: t.cuda(), lists), **how)
            assert not differing(tuple(x.cpu() for x in got[:2]), tuple(want[:2])), (form, options, own)
            sinks = torch.linspace(-3, 40, 8)
            with rk.arithmetic("sm_90"):
                of_cpu = rk.attention_merge(want, out_dtype=dtype, sinks=sinks, exp="hardware", return_lse=True)
            of_gpu = rk.attention_merge(got, out_dtype=dtype, sinks=sinks.cuda(), exp="hardware", return_lse=True)
            assert not differing(tuple(x.cpu() for x in of_gpu), tuple(of_cpu)), (form, options, own)
