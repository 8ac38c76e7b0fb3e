"""Time, power, energy and clocks of large products under a load that lasts: at the power limit, time is energy.

    python bench/steady_power.py [--rows 8192] [--vocab 128256] [--seconds 2]

Each call repeats by itself for some seconds, of which the first third is not counted. Power is what the driver's energy
counter gained over time (NVML, by nvidia-ml-py); one run of a kernel differs from the next by 1 to 2 %, and so does the
counter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import pynvml
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rl_kernel_native as rk

FEWEST_CHANGES = 3  # of the energy counter, for a measurement
POLL_SECONDS = 0.002


class Steady(NamedTuple):
    ms: float  # of one call
    watts: float
    mhz: float  # of the multiprocessors

    @property
    def joules(self) -> float:
        return self.watts * self.ms / 1e3


def steady(call: Callable[[], Any], gpu: Any, seconds: float) -> Steady:
    """Of ``call``, which enqueues work on the current stream, repeated for ``seconds``."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
    unmeasured = max(1, int(seconds * 1e3 / start.elapsed_time(stop)) // 3)
    measured = 2 * unmeasured
    for _ in range(unmeasured):
        call()
    start.record()
    for _ in range(measured):
        call()
    stop.record()
    changes: list[tuple[float, int, int]] = []  # seconds, millijoules, MHz
    while not stop.query():
        energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        if start.query() and (not changes or energy != changes[-1][1]):
            clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            changes.append((time.perf_counter(), energy, clock))
        time.sleep(POLL_SECONDS)
    torch.cuda.synchronize()
    if len(changes) < FEWEST_CHANGES:
        raise RuntimeError("the energy counter stood still: more --seconds, or a GPU that counts energy")
    first, last = changes[1], changes[-1]  # the first is no change, but the counter as it was found
    watts = (last[1] - first[1]) / 1e3 / (last[0] - first[0])
    mhz = sum(clock for *_, clock in changes) / len(changes)
    return Steady(start.elapsed_time(stop) / measured, watts, mhz)


def main(
    rows: int = 8192,
    in_features: int = 4096,
    vocab: int = 128256,
    seconds: Annotated[float, typer.Option(help="Of each call.")] = 2.0,
) -> None:
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
    w = (torch.randn(vocab, in_features, device="cuda") / in_features**0.5).bfloat16()
    zeros, target = torch.zeros_like(w), torch.randint(0, vocab, (rows,), device="cuda")
    y = torch.empty(rows, vocab, device="cuda", dtype=torch.bfloat16)
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
    ones = torch.ones(rows, device="cuda")

    def both(mebibytes: int) -> Callable[[], Any]:
        def call() -> Any:
            logprob = rk.linear_logprob(*leaves, target, workspace_bytes=mebibytes << 20)
            return torch.autograd.grad(logprob, leaves, ones)

        return call

    def product() -> Tensor:
        return torch.mm(x, w.t(), out=y)

    calls: dict[str, Callable[[], Any]] = {
        "torch": product,
        "linear, native engine": lambda: rk.linear(x, w, engine="native"),
        "linear_logprob": lambda: rk.linear_logprob(x, w, target),
        "with entropy and p^2": lambda: rk.linear_logprob(x, w, target, return_entropy=True, return_sum_p_sq=True),
        "portable": lambda: rk.linear_logprob(x, w, target, exp="portable"),
        "torch again": product,  # by then the GPU is as warm as it gets
        **{f"and backward, {size} MiB": both(size) for size in (1024, 512, 256)},
        "linear, weights of zeros": lambda: rk.linear(x, zeros, engine="native"),
    }
    name = f"{torch.cuda.get_device_name()}: {rows} x {vocab} x {in_features}, bfloat16"
    table = Table("", "ms", "W", "J", "MHz", title=name)
    refused = []
    for label, call in calls.items():
        try:
            found = steady(call, gpu, seconds)
        except ValueError as error:  # a workspace that is too small for so many rows
            refused.append(f"{label}: {error}")
            continue
        table.add_row(label, f"{found.ms:.2f}", f"{found.watts:.0f}", f"{found.joules:.2f}", f"{found.mhz:.0f}")
    Console().print(table, *refused, sep="\n")


if __name__ == "__main__":
    typer.run(main)
