"""Properties of operators in torch that several tests share; they take an operator's calls as functions."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cases import differing
from host_cost import host_costs_us


def gradients(function: Callable[..., Any], *inputs: Any) -> tuple[Any, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


def runs_with_and_without_checkpoints(operator: str, selective: bool) -> Iterator[Callable[..., Any]]:
    """Two ways to call a function: directly, and under activation checkpointing. With ``selective``, checkpointing
    keeps the results of ``operator``."""
    from torch.utils import checkpoint as ck

    saved = getattr(torch.ops.rl_kernel_native, operator).default

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        return ck.CheckpointPolicy.MUST_SAVE if op == saved else ck.CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": lambda: ck.create_selective_checkpoint_contexts(policy)} if selective else {}
    yield lambda function, *inputs: function(*inputs)
    yield lambda function, *inputs: ck.checkpoint(function, *inputs, use_reentrant=False, **options)


def assert_no_leak(burst: Callable[[int], None], device: str, repetitions: int = 1000) -> None:
    """Asserts that a ``burst`` leaves no memory behind. Allocators round by less than 8 MB; leaked results would be 100
    MB."""

    def memory() -> int:
        gc.collect()
        if device == "cuda":
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    burst(repetitions // 10)
    before = memory()
    burst(repetitions)
    assert memory() - before < 8 << 20


def printed_host_costs(
    operator: str, calls: dict[str, Callable[[], Any]], device: str, capsys: pytest.CaptureFixture[str]
) -> dict[str, float]:
    """Times in us; on a GPU also the time of a launch."""
    if device == "cuda":
        calls = {**calls, "launch": lambda: torch.cuda._sleep(0)}
    cost = host_costs_us(calls)
    with capsys.disabled():
        print(
            f"\nhost cost of {operator} on {device} in us:", ", ".join(f"{name} {us:.2f}" for name, us in cost.items())
        )
    return cost


def assert_work_follows_its_producer(final: Any, results: Callable[[Any], Any]) -> None:
    """The producer of the operands sleeps, then writes ``final``. A call on another stream would read the earlier
    contents: NaNs, and zeros for integers."""
    want = results(final)
    o = type(final)(*(torch.full_like(t, float("nan") if t.is_floating_point() else 0) for t in final))
    torch.cuda.synchronize()  # every kernel is loaded, too
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles: 0.1 s on an H200
        for mine, theirs in zip(o, final, strict=True):
            mine.copy_(theirs)
        got = results(o)
        assert not side.query(), "the calls waited for the stream, or the producer was too quick to tell"
    side.synchronize()
    assert not differing(tuple(got), tuple(want))


def assert_the_arguments_device_is_used(o: Any, results: Callable[[Any], Any]) -> None:
    """Asserts, for either current device, that the arguments' device is used."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        got = tuple(results(type(o)(*(t.to("cuda:1") for t in o))))
    assert got[0].device.index == 1
    assert not differing(got, tuple(results(type(o)(*(t.to("cuda:0") for t in o)))))


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside the context, an operation that makes the host wait for a GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call, captured without a synchronisation, and the call's result."""
    call()  # kernels must load outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_synchronisation(), torch.cuda.graph(graph):
        found = call()
    return graph, found
