"""Time, power, energy and clocks of large products under a load that lasts: at the power limit, time is energy.

    python bench/steady_power.py [--rows 8192] [--vocab 128256] [--seconds 1.5] [--rounds 4]

Each call repeats by itself for some seconds, of which the first third is not counted. Power is what the driver's energy
counter gained over time (NVML, by nvidia-ml-py). A GPU's speed drifts by 5 % within a minute. Each call is therefore
measured between two of G and divided by their mean; every second round takes the opposite order. The table shows
medians over the rounds, and the range of the rounds' ratios.
"""

from __future__ import annotations

import statistics
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

FEWEST_CHANGES = 3  # changes of the energy counter, for a measurement
POLL_SECONDS = 0.002


class Steady(NamedTuple):
    ms: float  # time of one call
    watts: float
    mhz: float  # clock of the multiprocessors

    @property
    def joules(self) -> float:
        return self.watts * self.ms / 1e3


def steady(call: Callable[[], Any], gpu: Any, seconds: float) -> Steady:
    """Measures ``call``, which enqueues work on the current stream, repeated for ``seconds``."""
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
    first, last = changes[1], changes[-1]  # changes[0] is the counter's first reading, not a change
    watts = (last[1] - first[1]) / 1e3 / (last[0] - first[0])
    mhz = sum(clock for *_, clock in changes) / len(changes)
    return Steady(start.elapsed_time(stop) / measured, watts, mhz)


def median(turns: list[Steady]) -> Steady:
    return Steady(*(statistics.median(values) for values in zip(*turns, strict=True)))


def main(
    rows: int = 8192,
    in_features: int = 4096,
    vocab: int = 128256,
    seconds: Annotated[float, typer.Option(help="Of each call in each round.")] = 1.5,
    rounds: int = 4,
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

    def product() -> Tensor:  # G
        return torch.mm(x, w.t(), out=y)

    calls: dict[str, Callable[[], Any]] = {
        "linear, native engine": lambda: rk.linear(x, w, engine="native"),
        "linear_logprob": lambda: rk.linear_logprob(x, w, target),
        "with entropy and p^2": lambda: rk.linear_logprob(x, w, target, return_entropy=True, return_sum_p_sq=True),
        "portable": lambda: rk.linear_logprob(x, w, target, exp="portable"),
        **{f"and backward, {size} MiB": both(size) for size in (1024, 512, 256)},
        "linear, weights of zeros": lambda: rk.linear(x, zeros, engine="native"),
    }
    name = f"{torch.cuda.get_device_name()}: {rows} x {vocab} x {in_features}, bfloat16"
    table = Table("", "ms", "of G", "rounds", "W", "J", "MHz", title=name)
    found: dict[str, list[Steady]] = {label: [] for label in calls}
    ratios: dict[str, list[float]] = {label: [] for label in calls}
    refused, all_g = [], [steady(product, gpu, seconds)]
    for turn in range(rounds):
        for label in list(found) if turn % 2 == 0 else reversed(list(found)):
            try:
                found[label].append(steady(calls[label], gpu, seconds))
            except ValueError as error:  # a workspace that is too small for so many rows
                refused.append(f"{label}: {error}")
                del found[label]
                continue
            all_g.append(steady(product, gpu, seconds))
            ratios[label].append(2 * found[label][-1].ms / (all_g[-2].ms + all_g[-1].ms))
    for label, turns in {"torch (G)": all_g, **found}.items():
        of, of_g = median(turns), ratios.get(label, [1.0])
        table.add_row(
            label,
            f"{of.ms:.2f}",
            f"{statistics.median(of_g):.3f}",
            f"{min(of_g):.3f} to {max(of_g):.3f}",
            f"{of.watts:.0f}",
            f"{of.joules:.2f}",
            f"{of.mhz:.0f}",
        )
    Console().print(table, *refused, sep="\n")


if __name__ == "__main__":
    typer.run(main)
