"""linear, forward and ranks: values against float64, and the same bytes however a row is presented."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from linear_cases import HALF, UNITS, Operands, chain, dtypes_of, failures, operands, results
from rl_kernel_native._native import module as native

torch = pytest.importorskip("torch", reason="layouts are made with torch; test_linear_frameworks.py has the others")

# (rows, in_features, out_features): sizes of one; sizes within a step and a tile; one more than a step and a tile.
# Primes; rows of a decode step; whole tiles of any kernel; two blocks of rows.
SHAPES = [(1, 1, 1), (3, 15, 7), (17, 17, 65), (31, 257, 131), (2, 4096, 96), (128, 128, 256), (8195, 24, 9)]


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(a, b)
    assert not found, f"{what}: {found}"


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_lie_within_the_bounds_of_float64(shape: tuple[int, ...], device: str, rng: np.random.Generator) -> None:
    rows, ins, outs = shape
    for dtype in dtypes_of(device):
        o = operands(rng, (rows,), ins, outs, dtype, device)
        unit = "ieee" if device == "cpu" else "sm_90"
        assert not failures(o, results(o), unit), dtype


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_lies_within_its_bound(unit: str, rng: np.random.Generator) -> None:
    for (rows, ins, outs), dtype in itertools.product(SHAPES[:4], HALF):
        o = operands(rng, (rows,), ins, outs, dtype)
        with rk.arithmetic(unit):
            assert not failures(o, results(o), unit), (rows, ins, outs, dtype)


def test_units_differ_from_each_other(rng: np.random.Generator) -> None:
    """Equal results would mean that the context does not reach the products."""
    o = operands(rng, (9,), 512, 33)
    found = set()
    for unit in UNITS:
        with rk.arithmetic(unit):
            found.add(rk.linear(o.x, o.weight, out_dtype="float32").numpy().tobytes())
    assert len(found) == len(UNITS)


def test_ieee_is_one_ascending_chain_of_fused_multiply_adds(rng: np.random.Generator) -> None:
    o = operands(rng, (13,), 301, 21)
    x, weight, bias, dy = (t.float().numpy() for t in o)
    got = results(o)
    want = chain(x, weight) + bias
    assert_same(got[0], want)
    assert_same(got[1], torch.from_numpy(chain(dy, weight.T)).bfloat16())
    assert_same(got[2], chain(dy.T, x.T))
    assert_same(rk.linear(o.x, o.weight, o.bias), torch.from_numpy(want).bfloat16(), "one rounding, after the bias")


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_output_is_the_float32_sum_rounded_once(out: Any, device: str, rng: np.random.Generator) -> None:
    for dtype in HALF:
        o = operands(rng, (5,), 160, 37, dtype, device)
        for bias in (None, o.bias, o.bias.float()):
            whole = rk.linear(o.x, o.weight, bias, out_dtype=torch.float32)
            assert_same(rk.linear(o.x, o.weight, bias, out_dtype=out), whole.to(out))
        assert rk.linear(o.x, o.weight).dtype == o.x.dtype


def test_a_nan_or_an_infinity_stays_in_its_row(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (6,), 96, 40, "bfloat16", device)
    want = rk.linear(o.x, o.weight, o.bias)
    x = o.x.clone()
    x[2, 5], x[4, 0] = float("nan"), float("inf")
    got = rk.linear(x, o.weight, o.bias)
    assert bool(torch.isnan(got[2]).all())
    assert not bool(torch.isfinite(got[4]).any())
    clean = [0, 1, 3, 5]
    assert_same(got[clean], want[clean])


def test_leading_dimensions_are_rows(device: str, rng: np.random.Generator) -> None:
    """No leading dimension, or seven; y and dx have the same dimensions."""
    o = operands(rng, (24,), 48, 20, "bfloat16", device)
    y, dx, dweight, dbias = results(o)
    got = results(o._replace(x=o.x[3], dy=o.dy[3]))
    assert_same(got[:2], (y[3], dx[3]), "one row")
    shape = (2, 1, 3, 1, 2, 1, 2)
    got = results(o._replace(x=o.x.view(*shape, 48), dy=o.dy.view(*shape, 20)))
    assert_same(got, (y.view(*shape, 20), dx.view(*shape, 48), dweight, dbias))


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)], ids=str)
def test_empty_sums_are_zero_and_empty_arrays_are_no_launch(shape: tuple[int, ...], device: str) -> None:
    rows, ins, outs = shape
    for dtype in dtypes_of(device):
        kind = {"dtype": getattr(torch, dtype), "device": device}
        x, weight, dy = torch.ones(rows, ins, **kind), torch.ones(outs, ins, **kind), torch.ones(rows, outs, **kind)
        bias = torch.arange(outs, **kind)
        assert_same(rk.linear(x, weight), torch.full((rows, outs), float(ins), **kind))
        assert_same(rk.linear(x, weight, bias), (bias + ins).expand(rows, outs))
        assert_same(rk.linear_input_grad(dy, weight), torch.full((rows, ins), float(outs), **kind))
        assert_same(rk.linear_weight_grad(dy, x), torch.full((outs, ins), float(rows), **kind))
        assert_same(rk.linear_bias_grad(dy), torch.full((outs,), float(rows), **kind))
        main_grad = torch.full((outs, ins), 0.1, device=device)
        assert rk.linear_weight_grad(dy, x, main_grad=main_grad) is main_grad
        assert_same(main_grad, torch.full((outs, ins), 0.1, device=device) + rows)


# ---- the same bytes -------------------------------------------------------------------------------------------------


def rows_of(o: Operands, chosen: Any) -> Operands:
    return o._replace(x=o.x[chosen], dy=o.dy[chosen])


@pytest.mark.parametrize("unit", ["ieee", "sm_90"])
def test_any_batch_and_any_position_give_the_same_bytes(unit: str, device: str, rng: np.random.Generator) -> None:
    """1 to 131 rows: around every tile that kernels choose by the number of rows, and single rows."""
    rows = 131
    with rk.arithmetic(unit):
        for dtype in dtypes_of(device) if unit == "ieee" else HALF:
            o = operands(rng, (rows,), 273, 70, dtype, device)
            y, dx = results(o)[:2]
            sizes = (1, 2, 3, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 130)
            for n in sizes:
                first = int(rng.integers(0, rows - n + 1))
                chosen = slice(first, first + n)
                assert_same(results(rows_of(o, chosen))[:2], (y[chosen], dx[chosen]), (dtype, n))
            order = torch.from_numpy(rng.permutation(rows)).to(device)
            assert_same(results(rows_of(o, order))[:2], (y[order], dx[order]), "permuted")


def test_neighbours_decide_nothing(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (40,), 128, 48, "bfloat16", device)
    y, dx = results(o)[:2]
    others = o._replace(x=o.x.clone(), dy=o.dy.clone())
    others.x[1::2], others.dy[1::2] = float("nan"), float("inf")
    got = results(others)[:2]
    assert_same(tuple(r[::2].contiguous() for r in got), tuple(r[::2].contiguous() for r in (y, dx)))


def test_an_output_column_has_the_same_bytes_whatever_the_others_are(device: str, rng: np.random.Generator) -> None:
    """Column-parallel layers split out_features over ranks; in_features of dweight and dx are split in the same way."""
    o = operands(rng, (33,), 112, 90, "bfloat16", device)
    y, dx, dweight, dbias = results(o)
    for first, last in ((0, 1), (1, 45), (45, 90)):
        part = Operands(o.x, o.weight[first:last], o.bias[first:last], o.dy[:, first:last])
        got = results(part)
        assert_same((got[0], *got[2:]), (y[:, first:last], dweight[first:last], dbias[first:last]))
    for first, last in ((0, 1), (1, 112)):
        part = Operands(o.x[:, first:last], o.weight[:, first:last], o.bias, o.dy)
        got = results(part)
        assert_same(got[1:3], (dx[:, first:last], dweight[:, first:last]))


LAYOUTS = ["padded", "offset", "sliced", "transposed", "expanded", "padded weight", "interleaved weight"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_row_layout_gives_the_same_bytes(layout: str, device: str, rng: np.random.Generator) -> None:
    for dtype in dtypes_of(device):
        o = operands(rng, (4, 6), 83, 37, dtype, device)

        def laid_out(t: Any) -> Any:
            memory = torch.full((5, 9, t.shape[-1] + 11), float("nan"), dtype=t.dtype, device=device)
            if layout == "padded":
                view = memory[:4, :6, : t.shape[-1]]
            elif layout == "offset":  # off by one element, so that no 16-byte vector is aligned
                view = memory.view(-1)[1 : 1 + t.numel()].view(t.shape)
            elif layout == "sliced":  # logits[:, :-1] of a padded batch
                view = memory[:4, 2:8, 3 : 3 + t.shape[-1]]
            elif layout == "transposed":
                view = memory.view(-1)[: t.numel()].view(6, 4, t.shape[-1]).transpose(0, 1)
            else:
                return t
            view.copy_(t)
            return view

        if layout == "expanded":
            o = Operands(*(t[:1, :1].expand(4, 6, -1) if t.dim() == 3 else t for t in o))
        weight = o.weight
        if layout == "padded weight":
            weight = torch.full((37, 100), float("nan"), dtype=weight.dtype, device=device)[:, 7:90]
            weight.copy_(o.weight)
        if layout == "interleaved weight":  # a projection out of three in one parameter
            memory = torch.zeros((37, 3, 83), dtype=weight.dtype, device=device)
            weight = memory[:, 1]
            weight.copy_(o.weight)
        got = results(Operands(laid_out(o.x), weight, o.bias, laid_out(o.dy)))
        assert_same(got, results(Operands(*(t.contiguous() for t in o))), (layout, dtype))


# Either all sizes are odd, or only the contraction is. From 256 rows and columns on, sm_90 copies such operands. Fewer
# rows read the weight in place.
@pytest.mark.parametrize("shape", [(300, 1003, 777), (600, 1004, 520), (260, 258, 1029), (70, 1003, 777)], ids=str)
def test_rows_off_16_bytes_have_the_bytes_of_aligned_ones(
    shape: tuple[int, ...], device: str, rng: np.random.Generator
) -> None:
    rows, ins, outs = shape
    o = operands(rng, (rows,), ins, outs, "bfloat16", device)

    def aligned(t: Any) -> Any:
        wide = torch.empty(len(t), -(-t.shape[1] // 8) * 8, dtype=t.dtype, device=device)
        wide[:, : t.shape[1]] = t
        return wide[:, : t.shape[1]]

    def found(x: Any, weight: Any, dy: Any) -> Any:
        return (
            rk.linear(x, weight, o.bias),
            rk.linear_input_grad(dy, weight),
            rk.linear_weight_grad(dy, x),
            rk.linear_weight_grad(dy, x, main_grad=torch.ones(outs, ins, device=device)),
        )

    rk.workspace_stats(reset=True)
    odd = found(o.x, o.weight, o.dy)
    copied = rk.workspace_stats(reset=True)
    assert_same(odd, found(*map(aligned, (o.x, o.weight, o.dy))))
    assert not rk.workspace_stats()
    if device != "cpu" and torch.cuda.get_device_capability() == (9, 0):
        assert next(iter(copied.values())).calls >= 2


def test_the_counts_of_workspaces_stay_unless_a_reset_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    # A CPU takes no workspace, so its counts are always empty.
    monkeypatch.setattr(native, "workspace_stats", lambda reset: asked.append(reset) or {})
    rk.workspace_stats()
    rk.workspace_stats(reset=True)
    assert asked == [False, True]


def test_engines_threads_and_instruction_sets_have_the_same_bytes(
    device: str, native_settings: None, rng: np.random.Generator
) -> None:
    o = operands(rng, (70,), 530, 140, "bfloat16", device)
    want = results(o)
    assert_same(results(o, engine="native"), want, "engine")
    if device == "cpu":
        before = torch.get_num_threads()
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                assert_same(results(o), want, threads)
        finally:
            torch.set_num_threads(before)
        best = native.cpu_isa()
        for isa in ("baseline", "avx2", "avx512")[: ("baseline", "avx2", "avx512").index(best) + 1]:
            native.set_cpu_isa(isa)
            assert_same(results(o), want, isa)


# ---- segments and ranks ---------------------------------------------------------------------------------------------


def shares(o: Operands, segments: int, ranks: int, **options: Any) -> list[Any]:
    """Results of each rank of a row-parallel layer, from the rank's columns."""
    n, width = segments // ranks, o.x.shape[-1] // ranks
    return [
        rk.linear_partial(
            o.x[..., i * width : (i + 1) * width],
            o.weight[:, i * width : (i + 1) * width],
            k_segments=segments,
            first_segment=i * n,
            num_segments=n,
            **options,
        )
        for i in range(ranks)
    ]


@pytest.mark.parametrize("unit", ["ieee", "sm_90"])
@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_any_number_of_ranks_has_the_bytes_of_one(
    segments: int, unit: str, device: str, rng: np.random.Generator
) -> None:
    with rk.arithmetic(unit):
        for dtype in dtypes_of(device) if unit == "ieee" else HALF:
            o = operands(rng, (3, 7), 16 * segments * 5, 50, dtype, device)
            bias = [None, o.bias, o.bias.float()][int(rng.integers(3))]
            outs = ("float32",) if dtype == "float32" else ("float32", "bfloat16", "float16")
            for out in outs:
                whole = rk.linear(o.x, o.weight, bias, k_segments=segments, out_dtype=out)
                for ranks in (r for r in (1, 2, 4, 8) if r <= segments):
                    parts = shares(o, segments, ranks)
                    assert {p.dtype for p in parts} == {torch.float32}
                    assert_same(rk.tree_sum(parts, bias=bias, out_dtype=out), whole, (dtype, ranks, out))


def test_segments_are_dot_products_of_their_own_added_in_pairs(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (9,), 16 * 8 * 3, 33, "bfloat16", device)
    d = [rk.linear(o.x[:, i : i + 48], o.weight[:, i : i + 48], out_dtype="float32") for i in range(0, 384, 48)]
    whole = ((d[0] + d[1]) + (d[2] + d[3])) + ((d[4] + d[5]) + (d[6] + d[7]))
    assert_same(rk.linear(o.x, o.weight, k_segments=8, out_dtype="float32"), whole)
    assert differing(whole, rk.linear(o.x, o.weight, out_dtype="float32")), "another order has other bits here"


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_tree_adds_pairs_then_the_bias_then_rounds(count: int, device: str, rng: np.random.Generator) -> None:
    """Shapes: one number; odd rows across vectors; more columns than a run of the CPU, and rows across its tasks."""
    for shape in ((1,), (3, 5, 17), (3, 1031), (70, 1000)):
        parts = [torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(device) for _ in range(count)]
        level = parts
        while len(level) > 1:
            level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
        assert_same(rk.tree_sum(parts), level[0])
        for bias_dtype in (torch.float32, torch.bfloat16, torch.float16):
            bias = torch.from_numpy(rng.standard_normal(shape[-1:], dtype=np.float32)).to(device, bias_dtype)
            for out in (torch.float32, torch.bfloat16, torch.float16):
                assert_same(rk.tree_sum(parts, bias=bias, out_dtype=out), (level[0] + bias.float()).to(out))
    assert_same(rk.tree_sum(torch.stack(parts)), level[0], "a stack of parts is a sequence of them")
    assert rk.tree_sum([torch.empty(0, 4)] * count, bias=torch.ones(4)).shape == (0, 4)


@pytest.mark.parametrize("ranks", [2, 8])
def test_gradients_flow_to_every_rank(ranks: int, device: str, rng: np.random.Generator) -> None:
    """A row-parallel layer on one machine: autograd through shares and tree gives each rank its columns of dx and
    dw."""
    o = operands(rng, (5,), 256, 24, "bfloat16", device)
    leaves = [t.clone().requires_grad_() for t in o[:3]]
    y = rk.tree_sum(shares(Operands(*leaves, None), 8, ranks), bias=leaves[2], out_dtype=torch.bfloat16)
    y.backward(o.dy)
    assert_same(leaves[0].grad, rk.linear_input_grad(o.dy, o.weight))
    assert_same(leaves[1].grad, rk.linear_weight_grad(o.dy, o.x))
    assert_same(leaves[2].grad, rk.linear_bias_grad(o.dy))
