"""The shared parts of the operators' benches: the number of buffers that together exceed the caches, the peers
(compared implementations) that can run here, and the rows of results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

import rl_kernel_native as rk

from .measure import Call, copy_bytes_per_second, device_text, measure

# Calls rotate over buffers. Together the buffers are far larger than any cache.
ROTATED_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}

T = TypeVar("T")


class Options(NamedTuple):
    """The options of a bench's command line; ``sizes`` are the sizes of the operator's :class:`~..cases.Bench`."""

    operator: str
    rows: int
    sizes: Mapping[str, int]
    dtype: str
    device: str
    seconds: float
    use_compile: bool


def count_of_buffers(bytes_each: int, device: torch.device, most: int) -> int:
    return min(most, max(1, -(-ROTATED_BYTES[device.type] // bytes_each)))


def cuda_peers(device: torch.device, makers: Mapping[str, Callable[[], T]]) -> tuple[list[T], list[str]]:
    """Returns the peers from CUDA packages that can run here, and for every other package the reason why it cannot."""
    found: list[T] = []
    absent: list[str] = []
    for name, make in makers.items():
        if importlib.util.find_spec(name) is None:
            absent.append(f"{name}: not installed")
        elif device.type != "cuda":
            absent.append(f"{name}: runs on CUDA only")
        else:
            try:
                found.append(make())
            except Exception as error:  # the peer's package itself fails, for example because it finds no compiler
                absent.append(f"{name}: {type(error).__name__}: {error}")
    return found, absent


class Candidate(NamedTuple):
    """A peer in one pass. ``error()`` returns the error of the peer's results against float64, or None if this error is
    not measured."""

    peer: str
    call: Call
    error: Callable[[], float | None] = lambda: None


class Comparison:
    """The results of one run: its rows, pass by pass, and a sentence for each peer that could not run."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.ceiling = copy_bytes_per_second(device)
        self.results: list[dict[str, Any]] = []
        self.absent: list[str] = []

    def add(
        self, which: str, candidates: Sequence[Candidate], bytes_moved: float, operations: float | None = None
    ) -> None:
        """Times the candidates of a pass, this library first.

        Args:
            bytes_moved: the least number of bytes that one call moves.
            operations: floating-point operations of a call, if they rather than the bytes limit its speed; else None.
        Raises: the first candidate's own error if its call fails, because all times are shown relative to its time.
        """
        calls: list[tuple[Candidate, float | None]] = []
        for candidate in candidates:
            try:
                error = candidate.error()
                candidate.call(0)
            except Exception as problem:
                if not calls:
                    raise
                words = str(problem).splitlines() or [""]
                self.absent.append(f"{candidate.peer}, {which}: {type(problem).__name__}: {words[0]}")
                continue
            calls.append((candidate, error))
        timings = measure([candidate.call for candidate, _ in calls], self.device, self.seconds)
        for (candidate, error), timing in zip(calls, timings, strict=True):
            rate = bytes_moved / (timing.median_ms * 1e-3)
            row = {
                "pass": which,
                "peer": candidate.peer,
                **timing._asdict(),
                "gb_per_s": rate / 1e9,
                "share_of_copy": rate / self.ceiling,
            }
            if operations is not None:
                row["tflops"] = operations / (timing.median_ms * 1e-3) / 1e12
            row |= {"times_rk": timing.median_ms / timings[0].median_ms, "max_error": error}
            self.results.append(row)

    def report(self, operator: str, shape: str, dtype: str, buffers: int, **sizes: Any) -> dict[str, Any]:
        """Returns the run as a dict for :mod:`rl_kernel_native.bench.report`. ``sizes`` are the numbers of ``shape``,
        by name."""
        return {
            "operator": operator,
            "shape": shape,
            **sizes,
            "dtype": dtype,
            "device": device_text(self.device),
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "buffers": buffers,
            "copy_gb_per_s": self.ceiling / 1e9,
            "versions": {"rl_kernel_native": rk.__version__, "variant": rk.variant, "torch": str(torch.__version__)},
            "results": self.results,
            "absent": self.absent,
        }
