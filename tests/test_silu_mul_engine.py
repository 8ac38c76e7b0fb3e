"""silu_mul's backward as torch's engine runs it: what is asked for, gradients of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native.contract import row
from silu_mul_cases import Operands, operands

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 40, "bfloat16", device)


def leaves_of(o: Operands) -> list[Any]:
    return [t.clone().requires_grad_() for t in (o.gate, o.up)]


class Subclass(torch.Tensor):
    """With memory, and without a word about dispatch: goes through the dispatcher."""


def test_a_gradient_that_nobody_asks_for_is_not_computed(o: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel_native.ops import silu_mul_torch

    leaves = [leaf * 1 for leaf in leaves_of(o)]  # about a leaf torch.autograd.grad has no answer
    y = rk.silu_mul(*leaves)
    given: list[Any] = []

    class Recording:
        def gated_mul_backward(self, *arguments: Any) -> Any:
            result = native.gated_mul_backward(*arguments)
            given.append(tuple(g is not None for g in result))
            return result

    native = silu_mul_torch._C
    monkeypatch.setattr(silu_mul_torch, "_C", Recording())
    for wanted, expected in ((leaves, (True, True)), (leaves[:1], (True, False)), (leaves[1:], (False, True))):
        given.clear()
        torch.autograd.grad(y, wanted, o.dy, retain_graph=True)
        torch.autograd.backward(y, o.dy, inputs=wanted, retain_graph=True)
        assert given == [expected] * 2


def test_batches_of_gradients_have_the_bytes_of_a_loop(o: Operands) -> None:
    leaves = leaves_of(o)
    y = rk.silu_mul(*leaves)
    batch = torch.stack([o.dy, o.dy * 2, o.dy - 1])
    want = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in batch]
    batched = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(batch)
    for i in range(3):
        for got in (batched, mapped):
            assert not differing(tuple(g[i] for g in got), want[i])


def test_a_tangent_of_the_gradient_is_kept(device: str, rng: np.random.Generator) -> None:
    """The gradient is linear in dy. The tangent is composed in float64; 4e-6 is float32's error."""
    o = operands(rng, (2, 3), 40, "float32", device)
    leaves = leaves_of(o)
    y = rk.silu_mul(*leaves)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(o.dy, o.dy * 2)
        tangents = [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(y, leaves, dual, retain_graph=True)]
    for tangent, want in zip(tangents, torch.autograd.grad(y, leaves, o.dy * 2), strict=True):
        allowed = row("silu_mul", "derivatives").allowed(largest=float(want.abs().max()))
        torch.testing.assert_close(tangent, want, rtol=0, atol=allowed)


@pytest.mark.parametrize("kind", ["subclass", "negative bit", "mode", "expanded", "transposed"])
def test_a_gradient_of_any_kind_has_the_bytes_of_a_plain_one(kind: str, o: Operands) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    make = {
        "subclass": lambda g: g.as_subclass(Subclass),
        "negative bit": lambda g: torch._neg_view(-g),
        "mode": lambda g: g,
        "expanded": lambda g: g[..., :1].expand_as(g),
        "transposed": lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
    }[kind]

    def gradients(dy: Any) -> tuple[Any, ...]:
        leaves = leaves_of(o)
        packed = torch.cat([o.gate, o.up], -1).requires_grad_()
        found = torch.autograd.grad(rk.silu_mul(*leaves), leaves, dy)
        return *found, *torch.autograd.grad(rk.silu_mul(packed), packed, dy)

    want = gradients(make(o.dy).as_subclass(torch.Tensor).clone().contiguous())
    if kind == "mode":
        with FlopCounterMode(display=False):
            got = gradients(make(o.dy))
    else:
        got = gradients(make(o.dy))
    assert not differing(tuple(t.as_subclass(torch.Tensor).resolve_neg() for t in got), want)


def test_a_gradient_from_a_collective_is_waited_for_and_a_dtensor_is_refused(
    o: Operands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dist = pytest.importorskip("torch.distributed")
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    tensor = pytest.importorskip("torch.distributed.tensor")
    if o.gate.is_cuda:
        pytest.skip("the group is gloo's")
    file = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    try:
        leaves = leaves_of(o)
        y = rk.silu_mul(*leaves)
        want = torch.autograd.grad(y, leaves, o.dy, retain_graph=True)
        dy = collectives.all_reduce(o.dy.clone(), "sum", dist.group.WORLD)
        assert not differing(torch.autograd.grad(y, leaves, dy, retain_graph=True), want)
        mesh = tensor.init_device_mesh("cpu", (1,))
        dy = tensor.DTensor.from_local(o.dy, mesh, [tensor.Replicate()])
        with pytest.raises(TypeError, match=r"dy: expected a local tensor, got a DTensor; pass tensor.to_local"):
            torch.autograd.grad(y, leaves, dy, retain_graph=True)
    finally:
        dist.destroy_process_group()


def test_a_fake_gradient_gives_fake_gradients(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves = leaves_of(o)
    y = rk.silu_mul(*leaves)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = torch.autograd.grad(y, leaves, torch.ones_like(o.dy))
    assert all(isinstance(g, FakeTensor) and g.shape == leaf.shape for g, leaf in zip(got, leaves, strict=True))


def test_a_sparse_gradient_is_refused(o: Operands) -> None:
    leaves = leaves_of(o)
    with pytest.raises(TypeError, match="dy: expected a dense tensor, got a sparse_coo one"):
        torch.autograd.grad(rk.silu_mul(*leaves), leaves, o.dy.to_sparse())
