"""Fixed random calls of rope: the contract's bytes, the same bytes for any tokens, and on a GPU the bytes of the CPU.

RLK_FUZZ_CASES (2,000) sets how many. A failure names its case. This command runs one case:
`PYTHONPATH=tests/support python tests/ops/test_rope_fuzz.py CASE`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cases import differing
from fuzz_layouts import as_laid_out_on, log_uniform
from rope_cases import DTYPES, Operands, contract, results

torch = pytest.importorskip("torch", reason="the fuzz makes its layouts with torch")

SEED = 20_243
CASES = int(os.environ.get("RLK_FUZZ_CASES", "2000"))
CHUNK = 100  # cases per test, so that a run shows progress; a failing chunk names its case
# elements per problem: enough to take every path, few enough that the NumPy contract takes milliseconds
MAX_LOG2 = 16
LAYOUTS = ("contiguous", "padded", "fused", "heads first", "transposed")


@dataclass
class Problem:
    """One set of operands, each with its own layout, and every option."""

    number: int
    dtype: str
    operands: Operands
    options: dict[str, Any]
    features: set[str] = field(default_factory=set)

    def moved(self, device: str) -> Operands:
        """A copy on another device with the same layouts; ``to`` would make it contiguous."""
        return Operands(*(None if t is None else as_laid_out_on(t, device) for t in self.operands))

    @property
    def name(self) -> str:
        shapes = [None if t is None else list(t.shape) for t in self.operands]
        return f"case {self.number}: {self.dtype} {shapes} {self.options} {sorted(self.features)}"


def laid_out(rng: np.random.Generator, values: Any, order: tuple[int, ...], pad: int, offset: int) -> Any:
    """``values`` as a view into memory of NaN: ``order`` lists the dimensions from the outermost in, and rows are
    ``pad`` further apart."""
    strides, step = [0] * values.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(values.shape[dim], 1)
        step += pad if dim == order[-1] else 0
    filler = float("nan") if values.is_floating_point() else -1
    memory = torch.full((offset + step + int(rng.integers(0, 32)),), filler, dtype=values.dtype)
    return memory.as_strided(values.shape, strides, offset).copy_(values)


def make(number: int) -> Problem:
    rng = np.random.default_rng([SEED, number])
    dtype, layout = str(rng.choice(DTYPES)), str(rng.choice(LAYOUTS))
    features = {dtype, layout}
    vec8s = rng.random() < 0.6  # widths and layouts that allow vectors
    rotary_dim = 16 * log_uniform(rng, 1, 16) if vec8s else 2 * log_uniform(rng, 1, 100)
    rest = 0 if rng.random() < 0.5 else int(rng.integers(1, 12)) * (8 if vec8s else 1)
    head_dim = rotary_dim + rest
    work = max(log_uniform(rng, 1, 2**MAX_LOG2) // head_dim, 1)
    heads = (log_uniform(rng, 1, min(work, 70)), log_uniform(rng, 1, min(work, 9)) if rng.random() < 0.8 else 0)
    tokens = max(work // sum(heads), 1)
    outer = int(rng.integers(1, 4))
    leading: tuple[int, ...] = (outer, max(tokens // outer, 1)) if rng.random() < 0.6 else (tokens,)
    if rng.random() < 0.02:
        leading = (0, *leading[1:])
    spread = float(rng.choice([1e-3, 1.0, 30.0], p=[0.2, 0.6, 0.2]))
    wide = rng.random() < 0.2
    features |= {"wide"} if wide else set()

    def values(*shape: int) -> Any:
        found = rng.standard_normal(shape, dtype=np.float32)
        if wide:  # exponents are far apart
            found *= np.exp2(rng.integers(-12, 13, shape)).astype(np.float32)
        found = np.clip(found * np.float32(spread), -60_000, 60_000)  # finite in float16
        made = torch.from_numpy(found).to(getattr(torch, dtype))
        if rng.random() < 0.1 and made.numel():
            made.view(-1)[int(rng.integers(made.numel()))] = float(rng.choice([np.nan, np.inf, -np.inf]))
            features.add("not finite")
        return made

    n = len(leading)
    head_axis = -2
    pad = int(rng.integers(1, 6)) * (8 if vec8s else 1) if layout == "padded" else 0
    offset = int(rng.integers(0, 3)) * (8 if vec8s else 5)

    def heads_of(count: int) -> Any:
        x = values(*leading, count, head_dim)
        order = tuple(range(n + 2))
        if layout == "heads first":  # their order in memory
            order = (*range(n - 1), n, n - 1, n + 1)
        elif layout == "transposed":
            order = (*reversed(range(n)), n, n + 1)
        if layout == "fused":
            return torch.cat((x, x[..., :1, :]), -2)[..., :count, :]
        return laid_out(rng, x, order, pad, offset)

    q, k = heads_of(heads[0]), heads_of(heads[1]) if heads[1] else None
    sections: Any = None
    if rng.random() < 0.3:
        step = 8 if vec8s and rng.random() < 0.7 else 1
        cuts = np.sort(rng.integers(0, rotary_dim // 2 // step + 1, 2)) * step
        sections = (int(cuts[0]), int(cuts[1] - cuts[0]), int(rotary_dim // 2 - cuts[1]))
        features.add("sections")
    angle_dtype = "float32" if rng.random() < 0.6 else dtype
    width = rotary_dim // 2 if rng.random() < 0.6 else rotary_dim
    features |= {
        f"angles {'like q' if angle_dtype == dtype else 'float32'}",
        "per pair" if width < rotary_dim else "all",
    }
    by_tokens = (*((3,) if sections else ()), *leading)
    positions: Any = None
    if rng.random() < 0.6:
        rows = log_uniform(rng, 1, 3000)
        shape: tuple[int, ...] = (rows, width)
        if rng.random() < 0.2:
            by_tokens = (*by_tokens[:-1], 1)
            features.add("one for all")
        kind = str(rng.choice(["int32", "int64"]))
        positions = torch.from_numpy(rng.integers(0, rows, by_tokens)).to(getattr(torch, kind))
        features.add(kind)
    else:
        shape = (*by_tokens, width)
        features.add("gathered")
    angles = rng.uniform(-4, 4, shape).astype(np.float32)
    if rng.random() < 0.1 and angles.size:
        angles.reshape(-1)[int(rng.integers(angles.size))] = np.nan
        features.add("NaN angle")
    between = int(rng.integers(1, 4)) * (8 if vec8s else 1) if rng.random() < 0.3 else 0
    cos, sin = (
        laid_out(rng, torch.from_numpy(f(angles)).to(getattr(torch, angle_dtype)), tuple(range(len(shape))), between, 0)
        for f in (np.cos, np.sin)
    )
    if rng.random() < 0.3:  # as Hugging Face makes them
        head_axis = n - 1
        q, k = q.transpose(-2, -3), None if k is None else k.transpose(-2, -3)
        features.add("head_axis")
    options = {
        "interleaved": bool(rng.random() < 0.4),
        "partial_dim": rotary_dim if rest or rng.random() < 0.3 else None,
        "intermediate": str(rng.choice(["float32", "input"])),
        "mrope_sections": sections,
        "head_axis": head_axis,
    }
    return Problem(number, dtype, Operands(q, k, cos, sin, positions), options, features)


def canonical(values: Any) -> tuple[Any, ...]:
    """Gives every NaN the same bits, since the NaNs of NumPy and torch differ."""
    return tuple(
        None if r is None else torch.where(torch.isnan(r), torch.full_like(r, float("nan")), r).contiguous()
        for r in values
    )


def present(values: Any) -> tuple[Any, ...]:
    return tuple(v for v in values if v is not None)


def check_cpu(p: Problem) -> None:
    o = p.operands
    for backward in (False, True):
        got = results(o, backward=backward, **p.options)
        with np.errstate(all="ignore"):
            want = contract(o, backward=backward, **p.options)
        found = differing(canonical(present(got)), canonical(present(want)))
        assert not found, f"{p.name}, backward {backward}, contract: {found}"
    if not o.q.shape[0] or "one for all" in p.features or p.options["head_axis"] == 0:
        return
    rng = np.random.default_rng([SEED, p.number, 1])
    count = o.q.shape[0]
    first = int(rng.integers(0, count))
    chosen = slice(first, int(rng.integers(first + 1, count + 1)))
    behind = (slice(None), chosen) if p.options["mrope_sections"] else (chosen,)
    part = o._replace(q=o.q[chosen], k=None if o.k is None else o.k[chosen])
    if o.position_ids is None:
        part = part._replace(cos=o.cos[behind], sin=o.sin[behind])
    else:
        part = part._replace(position_ids=o.position_ids[behind])
    found = differing(
        present(results(part, backward=True, **p.options)), tuple(r[chosen].contiguous() for r in present(got))
    )
    assert not found, f"{p.name}, tokens {chosen}: {found}"


def check_cuda(p: Problem) -> None:
    for backward in (False, True):
        want = results(p.operands, backward=backward, **p.options)
        got = results(p.moved("cuda"), backward=backward, **p.options)
        found = differing(present(got), present(want))
        assert not found, f"{p.name}, backward {backward}: {found}"


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_rotations(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cpu(make(number))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_rotations_have_the_bytes_of_the_cpu(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cuda(make(number))


def test_the_set_has_every_feature() -> None:
    """Without this test, a generator that lost a feature would go unnoticed."""
    seen: set[str] = set()
    for number in range(min(CASES, 400)):
        seen |= make(number).features
    assert seen >= {*DTYPES, *LAYOUTS, "wide", "not finite", "NaN angle", "sections", "gathered", "int32", "int64"}
    assert seen >= {"angles like q", "angles float32", "per pair", "all", "one for all", "head_axis"}


if __name__ == "__main__":
    check_cpu(make(int(sys.argv[1])))
    if torch.cuda.is_available():
        check_cuda(make(int(sys.argv[1])))
    print("passed")
