"""Measures the host time of a call next to the time of other calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

ROUNDS, BATCHES, BATCH = 9, 10, 20
GPU_ROUNDS = 60  # over two seconds or more, since a shared machine's host is slow for a second at a time


def _median_us(call: Callable[[], object]) -> float:
    """The median over batches, since one call is too short for the clock."""
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - start) / BATCH * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # so that the launch queue is never full
    return statistics.median(times)


def host_costs_us(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The cost of each call in the round with the least total. Calls take turns, because a host's clock speed changes
    by half within a second. Figures of different moments cannot be compared."""
    for call in calls.values():
        for _ in range(5 * BATCH):
            call()
    count = GPU_ROUNDS if torch.cuda.is_available() else ROUNDS
    rounds = [{name: _median_us(call) for name, call in calls.items()} for _ in range(count)]
    return min(rounds, key=lambda costs: sum(costs.values()))
