"""How long may attention's canonical splits be? Decode by split length, beside FlashAttention-3.

    python bench/attention_splits.py [--fa3 _vllm_fa3_C.abi3.so]

Builds attention_splits.cu with nvcc, checks it against float64, and prints microseconds by CUDA graph, medians of
seven. Keys and values rotate through more memory than L2 holds. Rule 6 of numerics.md has the decisive figures.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

SHAPES = [(1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (2, 4096), (4, 8192), (8, 4096)]
PLANS = [(4, 2048), (8, 2048), (4, 1024), (8, 1024)]  # shares of V's columns, keys of a split
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def build() -> ctypes.CDLL:
    library = Path(tempfile.mkdtemp()) / "libattention_splits.so"
    source = Path(__file__).with_suffix(".cu")
    flags = ["-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fPIC", "-shared"]
    subprocess.run(["nvcc", *flags, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls in order, as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of a call, replayed as one graph."""
    graph = graph_of(calls)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 5 / len(calls))
    return sorted(times)[3]


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def measure(library: ctypes.CDLL, batch: int, keys: int, has_fa3: bool) -> str:
    scale = HEAD_DIM**-0.5
    torch.manual_seed(1)
    pages = keys // PAGE
    copies = max(2, min(16, int(400e6 / (batch * keys * KV_HEADS * HEAD_DIM * 4))))
    q = torch.randn(batch, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    caches = []
    for _ in range(copies):
        k, v = (torch.randn(batch * pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype) for _ in "kv")
        caches.append((k, v, torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)))
    used = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    most = keys // 1024
    sums = torch.empty(batch * KV_HEADS * most * 8 * HEAD_DIM, device="cuda")
    rows = torch.empty(batch * KV_HEADS * most * 16, device="cuda")
    scores, out = torch.empty(batch * Q_HEADS * keys, device="cuda"), torch.empty_like(q)

    def ours(i: int, shares: int, split: int) -> Callable[[], None]:
        k, v, table = caches[i]

        def call() -> None:
            arrays = [pointer(x) for x in (q, k, v, table, used, sums, rows, scores, out)]
            sizes = (batch, Q_HEADS, KV_HEADS, pages, keys)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = library.attention_splits(*arrays, *sizes, ctypes.c_float(scale), shares, split, stream)
            assert status == 0, status

        return call

    k, v, table = caches[0]
    k64, v64 = (
        x[table.long()].view(batch, keys, KV_HEADS, HEAD_DIM).double().repeat_interleave(Q_HEADS // KV_HEADS, 2)
        for x in (k, v)
    )
    weights = (torch.einsum("bhd,bjhd->bhj", q.double(), k64) / math.sqrt(HEAD_DIM)).softmax(-1)
    expected = torch.einsum("bhj,bjhd->bhd", weights, v64)
    columns = []
    for shares, split in PLANS:
        out.fill_(float("nan"))
        ours(0, shares, split)()
        error = ((out.double() - expected).norm() / expected.norm()).item()
        assert error < 4e-3, (shares, split, error)
        us = graph_us([ours(i, shares, split) for i in range(copies)])
        columns.append(f"{split} keys, {shares} shares {us:6.1f}")
    if has_fa3:
        cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        no = None

        def peer(i: int) -> Callable[[], object]:
            k, v, table = caches[i]
            tail = (no,) * 8 + (scale, True, -1, -1, 0.0, True, no, 0, no, 0, no, 1, 0, no)
            arguments = (q, k, v, no, no, no, no, cu, no, no, no, used, 1, keys, table, *tail)
            return lambda: torch.ops._vllm_fa3_C.fwd(*arguments)

        columns.append(f"FlashAttention-3 {graph_us([peer(i) for i in range(copies)]):6.1f}")
    return f"{batch} x {keys} (us): " + ", ".join(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", type=Path)
    fa3 = parser.parse_args().fa3
    if fa3 is not None:
        torch.ops.load_library(str(fa3))
    library = build()
    print(torch.cuda.get_device_name())
    for batch, keys in SHAPES:
        print(measure(library, batch, keys, fa3 is not None), flush=True)


if __name__ == "__main__":
    main()
