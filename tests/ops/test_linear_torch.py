"""linear in torch: registered operators, torch.compile, export, modes, graphs, host cost."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from linear_cases import Operands, operands, results
from rl_kernel_native import _arithmetic

torch = pytest.importorskip("torch")

from torch_properties import (  # noqa: E402
    assert_no_leak,
    assert_the_arguments_device_is_used,
    assert_work_follows_its_producer,
    no_synchronisation,
    printed_host_costs,
    runs_with_and_without_checkpoints,
)

IEEE = (True, 0)  # allow_vendor, unit


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, 10, "bfloat16", device)


def step(x: Any, weight: Any, bias: Any, **options: Any) -> Any:
    return rk.linear(x, weight, bias, **options).float().square().sum()


# ---- the registered operators ---------------------------------------------------------------------------------------


def test_opcheck(o: Operands) -> None:
    """Schema, fake tensors, autograd registration and dynamic shapes of all operators."""
    rk.ops.register_torch_operators()
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
    """fullgraph=True forbids a graph break. Inductor runs only where it has a compiler for the device."""
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
        (y * y).sum().backward()  # its gradient is expanded, and multiplied in an order that the compiler chooses
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
    """Tracing cannot see rk.arithmetic, and a backward may run outside it, so this is an error."""
    o = operands(rng, (4,), 64, 10)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: rk.linear(x, w), fullgraph=True, backend="aot_eager")
    assert not differing(compiled(o.x, o.weight), rk.linear(o.x, o.weight))
    assert [_arithmetic.resolve_traced_unit(unit, "cpu") for unit in (0, 2, _arithmetic.AS_CALLED)] == [0, 2, 0]
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
    """Selective checkpointing runs under a dispatch mode, in which main_grad must work."""
    outcomes = []
    for run in runs_with_and_without_checkpoints("linear", selective):
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
        except Exception as error:  # the main thread reports it
            wrong.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]


def test_calls_do_not_leak(device: str, rng: np.random.Generator) -> None:
    """Covers both training steps and errors."""
    o = operands(rng, (64,), 200, 400, "bfloat16", device)
    leaves = [t.clone().requires_grad_() for t in o[:3]]
    main_grad = torch.zeros(400, 200, device=device)

    def burst(n: int) -> None:
        for _ in range(n):
            rk.linear(*leaves, main_grad=main_grad).backward(o.dy)
            leaves[0].grad = leaves[2].grad = None
            with pytest.raises(ValueError, match="weight"):
                rk.linear(o.x, o.weight[:, :7])

    assert_no_leak(burst, device)


@pytest.mark.alone
def test_median_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As for logprob: at most 6 us on a GPU without autograd (one array more) and 25 us with autograd. If a launch and
    an allocation alone take that long, the limit is their time plus 5 us. On a CPU the time includes the work itself,
    so the test only prints it."""
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device, dtype=torch.bfloat16))
    bias = torch.nn.Parameter(torch.randn(64, device=device, dtype=torch.bfloat16))

    frozen, frozen_bias = weight.detach(), bias.detach()
    calls = {
        "eager": lambda: rk.linear(x, frozen, frozen_bias),
        "torch": lambda: torch.nn.functional.linear(x, frozen, frozen_bias),
        "with_grad": lambda: rk.linear(x, weight, bias),
        "allocation": lambda: torch.empty(8, 64, device=device, dtype=torch.bfloat16),
    }
    cost = printed_host_costs("linear", calls, device, capsys)
    if device == "cuda":
        least = cost["launch"] + cost["allocation"]
        assert cost["eager"] <= max(6, least + 5)
        assert cost["with_grad"] <= max(25, 5 * least)


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
    with no_synchronisation():
        train(o, main_grad)
        results(o, engine=engine)


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
def test_work_goes_to_the_current_stream_behind_its_producer(rng: np.random.Generator) -> None:
    assert_work_follows_its_producer(operands(rng, (300,), 256, 128, "bfloat16", "cuda"), results)


@pytest.mark.gpu
def test_the_device_of_the_arguments_is_used_whichever_is_current(rng: np.random.Generator) -> None:
    assert_the_arguments_device_is_used(operands(rng, (4,), 64, 32), results)
