"""Gradients of logprob: float64, exact zeros, layouts of incoming gradients, in-place results, bad rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import DTYPES, differing, mode, numpy_of, part_cut, raw, torch_logits, torch_targets, truth
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch", reason="gradients are compared with torch's")

NAMES = ("dlogprob", "dlse", "dentropy")
# One column; around a leaf; a prime with uneven parts; GPT-2, whose rows are not 16-byte aligned.
VOCAB = [1, 127, 129, 4099, 50257]


def gradient(logits: Any, target: Any, exp: str, gradients: dict[str, Any], **options: Any) -> Any:
    """A forward, then a backward with every input that it may need."""
    forward = {k: v for k, v in options.items() if k != "out"}
    with mode(logits.device.type, exp):
        saved = rk.logprob(logits, target, return_lse=True, return_entropy=True, exp=exp, **forward)
        return rk.logprob_backward(logits, target, saved.lse, entropy=saved.entropy, **gradients, **options, exp=exp)


def incoming(rng: np.random.Generator, shape: tuple[int, ...], device: str, names: Any = NAMES) -> dict[str, Any]:
    return {n: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device) for n in names}


def problem(rng: np.random.Generator, shape: tuple[int, ...], device: str, dtype: str = "float32") -> tuple[Any, Any]:
    return torch_logits(rng, shape, dtype).to(device), torch_targets(rng, shape[:-1], shape[-1]).to(device)


def failures(logits: Any, target: Any, dtype: str, got: Any, gradients: dict[str, Any], **options: Any) -> str:
    arrays = {name: numpy_of(g) for name, g in gradients.items()}
    return truth(logits, target, **options).gradient_failures(got, dtype, **arrays)


COMBINATIONS = [c for n in (1, 2, 3) for c in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_combination_of_gradients_against_float64(
    names: tuple[str, ...], dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    logits, target = problem(rng, (17, 1001), device, dtype)
    target[3] = -100
    given = incoming(rng, (17,), device, names)
    for options in ({}, {"temperature": 0.6, "logit_scale": 1.4, "softcap": 15.0, "valid_vocab": 990}):
        got = gradient(logits, target, exp, given, **options)
        assert got.dtype == logits.dtype
        found = failures(logits, target, dtype, got, given, **options)
        assert not found, f"{options}: {found}"


@pytest.mark.parametrize("vocab", VOCAB)
def test_vocabularies_against_float64(vocab: int, device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (5, vocab), device)
    given = incoming(rng, (5,), device)
    temperature = torch.rand(5, device=device) + 0.3
    got = gradient(logits, target, exp, given, temperature=temperature)
    assert not failures(logits, target, "float32", got, given, temperature=temperature)


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_autograd_against_torchs_own_in_float64(
    names: tuple[str, ...], device: str, exp: str, rng: np.random.Generator
) -> None:
    """This oracle shares no formula with the truth."""
    logits, target = problem(rng, (6, 3, 217), device)
    weights = incoming(rng, (6, 3), device, names)
    x = logits.clone().requires_grad_()
    with mode(device, exp):
        outputs = rk.logprob(x, target, temperature=0.8, softcap=25.0, return_lse=True, return_entropy=True, exp=exp)
        sum((outputs[NAMES.index(n)] * w).sum() for n, w in weights.items()).backward()
    y = logits.double().requires_grad_()
    log_p = torch.log_softmax(25 * torch.tanh(y / 25) / np.float32(0.8).item(), -1)
    lse = torch.logsumexp(25 * torch.tanh(y / 25) / np.float32(0.8).item(), -1)
    plain = (log_p.gather(-1, target[..., None])[..., 0], lse, -(log_p.exp() * log_p).sum(-1))
    sum((plain[NAMES.index(n)] * w).sum() for n, w in weights.items()).backward()
    found = failures(logits, target, "float32", y.grad, weights, temperature=0.8, softcap=25.0)
    assert not found, f"the truth: {found}"
    found = failures(logits, target, "float32", x.grad, weights, temperature=0.8, softcap=25.0)
    assert not found, found


def test_finite_differences_of_the_operator_itself(device: str, exp: str, rng: np.random.Generator) -> None:
    """Central differences of the float32 forward have an error of 4e-5 / (2 h) from rounding and h^2 / 6 times the
    curvature, at h = 0.05."""
    logits, target = problem(rng, (1, 24), device)
    given = incoming(rng, (1,), device)
    got = gradient(logits, target, exp, given)[0].double()
    h = 0.05
    steps = torch.cat([torch.eye(24), -torch.eye(24)]).to(device) * h
    with mode(device, exp):
        moved = rk.logprob(logits + steps, target.expand(48), return_lse=True, return_entropy=True, exp=exp)
    value = sum(o.double() * g.double() for o, g in zip(moved, given.values(), strict=False))
    difference = (value[:24] - value[24:]) / (2 * h)
    size = sum(float(g.abs()) for g in given.values())
    # Third derivatives of ln p stay below 1, and third derivatives of the entropy below 4.
    assert float((got - difference).abs().max()) <= size * (4e-5 / (2 * h) + 4 * h * h / 6)


# ---- exact zeros ----------------------------------------------------------------------------------------------------


def test_what_must_be_zero_is_plus_zero_whatever_lies_there(device: str, exp: str, rng: np.random.Generator) -> None:
    """Ignored rows, rows without a gradient, padding and columns not kept get +0, although they hold NaN and Inf."""
    rows, vocab, valid = 8, 300, 280
    for dtype in DTYPES:
        logits, target = problem(rng, (rows, vocab), device, dtype)
        target %= valid
        target[2] = -100
        kept = (
            torch.arange(40, dtype=torch.int32, device=device),
            torch.tensor([0, 0, 0, 0, 40, 40, 40, 40, 40], device=device),  # only row 3 is restricted
        )
        given = incoming(rng, (rows,), device)
        for g in given.values():
            g[5] = 0
        want = gradient(logits, target, exp, given, valid_vocab=valid, kept=kept)
        outside = torch.ones(vocab, dtype=torch.bool, device=device)
        outside[:40] = outside[target[3]] = False
        for garbage in (float("nan"), float("inf"), float("-inf")):
            dirty = logits.clone()
            dirty[2] = dirty[5] = dirty[:, valid:] = garbage
            dirty[3, outside] = garbage
            got = gradient(dirty, target, exp, given, valid_vocab=valid, kept=kept)
            assert not differing(got, want), f"{dtype}, {garbage}"
        for zero in (got[2], got[5], got[:, valid:], got[3, outside]):
            assert not any(raw(zero)), "a byte that is not 0"
        assert bool((got[3, ~outside] != 0).any())
        assert bool((got[0, :valid] != 0).any())


def test_a_minus_infinity_column_has_zero_gradient(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (4, 100), device)
    logits[:, 50:] = float("-inf")
    target %= 50
    got = gradient(logits, target, exp, incoming(rng, (4,), device))
    assert not bool(got[:, 50:].any())
    assert bool(torch.isfinite(got).all())


def test_an_ignored_rows_incoming_gradient_may_be_nan(device: str) -> None:
    """A mean over an empty mask gives 0 / 0 for every token; ignored tokens must not spread the NaN."""
    logits, target = torch.randn(3, 20, device=device), torch.tensor([1, -100, 2], device=device)
    nan = torch.full((3,), float("nan"), device=device)
    got = gradient(logits, target, "portable", {"dlogprob": nan})
    assert not bool(got[1].any())
    assert bool(torch.isnan(got[0]).all())


# ---- incoming gradients ---------------------------------------------------------------------------------------------


def test_every_token_has_its_own_gradient(device: str, exp: str, rng: np.random.Generator) -> None:
    """In Liger#968 one kernel used element 0 of the incoming gradient for all rows."""
    logits, target = problem(rng, (4, 6, 90), device)
    given = incoming(rng, (4, 6), device)
    whole = gradient(logits, target, exp, given)
    for i, j in ((0, 0), (1, 5), (3, 2)):
        alone = {n: g[i : i + 1, j : j + 1] for n, g in given.items()}
        one = gradient(logits[i : i + 1, j : j + 1], target[i : i + 1, j : j + 1], exp, alone)
        assert not differing(one, whole[i : i + 1, j : j + 1])


STRIDES = {
    "expanded from one number": lambda g: g[0, 0].expand(4, 6),
    "expanded rows": lambda g: g[:1].expand(4, 6),
    "expanded columns": lambda g: g[:, :1].expand(4, 6),
    "transposed": lambda g: g.t().contiguous().t(),
    "every second": lambda g: torch.stack([g, g * 0 + 7], -1)[..., 0],
    "misaligned": lambda g: torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(4, 6),
}


@pytest.mark.parametrize("layout", STRIDES)
def test_a_gradient_of_any_strides_gives_the_bytes_of_its_copy(
    layout: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    logits, target = problem(rng, (4, 6, 90), device)
    given = {n: STRIDES[layout](g) for n, g in incoming(rng, (4, 6), device).items()}
    copies = {n: g.contiguous() for n, g in given.items()}
    assert not differing(gradient(logits, target, exp, given), gradient(logits, target, exp, copies))


def test_sum_and_mean_send_expanded_gradients_through_autograd(device: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (4, 6, 90), device)
    grads = []
    for reduce in (lambda o: o.sum(), lambda o: (o * torch.ones_like(o)).sum()):
        x = logits.clone().requires_grad_()
        reduce(rk.logprob(x, target)).backward()
        grads.append(x.grad)
    assert not differing(*grads)


def test_an_unused_output_costs_and_changes_nothing(device: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (5, 90), device)
    grads = []
    for flags in ({}, {"return_lse": True, "return_entropy": True, "return_sum_p_sq": True, "return_status": True}):
        x = logits.clone().requires_grad_()
        result = rk.logprob(x, target, **flags)
        (result.logprob if flags else result).sum().backward()
        grads.append(x.grad)
    assert not differing(*grads)


def test_sum_p_sq_and_status_have_no_gradient(device: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (5, 90), device)
    result = rk.logprob(logits.requires_grad_(), target, return_sum_p_sq=True, return_status=True)
    assert result.logprob.requires_grad
    assert not result.sum_p_sq.requires_grad
    assert not result.status.requires_grad


# ---- accuracy where it is hard --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [5.0, 10.0, 14.0])
def test_a_confident_tokens_gradient_is_not_cancelled_away(gap: float, device: str, exp: str) -> None:
    """Compares 1 - p_y with float64 by the absolute error."""
    logits = torch.full((1, 1024), -gap, device=device)
    logits[0, 3] = 0.0
    target = torch.tensor([3], device=device)
    got = gradient(logits, target, exp, {"dlogprob": torch.ones(1, device=device)})[0].double()
    rest = 1023 * np.exp(-gap)
    want = rest / (1 + rest)
    allowed = row("logprob", "dlogits of a confident target").allowed(expected=want)
    assert abs(float(got[3]) - want) <= allowed
    assert float(got[3]) > 0
    # A row of a log-probability's gradient sums to 0: the target gains what the others lose.
    assert abs(float(got.sum())) <= allowed


def test_large_logits_do_not_overflow(device: str, exp: str) -> None:
    for size in (1e3, 1e5):
        logits = torch.tensor([[size, -size, 0.0, size]], device=device)
        got = gradient(logits, torch.tensor([0], device=device), exp, {"dlogprob": torch.ones(1, device=device)})
        facts = {"p": 0.5, "log_p": np.log(2), "spread": 0.0, "given": 1.0, "given_entropy": 0.0, "given_target": 1.0}
        allowed = row("logprob", "dlogits").allowed(max_abs_z=size, expected=0.5, **facts)
        assert float((got.cpu() - torch.tensor([[0.5, 0, 0, -0.5]])).abs().max()) <= allowed


# ---- same bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_gives_the_same_bytes(dtype: str, device: str, exp: str, rng: np.random.Generator) -> None:
    for shape in ((5, 1003), (2, 3, 40_000)):
        logits, target = problem(rng, shape, device, dtype)
        given = incoming(rng, shape[:-1], device)
        want = gradient(logits, target, exp, given)
        assert not differing(gradient(logits, target, exp, given, out=logits), want)
        assert not differing(logits, want)


def test_in_place_into_strided_logits_leaves_the_rest_alone(device: str, exp: str, rng: np.random.Generator) -> None:
    memory = torch.full((4, 7, 130), 0.25, device=device)
    view = memory[:, :6, 1:101]
    logits, target = problem(rng, (4, 6, 100), device)
    view.copy_(logits)
    given = incoming(rng, (4, 6), device)
    want = gradient(logits, target, exp, given)
    result = gradient(view, target, exp, given, out=view)
    assert not differing(result, want)
    view.fill_(0.25)
    assert bool((memory == 0.25).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_gradients_have_the_same_bytes(dtype: str, device: str, exp: str, rng: np.random.Generator) -> None:
    """Offsets of 1 to 15 elements for the result, for the logits, and for both by different amounts."""
    vocab = 500
    logits, target = problem(rng, (3, vocab), device, dtype)
    given = incoming(rng, (3,), device)
    want = gradient(logits, target, exp, given)

    def place(offset: int, stride: int) -> tuple[Any, Any]:
        memory = torch.full((offset + 3 * stride + 8,), 9.0, dtype=logits.dtype, device=device)
        return memory, memory.as_strided((3, vocab), (stride, 1), offset)

    for offset in range(16):
        _, x = place(15 - offset, vocab + 3)
        x.copy_(logits)
        memory, out = place(offset, vocab + 1)
        assert not differing(gradient(x, target, exp, given, out=out), want), offset
        out.fill_(9.0)
        assert bool((memory == 9.0).all()), "wrote outside the result"


def test_rows_and_shards_have_the_bytes_of_the_whole(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (40, 1024), device, "bfloat16")
    given = incoming(rng, (40,), device)
    whole = gradient(logits, target, exp, given)
    for n in (1, 2, 7, 39):
        part = gradient(logits[:n], target[:n], exp, {k: g[:n] for k, g in given.items()})
        assert not differing(part, whole[:n]), f"{n} rows"
    with mode(device, exp):
        saved = rk.logprob(logits, target, return_lse=True, return_entropy=True, exp=exp)
        for shards in (2, 4, 8):
            edges = [part_cut(1024, 8 * i // shards) for i in range(shards + 1)]
            parts = [
                rk.logprob_backward(
                    logits[:, a:b], target, saved.lse, entropy=saved.entropy, **given, vocab_start=a, vocab_size=1024,
                    exp=exp,
                )
                for a, b in itertools.pairwise(edges)
            ]  # fmt: skip
            assert not differing(torch.cat(parts, -1), whole), f"{shards} shards"


def test_autograd_has_the_bytes_of_the_explicit_call(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (6, 333), device, "bfloat16")
    given = incoming(rng, (6,), device)
    x = logits.clone().requires_grad_()
    with mode(device, exp):
        outputs = rk.logprob(x, target, return_lse=True, return_entropy=True, exp=exp)
    torch.autograd.backward(outputs[:3], list(given.values()))
    assert not differing(x.grad, gradient(logits, target, exp, given))


def test_the_two_exponentials_differ_and_autograd_keeps_the_forwards(device: str, rng: np.random.Generator) -> None:
    """Both backwards start from one lse, so only the backward's own exponential can make a difference."""
    logits, target = problem(rng, (20, 500), device)
    given = incoming(rng, (20,), device, ("dlogprob",))
    lse = rk.logprob(logits, target, return_lse=True, exp="portable").lse
    grads = {}
    for exp in ("portable", "hardware"):
        with mode(device, exp):
            grads[exp] = rk.logprob_backward(logits, target, lse, **given, exp=exp)
            x = logits.clone().requires_grad_()
            value = rk.logprob(x, target, exp=exp)
        value.backward(given["dlogprob"])  # outside the forward's arithmetic context
        assert not differing(x.grad, gradient(logits, target, exp, given)), exp
    assert differing(grads["portable"], grads["hardware"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [*VOCAB, 128256])
def test_the_cpu_has_the_bytes_of_cuda(vocab: int, dtype: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (5, vocab), "cpu", dtype)
    for names in COMBINATIONS:
        given = incoming(rng, (5,), "cpu", names)
        on_gpu = gradient(logits.cuda(), target.cuda(), exp, {n: g.cuda() for n, g in given.items()}, softcap=30.0)
        assert not differing(gradient(logits, target, exp, given, softcap=30.0), on_gpu), names


# ---- bad rows -------------------------------------------------------------------------------------------------------


def test_a_bad_row_is_nan_and_leaves_the_others_alone(device: str, exp: str, rng: np.random.Generator) -> None:
    logits, target = problem(rng, (8, 200), device)
    given = incoming(rng, (8,), device)
    want = gradient(logits, target, exp, given)
    dirty, wrong = logits.clone(), target.clone()
    dirty[1, 7] = float("nan")
    dirty[3, 7] = float("inf")
    dirty[5] = float("-inf")
    wrong[6] = 200
    got = gradient(dirty, wrong, exp, given)
    for i in (0, 2, 4, 7):
        assert not differing(got[i], want[i]), f"row {i}"
    for i in (1, 3, 5, 6):
        assert bool(torch.isnan(got[i]).all()), f"row {i}"


def test_a_bad_target_poisons_only_the_gradient_of_logprob(device: str, rng: np.random.Generator) -> None:
    logits = torch_logits(rng, (1, 50)).to(device)
    bad, good = torch.tensor([77], device=device), torch.tensor([3], device=device)
    one = torch.ones(1, device=device)
    assert bool(torch.isnan(gradient(logits, bad, "portable", {"dlogprob": one})).all())
    for name in ("dlse", "dentropy"):
        got = gradient(logits, bad, "portable", {name: one})
        want = gradient(logits, good, "portable", {name: one})
        # The target's own column uses another formula, equal within the bound.
        assert not differing(torch.cat([got[:, :3], got[:, 4:]], 1), torch.cat([want[:, :3], want[:, 4:]], 1)), name
        for one_of_both in (got, want):
            assert not failures(logits, good, "float32", one_of_both, {name: one})


def test_batches_of_gradients_have_the_bytes_of_a_loop() -> None:
    """is_grads_batched passes tensors that look plain and have no memory."""
    torch = pytest.importorskip("torch")
    logits = torch.randn(3, 40, requires_grad=True)
    result, batch = rk.logprob(logits, torch.tensor([1, 39, -100])), torch.randn(4, 3)
    want = [torch.autograd.grad(result, logits, g, retain_graph=True)[0] for g in batch]
    for got in (
        torch.autograd.grad(result, logits, batch, is_grads_batched=True, retain_graph=True)[0],
        torch.func.vmap(lambda g: torch.autograd.grad(result, logits, g, retain_graph=True)[0])(batch),
    ):
        assert not differing(list(got), want)
