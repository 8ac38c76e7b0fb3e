"""linear_logprob's backward in torch's engine: the requested gradients, and main_grad."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from linear_logprob_cases import Head, head

torch = pytest.importorskip("torch")

from engine_cases import Subclass, zeros_for  # noqa: E402


@pytest.fixture
def h(device: str, rng: np.random.Generator) -> Head:
    return head(rng, 6, 32, 90, device=device)


def leaves_of(h: Head) -> list[Any]:
    return [t.clone().requires_grad_() for t in h[:3]]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["leaf", "product"])
def test_main_grad_gets_the_gradient_once_where_backward_is_split(inner: bool, traced: bool, h: Head) -> None:
    """Splits backward as zero-bubble pipelines do: inputs first, weights later."""
    dy = torch.linspace(0.5, 1.5, len(h.target), device=h.hidden.device)
    x, weight, bias = leaves_of(h)
    want = zeros_for(weight)
    rk.linear_logprob(x, weight, h.target, bias=bias, main_grad=want).backward(dy)
    want_dx, want_db = x.grad, bias.grad
    once = want.clone()
    x, weight, bias = leaves_of(h)
    if traced:
        x = h.hidden.as_subclass(Subclass).clone().requires_grad_()
    w, main_grad = weight * 1 if inner else weight, zeros_for(weight)
    y = rk.linear_logprob(x, w, h.target, bias=bias, main_grad=main_grad)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy, inputs=[x, bias], retain_graph=True)
    for got in (dx, x.grad):
        assert not differing(got.as_subclass(torch.Tensor), want_dx)
    assert not differing(bias.grad, want_db)
    assert not bool(main_grad.any())
    assert main_grad._version == 0
    y.backward(dy, inputs=[w], retain_graph=True)
    assert not differing(main_grad, once)
    if not inner:
        with pytest.raises(ValueError, match=r"main_grad: takes the gradient of weight, so torch.autograd.grad"):
            torch.autograd.grad(y, weight, dy, retain_graph=True, allow_unused=True)
    assert not differing(main_grad, once)
    y.backward(dy)
    x, w = h.hidden.clone(), h.weight.clone().requires_grad_()
    rk.linear_logprob(x, w, h.target, bias=h.bias, main_grad=want).backward(dy)
    assert not differing(main_grad, want)
    assert main_grad._version == 2
    assert weight.grad is None


def test_a_gradient_that_nobody_asks_for_is_not_computed(h: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel_native.ops import linear_logprob_traced
    from rl_kernel_native.ops.linear_logprob_traced import bools

    asked: list[tuple[bool, ...]] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def linear_logprob_backward(self, *arguments: Any) -> Any:
            asked.append(tuple(bools(arguments[5])[:3]))
            return native.linear_logprob_backward(*arguments)

    native = linear_logprob_traced._C
    monkeypatch.setattr(linear_logprob_traced, "_C", Recording())
    x, w, b = leaves_of(h)
    y = rk.linear_logprob(x, w, h.target, bias=b).sum()
    # A call that asks for the weight's gradient also computes the cheap gradient of bias.
    for leaf, expected in ((x, (True, False, False)), (w, (False, True, True)), (b, (False, False, True))):
        asked.clear()
        torch.autograd.grad(y, leaf, retain_graph=True)
        y.backward(inputs=[leaf], retain_graph=True)
        assert asked == [expected] * 2


def test_backwards_of_several_threads_lose_no_addition() -> None:
    """One token and two equal columns: its gradient is half of the hidden state, so every addition is exact."""
    threads, calls, columns = 8, 25, 4096
    x, target = torch.ones(1, columns), torch.zeros(1, dtype=torch.int64)
    weight, main_grad = torch.zeros(2, columns, requires_grad=True), torch.zeros(2, columns)

    def work() -> None:
        for _ in range(calls):
            rk.linear_logprob(x, weight, target, main_grad=main_grad).sum().backward()

    running = [threading.Thread(target=work) for _ in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    half = threads * calls / 2
    assert bool((main_grad == torch.tensor([[half], [-half]])).all()), main_grad[:, 0]
