"""Fixed random problems: bounds against float64, and the same bytes from every path that computes them.

RLK_FUZZ_CASES (2,000) sets how many; RLK_FUZZ_FULL=1 adds 200 at full vocabularies. A failure names its case.
`PYTHONPATH=tests/support python tests/ops/test_fuzz.py CASE` runs one case.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import ALL, DTYPES, Status, Truth, differing, mode, numpy_of, part_cut, raw, truth
from fuzz_layouts import log_uniform
from rl_kernel_native._native import module as native

torch = pytest.importorskip("torch", reason="the fuzz makes its layouts with torch")

SEED = 20_240
CASES = int(os.environ.get("RLK_FUZZ_CASES", "2000"))
CHUNK = 100  # cases per test, so that a run shows progress; a failing chunk names its case
FULL = 200 if os.environ.get("RLK_FUZZ_FULL") else 0
# elements per problem: enough to take every path, few enough that the float64 truth takes milliseconds
MAX_LOG2 = 20
# Qwen2.5, Llama 2, Llama 3, Qwen3, Qwen2 VL, Mistral small, Llama 4, Gemma 3, and widths that are no multiple of 64.
FULL_VOCABULARIES = (151_665, 32_000, 128_256, 151_936, 152_064, 131_072, 202_048, 262_144, 129_920, 100_277, 50_257)
CANARY = 0x5A


@dataclass
class Problem:
    """One call: its memory, the view of that memory which is the argument, and every option."""

    number: int
    dtype: str
    layout: str
    memory: Any  # 1-D torch tensor, with garbage between the logits
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    target: Any
    options: dict[str, Any]
    exp: str
    gradients: dict[str, Any]
    features: set[str] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return int(np.prod(self.shape[:-1]))

    def logits(self, device: str = "cpu") -> Any:
        return self.memory.to(device).as_strided(self.shape, self.strides, self.offset)

    def moved(self, device: str) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
        def to(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(to(y) for y in x)
            return x.to(device) if hasattr(x, "to") else x

        moved = {k: to(v) for k, v in self.options.items()}
        return self.logits(device), to(self.target), moved, {k: to(v) for k, v in self.gradients.items()}


def make(number: int, full: bool = False) -> Problem:
    rng = np.random.default_rng([SEED, int(full), number])
    if full:
        vocab, rows = int(rng.choice(FULL_VOCABULARIES)), int(rng.integers(1, 9))
    else:
        elements = log_uniform(rng, 1, 2**MAX_LOG2)
        vocab = min(log_uniform(rng, 1, elements), elements)
        rows = min(max(elements // vocab, 1), 4096)  # more than 4,096 rows show nothing new
    dtype = str(rng.choice(DTYPES))
    layout = str(
        rng.choice(["contiguous", "padded", "sliced", "transposed", "expanded"], p=[0.3, 0.3, 0.15, 0.15, 0.1])
    )
    features = {dtype, layout}
    outer = int(rng.integers(1, 5))
    if layout in ("sliced", "transposed"):
        rows = max(rows // outer, 1) * outer
    leading = (outer, rows // outer) if layout in ("sliced", "transposed") else (rows,)
    shape = (*leading, vocab)
    step = vocab + (int(rng.integers(1, 40)) if layout == "padded" else 0)
    offset = int(rng.integers(0, 16)) if rng.random() < 0.5 else 0
    strides = {
        "sliced": (step * (leading[-1] + 1), step, 1),
        "transposed": (step, step * outer, 1),
        "expanded": (0, 1),
    }.get(layout, (step, 1))
    length = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    memory = torch.full((length + int(rng.integers(0, 32)),), float("nan"), dtype=getattr(torch, dtype))
    view = memory.as_strided(shape, strides, offset)

    spread = float(rng.choice([0.01, 1.0, 4.0, 30.0], p=[0.1, 0.3, 0.5, 0.1]))
    center = float(rng.choice([0.0, -5.0, 20.0, -300.0], p=[0.6, 0.2, 0.15, 0.05]))
    content = (1, vocab) if layout == "expanded" else (rows, vocab)
    values = rng.standard_normal(content, dtype=np.float32) * np.float32(spread) + np.float32(center)
    if rng.random() < 0.35:
        features |= sprinkle(rng, values)
    source = torch.from_numpy(values).to(memory.dtype)
    (view[:1] if layout == "expanded" else view).copy_(source if layout == "expanded" else source.reshape(shape))

    options: dict[str, Any] = {}
    valid = vocab
    if rng.random() < 0.25:
        valid = options["valid_vocab"] = int(rng.integers(1, vocab + 1))
        features.add("valid_vocab")
    if rng.random() < 0.2:
        options["canonical_vocab"] = vocab + int(rng.integers(0, 200))
        features.add("canonical_vocab")
    if rng.random() < 0.2:
        options["logit_scale"] = float(rng.choice([0.125, 0.9, 2.0, 13.7]))
    if rng.random() < 0.2:
        options["softcap"] = float(rng.choice([5.0, 30.0, 50.0]))
        features.add("softcap")
    ignore_index = -100
    if rng.random() < 0.15:
        ignore_index = options["ignore_index"] = int(rng.integers(0, vocab)) if rng.random() < 0.7 else -1
    chosen = rng.random()
    if chosen < 0.3:
        options["temperature"] = float(rng.choice([0.1, 0.6, 0.7, 1.5, 4.0]))
    elif chosen < 0.6:
        t = rng.uniform(0.05, 3.0, rows).astype(np.float32)
        if rng.random() < 0.2:
            t[rng.integers(0, rows)] = rng.choice([0.0, -1.0, np.nan, np.inf, 1e-45])
            features.add("bad temperature")
        options["temperature"] = torch.from_numpy(t).reshape(leading)
    ids = rng.integers(0, valid, rows)
    if rng.random() < 0.4:
        ids[rng.random(rows) < rng.choice([0.1, 0.9])] = ignore_index
        features.add("ignored")
    if rng.random() < 0.2:
        wrong = rng.choice([-1, -101, valid, vocab, vocab + 7, 2**31 - 1, -(2**31)])
        ids[rng.integers(0, rows)] = wrong
        features.add("bad target")
    target = torch.from_numpy(ids).to(torch.int32 if rng.random() < 0.5 else torch.int64).reshape(leading)
    if rng.random() < 0.2:  # uses every second element of memory
        target = torch.stack([target, torch.full_like(target, 7)], -1)[..., 0]
    if rng.random() < 0.2:
        options["kept"] = kept_sets(rng, rows, valid, features)
    gradients = {
        name: torch.from_numpy(rng.standard_normal(rows).astype(np.float32)).reshape(leading)
        for name in ("dlogprob", "dlse", "dentropy")
        if rng.random() < 0.6
    } or {"dlogprob": torch.ones(()).expand(leading)}
    return Problem(
        number, dtype, layout, memory, shape, strides, offset, target, options,
        str(rng.choice(["portable", "hardware"])), gradients, features,
    )  # fmt: skip


def sprinkle(rng: np.random.Generator, values: np.ndarray) -> set[str]:
    """Puts special values into a few rows. Values near 2^21, where a row's failure is decided, are left out."""
    rows, vocab = values.shape
    features = set()
    for _ in range(int(rng.integers(1, 4))):
        row, kind = int(rng.integers(0, rows)), str(rng.choice(SPECIAL))
        some = rng.random(vocab) < rng.choice([1 / vocab, 0.3])
        some[rng.integers(0, vocab)] = True
        if kind == "all -inf":
            values[row] = -np.inf
        elif kind == "equal":
            values[row] = values[row, 0]
        elif kind == "confident":
            values[row] -= 25
            values[row, rng.integers(0, vocab)] = 0
        else:
            values[row, some] = {"-inf": -np.inf, "+inf": np.inf, "nan": np.nan, "huge": 3e38, "-huge": -3e38,
                                 "zero": -0.0, "tiny": 1e-42}[kind]  # fmt: skip
        features.add(kind)
    return features


SPECIAL = ("all -inf", "equal", "confident", "-inf", "+inf", "nan", "huge", "-huge", "zero", "tiny")


def kept_sets(rng: np.random.Generator, rows: int, valid: int, features: set[str]) -> tuple[Any, Any]:
    counts = rng.integers(0, min(valid, 64) + 1, rows)
    counts[rng.random(rows) < 0.2] = 0
    ids = rng.integers(0, valid, int(counts.sum())).astype(np.int32)  # duplicates and any order are valid
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    features.add("kept")
    if rng.random() < 0.15 and len(ids):
        ids[rng.integers(0, len(ids))] = rng.choice([-1, valid, 2**31 - 1])
        features.add("bad kept")
    elif rng.random() < 0.15:
        offsets[rng.integers(0, rows + 1)] = rng.choice([-1, len(ids) + 1, 2**62])
        features.add("bad kept")
    return torch.from_numpy(ids), torch.from_numpy(offsets)


def forward(problem: Problem, device: str, exp: str, out: Any = None) -> rk.LogprobResult:
    logits, target, options, _ = problem.moved(device)
    with mode(device, exp):
        return rk.logprob(logits, target, **options, **ALL, exp=exp, out=out)


def backward(problem: Problem, device: str, exp: str, result: rk.LogprobResult, in_place: Any = None) -> Any:
    logits, target, options, gradients = problem.moved(device)
    logits = logits if in_place is None else in_place
    entropy = result.entropy if "dentropy" in gradients else None
    with mode(device, exp):
        return rk.logprob_backward(
            logits, target, result.lse, entropy=entropy, **gradients, **options, exp=exp, out=in_place
        )


def shard_counts(problem: Problem) -> list[int]:
    """The numbers of ranks that can share the problem's vocabulary without an empty part. The last rank may leave out
    the padding."""
    vocab = problem.shape[-1]
    whole = problem.options.get("canonical_vocab", vocab)
    if whole <= 56:  # with fewer than eight vec8s some cuts coincide
        return [1]
    edges = {n: [part_cut(whole, 8 * i // n) for i in range(n + 1)] for n in (1, 2, 4, 8)}
    return [n for n, e in edges.items() if all(b > a for a, b in itertools.pairwise(e)) and e[-2] < vocab]


def partials(problem: Problem, device: str, exp: str, shards: int) -> Any:
    logits, target, options, _ = problem.moved(device)
    vocab = problem.shape[-1]
    whole = options.get("canonical_vocab", vocab)
    edges = [min(part_cut(whole, 8 * i // shards), vocab) for i in range(shards)] + [vocab]
    with mode(device, exp):
        stats = [
            rk.logprob_partial(logits[..., a:b], target, vocab_start=a, vocab_size=vocab, **options, exp=exp)
            for a, b in itertools.pairwise(edges)
        ]
    return torch.stack(stats)


def merged(problem: Problem, stats: Any) -> rk.LogprobResult:
    temperature = problem.moved(str(stats.device))[2].get("temperature", 1.0)
    return rk.logprob_merge(stats, temperature=temperature, **ALL)


def guarded_outputs(leading: tuple[int, ...], shift: int) -> tuple[list[Any], tuple[Any, ...]]:
    """Outputs between canaries, ``shift`` elements off alignment."""
    count = int(np.prod(leading))
    bands = [torch.full(((count + 16) * 4,), CANARY, dtype=torch.uint8) for _ in range(5)]
    outs = tuple(
        b.view(torch.int32 if i == 4 else torch.float32)[shift : shift + count].view(leading)
        for i, b in enumerate(bands)
    )
    return bands, outs


def check_on_cpu(problem: Problem) -> Truth:
    leading = problem.shape[:-1]
    shift = 1 + problem.number % 15
    bands, out = guarded_outputs(leading, shift)
    before = raw(problem.memory)
    result = forward(problem, "cpu", problem.exp, out)
    want = truth(problem.logits(), problem.target, **problem.options)
    report(problem, want.failures(result))
    for i, band in enumerate(bands):
        words = band.view(torch.int32)
        edge = torch.cat([words[:shift], words[shift + problem.rows :]])
        report(problem, "" if bool((edge == CANARY * 0x01010101).all()) else f"output {i} wrote past its end")

    choices = np.random.default_rng([SEED, 1, problem.number])
    one = problem.moved("cpu")
    with mode("cpu", problem.exp):
        alone = rk.logprob(one[0], one[1], **one[2], exp=problem.exp)
    report(problem, differing(alone, result.logprob), "logprob alone differs from logprob with all outputs")
    native.set_cpu_isa(str(choices.choice(ISAS)))
    torch.set_num_threads(int(choices.integers(1, 4)))
    report(problem, differing(forward(problem, "cpu", problem.exp), result), "another instruction set or thread count")
    counts = shard_counts(problem)
    if counts:
        shards = int(choices.choice(counts))
        joined = merged(problem, partials(problem, "cpu", problem.exp, shards))
        report(problem, differing(joined, result), f"{shards} shards")
        problem.features.add(f"{shards} shards")

    dlogits = backward(problem, "cpu", problem.exp, result)
    found = want.gradient_failures(dlogits, problem.dtype, **{k: numpy_of(v) for k, v in problem.gradients.items()})
    report(problem, found)
    if problem.layout != "expanded":  # in place; the memory between the rows must stay as it is
        copy = problem.memory.clone()
        backward(problem, "cpu", problem.exp, result, copy.as_strided(problem.shape, problem.strides, problem.offset))
        expected = problem.memory.clone()
        expected.as_strided(problem.shape, problem.strides, problem.offset).copy_(dlogits)
        report(problem, differing(copy, expected), "in-place gradient")
    report(problem, "" if raw(problem.memory) == before else "an input was written to")
    return want


def check_against_gpu(problem: Problem) -> None:
    for exp in ("portable", "hardware"):
        results = {device: forward(problem, device, exp) for device in ("cpu", "cuda")}
        report(problem, differing(results["cpu"], results["cuda"]), f"CPU and CUDA, {exp}")
        counts = shard_counts(problem)
        if counts:
            shards = counts[problem.number % len(counts)]
            stats = {device: partials(problem, device, exp, shards) for device in ("cpu", "cuda")}
            report(problem, differing(stats["cpu"], stats["cuda"]), f"statistics of {shards} shards, {exp}")
            report(
                problem, differing(merged(problem, stats["cuda"]), results["cuda"]), f"{shards} shards merged, {exp}"
            )
        gradients = {device: backward(problem, device, exp, results[device]) for device in ("cpu", "cuda")}
        report(problem, differing(gradients["cpu"], gradients["cuda"]), f"gradient of CPU and CUDA, {exp}")


def report(problem: Problem, failure: str, what: str = "") -> None:
    if failure:
        options = {k: v if isinstance(v, (int, float)) else "..." for k, v in problem.options.items()}
        pytest.fail(
            f"case {problem.number}: {what}{': ' if what else ''}{failure}\n  {problem.dtype} {list(problem.shape)} "
            f"{problem.layout} offset {problem.offset} exp={problem.exp} {options} gradients {list(problem.gradients)} "
            f"features {sorted(problem.features)}",
            pytrace=False,
        )


def available_isas() -> list[str]:
    original, found = native.cpu_isa(), []
    for isa in ("baseline", "avx2", "avx512"):
        try:
            native.set_cpu_isa(isa)
        except (RuntimeError, ValueError):
            continue
        if native.cpu_isa() == isa:
            found.append(isa)
    native.set_cpu_isa(original)
    return found


ISAS = available_isas()


@pytest.fixture(autouse=True)
def settings(native_settings: None) -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_the_cpu_keeps_the_bounds(first: int) -> None:
    for number in range(first, min(first + CHUNK, CASES)):
        check_on_cpu(make(number))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_cpu_and_cuda_have_the_same_bytes(first: int) -> None:
    for number in range(first, min(first + CHUNK, CASES)):
        check_against_gpu(make(number))


@pytest.mark.skipif(not FULL, reason="full vocabularies take minutes; set RLK_FUZZ_FULL=1")
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, FULL or 1, 10))
def test_full_vocabularies_on_the_cpu(first: int) -> None:
    for number in range(first, first + 10):
        check_on_cpu(make(number, full=True))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, FULL or 10, 10))
def test_full_vocabularies_on_cuda(first: int) -> None:
    """Ten vocabularies always run; with RLK_FUZZ_FULL all 200 do."""
    for number in range(first, first + 10):
        check_against_gpu(make(number, full=True))


def test_the_generator_reaches_every_feature_and_every_status() -> None:
    """The fuzz must generate every feature, or it tests nothing. If a feature is in one of a hundred cases, 400 cases
    contain it with 98 %."""
    features: set[str] = set()
    statuses = 0
    for number in range(400):
        problem = make(number)
        features |= problem.features
        if problem.rows * problem.shape[-1] <= 2**14:  # small problems reach every status too, at no cost
            want = truth(problem.logits(), problem.target, **problem.options)
            statuses |= int(np.bitwise_or.reduce(want.status))
    expected = {*DTYPES, *SPECIAL, "padded", "sliced", "transposed", "expanded", "softcap", "kept", "ignored"}
    expected |= {"bad target", "bad kept", "bad temperature", "valid_vocab", "canonical_vocab"}
    assert not expected - features
    assert statuses == sum(Status)


if __name__ == "__main__":
    chosen = make(int(sys.argv[1]), full="--full" in sys.argv)
    print(chosen)
    check_on_cpu(chosen)
    if torch.cuda.is_available():
        check_against_gpu(chosen)
