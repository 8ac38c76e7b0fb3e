"""embedding's backward in torch's engine: the requested gradients, and main_grad."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from embedding_cases import Operands, operands

torch = pytest.importorskip("torch")

from engine_cases import Subclass, zeros_for  # noqa: E402


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (3, 40), 40, 32, "bfloat16", device)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["leaf", "product"])
def test_main_grad_gets_the_gradient_once_for_each_backward_that_asks(inner: bool, traced: bool, o: Operands) -> None:
    weight = o.weight.clone().requires_grad_()
    other = torch.ones((), device=o.weight.device, requires_grad=True)
    w = weight * 1 if inner else weight
    main_grad, want = zeros_for(weight), zeros_for(weight)
    ids = o.ids.as_subclass(Subclass) if traced else o.ids
    y = rk.embedding(ids, w, main_grad=main_grad)
    rk.embedding_backward(o.dy, o.ids, 40, main_grad=want)
    z = y * other
    z.backward(o.dy, inputs=[other], retain_graph=True)
    assert not bool(main_grad.any())
    assert main_grad._version == 0
    z.backward(o.dy, inputs=[w], retain_graph=True)
    assert not differing(main_grad, want)
    if not inner:
        with pytest.raises(ValueError, match=r"main_grad: takes the gradient of weight, so torch\.autograd\.grad"):
            torch.autograd.grad(y, weight, o.dy, retain_graph=True, allow_unused=True)
    assert not differing(main_grad, want)
    y.backward(o.dy)
    rk.embedding_backward(o.dy, o.ids, 40, main_grad=want)
    assert not differing(main_grad, want)
    assert main_grad._version == 2
    assert weight.grad is None


def test_a_write_of_every_path_is_counted(o: Operands) -> None:
    """A backward that saved main_grad must be refused after something was added to it."""
    from torch.utils.flop_counter import FlopCounterMode

    memory = zeros_for(o.weight)
    rk.embedding_backward(o.dy, o.ids, 40, main_grad=memory)
    with FlopCounterMode(display=False):
        rk.embedding_backward(o.dy, o.ids, 40, main_grad=memory)
    assert memory._version == 2
    if o.weight.is_cuda:
        return
    dy, ids = o.dy.float().numpy(), o.ids.numpy()
    assert rk.embedding_backward(dy, ids, 40, main_grad=memory) is memory
    assert memory._version == 3
    with pytest.raises(ValueError, match=r"main_grad: has torch's negative bit; call .resolve_neg"):
        rk.embedding_backward(dy, ids, 40, main_grad=torch._neg_view(memory))


def test_backwards_of_several_threads_lose_no_addition() -> None:
    """All elements are ones, so the sum is exact in any order."""
    ids, dy, threads, calls = torch.arange(64) % 2, torch.ones(64, 4096), 8, 25
    weight, main_grad = torch.zeros(3, 4096, requires_grad=True), torch.zeros(3, 4096)

    def work() -> None:
        for _ in range(calls):
            rk.embedding(ids, weight, main_grad=main_grad).backward(dy)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    assert bool((main_grad[:2] == 32.0 * threads * calls).all())
    assert not bool(main_grad[2].any())
