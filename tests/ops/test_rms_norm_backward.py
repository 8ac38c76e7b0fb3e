"""rms_norm's gradients: sums over tokens in blocks, main_grad, and torch's autograd over the same functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native.contract import row
from rms_norm_cases import DTYPES, EPS, Operands, contract, operands, results

torch = pytest.importorskip("torch")

BLOCK = 8192  # rows per block of rule 9
# Around a group of 64 rows and around a block; several blocks and a remainder.
ROWS = [1, 63, 64, 65, 1000, 8191, 8192, 8193, 3 * 8192 + 77]


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(tuple(a), tuple(b)) if isinstance(a, tuple) else differing(a, b)
    assert not found, f"{what}: {found}"


def leaves(o: Operands, *names: str) -> dict[str, Any]:
    return {name: getattr(o, name).clone().requires_grad_() for name in names}


# ---- rule 9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_dweight_is_groups_of_64_rows_trees_and_blocks(rows: int, device: str, rng: np.random.Generator) -> None:
    for dtype, options in (("bfloat16", {"round_before_weight": True}), ("float32", {"weight_offset": 1.0})):
        o = operands(rng, (rows,), 24, dtype, device)
        assert_same(results(o, **options), contract(o, **options), dtype)


@pytest.mark.parametrize("rows", [100, 8192, 2 * 8192 + 5])
def test_blocks_are_added_to_main_grad_in_order(rows: int, device: str, rng: np.random.Generator) -> None:
    """Micro-batches of whole blocks then have the bytes of one batch."""
    o = operands(rng, (rows,), 40, "bfloat16", device)
    start = torch.from_numpy(rng.standard_normal(40, dtype=np.float32)).to(device)
    whole, pieces, want = start.clone(), start.clone(), start.clone()
    assert rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, main_grad=whole)[1] is whole
    for i in range(0, rows, BLOCK):
        part = (o.dy[i : i + BLOCK], o.x[i : i + BLOCK])
        rk.rms_norm_backward(*part, o.weight, EPS, main_grad=pieces)
        want = want + rk.rms_norm_backward(*part, o.weight, EPS, dweight_dtype="float32")[1]
    assert_same(whole, want)
    assert_same(pieces, want)


def test_dweight_is_rounded_once(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (9000,), 16, "bfloat16", device)
    single = rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, dweight_dtype=torch.float32)[1]
    assert_same(rk.rms_norm_backward(o.dy, o.x, o.weight, EPS)[1], single.bfloat16())
    assert rk.rms_norm_backward(o.dy, o.x, o.weight.float(), EPS)[1].dtype == torch.float32


def test_rstd_is_computed_again_with_the_same_bits(device: str, rng: np.random.Generator) -> None:
    for dtype in DTYPES:
        o = operands(rng, (5, 7), 133, dtype, device)
        rstd = rk.rms_norm(o.x, o.weight, EPS, return_rstd=True)[1]
        assert_same(
            rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, rstd=rstd), rk.rms_norm_backward(o.dy, o.x, o.weight, EPS)
        )


def test_no_gradient_of_the_new_residual_is_a_gradient_of_zeros(device: str, rng: np.random.Generator) -> None:
    """Every bit is equal, signs of zeros included, so a graph that drops this gradient changes nothing."""
    for dtype in DTYPES:
        o = operands(rng, (70,), 64, dtype, device)
        dy = o.dy * (torch.arange(70, device=device) % 3 > 0)[:, None]  # rows of zeros of both signs
        zeros = torch.zeros_like(dy)
        assert_same(
            rk.rms_norm_backward(dy, o.x, o.weight, EPS),
            rk.rms_norm_backward(dy, o.x, o.weight, EPS, d_new_residual=zeros),
        )


# ---- autograd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", ["same", "float32"])
def test_autograd_has_the_bytes_of_the_functions(weight_dtype: str, device: str, rng: np.random.Generator) -> None:
    for dtype in DTYPES:
        o = operands(rng, (2, 9), 40, dtype, device)
        if weight_dtype == "float32":
            o = o._replace(weight=o.weight.float())
        for options in ({}, {"round_before_weight": True, "weight_offset": 1.0}):
            t = leaves(o, "x", "weight")
            rk.rms_norm(t["x"], t["weight"], EPS, **options).backward(o.dy)
            dx, dweight = rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, **options)
            assert_same((t["x"].grad, t["weight"].grad), (dx, dweight))
            t = leaves(o, "x", "weight", "residual")
            y, new_residual = rk.rms_norm(t["x"], t["weight"], EPS, residual=t["residual"], **options)
            torch.autograd.backward((y, new_residual), (o.dy, o.d_new_residual))
            dx, dweight = rk.rms_norm_backward(
                o.dy, new_residual.detach(), o.weight, EPS, d_new_residual=o.d_new_residual, **options
            )
            assert_same((t["x"].grad, t["residual"].grad, t["weight"].grad), (dx, dx, dweight))


def test_only_what_is_asked_for_is_computed(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 16, "bfloat16", device)
    names = ("x", "weight", "residual")
    for asked in (("x",), ("weight",), ("residual",), ("x", "residual"), names):
        t = {name: getattr(o, name).clone().requires_grad_(name in asked) for name in names}
        y, new_residual = rk.rms_norm(t["x"], t["weight"], EPS, residual=t["residual"])
        y.backward(o.dy)
        assert {name for name in names if t[name].grad is not None} == set(asked)
        if asked != ("weight",):
            assert new_residual.requires_grad


def test_each_output_may_go_unused(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 16, "bfloat16", device)
    t = leaves(o, "x", "weight", "residual")
    _, new_residual = rk.rms_norm(t["x"], t["weight"], EPS, residual=t["residual"])
    new_residual.backward(o.d_new_residual)
    assert_same((t["x"].grad, t["residual"].grad), (o.d_new_residual, o.d_new_residual))
    assert t["weight"].grad is None
    t = leaves(o, "x", "weight", "residual")
    y, new_residual = rk.rms_norm(t["x"], t["weight"], EPS, residual=t["residual"])
    y.backward(o.dy)
    assert_same(t["x"].grad, rk.rms_norm_backward(o.dy, new_residual.detach(), o.weight, EPS)[0])


def test_rstd_has_no_gradient(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 16, "bfloat16", device)
    y, rstd = rk.rms_norm(o.x.clone().requires_grad_(), o.weight, EPS, return_rstd=True)
    assert y.requires_grad
    assert not rstd.requires_grad


@pytest.mark.parametrize("layout", ["expanded", "transposed", "strided", "four dimensions"])
def test_any_layout_of_the_incoming_gradient_is_right(layout: str, device: str, rng: np.random.Generator) -> None:
    rows = (2, 3, 2) if layout == "four dimensions" else (16,)
    o = operands(rng, rows, 16, "bfloat16", device)
    dy = {
        "expanded": lambda: torch.ones((), dtype=torch.bfloat16, device=device).expand(16, 16),
        "transposed": lambda: o.dy.t().contiguous().t(),
        "strided": lambda: torch.stack([o.dy, o.dy], -1)[..., 0],
        "four dimensions": lambda: o.dy.transpose(0, 2).contiguous().transpose(0, 2),
    }[layout]()
    grads = []
    for gradient in (dy, dy.contiguous()):
        t = leaves(o, "x", "weight", "residual")
        outputs = rk.rms_norm(t["x"], t["weight"], EPS, residual=t["residual"])
        torch.autograd.backward(outputs, (gradient, gradient))
        grads.append(tuple(t[name].grad for name in t))
    assert_same(*grads)


def test_a_weight_may_be_missing(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 16, "float32", device)
    x = o.x.clone().requires_grad_()
    rk.rms_norm(x, None, EPS).backward(o.dy)
    assert_same(x.grad, rk.rms_norm_backward(o.dy, o.x, torch.ones_like(o.weight), EPS)[0])


def test_a_layer_of_a_transformer_has_the_gradients_of_float64(device: str, rng: np.random.Generator) -> None:
    """Two norms on one residual stream, in float32."""
    o = operands(rng, (12,), 64, "float32", device)

    def stream(norm: Any, x: Any, weight: Any, residual: Any) -> Any:
        y, residual = norm(x, weight, residual)
        z, residual = norm(y.tanh(), weight, residual)
        return (z.sin() + residual).sum()

    def ours(x: Any, weight: Any, residual: Any) -> Any:
        return rk.rms_norm(x, weight, EPS, residual=residual)

    def theirs(x: Any, weight: Any, residual: Any) -> Any:
        h = x + residual
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight, h

    grads = []
    for norm, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        t = {name: getattr(o, name).clone().to(dtype).requires_grad_() for name in ("x", "weight", "residual")}
        stream(norm, **t).backward()
        grads.append([g.grad.double() for g in t.values()])
    for got, want in zip(*grads, strict=True):
        allowed = row("rms_norm", "gradients of two layers").allowed(largest=float(want.abs().max()))
        assert float((got - want).abs().max()) <= allowed


# ---- main_grad ------------------------------------------------------------------------------------------------------


def test_main_grad_takes_the_gradient_of_weight(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (2, 30), 40, "bfloat16", device)
    t = leaves(o, "x", "weight")
    main_grad = torch.full((40,), 0.25, device=device)
    want = main_grad.clone()
    for _ in range(3):  # micro-batches; each is one block here
        rk.rms_norm(t["x"], t["weight"], EPS, main_grad=main_grad).backward(o.dy)
        rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, main_grad=want)
    assert_same(main_grad, want)
    assert t["weight"].grad is None
    assert t["x"].grad is not None


def test_main_grad_may_be_a_view_and_nothing_else_is_touched(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (21,), 19, "bfloat16", device)
    want = rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, dweight_dtype="float32")[1]
    memory = torch.full((40,), 7.0, device=device)
    view = memory[5:24]
    view.fill_(0.5)
    rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, main_grad=view)
    assert_same(view, want + 0.5)
    view.fill_(7.0)
    assert bool((memory == 7.0).all())


def test_main_grad_is_left_alone_without_a_gradient(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (6,), 16, "bfloat16", device)
    main_grad = torch.ones(16, device=device)
    with torch.no_grad():
        y = rk.rms_norm(o.x, o.weight, EPS, main_grad=main_grad)
    assert_same(y, rk.rms_norm(o.x, o.weight, EPS))
    assert bool((main_grad == 1).all())


def test_writing_in_place_is_seen_by_autograd(device: str, rng: np.random.Generator) -> None:
    """Without this, a backward that saved the memory would compute with its overwritten contents."""
    o = operands(rng, (6,), 16, "bfloat16", device)
    for write in (
        lambda m: rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, main_grad=m),
        lambda m: rk.rms_norm(o.x, o.weight.clone().requires_grad_(), EPS, main_grad=m).backward(o.dy),
    ):
        memory, other = torch.ones(16, device=device), torch.ones(16, device=device, requires_grad=True)
        product = memory * other
        write(memory)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
