"""linear under torch.func, forward-mode and second derivatives: its functions are each other's derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from linear_cases import Operands, operands
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch")

from torch_properties import gradients  # noqa: E402


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, 10, "bfloat16", device)


@pytest.fixture
def single(rng: np.random.Generator) -> Operands:
    """float32, which only the CPU has, since derivatives are compared with float64."""
    return operands(rng, (4, 3), 6, 5, "float32")


def step(x: Any, weight: Any, bias: Any, **options: Any) -> Any:
    return rk.linear(x, weight, bias, **options).float().square().sum()


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (1, None, None), (0, 0, None), (None, 0, 0), (0, 1, 0), (None, 2, 1)], ids=str
)
def test_vmap_has_the_bytes_of_a_loop(in_dims: tuple[Any, ...], device: str, rng: np.random.Generator) -> None:
    size = 3
    o = operands(rng, (5,), 16, 8, "bfloat16", device)
    batched = [
        t if d is None else torch.stack([t * (i + 1) for i in range(size)], d)
        for t, d in zip(o[:3], in_dims, strict=True)
    ]
    got = torch.vmap(rk.linear, in_dims=in_dims)(*batched)
    for i in range(size):
        one = [t if d is None else t.select(d, i) for t, d in zip(batched, in_dims, strict=True)]
        assert not differing(got[i], rk.linear(*(t.contiguous() for t in one))), i


def test_vmap_over_every_dimension_of_every_function(o: Operands) -> None:
    """The batch is the last dimension, so no element of it is contiguous."""
    f = o.dy.float()
    for function, arguments in (
        (rk.linear_input_grad, (o.dy, o.weight)),
        (rk.linear_weight_grad, (o.dy, o.x)),
        (rk.linear_bias_grad, (o.dy,)),
        (lambda a, b, c: rk.tree_sum([a, b], bias=c), (f, f, o.bias)),
    ):
        got = torch.vmap(function, in_dims=-1)(*(torch.stack([t, t * 2], -1) for t in arguments))
        for i in range(2):
            assert not differing(got[i], function(*(t * (i + 1) for t in arguments)))


@pytest.mark.parametrize("in_dims", [(0, None, None), (1, 1, 0), (None, 0, None)], ids=str)
def test_vmap_over_an_empty_batch_is_empty(in_dims: tuple[Any, ...], o: Operands) -> None:
    inputs = [
        t if d is None else t.new_empty((*t.shape[:d], 0, *t.shape[d:])) for t, d in zip(o, in_dims, strict=False)
    ]
    got = torch.vmap(rk.linear, in_dims=in_dims)(*inputs)
    want = rk.linear(*o[:3])
    assert (got.shape, got.dtype, got.device) == ((0, *want.shape), want.dtype, want.device)


def test_func_grad_has_the_bytes_of_backward(o: Operands) -> None:
    want = gradients(step, *o[:3])
    assert not differing(torch.func.grad(step, argnums=(0, 1, 2))(*o[:3]), want)
    y, pullback = torch.func.vjp(rk.linear, *o[:3])
    assert not differing(pullback(o.dy)[:2], (rk.linear_input_grad(o.dy, o.weight), rk.linear_weight_grad(o.dy, o.x)))
    assert not differing(y, rk.linear(*o[:3]))


def test_vmap_of_grad_is_per_sample_gradients(o: Operands) -> None:
    got = torch.vmap(torch.func.grad(step, argnums=(1, 2)), in_dims=(0, None, None))(*o[:3])
    for i in range(2):
        assert not differing(tuple(g[i] for g in got), gradients(step, o.x[i], o.weight, o.bias)[1:])


def close(got: Any, want: Any, terms: int = 1) -> bool:
    allowed = row("linear", "derivatives").allowed(largest=float(want.abs().max()), terms=terms)
    return float((got.detach() - want.detach()).abs().max()) <= allowed


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = {
    "linear": (rk.linear, torch.nn.functional.linear, ("x", "weight", "bias")),
    "input_grad": (rk.linear_input_grad, lambda g, w: g @ w, ("dy", "weight")),
    "weight_grad": (rk.linear_weight_grad, lambda g, x: g.flatten(0, -2).T @ x.flatten(0, -2), ("dy", "x")),
    "bias_grad": (rk.linear_bias_grad, lambda g: g.flatten(0, -2).sum(0), ("dy",)),
    "tree_sum": (
        lambda a, b, c: rk.tree_sum([a, b], bias=c),
        lambda a, b, c: a + b + c,
        ("dy", "dy", "bias"),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_every_function_against_float64(name: str, single: Operands, rng: np.random.Generator) -> None:
    """Jacobians in both modes, tangents, and second derivatives through a square."""
    ours, theirs, arguments = FUNCTIONS[name]
    inputs = [getattr(single, a) for a in arguments]
    wide = [t.double() for t in inputs]
    every = tuple(range(len(inputs)))
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        for got, want in zip(jacobian(ours, every)(*inputs), jacobian(theirs, every)(*wide), strict=True):
            assert close(got, want), jacobian.__name__
    for function in (torch.func.hessian,):
        got = function(lambda *a: ours(*a).square().sum(), every)(*inputs)
        want = function(lambda *a: theirs(*a).square().sum(), every)(*wide)
        for i in every:
            for j in every:
                assert close(got[i][j], want[i][j], 8), (i, j)  # these are sums of sums


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck_and_gradgradcheck(name: str, single: Operands) -> None:
    """The functions are bilinear, so a difference quotient of any step is exact up to float32. The step is 1/4."""
    ours, _, arguments = FUNCTIONS[name]
    inputs = tuple(getattr(single, a).clone().requires_grad_() for a in arguments)
    options = {"eps": 0.25, "atol": 1e-4, "rtol": 1e-4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradcheck warns that inputs are not float64
        assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True, **options)
        assert torch.autograd.gradgradcheck(ours, inputs, **options)


def test_second_derivatives_in_half_precision(o: Operands) -> None:
    """A gradient penalty. Each factor has bfloat16 roundings, 2^-8 for each of at most 32 summands."""
    outcomes = []
    for function, inputs in ((rk.linear, o[:3]), (torch.nn.functional.linear, [t.double() for t in o[:3]])):
        leaves = [t.clone().requires_grad_() for t in inputs]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        outcomes.append(torch.autograd.grad(sum(f.square().sum() for f in first), leaves))
    for got, want in zip(*outcomes, strict=True):
        assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())
