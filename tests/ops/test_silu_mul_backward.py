"""Tests of the gradients of silu_mul and gelu_mul against torch's autograd over the same functions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cases import differing
from rl_kernel_native.contract import row
from silu_mul_cases import ACTIVATIONS, DTYPES, Operands, functions, operands, packed_results, results

torch = pytest.importorskip("torch")


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(tuple(a), tuple(b)) if isinstance(a, tuple) else differing(a, b)
    assert not found, f"{what}: {found}"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autograd_has_the_bytes_of_the_functions(activation: str, device: str, rng: np.random.Generator) -> None:
    forward, _, options = functions(activation)
    for dtype, rounds in itertools.product(DTYPES, (False, True)):
        o = operands(rng, (2, 9), 40, dtype, device)
        want = results(o, activation, round_before_mul=rounds)
        leaves = [t.clone().requires_grad_() for t in o[:2]]
        y = forward(*leaves, round_before_mul=rounds, **options)
        y.backward(o.dy)
        assert_same((y, *(t.grad for t in leaves)), want)
        gate_up = torch.cat(o[:2], -1).requires_grad_()
        y = forward(gate_up, round_before_mul=rounds, **options)
        y.backward(o.dy)
        assert_same((y, gate_up.grad[..., :40].contiguous(), gate_up.grad[..., 40:].contiguous()), want)
        assert gate_up.grad.is_contiguous()


def test_only_what_is_asked_for_is_computed(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 16, "bfloat16", device)
    want = results(o)
    for asked in itertools.product((True, False), (True, False)):
        leaves = [t.clone().requires_grad_(a) for t, a in zip(o[:2], asked, strict=True)]
        y = functions("silu")[0](*leaves)
        assert y.requires_grad is any(asked)
        if any(asked):
            y.backward(o.dy)
        assert_same(
            tuple(t.grad for t in leaves), tuple(w if a else None for w, a in zip(want[1:], asked, strict=True))
        )


def test_nothing_is_saved_but_what_came_in(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 16, "bfloat16", device)
    saved: list[int] = []
    leaves = [t.clone().requires_grad_() for t in o[:2]]
    gate_up = torch.cat(o[:2], -1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.data_ptr()), t)[1], lambda t: t):
        functions("silu")[0](*leaves)
        functions("gelu")[0](gate_up)
    assert saved == [t.data_ptr() for t in (*leaves, gate_up)]


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
        leaves = [t.clone().requires_grad_() for t in o[:2]]
        functions("silu")[0](*leaves).backward(gradient)
        grads.append(tuple(t.grad for t in leaves))
    assert_same(*grads)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_has_the_gradients_of_float64(activation: str, device: str, rng: np.random.Generator) -> None:
    """The MLP has two layers of gated activations in float32."""
    o = operands(rng, (12,), 64, "float32", device)
    forward, _, options = functions(activation)
    approximate = options.get("approximate", "none")

    def theirs(gate: Any, up: Any) -> Any:
        act = (
            torch.nn.functional.silu(gate)
            if activation == "silu"
            else torch.nn.functional.gelu(gate, approximate=approximate)
        )
        return act * up

    grads = []
    for f, dtype in ((lambda *a: forward(*a, **options), torch.float32), (theirs, torch.float64)):
        leaves = [t.to(dtype).clone().requires_grad_() for t in o[:2]]
        hidden = f(*leaves)
        f(hidden / 4, 1 - hidden / 8).sum().backward()  # exactly rounded on every device, unlike sin
        grads.append([t.grad.double() for t in leaves])
    for got, want in zip(*grads, strict=True):
        operator = "silu_mul" if activation == "silu" else "gelu_mul"
        allowed = row(operator, "gradients of two layers").allowed(largest=float(want.abs().max()))
        assert float((got - want).abs().max()) <= allowed


def test_a_gradient_of_another_dtype_is_rounded_first(device: str, rng: np.random.Generator) -> None:
    """A graph that mixes float32 and bfloat16 hands over such gradients."""
    o = operands(rng, (4,), 16, "bfloat16", device)
    leaves = [t.clone().requires_grad_() for t in o[:2]]
    y = functions("silu")[0](*leaves)
    (y.float() * o.dy.float()).sum().backward()
    assert_same(tuple(t.grad for t in leaves), results(o)[1:])


def test_packed_and_apart_have_the_same_gradients(device: str, rng: np.random.Generator) -> None:
    for activation in ACTIVATIONS:
        o = operands(rng, (3, 5), 24, "float16", device)
        assert_same(packed_results(torch.cat((o.gate, o.up), -1), o.dy, activation), results(Operands(*o), activation))
