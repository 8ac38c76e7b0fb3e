"""Tests of silu_mul and gelu_mul in torch: operators, torch.compile, export, torch.func, modes, graphs, host cost."""

from __future__ import annotations

import math
import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native.contract import row
from silu_mul_cases import ACTIVATIONS, Operands, functions, operands, packed_results, results

torch = pytest.importorskip("torch")

from torch_properties import (  # noqa: E402
    assert_no_leak,
    assert_the_arguments_device_is_used,
    assert_work_follows_its_producer,
    gradients,
    no_synchronisation,
    printed_host_costs,
    runs_with_and_without_checkpoints,
)

FORMS = ("apart", "packed")


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, "bfloat16", device)


@pytest.fixture
def single(rng: np.random.Generator) -> Operands:
    return operands(rng, (2,), 3, "float32")


def arguments(o: Operands, form: str) -> tuple[Any, ...]:
    return o[:2] if form == "apart" else (torch.cat(o[:2], -1),)


def step(*inputs: Any) -> Any:
    return rk.silu_mul(*inputs).float().square().sum()


# ---- the registered operators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str, o: Operands) -> None:
    """opcheck covers schema, fake tensors, autograd registration and dynamic shapes of both operators."""
    rk._call.load()
    ops, check = torch.ops.rl_kernel_native, torch.library.opcheck
    inputs = (*arguments(o, form), None)[:2]
    for activation in range(3):
        check(ops.gated_mul, (*inputs, activation, True))
        check(ops.gated_mul_backward, (o.dy, *inputs, activation, False, True, True))
    check(ops.gated_mul_backward, (o.dy, *inputs, 0, False, True, False))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_has_the_bytes_of_eager(form: str, backend: str, o: Operands) -> None:
    """fullgraph=True refuses a graph break. Inductor runs only where a C++ compiler exists."""
    if backend == "inductor" and (form != "packed" or shutil.which("g++") is None):
        pytest.skip("inductor takes seconds a graph and a C++ compiler; one case shows it")
    torch.compiler.reset()

    def function(*inputs: Any) -> Any:
        # The function has no sum of gradients: inductor would add bfloat16 without the roundings of eager.
        return rk.gelu_mul(rk.silu_mul(*inputs, round_before_mul=True), approximate="none")

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    outcomes = []
    for f in (function, compiled):
        leaves = [t.clone().requires_grad_() for t in arguments(o, form)]
        y = f(*leaves)
        y.backward(o.dy[..., :16].contiguous())
        outcomes.append((y, *(t.grad for t in leaves)))
    assert not differing(*outcomes)
    with torch.no_grad():
        assert not differing(compiled(*arguments(o, form)), outcomes[0][0])


def test_compiled_functions_with_dynamic_shapes(o: Operands) -> None:
    def everything(gate: Any, up: Any, dy: Any) -> Any:
        return (*results(Operands(gate, up, dy)), *packed_results(torch.cat((gate, up), -1), dy, "gelu_tanh"))

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 1):
        inputs = tuple(t[:rows] for t in o)
        assert not differing(tuple(compiled(*inputs)), everything(*inputs))


@pytest.mark.parametrize("form", FORMS)
def test_export(form: str, o: Operands) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return rk.gelu_mul(*inputs)

    inputs = arguments(o, form)
    program = torch.export.export(Layer(), inputs)
    assert "rl_kernel_native.gated_mul" in str(program.graph)
    assert not differing(program.module()(*inputs), Layer()(*inputs))


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = (*results(o), rk.silu_mul_backward(o.dy, torch.cat(o[:2], -1)))
    with FakeTensorMode() as fakes:
        f = Operands(*(fakes.from_tensor(t) for t in o))
        fake = (*results(f), rk.silu_mul_backward(f.dy, torch.cat(f[:2], -1)))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    meta = rk.silu_mul(torch.cat(o[:2], -1).to("meta"))
    assert (meta.shape, meta.dtype) == (real[0].shape, real[0].dtype)


# ---- torch.func and higher derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, None), (1, 0), (None, 2), (0, 0)], ids=str)
def test_vmap_has_the_bytes_of_a_loop(in_dims: tuple[Any, ...], device: str, rng: np.random.Generator) -> None:
    size = 3
    o = operands(rng, (5,), 16, "bfloat16", device)
    batched = [
        t if d is None else torch.stack([t * (i + 1) for i in range(size)], d)
        for t, d in zip(o[:2], in_dims, strict=True)
    ]
    got = torch.vmap(rk.silu_mul, in_dims=in_dims)(*batched)
    for i in range(size):
        one = [t if d is None else t.select(d, i).contiguous() for t, d in zip(batched, in_dims, strict=True)]
        assert not differing(got[i], rk.silu_mul(*one)), i
    if in_dims == (1, 0):
        packed = torch.vmap(rk.gelu_mul, in_dims=1)(batched[0])
        assert not differing(packed[2], rk.gelu_mul(batched[0].select(1, 2).contiguous()))


@pytest.mark.parametrize("form", FORMS)
def test_func_grad_has_the_bytes_of_backward(form: str, o: Operands) -> None:
    inputs = arguments(o, form)
    want = gradients(step, *inputs)
    assert not differing(torch.func.grad(step, argnums=tuple(range(len(inputs))))(*inputs), want)


@pytest.mark.parametrize("form", FORMS)
def test_vmap_of_grad_is_per_sample_gradients(form: str, o: Operands) -> None:
    inputs = arguments(o, form)
    got = torch.vmap(torch.func.grad(step, argnums=tuple(range(len(inputs)))))(*inputs)
    for i in range(2):
        assert not differing(tuple(g[i] for g in got), gradients(step, *(t[i] for t in inputs)))


def close(activation: str, got: Any, want: Any, terms: int = 1) -> bool:
    operator = "silu_mul" if activation == "silu" else "gelu_mul"
    allowed = row(operator, "derivatives").allowed(largest=float(want.abs().max()), terms=terms)
    return float((got.detach() - want.detach()).abs().max()) <= allowed


def act(gate: Any, activation: str) -> Any:
    """The activation by torch operators that have derivatives of any order."""
    if activation == "silu":
        return gate * torch.sigmoid(gate)
    if activation == "gelu":
        return gate / 2 * (1 + torch.erf(gate / math.sqrt(2)))
    return gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


def pairs(activation: str, form: str, backward: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Our function and the formula. Both functions take (gate, up) or (gate_up,); for backward dy comes first."""
    forward_of_ours, backward_of_ours, options = functions(activation)

    def formula(*inputs: Any) -> Any:
        gate, up = inputs if form == "apart" else inputs[0].chunk(2, -1)
        return act(gate, activation) * up

    def formula_backward(dy: Any, *inputs: Any) -> Any:
        found = torch.func.vjp(formula, *inputs)[1](dy)
        return found if form == "apart" else found[0]

    if backward:
        return lambda *a: backward_of_ours(*a, **options), formula_backward
    return lambda *a: forward_of_ours(*a, **options), formula


def flat(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_of_every_function_against_float64(
    activation: str, form: str, backward: bool, single: Operands
) -> None:
    """Compares Jacobians in both modes, and second derivatives through a square."""
    ours, theirs = pairs(activation, form, backward)
    inputs = (*((single.dy,) if backward else ()), *arguments(single, form))
    wide = tuple(t.double() for t in inputs)
    every = tuple(range(len(inputs)))
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        results_of = [jacobian(lambda *a, f=f: flat(f(*a)), every)(*i) for f, i in ((ours, inputs), (theirs, wide))]
        for got, want in zip(*results_of, strict=True):
            for a, b in zip(got, want, strict=True):
                assert close(activation, a, b), jacobian.__name__

    def squared(function: Any) -> Any:
        return lambda *a: sum(out.square().sum() for out in flat(function(*a)))

    got, want = (
        torch.func.jacrev(torch.func.jacrev(squared(f), every), every)(*i) for f, i in ((ours, inputs), (theirs, wide))
    )
    for i in every:
        for j in every:
            assert close(activation, got[i][j], want[i][j], 8), (i, j)  # second derivatives are sums of sums


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_and_gradgradcheck(activation: str, form: str, single: Operands) -> None:
    """Steps are 2^-7 in float32. Truncation errs by about 2^-14, rounding by about 2^-23 / 2^-7."""
    inputs = tuple(t.clone().requires_grad_() for t in arguments(single, form))
    options = {"eps": 2.0**-7, "atol": 2e-3, "rtol": 2e-3}
    ours = pairs(activation, form, False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradcheck warns that inputs are not float64
        assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True, **options)
        assert torch.autograd.gradgradcheck(ours, inputs, **options)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_in_half_precision(form: str, o: Operands) -> None:
    """The function is a gradient penalty, rounded to bfloat16 twice."""
    ours, theirs = pairs("silu", form, False)
    outcomes = []
    for function, inputs in ((ours, arguments(o, form)), (theirs, [t.double() for t in arguments(o, form)])):
        leaves = [t.clone().requires_grad_() for t in inputs]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        outcomes.append(torch.autograd.grad(sum(f.square().sum() for f in first), leaves))
    for got, want in zip(*outcomes, strict=True):
        assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())


# ---- modes of torch -------------------------------------------------------------------------------------------------


def test_a_gradient_that_nobody_asks_for_is_not_computed(o: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["rl_kernel_native.ops.silu_mul"]

    # These are no leaves: torch does not tell a backward whether autograd.grad asks for the gradient of a leaf.
    leaves = [leaf.clone().requires_grad_() * 1 for leaf in (o.gate, o.up)]
    y = rk.silu_mul(*leaves)
    given: list[Any] = []

    class Recording:
        def gated_mul_backward(self, *arguments: Any) -> Any:
            result = native.gated_mul_backward(*arguments)
            given.append(tuple(g is not None for g in result))
            return result

    native = module._C
    monkeypatch.setattr(module, "_C", Recording())
    for wanted, expected in ((leaves, (True, True)), (leaves[:1], (True, False)), (leaves[1:], (False, True))):
        given.clear()
        torch.autograd.grad(y, wanted, o.dy, retain_graph=True)
        torch.autograd.backward(y, o.dy, inputs=wanted, retain_graph=True)
        assert given == [expected] * 2


def test_no_grad_inference_mode_and_grad_have_the_same_bytes(o: Operands) -> None:
    want = rk.silu_mul(*(t.clone().requires_grad_() for t in o[:2]))
    assert want.requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = rk.silu_mul(o.gate, torch.nn.Parameter(o.up))
        assert not got.requires_grad
        assert not differing(got, want)
    assert not differing(rk.silu_mul(o.gate, o.up), want)


def test_autocast_changes_nothing(rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 32, "float32")
    want = gradients(step, *o[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not differing(gradients(step, *o[:2]), want)


def test_saved_tensors_may_not_be_changed_before_backward(o: Operands) -> None:
    for changed in (0, 1):
        inputs = [t.clone().requires_grad_() * 1 for t in o[:2]]
        y = rk.silu_mul(*inputs)
        inputs[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(selective: bool, o: Operands) -> None:
    outcomes = []
    for run in runs_with_and_without_checkpoints("gated_mul", selective):
        leaves = [t.clone().requires_grad_() for t in o[:2]]
        run(lambda gate, up: step(gate * 2, up), *leaves).backward()
        outcomes.append(tuple(t.grad for t in leaves))
    assert not differing(*outcomes)


def test_calls_do_not_leak(device: str, rng: np.random.Generator) -> None:
    """Neither training steps nor errors leak."""
    o = operands(rng, (64,), 800, "bfloat16", device)
    leaves = [t.clone().requires_grad_() for t in o[:2]]

    def burst(n: int) -> None:
        for _ in range(n):
            rk.silu_mul(*leaves).backward(o.dy)
            leaves[0].grad = leaves[1].grad = None
            with pytest.raises(ValueError, match="up"):
                rk.silu_mul(o.gate, o.up[:7])

    assert_no_leak(burst, device)


@pytest.mark.alone
def test_median_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU a call takes at most 6 us, or 5 us more than a launch and an allocation where that is longer.
    With autograd it takes at most 25 us, or five times a launch and an allocation. On a CPU the cost includes the work
    itself, so the test only prints it."""
    gate_up = torch.randn(8, 128, device=device, dtype=torch.bfloat16)
    leaf = gate_up.clone().requires_grad_()
    calls = {
        "eager": lambda: rk.silu_mul(gate_up),
        "torch": lambda: torch.nn.functional.silu(gate_up[:, :64]) * gate_up[:, 64:],
        "with_grad": lambda: rk.silu_mul(leaf),
        "allocation": lambda: torch.empty(8, 64, device=device, dtype=torch.bfloat16),
    }
    cost = printed_host_costs("silu_mul", calls, device, capsys)
    if device == "cuda":
        least = cost["launch"] + cost["allocation"]
        assert cost["eager"] <= max(6, least + 5)
        assert cost["with_grad"] <= max(25, 5 * least)


# ---- GPU ------------------------------------------------------------------------------------------------------------


def train(o: Operands) -> tuple[Any, ...]:
    leaf = torch.cat(o[:2], -1).requires_grad_()
    y = rk.silu_mul(leaf)
    y.backward(o.dy)
    return y.detach(), leaf.grad, *results(o, "gelu_tanh")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 700, 2000])  # a decode step; the plans for small and for large calls
def test_no_call_synchronises_and_a_captured_graph_replays(rows: int, rng: np.random.Generator) -> None:
    batches = [operands(rng, (rows,), 2048, "bfloat16", "cuda") for _ in range(4)]
    o = Operands(*(t.clone() for t in batches[0]))
    train(o)  # the first call of a process loads the kernels
    with no_synchronisation():
        train(o)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(o)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(o)
    for i in range(12):
        for mine, theirs in zip(o, batches[i % 4], strict=True):
            mine.copy_(theirs)
        graph.replay()
        assert not differing(got, train(batches[i % 4]))


@pytest.mark.gpu
def test_work_goes_to_the_current_stream_behind_its_producer(rng: np.random.Generator) -> None:
    assert_work_follows_its_producer(operands(rng, (300,), 256, "bfloat16", "cuda"), results)


@pytest.mark.gpu
def test_the_device_of_the_arguments_is_used_whichever_is_current(rng: np.random.Generator) -> None:
    assert_the_arguments_device_is_used(operands(rng, (4,), 64), results)
