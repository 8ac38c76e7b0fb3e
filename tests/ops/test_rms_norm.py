"""rms_norm: the contract's bytes, values against float64, and the same bytes however a row is presented."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native._native import module as native
from rms_norm_cases import DTYPES, EPS, Operands, contract, failures, operands, results

torch = pytest.importorskip("torch", reason="layouts are made with torch; test_rms_norm_frameworks.py has the others")

# (rows, columns): one element; a vec8; an odd size; a head; an odd and wide size; hidden sizes of models. The last rows
# are too wide for a kernel's registers, in float32 and in 16-bit types.
SHAPES = [(1, 1), (3, 8), (17, 37), (40, 128), (5, 1003), (4, 2048), (3, 4096), (3, 5120), (2, 8200), (1, 16400)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"round_before_weight": True},
    {"weight_offset": 1.0},
    {"weight_offset": 1.0, "round_before_weight": True},
]


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(tuple(a), tuple(b)) if isinstance(a, tuple) else differing(a, b)
    assert not found, f"{what}: {found}"


def without_residual(o: Operands) -> Operands:
    return o._replace(residual=None, d_new_residual=None)


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_output_has_the_bytes_of_the_contract(
    shape: tuple[int, int], dtype: str, device: str, rng: np.random.Generator
) -> None:
    o = operands(rng, shape[:1], shape[1], dtype, device)
    for options, weight in itertools.product(OPTIONS, (o.weight, o.weight.float())):
        for case in (o._replace(weight=weight), without_residual(o._replace(weight=weight))):
            assert_same(results(case, **options), contract(case, **options), options)
    bare = o._replace(weight=None)
    assert_same(results(bare), contract(bare), "no weight")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_lie_within_the_bounds_of_float64(shape: tuple[int, int], device: str, rng: np.random.Generator) -> None:
    for dtype, offset in itertools.product(DTYPES, (0.0, 1.0)):
        o = operands(rng, shape[:1], shape[1], dtype, device)
        for case in (o, without_residual(o), o._replace(weight=o.weight.float())):
            for rounds in (False, True):
                options: dict[str, Any] = {"weight_offset": offset, "round_before_weight": rounds}
                assert not failures(case, results(case, **options), **options), (dtype, options)


@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2"])
def test_the_roundings_are_those_of_model_families(family: str, rng: np.random.Generator) -> None:
    """The formulas are written as transformers writes them. transformers' reciprocal root may have other bits. A value
    then rounds to its neighbour in rare cases."""
    o = operands(rng, (64,), 1024)
    wide = o.x.float()
    xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    want, options = {
        "llama": (o.weight * xhat.bfloat16(), {"round_before_weight": True}),
        "gemma": ((xhat * (1.0 + o.weight.float())).bfloat16(), {"weight_offset": 1.0}),
        "olmo2": ((o.weight * xhat).bfloat16(), {}),
    }[family]
    got = rk.rms_norm(o.x, o.weight, EPS, **options)
    off = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert int(off.max()) <= 1 + bool(options.get("round_before_weight"))
    assert int((off != 0).sum()) < off.numel() // 500
    for other in OPTIONS[:3]:
        if other != options:
            assert differing(rk.rms_norm(o.x, o.weight, EPS, **other), want)


def test_the_residual_is_rounded_before_it_is_normalised(device: str, rng: np.random.Generator) -> None:
    for dtype in DTYPES:
        o = operands(rng, (6,), 300, dtype, device)
        y, new_residual = rk.rms_norm(o.x, o.weight, EPS, residual=o.residual)
        assert_same(new_residual, o.x + o.residual)
        assert_same(y, rk.rms_norm(new_residual, o.weight, EPS))


def test_what_is_returned_is_what_was_asked_for(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (2, 3), 40, "bfloat16", device)
    y = rk.rms_norm(o.x, o.weight, EPS)
    assert (y.shape, y.dtype, y.device) == (o.x.shape, o.x.dtype, o.x.device)
    pair = rk.rms_norm(o.x, o.weight, EPS, return_rstd=True)
    assert_same(pair[0], y)
    assert (pair[1].shape, pair[1].dtype) == (o.x.shape[:-1], torch.float32)
    assert len(rk.rms_norm(o.x, o.weight, EPS, residual=o.residual)) == 2
    assert len(rk.rms_norm(o.x, o.weight, EPS, residual=o.residual, return_rstd=True)) == 3
    for wanted in itertools.product((True, False), (True, False)):
        dx, dweight = rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, return_dx=wanted[0], return_dweight=wanted[1])
        assert (dx is not None, dweight is not None) == wanted
    assert rk.rms_norm_backward(o.dy, o.x, None, EPS)[1] is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_nans_infinities_and_overflow_stay_in_their_rows(dtype: str, device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (6,), 100, dtype, device)
    want = rk.rms_norm(o.x, o.weight, EPS)
    x = o.x.clone()
    x[1, 3], x[3, 5], x[4] = float("nan"), float("inf"), 0.0
    got, rstd = rk.rms_norm(x, o.weight, EPS, return_rstd=True)
    assert bool(torch.isnan(got[1]).all())
    assert bool(torch.isnan(got[3, 5]))
    assert int((got[3] == 0).sum()) == 99
    assert bool((got[4] == 0).all())
    assert rstd[3] == 0
    assert bool(torch.isnan(rstd[1]))
    for row in (0, 2, 5):
        assert_same(got[row], want[row])
    if dtype != "float16":  # the squares would overflow in float16
        x[0] = 1e30
        got, rstd = rk.rms_norm(x, o.weight, EPS, return_rstd=True)
        assert rstd[0] == 0
        assert bool((got[0] == 0).all())


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_empty_arrays_are_no_launch_and_empty_sums_are_zero(shape: tuple[int, ...], device: str) -> None:
    for dtype in DTYPES:
        kind = {"dtype": getattr(torch, dtype), "device": device}
        x, weight = torch.ones(shape, **kind), torch.ones(shape[-1], **kind)
        y, new_residual, rstd = rk.rms_norm(x, weight, 0.25, residual=x, return_rstd=True)
        assert (y.shape, new_residual.shape, rstd.shape) == (x.shape, x.shape, x.shape[:-1])
        assert bool((rstd == 2).all()), "the mean of nothing is 0"
        dx, dweight = rk.rms_norm_backward(x, x, weight, 0.25)
        assert dx.shape == x.shape
        assert_same(dweight, torch.zeros_like(weight))
        main_grad = torch.full(shape[-1:], 0.1, device=device)
        assert rk.rms_norm_backward(x, x, weight, 0.25, main_grad=main_grad)[1] is main_grad
        assert bool((main_grad == torch.tensor(0.1)).all())


# ---- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [37, 128, 1000, 4096])
def test_any_batch_and_any_position_give_the_same_bytes(columns: int, device: str, rng: np.random.Generator) -> None:
    """1 to 300 rows, alone, in the middle and permuted; the number of rows selects the kernel on the CPU and on a
    GPU."""
    rows = 300
    o = operands(rng, (rows,), columns, "bfloat16", device)
    whole = results(o)[:4]
    for n in (1, 2, 7, 63, 64, 65, 200):
        first = int(rng.integers(0, rows - n + 1))
        chosen = slice(first, first + n)
        part = Operands(o.x[chosen], o.weight, o.residual[chosen], o.dy[chosen], o.d_new_residual[chosen])
        assert_same(results(part)[:4], tuple(r[chosen] for r in whole), n)
    order = torch.from_numpy(rng.permutation(rows)).to(device)
    part = Operands(o.x[order], o.weight, o.residual[order], o.dy[order], o.d_new_residual[order])
    assert_same(results(part)[:4], tuple(r[order] for r in whole), "permuted")


def test_neighbours_decide_nothing(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (40,), 256, "bfloat16", device)
    want = results(o)[:4]
    others = Operands(o.x.clone(), o.weight, o.residual.clone(), o.dy.clone(), o.d_new_residual.clone())
    others.x[1::2], others.dy[1::2] = float("nan"), float("inf")
    assert_same(tuple(r[::2].contiguous() for r in results(others)[:4]), tuple(r[::2].contiguous() for r in want))


LAYOUTS = ["padded", "sliced", "transposed", "expanded", "misaligned"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [40, 128, 2048])
def test_any_layout_of_rows_gives_the_same_bytes(
    layout: str, columns: int, device: str, rng: np.random.Generator
) -> None:
    for dtype in DTYPES:
        o = operands(rng, (4, 6), columns, dtype, device)
        if layout == "expanded":
            o = Operands(*(t if t.dim() == 1 else t[:1].expand(4, 6, columns).contiguous() for t in o))

        def laid_out(t: Any, layout: str = layout, columns: int = columns) -> Any:
            if layout == "padded":  # heads of a fused projection
                return torch.cat([t, t], -1)[..., :columns]
            if layout == "sliced":  # hidden[:, :-1] of a padded batch
                return torch.cat([t, t[:, :1]], 1)[:, :-1]
            if layout == "transposed":
                return t.transpose(0, 1).contiguous().transpose(0, 1)
            if layout == "expanded":
                return t[:1].expand(4, 6, columns)
            memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
            return memory[1:].view(t.shape).copy_(t)

        moved = Operands(*(laid_out(t) if t.dim() > 1 else t for t in o))
        assert_same(results(moved), results(o), dtype)


def test_leading_dimensions_are_rows(device: str, rng: np.random.Generator) -> None:
    """No leading dimension, or seven."""
    o = operands(rng, (24,), 48, "bfloat16", device)
    want = results(o)
    one = Operands(*(t[3] if t.dim() > 1 else t for t in o))
    assert_same(results(one)[:4], tuple(r[3] for r in want[:4]), "one row")
    shape = (2, 1, 3, 1, 2, 1, 2)
    many = Operands(*(t.view(*shape, 48) if t.dim() > 1 else t for t in o))
    got = results(many)
    assert_same(tuple(g.view(w.shape) for g, w in zip(got, want, strict=True)), want)


def test_every_instruction_set_and_number_of_threads_give_the_same_bytes(
    rng: np.random.Generator, native_settings: None
) -> None:
    for columns in (77, 2500):
        o = operands(rng, (150,), columns, "bfloat16")
        want = results(o, round_before_weight=True)
        for isa in ("baseline", "avx2", "avx512"):
            try:
                native.set_cpu_isa(isa)
            except ValueError:
                continue
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                assert_same(results(o, round_before_weight=True), want, (isa, threads))


@pytest.mark.gpu
def test_cpu_and_gpu_have_the_same_bytes_over_many_rows(rng: np.random.Generator) -> None:
    """Whole blocks of 8192 rows, heads of 128, and enough groups for every kernel of backward."""
    for rows, columns, dtype in ((9000, 512, "bfloat16"), (40_000, 128, "bfloat16"), (8500, 264, "float32")):
        o = operands(rng, (rows,), columns, dtype)
        moved = Operands(*(t.cuda() for t in o))
        for options in OPTIONS[:2]:
            assert_same(results(moved, **options), results(o, **options), (rows, columns, options))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.gpu_memory(24)
def test_more_than_two_to_the_31_elements() -> None:
    """[525,000, 4096] = 2^31 and 3 million more; the last rows must equal those of a small call."""
    rows, columns = 525_000, 4096
    x, weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda"), torch.ones(columns, device="cuda")
    for i in range(0, rows, 4096):
        x[i : i + 4096].normal_()
    last = slice(rows - 100, None)
    y, rstd = rk.rms_norm(x, weight, EPS, return_rstd=True)
    assert_same(y[last], rk.rms_norm(x[last].clone(), weight, EPS))
    dx, dweight = rk.rms_norm_backward(y, x, weight, EPS, rstd=rstd)
    part = rk.rms_norm_backward(y[last].clone(), x[last].clone(), weight, EPS)
    assert_same(dx[last], part[0])
    del dx
    narrow = [t[:, -8:].contiguous() for t in (y, x)]
    assert_same(dweight[-8:], rk.rms_norm_backward(*narrow, weight[-8:], EPS, rstd=rstd)[1])
