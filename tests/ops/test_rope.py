"""rope: the contract's bytes, float64, Hugging Face's bytes, and the same bytes for any layout of heads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native._native import module as native
from rl_kernel_native.contract import row
from rope_cases import DTYPES, INTERMEDIATES, Operands, contract, failures, operands, results

torch = pytest.importorskip("torch", reason="layouts are made with torch; test_rope_frameworks.py has the others")

# (head_dim, partial_dim): a pair; odd widths that no vector fits; heads of models, rotated wholly, by half (GLM-4) and
# by a quarter (Qwen3-Next); a rest that is one vec8.
DIMS = [(2, None), (7, 6), (18, None), (64, None), (80, None), (96, 32), (128, None), (128, 64), (136, 128), (256, 64)]


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(tuple(a), tuple(b)) if isinstance(a, tuple) else differing(a, b)
    assert not found, f"{what}: {found}"


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_output_has_the_bytes_of_the_contract(
    dims: tuple[int, Any], dtype: str, device: str, rng: np.random.Generator
) -> None:
    head_dim, partial_dim = dims
    for per_pair, ids, angle_dtype in itertools.product((True, False), (True, False), ("float32", dtype)):
        o = operands(
            rng, (5,), (3, 2), head_dim, dtype, device,
            rotary_dim=partial_dim, per_pair=per_pair, ids=ids, angle_dtype=angle_dtype,
        )  # fmt: skip
        for backward, interleaved, intermediate in itertools.product((False, True), (False, True), INTERMEDIATES):
            options = {"interleaved": interleaved, "partial_dim": partial_dim, "intermediate": intermediate}
            got = results(o, backward=backward, **options)
            assert_same(got, contract(o, backward=backward, **options), (per_pair, ids, backward, options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_lie_within_the_bounds_of_float64(dtype: str, device: str, rng: np.random.Generator) -> None:
    for head_dim, partial_dim in DIMS:
        o = operands(rng, (5,), (3, 2), head_dim, dtype, device, rotary_dim=partial_dim)
        for backward, interleaved, intermediate in itertools.product((False, True), (False, True), INTERMEDIATES):
            options = {"interleaved": interleaved, "partial_dim": partial_dim}
            got = results(o, backward=backward, intermediate=intermediate, **options)
            assert not failures(o, got, backward, intermediate, **options), (head_dim, options)


def rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def hugging_face(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """transformers 5.23, models/qwen3: apply_rotary_pos_emb."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_of_cos", [1, 2])
def test_input_is_what_hugging_face_computes(
    batch_of_cos: int, dtype: str, device: str, rng: np.random.Generator
) -> None:
    """q and k are transposed views of [batch, heads, seq, head_dim]; cos and sin have the dtype of q and k or are
    rounded to it."""
    o = operands(rng, (2, 9), (4, 2), 128, dtype, device, ids=False)
    q, k = o.q.transpose(1, 2), o.k.transpose(1, 2)
    cos, sin = (torch.cat((t, t), -1)[:batch_of_cos] for t in o[2:4])
    narrow = (cos.to(q.dtype), sin.to(q.dtype))
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    want = hugging_face(*leaves, *narrow)
    gradients = tuple(torch.randn_like(w) for w in want)
    of_leaves = torch.autograd.grad(want, leaves, gradients)
    for angles in (narrow, (cos, sin), tuple(t[..., :64] for t in (cos, sin)), tuple(t[..., :64] for t in narrow)):
        got = rk.rope(q, k, *angles, head_axis=1, intermediate="input")
        assert_same(got, tuple(w.contiguous() for w in want))
        back = rk.rope_backward(*gradients, *angles, head_axis=1, intermediate="input")
        assert_same(back, tuple(g.contiguous() for g in of_leaves), "backward")
    wide = tuple(w.to(q.dtype) for w in hugging_face(q.float(), k.float(), cos, sin))
    close = rk.rope(q, k, cos, sin, head_axis=1)
    c, s, x = (t.float().unsqueeze(1) if t is not q else t.float() for t in (cos, sin, q))
    scale = ((x * c).abs() + (rotate_half(x) * s).abs()).double()
    allowed = row("rope", "q").allowed(dtype, expected=wide[0].double(), scale=scale)
    assert bool(((close[0].double() - wide[0].double()).abs() <= 2 * allowed).all()), "each within its bound"


def test_frameworks_ways_to_call_give_the_same_bytes(device: str, rng: np.random.Generator) -> None:
    """vLLM's cache and positions, Megatron's [seq, batch, heads, dim], and Hugging Face's [batch, heads, seq, dim]."""
    o = operands(rng, (2, 9), (4, 2), 64, "bfloat16", device)
    want = results(o)
    cache = torch.cat((o.cos, o.sin), -1)
    cos, sin = cache.chunk(2, -1)
    flat = rk.rope(o.q.flatten(0, 1), o.k.flatten(0, 1), cos, sin, position_ids=o.position_ids.flatten().int())
    assert_same(tuple(t.view(w.shape) for t, w in zip(flat, want, strict=True)), want, "vLLM")
    gathered = (o.cos[o.position_ids], o.sin[o.position_ids])
    assert_same(rk.rope(o.q, o.k, *gathered), want, "gathered")
    got = rk.rope(o.q.transpose(0, 1), o.k.transpose(0, 1), *(t.transpose(0, 1) for t in gathered))
    assert_same(tuple(t.transpose(0, 1).contiguous() for t in got), want, "Megatron")
    got = rk.rope(o.q.transpose(1, 2), o.k.transpose(1, 2), *gathered, head_axis=1)
    assert_same(tuple(t.transpose(1, 2).contiguous() for t in got), want, "Hugging Face")
    one = rk.rope(o.q, o.k, o.cos, o.sin, position_ids=o.position_ids[:1])
    assert_same(one, rk.rope(o.q, o.k, o.cos, o.sin, position_ids=o.position_ids[:1].expand(2, 9)), "one for all")


@pytest.mark.parametrize("sections", [(16, 24, 24), (24, 20, 20), (3, 50, 11), (64, 0, 0)], ids=str)
def test_sections_are_those_of_qwen2_vl(sections: Any, device: str, rng: np.random.Generator) -> None:
    """apply_multimodal_rotary_pos_emb of transformers 4.57, models/qwen2_vl, splits cos and sin into twice as many
    sections."""
    o = operands(rng, (2, 7), (3, 1), 128, "bfloat16", device, sections=True)
    assert_same(results(o, mrope_sections=sections), contract(o, mrope_sections=sections))
    assert_same(
        results(o, mrope_sections=sections, interleaved=True, intermediate="input"),
        contract(o, mrope_sections=sections, interleaved=True, intermediate="input"),
        "interleaved",
    )
    gathered = tuple(torch.cat((t[o.position_ids],) * 2, -1).to(o.q.dtype) for t in o[2:4])  # [3, B, S, 128]
    split = [2 * s for s in sections]
    merged = [
        torch.cat([m[i % 3] for i, m in enumerate(t.split([*sections, *sections], dim=-1))], -1) for t in gathered
    ]
    assert sum(split) == 128
    want = hugging_face(o.q.transpose(1, 2), o.k.transpose(1, 2), *merged)
    got = rk.rope(o.q, o.k, *gathered, mrope_sections=sections, intermediate="input")
    assert_same(got, tuple(w.transpose(1, 2).contiguous() for w in want), "Qwen2-VL")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nans_and_infinities_stay_in_their_pairs_and_copies_keep_their_bits(
    dtype: str, device: str, rng: np.random.Generator
) -> None:
    o = operands(rng, (4,), (2, 2), 96, dtype, device, rotary_dim=64)
    want = results(o, partial_dim=64)
    q = o.q.clone()
    q[1, 0, 3], q[2, 1, 40] = float("nan"), float("inf")
    bits = {4: torch.int32, 2: torch.int16}[q.element_size()]
    q.view(bits)[..., 70] = -1  # a NaN with a payload
    got = rk.rope(q, o.k, o.cos, o.sin, position_ids=o.position_ids, partial_dim=64)
    assert bool((got[0].view(bits)[..., 70] == -1).all())
    assert_same(got[1], want[1])
    same = torch.ones_like(q, dtype=torch.bool)
    same[..., 70] = same[1, 0, 3] = same[1, 0, 35] = same[2, 1, 40] = same[2, 1, 8] = False
    assert bool(torch.isnan(got[0][1, 0, [3, 35]]).all())
    assert bool((got[0][same] == want[0][same]).all())


def test_position_zero_changes_nothing(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (6,), device=device)
    zeros = torch.zeros_like(o.position_ids)
    for interleaved in (False, True):
        got = rk.rope(o.q, o.k, o.cos, o.sin, position_ids=zeros, interleaved=interleaved)
        assert_same(got, (o.q, o.k))


def test_backward_turns_forward_back(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (6,), (3, 2), 64, "float32", device)
    turned = results(o)
    back = rk.rope_backward(*turned, o.cos, o.sin, position_ids=o.position_ids)
    for got, want in zip(back, o[:2], strict=True):
        largest = float(want.abs().max())  # both passes rotate errors, too
        assert float((got - want).abs().max()) <= 3 * row("rope", "q").allowed(expected=largest, scale=2 * largest)


@pytest.mark.parametrize(
    "shape", [(0, 3, 8), (4, 0, 8), (4, 3, 0), (2, 0, 3, 8)], ids=["no tokens", "no heads", "no columns", "no sequence"]
)
def test_empty_arrays_are_no_launch(shape: tuple[int, ...], device: str) -> None:
    for dtype in DTYPES:
        q = torch.ones(shape, dtype=getattr(torch, dtype), device=device)
        table = torch.ones(5, shape[-1] // 2, device=device)
        ids = torch.zeros(shape[:-2], dtype=torch.int32, device=device)
        got = rk.rope(q, q, table, table, position_ids=ids)
        assert [t.shape for t in got] == [q.shape] * 2
        if shape[0] == 0:
            assert rk.rope(q, None, table[:0], table[:0], position_ids=ids)[1] is None, "no positions, none asked for"


def test_what_is_returned_is_what_was_given(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (2, 3), (4, 1), 32, "bfloat16", device)
    before = [t.clone() for t in o]
    q_out, k_out = results(o)
    assert (q_out.shape, q_out.dtype, q_out.device) == (o.q.shape, o.q.dtype, o.q.device)
    assert (k_out.shape, k_out.dtype) == (o.k.shape, o.k.dtype)
    assert q_out.is_contiguous()
    assert rk.rope(o.q, None, o.cos, o.sin, position_ids=o.position_ids)[1] is None
    for t, b in zip(o, before, strict=True):
        assert torch.equal(t, b)


# ---- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [18, 64, 128])
def test_any_batch_and_any_position_give_the_same_bytes(head_dim: int, device: str, rng: np.random.Generator) -> None:
    """1 to 600 tokens, alone, in the middle and permuted; the number of tokens selects a GPU's kernel."""
    o = operands(rng, (600,), (8, 2), head_dim, "bfloat16", device)
    whole = results(o, intermediate="input")
    for n in (1, 2, 7, 64, 400):
        first = int(rng.integers(0, 600 - n + 1))
        chosen = slice(first, first + n)
        part = o._replace(q=o.q[chosen], k=o.k[chosen], position_ids=o.position_ids[chosen])
        assert_same(results(part, intermediate="input"), tuple(r[chosen] for r in whole), n)
    order = torch.from_numpy(rng.permutation(600)).to(device)
    part = o._replace(q=o.q[order], k=o.k[order], position_ids=o.position_ids[order])
    assert_same(results(part, intermediate="input"), tuple(r[order] for r in whole), "permuted")


def test_heads_and_keys_are_rotated_alike(device: str, rng: np.random.Generator) -> None:
    """Any number of heads, q passed as k, and k alone: no head depends on another. MLA has one key for 64 queries."""
    o = operands(rng, (20,), (64, 1), 64, "bfloat16", device)
    whole = results(o)
    for first, last in ((0, 1), (3, 10), (0, 63)):
        part = rk.rope(o.q[:, first:last], None, o.cos, o.sin, position_ids=o.position_ids)[0]
        assert_same(part, whole[0][:, first:last].contiguous())
    assert_same(rk.rope(o.k, o.q, o.cos, o.sin, position_ids=o.position_ids)[::-1], whole)


LAYOUTS = ["fused", "sliced", "transposed", "expanded", "misaligned"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_any_layout_gives_the_same_bytes(layout: str, head_dim: int, device: str, rng: np.random.Generator) -> None:
    for dtype in DTYPES:
        o = operands(rng, (3, 5), (4, 4), head_dim, dtype, device, ids=False)
        if layout == "expanded":
            o = o._replace(q=o.q[:1].expand_as(o.q).contiguous(), k=o.k[:1].expand_as(o.k).contiguous())
            o = o._replace(cos=o.cos[:1].expand_as(o.cos).contiguous(), sin=o.sin[:1].expand_as(o.sin).contiguous())

        def laid_out(t: Any, layout: str = layout) -> Any:
            if layout == "fused" and t.dim() == 4:  # heads of a fused projection
                return torch.cat((t, t, t), 2)[:, :, 4:8]
            if layout == "sliced":  # q[:, :-1] of a padded batch
                return torch.cat((t, t[:, :1]), 1)[:, :-1]
            if layout == "transposed":
                return t.transpose(0, 1).contiguous().transpose(0, 1)
            if layout == "expanded":
                return t[:1].expand_as(t)
            memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
            return memory[1:].view(t.shape).copy_(t)

        moved = Operands(*(None if t is None else laid_out(t) for t in o))
        for backward in (False, True):
            assert_same(results(moved, backward=backward), results(o, backward=backward), dtype)


def test_dimensions_before_the_heads_are_tokens(device: str, rng: np.random.Generator) -> None:
    """No leading dimension, or five, with any axis of heads."""
    o = operands(rng, (24,), (4, 2), 32, "bfloat16", device)
    want = results(o)
    one = rk.rope(o.q[3], o.k[3], o.cos, o.sin, position_ids=o.position_ids[3])
    assert_same(one, tuple(w[3] for w in want), "one token")
    shape = (2, 1, 3, 2, 2)
    got = rk.rope(
        o.q.view(*shape, 4, 32), o.k.view(*shape, 2, 32), o.cos, o.sin, position_ids=o.position_ids.view(shape)
    )
    assert_same(tuple(g.view(w.shape) for g, w in zip(got, want, strict=True)), want, "many")
    for axis in (0, -2, 1):
        got = rk.rope(
            o.q.movedim(1, axis), o.k.movedim(1, axis), o.cos, o.sin, position_ids=o.position_ids, head_axis=axis
        )
        assert_same(tuple(g.movedim(axis, 1).contiguous() for g in got), want, axis)


def test_tables_of_a_million_positions(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (7,), (2, 1), 16, "bfloat16", device, max_position=1 << 20)
    o.position_ids[0], o.position_ids[1] = 0, (1 << 20) - 1
    assert_same(results(o), contract(o))


def test_every_instruction_set_and_number_of_threads_give_the_same_bytes(
    rng: np.random.Generator, native_settings: None
) -> None:
    for head_dim, interleaved, intermediate in itertools.product((54, 128), (False, True), INTERMEDIATES):
        o = operands(rng, (200,), (4, 1), head_dim, "bfloat16")
        options = {"interleaved": interleaved, "intermediate": intermediate}
        want = results(o, **options)
        for isa in ("baseline", "avx2", "avx512"):
            try:
                native.set_cpu_isa(isa)
            except ValueError:
                continue
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert_same(results(o, **options), want, (isa, threads))


# ---- GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cpu_and_gpu_have_the_same_bytes_over_many_tokens(rng: np.random.Generator) -> None:
    """There are enough tokens for every plan."""
    for tokens, heads, dim, dtype in (
        (5000, (32, 8), 128, "bfloat16"),
        (900, (8, 8), 64, "float32"),
        (3, (2, 1), 256, "float16"),
    ):
        o = operands(rng, (tokens,), heads, dim, dtype)
        moved = Operands(*(t.cuda() for t in o))
        for backward, interleaved, intermediate in itertools.product((False, True), (False, True), INTERMEDIATES):
            options = {"backward": backward, "interleaved": interleaved, "intermediate": intermediate}
            assert_same(results(moved, **options), results(o, **options), (tokens, options))


@pytest.mark.gpu
def test_an_id_outside_of_the_tables_makes_its_token_nan_and_no_other(rng: np.random.Generator) -> None:
    for dim, dtype in ((64, torch.int64), (18, torch.int32)):
        o = operands(rng, (40,), (4, 2), dim + 8, "bfloat16", "cuda", rotary_dim=dim)
        want = results(o, partial_dim=dim)
        ids = o.position_ids.to(dtype)
        for i, bad in enumerate((-1, 500, 2**31 - 1, -(2**31))):
            ids[3 * i] = bad
        for backward in (False, True):
            got = results(o._replace(position_ids=ids), backward=backward, partial_dim=dim)
            for g, x in zip(got, o[:2], strict=True):
                assert bool(torch.isnan(g[0:12:3, :, :dim]).all())
                assert_same(g[0:12:3, :, dim:].contiguous(), x[0:12:3, :, dim:].contiguous(), "copied columns")
            good = [i for i in range(40) if i not in (0, 3, 6, 9)]
            if not backward:
                assert_same(tuple(g[good] for g in got), tuple(w[good] for w in want))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.gpu_memory(12)
def test_more_than_two_to_the_31_elements() -> None:
    """[530,000, 32, 128] = 2^31 and 23 million more; the last tokens must equal those of a small call."""
    tokens = 530_000
    q = torch.empty(tokens, 32, 128, dtype=torch.bfloat16, device="cuda")
    for i in range(0, tokens, 4096):
        q[i : i + 4096].normal_()
    angles = torch.rand(1000, 64, device="cuda") * 6
    cos, sin, ids = angles.cos(), angles.sin(), torch.arange(tokens, device="cuda") % 1000
    last = slice(tokens - 100, None)
    got = rk.rope(q, None, cos, sin, position_ids=ids)[0]
    assert_same(got[last], rk.rope(q[last].clone(), None, cos, sin, position_ids=ids[last])[0])
