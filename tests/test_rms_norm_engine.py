"""rms_norm's backward as torch's engine runs it: what is asked for, gradients of every kind, main_grad."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native.contract import row
from rms_norm_cases import EPS, Operands, operands

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, "bfloat16", device)


def leaves_of(o: Operands) -> list[Any]:
    return [t.clone().requires_grad_() for t in o[:3]]


def zeros_for(weight: Any) -> Any:
    return torch.zeros(weight.shape, device=weight.device)


def norm(x: Any, weight: Any, residual: Any, **options: Any) -> Any:
    return rk.rms_norm(x, weight, EPS, residual=residual, **options)


def plain(tensors: Any) -> tuple[Any, ...]:
    return tuple(t.as_subclass(torch.Tensor) for t in tensors)


class Subclass(torch.Tensor):
    """With memory, and without a word about dispatch: goes through the dispatcher."""


# ---- what the engine asks for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["leaf", "product"])
def test_main_grad_gets_the_gradient_once_where_backward_is_split(inner: bool, traced: bool, o: Operands) -> None:
    """As zero-bubble pipelines do: inputs first, weights later."""
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
        assert not differing(plain([got]), (wanted_dx,))
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
    from rl_kernel_native.ops import rms_norm_torch

    asked: list[tuple[bool, bool]] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def rms_norm_backward(self, *arguments: Any) -> Any:
            asked.append(arguments[9:11])
            return native.rms_norm_backward(*arguments)

    native = rms_norm_torch._C
    monkeypatch.setattr(rms_norm_torch, "_C", Recording())
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


def test_batches_of_gradients_have_the_bytes_of_a_loop(o: Operands) -> None:
    batch = torch.stack([o.dy, o.dy * 2, o.dy - 1])
    leaves = leaves_of(o)
    y, _ = norm(*leaves)
    want = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in batch]
    batched = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(batch)
    for i in range(len(batch)):
        for got in (batched, mapped):
            assert not differing(tuple(g[i] for g in got), want[i])


def test_a_vectorised_hessian(rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 6, "float32")
    f = lambda x: rk.rms_norm(x, o.weight, 0.5).square().sum()  # noqa: E731
    got, want = (torch.autograd.functional.hessian(f, o.x, vectorize=v) for v in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_tangent_of_the_gradient_is_kept(rng: np.random.Generator) -> None:
    """The gradient is linear in dy. The tangent is composed in float64."""
    o = operands(rng, (5,), 32, "float32")
    leaves = leaves_of(o)
    y, _ = norm(*leaves)
    with forward_ad.dual_level():
        got = torch.autograd.grad(y, leaves, forward_ad.make_dual(o.dy, o.dy * 2), retain_graph=True)
        tangents = tuple(forward_ad.unpack_dual(g).tangent for g in got)
    for tangent, want in zip(tangents, torch.autograd.grad(y, leaves, o.dy * 2), strict=True):
        allowed = row("rms_norm", "derivatives").allowed(largest=float(want.abs().max()))
        torch.testing.assert_close(tangent, want, rtol=0, atol=allowed)


@pytest.mark.parametrize("kind", ["subclass", "negative bit", "mode", "expanded"])
def test_a_gradient_of_any_kind_has_the_bytes_of_a_plain_one(kind: str, o: Operands) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    make = {
        "subclass": lambda g: g.as_subclass(Subclass),
        "negative bit": lambda g: torch._neg_view(-g),
        "mode": lambda g: g,
        "expanded": lambda g: g[:, :1].expand_as(g),
    }[kind]

    def gradients(transform: Any) -> tuple[Any, ...]:
        dys = (transform(o.dy), transform(o.d_new_residual))
        leaves, main_grad = leaves_of(o), zeros_for(o.weight)
        first = torch.autograd.grad(norm(*leaves), leaves, dys)
        torch.autograd.backward(norm(*leaves, main_grad=main_grad), dys)
        assert main_grad._version == 1
        (past,) = torch.autograd.grad(norm(*leaves)[1], leaves[0], dys[1])
        return (*plain(first), *(leaf.grad for leaf in (leaves[0], leaves[2])), past, main_grad)

    want = gradients(lambda g: plain([make(g)])[0].clone().contiguous())
    if kind == "mode":
        with FlopCounterMode(display=False) as counter:
            got = gradients(make)
        assert counter.get_total_flops() == 0, "of products alone, as torch counts"
    else:
        got = gradients(make)
    assert not differing(plain(t.resolve_neg() for t in got), want)


def test_a_gradient_from_a_collective_is_waited_for_and_a_dtensor_is_refused(
    o: Operands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dist = pytest.importorskip("torch.distributed")
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    tensor = pytest.importorskip("torch.distributed.tensor")
    if o.x.is_cuda:
        pytest.skip("the group is gloo's")
    file = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    try:
        leaves = leaves_of(o)
        outputs = norm(*leaves)
        want = torch.autograd.grad(outputs, leaves, (o.dy, o.d_new_residual), retain_graph=True)
        for which in ((True, True), (True, False), (False, True)):
            dys = [
                collectives.all_reduce(g.clone(), "sum", dist.group.WORLD) if collected else g
                for g, collected in zip((o.dy, o.d_new_residual), which, strict=True)
            ]
            assert not differing(torch.autograd.grad(outputs, leaves, dys, retain_graph=True), want)
        main_grad = zeros_for(o.weight)
        dy = collectives.all_reduce(o.dy.clone(), "sum", dist.group.WORLD)
        norm(*leaves, main_grad=main_grad)[0].backward(dy)
        assert not differing(main_grad.bfloat16(), want[1])
        mesh = tensor.init_device_mesh("cpu", (1,))
        for i, name in enumerate(("dy", "d_new_residual")):
            dys = [o.dy, o.d_new_residual]
            dys[i] = tensor.DTensor.from_local(dys[i], mesh, [tensor.Replicate()])
            with pytest.raises(TypeError, match=rf"{name}: expected a local tensor, got a DTensor; pass tensor.to_loc"):
                torch.autograd.grad(outputs, leaves, dys, retain_graph=True)
    finally:
        dist.destroy_process_group()


def test_a_fake_gradient_gives_fake_gradients(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves = leaves_of(o)
    y, _ = norm(*leaves)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = torch.autograd.grad(y, leaves, torch.ones_like(o.dy))
    assert all(isinstance(g, FakeTensor) and g.shape == leaf.shape for g, leaf in zip(got, leaves, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_cannot_be_added_to_main_grad_is_refused(o: Operands) -> None:
    leaves, main_grad = leaves_of(o), zeros_for(o.weight)
    leaves[1] = leaves[1] * 1
    y, _ = norm(*leaves, main_grad=main_grad)
    batch = torch.stack([o.dy, o.dy])
    with pytest.raises(ValueError, match="main_grad: a batch of gradients"):
        torch.autograd.grad(y, leaves[1:2], batch, is_grads_batched=True, retain_graph=True, allow_unused=True)
    with pytest.raises(ValueError, match="main_grad: a batch of gradients"):
        torch.func.vmap(lambda g: torch.autograd.grad(y, leaves, g, retain_graph=True, allow_unused=True)[0])(batch)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="rms_norm_backward_: a derivative is wanted where it would be lost"),
    ):
        y.backward(forward_ad.make_dual(o.dy, o.dy), retain_graph=True)
    with pytest.raises(ValueError, match=r"main_grad: .*without create_graph"):
        y.backward(o.dy, create_graph=True)
    x = o.x[0].clone().requires_grad_()
    with pytest.raises(TypeError, match="dy: expected a dense tensor, got a sparse_coo one"):
        torch.autograd.grad(rk.rms_norm(x, o.weight, EPS), x, o.dy[0].to_sparse())
    assert not bool(main_grad.any())
    assert main_grad._version == 0


# ---- main_grad -------------------------------------------------------------------------------------------------------


def test_a_write_of_every_path_is_counted(o: Operands) -> None:
    """A backward that saved main_grad must not run on what was added since."""
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
    """Rows of ones in a norm without eps to speak of: every addition is of ones, so the sum is exact in any order."""
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
