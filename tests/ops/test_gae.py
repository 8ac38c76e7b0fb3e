"""gae, discounted_returns and vtrace: the contract's bytes, float64, verl's formula, the same bits for every layout
of sequences, bad input, and calls through torch."""

from __future__ import annotations

import functools
import itertools
import os
import re
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from advantage_cases import LENGTHS, MASKS, Batch, batch, contract_gae, scan_failures, verl_gae
from cases import differing
from torch_properties import captured

torch = pytest.importorskip("torch", reason="layouts are made with torch")

FUZZ = int(os.environ.get("RLK_FUZZ_CASES", "400")) // 4


def calls(b: Batch, mask: Any, cu: Any = None, **options: Any) -> dict[str, tuple[Any, ...]]:
    """Outputs of every function."""
    gamma, lam = options.pop("gamma", 0.99), options.pop("lam", 0.95)
    tokens, policies = b.tokens(), b.policies()
    return {
        "gae": rk.gae(**tokens, mask=mask, cu_seqlens=cu, gamma=gamma, lam=lam, **options),
        "vtrace": rk.vtrace(
            **policies, mask=mask, cu_seqlens=cu, gamma=gamma, lam=lam, rho_bar=1.1, c_bar=1.2, **options
        ),
        "reset": (rk.discounted_returns(b.rewards, mask, cu, gamma, masked="reset"),),
        "carry": (rk.discounted_returns(b.rewards, mask, cu, gamma, masked="carry"),),
    }


def assert_same(got: Any, want: Any, what: Any = "") -> None:
    found = differing(tuple(got), tuple(want))
    assert not found, f"{what}: {found}"


# ---- values ---------------------------------------------------------------------------------------------------------


def test_gae_has_the_bytes_of_the_contract(device: str, rng: np.random.Generator) -> None:
    for length, mask_dtype in zip(LENGTHS, itertools.cycle(MASKS), strict=False):
        b = batch(rng, [length, length // 2], device, mask_dtype)
        for gamma, lam in ((1.0, 1.0), (0.99, 0.95)):
            got = rk.gae(**b.tokens(), mask=b.mask, gamma=gamma, lam=lam)
            want = contract_gae(b.rewards, b.values, b.mask, gamma, lam)
            assert_same(got, want, (length, gamma, lam))


def test_values_lie_near_float64(device: str, rng: np.random.Generator) -> None:
    for length in LENGTHS:
        b = batch(rng, [length, length // 3], device)
        bootstrap = torch.randn(2, generator=torch.Generator().manual_seed(length)).to(device)
        got = calls(b, b.mask)
        arrays = {k: np.nan_to_num(v.cpu().numpy()) for k, v in b.policies().items()}
        tokens = {k: arrays[k] for k in ("rewards", "values")}
        mask, g = b.mask.cpu().numpy(), {"gamma": 0.99, "lam": 0.95}
        want = {
            "gae": rk.gae_reference(**tokens, mask=mask, **g),
            "vtrace": rk.vtrace_reference(**arrays, mask=mask, rho_bar=1.1, c_bar=1.2, **g),
            "reset": rk.discounted_returns_reference(tokens["rewards"], mask, gamma=0.99, masked="reset"),
            "carry": rk.discounted_returns_reference(tokens["rewards"], mask, gamma=0.99, masked="carry"),
        }
        for name, outputs in got.items():
            operator = "discounted_returns" if len(outputs) == 1 else name
            assert not scan_failures(operator, outputs, want[name]), (name, length)
        of_bootstrap = rk.gae(**b.tokens(), mask=b.mask, gamma=0.9, lam=0.8, bootstrap=bootstrap)
        exact = rk.gae_reference(**tokens, mask=mask, gamma=0.9, lam=0.8, bootstrap=bootstrap.cpu().numpy())
        assert not scan_failures("gae", of_bootstrap, exact), ("bootstrap", length)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_verls(gamma: float, lam: float, device: str, rng: np.random.Generator) -> None:
    """Compares advantages everywhere, since they are carried on, and returns where tokens count, since verl reads
    masked values there."""
    b = batch(rng, [300, 299, 10, 0], device, "int64")
    got = rk.gae(**b.tokens(), mask=b.mask, gamma=gamma, lam=lam)
    advantages, returns = verl_gae(b.rewards, b.values, b.mask, gamma, lam)
    arrays = (np.nan_to_num(a.cpu().numpy()) for a in (b.rewards, b.values))
    want = rk.gae_reference(*arrays, b.mask.cpu().numpy(), gamma=gamma, lam=lam)
    counted = (b.mask != 0).cpu().numpy()
    np.testing.assert_allclose(want["advantages"], advantages, rtol=0, atol=1e-10)
    np.testing.assert_allclose(want["returns"][counted], returns.numpy()[counted], rtol=0, atol=1e-10)
    assert not scan_failures("gae", got, want)


def test_vtrace_is_the_papers_sum(rng: np.random.Generator) -> None:
    """Equation 1 of arXiv:1802.01561, term by term over the tokens that count; c is the paper's trace cutting, times
    lam."""
    b, gamma, lam, rho_bar, c_bar = batch(rng, [40, 17, 1]), 0.97, 0.9, 1.05, 1.02
    arrays = {k: np.nan_to_num(v.numpy()).astype(np.float64) for k, v in b.policies().items()}
    for row, counts in enumerate(b.mask.numpy()):
        reward, value, ratio = (
            x[row][counts] for x in (arrays["rewards"], arrays["values"], arrays["logprob"] - arrays["rollout_logprob"])
        )
        ratio, following, n = np.exp(ratio), np.append(value[1:], 0.0), len(value)
        rho, c = np.minimum(rho_bar, ratio), lam * np.minimum(c_bar, ratio)
        delta = rho * (reward + gamma * following - value)
        target = np.array([
            value[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, n)) for s in range(n)
        ])  # fmt: skip
        advantage = rho * (reward + gamma * np.append(target[1:], 0.0) - value)
        got = rk.vtrace_reference(
            *(np.nan_to_num(x[row : row + 1].numpy()) for x in b.policies().values()), counts[None], gamma=gamma,
            lam=lam, rho_bar=rho_bar, c_bar=c_bar,
        )  # fmt: skip
        np.testing.assert_allclose(got["returns"][0][counts], target, rtol=0, atol=1e-10)
        np.testing.assert_allclose(got["advantages"][0][counts], advantage, rtol=0, atol=1e-10)


def test_a_neutral_token_of_vtrace_has_a_ratio_of_one(rng: np.random.Generator, device: str) -> None:
    b = batch(rng, (1, 40, 300), device)
    lost = torch.from_numpy(rng.random(b.rewards.shape) < 0.2).to(device)
    with_nan, as_trainer = b.rollout_logprob.masked_fill(lost, torch.nan), b.rollout_logprob.where(~lost, b.logprob)
    given = (b.rewards, b.values, b.logprob)
    how = {"mask": b.mask, "gamma": 0.97, "lam": 0.9, "rho_bar": 1.1}
    got = rk.vtrace(*given, with_nan, **how, rollout_nan="neutral")
    assert not differing(tuple(got), tuple(rk.vtrace(*given, as_trainer, **how)))
    assert rk.vtrace(*given, with_nan, **how)[0][b.mask != 0].isnan().any(), "the default hides nothing"
    on_host = {name: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for name, x in how.items()}
    arrays = [x.cpu().numpy() for x in (*given, with_nan)]
    want = rk.vtrace_reference(*arrays, **on_host, rollout_nan="neutral")
    assert not scan_failures("vtrace", got, want)
    with pytest.raises(ValueError, match="rollout_nan: expected"):
        rk.vtrace(*given, with_nan, **how, rollout_nan="zero")


def test_vtrace_on_policy_is_gae_with_lambda_one(rng: np.random.Generator) -> None:
    b = batch(rng, [200, 100])
    of_policy = rk.vtrace(b.rewards, b.values, b.logprob, b.logprob, b.mask, gamma=0.97)
    of_gae = rk.gae(b.rewards, b.values, b.mask, gamma=0.97)
    assert_same(of_policy.returns[None], of_gae.returns[None])
    close = (of_policy.advantages - of_gae.advantages)[b.mask].abs().max()
    assert close < 1e-4, "A_t = R_t + gamma v_{t+1} - V_t"


# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_packed_is_padded(share: float, device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [5, 0, 128, 700, 1, 129, 0, 2100], device, share=share)
    padded = calls(b, b.mask)
    flat, cu = b.packed()
    for cu_dtype in (torch.int32, torch.int64):
        for name, outputs in calls(flat, flat.mask, cu.to(cu_dtype)).items():
            for got, want in zip(outputs, padded[name], strict=True):
                for row, n, mine in zip(want, b.lengths, b.unpacked(got), strict=True):
                    assert_same((mine,), (row[:n],), name)


def test_batch_position_stride_and_padding_change_no_bit(device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [130, 700, 333, 1, 512], device)
    want = calls(b, b.mask)
    for i in range(5):
        one = Batch(*(a[i : i + 1, :] for a in b[:5]), b.lengths[i : i + 1])
        for name, outputs in calls(one, one.mask).items():
            assert_same(outputs, tuple(o[i : i + 1] for o in want[name]), (name, i))

    def moved(a: Any, shift: int, pad: int) -> Any:
        """The same numbers, shifted by ``shift`` elements, with larger row strides and more masked padding."""
        wide = torch.full((5, 700 + pad), float("nan"), device=device).to(a.dtype)
        wide = torch.zeros_like(wide) if a.dtype == torch.bool else wide
        memory = wide.new_zeros((5 * (710 + pad) + shift,))
        view = memory[shift:].view(5, 710 + pad)[:, : 700 + pad]
        view.copy_(wide)
        view[:, :700] = a
        return view

    for shift, pad in ((1, 0), (3, 5), (0, 4), (2, 129)):
        other = Batch(*(moved(a, shift, pad) for a in b[:5]), b.lengths)
        for name, outputs in calls(other, other.mask).items():
            assert_same(tuple(o[:, :700].contiguous() for o in outputs), want[name], (name, shift, pad))


def test_rows_may_be_expanded_or_reversed_in_memory(device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [64, 64], device, share=1.0)
    one = b.rewards[:1].expand(3, -1)
    got = rk.gae(one, one, None, gamma=0.9)
    assert_same(got, rk.gae(one.contiguous(), one.contiguous(), None, gamma=0.9))


def test_what_does_not_count_is_not_seen(device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [300, 200], device)
    want = calls(b, b.mask)
    for garbage in (float("inf"), 1e38, 0.0):
        filled = Batch(*(torch.where(b.mask, a, garbage) for a in b[:4]), b.mask, b.lengths)
        for name, outputs in calls(filled, b.mask).items():
            assert_same(outputs, want[name], (name, garbage))
            assert all(bool(o.isfinite().all()) for o in outputs)


def test_a_nan_that_counts_stays_in_its_sequence(device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [300, 300, 300], device, share=1.0)
    want = calls(b, None)
    b.rewards[1, 140] = float("nan")
    for name, outputs in calls(b, None).items():
        for got, clean in zip(outputs, want[name], strict=True):
            assert_same((got[0], got[2], got[1, 141:]), (clean[0], clean[2], clean[1, 141:]), name)
            assert bool(got[1, :141].isnan().all())
            assert bool((got[1, :141].view(torch.int32) == 0x7FC00000).all()), "the canonical one"


def test_a_turn_before_a_tools_result_has_the_reward_behind_it() -> None:
    """By default tokens of the tool make no difference."""
    rewards, mask = np.array([[0, 0, 0, 0, 0, 1]], np.float32), np.array([[1, 1, 0, 0, 1, 1]])
    of_reference = rk.discounted_returns_reference(rewards, mask)["returns"]
    for returns in (rk.discounted_returns(rewards, mask), of_reference):
        assert returns[0][mask[0] == 1].tolist() == [1, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(FUZZ))
def test_cpu_and_cuda_have_the_same_bytes(number: int) -> None:
    rng = np.random.default_rng(number)
    rows, most = int(rng.integers(1, 40)), int(np.exp(rng.uniform(0, 9)))
    b = batch(rng, rng.integers(0, most + 1, rows), mask_dtype=MASKS[number % 5], share=float(rng.random()))
    there = Batch(*(a.cuda() for a in b[:5]), b.lengths)
    options = {"gamma": float(rng.random()), "lam": float(rng.random())}
    mask = None if number % 7 == 0 else there.mask
    if mask is None:
        b, there = (
            Batch(*(a.nan_to_num() if a.is_floating_point() else a for a in x[:5]), x.lengths) for x in (b, there)
        )
    want, got = calls(b, None if mask is None else b.mask, **options), calls(there, mask, **options)
    for name in want:
        assert_same(tuple(o.cpu() for o in got[name]), want[name], name)
    if b.rewards.shape[1] and b.lengths.sum():
        (flat, cu), (flat_there, cu_there) = b.packed(), there.packed()
        want = calls(flat, None if mask is None else flat.mask, cu, **options)
        got = calls(flat_there, None if mask is None else flat_there.mask, cu_there, **options)
        for name in want:
            assert_same(tuple(o.cpu() for o in got[name]), want[name], f"{name}, packed")


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, length = 70000, 32768
    rewards = torch.zeros((rows, length), device="cuda")
    rewards[-1, -1] = 1.0
    returns = rk.discounted_returns(rewards, gamma=1.0)
    assert bool((returns[-1] == 1.0).all())
    assert bool((returns[-2] == 0.0).all())


# ---- edges ----------------------------------------------------------------------------------------------------------


def test_empty_sequences_have_empty_results(device: str) -> None:
    for shape in ((0, 5), (3, 0), (0, 0)):
        x = torch.zeros(shape, device=device)
        for outputs in calls(Batch(x, x, x, x, x, np.zeros(0)), None).values():
            assert all(o.shape == shape for o in outputs)
    x, cu = torch.zeros(0, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    assert rk.gae(x, x, None, cu).returns.shape == (0,)
    assert rk.discounted_returns(x, None, cu[:1]).shape == (0,)


def test_wholly_masked_sequences_give_zero_and_the_bootstrap(device: str) -> None:
    x = torch.full((2, 9), float("nan"), device=device)
    mask = torch.zeros((2, 9), dtype=torch.bool, device=device)
    boots = torch.tensor([2.0, -3.0], device=device)
    got = rk.gae(x, x, mask, bootstrap=boots)
    assert bool((got.advantages == 0).all())
    assert bool((got.returns == boots[:, None]).all())


X, V = torch.zeros(2, 8), torch.zeros(2, 8)
CU = torch.tensor([0, 3, 8])
BAD = {
    "rewards float64": (lambda: rk.gae(X.double(), V), TypeError, "rewards: expected dtype float32, got float64"),
    "rewards bfloat16": (lambda: rk.gae(X.bfloat16(), V), TypeError, "rewards: expected dtype float32, got bfloat16"),
    "rewards 3-D": (lambda: rk.gae(X[None], V), ValueError, "rewards: expected shape [num_sequences, num_tokens] or"),
    "rewards 2-D packed": (lambda: rk.gae(X, V, None, CU), ValueError, "rewards: expected shape [num_tokens] beside"),
    "rewards a list": (lambda: rk.gae([1.0], V), TypeError, "rewards: expected an array that speaks DLPack, got list"),
    "values a shape": (lambda: rk.gae(X, V[:, :7]), ValueError, "values: expected shape [2, 8] (that of rewards), got"),
    "values a dtype": (lambda: rk.gae(X, V.half()), TypeError, "values: expected dtype float32, got float16"),
    "values None": (lambda: rk.gae(X, None), TypeError, "values: expected an array"),
    "values strided": (
        lambda: rk.gae(X, torch.zeros(8, 2).T), ValueError, "values: expected a contiguous last dimension",
    ),
    "mask a shape": (lambda: rk.gae(X, V, X[:1] > 0), ValueError, "mask: expected shape [2, 8] (that of rewards), got"),
    "mask a dtype": (
        lambda: rk.gae(X, V, X * 1j), TypeError, "mask: expected dtype bool, of integers or of floats",
    ),
    "cu a dtype": (
        lambda: rk.gae(X[0], V[0], None, CU.float()), TypeError, "cu_seqlens: expected dtype int32 or int64, got",
    ),
    "cu 2-D": (lambda: rk.gae(X[0], V[0], None, CU[None]), ValueError, "cu_seqlens: expected shape [num_seq"),
    "cu from 1": (lambda: rk.gae(X[0], V[0], None, CU + 1), ValueError, "cu_seqlens: expected 0 first, got 1 at index"),
    "cu falls": (
        lambda: rk.gae(X[0], V[0], None, torch.tensor([0, 5, 4])), ValueError, "cu_seqlens: expected ascending offs",
    ),
    "cu long": (
        lambda: rk.gae(X[0], V[0], None, CU * 2), ValueError, "cu_seqlens: expected at most 8 (the number of tokens)",
    ),
    "gamma": (lambda: rk.gae(X, V, gamma=1.5), ValueError, "gamma: expected a number in [0, 1], got 1.5"),
    "gamma NaN": (lambda: rk.gae(X, V, gamma=float("nan")), ValueError, "gamma: expected a number in [0, 1], got nan"),
    "gamma text": (lambda: rk.gae(X, V, gamma="1"), TypeError, "gamma: expected a number, got str"),
    "lam": (lambda: rk.gae(X, V, lam=-0.5), ValueError, "lam: expected a number in [0, 1], got -0.5"),
    "masked": (lambda: rk.discounted_returns(X, masked="skip"), ValueError, 'masked: expected "reset", "carry"'),
    "bootstrap": (
        lambda: rk.gae(X, V, bootstrap=torch.zeros(3)), ValueError, "bootstrap: expected shape [2] (num_sequences)",
    ),
    "rho_bar": (lambda: rk.vtrace(X, V, X, X, rho_bar=0.0), ValueError, "rho_bar: expected a finite number > 0"),
    "c_bar": (lambda: rk.vtrace(X, V, X, X, c_bar=float("inf")), ValueError, "c_bar: expected a finite number > 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    call, error, text = BAD[case]
    with pytest.raises(error, match="^" + re.escape(text)):
        call()


@pytest.mark.gpu
def test_cu_seqlens_out_of_order_touch_nothing_outside_on_cuda() -> None:
    x = torch.zeros(64, device="cuda")
    for ends in ([0, 9, 5, 64], [-5, 10, 100], [70, 80, 90], [0, 1 << 40, 64]):
        rk.gae(x, x, None, torch.tensor(ends, device="cuda"))
    torch.cuda.synchronize()
    assert bool((rk.discounted_returns(x, None, torch.tensor([0, 64], device="cuda")) == 0).all())


# ---- frameworks, torch ----------------------------------------------------------------------------------------------


def test_numpy_and_jax_get_torchs_bytes(rng: np.random.Generator) -> None:
    b = batch(rng, [130, 57])
    want = calls(b, b.mask)
    arrays = Batch(*(a.numpy() for a in b[:5]), b.lengths)
    for name, outputs in calls(arrays, arrays.mask).items():
        assert all(type(o) is np.ndarray for o in outputs)
        assert_same(outputs, want[name], name)
    jax = pytest.importorskip("jax")
    of_jax = Batch(*(jax.numpy.asarray(a) for a in arrays[:5]), b.lengths)
    for name, outputs in calls(of_jax, of_jax.mask).items():
        assert all(isinstance(o, jax.Array) for o in outputs)
        assert_same(outputs, want[name], name)


def test_inputs_that_require_a_gradient_are_detached(device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [40, 30], device)
    want = calls(b, b.mask)
    leaves = Batch(*(a.clone().requires_grad_() for a in b[:4]), b.mask, b.lengths)
    for name, outputs in calls(leaves, b.mask).items():
        assert_same(outputs, want[name], name)
        assert not any(o.requires_grad for o in outputs)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_give_the_same_bytes(backend: str, device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [140, 130], device)
    flat, cu = b.packed()
    want = calls(b, b.mask)
    packed = calls(flat, flat.mask, cu)
    compiled: Any = torch.compile(lambda b, m: calls(b, m), fullgraph=True, backend=backend)
    of_packed: Any = torch.compile(lambda b, m, c: calls(b, m, c), fullgraph=True, backend=backend)
    leaves = Batch(*(a.clone().requires_grad_() for a in b[:4]), b.mask, b.lengths)
    for operands in (b, leaves):
        for name, outputs in compiled(operands, b.mask).items():
            assert_same(tuple(o.detach() for o in outputs), want[name], name)
    for name, outputs in of_packed(flat, flat.mask, cu).items():
        assert_same(outputs, packed[name], name)


def test_fake_kernels_and_schemas_hold(device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [9, 7], device)
    ops = torch.ops.rl_kernel_native
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.gae, (b.rewards, b.values, b.mask, None, None, 0.9, 0.8), test_utils=tests)
    torch.library.opcheck(ops.discounted_returns, (b.rewards, b.mask, None, 0.9, True), test_utils=tests)
    torch.library.opcheck(ops.vtrace, (*b[:4], b.mask, None, None, 0.9, 0.8, 1.0, 1.0, False), test_utils=tests)


@pytest.mark.gpu
def test_a_cuda_graph_replays_without_a_synchronisation(rng: np.random.Generator) -> None:
    b = batch(rng, [700, 300, 20], "cuda")
    flat, cu = b.packed()
    for x, ends in ((b, None), (flat, cu)):
        graph, got = captured(functools.partial(calls, x, x.mask, ends))
        x.rewards.mul_(2.0)
        graph.replay()
        torch.cuda.synchronize()
        for name, outputs in calls(x, x.mask, ends).items():
            assert_same(tuple(o.cpu() for o in got[name]), tuple(o.cpu() for o in outputs), name)


def test_a_mask_of_bytes_is_traced() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 3, device="meta")
    for found in (rk.gae(x, x, x.to(torch.uint8)), rk.masked_whiten(x, x.to(torch.uint8))):
        assert (found if isinstance(found, torch.Tensor) else found[0]).shape == x.shape
