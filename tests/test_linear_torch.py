"""linear in torch: registered operators, torch.compile, export, torch.func, second derivatives, graphs, host cost."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from linear_cases import Operands, operands, results

torch = pytest.importorskip("torch")

IEEE = (True, 0)  # allow_vendor, unit
FIRST = 2e-6  # float32 sums of at most 24 products of normal values, against float64: 24 * 2^-24 of |sum| < 10


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, 10, "bfloat16", device)


@pytest.fixture
def single(rng: np.random.Generator) -> Operands:
    """float32, which the CPU alone has: derivatives are compared with float64."""
    return operands(rng, (4, 3), 6, 5, "float32")


def step(x: Any, weight: Any, bias: Any, **options: Any) -> Any:
    return rk.linear(x, weight, bias, **options).float().square().sum()


def gradients(function: Callable[..., Any], *inputs: Any) -> tuple[Any, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


# ---- the registered operators ---------------------------------------------------------------------------------------


def test_opcheck(o: Operands) -> None:
    """Schema, fake tensors, autograd registration and dynamic shapes of all operators."""
    import rl_kernel_native.ops.linear_traced  # noqa: F401 - registers them; a call that is traced does, too

    ops, check = torch.ops.rl_kernel_native, torch.library.opcheck
    for bias, segments, out in ((None, 1, torch.bfloat16), (o.bias, 2, torch.float32), (o.bias.float(), 1, torch.half)):
        check(ops.linear, (o.x, o.weight, bias, segments, out, *IEEE))
    check(ops.linear_input_grad, (o.dy, o.weight, *IEEE))
    for out in (torch.bfloat16, torch.float32):
        check(ops.linear_weight_grad, (o.dy, o.x, out, *IEEE))
        check(ops.linear_bias_grad, (o.dy, out))
    check(ops.linear_weight_grad_, (torch.zeros(10, 32, device=o.x.device), o.dy, o.x, *IEEE))
    parts = [o.dy.float(), o.dy.float() * 2]
    check(ops.tree_sum, (parts, None, torch.float32))
    check(ops.tree_sum, (parts, o.bias, torch.bfloat16))


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"k_segments": 2, "out_dtype": torch.float32, "engine": "native"},
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_has_the_bytes_of_eager(case: str, backend: str, o: Operands) -> None:
    """fullgraph=True: no graph break. Inductor only where it has a compiler for the device, which it needs anyway."""
    if backend == "inductor" and (case != "everything" or shutil.which("g++") is None):
        pytest.skip("inductor takes seconds a graph and a C++ compiler; one case shows it")
    torch.compiler.reset()

    def function(x: Any, weight: Any, bias: Any) -> Any:
        return rk.linear(x, weight, bias, **COMPILED[case])

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    outcomes = []
    for f in (function, compiled):
        leaves = [t.clone().requires_grad_() for t in o[:3]]
        y = f(*leaves)
        (y * y).sum().backward()  # its gradient is expanded and multiplied in whatever order the compiler likes
        outcomes.append((y, *(t.grad for t in leaves)))
    assert not differing(*outcomes)
    with torch.no_grad():
        assert not differing(compiled(*o[:3]), outcomes[0][0])


def test_compiled_functions_of_every_kind_with_dynamic_shapes(o: Operands) -> None:
    def everything(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        parts = [
            rk.linear_partial(x[..., i : i + 16], weight[:, i : i + 16], k_segments=2, first_segment=i // 16,
                              num_segments=1)
            for i in (0, 16)
        ]  # fmt: skip
        total = torch.zeros(weight.shape, device=weight.device)
        return (*results(Operands(x, weight, bias, dy)), rk.tree_sum(parts, bias=bias, out_dtype=torch.bfloat16),
                rk.linear_weight_grad(dy, x, main_grad=total))  # fmt: skip

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 1):
        inputs = (o.x[:rows], o.weight, o.bias, o.dy[:rows])
        assert not differing(compiled(*inputs), everything(*inputs))


def test_a_compiled_graph_is_ieee_and_says_so_where_a_context_asks_for_more(rng: np.random.Generator) -> None:
    """Tracing cannot see rk.arithmetic, and a backward may run outside of it: an error, never a guess."""
    o = operands(rng, (4,), 64, 10)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: rk.linear(x, w), fullgraph=True, backend="aot_eager")
    assert not differing(compiled(o.x, o.weight), rk.linear(o.x, o.weight))
    with rk.arithmetic("sm_90"), pytest.raises(ValueError, match=r"arithmetic: a compiled call .*rk.arithmetic\("):
        compiled(o.x, o.weight)
    x = o.x.clone().requires_grad_()
    y = compiled(x, o.weight)
    with rk.arithmetic("sm_90"):
        y.backward(o.dy)
    assert not differing(x.grad, rk.linear_input_grad(o.dy, o.weight))


def test_export(o: Operands) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Any, weight: Any, bias: Any) -> Any:
            return rk.linear(x, weight, bias, out_dtype=torch.float32)

    program = torch.export.export(Layer(), tuple(o[:3]))
    assert "rl_kernel_native.linear" in str(program.graph)
    assert not differing(program.module()(*o[:3]), Layer()(*o[:3]))


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = (*results(o), rk.linear(o.x, o.weight))
    with FakeTensorMode() as fakes:
        f = Operands(*(fakes.from_tensor(t) for t in o))
        fake = (*results(f), rk.linear(f.x, f.weight))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    meta = rk.linear(o.x.to("meta"), o.weight.to("meta"))
    assert (meta.shape, meta.dtype) == (real[4].shape, real[4].dtype)


# ---- torch.func -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, None, None), (1, None, None), (0, 0, None), (None, 0, 0), (0, 1, 0)], ids=str)
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


def close(got: Any, want: Any, scale: float = 1.0) -> bool:
    return float((got.detach() - want.detach()).abs().max()) <= FIRST * scale * max(1.0, float(want.abs().max()))


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
                assert close(got[i][j], want[i][j], 8), (i, j)  # sums of sums


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck_and_gradgradcheck(name: str, single: Operands) -> None:
    """Bilinear functions: a difference quotient of any step is exact but for float32, so the step is 1/4."""
    ours, _, arguments = FUNCTIONS[name]
    inputs = tuple(getattr(single, a).clone().requires_grad_() for a in arguments)
    options = {"eps": 0.25, "atol": 1e-4, "rtol": 1e-4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the inputs are not float64
        assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True, **options)
        assert torch.autograd.gradgradcheck(ours, inputs, **options)


def test_second_derivatives_in_half_precision(o: Operands) -> None:
    """A gradient penalty: of bfloat16 roundings of each factor, 2^-8 each of a sum of 32 at most."""
    outcomes = []
    for function, inputs in ((rk.linear, o[:3]), (torch.nn.functional.linear, [t.double() for t in o[:3]])):
        leaves = [t.clone().requires_grad_() for t in inputs]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        outcomes.append(torch.autograd.grad(sum(f.square().sum() for f in first), leaves))
    for got, want in zip(*outcomes, strict=True):
        assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())


# ---- modes of torch -------------------------------------------------------------------------------------------------


def test_no_grad_inference_mode_and_grad_have_the_same_bytes(o: Operands) -> None:
    want = rk.linear(*(t.clone().requires_grad_() for t in o[:3]))
    assert want.requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = rk.linear(o.x, torch.nn.Parameter(o.weight), torch.nn.Parameter(o.bias))
        assert not got.requires_grad
        assert not differing(got, want)
    assert not differing(rk.linear(*o[:3]), want)


def test_autocast_changes_nothing(rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 32, 8, "float32")
    want = gradients(step, *o[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not differing(gradients(step, *o[:3]), want)


def test_saved_tensors_may_not_be_changed_before_backward(o: Operands) -> None:
    for changed in (0, 1):
        leaves = [t.clone().requires_grad_() for t in o[:3]]
        inputs = [t * 1 for t in leaves]
        y = rk.linear(*inputs)
        inputs[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()


def test_backward_twice(o: Operands) -> None:
    leaves = [t.clone().requires_grad_() for t in o[:3]]
    y = rk.linear(*leaves)
    first = torch.autograd.grad(y, leaves, o.dy, retain_graph=True)
    assert not differing(torch.autograd.grad(y, leaves, o.dy), first)


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(selective: bool, o: Operands) -> None:
    """Selective checkpointing runs under a dispatch mode, which main_grad must live with."""
    from torch.utils import checkpoint as ck

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        saved = op == torch.ops.rl_kernel_native.linear.default
        return ck.CheckpointPolicy.MUST_SAVE if saved else ck.CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": lambda: ck.create_selective_checkpoint_contexts(policy)} if selective else {}
    outcomes = []
    for run in (lambda f, *a: f(*a), lambda f, *a: ck.checkpoint(f, *a, use_reentrant=False, **options)):
        x, weight, bias = (t.clone().requires_grad_() for t in o[:3])
        main_grad = torch.zeros(weight.shape, device=weight.device)
        run(lambda x, w, b, m=main_grad: rk.linear(x * 2, w, b, main_grad=m), x, weight, bias).backward(o.dy)
        outcomes.append((x.grad, bias.grad, main_grad))
        assert weight.grad is None
    assert not differing(*outcomes)


def test_many_threads_of_the_caller(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (37,), 300, 90, "bfloat16", device)
    want = results(o)
    wrong: list[str] = []

    def work() -> None:
        try:
            for _ in range(5):
                wrong.extend(filter(None, [differing(results(o), want)]))
        except Exception as error:  # reported by the main thread
            wrong.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]


def median_us(call: Any, calls: int = 1000) -> float:
    batch, times = 20, []
    for _ in range(50):
        call()
    for _ in range(calls // batch):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # so that the launch queue is never full
    return statistics.median(times)


def test_median_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As logprob's: on a GPU 6 us without autograd (one array more) and 25 us with it, or a launch and an allocation
    and 5 us, where these alone take that long. On a CPU the work itself is in it: only printed."""
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device, dtype=torch.bfloat16))
    bias = torch.nn.Parameter(torch.randn(64, device=device, dtype=torch.bfloat16))

    def best(call: Any) -> float:
        return min(median_us(call) for _ in range(3))

    with torch.no_grad():
        eager, theirs = (
            best(lambda: rk.linear(x, weight, bias)),
            best(lambda: torch.nn.functional.linear(x, weight, bias)),
        )
    with_grad = best(lambda: rk.linear(x, weight, bias))
    allocation = best(lambda: torch.empty(8, 64, device=device, dtype=torch.bfloat16))
    launch = best(lambda: torch.cuda._sleep(0)) if device == "cuda" else 0.0
    with capsys.disabled():
        print(
            f"\nhost cost of linear on {device}: {eager:.2f} us eager, {with_grad:.2f} us with autograd; "
            f"torch {theirs:.2f}, a launch {launch:.2f}, an allocation {allocation:.2f}"
        )
    if device == "cuda":
        assert eager <= max(6, launch + allocation + 5)
        assert with_grad <= max(25, 5 * (launch + allocation))


# ---- GPU ------------------------------------------------------------------------------------------------------------


def train(o: Operands, main_grad: Any) -> tuple[Any, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in o[:3]]
    y = rk.linear(*leaves, k_segments=2, main_grad=main_grad)
    y.backward(o.dy)
    parts = [y.detach().float(), y.detach().float()]
    return y.detach(), leaves[0].grad, leaves[2].grad, rk.tree_sum(parts, bias=o.bias), *results(o)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "native"])
def test_no_call_synchronises(engine: str, rng: np.random.Generator) -> None:
    o = operands(rng, (64,), 256, 128, "bfloat16", "cuda")
    main_grad = torch.zeros(128, 256, device="cuda")
    results(o, engine=engine)
    train(o, main_grad)  # the first call of a process loads its kernels
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(o, main_grad)
        results(o, engine=engine)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 48, 700])  # kernels for a decode step, for few rows, for many
def test_a_captured_graph_replays_with_the_bytes_of_eager(rows: int, rng: np.random.Generator) -> None:
    batches = [operands(rng, (rows,), 512, 256, "bfloat16", "cuda") for _ in range(4)]
    o = Operands(*(t.clone() for t in batches[0]))
    main_grad = torch.zeros(256, 512, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train(o, main_grad)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(o, main_grad)
    for i in range(20):
        for mine, theirs in zip(o, batches[i % 4], strict=True):
            mine.copy_(theirs)
        main_grad.zero_()
        graph.replay()
        want_main_grad = torch.zeros_like(main_grad)
        assert not differing(got, train(batches[i % 4], want_main_grad))
        assert not differing(main_grad, want_main_grad)


@pytest.mark.gpu
def test_the_device_of_the_arguments_is_used_whichever_is_current(rng: np.random.Generator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    o = operands(rng, (4,), 64, 32)
    with torch.cuda.device(0):
        got = results(Operands(*(t.to("cuda:1") for t in o)))
    assert got[0].device.index == 1
    assert not differing(got, results(Operands(*(t.to("cuda:0") for t in o))))
