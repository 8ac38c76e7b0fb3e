"""rms_norm in torch: registered operators, torch.compile, export, torch.func, modes, graphs, host cost."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native.contract import row
from rms_norm_cases import EPS, Operands, operands, results

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


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, "bfloat16", device)


@pytest.fixture
def single(rng: np.random.Generator) -> Operands:
    return operands(rng, (4,), 6, "float32")


def step(x: Any, weight: Any, residual: Any, **options: Any) -> Any:
    y, new_residual = rk.rms_norm(x, weight, EPS, residual=residual, **options)
    return y.float().square().sum() + (new_residual.float() * y.float()).sum()


# ---- the registered operators ---------------------------------------------------------------------------------------


def test_opcheck(o: Operands) -> None:
    """Schema, fake tensors, autograd registration and dynamic shapes of all operators."""
    rk._call.load()
    ops, check = torch.ops.rl_kernel_native, torch.library.opcheck
    rstd = rk.rms_norm(o.x, o.weight, EPS, return_rstd=True)[1]
    for weight, residual in ((o.weight, None), (o.weight.float(), o.residual), (None, o.residual)):
        check(ops.rms_norm, (o.x, weight, residual, EPS, 0.0, True))
    for third, return_dx, dtype in ((None, True, torch.bfloat16), (o.d_new_residual, False, torch.float32)):
        check(ops.rms_norm_backward, (o.dy, o.x, o.weight, rstd, third, EPS, 1.0, False, return_dx, dtype))
    check(ops.rms_norm_backward, (o.dy, o.x, None, None, None, EPS, 0.0, False, True, None))
    main_grad = torch.zeros(32, device=o.x.device)
    check(ops.rms_norm_backward_, (main_grad, o.dy, o.x, o.weight, rstd, None, EPS, 0.0, False, True))


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"round_before_weight": True, "weight_offset": 1.0},
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_has_the_bytes_of_eager(case: str, backend: str, o: Operands) -> None:
    """fullgraph=True forbids a graph break. Inductor runs only where it has a compiler for the device."""
    if backend == "inductor" and (case != "everything" or shutil.which("g++") is None):
        pytest.skip("inductor takes seconds a graph and a C++ compiler; one case shows it")
    torch.compiler.reset()

    def function(x: Any, weight: Any, residual: Any) -> Any:
        y, new_residual = rk.rms_norm(x, weight, EPS, residual=residual, **COMPILED[case])
        return rk.rms_norm(y, None, EPS), new_residual

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    outcomes = []
    for f in (function, compiled):
        leaves = [t.clone().requires_grad_() for t in o[:3]]
        outputs = f(*leaves)
        (outputs[0] * outputs[1]).sum().backward()
        outcomes.append((*outputs, *(t.grad for t in leaves)))
    assert not differing(*outcomes)
    with torch.no_grad():
        assert not differing(tuple(compiled(*o[:3])), outcomes[0][:2])


def test_compiled_functions_with_dynamic_shapes(o: Operands) -> None:
    def everything(x: Any, weight: Any, residual: Any, dy: Any, third: Any) -> Any:
        total = torch.zeros(weight.shape, device=weight.device)
        dx, _ = rk.rms_norm_backward(dy, x, weight, EPS, main_grad=total, return_dweight=False)
        return (*results(Operands(x, weight, residual, dy, third)), dx, total)

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 1):
        inputs = tuple(t if t.dim() == 1 else t[:rows] for t in o)
        assert not differing(tuple(compiled(*inputs)), everything(*inputs))


def test_export(o: Operands) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Any, weight: Any, residual: Any) -> Any:
            return rk.rms_norm(x, weight, EPS, residual=residual)

    program = torch.export.export(Layer(), tuple(o[:3]))
    assert "rl_kernel_native.rms_norm" in str(program.graph)
    assert not differing(tuple(program.module()(*o[:3])), Layer()(*o[:3]))


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = results(o)
    with FakeTensorMode() as fakes:
        fake = results(Operands(*(fakes.from_tensor(t) for t in o)))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    meta = rk.rms_norm(o.x.to("meta"), o.weight.to("meta"), EPS)
    assert (meta.shape, meta.dtype) == (real.y.shape, real.y.dtype)


# ---- torch.func and higher derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (1, None, 0), (0, 0, None), (None, 0, 0), (None, None, 1)], ids=str
)
def test_vmap_has_the_bytes_of_a_loop(in_dims: tuple[Any, ...], device: str, rng: np.random.Generator) -> None:
    size = 3
    o = operands(rng, (5,), 16, "bfloat16", device)
    batched = [
        t if d is None else torch.stack([t * (i + 1) for i in range(size)], d)
        for t, d in zip(o[:3], in_dims, strict=True)
    ]

    def norm(x: Any, weight: Any, residual: Any) -> Any:
        return rk.rms_norm(x, weight, EPS, residual=residual)

    got = torch.vmap(norm, in_dims=in_dims)(*batched)
    for i in range(size):
        one = [t if d is None else t.select(d, i).contiguous() for t, d in zip(batched, in_dims, strict=True)]
        assert not differing(tuple(g[i] for g in got), norm(*one)), i
    if in_dims[0] == 0 and in_dims[1] is None:
        plain = torch.vmap(lambda x: rk.rms_norm(x, None, EPS))(batched[0])
        assert not differing(plain[1], rk.rms_norm(batched[0][1], None, EPS))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_over_an_empty_batch_is_empty(in_dims: tuple[Any, ...], o: Operands) -> None:
    batched = [
        t if d is None else t.new_zeros((0, *t.shape)) for t, d in zip((o.residual, o.weight), in_dims, strict=True)
    ]
    got = torch.vmap(lambda r, w: rk.rms_norm(o.x, w, EPS, residual=r), in_dims=in_dims)(*batched)
    assert [t.shape for t in got] == [(0, 2, 3, 32)] * 2


def test_func_grad_has_the_bytes_of_backward(o: Operands) -> None:
    want = gradients(step, *o[:3])
    assert not differing(torch.func.grad(step, argnums=(0, 1, 2))(*o[:3]), want)


def test_vmap_of_grad_is_per_sample_gradients(o: Operands) -> None:
    got = torch.vmap(torch.func.grad(step, argnums=(0, 1)), in_dims=(0, None, 0))(*o[:3])
    for i in range(2):
        assert not differing(tuple(g[i] for g in got), gradients(step, o.x[i], o.weight, o.residual[i])[:2])


def close(got: Any, want: Any, terms: int = 1) -> bool:
    allowed = row("rms_norm", "derivatives").allowed(largest=float(want.abs().max()), terms=terms)
    return float((got.detach() - want.detach()).abs().max()) <= allowed


def formula(x: Any, weight: Any, residual: Any = None) -> Any:
    h = x if residual is None else x + residual
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 0.5) * (weight + 1), h


def norm(x: Any, weight: Any, residual: Any = None) -> Any:
    y = rk.rms_norm(x, weight, 0.5, residual=residual, weight_offset=1.0)
    return y if residual is not None else (y, x)


def formula_backward(dy: Any, h: Any, weight: Any, third: Any) -> Any:
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + 0.5)
    g = dy * (weight + 1)
    return rstd * (g - h * rstd * (g * h * rstd).mean(-1, keepdim=True)) + third, (dy * h * rstd).sum(0)


def backward(dy: Any, h: Any, weight: Any, third: Any) -> Any:
    return rk.rms_norm_backward(dy, h, weight, 0.5, d_new_residual=third, weight_offset=1.0)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = {
    "norm": (norm, formula, ("x", "weight")),
    "norm with a residual": (norm, formula, ("x", "weight", "residual")),
    "backward": (backward, formula_backward, ("dy", "x", "weight", "d_new_residual")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_every_function_against_float64(name: str, single: Operands) -> None:
    """Jacobians in both modes and second derivatives through a square."""
    ours, theirs, arguments = FUNCTIONS[name]
    inputs = [getattr(single, a) for a in arguments]
    wide = [t.double() for t in inputs]
    every = tuple(range(len(inputs)))
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        for got, want in zip(jacobian(ours, every)(*inputs), jacobian(theirs, every)(*wide), strict=True):
            for a, b in zip(got, want, strict=True):
                assert close(a, b), jacobian.__name__

    def squared(function: Any) -> Any:
        return lambda *a: sum(out.square().sum() for out in function(*a))

    got, want = (
        torch.func.jacrev(torch.func.jacrev(squared(f), every), every)(*i) for f, i in ((ours, inputs), (theirs, wide))
    )
    for i in every:
        for j in every:
            assert close(got[i][j], want[i][j], 8), (i, j)  # these are sums of sums


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck_and_gradgradcheck(name: str, single: Operands) -> None:
    """Float32 steps of 2^-7: truncation errs by about 2^-14, rounding by about 2^-23 / 2^-7."""
    ours, _, arguments = FUNCTIONS[name]
    inputs = tuple(getattr(single, a).clone().requires_grad_() for a in arguments)
    options = {"eps": 2.0**-7, "atol": 2e-3, "rtol": 2e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradcheck warns that inputs are not float64
        assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True, **options)
        assert torch.autograd.gradgradcheck(ours, inputs, **options)


def test_second_derivatives_in_half_precision(o: Operands) -> None:
    """A gradient penalty, rounded twice to bfloat16."""
    outcomes = []
    for function, inputs in ((norm, o[:3]), (formula, [t.double() for t in o[:3]])):
        leaves = [t.clone().requires_grad_() for t in inputs]
        first = torch.autograd.grad(function(*leaves)[0].square().sum(), leaves, create_graph=True)
        outcomes.append(torch.autograd.grad(sum(f.square().sum() for f in first), leaves))
    for got, want in zip(*outcomes, strict=True):
        assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())


# ---- modes of torch -------------------------------------------------------------------------------------------------


def test_no_grad_inference_mode_and_grad_have_the_same_bytes(o: Operands) -> None:
    want = rk.rms_norm(*(t.clone().requires_grad_() for t in o[:2]), EPS)
    assert want.requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = rk.rms_norm(o.x, torch.nn.Parameter(o.weight), EPS)
        assert not got.requires_grad
        assert not differing(got, want)
    assert not differing(rk.rms_norm(o.x, o.weight, EPS), want)


def test_autocast_changes_nothing(rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 32, "float32")
    want = gradients(step, *o[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not differing(gradients(step, *o[:3]), want)


def test_saved_tensors_may_not_be_changed_before_backward(o: Operands) -> None:
    for changed in ("x", "weight"):
        leaves = {name: getattr(o, name).clone().requires_grad_() for name in ("x", "weight")}
        inputs = {name: t * 1 for name, t in leaves.items()}
        y = rk.rms_norm(**inputs, eps=EPS)
        inputs[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(selective: bool, o: Operands) -> None:
    outcomes = []
    for run in runs_with_and_without_checkpoints("rms_norm", selective):
        leaves = [t.clone().requires_grad_() for t in o[:3]]
        run(lambda x, w, r: step(x * 2, w, r), *leaves).backward()
        outcomes.append(tuple(t.grad for t in leaves))
    assert not differing(*outcomes)


def test_calls_do_not_leak(device: str, rng: np.random.Generator) -> None:
    """Covers both training steps and errors."""
    o = operands(rng, (64,), 800, "bfloat16", device)
    leaves = [t.clone().requires_grad_() for t in o[:3]]
    main_grad = torch.zeros(800, device=device)

    def burst(n: int) -> None:
        for _ in range(n):
            y, _ = rk.rms_norm(leaves[0], leaves[1], EPS, residual=leaves[2], main_grad=main_grad)
            y.backward(o.dy)
            leaves[0].grad = leaves[2].grad = None
            with pytest.raises(ValueError, match="weight"):
                rk.rms_norm(o.x, o.weight[:7], EPS)

    assert_no_leak(burst, device)


@pytest.mark.alone
def test_median_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As for linear: at most 6 us on a GPU without autograd and 25 us with autograd. If a launch and an allocation
    alone take that long, the limit is their time plus 5 us. On a CPU the time includes the work itself, so the test
    only prints it."""
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(64, device=device, dtype=torch.bfloat16))
    frozen = weight.detach()
    calls = {
        "eager": lambda: rk.rms_norm(x, frozen, EPS),
        "torch": lambda: torch.nn.functional.rms_norm(x, (64,), frozen, EPS),
        "with_grad": lambda: rk.rms_norm(x, weight, EPS),
        "allocation": lambda: torch.empty(8, 64, device=device, dtype=torch.bfloat16),
    }
    cost = printed_host_costs("rms_norm", calls, device, capsys)
    if device == "cuda":
        least = cost["launch"] + cost["allocation"]
        assert cost["eager"] <= max(6, least + 5)
        assert cost["with_grad"] <= max(25, 5 * least)


# ---- GPU ------------------------------------------------------------------------------------------------------------


def train(o: Operands, main_grad: Any) -> tuple[Any, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in o[:3]]
    y, new_residual = rk.rms_norm(leaves[0], leaves[1], EPS, residual=leaves[2], main_grad=main_grad)
    torch.autograd.backward((y, new_residual), (o.dy, o.d_new_residual))
    return y.detach(), new_residual.detach(), leaves[0].grad, leaves[2].grad, *results(o)


@pytest.mark.gpu
# a decode step; few groups of rows; enough groups for every multiprocessor
@pytest.mark.parametrize("rows", [1, 700, 8200])
def test_no_call_synchronises_and_a_captured_graph_replays(rows: int, rng: np.random.Generator) -> None:
    batches = [operands(rng, (rows,), 512, "bfloat16", "cuda") for _ in range(4)]
    o = Operands(*(t.clone() for t in batches[0]))
    main_grad = torch.zeros(512, device="cuda")
    train(o, main_grad)  # the first call of a process loads its kernels
    with no_synchronisation():
        train(o, main_grad)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(o, main_grad)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(o, main_grad)
    for i in range(12):
        for mine, theirs in zip(o, batches[i % 4], strict=True):
            mine.copy_(theirs)
        main_grad.zero_()
        graph.replay()
        want_main_grad = torch.zeros_like(main_grad)
        assert not differing(got, train(batches[i % 4], want_main_grad))
        assert not differing(main_grad, want_main_grad)


@pytest.mark.gpu
def test_work_goes_to_the_current_stream_behind_its_producer(rng: np.random.Generator) -> None:
    assert_work_follows_its_producer(operands(rng, (300,), 256, "bfloat16", "cuda"), results)


@pytest.mark.gpu
def test_a_workspace_outlives_its_call(rng: np.random.Generator) -> None:
    """The allocator may reuse the workspace as soon as the call returns, but only for work queued behind it."""
    o = operands(rng, (20_000,), 1024, "bfloat16", "cuda")
    want = rk.rms_norm_backward(o.dy, o.x, o.weight, EPS)
    for _ in range(20):
        got = rk.rms_norm_backward(o.dy, o.x, o.weight, EPS)
        junk = [torch.full((400_000,), float("nan"), device="cuda") for _ in range(3)]
        assert not differing(got, want)
        del junk


@pytest.mark.gpu
def test_the_device_of_the_arguments_is_used_whichever_is_current(rng: np.random.Generator) -> None:
    assert_the_arguments_device_is_used(operands(rng, (4,), 64), results)
