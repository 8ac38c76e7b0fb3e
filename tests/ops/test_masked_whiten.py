"""masked_whiten: float64, verl's formula, the same bits for every layout of sequences, bad input, and calls through
torch. test_masked_whiten.cpp compares the contract's bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from advantage_cases import LENGTHS, MASKS, Batch, batch, verl_whiten, whiten_failures
from cases import beyond, differing
from torch_properties import captured

torch = pytest.importorskip("torch", reason="layouts are made with torch")


def assert_same(got: Any, want: Any, what: Any = "") -> None:
    found = differing(tuple(got), tuple(want))
    assert not found, f"{what}: {found}"


def whiten(x: Any, *sequences: Any, **options: Any) -> Any:
    return rk.masked_whiten(x, *sequences, return_stats=True, **options)


@pytest.mark.parametrize("options", [{}, {"shift_mean": False}, {"unbiased": False}, {"eps": 0.5}], ids=str)
def test_values_lie_near_float64(options: dict[str, Any], device: str, rng: np.random.Generator) -> None:
    for length, mask_dtype in zip(LENGTHS, MASKS * 2, strict=False):
        b = batch(rng, [length, length // 2, 3], device, mask_dtype)
        x = b.rewards * 3 + 1
        got = whiten(x, b.mask, **options)
        want = rk.masked_whiten_reference(np.nan_to_num(x.cpu().numpy()), b.mask.cpu().numpy(), **options)
        assert not whiten_failures(got, want), length


@pytest.mark.parametrize("shift_mean", [True, False])
def test_it_is_verls(shift_mean: bool, device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [400, 300, 0, 7], device, "int64")
    got = rk.masked_whiten(b.values, b.mask, shift_mean=shift_mean)
    mask = b.mask.cpu()
    want = verl_whiten(b.values.cpu().nan_to_num().double(), mask, shift_mean) * mask
    assert not beyond("masked_whiten", "y", got, want, largest=float(want.abs().max()))


def test_packing_padding_and_strides_change_no_bit(device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [5, 0, 128, 700, 1, 2100], device)
    want = whiten(b.values, b.mask)
    flat, cu = b.packed()
    for ends in (cu, cu.int()):
        got = whiten(flat.values, flat.mask, ends)
        assert_same(got[1:], want[1:])
        for row, n, mine in zip(want.y, b.lengths, b.unpacked(got.y), strict=True):
            assert_same((mine,), (row[:n],))
    for shift, pad in ((1, 3), (0, 4), (2, 129)):
        memory = torch.full((6 * (2100 + pad) + shift,), float("nan"), device=device)
        x = memory[shift:].view(6, 2100 + pad)
        x[:, :2100] = b.values
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[:, :2100] = b.mask
        got = whiten(x, mask)
        assert_same((got.y[:, :2100].contiguous(), *got[1:]), want, (shift, pad))
    garbage = torch.where(b.mask, b.values, float("inf"))
    assert_same(whiten(garbage, b.mask), want)
    empty_rows = torch.cat((b.values, torch.full_like(b.values, float("nan"))))
    none = torch.cat((b.mask, torch.zeros_like(b.mask)))
    assert_same((whiten(empty_rows, none).y[:6],), (want.y,), "rows of which none counts")


def test_edges_are_defined(device: str) -> None:
    x = torch.full((2, 5), float("nan"), device=device)
    none = torch.zeros((2, 5), dtype=torch.bool, device=device)
    got = whiten(x, none)
    assert_same((got.y, got.mean, got.var), (torch.zeros(2, 5), torch.tensor(0.0), torch.tensor(0.0)))
    one = none.clone()
    one[1, 2] = True
    x[1, 2] = 0.7
    got = whiten(x, one)
    assert bool((got.y == 0).all())
    assert got.mean == x[1, 2]
    equal = torch.full((7, 3), 0.1, device=device)
    assert bool((rk.masked_whiten(equal) == 0).all()), "exactly"
    assert bool((rk.masked_whiten(equal, shift_mean=False) == equal).all())
    assert rk.masked_whiten(equal[:0]).shape == (0, 3)
    assert rk.masked_whiten(equal[:, :0]).shape == (7, 0)
    equal[3, 1] = float("nan")
    assert bool(rk.masked_whiten(equal).isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(60))
def test_cpu_and_cuda_have_the_same_bytes(number: int) -> None:
    rng = np.random.default_rng(number)
    rows, most = int(np.exp(rng.uniform(0, 7))), int(np.exp(rng.uniform(0, 8)))
    b = batch(rng, rng.integers(0, most + 1, rows), mask_dtype=MASKS[number % 5], share=float(rng.random()))
    there = Batch(*(a.cuda() for a in b[:5]), b.lengths)
    options = {"shift_mean": bool(number % 2), "unbiased": bool(number % 3)}
    assert_same(
        tuple(o.cpu() for o in whiten(there.values, there.mask, **options)), whiten(b.values, b.mask, **options)
    )
    (flat, cu), (flat_there, cu_there) = b.packed(), there.packed()
    got = whiten(flat_there.values, flat_there.mask, cu_there, **options)
    assert_same(tuple(o.cpu() for o in got), whiten(flat.values, flat.mask, cu, **options), "packed")


X = torch.zeros(2, 8)
BAD = {
    "x a dtype": (lambda: rk.masked_whiten(X.double()), TypeError, "x: expected dtype float32, got float64"),
    "x 3-D": (lambda: rk.masked_whiten(X[None]), ValueError, "x: expected shape [num_sequences, num_tokens] or"),
    "x strided": (lambda: rk.masked_whiten(torch.zeros(8, 2).T), ValueError, "x: expected a contiguous last dimension"),
    "mask a shape": (lambda: rk.masked_whiten(X, X[:1] > 0), ValueError, "mask: expected shape [2, 8] (that of x)"),
    "mask a dtype": (lambda: rk.masked_whiten(X, X * 1j), TypeError, "mask: expected dtype bool, of integ"),
    "eps": (lambda: rk.masked_whiten(X, eps=0.0), ValueError, "eps: expected a finite number > 0 in float32, got 0.0"),
    "cu": (
        lambda: rk.masked_whiten(X[0], None, torch.tensor([0, 9, 8])), ValueError, "cu_seqlens: expected at most 8",
    ),
}  # fmt: skip


def test_subnormal_values_are_told_apart_whatever_the_thread_flushes() -> None:
    """The least and the largest value come from several sequences; equal extremes would make the values a constant."""
    x = torch.tensor([[1e-40, 1e-40], [2e-40, 2e-40]])
    want = whiten(x)
    try:
        assert torch.set_flush_denormal(True)
        got = whiten(x)
    finally:
        torch.set_flush_denormal(False)
    assert_same(got, want)
    assert want.var == 0
    assert want.y[0, 0] != want.y[1, 1]


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    call, error, text = BAD[case]
    with pytest.raises(error, match="^" + re.escape(text)):
        call()


def test_numpy_and_jax_get_torchs_bytes(rng: np.random.Generator) -> None:
    b = batch(rng, [130, 57])
    want = whiten(b.values, b.mask)
    assert_same(whiten(b.values.numpy(), b.mask.numpy()), want)
    jax = pytest.importorskip("jax")
    got = whiten(jax.numpy.asarray(b.values.numpy()), jax.numpy.asarray(b.mask.numpy()))
    assert isinstance(got.y, jax.Array)
    assert_same(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_calls_give_the_same_bytes(backend: str, device: str, rng: np.random.Generator) -> None:
    b = batch(rng, [140, 130], device)
    compiled: Any = torch.compile(whiten, fullgraph=True, backend=backend)
    assert_same(compiled(b.values.clone().requires_grad_(), b.mask), whiten(b.values, b.mask))
    torch.library.opcheck(
        torch.ops.rl_kernel_native.masked_whiten, (b.values, b.mask, None, 1e-8, True, True, True),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    assert not rk.masked_whiten(b.values.clone().requires_grad_()).requires_grad


@pytest.mark.gpu
def test_a_cuda_graph_replays_without_a_synchronisation(rng: np.random.Generator) -> None:
    b = batch(rng, [700, 300, 20], "cuda")
    graph, got = captured(lambda: whiten(b.values, b.mask))
    b.values.mul_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(tuple(g.cpu() for g in got), tuple(w.cpu() for w in whiten(b.values, b.mask)))
