"""mismatch_metrics: float64, verl's formulas, the same bits for every layout of sequences, bad input, and calls
through torch. test_mismatch_metrics.cpp compares the contract's bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import same, tensors
from rollout_cases import ragged, rollouts, wild
from torch_properties import no_synchronisation


def run(a: dict[str, Any], **more: Any) -> rk.MismatchMetrics:
    return rk.mismatch_metrics(a["train"], a["rollout"], a["mask"], **more)


def near(got: rk.MismatchMetrics, want: dict[str, float]) -> str:
    assert list(got.names) == list(want)
    return beyond("mismatch_metrics", "metrics", got.vector, np.array(list(want.values())))


@pytest.mark.parametrize("clamp", [20.0, 0.1, None])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (6, 37), (2, 5000)])
def test_values_lie_near_float64(shape: tuple[int, int], clamp: float | None, device: str) -> None:
    for seed in range(4):
        a = rollouts(*shape, seed=seed)
        # so that chi2_seq stays small
        a["rollout"] = a["train"] + (a["rollout"] - a["train"]) / np.float32(shape[1] ** 0.5)
        got = run(tensors(a, device), log_ratio_clamp=clamp)
        want = rk.mismatch_metrics_reference(a["train"], a["rollout"], a["mask"], log_ratio_clamp=clamp)
        if want["num_tokens"] < 4:  # with one or two tokens the correlation is rounding alone
            want["correlation"] = float(got.correlation)
        assert not near(got, want), seed


def test_it_is_verls_where_verl_has_it() -> None:
    """Computes compute_offpolicy_metrics of verl's rollout_corr_helper in float64. Every sequence has an unmasked
    token."""
    a = tensors(rollouts(2, 60, seed=5))
    train, rollout, mask = a["train"].double(), a["rollout"].double(), a["mask"].double()

    def mean(x: torch.Tensor, axis: Any = None) -> torch.Tensor:
        return (x * mask).sum(axis) / mask.sum(axis)

    d = train - rollout
    of_train, of_rollout = mean(train, -1), mean(rollout, -1)
    diff = of_rollout - of_train
    want = {
        "kl": -mean(d),
        "k3": mean(d.exp() - d - 1),
        "ppl_train": (-of_train).exp().mean(),
        "ppl_rollout": (-of_rollout).exp().mean(),
        "log_ppl_train": -of_train.mean(),
        "log_ppl_rollout": -of_rollout.mean(),
        "log_ppl_diff_mean": diff.mean(),
        "log_ppl_diff_abs_mean": diff.abs().mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "ppl_ratio": diff.exp().mean(),
        "chi2_token": mean(d.clamp(-20, 20).exp().square()) - 1,
        "chi2_seq": (2 * (d * mask).sum(-1).clamp(-20, 20)).exp().mean() - 1,
        "ess": 1 / mean((d.exp() / mean(d.exp())).square()),
    }
    got = run(a).asdict()
    found = np.array([got[name] for name in want])
    assert not beyond("mismatch_metrics", "metrics", found, np.array([float(x) for x in want.values()]))


@pytest.mark.parametrize("shift", [0.0, -4.0, -8.0, -15.0, 8.0])
def test_the_effective_sample_size_keeps_its_digits(shift: float) -> None:
    """1 + chi2 has no digits of ratios far below 1. The share is that of the ratios without their common factor."""
    train, rollout = rollouts(4, 50, seed=8)["train"], rollouts(4, 50, seed=9)["train"]
    near = rollout + 0.3 * np.tanh(train)
    ratio = np.exp((near + np.float32(shift)).astype(np.float64) - rollout)
    got = rk.mismatch_metrics((near + np.float32(shift)).astype(np.float32), rollout).asdict()["ess"]
    assert got == pytest.approx(ratio.mean() ** 2 / np.square(ratio).mean(), rel=1e-5)


def test_packing_padding_and_strides_change_no_bit(device: str) -> None:
    padded, packed, cuts = ragged()
    want = run(tensors(padded, device)).vector.cpu()
    for dtype in (torch.int32, torch.int64):
        ends = torch.from_numpy(cuts).to(device, dtype)
        assert same(run(tensors(packed, device), cu_seqlens=ends).vector.cpu(), want)
    for shift in (1, 2, 5):
        strided = {}
        for i, (k, x) in enumerate(tensors(padded, device).items()):
            wide = torch.zeros((5, 400), dtype=x.dtype, device=device)
            wide[:, shift + i : shift + i + 300] = x
            strided[k] = wide[:, shift + i : shift + i + 300]
        assert same(run(strided).vector.cpu(), want)


def test_masked_slots_are_never_read(device: str) -> None:
    a = rollouts(4, 65, seed=2)
    want = run(tensors(a, device)).vector.cpu()
    assert same(run(tensors(wild(a), device)).vector.cpu(), want)
    rows = {k: np.concatenate([x, x]) for k, x in wild(a).items()}
    rows["mask"][4:] = False
    assert same(run(tensors(rows, device)).vector.cpu(), want), "rows of which none counts"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_masks_of_every_dtype_say_the_same(dtype: torch.dtype) -> None:
    a = tensors(rollouts(4, 50, seed=6))
    assert same(run({**a, "mask": a["mask"].to(dtype)}).vector, run(a).vector)


def test_no_mask_counts_every_token() -> None:
    a = tensors(rollouts(4, 50, seed=6))
    want = run({**a, "mask": torch.ones_like(a["mask"])}).vector
    assert same(rk.mismatch_metrics(a["train"], a["rollout"]).vector, want)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (3, 7)])
def test_without_a_token_all_are_zero(shape: tuple[int, int], device: str) -> None:
    x = torch.full(shape, float("nan"), device=device)
    got = rk.mismatch_metrics(x, x, torch.zeros(shape, dtype=torch.bool, device=device))
    assert same(got.vector.cpu(), np.zeros(31, np.float32))
    assert rk.mismatch_metrics_reference(x.cpu(), x.cpu(), np.zeros(shape, bool)) == got.asdict()


def test_equal_log_probabilities_have_no_mismatch() -> None:
    a = rollouts(4, 50, seed=7)
    got = rk.mismatch_metrics(a["train"], a["train"], a["mask"]).asdict()
    zeros = ("dlogp_mean", "dlogp_max", "kl", "k3", "chi2_token", "chi2_seq", "log_ppl_diff_max", "differing_fraction")
    assert [got[name] for name in zeros] == [0.0] * len(zeros)
    assert [got[name] for name in ("ratio_mean", "ess", "ppl_ratio", "histogram_4")] == [1.0] * 4
    assert got["ppl_train"] == got["ppl_rollout"]
    assert not beyond("mismatch_metrics", "metrics", np.array(got["correlation"]), np.array(1.0))
    constant = np.full((2, 3), -0.5, np.float32)
    assert rk.mismatch_metrics(constant, constant).asdict()["correlation"] == 0.0, "has no variance"


def test_zeros_of_either_sign_differ_and_every_nan_is_one() -> None:
    x = np.array([[0.0, -0.0, np.nan, np.nan, -1.0, -2.0]], np.float32)
    y = np.array([[-0.0, -0.0, -np.nan, 1.0, -1.0, 2.0]], np.float32)
    got = rk.mismatch_metrics(x, y).asdict()
    assert got["differing_fraction"] == np.float32(3 / 6)
    assert got["nonfinite_fraction"] == np.float32(2 / 6)
    assert sum(got[f"histogram_{i}"] for i in range(9)) == np.float32(4 / 6), "a NaN is in no bin"
    for i, bin_ in (([[-1.0]], 1), ([[np.float32(0.001)]], 5), ([[1.0]], 8), ([[-np.inf]], 0), ([[0.0]], 4)):
        found = rk.mismatch_metrics(np.array(i, np.float32), np.zeros((1, 1), np.float32)).histogram
        assert found[bin_] == 1.0, "an edge belongs to the bin above"


def test_numpy_and_jax_get_torchs_bytes() -> None:
    a = rollouts(3, 40, seed=8)
    want = run(tensors(a)).vector
    assert isinstance(run(a).vector, np.ndarray)
    assert same(run(a).vector, want)
    jax = pytest.importorskip("jax")
    got = run({k: jax.numpy.asarray(x) for k, x in a.items()}).vector
    assert isinstance(got, jax.Array)
    assert same(got, want)


def test_no_bit_depends_on_the_number_of_threads() -> None:
    a = tensors(rollouts(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(a).vector
        torch.set_num_threads(3)
        assert same(run(a).vector, want)
    finally:
        torch.set_num_threads(before)


def test_metrics_have_names() -> None:
    metrics = run(rollouts(3, 40))
    assert list(metrics.asdict()) == list(rk.MismatchMetrics.names)
    assert float(metrics.k3) == metrics.asdict()["k3"]
    assert len(metrics.histogram) == len(metrics.histogram_edges) + 1
    with pytest.raises(AttributeError, match="MismatchMetrics has no 'nothing'"):
        _ = metrics.nothing


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_give_the_same_bytes(backend: str, device: str) -> None:
    a = tensors(rollouts(4, 65), device)
    compiled: Any = torch.compile(lambda a: run(a).vector, fullgraph=True, backend=backend)
    assert same(compiled(a).cpu(), run(a).vector.cpu())
    learned = {**a, "train": a["train"].clone().requires_grad_()}
    assert same(compiled(learned).cpu(), run(a).vector.cpu())
    assert not run(learned).vector.requires_grad
    torch.library.opcheck(
        torch.ops.rl_kernel_native.mismatch_metrics, (a["train"], a["rollout"], a["mask"], None, 20.0, False),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


X = torch.zeros(2, 8)
BAD = {
    "dtype": (lambda: rk.mismatch_metrics(X.double(), X), TypeError, "logprob_train: expected dtype float32, got"),
    "other dtype": (lambda: rk.mismatch_metrics(X, X.half()), TypeError, "logprob_rollout: expected dtype float32"),
    "3-D": (lambda: rk.mismatch_metrics(X[None], X), ValueError, "logprob_train: expected shape [num_sequences, num_"),
    "shape": (lambda: rk.mismatch_metrics(X, X[:1]), ValueError, "logprob_rollout: expected shape [2, 8] (that of"),
    "strided": (lambda: rk.mismatch_metrics(X.T, X.T), ValueError, "logprob_train: expected a contiguous last"),
    "mask shape": (lambda: rk.mismatch_metrics(X, X, X[:1]), ValueError, "mask: expected shape [2, 8] (that of"),
    "mask dtype": (lambda: rk.mismatch_metrics(X, X, X * 1j), TypeError, "mask: expected dtype bool, of integers"),
    "cuts": (
        lambda: rk.mismatch_metrics(X[0], X[0], cu_seqlens=torch.tensor([0, 9, 8])), ValueError,
        "cu_seqlens: expected at most 8 (the number of tokens), got 9 at index 1",
    ),
    "packed 2-D": (
        lambda: rk.mismatch_metrics(X, X, cu_seqlens=torch.tensor([0, 8])), ValueError,
        "logprob_train: expected shape [num_tokens] beside cu_seqlens, got [2, 8]",
    ),
    "clamp": (
        lambda: rk.mismatch_metrics(X, X, log_ratio_clamp=0.0), ValueError,
        "log_ratio_clamp: expected a finite number > 0 or None, got 0.0",
    ),
    "clamp type": (
        lambda: rk.mismatch_metrics(X, X, log_ratio_clamp="20"), TypeError,  # type: ignore[arg-type]
        "log_ratio_clamp: expected a number, got str",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    call, error, text = BAD[case]
    with pytest.raises(error, match="^" + re.escape(text)):
        call()


@pytest.mark.gpu
def test_cpu_and_cuda_have_the_same_bytes() -> None:
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000), (5000, 7)):
        a = rollouts(rows, columns, seed=11)
        want = run(tensors(a)).vector
        there = tensors(a, "cuda")
        assert same(run(there).vector.cpu(), want)
        cuts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns
        flat = {k: x.reshape(-1) for k, x in there.items()}
        assert same(run(flat, cu_seqlens=cuts).vector.cpu(), want)


@pytest.mark.gpu
def test_a_gpu_says_nan_of_bad_cuts() -> None:
    a = {k: x.reshape(-1) for k, x in tensors(rollouts(4, 50), "cuda").items()}
    for cuts in ([0, 60, 50, 200], [1, 60, 100, 200], [0, 60, 100, 300], [0, -5, 100, 200]):
        found = run(a, cu_seqlens=torch.tensor(cuts, dtype=torch.int32, device="cuda")).vector
        assert bool(found.isnan().all())


@pytest.mark.gpu
def test_a_cuda_graph_replays_without_a_synchronisation() -> None:
    a = tensors(rollouts(64, 512, seed=12), "cuda")
    run(a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_synchronisation(), torch.cuda.graph(graph):
        got = run(a).vector
    a["train"].mul_(1.5)
    graph.replay()
    torch.cuda.synchronize()
    assert same(got.cpu(), run(a).vector.cpu())
