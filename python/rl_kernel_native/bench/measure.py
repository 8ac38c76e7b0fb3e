"""Times several calls in turn, so that clocks, caches and other processes affect all calls equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import _native
from .._machine import cpu_model

WARM_UP_S = 0.15  # length of the warm-up; a GPU needs less time to raise its clocks
ROUNDS = 10  # rounds over all calls, so that the samples of each call spread over the whole time
REPLAY_MS = 4.0  # approximate time of a graph's replay
SHORTEST_SAMPLE_S = 200e-6  # a shorter call is repeated within a sample, because clocks cannot resolve it

Call = Callable[[int], object]  # a function of the number of the call, which selects the buffer


class Timing(NamedTuple):
    """Statistics of the time of one call, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    samples: int


class Clock:
    """Measures the time of calls: with events on a CUDA stream, with the wall clock on other devices."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def samples_ms(self, call: Call, repeat: int, count: int) -> list[float]:
        """Returns ``count`` samples of ``repeat`` calls each, in milliseconds per call."""
        if not self.cuda:
            found = []
            for s in range(count):
                start = time.perf_counter()
                for i in range(repeat):
                    call(s * repeat + i)
                found.append((time.perf_counter() - start) * 1e3 / repeat)
            return found
        with torch.cuda.device(self.device):
            pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
            for s, (start_event, end_event) in enumerate(pairs):
                start_event.record()
                for i in range(repeat):
                    call(s * repeat + i)
                end_event.record()
            torch.cuda.synchronize(self.device)
            return [start_event.elapsed_time(end_event) / repeat for start_event, end_event in pairs]


def measure(calls: Sequence[Call], device: torch.device, seconds: float) -> list[Timing]:
    """Returns the median and percentiles of each call's time. Calls are timed in turn, each for about ``seconds`` in
    total."""
    clock = Clock(device)
    plans = []
    for call in calls:
        clock.synchronize()
        start, done = time.perf_counter(), 0
        while done < 3 or time.perf_counter() - start < WARM_UP_S:
            call(done)
            done += 1
            if done % 8 == 0:
                clock.synchronize()  # without this wait, the time would be that of the launches alone
        clock.synchronize()
        each = (time.perf_counter() - start) / done
        repeat = max(1, round(SHORTEST_SAMPLE_S / each))
        plans.append((repeat, max(1, round(seconds / ROUNDS / (each * repeat)))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, (repeat, count), found in zip(calls, plans, samples, strict=True):
            call(0)  # this untimed call replaces the data of the previous call in the caches
            found += clock.samples_ms(call, repeat, min(count, 1000))
    return [timing_of(found) for found in samples]


def timing_of(samples_ms: Sequence[float]) -> Timing:
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[last // 10], ordered[last - last // 10], len(ordered))


class Replay:
    """A CUDA graph of several calls over rotating buffers. A replay of the graph shows the time of a call without the
    work of the host."""

    def __init__(self, call: Call, buffers: int) -> None:
        self.stream = torch.cuda.Stream()
        self.times_us: list[float] = []
        with torch.cuda.stream(self.stream):
            call(0)
            one_ms = max(self._elapsed_ms(lambda: call(0)), 0.004)
            calls = max(buffers, min(64, int(REPLAY_MS / one_ms)))
            self.calls = (calls + buffers - 1) // buffers * buffers
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                for i in range(self.calls):
                    call(i % buffers)
            self.graph.replay()
            torch.cuda.synchronize()

    def _elapsed_ms(self, work: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record(self.stream)
        work()
        stop.record(self.stream)
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def once(self) -> None:
        with torch.cuda.stream(self.stream):
            self.times_us.append(1e3 * self._elapsed_ms(self.graph.replay) / self.calls)


def replay_medians_us(calls: Sequence[Call], buffers: int, rounds: int) -> list[float]:
    """Returns the median time of each call in microseconds. The CUDA graphs of the calls are replayed in turn, because
    a GPU under load lowers its clocks."""
    replays = [Replay(call, buffers) for call in calls]
    for i in range(rounds):
        for replay in replays[:: 1 if i % 2 else -1]:
            replay.once()
    return [statistics.median(replay.times_us) for replay in replays]


def copy_bytes_per_second(device: torch.device, seconds: float = 0.5) -> float:
    """Returns the bandwidth with which every peer is compared: bytes that torch's copy of 256 MiB reads and writes per
    second."""
    source = torch.ones(64 << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = measure([lambda i: target.copy_(source)], device, seconds)[0]
    return 2 * source.numel() * 4 / (timing.median_ms * 1e-3)


def device_text(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {_native.module.cpu_isa()}"
