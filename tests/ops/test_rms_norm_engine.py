"""rms_norm's backward in torch's engine: the requested gradients, and main_grad."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rms_norm_cases import EPS, Operands, operands

torch = pytest.importorskip("torch")

from engine_cases import Subclass, zeros_for  # noqa: E402


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, "bfloat16", device)


def leaves_of(o: Operands) -> list[Any]:
    return [t.clone().requires_grad_() for t in o[:3]]


def norm(x: Any, weight: Any, residual: Any, **options: Any) -> Any:
    return rk.rms_norm(x, weight, EPS, residual=residual, **options)


# ---- requested gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["leaf", "product"])
def test_main_grad_gets_the_gradient_once_where_backward_is_split(inner: bool, traced: bool, o: Operands) -> None:
    """Splits backward as zero-bubble pipelines do: inputs first, weights later."""
    x, weight, residual = leaves_of(o)
    if traced:
        x = o.x.as_subclass(Subclass).clone().requires_grad_()
    w = weight * 1 if inner else weight
    main_grad, want = zeros_for(weight), zeros_for(weight)
    y, h = norm(x, w, residual, main_grad=main_grad)
    h = h.detach().as_subclass(torch.Tensor)
    wanted_dx, _ = rk.rms_norm_backward(o.dy, h, o.weight, EPS, main_grad=want)
    (dx,) = torch.autograd.grad(y, x, o.dy, retain_graph=True)
    y.backward(o.dy, inputs=[x, residual], retain_graph=True)
    for got in (dx, x.grad, residual.grad):
        assert not differing(got.as_subclass(torch.Tensor), wanted_dx)
    assert not bool(main_grad.any())
    assert main_grad._version == 0
    y.backward(o.dy, inputs=[w], retain_graph=True)
    assert not differing(main_grad, want)
    if not inner:
        with pytest.raises(ValueError, match=r"main_grad: takes the gradient of weight, so torch.autograd.grad"):
            torch.autograd.grad(y, weight, o.dy, retain_graph=True, allow_unused=True)
    assert not differing(main_grad, want)
    y.backward(o.dy)
    rk.rms_norm_backward(o.dy, h, o.weight, EPS, main_grad=want)
    assert not differing(main_grad, want)
    assert main_grad._version == 2
    assert weight.grad is None


def test_a_gradient_that_nobody_asks_for_is_not_computed(o: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["rl_kernel_native.ops.rms_norm"]

    asked: list[tuple[bool, bool]] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def rms_norm_backward(self, *arguments: Any) -> Any:
            asked.append(arguments[9:11])
            return native.rms_norm_backward(*arguments)

    native = module._C
    monkeypatch.setattr(module, "_C", Recording())
    for weight, leaves in ((True, leaves_of(o)), (False, leaves_of(o))):
        x, w, residual = leaves
        y, _ = norm(x, w if weight else None, residual)
        for leaf, expected in ((x, (True, False)), (w, (False, True)), (residual, (True, False))):
            if leaf is w and not weight:
                continue
            asked.clear()
            torch.autograd.grad(y, leaf, o.dy, retain_graph=True)
            y.backward(o.dy, inputs=[leaf], retain_graph=True)
            assert asked == [expected] * 2


# ---- gradients of every kind -----------------------------------------------------------------------------------------


def test_a_vectorised_hessian(rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 6, "float32")
    f = lambda x: rk.rms_norm(x, o.weight, 0.5).square().sum()  # noqa: E731
    got, want = (torch.autograd.functional.hessian(f, o.x, vectorize=v) for v in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- main_grad -------------------------------------------------------------------------------------------------------


def test_a_write_of_every_path_is_counted(o: Operands) -> None:
    """A backward that saved main_grad must not run after something was added to it."""
    from torch.utils.flop_counter import FlopCounterMode

    memory = zeros_for(o.weight)
    rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, main_grad=memory)
    with FlopCounterMode(display=False):
        rk.rms_norm_backward(o.dy, o.x, o.weight, EPS, main_grad=memory)
    assert memory._version == 2
    if o.x.is_cuda:
        return
    dy, x, weight = (t.float().numpy() for t in (o.dy, o.x, o.weight))
    assert rk.rms_norm_backward(dy, x, weight, EPS, main_grad=memory)[1] is memory
    assert memory._version == 3
    with pytest.raises(ValueError, match=r"main_grad: has torch's negative bit; call .resolve_neg"):
        rk.rms_norm_backward(dy, x, weight, EPS, main_grad=torch._neg_view(memory))


def test_backwards_of_several_threads_lose_no_addition() -> None:
    """Rows are ones and eps is negligible, so every addition is of ones and the sum is exact in any order."""
    x, threads, calls, columns = torch.ones(64, 4096), 8, 25, 4096
    weight = torch.zeros(columns, requires_grad=True)
    main_grad = torch.zeros(columns)

    def work() -> None:
        for _ in range(calls):
            rk.rms_norm(x, weight, 1e-12, main_grad=main_grad).backward(x)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    assert bool((main_grad == 64.0 * threads * calls).all())
