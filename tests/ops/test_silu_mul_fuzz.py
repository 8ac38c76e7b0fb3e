"""Random calls of silu_mul and gelu_mul, the same calls in every run.

The results must have the contract's bytes, the same bytes for any subset of rows, and on a GPU the bytes of the CPU.
The calls must read nothing beside an array. RLK_FUZZ_CASES sets the number of cases (default 2,000). A failure names
its case, and this command runs that case alone: `PYTHONPATH=tests/support python tests/ops/test_silu_mul_fuzz.py CASE`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cases import differing
from fuzz_layouts import as_laid_out_on, laid_out, log_uniform
from silu_mul_cases import ACTIVATIONS, DTYPES, Operands, Results, canonical, contract, packed_results, results

torch = pytest.importorskip("torch", reason="the fuzz makes its layouts with torch")

SEED = 20_243
CASES = int(os.environ.get("RLK_FUZZ_CASES", "2000"))
CHUNK = 100  # cases per test: a failing chunk names its case, and a run shows progress
MAX_LOG2 = 16  # log2 of the elements: enough for every path, and NumPy's contract takes milliseconds
MOST_CONTRACTS = 500  # cases compared with NumPy; every case is compared with itself in another batch


@dataclass
class Problem:
    """One set of operands, each in its own layout, and every option."""

    number: int
    dtype: str
    operands: Operands  # where packed, gate and up are views of gate_up
    gate_up: Any
    activation: str
    rounds: bool
    features: set[str] = field(default_factory=set)

    def on(self, device: str) -> Problem:
        """The problem on another device in the same layouts; plain ``to`` would make the arrays contiguous."""
        if self.gate_up is None:
            moved, gate_up = Operands(*(as_laid_out_on(t, device) for t in self.operands)), None
        else:
            gate_up = as_laid_out_on(self.gate_up, device)
            moved = Operands(*gate_up.chunk(2, -1), as_laid_out_on(self.operands.dy, device))
        return Problem(self.number, self.dtype, moved, gate_up, self.activation, self.rounds, self.features)

    def results(self) -> Results:
        if self.gate_up is None:
            return results(self.operands, self.activation, round_before_mul=self.rounds)
        return packed_results(self.gate_up, self.operands.dy, self.activation, round_before_mul=self.rounds)

    @property
    def name(self) -> str:
        shape = list(self.operands.gate.shape)
        return f"case {self.number}: {self.dtype} {shape} {self.activation} {self.rounds} {sorted(self.features)}"


def make(number: int) -> Problem:
    rng = np.random.default_rng([SEED, number])
    work = log_uniform(rng, 1, 2**MAX_LOG2)
    columns = log_uniform(rng, 1, min(work, 20_000))
    if rng.random() < 0.6:  # widths of whole vec8s
        columns = -(-columns // 8) * 8
    rows = max(min(work // columns, 20_000), 1)
    if rng.random() < 0.02:
        rows, columns = (int(rng.integers(0, 2)) * n for n in (rows, columns))
    dtype, layout = str(rng.choice(DTYPES)), str(rng.choice(["contiguous", "padded", "sliced", "transposed"]))
    activation = str(rng.choice(ACTIVATIONS))
    features = {dtype, layout, activation}
    outer = int(rng.integers(1, 5))
    leading = (outer, rows // outer) if layout in ("sliced", "transposed") and rows >= outer else (rows,)
    spread = float(rng.choice([1e-3, 3.0, 100.0], p=[0.2, 0.6, 0.2]))

    def values(*shape: int) -> Any:
        found = rng.standard_normal(shape, dtype=np.float32)
        if rng.random() < 0.2:  # exponents far apart
            found *= np.exp2(rng.integers(-12, 13, shape)).astype(np.float32)
            features.add("wide")
        found = np.clip(found * np.float32(spread), -60_000, 60_000)  # finite in float16
        return torch.from_numpy(found).to(getattr(torch, dtype))

    gate, up, dy = (values(*leading, columns) for _ in range(3))
    if rng.random() < 0.1:
        for t in (gate, up, dy):
            if t.numel():
                t.view(-1)[int(rng.integers(t.numel()))] = float(rng.choice([np.nan, np.inf, -np.inf]))
        features.add("not finite")
    if rng.random() < 0.1:
        gate[...] *= 2.0**-20  # float16's subnormals
        features.add("subnormal")
    gate_up = None
    if rng.random() < 0.5:
        gate_up = laid_out(rng, torch.cat((gate, up), -1), layout)
        gate, up = gate_up.chunk(2, -1) if columns else (gate, up)
        features.add("packed")
    else:
        gate, up = laid_out(rng, gate, layout), laid_out(rng, up, str(rng.choice(["contiguous", layout])))
        features.add("apart")
    o = Operands(gate, up, laid_out(rng, dy, layout))
    return Problem(number, dtype, o, gate_up, activation, bool(rng.random() < 0.5), features)


def check_cpu(p: Problem) -> None:
    o = p.operands
    got = p.results()
    if p.number < MOST_CONTRACTS and o.gate.numel():
        found = differing(canonical(got), canonical(contract(o, p.activation, p.rounds)))
        assert not found, f"{p.name}, contract: {found}"
    if not o.gate.numel():
        return
    rng = np.random.default_rng([SEED, p.number, 1])
    rows = o.gate.shape[0]
    first = int(rng.integers(0, rows))
    chosen = slice(first, int(rng.integers(first + 1, rows + 1)))
    part = results(Operands(*(t[chosen] for t in o)), p.activation, round_before_mul=p.rounds)  # also of a packed case
    found = differing(tuple(part), tuple(r[chosen].contiguous() for r in got))
    assert not found, f"{p.name}, rows {chosen}: {found}"


def check_cuda(p: Problem) -> None:
    found = differing(tuple(p.on("cuda").results()), tuple(p.results()))
    assert not found, f"{p.name}: {found}"


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_gates(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cpu(make(number))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_gates_have_the_bytes_of_the_cpu(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cuda(make(number))


def test_the_set_has_every_feature() -> None:
    """A generator that lost a feature would otherwise go unnoticed."""
    seen: set[str] = set()
    for number in range(min(CASES, 400)):
        seen |= make(number).features
    layouts = {"contiguous", "padded", "sliced", "transposed"}
    assert seen >= {*DTYPES, *layouts, *ACTIVATIONS, "wide", "not finite", "subnormal", "packed", "apart"}


if __name__ == "__main__":
    check_cpu(make(int(sys.argv[1])))
    if torch.cuda.is_available():
        check_cuda(make(int(sys.argv[1])))
    print("passed")
