"""rk.trace: which operators ran, where and how often; it leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from rl_kernel_native import _trace, contract
from rl_kernel_native._native import module as native

torch = pytest.importorskip("torch")


def forward(device: str) -> Any:
    x = torch.randn(3, 16, device=device).bfloat16()
    w = torch.randn(16, 16, device=device).bfloat16()
    h = rk.linear(rk.rms_norm(x, w[0], 1e-6), w)
    h = rk.silu_mul(torch.cat([h, h], -1)) + rk.embedding(torch.arange(3, device=device), w)
    heads = h.view(3, 2, 8)
    q, k = rk.rope(heads, heads, w[:3, :4].contiguous(), w[:3, 4:8].contiguous())
    return rk.logprob(rk.attention(q[None], k[None], k[None]).view(3, 16), torch.arange(3, device=device))


def backend(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda sm_{}{}".format(*torch.cuda.get_device_capability())


ONCE = ("attention", "embedding", "linear", "logprob", "rms_norm", "rope", "silu_mul")


def test_every_call_counts_once_on_its_backend(device: str) -> None:
    before = dict(vars(native))
    with rk.trace() as found:
        forward(device)
        assert found.calls == {name: {backend(device): 1} for name in ONCE}
        forward(device)
    assert found.calls == {name: {backend(device): 2} for name in ONCE}
    forward(device)
    assert found.calls == {name: {backend(device): 2} for name in ONCE}
    assert dict(vars(native)) == before
    assert found.as_json() == {"contract": contract.digest(), "calls": found.calls, "plans": found.plans}


# Calls of every operator whose plan a trace must name, by operator; each gives its arguments on a device.
def arrays(device: str, *shape: int) -> Any:
    return torch.linspace(-1, 1, math.prod(shape)).view(shape).bfloat16().to(device)


PLANNED: dict[str, Callable[[str], Any]] = {
    "attention": lambda d: rk.attention(arrays(d, 1, 3, 2, 64), arrays(d, 1, 9, 1, 64), arrays(d, 1, 9, 1, 64)),
    "embedding": lambda d: rk.embedding(torch.arange(3, device=d), arrays(d, 4, 16)),
    "kv_cache_append": lambda d: rk.kv_cache_append(
        arrays(d, 3, 2, 8), arrays(d, 3, 2, 8), *(arrays(d, 2, 4, 2, 8) for _ in "kv"), torch.arange(3, device=d)
    ),
    "linear": lambda d: rk.linear(arrays(d, 40, 64), arrays(d, 24, 64)),
    "linear_logprob": lambda d: rk.linear_logprob(arrays(d, 3, 64), arrays(d, 24, 64), torch.arange(3, device=d)),
    "logprob": lambda d: rk.logprob(arrays(d, 3, 40), torch.arange(3, device=d)),
    "policy_loss": lambda d: rk.policy_loss(
        *(arrays(d, 2, 4).float() for _ in range(3)), torch.ones(2, 4, device=d), spec=rk.PolicySpec()
    ),
    "rms_norm": lambda d: rk.rms_norm(arrays(d, 3, 64), arrays(d, 64), 1e-6),
    "rope": lambda d: rk.rope(*(arrays(d, 3, 2, 8) for _ in "qk"), arrays(d, 3, 4), arrays(d, 3, 4)),
    "sample": lambda d: rk.sample(arrays(d, 3, 40), seed=1, sample_id=0, position=0),
    "silu_mul": lambda d: rk.silu_mul(arrays(d, 3, 32)),
}
ON_CPU = {
    "attention": "{isa} ieee", "embedding": "copies", "kv_cache_append": "copies", "linear": "{isa} ieee",
    "linear_logprob": "{isa} ieee + {isa} rows", "logprob": "{isa} rows",
}  # fmt: skip


def plans_of(call: Callable[[], Any]) -> dict[str, dict[str, dict[str, int]]]:
    with rk.trace() as found:
        call()
    return found.plans


@pytest.mark.parametrize("operator", _trace.FUNCTIONS)
def test_each_call_names_the_plan_that_served_it(device: str, operator: str) -> None:
    call = partial(PLANNED[operator], device)
    found = plans_of(call)
    assert {name: [*of] for name, of in found.items()} == {operator: [backend(device)]}
    (plan,) = found[operator][backend(device)]
    assert found[operator][backend(device)][plan] == 1
    assert plans_of(call) == found, "a plan depends on earlier calls"
    if device == "cpu":
        assert plan == ON_CPU.get(operator, "{isa}").format(isa=native.cpu_isa())
    else:
        assert plan not in ("", native.cpu_isa())


def test_a_plan_follows_the_instruction_set_and_the_arithmetic() -> None:
    own = native.cpu_isa()
    product = partial(PLANNED["linear"], "cpu")
    try:
        native.set_cpu_isa("baseline")
        assert plans_of(product) == {"linear": {"cpu": {"baseline ieee": 1}}}
        with rk.arithmetic("sm_90"):
            assert plans_of(product) == {"linear": {"cpu": {"baseline as sm_90": 1}}}
    finally:
        native.set_cpu_isa(own)


def test_plans_of_other_calls_are_not_those_of_the_next_one() -> None:
    x, w = arrays("cpu", 3, 16).float().requires_grad_(), arrays("cpu", 16).float()
    with rk.trace() as found:
        y = rk.linear(x, arrays("cpu", 16, 16).float())
        y.sum().backward()  # a product that is not counted
        rk.rms_norm(x.detach(), w, 1e-6)
        rk.rms_norm(x.detach()[:0], w, 1e-6)
    isa = native.cpu_isa()
    assert found.plans == {"linear": {"cpu": {f"{isa} ieee": 1}}, "rms_norm": {"cpu": {isa: 2}}}
    assert native.take_plans() == [], "without a trace nothing is noted"
    rk.rms_norm(x.detach(), w, 1e-6)
    assert native.take_plans() == []


def test_a_shared_prefix_is_named() -> None:
    q, pages = arrays("cpu", 2, 1, 16), arrays("cpu", 3, 4, 1, 16)
    of_group = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [4], [0, 2])]
    with rk.trace() as found:
        rk.attention(
            q, pages, pages, cu_seqlens_q=torch.arange(3, dtype=torch.int32), seqused_k=torch.tensor([5, 6]).int(),
            block_table=torch.tensor([[1], [2]], dtype=torch.int32), shared_prefix=tuple(of_group),
        )  # fmt: skip
    assert found.plans == {"attention": {"cpu": {f"{native.cpu_isa()} ieee, shared prefix": 1}}}


def test_losses_count_with_and_without_gradients() -> None:
    spec = rk.presets.trl(loss_type="grpo")
    arrays = [torch.full((1, 4), value) for value in (-0.5, -0.6, 1.0, 1.0)]
    with rk.trace() as found:
        rk.policy_loss(*arrays, spec=spec)
        rk.policy_loss(arrays[0].requires_grad_(), *arrays[1:], spec=spec).loss.backward()
    assert found.calls == {"policy_loss": {"cpu": 2}}


def test_calls_inside_of_a_compiled_function_count(device: str) -> None:
    x, w = torch.ones(2, 16, device=device), torch.ones(16, device=device)
    torch.compiler.reset()
    norm = torch.compile(lambda x: rk.rms_norm(x, w, 1e-6), backend="aot_eager", fullgraph=True)
    norm(x)
    with rk.trace() as found:
        norm(x)
        norm(x)
    assert found.calls == {"rms_norm": {backend(device): 2}}


def test_what_a_compiler_asks_about_a_call_is_no_call(device: str) -> None:
    x, w = torch.ones(2, 16, device=device), torch.ones(16, device=device)
    torch.compiler.reset()
    norm = torch.compile(lambda x: rk.rms_norm(x, w, 1e-6), backend="aot_eager", fullgraph=True)
    with rk.trace() as found:
        norm(x)
    assert found.calls == {"rms_norm": {backend(device): 1}}


def test_a_backend_is_that_of_a_tensor_inside_of_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(1, device="cuda")
    if torch.version.hip is None:
        assert _trace._backend(((None, x), 0, ())) == _trace._backend((x,)) == "cuda sm_90"
    assert _trace._backend(((torch.ones(1), None), x)) == "cpu"


def test_arrays_of_numpy_count() -> None:
    with rk.trace() as found:
        rk.rms_norm(np.ones((2, 8), np.float32), np.ones(8, np.float32), 1e-6)
    assert found.calls == {"rms_norm": {"cpu": 1}}


def test_one_at_a_time_and_an_error_ends_it() -> None:
    with rk.trace(), pytest.raises(RuntimeError, match="trace: expected one at a time"), rk.trace():
        pass
    with pytest.raises(ZeroDivisionError), rk.trace():
        raise ZeroDivisionError
    with rk.trace() as found:
        pass
    assert found.calls == {}


def test_the_functions_that_are_counted_exist() -> None:
    for operator, names in _trace.FUNCTIONS.items():
        assert callable(getattr(rk, operator))
        assert all(callable(getattr(native, name)) for name in names)


@pytest.mark.gpu
def test_replays_of_a_graph_count() -> None:
    x, w = torch.ones(2, 16, device="cuda"), torch.ones(16, device="cuda")
    rk.rms_norm(x, w, 1e-6)
    with rk.trace() as found:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rk.rms_norm(x, w, 1e-6)
        assert found.calls == {}, "a capture runs nothing"
        for _ in range(3):
            graph.replay()
    assert found.calls == {"rms_norm": {backend("cuda"): 3}}
    ((_, count),) = found.plans["rms_norm"][backend("cuda")].items()
    assert count == 3


@pytest.mark.gpu
def test_plans_of_a_gpu_are_those_that_its_host_code_names() -> None:
    """Shapes at which a Hopper GPU takes other kernels; every other GPU has one plan for some of them."""
    hopper = torch.cuda.get_device_capability() == (9, 0)

    def plan(call: Callable[[], Any]) -> str:
        ((_, of_backend),) = plans_of(call).items()
        ((name, _),) = of_backend[backend("cuda")].items()
        return name

    def product(rows: int, features: int) -> str:
        weight = arrays("cuda", 4096, features)
        return plan(lambda: rk.linear(arrays("cuda", rows, features), weight, engine="native"))

    def attends(queries: int, keys: int, sequences: int = 1, columns: int = 128) -> str:
        q, k = arrays("cuda", sequences, queries, 8, columns), arrays("cuda", sequences, keys, 2, columns)
        return plan(lambda: rk.attention(q, k, k))

    def rotates(tokens: int) -> str:
        q, k, angles = arrays("cuda", tokens, 32, 128), arrays("cuda", tokens, 8, 128), arrays("cuda", tokens, 64)
        return plan(lambda: rk.rope(q, k, angles, angles))

    products = [product(8, 4096), product(2048, 4096), product(8, 4095), product(2048, 4095)]
    if hopper:
        assert products[0].startswith("few rows"), products
        assert products[2].startswith("rows at 2 bytes few rows"), products
        assert products[3].startswith("copies + "), products
        assert (attends(512, 512), attends(1, 4096)) == ("wgmma", "clusters")
        assert {attends(512, 512, columns=d) for d in (40, 72, 96, 120)} == {"wgmma"}
        assert (attends(2048, 2048), attends(2048, 2048, columns=64)) == ("wgmma", "tall")
        assert plan(partial(PLANNED["logprob"], "cuda")) == "clusters"
    else:
        assert all(name.startswith("any layout, ") for name in products), products
        assert (attends(512, 512), attends(1, 4096)) == ("tiles", "few rows")
        assert plan(partial(PLANNED["logprob"], "cuda")) == "stream"
    assert attends(1, 4096, 512) == "few rows"
    assert (rotates(1), rotates(8192)) == ("1 heads", "2 heads by lanes" if hopper else "4 heads")
    many = torch.zeros(4 * 1024, 40, device="cuda")
    assert plan(lambda: rk.logprob(many, torch.zeros(len(many), dtype=torch.long, device="cuda"))) == "stream"
    drawn = plan(lambda: rk.sample(many[:3], seed=1, sample_id=0, position=0, top_p=0.9, exp="portable"))
    assert drawn == "portable exp, top_p"
