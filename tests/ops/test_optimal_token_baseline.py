"""optimal_token_baseline: float64, verl's own function, the same bits for every layout of sequences, bad input, and
calls through torch. test_optimal_token_baseline.cpp compares the contract's bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import framework_sources
import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import same, tensors
from rollout_cases import wild
from torch_properties import captured

NAMES = ("rewards", "logprob", "sum_p_sq", "mask", "importance_weight")
OPTIONS: dict[str, dict[str, Any]] = {
    "groups of three": {"group_size": 3},
    "without a tail": {"group_size": 6, "zero_tail": False},
    "alone": {"group_size": 1},
    "a large eps": {"group_size": 2, "eps": 0.5},
}


def make(rows: int, columns: int, seed: int = 0, prefix: bool = True) -> dict[str, np.ndarray]:
    """Answers of different lengths; unless ``prefix``, the mask has holes."""
    random = np.random.default_rng(seed)
    shape = (rows, columns)
    logits = random.normal(0, 2, (*shape, 7))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    mask = np.arange(columns) < random.integers(0, columns + 1, rows)[:, None]
    if not prefix:
        mask &= random.random(shape) < 0.8
    found = {
        "rewards": random.normal(0, 1, shape) * (random.random(shape) < 0.2),
        "logprob": np.log(p[..., 0]),
        "sum_p_sq": (p * p).sum(-1),
        "importance_weight": np.exp(random.normal(0, 0.3, shape)),
    }
    return {k: x.astype(np.float32) for k, x in found.items()} | {"mask": mask}


def run(a: dict[str, Any], weighted: bool = False, **options: Any) -> Any:
    weight = {"importance_weight": a["importance_weight"]} if weighted else {}
    return rk.optimal_token_baseline(*(a[k] for k in NAMES[:4]), **weight, **options)


def failures(got: Any, a: dict[str, np.ndarray], weighted: bool = False, **options: Any) -> str:
    weight = {"importance_weight": a["importance_weight"]} if weighted else {}
    want = rk.optimal_token_baseline_reference(*(a[k] for k in NAMES[:4]), **weight, **options)
    members = options.get("group_size", a["mask"].shape[0])
    facts = {"scale": want["scale"], "terms": members + a["mask"].shape[-1] // 256}
    return "; ".join(
        beyond("optimal_token_baseline", k, getattr(got, k), want[k], **facts) for k in ("advantages", "returns")
    ).strip("; ")


def assert_same(got: Any, want: Any) -> None:
    assert all(same(g.cpu(), w.cpu()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_lie_near_float64(name: str, weighted: bool, device: str) -> None:
    for columns in (1, 97, 1300):
        a = make(6, columns, seed=columns, prefix=columns != 97)
        got = run(tensors(a, device), weighted, **OPTIONS[name])
        assert not failures(got, a, weighted, **OPTIONS[name]), columns


def test_fuzzed_groups_lie_near_float64() -> None:
    random = np.random.default_rng(0)
    for _ in range(120):
        rows, columns = int(random.integers(1, 12)), int(random.integers(1, 300))
        a = make(rows, columns, int(random.integers(1 << 30)), bool(random.integers(2)))
        cuts = np.sort(random.integers(0, rows + 1, int(random.integers(0, 4))))
        offsets = np.array([0, *cuts, rows], (np.int32, np.int64)[random.integers(2)])
        options: dict[str, Any] = {"group_offsets": offsets, "zero_tail": bool(random.integers(2))}
        if random.integers(2):
            a["rewards"] = a["rewards"][:, 0].copy()
        assert not failures(run(a, True, **options), a, True, **options)


def verl(a: dict[str, np.ndarray], index: Any, weighted: bool, zero_tail: bool) -> Any:
    """verl's own function in float64."""
    core_algos = framework_sources.verl()
    t = {k: torch.from_numpy(x.astype(np.float64)) for k, x in a.items()}
    return core_algos.compute_optimal_token_baseline_advantage(
        t["rewards"], t["mask"], index, t["logprob"], t["sum_p_sq"],
        t["importance_weight"] if weighted else None, zero_tail,
    )  # fmt: skip


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_it_is_verls(prefix: bool, weighted: bool, zero_tail: bool) -> None:
    a = make(12, 80, seed=5, prefix=prefix)
    advantages, returns = verl(a, np.arange(12) // 4, weighted, zero_tail)
    got = run(a, weighted, group_size=4, zero_tail=zero_tail)
    scale = rk.optimal_token_baseline_reference(*(a[k] for k in NAMES[:4]), group_size=4)["scale"]
    facts = {"scale": scale, "terms": 4}
    assert not beyond("optimal_token_baseline", "advantages", got.advantages, advantages, **facts)
    assert not beyond("optimal_token_baseline", "returns", got.returns, returns * a["mask"], **facts)


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_that_of_several_turns_is_verls(weighted: bool, zero_tail: bool) -> None:
    """Positions count only the model's tokens, so packed sequences are passed without the other tokens."""
    a = make(12, 80, seed=5, prefix=False)
    verl = framework_sources.verl()
    t = {k: torch.from_numpy(x.astype(np.float64)) for k, x in a.items()}
    of_verl = (t["rewards"], t["mask"], np.arange(12) // 4, t["logprob"], t["sum_p_sq"])
    advantages, _ = verl.compute_multi_turn_optimal_token_baseline_advantage(
        *of_verl, t["importance_weight"] if weighted else None, zero_tail
    )
    mask = torch.from_numpy(a["mask"])
    packed = rk.pack([torch.from_numpy(a[k]) for k in NAMES if k != "mask"], mask=mask, max_tokens=int(mask.sum()))
    rewards, logprob, sum_p_sq, weight = packed.tensors
    found = rk.optimal_token_baseline(
        rewards, logprob, sum_p_sq, cu_seqlens=packed.cu_seqlens, group_size=4, zero_tail=zero_tail,
        importance_weight=weight if weighted else None,
    )  # fmt: skip
    got = rk.unpack(found.advantages, packed.cu_seqlens, 80, positions=packed.positions)
    scale = rk.optimal_token_baseline_reference(*(a[k] for k in NAMES[:4]), group_size=4)["scale"]
    facts = {"scale": np.broadcast_to(scale.max(1, keepdims=True), scale.shape), "terms": 4}
    assert not beyond("optimal_token_baseline", "advantages", got, (advantages * t["mask"]).numpy(), **facts)


def test_the_sum_of_squares_comes_from_logprob() -> None:
    """A nearly certain policy gives a token almost no weight, so the baseline is the other sequence's return."""
    logits = torch.tensor([[[30.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]])
    of = rk.logprob(logits.view(2, 3), torch.zeros(2, dtype=torch.int64), return_sum_p_sq=True)
    found = rk.optimal_token_baseline(
        torch.tensor([1.0, 3.0]), of.logprob.view(2, 1), of.sum_p_sq.view(2, 1), group_size=2
    )
    want = np.array([[-2.0], [0.0]])
    assert not beyond("optimal_token_baseline", "advantages", found.advantages, want, scale=3.0, terms=2)


@pytest.mark.parametrize("name", OPTIONS)
def test_packing_padding_and_strides_change_no_bit(name: str, device: str) -> None:
    a, lengths = make(6, 300, seed=1, prefix=False), [300, 0, 17, 256, 131, 280]
    a["mask"] &= np.arange(300) < np.array(lengths)[:, None]
    want = run(tensors(a, device), True, **OPTIONS[name])
    flat = {k: np.concatenate([x[:n] for x, n in zip(v, lengths, strict=True)]) for k, v in a.items()}
    cuts = torch.from_numpy(np.cumsum([0, *lengths])).to(device)
    for dtype in (torch.int32, torch.int64):
        got = run(tensors(flat, device), True, cu_seqlens=cuts.to(dtype), **OPTIONS[name])
        for s, n in enumerate(lengths):
            assert_same([x[cuts[s] : cuts[s + 1]] for x in got], [x[s, :n] for x in want])
    strided = {}
    for i, (k, x) in enumerate(tensors(a, device).items()):
        wide = torch.zeros((6, 700), dtype=x.dtype, device=device)
        wide[:, 3 + i : 303 + i] = x
        strided[k] = wide[:, 3 + i : 303 + i]
    assert_same(run(strided, True, **OPTIONS[name]), want)
    padded = {k: np.pad(x, ((0, 0), (0, 250))) for k, x in a.items()}
    assert_same([x[:, :300] for x in run(tensors(padded, device), True, **OPTIONS[name])], want)


def test_of_as_many_tokens_as_sequences_a_column_is_of_sequences() -> None:
    """Rewards [4] for four packed tokens are rewards of tokens. Rewards [4, 1] are rewards of sequences and belong to
    their last tokens."""
    cuts = torch.tensor([0, 3, 3, 4, 4])
    logprob, squares = torch.full((4,), -0.7), torch.full((4,), 0.3)
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0])
    options: dict[str, Any] = {"group_size": 2, "cu_seqlens": cuts}
    got = rk.optimal_token_baseline(rewards[:, None], logprob, squares, **options)
    assert got.returns.tolist() == [1.0, 1.0, 1.0, 4.0]
    assert rk.optimal_token_baseline(rewards, logprob, squares, **options).returns.tolist() == [7.0, 6.0, 4.0, 8.0]
    want = rk.optimal_token_baseline(torch.tensor([0.0, 0.0, 1.0, 4.0]), logprob, squares, **options)
    assert_same(got, want)
    with pytest.raises(ValueError, match=r"rewards: expected shape \[4\] or \[4, 1\] \(that of logprob"):
        rk.optimal_token_baseline(rewards[:3], logprob, squares, **options)


def test_a_group_has_its_bits_in_any_batch() -> None:
    a = make(9, 90, seed=7)
    want = run(a, group_size=3)
    for order in ([6, 7, 8, 0, 1, 2], [3, 4, 5]):
        got = run({k: x[order] for k, x in a.items()}, group_size=3)
        assert all(same(g, w[order]) for g, w in zip(got, want, strict=True))
    sizes = run(a, group_offsets=np.array([0, 3, 3, 6, 9]))
    assert all(same(g, w) for g, w in zip(sizes, want, strict=True))


def test_rewards_of_sequences_are_those_of_their_last_tokens() -> None:
    a = make(6, 50, seed=6)
    one = np.arange(6, dtype=np.float32) - 2.5
    last = np.zeros_like(a["rewards"])
    n = a["mask"].sum(1)
    last[np.arange(6), np.maximum(n - 1, 0)] = one
    want = run({**a, "rewards": last}, group_size=3)
    got = run({**a, "rewards": one}, group_size=3)
    assert all(same(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_masked_slots_are_never_read(name: str) -> None:
    a = make(6, 65, seed=2, prefix=False)
    want, got = run(a, True, **OPTIONS[name]), run(wild(a), True, **OPTIONS[name])
    assert all(same(g, w) for g, w in zip(got, want, strict=True))
    for x in got:
        assert not x[~a["mask"]].view(np.int32).any(), "+0"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_masks_of_every_dtype_say_the_same(dtype: torch.dtype) -> None:
    a = tensors(make(6, 50, seed=6))
    assert_same(run({**a, "mask": a["mask"].to(dtype)}, group_size=3), run(a, group_size=3))


@pytest.mark.parametrize("shape", [(0, 5), (6, 0), (6, 7)])
def test_without_a_token_all_are_zero(shape: tuple[int, int]) -> None:
    x = torch.full(shape, float("nan"))
    a = dict.fromkeys(NAMES, x) | {"mask": torch.zeros(shape, dtype=torch.bool)}
    for found in run(a, True, group_size=3):
        assert same(found, np.zeros(shape, np.float32))


def test_a_nan_is_seen_in_its_group_alone() -> None:
    a = make(6, 40, seed=9)
    a["mask"][:] = True
    want = run(a, group_size=3)
    a["rewards"][4, 20] = np.nan
    got = run(a, group_size=3)
    assert same(got.advantages[:3], want.advantages[:3])
    assert np.isnan(got.returns[4, :21]).all()
    assert np.isnan(got.advantages[3:, :21]).all()
    assert not np.isnan(got.advantages[3:, 21:]).any()


def test_numpy_and_jax_get_torchs_bytes() -> None:
    a = make(6, 40, seed=8)
    want = run(tensors(a), True, group_size=3)
    assert isinstance(run(a, group_size=3).advantages, np.ndarray)
    assert all(same(g, w) for g, w in zip(run(a, True, group_size=3), want, strict=True))
    jax = pytest.importorskip("jax")
    got = run({k: jax.numpy.asarray(x) for k, x in a.items()}, True, group_size=3)
    assert isinstance(got.advantages, jax.Array)
    assert all(same(g, w) for g, w in zip(got, want, strict=True))


def test_no_bit_depends_on_the_number_of_threads() -> None:
    a = tensors(make(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(run(a, group_size=8))
    finally:
        torch.set_num_threads(before)
    assert_same(*found)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_give_the_same_bytes(backend: str, device: str) -> None:
    a = tensors(make(6, 65), device)
    compiled: Any = torch.compile(lambda a: tuple(run(a, True, group_size=3)), fullgraph=True, backend=backend)
    learned = {**a, "logprob": a["logprob"].clone().requires_grad_()}
    assert_same(compiled(learned), run(a, True, group_size=3))
    assert not run(learned, group_size=3).advantages.requires_grad
    operands = (a["logprob"], a["rewards"], a["sum_p_sq"], a["mask"], None, None, None)
    torch.library.opcheck(
        torch.ops.rl_kernel_native.optimal_token_baseline, (*operands, 3, True, 1e-8),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


X = torch.zeros(2, 8)


def of_x(**changed: Any) -> Any:
    arguments: dict[str, Any] = {"rewards": X, "logprob": X, "sum_p_sq": X, "group_size": 2}
    return rk.optimal_token_baseline(**(arguments | changed))


OFFSETS: dict[str, Any] = {"group_size": None}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"logprob": X.double()}, TypeError, "logprob: expected dtype float32, got float64"),
    "rewards": ({"rewards": X[:, :3]}, ValueError, "rewards: expected shape [2, 8] or [2] (that of logprob, or one"),
    "no rewards": ({"rewards": None}, TypeError, "rewards: expected"),
    "squares": ({"sum_p_sq": X[0]}, ValueError, "sum_p_sq: expected shape [2, 8] (that of logprob), got [8]"),
    "weight": ({"importance_weight": X.int()}, TypeError, "importance_weight: expected dtype float32, got int32"),
    "mask": ({"mask": X[:1]}, ValueError, "mask: expected shape [2, 8] (that of logprob), got [1, 8]"),
    "no groups": (OFFSETS, ValueError, "group_offsets: expected one of group_offsets and group_size, got neither"),
    "both": ({"group_offsets": torch.tensor([0, 2])}, ValueError, "group_offsets: expected one of group_offsets and"),
    "group_size": ({"group_size": 0}, ValueError, "group_size: expected a number >= 1, got 0"),
    "no divisor": ({"group_size": 3}, ValueError, "group_size: expected a divisor of 2 (the number of"),
    "offsets": (OFFSETS | {"group_offsets": torch.tensor([0, 3])}, ValueError, "group_offsets: expected at most 2"),
    "eps": ({"eps": 0.0}, ValueError, "eps: expected a finite number > 0 in float32, got 0.0"),
    "cuts": (
        {"logprob": X[0], "rewards": X[0], "sum_p_sq": X[0], "cu_seqlens": torch.tensor([0, 9, 8])}, ValueError,
        "cu_seqlens: expected at most 8 (the number of tokens), got 9 at index 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    changed, error, text = BAD[case]
    with pytest.raises(error, match="^" + re.escape(text)):
        of_x(**changed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_cpu_and_cuda_have_the_same_bytes(name: str) -> None:
    for rows, columns in ((6, 1), (12, 37), (300, 64), (36, 2048), (6, 20000), (6000, 7)):
        a = make(rows, columns, seed=11, prefix=rows % 12 != 0)
        want = run(tensors(a), True, **OPTIONS[name])
        there = tensors(a, "cuda")
        assert_same(run(there, True, **OPTIONS[name]), want)
        cuts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns
        flat = {k: x.reshape(-1) for k, x in there.items()}
        got = run(flat, True, cu_seqlens=cuts, **OPTIONS[name])
        assert_same(got, [x.reshape(-1) for x in want])


@pytest.mark.gpu
def test_a_gpu_says_nan_beside_bad_cuts() -> None:
    a = {k: x.reshape(-1) for k, x in tensors(make(4, 50), "cuda").items()}
    a["mask"][:] = True
    cuts = torch.tensor([0, 40, 100, 90, 160, 200], dtype=torch.int32, device="cuda")
    found = run(a, group_size=1, cu_seqlens=cuts)
    in_doubt = torch.zeros(200, dtype=torch.bool, device="cuda")
    in_doubt[40:160] = True  # sequences that begin or end at 100 or 90
    assert bool(found.advantages[in_doubt].isnan().all())
    assert not bool(found.advantages[~in_doubt].isnan().any())


@pytest.mark.gpu
def test_a_cuda_graph_replays_without_a_synchronisation() -> None:
    a = tensors(make(64, 512, seed=12), "cuda")
    graph, got = captured(lambda: run(a, group_size=8))
    a["rewards"].mul_(1.1)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, run(a, group_size=8))
