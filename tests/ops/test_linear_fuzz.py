"""Fixed random products: bounds against float64, the same bytes for any rows, and on a GPU the bytes of the CPU with
that GPU's arithmetic.

RLK_FUZZ_CASES (2,000) sets how many. A failure names its case. This command runs one case:
`PYTHONPATH=tests/support python tests/ops/test_linear_fuzz.py CASE`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from fuzz_layouts import as_laid_out_on, log_uniform
from linear_cases import HALF, NAMES, Operands, failures

torch = pytest.importorskip("torch", reason="the fuzz makes its layouts with torch")

SEED = 20_241
CASES = int(os.environ.get("RLK_FUZZ_CASES", "2000"))
CHUNK = 100  # cases per test, so that a run shows progress; a failing chunk names its case
# multiply-adds per problem: enough to take every path, few enough that the model of a unit takes milliseconds
MAX_LOG2 = 20
CANARY = 7.0


@dataclass
class Problem:
    """One set of operands, each with its own layout, and every option."""

    number: int
    dtype: str
    operands: Operands
    segments: int
    out: str
    engine: str
    main_grad: Any  # float32 [out_features, in_features], a view into memory with canaries
    features: set[str] = field(default_factory=set)

    def moved(self, device: str) -> Operands:
        """A copy on another device with the same layouts; ``to`` would make it contiguous."""
        return Operands(*(None if t is None else as_laid_out_on(t, device) for t in self.operands))


def laid_out(rng: np.random.Generator, values: Any, layout: str) -> Any:
    """``values`` [rows..., columns] as a view into memory that is NaN elsewhere."""
    *leading, columns = values.shape
    step = columns + (int(rng.integers(1, 40)) if layout != "contiguous" else 0)
    offset = int(rng.integers(0, 16)) if rng.random() < 0.5 else 0
    if len(leading) == 2:
        inner = leading[1]
        strides = {"transposed": (step, step * leading[0], 1), "sliced": (step * (inner + 1), step, 1)}.get(
            layout, (step * inner, step, 1)
        )
    else:
        strides = (step, 1)
    length = offset + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 1 if values.numel() else 1
    memory = torch.full((max(length, 1) + int(rng.integers(0, 32)),), float("nan"), dtype=values.dtype)
    return memory.as_strided(values.shape, strides, offset).copy_(values)


def make(number: int) -> Problem:
    rng = np.random.default_rng([SEED, number])
    work = log_uniform(rng, 1, 2**MAX_LOG2)
    segments = int(rng.choice([1, 1, 1, 2, 4, 8]))
    ins = log_uniform(rng, 1, min(work, 2**14))
    if segments > 1:
        ins = -(-ins // (16 * segments)) * 16 * segments
    outs = log_uniform(rng, 1, max(work // ins, 1))
    rows = max(min(work // (ins * outs), 20_000), 1)
    if rng.random() < 0.02:
        rows, ins, outs = (int(rng.integers(0, 2)) * n for n in (rows, ins, outs))
    dtype = str(rng.choice([*HALF, *HALF, "float32"]))
    layout = str(rng.choice(["contiguous", "padded", "sliced", "transposed"]))
    features = {dtype, layout}
    outer = int(rng.integers(1, 5))
    leading = (outer, rows // outer) if layout in ("sliced", "transposed") and rows >= outer else (rows,)
    spread = float(rng.choice([1e-3, 1.0, 30.0], p=[0.2, 0.6, 0.2]))

    def values(*shape: int) -> Any:
        found = rng.standard_normal(shape, dtype=np.float32)
        if rng.random() < 0.2:  # exponents are far apart, so alignment cuts and sums cancel
            found *= np.exp2(rng.integers(-12, 13, shape)).astype(np.float32)
            features.add("wide")
        found = np.clip(found * np.float32(spread), -60_000, 60_000)  # finite in float16
        return torch.from_numpy(found).to(getattr(torch, dtype))

    x, weight, dy = values(*leading, ins), values(outs, ins), values(*leading, outs)
    if rng.random() < 0.1:
        for t in (x, weight, dy):
            if t.numel():
                t.view(-1)[int(rng.integers(t.numel()))] = float(rng.choice([np.nan, np.inf, -np.inf]))
        features.add("not finite")
    if rng.random() < 0.1:
        x[...] *= 2.0**-20  # float16's subnormals
        features.add("subnormal")
    bias = None
    if rng.random() < 0.5:
        bias = values(outs)
        bias = bias.float() if rng.random() < 0.5 else bias
        features.add(f"bias {bias.dtype}")
    weight_layout = "padded" if rng.random() < 0.3 else "contiguous"
    memory = torch.full((outs + 2, ins + 5), CANARY)
    main_grad = memory[1 : outs + 1, 2 : ins + 2]
    main_grad.copy_(torch.from_numpy(rng.standard_normal((outs, ins), dtype=np.float32)))
    return Problem(
        number,
        dtype,
        Operands(laid_out(rng, x, layout), laid_out(rng, weight, weight_layout), bias, laid_out(rng, dy, layout)),
        segments,
        "float32" if dtype == "float32" else str(rng.choice(["float32", *HALF])),
        str(rng.choice(["auto", "native"])),
        main_grad,
        features,
    )


def compute(p: Problem, o: Operands, engine: str) -> tuple[Any, ...]:
    """y, dx, dweight, dbias, y in the wanted dtype, shares of two ranks, main_grad."""
    options = {"engine": engine}
    y = rk.linear(o.x, o.weight, o.bias, k_segments=p.segments, out_dtype="float32", **options)
    main_grad = as_laid_out_on(p.main_grad.clone(), str(o.x.device.type))
    ranks = min(p.segments, 2)
    width = o.x.shape[-1] // ranks
    parts = [
        rk.linear_partial(
            o.x[..., i * width : (i + 1) * width],
            o.weight[:, i * width : (i + 1) * width],
            k_segments=p.segments,
            first_segment=i * p.segments // ranks,
            num_segments=p.segments // ranks,
            **options,
        )
        for i in range(ranks)
    ]
    return (
        y,
        rk.linear_input_grad(o.dy, o.weight, **options),
        rk.linear_weight_grad(o.dy, o.x, out_dtype="float32", **options),
        rk.linear_bias_grad(o.dy, out_dtype="float32"),
        rk.linear(o.x, o.weight, o.bias, k_segments=p.segments, out_dtype=p.out, **options),
        rk.tree_sum(parts, bias=o.bias),
        rk.linear_weight_grad(o.dy, o.x, main_grad=main_grad, **options),
    )


def canonical(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives every NaN the same bits, since a GPU's NaNs come from its matrix unit."""
    return tuple(torch.where(torch.isnan(r), torch.full_like(r, float("nan")), r) for r in results)


def check_cpu(p: Problem) -> None:
    o = p.operands
    name = f"case {p.number}: {p.dtype} {list(o.x.shape)} x {list(o.weight.shape)} {sorted(p.features)}"
    rng = np.random.default_rng([SEED, p.number, 1])
    got = compute(p, o, p.engine)
    if "not finite" not in p.features:
        full = o._replace(bias=torch.zeros(len(o.weight), dtype=o.weight.dtype) if o.bias is None else o.bias)
        wrong = failures(full, got[: len(NAMES)], "ieee")
        assert not wrong, f"{name}: {wrong}"
    found = differing(canonical(got[4:6]), canonical((got[0].to(got[4].dtype), got[0])))
    assert not found, f"{name}, rounding and ranks: {found}"
    if o.x.numel() and o.dy.numel():
        rows = o.x.shape[0]
        first = int(rng.integers(0, rows))
        chosen = slice(first, int(rng.integers(first + 1, rows + 1)))
        part = compute(p, o._replace(x=o.x[chosen], dy=o.dy[chosen]), p.engine)
        found = differing((part[0], part[1], part[4]), tuple(r[chosen] for r in (got[0], got[1], got[4])))
        assert not found, f"{name}, rows {chosen}: {found}"
    before = p.main_grad.clone()
    memory = p.main_grad._base
    rk.linear_weight_grad(o.dy, o.x, main_grad=p.main_grad)
    found = differing(canonical((p.main_grad,)), canonical((got[6],)))
    assert not found, f"{name}, main_grad in place: {found}"
    p.main_grad.copy_(torch.full_like(before, CANARY))
    assert bool((memory == CANARY).all()), f"{name}: wrote beside main_grad"


def check_cuda(p: Problem) -> None:
    name = f"case {p.number}: {p.dtype} {list(p.operands.x.shape)} x {list(p.operands.weight.shape)}"
    with rk.arithmetic("sm_90"):
        want = canonical(compute(p, p.operands, "auto"))
    for engine in ("auto", "native"):
        found = differing(canonical(compute(p, p.moved("cuda"), engine)), want)
        assert not found, f"{name}, engine {engine}, {sorted(p.features)}, {p.segments} segments: {found}"


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_products(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cpu(make(number))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_products_have_the_bytes_of_the_cpu_as_an_sm_90(chunk: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the CPU's model is of compute capability 9.0")
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        problem = make(number)
        if problem.dtype != "float32":
            check_cuda(problem)


def test_the_set_has_every_feature() -> None:
    """Without this test, a generator that lost a feature would go unnoticed."""
    seen: set[str] = set()
    segments: set[int] = set()
    for number in range(min(CASES, 400)):
        problem = make(number)
        seen |= problem.features
        segments.add(problem.segments)
    assert seen >= {*HALF, "float32", "contiguous", "padded", "sliced", "transposed", "wide", "not finite", "subnormal"}
    assert segments == {1, 2, 4, 8}


if __name__ == "__main__":
    check_cpu(make(int(sys.argv[1])))
    if torch.cuda.is_available():
        check_cuda(make(int(sys.argv[1])))
    print("passed")
