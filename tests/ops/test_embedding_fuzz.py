"""Fixed random calls of embedding: the contract's bytes, the same bytes for any shard, and on a GPU the bytes of the
CPU.

RLK_FUZZ_CASES (2,000) sets how many. A failure names its case. This command runs one case:
`PYTHONPATH=tests/support python tests/ops/test_embedding_fuzz.py CASE`.
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
from embedding_cases import DTYPES, Operands, contract, wide, zipf
from fuzz_layouts import log_uniform

torch = pytest.importorskip("torch", reason="the fuzz makes its layouts with torch")

SEED = 20_244
CASES = int(os.environ.get("RLK_FUZZ_CASES", "2000"))
CHUNK = 100  # cases per test, so that a run shows progress; a failing chunk names its case
MAX_LOG2 = 16  # elements of dy: enough to take every path, few enough that the NumPy contract takes milliseconds


@dataclass
class Problem:
    """One set of operands, each with its own layout, and every option."""

    number: int
    dtype: str
    operands: Operands
    main_grad: Any  # or None
    options: dict[str, Any]
    dweight_dtype: str
    features: set[str] = field(default_factory=set)

    def moved(self, device: str) -> Problem:
        """A copy on another device with the same layouts; ``to`` would make it contiguous."""
        o = Operands(*(copied(t, device) for t in self.operands))
        main_grad = None if self.main_grad is None else copied(self.main_grad, device)
        return Problem(self.number, self.dtype, o, main_grad, self.options, self.dweight_dtype, self.features)

    def results(self) -> tuple[Any, Any]:
        o = self.operands
        y = rk.embedding(o.ids, o.weight, **self.options)
        if self.main_grad is None:
            how = {"dweight_dtype": self.dweight_dtype}
        else:
            how = {"main_grad": copied(self.main_grad, str(self.main_grad.device))}
        return y, rk.embedding_backward(o.dy, o.ids, len(o.weight), **how, **self.options)

    @property
    def name(self) -> str:
        shapes = [list(t.shape) for t in self.operands]
        return f"case {self.number}: {self.dtype} {shapes} {self.options} {sorted(self.features)}"


def copied(t: Any, device: str) -> Any:
    flat = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return flat.to(device, copy=True).as_strided(t.shape, t.stride(), t.storage_offset())


def laid_out(rng: np.random.Generator, values: Any, pad: int, offset: int, transposed: bool) -> Any:
    """``values`` as a view into other memory: rows lie ``pad`` elements further apart, and the two leading dimensions
    are exchanged."""
    order = list(range(values.dim()))
    if transposed and values.dim() > 2:
        order[:2] = [1, 0]
    strides, step = [0] * values.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(values.shape[dim], 1)
        step += pad if dim == order[-1] else 0
    filler = float("nan") if values.is_floating_point() else 2**30
    memory = torch.full((offset + step + int(rng.integers(0, 32)),), filler, dtype=values.dtype)
    return memory.as_strided(values.shape, strides, offset).copy_(values)


def make(number: int) -> Problem:
    rng = np.random.default_rng([SEED, number])
    dtype = str(rng.choice(DTYPES))
    features = {dtype}
    vec8s = rng.random() < 0.6  # widths and layouts that allow vectors
    columns = 8 * log_uniform(rng, 1, 160) if vec8s else log_uniform(rng, 1, 1100)
    if rng.random() < 0.3:
        columns = 8 if vec8s else log_uniform(rng, 1, 7)
    count = max(log_uniform(rng, 1, 2**MAX_LOG2) // columns, 1)
    outer = int(rng.integers(1, 4))
    tokens: tuple[int, ...] = (outer, max(count // outer, 1)) if rng.random() < 0.5 else (count,)
    if rng.random() < 0.02:
        tokens = (0, *tokens[1:])
    features |= {"blocks"} if np.prod(tokens) > 8192 else set()
    rows = min(log_uniform(rng, 1, 3000), 2**18 // columns + 1)
    start = int(rng.integers(0, 1000)) if rng.random() < 0.3 else 0
    size = start + rows if rng.random() < 0.5 else start + int(rng.integers(0, 2 * rows + 1))
    features |= {"shard"} if start else set()
    features |= {"padded table"} if size < start + rows else set()
    kind = str(rng.choice(["zipf", "uniform", "one", "each"]))
    features.add(kind)
    if kind == "zipf":
        ids = start + zipf(rng, tokens, rows)
    elif kind == "uniform":
        ids = rng.integers(0, max(size, 1), tokens)
    elif kind == "one":
        ids = np.full(tokens, start + rows // 2)
    else:
        ids = start + np.arange(np.prod(tokens)).reshape(tokens) % rows
    id_dtype = str(rng.choice(["int32", "int64"]))
    if rng.random() < 0.3 and ids.size:
        limits = np.iinfo(id_dtype)
        bad = rng.choice([-1, size, limits.min, limits.max], tokens)
        ids = np.where(rng.random(tokens) < 0.2, bad, ids)
        features.add("bad ids")
    options: dict[str, Any] = {"vocab_start": start, "vocab_size": size}
    if rng.random() < 0.3 and size > start:
        options["padding_idx"] = start + int(rng.integers(0, min(3, size - start)))
        features.add("padding_idx")
    spread = float(rng.choice([1e-3, 1.0, 30.0], p=[0.2, 0.6, 0.2]))
    is_wide = rng.random() < 0.2
    features |= {"wide", id_dtype} if is_wide else {id_dtype}

    def values(kind: str, *shape: int) -> Any:
        found = rng.standard_normal(shape, dtype=np.float32)
        if is_wide:  # exponents are far apart
            found *= np.exp2(rng.integers(-12, 13, shape)).astype(np.float32)
        made = torch.from_numpy(np.clip(found * np.float32(spread), -60_000, 60_000)).to(getattr(torch, kind))
        if rng.random() < 0.1 and made.numel():
            made.view(-1)[int(rng.integers(made.numel()))] = float(rng.choice([np.nan, np.inf, -np.inf, -0.0]))
            features.add("not finite")
        return made

    def placed(t: Any) -> Any:
        pad = int(rng.integers(1, 6)) * (8 if vec8s else 1) if rng.random() < 0.3 else 0
        offset = int(rng.integers(0, 3)) * (8 if vec8s else 5) if rng.random() < 0.5 else 0
        transposed = rng.random() < 0.3
        features.update({"padded"} if pad else set(), {"transposed"} if transposed and t.dim() > 2 else set())
        return laid_out(rng, t, pad, offset, transposed)

    ids = torch.from_numpy(np.asarray(ids)).to(getattr(torch, id_dtype))
    if ids.dim() == 2 and rng.random() < 0.3:
        ids = ids.t().contiguous().t()
    o = Operands(ids, placed(values(dtype, rows, columns)), placed(values(dtype, *tokens, columns)))
    main_grad = None
    if rng.random() < 0.3:
        main_grad = placed(values("float32", rows, columns))
        features.add("main_grad")
    dweight_dtype = "float32" if rng.random() < 0.5 else dtype
    return Problem(number, dtype, o, main_grad, options, dweight_dtype, features)


def canonical(values: Any) -> tuple[Any, ...]:
    """Gives every NaN the same bits, since the NaNs of NumPy and torch differ."""
    return tuple(torch.where(torch.isnan(r), torch.full_like(r, float("nan")), r).contiguous() for r in values)


def check_cpu(p: Problem) -> None:
    o = p.operands
    got = p.results()
    before = None if p.main_grad is None else wide(p.main_grad)
    with np.errstate(all="ignore"):
        y, dweight = contract(o, before, **p.options)
    want = (torch.from_numpy(y).to(o.weight.dtype), torch.from_numpy(dweight).to(got[1].dtype))
    found = differing(canonical(got), canonical(want))
    assert not found, f"{p.name}, contract: {found}"
    rng = np.random.default_rng([SEED, p.number, 1])
    first = int(rng.integers(0, len(o.weight)))
    last = int(rng.integers(first + 1, len(o.weight) + 1))
    options = {**p.options, "vocab_start": p.options["vocab_start"] + first}
    if options["vocab_start"] > options["vocab_size"]:
        return
    part = Problem(p.number, p.dtype, o._replace(weight=o.weight[first:last]), None, options, p.dweight_dtype)
    if p.main_grad is None:
        found = differing(part.results()[1], got[1][first:last].clone())
        assert not found, f"{p.name}, rows {first} to {last}: {found}"


def check_cuda(p: Problem) -> None:
    found = differing(p.moved("cuda").results(), p.results())
    assert not found, f"{p.name}: {found}"


@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_tables(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cpu(make(number))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", range(-(-CASES // CHUNK)))
def test_random_tables_have_the_bytes_of_the_cpu(chunk: int) -> None:
    for number in range(chunk * CHUNK, min((chunk + 1) * CHUNK, CASES)):
        check_cuda(make(number))


def test_the_set_has_every_feature() -> None:
    """Without this test, a generator that lost a feature would go unnoticed."""
    seen: set[str] = set()
    for number in range(min(CASES, 400)):
        seen |= make(number).features
    assert seen >= {*DTYPES, "zipf", "uniform", "one", "each", "int32", "int64", "blocks", "bad ids", "shard"}
    assert seen >= {"padded table", "padding_idx", "main_grad", "wide", "not finite", "padded", "transposed"}


if __name__ == "__main__":
    check_cpu(make(int(sys.argv[1])))
    if torch.cuda.is_available():
        check_cuda(make(int(sys.argv[1])))
    print("passed")
