"""rk.trace: which operators ran, where and how often; it leaves nothing behind."""

from __future__ import annotations

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
    assert found.as_json() == {"contract": contract.digest(), "calls": found.calls}


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
