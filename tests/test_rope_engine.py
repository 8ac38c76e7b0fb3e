"""rope's backward as torch's engine runs it: what is asked for, gradients of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rope_cases import Operands, operands, results

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), (2, 1), 32, "bfloat16", device)


def leaves_of(o: Operands) -> list[Any]:
    return [t.clone().requires_grad_() for t in o[:2]]


def rotated(leaves: Any, o: Operands) -> Any:
    return results(o._replace(q=leaves[0], k=leaves[1]))


def plain(tensors: Any) -> tuple[Any, ...]:
    return tuple(t.as_subclass(torch.Tensor) for t in tensors)


class Subclass(torch.Tensor):
    """With memory, and without a word about dispatch: goes through the dispatcher."""


def test_a_gradient_that_nobody_asks_for_is_not_computed(o: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel_native.ops import rope_torch

    leaves = [leaf * 1 for leaf in leaves_of(o)]  # about a leaf torch.autograd.grad has no answer
    outputs = rotated(leaves, o)
    asked: list[Any] = []

    class Recording:
        def rope(self, *arguments: Any) -> Any:
            asked.append(tuple(None if t is None else t.shape for t in arguments[:2]))
            return native.rope(*arguments)

    native = rope_torch._C
    monkeypatch.setattr(rope_torch, "_C", Recording())
    shapes = tuple(leaf.shape for leaf in leaves)
    for wanted, expected in ((leaves, shapes), (leaves[:1], (shapes[0], None)), (leaves[1:], (shapes[1], None))):
        asked.clear()
        torch.autograd.grad(outputs, wanted, o[:2], retain_graph=True)
        torch.autograd.backward(outputs, o[:2], inputs=wanted, retain_graph=True)
        assert asked == [expected] * 2


def test_batches_of_gradients_have_the_bytes_of_a_loop(o: Operands) -> None:
    leaves = leaves_of(o)
    outputs = rotated(leaves, o)
    batches = tuple(torch.stack([t, t * 2, t - 1]) for t in o[:2])
    want = [torch.autograd.grad(outputs, leaves, dys, retain_graph=True) for dys in zip(*batches, strict=True)]
    batched = torch.autograd.grad(outputs, leaves, batches, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda *dys: torch.autograd.grad(outputs, leaves, dys, retain_graph=True))(*batches)
    for i in range(3):
        for got in (batched, mapped):
            assert not differing(tuple(g[i] for g in got), want[i])


def test_a_tangent_of_the_gradient_is_kept(o: Operands) -> None:
    """The gradient is linear: its tangent is that of the incoming one, rotated back."""
    leaves = leaves_of(o)
    outputs = rotated(leaves, o)
    with forward_ad.dual_level():
        dys = tuple(forward_ad.make_dual(t, t * 2) for t in o[:2])
        got = torch.autograd.grad(outputs, leaves, dys, retain_graph=True)
        tangents = tuple(forward_ad.unpack_dual(g).tangent for g in got)
    assert not differing(tangents, torch.autograd.grad(outputs, leaves, tuple(t * 2 for t in o[:2])))


@pytest.mark.parametrize("kind", ["subclass", "negative bit", "mode", "expanded", "transposed"])
def test_a_gradient_of_any_kind_has_the_bytes_of_a_plain_one(kind: str, o: Operands) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    make = {
        "subclass": lambda g: g.as_subclass(Subclass),
        "negative bit": lambda g: torch._neg_view(-g),
        "mode": lambda g: g,
        "expanded": lambda g: g[..., :1].expand_as(g),
        "transposed": lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
    }[kind]

    def gradients(transform: Any) -> tuple[Any, ...]:
        leaves, dys = leaves_of(o), tuple(transform(t) for t in o[:2])
        both = torch.autograd.grad(rotated(leaves, o), leaves, dys)
        return *both, *torch.autograd.grad(rotated(leaves, o)[1], leaves[1:], dys[1])

    want = gradients(lambda g: plain([make(g)])[0].clone().contiguous())
    if kind == "mode":
        with FlopCounterMode(display=False):
            got = gradients(make)
    else:
        got = gradients(make)
    assert not differing(plain(t.resolve_neg() for t in got), want)


def test_a_gradient_from_a_collective_is_waited_for_and_a_dtensor_is_refused(
    o: Operands, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dist = pytest.importorskip("torch.distributed")
    collectives = pytest.importorskip("torch.distributed._functional_collectives")
    tensor = pytest.importorskip("torch.distributed.tensor")
    if o.q.is_cuda:
        pytest.skip("the group is gloo's")
    file = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    try:
        leaves = leaves_of(o)
        outputs = rotated(leaves, o)
        want = torch.autograd.grad(outputs, leaves, o[:2], retain_graph=True)
        dys = [collectives.all_reduce(g.clone(), "sum", dist.group.WORLD) for g in o[:2]]
        for given in (dys, (dys[0], o.k), (o.q, dys[1])):
            assert not differing(torch.autograd.grad(outputs, leaves, given, retain_graph=True), want)
        mesh = tensor.init_device_mesh("cpu", (1,))
        for i, name in enumerate(("dq_out", "dk_out")):
            dys = list(o[:2])
            dys[i] = tensor.DTensor.from_local(dys[i], mesh, [tensor.Replicate()])
            with pytest.raises(TypeError, match=rf"{name}: expected a local tensor, got a DTensor; pass tensor.to_loc"):
                torch.autograd.grad(outputs, leaves, dys, retain_graph=True)
    finally:
        dist.destroy_process_group()


def test_a_fake_gradient_gives_fake_gradients(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves = leaves_of(o)
    outputs = rotated(leaves, o)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = torch.autograd.grad(outputs, leaves, tuple(torch.ones_like(t) for t in o[:2]))
    assert all(isinstance(g, FakeTensor) and g.shape == leaf.shape for g, leaf in zip(got, leaves, strict=True))


def test_a_sparse_gradient_is_refused(o: Operands) -> None:
    leaves = leaves_of(o)
    with pytest.raises(TypeError, match="dk_out: expected a dense tensor, got a sparse_coo one"):
        torch.autograd.grad(rotated(leaves, o), leaves, (o.q, o.k.to_sparse()))


def test_the_registered_operator_refuses_a_gradient_of_its_constants(o: Operands) -> None:
    rk.rope(*o[:4], position_ids=o.position_ids)
    cos = o.cos.clone().requires_grad_()
    out = torch.ops.rl_kernel_native.rope(o.q, None, cos, o.sin, o.position_ids, False, None, False, None, -2, False)[0]
    with pytest.raises(ValueError, match=r"cos: is a constant of the rotation and gets no gradient"):
        torch.autograd.grad(out.float().sum(), cos)
