"""Tests of silu_mul and gelu_mul: the contract's bytes, errors against float64, the same bytes at every position."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native._native import module as native
from silu_mul_cases import (
    ACTIVATIONS,
    DTYPES,
    Operands,
    canonical,
    contract,
    failures,
    functions,
    operands,
    packed_results,
    results,
)

torch = pytest.importorskip("torch", reason="layouts are made with torch; test_silu_mul_frameworks.py has the others")

# (rows, columns): a single element; a vec8; odd counts; a GPU block's share, also with one vec8 less and more; widths
# of models.
SHAPES = [(1, 1), (300, 8), (17, 37), (5, 1003), (3, 1016), (4, 1024), (3, 2056), (2, 12288), (1, 14336)]


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(tuple(a), tuple(b)) if isinstance(a, tuple) else differing(a, b)
    assert not found, f"{what}: {found}"


def packed(o: Operands) -> Any:
    return torch.cat((o.gate, o.up), -1)


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_output_has_the_bytes_of_the_contract(
    shape: tuple[int, int], dtype: str, device: str, rng: np.random.Generator
) -> None:
    o = operands(rng, shape[:1], shape[1], dtype, device)
    for activation, rounds in itertools.product(ACTIVATIONS, (False, True)):
        want = contract(o, activation, rounds)
        got = results(o, activation, round_before_mul=rounds)
        assert_same(got, want, (activation, rounds))
        assert_same(packed_results(packed(o), o.dy, activation, round_before_mul=rounds), want, "packed")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_of_a_gate_has_the_bytes_of_the_contract(dtype: str, device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (64,), 1024, dtype, device)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(getattr(torch, dtype)).view(64, 1024).to(device)
    o = o._replace(gate=every)
    for activation, rounds in itertools.product(ACTIVATIONS, (False, True)):
        got = results(o, activation, round_before_mul=rounds)
        assert_same(canonical(got), canonical(contract(o, activation, rounds)), (activation, rounds))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_gates_of_every_magnitude(activation: str, device: str, rng: np.random.Generator) -> None:
    """Every 4096th pattern of float32, which include both signs, the ends of the range and NaN."""
    bits = np.arange(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32) + rng.integers(0, 4096, 2**20, dtype=np.uint32)
    gate = torch.from_numpy(bits.view(np.float32).reshape(256, 4096).copy()).to(device)
    o = operands(rng, (256,), 4096, "float32", device)._replace(gate=gate)
    assert_same(canonical(results(o, activation)), canonical(contract(o, activation)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_lie_within_the_bounds_of_float64(shape: tuple[int, int], device: str, rng: np.random.Generator) -> None:
    for dtype, activation in itertools.product(DTYPES, ACTIVATIONS):
        o = operands(rng, shape[:1], shape[1], dtype, device)
        for rounds in (False, True):
            got = results(o, activation, round_before_mul=rounds)
            assert not failures(o, got, activation, rounds), (dtype, activation, rounds)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_roundings_are_those_of_frameworks(activation: str, rng: np.random.Generator) -> None:
    """transformers computes torch's activation in bfloat16, then the product. torch's exponential has other bits, so a
    few values may round the other way. Gates are at least -2, because 1 + erf cancels below -2 in both
    implementations."""
    o = operands(rng, (64,), 1024)
    o = o._replace(gate=o.gate.clamp(min=-2))
    approximate = "none" if activation == "gelu" else "tanh"
    act = (
        torch.nn.functional.silu
        if activation == "silu"
        else lambda g: torch.nn.functional.gelu(g, approximate=approximate)
    )
    rounded, fused = act(o.gate) * o.up, (act(o.gate.float()) * o.up.float()).bfloat16()
    for rounds, same, other in ((True, rounded, fused), (False, fused, rounded)):
        got = results(o, activation, round_before_mul=rounds).y
        assert int((got != same).sum()) < got.numel() // 500
        assert int((got != other).sum()) > got.numel() // 10


def test_infinite_gates_have_the_limits_and_nans_stay_where_they_are(device: str) -> None:
    inf, nan = float("inf"), float("nan")
    for dtype, activation in itertools.product(DTYPES, ACTIVATIONS):
        kind = {"dtype": getattr(torch, dtype), "device": device}
        gate = torch.tensor([-inf, inf, nan, -0.0, 1.0, 1.0, -inf], **kind)
        up = torch.tensor([2.0, 2.0, 2.0, 2.0, nan, 2.0, inf], **kind)
        o = Operands(gate, up, torch.ones_like(gate))
        y, d_gate, d_up = (r.float().tolist() for r in results(o, activation))
        assert (y[0], str(y[0]), y[1], str(y[3])) == (0.0, "-0.0", inf, "-0.0"), activation
        assert (d_gate[:2], d_up[:2]) == ([0.0, 2.0], [0.0, inf])
        assert [i for i, v in enumerate(y) if v != v] == [2, 4, 6]
        assert [i for i, v in enumerate(d_gate) if v != v] == [2, 4, 6]
        assert [i for i, v in enumerate(d_up) if v != v] == [2]


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_empty_arrays_are_no_launch(shape: tuple[int, ...], device: str) -> None:
    for dtype, activation in itertools.product(DTYPES, ACTIVATIONS):
        x = torch.ones(shape, dtype=getattr(torch, dtype), device=device)
        for r in results(Operands(x, x, x), activation):
            assert (r.shape, r.dtype) == (x.shape, x.dtype)
        halves = torch.ones((*shape[:-1], 2 * shape[-1]), dtype=x.dtype, device=device)
        assert packed_results(halves, x, activation).y.shape == x.shape


def test_what_is_returned_is_what_was_asked_for(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (2, 3), 40, "bfloat16", device)
    for activation in ACTIVATIONS:
        _, backward, options = functions(activation)
        want = results(o, activation)
        assert (want.y.shape, want.y.dtype, want.y.device) == (o.gate.shape, o.gate.dtype, o.gate.device)
        for wanted in itertools.product((True, False), (True, False)):
            got = backward(o.dy, o.gate, o.up, return_d_gate=wanted[0], return_d_up=wanted[1], **options)
            assert_same(got, tuple(w if kept else None for w, kept in zip(want[1:], wanted, strict=True)))
        assert backward(o.dy, packed(o), **options).shape == (2, 3, 80)
    assert_same(rk.gelu_mul(o.gate, o.up), rk.gelu_mul(o.gate, o.up, approximate="tanh"))


# ---- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [37, 128, 1000, 4096])
def test_any_batch_and_any_position_give_the_same_bytes(columns: int, device: str, rng: np.random.Generator) -> None:
    """1 to 300 rows, alone, in the middle and permuted. A GPU's kernel depends on the number of rows."""
    rows = 300
    o = operands(rng, (rows,), columns, "bfloat16", device)
    for activation in ACTIVATIONS:
        whole = results(o, activation)
        for n in (1, 2, 7, 64, 65, 200):
            first = int(rng.integers(0, rows - n + 1))
            chosen = slice(first, first + n)
            part = results(Operands(*(t[chosen] for t in o)), activation)
            assert_same(part, tuple(r[chosen] for r in whole), n)
        order = torch.from_numpy(rng.permutation(rows)).to(device)
        part = results(Operands(*(t[order] for t in o)), activation)
        assert_same(part, tuple(r[order] for r in whole), "permuted")


def test_columns_do_not_know_their_position(device: str, rng: np.random.Generator) -> None:
    """A tensor-parallel rank's share of the columns has the bytes of the whole layer's."""
    o = operands(rng, (9,), 1536, "bfloat16", device)
    whole = results(o)
    for ranks in (2, 3, 4, 8):
        width = 1536 // ranks
        for i in range(ranks):
            chosen = (slice(None), slice(i * width, (i + 1) * width))
            assert_same(
                tuple(r.contiguous() for r in results(Operands(*(t[chosen] for t in o)))),
                tuple(r[chosen].contiguous() for r in whole),
                (ranks, i),
            )


LAYOUTS = ["padded", "sliced", "transposed", "expanded", "misaligned", "half of a row"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [40, 128, 2048])
def test_any_layout_of_rows_gives_the_same_bytes(
    layout: str, columns: int, device: str, rng: np.random.Generator
) -> None:
    for dtype in DTYPES:
        o = operands(rng, (4, 6), columns, dtype, device)
        if layout == "expanded":
            o = Operands(*(t[:1].expand(4, 6, columns).contiguous() for t in o))

        def laid_out(t: Any, layout: str = layout, columns: int = columns) -> Any:
            if layout in ("padded", "half of a row"):
                wide = torch.cat([t, t], -1)
                return wide[..., :columns] if layout == "padded" else wide[..., columns:]
            if layout == "sliced":  # hidden[:, :-1] of a padded batch
                return torch.cat([t, t[:, :1]], 1)[:, :-1]
            if layout == "transposed":
                return t.transpose(0, 1).contiguous().transpose(0, 1)
            if layout == "expanded":
                return t[:1].expand(4, 6, columns)
            memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
            return memory[1:].view(t.shape).copy_(t)

        for activation in ACTIVATIONS:
            want = results(o, activation)
            assert_same(results(Operands(*map(laid_out, o)), activation), want, dtype)
            moved = packed_results(torch.cat((packed(o), o.up), -1)[..., : 2 * columns], laid_out(o.dy), activation)
            assert_same(moved, want, "packed rows of a wider array")


def test_leading_dimensions_are_rows(device: str, rng: np.random.Generator) -> None:
    """Inputs have no leading dimension, or seven."""
    o = operands(rng, (24,), 48, "bfloat16", device)
    want = results(o)
    assert_same(results(Operands(*(t[3] for t in o))), tuple(r[3] for r in want), "one row")
    many = results(Operands(*(t.view(2, 1, 3, 1, 2, 1, 2, 48) for t in o)))
    assert_same(tuple(r.view(24, 48) for r in many), want)


def test_every_instruction_set_and_number_of_threads_give_the_same_bytes(
    rng: np.random.Generator, native_settings: None
) -> None:
    for columns, activation in itertools.product((77, 40_000), ACTIVATIONS):  # threads share rows of 40,000
        o = operands(rng, (5,), columns, "bfloat16")
        want = results(o, activation, round_before_mul=True)
        for isa in ("baseline", "avx2", "avx512"):
            try:
                native.set_cpu_isa(isa)
            except ValueError:
                continue
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert_same(results(o, activation, round_before_mul=True), want, (isa, threads))


@pytest.mark.gpu
def test_cpu_and_gpu_have_the_same_bytes_over_many_rows(rng: np.random.Generator) -> None:
    """Each case has enough work for the kernels of large batches."""
    for rows, columns, dtype in ((2000, 14336, "bfloat16"), (300_000, 8, "float16"), (1500, 4104, "float32")):
        o = operands(rng, (rows,), columns, dtype)
        for activation in ACTIVATIONS:
            want = results(o, activation, round_before_mul=True)
            moved = Operands(*(t.cuda() for t in o))
            assert_same(results(moved, activation, round_before_mul=True), want, (rows, columns))
            assert_same(packed_results(packed(moved), moved.dy, activation, round_before_mul=True), want, "packed")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.gpu_memory(24)
def test_more_than_two_to_the_31_elements() -> None:
    """A call on [90,000, 2 * 14336] (2.58e9 elements) gives its last rows the bytes of a small call."""
    rows, columns = 90_000, 14336
    gate_up = torch.empty(rows, 2 * columns, dtype=torch.bfloat16, device="cuda")
    for i in range(0, rows, 4096):
        gate_up[i : i + 4096].normal_()
    last = slice(rows - 100, None)
    y = rk.silu_mul(gate_up)
    assert_same(y[last], rk.silu_mul(gate_up[last].clone()))
    d_gate_up = rk.silu_mul_backward(y, gate_up)
    assert_same(d_gate_up[last], rk.silu_mul_backward(y[last].clone(), gate_up[last].clone()))
    odd = gate_up.view(-1)[1 : 1 + 2 * columns * (rows - 1)].view(rows - 1, 2 * columns)  # not at multiples of 16 bytes
    assert_same(rk.silu_mul(odd)[-100:], rk.silu_mul(odd[-100:].clone()))
