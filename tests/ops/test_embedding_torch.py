"""embedding in torch: compile, export, fake tensors, torch.func, derivatives of any order, main_grad, CUDA graphs."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from embedding_cases import Operands, operands, results

torch = pytest.importorskip("torch")

from torch_properties import (  # noqa: E402
    assert_no_leak,
    assert_the_arguments_device_is_used,
    assert_work_follows_its_producer,
    no_synchronisation,
    printed_host_costs,
)

forward_ad = torch.autograd.forward_ad
FUNCTIONS = (rk.embedding, torch.nn.functional.embedding)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 1},
    "shard": {"vocab_start": 3, "vocab_size": 60, "padding_idx": 5},
}


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (3, 40), 40, 32, "bfloat16", device, vocab=45)


def gradient(o: Operands, **options: Any) -> Any:
    leaf = o.weight.clone().requires_grad_()
    y = rk.embedding(o.ids, leaf, **options)
    y.backward(o.dy)
    return leaf.grad


# ---- autograd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_autograd_has_the_bytes_of_backward(options: dict[str, Any], o: Operands) -> None:
    want = rk.embedding_backward(o.dy, o.ids, 40, **options)
    assert want.dtype == torch.bfloat16
    assert not differing(gradient(o, **options), want)
    leaf = o.weight.clone().requires_grad_()
    y = rk.embedding(o.ids, leaf, **options)
    assert not differing(y.detach(), rk.embedding(o.ids, o.weight, **options))
    y.float().sum().backward()  # gives an expanded gradient
    ones = torch.ones_like(o.dy)
    assert not differing(leaf.grad, rk.embedding_backward(ones, o.ids, 40, **options))


def test_main_grad_takes_the_gradient(o: Operands) -> None:
    for options in OPTIONS.values():
        leaf, main_grad = o.weight.clone().requires_grad_(), torch.ones(40, 32, device=o.weight.device)
        want = main_grad.clone()
        version = main_grad._version
        rk.embedding(o.ids, leaf, main_grad=main_grad, **options).backward(o.dy)
        rk.embedding_backward(o.dy, o.ids, 40, main_grad=want, **options)
        assert leaf.grad is None
        assert not differing(main_grad, want)
        assert main_grad._version > version, "the write is counted"
    leaf = o.weight.clone().requires_grad_()
    y = rk.embedding(o.ids, leaf, main_grad=main_grad)
    with pytest.raises(ValueError, match=r"main_grad: takes the gradient of weight, so torch\.autograd\.grad cannot"):
        torch.autograd.grad(y, leaf, o.dy)
    y = rk.embedding(o.ids, leaf, main_grad=main_grad)
    with pytest.raises(ValueError, match="main_grad: a gradient that is added to it has no derivative"):
        y.backward(o.dy, create_graph=True)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch rounds every gradient")
def test_a_gradient_in_float32_of_a_table_in_half_precision(o: Operands) -> None:
    leaf = o.weight.clone().requires_grad_()
    leaf.grad_dtype = torch.float32
    rk.embedding(o.ids, leaf, weight_grad_dtype="float32").backward(o.dy)
    assert not differing(leaf.grad, rk.embedding_backward(o.dy, o.ids, 40, dweight_dtype="float32"))
    with pytest.raises(ValueError, match=r"weight_grad_dtype: torch would round the gradient to torch.bfloat16 again"):
        rk.embedding(o.ids, o.weight.clone().requires_grad_(), weight_grad_dtype="float32")


def test_no_grad_inference_mode_and_grad_have_the_same_bytes(o: Operands) -> None:
    want = rk.embedding(o.ids, o.weight)
    leaf = torch.nn.Parameter(o.weight.clone())
    assert not differing(rk.embedding(o.ids, leaf).detach(), want)
    with torch.no_grad():
        assert not differing(rk.embedding(o.ids, leaf), want)
    with torch.inference_mode():
        assert not differing(rk.embedding(o.ids, leaf).clone(), want)


def test_a_layer_trains_as_torchs(device: str, rng: np.random.Generator) -> None:
    """float32 with distinct ids needs no sum, so the bytes are torch's."""
    ids = torch.from_numpy(rng.permutation(30)[:20]).to(device)
    layers = [torch.nn.Embedding(30, 16, padding_idx=int(ids[3]), device=device) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            ours = layer is layers[0]
            y = rk.embedding(ids, layer.weight, padding_idx=layer.padding_idx) if ours else layer(ids)
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
    assert not differing(layers[0].weight.detach(), layers[1].weight.detach())


# ---- the registered operators ---------------------------------------------------------------------------------------


def test_opcheck(o: Operands) -> None:
    """Schema, fake tensors, autograd registration and dynamic shapes of all operators."""
    rk._call.load()

    ops, check = torch.ops.rl_kernel_native, torch.library.opcheck
    for weight in (o.weight, o.weight.float().requires_grad_()):
        check(ops.embedding, (o.ids.clamp(max=39), weight, 0, None, None))
        check(ops.embedding, (o.ids.int(), weight, 3, 60, 4))
    check(ops.embedding_backward, (o.dy, o.ids, 40, 0, None, 1, torch.bfloat16))
    check(ops.embedding_backward, (o.dy.float().requires_grad_(), o.ids, 40, 3, 60, None, torch.float32))
    check(ops.embedding_backward_, (torch.zeros(40, 32, device=o.dy.device), o.dy, o.ids, 40, 0, None, None))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", OPTIONS)
def test_compiled_has_the_bytes_of_eager(case: str, backend: str, o: Operands) -> None:
    """fullgraph=True forbids a graph break. Inductor runs only where it finds a compiler."""
    if backend == "inductor" and (case != "shard" or shutil.which("g++") is None):
        pytest.skip("inductor takes seconds a graph and a C++ compiler; one case shows it")
    torch.compiler.reset()
    options = OPTIONS[case]

    def function(ids: Any, weight: Any) -> Any:
        return rk.embedding(ids, weight * 2, **options)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    outcomes = []
    for f in (function, compiled):
        leaf = o.weight.clone().requires_grad_()
        y = f(o.ids, leaf)
        (y * o.dy).nan_to_num().sum().backward()
        outcomes.append((y.detach(), leaf.grad))
    assert not differing(*outcomes)
    with torch.no_grad():
        assert not differing(compiled(o.ids, o.weight), outcomes[0][0])


def test_compiled_functions_with_dynamic_shapes(o: Operands) -> None:
    def everything(ids: Any, weight: Any, dy: Any) -> Any:
        total = torch.zeros(weight.shape, device=weight.device)
        rk.embedding_backward(dy, ids, weight.shape[0], main_grad=total)
        return (*results(Operands(ids, weight, dy), vocab_start=1, vocab_size=50, padding_idx=2), total)

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, rows in ((3, 40), (2, 30)):
        inputs = (o.ids[:tokens], o.weight[:rows], o.dy[:tokens])
        assert not differing(tuple(compiled(*inputs)), everything(*inputs))


def test_export(o: Operands) -> None:
    class Layer(torch.nn.Module):
        def forward(self, ids: Any, weight: Any) -> Any:
            return rk.embedding(ids, weight, padding_idx=0)

    program = torch.export.export(Layer(), tuple(o[:2]))
    assert "rl_kernel_native.embedding" in str(program.graph)
    assert not differing(program.module()(*o[:2]), Layer()(*o[:2]))


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = results(o)
    with FakeTensorMode() as fakes:
        fake = results(Operands(*(fakes.from_tensor(t) for t in o)))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    meta = rk.embedding(o.ids.to("meta"), o.weight.to("meta"))
    assert (meta.shape, meta.dtype) == (real[0].shape, real[0].dtype)


# ---- torch.func and higher derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (None, 0), (0, 1)])
def test_vmap_has_the_bytes_of_a_loop(in_dims: tuple[Any, Any], device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4, 6), 4, 8, "bfloat16", device)
    weights = torch.stack([o.weight, o.weight + 1, o.weight * 2, -o.weight], 1 if in_dims[1] == 1 else 0)
    arguments = (o.ids if in_dims[0] != 1 else o.ids.t(), o.weight if in_dims[1] is None else weights)
    got = torch.func.vmap(lambda i, w: rk.embedding(i, w, padding_idx=1), in_dims)(*arguments)

    def element(x: Any, d: Any, i: int) -> Any:
        return x if d is None else x.select(d, i).contiguous()

    want = [rk.embedding(*(element(x, d, i) for x, d in zip(arguments, in_dims, strict=True))) for i in range(4)]
    assert not differing(got, torch.stack(want))
    sums = torch.func.vmap(lambda i, dy: rk.embedding_backward(dy, i, 4))(o.ids, o.dy)
    assert not differing(sums, torch.stack([rk.embedding_backward(o.dy[i], o.ids[i], 4) for i in range(4)]))


def test_func_grad_has_the_bytes_of_backward(o: Operands) -> None:
    got = torch.func.grad(lambda w: (rk.embedding(o.ids.clamp(max=39), w) * o.dy).sum())(o.weight)
    assert not differing(got, gradient(o._replace(ids=o.ids.clamp(max=39))))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_gradcheck_and_gradgradcheck(options: dict[str, Any], device: str, rng: np.random.Generator) -> None:
    """float32 with values that no step rounds, since the functions are linear."""
    o = operands(rng, (9,), 8, 3, "float32", device, vocab=6)
    if "vocab_start" in options:
        o = o._replace(ids=o.ids + 2)
    grad = {"eps": 0.5, "atol": 1e-5, "rtol": 1e-5}

    def doubled(f: Any) -> Any:
        return lambda t: f(t.float()).double()

    dy = (o.dy * 8).round().double().requires_grad_()
    assert torch.autograd.gradcheck(doubled(lambda g: rk.embedding_backward(g, o.ids, 8, **options)), (dy,), **grad)
    assert torch.autograd.gradgradcheck(doubled(lambda g: rk.embedding_backward(g, o.ids, 8, **options)), (dy,), **grad)
    if "padding_idx" in options:  # the gradient of that row is defined as zero
        options = {k: v for k, v in options.items() if k != "padding_idx"}
    weight = (o.weight * 8).round().double().requires_grad_()
    assert torch.autograd.gradcheck(
        doubled(lambda w: rk.embedding(o.ids, w, **options)), (weight,), check_forward_ad=True, **grad
    )
    assert torch.autograd.gradgradcheck(doubled(lambda w: rk.embedding(o.ids, w, **options)), (weight,), **grad)


def test_forward_mode_has_the_bytes_of_the_operators(o: Operands) -> None:
    with forward_ad.dual_level():
        y = rk.embedding(o.ids, forward_ad.make_dual(o.weight, o.weight * 2), padding_idx=1)
        tangent = forward_ad.unpack_dual(y).tangent
        sums = rk.embedding_backward(forward_ad.make_dual(o.dy, o.dy * 2), o.ids, 40, padding_idx=1)
        of_sums = forward_ad.unpack_dual(sums).tangent
    assert not differing(tangent, rk.embedding(o.ids, o.weight * 2, padding_idx=1))
    assert not differing(of_sums, rk.embedding_backward(o.dy * 2, o.ids, 40, padding_idx=1))


def _tangent_of_gradient(f: Any, w: Any, t: Any) -> Any:
    return torch.func.jvp(lambda dy: torch.func.vjp(f, w)[1](dy)[0], (f(w),), (f(t),))[1]


def _gradient_of_gradient(f: Any, w: Any, t: Any) -> Any:
    dy = f(w).detach().requires_grad_()
    leaf = w.clone().requires_grad_()
    (dweight,) = torch.autograd.grad(f(leaf), leaf, dy, create_graph=True)
    return torch.autograd.grad(dweight, dy, t)[0]


# Derivative -> a function of embedding, the table and a tangent of the table; whether the padding row contributes.
DERIVATIVES: dict[str, tuple[Any, bool]] = {
    "tangent": (lambda f, w, t: torch.func.jvp(f, (w,), (t,))[1], True),
    "gradient": (lambda f, w, t: torch.func.vjp(f, w)[1](f(t))[0], False),
    "tangent of the gradient": (_tangent_of_gradient, False),
    "gradient of the gradient": (_gradient_of_gradient, False),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_padding_row_has_the_derivatives_of_torch(derivative: str, compiles: bool, device: str) -> None:
    """torch keeps the row's tangent and drops its gradient. The sums of small integers are exact."""
    ids = torch.tensor([2, 1, 1, 0], device=device)
    weight, tangent = (torch.arange(24.0, device=device).view(3, 8) - x for x in (9, 4))
    of, contributes = DERIVATIVES[derivative]
    if compiles and derivative != "gradient of the gradient":
        of = torch.compile(of, fullgraph=True, backend="eager")
    got, want = (of(lambda w, f=f: f(ids, w, padding_idx=1), weight, tangent) for f in FUNCTIONS)
    assert not differing(got, want)
    row = got[1] if len(got) == 3 else got[1:3]
    assert (row != 0).any() == contributes


def test_activation_checkpointing(o: Operands) -> None:
    from torch.utils.checkpoint import checkpoint

    leaf = o.weight.clone().requires_grad_()
    checkpoint(lambda w: rk.embedding(o.ids, w), leaf, use_reentrant=False).backward(o.dy)
    assert not differing(leaf.grad, gradient(o))


def test_calls_do_not_leak(device: str, rng: np.random.Generator) -> None:
    """Covers both training steps and errors."""
    o = operands(rng, (64,), 800, 64, "bfloat16", device)
    leaf, main_grad = o.weight.clone().requires_grad_(), torch.zeros(800, 64, device=device)

    def burst(n: int) -> None:
        for _ in range(n):
            rk.embedding(o.ids, leaf, main_grad=main_grad).backward(o.dy)
            rk.embedding(o.ids, leaf).backward(o.dy)
            leaf.grad = None
            with pytest.raises(ValueError, match="weight"):
                rk.embedding(o.ids, o.weight[0])

    assert_no_leak(burst, device)


@pytest.mark.alone
def test_median_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As for linear: at most 6 us on a GPU without autograd and 25 us with autograd. If a launch and an allocation
    alone take that long, the limit is their time plus 5 us. On a CPU the time includes the work itself, so the test
    only prints it."""
    ids = torch.arange(8, device=device)
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device, dtype=torch.bfloat16))
    frozen = weight.detach()
    calls = {
        "eager": lambda: rk.embedding(ids, frozen),
        "torch": lambda: torch.nn.functional.embedding(ids, frozen),
        "with_grad": lambda: rk.embedding(ids, weight),
        "allocation": lambda: torch.empty(8, 64, device=device, dtype=torch.bfloat16),
    }
    cost = printed_host_costs("embedding", calls, device, capsys)
    if device == "cuda":
        least = cost["launch"] + cost["allocation"]
        assert cost["eager"] <= max(6, least + 5)
        assert cost["with_grad"] <= max(25, 5 * least)


# ---- GPU ------------------------------------------------------------------------------------------------------------


def train(o: Operands, main_grad: Any) -> tuple[Any, ...]:
    leaf = o.weight.detach().clone().requires_grad_()
    y = rk.embedding(o.ids, leaf, main_grad=main_grad)
    y.backward(o.dy)
    return y.detach(), *results(o)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 700, 20_000])
def test_no_call_synchronises_and_a_captured_graph_replays(tokens: int, rng: np.random.Generator) -> None:
    batches = [operands(rng, (tokens,), 3000, 512, "bfloat16", "cuda") for _ in range(4)]
    o = Operands(*(t.clone() for t in batches[0]))
    main_grad = torch.zeros(3000, 512, device="cuda")
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
    assert_work_follows_its_producer(operands(rng, (300,), 500, 256, "bfloat16", "cuda"), results)


@pytest.mark.gpu
def test_a_workspace_outlives_its_call_and_calls_repeat(rng: np.random.Generator) -> None:
    """The allocator may reuse the workspace as soon as the call returns, but only for work queued behind it."""
    o = operands(rng, (20_000,), 30_000, 1024, "bfloat16", "cuda")
    want = rk.embedding_backward(o.dy, o.ids, 30_000)
    for _ in range(50):
        got = rk.embedding_backward(o.dy, o.ids, 30_000)
        junk = [torch.full((400_000,), float("nan"), device="cuda") for _ in range(3)]
        assert not differing(got, want)
        del junk


@pytest.mark.gpu
def test_a_bad_id_leaves_the_context_alive(rng: np.random.Generator) -> None:
    o = operands(rng, (300,), 50, 64, "bfloat16", "cuda")
    ids = o.ids.clone()
    ids[7] = 2**62
    y, _ = results(o._replace(ids=ids))
    torch.cuda.synchronize()
    assert bool(y[7].isnan().all())
    assert not differing(rk.embedding(o.ids, o.weight)[8:].clone(), y[8:].clone())


@pytest.mark.gpu
def test_the_device_of_the_arguments_is_used_whichever_is_current(rng: np.random.Generator) -> None:
    assert_the_arguments_device_is_used(operands(rng, (40,), 64), results)
