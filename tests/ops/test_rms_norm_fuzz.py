"""Fixed random calls of rms_norm: the contract's bytes, the same bytes for any rows, no writes beside an output, and on
a GPU the bytes of the CPU.

RLK_FUZZ_CASES (2,000) sets how many. A failure names its case. This command runs one case:
`PYTHONPATH=tests/support python tests/ops/test_rms_norm_fuzz.py CASE`.
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
from fuzz_layouts import as_laid_out_on, laid_out, log_uniform
from rms_norm_cases import DTYPES, Operands, Results, contract, results

torch = pytest.importorskip("torch", reason="the fuzz makes its layouts with torch")

SEED = 20_242
CASES = int(os.environ.get("RLK_FUZZ_CASES", "2000"))
CHUNK = 100  # cases per test, so that a run shows progress; a failing chunk names its case
# elements per problem: enough to take every path, few enough that the NumPy contract takes milliseconds
MAX_LOG2 = 17
MOST_CONTRACTS = 300  # cases that are compared with NumPy; all cases are compared with themselves in another batch
CANARY = 7.0


@dataclass
class Problem:
    """One set of operands, each with its own layout, and every option."""

    number: int
    dtype: str
    operands: Operands
    eps: float
    options: dict[str, Any]
    features: set[str] = field(default_factory=set)

    def moved(self, device: str) -> Operands:
        """A copy on another device with the same layouts; ``to`` would make it contiguous."""
        return Operands(*(None if t is None else as_laid_out_on(t, device) for t in self.operands))

    @property
    def name(self) -> str:
        shape = list(self.operands.x.shape)
        return f"case {self.number}: {self.dtype} {shape} eps {self.eps} {self.options} {sorted(self.features)}"


def make(number: int) -> Problem:
    rng = np.random.default_rng([SEED, number])
    work = log_uniform(rng, 1, 2**MAX_LOG2)
    columns = log_uniform(rng, 1, min(work, 20_000))
    if rng.random() < 0.6:  # widths that allow vectors
        columns = -(-columns // 8) * 8
    rows = max(min(work // columns, 20_000), 1)
    if rng.random() < 0.02:
        rows, columns = (int(rng.integers(0, 2)) * n for n in (rows, columns))
    dtype = str(rng.choice(DTYPES))
    layout = str(rng.choice(["contiguous", "padded", "sliced", "transposed"]))
    features = {dtype, layout}
    outer = int(rng.integers(1, 5))
    leading = (outer, rows // outer) if layout in ("sliced", "transposed") and rows >= outer else (rows,)
    spread = float(rng.choice([1e-3, 1.0, 30.0], p=[0.2, 0.6, 0.2]))

    def values(*shape: int) -> Any:
        found = rng.standard_normal(shape, dtype=np.float32)
        if rng.random() < 0.2:  # exponents are far apart
            found *= np.exp2(rng.integers(-12, 13, shape)).astype(np.float32)
            features.add("wide")
        found = np.clip(found * np.float32(spread), -60_000, 60_000)  # finite in float16
        return torch.from_numpy(found).to(getattr(torch, dtype))

    x, residual, dy, third = (values(*leading, columns) for _ in range(4))
    if rng.random() < 0.1:
        for t in (x, residual, dy, third):
            if t.numel():
                t.view(-1)[int(rng.integers(t.numel()))] = float(rng.choice([np.nan, np.inf, -np.inf]))
        features.add("not finite")
    if rng.random() < 0.1:
        x[...] *= 2.0**-20  # float16's subnormals
        residual[...] *= 0.0
        features.add("subnormal")
    weight: Any = None
    if rng.random() < 0.9:
        weight = values(columns)
        weight = weight.float() if rng.random() < 0.4 else weight
        features.add(f"weight {weight.dtype}")
    with_residual = rng.random() < 0.5
    features.add("residual" if with_residual else "no residual")
    options = {
        "weight_offset": float(rng.choice([0.0, 1.0, -0.3])) if weight is not None else 0.0,
        "round_before_weight": bool(rng.random() < 0.5),
    }
    return Problem(
        number,
        dtype,
        Operands(
            laid_out(rng, x, layout),
            weight,
            laid_out(rng, residual, layout) if with_residual else None,
            laid_out(rng, dy, layout),
            laid_out(rng, third, layout) if with_residual else None,
        ),
        float(rng.choice([1e-6, 1e-5, 1e-12, 0.5])),
        options,
        features,
    )


def check_cpu(p: Problem) -> None:
    o = p.operands
    got = results(o, p.eps, **p.options)
    if p.number < MOST_CONTRACTS and o.x.numel():
        with np.errstate(all="ignore"):
            want = contract(o, p.eps, **p.options)
        found = differing(tuple(canonical(got)), tuple(canonical(want)))
        assert not found, f"{p.name}, contract: {found}"
    rng = np.random.default_rng([SEED, p.number, 1])
    if o.x.numel():
        rows = o.x.shape[0]
        first = int(rng.integers(0, rows))
        chosen = slice(first, int(rng.integers(first + 1, rows + 1)))
        part = Operands(*(t if t is None or t.dim() == 1 else t[chosen] for t in o))
        found = differing(tuple(results(part, p.eps, **p.options)[:4]), tuple(r[chosen] for r in got[:4]))
        assert not found, f"{p.name}, rows {chosen}: {found}"
    if o.weight is None:
        return
    start = torch.from_numpy(rng.standard_normal(o.x.shape[-1], dtype=np.float32))
    memory = torch.full((len(start) + 6,), CANARY)
    main_grad = memory[2 : len(start) + 2]
    main_grad.copy_(start)
    h = got.new_residual
    rk.rms_norm_backward(o.dy, h, o.weight, p.eps, rstd=got.rstd, main_grad=main_grad, return_dx=False, **p.options)
    if len(o.x.reshape(-1, max(len(start), 1))) <= 8192:  # with one block there is one addition
        found = differing(canonical([main_grad])[0], canonical([start + got.dweight])[0])
        assert not found or o.x.numel() == 0, f"{p.name}, main_grad: {found}"
    main_grad.fill_(CANARY)
    assert bool((memory == CANARY).all()), f"{p.name}: wrote beside main_grad"


def canonical(values: Any) -> list[Any]:
    """Gives every NaN the same bits, since the NaNs of NumPy and torch differ."""
    return [
        None if r is None else torch.where(torch.isnan(r), torch.full_like(r, float("nan")), r).contiguous()
        for r in values
    ]


def check_cuda(p: Problem) -> None:
    want: Results = results(p.operands, p.eps, **p.options)
    found = differing(tuple(results(p.moved("cuda"), p.eps, **p.options)), tuple(want))
    assert not found, f"{p.name}: {found}"


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_norms(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cpu(make(number))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_norms_have_the_bytes_of_the_cpu(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cuda(make(number))


def test_the_set_has_every_feature() -> None:
    """Without this test, a generator that lost a feature would go unnoticed."""
    seen: set[str] = set()
    for number in range(min(CASES, 400)):
        seen |= make(number).features
    layouts = {"contiguous", "padded", "sliced", "transposed"}
    weights = {f"weight torch.{dtype}" for dtype in DTYPES}
    assert seen >= {*DTYPES, *layouts, *weights, "wide", "not finite", "subnormal", "residual", "no residual"}


if __name__ == "__main__":
    check_cpu(make(int(sys.argv[1])))
    if torch.cuda.is_available():
        check_cuda(make(int(sys.argv[1])))
    print("passed")
