"""Tests the HIP backend from Python on the stand-in runtime: the fuzz set with the CPU's bytes, and errors that users
see.

`scripts/test.sh hip` starts it, with the extension of variant rocm6 and the stand-in libamdhip64 in the library path.
The arrays are NumPy's memory that claims to lie on a ROCm device.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import ALL, differing, part_cut, torch_logits, torch_targets
from dlpack import BFLOAT, ROCM, Exporter
from rl_kernel_native import _dispatch
from rl_kernel_native._native import module as native

torch = pytest.importorskip("torch", reason="the fuzz makes its layouts with torch")

import advantage_cases  # noqa: E402
import attention_cases  # noqa: E402
import policy_loss_cases  # noqa: E402
import reward_batches  # noqa: E402
import rollout_cases  # noqa: E402
import rope_cases  # noqa: E402
import silu_mul_cases  # noqa: E402
import test_attention_fuzz as attention_fuzz  # noqa: E402
import test_attention_partials as partials_tests  # noqa: E402
import test_attention_tree as tree_tests  # noqa: E402
import test_attention_values as values_tests  # noqa: E402
import test_covariance_mask as covariance_tests  # noqa: E402
import test_embedding_fuzz as embedding_fuzz  # noqa: E402
import test_fuzz as fuzz  # noqa: E402
import test_importance_weights as importance_tests  # noqa: E402
import test_kl as kl_tests  # noqa: E402
import test_mismatch_metrics as mismatch_tests  # noqa: E402
import test_optimal_token_baseline as baseline_tests  # noqa: E402
import test_policy_loss as policy_tests  # noqa: E402
import test_rms_norm_fuzz as rms_norm_fuzz  # noqa: E402
import test_rope_fuzz as rope_fuzz  # noqa: E402
import test_sample_rounds as round_tests  # noqa: E402
import test_sample_shards as shard_tests  # noqa: E402
import test_silu_mul_fuzz as silu_mul_fuzz  # noqa: E402
import test_value_loss as value_tests  # noqa: E402
from rl_kernel_native._metrics import MetricVector  # noqa: E402
from rl_kernel_native.cases import Arrays, certified_cases  # noqa: E402
from rl_kernel_native.consistency.certify import certify_case, digests  # noqa: E402
from rl_kernel_native.ops.linear_logprob import LARGEST, head_rows  # noqa: E402
from rl_kernel_native.ops.sample import SampleStatus  # noqa: E402
from rms_norm_cases import Operands, results  # noqa: E402

pytestmark = pytest.mark.skipif(
    native.variant != "rocm6" or "RLK_STANDIN_ORDER" not in os.environ,
    reason="needs the rocm6 build on the stand-in runtime: scripts/test.sh hip",
)

CASES = int(os.environ.get("RLK_FUZZ_CASES", "2000"))
CHUNK = 100


class RocmArray(Exporter):
    """A torch CPU tensor's memory that claims to lie on a ROCm device."""

    def __init__(self, tensor: Any) -> None:
        fields: dict[str, Any] = {"device": ROCM}
        if tensor.dtype == torch.bfloat16:
            fields |= {"code": BFLOAT, "bits": 16}
            super().__init__(tensor.view(torch.uint16).numpy(), **fields)
        else:
            super().__init__(tensor.numpy(), **fields)
        self.tensor, self.shape = tensor, tuple(tensor.shape)


def on_device(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(on_device(y) for y in x)
    return RocmArray(x) if isinstance(x, torch.Tensor) else x


def back(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x)(*(back(y) for y in x)) if hasattr(x, "_fields") else tuple(back(y) for y in x)
    return x.tensor if isinstance(x, RocmArray) else x


def host_cupy(device: str) -> Any:
    """Outputs for a ROCm array without a framework come from CuPy; here they come from torch's CPU memory."""

    def empty(shape: tuple[int, ...], dtype: Any) -> RocmArray:
        return RocmArray(torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name)))

    return SimpleNamespace(empty=empty, cuda=SimpleNamespace(Device=lambda index: contextlib.nullcontext()))


@pytest.fixture(autouse=True)
def device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_cupy", host_cupy)


def forward(problem: fuzz.Problem) -> Any:
    options = {k: on_device(v) for k, v in problem.options.items()}
    return back(rk.logprob(on_device(problem.logits()), on_device(problem.target), **options, **ALL))


def backward(problem: fuzz.Problem, result: Any) -> Any:
    options, gradients = ({k: on_device(v) for k, v in x.items()} for x in (problem.options, problem.gradients))
    entropy = on_device(result.entropy) if "dentropy" in gradients else None
    dlogits = torch.empty(problem.shape, dtype=problem.memory.dtype)
    out = on_device(dlogits)
    logits, target = on_device(problem.logits()), on_device(problem.target)
    rk.logprob_backward(logits, target, on_device(result.lse), entropy=entropy, **gradients, **options, out=out)
    return dlogits


def merged_shards(problem: fuzz.Problem, shards: int) -> Any:
    vocab = problem.shape[-1]
    whole = problem.options.get("canonical_vocab", vocab)
    edges = [min(part_cut(whole, 8 * i // shards), vocab) for i in range(shards)] + [vocab]
    options = {k: on_device(v) for k, v in problem.options.items()}
    stats = [
        back(
            rk.logprob_partial(
                on_device(problem.logits()[..., a:b]),
                on_device(problem.target),
                vocab_start=a,
                vocab_size=vocab,
                **options,
            )
        )
        for a, b in itertools.pairwise(edges)
    ]
    temperature = options.get("temperature", 1.0)
    return back(rk.logprob_merge(on_device(torch.stack(stats)), temperature=temperature, **ALL))


@pytest.mark.parametrize("first", range(0, CASES // 4, CHUNK // 4))
def test_cpu_and_hip_have_the_same_bytes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a quarter of the cases; each is a forward, its shards and a gradient."""
    for number in range(first, min(first + CHUNK // 4, CASES // 4)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        problem = fuzz.make(number)
        want = fuzz.forward(problem, "cpu", "portable")
        fuzz.report(problem, fuzz.differing(want, forward(problem)), "CPU and HIP")
        counts = fuzz.shard_counts(problem)
        if counts:
            shards = counts[number % len(counts)]
            fuzz.report(problem, fuzz.differing(want, merged_shards(problem, shards)), f"{shards} shards on HIP")
        gradient = fuzz.backward(problem, "cpu", "portable", want)
        fuzz.report(problem, fuzz.differing(gradient, backward(problem, want)), "gradient of CPU and HIP")


@pytest.mark.parametrize("first", range(0, CASES // 4, CHUNK // 4))
def test_cpu_and_hip_norms_have_the_same_bytes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a quarter of the cases, since three kernels of 256 lanes per row take long here."""
    for number in range(first, min(first + CHUNK // 4, CASES // 4)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        norm = rms_norm_fuzz.make(number)
        want = results(norm.operands, norm.eps, **norm.options)
        got = back(results(Operands(*(on_device(t) for t in norm.operands)), norm.eps, **norm.options))
        found = fuzz.differing(tuple(want), tuple(got))
        assert not found, f"{norm.name}: {found}"


@pytest.mark.parametrize("first", range(0, CASES // 4, CHUNK // 4))
def test_cpu_and_hip_tables_have_the_same_bytes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a quarter of the cases, since the sort's ballots take long here."""
    for number in range(first, min(first + CHUNK // 4, CASES // 4)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        table = embedding_fuzz.make(number)
        ids, weight, dy = (on_device(t) for t in table.operands)
        y = back(rk.embedding(ids, weight, **table.options))
        if table.main_grad is None:
            how = {"dweight_dtype": table.dweight_dtype}
        else:
            how = {"main_grad": on_device(embedding_fuzz.copied(table.main_grad, "cpu"))}
        dweight = back(rk.embedding_backward(dy, ids, len(table.operands.weight), **how, **table.options))
        found = fuzz.differing(table.results(), (y, dweight))
        assert not found, f"{table.name}: {found}"


@pytest.mark.parametrize("first", range(0, CASES // 8, CHUNK // 8))  # each takes a second
def test_cpu_and_hip_attention_has_the_same_bytes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(first, min(first + CHUNK // 8, CASES // 8)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        problem = attention_fuzz.make(number)
        call = problem.sequences.call(problem.form)
        want = attention_cases.results(call, **problem.options)
        there, options = attention_cases.moved(on_device, (call, problem.options))
        got = attention_cases.results(there, **options)
        found = fuzz.differing(tuple(want.values()), back(tuple(got.values())))
        assert not found, f"{problem.name}: {found}"


@pytest.mark.parametrize("number", range(6))
def test_cpu_and_hip_trees_have_the_same_bytes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trees and a deep chain of short segments with dead ends, both widths of tiles, every option; values as
    wide as keys, and narrower values. Machine code takes minutes for many segments, and so gets fewer segments."""
    monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
    rng = np.random.default_rng(number)
    how = {"dtype": attention_cases.DTYPES[number % 3], "head_dim": (24, 192)[number % 2]}
    depth = 18 if "RLK_ISA_LOG" in os.environ else 60
    trees = [tree_tests.random_tree(rng, depth // 6 if depth < 60 else 8, **how)]
    chain = [-1, *(s - 1 if s % 4 else s - 2 for s in range(1, depth))]
    trees.append(tree_tests.Tree(rng, [2, 0, 1] * (depth // 3), chain, **how))
    for tree, columns in zip(trees, (how["head_dim"], how["head_dim"] * 2 // 3), strict=True):
        options = tree_tests.OPTIONS[number // 2]
        q, k, v, dout = tree.arrays
        arrays = (q, k, v[..., :columns].contiguous(), dout[..., :columns].contiguous())
        want = attention_cases.results((arrays, tree.lists), **options)
        there, moved = attention_cases.moved(on_device, ((arrays, tree.lists), options))
        got = attention_cases.results(there, **moved)
        found = fuzz.differing(tuple(want.values()), back(tuple(got.values())))
        assert not found, f"{tree.lengths}, {tree.of}, {how}, {options}: {found}"


@pytest.mark.parametrize("number", range(10))
def test_cpu_and_hip_partials_have_the_same_bytes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases have splits with a gap, rows that see no key of their splits, and scores that make a row NaN. The calls
    also have both tile widths, every layout, and values with fewer columns than keys."""
    monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
    form = ("cache", "paged", "right", "packed", "shared")[number % 5]
    options = list(partials_tests.OPTIONS.values())[(number + number // 5) % 5]
    dtype = attention_cases.DTYPES[number % 3]
    rng = np.random.default_rng(number)
    s = attention_cases.Sequences(rng, [(1, 2500), (7, 1100), (2, 1), (0, 5)], (4, 2), (24, 192)[number % 2], dtype)
    s.k[1][1050], s.k[0][:1024] = torch.nan, -torch.inf
    s = values_tests.narrowed(s, 16) if number >= 5 else s
    for own in (None,) if form == "shared" else ([0, 2], [1]):
        (q, k, v, _), lists = (s if own is None else partials_tests.held(s, own)).call(form)
        if own is not None:
            lists["seqused_k"] = torch.tensor([len(x) for x in s.k], dtype=torch.int32)
        how = {**options, "splits": own, "return_partials": True}
        want = rk.attention(q, k, v, **lists, **how)
        arrays, moved = attention_cases.moved(on_device, ((q, k, v), lists))
        got = back(rk.attention(*arrays, **moved, **how))
        found = fuzz.differing(tuple(want[:2]), tuple(got[:2]))
        assert not found, (form, dtype, options, own, found)
        merge = {"out_dtype": dtype, "return_lse": True}
        there = rk.AttentionPartials(*(on_device(x) for x in want[:2]), want.splits)
        for sinks in (None, partials_tests.SINKS):
            of_cpu = rk.attention_merge(want, sinks=sinks, **merge)
            of_hip = back(rk.attention_merge(there, sinks=on_device(sinks), **merge))
            assert not fuzz.differing(tuple(of_cpu), tuple(of_hip)), (form, own)
        outs = torch.stack([of_cpu.out, of_cpu.out.nan_to_num() * 0.5])
        lses = torch.stack([of_cpu.lse, of_cpu.lse * 0.5])
        of_parts = rk.attention_merge_approximate(outs, lses, return_lse=True)
        of_hip = back(rk.attention_merge_approximate(on_device(outs), on_device(lses), return_lse=True))
        assert not fuzz.differing(tuple(of_parts), tuple(of_hip)), (form, own)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_cpu_and_hip_rotations_have_the_same_bytes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(first, min(first + CHUNK, CASES)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        rope = rope_fuzz.make(number)
        moved = rope_cases.Operands(*(None if t is None else on_device(t) for t in rope.operands))
        for backward in (False, True):
            want = rope_cases.results(rope.operands, backward=backward, **rope.options)
            got = back(rope_cases.results(moved, backward=backward, **rope.options))
            found = fuzz.differing(rope_fuzz.present(want), rope_fuzz.present(got))
            assert not found, f"{rope.name}: {found}"


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_cpu_and_hip_gates_have_the_same_bytes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(first, min(first + CHUNK, CASES)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        gates = silu_mul_fuzz.make(number)
        forward, gradient, options = silu_mul_cases.functions(gates.activation)
        options["round_before_mul"] = gates.rounds
        o = gates.operands
        inputs = (o.gate, o.up) if gates.gate_up is None else (gates.gate_up,)
        moved = tuple(on_device(t) for t in inputs)
        for want, got in (
            (forward(*inputs, **options), forward(*moved, **options)),
            (gradient(o.dy, *inputs, **options), gradient(on_device(o.dy), *moved, **options)),
        ):
            found = fuzz.differing(want, back(got))
            assert not found, f"{gates.name}: {found}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_lone_column_of_minus_zero_gives_plus_zero(dtype: str) -> None:
    """A compiler that replaces x + 0 by x keeps the sign of zero; only the machine code shows this."""
    logits = torch.tensor([[-0.0], [0.0], [-3.0]]).to(getattr(torch, dtype))
    target = torch.zeros(3, dtype=torch.int64)
    want = rk.logprob(logits, target, exp="portable", **ALL)
    assert not torch.signbit(want.logprob).any()
    found = back(rk.logprob(on_device(logits), on_device(target), **ALL))
    assert not fuzz.differing(want, found)


@pytest.mark.parametrize("columns", [90, 96])  # unaligned rows, and rows of whole vectors
def test_the_head_finds_its_kernels(rng: np.random.Generator, columns: int) -> None:
    """The head's kernels have names that begin like linear's; they are in the head's code object, not in linear's."""
    hidden, weight = (torch.from_numpy(rng.standard_normal((n, 32))).to(torch.bfloat16) for n in (6, columns))
    target = torch.from_numpy(rng.integers(0, columns, 6))
    with rk.arithmetic(os.environ.get("RLK_STANDIN_ARCH", "gfx942")):
        want = rk.linear_logprob(hidden, weight, target, return_lse=True, exp="portable")
    found = back(rk.linear_logprob(*(on_device(t) for t in (hidden, weight, target)), return_lse=True))
    assert not fuzz.differing(want, found)


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_the_largest_logits_are_those_of_a_cpu(rng: np.random.Generator, logits_dtype: str) -> None:
    """Logits in bf16 have ties. One row holds a NaN, one an ignored target and one a target out of range."""
    hidden, weight = (torch.from_numpy(rng.standard_normal((n, 32))).to(torch.bfloat16) for n in (12, 203))
    largest = rk.linear(hidden, weight, out_dtype="float32").argmax(-1)
    target, weight[7] = largest.clone(), weight[largest[6]]
    hidden[3, 0], target[4], target[5] = torch.nan, -100, 203
    how = {k: v for k, v in rk.linear_logprob.__kwdefaults__.items() if not k.startswith("return_")}
    how["logits_dtype"] = logits_dtype
    wanted = LARGEST | 3  # logprob and lse
    with rk.arithmetic(os.environ.get("RLK_STANDIN_ARCH", "gfx942")):
        want = head_rows(hidden, weight, target, wanted, **how | {"exp": "portable"})
    assert want[1][3] == -1
    assert int(want[1][6]) == min(7, int(largest[6]))
    there = [on_device(t) for t in (hidden, weight, target)]
    for size in (512 << 20, 64 << 10):
        found = head_rows(*there, wanted, **how | {"workspace_bytes": size})
        assert not fuzz.differing(want[0], back(found[0]))
        is_scored = target != -100
        assert torch.equal(back(found[1])[is_scored], want[1][is_scored])


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_smoothed_log_probabilities_are_those_of_a_cpu(rng: np.random.Generator, logits_dtype: str) -> None:
    hidden, weight = (torch.from_numpy(rng.standard_normal((n, 32))).to(torch.bfloat16) for n in (9, 1100))
    target = torch.from_numpy(rng.integers(0, 1000, 9))
    hidden[3, 0], target[4], target[5] = torch.nan, -100, 1100
    how = {k: v for k, v in rk.linear_logprob.__kwdefaults__.items() if not k.startswith("return_")}
    how |= {"logits_dtype": logits_dtype, "softcap": 20.0, "valid_vocab": 1001, "label_smoothing": 0.1}
    wanted = 3  # logprob and lse
    with rk.arithmetic(os.environ.get("RLK_STANDIN_ARCH", "gfx942")):
        want = head_rows(hidden, weight, target, wanted, **how | {"exp": "portable"})
        plain = head_rows(hidden, weight, target, wanted, **how | {"exp": "portable", "label_smoothing": 0.0})
    assert (want.logprob != plain.logprob)[:3].all()
    there = [on_device(t) for t in (hidden, weight, target)]
    for size in (512 << 20, 64 << 10):
        found = head_rows(*there, wanted, **how | {"workspace_bytes": size})
        assert not fuzz.differing(want, back(found))


SAMPLED = ("ids", "logprob", "raw_logprob", "kept_offsets", "status")


def assert_sampled(found: Any, want: Any) -> None:
    """Compares results of a sampler, skipping None; kept ids only as far as rows have them."""
    for name in SAMPLED:
        a, b = getattr(found, name), getattr(want, name)
        if b is not None:
            assert back(a).numpy().tobytes() == b.numpy().tobytes(), name
    if want.kept_offsets is not None:
        used = int(want.kept_offsets[-1])
        assert torch.equal(back(found.kept_ids)[:used], want.kept_ids[:used])


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
def test_tokens_of_hidden_states_are_those_of_a_cpu(rng: np.random.Generator, logits_dtype: str) -> None:
    """Computes all rows at once and, with a small workspace, some rows at a time. One row is greedy, and one row has an
    excessive top_k."""
    hidden, weight = (torch.from_numpy(rng.standard_normal((n, 32))).to(torch.bfloat16) for n in (9, 1100))
    hidden[3, 0] = torch.nan
    rows = {
        "sample_id": torch.arange(9), "top_k": torch.tensor([0, 1, 5, 5, 64, 65, 0, 0, 9]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0]), "greedy": torch.arange(9) == 7,
    }  # fmt: skip
    how: dict[str, Any] = {"seed": 7, "position": 3, "valid_vocab": 1001, "return_logprob": "both"}
    how["logits_dtype"] = logits_dtype
    with rk.arithmetic(os.environ.get("RLK_STANDIN_ARCH", "gfx942")):
        want = rk.linear_sample(hidden, weight, **rows, **how, exp="portable")
    assert (want.status != 0).tolist() == [i in (3, 5) for i in range(9)]
    there = {name: on_device(x) for name, x in rows.items()}
    for size in (512 << 20, 128 << 10):
        found = rk.linear_sample(on_device(hidden), on_device(weight), **there, **how, workspace_bytes=size)
        assert_sampled(found, want)


@pytest.mark.parametrize("split", ["1", "3", "8"])
def test_tokens_of_shards_are_those_of_a_cpu(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every kind under masks, padding, penalties and bias: the payloads, in one exchange and in rounds, and
    their merges."""
    rng = np.random.default_rng(36)
    for number, vocab in enumerate((20, 130, 1100)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number])
        x = shard_tests.logits_of(rng, 6, vocab).to((torch.float32, torch.bfloat16, torch.float16)[number])
        x[5, vocab // 2] = (0.0, torch.nan, torch.inf)[number]
        edges = shard_tests.edges_of(shard_tests.SPLITS[split], vocab)
        for more in shard_tests.more_of(rng, 6, vocab, "cpu"):
            how = shard_tests.asked(x, **shard_tests.mixed(rng, 6, "cpu"), **more, kept_capacity=6 * vocab)
            there = {name: on_device(value) for name, value in how.items()}
            own = {name: value for name, value in there.items() if name not in shard_tests.OF_MERGE}
            payloads = torch.stack([
                back(rk.sample_partial(on_device(x[:, a:b]), vocab_start=a, vocab_size=vocab, **own))
                for a, b in itertools.pairwise(edges)
            ])  # fmt: skip
            assert torch.equal(payloads, shard_tests.payloads_of(x, shard_tests.SPLITS[split], **how))
            merge = {name: value for name, value in there.items() if name not in shard_tests.OF_PARTIAL}
            found = rk.sample_merge(on_device(payloads), vocab_size=vocab, **merge)
            assert_sampled(found, rk.sample(x, **how))
            how = {name: value for name, value in how.items() if name not in shard_tests.OF_MERGE} | {"top_p": 0.9}
            wanted, kept = round_tests.rounds_of(x, shard_tests.SPLITS[split], **how)
            rounds, owned = round_tests.rounds_of(x, shard_tests.SPLITS[split], on_device, back, **how)
            assert all(map(torch.equal, rounds, wanted))
            assert all(round_tests.owned(owned, i) == round_tests.owned(kept, i) for i in range(6))
            merge = {name: on_device(value) for name, value in how.items() if name not in shard_tests.OF_PARTIAL}
            found = rk.sample_merge(on_device(wanted[-1]), vocab_size=vocab, in_rounds=True, **merge)
            assert_sampled(found, rk.sample(x, **how))
            found = rk.sample_merge(on_device(payloads), vocab_size=vocab, **merge | {"seed": 1 << 40})
            assert set(back(found.status).tolist()) == {SampleStatus.BAD_SHARDS}  # by the tags of the rows


class RocmArrays(Arrays):
    """The arrays of a certificate, on the stand-in's device."""

    has_autograd = False

    @property
    def arithmetic(self) -> str:
        return os.environ.get("RLK_STANDIN_ARCH", "gfx942")

    def wrap(self, tensor: Any) -> Any:
        return on_device(tensor)

    def unwrap(self, array: Any) -> Any:
        return back(array)


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_a_certificate_has_the_digests_of_the_cpu(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row operators have the digests of every backend. Products have the CPU's digests under `rk.arithmetic` of
    the device."""
    monkeypatch.setenv("RLK_STANDIN_ORDER", order)
    arrays = RocmArrays()
    recorded = json.loads((Path(__file__).parents[1] / "certificate.json").read_text())
    found = digests(arrays, quick=True)
    assert set(found) == {"every", arrays.arithmetic}
    for group, of_group in found.items():
        assert {key: recorded[group][key] for key in of_group} == of_group


@pytest.mark.parametrize("operator", ["linear", "rms_norm", "rope", "silu_mul"])
def test_a_row_is_certified_on_the_device(operator: str) -> None:
    """Every variation runs, on the narrow shapes in one dtype."""
    arrays = RocmArrays()
    chosen = [
        case
        for case in certified_cases(arrays, True)
        if case.operator == operator and case.dtype == "bfloat16" and np.prod(case.shape) < 1100
    ]
    assert chosen
    for case in chosen:
        entry = certify_case(case, arrays)
        assert entry.invariant, f"{entry.key}: {entry.differs}"


def problem(rng: np.random.Generator) -> tuple[Any, Any]:
    return on_device(torch_logits(rng, (3, 1000), "bfloat16")), on_device(torch_targets(rng, (3,), 1000))


def test_the_default_exponential_is_portable_and_hardware_is_an_error(rng: np.random.Generator) -> None:
    logits, target = problem(rng)
    with pytest.raises(ValueError, match='exp: "hardware"'):
        rk.logprob(logits, target, exp="hardware")
    want = rk.logprob(logits.tensor.clone(), target.tensor.clone(), exp="portable")
    assert not fuzz.differing(want, back(rk.logprob(logits, target)))


def test_no_device_is_a_typed_error(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_STANDIN_DEVICES", "0")
    with pytest.raises(RuntimeError, match="HIP: no device: no ROCm-capable device is detected"):
        rk.logprob(*problem(rng))


def test_results_lie_where_the_logits_do(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = problem(rng)
    elsewhere = host_cupy("rocm")
    elsewhere.empty = lambda shape, dtype: Exporter(np.empty(shape, dtype), device=ROCM, index=1)
    monkeypatch.setattr(_dispatch, "_cupy", lambda device: elsewhere)
    with pytest.raises(ValueError, match="out: expected memory on rocm:0, the allocator gave some on rocm:1"):
        rk.logprob(logits, target)


def run_in_a_process(code: str, **settings: str) -> str:
    """The output of a new process, which has not loaded a HIP runtime."""
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


CALL = """
import numpy as np, torch, rl_kernel_native as rk, test_hip
test_hip._dispatch._cupy = test_hip.host_cupy
logits, target = test_hip.problem(np.random.default_rng(0))
try:
    rk.logprob(logits, target)
except RuntimeError as error:
    print(error)
"""


def test_a_runtime_older_than_rocm_6_is_refused() -> None:
    assert "is of ROCm 5; ROCm 6 or 7 is needed" in run_in_a_process(CALL, RLK_STANDIN_VERSION="50200000")


def test_the_runtime_that_a_framework_loaded_is_used(tmp_path: Path) -> None:
    """The runtime is installed as in wheels: under its own name, in a folder that the loader does not search."""
    standin = next(Path(p) / "libamdhip64.so.6" for p in os.environ["LD_LIBRARY_PATH"].split(os.pathsep))
    own = shutil.copy(standin, tmp_path / "libamdhip64-0a1b2c3d.so")
    code = f"import ctypes; ctypes.CDLL({str(own)!r})" + CALL
    said = run_in_a_process(code, RLK_STANDIN_VERSION="50200000")
    assert str(own) in said


def test_mixed_devices_are_refused(rng: np.random.Generator) -> None:
    logits, target = problem(rng)
    with pytest.raises(ValueError, match="target: expected device"):
        rk.logprob(logits, target.tensor.numpy())


@pytest.mark.parametrize("number", range(CASES // 10))
def test_cpu_and_hip_advantages_have_the_same_bytes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gae, discounted_returns, vtrace, masked_whiten and group_advantage, padded and packed."""
    monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
    rng = np.random.default_rng(number)
    lengths = rng.integers(0, int(np.exp(rng.uniform(0, 6))) + 1, int(rng.integers(1, 6)))
    padded = advantage_cases.batch(rng, lengths, mask_dtype=("int32", "int64", "float32")[number % 3])
    flat, cu = padded.packed()
    scores = torch.from_numpy(rng.standard_normal(24).astype(np.float32))
    ids = torch.from_numpy(rng.integers(0, 5, 24))

    def run(*arrays: Any) -> list[Any]:
        found: list[Any] = []
        for (rewards, values, logprob, rollout, mask), ends in ((arrays[:5], None), (arrays[5:10], arrays[10])):
            found += rk.gae(rewards, values, mask, ends, 0.99, 0.9)
            found += rk.vtrace(rewards, values, logprob, rollout, mask, ends, 0.99)
            found.append(rk.discounted_returns(rewards, mask, ends, 0.9))
            found.append(rk.masked_whiten(values, mask, ends))
        found += rk.group_advantage(arrays[11], group_size=8, return_stats=True, return_status=True)
        found += rk.group_advantage(arrays[11], group_ids=arrays[12], scale="batch", return_stats=True)[:3]
        return found

    operands = (*padded[:5], *flat[:5], cu, scores, ids)
    want, got = run(*operands), [back(x) for x in run(*(on_device(x) for x in operands))]
    found = fuzz.differing(tuple(want), tuple(got))
    assert not found, f"{lengths}: {found}"


def test_cpu_and_hip_sequences_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path from Python: packing, sums, losses, labels."""
    rng = np.random.default_rng(3)
    for number in range(max(CASES // 40, 3)):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        rows, columns = int(rng.integers(1, 9)), int(rng.integers(1, 90))
        logprob = -torch.from_numpy(rng.exponential(1.0, (rows, columns)).astype(np.float32))
        mask = torch.from_numpy(rng.random((rows, columns)) < 0.6)
        ids = torch.from_numpy(rng.integers(0, 4, (rows, columns)))
        lengths = torch.from_numpy(rng.integers(0, columns + 1, rows))

        def results(x: Any, m: Any, i: Any, n: Any, width: int = columns) -> tuple[Any, ...]:
            packed, kept = rk.pack([x, m, i], n), rk.pack([x, i], mask=m, fill_value=3)
            of_rows = rk.sequence_logprob(x, m)
            sums = rk.sequence_logprob(packed.tensors[0], packed.tensors[1], packed.cu_seqlens)
            losses = rk.preference_loss(sums.sum, of_rows.sum, kind="hinge")
            labels = rk.shift_labels_packed(packed.tensors[2], packed.cu_seqlens, mask=packed.tensors[1])
            turns = rk.tool_mask(i, [1, 2], [3])
            back_again = rk.unpack(kept.tensors, kept.cu_seqlens, width, positions=kept.positions)
            return (
                *packed.tensors,
                *kept.tensors,
                *of_rows,
                *sums,
                *losses[:3],
                losses.metrics.vector,
                labels,
                turns,
                *back_again,
            )

        want = results(logprob, mask, ids, lengths)
        got = results(*(on_device(t) for t in (logprob, mask, ids, lengths)))
        found = fuzz.differing(tuple(want), back(tuple(got)))
        assert not found, f"case {number}: {found}"


# Operators over tokens: arrays for a shape and seed, every way to call the operator, and the call.
TOKENS: dict[str, tuple[Callable[..., Any], list[Any], Callable[..., Any]]] = {
    "policy_loss": (
        policy_loss_cases.arrays,
        list(policy_tests.SPECS.values()),
        lambda a, spec, **more: policy_tests.run(a, spec, ratio_metrics=True, **more),
    ),
    "value_loss": (value_tests.arrays, list(value_tests.HOW.values()), value_tests.run),
    "kl": (policy_loss_cases.arrays, list(kl_tests.HOW.values()), kl_tests.run),
    "importance_weights": (rollout_cases.rollouts, list(importance_tests.OPTIONS), importance_tests.everything),
    "importance_weights alone": (rollout_cases.rollouts, list(importance_tests.OPTIONS), importance_tests.run),
    "covariance_mask": (covariance_tests.make, list(covariance_tests.OPTIONS), covariance_tests.run),
    "entropy_mask": (
        rollout_cases.rollouts,
        [0.0, 0.2, 1.0],
        lambda a, top, **more: rk.entropy_mask(a["train"], a["mask"], top_quantile=top, **more),
    ),
    "optimal_token_baseline": (
        baseline_tests.make,
        [{"group_size": 1}, {"group_size": 1, "eps": 0.5}],
        lambda a, options, **more: baseline_tests.run(a, True, **options, **more),
    ),
    "mismatch_metrics": (
        rollout_cases.rollouts,
        [20.0, 0.1, None],
        lambda a, clamp, **more: mismatch_tests.run(a, log_ratio_clamp=clamp, **more),
    ),
}


def outputs_of(found: Any) -> tuple[Any, ...]:
    if isinstance(found, MetricVector):
        return (found.vector,)
    if isinstance(found, (tuple, list)):
        return tuple(itertools.chain.from_iterable(map(outputs_of, found)))
    return () if found is None else (found,)


@pytest.mark.parametrize("operator", TOKENS)
def test_cpu_and_hip_tokens_have_the_same_bytes(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to call it, padded and packed. One shape has more sequences than a block sums, one shape has several
    tiles, one shape no token."""
    make, ways, run = TOKENS[operator]
    for number, (way, packed) in enumerate(itertools.product(ways, (False, True))):
        if packed and operator == "kl":  # kl has no sequences
            continue
        # if there are many ways, half run padded and half packed
        if len(ways) > 20 and packed != (number // 2 % 2 == 1):
            continue
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        rows, columns = ((5, 37), (70, 3), (2, 300), (1, 1), (1, 2500), (4, 0), (300, 2))[number % 7]
        arrays = {k: torch.from_numpy(x) for k, x in make(rows, columns, seed=number).items()}
        more: dict[str, Any] = {}
        if packed:
            arrays = {k: x.reshape(-1) for k, x in arrays.items()}
            cuts = np.sort(np.random.default_rng(number).integers(0, rows * columns + 1, rows - 1))
            dtype = (np.int32, np.int64)[number % 2]
            more["cu_seqlens"] = torch.from_numpy(np.array([0, *cuts, rows * columns], dtype))
        want = outputs_of(run(arrays, way, **more))
        there = {k: on_device(x) for k, x in arrays.items()}
        got = back(outputs_of(run(there, way, **{k: on_device(x) for k, x in more.items()})))
        found = fuzz.differing(want, got)
        assert not found, f"{way}, [{rows}, {columns}]{' packed' * packed}: {found}"


@pytest.mark.parametrize("name", reward_batches.HOW)
def test_cpu_and_hip_rewards_have_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows, several tiles of one row, and packed sequences, some of them empty."""
    padded, packed, cuts = reward_batches.ragged()
    batches = [padded, packed, *(reward_batches.batch(*shape) for shape in ((70, 3), (1, 2500), (1, 1)))]
    for number, a in enumerate(batches):
        monkeypatch.setenv("RLK_STANDIN_ORDER", ("forward", "backward", "shuffled")[number % 3])
        more = {"cu_seqlens": torch.from_numpy(cuts)} if a is packed else {}
        arrays = {k: torch.from_numpy(x) for k, x in a.items()}
        want = outputs_of(reward_batches.run(arrays, name, **more))
        there = {k: on_device(x) for k, x in arrays.items()}
        got = back(outputs_of(reward_batches.run(there, name, **{k: on_device(x) for k, x in more.items()})))
        found = fuzz.differing(want, got)
        assert not found, f"{name}, batch {number}: {found}"


def test_workspaces_are_counted_by_device() -> None:
    arrays = (torch.randn(300, 64).bfloat16(), torch.randn(1000, 64).bfloat16(), torch.arange(300))
    head = on_device(arrays)
    want = back(rk.linear_logprob(*head))
    with pytest.raises(ValueError, match="workspace_bytes: expected at least") as refused:
        rk.linear_logprob(*head, workspace_bytes=10)
    named = re.search(r"at least (\d+)", str(refused.value))
    assert named is not None
    sizes = (1 << 20, int(named[1]))
    rk.workspace_stats(reset=True)
    for size in sizes:
        before = rk.workspace_stats().get("rocm:0", (0,))[0]
        assert not differing(back(rk.linear_logprob(*head, workspace_bytes=size)), want)
        found = rk.workspace_stats()["rocm:0"]
        assert found.calls == before + 1
        assert size // 2 < found.last_bytes <= size
    assert found.most_bytes <= sizes[0]
    assert rk.workspace_stats(reset=True) == {"rocm:0": found}
    assert rk.workspace_stats() == {}
