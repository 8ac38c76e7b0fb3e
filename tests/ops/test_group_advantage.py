"""group_advantage: float64, the formulas of verl and TRL, the same bits for every layout of groups, bad input, and
calls through torch. test_group_advantage.cpp compares the contract's bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from advantage_cases import areal_group, trl_group, verl_group
from cases import beyond, differing
from torch_properties import captured

torch = pytest.importorskip("torch", reason="layouts are made with torch")

KINDS = (
    "grpo", "grpo_trl", "dr_grpo", "rloo", "remax", "opo", "passk", "gpg", "reinforce_pp", "reinforce_pp_baseline",
    "areal",
)  # fmt: skip
WITHOUT_GROUPS = ("remax", "reinforce_pp")
Status = rk.GroupAdvantageStatus


def options_of(kind: str, rng: np.random.Generator, num: int, device: str = "cpu") -> dict[str, Any]:
    if kind == "opo":
        return {"lengths": torch.from_numpy(rng.integers(1, 9000, num)).to(device)}
    if kind == "remax":
        return {"baseline": torch.from_numpy(rng.standard_normal(num).astype(np.float32)).to(device)}
    return {}


def everything(rewards: Any, *groups: Any, **options: Any) -> Any:
    return rk.group_advantage(rewards, *groups, return_stats=True, return_status=True, **options)


def assert_same(got: Any, want: Any, what: Any = "") -> None:
    found = differing(tuple(got), tuple(want))
    assert not found, f"{what}: {found}"


@pytest.mark.parametrize("kind", KINDS)
def test_values_lie_near_float64(kind: str, device: str, rng: np.random.Generator) -> None:
    for sizes in ((8,) * 4, (1, 2, 5, 300, 3), (4096,)):
        num = sum(sizes)
        s = torch.from_numpy(rng.standard_normal(num).astype(np.float32)).to(device)
        options = options_of(kind, rng, num, device)
        offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(sizes)))).to(device)
        groups = () if kind in WITHOUT_GROUPS else (offsets,)
        scales = ("group", "batch", "none") if groups else ("none", "batch")
        for scale in scales:
            got = rk.group_advantage(s, *groups, kind=kind, scale=scale, **options)
            on_host = {k: v.cpu().numpy() for k, v in options.items()}
            want = rk.group_advantage_reference(
                s.cpu().numpy(), *(g.cpu().numpy() for g in groups), kind=kind, scale=scale, **on_host
            )
            assert not beyond("group_advantage", "advantage", got, want["advantage"], scale=want["scale"]), (
                kind,
                sizes,
            )


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"grpo_trl", "reinforce_pp", "areal"}))
def test_kinds_are_verls(kind: str, device: str, rng: np.random.Generator) -> None:
    """Scattered ids, a group of one, and rewards of 0 and 1; some groups are constant."""
    index = rng.permutation(np.repeat(np.arange(9), (8, 8, 8, 5, 3, 2, 16, 8, 8 if kind == "passk" else 1)))
    for binary in (False, True):
        s = rng.integers(0, 2, len(index)) * 1.0 if binary else rng.standard_normal(len(index))
        s = s.astype(np.float32).astype(np.float64)
        options = options_of(kind, rng, len(index), device)
        ids = {} if kind in WITHOUT_GROUPS else {"group_ids": torch.from_numpy(index).to(device)}
        got = rk.group_advantage(torch.from_numpy(s).float().to(device), kind=kind, **ids, **options)
        lengths, baseline = (options.get(n, torch.zeros(len(s))).cpu().numpy() for n in ("lengths", "baseline"))
        want = verl_group(kind, s, index, lengths, baseline.astype(np.float64))
        where = {} if kind in WITHOUT_GROUPS else {"group_ids": index}
        on_host = {name: value.cpu().numpy() for name, value in options.items()}
        scale = rk.group_advantage_reference(s, kind=kind, **where, **on_host)["scale"]
        assert not beyond("group_advantage", "advantage", got, want, scale=scale)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_trl_is_trls(scale: str, device: str, rng: np.random.Generator) -> None:
    s = rng.standard_normal(64).astype(np.float32)
    got = rk.group_advantage(torch.from_numpy(s).to(device), group_size=8, kind="grpo_trl", scale=scale)
    of = rk.group_advantage_reference(s, group_size=8, kind="grpo_trl", scale=scale)["scale"]
    assert not beyond("group_advantage", "advantage", got, trl_group(s.astype(np.float64), 8, scale), scale=of)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_areal_is_areals(scale: str, device: str, rng: np.random.Generator) -> None:
    for size, binary in ((8, False), (8, True), (1, False), (48, False)):
        s = rng.integers(0, 2, 48) if binary else rng.standard_normal(48)  # some groups of binary rewards are constant
        s = s.astype(np.float32).astype(np.float64)
        s[:8] = 1.0
        got = rk.group_advantage(torch.from_numpy(s).float().to(device), group_size=size, kind="areal", scale=scale)
        want = areal_group(s, size, None if scale == "none" else scale)
        of = rk.group_advantage_reference(s, group_size=size, kind="areal", scale=scale)
        np.testing.assert_allclose(of["advantage"], want, rtol=1e-12, atol=1e-12)
        assert not beyond("group_advantage", "advantage", got, want, scale=of["scale"])


def test_a_constant_group_of_areal_is_compared_with_the_batch(device: str) -> None:
    s = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.5], device=device)
    offsets = torch.tensor([0, 2, 4, 5], device=device)
    got = everything(s, offsets, kind="areal", eps=0.0)
    assert got.advantage.tolist() == pytest.approx([0.5**0.5] * 2 + [-(0.5**0.5)] * 2 + [0.0])
    assert got.mean.tolist() == [0.5] * 5
    assert got.std.tolist() == pytest.approx([0.5**0.5] * 4 + [1.0])
    assert got.status.tolist() == [0] * 4 + [Status.ALONE]
    alike = everything(torch.full((4,), 0.1, device=device), group_size=2, kind="areal", eps=0.0)
    assert (alike.advantage == 0).all(), "0 / 0 is 0: a batch of equal rewards has no signal"
    alone = everything(s[:3], torch.tensor([0, 2, 3], device=device), kind="areal", alone="zero")
    assert alone.advantage[2] == 0
    # Squares would overflow or underflow, and the first two groups have no reward equal to the mean.
    for size in (1e-38, 1e-30, 1e30, 1e38):
        far = everything(s * size, offsets, kind="areal", eps=0.0)
        assert far.advantage[:4].tolist() == pytest.approx(got.advantage[:4].tolist())
        assert far.std[:4].tolist() == pytest.approx((got.std[:4] * size).tolist())


def test_rloo_with_rewards_that_do_not_count_is_trls(device: str, rng: np.random.Generator) -> None:
    """The mean over the other members that count; without such a member there is no advantage."""
    s = rng.standard_normal((6, 4)).astype(np.float32)
    s[1, 2] = s[2, 0] = s[2, 3] = np.nan
    s[3, 1:] = np.nan
    counts = (~np.isnan(s)).sum(1, keepdims=True)
    wide = s.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        want = np.nan_to_num(wide - (np.nansum(wide, 1, keepdims=True) - wide) / (counts - 1), posinf=0, neginf=0)
    options: dict[str, Any] = {"group_size": 4, "kind": "rloo", "exclude_nan": True, "alone": "zero"}
    got = rk.group_advantage(torch.from_numpy(s).to(device).view(-1), **options)
    scale = rk.group_advantage_reference(s.reshape(-1), **options)["scale"]
    assert not beyond("group_advantage", "advantage", got, want.reshape(-1), scale=np.nan_to_num(scale))


def test_rloo_with_a_kl_in_the_reward_is_trls(device: str, rng: np.random.Generator) -> None:
    """RLOOTrainer subtracts k1 of a sequence's tokens, times beta, from its reward before the baseline."""
    beta, size = 0.05, 2
    reward = torch.from_numpy(rng.standard_normal(8).astype(np.float32)).to(device)
    old = torch.from_numpy(-rng.exponential(1.0, (8, 33)).astype(np.float32)).to(device)
    ref = old + torch.from_numpy(rng.standard_normal((8, 33)).astype(np.float32)).to(device)
    mask = torch.from_numpy(rng.random((8, 33)) < 0.7).to(device)
    kl = rk.sequence_logprob(rk.kl(old, ref, mask, estimator="k1"), mask).sum
    exact = (old - ref).double() * mask
    assert not beyond("sequence_logprob", "sum", kl, exact.sum(1), terms=33, scale=exact.abs().sum(1).cpu().numpy())
    rewards = reward - beta * kl
    got = rk.group_advantage(rewards, group_size=size, kind="rloo")
    groups = rewards.double().view(-1, size)
    want = (groups - (groups.sum(1, keepdim=True) - groups) / (size - 1)).view(-1)
    scale = rk.group_advantage_reference(rewards.cpu().numpy(), group_size=size, kind="rloo")["scale"]
    assert not beyond("group_advantage", "advantage", got, want, scale=scale)


def test_a_nan_reward_is_excluded_or_taints_its_group(device: str) -> None:
    nan = float("nan")
    s = torch.tensor([1.0, nan, 3.0, 2.0, 5.0, 7.0], device=device)
    got = everything(s, group_size=3, kind="grpo_trl")
    clean = rk.group_advantage(s[[0, 2]], group_size=2, kind="grpo_trl")
    assert_same((got.advantage[[0, 2]],), (clean,))
    assert got.advantage[1] == 0
    assert got.status.tolist() == [0, Status.EXCLUDED, 0, 0, 0, 0]
    tainted = everything(s, group_size=3)
    assert tainted.advantage[:3].isnan().all()
    assert tainted.advantage[3:].isfinite().all()
    assert tainted.status.tolist() == [Status.NOT_FINITE] * 3 + [0] * 3
    assert bool((tainted.advantage[:3].view(torch.int32) == 0x7FC00000).all()), "the canonical one"


def test_groups_of_one_and_equal_rewards_have_defined_results(device: str) -> None:
    s = torch.tensor([0.1, 0.1, 0.1, 0.7, -2.0], device=device)
    offsets = torch.tensor([0, 3, 4, 4, 5], device=device)
    for kind in sorted(set(KINDS) - {"remax", "opo", "reinforce_pp", "areal"}):
        for alone in ("score", "zero"):
            got = everything(s, offsets, kind=kind, alone=alone)
            assert got.advantage.isfinite().all()
            assert (got.advantage[:3] == 0).all(), "exactly, though 0.1 * 3 / 3 is not 0.1"
            assert got.status.tolist() == [Status.CONSTANT] * 3 + [Status.ALONE] * 2
            assert bool((got.advantage[3:] == 0).all()) == (alone == "zero" or kind == "passk")
    one = rk.group_advantage(s, offsets)
    assert one[3] == torch.tensor(0.7) / (torch.tensor(1.0) + torch.tensor(1e-6)), "verl: mean 0, std 1"


def test_offsets_size_and_ids_of_any_order_give_the_same_bits(device: str, rng: np.random.Generator) -> None:
    s = torch.from_numpy(rng.standard_normal(24 * 7).astype(np.float32)).to(device)
    lengths = torch.from_numpy(rng.integers(1, 99, len(s))).to(device)
    offsets = torch.arange(0, len(s) + 1, 24, device=device)
    ids = torch.arange(7, device=device).repeat_interleave(24)
    order = torch.from_numpy(rng.permutation(len(s))).to(device)
    for kind in ("grpo", "opo", "rloo", "passk", "dr_grpo"):
        of = {"lengths": lengths} if kind == "opo" else {}
        want = everything(s, offsets, kind=kind, **of)
        assert_same(everything(s, offsets.int(), kind=kind, **of), want)
        assert_same(everything(s, group_size=24, kind=kind, **of), want)
        for other in (ids, ids.int(), (ids * -(1 << 20)).int(), 5 - ids):
            assert_same(everything(s, group_ids=other, kind=kind, **of), want)
        # Groups are interleaved, and members keep their order.
        mixed = torch.arange(len(s), device=device).view(7, 24).T.flatten()
        of_mixed = {"lengths": lengths[mixed]} if kind == "opo" else {}
        got = everything(s[mixed], group_ids=ids[mixed], kind=kind, **of_mixed)
        assert_same(got, tuple(w[mixed] for w in want), kind)
        # The same groups at another place in another batch.
        part = {"lengths": lengths[48:96]} if kind == "opo" else {}
        assert_same(everything(s[48:96], group_size=24, kind=kind, **part), tuple(w[48:96] for w in want))
    shuffled = everything(s[order], group_ids=ids[order])
    assert (shuffled.advantage - everything(s, offsets).advantage[order]).abs().max() < 1e-6, "another order of sums"


def test_strided_rewards_are_read_as_they_lie(device: str, rng: np.random.Generator) -> None:
    wide = torch.from_numpy(rng.standard_normal((24, 3)).astype(np.float32)).to(device)
    assert_same(everything(wide[:, 1], group_size=8), everything(wide[:, 1].contiguous(), group_size=8))
    turned = torch.from_numpy(wide[:, 1].cpu().numpy()[::-1].copy()).to(device)
    assert_same(everything(turned, group_size=8), everything(wide[:, 1].flip(0), group_size=8))
    lengths = torch.arange(48, device=device)[::2]
    got = rk.group_advantage(wide[:, 0], group_size=8, kind="opo", lengths=lengths)
    assert_same((got,), (rk.group_advantage(wide[:, 0], group_size=8, kind="opo", lengths=lengths.contiguous()),))


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(150))
def test_cpu_and_cuda_have_the_same_bytes(number: int) -> None:
    rng = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    num_groups, most = int(rng.integers(1, 60)), int(np.exp(rng.uniform(0, 6)))
    sizes = rng.integers(0, most + 1, num_groups)
    num = int(sizes.sum())
    s = rng.standard_normal(num).astype(np.float32) if number % 3 else rng.integers(0, 2, num).astype(np.float32)
    s[rng.random(num) < 0.02] = (np.nan, np.inf, -0.0)[number % 3]
    options: dict[str, Any] = {**options_of(kind, rng, num), "exclude_nan": bool(number % 2)}
    if kind not in WITHOUT_GROUPS:
        options["scale"] = ("group", "batch", "none")[number % 7 % 3]
        if kind != "areal" or options["scale"] == "group":
            options["alone"] = ("score", "zero")[number % 5 % 2]
        if number % 4 == 1:
            options["group_ids"] = torch.from_numpy(rng.permutation(np.repeat(np.arange(num_groups), sizes)))
        else:
            options["group_offsets"] = torch.from_numpy(np.concatenate(([0], np.cumsum(sizes))))
    there = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    want = everything(torch.from_numpy(s), kind=kind, **options)
    got = everything(torch.from_numpy(s).cuda(), kind=kind, **there)
    assert_same(tuple(g.cpu() for g in got), want, kind)


def test_an_empty_batch_has_an_empty_result(device: str) -> None:
    none = torch.zeros(0, device=device)
    assert rk.group_advantage(none, group_size=8).shape == (0,)
    assert rk.group_advantage(none, torch.zeros(3, dtype=torch.int64, device=device)).shape == (0,)
    assert rk.group_advantage(none, group_ids=none.long()).shape == (0,)


def test_rewards_come_as_reward_functions_give_them(device: str) -> None:
    """float64, half, integers, bools and lists are rounded to float32 once. A list without any array gives NumPy
    results."""
    s = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    want = rk.group_advantage(s.float(), group_size=3)
    for other in (s.double(), s.half(), s.bfloat16(), s, s.int(), s.bool()):
        assert_same((rk.group_advantage(other, group_size=3),), (want,), str(other.dtype))
    exact = torch.tensor([0.1, 0.7, 1e-9, 3.0], dtype=torch.float64, device=device)
    assert_same((rk.group_advantage(exact, group_size=2),), (rk.group_advantage(exact.float(), group_size=2),), "once")
    for rewards in (s.tolist(), tuple(s.tolist()), [bool(x) for x in s], list(s)):
        got = rk.group_advantage(rewards, group_ids=[7, 7, 7, 9, 9, 9])
        assert isinstance(got, np.ndarray)
        assert got.tobytes() == want.cpu().numpy().tobytes()
    numbers = s.cpu().numpy()
    for array in (numbers, numbers.astype(np.float64), numbers.astype(np.float16), numbers.astype(bool)):
        assert rk.group_advantage(array, group_size=3).tobytes() == want.cpu().numpy().tobytes()
    assert_same((rk.group_advantage(s, [0, 3, 6]),), (want,), "offsets of a list beside a tensor")
    remax = rk.group_advantage(s, kind="remax", baseline=[0.5] * 6)
    assert_same((remax,), (s - 0.5,), "baseline of a list")


S, AT = torch.zeros(6), torch.tensor([0, 2, 6])
BAD = {
    "rewards complex": (
        lambda: rk.group_advantage(S.to(torch.complex64), AT), TypeError, "rewards: expected dtype float32, got comp",
    ),
    "rewards 2-D": (lambda: rk.group_advantage(S[None], AT), ValueError, "rewards: expected shape [num_sequences]"),
    "rewards a list of words": (
        lambda: rk.group_advantage(["a"], group_size=1), TypeError,
        "rewards: expected an array or a list of numbers, got a list of str",
    ),
    "ids a list of floats": (
        lambda: rk.group_advantage([1.0], group_ids=[0.5]), TypeError,
        "group_ids: expected an array or a list of whole numbers, got a list of float",
    ),
    "no groups": (lambda: rk.group_advantage(S), ValueError, "group_offsets: expected one of group_offsets"),
    "two groups": (
        lambda: rk.group_advantage(S, AT, group_size=2), ValueError, "group_offsets: expected one of",
    ),
    "size": (lambda: rk.group_advantage(S, group_size=4), ValueError, "group_size: expected a divisor of 6 (the"),
    "size 0": (lambda: rk.group_advantage(S, group_size=0), ValueError, "group_size: expected a number >= 1, got 0"),
    "size a float": (lambda: rk.group_advantage(S, group_size=2.0), TypeError, "group_size: expected an integer, got"),
    "offsets a dtype": (
        lambda: rk.group_advantage(S, AT.float()), TypeError, "group_offsets: expected dtype int32 or int64",
    ),
    "offsets of none": (
        lambda: rk.group_advantage(S[:0], AT[:1] + 5), ValueError, "group_offsets: expected 0 first, got 5 at index 0",
    ),
    "offsets from 1": (lambda: rk.group_advantage(S, AT + 1), ValueError, "group_offsets: expected 0 first, got 1"),
    "offsets fall": (
        lambda: rk.group_advantage(S, torch.tensor([0, 4, 2, 6])), ValueError, "group_offsets: expected ascending off",
    ),
    "offsets short": (
        lambda: rk.group_advantage(S, AT[:2]), ValueError, "group_offsets: expected 6 (the number of sequences) last",
    ),
    "ids a shape": (
        lambda: rk.group_advantage(S, group_ids=AT), ValueError, "group_ids: expected shape [6]",
    ),
    "ids a dtype": (
        lambda: rk.group_advantage(S, group_ids=S), TypeError, "group_ids: expected dtype int32 or int64, got float32",
    ),
    "kind": (lambda: rk.group_advantage(S, AT, kind="ppo"), ValueError, 'kind: expected "grpo", "grpo_trl", "dr_grpo"'),
    "scale": (lambda: rk.group_advantage(S, AT, scale="std"), ValueError, 'scale: expected "none", "group", "batch"'),
    "alone": (lambda: rk.group_advantage(S, AT, alone="nan"), ValueError, 'alone: expected "score", "zero"'),
    "eps": (lambda: rk.group_advantage(S, AT, eps=-1e-6), ValueError, "eps: expected a finite number >= 0 in float32"),
    "f_norm of grpo": (lambda: rk.group_advantage(S, AT, f_norm=2.0), ValueError, "f_norm: expected 1 for kind 'grpo'"),
    "alone of remax": (
        lambda: rk.group_advantage(S, kind="remax", baseline=S, alone="zero"), ValueError,
        "alone: expected None for kind 'remax'",
    ),
    "f_norm": (
        lambda: rk.group_advantage(S, AT, kind="gpg", f_norm=0.0), ValueError, "f_norm: expected a finite number > 0",
    ),
    "lengths missing": (lambda: rk.group_advantage(S, AT, kind="opo"), TypeError, "lengths: expected an array that"),
    "lengths not asked for": (lambda: rk.group_advantage(S, AT, lengths=S), ValueError, "lengths: expected None for"),
    "lengths a shape": (
        lambda: rk.group_advantage(S, AT, kind="opo", lengths=AT), ValueError, "lengths: expected shape [6] (num_sequ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    call, error, text = BAD[case]
    with pytest.raises(error, match="^" + re.escape(text)):
        call()


def test_numpy_and_jax_get_torchs_bytes(rng: np.random.Generator) -> None:
    s = rng.standard_normal(48).astype(np.float32)
    want = everything(torch.from_numpy(s), group_size=8)
    assert_same(everything(s, group_size=8), want)
    assert_same(everything(s, np.arange(0, 49, 8)), want)
    jax = pytest.importorskip("jax")
    got = everything(jax.numpy.asarray(s), group_ids=jax.numpy.arange(48) // 8)
    assert isinstance(got.advantage, jax.Array)
    assert_same(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_give_the_same_bytes(backend: str, device: str, rng: np.random.Generator) -> None:
    s = torch.from_numpy(rng.standard_normal(48).astype(np.float32)).to(device)
    offsets = torch.arange(0, 49, 8, device=device)
    ids = torch.arange(48, device=device) % 6
    for options in (
        {"group_offsets": offsets},
        {"group_ids": ids, "kind": "rloo"},
        {"group_size": 8, "scale": "batch"},
    ):
        compiled: Any = torch.compile(lambda x, o=options: everything(x, **o), fullgraph=True, backend=backend)
        assert_same(compiled(s.clone().requires_grad_()), everything(s, **options))
    torch.library.opcheck(
        torch.ops.rl_kernel_native.group_advantage,
        (s, offsets, None, None, None, 0, 1, 1, 0, False, False, False, False, 1e-6, 1.0, True, False),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_inputs_that_require_a_gradient_are_detached(device: str) -> None:
    s = torch.randn(8, device=device).requires_grad_()
    assert not rk.group_advantage(s, group_size=4).requires_grad


@pytest.mark.gpu
def test_a_cuda_graph_replays_without_a_synchronisation() -> None:
    s, ids = torch.randn(48, device="cuda"), torch.arange(48, device="cuda") % 6
    run = lambda: (*everything(s, group_ids=ids, kind="gpg"), *everything(s, group_size=8, scale="batch"))  # noqa: E731
    graph, got = captured(run)
    s.mul_(-3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(tuple(g.cpu() for g in got), tuple(w.cpu() for w in run()))


@pytest.mark.gpu
def test_offsets_out_of_order_touch_nothing_outside_on_cuda() -> None:
    s = torch.zeros(64, device="cuda")
    for ends in ([0, 9, 5, 64], [-5, 10, 100], [70, 80, 90]):
        rk.group_advantage(s, torch.tensor(ends, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_negative_length_is_no_length(dtype: torch.dtype, device: str) -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 1.0, 2.0, 4.0], device=device)
    lengths = torch.tensor([3, -1, 2, 3, 1, 2], device=device).to(dtype)
    of = rk.group_advantage(rewards, group_size=3, kind="opo", lengths=lengths, return_status=True)
    assert of.advantage[:3].isnan().all()
    assert of.status.tolist() == [int(rk.GroupAdvantageStatus.NOT_FINITE)] * 3 + [0] * 3
    assert of.advantage[3:].isfinite().all()
