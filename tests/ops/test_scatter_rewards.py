"""scatter_rewards: float64, the formulas of verl, OpenRLHF and TRL, the bits of kl, the same bits for every layout of
sequences, bad input, and calls through torch. test_scatter_rewards.cpp compares the contract's bytes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import framework_sources
import rl_kernel_native as rk
from cases import beyond
from policy_loss_cases import same, tensors
from reward_batches import HOW, LENGTHS, SEQUENCES, TOKENS, arguments, batch, ragged, reference, run, select, wild
from torch_properties import captured


def assert_same(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        assert g is None or same(g.cpu() if isinstance(g, torch.Tensor) else g, w)


def far(got: rk.ScatteredRewards, want: dict[str, np.ndarray]) -> str:
    """Results that are further from float64 than contract.py allows. No addend in these batches is above 8."""
    found = got._asdict()
    assert {name for name, array in found.items() if array is not None} == set(want)
    facts = {"rewards": {"largest": 8.0}, "combined": {"largest": 8.0}, "costs": {}, "lengths": {}}
    return "; ".join(filter(None, (beyond("scatter_rewards", k, found[k], x, **facts[k]) for k, x in want.items())))


@pytest.mark.parametrize("name", HOW)
def test_values_lie_near_float64(name: str, device: str) -> None:
    for shape in ((1, 1), (12, 97), (3, 1300)):
        a = batch(*shape, seed=len(name))
        want = reference(a, name)
        assert not far(run(tensors(a, device), name), want)
        assert shape == (1, 1) or np.count_nonzero(want["rewards"]) >= 2, "a batch of zeros tests nothing"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 6), columns=st.integers(0, 90), seed=st.integers(0, 1 << 30), name=st.sampled_from(list(HOW)),
    place=st.sampled_from(["last", "first", "spread"]), masked=st.sampled_from([0.0, 0.3, 0.95]),
    packed=st.booleans(),
)  # fmt: skip
def test_fuzzed_batches_lie_near_float64(
    rows: int, columns: int, seed: int, name: str, place: str, masked: float, packed: bool
) -> None:
    a = batch(rows, columns, seed, masked)
    cuts: dict[str, Any] = {}
    if packed:
        a |= {k: a[k].reshape(-1) for k in TOKENS}
        cuts = {"cu_seqlens": np.arange(rows + 1) * columns}
    call = {**arguments(a, name), "place": place, **cuts}
    assert not far(rk.scatter_rewards(**call), rk.scatter_rewards_reference(**call))


def test_rewards_and_kl_are_verls_openrlhfs_and_trls() -> None:
    """Compares with verl's apply_kl_penalty, OpenRLHF's compute_reward and TRL's PPOTrainer; their masks end where a
    response ends."""
    a = tensors(batch(6, 40, seed=4))
    length = torch.tensor([40, 1, 7, 39, 20, 33])
    mask, beta = torch.arange(40) < length[:, None], 0.05
    kl = (a["logprob"] - a["ref_logprob"]) * mask
    scores = torch.zeros(6, 40).scatter_(1, length[:, None] - 1, a["rewards"][:, None])  # as verl's reward manager does
    eos = mask.size(1) - 1 - mask.long().fliplr().argmax(dim=1, keepdim=True)  # as OpenRLHF does
    openrlhf = torch.zeros_like(kl).scatter_(1, eos, a["rewards"][:, None]) + -beta * kl
    trl = -beta * kl
    trl[torch.arange(6), length - 1] += a["rewards"]
    got = rk.scatter_rewards(
        a["rewards"], mask, logprob=a["logprob"], ref_logprob=a["ref_logprob"], kl_coef=beta, kl_estimator="k1"
    )
    for want in (scores - beta * kl, openrlhf, trl):
        assert not beyond("scatter_rewards", "rewards", got.rewards, want.double(), largest=8.0)
    assert torch.equal(got.lengths, length)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_is_openrlhfs_own(estimator: str) -> None:
    models = framework_sources.openrlhf()
    a = tensors(batch(6, 40, seed=4))
    a["ref_logprob"][0, :4] -= 20.0  # exceeds the limit of the KL
    mask = torch.arange(40) < torch.tensor([40, 1, 7, 39, 20, 33])[:, None]
    kl = models.compute_approx_kl(a["logprob"], a["ref_logprob"], kl_estimator=estimator) * mask
    want = models.compute_reward(a["rewards"], 0.05, kl, mask)
    got = rk.scatter_rewards(
        a["rewards"], mask, logprob=a["logprob"], ref_logprob=a["ref_logprob"], kl_coef=0.05, kl_estimator=estimator,
        kl_clamp=10.0,
    )  # fmt: skip
    assert not beyond("scatter_rewards", "rewards", got.rewards, want.double(), largest=8.0)


@pytest.mark.parametrize(("length", "penalty"), [(16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)])
def test_overlong_responses_are_dapos(length: int, penalty: float) -> None:
    """verl's DAPORewardManager with the paper's numbers: 20480 tokens, and a buffer of 4096."""
    mask = np.arange(20481)[None] < length
    got = rk.scatter_rewards(np.ones(1, np.float32), mask, overlong=(20480, 4096, 1.0))
    assert got.rewards[0, length - 1] == 1 + np.float32(penalty)
    assert np.count_nonzero(got.rewards) == (1 + penalty != 0)


def test_a_reward_and_a_cost_are_combined_as_in_safe_rlhf() -> None:
    a = tensors(batch(5, 30, seed=7))
    multiplier = torch.tensor(1.5)
    kept = rk.scatter_rewards(a["rewards"], a["mask"], cost=a["cost"], lagrange=multiplier, normalize_lagrange=True)
    apart = rk.scatter_rewards(a["rewards"], a["mask"]), rk.scatter_rewards(a["cost"], a["mask"])
    assert torch.equal(kept.rewards, apart[0].rewards)
    assert torch.equal(kept.costs, apart[1].rewards)
    want = (kept.rewards.double() - multiplier * kept.costs.double()) / (1.0 + multiplier)
    assert not beyond("scatter_rewards", "combined", kept.combined, want, largest=8.0)


def test_a_weight_is_the_same_as_a_number_and_as_an_element() -> None:
    a = tensors(batch(5, 30, seed=7))
    with_number = rk.scatter_rewards(a["rewards"], a["mask"], cost=a["cost"], lagrange=0.75)
    of_numpy = rk.scatter_rewards(a["rewards"], a["mask"], cost=a["cost"], lagrange=np.float32(0.75))
    assert_same(of_numpy, with_number)
    for element in (torch.tensor(0.75), torch.tensor([0.75]), torch.tensor(0.75, requires_grad=True)):
        assert_same(rk.scatter_rewards(a["rewards"], a["mask"], cost=a["cost"], lagrange=element), with_number)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_kl_has_the_bits_of_kl(estimator: str) -> None:
    a = batch(4, 70, seed=6)
    options: dict[str, Any] = {"input_clamp": 0.3, "clamp": 0.05}
    kl = rk.kl(a["logprob"], a["ref_logprob"], a["mask"], estimator=estimator, **options)
    got = rk.scatter_rewards(
        None, a["mask"], logprob=a["logprob"], ref_logprob=a["ref_logprob"], kl_coef=1.0, kl_estimator=estimator,
        kl_input_clamp=0.3, kl_clamp=0.05,
    ).rewards  # fmt: skip
    assert same(got, np.float32(0) - kl)


def test_spans_of_one_token_add_in_their_order() -> None:
    """fp32 addition is not associative, so any other order gives other bits."""
    values = np.array([1e8, 1.0, -1e8, 1.0, 3.0], np.float32)
    mask = np.array([[1, 1, 1, 0, 0]], np.int32)
    spans = np.array([[0, 5], [1, 3], [2, 4], [0, 3], [3, 5]])  # the last token does not count
    call: dict[str, Any] = {"spans": spans, "span_offsets": np.array([0, 5]), "span_rewards": values}
    got = rk.scatter_rewards(np.array([0.5], np.float32), mask, **call)
    want = np.float32(0)
    for x in (*values[:4], np.float32(0.5)):
        want = np.float32(want + x)
    assert got.rewards.tolist() == [[0, 0, want, 0, 0]]
    assert want != np.float32(2.5)
    first = rk.scatter_rewards(None, mask, place="first", **call).rewards
    assert first.tolist() == [[np.float32(1e8) + 1, 1, -1e8, 0, 0]]


def test_turns_are_placed_where_their_tokens_count() -> None:
    """Two turns of the model with a tool's answer between them. Spans that cover both turns place their rewards."""
    mask = np.array([[0, 1, 1, 0, 0, 1, 1, 1, 0, 0]], bool)
    call: dict[str, Any] = {
        "spans": np.array([[0, 5], [5, 10]], np.int32), "span_offsets": np.array([0, 2]),
        "span_rewards": np.array([2.0, 3.0], np.float32),
    }  # fmt: skip
    want = {"last": [0, 0, 2, 0, 0, 0, 0, 3, 0, 0], "first": [0, 2, 0, 0, 0, 3, 0, 0, 0, 0]}
    want["spread"] = [0, 1, 1, 0, 0, 1, 1, 1, 0, 0]
    for place, expected in want.items():
        assert rk.scatter_rewards(None, mask, place=place, **call).rewards.tolist() == [expected]


@pytest.mark.parametrize("name", HOW)
def test_packing_padding_and_strides_change_no_bit(name: str, device: str) -> None:
    padded, packed, cuts = ragged()
    want = run(tensors(padded, device), name)
    for dtype in (torch.int32, torch.int64):
        got = run(tensors(packed, device), name, cu_seqlens=torch.from_numpy(cuts).to(device, dtype))
        for s, n in enumerate(LENGTHS):
            of_tokens = [None if x is None else x[cuts[s] : cuts[s + 1]] for x in got[:3]]
            assert_same(of_tokens, [None if x is None else x[s, :n].cpu() for x in want[:3]])
        assert_same(got[3:], [want.lengths.cpu()])
    strided = tensors(padded, device)
    for i, k in enumerate(TOKENS):
        wide = torch.zeros((5, 400), dtype=strided[k].dtype, device=device)
        wide[:, 3 + i : 303 + i] = strided[k]
        strided[k] = wide[:, 3 + i : 303 + i]
    for k in SEQUENCES:
        strided[k] = torch.stack((strided[k], strided[k]), 1)[:, 1]
    strided["spans"] = strided["spans"].to(torch.int32)
    strided["span_offsets"] = strided["span_offsets"].to(torch.int64)
    assert_same(run(strided, name), [None if x is None else x.cpu() for x in want])


@pytest.mark.parametrize("name", HOW)
def test_a_sequence_has_its_bits_in_any_batch(name: str) -> None:
    a = batch(5, 90, seed=7)
    want = run(a, name)
    for order in ([4, 2, 0, 1, 3], [3], [2, 2]):
        assert_same(run(select(a, order), name), [None if x is None else x[order] for x in want])


@pytest.mark.parametrize("name", HOW)
def test_masked_slots_are_never_read_and_hold_zero(name: str) -> None:
    a = batch(4, 65, seed=2)
    want, got = run(a, name), run(wild(a), name)
    assert_same(got, want)
    for x in got[:3]:
        assert x is None or not x[~a["mask"]].view(np.int32).any(), "+0"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_masks_of_every_dtype_say_the_same(dtype: torch.dtype) -> None:
    a = tensors(batch(4, 50, seed=6))
    assert_same(run({**a, "mask": a["mask"].to(dtype)}, "all"), run(a, "all"))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (3, 7)])
def test_without_a_token_all_are_zero(shape: tuple[int, int]) -> None:
    a = batch(*shape)
    got = run({**a, "mask": np.zeros(shape, bool)}, "all")
    assert_same(got, [*[np.zeros(shape, np.float32)] * 3, np.zeros(shape[0], np.int64)])


def test_what_is_not_finite_stays_at_its_place() -> None:
    mask = np.ones((4, 5), bool)
    rewards = np.array([math.nan, 1, math.inf, -0.0], np.float32)
    got = rk.scatter_rewards(rewards, mask, cost=np.full(4, -0.0, np.float32))
    want = np.zeros((4, 5), np.float32)
    want[:3, 4] = math.nan, 1, math.inf
    assert same(got.rewards, want)
    assert same(got.costs, np.zeros((4, 5), np.float32)), "no zero has a sign"
    of_gae = rk.gae(got.rewards, np.zeros((4, 5), np.float32), mask, gamma=1.0, lam=1.0)
    assert np.isnan(of_gae.advantages[0]).all()
    assert np.isfinite(of_gae.advantages[1]).all()


def test_without_a_coefficient_no_kl_is_read() -> None:
    a = batch(3, 20)
    nan = np.full((3, 20), math.nan, np.float32)
    want = rk.scatter_rewards(a["rewards"], a["mask"])
    assert_same(rk.scatter_rewards(a["rewards"], a["mask"], logprob=nan, ref_logprob=nan), want)


def test_numpy_and_jax_get_torchs_bytes() -> None:
    a = batch(3, 40, seed=8)
    want = run(tensors(a), "all")
    assert isinstance(run(a, "all").rewards, np.ndarray)
    assert_same(run(a, "all"), want)
    jax = pytest.importorskip("jax")
    a["spans"] = a["spans"].astype(np.int32)
    got = run({k: jax.numpy.asarray(x) for k, x in a.items()}, "all")
    assert isinstance(got.combined, jax.Array)
    assert_same(got[:3], want[:3])
    assert np.array_equal(got.lengths, want.lengths)


def test_no_bit_depends_on_the_number_of_threads() -> None:
    a = tensors(batch(40, 3000, seed=10))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(a, "all")
        torch.set_num_threads(3)
        assert_same(run(a, "all"), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sequences", "lagrange", "all"])
def test_compiled_calls_give_the_same_bytes(name: str, backend: str, device: str) -> None:
    torch._dynamo.reset()  # the limit of recompilations counts for the function over all cases
    a = tensors(batch(4, 65), device)
    want = [None if x is None else x.cpu() for x in run(a, name)]
    compiled: Any = torch.compile(lambda a: run(a, name), fullgraph=True, backend=backend)
    assert_same(compiled(a), want)
    learned = {**a, "rewards": a["rewards"].clone().requires_grad_()}
    assert_same(compiled(learned), want)
    assert not run(learned, name).rewards.requires_grad


def test_the_operator_keeps_its_schema(device: str) -> None:
    a = tensors(batch(4, 65), device)
    names = (
        "mask", "rewards", "token_rewards", "spans", "span_offsets", "span_rewards", "logprob", "ref_logprob", "cost",
    )  # fmt: skip
    spec = [1.0, 0.1, math.inf, math.inf, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0]
    calls = (names, (a["lagrange"], spec, False, 0.0)), (names[:2], (None, [0.0, *spec[1:]], False, 0.0))
    for given_names, lagrange in calls:
        operands = (a[k] if k in given_names else None for k in names)
        torch.library.opcheck(
            torch.ops.rl_kernel_native.scatter_rewards, (*operands, None, *lagrange),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


M, R, X = torch.ones(2, 8), torch.zeros(2), torch.zeros(2, 8)
SPANS: dict[str, Any] = {
    "spans": torch.tensor([[0, 8], [2, 4]]), "span_offsets": torch.tensor([0, 1, 2]), "span_rewards": torch.zeros(2),
}  # fmt: skip
KL: dict[str, Any] = {"logprob": X, "ref_logprob": X, "kl_coef": 0.1}


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "mask": ({"mask": M * 1j}, TypeError, "mask: expected"),
    "no mask": ({"mask": None}, TypeError, "mask: expected"),
    "small mask": ({"mask": M.to(torch.float8_e5m2)}, TypeError, "mask: expected dtype bool, of integers or of floats"),
    "mask of three": ({"mask": M[None]}, ValueError, "mask: expected shape [num_sequences, num_tokens] or ["),
    "strided mask": ({"mask": M.T.contiguous().T}, ValueError, "mask: expected a contiguous last dimension (stri"),
    "rewards": ({"rewards": R.double()}, TypeError, "rewards: expected dtype float32, got float64"),
    "rewards of tokens": ({"rewards": X}, ValueError, "rewards: expected shape [2] (one a sequence), got [2, 8]"),
    "cost": ({"cost": R[:1]}, ValueError, "cost: expected shape [2] (one a sequence), got [1]"),
    "token_rewards": ({"token_rewards": X[0]}, ValueError, "token_rewards: expected shape [2, 8] (that of mask), got"),
    "logprob": (KL | {"logprob": X[:1]}, ValueError, "logprob: expected shape [2, 8] (that of mask), got [1, 8]"),
    "no ref_logprob": (KL | {"ref_logprob": None}, ValueError, "ref_logprob: expected an array with logprob, got None"),
    "no logprob": ({"kl_coef": 0.1}, ValueError, "logprob: expected an array with kl_coef = 0.1, got None"),
    "kl_coef": (KL | {"kl_coef": -1.0}, ValueError, "kl_coef: expected a finite number >= 0, got -1.0"),
    "estimator": (KL | {"kl_estimator": "k4"}, ValueError, 'kl_estimator: expected "k1", "k2", "k3", "abs", got'),
    "clamp": (KL | {"kl_clamp": 0.0}, ValueError, "kl_clamp: expected a finite number > 0 or None, got 0.0"),
    "length_penalty": ({"length_penalty": math.nan}, ValueError, "length_penalty: expected a finite number >= 0"),
    "overlong": ({"overlong": 5}, TypeError, "overlong: expected None or (max_length, buffer, penalty), got 5"),
    "buffer": ({"overlong": (5, 6, 1.0)}, ValueError, "overlong: expected 0 < buffer <= max_length < 2^33, got 5"),
    "overlong penalty": ({"overlong": (5, 1, -1.0)}, ValueError, "overlong: expected a finite number >= 0, got -1.0"),
    "place": ({"place": "middle"}, ValueError, 'place: expected "last", "first", "spread", got'),
    "spans alone": ({"spans": SPANS["spans"]}, ValueError, "span_offsets: expected an array with spans, got None"),
    "spans": (SPANS | {"spans": torch.zeros(2, 3).long()}, ValueError, "spans: expected a contiguous array of shape"),
    "span dtype": (SPANS | {"spans": torch.zeros(2, 2)}, TypeError, "spans: expected dtype int32 or int64, got"),
    "span_offsets of none": (
        {"spans": SPANS["spans"][:0], "span_offsets": torch.tensor([5]), "span_rewards": R[:0], "mask": X[:0],
         "rewards": None}, ValueError, "span_offsets: expected 0 first, got 5 at index 0",
    ),
    "span_offsets": (
        SPANS | {"span_offsets": torch.tensor([0, 2])}, ValueError,
        "span_offsets: expected shape [3] (num_sequences + 1), got [2]",
    ),
    "span_rewards": (
        SPANS | {"span_rewards": torch.zeros(3)}, ValueError, "span_rewards: expected shape [2] (one a span), got [3]",
    ),
    "a span outside": (
        SPANS | {"spans": torch.tensor([[0, 8], [2, 9]])}, ValueError,
        "spans: expected 0 <= begin <= end <= 8 (the length of sequence 1), got 2, 9 for span 1",
    ),
    "offsets": (
        SPANS | {"span_offsets": torch.tensor([0, 3, 2])}, ValueError,
        "span_offsets: expected at most 2 (the number of spans), got 3 at index 1",
    ),
    "lagrange alone": ({"lagrange": 0.5}, ValueError, "cost: expected an array with lagrange, got None"),
    "lagrange": ({"cost": R, "lagrange": -0.5}, ValueError, "lagrange: expected a finite number >= 0, got -0.5"),
    "lagrange of float64": (
        {"cost": R, "lagrange": 1e39}, ValueError,
        "lagrange: expected a finite number >= 0, got 1e+39, which is inf in float32",
    ),
    "lagrange of two": ({"cost": R, "lagrange": R}, ValueError, "lagrange: expected one element, got shape [2]"),
    "lagrange dtype": (
        {"cost": R, "lagrange": torch.tensor(1.0).double()}, TypeError, "lagrange: expected dtype float32, got float64",
    ),
    "normalize": ({"normalize_lagrange": True}, ValueError, "normalize_lagrange: expected False without lagrange"),
    "normalize type": ({"normalize_lagrange": 1}, TypeError, "normalize_lagrange: expected a bool, got int"),
    "cuts": (
        {"mask": M[0], "cu_seqlens": torch.tensor([0, 9, 8])}, ValueError,
        "cu_seqlens: expected at most 8 (the number of tokens), got 9 at index 1",
    ),
    "packed mask": ({"cu_seqlens": torch.tensor([0, 4, 8])}, ValueError, "mask: expected shape [num_tokens] beside"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    changed, error, text = BAD[case]
    with pytest.raises(error, match="^" + re.escape(text)):
        rk.scatter_rewards(**({"rewards": R, "mask": M} | changed))


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOW)
def test_cpu_and_cuda_have_the_same_bytes(name: str) -> None:
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000), (5000, 7)):
        a = batch(rows, columns, seed=11)
        want = run(tensors(a), name)
        there = tensors(a, "cuda")
        assert_same(run(there, name), want)
        cuts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * columns
        flat = there | {k: there[k].reshape(-1) for k in TOKENS}
        assert_same(
            run(flat, name, cu_seqlens=cuts), [None if x is None else x.reshape(-1) for x in want[:3]] + [want.lengths]
        )


@pytest.mark.gpu
def test_a_gpu_says_nan_where_a_span_is_none() -> None:
    a = tensors(batch(4, 50, seed=3, masked=0.0), "cuda")
    spans: dict[str, Any] = {
        "spans": torch.tensor([[0, 51], [3, 2], [-1, 4], [0, 50]], device="cuda"),
        "span_offsets": torch.arange(5, device="cuda"),
        "span_rewards": torch.ones(4, device="cuda"),
    }
    a["mask"][:] = True
    got = rk.scatter_rewards(a["rewards"], a["mask"], **spans).rewards
    assert got[:, -1].isnan().tolist() == [True, True, True, False]
    assert not bool(got[:, :-1].isnan().any())


@pytest.mark.gpu
def test_a_gpu_says_nan_beside_bad_cuts() -> None:
    cuts = torch.tensor([0, 40, 100, 90, 160, 200], dtype=torch.int32, device="cuda")
    got = rk.scatter_rewards(torch.ones(5, device="cuda"), torch.ones(200, device="cuda"), cu_seqlens=cuts)
    in_doubt = torch.zeros(200, dtype=torch.bool, device="cuda")
    in_doubt[40:160] = True  # every sequence that begins or ends at 100 or 90
    assert bool(got.rewards[in_doubt].isnan().all())
    assert not bool(got.rewards[~in_doubt].isnan().any())
    assert got.lengths.tolist() == [40, 0, 0, 0, 40]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sequences", "all"])
def test_a_cuda_graph_replays_without_a_synchronisation(name: str) -> None:
    a = tensors(batch(64, 512, seed=12), "cuda")
    graph, got = captured(lambda: run(a, name))
    a["rewards"].mul_(1.1)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, [None if x is None else x.cpu() for x in run(a, name)])
