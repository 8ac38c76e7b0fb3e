"""embedding's backward as torch's engine runs it: what is asked for, gradients of every kind, main_grad."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from embedding_cases import Operands, operands

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (3, 40), 40, 32, "bfloat16", device)


def zeros_for(weight: Any) -> Any:
    return torch.zeros(weight.shape, device=weight.device)


class Subclass(torch.Tensor):
    """With memory, and without a word about dispatch: goes through the dispatcher."""


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


@pytest.mark.parametrize("kind", ["subclass", "negative bit", "mode", "expanded", "transposed", "float32"])
def test_a_gradient_of_any_kind_has_the_bytes_of_a_plain_one(kind: str, o: Operands) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    make = {
        "subclass": lambda g: g.as_subclass(Subclass),
        "negative bit": lambda g: torch._neg_view(-g),
        "mode": lambda g: g,
        "expanded": lambda g: g[..., :1].expand_as(g),
        "transposed": lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
        "float32": lambda g: g.float(),
    }[kind]
    leaf = o.weight.clone().requires_grad_()
    y = rk.embedding(o.ids, leaf)
    y = y.float() if kind == "float32" else y
    plain = make(o.dy).as_subclass(torch.Tensor).resolve_neg().clone().contiguous()
    (want,) = torch.autograd.grad(y, leaf, plain, retain_graph=True)
    if kind == "mode":
        with FlopCounterMode(display=False):
            (got,) = torch.autograd.grad(y, leaf, make(o.dy))
    else:
        (got,) = torch.autograd.grad(y, leaf, make(o.dy))
    assert not differing(got.as_subclass(torch.Tensor), want)


def test_batches_of_gradients_have_the_bytes_of_a_loop(o: Operands) -> None:
    leaf = o.weight.clone().requires_grad_()
    y = rk.embedding(o.ids, leaf)
    batch = torch.stack([o.dy, o.dy * 2, o.dy - 1])
    want = torch.stack([torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for dy in batch])
    (batched,) = torch.autograd.grad(y, leaf, batch, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda dy: torch.autograd.grad(y, leaf, dy, retain_graph=True)[0])(batch)
    assert not differing(batched, want)
    assert not differing(mapped, want)


def test_a_tangent_of_the_gradient_is_kept(o: Operands) -> None:
    """The gradient is linear: its tangent is that of the incoming one, summed."""
    leaf = o.weight.clone().requires_grad_()
    y = rk.embedding(o.ids, leaf)
    with forward_ad.dual_level():
        (got,) = torch.autograd.grad(y, leaf, forward_ad.make_dual(o.dy, o.dy * 2), retain_graph=True)
        tangent = forward_ad.unpack_dual(got).tangent
    assert not differing(tangent, torch.autograd.grad(y, leaf, o.dy * 2)[0])


def test_a_gradient_from_a_collective_is_waited_for_and_a_dtensor_is_refused(
    o: Operands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dist = pytest.importorskip("torch.distributed")
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    tensor = pytest.importorskip("torch.distributed.tensor")
    if o.weight.is_cuda:
        pytest.skip("the group is gloo's")
    file = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    try:
        leaf, main_grad = o.weight.clone().requires_grad_(), zeros_for(o.weight)
        y = rk.embedding(o.ids, leaf)
        (want,) = torch.autograd.grad(y, leaf, o.dy, retain_graph=True)
        dy = collectives.all_reduce(o.dy.clone(), "sum", dist.group.WORLD)
        assert not differing(torch.autograd.grad(y, leaf, dy, retain_graph=True)[0], want)
        dy = collectives.all_reduce(o.dy.clone(), "sum", dist.group.WORLD)
        rk.embedding(o.ids, leaf, main_grad=main_grad).backward(dy)
        assert not differing(main_grad.bfloat16(), want)
        mesh = tensor.init_device_mesh("cpu", (1,))
        dy = tensor.DTensor.from_local(o.dy, mesh, [tensor.Replicate()])
        with pytest.raises(TypeError, match=r"dy: expected a local tensor, got a DTensor; pass tensor.to_local"):
            torch.autograd.grad(y, leaf, dy)
    finally:
        dist.destroy_process_group()


def test_a_fake_gradient_gives_fake_gradients(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaf = o.weight.clone().requires_grad_()
    y = rk.embedding(o.ids, leaf)
    with FakeTensorMode(allow_non_fake_inputs=True):
        (got,) = torch.autograd.grad(y, leaf, torch.ones_like(o.dy))
    assert isinstance(got, FakeTensor)
    assert got.shape == leaf.shape


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_cannot_be_added_to_main_grad_is_refused(o: Operands) -> None:
    weight, main_grad = o.weight.clone().requires_grad_() * 1, zeros_for(o.weight)
    y = rk.embedding(o.ids, weight, main_grad=main_grad)
    batch = torch.stack([o.dy, o.dy])
    with pytest.raises(ValueError, match="main_grad: a batch of gradients"):
        torch.autograd.grad(y, weight, batch, is_grads_batched=True, retain_graph=True, allow_unused=True)
    with pytest.raises(ValueError, match="main_grad: a batch of gradients"):
        torch.func.vmap(lambda g: torch.autograd.grad(y, weight, g, retain_graph=True, allow_unused=True)[0])(batch)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="embedding_backward_: a derivative is wanted where it would be lost"),
    ):
        y.backward(forward_ad.make_dual(o.dy, o.dy), retain_graph=True)
    with pytest.raises(ValueError, match=r"main_grad: .*without create_graph"):
        y.backward(o.dy, create_graph=True)
    leaf = o.weight.clone().requires_grad_()
    with pytest.raises(TypeError, match="dy: expected a dense tensor, got a sparse_coo one"):
        torch.autograd.grad(rk.embedding(o.ids[0], leaf), leaf, o.dy[0].to_sparse())
    assert not bool(main_grad.any())
    assert main_grad._version == 0


def test_a_write_of_every_path_is_counted(o: Operands) -> None:
    """A backward that saved main_grad must not run on what was added since."""
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
    """Rows of ones: every addition is of ones, so the sum is exact in any order."""
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
