"""attention: values against float64 and torch, and the same bytes in any batch, packing, padding, paging and chunk."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import beyond, differing, mode

torch = pytest.importorskip("torch", reason="forms are made with torch; test_attention_frameworks.py has the others")

from attention_bounds import attention_failures  # noqa: E402
from attention_cases import DTYPES, FORMS, Sequences, alone, each, moved, plain, results  # noqa: E402

# (queries, keys): a lone token; decode; less than a block, a block, one more; a chunk; three blocks.
LENGTHS = [(1, 1), (1, 40), (20, 20), (128, 128), (129, 129), (33, 300)]
SELF = [(n, n) for n in (1, 5, 128, 150, 64)]
OPTIONS: list[dict[str, Any]] = [{}, {"window_size": 20}, {"causal": False}, {"softmax_scale": 0.3}]


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    for name in a:
        found = differing(a[name].contiguous(), b[name].contiguous())
        assert not found, f"{what} {name}: {found}"


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_errors_are_at_most_twice_those_of_torch(
    options: dict[str, Any], dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    """Compares root mean squares with float64 from the same inputs, since worst elements of random draws differ by
    chance. In float32 the portable exponential dominates, with an error of 2^-18.4. Operands are about 1, so an ulp is
    the ulp of 1. A lone key has weight 1, where torch has no error to compare with, so the contract's bounds apply."""
    s = Sequences(rng, LENGTHS, (4, 2), 64, dtype, device)
    for b, got in enumerate(alone(s, device=device, exp=exp, **options)):
        if LENGTHS[b] == (1, 1):
            with mode(device, exp):
                assert not attention_failures(s.q[b], s.k[b], s.v[b], s.dout[b], exp=exp, **options)
            continue
        given = [t[b][None].cpu() for t in (s.q, s.k, s.v, s.dout)]
        wide = [t.double().numpy() for t in given]
        want = rk.attention_reference(*wide[:3], dout=wide[3], **options)
        theirs = plain(*given, **options)
        ulp = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        for name, other in theirs.items():
            ours, others = (rms(x.detach().double().cpu().numpy() - want[name][0]) for x in (got[name], other[0]))
            floor = 2.0**-17 if exp == "portable" else 2.0**-20
            assert ours <= 2 * others + ulp + floor, (LENGTHS[b], name)
        least = {"head_dim": 64, "max_abs_s": 0.0, "score_scale": 0.0}  # scores are small
        assert not beyond("attention", "lse", got["lse"], np.moveaxis(want["lse"][0], 0, 1), **least), LENGTHS[b]


def test_it_is_what_torch_and_hugging_face_compute(device: str, rng: np.random.Generator) -> None:
    """The arrays are transposed views of [batch, heads, tokens, head_dim], with grouped heads."""
    q, k, v = (torch.from_numpy(rng.standard_normal((2, h, 50, 64), dtype=np.float32)).to(device) for h in (6, 2, 2))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    got = rk.attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    chunk = torch.nn.functional.scaled_dot_product_attention(q[:, :, -3:], k, v, enable_gqa=True)
    torch.testing.assert_close(
        rk.attention(q[:, :, -3:].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=False).transpose(1, 2),
        chunk, rtol=2e-5, atol=2e-5,
    )  # fmt: skip


def test_windows_are_those_of_hugging_face(rng: np.random.Generator) -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    q = torch.from_numpy(rng.standard_normal((1, 12, 2, 16), dtype=np.float32))
    allowed = masking.sliding_window_overlay(5)
    mask = torch.tensor([[bool(allowed(0, 0, i, j)) and j <= i for j in range(12)] for i in range(12)])
    x = q.transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(rk.attention(q, q, q, window_size=5), want, rtol=2e-5, atol=2e-5)


# ---- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_has_the_same_bytes_in_any_form_and_company(
    form: str, dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    s = Sequences(rng, SELF if form == "left" else LENGTHS, (4, 2), 40, dtype, device)
    for options in OPTIONS:
        if form == "left" and options.get("causal") is False:
            continue  # without a mask, queries before the first key see all keys
        want = alone(s, device=device, exp=exp, **options)
        for b, got in enumerate(each(s, form, device=device, exp=exp, **options)):
            assert_same(got, want[b], (form, options, s.lengths[b]))


def test_chunks_and_single_steps_have_the_bytes_of_a_whole_prefill(
    device: str, exp: str, rng: np.random.Generator
) -> None:
    n = 300
    s = Sequences(rng, [(n, n)], (4, 2), 64, "bfloat16", device)
    q, k, v = s.q[0], s.k[0], s.v[0]
    for options in OPTIONS[:2]:
        whole = alone(s, device=device, exp=exp, **options)[0]["out"]
        for begin, end in ((0, 100), (100, 229), (229, 300), (7, 8), (128, 129), (299, 300)):
            part = ((q[None, begin:end], k[None, :end], v[None, :end], None), {})
            got = results(part, backward=False, device=device, exp=exp, **options)["out"][0]
            assert not differing(got, whole[begin:end]), (begin, end, options)
            used = torch.tensor([end], dtype=torch.int32, device=device)  # from a cache that holds more keys
            cache = ((q[None, begin:end], k[None], v[None], None), {"seqused_k": used})
            got = results(cache, backward=False, device=device, exp=exp, **options)["out"][0]
            assert not differing(got, whole[begin:end]), (begin, end, options)


def test_splits_of_keys_are_no_business_of_batch_or_page(device: str, exp: str, rng: np.random.Generator) -> None:
    """Numbers of keys: above two splits, a split and one key, one key. Blocks have 128 keys, or 64 for wide heads."""
    for head_dim in (64, 136):
        s = Sequences(rng, [(3, 5000), (2, 2049), (1, 2048)], (2, 1), head_dim, "bfloat16", device)
        want = alone(s, device=device, exp=exp)
        for form in ("right", "packed", "paged"):
            for b, got in enumerate(each(s, form, device=device, exp=exp)):
                assert_same(got, want[b], (form, head_dim, s.lengths[b]))


@pytest.mark.parametrize(("sequences", "most"), [(100, 1100), (5, 13000)], ids=["100 sequences", "13 splits"])
@pytest.mark.parametrize("head_dim", [16, 72])
def test_a_decode_step_of_many_rows_has_the_bytes_of_calls_of_few_rows(
    sequences: int, most: int, head_dim: int, device: str, rng: np.random.Generator
) -> None:
    """On a GPU, warps merge the splits of more than 128 rows. With 3300 rows, a warp has two of the 33 heads, and the
    last warp has one. Heads of at most 64 columns are merged two at a time. A warp loads ten splits at once."""
    queries = [(0 if b % 5 == 3 else 2 if b % 5 == 4 else 1) for b in range(sequences)]
    keys = [most, *rng.integers(2, most, sequences - 1)]
    s = Sequences(rng, [(n, int(k)) for n, k in zip(queries, keys, strict=True)], (33, 11), head_dim, device=device)
    used = [b for b in range(sequences) if queries[b] > 0 and b % 9 < 5]
    few = copy.copy(s)
    for name in ("lengths", "q", "k", "v", "dout"):
        setattr(few, name, [getattr(s, name)[b] for b in used])
    for options in ({}, {"window_size": 700}):
        want = alone(few, device=device, backward=False, **options)
        got = each(s, "cache", device=device, backward=False, **options)
        for b, of_sequence in zip(used, want, strict=True):
            assert_same(got[b], of_sequence, (options, s.lengths[b]))


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_pages_of_any_size_have_the_bytes_of_keys_in_a_row(
    page_size: int, device: str, exp: str, rng: np.random.Generator
) -> None:
    """Pages of one key, of two, and of as many as engines use. Other tests have pages of seven keys."""
    s = Sequences(rng, [(3, 70), (1, 33), (2, 2)], (4, 2), 32, "bfloat16", device)
    want = alone(s, device=device, exp=exp)
    out = results(s._paged((), page_size), backward=False, device=device, exp=exp)["out"]
    for b, got in enumerate(s.split("packed", out)):
        assert not differing(got, want[b]["out"]), s.lengths[b]


def test_rollouts_that_share_the_pages_of_their_prompt_have_the_bytes_of_such_as_do_not(
    device: str, exp: str, rng: np.random.Generator
) -> None:
    """The groups have three sequences, one sequence, and no sequence. A prompt ends inside a page, or beyond a split.
    One rollout is shorter than its prompt, since this rollout is a chunk of the prompt."""
    for head_dim in (32, 136):
        s = Sequences(rng, [(2, 60), (1, 45), (5, 40), (3, 1300), (1, 30)], (4, 2), head_dim, "bfloat16", device)
        for b in (1, 2):
            for part in (s.k, s.v):
                part[b][:45] = part[0][: min(45, len(part[b]))]
        groups = [(3, 45), (1, 1100)]
        for options in OPTIONS:
            want = alone(s, device=device, exp=exp, **options)
            call = s._paged(groups)
            pages = call[1]["shared_prefix"][0]
            assert pages[0, 7:].eq(-1).all()  # the prompt is stored once
            out = results(call, device=device, exp=exp, **options)
            parts = s.split("packed", out["out"])
            lse = s.split("packed", out["lse"], heads_first=True)
            for b in range(len(s.lengths)):
                mine = {"out": parts[b], "lse": lse[b]}
                assert_same(mine, {n: want[b][n] for n in mine}, (head_dim, options, s.lengths[b]))


def without_prefix(sequences: int, groups: int, device: str) -> tuple[Any, ...]:
    """A ``shared_prefix`` whose table has no columns: groups of sequences that share no key."""
    offsets = torch.linspace(0, sequences, groups + 1).int()
    table, lens = torch.zeros(groups, 0, dtype=torch.int32), torch.zeros(groups, dtype=torch.int32)
    return tuple(x.to(device) for x in (table, lens, offsets))


def test_a_prefix_table_without_columns_changes_nothing(device: str, exp: str, rng: np.random.Generator) -> None:
    """One query per sequence runs the kernel of splits; 20 queries run the kernel of tiles."""
    for queries in (1, 20):
        s = Sequences(rng, [(queries, n) for n in (60, 45, 1300, 33)], (4, 2), 32, "bfloat16", device)
        call = s._paged(())
        want = results(call, device=device, exp=exp)
        call[1]["shared_prefix"] = without_prefix(4, 2, device)
        assert_same(results(call, device=device, exp=exp), want, queries)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 128])  # copied keys, and keys that wgmma could take
def test_a_prefix_table_without_columns_waits_for_keys_of_the_kernel_before(head_dim: int) -> None:
    """The kernel of `embedding` lets the next kernel begin before the last rows of `embedding` are written. These rows
    are the keys. The rows' memory held NaNs before, and every sequence has pages among the last rows."""
    sequences, pages, page_size, heads = 64, 64, 16, 8
    torch.manual_seed(1)
    table = torch.randn(512, heads * head_dim, device="cuda").bfloat16()
    ids = torch.randint(512, (sequences * pages * page_size,), device="cuda")
    q = torch.randn(sequences, 4 * heads, head_dim, device="cuda").bfloat16()
    lists = {
        "cu_seqlens_q": torch.arange(sequences + 1, dtype=torch.int32, device="cuda"),
        "seqused_k": torch.full((sequences,), pages * page_size, dtype=torch.int32, device="cuda"),
        "block_table": torch.randperm(sequences * pages, device="cuda").int().view(sequences, pages),
    }
    prefix = without_prefix(sequences, 2, "cuda")

    def attends(**more: Any) -> Any:
        keys = rk.embedding(ids, table).view(-1, page_size, heads, head_dim)
        return rk.attention(q, keys, keys, **lists, **more)

    keys = rk.embedding(ids, table).view(-1, page_size, heads, head_dim)
    torch.cuda.synchronize()
    want = rk.attention(q, keys, keys, **lists)
    del keys
    for call in range(20):
        torch.full((len(ids), heads * head_dim), float("nan"), dtype=torch.bfloat16, device="cuda")  # freed at once
        assert not differing(attends(shared_prefix=prefix), want), call


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bytes_at_any_stride(dtype: str, device: str, rng: np.random.Generator) -> None:
    s = Sequences(rng, [(70, 140)], (4, 2), 40, dtype, device)
    q, k, v, dout = (t[0][None] for t in (s.q, s.k, s.v, s.dout))
    want = results(((q, k, v, dout), {}))

    def heads_first(t: Any) -> Any:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def fused(t: Any) -> Any:
        return torch.cat((t, t, t), 2)[:, :, t.shape[2] : 2 * t.shape[2]]

    def off_by_one(t: Any) -> Any:
        memory = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
        return memory[1:].view(t.shape).copy_(t)

    for move in (heads_first, fused, off_by_one):
        assert_same(results((tuple(move(t) for t in (q, k, v, dout)), {})), want, move.__name__)  # type: ignore[arg-type]


def test_hardware_on_the_cpu_is_another_mode_and_portable_the_default(rng: np.random.Generator) -> None:
    s = Sequences(rng, [(20, 60)], dtype="float32")
    portable, hardware = (alone(s, exp=e)[0]["out"] for e in ("portable", "hardware"))
    assert not differing(rk.attention(s.q[0][None], s.k[0][None], s.v[0][None])[0], portable)
    assert differing(portable, hardware)
    with rk.arithmetic("sm_90"):
        assert not differing(rk.attention(s.q[0][None], s.k[0][None], s.v[0][None])[0], hardware)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_an_sm_90_products_are_the_matrix_units_in_every_form(
    dtype: str, exp: str, rng: np.random.Generator
) -> None:
    """Covers both exponentials and every path of a call; float32 keeps its chains."""
    s = Sequences(rng, LENGTHS, (4, 2), 40, dtype)
    chains = alone(s, exp="portable")
    with rk.arithmetic("sm_90"):
        for options in OPTIONS[:3]:
            want = alone(s, exp=exp, **options)
            for form in FORMS[1:]:
                for b, got in enumerate(each(s, form, exp=exp, **options)):
                    assert_same(got, want[b], (form, options, s.lengths[b]))
        want = alone(s, exp=exp)
        q, k, v = (t[5] for t in (s.q, s.k, s.v))  # a chunk over three blocks
        for i in (0, 20, 32):
            keys = 300 - 32 + i
            got = rk.attention(q[None, i : i + 1], k[None, :keys], v[None, :keys], exp=exp)
            assert not differing(got[0], want[5]["out"][i : i + 1]), i
        whole = want[5]["out"]
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        assert not differing(rk.attention(*(t[None] for t in leaves), exp=exp)[0].detach(), whole)
        batched = torch.func.vmap(lambda *t: rk.attention(*t, exp=exp))(*(t[None, None] for t in (q, k, v)))
        assert not differing(batched[0, 0], whole)
        if dtype != "bfloat16":  # numpy has no bfloat16
            got = rk.attention(*(t[None].numpy() for t in (q, k, v)), exp=exp)
            assert not differing(torch.from_numpy(got)[0], whole)
    if exp == "portable":
        same = not differing(want[5]["lse"].contiguous(), chains[5]["lse"].contiguous())
        assert same == (dtype == "float32")


# ---- what is not read ------------------------------------------------------------------------------------------------


def test_later_tokens_may_hold_anything(device: str, rng: np.random.Generator) -> None:
    """A key that a query does not see contributes nothing, not even NaN times zero. The query contributes nothing to
    that key either."""
    s = Sequences(rng, [(140, 140)], (2, 1), 32, "float32", device)
    want = alone(s)[0]
    for value in (float("nan"), float("inf"), -float("inf")):
        t = Sequences(rng, [(140, 140)], (2, 1), 32, "float32", device)
        for mine, theirs in zip((t.q, t.k, t.v, t.dout), (s.q, s.k, s.v, s.dout), strict=True):
            mine[0] = theirs[0].clone()
            mine[0][100:] = value
        got = alone(t)[0]
        for name in ("out", "lse", "dq"):
            assert not differing(got[name][:100].contiguous(), want[name][:100].contiguous()), (value, name)


def test_rows_that_fail_are_nan_and_others_are_not(device: str, rng: np.random.Generator) -> None:
    s = Sequences(rng, [(4, 4)], (1, 1), 8, "float32", device)
    want = alone(s)[0]["out"]
    for value, dim in ((float("nan"), 0), (1e30, 1)):
        s.q[0][2, 0, dim] = value
        s.k[0][:, 0, 1] = 1e30 if value == 1e30 else s.k[0][:, 0, 1]
        got = alone(s)[0]["out"]
        assert torch.isnan(got[2]).all()
        if value != 1e30:
            assert not differing(got[[0, 1, 3]], want[[0, 1, 3]])


def test_an_infinite_score_that_is_negative_counts_for_nothing(rng: np.random.Generator) -> None:
    q = torch.ones(1, 1, 1, 8)
    k = torch.zeros(1, 3, 1, 8)
    k[0, 1] = -float("inf")
    v = torch.tensor([1.0, float("nan"), 3.0])[None, :, None, None].expand(1, 3, 1, 8).contiguous()
    out, lse = rk.attention(q, k, v, return_lse=True)
    assert (out == 2).all()
    assert not beyond(
        "attention", "lse", lse, np.full((1, 1, 1), np.log(2)), head_dim=8, max_abs_s=0.0, score_scale=0.0
    )


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_nothing_to_do(shape: tuple[int, int, int], device: str) -> None:
    batch, queries, keys = shape
    q, k = (torch.zeros(batch, n, 2, 16, device=device) for n in (queries, keys))
    out, lse = rk.attention(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == (batch, 2, queries)
    assert (lse == -torch.inf).all()
    for grad, like in zip(rk.attention_backward(q, q, k, k, out, lse), (q, k, k), strict=True):
        assert grad.shape == like.shape
        assert (grad == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_has_the_bytes_of_the_cpu(dtype: str, exp: str, rng: np.random.Generator) -> None:
    for head_dim in (8, 64, 80, 128, 192, 256):
        s = Sequences(rng, LENGTHS, (6, 2), head_dim, dtype)
        for form in FORMS[1:]:
            (arrays, lists) = s.call(form)
            there = moved(torch.Tensor.cuda, (arrays, lists))
            for options in OPTIONS:
                with rk.arithmetic("sm_90"):
                    want = results((arrays, lists), device="cpu", exp=exp, **options)
                got = results(there, device="cuda", exp=exp, **options)  # type: ignore[arg-type]
                assert_same(got, want, (head_dim, form, options))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window_size": 2500}, {"causal": False}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_long_sequence_has_the_same_gradients_alone_and_among_short_ones(
    head_dim: int, options: dict[str, Any]
) -> None:
    """The two calls may take plans whose jobs have one query head or a whole group of query heads. The jobs outnumber
    the multiprocessors, so jobs wait for the sums of other jobs."""
    torch.manual_seed(1)
    long, short = 4200, [70] * 12

    def normal(heads: int) -> Any:
        return torch.randn(long + sum(short), heads, head_dim, dtype=torch.bfloat16, device="cuda")

    q, dout, k, v = normal(32), normal(32), normal(8), normal(8)

    def gradients(lengths: list[int]) -> dict[str, Any]:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        arrays = [x[: sum(lengths)] for x in (q, k, v)]
        how: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, **options}
        found = rk.attention_backward(
            dout[: sum(lengths)], *arrays, *rk.attention(*arrays, return_lse=True, **how), **how
        )
        return {name: x[:long] for name, x in zip(("dq", "dk", "dv"), found, strict=True)}

    want = gradients([long, *short])
    for _ in range(3):
        assert_same(gradients([long]), want)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """k and v have 2.2 G elements each; the last sequence lies after element 2^31."""
    tokens, heads, d = 8192, 8, 256
    batch = 2**31 // (tokens * heads * d) + 3
    k = torch.empty(batch, tokens, heads, d, dtype=torch.bfloat16, device="cuda").normal_()
    q = torch.randn(batch, 2, 16, d, dtype=torch.bfloat16, device="cuda")
    out = rk.attention(q, k, k)
    assert not differing(out[-1:], rk.attention(q[-1:], k[-1:].clone(), k[-1:].clone()))


MIXED = [(1, 700), (300, 1300), (0, 30), (1, 2100), (16, 1040), (17, 500), (1, 5), (2, 1100), (64, 64), (65, 1090)]


@pytest.mark.parametrize("options", [{}, {"window_size": 70}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mixed_batch_of_prefill_and_decode_has_the_bytes_of_calls_apart(
    dtype: str, options: dict[str, Any], device: str, exp: str
) -> None:
    """Pages, queries in use that end early, tokens of no sequence, and sinks. On a GPU, separate kernels serve
    sequences with few queries and sequences with many."""
    torch.manual_seed(2)
    kind, page, heads, kv_heads, d = getattr(torch, dtype), 16, 8, 2, 64
    lengths = MIXED if device == "cuda" else [(min(n, 40), min(m, 200)) for n, m in MIXED]
    pages = [-(-m // page) for _, m in lengths]
    k, v = (torch.randn(sum(pages), page, kv_heads, d, device=device).to(kind) for _ in range(2))
    order, table = torch.randperm(sum(pages)).int(), torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for b, of_sequence in enumerate(order.split(pages)):
        table[b, : pages[b]] = of_sequence
    first = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0).int()
    q = torch.randn(int(first[-1]) + 5, heads, d, device=device).to(kind)
    sinks = torch.randn(heads, device=device)
    used_q = torch.tensor([n - n // 10 for n, _ in lengths], dtype=torch.int32, device=device)
    used_k = torch.tensor([m for _, m in lengths], dtype=torch.int32, device=device)
    table, offsets = table.to(device), first.to(device)

    def call(queries: Any, cu: Any, which: slice) -> Any:
        with mode(device, exp):
            return rk.attention(
                queries, k, v, cu_seqlens_q=cu, block_table=table[which], seqused_q=used_q[which],
                seqused_k=used_k[which], sinks=sinks, exp=exp, return_lse=True, **options,
            )  # fmt: skip

    together = call(q, offsets, slice(None))
    out, lse = torch.zeros_like(q), torch.full_like(together.lse, -float("inf"))
    for b, (n, _) in enumerate(lengths):
        if n == 0:
            continue
        at = slice(int(first[b]), int(first[b]) + n)
        cu = torch.tensor([0, n], dtype=torch.int32, device=device)
        out[at], lse[:, at] = call(q[at], cu, slice(b, b + 1))
    assert_same({"out": together.out, "lse": together.lse}, {"out": out, "lse": lse})
