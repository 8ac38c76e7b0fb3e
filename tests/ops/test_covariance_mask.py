"""covariance_mask: float64, verl's choice, the same choice for any layout of the sequences, bad input, torch's ways to
call. test_covariance_mask.cpp compares the contract's bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import rl_kernel_native as rk
from policy_loss_cases import arrays, same, tensors
from rollout_cases import wild
from torch_properties import captured

# Every kind. The bounds and ratios choose some or all of the candidates.
OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"kind": "clip", "ratio": 0.02, "seed": 7},
    "clip, one": {"kind": "clip", "ratio": 0.0002, "seed": 8, "lower": -0.5, "upper": 0.5},
    "clip, wide": {"kind": "clip", "ratio": 0.1, "seed": (1 << 63) - 1, "lower": 0.1, "epsilon_high": 0.5},
    "clip, all": {"kind": "clip", "ratio": 1.0, "seed": 0, "lower": -3.0, "epsilon_low": 1.0, "epsilon_high": 100.0},
    "kl": {"kind": "kl", "ratio": 0.05},
    "kl, one": {"kind": "kl", "ratio": 1e-9},
    "kl, all": {"kind": "kl", "ratio": 1.0},
}
NAMES = ("logprob", "old_logprob", "advantage", "mask")


def make(rows: int, columns: int, seed: int = 0) -> dict[str, Any]:
    return {k: v for k, v in arrays(rows, columns, seed).items() if k in NAMES}


def run(a: dict[str, Any], name: str, **more: Any) -> Any:
    return call(a, **(OPTIONS[name] | more))


def call(a: dict[str, Any], **options: Any) -> Any:
    old = a["old_logprob"] if options["kind"] == "clip" else None
    return rk.covariance_mask(a["logprob"], old, a["advantage"], a["mask"], **options)


def want_of(a: dict[str, Any], **options: Any) -> dict[str, np.ndarray]:
    old = a["old_logprob"] if options["kind"] == "clip" else None
    return rk.covariance_mask_reference(a["logprob"], old, a["advantage"], a["mask"], **options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(1, 1), (12, 97), (3, 1300)])
def test_the_choice_is_the_references(shape: tuple[int, int], name: str, device: str) -> None:
    """Covariances differ from each other and from the bounds by enough that float32 makes the same choice."""
    a = make(*shape, seed=3)
    want = want_of(a, **OPTIONS[name])["selected"]
    got = run(tensors(a, device), name).cpu()
    assert same(got, want.astype(np.float32))
    n, most = int(a["mask"].sum()), max(int(OPTIONS[name]["ratio"] * a["mask"].sum()), 1)
    if shape != (1, 1):
        full = name not in ("clip, all", "clip")
        assert (want.sum() == min(most, n)) if full else 0 < want.sum() <= most


def test_fuzzed_options_choose_what_the_reference_does() -> None:
    random = np.random.default_rng(0)
    part = 0
    for _ in range(150):
        a = make(int(random.integers(1, 9)), int(random.integers(1, 200)), seed=int(random.integers(1 << 30)))
        options: dict[str, Any] = {"kind": "kl", "ratio": float(random.uniform(0.001, 1))}
        if random.integers(2):
            options = {
                "kind": "clip", "ratio": float(random.uniform(0.001, 0.3)), "seed": int(random.integers(1 << 62)),
                "lower": float(random.uniform(-1, 1)), "upper": float(random.uniform(1, 4)),
                "epsilon_low": float(random.uniform(0, 1)), "epsilon_high": float(random.uniform(0, 1)),
            }  # fmt: skip
        want = want_of(a, **options)["selected"]
        assert same(call(a, **options), want.astype(np.float32)), options
        part += bool(want.sum() > 1)
    assert part > 75


def test_kl_cov_is_verls() -> None:
    a = tensors(arrays(6, 80, seed=5))
    valid = torch.nonzero(a["mask"].reshape(-1)).squeeze(-1)
    adv, logp = a["advantage"][a["mask"]], a["logprob"][a["mask"]]
    cov = (adv - adv.mean()) * (logp - logp.mean())
    want = torch.zeros(a["mask"].numel())
    want[valid[torch.topk(cov, max(1, int(len(cov) * 0.03))).indices]] = 1
    got = rk.covariance_mask(a["logprob"], None, a["advantage"], a["mask"], kind="kl", ratio=0.03)
    assert same(got.reshape(-1), want)


def test_clip_cov_draws_from_verls_candidates_without_a_preference() -> None:
    """Over 800 seeds all candidates are drawn about equally often, within five standard deviations of the binomial."""
    a = tensors(arrays(4, 60, seed=2))
    counts = a["mask"]
    ratio = (a["logprob"] - a["old_logprob"]).exp()
    p1, p2 = -a["advantage"] * ratio, -a["advantage"] * ratio.clamp(0.8, 1.2)
    mean = {k: a[k][counts].mean() for k in ("advantage", "logprob")}
    cov = (a["advantage"] - mean["advantage"]) * (a["logprob"] - mean["logprob"])
    candidates = (cov > 0.3) & (cov < 5.0) & ~(p2 > p1) & counts
    times = torch.zeros_like(cov)
    how: dict[str, Any] = {"kind": "clip", "ratio": 0.03, "lower": 0.3}
    draws, chosen = 800, max(int(0.03 * int(counts.sum())), 1)
    for seed in range(draws):
        got = rk.covariance_mask(a["logprob"], a["old_logprob"], a["advantage"], counts, seed=seed, **how)
        assert int(got.sum()) == chosen
        times += got
    assert not times[~candidates].any()
    share = chosen / int(candidates.sum())
    assert share < 0.5, "a draw of most of them shows nothing"
    far = (times[candidates] - draws * share).abs().max()
    assert float(far) < 5 * (draws * share * (1 - share)) ** 0.5


def test_what_is_chosen_has_no_policy_term() -> None:
    a = tensors(arrays(5, 60, seed=4))
    selected = run(a, "clip, wide")
    assert selected.sum() > 3
    spec = rk.PolicySpec(clip="clip_cov", epsilon_high=0.5)
    found = rk.policy_loss_and_grad(
        a["logprob"], a["old_logprob"], a["advantage"], a["mask"], spec=spec, selected=selected
    )
    assert not found.d_logprob[selected > 0].any()
    assert float(found.metrics.clip_fraction) == pytest.approx(float(selected.sum() / a["mask"].sum()), rel=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_packing_padding_and_strides_change_no_choice(name: str, device: str) -> None:
    a = make(5, 300, seed=1)
    lengths = [300, 0, 17, 256, 131]
    a["mask"] &= np.arange(300) < np.array(lengths)[:, None]
    want = run(tensors(a, device), name)
    flat = {k: np.concatenate([x[:n] for x, n in zip(v, lengths, strict=True)]) for k, v in a.items()}
    cuts = torch.from_numpy(np.cumsum([0, *lengths])).to(device)
    for dtype in (torch.int32, torch.int64):
        got = run(tensors(flat, device), name, cu_seqlens=cuts.to(dtype))
        for s, n in enumerate(lengths):
            assert same(got[cuts[s] : cuts[s + 1]].cpu(), want[s, :n].cpu())
    strided = {}
    for i, (k, x) in enumerate(tensors(a, device).items()):
        wide = torch.zeros((5, 400), dtype=x.dtype, device=device)
        wide[:, 3 + i : 303 + i] = x
        strided[k] = wide[:, 3 + i : 303 + i]
    assert same(run(strided, name).cpu(), want.cpu())
    more = {k: np.concatenate((x, x[:1]), 0) for k, x in a.items()}
    more["mask"][5] = False  # rows without tokens, after the other rows
    assert same(run(more, name)[:5], want.cpu())


def test_an_advantage_of_sequences_is_that_of_their_tokens() -> None:
    a = make(4, 50, seed=6)
    one = a["advantage"][:, 0]
    want = run({**a, "advantage": np.repeat(one[:, None], 50, 1)}, "clip, wide")
    assert want.sum() > 2
    assert same(run({**a, "advantage": one.copy()}, "clip, wide"), want)


@pytest.mark.parametrize("name", OPTIONS)
def test_masked_slots_are_never_read(name: str) -> None:
    a = make(4, 65, seed=2)
    got = run(wild(a), name)
    assert same(got, run(a, name))
    assert not got[~a["mask"]].view(np.int32).any(), "+0"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_masks_of_every_dtype_say_the_same(dtype: torch.dtype) -> None:
    a = tensors(make(4, 50, seed=6))
    assert same(run({**a, "mask": a["mask"].to(dtype)}, "kl"), run(a, "kl"))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (3, 7)])
def test_without_a_token_none_is_chosen(shape: tuple[int, int], name: str) -> None:
    x = torch.full(shape, float("nan"))
    a = {"logprob": x, "old_logprob": x, "advantage": x, "mask": torch.zeros(shape, dtype=torch.bool)}
    assert same(run(a, name), np.zeros(shape, np.float32))


def test_a_nan_is_no_candidate_of_a_draw_and_the_first_of_the_largest() -> None:
    a = make(2, 40, seed=9)
    a["mask"][:] = True
    a["advantage"][1, 3] = np.nan  # makes the mean NaN, so all covariances are
    assert not run(a, "clip, all").any()
    assert run(a, "kl, one")[0, 0] == 1.0
    b = make(2, 40, seed=9)
    b["mask"][:] = True
    b["old_logprob"][:] = np.nan  # then PPO clips no ratio
    assert run(b, "clip, all").any()


def test_of_equal_covariances_the_first_are_chosen() -> None:
    flat = np.zeros((3, 50), np.float32)
    got = rk.covariance_mask(flat, None, flat, None, kind="kl", ratio=0.5)
    assert same(got.reshape(-1), (np.arange(150) < 75).astype(np.float32))


def test_numpy_and_jax_get_torchs_bytes() -> None:
    a = make(3, 40, seed=8)
    want = run(tensors(a), "clip, wide")
    assert isinstance(run(a, "clip, wide"), np.ndarray)
    assert same(run(a, "clip, wide"), want)
    jax = pytest.importorskip("jax")
    got = run({k: jax.numpy.asarray(x) for k, x in a.items()}, "clip, wide")
    assert isinstance(got, jax.Array)
    assert same(got, want)


def test_no_choice_depends_on_the_number_of_threads() -> None:
    a = tensors(make(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append([run(a, name) for name in OPTIONS])
    finally:
        torch.set_num_threads(before)
    assert all(same(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_choose_the_same_for_any_seed(backend: str, device: str) -> None:
    a = tensors(make(4, 65), device)
    counter = CompileCounterWithBackend(backend)
    compiled: Any = torch.compile(lambda a, seed: run(a, "clip, wide", seed=seed), fullgraph=True, backend=counter)
    learned = {**a, "logprob": a["logprob"].clone().requires_grad_()}
    for seed in (5, 6, 7, 123456789012345678):
        want = run(a, "clip, wide", seed=seed)
        assert same(compiled(a, seed).cpu(), want.cpu())
    assert counter.frame_count <= 2, "one compilation for the first seed, one for all others"
    assert not run(learned, "clip, wide").requires_grad
    torch.library.opcheck(
        torch.ops.rl_kernel_native.covariance_mask,
        (*(a[k] for k in NAMES), None, 0, 0.1, 0.1, 5.0, 0.8, 1.2, 7), test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_of_as_many_tokens_as_sequences_a_column_is_of_sequences() -> None:
    flat = {k: x[0] for k, x in tensors(make(1, 60, seed=3)).items()}
    cuts = torch.arange(0, 121, 2).clamp(max=60)  # 30 sequences of two tokens each, and 30 empty sequences
    of_sequences = flat["advantage"]
    want = run({**flat, "advantage": of_sequences[torch.arange(60) // 2]}, "kl", cu_seqlens=cuts)
    assert same(run({**flat, "advantage": of_sequences[:, None]}, "kl", cu_seqlens=cuts), want)
    assert not same(run(flat, "kl", cu_seqlens=cuts), want)


X = torch.zeros(2, 8)


def of_x(**changed: Any) -> Any:
    arguments: dict[str, Any] = {
        "logprob": X,
        "old_logprob": X,
        "advantage": X,
        "kind": "clip",
        "ratio": 0.1,
        "seed": 1,
    }
    return rk.covariance_mask(**(arguments | changed))


KL: dict[str, Any] = {"kind": "kl", "old_logprob": None, "seed": None}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"logprob": X.double()}, TypeError, "logprob: expected dtype float32, got float64"),
    "shape": ({"old_logprob": X[0]}, ValueError, "old_logprob: expected shape [2, 8] (that of logprob), got [8]"),
    "advantage": ({"advantage": X[:, :3]}, ValueError, "advantage: expected shape [2, 8] or [2] (that of logprob, or"),
    "no advantage": ({"advantage": None}, TypeError, "advantage: expected"),
    "mask": ({"mask": X[:1]}, ValueError, "mask: expected shape [2, 8] (that of logprob), got [1, 8]"),
    "kind": ({"kind": "cov"}, ValueError, 'kind: expected "clip", "kl", got'),
    "ratio": ({"ratio": 0.0}, ValueError, "ratio: expected a number in (0, 1], got 0.0"),
    "ratio above": ({"ratio": 1.5}, ValueError, "ratio: expected a number in (0, 1], got 1.5"),
    "no seed": ({"seed": None}, ValueError, 'seed: expected an integer, which kind="clip" draws by, got None'),
    "seed": ({"seed": -1}, ValueError, "seed: expected an integer in [0, 2^63), got -1"),
    "seed type": ({"seed": 1.5}, TypeError, "seed: expected an integer, got float"),
    "equal bounds": (
        {"lower": 2.0, "upper": 2 + 1e-12}, ValueError,
        "upper: expected a number > lower = 2, got 2.000000000001, which is 2 in float32",
    ),
    "lower": ({"lower": -1e39}, ValueError, "lower: expected a number, got -1e+39, which is -inf in float32"),
    "bounds": ({"lower": 2.0, "upper": 2.0}, ValueError, "upper: expected a number > lower = 2, got 2.0"),
    "epsilon_low": ({"epsilon_low": 1.5}, ValueError, "epsilon_low: expected a number in [0, 1], got 1.5"),
    "epsilon_high": ({"epsilon_high": -1}, ValueError, "epsilon_high: expected a number in [0, inf], got -1"),
    "no old": ({"old_logprob": None}, ValueError, 'old_logprob: expected an array, which kind="clip" needs, got None'),
    "old of kl": (KL | {"old_logprob": X}, ValueError, 'old_logprob: expected None with kind="kl"'),
    "seed of kl": (KL | {"seed": 1}, ValueError, 'seed: expected None with kind="kl"'),
    "bound of kl": (KL | {"lower": 1.0}, ValueError, 'lower: expected None with kind="kl"'),
    "cuts": (
        {"logprob": X[0], "old_logprob": X[0], "advantage": X[0], "cu_seqlens": torch.tensor([0, 9, 8])}, ValueError,
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
def test_cpu_and_cuda_choose_the_same(name: str) -> None:
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000), (5000, 7), (600, 8192)):
        a = make(rows, columns, seed=11)
        want = run(tensors(a), name)
        there = tensors(a, "cuda")
        assert same(run(there, name).cpu(), want)
        cuts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns
        flat = {k: x.reshape(-1) for k, x in there.items()}
        assert same(run(flat, name, cu_seqlens=cuts).cpu(), want.reshape(-1))


@pytest.mark.gpu
def test_a_gpu_says_nan_of_bad_cuts() -> None:
    a = {k: x.reshape(-1) for k, x in tensors(make(4, 50), "cuda").items()}
    for cuts in ([0, 40, 100, 90, 160, 200], [0, 50, 300]):
        found = run(a, "clip", cu_seqlens=torch.tensor(cuts, dtype=torch.int32, device="cuda"))
        assert bool(found.isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["clip, wide", "kl"])
def test_a_cuda_graph_replays_without_a_synchronisation(name: str) -> None:
    a = tensors(make(64, 512, seed=12), "cuda")
    graph, got = captured(lambda: run(a, name))
    a["advantage"].mul_(-1.1)
    graph.replay()
    torch.cuda.synchronize()
    assert same(got.cpu(), run(a, name).cpu())
