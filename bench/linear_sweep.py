"""linear beside both settings of cuBLAS, at 1 to 16384 rows in steps of a factor 1.25, for eight layer shapes.

    python bench/linear_sweep.py [--rounds 30] [--seconds 110] [--rows 1,64,8192] [--tsv FILE]

A cell has two ratios: the time of engine="auto" and of engine="native", divided by the time of the faster cuBLAS
setting. The settings are torch's default (torch.mm) and a handle without a workspace, as CUBLAS_WORKSPACE_CONFIG=:0:0
gives. All four replay CUDA graphs in turn in one process. Every cell whose "auto" exceeds 1.02 is measured again, with
twice the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import rl_kernel_native as rk
from linear_shapes import LAYERS, ROTATED_BYTES

MOST_ROWS = 16384
GRAPH_US = 700.0  # time of a replay, about
MOST_GRAPH_US = 1500.0  # a longer replay over all weights gives way to a replay over few weights
SLOW_US = 4000.0  # replays above this take half of the rounds
REPEAT_ABOVE = 1.02
COPY_BYTES_PER_US, FLOPS_PER_US = 4.2e6, 6.5e8  # about the rates of an H200

Call = Callable[[int], object]


def row_counts() -> list[int]:
    counts, rows = {MOST_ROWS}, 1.0
    while rows < MOST_ROWS:
        counts.add(round(rows))
        rows *= 1.25
    return sorted(counts)


class CublasWithoutWorkspace:
    """cublasGemmEx with torch's arguments, on a handle whose workspace is empty."""

    OP_N, OP_T, BF16, COMPUTE_32F, TENSOR_OP = 0, 1, 14, 68, 99

    def __init__(self) -> None:
        self.library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '13').split('.')[0]}")
        self.handle = ctypes.c_void_p()
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        self.check(self.library.cublasCreate_v2(ctypes.byref(self.handle)))

    @staticmethod
    def check(status: int) -> None:
        if status != 0:
            raise RuntimeError(f"cuBLAS: status {status}")

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        (rows, ins), outs = x.shape, weight.shape[0]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        # A new stream brings the library's workspace back, so it is removed afterwards.
        self.check(self.library.cublasSetStream_v2(self.handle, stream))
        self.check(self.library.cublasSetWorkspace_v2(self.handle, None, ctypes.c_size_t(0)))
        self.check(
            self.library.cublasGemmEx(
                self.handle,
                *(self.OP_T, self.OP_N, outs, rows, ins, ctypes.byref(self.one)),
                *(ctypes.c_void_p(weight.data_ptr()), self.BF16, ins),
                *(ctypes.c_void_p(x.data_ptr()), self.BF16, ins, ctypes.byref(self.zero)),
                *(ctypes.c_void_p(y.data_ptr()), self.BF16, outs, self.COMPUTE_32F, self.TENSOR_OP),
            )
        )


class Cell(NamedTuple):
    outs: int
    ins: int
    rows: int
    us: tuple[float, ...]  # auto, native, torch, without workspace
    samples: int

    def ratio(self, ours: int) -> float:
        return self.us[ours] / min(self.us[2:])


class Layer:
    """The operands of a layer for any number of rows, and the four calls that are compared."""

    def __init__(self, outs: int, ins: int, cublas: CublasWithoutWorkspace) -> None:
        self.outs, self.ins, self.cublas = outs, ins, cublas
        count = min(12, max(3, ROTATED_BYTES // (outs * ins * 2)))
        self.weights = [torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        self.x = torch.randn(MOST_ROWS, ins, device="cuda", dtype=torch.bfloat16)
        self.y = torch.empty(MOST_ROWS * outs, device="cuda", dtype=torch.bfloat16)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def calls(self, rows: int) -> list[Call]:
        x, weights = self.x[:rows], self.weights
        y = self.y[: rows * self.outs].view(rows, self.outs)
        return [
            lambda i: rk.linear(x, weights[i], engine="auto"),
            lambda i: rk.linear(x, weights[i], engine="native"),
            lambda i: torch.mm(x, weights[i].t(), out=y),
            lambda i: self.cublas.multiply(x, weights[i], y),
        ]

    def different_bytes(self, rows: int) -> list[int]:
        """Elements of "native", torch and cuBLAS without workspace whose bits differ from engine="auto"."""
        auto, native, default, bare = self.calls(rows)
        expected = auto(0)
        assert isinstance(expected, torch.Tensor)
        found = []
        for call in (native, default, bare):
            if call is bare:
                self.y.zero_()
            result = call(0)
            if result is None:
                result = self.y[: rows * self.outs].view(rows, self.outs)
            assert isinstance(result, torch.Tensor)
            found.append(int((result.view(torch.int16) != expected.view(torch.int16)).sum()))
        return found

    def estimated_us(self, rows: int) -> float:
        values = rows * self.ins + self.outs * self.ins + rows * self.outs
        return max(2 * values / COPY_BYTES_PER_US, 2 * rows * self.ins * self.outs / FLOPS_PER_US)

    def measure(self, rows: int, rounds: int) -> Cell:
        calls = self.calls(rows)
        count = len(self.weights)
        with torch.cuda.stream(self.stream):
            one = self.estimated_us(rows)
            number = -(-max(1, min(64, int(GRAPH_US / one))) // count) * count
            if number * one > MOST_GRAPH_US:
                number = max(1, int(GRAPH_US / one))
            graphs = []
            for call in calls:
                call(0)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self.pool)
                for i in range(number):
                    call(i % count)
                graph.capture_end()
                graphs.append(graph)
            self.graphs = graphs  # the earlier graphs kept the pool's memory until now
            if number * one > SLOW_US:
                rounds = (rounds + 1) // 2
            for graph in graphs:
                graph.replay()
            samples: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
            for i in range(rounds):
                for which in range(len(graphs))[:: 1 if i % 2 else -1]:
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graphs[which].replay()
                    stop.record()
                    samples[which].append((start, stop))
            torch.cuda.synchronize()
        medians = (statistics.median(a.elapsed_time(b) for a, b in found) * 1e3 / number for found in samples)
        return Cell(self.outs, self.ins, rows, tuple(medians), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, row_counts())))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=600, help="no layer begins after this time")
    parser.add_argument("--tsv", help="file for the medians of every cell")
    options = parser.parse_args()
    rows = [int(text) for text in options.rows.split(",")]
    start = time.monotonic()
    cublas = CublasWithoutWorkspace()
    first: dict[tuple[int, int, int], Cell] = {}
    again: dict[tuple[int, int, int], Cell] = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.rounds} rounds", flush=True)
    with torch.no_grad():
        for outs, ins in LAYERS:
            if time.monotonic() - start > options.seconds:
                print(f"{outs} x {ins}: not measured, no time left")
                continue
            layer = Layer(outs, ins, cublas)
            differ = {m: layer.different_bytes(m) for m in (1, 8, 256, 1010) if m <= MOST_ROWS}
            print(f"{outs} x {ins}: elements that differ from auto (native, torch, no workspace): {differ}", flush=True)
            for m in rows:
                first[outs, ins, m] = layer.measure(m, options.rounds)
            for m in rows:
                if first[outs, ins, m].ratio(0) > REPEAT_ABOVE:
                    again[outs, ins, m] = layer.measure(m, 2 * options.rounds)
            del layer
            torch.cuda.empty_cache()
            print(f"  {time.monotonic() - start:.1f} s", flush=True)
    print("| rows | " + " | ".join(f"{n} x {k}" for n, k in LAYERS) + " |")
    for m in rows:
        cells = []
        for outs, ins in LAYERS:
            cell = again.get((outs, ins, m), first.get((outs, ins, m)))
            cells.append("-" if cell is None else f"{cell.ratio(0):.3f} {cell.ratio(1):.3f}")
        print(f"| {m} | " + " | ".join(cells) + " |")
    print("cells measured again: first auto, auto, native; us of auto, native, torch, no workspace")
    for (outs, ins, m), cell in again.items():
        print(
            f"{m} x {outs} x {ins}: {first[outs, ins, m].ratio(0):.3f} {cell.ratio(0):.3f} {cell.ratio(1):.3f}; "
            + " ".join(f"{us:.2f}" for us in cell.us)
        )
    final = [again.get(key, cell) for key, cell in first.items()]
    above = [sum(cell.ratio(ours) > 1.03 for cell in final) for ours in (0, 1)]
    print(f"{len(final)} cells; above 1.03: auto {above[0]}, native {above[1]}; {time.monotonic() - start:.0f} s")
    if options.tsv:
        with open(options.tsv, "w", encoding="utf-8") as file:
            for cells_of in (first, again):
                for cell in cells_of.values():
                    file.write("\t".join(map(str, (cell.outs, cell.ins, cell.rows, cell.samples, *cell.us))) + "\n")


if __name__ == "__main__":
    main()
