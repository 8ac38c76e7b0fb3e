"""rope in torch: autograd, the registered operator, torch.compile, export, torch.func, modes, graphs, host cost."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native import _operator
from rl_kernel_native.contract import row
from rope_cases import DTYPES, Operands, operands, results

torch = pytest.importorskip("torch")

from torch_properties import (  # noqa: E402
    assert_no_leak,
    assert_the_arguments_device_is_used,
    assert_work_follows_its_producer,
    no_synchronisation,
    printed_host_costs,
    runs_with_and_without_checkpoints,
)


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), (2, 1), 32, "bfloat16", device)


@pytest.fixture
def single(rng: np.random.Generator) -> Operands:
    return operands(rng, (4,), (2, 1), 6, "float32")


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(tuple(a), tuple(b)) if isinstance(a, tuple) else differing(a, b)
    assert not found, f"{what}: {found}"


def leaves(o: Operands) -> tuple[Any, Any]:
    return o.q.clone().requires_grad_(), o.k.clone().requires_grad_()


# ---- autograd -------------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"interleaved": True, "intermediate": "input"},
    {"partial_dim": 16, "intermediate": "input"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_autograd_has_the_bytes_of_backward(options: dict[str, Any], device: str, rng: np.random.Generator) -> None:
    for dtype in DTYPES:
        o = operands(rng, (2, 3), (2, 1), 32, dtype, device, rotary_dim=options.get("partial_dim"))
        dq_out, dk_out = torch.randn_like(o.q), torch.randn_like(o.k)
        want = results(o._replace(q=dq_out, k=dk_out), backward=True, **options)
        q, k = leaves(o)
        outputs = results(o._replace(q=q, k=k), **options)
        assert_same(torch.autograd.grad(outputs, (q, k), (dq_out, dk_out), retain_graph=True), want)
        assert_same(torch.autograd.grad(outputs[0], q, dq_out, retain_graph=True)[0], want[0], "q alone")
        assert_same(torch.autograd.grad(outputs[1], k, dk_out, retain_graph=True)[0], want[1], "k alone")
        assert torch.autograd.grad(results(o._replace(k=k), **options)[1].float().sum(), k)[0].shape == k.shape
        only = rk.rope(q, None, o.cos, o.sin, position_ids=o.position_ids, **options)[0]
        assert_same(torch.autograd.grad(only, q, dq_out)[0], want[0], "no k")


def test_a_gradient_that_nobody_asks_for_is_not_computed(o: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [leaf * 1 for leaf in leaves(o)]  # torch.autograd.grad cannot handle these leaves directly
    outputs = results(o._replace(q=inputs[0], k=inputs[1]))
    asked: list[Any] = []

    class Recording:
        def rope(self, *arguments: Any) -> Any:
            asked.append(tuple(None if t is None else t.shape for t in arguments[:2]))
            return native.rope(*arguments)

    native = _operator._C
    monkeypatch.setattr(_operator, "_C", Recording())
    shapes = tuple(leaf.shape for leaf in inputs)
    for wanted, expected in ((inputs, shapes), (inputs[:1], (shapes[0], None)), (inputs[1:], (shapes[1], None))):
        asked.clear()
        torch.autograd.grad(outputs, wanted, o[:2], retain_graph=True)
        torch.autograd.backward(outputs, o[:2], inputs=wanted, retain_graph=True)
        assert asked == [expected] * 2


def test_the_registered_operator_refuses_a_gradient_of_its_constants(o: Operands) -> None:
    rk.rope(*o[:4], position_ids=o.position_ids)
    cos = o.cos.clone().requires_grad_()
    out = torch.ops.rl_kernel_native.rope(o.q, None, cos, o.sin, o.position_ids, False, None, False, None, -2, False)[0]
    with pytest.raises(ValueError, match=r"cos: is a constant of the rotation and gets no gradient"):
        torch.autograd.grad(out.float().sum(), cos)


def test_gradients_of_any_layout(device: str, rng: np.random.Generator) -> None:
    """Attention gives gradients in its own layout; a sum gives an expanded gradient."""
    o = operands(rng, (2, 5), (4, 2), 64, "bfloat16", device)
    q, k = leaves(o)
    outputs = results(o._replace(q=q, k=k))
    dense = tuple(torch.randn_like(t) for t in outputs)
    want = torch.autograd.grad(outputs, (q, k), dense, retain_graph=True)
    moved = tuple(d.transpose(1, 2).contiguous().transpose(1, 2) for d in dense)
    assert_same(torch.autograd.grad(outputs, (q, k), moved, retain_graph=True), want)
    by_columns = tuple(d.transpose(2, 3).contiguous().transpose(2, 3) for d in dense)
    assert_same(torch.autograd.grad(outputs, (q, k), by_columns, retain_graph=True), want)
    ones = tuple(torch.ones_like(t) for t in outputs)
    assert_same(
        torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), (q, k), retain_graph=True),
        torch.autograd.grad(outputs, (q, k), ones),
    )


def test_hugging_face_views_train(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (2, 5), (4, 2), 64, "bfloat16", device)
    outcomes = []
    for axis in (2, 1):
        q, k = leaves(o)
        turned = (q, k) if axis == 2 else (q.transpose(1, 2), k.transpose(1, 2))
        got = rk.rope(*turned, o.cos, o.sin, position_ids=o.position_ids, head_axis=axis)
        if axis == 1:
            got = tuple(t.transpose(1, 2) for t in got)
        (got[0].float().square().sum() + (got[1].float() ** 3).sum()).backward()
        outcomes.append((q.grad, k.grad))
    assert_same(*outcomes)


# ---- the registered operator ----------------------------------------------------------------------------------------


def test_opcheck(o: Operands) -> None:
    """Schema, fake tensors, autograd registration and dynamic shapes."""
    rk._call.load()
    op, check = torch.ops.rl_kernel_native.rope, torch.library.opcheck
    check(op, (*o, False, None, False, None, -2, False))
    check(op, (o.q, None, *o[2:], True, 16, True, None, 2, True))  # a table of 16 columns serves 16 rotated columns
    gathered = (o.cos[o.position_ids], o.sin[o.position_ids])
    check(op, (o.q, o.k, *gathered, None, True, None, True, None, -2, True))
    three = o.position_ids.expand(3, 2, 3).contiguous()
    check(op, (o.q, None, o.cos, o.sin, three, False, None, False, [8, 4, 4], 2, False))


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"interleaved": True, "intermediate": "input", "mrope_sections": (8, 4, 4)},
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_has_the_bytes_of_eager(case: str, backend: str, o: Operands) -> None:
    """fullgraph=True forbids a graph break. Inductor runs only where it has a compiler for the device."""
    if backend == "inductor" and (case != "everything" or shutil.which("g++") is None):
        pytest.skip("inductor takes seconds a graph and a C++ compiler; one case shows it")
    torch.compiler.reset()
    ids = o.position_ids.expand(3, 2, 3) if case == "everything" else o.position_ids

    def function(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
        q_out, k_out = rk.rope(q, k, cos, sin, position_ids=position_ids, **COMPILED[case])
        alone, _ = rk.rope(
            k_out.transpose(1, 2), None, cos, sin, position_ids=position_ids, head_axis=1, **COMPILED[case]
        )
        return q_out, alone

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    outcomes = []
    for f in (function, compiled):
        q, k = leaves(o)
        outputs = f(q, k, o.cos, o.sin, ids)
        (outputs[0].float().square().sum() + outputs[1].float().square().sum()).backward()
        outcomes.append((*outputs, q.grad, k.grad))
    assert_same(*outcomes)
    with torch.no_grad():
        assert_same(tuple(compiled(o.q, o.k, o.cos, o.sin, ids)), outcomes[0][:2])


def test_compiled_functions_with_dynamic_shapes(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (12,), (2, 1), 32, "bfloat16", device)

    def everything(q: Any, k: Any, cos: Any, sin: Any, ids: Any) -> Any:
        return *rk.rope(q, k, cos, sin, position_ids=ids), *rk.rope_backward(q, k, cos, sin, position_ids=ids)

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 5, 1):
        inputs = (o.q[:tokens], o.k[:tokens], o.cos, o.sin, o.position_ids[:tokens])
        assert_same(tuple(compiled(*inputs)), everything(*inputs))


def test_export(o: Operands) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, cos: Any, sin: Any, ids: Any) -> Any:
            return rk.rope(q, k, cos, sin, position_ids=ids)

    program = torch.export.export(Layer(), tuple(o))
    assert "rl_kernel_native.rope" in str(program.graph)
    assert_same(tuple(program.module()(*o)), Layer()(*o))


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(o: Operands) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = results(o)
    with FakeTensorMode() as fakes:
        fake = results(Operands(*(fakes.from_tensor(t) for t in o)))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    meta = results(Operands(*(t.to("meta") for t in o)))
    assert (meta[0].shape, meta[1].dtype) == (real[0].shape, real[1].dtype)


# ---- torch.func and higher derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "in_dims",
    [
        (0, 0, None, None, None),
        (1, None, None, None, 0),
        (None, 0, None, None, 1),
        (2, 1, 0, None, None),
        (0, 0, 0, 1, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("gathered", [False, True])
def test_vmap_has_the_bytes_of_a_loop(
    in_dims: tuple[Any, ...], gathered: bool, device: str, rng: np.random.Generator
) -> None:
    o = operands(rng, (5,), (2, 1), 16, "bfloat16", device)
    if gathered:
        o = o._replace(cos=o.cos[o.position_ids], sin=o.sin[o.position_ids], position_ids=None)
        in_dims = (*in_dims[:4], None)

    def varied(t: Any, i: int) -> Any:
        return t * (i + 1) if t.is_floating_point() else (t + i) % 500

    batched = [
        t if d is None else torch.stack([varied(t, i) for i in range(3)], d) for t, d in zip(o, in_dims, strict=True)
    ]

    def function(q: Any, k: Any, cos: Any, sin: Any, ids: Any = None) -> Any:
        return rk.rope(q, k, cos, sin, position_ids=ids)

    count = 4 if gathered else 5
    got = torch.vmap(function, in_dims=in_dims[:count])(*batched[:count])
    for i in range(3):
        one = [t if d is None else t.select(d, i).contiguous() for t, d in zip(batched, in_dims, strict=True)]
        assert_same(tuple(g[i] for g in got), function(*one[:count]), i)
    if in_dims[0] == 0:
        alone = torch.vmap(lambda q: function(q, None, *o[2:count])[0])(batched[0])
        assert_same(alone[1], function(batched[0][1], None, *o[2:count])[0])


def test_vmap_of_sections_and_other_axes_of_heads(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (3, 5), (2, 1), 16, "bfloat16", device, sections=True)
    options = {"mrope_sections": (4, 2, 2)}
    want = results(o, **options)
    got = torch.vmap(
        lambda q, k, ids: rk.rope(q, k, o.cos, o.sin, position_ids=ids, head_axis=0, **options), in_dims=(0, 0, 1)
    )(o.q.transpose(1, 2), o.k.transpose(1, 2), o.position_ids)
    assert_same(tuple(g.transpose(1, 2).contiguous() for g in got), want)


def step(q: Any, k: Any, o: Operands, **options: Any) -> Any:
    q_out, k_out = rk.rope(q, k, o.cos, o.sin, position_ids=o.position_ids, **options)
    return q_out.float().square().sum() + (k_out.float() ** 3).sum()


def test_func_grad_has_the_bytes_of_backward(o: Operands) -> None:
    q, k = leaves(o)
    want = torch.autograd.grad(step(q, k, o), (q, k))
    assert_same(torch.func.grad(lambda q, k: step(q, k, o), argnums=(0, 1))(o.q, o.k), want)


def test_vmap_of_grad_is_per_sample_gradients(o: Operands) -> None:
    got = torch.vmap(torch.func.grad(lambda q, k, ids: step(q, k, o._replace(position_ids=ids)), argnums=(0, 1)))(
        o.q, o.k, o.position_ids
    )
    for i in range(2):
        part = o._replace(q=o.q[i], k=o.k[i], position_ids=o.position_ids[i])
        q, k = leaves(part)
        assert_same(tuple(g[i] for g in got), torch.autograd.grad(step(q, k, part), (q, k)))


def close(got: Any, want: Any, terms: int = 1) -> bool:
    allowed = row("rope", "derivatives").allowed(largest=float(want.abs().max()), terms=terms)
    return float((got - want).abs().max()) <= allowed


@pytest.mark.parametrize("options", [{}, {"interleaved": True, "intermediate": "input"}], ids=str)
def test_derivatives_of_any_order_and_mode_against_float64(options: dict[str, Any], single: Operands) -> None:
    """Jacobians in both modes, and second derivatives through a square, are compared with derivatives of the rotation's
    matrix."""
    o = single
    every = (0, 1)

    def ours(q: Any, k: Any) -> Any:
        return rk.rope(q, k, o.cos, o.sin, position_ids=o.position_ids, **options)

    def theirs(q: Any, k: Any) -> Any:
        c, s = (t[o.position_ids].double()[:, None] for t in (o.cos, o.sin))

        def rotate(x: Any) -> Any:
            a, b = (x[..., 0::2], x[..., 1::2]) if options else (x[..., :3], x[..., 3:])
            pair = (a * c - b * s, b * c + a * s)
            return torch.stack(pair, -1).flatten(-2) if options else torch.cat(pair, -1)

        return rotate(q), rotate(k)

    wide = (o.q.double(), o.k.double())
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        for got, want in zip(jacobian(ours, every)(o.q, o.k), jacobian(theirs, every)(*wide), strict=True):
            for a, b in zip(got, want, strict=True):
                assert close(a, b), jacobian.__name__

    def squared(function: Any) -> Any:
        return lambda q, k: sum(out.square().sum() * 0.5 for out in function(q, k))

    for first, second in ((torch.func.jacrev, torch.func.jacrev), (torch.func.jacfwd, torch.func.jacrev)):
        hessian = first(second(squared(ours), every), every)(o.q, o.k)
        for i in every:
            size = (o.q, o.k)[i].numel()
            got = hessian[i][i].reshape(size, size)
            assert close(got, torch.eye(size), 2), "a rotation's matrix times its transpose"
            assert not bool(hessian[i][1 - i].any())


def test_gradcheck_and_gradgradcheck(single: Operands) -> None:
    """Steps of 2^-7 in float32. The operator is linear, so nothing is truncated; rounding errs by 2^-23 / 2^-7."""
    inputs = leaves(single)

    def function(q: Any, k: Any) -> Any:
        return rk.rope(q, k, single.cos, single.sin, position_ids=single.position_ids)

    options = {"eps": 2.0**-7, "atol": 2e-3, "rtol": 2e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradcheck warns that inputs are not float64
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, **options)
        assert torch.autograd.gradgradcheck(function, inputs, **options)


def test_forward_mode_has_the_bytes_of_the_operator(o: Operands) -> None:
    """The derivative of a rotation along a tangent is the rotated tangent, for one argument or for both."""
    tangents = (torch.randn_like(o.q), torch.randn_like(o.k))
    want = results(o._replace(q=tangents[0], k=tangents[1]))
    function = lambda q, k: rk.rope(q, k, o.cos, o.sin, position_ids=o.position_ids)  # noqa: E731
    outputs, got = torch.func.jvp(function, (o.q, o.k), tangents)
    assert_same(outputs, results(o))
    assert_same(got, want)
    _, got = torch.func.jvp(lambda k: function(o.q, k), (o.k,), (tangents[1],))
    assert_same(got[1], want[1])


# ---- modes of torch -------------------------------------------------------------------------------------------------


def test_no_grad_inference_mode_and_grad_have_the_same_bytes(o: Operands) -> None:
    q, k = leaves(o)
    want = results(o._replace(q=q, k=k))
    assert all(w.requires_grad for w in want)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = results(o._replace(q=q, k=k))
        assert not got[0].requires_grad
        assert_same(got, want)
    assert_same(results(o), want)


def test_autocast_changes_nothing(rng: np.random.Generator) -> None:
    o = operands(rng, (4,), (2, 1), 32, "float32")
    want = results(o)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(results(o), want)


def test_constants_may_not_be_changed_before_backward_and_the_rest_may(o: Operands) -> None:
    """The queries are not saved, so a caller may overwrite them."""
    for changed in ("cos", "position_ids"):
        mine = o._replace(**{changed: getattr(o, changed).clone()})
        q, k = leaves(o)
        loss = step(q, k, mine)
        getattr(mine, changed).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    q, k = leaves(o)
    inner = q * 1
    out = rk.rope(inner, None, o.cos, o.sin, position_ids=o.position_ids)[0]
    inner.zero_()
    out.float().sum().backward()


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(selective: bool, o: Operands) -> None:
    outcomes = []
    for run in runs_with_and_without_checkpoints("rope", selective):
        q, k = leaves(o)
        run(lambda q, k: step(q * 2, k, o), q, k).backward()
        outcomes.append((q.grad, k.grad))
    assert_same(*outcomes)


def test_calls_do_not_leak(device: str, rng: np.random.Generator) -> None:
    """Covers both training steps and errors."""
    o = operands(rng, (64,), (8, 2), 80, "bfloat16", device)
    q, k = leaves(o)

    def burst(n: int) -> None:
        for _ in range(n):
            q_out, k_out = results(o._replace(q=q, k=k))
            torch.autograd.backward((q_out, k_out), (o.q, o.k))
            q.grad = k.grad = None
            with pytest.raises(ValueError, match="position_ids"):
                rk.rope(o.q, None, o.cos, o.sin, position_ids=o.position_ids[:7])

    assert_no_leak(burst, device)


@pytest.mark.alone
def test_median_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As for rms_norm, with two outputs and five arrays: at most 10 us on a GPU without autograd and 30 us with
    autograd. If a launch and two allocations alone take that long, the limit is their time plus 7 us. On a CPU the time
    includes the work itself, so the test only prints it."""
    q = torch.randn(8, 4, 64, device=device, dtype=torch.bfloat16)
    leaf = q.clone().requires_grad_()
    k, table = q[:, :2], torch.randn(32, 32, device=device)
    ids = torch.arange(8, device=device)
    calls = {
        "eager": lambda: rk.rope(q, k, table, table, position_ids=ids),
        "with_grad": lambda: rk.rope(leaf, k, table, table, position_ids=ids),
        "allocation": lambda: torch.empty(8, 4, 64, device=device, dtype=torch.bfloat16),
    }
    cost = printed_host_costs("rope", calls, device, capsys)
    if device == "cuda":
        least = cost["launch"] + 2 * cost["allocation"]
        assert cost["eager"] <= max(10, least + 7)
        assert cost["with_grad"] <= max(30, 5 * least)


# ---- GPU ------------------------------------------------------------------------------------------------------------


def train(o: Operands) -> tuple[Any, ...]:
    q, k = o.q.detach().clone().requires_grad_(), o.k.detach().clone().requires_grad_()
    outputs = results(o._replace(q=q, k=k))
    torch.autograd.backward(outputs, (o.q, o.k))
    return *(t.detach() for t in outputs), q.grad, k.grad, *results(o, backward=True, intermediate="input")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 300, 6000])  # a decode step, and enough tokens for each plan
def test_no_call_synchronises_and_a_captured_graph_replays(tokens: int, rng: np.random.Generator) -> None:
    batches = [operands(rng, (tokens,), (8, 2), 64, "bfloat16", "cuda") for _ in range(4)]
    o = Operands(*(t.clone() for t in batches[0]))
    train(o)  # the first call of a process loads its kernels
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
        assert_same(got, train(batches[i % 4]))


@pytest.mark.gpu
def test_work_goes_to_the_current_stream_behind_its_producer(rng: np.random.Generator) -> None:
    assert_work_follows_its_producer(operands(rng, (300,), (4, 2), 64, "bfloat16", "cuda"), results)


@pytest.mark.gpu
def test_the_device_of_the_arguments_is_used_whichever_is_current(rng: np.random.Generator) -> None:
    assert_the_arguments_device_is_used(operands(rng, (4,), (2, 1), 64), results)
