"""Memory-bound operators in a burst of a few milliseconds after a rest, and under a lasting load. The difference is
the cost of the power limit.

    python bench/bursts.py [--rows 8192] [--seconds 0.7]

Times, in microseconds, come from graph replays over rotating buffers. A burst's time is the median of eight replays
after 0.4 seconds of rest. With fewer than 8192 rows a part of the data stays in the L2 cache. The share compares the
bytes that must be read and written a second with a copy of 1 GiB in the same run. Power and clock belong to the lasting
load (steady_power.py). Needs nvidia-ml-py.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import pynvml
import torch
import typer
from rich.console import Console
from rich.table import Table

import rl_kernel_native as rk
from steady_power import steady

REST_S = 0.4
REPLAYS = 8
REPLAY_BYTES = 8e9  # bytes per replay of a graph, about
COPY_BYTES = 1 << 30

Call = Callable[[int], Any]  # takes the number of the call: the number rotates buffers


def replay_of(call: Call, calls: int) -> Callable[[], None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph.replay


def burst_ms(replay: Callable[[], None]) -> float:
    replay()
    torch.cuda.synchronize()
    time.sleep(REST_S)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def copy_rate() -> float:
    """Bytes per second. Measures outside a graph, whose copies take a slower path."""
    a, b = (torch.zeros(COPY_BYTES, device="cuda", dtype=torch.uint8) for _ in range(2))

    def copies() -> None:
        for _ in range(10):
            b.copy_(a)

    return 20 * COPY_BYTES / burst_ms(copies) * 1e3


def cases(rows: int) -> dict[str, tuple[Call, float]]:
    """Calls and the bytes that each must move."""

    def normal(*sizes: int, count: int = 4) -> list[torch.Tensor]:
        return [torch.randn(*sizes, device="cuda").bfloat16() for _ in range(count)]

    x, residual, dy, d_residual = (normal(rows, 4096) for _ in range(4))
    weight = normal(4096, count=1)[0]
    leaves = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for a, b in zip(x, residual, strict=True)]
    of_weight = weight.clone().requires_grad_()

    def both(i: int) -> Any:
        a = leaves[i % 4][0]
        return torch.autograd.grad(rk.rms_norm(a, of_weight, 1e-6), (a, of_weight), dy[i % 4])

    def both_residual(i: int) -> Any:
        a, b = leaves[i % 4]
        found = rk.rms_norm(a, of_weight, 1e-6, residual=b)
        return torch.autograd.grad(found, (a, b, of_weight), (dy[i % 4], d_residual[i % 4]))

    q, k = normal(rows, 32, 128), normal(rows, 8, 128)
    cos, sin = (torch.randn(rows, 64, device="cuda") for _ in range(2))
    norm, wide = 2.0 * rows * 4096, 2.0 * rows
    found: dict[str, tuple[Call, float]] = {
        "rms_norm": (lambda i: rk.rms_norm(x[i % 4], weight, 1e-6), 2 * norm),
        "rms_norm, forward and backward": (both, 5 * norm),
        "rms_norm, residual": (lambda i: rk.rms_norm(x[i % 4], weight, 1e-6, residual=residual[i % 4]), 4 * norm),
        "rms_norm, residual, forward and backward": (both_residual, 8 * norm),
        "rope, 32 + 8 heads of 128": (lambda i: rk.rope(q[i % 4], k[i % 4], cos, sin), wide * (2 * 40 * 128 + 2 * 128)),
    }
    for columns in (12288, 14336):
        gate_up = normal(rows, 2 * columns, count=2)
        found[f"silu_mul, {columns} columns"] = (lambda i, g=gate_up: rk.silu_mul(g[i % 2]), 3 * columns * wide)
        zeros = [torch.zeros_like(g) for g in gate_up]
        found[f"silu_mul, {columns} columns of zeros"] = (lambda i, g=zeros: rk.silu_mul(g[i % 2]), 3 * columns * wide)
    return found


def main(rows: int = 8192, seconds: Annotated[float, typer.Option(help="Of each load that lasts.")] = 0.7) -> None:
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    ceiling = copy_rate()
    title = f"{torch.cuda.get_device_name()}: {rows} rows, bfloat16; a copy {ceiling / 1e12:.2f} TB/s"
    table = Table("", "burst us", "of a copy", "lasting us", "of a copy", "W", "MHz", title=title)
    for label, (call, moved) in cases(rows).items():
        calls = max(4, int(REPLAY_BYTES / moved))
        replay = replay_of(call, calls)
        burst, lasting = burst_ms(replay), steady(replay, gpu, seconds)
        cells: list[str] = []
        for seconds_of_one in (burst / calls / 1e3, lasting.ms / calls / 1e3):
            cells += [f"{1e6 * seconds_of_one:.1f}", f"{moved / seconds_of_one / ceiling:.1%}"]
        table.add_row(label, *cells, f"{lasting.watts:.0f}", f"{lasting.mhz:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
